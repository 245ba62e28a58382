"""A folder that is whole or not there, however its making ends."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from telamon.errors import CheckpointError, ConfigError
from telamon.watch.log import human_bytes


def check_free(destination: Path, *, overwrite: bool, mark: str) -> Path:
    """The destination's path, absolute and where links lead, if a folder can be made there.

    Args:
        destination: the folder to be.
        overwrite: whether a folder in its place may go.
        mark: a file that says of a folder that it is of the kind to be made: no other is overwritten.

    Raises:
        ConfigError: something is in the way.
    """
    path = Path(os.path.realpath(destination.expanduser()))  # a link to a folder on another disk stays, and the folder is made there
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return path
    if not path.is_dir():
        raise ConfigError(f"{destination} is a file; choose another name")
    if not overwrite:
        raise ConfigError(f"{destination} exists already; choose another name, or replace it with --overwrite")
    if not (path / mark).is_file():
        raise ConfigError(
            f"{destination} has no {mark}, so it was not made by this command and --overwrite does not touch it; choose another name"
        )
    return path


def check_space(destination: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot take. Raises CheckpointError that says what is needed and what is free."""
    disk = destination
    while not disk.exists():
        disk = disk.parent
    free = shutil.disk_usage(disk).free
    if free < needed:
        raise CheckpointError(
            f"{destination} needs {human_bytes(needed)} of disk, and {human_bytes(free)} are free there; free some space or choose another disk"
        )


@contextmanager
def whole_folder(destination: Path) -> Iterator[Path]:
    """A new, empty folder beside `destination` (from `check_free`), which takes its name when the block ends well.

    On an exception, Ctrl-C included, it is removed. After a kill it stays, under a name that the next call knows and removes.

    Raises:
        CheckpointError: something cannot be written; the message names the file and the reason.
    """
    draft, old = _beside(destination, "part"), _beside(destination, "old")
    try:
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            _remove(draft)
            draft.mkdir()
            yield draft
            _put_on_disk(draft)
            _remove(old)
            if destination.exists():
                destination.rename(old)
            draft.rename(destination)
            _put_on_disk_entry(destination.parent)
            _remove(old)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            if old.exists() and not destination.exists():
                old.rename(destination)
            raise
    except OSError as error:
        where = str(error.filename or destination).replace(str(draft), str(destination))
        raise CheckpointError(
            f"{destination} could not be written: {where}: {error.strerror or error}. Nothing of it is left; free some space or choose another place"
        ) from error


def _beside(path: Path, role: str) -> Path:
    return path.with_name(f".{path.name}.{role}")


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _put_on_disk(folder: Path) -> None:
    for place, _, files in os.walk(folder):
        for file in files:
            _put_on_disk_entry(Path(place, file))
        _put_on_disk_entry(Path(place))


def _put_on_disk_entry(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
