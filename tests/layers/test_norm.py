import jax
import jax.numpy as jnp
import numpy as np
import reference_numpy

from telamon.layers.norm import RMSNorm


def _norm(scale: np.ndarray, *, eps: float) -> RMSNorm:
    norm = RMSNorm(len(scale), eps=eps)
    norm.scale[...] = jnp.asarray(scale)
    return norm


def test_equals_the_formula_in_float64():
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((2, 3, 8)).astype(np.float32), rng.standard_normal(8).astype(np.float32)
    expected = reference_numpy.rms_norm(x.astype(np.float64), scale.astype(np.float64), 1e-2)
    np.testing.assert_allclose(_norm(scale, eps=1e-2)(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)


def test_squares_are_summed_in_float32_under_bfloat16():
    # 2048 squares of 1: a bfloat16 sum stops growing at 256, which would make the output 2.8 times too large.
    x = jnp.ones((1, 2048), jnp.bfloat16)
    out = _norm(np.ones(2048, np.float32), eps=1e-6)(x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(jnp.float32), 1.0)


def test_zeros_stay_zeros_with_finite_gradients():
    norm = _norm(np.ones(8, np.float32), eps=1e-6)
    value, grad = jax.value_and_grad(lambda x: jnp.sum(norm(x)))(jnp.zeros((2, 8)))
    assert value == 0
    assert np.isfinite(grad).all()
