"""Loading a run's config: defaults, model preset, run file and overrides, in this order, and where each value came from.

Reading a config has no side effects: nothing is written, and no device is touched.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from telamon.config import keys, messages, presets, registry, yamlio
from telamon.config.ignored import refuse_idle
from telamon.config.schema import ModelConfig, RunConfig, RunSection
from telamon.errors import ConfigError

# Stands first in a saved config, which holds every value, so that a preset has nothing to add when it is read again.
RESOLVED = "resolved_by"

_OF_NO_SECTION: dict[str, Any] = {}


@dataclass(frozen=True)
class Layer:
    """One source of values, as nested dicts; `place` says where, such as "in tiny.yml"."""

    place: str
    values: dict[str, Any]
    typed: bool = False  # on the command line, so that an error needn't say where
    shipped: bool = False  # a run preset of the package's
    named: bool = False  # read because another layer names it: a model preset, a run to begin with


@dataclass(frozen=True)
class Origin:
    """A value that a source gave to a key."""

    value: Any
    place: str


@dataclass(frozen=True)
class Loaded:
    """A config, the name of the run file it came from, and the sources of its values, oldest first."""

    config: RunConfig
    name: str
    layers: tuple[Layer, ...]

    def value(self, key: str) -> Any:
        """The value at a dotted key. Raises ConfigError for a key that doesn't exist."""
        try:
            return _at(plain(self.config), key.split("."))
        except KeyError:
            near = keys.nearest(type(self.config.model), key)
            raise ConfigError(f"unknown key {key}" + (f"; did you mean {near}?" if near else "; see `telamon config show`")) from None

    def origins(self, key: str) -> tuple[Origin, ...]:
        """Every value that was given to `key`, the one that counts first, the schema's default last."""
        self.value(key)
        found = list(_origins(self.layers, key.split(".")))
        described = keys.find(type(self.config.model), key)
        if described is not None and described.default is not ...:
            found.append(Origin(plain(described.default), "by default"))
        return tuple(found)

    def written(self) -> dict[str, Any]:
        """What the run's file and overrides say, as one file would: without defaults and what presets add."""
        return _merged({}, [layer for layer in self.layers if not layer.named])

    def origin(self, key: str) -> str:
        """The same in words: "32 from the override (model.d_model=32), 64 in the preset x, 256 by default"."""
        return ", ".join(f"{messages.show(origin.value)} {origin.place}" for origin in self.origins(key))


def load_run(source: str | Path | None = None, overrides: Sequence[str] = (), *, imports: Sequence[str] = ()) -> Loaded:
    """The config of a run.

    `source` is a YAML file (path or URL), a run directory, or the name of a run preset; None starts from the defaults.
    `overrides` are texts like `train.steps=200`, whose values are YAML. `imports` are modules with a user's families and
    blocks, added to `run.imports`. Raises ConfigError.
    """
    name, file = ("run", None) if source is None else _read_source(str(source))
    resolved = file is not None and file.values.pop(RESOLVED, None) is not None
    own = [layer for layer in (file, *map(_override, overrides)) if layer is not None]
    if imports:
        listed = _given(own, "run.imports", ())
        if isinstance(listed, tuple):  # else its own error comes below
            own.append(Layer("from --import", {"run": {"imports": (*listed, *imports)}}))
    run = _validate(RunSection, "run", _merged({"run": _defaults(RunSection)}, own).get("run"))
    registry.import_plugins(run.imports if isinstance(run, RunSection) else ())

    begun = None if resolved else _given(own, "train.init_from", None)
    begun = None if begun == "none" else begun
    saved = None if begun is None else _begun_config(begun)
    own = [_without_model(layer) if layer.shipped and saved is not None else layer for layer in own]
    layers = [*([] if saved is None else [_begun(str(begun), saved, own)]), *_preset(own, resolved), *own]
    model = registry.family(_given(layers, "model.family", ModelConfig.model_fields["family"].default))
    merged = _merged({**_defaults(RunConfig), "model": _defaults(model)}, layers)
    loaded = Loaded(_build(merged, model, layers), name, tuple(layers))
    written = layers[1:] if resolved else layers  # a resolved file writes down every value, idle ones too
    refuse_idle(loaded, [partial(_sets, layer) for layer in written])
    if saved is not None:
        _check_begun(loaded, str(begun), saved)
    return loaded


