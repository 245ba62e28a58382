"""Which model families exist: an open registry, filled by importing plug-in modules.

The built-in families come in by the same door as a user's `--import my_blocks`: a module is imported by name and registers
what it has. So nothing in the package lists the families, and this module, which is below `telamon.models`, never imports it.
"""

import importlib
import os
import sys
from difflib import get_close_matches

from telamon.config.schema import ModelConfig
from telamon.errors import ConfigError

BUILT_IN = "telamon.models"

_families: dict[str, type[ModelConfig]] = {}


def register_family[C: type[ModelConfig]](cls: C) -> C:
    """Make a family known under the default of its `family` field; usable as a class decorator.

    Raises ConfigError when another class has the name already.
    """
    name = cls.model_fields["family"].default
    known = _families.get(name)
    # A module that is imported afresh (a reload, a notebook cell run twice) defines the same class again: that is no conflict.
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ConfigError(f"two model families are named {name!r}: in {known.__module__} and in {cls.__module__}; rename one")
    _families[name] = cls
    return cls


def import_plugins(modules: tuple[str, ...]) -> None:
    """Import a user's modules, from the working directory too. Raises ConfigError for one that isn't found."""
    here = os.getcwd()
    # A console script, unlike `python -m`, doesn't look in the working directory. Last place: it must not shadow a package.
    if modules and here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    for module in modules:
        try:
            importlib.import_module(module)
        except (ModuleNotFoundError, TypeError, ValueError) as error:
            if isinstance(error, ModuleNotFoundError) and error.name is not None and not module.startswith(error.name):
                raise  # a fault inside the user's module; its traceback shows where
            raise ConfigError(f"--import {module}: no such module (looked in {here} and the installed packages)") from None


def family(name: str) -> type[ModelConfig]:
    """The config class of a family. Raises ConfigError with the nearest name for one that isn't registered."""
    if not isinstance(name, str):
        raise ConfigError(f"model.family={name!r} must be the name of a family")
    if name not in _families:
        known = families()
        if name not in _families:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)} (--import adds a module's own)"
            raise ConfigError(f"model.family={name!r} is not a known family; {hint}")
    return _families[name]


def families() -> list[str]:
    """Names of all registered families, sorted."""
    importlib.import_module(BUILT_IN)
    return sorted(_families)
