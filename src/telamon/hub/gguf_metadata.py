"""The key-value pairs of a GGUF file, with a record of which were used."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telamon.errors import ConfigError, DataError

if TYPE_CHECKING:
    from gguf import ReaderField

_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list", object: "a number or a list"}


class Metadata:
    """What a file says about its model. A value is decoded when it is asked for: a vocabulary takes seconds."""

    def __init__(self, path: Path, fields: Mapping[str, "ReaderField"]):
        self.path = path
        self._fields = fields
        self._used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def get[T, D](self, key: str, kind: type[T], default: D) -> T | D:
        """The value of `key`, or `default` where the file has none.

        Raises ConfigError where it is of another kind than `kind`, DataError where it is damaged.
        """
        self._used.add(key)
        if key not in self._fields:
            return default
        value: Any = self._decoded(key)
        if kind is float and type(value) in (int, float):
            value = _shortest(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{self.path}: the metadata {key} is {_shown(value)}, not {_KINDS[kind]}")
        return value

    def need[T](self, key: str, kind: type[T]) -> T:
        """The value of `key`. Raises ConfigError where the file has none."""
        value = self.get(key, kind, None)
        if value is None:
            raise ConfigError(
                f"{self.path}: the metadata has no {key}, and without it the model is not known; convert the model to GGUF again with "
                "a current llama.cpp, or add the key with gguf_new_metadata.py of the gguf package"
            )
        return value

    def expect(self, key: str, value: Any, reason: str) -> None:
        """Raise ConfigError where the file has `key` with another value than `value`; `reason` says why nothing else will do."""
        found = self.get(key, type(value), value)
        if found != value:
            raise ConfigError(f"{self.path}: the metadata {key} is {_shown(found)}, and only {_shown(value)} can be read: {reason}")

    def refuse_unused(self, prefix: str, harmless: tuple[str, ...] = ()) -> None:
        """Raise ConfigError where a key that begins with `prefix` was asked for by nobody and is not among the `harmless` ones."""
        known = self._used | {prefix + key for key in harmless}
        unknown = [key for key in self._fields if key.startswith(prefix) and key not in known]
        if unknown:
            listed = ", ".join(f"{key}={_shown(self._decoded(key))}" for key in unknown)
            raise ConfigError(
                f"{self.path}: metadata that may change the model's numbers and that this program does not know: {listed}; "
                "import the model's original Hugging Face folder instead"
            )

    def _decoded(self, key: str) -> Any:
        try:
            return self._fields[key].contents()
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path} is damaged: the metadata {key} is no UTF-8 text ({error.reason}); fetch it again") from error


def _shortest(value: float) -> float:
    """The shortest decimal of a float32, so that 9.999999747378752e-06 is read as the 1e-05 that it was written from."""
    import numpy as np

    return float(str(np.float32(value))) if float(np.float32(value)) == value else float(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
