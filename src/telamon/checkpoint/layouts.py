"""Where each layer lies in a checkpoint's stacks, read from the names and shapes of its arrays.

A weight of layer 7 of a model with a repeating pattern of six is row 1 of `stacks.0.blocks.1.…`, whose leading axis
counts repeats. Another version of this library, or another program, may cut the same layers into other stacks, so what
is restored is looked up layer by layer: names and shapes are the record of the layout, and nobody states it a second time.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_STACKED = re.compile(r"(?P<prefix>(?:.*\.)?)stacks\.(?P<stack>\d+)\.blocks\.(?P<block>\d+)\.(?P<rest>.+)")


@dataclass(frozen=True)
class Slot:
    """One layer's part of a stacked array."""

    name: str
    index: int


def is_stacked(name: str) -> bool:
    """Whether an array holds a row for each repeat of a stack."""
    return _STACKED.fullmatch(name) is not None


def layout(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, int]]:
    """(period, repeats) of each stack, first to last, of arrays {dotted name: shape}."""
    periods: dict[int, int] = {}
    repeats: dict[int, int] = {}
    for name, shape in shapes.items():
        if match := _STACKED.fullmatch(name):
            stack = int(match["stack"])
            periods[stack] = max(periods.get(stack, 0), int(match["block"]) + 1)
            repeats[stack] = shape[0]
    return [(periods[stack], repeats[stack]) for stack in sorted(periods)]


def layers(shapes: Mapping[str, tuple[int, ...]]) -> dict[tuple[str, int, str], Slot]:
    """The slot of each layer's part: (prefix, layer, rest of the name) -> array and row."""
    starts, start = [], 0
    stacks = layout(shapes)
    for period, repeats in stacks:
        starts.append(start)
        start += period * repeats
    found: dict[tuple[str, int, str], Slot] = {}
    for name, shape in shapes.items():
        if match := _STACKED.fullmatch(name):
            stack, block = int(match["stack"]), int(match["block"])
            for row in range(shape[0]):
                key = match["prefix"], starts[stack] + row * stacks[stack][0] + block, match["rest"]
                assert key not in found, f"two arrays hold layer {key[1]} of {match['rest']}"
                found[key] = Slot(name, row)
    return found