def plain(value: Any) -> Any:
    """Sections as dicts, all the way down."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return tuple(map(plain, value)) if isinstance(value, tuple | list) else value


def fingerprint(config: RunConfig) -> str:
    """A hash of all values of a config: equal for equal configs, in any process."""
    text = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_yaml(config: RunConfig) -> str:
    """The config with every value written out; loading it again gives an equal config, whatever became of its presets."""
    from telamon import __version__

    return yamlio.dump({RESOLVED: f"telamon {__version__}", **plain(config)})


def _read_source(source: str) -> tuple[str, Layer]:
    path = Path(source)
    if "://" in source or path.suffix in (".yml", ".yaml") or path.is_file():
        return path.stem, Layer(f"in {source}", yamlio.read(source))
    if path.is_dir():
        if not (path / "config.yaml").is_file():
            raise ConfigError(
                f"{source} is a folder without a config.yaml, so no run; text to train on is named in a run file, in data.sources"
            )
        return path.name, Layer(f"in {source}/config.yaml", yamlio.read(path / "config.yaml"))
    if path.name != source:
        raise ConfigError(f"there is no config file and no run directory {source}")
    hint = hint_at_run(source) or _hint_at_model(source)
    if hint and source not in presets.names("runs"):
        raise ConfigError(f"no run preset is named {source!r}; {hint}")
    return source, Layer(f"in the run preset {source}", yamlio.read(presets.find("runs", source)), shipped=True)


def hint_at_run(name: str) -> str | None:
    """The question whether a run below runs/ is meant; none where none has this name."""
    return f"did you mean runs/{name}?" if name and Path("runs", name, "config.yaml").is_file() else None


def _hint_at_model(name: str) -> str | None:
    return f"it is a model: model.preset={name}" if name in presets.names("models") else None


def _override(text: str) -> Layer:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{messages.show(text)} is not an override; write key=value, such as train.steps=200")
    values = yamlio.parse(value, f"the override {messages.show(text)}")
    for part in reversed(parts):
        values = {part: values}
    return Layer(f"from the override ({messages.line(text)})", values, typed=True)


def _preset(own: list[Layer], resolved: bool) -> Iterator[Layer]:
    name = _given(own, "model.preset", None)
    if name is None or name == "none":
        return
    if resolved:
        saved = _given(own[:1], "model.preset", None)
        if name != saved:
            raise ConfigError(f"model.preset={name} comes too late: {own[0].place.removeprefix('in ')} holds every size already")
        return
    if not isinstance(name, str):
        raise ConfigError(f"model.preset={messages.show(name)} must be the name of a preset; see `telamon models list`")
    yield Layer(f"in the preset {name}", {"model": yamlio.read(presets.find("models", name))}, named=True)


def _begun(run: str, saved: RunConfig, own: list[Layer]) -> Layer:
    """What a run takes over from the one whose weights it begins with: its model, unless a preset is named, and its tokenizer."""
    values: dict[str, Any] = {} if _given(own, "model.preset", None) else {"model": plain(saved.model)}
    if "://" not in run and (Path(run) / "tokenizer").is_dir():
        values["data"] = {"tokenizer": {"path": str(Path(run) / "tokenizer")}}
    return Layer(f"in {run}", values, named=True)


def _without_model(layer: Layer) -> Layer:
    """A run preset without its model and tokenizer: whoever takes one for other weights wants the rest of it."""
    values = {name: value for name, value in layer.values.items() if name != "model"}
    data = {name: value for name, value in (values.get("data") or {}).items() if name != "tokenizer"}
    return replace(layer, values=values | ({"data": data} if data else {}))


def _begun_config(run: Any) -> RunConfig:
    file = f"{str(run).rstrip('/')}/config.yaml"
    if not isinstance(run, str) or ("://" not in run and not Path(file).is_file()):
        hint = hint_at_run(str(run)) or "name a run's folder, such as runs/first"
        raise ConfigError(f"train.init_from={messages.show(run)}: no run there (no config.yaml); {hint}")
    return load_run(file).config


def _check_begun(loaded: Loaded, run: str, saved: RunConfig) -> None:
    """Refuse weights of other sizes, naming both numbers and where each came from."""
    model, of_weights = loaded.config.model, plain(saved.model)
    for name, ours in plain(model).items():
        theirs = of_weights.get(name)
        fewer = name in model.may_be_fewer and isinstance(theirs, int) and 0 <= ours <= theirs
        if isinstance(ours, int | str) and name not in model.beside_weights and ours != theirs and not fewer:
            raise ConfigError(
                f"model.{name}={messages.show(ours)} does not fit the weights of train.init_from={run}, which have {messages.show(theirs)}: "
                f"{loaded.origin(f'model.{name}')}; leave it out, or begin with other weights"
            )


def _build(merged: dict[str, Any], model: type[ModelConfig], layers: list[Layer]) -> RunConfig:
    sections: dict[str, BaseModel] = {}
    errors: list[dict[str, Any]] = []
    for name, value in merged.items():
        field = RunConfig.model_fields.get(name)
        if field is None:
            errors.append({"type": "extra_forbidden", "loc": (name,), "input": value})
            continue
        section = _validate(model if name == "model" else field.annotation, name, value)
        errors.extend(section) if isinstance(section, list) else sections.update({name: section})
    if errors:
        raise messages.refuse(errors, model, lambda path: _place(layers, path))
    return RunConfig.model_validate(sections)


def _validate(section: Any, name: str, value: Any) -> Any:
    """The section, or the list of what is wrong with it."""
    try:
        return section.model_validate(value)
    except ValidationError as error:
        return [{**item, "loc": (name, *item["loc"])} for item in error.errors(include_url=False)]


class _Removable(dict[str, Any]):
    """The default of a section that may also be none."""


def _defaults(section: type[BaseModel]) -> dict[str, Any]:
    fields = {name: field for name, field in section.model_fields.items() if not field.is_required()}
    values = plain({name: field.get_default(call_default_factory=True) for name, field in fields.items()})
    removable = (name for name, field in fields.items() if isinstance(values[name], dict) and NoneType in get_args(field.annotation))
    return values | {name: _Removable(values[name]) for name in removable}


def _merged(defaults: dict[str, Any], layers: Sequence[Layer]) -> dict[str, Any]:
    merged = defaults
    for layer in layers:
        merged = _overlay(merged, layer.values, defaults)
    return merged


def _overlay(base: Any, over: Any, default: Any) -> Any:
    """`over` on top of `base`: mappings key by key, list items by index where `over` names indices, all else replaced.

    A section that may be none is replaced as a whole by one of another kind, and by none.
    """
    optional = isinstance(base, dict) and (default is None or isinstance(default, _Removable))
    if optional and (over is None or (isinstance(over, dict) and over.get("kind", base.get("kind")) != base.get("kind"))):
        return over
    if isinstance(base, dict) and over is None:
        return base  # a section left empty in a file, all its lines commented out
    if isinstance(base, tuple) and isinstance(over, dict) and over and all(map(_is_index, over)):
        items = dict(enumerate(base))
        for index, value in over.items():
            items[int(index)] = _overlay(items.get(int(index)), value, _OF_NO_SECTION)
        if set(items) != set(range(len(items))):
            raise ConfigError(f"list index {max(items)} leaves a gap: the list has {len(base)} items, numbered from 0")
        return tuple(items[index] for index in range(len(items)))
    if isinstance(base, dict) and isinstance(over, dict):
        defaults = default if isinstance(default, dict) else {}
        return {**base, **{key: _overlay(base.get(key), value, defaults.get(key, _OF_NO_SECTION)) for key, value in over.items()}}
    return over


def _is_index(key: str) -> bool:
    return key.isdecimal() and len(key) < 10


def _at(values: Any, path: Sequence[str]) -> Any:
    """The value at `path`; KeyError where there is none."""
    for part in path:
        if isinstance(values, dict):
            values = values[part]
        elif isinstance(values, tuple) and _is_index(part) and int(part) < len(values):
            values = values[int(part)]
        else:
            raise KeyError(part)
    return values


def _origins(layers: Sequence[Layer], path: Sequence[str]) -> Iterator[Origin]:
    """Newest first; sources that a newer one hides altogether (a list replaced as a whole) are left out."""
    for layer in reversed(layers):
        values: Any = layer.values
        for part in path:
            if isinstance(values, dict) and part not in values:
                break
            try:
                values = _at(values, [part])
            except KeyError:
                return
        else:
            if not isinstance(values, dict):  # a section has no value of its own
                yield Origin(values, layer.place)


def _given(layers: Sequence[Layer], key: str, default: Any) -> Any:
    return next((origin.value for origin in _origins(layers, key.split("."))), default)


def _place(layers: Sequence[Layer], path: str) -> str:
    return next(("" if layer.typed else layer.place for layer in reversed(layers) if _sets(layer, path)), "")


def _sets(layer: Layer, path: str) -> bool:
    try:
        _at(layer.values, path.split("."))
    except KeyError:
        return False
    return True
