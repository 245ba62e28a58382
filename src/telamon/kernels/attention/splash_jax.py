"""JAX's splash kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from telamon.kernels.attention.rule import SAVED

FACTOR = 1.0
"""On the queries, beside the scale."""


@functools.lru_cache(maxsize=32)
def kernel(N: int, T: int, block: int, softcap: float | None, reach: int | None, interpret: bool) -> Callable[..., Any]:
    """As `splash_tokamax.kernel`, but without sinks."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    mask = splash.CausalMask((T, T)) if reach is None else splash.LocalMask((T, T), (reach - 1, 0), 0)
    compute = min(block, 512)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
        use_fused_bwd_kernel=True,
    )
    with jax.ensure_compile_time_eval():  # arrays that outlive the trace that asks for them first
        made = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * N),
            block_sizes=sizes,
            attn_logits_soft_cap=softcap,
            residual_checkpoint_name=SAVED,
            interpret=interpret,
        )

    def call(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, sinks: jax.Array | None) -> Any:
        assert sinks is None, "see splash.refusal"
        return made(q, k, v, splash.SegmentIds(segments, segments))

    return call
