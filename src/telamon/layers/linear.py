"""The linear maps: one small function a kind.

Every product of activations and weights in a model goes through these, so that adapters, quantisation and kernels have
one place to enter. Weights are float32 and are cast to the activations' type in `kernels.matmul`.
"""

import jax

from telamon.kernels.matmul import matmul


def dense(x_BTD: jax.Array, w_DF: jax.Array, bias_F: jax.Array | None = None) -> jax.Array:
    """[B, T, D] x [D, F] -> [B, T, F]."""
    B, T, D = x_BTD.shape
    y_BTF = matmul(x_BTD.reshape(B * T, D), w_DF).reshape(B, T, w_DF.shape[1])
    return y_BTF if bias_F is None else y_BTF + bias_F.astype(y_BTF.dtype)


def to_heads(x_BTD: jax.Array, w_DNH: jax.Array, bias_NH: jax.Array | None = None) -> jax.Array:
    """[B, T, D] x [D, N, H] -> [B, T, N, H]."""
    (B, T, _), (D, N, H) = x_BTD.shape, w_DNH.shape
    y_BTNH = dense(x_BTD, w_DNH.reshape(D, N * H)).reshape(B, T, N, H)
    return y_BTNH if bias_NH is None else y_BTNH + bias_NH.astype(y_BTNH.dtype)


def from_heads(x_BTNH: jax.Array, w_NHD: jax.Array, bias_D: jax.Array | None = None) -> jax.Array:
    """[B, T, N, H] x [N, H, D] -> [B, T, D]."""
    (B, T, N, H), D = x_BTNH.shape, w_NHD.shape[2]
    return dense(x_BTNH.reshape(B, T, N * H), w_NHD.reshape(N * H, D), bias_D)
