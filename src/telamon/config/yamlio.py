"""YAML as a config means it: the core schema of YAML 1.2, so that a value is what it looks like.

PyYAML follows YAML 1.1, where `3e-4` is a string, `10:13` the number 613, `no` a boolean and `010` eight. Here `3e-4` is a
float, the other three a string, a string and ten, and a key given twice is refused instead of the first one being lost.
"""

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from telamon.errors import ConfigError

_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+0123456789.")),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}
    yaml_constructors: ClassVar[dict[str | None, Any]] = {None: yaml.SafeLoader.construct_undefined}

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, "expected a mapping", node.start_mark)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(self.construct_object(key_node, deep=True))
            if key in result:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
            result[key] = self.construct_object(value_node, deep=True)
        return result

    def sequence(self, node: yaml.SequenceNode) -> tuple[Any, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise yaml.constructor.ConstructorError(None, None, "expected a list", node.start_mark)
        return tuple(self.construct_object(item, deep=True) for item in node.value)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the strings that the loader above would read as something else."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


for _name, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _first)
for _name, _construct in {
    "map": _Loader.mapping,
    "seq": _Loader.sequence,
    "str": _Loader.construct_scalar,
    "null": lambda loader, node: None,
    "bool": lambda loader, node: loader.construct_scalar(node).lower() == "true",
    "int": lambda loader, node: int(loader.construct_scalar(node)),
    "float": _Loader.construct_yaml_float,
}.items():
    _Loader.add_constructor(f"tag:yaml.org,2002:{_name}", _construct)
_Dumper.add_representer(tuple, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=_flat(value)))


def _flat(value: tuple[Any, ...]) -> bool:
    return not any(isinstance(item, dict | tuple) for item in value)


def parse(text: str, where: str) -> Any:
    """The value that `text` stands for: mappings as dicts with string keys, sequences as tuples.

    `where` names the text in an error, such as a file's path. Raises ConfigError for text that isn't YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{where}{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not valid YAML here: it is nested too deeply") from None


def read(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file at a path or fsspec URL. Raises ConfigError where there is none."""
    try:
        text = _read_text(str(path))
    except (OSError, UnicodeDecodeError, ImportError, ValueError) as error:
        raise ConfigError(f"cannot read the config {path}: {getattr(error, 'strerror', None) or error}") from None
    value = parse(text, str(path))
    if value is None:
        return {}
    if not isinstance(value, dict):
        found = "a list" if isinstance(value, tuple) else "a single value"
        raise ConfigError(f"{path}: a config is a mapping of sections, such as `train: {{steps: 100}}`; got {found}")
    return value


def _read_text(path: str) -> str:
    if "://" in path:
        import fsspec

        with fsspec.open(path, "r", encoding="utf-8") as file:
            return file.read()  # pyright: ignore[reportAttributeAccessIssue]: fsspec's stubs lose the mode
    return Path(path).read_text(encoding="utf-8")


def dump(value: Any) -> str:
    """`value` (dicts, tuples, scalars) as YAML in the order given, which `parse` reads back as an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10**6)
