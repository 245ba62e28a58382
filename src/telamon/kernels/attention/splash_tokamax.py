"""Tokamax's splash kernel (an experimental part of that package, so that its version is fixed in constraints.txt)."""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from telamon.kernels.attention.rule import SAVED

FACTOR = math.log2(math.e)
"""On the queries, beside the scale: the kernel's exponentials are powers of two, one operation less for each score."""


@functools.cache
def installed() -> bool:
    """Whether Tokamax is there, with this kernel."""
    try:
        return importlib.util.find_spec("tokamax._src.ops.experimental.tpu.splash_attention") is not None
    except ModuleNotFoundError:
        return False


@functools.lru_cache(maxsize=32)
def kernel(N: int, T: int, block: int, softcap: float | None, reach: int | None, interpret: bool) -> Callable[..., Any]:
    """The kernel for rows of T tokens, as `(q [N, T, H], k [K, T, H], v, segments [T], sinks [N] or None) -> [N, T, H]`.

    Args:
        N: query heads.
        T: tokens, a multiple of `block`.
        block: queries and keys at one time.
        softcap: see `Scores`.
        reach: keys from a query backwards that it sees, its own included; none: all.
        interpret: run without a TPU.
    """
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks
    from tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_mask_info import process_mask

    mask = masks.CausalMask((T, T)) if reach is None else masks.LocalMask((T, T), (reach - 1, 0), 0)
    compute = min(block, 512)  # of a block of keys at one time: scores of 1024 x 512 in float32 are 2 MiB of a TPU's fast memory
    config = splash.SplashConfig(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
        attn_logits_soft_cap=softcap,
        q_prescaled_log2e=True,
        residual_checkpoint_name=SAVED,
        interpret=interpret,
    )
    # As the package's own maker does, but with NumPy arrays, which outlive the trace that asks for them first.
    forward, function = process_mask(mask, (block, block), q_seq_shards=1)
    backward, _ = process_mask(mask, (block, block), q_seq_shards=1, is_dkv=True, return_dynamic_grid=False)
    made = splash.SplashAttentionKernel(
        forward,
        backward,
        config=config,
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.base.DEFAULT_MASK_VALUE,
        mask_function=function,
        fwd_mask_sparsity=float((forward.block_mask != 0).mean()),
        dkv_mask_sparsity=float((backward.block_mask != 0).mean()),
    )

    def call(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, sinks: jax.Array | None) -> Any:
        return made(q, k, v, splash.SegmentIds(segments, segments), None if sinks is None else _as_it_is(sinks))

    return call


@jax.custom_vjp
def _as_it_is(sinks: jax.Array) -> jax.Array:
    """The sinks; the kernel gives their gradient in the type of the queries, which is turned into theirs before any sum."""
    return sinks


_as_it_is.defvjp(lambda sinks: (sinks, jnp.zeros((), sinks.dtype)), lambda like, gradient: (gradient.astype(like.dtype),))
