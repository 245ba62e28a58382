"""Grouped-query attention: a plain reference, and a path whose memory is linear in the sequence.

Both follow one rule for what a query sees (see `visible`), so packing, padding and decoding need no other mask.
"""

import functools
import itertools

import jax
import jax.numpy as jnp

_BLOCK = 128
"""Queries a block. On CPUs of today 128 keeps a block's scores in the second-level cache."""

_MOST_BLOCKS = 32
"""Blocks are unrolled so that keys after a block's last query are never touched; more would bloat the program."""


def visible(*, q_positions: jax.Array, q_segments: jax.Array, k_positions: jax.Array, k_segments: jax.Array) -> jax.Array:
    """Which keys each query sees, [B, T, S]: those of its own segment, real (segment > 0), at positions not later."""
    same = q_segments[:, :, None] == k_segments[:, None, :]
    real = (k_segments > 0)[:, None, :]
    return same & real & (k_positions[:, None, :] <= q_positions[:, :, None])


def reference_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, *, scale: float) -> jax.Array:
    """Softmax attention written out (Vaswani et al. 2017, eq. 1), with softmax in float32.

    Args:
        q: queries [B, T, N, H]. Query head n reads kv head n // G, with G = N / K.
        k: keys [B, S, K, H].
        v: values [B, S, K, H].
        mask: what each query sees [B, T, S]; a query that sees nothing gets zeros.
        scale: factor on the scores.

    Returns:
        [B, T, N, H] in the type of `v`.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    q_BTKGH = q.reshape(B, T, K, N // K, H)
    scores_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k, preferred_element_type=jnp.float32) * scale
    seen = mask[:, None, None, :, :]
    # A finite floor keeps a row without any visible key free of NaN, in its gradient too.
    scores_BKGTS = jnp.where(seen, scores_BKGTS, -1e30)
    weights_BKGTS = jnp.where(seen, jax.nn.softmax(scores_BKGTS, axis=-1), 0.0)
    out_BTKGH = jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS.astype(v.dtype), v)
    return out_BTKGH.reshape(B, T, N, H)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_positions: jax.Array,
    q_segments: jax.Array,
    k_positions: jax.Array,
    k_segments: jax.Array,
    scale: float,
    aligned: bool,
) -> jax.Array:
    """Attention by blocks of queries; a block's scores are made, used and, for the gradient, made again.

    Memory is B N 128 S for scores instead of B N T S (the idea of Rabe and Staats 2021, with whole rows of keys).

    Args:
        q, k, v, scale: as in `reference_attention`.
        q_positions, q_segments: [B, T].
        k_positions, k_segments: [B, S].
        aligned: keys are the queries' own tokens in the same order, so that no query sees a later index.

    Returns:
        [B, T, N, H].
    """
    T, S = q.shape[1], k.shape[1]

    def rows(start: int, stop: int, keys: int) -> jax.Array:
        mask = visible(
            q_positions=q_positions[:, start:stop],
            q_segments=q_segments[:, start:stop],
            k_positions=k_positions[:, :keys],
            k_segments=k_segments[:, :keys],
        )
        return block(q[:, start:stop], k[:, :keys], v[:, :keys], mask)

    block = functools.partial(reference_attention, scale=scale)
    if T <= _BLOCK:
        return rows(0, T, S)
    block = jax.checkpoint(block)
    size = max(_BLOCK, -(-T // _MOST_BLOCKS))
    edges = [*range(0, T, size), T]
    return jnp.concatenate([rows(a, b, b if aligned else S) for a, b in itertools.pairwise(edges)], axis=1)
