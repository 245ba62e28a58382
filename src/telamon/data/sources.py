"""Sources of documents: what they hold (an inventory with a content hash), and their text, piece by piece.

Every source gives its documents in one fixed order, that of the sorted keys of its files and then of the rows in a file. Text comes in pieces
of at most a megabyte or so, so that neither a long document nor a long line costs memory in proportion in the steps that follow.

The content hash is taken at every start, from the bytes and not from sizes and dates: a corpus that was changed is never taken for the old
one. Files are hashed side by side on all cores, at the speed of the disk.
"""

import hashlib
import io
import json
import os
import tokenize
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Protocol

import numpy as np

from telamon.config.schema import SourceConfig
from telamon.data.files import File, find_files, standard_library
from telamon.data.order import U64, mix
from telamon.errors import DataError

PIECE = 1 << 20
"""Longest piece of text, in characters."""


@dataclass(frozen=True)
class Inventory:
    """What a source holds, found by one pass over its bytes."""

    name: str
    files: int
    bytes: int
    sha256: str
    """Over the sorted keys of the files and their contents."""
    reading: str
    """How text is taken from the files; with `sha256` it settles what the documents are."""
    keys: np.ndarray = field(repr=False)
    """u64[documents]: a hash of each document's key (and row), which decides what is held out."""
    sizes: np.ndarray = field(repr=False)
    """i64[documents]: about how many bytes of text each has."""
    skipped: tuple[str, ...] = ()
    """Keys of files left out because they hold no valid text (standard library only: some of its test files are broken on purpose)."""


class Source(Protocol):
    """Random access to documents of text by number."""

    inventory: Inventory

    def read(self, chosen: np.ndarray | None = None) -> Iterator[tuple[int, str]]:
        """Yield (document, piece of its text) in order: every document, or those of the mask `chosen` bool[documents]."""
        ...


def open_source(config: SourceConfig) -> Source:
    """Find the files of a source and take its inventory. Raises DataError naming the file that is missing or bad."""
    if config.kind == "stdlib":
        return TextFiles("stdlib", standard_library(), python=True)
    path = config.path or ""
    if config.kind == "text":
        return TextFiles(path, find_files(path))
    if config.kind == "jsonl":
        return JsonLines(path, find_files(path, suffixes=(".jsonl", ".ndjson", ".json")), config.field)
    assert config.kind == "parquet", config.kind
    from telamon.data.parquet import Parquet

    return Parquet(path, find_files(path, suffixes=(".parquet",)), config.field)


@dataclass(frozen=True)
class FileFacts:
    """One file's part of an inventory: size in bytes, digest, and for each document its row number and size."""

    file: File
    size: int
    digest: bytes
    rows: np.ndarray
    sizes: np.ndarray

    @property
    def keys(self) -> np.ndarray:
        """u64[documents]: hashes of (file key, row)."""
        file_key = U64(int.from_bytes(hashlib.sha256(self.file.key.encode()).digest()[:8], "little"))
        return mix(self.rows.astype(U64) ^ file_key)


def take_inventory(name: str, facts: list[FileFacts], *, reading: str, skipped: tuple[str, ...] = ()) -> Inventory:
    """Put the files' facts together."""
    total = hashlib.sha256()
    for fact in facts:
        total.update(f"{fact.file.key}\0{fact.size}\0".encode() + fact.digest)
    return Inventory(
        name=name,
        files=len(facts),
        bytes=sum(fact.size for fact in facts),
        sha256=total.hexdigest(),
        reading=reading,
        keys=np.concatenate([np.zeros(0, U64), *(fact.keys for fact in facts)]),
        sizes=np.concatenate([np.zeros(0, np.int64), *(fact.sizes for fact in facts)]),
        skipped=skipped,
    )


def in_parallel[T](function: Callable[[File], T], files: list[File]) -> list[T]:
    """`function` of every file, in order; hashing and reading release the interpreter's lock."""
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, files))


class Readable(Protocol):
    """As much of an open file as decoding needs."""

    def read(self, size: int = -1, /) -> bytes:
        """The next `size` bytes, or all that are left."""
        ...


class TextFiles:
    """One document a file, in UTF-8; Python files in the encoding that they declare."""

    def __init__(self, name: str, files: list[File], *, python: bool = False):
        self._python = python
        facts = in_parallel(self._scan, files)
        bad = tuple(file.key for file, fact in zip(files, facts, strict=True) if fact is None)
        self._facts: list[FileFacts] = [fact for fact in facts if fact is not None]
        if not self._facts:
            raise DataError(f"{name}: none of its {len(files)} files holds valid text")
        self.inventory = take_inventory(name, self._facts, reading="python" if python else "text", skipped=bad)

    def read(self, chosen: np.ndarray | None = None) -> Iterator[tuple[int, str]]:
        """See :class:`Source`."""
        for index, fact in enumerate(self._facts):
            if chosen is None or chosen[index]:
                with fact.file.open() as handle:
                    for piece in cut(self._decoded(fact.file, handle)):
                        yield index, piece

    def _scan(self, file: File) -> FileFacts | None:
        """Facts of one file; None for a Python file that is not valid text."""
        with file.open() as raw:
            handle = Hashing(raw)
            try:
                for _ in self._decoded(file, handle):
                    pass
            except SyntaxError:
                return None
        return FileFacts(file, handle.size, handle.digest(), np.zeros(1, np.int64), np.array([handle.size]))

    def _decoded(self, file: File, handle: Readable) -> Iterator[str]:
        if self._python:
            return iter([_decode_python(handle.read())])
        return _decode_utf8(file.path, handle)


