"""The token cache: each source is tokenised once, into a file of tokens and a table of documents, and then only mapped into memory.

A cache is a folder named by a hash of content, tokenizer and format. It is written beside its place, flushed, and renamed: it is there whole or
not at all, whenever the process is killed. A lock makes a second process wait for the first instead of doing the work again.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from telamon.data.sources import Source
from telamon.data.tokenizer import TextTokenizer
from telamon.errors import DataError

FORMAT = 1
"""Raised when what a cache holds changes."""

_BATCH = 8 << 20
"""Characters given to the tokenizer at one time."""


@dataclass(frozen=True)
class TokenStore:
    """Tokens of all documents of a source, end to end.

    `tokens` u16 or u32[tokens]; `first` i64[documents + 1], where each document begins and the last ends; `bytes` i64[documents], of text.
    """

    tokens: np.ndarray
    first: np.ndarray
    bytes: np.ndarray

    @property
    def length(self) -> np.ndarray:
        """Tokens of each document, i64[documents]."""
        return np.diff(self.first)


def token_store(source: Source, tokenizer: TextTokenizer, cache_dir: str) -> TokenStore:
    """The source's tokens, from the cache or made now. A document is BOS, its tokens, EOS, so that every byte of text is predicted."""
    name = hashlib.sha256(f"{FORMAT}\0{source.inventory.sha256}\0{source.inventory.reading}\0{tokenizer.hash}".encode()).hexdigest()[:32]
    folder = Path(cache_dir) / "tokens" / name
    return cached(folder, lambda half: _tokenise(source, tokenizer, half), _open)


def cached[T](place: Path, make: Callable[[Path], None], read: Callable[[Path], T | None]) -> T:
    """What `read` finds at `place`; if it finds nothing whole, `make` first writes it to a path beside it, which is then renamed.

    Raises DataError naming the path where the disk is full or can't be written.
    """
    found = read(place)
    if found is not None:
        return found
    half = place.with_name(f".half-{place.name}")
    try:
        with _locked(place.with_name(f".lock-{place.name}")):
            found = read(place)  # another process may have made it meanwhile
            if found is None:
                _remove(half)
                make(half)
                _flush(half)
                _remove(place)
                os.rename(half, place)
                _flush(place.parent)
                found = read(place)
    except OSError as error:
        raise DataError(f"{place}: the cache cannot be written: {error.strerror or error}; free space, or set data.cache_dir") from error
    assert found is not None, place
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Push a file, or a folder and the files in it, to the disk."""
    for each in [*(path.iterdir() if path.is_dir() and path.name.startswith(".half-") else ()), path]:
        handle = os.open(each, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _open(folder: Path) -> TokenStore | None:
    """The store in a folder, or None where it is not there or not as long as its table says."""
    try:
        facts = json.loads((folder / "facts.json").read_text())
        first, sizes = np.load(folder / "first.npy"), np.load(folder / "bytes.npy")
        tokens = np.memmap(folder / "tokens.bin", np.dtype(facts["dtype"]), mode="r") if facts["tokens"] else np.zeros(0, np.uint16)
    except (OSError, ValueError, KeyError):
        return None
    whole = len(tokens) == facts["tokens"] == first[-1] and len(first) == facts["documents"] + 1 == len(sizes) + 1
    return TokenStore(np.asarray(tokens), first, sizes) if whole else None


def _tokenise(source: Source, tokenizer: TextTokenizer, folder: Path) -> None:
    """Write the source's tokens, batch by batch; memory is bounded by a batch and three numbers a document."""
    folder.mkdir()
    documents = len(source.inventory.keys)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    opening = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    closing = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    length, sizes = np.full(documents, len(opening) + len(closing)), np.zeros(documents, np.int64)
    previous = -1
    with (
        (folder / "tokens.bin").open("wb") as out,
        progress(f"Tokenising {source.inventory.name}", int(source.inventory.sizes.sum())) as advance,
    ):
        for owners, texts in _batches(source.read()):
            ids, counts = tokenizer.encode_flat(texts)
            begins = np.diff(owners, prepend=previous) != 0
            border = closing + opening  # ends the document before, begins this one
            at = np.repeat((np.cumsum(counts) - counts)[begins], len(border))
            marked = np.insert(ids.astype(dtype), at, np.tile(np.array(border, dtype), int(begins.sum())))
            out.write(marked[len(closing) if previous < 0 else 0 :])
            text_bytes = np.array([len(t) if t.isascii() else len(t.encode()) for t in texts])
            np.add.at(length, owners, counts)
            np.add.at(sizes, owners, text_bytes)
            previous = owners[-1]
            advance(int(text_bytes.sum()))
        out.write(np.array(closing, dtype))
    np.save(folder / "first.npy", np.concatenate([[0], np.cumsum(length)]))
    np.save(folder / "bytes.npy", sizes)
    facts = {
        "dtype": dtype.name,
        "tokens": int(length.sum()),
        "documents": documents,
        "source": source.inventory.name,
        "tokenizer": tokenizer.hash,
    }
    (folder / "facts.json").write_text(json.dumps(facts))


def _batches(pieces: Iterator[tuple[int, str]]) -> Iterator[tuple[np.ndarray, list[str]]]:
    """Group pieces by size: the documents they belong to, i64[pieces], and their texts."""
    owners: list[int] = []
    texts: list[str] = []
    size = 0
    for owner, text in pieces:
        owners.append(owner)
        texts.append(text)
        size += len(text)
        if size >= _BATCH:
            yield np.array(owners), texts
            owners, texts, size = [], [], 0
    if owners:
        yield np.array(owners), texts


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal's error stream for `total` bytes of work, gone when the work is done; nothing where there is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)
