"""Normalisation: the forms that published models differ by.

In float32 `rms` and `rms32` are one; in bfloat16 the place of the cast is visible in the logits.
"""

import functools
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field

from telamon.config.schema import Section
from telamon.layers.param import vector


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float, scale_in_float32: bool = False) -> jax.Array:
    """`x / rms(x) * scale` over the last dim. For the gradient x is kept in its own type, not in float32, and one float32 a row."""
    return _forward(x, scale, eps, scale_in_float32)[0]


def _forward(x: jax.Array, scale: jax.Array, eps: float, scale_in_float32: bool):
    x32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    if scale_in_float32:
        out = (x32 * inverse_rms * scale).astype(x.dtype)
    else:
        out = (x32 * inverse_rms).astype(x.dtype) * scale.astype(x.dtype)
    return out, (x, scale, inverse_rms)


def _backward(eps: float, scale_in_float32: bool, residuals, dy: jax.Array):
    x, scale, inverse_rms = residuals
    normed, dy32 = x.astype(jnp.float32) * inverse_rms, dy.astype(jnp.float32)
    d_scale = jnp.sum(dy32 * normed, axis=tuple(range(x.ndim - 1)))
    d_normed = dy32 * scale
    d_x = inverse_rms * (d_normed - normed * jnp.mean(d_normed * normed, axis=-1, keepdims=True))
    return d_x.astype(x.dtype), d_scale.astype(scale.dtype)


rms_norm.defvjp(_forward, _backward)


class NormConfig(Section):
    """Which norm, described as data."""

    kind: Literal["rms", "rms32", "rms1p", "rms0", "layer"] = Field(
        default="rms",
        description="rms: normed, cast, times the scale (Llama); rms32: times the scale before the cast (OLMo 2); "
        "rms1p: times 1 + scale, before the cast (Gemma); rms0: without a scale (Llama 4's queries and keys); "
        "layer: LayerNorm with a bias (GPT).",
    )
    eps: Annotated[float, Field(gt=0)] = Field(default=1e-6, description="Added to the mean square (or the variance).")

    def build(self, size: int) -> "RMSNorm | UnscaledRMSNorm | LayerNorm":
        """The module over a last dim of `size`."""
        if self.kind == "rms0":
            return UnscaledRMSNorm(eps=self.eps)
        if self.kind == "layer":
            return LayerNorm(size, eps=self.eps)
        return RMSNorm(size, eps=self.eps, scale_in_float32=self.kind != "rms", offset=1.0 if self.kind == "rms1p" else 0.0)


class RMSNorm(nnx.Module):
    """`x / rms(x) * (offset + scale)` over the last dim, computed in float32 (Zhang and Sennrich 2019, eq. 4).

    Args:
        size: of the last dim.
        eps: added to the mean square.
        scale_in_float32: multiply by the scale before the cast back to the type of x, not after it.
        offset: 1 for weights that hold the scale's distance from 1 and start at 0, as Gemma's do.
    """

    def __init__(self, size: int, *, eps: float, scale_in_float32: bool = False, offset: float = 0.0):
        self.scale = vector((size,), axes=("norm",), fill=1.0 - offset)
        self.eps, self.scale_in_float32, self.offset = eps, scale_in_float32, offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size], in the type of `x`."""
        scale = self.scale[...] + self.offset if self.offset else self.scale[...]
        return rms_norm(x, scale, self.eps, self.scale_in_float32)


class UnscaledRMSNorm(nnx.Module):
    """`x / rms(x)` over the last dim, computed in float32: no weights."""

    def __init__(self, *, eps: float):
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size], in the type of `x`."""
        return rms_norm(x, jnp.ones(x.shape[-1:]), self.eps)


class LayerNorm(nnx.Module):
    """`(x - mean) / sqrt(var + eps) * scale + bias` over the last dim, computed in float32 (Ba et al. 2016, eq. 4)."""

    def __init__(self, size: int, *, eps: float):
        self.scale = vector((size,), axes=("norm",), fill=1.0)
        self.bias = vector((size,), axes=("norm",), fill=0.0)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size], in the type of `x`."""
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale[...] + self.bias[...]).astype(x.dtype)