class JsonLines:
    """One document a line: a string field of a JSON object. Blank lines are no documents."""

    def __init__(self, name: str, files: list[File], field: str):
        self._field = field
        self._facts = in_parallel(self._scan, files)
        self.inventory = take_inventory(name, self._facts, reading=f"jsonl {field}")

    def read(self, chosen: np.ndarray | None = None) -> Iterator[tuple[int, str]]:
        """See :class:`Source`."""
        index = 0
        for fact in self._facts:
            with fact.file.open() as handle:
                for number, line in enumerate(handle, start=1):
                    if line.strip():
                        if chosen is None or chosen[index]:
                            for piece in cut([self._text(f"{fact.file.path}:{number}", line)]):
                                yield index, piece
                        index += 1

    def _scan(self, file: File) -> FileFacts:
        rows, sizes = [], []
        with file.open() as raw:
            handle = Hashing(raw)
            for number, line in enumerate(handle):
                if line.strip():
                    rows.append(number)
                    sizes.append(len(line))
        return FileFacts(file, handle.size, handle.digest(), np.array(rows, np.int64), np.array(sizes, np.int64))

    def _text(self, where: str, line: bytes) -> str:
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8 at byte {error.start} of the line; convert the file to UTF-8") from error
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}; every line must be one JSON object") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: a JSON {type(record).__name__}; every line must be an object with the field {self._field!r}")
        if self._field not in record:
            raise DataError(
                f"{where}: no field {self._field!r}; fields there: {', '.join(map(repr, record)) or 'none'}; set data.sources' field"
            )
        text = record[self._field]
        if not isinstance(text, str):
            raise DataError(f"{where}: the field {self._field!r} holds {json.dumps(text)[:40]}; it must hold text")
        return text


def _decode_python(content: bytes) -> str:
    """Text of a Python file, by its byte order mark or coding cookie. Raises SyntaxError where it is not valid."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise SyntaxError(str(error)) from error


def _decode_utf8(path: str, handle: Readable) -> Iterator[str]:
    """Text of a file, a block at a time. A character may lie across the border of two blocks."""
    carry, offset = b"", 0
    while True:
        block = handle.read(PIECE)
        content, final = carry + block, not block
        try:
            text = content.decode()
            carry = b""
        except UnicodeDecodeError as error:
            if final or error.reason != "unexpected end of data":
                raise DataError(
                    f"{path}: not UTF-8 at byte {offset + error.start} (0x{content[error.start]:02x}); convert it "
                    "(iconv -f LATIN1 -t UTF-8), or name the text files with a glob such as folder/**/*.txt"
                ) from error
            text, carry = content[: error.start].decode(), content[error.start :]
        offset += len(content) - len(carry)
        if text:
            yield text
        if final:
            return


def cut(blocks: Iterator[str] | list[str]) -> Iterator[str]:
    """The text of `blocks` in pieces of at most PIECE characters; at least one piece, which may be empty.

    A piece ends before a space between two letters or digits, where every common tokenizer starts a new word anyway; a megabyte
    without such a place is cut at its end.
    """
    held = ""
    for block in blocks:
        held, start = held + block, 0
        while len(held) - start > PIECE:
            end = _place_to_cut(held, start)
            yield held[start:end]
            start = end
        held = held[start:]
    yield held


def _place_to_cut(text: str, start: int) -> int:
    at = start + PIECE
    while (at := text.rfind(" ", start + PIECE // 2, at)) > 0:
        if text[at - 1].isalnum() and text[at + 1 : at + 2].isalnum():
            return at
    return start + PIECE


class Hashing:
    """Reading a file while hashing and counting what passes through."""

    def __init__(self, raw: IO[bytes]):
        self._raw, self._sha, self.size = raw, hashlib.sha256(), 0

    def _seen(self, block: bytes) -> bytes:
        self._sha.update(block)
        self.size += len(block)
        return block

    def read(self, size: int = -1, /) -> bytes:
        """The next `size` bytes, or all that are left."""
        return self._seen(self._raw.read(size))

    def __iter__(self) -> Iterator[bytes]:
        return map(self._seen, self._raw)

    def digest(self) -> bytes:
        """SHA-256 of what was read so far."""
        return self._sha.digest()
