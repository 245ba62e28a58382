"""MXFP4, as GPT-OSS's experts have it: two numbers of four bits in a byte, and for every 32 of them a power of two.

Source: the OCP Microscaling Formats specification (E2M1 elements, E8M0 scales); transformers' `integrations/mxfp4.py` for the layout.
"""

from functools import cache, partial
from typing import TYPE_CHECKING

from telamon.errors import DataError
from telamon.hub.packed.tensor import PackedTensor, Packing, check_packed_modules, check_shape, part, stems, strides, transformers_rule
from telamon.hub.source import TensorSource, numpy_dtype
from telamon.models.hf_config import Values

if TYPE_CHECKING:
    import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
BYTES = 16
"""In a block of 32 numbers."""
_BIAS, _NAN = 127, 255


def read(settings: Values) -> Packing:
    """What finds `NAME` [E, I, O] in `NAME_blocks` [E, O, I / 32, 16] and `NAME_scales` [E, O, I / 32]. Raises ConfigError."""
    excluded = settings.listed("modules_to_not_convert") or []
    settings.harmless("quant_method", "dequantize")
    return partial(_find, excluded)


def _find(excluded: list[str], source: TensorSource) -> dict[str, PackedTensor]:
    names = stems(source, BLOCKS, SCALES)
    check_packed_modules(source, names, excluded, transformers_rule)
    return {name: _packed(source, name) for name in names}


def _packed(source: TensorSource, name: str) -> PackedTensor:
    blocks = part(source, name + BLOCKS, name, ("uint8",)).shape
    part(source, name + SCALES, name, ("uint8",))
    if len(blocks) != 4 or blocks[-1] != BYTES:
        raise DataError(f"{source.origin}: {name + BLOCKS} has shape {blocks}; in MXFP4 it is [experts, outputs, blocks, {BYTES}]")
    check_shape(source, name + SCALES, blocks[:-1], f"beside {name + BLOCKS} of {blocks}")
    E, O, count, _ = blocks
    return PackedTensor((E, count * 2 * BYTES, O), (name + BLOCKS, name + SCALES), partial(_unpack, f"{source.origin}: {name}"))


def _unpack(where: str, blocks: "np.ndarray", scales: "np.ndarray") -> "np.ndarray":
    """[E, I, O] from blocks [E, O, I / 32, 16] and scales [E, O, I / 32], some rows at a time; it lies in memory as [E, O, I]."""
    import numpy as np

    if (scales == _NAN).any():
        raise DataError(f"{where}{SCALES} holds the code {_NAN}, which stands for no number")
    E, O, count, _ = blocks.shape
    pairs = np.empty((E * O, count, BYTES), np.uint32)
    by_row, scales = blocks.reshape(pairs.shape), scales.reshape(E * O, count, 1)
    for rows in strides(E * O, count * 2 * BYTES):
        places = scales[rows].astype(np.intp) << 8 | by_row[rows]
        _table().take(places, out=pairs[rows], mode="clip")  # where it might raise, it would take another copy
    return pairs.view(numpy_dtype("bfloat16")).reshape(E, O, count * 2 * BYTES).swapaxes(1, 2)


@cache
def _table() -> "np.ndarray":
    """Two bfloat16 numbers in one of 32 bits, the one in the low bits of the byte first, at 256 scale + byte."""
    import numpy as np

    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers = np.concatenate([sizes, -sizes])
    codes = np.arange(256)
    pairs = np.stack([numbers[codes & 15], numbers[codes >> 4]], axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):  # the largest scales take some numbers to infinity, in bfloat16 as well
        scaled = np.ldexp(pairs, (codes - _BIAS)[:, None, None])
    return scaled.astype(numpy_dtype("bfloat16")).view(np.uint32).reshape(-1)
