"""The MLPs: gated (Shazeer 2020, "GLU variants improve transformer", eq. 5), with a clamp where a model has it, and GPT's without a gate."""

import functools
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field

from telamon.config.schema import Positive
from telamon.kernels.matmul import narrow
from telamon.layers.linear import dense
from telamon.layers.param import matrix, vector
from telamon.layers.parts import Aux, Context, FfnConfig, register
from telamon.parallel.rules import constrain

Activation = Literal["silu", "gelu_tanh", "gelu"]
GatedActivation = Literal["silu", "gelu_tanh", "gelu", "swiglu_oss"]
"""swiglu_oss: `gate * sigmoid(1.702 gate) * (up + 1)` (gpt-oss model card, OpenAI 2025, section 2.3)."""

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "swiglu_oss": lambda x: x * jax.nn.sigmoid(1.702 * x),
}

_UP_SHIFT = {"swiglu_oss": 1.0}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gated(activation: str, limit: float | None, gate: jax.Array, up: jax.Array) -> jax.Array:
    """`activation(gate) * up` in float32, in the type of `up`; for the gradient only the two inputs are kept.

    Args:
        activation: a name of `GatedActivation`.
        limit: the gate is cut off above it, and up outside of plus and minus it, before all else; None: neither.
        gate, up: [..., F] each.
    """
    return _formula(activation, limit, gate.astype(jnp.float32), up.astype(jnp.float32)).astype(up.dtype)


def _formula(activation: str, limit: float | None, gate: jax.Array, up: jax.Array) -> jax.Array:
    if limit is not None:
        # Written so that a value at the limit keeps its whole gradient; that of `jnp.minimum` would be half.
        gate = jnp.where(gate > limit, limit, gate)
        up = jnp.where(jnp.abs(up) > limit, jnp.copysign(limit, up), up)
    return _ACTIVATIONS[activation](gate) * (up + _UP_SHIFT.get(activation, 0.0))


def _gated_forward(activation: str, limit: float | None, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return gated(activation, limit, gate, up), (gate, up)


def _gated_backward(
    activation: str, limit: float | None, inputs: tuple[jax.Array, jax.Array], d_hidden: jax.Array
) -> tuple[jax.Array, jax.Array]:
    gate, up = (x.astype(jnp.float32) for x in inputs)
    _, pullback = jax.vjp(functools.partial(_formula, activation, limit), gate, up)
    d_gate, d_up = pullback(narrow(d_hidden).astype(jnp.float32))
    return d_gate.astype(inputs[0].dtype), d_up.astype(inputs[1].dtype)


gated.defvjp(_gated_forward, _gated_backward)


@register
class GatedMLPConfig(FfnConfig):
    """`down(activation(gate(x)) * up(x))`."""

    kind: str = "gated_mlp"
    d_ff: Positive = Field(description="Hidden width F.")
    activation: GatedActivation = Field(default="silu", description="Gate's activation.")
    limit: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="The gate is cut off above this, and up outside of plus and minus this (GPT-OSS: 7); none: neither."
    )
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
        hidden_BTF = constrain(gated(self.config.activation, self.config.limit, gate_BTF, up_BTF), "batch", "seq", "mlp")
        return dense(hidden_BTF, self.down[...], self.down_bias[...] if bias else None), {}


@register
class MLPConfig(FfnConfig):
    """`down(activation(up(x)))` with biases, as GPT-2 and GPT-3 have it."""

    kind: str = "mlp"
    d_ff: Positive = Field(description="Hidden width F.")
    activation: Activation = Field(default="gelu_tanh", description="Activation.")

    def build(self, *, d_model: int, n_layers: int, rngs: nnx.Rngs) -> "MLP":
        """See `FfnConfig`."""
        return MLP(self, d_model=d_model, n_layers=n_layers, rngs=rngs)


class MLP(nnx.Module):
    """Weights: up [D, F], down [F, D], and a bias for each."""

    def __init__(self, config: MLPConfig, *, d_model: int, n_layers: int, rngs: nnx.Rngs):
        self.config = config
        self.up = matrix(rngs, (d_model, config.d_ff), axes=("embed", "mlp"), inputs=1)
        self.up_bias = vector((config.d_ff,), axes=("mlp",), fill=0.0)
        self.down = matrix(rngs, (config.d_ff, d_model), axes=("mlp", "embed"), inputs=1, scale=(2 * n_layers) ** -0.5)
        self.down_bias = vector((d_model,), axes=("norm",), fill=0.0)

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, Aux]:
        """[B, T, D] -> [B, T, D], no auxiliary terms."""
        up_BTF = dense(x_BTD, self.up[...], self.up_bias[...])
        hidden_BTF = _ACTIVATIONS[self.config.activation](up_BTF.astype(jnp.float32)).astype(up_BTF.dtype)
        return dense(constrain(hidden_BTF, "batch", "seq", "mlp"), self.down[...], self.down_bias[...]), {}
