"""What is asked of a grouped matmul, and where the rows of an expert lie."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from telamon.parallel.target import Target

SAVED = "experts"
"""Name of what a grouped matmul computes forward, for the policies that say what the backward pass may keep."""


@dataclass(frozen=True)
class Request:
    """What is asked of a grouped matmul, for whoever chooses a path. Sizes are those of the arrays at the place of the call."""

    target: Target
    """The device, and the mesh."""
    M: int
    """Rows of all experts."""
    K: int
    """Width of a row."""
    N: int
    """Width of a result."""
    E: int
    dtype: str
    """Type of the rows."""


def own_rows(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """x [M, N] with zeros in the rows of no expert."""
    rows = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return jnp.where(rows < jnp.sum(sizes), x, 0)
