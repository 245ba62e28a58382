"""Rotary position embedding (Su et al. 2021, section 3.2), with the two halves of a head paired as Llama's checkpoints do."""

from typing import Annotated

import jax
import jax.numpy as jnp
from pydantic import Field

from telamon.config.schema import Section


class RopeConfig(Section):
    """How angles grow with position."""

    theta: Annotated[float, Field(gt=0)] = Field(default=10_000.0, description="Base of the geometric series of wavelengths.")

    def inverse_frequencies(self, head_dim: int) -> jax.Array:
        """Angle per position of each pair, in radians: [H/2] float32."""
        exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
        return 1.0 / (self.theta**exponents)


def rotate(x: jax.Array, *, positions: jax.Array, inverse_frequencies: jax.Array) -> jax.Array:
    """Rotate the pairs (x[i], x[i + H/2]) of x [B, T, N, H] by position [B, T] times frequency [H/2].

    Angles and products are float32 whatever the type of x: in bfloat16 position 257 would round to 256.
    """
    angles = positions.astype(jnp.float32)[..., None] * inverse_frequencies
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
