"""MaxText's settings as they are given: a YAML file with those it builds on, and `key=value` words; and what became of each."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from telamon.config import yamlio
from telamon.config.messages import show
from telamon.config.presets import ROOT
from telamon.errors import ConfigError

_SECRET = "hf_access_token"
_NOTHING = object()
_READING = ("base_config", "override_model_config")
"""Settings that say how MaxText's settings are to be read."""


@dataclass(frozen=True)
class Note:
    """A setting that was not carried over as it stands, and why."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        value = "..." if self.key == _SECRET else show(self.value)
        return f"{self.key}={value}: {self.reason}"


@dataclass(frozen=True)
class Vocabulary:
    """Every setting that MaxText knows."""

    defaults: dict[str, Any]
    carried: frozenset[str]
    agreed: dict[str, Any]
    """Values that hold here anyhow."""
    reasons: dict[str, str]
    """Why a setting that is not carried is not."""


@functools.cache
def vocabulary() -> Vocabulary:
    """What `presets/maxtext/settings.yml` says."""
    file = yamlio.read(ROOT / "maxtext" / "settings.yml")
    groups = file["not_carried"]
    values = file["carried"] | {key: value for group in groups for key, value in group["keys"].items()}
    defaults = {key: _plain(value) for key, value in values.items()}
    return Vocabulary(
        defaults, frozenset(file["carried"]), file["agreed"], {key: group["reason"] for group in groups for key in group["keys"]}
    )


def without_secrets(argument: str) -> str:
    """An argument as it may be shown and written down."""
    return f"{_SECRET}=..." if argument.strip().startswith(_SECRET) else argument


class Settings:
    """The settings in force, by MaxText's names; what is read counts as carried unless a note says otherwise."""

    def __init__(self, in_file: dict[str, Any], words: dict[str, Any]):
        known = vocabulary()
        for key in (*in_file, *words):
            _must_be_known(key, known.defaults)
        self._words = words
        self._given = {key: value for key, value in (in_file | words).items() if value != known.defaults[key]}
        self._values = known.defaults | in_file | words
        self._read: set[str] = set()
        self._notes: list[Note] = []

    def __getitem__(self, key: str) -> Any:
        assert key in vocabulary().carried, f"{key} is not among the carried ones in settings.yml"
        self._read.add(key)
        return self._values[key]

    def given(self, key: str) -> bool:
        """Whether somebody gave `key` another value than MaxText's default."""
        return key in self._given

    def spoken(self, key: str) -> bool:
        """Whether `key` was given as a word, `key=value`: only those come before what MaxText's file of a model says."""
        return key in self._words

    def assume(self, values: dict[str, Any]) -> None:
        """Take what MaxText's file of a model says, where no word says otherwise."""
        self._values |= {key: value for key, value in values.items() if key not in self._words}

    def note(self, key: str, reason: str) -> None:
        """Say that `key` is not carried as it stands, whether or not somebody gave it."""
        self._read.add(key)
        self._notes.append(Note(key, self._values[key], reason))

    def notes(self) -> list[Note]:
        """All notes, those on settings that nobody read included."""
        known = vocabulary()
        unread = [key for key, value in self._given.items() if key not in self._read and known.agreed.get(key, _NOTHING) != value]
        idle = "nothing that was chosen makes use of it"
        return [*self._notes, *(Note(key, self._values[key], known.reasons.get(key, idle)) for key in unread)]


def _must_be_known(key: str, known: Iterable[str]) -> None:
    if key in known:
        return
    near = get_close_matches(key, list(known), 1)
    raise ConfigError(
        f"{key} is not a setting of MaxText (release 0.2.5)" + (f"; did you mean {near[0]}?" if near else "; remove it if it is your own")
    )


def read_settings(arguments: Sequence[str]) -> Settings:
    """The settings that a file and `key=value` words give, the words on top.

    Args:
        arguments: at most one YAML file, and words.

    Raises:
        ConfigError: two files, one that cannot be read, or a key that MaxText does not know.
    """
    files = [argument for argument in arguments if "=" not in argument]
    if len(files) > 1:
        raise ConfigError(f"two files are named, {files[0]} and {files[1]}; a setting is written key=value")
    in_file = _read_file(Path(files[0]), ()) if files else {}
    words = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals:
            words[key.strip()] = yamlio.parse(value, f"the argument {argument}")
    return Settings(*({key: _plain(value) for key, value in given.items() if key not in _READING} for given in (in_file, words)))


def _read_file(path: Path, below: tuple[Path, ...]) -> dict[str, Any]:
    """A file's settings on top of those of the files it builds on. MaxText's own base.yml need not be there: it holds the defaults."""
    if path in below:
        raise ConfigError(f"{path} builds on itself, by base_config: {' -> '.join(map(str, [*below, path]))}")
    own = yamlio.read(path)
    base = own.get("base_config")
    if base is None:
        return own
    # MaxText looks beside the file, then in its own folder of configs, which is above the file if that is one of its own.
    parent = next((found for folder in path.parents if (found := folder / str(base)).is_file()), None)
    if parent is not None:
        return _read_file(parent, (*below, path)) | own
    if Path(str(base)).name != "base.yml":
        raise ConfigError(
            f"{path}: base_config={base}: there is no file {path.parent / str(base)}; copy it there, or leave base_config out"
        )
    return own


def _plain(value: Any) -> Any:
    """MaxText takes "none" in any spelling for nothing."""
    if isinstance(value, str) and value.lower() == "none":
        return None
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
