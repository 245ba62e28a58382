"""Two model presets side by side: the sizes in which they differ, and the figures that follow from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from telamon.config.explain import leaves
from telamon.records.card import SERVED_LENGTH, make_card
from telamon.records.card_text import binary_size, in_thousands

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Comparison:
    """What differs between two presets."""

    names: tuple[str, str]
    figures: tuple[Mapping[str, Any], Mapping[str, Any]]
    """Of each: dotted key -> value, as `telamon models show --json` nests them."""

    @property
    def differing(self) -> list[str]:
        """Keys whose values differ. None is as good as no such key: a setting that is off, and one that the family does not have."""
        left, right = self.figures
        return [key for key in {**left, **right} if left.get(key) != right.get(key)]

    def as_json(self) -> dict[str, dict[str, Any]]:
        """Key -> preset -> value, for JSON; a preset without such a key is left out."""
        sides = [*zip(self.names, self.figures, strict=True)]
        return {key: {name: values[key] for name, values in sides if key in values} for key in self.differing}


def compare(first: str, second: str) -> Comparison:
    """Compare two presets; work at the row lengths of both, longer than what a model is made for or not.

    Raises:
        ConfigError: no preset has this name.
    """
    lengths = {length for name in (first, second) for length in make_card(name).flops}
    left, right = (leaves(make_card(name, lengths=lengths).figures()) for name in (first, second))
    return Comparison((first, second), (left, right))


def make_table(comparison: Comparison) -> "Table":
    """What differs as a table for a terminal, in groups, with figures for people."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("", *comparison.names)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.overflow = "fold"  # names of repositories are long words
    lines = sorted(((*_labelled(key), key) for key in comparison.differing if key not in _STATED), key=lambda line: _GROUPS.index(line[0]))
    for group, rows in groupby(lines, key=lambda line: line[0]):
        table.add_row(f"[bold]{group}[/]")
        for _, label, shown, key in rows:
            values = (shown(side[key]) if key in side else "-" for side in comparison.figures)
            table.add_row(f"  {escape(label)}", *map(escape, values))
        table.add_section()
    return table


def _value(value: Any) -> str:
    match value:
        case None:
            return "none"
        case str():
            return value
        case bool():
            return str(value).lower()
        case int():
            return f"{value:,}"
        case float() if value.is_integer():
            return f"{int(value):,}"
        case list() | tuple():
            return " or ".join(map(_value, value))
        case _:
            return f"{value:g}"


_GROUPS = ("model", "settings", "parameters", "FLOPs a token, training", "memory")
_STATED = {"model.published_parameters", "model.published_active_parameters"}  # of the preset's file; counted, they are among `parameters`
_LABELS: dict[str, tuple[str, str, Callable[[Any], str]]] = {
    "repository": ("model", "repository", _value),
    "architecture": ("model", "architecture", _value),
    "layers": ("model", "layers", _value),
    "experts": ("model", "experts", _value),
    "parameters.total": ("parameters", "all", _value),
    "parameters.active": ("parameters", "active", _value),
    "parameters.embedding": ("parameters", "table of tokens", _value),
    "parameters.positions": ("parameters", "table of positions", _value),
    "parameters.head": ("parameters", "output head", _value),
    "parameters.per_layer": ("parameters", "a layer", _value),
    "parameters.matmul": ("parameters", "that a token meets", _value),
    "memory.training_bytes": ("memory", "training", binary_size),
    "memory.weights_bytes": ("memory", "weights to serve", binary_size),
    "memory.cache_per_token_bytes": ("memory", "cache a token", binary_size),
    "memory.cache_per_token_beyond_bytes": ("memory", "... windows full", binary_size),
    "memory.cache_served_bytes": ("memory", f"cache of {SERVED_LENGTH:,}", binary_size),
    "memory.cache_kept_bytes": ("memory", "... as kept here", binary_size),
}


def _labelled(key: str) -> tuple[str, str, Callable[[Any], str]]:
    """The group of a figure, what it is called there, and how its values are shown."""
    section, _, rest = key.partition(".")
    if section == "flops_per_token":
        return _GROUPS[3], f"rows of {int(rest):,}", in_thousands
    return ("settings", rest, _value) if section == "model" else _LABELS[key]
