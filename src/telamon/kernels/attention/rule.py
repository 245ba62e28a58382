"""What a query sees and how its scores are made: the one rule that every path of attention follows.

Packing, padding, windows, chunks and decoding need no other mask.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from telamon.parallel.target import Target

HIDDEN = -1e30
"""Score of a key that is not seen; finite, so that a query without any visible key stays free of NaN."""

SAVED = "attention"
"""Name of what a kernel computes forward, for the policies that say what the backward pass may keep."""


class Places(NamedTuple):
    """Where tokens are: position within the document, and document within the row (0 for padding), [B, length] each."""

    positions: jax.Array
    segments: jax.Array


@dataclass(frozen=True)
class Scores:
    """How the product of a query and a key becomes a score, and which keys are left out by distance."""

    scale: float
    """Factor on the product."""
    softcap: float | None = None
    """Scaled products x become softcap * tanh(x / softcap) (Gemma team 2024, section 2)."""
    window: int | None = None
    """Keys seen at most, the query's own included: those at positions above the query's minus this."""
    chunk: int | None = None
    """Positions are cut into chunks of this many, and only keys of the query's own chunk are seen (Llama 4)."""

    @property
    def reach(self) -> int | None:
        """Keys from a query backwards, its own included, among which are all that it sees; None: all of its document."""
        return min((limit for limit in (self.window, self.chunk) if limit is not None), default=None)

    def of(self, products: jax.Array) -> jax.Array:
        """Scores of products."""
        scaled = products * self.scale
        return scaled if self.softcap is None else self.softcap * jnp.tanh(scaled / self.softcap)

    def gradient(self, d_scores: jax.Array, scores: jax.Array) -> jax.Array:
        """The products' gradient from that of their scores."""
        if self.softcap is not None:
            d_scores = d_scores * (1.0 - jnp.square(scores / self.softcap))
        return d_scores * self.scale


@dataclass(frozen=True)
class Request:
    """What is asked of attention, for whoever chooses a path. Sizes are those of the whole batch, over all devices."""

    target: Target
    """The device, and the mesh."""
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    """Features of a query, a key and a value, of whichever most."""
    dtype: str
    """Type of queries, keys and values."""
    scores: Scores
    sinks: bool = False
    """There are scores of sinks."""
    aligned: bool = True
    """See `telamon.kernels.attention.attention`."""


def visible(queries: Places, keys: Places, window: int | None = None, chunk: int | None = None) -> jax.Array:
    """Which keys each query sees, [B, T, S]: real ones (segment > 0) of its own segment, not later, within window and chunk."""
    same = queries.segments[:, :, None] == keys.segments[:, None, :]
    real = (keys.segments > 0)[:, None, :]
    behind = queries.positions[:, :, None] - keys.positions[:, None, :]
    seen = same & real & (behind >= 0)
    if window is not None:
        seen &= behind < window
    if chunk is not None:
        seen &= queries.positions[:, :, None] // chunk == keys.positions[:, None, :] // chunk
    return seen
