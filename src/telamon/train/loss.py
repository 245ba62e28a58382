"""Losses as sums with denominators.

A loss gives, for a microbatch, named (sum, denominator) terms. Nothing is divided here: the step adds denominators over the
whole step first, and each term is divided by its own, once. So accumulation, packing, padding and any mesh give one gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from telamon.config.schema import TrainConfig
from telamon.kernels.cross_entropy_pick import cross_entropy
from telamon.models.decoder import Decoder

Batch = Mapping[str, jax.Array]
"""tokens, targets, mask, segments, positions and bytes, each [B, T] (see `telamon.data`)."""


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


@dataclass(frozen=True)
class Loss:
    """An objective: the sum over terms of weight * sum / denominator."""

    measure: Callable[[Decoder, Batch, jax.Array], Measured]
    """From a decoder, a microbatch and a random key to terms and counts."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each term; 1 where none is given."""


def language_model_loss(config: TrainConfig) -> Loss:
    """Next-token cross-entropy over the trained targets, with the run's z-loss, and the model's auxiliary terms."""

    def measure(decoder: Decoder, batch: Batch, key: jax.Array) -> Measured:
        output = decoder(batch["tokens"], positions=batch["positions"], segments=batch["segments"])
        mask = batch["mask"].astype(jnp.float32)
        how = {"chunk": config.loss_chunk, "z_loss": config.z_loss, "softcap": decoder.spec.final_softcap, "vocab": decoder.spec.vocab_size}
        sums = cross_entropy(output.hidden, decoder.output_head(), batch["targets"], mask, **how, path=config.loss)
        tokens = jnp.sum(mask)
        terms = {"cross_entropy": Term(sums.objective, tokens)} | {name: Term(*pair) for name, pair in output.aux.items()}
        counts = {"nll": sums.nll, "tokens": tokens, "bytes": jnp.sum(mask * batch["bytes"])}
        counts |= {} if sums.correct is None else {"correct": sums.correct}
        return Measured(terms, counts)

    return Loss(measure)
