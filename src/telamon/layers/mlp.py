"""The gated MLP (Shazeer 2020, "GLU variants improve transformer", eq. 5)."""

from typing import Literal

import jax
from flax import nnx
from pydantic import Field

from telamon.config.schema import Positive
from telamon.layers.linear import dense
from telamon.layers.param import matrix, vector
from telamon.layers.parts import Aux, Context, FfnConfig, register
from telamon.parallel.rules import constrain

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


@register
class GatedMLPConfig(FfnConfig):
    """`down(activation(gate(x)) * up(x))`."""

    kind: str = "gated_mlp"
    d_ff: Positive = Field(description="Hidden width F.")
    activation: Literal["silu", "gelu_tanh"] = Field(default="silu", description="Gate's activation.")
    bias: bool = Field(default=False, description="Biases on the three maps.")

    def build(self, *, d_model: int, n_layers: int, rngs: nnx.Rngs) -> "GatedMLP":
        """See `FfnConfig`."""
        return GatedMLP(self, d_model=d_model, n_layers=n_layers, rngs=rngs)


class GatedMLP(nnx.Module):
    """Weights: gate and up [D, F], down [F, D]."""

    def __init__(self, config: GatedMLPConfig, *, d_model: int, n_layers: int, rngs: nnx.Rngs):
        self.config = config
        self.gate = matrix(rngs, (d_model, config.d_ff), axes=("embed", "mlp"), inputs=1)
        self.up = matrix(rngs, (d_model, config.d_ff), axes=("embed", "mlp"), inputs=1)
        self.down = matrix(rngs, (config.d_ff, d_model), axes=("mlp", "embed"), inputs=1, scale=(2 * n_layers) ** -0.5)
        if config.bias:
            self.gate_bias = vector((config.d_ff,), axes=("mlp",), fill=0.0)
            self.up_bias = vector((config.d_ff,), axes=("mlp",), fill=0.0)
            self.down_bias = vector((d_model,), axes=("norm",), fill=0.0)

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, Aux]:
        """[B, T, D] -> [B, T, D], no auxiliary terms."""
        bias = self.config.bias
        gate_BTF = dense(x_BTD, self.gate[...], self.gate_bias[...] if bias else None)
        up_BTF = dense(x_BTD, self.up[...], self.up_bias[...] if bias else None)
        hidden_BTF = constrain(_ACTIVATIONS[self.config.activation](gate_BTF) * up_BTF, "batch", "seq", "mlp")
        return dense(hidden_BTF, self.down[...], self.down_bias[...] if bias else None), {}
