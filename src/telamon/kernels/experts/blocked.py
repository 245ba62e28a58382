"""Grouped matmul by blocks of rows in plain XLA, for any device: the work is that of the rows there are, plus parts of blocks.

A loop over experts holds a loop over the blocks of one expert's rows. Rows stay where they are: a block that reaches into the
next expert's rows computes them in vain and does not write them. Nothing is padded, and how far experts are out of balance
changes how many blocks there are and nothing else.
"""

import jax
import jax.numpy as jnp

from telamon.kernels import matmul
from telamon.kernels.experts.rule import Request


def refusal(request: Request) -> str | None:
    """Why a request cannot be served: never; other paths fall back on this one."""
    del request
    return None


def product(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """x [M, K] times w [E, K, N], or the transposes of w [E, N, K] -> [M, N] in the type of x."""
    M, N = x.shape[0], w.shape[1 if transposed else 2]
    multiply = matmul.product_t if transposed else matmul.product
    starts = jnp.cumsum(sizes) - sizes
    block = _block(M, 128)

    def expert(e, out):
        start, size = starts[e], sizes[e]
        w_e = w[e].astype(x.dtype)

        def rows(i, out):
            first, own = _place(start + i * block, start + size, M, block)
            done = multiply(_rows(x, first, block), w_e)
            kept = jnp.where(own, done, _rows(out, first, block))
            return jax.lax.dynamic_update_slice_in_dim(out, kept, first, 0)

        return jax.lax.fori_loop(0, _blocks(size, block), rows, out)

    return jax.lax.fori_loop(0, sizes.shape[0], expert, jnp.zeros((M, N), x.dtype))


def weight_gradient(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    """xᵀ dy over the rows of each expert, for x [M, K] and dy [M, N]: [E, K, N] in float32."""
    M, block = x.shape[0], _block(x.shape[0], 512)
    x_t = matmul.transposed(x)
    starts = jnp.cumsum(sizes) - sizes

    def expert(e, total):
        start, size = starts[e], sizes[e]

        def rows(i, total):
            first, own = _place(start + i * block, start + size, M, block)
            x_e = jnp.where(own.T, jax.lax.dynamic_slice_in_dim(x_t, first, block, 1), 0)
            dy_e = jnp.where(own, _rows(dy, first, block), 0)
            return total.at[e].add(matmul.product(x_e, dy_e, jnp.float32))

        return jax.lax.fori_loop(0, _blocks(size, block), rows, total)

    return jax.lax.fori_loop(0, sizes.shape[0], expert, jnp.zeros((sizes.shape[0], x.shape[1], dy.shape[1]), jnp.float32))


def _block(M: int, most: int) -> int:
    """Rows that are multiplied at one time."""
    return min(M, most)


def _blocks(size: jax.Array, block: int) -> jax.Array:
    return (size + block - 1) // block


def _rows(x: jax.Array, first: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, first, block, 0)


def _place(start: jax.Array, end: jax.Array, M: int, block: int) -> tuple[jax.Array, jax.Array]:
    """First row of a block for the rows from `start`, moved back where it would pass the last row, and which of its rows are meant [block, 1]."""
    first = jnp.minimum(start, M - block)
    rows = first + jax.lax.broadcasted_iota(jnp.int32, (block, 1), 0)
    return first, (rows >= start) & (rows < end)
