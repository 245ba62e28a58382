"""The linear maps: one small function a kind.

Every product of activations and weights in a model goes through these, so that adapters, quantisation and kernels have
one place to enter. Weights are float32 and are cast to the activations' type in `kernels.matmul`.
"""

import jax
import jax.numpy as jnp

from telamon.kernels.matmul import matmul


def dense(x_BTD: jax.Array, w_DF: jax.Array, bias_F: jax.Array | None = None) -> jax.Array:
    """[B, T, D] x [D, F] -> [B, T, F]."""
    return _with_bias(matmul(x_BTD, w_DF), bias_F)


def to_heads(x_BTD: jax.Array, w_DNH: jax.Array, bias_NH: jax.Array | None = None) -> jax.Array:
    """[B, T, D] x [D, N, H] -> [B, T, N, H]."""
    return _with_bias(matmul(x_BTD, w_DNH), bias_NH)


def from_heads(x_BTNH: jax.Array, w_NHD: jax.Array, bias_D: jax.Array | None = None) -> jax.Array:
    """[B, T, N, H] x [N, H, D] -> [B, T, D]."""
    return _with_bias(matmul(x_BTNH, w_NHD, 2), bias_D)


def inputs_to_heads(x_BTNC: jax.Array, w_CNH: jax.Array) -> jax.Array:
    """[B, T, N, C] x [C, N, H] -> [B, T, N, H]: a map to heads, of which each has an input of its own."""
    return jnp.einsum("btnc,cnh->btnh", x_BTNC, w_CNH.astype(x_BTNC.dtype))


def heads_to_inputs(x_BTNH: jax.Array, w_CNH: jax.Array) -> jax.Array:
    """[B, T, N, H] x [C, N, H] -> [B, T, N, C]: the transpose of the former."""
    return jnp.einsum("btnh,cnh->btnc", x_BTNH, w_CNH.astype(x_BTNH.dtype))


def _with_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias.astype(y.dtype)
