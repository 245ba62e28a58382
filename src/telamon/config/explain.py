"""A config said in words: what a key means, where values came from, how two runs differ, and the schema for an editor."""

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any

from pydantic import create_model

from telamon.config import keys, messages, registry, yamlio
from telamon.config.load import Loaded, plain, to_yaml
from telamon.config.schema import RunConfig
from telamon.errors import ConfigError


def annotated(loaded: Loaded) -> str:
    """The config as YAML, each value followed by a comment with its origins."""
    head, _, _ = to_yaml(loaded.config).partition("\n")
    return "\n".join([head, *_annotate(loaded, plain(loaded.config), "")]) + "\n"


def _annotate(loaded: Loaded, values: dict[str, Any], path: str) -> Iterator[str]:
    for key, value in values.items():
        here = f"{path}{key}"
        if value and isinstance(value, dict):
            yield f"{key}:"
            yield from (f"  {line}" for line in _annotate(loaded, value, f"{here}."))
        elif value and isinstance(value, tuple) and all(isinstance(item, dict) for item in value):
            yield f"{key}:"
            for index, item in enumerate(value):
                lines = _annotate(loaded, item, f"{here}.{index}.")
                yield f"  - {next(lines)}"
                yield from (f"    {line}" for line in lines)
        else:
            origins = loaded.origins(here)
            comment = "default" if len(origins) == 1 and origins[0].place == "by default" else loaded.origin(here)
            yield from f"{yamlio.dump({key: value}).rstrip()}  # {comment}".splitlines()


def explain_key(loaded: Loaded, path: str) -> str:
    """What a key means, its type, default, value and origins; for a section, its keys. Raises ConfigError for no key."""
    model = type(loaded.config.model)
    key, value = keys.find(model, path), loaded.value(path)
    if key is None:  # an item of a list
        parent = keys.find(model, path.rpartition(".")[0])
        section = parent.section if parent else None
        about, rows = f"an item of {path.rpartition('.')[0]}", [] if section else [("value", messages.show(value))]
    else:
        section, about = key.section, key.field.description or ""
        default = "none: must be given" if key.default is ... else messages.show(plain(key.default))
        rows = [("type", key.type), ("default", default), ("value", messages.show(value)), ("from", loaded.origin(path))]
    if key is not None and key.many:
        about += f" A list; an item, such as {path}.0, has:"
    if section is not None:
        values = value if isinstance(value, dict) else {}
        rows = [(_setting(name, values.get(name, {})), f"{field.description}") for name, field in section.model_fields.items()]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([path, f"  {about}", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _setting(name: str, value: Any) -> str:
    return name if isinstance(value, dict) else f"{name}={messages.show(value)}"


def difference(first: RunConfig, second: RunConfig) -> list[tuple[str, str, str]]:
    """The dotted keys in which two configs differ, with both values; `-` where one has no such key."""
    left, right = leaves(plain(first)), leaves(plain(second))
    shown = [(key, *(messages.show(side[key]) if key in side else "-" for side in (left, right))) for key in {**left, **right}]
    return [(key, a, b) for key, a, b in shown if key not in left or key not in right or left[key] != right[key]]


def leaves(values: dict[str, Any]) -> dict[str, Any]:
    """A nested dict as dotted keys with their values; the items of a list of sections have their number as a key."""
    return dict(_leaves(values))


def _leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        elif value and isinstance(value, tuple) and all(isinstance(item, dict) for item in value):
            yield from _leaves({str(index): item for index, item in enumerate(value)}, f"{path}{key}.")
        else:
            yield path + key, value


def json_schema(imports: Sequence[str] = ()) -> dict[str, Any]:
    """The JSON schema of a run file, for every registered family and those of the modules in `imports`."""
    registry.import_plugins(tuple(imports))
    families = [registry.family(name) for name in registry.families()]
    if not families:
        raise ConfigError("no model family is registered")
    field = RunConfig.model_fields["model"]
    run = create_model("RunConfig", __base__=RunConfig, model=(reduce(or_, families), field))
    return run.model_json_schema()
