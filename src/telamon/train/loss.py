"""Losses as sums with denominators.

A loss gives, for a microbatch, named (sum, denominator) terms. Nothing is divided here: the step adds denominators over the
whole step first, and each term is divided by its own, once. So accumulation, packing, padding and any mesh give one gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from telamon.config.schema import TrainConfig
from telamon.kernels.cross_entropy_pick import cross_entropy
from telamon.layers.parts import Load
from telamon.models.decoder import Decoder, add_aux
from telamon.train.further import Ahead
from telamon.train.placement import Batch


class Term(NamedTuple):
    """A sum over tokens (or sequences, or experts), and what it is to be divided by."""

    sum: jax.Array
    denominator: jax.Array


class Measured(NamedTuple):
    """What a loss gives for one microbatch."""

    terms: dict[str, Term]
    """Terms of the objective."""
    counts: dict[str, jax.Array]
    """Further sums for metrics, without gradient: `nll` in nats, `tokens`, `bytes`, and `correct` where it is known."""
    loads: dict[str, Load] = {}  # noqa: RUF012 - of a tuple, never written to
    """How tokens spread over experts, by the path of each mixture."""


@dataclass(frozen=True)
class Loss:
    """An objective: the sum over terms of weight * sum / denominator. A term of weight 0 is measured, and trains nothing."""

    measure: Callable[[Decoder, Batch, jax.Array], Measured]
    """From a decoder, a microbatch and a random key to terms and counts."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each term; 1 where none is given."""
    balances: bool = False
    """Add the term `balance`, of the loads of the whole step (see `balance_term`)."""
    held_out: Callable[[Decoder, Batch, jax.Array], Measured] | None = None
    """`measure` with what only an evaluation counts; none: there is no such thing."""

    def weight(self, term: str) -> float:
        """The weight of a term."""
        return self.weights.get(term, 1.0)


def language_model_loss(config: TrainConfig) -> Loss:
    """Next-token cross-entropy over the trained targets, with the run's z-loss, and the model's auxiliary terms.

    Where the model predicts further tokens, they are the term `mtp`; evaluation also counts what speculative decoding would accept.
    """
    experts = config.experts

    def measure(decoder: Decoder, batch: Batch, key: jax.Array, *, held_out: bool = False) -> Measured:
        key_or_none = key if experts.jitter else None
        counted = batch["mask"] > 0 if experts.count == "trained" else None
        output = decoder(
            batch["tokens"],
            positions=batch["positions"],
            segments=batch["segments"],
            counted=counted,
            key=key_or_none,
        )
        mask = batch["mask"].astype(jnp.float32)
        how = {"chunk": config.loss_chunk, "z_loss": config.z_loss, "softcap": decoder.spec.final_softcap, "vocab": decoder.spec.vocab_size}
        sums = cross_entropy(output.hidden, decoder.output_head(), batch["targets"], mask, **how, path=config.loss)
        tokens = jnp.sum(mask)
        terms = {"cross_entropy": Term(sums.objective, tokens)}
        counts = {"nll": sums.nll, "tokens": tokens, "bytes": jnp.sum(mask * batch["bytes"])}
        counts |= {} if sums.correct is None else {"correct": sums.correct}
        aux, loads = output.aux, output.loads
        if decoder.spec.mtp:
            ahead = Ahead(decoder, batch, output.hidden, config, key_or_none)
            terms["mtp"] = Term(*ahead.cross_entropy())
            aux, loads = add_aux(aux, ahead.further.aux), loads | ahead.further.loads
            counts |= ahead.acceptance() if held_out else {}
        return Measured(terms | {name: Term(*pair) for name, pair in aux.items()}, counts, loads)

    weights = {
        "mtp": config.mtp_weight,
        "balance": experts.balance_weight,
        "router_z": experts.z_weight,
        "router_entropy": 0.0,
        "expert_dropped": 0.0,
    }
    return Loss(measure, weights, balances=experts.balance == "batch", held_out=partial(measure, held_out=True))


def balance_term(loads: Mapping[str, Load], whole: Mapping[str, Load]) -> Term:
    """For each layer the number of experts times the sum over them of load times probability, and the tokens; divided, the mean over layers.

    An even load gives X, the experts a token goes to (Fedus et al. 2021, eq. 4, summed over choices).

    Args:
        loads: of the tokens whose probabilities get a gradient.
        whole: of all tokens of the step, whose counts are each expert's load.
    """

    def product(load: Load, whole: Load) -> jax.Array:
        fraction = jax.lax.stop_gradient(whole.counts / jnp.maximum(whole.tokens, 1.0)[..., None])
        return load.counts.shape[-1] * jnp.sum(fraction * load.probabilities)

    return Term(sum((product(load, whole[path]) for path, load in loads.items()), jnp.zeros((), jnp.float32)), tokens_of(whole))


def tokens_of(loads: Mapping[str, Load]) -> jax.Array:
    """Tokens counted, once for each layer."""
    return sum((jnp.sum(load.tokens) for load in loads.values()), jnp.zeros((), jnp.float32))
