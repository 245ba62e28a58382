"""Attention on TPUs by a splash kernel (FlashAttention by blocks, with blocks that no query sees left out).

There are two of it. Tokamax's is taken where that is installed: it alone has sinks, it leaves out blocks whose documents do
not meet, so packed rows cost what their documents do, and its backward pass is one kernel that makes scores once. JAX's own
needs no further package and serves all but sinks. Both are tested against `reference_attention`.

A kernel masks by index, not by position. Rows in which positions rise by one within a document, as the loader's do, have the
same windows either way. Chunks are cut by position and go into the kernel as finer segments.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from telamon.kernels.attention import rows, splash_jax, splash_tokamax
from telamon.kernels.attention.rule import Places, Request, Scores

_LANES = 128
"""Rows of tokens come in multiples of this: the width of a TPU's vector registers."""

_CHUNKS = 1 << 16
"""Chunks a document may have; segments up to 2**15 fit beside them into 32 bits."""


def refusal(request: Request) -> str | None:
    """Why a request cannot be served; None: it can."""
    if request.dtype not in ("bfloat16", "float32"):
        return f"it computes in bfloat16 and float32, not in {request.dtype}"
    if request.sinks and not splash_tokamax.installed():
        return "sinks need Tokamax's kernel, and Tokamax is not installed (extra `tpu`)"
    return rows.refusal(request)


def run(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    queries: Places,
    keys: Places,
    scores: Scores,
    aligned: bool,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Arguments as of `telamon.kernels.attention.attention`; `interpret` runs the kernel's program without a TPU."""
    assert aligned and q.shape[1] == k.shape[1], "see refusal"
    del keys  # the queries' own
    local = functools.partial(_whole_rows, scores=scores, interpret=interpret)
    return rows.on_each_device(local, q, k, v, queries, sinks)


def _whole_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, places: Places, sinks: jax.Array | None, *, scores: Scores, interpret: bool
) -> jax.Array:
    """Attention of one device's rows and heads."""
    T, N, H = q.shape[1:]
    made = splash_tokamax if splash_tokamax.installed() else splash_jax
    # The kernels have no scale. It goes into the queries, in float32 together with what else the kernel wants there, so that
    # they are rounded once: by at most 1 part in 512 in bfloat16, as they were after the rotation.
    q = (q.astype(jnp.float32) * (scores.scale * made.FACTOR)).astype(q.dtype)
    tail = -T % _LANES
    q_BNTH, k_BKTH, v_BKTH = (jnp.swapaxes(_longer(x, tail), 1, 2) for x in (q, k, v))
    kernel = made.kernel(N, T + tail, _block(T + tail, H, scores), scores.softcap, scores.reach, interpret)
    ids_BT = _longer(_segments(places, scores.chunk), tail)
    call: Callable[..., jax.Array] = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))
    out_BTNH = jnp.swapaxes(call(q_BNTH, k_BKTH, v_BKTH, ids_BT, sinks), 1, 2)[:, :T]
    # Padding sees padding in there. Zeros instead, whose gradient is zero too, so that padding leaves no trace.
    return jnp.where((places.segments > 0)[:, :, None, None], out_BTNH, 0)


def _segments(places: Places, chunk: int | None) -> jax.Array:
    """Ids that are equal where a query may see a key, windows and order apart; 0 for padding [B, T]."""
    if chunk is None:
        return places.segments
    return jnp.where(places.segments > 0, places.segments * _CHUNKS + places.positions // chunk, 0)


def _block(T: int, H: int, scores: Scores) -> int:
    """Queries, and keys, that are compared at one time: the largest that divides the row, is not too large, and pays.

    1024 is what Tokamax's tuning prefers for long rows. With more than 128 features a head, blocks of 1024 do not fit into
    the fast memory that a kernel gets on every TPU (16 MiB on v5p; the backward pass holds eight blocks of float32). Queries
    of a block look at a window's keys and up to two blocks more; where a window is shorter than a block, half of it saves
    more than it costs.
    """
    reach = scores.reach
    largest = min(1024 * _LANES // max(H, _LANES), 1024 if reach is None or reach >= 1024 else 512)
    return max(size for size in (128, 256, 512, 1024) if size <= max(largest, 128) and T % size == 0)


def _longer(x: jax.Array, tail: int) -> jax.Array:
    """Zeros behind the second dim: tokens of segment 0."""
    return jnp.pad(x, [(0, tail if dim == 1 else 0) for dim in range(x.ndim)]) if tail else x
