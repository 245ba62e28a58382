"""The same run on one device, sharded over eight, and on a mesh of three axes: equal losses, and each device holds its share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from telamon.config import registry
from telamon.config.schema import MeshConfig, OptimizerConfig, RunConfig, ScheduleConfig
from telamon.errors import ConfigError
from telamon.models.weights import flatten
from telamon.parallel.rules import batch_sharding
from telamon.train.job import Job, make_job
from telamon.train.state import TrainState, fresh_state, shardings_of

pytestmark = pytest.mark.xdist_group("mesh")

STEPS = 20
LAYOUTS = {"one device": MeshConfig(), "fsdp 8": MeshConfig(fsdp=8), "data 2, fsdp 2, tensor 2": MeshConfig(data=2, fsdp=2, tensor=2)}

# Devices that share each matrix; the other weights (scales) are on every device.
PARTS = {"one device": 1, "fsdp 8": 8, "data 2, fsdp 2, tensor 2": 4}

MATRICES = 64 * 32 + 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48)
VECTORS = 32 + 2 * (32 + 32)


def _config(kind: Any, layout: str) -> RunConfig:
    schedule = ScheduleConfig(kind="cosine", warmup_steps=2)
    optimizer = OptimizerConfig(kind=kind, learning_rate=1e-2, schedule=schedule)
    # On the mesh of three axes the step is accumulated too: two microbatches of four rows, one row a device.
    accumulate = 2 if "tensor" in layout else 1
    return tiny.run(optimizer=optimizer, steps=STEPS, z_loss=1e-3, accumulate=accumulate).model_copy(update={"mesh": LAYOUTS[layout]})


def _state(job: Job) -> TrainState:
    """The same state wherever it lives."""
    weights = tiny.weights(job.model)
    state = TrainState(jnp.zeros((), jnp.int32), weights, jax.jit(job.optimizer.init)(weights), jax.random.key(0))
    return jax.device_put(state, shardings_of(job.abstract_state))


def _batches() -> list[dict[str, np.ndarray]]:
    """Rows of unequal documents; in some steps a device has nothing to train."""
    rng = np.random.default_rng(0)
    made = []
    for step in range(STEPS):
        documents = [[int(rng.integers(1, 9)), int(rng.integers(1, 8))] for _ in range(8)]
        documents[step % 8] = [1] if step % 2 else []
        made.append(tiny.batch(documents, length=16, seed=step))
    return made


def _train(job: Job) -> tuple[TrainState, list[float]]:
    state, losses = _state(job), []
    for batch in _batches():
        state, metrics = job.train_step(8)(state, jax.device_put(batch, batch_sharding(job.mesh)))
        losses.append(float(metrics["loss"]))
    assert int(state.step) == STEPS
    return state, losses


@pytest.fixture(scope="module", params=["adamw", "muon"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def runs(kind: str) -> dict[str, tuple[TrainState, list[float]]]:
    def devices(layout: str) -> list[Any]:
        return jax.devices()[:1] if layout == "one device" else jax.devices()

    return {layout: _train(make_job(_config(kind, layout), devices=devices(layout))) for layout in LAYOUTS}


def test_losses_are_equal_over_twenty_steps(runs: dict[str, tuple[TrainState, list[float]]]):
    _, expected = runs["one device"]
    assert expected[-1] < expected[0]
    for layout, (_, losses) in runs.items():
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5, err_msg=layout)


def _device_bytes(tree: Any) -> set[int]:
    """Bytes of a tree's float arrays on each device."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.dtype == jnp.float32]
    devices = {shard.device for leaf in leaves for shard in leaf.addressable_shards}
    return {sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards if shard.device == device) for device in devices}


def test_each_device_holds_its_share_of_weights_and_moments(runs: dict[str, tuple[TrainState, list[float]]], kind: str):
    """A program that kept everything everywhere would give equal losses too."""
    embedding = 64 * 32
    # AdamW keeps two moments of everything; Muon one of hidden matrices, and leaves the rest to AdamW.
    of_matrices = 2 * MATRICES if kind == "adamw" else MATRICES + embedding
    coefficients = 0 if kind == "adamw" else 3  # of Muon's iteration, in its state
    for layout, (state, _) in runs.items():
        parts = PARTS[layout]
        assert _device_bytes(state.weights) == {4 * (MATRICES // parts + VECTORS)}, layout
        assert _device_bytes(state.optimizer) == {4 * (of_matrices // parts + 2 * VECTORS + coefficients)}, layout


def test_a_fresh_state_is_made_in_place_and_in_one_shape():
    job = make_job(_config("adamw", "fsdp 8"))
    state = job.fresh_state()
    assert _device_bytes(state.weights) == {4 * (MATRICES // 8 + VECTORS)}
    assert _device_bytes(state.optimizer) == {8 * (MATRICES // 8 + VECTORS)}
    where = jax.tree.map(lambda leaf: leaf.sharding, state)
    assert jax.tree.all(jax.tree.map(lambda ours, wanted: ours == wanted, where, shardings_of(job.abstract_state)))
    alone = jax.jit(fresh_state, static_argnums=(0, 1, 2))(job.model, job.optimizer, job.config.train.seed)
    for path, leaf in flatten(state.weights).items():
        np.testing.assert_allclose(leaf, flatten(alone.weights)[path], rtol=0, atol=1e-7, err_msg=path)


def test_a_job_that_would_keep_its_weights_whole_is_refused():
    config = tiny.run(model=tiny.INDIVISIBLE).model_copy(update={"mesh": MeshConfig(fsdp=8)})
    with pytest.raises(ConfigError, match="of the parameters would stay unsharded"):
        make_job(config)


@pytest.mark.parametrize("family", ["gemma2", "olmo3", "gpt3"])
def test_what_other_families_add_is_the_same_on_a_mesh(family: str):
    """Norms over all heads together, caps on scores and logits, windows, spare rows of the tables, a table of positions."""
    sizes = registry.family(family)(tie_embeddings=False, vocab_multiple=12).shrunk()
    sizes = sizes.model_copy(
        update={"vocab_size": 64, "n_layers": 2, **({"layer_pattern": "SG"} if "layer_pattern" in type(sizes).model_fields else {})}
    )
    losses = {}
    for layout in ("one device", "data 2, fsdp 2, tensor 2"):
        config = _config("adamw", layout)
        config = config.model_copy(update={"model": sizes, "mesh": LAYOUTS[layout].model_copy(update={"replicated_limit": 1.0})})
        job = make_job(config, devices=jax.devices()[:1] if layout == "one device" else None)
        state, losses[layout] = _state(job), []
        for batch in _batches()[:3]:
            state, metrics = job.train_step(8)(state, jax.device_put(batch, batch_sharding(job.mesh)))
            losses[layout].append([float(metrics["loss"]), float(metrics["grad_norm"])])
    np.testing.assert_allclose(losses["data 2, fsdp 2, tensor 2"], losses["one device"], rtol=1e-5)
