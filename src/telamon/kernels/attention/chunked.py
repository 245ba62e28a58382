"""Attention by blocks of queries in plain XLA: for any device, with memory linear in the sequence."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from telamon.kernels.attention.rule import HIDDEN, Places, Request, Scores, visible
from telamon.kernels.matmul import product, product_t, settled, transposed

_BLOCK = 128
"""Queries a block: on CPUs of today a block's scores stay in the second-level cache."""

_SPANS = 8
"""Spans of blocks, each compared with the keys up to its end: with 8, causal attention computes 9/16 of all pairs (1/2 is needed)."""


def refusal(request: Request) -> str | None:
    """Why a request cannot be served; None: it can."""
    if request.sinks:
        return "it has no sinks"
    return "it has no chunks of positions" if request.scores.chunk is not None else None


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
) -> jax.Array:
    """Attention by blocks of queries; a block's scores are made, used and, for the gradient, made again.

    Memory for scores is B N 128 S instead of B N T S. What the gradient needs is the log-normaliser of each query alone, as
    in FlashAttention (Dao et al. 2022, section 3.1), here with whole rows of keys. Arguments as of
    `telamon.kernels.attention.attention`.
    """
    assert sinks is None, "see refusal"
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
    scores = jnp.where(seen_BCS[:, None, None], scores, HIDDEN)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = product(weights.astype(v.dtype).reshape(B, K, G * C, S), v, jnp.float32).reshape(B, K, G, C, H)
    some = jnp.any(seen_BCS, axis=-1)[:, None, None, :, None]
    # An infinite normaliser makes every weight of a query that sees nothing 0 in the gradient too.
    norm = jnp.where(some, top + jnp.log(total), -HIDDEN)[..., 0]
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
    weights = jnp.exp(jnp.where(seen, scores, HIDDEN) - norm_rows)
    d_weights = product_t(v, d_rows, jnp.float32)
    d_products = rule.gradient(weights * (d_weights - delta_rows), scores).astype(q.dtype)
    d_q = jnp.swapaxes(settled(product(k_BKHS, d_products)), 2, 3).reshape(B, K, G, C, H)
    return d_q, product(d_products, q_rows, jnp.float32), product(weights.astype(q.dtype), d_rows, jnp.float32)


_blocked.defvjp(_forward, _backward)
