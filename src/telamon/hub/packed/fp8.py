"""FP8 in blocks, as DeepSeek V3 and Kimi K2 have it: numbers of eight bits (E4M3), and a factor for each block of 128 x 128.

The factor's tensor is called `weight_scale_inv`, and weights are multiplied by it. Blocks at the right and lower edge may be partial.

Source: DeepSeek-V3 report, section 3.3; transformers' `integrations/finegrained_fp8.py`.
"""

from functools import cache, partial
from typing import TYPE_CHECKING

from telamon.errors import DataError
from telamon.hub.packed.tensor import PackedTensor, Packing, check_packed_modules, check_shape, part, stems, strides, transformers_rule
from telamon.hub.source import TensorSource, numpy_dtype
from telamon.models.hf_config import Values

if TYPE_CHECKING:
    import numpy as np

SCALE = "_scale_inv"
CODES = "float8_e4m3fn"
SCALES = ("float32", "bfloat16", "float8_e8m0fnu")


def read(settings: Values) -> Packing:
    """What finds `NAME` [O, I] in float8_e4m3fn beside `NAME_scale_inv`, a factor for each block. Raises ConfigError."""
    settings.must_be("fmt", "e4m3", because="one kind of eight bits is read")
    settings.must_be("scale_fmt", "float", "ue8m0", because="factors are read as they are stored")
    settings.must_be("activation_scheme", "dynamic", because="activations are not packed here, and factors for them would be lost")
    block = settings.listed("weight_block_size")
    if block is None or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise settings.refuse("weight_block_size", block, "two positive whole numbers are needed")
    excluded = [*(settings.listed("modules_to_not_convert") or []), *(settings.listed("ignored_layers") or [])]
    settings.harmless("quant_method", "dequantize")
    return partial(_find, excluded, (block[0], block[1]))


def _find(excluded: list[str], block: tuple[int, int], source: TensorSource) -> dict[str, PackedTensor]:
    codes = (name for name, info in source.tensors.items() if info.dtype == CODES)
    names = list(dict.fromkeys([*stems(source, SCALE), *codes]))
    check_packed_modules(source, (name.removesuffix(".weight") for name in names), excluded, transformers_rule)
    return {name: _packed(source, name, block) for name in names}


def _packed(source: TensorSource, name: str, block: tuple[int, int]) -> PackedTensor:
    shape = part(source, name, name, (CODES,)).shape
    part(source, name + SCALE, name, SCALES)
    if len(shape) != 2:
        raise DataError(f"{source.origin}: {name} has shape {shape}; FP8 in blocks is read for matrices")
    counts = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    check_shape(source, name + SCALE, counts, f"beside {name} of {shape}, in blocks of {block[0]} x {block[1]}")
    return PackedTensor(shape, (name, name + SCALE), partial(_unpack, block))


def _unpack(block: tuple[int, int], codes: "np.ndarray", scales: "np.ndarray") -> "np.ndarray":
    """[O, I] in bfloat16, some rows of blocks at a time."""
    import numpy as np

    (O, I), (high, wide) = codes.shape, block
    out = np.empty((O, I), numpy_dtype("bfloat16"))
    numbers, factors = _numbers(), scales.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for rows in strides(O, I, high):
            of_rows = factors[rows.start // high : -(-rows.stop // high)].repeat(high, 0)[: rows.stop - rows.start]
            values = numbers.take(codes[rows].view(np.uint8), mode="clip")
            values *= of_rows.repeat(wide, 1)[:, :I]
            out[rows] = values
    return out


@cache
def _numbers() -> "np.ndarray":
    """The number of each code [256]."""
    import numpy as np

    return np.arange(256, dtype=np.uint8).view(numpy_dtype(CODES)).astype(np.float32)
