"""Finding and reading files on any file system that fsspec knows, with errors that name the file.

Files have a *key*: their path relative to the folder (or the fixed part of the glob) that was asked for, with forward slashes.
Keys, never absolute paths, enter hashes, so that a corpus is the same corpus wherever it lies.
"""

import os
import posixpath
import re
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from telamon.errors import DataError

_WILDCARD = re.compile(r"[*?\[{]")


@dataclass(frozen=True)
class File:
    """A file of a source: where it is, and its key."""

    fs: Any
    path: str
    key: str

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open for reading bytes, decompressed according to the suffix (.gz, .xz, .zst ...); failures become DataError."""
        from fsspec.core import OpenFile

        try:
            with OpenFile(self.fs, self.path, "rb", compression="infer") as handle:
                yield handle
        except (OSError, EOFError) as error:
            raise DataError(f"{self.path}: cannot be read: {error}") from error


def find_files(path: str, *, suffixes: tuple[str, ...] = ()) -> list[File]:
    """The files that `path` (a file, a folder, a glob, or an fsspec URL of one) stands for, sorted by key.

    A folder stands for every file under it that is not hidden and, where `suffixes` are given, has one of them.
    Raises DataError when there is none.
    """
    from fsspec.core import url_to_fs

    try:
        fs, root = url_to_fs(path)
        if _WILDCARD.search(root) and not fs.exists(root):
            base = posixpath.dirname(_WILDCARD.split(root, maxsplit=1)[0])
            found, wanted = [p for p in fs.glob(root) if fs.isfile(p)], "file matches this pattern"
        elif not fs.exists(root):
            raise DataError(f"{path}: no such file or folder")
        elif fs.isfile(root):
            base, found, wanted = posixpath.dirname(root), [root], "file"
        else:
            base, found = root, [p for p in fs.find(root) if _counts(posixpath.relpath(p, root), suffixes)]
            wanted = f"file with the suffix {' or '.join(suffixes)} is in this folder" if suffixes else "file is in this folder"
    except (ImportError, ValueError, OSError) as error:
        raise DataError(f"{path}: cannot be opened: {error}") from error
    if not found:
        raise DataError(f"{path}: no {wanted}; point data.sources' path at a file, a folder with files, or a glob")
    return sorted((File(fs, p, posixpath.relpath(p, base or ".")) for p in found), key=lambda file: file.key)


def standard_library() -> list[File]:
    """Every `.py` file of the running interpreter's standard library, sorted by key. Folders of installed packages, often far larger, are not entered."""
    from fsspec.implementations.local import LocalFileSystem

    fs, root = LocalFileSystem(), Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in ("site-packages", "dist-packages")]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        files.extend(File(fs, str(path), path.relative_to(root).as_posix()) for path in paths)
    return sorted(files, key=lambda file: file.key)


def _counts(key: str, suffixes: tuple[str, ...]) -> bool:
    hidden = any(part.startswith(".") for part in key.split("/"))
    return not hidden and (not suffixes or any(key.endswith(s) or f"{s}." in posixpath.basename(key) for s in suffixes))
