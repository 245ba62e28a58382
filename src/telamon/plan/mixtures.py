"""What experts of a mixture take on a mesh, where a device gathers blocks of them and rows travel in turns.

Neither grows with the rows of a batch as other arrays do: both are cut to bounded sizes. So a block of layers is traced without its
experts, which stand in it as one operation; what they hold while they work is read from their own program, traced on abstract arrays
of the sizes that a run has, for the mesh and the devices that it is for. So it is of whatever kernels such devices get.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh

from telamon.config.schema import AXES
from telamon.kernels.experts import SAVED
from telamon.layers.moe import MoE, MoEConfig
from telamon.layers.router import Routing
from telamon.layers.sharded_experts import Kind, on_devices
from telamon.models.decoder import Block
from telamon.models.spec import BlockSpec
from telamon.plan.working_set import ROWS, aside, most, working_set


class ExpertsAside(nnx.Module):
    """Stands for a mixture's experts in a block that is traced: gives, keeps and asks for what they do, and holds no weights."""

    def without_dropping(self, x_BTD: jax.Array, routing: Routing, *, path: str) -> jax.Array:
        """See `telamon.layers.experts.Experts`."""
        del path
        return _experts(x_BTD, routing.weights)


@jax.custom_vjp
def _experts(x: jax.Array, weights: jax.Array) -> jax.Array:
    return aside(_made)(x, weights)


def _forward(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return checkpoint_name(_experts(x, weights), SAVED), (x, weights)


def _backward(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    return aside(_gradients)(*residuals, dy)


_experts.defvjp(_forward, _backward)


def _made(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Something of the right shape, which is all that is looked at; so of gradients."""
    return x * jnp.sum(weights, axis=-1, keepdims=True).astype(x.dtype)


def _gradients(x: jax.Array, weights: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x * dy, weights * jnp.sum(dy, axis=-1, keepdims=True)


def put_aside(block: Block) -> Block:
    """The block with a stand-in for its experts, if it has any."""
    if isinstance(block.ffn, MoE):
        mixture: Any = block.ffn  # whose experts are Experts, as far as types go
        mixture.experts = ExpertsAside()
    return block


def at_work(blocks: tuple[BlockSpec, ...], *, d_model: int, rows: int, seq_len: int, dtype: str, path: str, mesh: AbstractMesh) -> int:
    """Most bytes that the experts of one of these blocks hold on a device in a backward pass, beside what the block gives them; 0: there are none.

    Args:
        blocks: of a stack's pattern.
        d_model: width of the stream.
        rows: of a device's batch.
        seq_len: tokens of a row.
        dtype: type of activations.
        path: of the grouped matmul.
        mesh: of several devices, with their kind.
    """
    mixtures: list[Any] = [block.ffn for block in blocks if isinstance(block.ffn, MoEConfig)]  # frozen, so they have hashes
    how = {"d_model": d_model, "rows": rows, "seq_len": seq_len, "dtype": dtype, "path": path, "mesh": mesh}
    return max((_at_work(mixture, **how) for mixture in mixtures), default=0)


@functools.lru_cache(maxsize=1024)
def _at_work(config: MoEConfig, *, d_model: int, rows: int, seq_len: int, dtype: str, path: str, mesh: AbstractMesh) -> int:
    kind = Kind(config.activation, config.limit, config.router.weight_on == "input", path)
    w = jax.eval_shape(lambda: config.build(d_model=d_model, n_layers=1, rngs=nnx.Rngs(0)).experts.weights)
    lead = rows * mesh.size // mesh.shape["tensor"], seq_len
    stream = jax.ShapeDtypeStruct((*lead, d_model), dtype)
    choices = jax.ShapeDtypeStruct((*lead, config.router.top_k), jnp.int32)
    weights = jax.ShapeDtypeStruct(choices.shape, jnp.float32)

    def backward(x: jax.Array, choices: jax.Array, weights: jax.Array, w: Any, dy: jax.Array) -> Any:
        return jax.vjp(lambda x, weights, w: on_devices(kind, x, choices, weights, w), x, weights, w)[1](dy)

    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.make_jaxpr(backward)(stream, choices, weights, w, stream)
    return most(working_set(_on_a_device(traced.jaxpr)), ROWS)


def _on_a_device(jaxpr: Jaxpr) -> Jaxpr:
    """The program of a device within that of all: the last that is mapped over them, for the forward pass comes first."""
    (*_, mapped) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map")
    assert set(mapped.params["mesh"].axis_names) == set(AXES)
    inner = mapped.params["jaxpr"]
    return inner if isinstance(inner, Jaxpr) else inner.jaxpr
