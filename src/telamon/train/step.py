"""The training step and the evaluation step: pure functions to be jitted once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from telamon.layers.parts import Load
from telamon.models.weights import Model, Weights
from telamon.parallel.rules import constrain
from telamon.train.balance import load_metrics, moved_biases
from telamon.train.loss import Loss, Measured, Term, balance_term, tokens_of
from telamon.train.placement import Batch
from telamon.train.state import TrainState

Metrics = dict[str, jax.Array]


def split_microbatches(batch: Batch, count: int) -> Batch:
    """[B, T] -> [count, B / count, T]; microbatch i takes rows i, i + count, ...

    Strided, so that every device's block of rows gives each microbatch an equal share and no row moves between devices.
    """

    def split(x: jax.Array) -> jax.Array:
        parts = jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1)
        return constrain(parts, None, "batch", "seq")

    return jax.tree.map(split, dict(batch))


def gradient(model: Model, loss: Loss, weights: Weights, batch: Batch, key: jax.Array, *, accumulate: int) -> tuple[Weights, Measured]:
    """Gradient of the objective over the whole batch, and its terms and counts.

    Every denominator is summed over all microbatches before any is used, so each microbatch adds exactly its share. With
    nothing to train (denominator 0) a term is 0 and so is its gradient.
    """
    if accumulate == 1:
        return _objective_gradient(model, loss, weights, batch, key, None)
    parts = split_microbatches(batch, accumulate)
    keys = jax.random.split(key, accumulate)

    def measure(_: None, part: tuple[Batch, jax.Array]) -> tuple[None, _Whole]:
        # Where only denominators leave this scan, they depend on masks alone, and the compiler drops the forward pass.
        microbatch, key = part
        return None, _Whole.of(loss.measure(model.bind(weights), microbatch, key), loss)

    whole = jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.scan(measure, None, (parts, keys))[1])

    def add(total: tuple[Weights, Measured], part: tuple[Batch, jax.Array]) -> tuple[tuple[Weights, Measured], None]:
        return jax.tree.map(jnp.add, total, of_part(part)), None

    def of_part(part: tuple[Batch, jax.Array]) -> tuple[Weights, Measured]:
        microbatch, key = part
        return _objective_gradient(model, loss, weights, microbatch, key, whole)

    shapes = jax.eval_shape(lambda: of_part(jax.tree.map(lambda x: x[0], (parts, keys))))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(add, zero, (parts, keys))[0]


class _Whole(NamedTuple):
    """Sums over all microbatches of a step that each of them needs."""

    denominators: dict[str, jax.Array]
    loads: dict[str, Load]
    """Of experts; empty where no term is made of them."""

    @classmethod
    def of(cls, measured: Measured, loss: Loss) -> "_Whole":
        return cls({name: term.denominator for name, term in measured.terms.items()}, measured.loads if loss.balances else {})


def _objective_gradient(
    model: Model, loss: Loss, weights: Weights, batch: Batch, key: jax.Array, whole: _Whole | None
) -> tuple[Weights, Measured]:
    def objective(weights: Weights) -> tuple[jax.Array, Measured]:
        measured = loss.measure(model.bind(weights), batch, key)
        denominators, loads = whole or _Whole.of(measured, loss)
        total = jnp.zeros((), jnp.float32)
        for name, term in measured.terms.items():
            if loss.weight(name):
                total += loss.weight(name) * divide(term.sum, jax.lax.stop_gradient(denominators[name]))
        if loss.balances:
            balance = balance_term(measured.loads, loads)
            total += loss.weight("balance") * divide(*balance)
            # The denominator is of the whole step; of the measured terms each microbatch adds its own.
            own = Term(balance.sum, tokens_of(measured.loads))
            measured = measured._replace(terms=measured.terms | {"balance": own})
        return total, measured

    grads, measured = jax.grad(objective, has_aux=True)(weights)
    return grads, measured


def divide(total: jax.Array, denominator: jax.Array) -> jax.Array:
    """total / denominator, and 0 with gradient 0 where nothing was counted."""
    counted = denominator > 0
    return jnp.where(counted, total, 0.0) / jnp.where(counted, denominator, 1.0)


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Model,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    accumulate: int,
    bias_rate: float = 0.0,
) -> tuple[TrainState, Metrics]:
    """One optimizer step.

    Args:
        state: state before the step; donate it.
        batch: the step's rows [B, T], all microbatches.
        model, optimizer, loss: what to train, how, and on what.
        accumulate: microbatches the batch is split into.
        bias_rate: how far the selection biases of experts move (see `moved_biases`).

    Returns:
        The state after the step, and metrics as float32 scalars: `loss` (the objective), `nll`, `tokens`, `bytes`,
        `correct` (sums), `grad_norm` (before clipping), each auxiliary term divided, and the loads of experts (see `load_metrics`).
    """
    key = jax.random.fold_in(state.key, state.step)
    grads, measured = gradient(model, loss, state.weights, batch, key, accumulate=accumulate)
    updates, optimizer_state = optimizer.update(grads, state.optimizer, state.weights)
    weights: Any = optax.apply_updates(state.weights, updates)
    weights = moved_biases(weights, measured.loads, rate=bias_rate)
    metrics = summarise(measured, loss) | {"grad_norm": optax.tree.norm(grads)}
    return TrainState(state.step + 1, weights, optimizer_state, state.key), metrics


def eval_step(weights: Weights, batch: Batch, *, model: Model, loss: Loss) -> Measured:
    """Terms and counts of a batch, undivided: evaluation adds these and divides once, exactly as a step does."""
    return (loss.held_out or loss.measure)(model.bind(weights), batch, jax.random.key(0))


def summarise(measured: Measured, loss: Loss) -> Metrics:
    """Divide each term by its denominator; the objective as `loss`, the terms by name, the counts as they are."""
    means = {name: divide(*term) for name, term in measured.terms.items()}
    total = sum((loss.weight(name) * mean for name, mean in means.items() if loss.weight(name)), jnp.zeros((), jnp.float32))
    return {"loss": total, **means, **measured.counts, **load_metrics(measured.loads)}


def bind_step(function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """A step with its model, optimizer and loss filled in, named for profiles and HLO dumps."""

    def step(*arguments: Any) -> Any:
        return function(*arguments, **fixed)

    step.__name__ = function.__name__
    return step
