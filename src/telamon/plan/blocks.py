"""What the passes over a model's layers and its loss keep, traced on abstract arrays a block at a time."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, Var

from telamon.kernels.cross_entropy import cross_entropy
from telamon.layers.norm import NormConfig
from telamon.layers.parts import Context, HowExperts
from telamon.models.decoder import BLOCK_INPUT, REMAT_POLICIES, Block, Numerics
from telamon.models.mtp import Predictor
from telamon.models.spec import BlockSpec
from telamon.plan.mixtures import put_aside
from telamon.plan.working_set import ROWS, Size, size_of, working_set


@dataclass(frozen=True)
class PatternCost:
    """A pattern of blocks, in bytes of a device that has gathered their weights, as functions of its rows."""

    each: Size
    """What each repetition keeps for the backward pass."""
    once: Size
    """What is kept once for all of them, as it depends on the positions alone."""
    host: Size
    """What each repetition keeps in the host's memory."""
    working: tuple[Size, ...]
    """Backward pass of a repetition: the moments that may be its peak, each gradient gone once it is made."""
    shared: tuple[Size, ...]
    """The same where gradients stay until their reduction over other devices is through, which goes on behind what follows."""


@functools.lru_cache(maxsize=256)
def pattern_cost(
    pattern: tuple[BlockSpec, ...],
    *,
    d_model: int,
    seq_len: int,
    numerics: Numerics,
    experts_aside: bool,
    joined: NormConfig | None = None,
) -> PatternCost:
    """Trace a stack's pattern, forward for what it saves and backward for what it works with.

    Args:
        pattern: the blocks.
        d_model: width of the stream.
        seq_len: tokens of a traced row.
        numerics: how the model is run.
        experts_aside: mixtures' experts are no part of it (see `plan.mixtures`).
        joined: the norms of a depth of multi-token prediction, which the pattern then is; that it has two streams, the caller counts.
    """

    def built(block: BlockSpec) -> nnx.Module:
        made = Block(block, d_model=d_model, n_layers=1, rngs=nnx.Rngs(0))
        made = put_aside(made) if experts_aside else made
        return made if joined is None else Predictor(made, norm=joined, d_model=d_model, rngs=nnx.Rngs(0))

    how = numerics.experts if numerics.experts.path in ("capacity", "dense") else HowExperts()
    blocks = nnx.eval_shape(lambda: nnx.List([built(block) for block in pattern]))
    graph, weights = nnx.split(blocks)
    ids = jax.ShapeDtypeStruct((ROWS, seq_len), jnp.int32)
    stream = jax.ShapeDtypeStruct((ROWS, seq_len, d_model), numerics.dtype)

    def layer(weights: Any, stream: jax.Array, ids: jax.Array) -> jax.Array:
        ctx = Context(ids, ids, ids, ids, ids, None, experts=how)
        stream = checkpoint_name(stream, BLOCK_INPUT)
        for block in nnx.merge(graph, weights):
            stream = block(stream, stream if joined else ctx, ctx if joined else None)[0]
        return stream

    if numerics.remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT_POLICIES[numerics.remat], prevent_cse=False)

    def forward(ids: jax.Array, weights: Any, stream: jax.Array) -> Any:
        return jax.vjp(lambda weights, stream: layer(weights, stream, ids), weights, stream)

    traced, (_, pull) = jax.make_jaxpr(forward, return_shape=True)(ids, weights, stream)
    each, once, host = _saved(traced.jaxpr, outputs=1, ids=1, weights=len(jax.tree.leaves(weights)))
    backward = jax.make_jaxpr(lambda pull, d_stream: pull(d_stream))(pull, stream)
    gradients = len(jax.tree.leaves(weights))
    return PatternCost(each, once, host, working_set(backward.jaxpr, handed_on=gradients), working_set(backward.jaxpr))


def _saved(jaxpr: Jaxpr, *, outputs: int, ids: int, weights: int) -> tuple[Size, Size, Size]:
    """Residuals that come from weights or the stream, those that do not, and those in the host's memory."""
    given = set(jaxpr.invars[: ids + weights])
    by_layer = set(jaxpr.invars[ids:])
    for eqn in jaxpr.eqns:
        if any(isinstance(var, Var) and var in by_layer for var in eqn.invars):
            by_layer.update(eqn.outvars)
    each, once, host = Size(), Size(), Size()
    for var in dict.fromkeys(var for var in jaxpr.outvars[outputs:] if isinstance(var, Var)):
        if var in given:
            continue
        if getattr(var.aval, "memory_space", None) == jax.memory.Space.Host:
            host += size_of(var.aval)
        elif var in by_layer:
            each += size_of(var.aval)
        else:
            once += size_of(var.aval)
    return each, once, host


@functools.lru_cache(maxsize=64)
def loss_working(
    d_model: int, *, vocab: int, used: int, dtype: str, z_loss: float, softcap: float | None, adds_in_place: bool
) -> tuple[Size, ...]:
    """The loss of one chunk with its gradients, as functions of the chunk's tokens.

    Args:
        d_model: width of the stream.
        vocab: columns of the head on a device.
        used: those that stand for tokens.
        dtype: type of activations.
        z_loss, softcap: as in `cross_entropy`.
        adds_in_place: as in `working_set`.
    """
    tokens = jax.ShapeDtypeStruct((ROWS, 1), jnp.int32)
    hidden = jax.ShapeDtypeStruct((ROWS, 1, d_model), dtype)
    head = jax.ShapeDtypeStruct((d_model, vocab), jnp.float32)

    def loss(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
        how = {"chunk": ROWS, "z_loss": z_loss, "softcap": softcap, "vocab": used}
        return cross_entropy(hidden, head, targets, jnp.ones(targets.shape), **how).objective

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, head, tokens)
    return working_set(traced.jaxpr, adds_in_place=adds_in_place)
