"""How tokens choose experts: one router, described by data.

Scores of all experts are made from logits; the best experts are chosen, where the config says so by scores with a bias and within the
best groups; what the chosen ones give is weighted by their scores. All of it is computed in float32, whatever the activations are.
"""

from typing import Annotated, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field, model_validator

from telamon.config.schema import Positive, Section
from telamon.layers.param import buffer, matrix, vector
from telamon.layers.parts import Aux, Context, Load
from telamon.parallel.local import on_own_rows

_SCORES = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    # Above 0, where a root has no slope: from -104 on softplus is 0 in float32.
    "sqrt_softplus": lambda logits: jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), jnp.finfo(jnp.float32).tiny)),
}
_SMALLEST = 1e-20
"""Added to a sum of weights before they are divided by it, as DeepSeek V3 has it."""


class RouterConfig(Section):
    """Who goes to which experts, and with which weight."""

    n_experts: Positive = Field(description="Experts E.")
    top_k: Positive = Field(description="Experts X that a token goes to.")
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = Field(default="softmax", description="From logits to scores.")
    selection_bias: bool = Field(
        default=False,
        description="Experts are chosen by score + bias, a buffer that evens their load out without a gradient; it enters no weight.",
    )
    n_groups: Positive = Field(default=1, description="Groups of consecutive experts; only those of the best groups can be chosen.")
    top_groups: Positive = Field(default=1, description="Groups kept.")
    group_score: Literal["best", "best_two"] = Field(
        default="best_two", description="A group's rank: by its best score (DeepSeek V2) or by the sum of its two best (DeepSeek V3)."
    )
    renormalize: bool = Field(default=True, description="Divide a token's weights by their sum.")
    scale: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Factor on the weights.")
    weight_on: Literal["output", "input"] = Field(
        default="output", description="The weight multiplies what an expert gives, or what it is given (Llama 4)."
    )
    bias: bool = Field(default=False, description="A bias on the logits (GPT-OSS).")

    @model_validator(mode="after")
    def _counts_fit(self) -> Self:
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k={self.top_k} is more than the n_experts={self.n_experts} that there are")
        if self.n_experts % self.n_groups:
            divisors = [n for n in range(1, self.n_experts + 1) if self.n_experts % n == 0]
            raise ValueError(f"n_experts={self.n_experts} is not divisible by n_groups={self.n_groups}; allowed for n_groups: {divisors}")
        if self.top_groups > self.n_groups:
            raise ValueError(f"top_groups={self.top_groups} is more than the n_groups={self.n_groups} that there are")
        size = self.n_experts // self.n_groups
        if self.top_k > self.top_groups * size:
            raise ValueError(
                f"top_k={self.top_k} is more than the {self.top_groups * size} experts in top_groups={self.top_groups} groups of {size}"
            )
        if self.group_score == "best_two" and self.n_groups > 1 and size < 2:
            raise ValueError(
                f"group_score=best_two needs groups of two or more; n_experts={self.n_experts} in n_groups={self.n_groups} has {size}"
            )
        return self

    def build(self, *, d_model: int, rngs: nnx.Rngs) -> "Router":
        """The module for a stream of width `d_model`."""
        return Router(self, d_model=d_model, rngs=rngs)


class Routing(NamedTuple):
    """What a router decides."""

    experts: jax.Array
    """Chosen experts [B, T, X], int32, best first; E, which is nobody, for a token that is not real."""
    weights: jax.Array
    """Their weights [B, T, X], float32; 0 for a token that is not real."""


