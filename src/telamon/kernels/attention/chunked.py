"""Attention by blocks of queries in plain XLA: for any device, with memory linear in the sequence."""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from telamon.kernels.attention.rule import HIDDEN, Places, Request, Scores, visible
from telamon.kernels.matmul import product, product_t, settled, transposed
from telamon.parallel.target import target


class _Grain(NamedTuple):
    """How finely the work is cut on a kind of device."""

    block: int
    """Queries a block."""
    spans: int
    """Spans of blocks, each compared with the keys up to its end: with n, causal attention computes (n + 1) / 2n of all pairs."""


_CPU = _Grain(block=128, spans=8)
"""On CPUs of today the scores of 128 queries stay in the second-level cache; 9/16 of all pairs are computed."""

_ACCELERATOR = _Grain(block=256, spans=2)
"""Products as large as matrix units like, and scores that still fit beside a model: 256 MiB for a row of 8192 tokens and 32 heads.

Other paths serve most requests there, so few spans do: libtpu takes as long for each of them as for the first (at T 4096, both
passes: 7 seconds of a CPU's time for one span, 13 for two, 26 for four).
"""


def refusal(request: Request) -> str | None:
    """Why a request cannot be served: never; other paths fall back on this one."""
    del request
    return None


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

    A block's scores are held instead of all: memory is linear in the sequence. What the gradient needs is the log-normaliser
    of each query alone, as in FlashAttention (Dao et al. 2022, section 3.1), here with whole rows of keys. Arguments as of
    `telamon.kernels.attention.attention`.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    q_BKGTH = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    k_BKSH, v_BKSH = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    sinks_KG = None if sinks is None else sinks.astype(jnp.float32).reshape(K, N // K)
    layout = _layout(T, k.shape[1], _CPU if target().platform == "cpu" else _ACCELERATOR, aligned=aligned, reach=scores.reach)
    out_BKGTH = _blocked(scores, layout, q_BKGTH, k_BKSH, v_BKSH, sinks_KG, queries, keys)
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, v.shape[3])


class _Span(NamedTuple):
    """Blocks of queries that are compared with equally many keys."""

    start: int
    stop: int
    keys: int
    slides: bool
    """A block's keys are those that end where the block ends; else the row's first."""

    def first_keys(self, size: int, S: int) -> jax.Array:
        """Index of the first key for each block of `size` queries, of S keys in all."""
        ends = jnp.arange(self.start, self.stop, size) + size
        return jnp.clip(ends - self.keys, 0, S - self.keys if self.slides else 0)

    def of_block(self, x: jax.Array, axis: int, first: jax.Array) -> jax.Array:
        """A block's part of what the span reads of keys."""
        return jax.lax.dynamic_slice_in_dim(x, first, self.keys, axis=axis) if self.slides else x

    def of_row(self, x: jax.Array, axis: int) -> jax.Array:
        """What the span reads of keys."""
        return x if self.slides else jax.lax.slice_in_dim(x, 0, self.keys, axis=axis)

    def added(self, total: jax.Array, part: jax.Array, first: jax.Array) -> jax.Array:
        """Sums over all keys with those of a block added, along the keys' axis 2."""
        if not self.slides:
            return total + part
        return jax.lax.dynamic_update_slice_in_dim(total, self.of_block(total, 2, first) + part, first, axis=2)


class _Layout(NamedTuple):
    """How a row of queries is cut."""

    size: int
    """Queries a block."""
    spans: tuple[_Span, ...]

    @property
    def length(self) -> int:
        """Queries in all; more than there are by less than a block."""
        return self.spans[-1].stop


