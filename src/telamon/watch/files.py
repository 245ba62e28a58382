"""Small files of a run directory, on a local disk or behind an fsspec URL."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from telamon.errors import ConfigError


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is an fsspec URL such as ``gs://bucket/run``."""
    return "://" in os.fspath(path)


def join(folder: str | os.PathLike[str], *parts: str) -> str:
    """`parts` below `folder`, which may be a URL."""
    return "/".join([os.fspath(folder).rstrip("/"), *parts]) if is_url(folder) else os.path.join(folder, *parts)


_OF_A_RUN = "choose another run.root or free some space"


@contextmanager
def writing(path: str | os.PathLike[str], advice: str = _OF_A_RUN) -> Iterator[None]:
    """Turn a failure to write `path` into a ConfigError that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}; {advice}") from error


def check_place(path: str | os.PathLike[str], option: str) -> None:
    """Raise ConfigError where a local file clearly cannot be written, before the work that would make its content.

    Args:
        path: the file; folders on its way may be missing.
        option: what names it on the command line.
    """
    if re.match(r"[a-z][a-z0-9+.-]+:/", os.fspath(path)):  # a `Path` has one of a URL's two slashes only
        raise ConfigError(f"{option} {path} is no local file; write it here and copy it there")
    target = Path(path).absolute()
    if os.path.isdir(target):  # unlike pathlib's, silent where a folder on the way cannot be entered
        raise ConfigError(f"{option} {path} is a folder; name a file in it")
    there = next(parent for parent in target.parents if os.path.exists(parent))
    if not os.path.isdir(there) or not os.access(there, os.W_OK):
        why = "not writable" if os.path.isdir(there) else "no folder"
        raise ConfigError(f"{option} {path} cannot be written, for {there} is {why}; choose another place")


def write_text(path: str | os.PathLike[str], text: str, *, advice: str = _OF_A_RUN) -> None:
    """Write a whole text file, as :func:`write_bytes` does."""
    write_bytes(path, text.encode(), advice=advice)


def write_bytes(path: str | os.PathLike[str], content: bytes, *, advice: str = _OF_A_RUN) -> None:
    """Write a whole file so that a reader sees the old content or the new one, never a part.

    Raises:
        ConfigError: the file cannot be written; the message names it and ends with `advice`.
    """
    with writing(path, advice):
        if is_url(path):
            import fsspec

            with fsspec.open(os.fspath(path), "wb") as file:
                file.write(content)  # pyright: ignore[reportAttributeAccessIssue]
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.parent / f".{target.name}.{os.getpid()}.part"
        try:
            part.write_bytes(content)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)


def read_text(path: str | os.PathLike[str]) -> str | None:
    """The file's text, or none where there is no such file."""
    try:
        if is_url(path):
            import fsspec

            with fsspec.open(os.fspath(path), "r", encoding="utf-8") as file:
                return file.read()  # pyright: ignore[reportAttributeAccessIssue]
        return Path(path).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