class Router(nnx.Module):
    """Weights: weight [D, E], and where the config has them bias [E] and selection_bias [E]."""

    def __init__(self, config: RouterConfig, *, d_model: int, rngs: nnx.Rngs):
        self.config = config
        E = config.n_experts
        self.weight = matrix(rngs, (d_model, E), axes=("embed", "routes"), inputs=1, role="router")
        if config.bias:
            self.bias = vector((E,), axes=("routes",), fill=0.0)
        if config.selection_bias:
            self.selection_bias = buffer((E,), axes=("routes",))

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[Routing, Aux]:
        """[B, T, D] -> where each token goes, and what is to be known of it: the load, and terms of the loss."""
        config = self.config
        logits_BTE = self._logits(x_BTD, ctx)
        scores_BTE = _SCORES[config.score](logits_BTE)
        experts_BTX = on_own_rows(self._chosen, self._ranked(logits_BTE, scores_BTE))
        chosen_BTXE = jax.nn.one_hot(experts_BTX, config.n_experts, dtype=jnp.float32)
        weights_BTX = jnp.sum(chosen_BTXE * scores_BTE[:, :, None], axis=-1)
        if config.renormalize:
            weights_BTX = _shares(weights_BTX)
        real_BT = ctx.segments > 0
        routing = Routing(
            jnp.where(real_BT[..., None], experts_BTX, config.n_experts), jnp.where(real_BT[..., None], config.scale * weights_BTX, 0.0)
        )
        probabilities_BTE = scores_BTE if config.score == "softmax" else _shares(scores_BTE)
        return routing, _account(logits_BTE, probabilities_BTE, jnp.sum(chosen_BTXE, axis=2), ctx)

    def _logits(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        x_BTD = x_BTD.astype(jnp.float32)
        if ctx.experts.jitter and ctx.key is not None:
            low, high = 1 - ctx.experts.jitter, 1 + ctx.experts.jitter
            x_BTD *= jax.random.uniform(ctx.key, x_BTD.shape, minval=low, maxval=high)
        # A TPU's default for float32 is a product of bfloat16 parts.
        logits_BTE = jnp.einsum("btd,de->bte", x_BTD, self.weight[...], precision=jax.lax.Precision.HIGHEST)
        return logits_BTE + self.bias[...] if self.config.bias else logits_BTE

    def _ranked(self, logits_BTE: jax.Array, scores_BTE: jax.Array) -> jax.Array:
        """What experts are ranked by. Where nothing is added, logits rank as scores do, and do not saturate."""
        config = self.config
        if not config.selection_bias and (config.n_groups == 1 or config.group_score == "best"):
            ranked_BTE = logits_BTE
        else:
            ranked_BTE = scores_BTE + self.selection_bias[...] if config.selection_bias else scores_BTE
        return jax.lax.stop_gradient(ranked_BTE)

    def _chosen(self, ranked_BTE: jax.Array) -> jax.Array:
        """The best experts of the best groups [B, T, X], int32."""
        config = self.config
        if config.n_groups > 1:
            size = config.n_experts // config.n_groups
            groups_BTGe = ranked_BTE.reshape(*ranked_BTE.shape[:2], config.n_groups, size)
            best = jax.lax.top_k(groups_BTGe, 1 if config.group_score == "best" else 2)[0]
            kept_BTG = jax.nn.one_hot(jax.lax.top_k(jnp.sum(best, -1), config.top_groups)[1], config.n_groups).sum(axis=-2)
            # Not 0: a score with a bias may be below it.
            ranked_BTE = jnp.where(kept_BTG[..., None] > 0, groups_BTGe, -jnp.inf).reshape(ranked_BTE.shape)
        return jax.lax.top_k(ranked_BTE, config.top_k)[1].astype(jnp.int32)


def _shares(x: jax.Array) -> jax.Array:
    """Parts of the sum over the last dim, `x / (sum + _SMALLEST)`.

    Counted in the largest, for the gradient divides by the sum's square, which float32 cannot hold where every sigmoid is near 0.
    """
    largest = jax.lax.stop_gradient(jnp.maximum(jnp.max(x, axis=-1, keepdims=True), _SMALLEST))
    x = x / largest
    return x / (jnp.sum(x, axis=-1, keepdims=True) + _SMALLEST / largest)


def _account(logits_BTE: jax.Array, probabilities_BTE: jax.Array, chosen_BTE: jax.Array, ctx: Context) -> Aux:
    """The load of experts, and the terms that follow from it: over real tokens, or those of them that the run counts.

    `router_z` is the mean squared log-normaliser of the logits (Zoph et al. 2022, "ST-MoE", eq. 5), `router_entropy` the mean entropy of
    a token's probabilities in nats.
    """
    counted_BT = (ctx.segments > 0) if ctx.counted is None else (ctx.segments > 0) & ctx.counted
    mask_BT = counted_BT.astype(jnp.float32)
    tokens = jnp.sum(mask_BT)
    normaliser_BT = jax.nn.logsumexp(logits_BTE, axis=-1)
    entropy_BT = -jnp.sum(jax.scipy.special.xlogy(probabilities_BTE, probabilities_BTE), axis=-1)
    aux: Aux = {
        "load": Load(
            counts=jax.lax.stop_gradient(jnp.einsum("bt,bte->e", mask_BT, chosen_BTE)),
            probabilities=jnp.einsum("bt,bte->e", mask_BT, probabilities_BTE),
            tokens=tokens,
        ),
        "router_z": (jnp.sum(mask_BT * jnp.square(normaliser_BT)), tokens),
        "router_entropy": (jax.lax.stop_gradient(jnp.sum(mask_BT * entropy_BT)), tokens),
    }
    if ctx.experts.by_document:
        aux["balance"] = jax.tree.map(jnp.sum, jax.vmap(_documents_balance)(probabilities_BTE, chosen_BTE, mask_BT, ctx.segments))
    return aux


def _documents_balance(
    probabilities_TE: jax.Array, chosen_TE: jax.Array, mask_T: jax.Array, segments_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """E times the sum over experts of load times mean probability, within each document of a row: sum over documents, and their number.

    The load sums to X, not to 1 as in DeepSeek V3's form (DeepSeek-AI 2024, eq. 17 to 20).
    """
    T, E = probabilities_TE.shape
    counts = jnp.zeros((T + 1, E)).at[segments_T].add(mask_T[:, None] * chosen_TE)  # by document
    length_T = jnp.maximum(jnp.zeros(T + 1).at[segments_T].add(mask_T)[segments_T], 1.0)
    load_TE = jax.lax.stop_gradient(counts[segments_T] / jnp.square(length_T)[:, None])
    return E * jnp.sum(mask_T[:, None] * load_TE * probabilities_TE), jnp.sum(mask_T / length_T)
