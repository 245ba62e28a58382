"""The linear maps: one small function a kind.

Every product of activations and weights in a model goes through these, so that adapters, quantisation and kernels have
one place to enter. Weights are float32 and are cast to the activations' type here.
"""

import jax
import jax.numpy as jnp


def dense(x_BTD: jax.Array, w_DF: jax.Array, bias_F: jax.Array | None = None) -> jax.Array:
    """[B, T, D] x [D, F] -> [B, T, F]."""
    y_BTF = jnp.einsum("btd,df->btf", x_BTD, w_DF.astype(x_BTD.dtype))
    return y_BTF if bias_F is None else y_BTF + bias_F.astype(y_BTF.dtype)


def to_heads(x_BTD: jax.Array, w_DNH: jax.Array, bias_NH: jax.Array | None = None) -> jax.Array:
    """[B, T, D] x [D, N, H] -> [B, T, N, H]."""
    y_BTNH = jnp.einsum("btd,dnh->btnh", x_BTD, w_DNH.astype(x_BTD.dtype))
    return y_BTNH if bias_NH is None else y_BTNH + bias_NH.astype(y_BTNH.dtype)


def from_heads(x_BTNH: jax.Array, w_NHD: jax.Array, bias_D: jax.Array | None = None) -> jax.Array:
    """[B, T, N, H] x [N, H, D] -> [B, T, D]."""
    y_BTD = jnp.einsum("btnh,nhd->btd", x_BTNH, w_NHD.astype(x_BTNH.dtype))
    return y_BTD if bias_D is None else y_BTD + bias_D.astype(y_BTD.dtype)
