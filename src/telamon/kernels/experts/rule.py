"""What is asked of a grouped matmul, and where the rows of an expert lie."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from telamon.parallel.rules import extent
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
    alone: bool = True
    """The arrays are one device's own: there is one, or the call is inside a `shard_map` over all mesh axes of several."""


def on_one_device() -> bool:
    """Whether arrays at this place of a trace are one device's own; see `Request.alone`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or extent(mesh, tuple(set(mesh.axis_names) - set(mesh.manual_axes))) == 1


def own_rows(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """x [M, N] with zeros in the rows of no expert."""
    rows = jax.lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return jnp.where(rows < jnp.sum(sizes), x, 0)
