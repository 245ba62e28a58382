"""The whole decoder against NumPy in float64, its stacks, and what the backward pass may recompute."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy
import tiny

from telamon.models.decoder import Numerics
from telamon.models.weights import Model, Weights, flatten

BATCH = tiny.batch([[5, 3, 6], [16], [1, 10]], length=16)

VARIANTS: dict[str, dict[str, Any]] = {
    "llama, tied": {},
    "llama, untied": {"tie_embeddings": False},
    "llama with every bias": {"attention_bias": True, "mlp_bias": True, "rope_theta": 50.0},
    "qwen3": {"family": "qwen3", "n_kv_heads": 1, "norm_eps": 1e-3},
    "qwen3, untied, with biases, one layer": {"family": "qwen3", "tie_embeddings": False, "attention_bias": True, "n_layers": 1},
}


def _logits(model: Model, weights: Weights) -> jax.Array:
    return jax.jit(lambda weights: tiny.logits(model.bind(weights), BATCH))(weights)


def _expected(sizes: Any, flat: Any, row: int) -> np.ndarray:
    where = {"positions": BATCH["positions"][row], "segments": BATCH["segments"][row]}
    layers = [("stacks.0.blocks.0.", layer, sizes.rope_theta) for layer in range(sizes.n_layers)]
    return reference_numpy.decoder_logits(flat, BATCH["tokens"][row], **where, layers=layers, eps=sizes.norm_eps)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_numpy(variant: str):
    """Packed and padded rows, noise on every weight, biases and scales included."""
    sizes = tiny.sizes(**VARIANTS[variant])
    model = Model(sizes.spec())
    weights = tiny.weights(model)
    logits = _logits(model, weights)
    assert logits.dtype == jnp.float32
    for row in range(3):
        np.testing.assert_allclose(logits[row], _expected(sizes, flatten(weights), row), atol=1e-4)


def test_gradients_equal_finite_differences_of_numpy():
    """Central differences in float64, at one entry of each weight."""
    sizes = tiny.sizes("qwen3", attention_bias=True, tie_embeddings=False)
    model = Model(sizes.spec())
    weights = tiny.weights(model)
    probe = np.random.default_rng(3).standard_normal((16, 64))

    def objective(weights: Weights) -> jax.Array:
        row = {name: x[:1] for name, x in BATCH.items()}
        return jnp.sum(jnp.tanh(tiny.logits(model.bind(weights), row)) * probe)

    gradients = {path: np.asarray(value) for path, value in flatten(jax.jit(jax.grad(objective))(weights)).items()}
    flat = {path: np.asarray(value, np.float64) for path, value in flatten(weights).items()}
    rng = np.random.default_rng(4)
    for path, value in flat.items():
        # The embedding of a token that occurs, or any entry elsewhere.
        index = (int(BATCH["tokens"][0, 0]), 3) if path == "embedding" else tuple(int(rng.integers(0, size)) for size in value.shape)
        sides = []
        for step in (1e-5, -1e-5):
            moved = value.copy()
            moved[index] += step
            sides.append((np.tanh(_expected(sizes, flat | {path: moved}, 0)) * probe).sum())
        assert gradients[path][index] == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=2e-3, abs=2e-4), path


def test_recomputing_in_the_backward_pass_changes_no_gradient():
    def gradients(remat: Any) -> Weights:
        model = tiny.model(numerics=Numerics(remat=remat))

        def objective(weights: Weights) -> jax.Array:
            return jnp.sum(jnp.sin(tiny.logits(model.bind(weights), BATCH)))

        return jax.jit(jax.grad(objective))(weights)

    weights = tiny.weights(tiny.model())
    kept = gradients("none")
    for remat in ("full", "dots"):
        jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4), gradients(remat), kept)


def test_bfloat16_activations_stay_near_float32():
    weights = tiny.weights(tiny.model())
    exact = _logits(tiny.model(), weights)
    rounded = _logits(tiny.model(numerics=Numerics(dtype="bfloat16")), weights)
    assert rounded.dtype == jnp.float32
    assert not np.array_equal(exact, rounded)
    assert np.linalg.norm(exact - rounded) < 0.05 * np.linalg.norm(exact)
