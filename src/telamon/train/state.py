"""The training state: one explicit pytree, made sharded."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from telamon.models.weights import Model, Weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes, and that a checkpoint holds."""

    step: jax.Array
    """Optimizer steps done, int32 scalar."""
    weights: Weights
    """Float32 master weights."""
    optimizer: optax.OptState
    """Moments and counts."""
    key: jax.Array
    """Random key of the run; a step folds its number in, so that it needs no writing back."""


def fresh_state(model: Model, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """State before the first step: a pure function of the seed (call under jit, see `Job.fresh_state`)."""
    weights_key, run_key = jax.random.split(jax.random.key(seed))
    weights = model.init(weights_key)
    return TrainState(step=jnp.zeros((), jnp.int32), weights=weights, optimizer=optimizer.init(weights), key=run_key)


HOST = "pinned_host"
"""The kind of memory of a host that its devices read and write by themselves."""


def abstract_state(model: Model, optimizer: optax.GradientTransformation, mesh: Mesh, *, offload: bool = False) -> TrainState:
    """Shapes, types and shardings of the state; allocates nothing.

    Moments are cut as their weights are, and live beside them or, with `offload`, in the host's memory; the rest (counts) is on every
    device.
    """
    shapes = jax.eval_shape(lambda: fresh_state(model, optimizer, 0))
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = model.shardings(mesh)

    def place(leaf: Any, sharding: NamedSharding = everywhere) -> Any:
        if isinstance(leaf, optax.MaskedNode):  # this moment belongs to another rule's weights
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    homes = jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST), shardings) if offload else shardings
    moments = optax.tree_utils.tree_map_params(optimizer, place, shapes.optimizer, homes, transform_non_params=place, is_leaf=_masked)
    return TrainState(
        step=place(shapes.step),
        weights=jax.tree.map(place, shapes.weights, shardings),
        optimizer=moments,
        key=place(shapes.key),
    )


def shardings_of(abstract: Any) -> Any:
    """The shardings of a tree of abstract arrays."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def weights_hash(weights: Weights, mesh: Mesh) -> str:
    """A checksum of the weights' bits, 8 hex digits: the same on any mesh and any number of processes.

    Sums of unsigned integers wrap and so do not depend on their order, unlike sums of floats; each bit pattern is
    multiplied by an odd number made from its place, so that moved values are noticed.
    """

    def leaf_sum(number: int, leaf: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
        places = jnp.zeros(leaf.shape, jnp.uint32)
        for dim, size in enumerate(leaf.shape):
            places = places * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, dim)
        return jnp.sum(bits * (places * jnp.uint32(2654435762) + jnp.uint32(2 * number + 1)), dtype=jnp.uint32)

    def total(weights: Weights) -> jax.Array:
        return sum((leaf_sum(i, leaf) for i, leaf in enumerate(jax.tree.leaves(weights))), jnp.uint32(0))

    with jax.set_mesh(mesh):
        return f"{int(jax.jit(total)(weights)):08x}"
