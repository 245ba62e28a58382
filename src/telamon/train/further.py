"""Predictions of tokens beyond the next: their loss, and how often speculative decoding would accept them.

At depth k, place i has seen the row's tokens up to i + k, and predicts the one at i + k + 1. A prediction counts where that token is trained
as the next one of place i + k, and i + k is in the document of i: so never across a document's border, nor into padding or a prompt.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from telamon.config.schema import TrainConfig
from telamon.kernels.cross_entropy import most_likely
from telamon.kernels.cross_entropy_pick import cross_entropy
from telamon.models.decoder import Decoder, Further
from telamon.models.mtp import follows, later
from telamon.train.placement import Batch

ACCEPTED, DRAFTED = "mtp_accepted_", "mtp_drafted_"
"""Beginnings of the names of counts; a depth's number follows."""


@dataclass(frozen=True)
class Ahead:
    """What a model predicts of a batch beyond the next token."""

    decoder: Decoder
    batch: Batch
    hidden: jax.Array
    """Of the model itself [B, T, D]."""
    config: TrainConfig
    key: jax.Array | None
    """As the model's own forward had it."""

    @functools.cached_property
    def masks(self) -> tuple[jax.Array, ...]:
        """For each depth which places predict something that counts, float32 [B, T]."""
        mask, segments = self.batch["mask"].astype(jnp.float32), self.batch["segments"]
        depths = range(1, len(self.decoder.spec.mtp) + 1)
        return tuple(jnp.where(follows(segments, depth), later(mask, depth), 0.0) for depth in depths)

    @functools.cached_property
    def further(self) -> Further:
        """The forward of all depths."""
        trained = tuple(mask > 0 for mask in self.masks) if self.config.experts.count == "trained" else None
        where = {name: self.batch[name] for name in ("tokens", "positions", "segments")}
        return self.decoder.further(self.hidden, **where, counted=trained, key=self.key)

    def cross_entropy(self) -> tuple[jax.Array, jax.Array]:
        """The objective summed over all depths' predictions, and their number."""
        how = {"chunk": self.config.loss_chunk, "z_loss": self.config.z_loss, "path": self.config.loss, **self._logits}
        total, head = jnp.zeros((), jnp.float32), self.decoder.output_head()
        for depth, (hidden, mask) in enumerate(zip(self.further.hidden, self.masks, strict=True), 1):
            total += cross_entropy(hidden, head, later(self.batch["targets"], depth), mask, **how).objective
        return total, sum((jnp.sum(mask) for mask in self.masks), jnp.zeros((), jnp.float32))

    def acceptance(self) -> dict[str, jax.Array]:
        """For each depth, how many tokens it drafts, and how many of them the model itself would write after the true text before them.

        Speculative decoding that is to change nothing of greedy decoding accepts a draft if it is the model's own most likely token
        (Leviathan et al. 2023, section 2.3, at temperature 0).
        """
        greedy = functools.partial(most_likely, chunk=self.config.loss_chunk, **self._logits)
        head = self.decoder.output_head()
        own, counts = greedy(self.hidden, head), {}
        for depth, (hidden, mask) in enumerate(zip(self.further.hidden, self.masks, strict=True), 1):
            counts[f"{ACCEPTED}{depth}"] = jnp.sum(mask * (greedy(hidden, head) == later(own, depth)))
            counts[f"{DRAFTED}{depth}"] = jnp.sum(mask)
        return counts

    @property
    def _logits(self) -> dict[str, float | int | None]:
        spec = self.decoder.spec
        return {"softcap": spec.final_softcap, "vocab": spec.vocab_size}
