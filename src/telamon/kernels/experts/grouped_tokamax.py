"""Grouped matmul by Tokamax's kernels, which read an expert's rows and its matrix and nothing else.

On TPUs these are the second generation of its grouped matmul: blocks of as many rows as there are, tiles that fit the chip's fast
memory, and matrices that are read transposed where they lie. On GPUs they are Mosaic kernels for Hopper and Blackwell, of which
Blackwell has none for the weights' gradient; there that is a product by blocks. Tokamax joins its kernels to a function with
gradients itself, in which the weights' gradient is rounded to the type that they were cast to. Called one by one, all sum in
float32 and that gradient stays so.

XLA's compilers for TPUs and GPUs take these kernels without a device.
"""

import dataclasses
import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from telamon.kernels import gpus
from telamon.kernels.experts import blocked
from telamon.kernels.experts.rule import Request, own_rows
from telamon.parallel.target import target

_ROWS = {"tpu": 16, "gpu": 64}
"""Rows that the kernels of weights' gradients sum together; what is missing is filled up with zeros."""

_WIDTH = 64
"""What widths must be multiples of: what a GPU's Mosaic kernels load together. A TPU's fill up rows of lanes by themselves."""

_HOPPER, _BLACKWELL = 9, 10
_GENERATIONS = (_HOPPER, _BLACKWELL)
"""NVIDIA's first numbers of these architectures."""

_MOST_ROWS = 256
"""Rows of a tile on a TPU. Tokamax's rule takes four times as many, with code of its own for each quarter, so that the weights' gradient
of 2880 x 2880 takes 40 seconds of a CPU's time to compile; so it takes 4, and the matrix still waits in fast memory for all its rows."""

_ROOM = 0.75
"""Share of a TPU's fast memory for tiles. Tokamax's own rule fills it up to what kernels need beside them, and the compiler refuses."""


def refusal(request: Request) -> str | None:
    """Why a request cannot be served; None: it can."""
    platform = request.target.platform
    gpu = gpus.gpu_of(request.target) if platform == "gpu" else None
    kind = request.target.device_kind or "this device"
    if not _installed():
        return "Tokamax is not installed (extra `tpu` or `cuda13`)"
    if platform != "tpu" and gpu is None:
        return f"it is for TPUs and NVIDIA's GPUs, and {kind} is not known as one"
    if gpu is not None and gpu.capability[0] not in _GENERATIONS:
        return f"its kernels are for Hopper and Blackwell, which {kind} is not"
    if request.dtype != "bfloat16":
        return f"it computes in bfloat16, not in {request.dtype}"
    if request.K % _WIDTH or request.N % _WIDTH:
        return f"matrices of {request.K} x {request.N} are not in multiples of {_WIDTH}"
    if not request.alone:
        return "it works on the rows of one device, and where it is called the mesh's devices share them"
    return None


def product(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """x [M, K] times w [E, K, N], or the transposes of w [E, N, K] -> [M, N] in the type of x."""
    w = w.astype(x.dtype)
    if target().platform == "tpu":
        from tokamax._src.ops.gmm_v2.gmm_v2 import gmm_v2

        return own_rows(gmm_v2(x, w, sizes, transpose_rhs=transposed, zero_initialize=False, tile_info=_tiles), sizes)
    from tokamax._src.ops.ragged_dot.base import DEFAULT_RAGGED_DOT_DIM_NUMS, TRANS_RHS_RAGGED_DOT_DIM_NUMS

    dims = TRANS_RHS_RAGGED_DOT_DIM_NUMS if transposed else DEFAULT_RAGGED_DOT_DIM_NUMS
    return own_rows(_on_gpu(_gpu(), dims, x, w, sizes, x.dtype), sizes)


def weight_gradient(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    """xᵀ dy over the rows of each expert, for x [M, K] and dy [M, N]: [E, K, N] in float32."""
    platform = target().platform
    if platform == "gpu" and _gpu().capability[0] == _BLACKWELL:
        return blocked.weight_gradient(x, dy, sizes)
    x, dy = (jnp.pad(rows, ((0, -rows.shape[0] % _ROWS[platform]), (0, 0))) for rows in (x, dy))
    if platform == "tpu":
        from tokamax._src.ops.gmm_v2.tgmm_v2 import tgmm_v2

        return tgmm_v2(x, dy, sizes, sizes.shape[0], preferred_element_type=jnp.dtype(jnp.float32), tile_info=_tiles_of_sum)
    from tokamax._src.ops.ragged_dot.base import RAGGED_CONTRACTING_DOT_DIM_NUMS

    return _on_gpu(_gpu(), RAGGED_CONTRACTING_DOT_DIM_NUMS, x, dy, sizes, jnp.float32)


def _gpu() -> gpus.Gpu:
    gpu = gpus.gpu_of(target())
    assert gpu is not None, "see refusal"
    return gpu


def _on_gpu(gpu: gpus.Gpu, dims: Any, x: jax.Array, y: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
    from tokamax._src.ops.ragged_dot.api import IMPLEMENTATIONS

    operation: Any = IMPLEMENTATIONS["mosaic_gpu"]
    with gpus.tokamax_as_on(gpu):
        return operation(x, y, group_sizes=sizes, ragged_dot_dimension_numbers=dims, preferred_element_type=jnp.dtype(dtype))


def _tiles(dims: Any, lhs: Any, rhs: Any, room: int, *rest: Any) -> Any:
    from tokamax._src.ops.gmm_v2.gmm_v2 import calculate_tiling

    return _few_rows(calculate_tiling(dims, lhs, rhs, int(_ROOM * room), *rest))


def _tiles_of_sum(dims: Any, lhs: Any, rhs: Any, room: int, *rest: Any) -> Any:
    from tokamax._src.ops.gmm_v2.tgmm_v2 import calculate_tgmm_tiling

    return _few_rows(calculate_tgmm_tiling(dims, lhs, rhs, int(_ROOM * room), *rest))


def _few_rows(tiles: Any) -> Any:
    """Tiles of at most `_MOST_ROWS` rows, still a multiple of the least."""
    least = tiles.bucket_base
    return dataclasses.replace(tiles, tile_m=min(tiles.tile_m, max(_MOST_ROWS // least, 1) * least))


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("tokamax") is not None
