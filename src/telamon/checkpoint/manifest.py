"""The manifest of a checkpoint: what it holds, and the size and CRC-32 of each of its files.

It is written last, in one rename, once every other file is on disk. Its presence therefore is the commit mark, and
its contents tell whether the files are still those that were written. CRC-32 guards against accidents, not malice;
at some GB/s on one core it costs less than reading the file.
"""

import json
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Self

from etils import epath

FILE_NAME = "manifest.json"
FORMAT = 1
_CHUNK = 1 << 20
_THREADS = 4


@dataclass(frozen=True)
class ArrayInfo:
    """Shape and type of a saved array. Of PRNG keys, `key_impl` names the generator and `stored_shape` is that of the raw words."""

    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None
    stored_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint. `files` maps a path relative to the checkpoint to (bytes, CRC-32)."""

    step: int
    meta: dict[str, Any]
    arrays: dict[str, ArrayInfo]
    files: dict[str, tuple[int, int]]

    @classmethod
    def read(cls, checkpoint: epath.Path) -> Self:
        """Read the manifest of `checkpoint`; ValueError says what is wrong with it."""
        path = checkpoint / FILE_NAME
        if not path.exists():
            raise ValueError(f"it lacks its commit mark, {FILE_NAME}")
        try:
            crc, body = path.read_bytes().split(b"\n", 1)
            whole = int(crc) == zlib.crc32(body)
        except (ValueError, OSError) as error:
            raise ValueError(f"{FILE_NAME} is damaged ({error})") from error
        if not whole:
            raise ValueError(f"{FILE_NAME} is damaged (its CRC-32 does not match)")
        fields = json.loads(body)
        if fields.pop("format") != FORMAT:
            raise ValueError(f"{FILE_NAME} is of another format than {FORMAT}; a newer telamon wrote it")
        arrays = {name: _array_info(info) for name, info in fields.pop("arrays").items()}
        files = {name: (size, crc) for name, (size, crc) in fields.pop("files").items()}
        return cls(arrays=arrays, files=files, **fields)

    def write(self, checkpoint: epath.Path) -> None:
        """Commit: the manifest appears under its name only when all of it is on disk."""
        body = json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()
        write_atomically(checkpoint / FILE_NAME, b"%d\n%s" % (zlib.crc32(body), body))


def _array_info(fields: dict[str, Any]) -> ArrayInfo:
    stored = fields["stored_shape"]
    return ArrayInfo(tuple(fields["shape"]), fields["dtype"], fields["key_impl"], tuple(stored) if stored is not None else None)


def scan(checkpoint: epath.Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of every file of `checkpoint` but the manifest, as read back once it is on disk."""
    paths = [path for path in _files(checkpoint) if path.name != FILE_NAME]
    with ThreadPoolExecutor(_THREADS) as pool:  # waiting, reading and summing let go of the interpreter
        return dict(zip((str(path.relative_to(checkpoint)) for path in paths), pool.map(_settle, paths), strict=True))


def _settle(path: epath.Path) -> tuple[int, int]:
    if "://" not in str(path):
        put_on_disk(path)
    return _size_and_crc(path)


def damage(checkpoint: epath.Path) -> str | None:
    """What is wrong with `checkpoint`, or None if each of its files is as it was written."""
    try:
        manifest = Manifest.read(checkpoint)
    except ValueError as error:
        return str(error)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda file: _file_damage(checkpoint, file[0], *file[1]), manifest.files.items())
        return next((problem for problem in found if problem), None)


def _file_damage(checkpoint: epath.Path, name: str, size: int, crc: int) -> str | None:
    path = checkpoint / name
    try:
        found_size = path.stat().length
        if found_size != size:
            return f"{name} has {found_size} bytes of {size}"
        if _size_and_crc(path) != (size, crc):
            return f"{name} was altered (its CRC-32 does not match)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error})"
    return None


def write_atomically(path: epath.Path, data: bytes) -> None:
    """Write a file that is either whole or not there, and on disk when this returns."""
    if "://" in str(path):  # object stores show a file only when it is complete
        path.write_bytes(data)
        return
    draft = f"{path}.draft"
    with open(draft, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    put_on_disk(epath.Path(path).parent)  # the new name itself


def put_on_disk(path: epath.Path) -> None:
    """Return when a local file, or the list of a folder's names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _size_and_crc(path: epath.Path) -> tuple[int, int]:
    size = crc = 0
    buffer = memoryview(bytearray(_CHUNK))
    file: Any  # Etils does not say that it is binary
    with path.open("rb") as file:
        while count := file.readinto(buffer):
            size += count
            crc = zlib.crc32(buffer[:count], crc)
    return size, crc
