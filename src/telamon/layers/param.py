"""Weights: how one is made, and what it says of itself.

A weight is an `nnx.Param` in float32 whose metadata holds `axes`, a logical name for each dimension (`parallel.rules` turns
them into shardings), `matrix`, the (input dims, output dims) of a linear map, or None, and `used`, the share of it that works on
a token. Optimizers, FLOPs and memory follow from these declarations.
"""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx


def matrix(
    rngs: nnx.Rngs,
    shape: Sequence[int],
    *,
    axes: Sequence[str],
    inputs: int,
    scale: float = 1.0,
    role: Literal["hidden", "embedding", "router"] = "hidden",
    copies: bool = False,
    used: float = 1.0,
) -> nnx.Param:
    """A linear map's weight: its first `inputs` dims are contracted with the input, the others make the output.

    Initial values are normal, cut at two deviations, with variance `scale**2 / fan_in` (LeCun et al. 1998).

    Args:
        rngs: where initial values come from.
        shape: of the weight.
        axes: a logical name for each dim.
        inputs: dims that are contracted.
        scale: of the initial values.
        role: hidden; embedding; or router, a map that is computed in float32 wherever the model runs.
        copies: the first dim is neither input nor output, but counts maps that are alike (experts); `inputs` is of those behind it.
        used: share of the copies that a token goes through.
    """
    first = int(copies)
    fan_in = math.prod(shape[first : first + inputs])
    # 0.8796 is the deviation of a standard normal cut at 2.
    stddev = scale / math.sqrt(fan_in) / 0.87962566103423978
    value = stddev * jax.random.truncated_normal(rngs.params(), -2.0, 2.0, tuple(shape), jnp.float32)
    dims = (tuple(range(first, first + inputs)), tuple(range(first + inputs, len(shape))))
    return nnx.Param(value, axes=tuple(axes), matrix=dims, role=role, used=used)


def vector(shape: Sequence[int], *, axes: Sequence[str], fill: float, used: float = 1.0) -> nnx.Param:
    """A scale or a bias, filled with one value; `used` as of `matrix`."""
    return nnx.Param(jnp.full(tuple(shape), fill, jnp.float32), axes=tuple(axes), matrix=None, role="vector", used=used)


def buffer(shape: Sequence[int], *, axes: Sequence[str]) -> nnx.Param:
    """Zeros that no gradient reaches and no optimizer moves: whoever declares it says what does."""
    return nnx.Param(jnp.zeros(tuple(shape), jnp.float32), axes=tuple(axes), matrix=None, role="buffer", used=1.0)


def table(rngs: nnx.Rngs, shape: Sequence[int], *, axes: Sequence[str], stddev: float) -> nnx.Param:
    """An embedding table [V, D], or an output head [D, V]: normal with the given deviation."""
    value = stddev * jax.random.normal(rngs.params(), tuple(shape), jnp.float32)
    return nnx.Param(value, axes=tuple(axes), matrix=((0,), (1,)), role="embedding", used=1.0)
