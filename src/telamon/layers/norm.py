"""Normalisation."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from telamon.layers.param import vector


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) * scale` over the last dim. For the gradient x is kept in its own type, not in float32, and one float32 a row."""
    return _forward(x, scale, eps)[0]


def _forward(x: jax.Array, scale: jax.Array, eps: float):
    x32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    # The product with the scale happens after the cast, as in the published Llama code.
    return (x32 * inverse_rms).astype(x.dtype) * scale.astype(x.dtype), (x, scale, inverse_rms)


def _backward(eps: float, residuals, dy: jax.Array):
    x, scale, inverse_rms = residuals
    normed, dy32 = x.astype(jnp.float32) * inverse_rms, dy.astype(jnp.float32)
    d_scale = jnp.sum(dy32 * normed, axis=tuple(range(x.ndim - 1)))
    d_normed = dy32 * scale
    d_x = inverse_rms * (d_normed - normed * jnp.mean(d_normed * normed, axis=-1, keepdims=True))
    return d_x.astype(x.dtype), d_scale.astype(scale.dtype)


rms_norm.defvjp(_forward, _backward)


class RMSNorm(nnx.Module):
    """`x / rms(x) * scale` over the last dim, computed in float32 (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, size: int, *, eps: float):
        self.scale = vector((size,), axes=("norm",), fill=1.0)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size], in the type of `x`."""
        return rms_norm(x, self.scale[...], self.eps)
