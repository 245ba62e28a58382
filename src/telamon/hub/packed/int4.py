"""INT4 in groups, as Kimi K2 Thinking's experts have it: eight codes of four bits in an int32, and a factor for each group of a row.

Source: the package compressed-tensors, format `pack-quantized`: codes lie in order from the lowest bits up, and stand for code - 8.
"""

import re
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from telamon.errors import DataError
from telamon.hub.packed.tensor import PackedTensor, Packing, check_packed_modules, check_shape, part, stems, strides
from telamon.hub.source import TensorSource, numpy_dtype
from telamon.models.hf_config import Values

if TYPE_CHECKING:
    import numpy as np

PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
CODES = 8
"""In an int32."""


def read(settings: Values) -> Packing:
    """What finds `NAME` [O, I] in `NAME_packed` [O, I / 8], `NAME_scale` [O, I / group] and `NAME_shape` [2]. Raises ConfigError."""
    return partial(_find, settings.listed("ignore") or [], _group_size(settings))


def _find(ignored: list[str], group: int, source: TensorSource) -> dict[str, PackedTensor]:
    names = stems(source, PACKED, SHAPE)
    check_packed_modules(source, (name.removesuffix(".weight") for name in names), ignored, _rule)
    return {name: _packed(source, name, group) for name in names}


def _rule(pattern: str, module: str) -> bool:
    """How `ignore` is read: a name, or behind `re:` an expression for the beginning of one."""
    return re.match(pattern[3:], module) is not None if pattern.startswith("re:") else pattern == module


def _group_size(settings: Values) -> int:
    """Checks every attribute, and gives how many codes share a factor."""
    settings.must_be("format", "pack-quantized", because="one format of this package is read")
    settings.must_be("quantization_status", "compressed", because="weights are read packed")
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if value := settings.get(name, None):
            raise settings.refuse(name, value, "weights alone are packed here")
    settings.harmless("quant_method", "global_compression_ratio", "version")
    groups = settings.dictionary("config_groups")
    if len(groups) != 1:
        raise settings.refuse("config_groups", list(groups), "one group of settings for all packed weights is needed")
    ((name, raw),) = groups.items()
    return _checked_group(settings.inner(f"config_groups: {name}", raw))


def _checked_group(group: Values) -> int:
    group.must_be("targets", ["Linear"], because="weights of linear layers are packed")
    group.must_be("format", "pack-quantized", because="one format of this package is read")
    for name in ("input_activations", "output_activations"):
        if value := group.get(name, None):
            raise group.refuse(name, value, "weights alone are packed here")
    weights = group.inner("weights", group.dictionary("weights"))
    group.finish()
    return _checked_weights(weights)


def _checked_weights(weights: Values) -> int:
    needed: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    for name, value in needed.items():
        if weights.get(name, None) != value:
            raise weights.refuse(name, weights.get(name, None), f"{value!r} is needed")
    weights.must_be("dynamic", False, because="weights are packed once")
    weights.must_be("actorder", "weight", "static", because="columns lie in their own order")
    weights.must_be("block_structure", because="a factor is one of a group within a row")
    weights.harmless("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    size = weights.size("group_size")
    weights.finish()
    return size


def _packed(source: TensorSource, name: str, group: int) -> PackedTensor:
    part(source, name + PACKED, name, ("int32",))
    part(source, name + SCALE, name, ("bfloat16", "float16", "float32"))
    part(source, name + SHAPE, name, ("int64", "int32"))
    check_shape(source, name + SHAPE, (2,), "of a matrix")
    O, I = (int(size) for size in source.read(name + SHAPE))
    if min(O, I) < 1:
        raise DataError(f"{source.origin}: {name + SHAPE} says {O} x {I}; fetch the model's files again")
    if I % group:
        raise DataError(f"{source.origin}: {name} has {I} columns, which groups of {group} do not divide")
    check_shape(source, name + PACKED, (O, -(-I // CODES)), f"of {O} x {I} with {CODES} codes in a number")
    check_shape(source, name + SCALE, (O, I // group), f"of {O} x {I} in groups of {group}")
    return PackedTensor((O, I), (name + PACKED, name + SCALE, name + SHAPE), partial(_unpack, I, group))


def _unpack(I: int, group: int, packed: "np.ndarray", scales: "np.ndarray", _shape: "np.ndarray") -> "np.ndarray":
    """[O, I] in bfloat16, some rows at a time. Products are rounded once, to the type of the factors, which is bfloat16 in files."""
    import numpy as np

    out = np.empty((len(packed), I), numpy_dtype("bfloat16"))
    with np.errstate(over="ignore"):  # the largest factors take some numbers to infinity, here as there
        for rows in strides(len(packed), I):
            codes = _pairs().take(packed[rows].view(np.uint8), mode="clip").view(np.float32)[:, :I]
            numbers = codes.reshape(len(codes), -1, group)
            numbers *= scales[rows].astype(np.float32)[..., None]
            out[rows] = numbers.reshape(len(codes), I)
    return out


@cache
def _pairs() -> "np.ndarray":
    """The two float32 numbers of each byte in one of 64 bits [256], the one in the low bits of the byte first."""
    import numpy as np

    codes = np.arange(256)
    return (np.stack([codes & 15, codes >> 4], axis=-1).astype(np.float32) - 8).view(np.uint64).reshape(-1)
