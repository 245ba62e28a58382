import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy

from telamon.kernels.cross_entropy import CrossEntropy, cross_entropy, reference_cross_entropy


def _inputs(B: int, T: int, D: int, V: int, *, dtype=jnp.float32) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        "hidden": jnp.asarray(rng.standard_normal((B, T, D)), dtype),
        "head": jnp.asarray(rng.standard_normal((D, V)), jnp.float32),
        "targets": jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32),
        "mask": jnp.asarray(rng.random((B, T)) < 0.7, jnp.float32),
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sums_and_gradients(function: Callable[..., CrossEntropy], factor: float, inputs: dict[str, jax.Array]) -> Any:
    """The sums, and gradients of factor x objective by hidden states and by the head."""

    def objective(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, CrossEntropy]:
        sums = function(hidden, head, inputs["targets"], inputs["mask"])
        return factor * sums.objective, sums

    (_, sums), gradients = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(inputs["hidden"], inputs["head"])
    return sums, gradients


def _chunked(*, chunk: int, z_loss: float = 0.0) -> Callable[..., CrossEntropy]:
    return functools.partial(cross_entropy, chunk=chunk, z_loss=z_loss)


def _whole(*, z_loss: float = 0.0) -> Callable[..., CrossEntropy]:
    return functools.partial(reference_cross_entropy, z_loss=z_loss)


def test_sums_equal_the_formula_in_float64():
    inputs = _inputs(2, 4, 8, 16)
    hidden, head, mask = (np.asarray(inputs[name], np.float64) for name in ("hidden", "head", "mask"))
    logits, targets = hidden @ head, np.asarray(inputs["targets"])
    nll = -(np.take_along_axis(reference_numpy.log_softmax(logits), targets[..., None], -1)[..., 0] * mask).sum()
    log_z = np.log(np.exp(logits).sum(-1))
    sums = _sums_and_gradients(_chunked(chunk=2, z_loss=0.1), 1.0, inputs)[0]
    assert sums.nll == pytest.approx(nll, rel=1e-6)
    assert sums.objective == pytest.approx(nll + 0.1 * (mask * log_z**2).sum(), rel=1e-6)
    assert sums.correct == (mask * (logits.argmax(-1) == targets)).sum()


@pytest.mark.parametrize(("chunk", "z_loss"), [(1, 0.0), (4, 0.0), (8, 1e-2), (24, 0.0), (1000, 1e-2)])
def test_gradients_carry_the_incoming_cotangent_to_both_inputs(chunk: int, z_loss: float):
    """A hand-written backward pass that forgets the factor is exact for a factor of 1 and wrong for every other.

    With chunks of one token, of columns that divide 12 tokens evenly, and of the whole batch.
    """
    inputs = _inputs(2, 12, 8, 16)
    sums, gradients = _sums_and_gradients(_chunked(chunk=chunk, z_loss=z_loss), 2.5, inputs)
    expected_sums, expected = _sums_and_gradients(_whole(z_loss=z_loss), 2.5, inputs)
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-6)
    for name, ours, theirs in zip(("hidden", "head"), gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_caps_and_spare_columns_equal_a_smaller_head_in_value_and_gradient(softcap: float | None):
    """A head of 16 columns of which 11 stand for tokens is one of 11; the spare columns get no probability and no gradient."""
    inputs = _inputs(2, 12, 8, 16)
    inputs["targets"] %= 11
    spare = functools.partial(cross_entropy, chunk=4, z_loss=1e-2, softcap=softcap, vocab=11)
    sums, (d_hidden, d_head) = _sums_and_gradients(spare, 2.5, inputs)
    small = functools.partial(reference_cross_entropy, z_loss=1e-2, softcap=softcap)
    expected_sums, (expected_hidden, expected_head) = _sums_and_gradients(small, 2.5, inputs | {"head": inputs["head"][:, :11]})
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-6)
    np.testing.assert_allclose(d_hidden, expected_hidden, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(d_head[:, :11], expected_head, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(d_head[:, 11:], 0.0)


def test_measurements_have_no_gradient():
    inputs = _inputs(2, 4, 8, 16)

    def measurements(hidden: jax.Array) -> jax.Array:
        sums = cross_entropy(hidden, inputs["head"], inputs["targets"], inputs["mask"], chunk=2)
        assert sums.correct is not None
        return sums.nll + sums.correct

    np.testing.assert_array_equal(jax.jit(jax.grad(measurements))(inputs["hidden"]), 0.0)


def test_nothing_to_train_is_zero_with_zero_gradients():
    inputs = _inputs(2, 4, 8, 16)
    inputs |= {"mask": jnp.zeros((2, 4)), "hidden": 1e4 * inputs["hidden"]}
    sums, gradients = _sums_and_gradients(_chunked(chunk=2, z_loss=1e-2), 2.5, inputs)
    np.testing.assert_array_equal(sums, 0.0)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0.0)


def test_bfloat16_hidden_states_lose_little():
    """Logits, softmax and sums stay float32: 200 tokens lose less than the inputs' own rounding."""
    small, exact = (_inputs(4, 50, 16, 32, dtype=dtype) for dtype in (jnp.bfloat16, jnp.float32))
    sums, gradients = _sums_and_gradients(_chunked(chunk=40), 1.0, small)
    expected_sums, expected = _sums_and_gradients(_whole(), 1.0, exact)
    assert sums.nll.dtype == jnp.float32
    assert sums.nll == pytest.approx(float(expected_sums.nll), rel=3e-3)
    assert gradients[0].dtype == jnp.bfloat16
    assert gradients[1].dtype == jnp.float32
    for ours, theirs in zip(gradients, expected, strict=True):
        assert np.linalg.norm(ours.astype(jnp.float32) - theirs) < 1e-2 * np.linalg.norm(theirs)


def _largest_array(function: Callable[..., CrossEntropy]) -> int:
    """Values in the largest array anywhere in the traced gradient."""
    inputs = _inputs(4, 64, 8, 512)
    jaxpr = jax.make_jaxpr(_sums_and_gradients, static_argnums=(0, 1))(function, 1.0, inputs)

    def sizes(jaxpr: Any):
        for equation in jaxpr.eqns:
            yield from (variable.aval.size for variable in equation.outvars)
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "eqns"):
                    yield from sizes(inner)

    return max(sizes(jaxpr.jaxpr))


def test_the_whole_batchs_logits_never_exist():
    assert _largest_array(_whole()) == 4 * 64 * 512
    assert _largest_array(_chunked(chunk=32)) == 32 * 512
