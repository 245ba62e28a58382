"""Tokens sorted by the expert they go to, and back. Both ways, and both gradients, are gathers: nothing is added in an order that varies."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class By(NamedTuple):
    """M tokens with X choices each as R = M * X rows sorted by expert; those of nobody stand last."""

    order: jax.Array
    """Choice of each row [R]: choice r is the token r // X's r % X-th."""
    inverse: jax.Array
    """Row of each choice [R]."""
    experts: jax.Array
    """Expert of each row [R], rising; E for nobody."""
    sizes: jax.Array
    """Rows of each expert [E], int32."""


def by_expert(experts_MX: jax.Array, n_experts: int) -> By:
    """Sort choices [M, X] by expert; those of one expert keep their order."""
    flat_R = experts_MX.reshape(-1)
    order_R = jnp.argsort(flat_R, stable=True)
    sizes_E = jnp.sum(flat_R[:, None] == jnp.arange(n_experts), axis=0, dtype=jnp.int32)
    return By(order_R, jnp.argsort(order_R), flat_R[order_R], sizes_E)


def dispatch(x_MD: jax.Array, by: By) -> jax.Array:
    """[M, D] -> the row of each choice [R, D]."""
    return _dispatched(x_MD, by, len(by.order) // len(x_MD))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dispatched(x_MD: jax.Array, by: By, X: int) -> jax.Array:
    return x_MD[by.order // X]


def _dispatch_forward(x_MD: jax.Array, by: By, X: int) -> tuple[jax.Array, By]:
    return _dispatched(x_MD, by, X), by


def _dispatch_backward(X: int, by: By, d_RD: jax.Array) -> tuple[jax.Array, None]:
    d_MXD = d_RD[by.inverse].reshape(-1, X, d_RD.shape[-1])
    return jnp.sum(d_MXD.astype(jnp.float32), axis=1).astype(d_RD.dtype), None


_dispatched.defvjp(_dispatch_forward, _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def collect(rows_RD: jax.Array, by: By, X: int) -> jax.Array:
    """[R, D] -> the rows of each token's X choices [M, X, D]."""
    return rows_RD[by.inverse].reshape(-1, X, rows_RD.shape[-1])


def _collect_forward(rows_RD: jax.Array, by: By, X: int) -> tuple[jax.Array, By]:
    return collect(rows_RD, by, X), by


def _collect_backward(X: int, by: By, d_MXD: jax.Array) -> tuple[jax.Array, None]:
    return d_MXD.reshape(-1, d_MXD.shape[-1])[by.order], None


collect.defvjp(_collect_forward, _collect_backward)
