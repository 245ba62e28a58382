from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy
from flax import nnx

from telamon.layers.norm import NormConfig, RMSNorm, rms_norm


def _norm(scale: np.ndarray, *, eps: float) -> RMSNorm:
    norm = RMSNorm(len(scale), eps=eps)
    norm.scale[...] = jnp.asarray(scale)
    return norm


def test_equals_the_formula_in_float64():
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((2, 3, 8)).astype(np.float32), rng.standard_normal(8).astype(np.float32)
    expected = reference_numpy.rms_norm(x.astype(np.float64), scale.astype(np.float64), 1e-2)
    np.testing.assert_allclose(_norm(scale, eps=1e-2)(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)


def test_only_the_result_is_rounded_under_bfloat16():
    """Squares, mean and root in bfloat16 would put every third value one step off."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.bfloat16)
    out = _norm(np.ones(64, np.float32), eps=1e-6)(x)
    assert out.dtype == jnp.bfloat16
    exact = reference_numpy.rms_norm(np.asarray(x.astype(jnp.float32), np.float64), np.ones(64), 1e-6)
    off = out != jnp.asarray(exact, jnp.bfloat16)
    assert off.mean() < 1e-3  # a value half-way between two neighbours may go either way


def test_zeros_stay_zeros_with_finite_gradients():
    norm = _norm(np.ones(8, np.float32), eps=1e-6)
    value, grad = jax.value_and_grad(lambda x: jnp.sum(norm(x)))(jnp.zeros((2, 8)))
    assert value == 0
    assert np.isfinite(grad).all()


def test_the_gradient_is_that_of_the_formula():
    rng = np.random.default_rng(0)
    x, scale, weight = rng.standard_normal((2, 3, 8)), rng.standard_normal(8), rng.standard_normal((2, 3, 8))

    def total(x: np.ndarray, scale: np.ndarray) -> float:
        return float(np.sum(weight * reference_numpy.rms_norm(x, scale, 1e-2)))

    def slope(place: np.ndarray, index: tuple[int, ...]) -> float:
        """Central difference in float64."""
        values = []
        for step in (1e-6, -1e-6):
            place[index] += step
            values.append(total(x, scale))
            place[index] -= step
        return (values[0] - values[1]) / 2e-6

    gradient = jax.grad(lambda x, scale: jnp.sum(weight * rms_norm(x, scale, 1e-2)), argnums=(0, 1))
    for found, place in zip(gradient(jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32)), (x, scale), strict=True):
        expected = np.array([slope(place, index) for index in np.ndindex(place.shape)]).reshape(place.shape)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_only_the_input_is_kept_for_the_gradient():
    x = jnp.ones((4, 16, 32), jnp.bfloat16)
    _, pullback = jax.vjp(lambda x: rms_norm(x, jnp.ones(32), 1e-6), x)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pullback))
    assert kept <= x.nbytes + 4 * 16 * 4 + 32 * 4


@pytest.mark.parametrize("kind", ["rms", "rms32", "rms1p"])
def test_the_cast_stands_where_the_kind_says(kind: Any):
    """In bfloat16: rms casts before the scale, rms32 after it, rms1p multiplies by 1 + weight and then casts."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((64, 32)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal(32), jnp.float32)
    norm: Any = NormConfig(kind=kind, eps=1e-3).build(32)
    norm.scale[...] = weight
    normed = reference_numpy.rms_norm(np.asarray(x.astype(jnp.float32), np.float64), np.ones(32), 1e-3)
    expected = {
        "rms": jnp.asarray(normed, jnp.bfloat16) * weight.astype(jnp.bfloat16),
        "rms32": jnp.asarray(normed * np.asarray(weight, np.float64), jnp.bfloat16),
        "rms1p": jnp.asarray(normed * (1.0 + np.asarray(weight, np.float64)), jnp.bfloat16),
    }
    out = norm(x)
    off = {other: float((out != array).mean()) for other, array in expected.items()}
    assert off.pop(kind) < 2e-3  # a value half-way between two neighbours may go either way
    assert min(off.values()) > 0.1, "the other kinds differ visibly"


def test_without_a_scale_there_is_no_weight():
    norm = NormConfig(kind="rms0", eps=1e-2).build(8)
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    np.testing.assert_allclose(norm(jnp.asarray(x)), reference_numpy.rms_norm(x.astype(np.float64), np.ones(8), 1e-2), rtol=1e-5)
    assert not jax.tree.leaves(nnx.state(norm))
    assert norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", ["rms", "rms32", "rms1p", "rms0", "layer"])
def test_a_fresh_norm_scales_by_one(kind: Any):
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    centred = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    expected = centred / np.sqrt((centred.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(NormConfig(kind=kind, eps=1e-3).build(32)(jnp.asarray(x)), expected, atol=1e-5)
