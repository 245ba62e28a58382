"""Choosing the next token: greedy, temperature, top-k, top-p (Holtzman et al. 2020), each row with its own settings and key."""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from telamon.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; filters apply in the order temperature, top-k, top-p."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy: always the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens."""
    top_p: float | None = None
    """Draw from the fewest likeliest tokens whose probabilities sum to at least p."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ConfigError(f"temperature={self.temperature} is not possible; give 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} is not possible; give 1 or more, or leave it out to draw from all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} is not possible; give a share above 0 and up to 1")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSampling:
    """The settings of every row as arrays [B], so that another setting compiles nothing anew."""

    temperature: jax.Array | np.ndarray
    top_k: jax.Array | np.ndarray
    top_p: jax.Array | np.ndarray

    @classmethod
    def stack(cls, rows: Sequence[Sampling]) -> "RowSampling":
        """One entry a row."""
        return cls(
            temperature=np.array([row.temperature for row in rows], np.float32),
            top_k=np.array([row.top_k or np.iinfo(np.int32).max for row in rows], np.int32),
            top_p=np.array([row.top_p or 1.0 for row in rows], np.float32),
        )


def row_keys(prompts: Sequence[Sequence[int]], seed: int) -> jax.Array:
    """A random key for each prompt [B], from the seed and the prompt itself.

    So a prompt's continuation depends on neither its place in the batch nor its neighbours. A prompt that is given
    several times gets a key of its own each time.
    """
    given: Counter[tuple[int, ...]] = Counter()
    words = []
    for prompt in map(tuple, prompts):
        words.append((zlib.crc32(np.asarray(prompt, np.int64).tobytes()), given[prompt]))
        given[prompt] += 1
    base = jax.random.key(seed)
    data = np.array(words, np.uint32)
    return jax.vmap(lambda pair: jax.random.fold_in(jax.random.fold_in(base, pair[0]), pair[1]))(data)


def sample(logits_BV: jax.Array, keys_B: jax.Array, rows: RowSampling) -> jax.Array:
    """Next token of each row [B]; jittable.

    Args:
        logits_BV: float32; -inf for tokens that may not come.
        keys_B: a random key a row, used once.
        rows: settings of the rows.
    """
    greedy_B = likeliest(logits_BV)

    def draw() -> jax.Array:
        scaled_BV = logits_BV / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
        filters = jnp.any((rows.top_k < logits_BV.shape[-1]) | (rows.top_p < 1.0))
        # Sorting a vocabulary costs more than drawing from it.
        kept_BV = jax.lax.cond(filters, lambda x: keep_likeliest(x, top_k=rows.top_k, top_p=rows.top_p), lambda x: x, scaled_BV)
        return jnp.where(rows.temperature > 0, jax.vmap(jax.random.categorical)(keys_B, kept_BV), greedy_B)

    return jax.lax.cond(jnp.any(rows.temperature > 0), draw, lambda: greedy_B).astype(jnp.int32)


def likeliest(logits_BV: jax.Array) -> jax.Array:
    """The likeliest token of each row [B], the one with the lowest id where several are.

    `jnp.argmax` gives the same, but XLA on CPU reduces its pairs one value at a time: with 49,152 tokens 17 times as slow.
    """
    V = logits_BV.shape[-1]
    top_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits_BV == top_B1, jnp.arange(V), V - 1), axis=-1)


def keep_likeliest(logits_BV: jax.Array, *, top_k: jax.Array | np.ndarray, top_p: jax.Array | np.ndarray) -> jax.Array:
    """Logits with all but the likeliest tokens at -inf: of the k likeliest, the fewest whose share is at least p.

    The likeliest token always stays; of tokens that are equally likely, the one with the lower id comes first.
    """
    order_BV = jnp.argsort(-logits_BV, axis=-1, stable=True)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    ranks_V = jnp.arange(logits_BV.shape[-1])
    sorted_BV = jnp.where(ranks_V < top_k[:, None], sorted_BV, -jnp.inf)
    shares_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(shares_BV, axis=-1) - shares_BV
    enough_BV = (before_BV >= top_p[:, None]) & (top_p < 1.0)[:, None] & (ranks_V > 0)
    sorted_BV = jnp.where(enough_BV, -jnp.inf, sorted_BV)
    return jnp.take_along_axis(sorted_BV, jnp.argsort(order_BV, axis=-1), axis=-1)
