import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telamon.kernels.matmul import matmul, product, product_t, settled, transposed, weight_gradient


def _random(*shape: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


@pytest.mark.parametrize("shape", [(24, 8, 40), (24, 40, 8), (1, 8, 8)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_carry_the_cotangent_to_both_inputs(shape: tuple[int, int, int], dtype: jnp.dtype):
    """Wider and narrower weights take different ways; the weight's gradient is float32 and never rounded to the compute type."""
    M, K, N = shape
    x, w, d_out = _random(M, K, dtype=dtype), _random(K, N, seed=1), _random(M, N, seed=2, dtype=dtype)
    out, pull = jax.jit(lambda x, w: jax.vjp(matmul, x, w))(x, w)
    d_x, d_w = jax.jit(lambda pull, d_out: pull(d_out))(pull, d_out)
    assert (out.dtype, d_x.dtype, d_w.dtype) == (dtype, dtype, jnp.float32)
    rounding = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(_exact(out), _exact(x) @ _exact(w), atol=rounding * K**0.5 * 3)
    np.testing.assert_allclose(_exact(d_x), _exact(d_out) @ _exact(w).T, atol=rounding * N**0.5 * 3)
    np.testing.assert_allclose(_exact(d_w), _exact(x).T @ _exact(d_out), atol=1e-4)
    np.testing.assert_allclose(jax.jit(weight_gradient)(x, d_out), d_w, atol=1e-5)


def test_products_over_leading_dims():
    x, y = _random(2, 3, 5, 4), _random(2, 3, 4, 6, seed=1)
    expected = _exact(x) @ _exact(y)
    np.testing.assert_allclose(product(x, y), expected, atol=1e-5)
    np.testing.assert_allclose(product_t(x, jnp.swapaxes(y, 2, 3)), expected, atol=1e-5)
    assert product(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), jnp.float32).dtype == jnp.float32
    np.testing.assert_array_equal(jax.jit(transposed)(x), np.swapaxes(x, 2, 3))
    np.testing.assert_array_equal(jax.jit(settled)(x), x)


def test_activations_read_by_several_maps_are_kept_once():
    x, w = jnp.ones((4, 8, 16), jnp.bfloat16), jnp.ones((2, 16, 4, 8))

    def layer(x, w):
        maps = [matmul(x, w), matmul(x, 2 * w), matmul(x, 3 * w)]
        return matmul(sum(maps), jnp.swapaxes(w, 0, 2).swapaxes(0, 1), 2), None

    _, pullback = jax.vjp(lambda x: jax.lax.scan(layer, x, w)[0], x)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pullback) if leaf.dtype == jnp.bfloat16)
    # Two layers' inputs of the three maps, and of the one after them, which is twice as wide.
    assert kept == 2 * (x.nbytes + 2 * x.nbytes)


def test_a_policy_that_saves_products_saves_this_one():
    """Each of the two products is made once forward and twice for gradients; with whole recomputation the first once more."""

    def count(policy) -> int:
        def layer(x, w):
            return jnp.sum(jnp.tanh(matmul(jnp.tanh(matmul(x, w)), w)))

        made = jax.make_jaxpr(jax.grad(jax.checkpoint(layer, policy=policy), argnums=(0, 1)))(_random(8, 16), _random(16, 16))
        return str(made).count("dot_general")

    assert count(jax.checkpoint_policies.dots_with_no_batch_dims_saveable) == count(jax.checkpoint_policies.everything_saveable)
    assert count(jax.checkpoint_policies.nothing_saveable) > count(jax.checkpoint_policies.everything_saveable)
