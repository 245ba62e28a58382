"""Validation, reduced exactly as training is: sums over all tokens, divided once."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import jax
import numpy as np

from telamon.data.loader import Loader
from telamon.models.weights import Weights
from telamon.train.further import ACCEPTED, DRAFTED
from telamon.train.job import Job
from telamon.train.placement import place
from telamon.watch import phases

SUMS = ("nll", "tokens", "bytes")


@dataclass(frozen=True)
class Validation:
    """What an evaluation found."""

    loss: float
    """Nats a token."""
    bits_per_byte: float | None
    """None where tokens stand for no text."""
    tokens: int
    """Tokens it is over."""
    acceptance: Mapping[int, float] = field(default_factory=dict)
    """For each depth of multi-token prediction the share of its drafts that speculative decoding would accept (see `train.further`)."""


def evaluate(job: Job, weights: Weights, loader: Loader) -> Validation | None:
    """Loss over the held-out set (or its first `eval.batches` batches); None where nothing is held out."""
    phases.mark("eval begin")
    step, most = job.eval_step(job.eval_rows), job.config.eval.batches
    pending = []
    with jax.set_mesh(job.mesh):
        for number, batch in enumerate(loader.eval_batches(job.eval_rows)):
            if most is not None and number >= most:
                break
            pending.append(step(weights, place(batch, token_bytes=loader.tokenizer.token_bytes, mesh=job.mesh)).counts)
    found = add_up(pending)
    phases.mark("eval end")
    return found


def add_up(batches: Iterable[Mapping[str, jax.Array]]) -> Validation | None:
    """The counts of batches (those of a loss, `SUMS` among them) added, and divided once; None where no token was counted."""
    counts = list(batches)

    def total(name: str) -> float:
        # Sums of float32 sums are taken in float64: a large held-out set must not lose the small batches.
        return math.fsum(float(np.asarray(each[name])) for each in counts)

    nll, tokens, text_bytes = map(total, SUMS)
    if not tokens:
        return None
    depths = [int(name.removeprefix(DRAFTED)) for name in counts[0] if name.startswith(DRAFTED)]
    acceptance = {depth: total(f"{ACCEPTED}{depth}") / drafted for depth in depths if (drafted := total(f"{DRAFTED}{depth}"))}
    return Validation(nll / tokens, bits_per_byte(nll, text_bytes), int(tokens), acceptance)


def acceptance_metrics(validation: Validation) -> dict[str, float]:
    """`val_mtp_acceptance` of the first depth, with `_2` and so on behind it of the others."""
    return {f"val_mtp_acceptance{'' if depth == 1 else f'_{depth}'}": share for depth, share in validation.acceptance.items()}


def bits_per_byte(nll: float, text_bytes: float) -> float | None:
    """Nats over a text to bits per byte of it."""
    return nll / (math.log(2) * text_bytes) if text_bytes > 0 else None