def _layout(T: int, S: int, grain: _Grain, *, aligned: bool, reach: int | None) -> _Layout:
    """The cut that computes the fewest pairs for T queries and S keys."""
    blocks = -(-T // grain.block)
    size = -(-T // blocks)
    count = min(grain.spans, blocks)
    edges = sorted({round(i * blocks / count) * size for i in range(count + 1)})
    growing = _Layout(size, tuple(_Span(start, stop, min(stop, S) if aligned else S, False) for start, stop in itertools.pairwise(edges)))
    if not aligned or reach is None:
        return growing
    # The block's last query is the size-th, and its first one reaches back over reach - 1 keys; whole blocks start at whole blocks.
    sliding = _Layout(size, (_Span(0, blocks * size, min(S, (1 + -(-(reach - 1) // size)) * size), True),))
    return min(growing, sliding, key=lambda layout: sum((span.stop - span.start) * span.keys for span in layout.spans))


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
def _blocked(scores: Scores, layout: _Layout, q, k, v, sinks, queries: Places, keys: Places):
    return _forward(scores, layout, q, k, v, sinks, queries, keys)[0]


def _forward(scores: Scores, layout: _Layout, q, k, v, sinks, queries: Places, keys: Places):
    """Output [B, K, G, T, H], and for the gradient each query's log-normaliser [B, K, G, T]."""
    T, size = q.shape[3], layout.size
    padded_q, padded_queries = _padded(q, 3, layout.length), Places(*(_padded(x, 1, layout.length) for x in queries))
    outs, norms = [], []
    for span in layout.spans:
        of_row = span.of_row(k, 2), span.of_row(v, 2), *(span.of_row(x, 1) for x in keys)

        def block(x, span=span, of_row=of_row):
            q_block, first, *places = x
            k_block, v_block, *key_places = (span.of_block(y, axis, first) for y, axis in zip(of_row, (2, 2, 1, 1), strict=True))
            return _block_forward(scores, q_block, Places(*places), k_block, v_block, sinks, Places(*key_places))

        blocks = (
            _by_block(padded_q, 3, span, size),
            span.first_keys(size, k.shape[2]),
            *(_by_block(x, 1, span, size) for x in padded_queries),
        )
        out, norm = jax.lax.map(block, blocks)
        outs.append(out)
        norms.append(norm)
    out, norm = _joined(outs, 3, T), _joined(norms, 3, T)
    return out, (q, k, v, sinks, queries, keys, out, norm)


def _block_forward(rule: Scores, q, queries: Places, k, v, sinks, keys: Places):
    """Output [B, K, G, C, H] and log-normalisers [B, K, G, C] of a block of C queries."""
    B, K, G, C, H = q.shape
    S = k.shape[2]
    seen_BCS = visible(queries, keys, rule.window, rule.chunk)
    # The heads of a group read the same keys: their queries are rows of one product.
    scores = rule.of(product_t(q.reshape(B, K, G * C, H), k, jnp.float32)).reshape(B, K, G, C, S)
    scores = jnp.where(seen_BCS[:, None, None], scores, HIDDEN)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        top = jnp.maximum(top, sinks[:, :, None, None])
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks[:, :, None, None] - top)
    out = product(weights.astype(v.dtype).reshape(B, K, G * C, S), v, jnp.float32).reshape(B, K, G, C, v.shape[3])
    some = jnp.any(seen_BCS, axis=-1)[:, None, None, :, None]
    # An infinite normaliser makes every weight of a query that sees nothing 0 in the gradient too.
    norm = jnp.where(some, top + jnp.log(total), -HIDDEN)[..., 0]
    return jnp.where(some, out / total, 0.0).astype(v.dtype), norm


def _backward(scores: Scores, layout: _Layout, residuals, d_out):
    q, k, v, sinks, queries, keys, out, norm = residuals
    T, size = q.shape[3], layout.size
    # Sum over keys of weight times its gradient, from the output alone (Dao et al. 2022, appendix B.2).
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    padded = [_padded(x, 3, layout.length) for x in (q, d_out, norm, delta)]
    padded_queries = [_padded(x, 1, layout.length) for x in queries]
    k_BKHS = transposed(k)
    d_q, d_k, d_v = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for span in layout.spans:
        of_row = span.of_row(k, 2), span.of_row(k_BKHS, 3), span.of_row(v, 2), *(span.of_row(x, 1) for x in keys)

        def add(totals, x, span=span, of_row=of_row):
            first, q_block, d_block, norm_block, delta_block, *places = x
            k_block, kt_block, v_block, *key_places = (
                span.of_block(y, axis, first) for y, axis in zip(of_row, (2, 3, 2, 1, 1), strict=True)
            )
            of_queries = q_block, d_block, norm_block, delta_block, Places(*places)
            d_q_block, *d_keys = _block_backward(scores, *of_queries, k_block, kt_block, v_block, Places(*key_places))
            return tuple(span.added(total, part, first) for total, part in zip(totals, d_keys, strict=True)), d_q_block

        blocks = [_by_block(x, 3, span, size) for x in padded] + [_by_block(x, 1, span, size) for x in padded_queries]
        totals = span.of_row(d_k, 2), span.of_row(d_v, 2)
        totals, d_q_span = jax.lax.scan(add, totals, (span.first_keys(size, k.shape[2]), *blocks))
        d_k, d_v = (jax.lax.dynamic_update_slice_in_dim(d, total, 0, axis=2) for d, total in zip((d_k, d_v), totals, strict=True))
        d_q.append(d_q_span)
    # A sink's value is zero, so its weight alone counts: d_sink = weight * (0 - delta).
    d_sinks = None if sinks is None else -jnp.sum(jnp.exp(sinks[:, :, None] - norm) * delta, axis=(0, 3))
    return _joined(d_q, 3, T), d_k.astype(k.dtype), d_v.astype(v.dtype), d_sinks, None, None


def _block_backward(rule: Scores, q, d_out, norm, delta, queries: Places, k, k_BKHS, v, keys: Places):
    """Gradients of a block of C queries and of their keys and values, the latter in float32.

    Scores are made again in transposed order, [S, G C], in which each product contracts a last dimension.
    """
    B, K, G, C, H = q.shape
    S = k.shape[2]
    q_rows, d_rows = q.reshape(B, K, G * C, H), d_out.reshape(B, K, G * C, v.shape[3])
    norm_rows, delta_rows = norm.reshape(B, K, 1, G * C), delta.reshape(B, K, 1, G * C)
    seen_BSC = jnp.swapaxes(visible(queries, keys, rule.window, rule.chunk), 1, 2)
    seen = jnp.broadcast_to(seen_BSC[:, None, :, None], (B, 1, S, G, C)).reshape(B, 1, S, G * C)
    scores = rule.of(product_t(k, q_rows, jnp.float32))
    weights = jnp.exp(jnp.where(seen, scores, HIDDEN) - norm_rows)
    d_weights = product_t(v, d_rows, jnp.float32)
    d_products = rule.gradient(weights * (d_weights - delta_rows), scores).astype(q.dtype)
    d_q = jnp.swapaxes(settled(product(k_BKHS, d_products)), 2, 3).reshape(B, K, G, C, H)
    return d_q, product(d_products, q_rows, jnp.float32), product(weights.astype(q.dtype), d_rows, jnp.float32)


_blocked.defvjp(_forward, _backward)
