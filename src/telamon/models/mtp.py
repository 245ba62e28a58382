"""Multi-token prediction: in training, further modules predict the tokens behind the next (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2).

At depth k, place i holds the hidden state of depth k - 1 (depth 0 is the model itself) and the embedding of the token at i + k, and
predicts the one at i + k + 1 through the model's own embedding and head. What the report leaves open is as in published checkpoints
and in the programs that serve them (vLLM, SGLang): the embedding stands before the hidden state where the two are joined, a hidden state
is taken from behind its final norm, and the block is at the position i.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from telamon.layers.linear import dense
from telamon.layers.norm import NormConfig
from telamon.layers.param import matrix
from telamon.layers.parts import Aux, Context
from telamon.parallel.rules import constrain

FURTHER = "mtp"
"""Branch of a model's weights that holds them; a forward that generates reads nothing of it."""


class Predictor(nnx.Module):
    """A depth. Weights: enorm and hnorm of the two inputs, projection [2D, D], the block's own, and norm.

    Args:
        block: as the model's are.
        norm: kind of the three norms.
        d_model: width D.
        rngs: where initial values come from.
    """

    def __init__(self, block: Callable[..., Any], *, norm: NormConfig, d_model: int, rngs: nnx.Rngs):
        self.enorm, self.hnorm, self.norm = (norm.build(d_model) for _ in range(3))
        self.projection = matrix(rngs, (2 * d_model, d_model), axes=("joined", "embed"), inputs=1)
        self.block = block

    def __call__(self, hidden_BTD: jax.Array, embedded_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, Aux]:
        """Hidden states of the depth before and embeddings of the tokens ahead -> this depth's hidden states, normed [B, T, D]."""
        joined_BTJ = jnp.concatenate([self.enorm(embedded_BTD), self.hnorm(hidden_BTD)], axis=-1)
        stream_BTD, _, aux = self.block(dense(joined_BTJ, self.projection[...]), ctx, None)
        return self.norm(constrain(stream_BTD, "batch", "seq", "embed")), aux


def later(x_BT: jax.Array, steps: int) -> jax.Array:
    """At each place what stands `steps` places on in its row; of no meaning where `follows` says no."""
    return jnp.roll(x_BT, -steps, axis=1)


def follows(segments_BT: jax.Array, steps: int) -> jax.Array:
    """Whether the place `steps` on is in the same row and document; never for padding, bool [B, T]."""
    within_T = jnp.arange(segments_BT.shape[1]) < segments_BT.shape[1] - steps
    return within_T & (segments_BT > 0) & (later(segments_BT, steps) == segments_BT)
