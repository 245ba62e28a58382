"""Grouped-query attention: a plain reference, and a path whose memory is linear in the sequence.

Both follow one rule for what a query sees (see `visible`), so packing, padding and decoding need no other mask.
"""

import itertools

import jax
import jax.numpy as jnp

_BLOCK = 128
"""Queries a block. On CPUs of today 128 keeps a block's scores in the second-level cache."""

_SPANS = 4
"""Spans of queries, each with the keys up to its end: with 4, causal attention computes 5/8 of all pairs (1/2 is needed)."""


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

    Scores take memory for at most four blocks at a time, B N 512 S instead of B N T S (the idea of Rabe and Staats 2021,
    with whole rows of keys).

    Args:
        q, k, v, scale: as in `reference_attention`.
        q_positions, q_segments: [B, T].
        k_positions, k_segments: [B, S].
        aligned: keys are the queries' own tokens in the same order, so that no query sees a later index.

    Returns:
        [B, T, N, H].
    """
    T, S = q.shape[1], k.shape[1]

    def rows(first: int, last: int, keys: int) -> jax.Array:
        """Queries of blocks `first` to `last`, which see the first `keys` keys."""
        k_seen, v_seen, positions, segments = k[:, :keys], v[:, :keys], k_positions[:, :keys], k_segments[:, :keys]

        # The mask is made inside, or the gradient would keep a [B, T, S] array of it.
        def block(queries: tuple[jax.Array, ...]) -> jax.Array:
            q, q_positions, q_segments = queries
            mask = visible(q_positions=q_positions, q_segments=q_segments, k_positions=positions, k_segments=segments)
            return reference_attention(q, k_seen, v_seen, mask, scale=scale)

        queries = tuple(x[:, first * _BLOCK : last * _BLOCK] for x in (q, q_positions, q_segments))
        if T <= _BLOCK:
            return block(queries)
        if last - first == 1:
            return jax.checkpoint(block)(queries)
        # A loop, because the compiler may run independent blocks side by side and hold the scores of all.
        return _joined(jax.lax.map(jax.checkpoint(block), tuple(_blocks(x) for x in queries)))

    if T <= _BLOCK:
        return rows(0, 1, S)
    q, q_positions, q_segments = (_padded(x) for x in (q, q_positions, q_segments))
    count = q.shape[1] // _BLOCK
    edges = [*range(0, count, -(-count // _SPANS)), count]
    parts = [rows(first, last, last * _BLOCK if aligned else S) for first, last in itertools.pairwise(edges)]
    return jnp.concatenate(parts, axis=1)[:, :T]


def _padded(x: jax.Array) -> jax.Array:
    """Queries up to a multiple of `_BLOCK`; the new ones are of segment 0 and see nothing."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % _BLOCK)] + [(0, 0)] * (x.ndim - 2))


def _blocks(x: jax.Array) -> jax.Array:
    """[B, blocks * _BLOCK, ...] -> [blocks, B, _BLOCK, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, _BLOCK, *x.shape[2:]), 1, 0)


def _joined(x: jax.Array) -> jax.Array:
    """Undo `_blocks`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
