"""AdamW against its formula in float64, Muon against matrices one by one, groups with rates of their own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import tiny

from telamon.config.schema import GroupConfig, OptimizerConfig, ScheduleConfig
from telamon.errors import ConfigError
from telamon.models.weights import Model, flatten
from telamon.train.job import make_job
from telamon.train.optimizer import build_optimizer

MODEL = tiny.model(attention_bias=True, tie_embeddings=False)
CONSTANT = ScheduleConfig(kind="constant", warmup_steps=0)


@pytest.fixture(scope="module")
def weights() -> Any:
    return tiny.weights(MODEL)


@pytest.fixture(scope="module")
def gradients() -> list[Any]:
    """Gradients of five steps, of which the last are large enough to be clipped."""
    return [jax.tree.map(lambda leaf, s=step: leaf * 10.0 ** (s - 3), tiny.weights(MODEL, seed=10 + step)) for step in range(5)]


def _steps(optimizer: OptimizerConfig, weights: Any, gradients: list[Any], model: Model = MODEL) -> list[dict[str, np.ndarray]]:
    """Weights by path after each step."""
    rule = build_optimizer(tiny.run(model={"attention_bias": True, "tie_embeddings": False}, optimizer=optimizer), model)

    @jax.jit
    def step(weights: Any, state: Any, grads: Any) -> Any:
        updates, state = rule.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    state, after = jax.jit(rule.init)(weights), []
    for grads in gradients:
        weights, state = step(weights, state, grads)
        after.append({path: np.asarray(leaf) for path, leaf in flatten(weights).items()})
    return after


@pytest.mark.parametrize("clip_norm", [1.0, None])
def test_adamw_equals_its_formula_over_five_steps(weights: Any, gradients: list[Any], clip_norm: float | None):
    """Loshchilov and Hutter 2019, algorithm 2: the gradient clipped by its global norm, decay outside the moments, on matrices alone."""
    rate, b1, b2, eps, decay = 0.01, 0.8, 0.9, 1e-6, 0.3
    settings = OptimizerConfig(learning_rate=rate, b1=b1, b2=b2, eps=eps, weight_decay=decay, clip_norm=clip_norm, schedule=CONSTANT)
    after = _steps(settings, weights, gradients)
    expected = {path: np.asarray(leaf, np.float64) for path, leaf in flatten(weights).items()}
    first, second = ({path: np.zeros(leaf.shape) for path, leaf in expected.items()} for _ in range(2))
    clipped = []
    for count, grads in enumerate(gradients, 1):
        flat = {path: np.asarray(leaf, np.float64) for path, leaf in flatten(grads).items()}
        norm = np.sqrt(sum((leaf**2).sum() for leaf in flat.values()))
        clipped.append(clip_norm is not None and norm > clip_norm)
        factor = clip_norm / norm if clip_norm is not None and norm > clip_norm else 1.0
        for path, weight in expected.items():
            g = flat[path] * factor
            first[path] = b1 * first[path] + (1 - b1) * g
            second[path] = b2 * second[path] + (1 - b2) * g * g
            direction = first[path] / (1 - b1**count) / (np.sqrt(second[path] / (1 - b2**count)) + eps)
            matrix = not path.endswith(("scale", "bias"))
            expected[path] = weight - rate * (direction + (decay * weight if matrix else 0.0))
            np.testing.assert_allclose(after[count - 1][path], expected[path], rtol=1e-4, atol=2e-6, err_msg=f"{path}, step {count}")
    assert clip_norm is None or set(clipped) == {False, True}


def _muon(learning_rate: float = 1.0, **settings: Any) -> OptimizerConfig:
    settings = {"weight_decay": 0.0, "clip_norm": None, "schedule": CONSTANT, **settings}
    return OptimizerConfig(kind="muon", learning_rate=learning_rate, **settings)


@pytest.fixture(scope="module")
def muon_updates(weights: Any, gradients: list[Any]) -> dict[str, np.ndarray]:
    """Muon's first update, by path."""
    after = _steps(_muon(), weights, gradients[:1])[0]
    return {path: after[path] - np.asarray(leaf) for path, leaf in flatten(weights).items()}


