"""The product of activations and a float32 weight, and its gradients, in the forms that compilers run fast.

XLA on CPU gives a product to its fast library (bfloat16 at twice the rate of float32) only when the left operand
contracts its last dimension. The gradient of a weight, `xᵀ dy`, contracts the first; left to itself it is turned into
float32 and runs at a third of the speed. So the smaller operand is copied into transposed order first: a copy costs a
percent of the product. Elsewhere the compiler's own choice stands.
"""

import functools
import math

import jax
import jax.numpy as jnp

from telamon.parallel.target import target


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: jax.Array, w: jax.Array, summed: int = 1) -> jax.Array:
    """x [..., K] in the compute type times w [K, ...] in float32 -> [..., ...] in the compute type; K may be `summed` dims.

    The weight's gradient leaves the product in float32: it is never rounded to the compute type. Operands come in the shape
    that they have elsewhere and are flattened in here, so that what the gradient needs is kept once: reshaped outside,
    the same activations would be kept again for each of the maps that read them, and weights beside themselves.
    """
    return _value(x, w, summed)


def product(x: jax.Array, y: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """x [..., M, K] times y [..., K, N] with equal leading dims, summed in float32, as `dtype` (default that of x)."""
    return _dot(x, y, y.ndim - 2, dtype)


def product_t(x: jax.Array, y: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """x [..., M, K] times the transpose of y [..., N, K]."""
    return _dot(x, y, y.ndim - 1, dtype)


def transposed(x: jax.Array) -> jax.Array:
    """[..., M, K] -> [..., K, M]; on a CPU in memory too, so that a product reads it as a left operand."""
    return jax.lax.platform_dependent(x, cpu=_transposed_copy, default=lambda x: jnp.swapaxes(x, -1, -2))


def settled(x: jax.Array) -> jax.Array:
    """x as it is, finished before what follows: on a CPU a transpose after a product must not be folded into it.

    Folded, it would make the product's result column-major, which the fast library does not write.
    """
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def narrow(x: jax.Array) -> jax.Array:
    """x as it is, in memory in its own type: XLA on TPU would write a product's result in the wider type of what reads it, at twice the size."""
    return jax.lax.optimization_barrier(x) if target().platform == "tpu" else x


def weight_gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
    """xᵀ dy in float32, for x [M, K] and dy [M, N]: [K, N]."""
    if x.shape[1] <= dy.shape[1]:
        return product(transposed(x), dy, jnp.float32)
    return settled(product(transposed(dy), x, jnp.float32)).T


def _dot(x: jax.Array, y: jax.Array, contracted: int, dtype: jax.typing.DTypeLike | None) -> jax.Array:
    batch = tuple(range(x.ndim - 2))
    dims = (((x.ndim - 1,), (contracted,)), (batch, batch))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.dtype(dtype or x.dtype))


def _transposed_copy(x: jax.Array) -> jax.Array:
    # The barrier alone would keep the old order in memory and only relabel it; through a reshape it cannot.
    *batch, m, k = x.shape
    return jax.lax.optimization_barrier(jnp.swapaxes(x, -1, -2).reshape(*batch, k, 1, m)).reshape(*batch, k, m)


def _flat(x: jax.Array, w: jax.Array, summed: int) -> tuple[jax.Array, jax.Array]:
    """x as [M, K], w as [K, N]."""
    K = math.prod(w.shape[:summed])
    return x.reshape(-1, K), w.reshape(K, -1)


def _value(x: jax.Array, w: jax.Array, summed: int) -> jax.Array:
    rows, matrix = _flat(x, w, summed)
    return product(rows, matrix.astype(x.dtype)).reshape(*x.shape[: x.ndim - summed], *w.shape[summed:])


def _forward(x: jax.Array, w: jax.Array, summed: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Not `matmul` itself: a policy that saves products would not see one inside a call with a gradient of its own.
    return _value(x, w, summed), (x, w)


def _backward(summed: int, residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    rows, matrix = _flat(x, w, summed)
    dy = dy.reshape(rows.shape[0], matrix.shape[1])
    return product_t(dy, matrix.astype(dy.dtype)).reshape(x.shape), weight_gradient(rows, dy).reshape(w.shape)


matmul.defvjp(_forward, _backward)
