"""MXFP4, as GPT-OSS's experts have it: two numbers of four bits in a byte, and for every 32 of them a power of two.

Source: the OCP Microscaling Formats specification (E2M1 elements, E8M0 scales); transformers' `integrations/mxfp4.py` for the layout.
"""

from functools import cache, partial
from typing import TYPE_CHECKING

from telamon.errors import DataError
from telamon.hub.packed.tensor import PackedTensor, Packing, check_packed_modules, check_shape, part, stems, transformers_rule
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
    """[E, I, O] from blocks [E, O, I / 32, 16] and scales [E, O, I / 32], expert by expert."""
    import numpy as np

    if (scales == _NAN).any():
        raise DataError(f"{where}{SCALES} holds the code {_NAN}, which stands for no number")
    pairs, powers = _tables()
    E, O, count, _ = blocks.shape
    out = np.empty((E, count * 2 * BYTES, O), numpy_dtype("bfloat16"))
    with np.errstate(over="ignore"):  # the largest scales take some numbers to infinity, here as there
        for e in range(E):
            values = pairs[blocks[e]].reshape(O, count, 2 * BYTES) * powers[scales[e]][..., None]
            out[e] = values.reshape(O, -1).T
    return out


@cache
def _tables() -> "tuple[np.ndarray, np.ndarray]":
    """The two numbers of each byte [256, 2], the one in the low bits first, and the number of each scale [256]."""
    import numpy as np

    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    numbers = np.concatenate([sizes, -sizes])
    codes = np.arange(256)
    with np.errstate(over="ignore"):
        return np.stack([numbers[codes & 15], numbers[codes >> 4]], axis=-1), np.ldexp(np.float32(1), codes - _BIAS)
