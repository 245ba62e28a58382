"""Grouped matmul as `jax.lax.ragged_dot`, the operation that XLA has for it.

What a compiler makes of it differs. Those of today (jaxlib 0.12 for CPUs, libtpu 0.0.52, XLA for H100) multiply all rows with
every expert's matrix and mask, E times the work. It stands here as the plainest statement of what is computed.
"""

import jax
import jax.numpy as jnp

from telamon.kernels.experts.rule import Request, own_rows

_ROWS_SHARED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
"""Both operands have the rows of experts, which are summed over: a matrix for each expert."""


def refusal(request: Request) -> str | None:
    """Why a request cannot be served: never."""
    del request
    return None


def product(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """x [M, K] times w [E, K, N], or the transposes of w [E, N, K] -> [M, N] in the type of x."""
    w = w.astype(x.dtype)
    out = jax.lax.ragged_dot(x, jnp.swapaxes(w, 1, 2) if transposed else w, sizes, preferred_element_type=jnp.float32)
    return own_rows(out.astype(x.dtype), sizes)  # JAX does not say what rows of no group get


def weight_gradient(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    """xᵀ dy over the rows of each expert, for x [M, K] and dy [M, N]: [E, K, N] in float32."""
    return jax.lax.ragged_dot_general(x, dy, sizes, _ROWS_SHARED, preferred_element_type=jnp.float32)
