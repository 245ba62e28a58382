"""Telling apart the three things that can be imported: a folder, a repository, a GGUF file."""

import re
from difflib import get_close_matches
from pathlib import Path

from telamon.errors import ConfigError, DataError
from telamon.hub.source import TensorSource

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PAGE = re.compile(rf"https?://[^/]+/({_REPOSITORY.pattern})(?:/|$)")
"""The address of a repository's page, as a browser shows it."""
FORMS = (
    "a model to import is a folder with config.json and safetensors files, a .gguf file, or a repository of the Hugging Face Hub "
    "such as Qwen/Qwen3-0.6B"
)
"""What can be imported, for messages."""


def open_source(src: str, *, revision: str | None = None) -> TensorSource:
    """The model that `src` names; a path that exists comes before a repository of the same name.

    Args:
        src: a folder, a `.gguf` file, or a repository `organisation/name`.
        revision: of a repository.

    Raises:
        ConfigError: `src` is none of the three, or a revision is given for a local path.
        DataError: it is one, but missing, unreadable or damaged.
    """
    path = Path(src).expanduser()
    if path.exists():
        if revision is not None:
            raise ConfigError(f"--revision {revision} names a state of a repository, and {src} is a local path; leave it out")
        return _open_path(path)
    if _REPOSITORY.fullmatch(src) and path.suffix != ".gguf":
        return _open_repository(src, path, revision)
    page = _PAGE.match(src)
    hint = f"; did you mean {page[1]}?" if page else _did_you_mean(path)
    raise ConfigError(f"there is no {src}{hint}; {FORMS}")


def _open_path(path: Path) -> TensorSource:
    if path.is_dir():
        from telamon.hub.packed.source import unpacked
        from telamon.hub.safetensors_folder import SafetensorsFolder

        return unpacked(SafetensorsFolder(path))
    if path.suffix == ".gguf":
        from telamon.hub.gguf_file import GgufFile

        return GgufFile(path)
    if path.suffix in (".safetensors", ".json"):
        raise ConfigError(f"{path} is one file of a model; name its folder, {path.parent}")
    raise ConfigError(f"{path} is a file of another kind; {FORMS}")


def _open_repository(src: str, path: Path, revision: str | None) -> TensorSource:
    from telamon.hub.download import open_repository
    from telamon.hub.packed.source import unpacked

    try:
        return unpacked(open_repository(src, revision=revision))
    except DataError as error:
        near = _did_you_mean(path)
        if near:  # it may have been a path
            raise DataError(f"{error}. Nor is there a folder {src}{near}") from error
        raise


def _did_you_mean(path: Path) -> str:
    """The nearest name in the folder that would hold the path, or nothing."""
    if not path.parent.is_dir():
        return ""
    near = get_close_matches(path.name, sorted(entry.name for entry in path.parent.iterdir()), 1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
