"""What the formats have in common: a tensor made of several, and the checks of their names, types and shapes."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from telamon.errors import DataError
from telamon.hub.source import TensorInfo, TensorSource

if TYPE_CHECKING:
    import numpy as np

ROOM = 1 << 20
"""About so many numbers are unpacked at one time, for they are float32 on their way to bfloat16."""


@dataclass(frozen=True)
class PackedTensor:
    """A tensor that a source holds as several."""

    shape: tuple[int, ...]
    """Of the unpacked tensor."""
    parts: tuple[str, ...]
    """Names of the source's tensors that it consists of."""
    unpack: "Callable[..., np.ndarray]"
    """Takes these as arrays and gives the tensor in bfloat16."""

    @property
    def info(self) -> TensorInfo:
        """What it reads as."""
        return TensorInfo(self.shape, "bfloat16")


Packing = Callable[[TensorSource], dict[str, PackedTensor]]
"""Finds the packed tensors of a source, by their plain names. Raises DataError where one is missing, or of another type or shape."""


def stems(source: TensorSource, *suffixes: str) -> list[str]:
    """What the names of tensors with one of these suffixes begin with, each once, in the source's order."""
    found = (name.removesuffix(suffix) for name in source.tensors for suffix in suffixes if name.endswith(suffix))
    return list(dict.fromkeys(found))


def part(source: TensorSource, name: str, of: str, dtypes: tuple[str, ...]) -> TensorInfo:
    """A part of the packed tensor `of`. Raises DataError where it is missing or of another type."""
    if name not in source.tensors:
        raise DataError(f"{source.origin}: {name} is missing, without which {of} cannot be unpacked; fetch the model's files again")
    info = source.tensors[name]
    if info.dtype not in dtypes:
        raise DataError(f"{source.origin}: {name} is of type {info.dtype}; of a packed weight it is {' or '.join(dtypes)}")
    return info


def check_shape(source: TensorSource, name: str, expected: tuple[int, ...], because: str) -> None:
    """Raise DataError where the tensor `name` has another shape."""
    shape = source.tensors[name].shape
    if shape != expected:
        raise DataError(f"{source.origin}: {name} has shape {shape}; {because}, it has {expected}")


def check_packed_modules(source: TensorSource, modules: Iterable[str], excluded: list[str], rule: Callable[[str, str], bool]) -> None:
    """Raise DataError where a packed tensor belongs to a module that the config says is not packed."""
    for module in modules:
        if pattern := next((pattern for pattern in excluded if rule(pattern, module)), None):
            raise DataError(f"{source.origin}: {module} is packed, and quantization_config excludes it by {pattern!r}")


def transformers_rule(pattern: str, module: str) -> bool:
    """How `modules_to_not_convert` is read: as an expression for a module or one that it lies in, or as the end of its name.

    transformers takes the beginning of a last word for the whole, so that a router called `gate` would exclude every `gate_proj`;
    files do not mean that.
    """
    return re.match(rf"(?:{pattern})(?:\.|$)", module) is not None or f".{module}".endswith(f".{pattern}")


def strides(rows: int, columns: int, multiple: int = 1) -> Iterable[slice]:
    """Slices of `rows` rows that hold about `ROOM` numbers each, whole multiples of so many rows."""
    step = max(1, ROOM // max(1, columns) // multiple) * multiple
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
