"""Normalisation."""

import jax
import jax.numpy as jnp
from flax import nnx

from telamon.layers.param import vector


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last dim, computed in float32 (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, size: int, *, eps: float):
        self.scale = vector((size,), axes=("norm",), fill=1.0)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size], in the type of `x`."""
        x32 = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        # The product with the scale happens after the cast, as in the published Llama code.
        return (x32 * inverse_rms).astype(x.dtype) * self.scale[...].astype(x.dtype)
