"""A mixture of experts: a router sends each token to a few of many MLPs (Shazeer et al. 2017; Fedus et al. 2021, "Switch Transformers")."""

from typing import Annotated

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field

from telamon.config.schema import Positive
from telamon.kernels.picks import Pick, note
from telamon.layers.experts import Experts
from telamon.layers.mlp import GatedActivation, GatedMLPConfig
from telamon.layers.parts import Aux, Context, FfnConfig, register
from telamon.layers.router import RouterConfig


@register
class MoEConfig(FfnConfig):
    """`shared(x) + sum over the chosen experts of weight * down(activation(gate(x)) * up(x))`."""

    kind: str = "moe"
    router: RouterConfig = Field(description="How tokens choose experts.")
    d_ff: Positive = Field(description="Hidden width F of an expert.")
    activation: GatedActivation = Field(default="silu", description="Gate's activation.")
    limit: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Largest size of what the activation is given; none: any (see `telamon.layers.mlp.gated`)."
    )
    bias: bool = Field(default=False, description="Biases on the three maps of each expert.")
    shared: GatedMLPConfig | None = Field(default=None, description="An expert that every token goes through, unweighted; none: no such.")

    @property
    def has_experts(self) -> bool:
        """See `FfnConfig`."""
        return True

    def build(self, *, d_model: int, n_layers: int, rngs: nnx.Rngs) -> "MoE":
        """See `FfnConfig`."""
        return MoE(self, d_model=d_model, n_layers=n_layers, rngs=rngs)


class MoE(nnx.Module):
    """A router, experts, and perhaps an expert that all tokens share."""

    def __init__(self, config: MoEConfig, *, d_model: int, n_layers: int, rngs: nnx.Rngs):
        self.config = config
        self.router = config.router.build(d_model=d_model, rngs=rngs)
        self.experts = Experts(
            count=config.router.n_experts,
            chosen=config.router.top_k,
            d_model=d_model,
            d_ff=config.d_ff,
            activation=config.activation,
            limit=config.limit,
            bias=config.bias,
            weigh_input=config.router.weight_on == "input",
            scale=(2 * n_layers) ** -0.5,
            rngs=rngs,
        )
        if config.shared is not None:
            self.shared = config.shared.build(d_model=d_model, n_layers=n_layers, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, Aux]:
        """[B, T, D] -> [B, T, D], and the router's load and terms; with `capacity`, also `expert_dropped`, the choices dropped."""
        routing, aux = self.router(x_BTD, ctx)
        if ctx.experts.path in ("capacity", "dense"):
            note(Pick("experts", ctx.experts.path))  # what neither of them asks a kernel for
        if ctx.experts.path == "capacity":
            y_BTD, dropped = self.experts.with_capacity(x_BTD, routing, factor=ctx.experts.capacity_factor)
            aux["expert_dropped"] = dropped, jnp.sum(ctx.segments > 0) * float(self.config.router.top_k)
        elif ctx.experts.path == "dense":
            y_BTD = self.experts.dense(x_BTD, routing)
        else:
            y_BTD = self.experts.without_dropping(x_BTD, routing, path=ctx.experts.path)
        if self.config.shared is not None:
            y_BTD += self.shared(x_BTD, ctx)[0]
        return y_BTD, aux
