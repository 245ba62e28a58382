"""The look-up in an embedding table, with a gradient that reaches each device as the part it owns."""

import functools

import jax
import jax.numpy as jnp

from telamon.parallel import local

TABLE_AXES = ("vocab", "embed")
"""Logical axes of a table of embeddings."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(table: jax.Array, ids: jax.Array, dtype: str) -> jax.Array:
    """Rows of a float32 table [V, D] for ids [B, T], as `dtype`: [B, T, D].

    The table's gradient is summed in float32, whatever the type of activations: common tokens add up thousands of terms. On a
    mesh each device sums over its own rows, a block of the table at a time, and a reduction leaves it the part of the block that it owns.
    """
    return _forward(table, ids, dtype)[0]


def _forward(table: jax.Array, ids: jax.Array, dtype: str):
    residuals = (ids, jax.eval_shape(lambda: table))
    shared = local.own_rows(ids.shape[0])
    if shared is None:
        return table[ids].astype(dtype), residuals
    owned = shared.weight(TABLE_AXES, table.shape)

    def own(table, ids):
        return shared.gathered(table.astype(dtype), owned)[ids]

    return shared.call(own, (table, ids), ins=(owned, shared.rows), outs=shared.rows), residuals


def _backward(dtype: str, residuals, d_rows: jax.Array):
    ids, table = residuals
    shared = local.own_rows(ids.shape[0])
    if shared is None:
        return _sum_of_rows(table.shape, ids, d_rows), None
    owned = shared.weight(TABLE_AXES, table.shape)
    V, D = table.shape
    size = local.block_size(V, D * 4, most=local.BLOCK_BYTES) if shared.alone and owned[0] is None else V

    def own(ids, d_rows):
        def block(start):
            there = (ids >= start) & (ids < start + size)
            return shared.scattered(_sum_of_rows((size, D), jnp.where(there, ids - start, size), d_rows), owned)

        return block(0) if size == V else jax.lax.map(block, jnp.arange(0, V, size)).reshape(V, -1)

    return shared.call(own, (ids, d_rows), ins=(shared.rows, shared.rows), outs=owned), None


def _sum_of_rows(shape: tuple[int, ...], ids: jax.Array, d_rows: jax.Array) -> jax.Array:
    """Rows added up by id; an id behind the last counts for nothing."""
    return jnp.zeros(shape, jnp.float32).at[ids].add(d_rows.astype(jnp.float32), mode="drop")


look_up.defvjp(_forward, _backward)