def _as_matrix(path: str, layer: np.ndarray) -> np.ndarray:
    """One layer's weight as inputs x outputs."""
    inputs = {"query": 1, "key": 1, "value": 1, "out": 2}.get(path.rpartition(".")[2], 1)
    return layer.reshape(int(np.prod(layer.shape[:inputs])), -1)


HIDDEN = [
    f"stacks.0.blocks.0.{name}" for name in ("mixer.query", "mixer.key", "mixer.value", "mixer.out", "ffn.gate", "ffn.up", "ffn.down")
]


@pytest.mark.parametrize("path", HIDDEN)
def test_muon_makes_each_layers_matrix_orthogonal(muon_updates: dict[str, np.ndarray], path: str):
    """Singular values near 1 times the scale that brings the update's root mean square to AdamW's 0.2."""
    for layer in muon_updates[path]:
        matrix = _as_matrix(path, layer)
        scale = 0.2 * max(matrix.shape) ** 0.5
        values = np.linalg.svd(matrix, compute_uv=False) / scale
        assert 0.6 < values.min() < values.max() < 1.25
        assert np.sqrt((matrix**2).mean()) == pytest.approx(0.2, rel=0.25)


@pytest.mark.parametrize("path", HIDDEN)
def test_muon_equals_optax_on_each_layer_alone(muon_updates: dict[str, np.ndarray], gradients: list[Any], path: str):
    rule = optax.contrib.scale_by_muon(beta=0.95)
    for layer, update in zip(np.asarray(flatten(gradients[0])[path]), muon_updates[path], strict=True):
        alone = jnp.asarray(_as_matrix(path, layer))
        direction, _ = jax.jit(lambda g: rule.update(g, rule.init(g)))(alone)
        expected = -0.2 * max(alone.shape) ** 0.5 * np.asarray(direction)
        np.testing.assert_allclose(_as_matrix(path, update), expected, atol=2e-4)


def test_muon_leaves_embeddings_head_and_vectors_to_adamw(muon_updates: dict[str, np.ndarray], gradients: list[Any]):
    """AdamW's first update is the sign of the gradient, but for epsilon."""
    for path, gradient in flatten(gradients[0]).items():
        if path not in HIDDEN:
            expected = -gradient / (np.abs(gradient) + 1e-8)
            np.testing.assert_allclose(muon_updates[path], expected, atol=1e-4, err_msg=path)


def test_groups_that_differ_in_their_peak_alone_keep_it(weights: Any, gradients: list[Any]):
    """The first match counts; a learning rate per group, under both rules."""
    groups = (GroupConfig(match="embed", learning_rate=0.5), GroupConfig(match=r"ffn\.", learning_rate=0.25))
    for kind in ("adamw", "muon"):
        settings: Any = {"kind": kind, "weight_decay": 0.0, "clip_norm": None, "schedule": CONSTANT, "learning_rate": 1.0}
        one, own = (_steps(OptimizerConfig(**settings, groups=g), weights, gradients[:1])[0] for g in ((), groups))
        for path, before in flatten(weights).items():
            share = 0.5 if path == "embedding" else 0.25 if ".ffn." in path else 1.0
            np.testing.assert_allclose(own[path] - before, share * (one[path] - before), atol=2e-5, err_msg=f"{kind}: {path}")


def test_a_pattern_that_matches_no_weight_is_refused():
    settings = OptimizerConfig(groups=(GroupConfig(match="embedings", learning_rate=0.5),))
    with pytest.raises(ConfigError, match=r"optimizer\.groups: 'embedings' matches no weight; there are embedding, "):
        build_optimizer(tiny.run(optimizer=settings), MODEL)


@pytest.mark.xdist_group("mesh")
def test_muon_makes_one_layers_matrices_whole_at_a_time():
    """A device that holds a quarter of each weight gathers them for the products: all at once were three times all weights."""
    sizes = {"d_model": 128, "d_ff": 384, "n_layers": 24}
    config = tiny.run(model=sizes, optimizer=OptimizerConfig(kind="muon"), seq_len=16, batch_size=4, remat="full")
    job = make_job(config, devices=jax.devices()[:4])
    assert job.train_step(4).memory_analysis().temp_size_in_bytes < 1.2 * 4 * job.model.parameter_count
