"""Rotary position embedding (Su et al. 2021, section 3.2), with a head's halves paired as Llama 3's checkpoints have it, or its
neighbours, as the paper and Llama 4's have it.

A scaling stretches the wavelengths of a model that was trained on short text for use on longer text. Every constant comes
from the config: none depends on a model's name.
"""

import math
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from telamon.config.schema import Section
from telamon.kernels.matmul import narrow

Above0 = Annotated[float, Field(gt=0)]


class LinearScaling(Section):
    """Every wavelength times `factor` (Chen et al. 2023, eq. 4)."""

    kind: Literal["linear"] = Field(default="linear", description="Name of the scaling.")
    factor: Above0 = Field(description="How many times longer the text may be.")

    def stretch(self, inverse: np.ndarray, theta: float) -> np.ndarray:
        """Scaled angles per position, [R/2] float64."""
        return inverse / self.factor

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines."""
        return 1.0


class Llama3Scaling(Section):
    """Long wavelengths times `factor`, short ones kept, a straight line between (Llama team 2024, section 3.4.3, and their code)."""

    kind: Literal["llama3"] = Field(default="llama3", description="Name of the scaling.")
    factor: Above0 = Field(description="How many times longer the text may be.")
    low_freq_factor: Above0 = Field(default=1.0, description="Wavelengths above original_length / this are stretched whole.")
    high_freq_factor: Above0 = Field(default=4.0, description="Wavelengths below original_length / this are kept.")
    original_length: Annotated[int, Field(gt=0)] = Field(default=8192, description="Length the model was first trained on, in tokens.")

    def stretch(self, inverse: np.ndarray, theta: float) -> np.ndarray:
        """Scaled angles per position, [R/2] float64."""
        turns = self.original_length * inverse / (2 * math.pi)  # in the original length
        band = self.high_freq_factor - self.low_freq_factor
        # With equal factors there is no band between: a frequency is kept or stretched whole.
        kept = np.clip((turns - self.low_freq_factor) / band, 0.0, 1.0) if band else (turns >= self.high_freq_factor).astype(float)
        return inverse * kept + inverse / self.factor * (1 - kept)

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines."""
        return 1.0


class YarnScaling(Section):
    """YaRN (Peng et al. 2023, section 3.2): as llama3, with the band given in turns and the attention sharpened."""

    kind: Literal["yarn"] = Field(default="yarn", description="Name of the scaling.")
    factor: Above0 = Field(description="How many times longer the text may be.")
    original_length: Annotated[int, Field(gt=0)] = Field(description="Length the model was first trained on, in tokens.")
    beta_fast: Above0 = Field(default=32.0, description="Pairs that turn more often than this in the original length are kept.")
    beta_slow: Above0 = Field(default=1.0, description="Pairs that turn less often than this are stretched whole.")
    truncate: bool = Field(default=True, description="Round the ends of the band outwards to whole pairs.")
    attention_factor: Above0 | None = Field(
        default=None, description="Factor on cosines and sines; none: from mscale, else 0.1 ln(factor) + 1."
    )
    mscale: float | None = Field(default=None, description="DeepSeek: numerator of the factor on cosines and sines, as m(factor, mscale).")
    mscale_all_dim: float | None = Field(default=None, description="DeepSeek: its denominator, as m(factor, mscale_all_dim).")

    def stretch(self, inverse: np.ndarray, theta: float) -> np.ndarray:
        """Scaled angles per position, [R/2] float64."""
        pairs = len(inverse)

        def pair(turns: float) -> float:
            """The pair, counted from the fastest, that turns this often in the original length."""
            return pairs * math.log(self.original_length / (2 * math.pi * turns)) / math.log(theta)

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        slow = np.clip((np.arange(pairs) - first) / (last - first or 0.001), 0.0, 1.0)
        return inverse / self.factor * slow + inverse * (1 - slow)

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_growth(self.factor, self.mscale) / yarn_growth(self.factor, self.mscale_all_dim)
        return yarn_growth(self.factor)


def yarn_growth(factor: float, weight: float = 1.0) -> float:
    """YaRN's m: 0.1 weight ln(factor) + 1, and 1 where nothing is stretched (Peng et al. 2023, eq. 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


RopeScaling = Annotated[LinearScaling | Llama3Scaling | YarnScaling, Field(discriminator="kind")]

Pairs = Literal["halves", "interleaved"]


class RopeConfig(Section):
    """How angles grow with position."""

    theta: Annotated[float, Field(gt=0)] = Field(default=10_000.0, description="Base of the geometric series of wavelengths.")
    scaling: RopeScaling | None = Field(default=None, description="How wavelengths are stretched for longer text.")
    pairs: Pairs = Field(
        default="halves",
        description="What turns together: halves (features i and i + H/2, Llama 3) or interleaved (2i and 2i + 1, Llama 4).",
    )

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Angle per position of each pair, in radians: [H/2] float32, rounded once."""
        inverse = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.scaling is not None:
            inverse = self.scaling.stretch(inverse, self.theta)
        return inverse.astype(np.float32)

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.amplitude


class Rotation(NamedTuple):
    """Cosines and sines of every pair's angle at every position, [B, T, H/2] float32, times the amplitude."""

    cos: jax.Array
    sin: jax.Array


def rotation(positions: jax.Array, inverse_frequencies: np.ndarray | jax.Array, *, amplitude: float = 1.0) -> Rotation:
    """Angles are position [B, T] times frequency [H/2], in float32: in bfloat16 position 257 would round to 256."""
    angles = positions.astype(jnp.float32)[..., None] * inverse_frequencies
    return Rotation(amplitude * jnp.cos(angles), amplitude * jnp.sin(angles))


def rotate(x: jax.Array, by: Rotation, pairs: Pairs = "halves") -> jax.Array:
    """Rotate the pairs of x [B, T, N, H], (x[i], x[i + H/2]) or (x[2i], x[2i + 1]), in float32 whatever the type of x; each stays where it was."""
    cos, sin = by.cos[:, :, None, :], by.sin[:, :, None, :]
    x32 = narrow(x).astype(jnp.float32)
    if pairs == "interleaved":
        paired = x32.reshape(*x.shape[:-1], -1, 2)
        first, second = paired[..., 0], paired[..., 1]
    else:
        first, second = jnp.split(x32, 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    rotated = jnp.stack(turned, axis=-1).reshape(x.shape) if pairs == "interleaved" else jnp.concatenate(turned, axis=-1)
    return rotated.astype(x.dtype)
