"""Where each layer lies in a checkpoint's stacks, read from the names and shapes of its arrays.

In a model with a repeating pattern of six, layer 7's weights are row 1 of `stacks.0.blocks.1.…`, arrays whose leading axis
counts repeats. Another version of this library, or another program, may cut the same layers into other stacks. Names and
shapes are the record of how it was done, so what is restored is looked up layer by layer, and nobody has to say it again.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from telamon.checkpoint.manifest import ArrayInfo

_STACKED = re.compile(r"(?P<prefix>(?:.*\.)?)stacks\.(?P<stack>\d+)\.blocks\.(?P<block>\d+)\.(?P<rest>.+)")

Layout = list[tuple[int, int]]
"""(period, repeats) of each stack, first to last."""


@dataclass(frozen=True)
class Slot:
    """Where one layer's part is: an array's name, and the row in it."""

    name: str
    row: int


def is_stacked(name: str) -> bool:
    """Whether an array holds a row for each repeat of a stack."""
    return _STACKED.fullmatch(name) is not None


def layouts(arrays: Mapping[str, Any]) -> dict[str, Layout]:
    """The layout of each tree of weights among {dotted name: array}: by prefix, such as `weights.` or that of a moment."""
    found: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    for name, array in arrays.items():
        match = _STACKED.fullmatch(name)
        if match and array.shape:
            stack = int(match["stack"])
            period, repeats = found[match["prefix"]].get(stack, (0, 0))
            found[match["prefix"]][stack] = max(period, int(match["block"]) + 1), max(repeats, array.shape[0])
    return {prefix: [stacks[stack] for stack in sorted(stacks)] for prefix, stacks in found.items()}


def slots(arrays: Mapping[str, Any]) -> dict[str, Slot]:
    """{name of a layer's part, as of :func:`by_layer`: where it is}."""
    cut = layouts(arrays)
    found: dict[str, Slot] = {}
    for name, array in arrays.items():
        match = _STACKED.fullmatch(name)
        if not match:
            continue
        stacks, stack = cut[match["prefix"]], int(match["stack"])
        period, repeats = stacks[stack]
        if not array.shape or array.shape[0] != repeats:  # a placeholder, which optimizers keep for some weights
            continue
        start = sum(p * r for p, r in stacks[:stack])
        for row in range(repeats):
            part = f"{match['prefix']}layers.{start + row * period + int(match['block'])}.{match['rest']}"
            assert part not in found, f"two arrays hold {part}"
            found[part] = Slot(name, row)
    return found


def by_layer(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays with stacked ones taken apart: `weights.layers.7.mixer.query` and so on, each described by one layer's shape."""
    places = slots(arrays)
    stacked = {slot.name for slot in places.values()}
    apart = {name: _one_layer(arrays[slot.name]) for name, slot in places.items()}
    return {name: array for name, array in arrays.items() if name not in stacked} | apart


def moves(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[dict[str, list[Slot]]]:
    """For each kind of weight: {name of a wanted array: where in the saved ones its rows are, first to last}.

    Both hold the same layers (`by_layer` of the two has the same names).
    """
    places, groups = slots(saved), defaultdict(lambda: defaultdict(list))
    for name, slot in slots(wanted).items():
        kind = re.sub(r"layers\.\d+\.", "", name)
        groups[kind][slot.name].append(places[name])
    return [dict(group) for group in groups.values()]


def restack(
    group: Mapping[str, list[Slot]],
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    load: Callable[[dict[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]],
) -> dict[str, jax.Array]:
    """Load one kind of weight as it was cut, and cut it as it is wanted. At most this kind is in memory twice.

    Args:
        group: of :func:`moves`.
        saved, wanted: the arrays' descriptions; those wanted with shardings.
        load: reads arrays by name, into the shapes, types and shardings given.
    """
    like = wanted[next(iter(group))]
    names = sorted({slot.name for places in group.values() for slot in places})
    parts = load({name: jax.ShapeDtypeStruct(saved[name].shape, like.dtype, sharding=_whole_layers(like.sharding)) for name in names})

    def cut(parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: jnp.stack([parts[slot.name][slot.row] for slot in places]) for name, places in group.items()}

    return jax.jit(cut, out_shardings={name: wanted[name].sharding for name in group})(parts)


def _one_layer(array: Any) -> Any:
    if isinstance(array, ArrayInfo):
        return dataclasses.replace(array, shape=array.shape[1:])
    return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)


def _whole_layers(sharding: Any) -> Any:
    """A sharding that also fits another number of layers."""
    if isinstance(sharding, NamedSharding) and len(sharding.spec):
        return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))
    return sharding
