"""Grouped-query attention: a plain reference, and a path whose memory is linear in the sequence.

Both follow one rule for what a query sees (see `visible`), so packing, padding and decoding need no other mask.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from telamon.kernels.matmul import product, product_t, settled, transposed

_BLOCK = 128
"""Queries a block: on CPUs of today a block's scores stay in the second-level cache."""

_SPANS = 8
"""Spans of blocks, each compared with the keys up to its end: with 8, causal attention computes 9/16 of all pairs (1/2 is needed)."""

_HIDDEN = -1e30
"""Score of a key that is not seen; finite, so that a query without any visible key stays free of NaN."""


class Places(NamedTuple):
    """Where tokens are: position within the document, and document within the row (0 for padding), [B, length] each."""

    positions: jax.Array
    segments: jax.Array

    def cut(self, stop: int) -> "Places":
        """The first `stop` places."""
        return Places(self.positions[:, :stop], self.segments[:, :stop])


@dataclass(frozen=True)
class Scores:
    """How the product of a query and a key becomes a score, and which keys are left out by distance."""

    scale: float
    """Factor on the product."""
    softcap: float | None = None
    """Scaled products x become softcap * tanh(x / softcap) (Gemma team 2024, section 2)."""
    window: int | None = None
    """Keys seen at most, the query's own included: those at positions above the query's minus this."""

    def of(self, products: jax.Array) -> jax.Array:
        """Scores of products."""
        scaled = products * self.scale
        return scaled if self.softcap is None else self.softcap * jnp.tanh(scaled / self.softcap)

    def gradient(self, d_scores: jax.Array, scores: jax.Array) -> jax.Array:
        """The products' gradient from that of their scores."""
        if self.softcap is not None:
            d_scores = d_scores * (1.0 - jnp.square(scores / self.softcap))
        return d_scores * self.scale


def visible(queries: Places, keys: Places, window: int | None = None) -> jax.Array:
    """Which keys each query sees, [B, T, S]: those of its own segment, real (segment > 0), not later, and within the window."""
    same = queries.segments[:, :, None] == keys.segments[:, None, :]
    real = (keys.segments > 0)[:, None, :]
    behind = queries.positions[:, :, None] - keys.positions[:, None, :]
    seen = same & real & (behind >= 0)
    return seen if window is None else seen & (behind < window)


def reference_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, *, scores: Scores) -> jax.Array:
    """Softmax attention written out (Vaswani et al. 2017, eq. 1), with softmax in float32.

    Args:
        q: queries [B, T, N, H]. Query head n reads kv head n // G, with G = N / K.
        k: keys [B, S, K, H].
        v: values [B, S, K, H].
        mask: what each query sees [B, T, S]; a query that sees nothing gets zeros.
        scores: how products become scores; its window is not applied here, but by the mask.

    Returns:
        [B, T, N, H] in the type of `v`.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    q_BTKGH = q.reshape(B, T, K, N // K, H)
    scores_BKGTS = scores.of(jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k, preferred_element_type=jnp.float32))
    seen = mask[:, None, None, :, :]
    weights_BKGTS = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores_BKGTS, _HIDDEN), axis=-1), 0.0)
    out_BTKGH = jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS.astype(v.dtype), v)
    return out_BTKGH.reshape(B, T, N, H)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, queries: Places, keys: Places, scores: Scores, aligned: bool) -> jax.Array:
    """Attention by blocks of queries; a block's scores are made, used and, for the gradient, made again.

    Memory for scores is B N 128 S instead of B N T S. What the gradient needs is the log-normaliser of each query alone, as
    in FlashAttention (Dao et al. 2022, section 3.1), here with whole rows of keys.

    Args:
        q, k, v: as in `reference_attention`.
        scores: how products become scores, and the window.
        queries, keys: where the queries [B, T] and the keys [B, S] are.
        aligned: keys are the queries' own tokens in the same order, so that no query sees a later index.

    Returns:
        [B, T, N, H] in the type of `v`.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    q_BKGTH = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    k_BKSH, v_BKSH = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    out_BKGTH = _blocked(scores, aligned, q_BKGTH, k_BKSH, v_BKSH, queries, keys)
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


class _Span(NamedTuple):
    """Blocks of queries that share the keys they are compared with."""

    start: int
    stop: int
    keys: int


