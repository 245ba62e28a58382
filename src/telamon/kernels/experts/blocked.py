"""Grouped matmul by blocks of rows in plain XLA, for any device: the work is that of the rows there are, plus parts of blocks.

A loop over experts holds loops over the blocks of one expert's rows. Rows stay where they are: a block that reaches into the next
expert's rows computes them in vain and does not write them. So nothing is padded, and how far experts are out of balance changes
how many blocks there are and nothing else.
"""

import functools

import jax
import jax.numpy as jnp

from telamon.kernels import matmul
from telamon.kernels.experts.rule import Request

_PRODUCT = (256, 64)
"""Rows that are multiplied at one time, those of whole blocks first. On CPUs of today 256 are as fast as thousands, and 64 nearly so."""


def refusal(request: Request) -> str | None:
    """Why a request cannot be served: never; other paths fall back on this one."""
    del request
    return None


def product(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """x [M, K] times w [E, K, N], or the transposes of w [E, N, K] -> [M, N] in the type of x."""
    M, N = x.shape[0], w.shape[1 if transposed else 2]
    multiply = matmul.product_t if transposed else matmul.product
    blocks = [block for block in _PRODUCT if block <= M] or [M]
    starts = jnp.cumsum(sizes) - sizes

    def expert(e: jax.Array, out: jax.Array) -> jax.Array:
        w_e, end = w[e].astype(x.dtype), starts[e] + sizes[e]

        def rows(block: int, start: jax.Array, out: jax.Array) -> jax.Array:
            first, own = _place(start, end, M, block)
            made = jnp.where(own, multiply(_rows(x, first, block), w_e), _rows(out, first, block))
            return jax.lax.dynamic_update_slice_in_dim(out, made, first, 0)

        start = starts[e]
        for block in blocks:
            # A rest that nearly fills a block is cheaper as one than as several small ones.
            count = (end - start + (block - 1 if block == blocks[-1] else block // 8)) // block
            out = jax.lax.fori_loop(0, count, lambda i, out, block=block, start=start: rows(block, start + i * block, out), out)
            start = jnp.minimum(start + count * block, end)
        return out

    return jax.lax.fori_loop(0, sizes.shape[0], expert, jnp.zeros((M, N), x.dtype))


def weight_gradient(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    """xᵀ dy over the rows of each expert, for x [M, K] and dy [M, N]: [E, K, N] in float32."""
    M, E = x.shape[0], sizes.shape[0]
    x_t, starts = matmul.transposed(x), jnp.cumsum(sizes) - sizes
    blocks = _near_mean(M, E)
    largest = blocks[-1]

    def part(block: int, start: jax.Array, end: jax.Array) -> jax.Array:
        """xᵀ dy over the rows from `start` that are before `end`, at most `block`."""
        first, own = _place(start, end, M, block)
        x_e = jnp.where(own.T, jax.lax.dynamic_slice_in_dim(x_t, first, block, 1), 0)
        return matmul.product(x_e, jnp.where(own, _rows(dy, first, block), 0), jnp.float32)

    def expert(e: jax.Array, total: jax.Array) -> jax.Array:
        start, end = starts[e], starts[e] + sizes[e]
        # One product, whose result is not added to anything, holds all rows of an expert with a usual load.
        more = jnp.maximum(sizes[e] - 1, 0) // largest
        rest = start + more * largest
        which = jnp.sum(end - rest > jnp.array(blocks[:-1], jnp.int32), dtype=jnp.int32)
        total = total.at[e].set(jax.lax.switch(which, [functools.partial(part, block) for block in blocks], rest, end))
        return jax.lax.fori_loop(0, more, lambda i, total: total.at[e].add(part(largest, start + i * largest, rest)), total)

    return jax.lax.fori_loop(0, E, expert, jnp.zeros((E, x.shape[1], dy.shape[1]), jnp.float32))


def _near_mean(M: int, E: int) -> list[int]:
    """Sizes of blocks around the rows that an expert has on average: most loads are within an eighth of it."""
    return sorted({min(M, max(64, -(-int(share * M / E) // 64) * 64)) for share in (1 / 4, 5 / 8, 9 / 8)})


def _rows(x: jax.Array, first: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, first, block, 0)


def _place(start: jax.Array, end: jax.Array, M: int, block: int) -> tuple[jax.Array, jax.Array]:
    """The first row of a block that holds those from `start`, moved back where it would pass the last row, and which rows are meant [block, 1]."""
    first = jnp.minimum(start, M - block)
    rows = first + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0)
    return first, (rows >= start) & (rows < end)