def _spans(T: int, S: int, aligned: bool) -> tuple[int, list[_Span]]:
    """Queries a block, and the spans, in queries; the last may run past T by less than a block."""
    blocks = -(-T // _BLOCK)
    size = -(-T // blocks)
    edges = sorted({round(i * blocks / min(_SPANS, blocks)) * size for i in range(min(_SPANS, blocks) + 1)})
    return size, [_Span(start, stop, min(stop, S) if aligned else S) for start, stop in itertools.pairwise(edges)]


def _by_block(x: jax.Array, axis: int, span: _Span, size: int) -> jax.Array:
    """A span of queries along `axis`, as [blocks, ..., size, ...]."""
    part = jax.lax.slice_in_dim(x, span.start, span.stop, axis=axis)
    shape = (*x.shape[:axis], (span.stop - span.start) // size, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(part.reshape(shape), axis, 0)


def _joined(spans: list[jax.Array], axis: int, T: int) -> jax.Array:
    """The inverse of `_by_block` over all spans, cut to T queries."""
    whole = jnp.moveaxis(jnp.concatenate(spans, axis=0), 0, axis)
    shape = (*whole.shape[:axis], whole.shape[axis] * whole.shape[axis + 1], *whole.shape[axis + 2 :])
    return jax.lax.slice_in_dim(whole.reshape(shape), 0, T, axis=axis)


def _padded(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Zeros behind `axis` up to `length`: queries of segment 0, which see nothing."""
    return jnp.pad(x, [(0, length - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _blocked(scores: Scores, aligned: bool, q, k, v, queries: Places, keys: Places):
    return _forward(scores, aligned, q, k, v, queries, keys)[0]


def _forward(scores: Scores, aligned: bool, q, k, v, queries: Places, keys: Places):
    """Output [B, K, G, T, H], and for the gradient each query's log-normaliser [B, K, G, T]."""
    T = q.shape[3]
    size, spans = _spans(T, k.shape[2], aligned)
    padded_q, padded_queries = _padded(q, 3, spans[-1].stop), Places(*(_padded(x, 1, spans[-1].stop) for x in queries))
    outs, norms = [], []
    for span in spans:
        seen_keys = (k[:, :, : span.keys], v[:, :, : span.keys], keys.cut(span.keys))
        blocks = _by_block(padded_q, 3, span, size), Places(*(_by_block(x, 1, span, size) for x in padded_queries))
        out, norm = jax.lax.map(lambda block, seen=seen_keys: _block_forward(scores, *block, *seen), blocks)
        outs.append(out)
        norms.append(norm)
    out, norm = _joined(outs, 3, T), _joined(norms, 3, T)
    return out, (q, k, v, queries, keys, out, norm)


def _block_forward(rule: Scores, q, queries: Places, k, v, keys: Places):
    """Output [B, K, G, C, H] and log-normalisers [B, K, G, C] of a block of C queries."""
    B, K, G, C, H = q.shape
    S = k.shape[2]
    seen_BCS = visible(queries, keys, rule.window)
    # The heads of a group read the same keys: their queries are rows of one product.
    scores = rule.of(product_t(q.reshape(B, K, G * C, H), k, jnp.float32)).reshape(B, K, G, C, S)
    scores = jnp.where(seen_BCS[:, None, None], scores, _HIDDEN)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = product(weights.astype(v.dtype).reshape(B, K, G * C, S), v, jnp.float32).reshape(B, K, G, C, H)
    some = jnp.any(seen_BCS, axis=-1)[:, None, None, :, None]
    # An infinite normaliser makes every weight of a query that sees nothing 0 in the gradient too.
    norm = jnp.where(some, top + jnp.log(total), -_HIDDEN)[..., 0]
    return jnp.where(some, out / total, 0.0).astype(v.dtype), norm


def _backward(scores: Scores, aligned: bool, residuals, d_out):
    q, k, v, queries, keys, out, norm = residuals
    T = q.shape[3]
    size, spans = _spans(T, k.shape[2], aligned)
    # Sum over keys of weight times its gradient, from the output alone (Dao et al. 2022, appendix B.2).
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    padded = [_padded(x, 3, spans[-1].stop) for x in (q, d_out, norm, delta)]
    padded_queries = Places(*(_padded(x, 1, spans[-1].stop) for x in queries))
    k_BKHS = transposed(k)
    d_q, d_k, d_v = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for span in spans:
        seen_keys = (k[:, :, : span.keys], k_BKHS[..., : span.keys], v[:, :, : span.keys], keys.cut(span.keys))
        by_block = [_by_block(x, 3, span, size) for x in padded]
        blocks = *by_block, Places(*(_by_block(x, 1, span, size) for x in padded_queries))

        def add(totals, block, seen=seen_keys):
            d_q_block, d_k_block, d_v_block = _block_backward(scores, *block, *seen)
            return (totals[0] + d_k_block, totals[1] + d_v_block), d_q_block

        totals = d_k[:, :, : span.keys], d_v[:, :, : span.keys]
        totals, d_q_span = jax.lax.scan(add, totals, blocks)
        d_k, d_v = d_k.at[:, :, : span.keys].set(totals[0]), d_v.at[:, :, : span.keys].set(totals[1])
        d_q.append(d_q_span)
    return _joined(d_q, 3, T), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


def _block_backward(rule: Scores, q, d_out, norm, delta, queries: Places, k, k_BKHS, v, keys: Places):
    """Gradients of a block of C queries and of their keys and values, the latter in float32.

    Scores are made again in transposed order, [S, G C], in which each product contracts a last dimension.
    """
    B, K, G, C, H = q.shape
    S = k.shape[2]
    q_rows, d_rows = q.reshape(B, K, G * C, H), d_out.reshape(B, K, G * C, H)
    norm_rows, delta_rows = norm.reshape(B, K, 1, G * C), delta.reshape(B, K, 1, G * C)
    seen_BSC = jnp.swapaxes(visible(queries, keys, rule.window), 1, 2)
    seen = jnp.broadcast_to(seen_BSC[:, None, :, None], (B, 1, S, G, C)).reshape(B, 1, S, G * C)
    scores = rule.of(product_t(k, q_rows, jnp.float32))
    weights = jnp.exp(jnp.where(seen, scores, _HIDDEN) - norm_rows)
    d_weights = product_t(v, d_rows, jnp.float32)
    d_products = rule.gradient(weights * (d_weights - delta_rows), scores).astype(q.dtype)
    d_q = jnp.swapaxes(settled(product(k_BKHS, d_products)), 2, 3).reshape(B, K, G, C, H)
    return d_q, product(d_products, q_rows, jnp.float32), product(weights.astype(q.dtype), d_rows, jnp.float32)


_blocked.defvjp(_forward, _backward)
