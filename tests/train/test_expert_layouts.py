"""The same run of mixtures on one device and with its experts split over eight: equal losses, biases and balance, and each device its share.

The model's first layer is Mixtral's; in the second experts are chosen by sigmoids with a bias, within groups, beside one that is shared.
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from telamon.checkpoint.store import CheckpointStore
from telamon.config.schema import ExpertsConfig, MeshConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from telamon.layers.mlp import GatedMLPConfig
from telamon.layers.moe import MoEConfig
from telamon.layers.router import RouterConfig
from telamon.models.mixtral import MixtralConfig
from telamon.models.spec import ModelSpec
from telamon.models.weights import flatten
from telamon.parallel.rules import batch_sharding
from telamon.train.job import Job, make_job
from telamon.train.state import TrainState, shardings_of

pytestmark = pytest.mark.xdist_group("mesh")

STEPS = 6
LAYOUTS = {
    "one device": MeshConfig(fsdp=1),
    "expert 8": MeshConfig(expert=8, fsdp=1),
    "expert 4, fsdp 2": MeshConfig(expert=4, fsdp=2),
    "expert 2, fsdp 2, tensor 2": MeshConfig(expert=2, fsdp=2, tensor=2),
    "fsdp 2": MeshConfig(fsdp=2),
}
EXPERTS = 2 * 8 * 3 * 32 * 24
"""Values in experts."""


class _TwoMixtures(MixtralConfig):
    def spec(self) -> ModelSpec:
        spec = super().spec()
        router = RouterConfig(
            n_experts=8, top_k=2, score="sigmoid", selection_bias=True, n_groups=4, top_groups=2, renormalize=True, scale=2.5
        )
        other = MoEConfig(router=router, d_ff=self.d_ff, shared=GatedMLPConfig(d_ff=16))
        return spec.model_copy(update={"blocks": (spec.blocks[0], spec.blocks[1].model_copy(update={"ffn": other}))})


def _job(layout: str, kind: Any = "adamw", **experts: Any) -> Job:
    # Where there is a tensor axis too the step is in two microbatches, of whose loads together the balance is.
    accumulate = 2 if "tensor" in layout else 1
    how = ExpertsConfig(**{"balance": "batch", "balance_weight": 0.1, "z_weight": 1e-2, "bias_rate": 0.02, **experts})
    config = RunConfig(
        model=_TwoMixtures(**{**tiny.SIZES, "d_ff": 24}),
        train=TrainConfig(
            steps=20, batch_size=8, seq_len=16, compute_dtype="float32", loss_chunk=32, accumulate=accumulate, experts=how, z_loss=1e-3
        ),
        optimizer=OptimizerConfig(kind=kind, learning_rate=1e-2, schedule=ScheduleConfig(kind="cosine", warmup_steps=2)),
        mesh=LAYOUTS[layout],
    )
    count = math.prod(LAYOUTS[layout].sizes().values())
    return make_job(config, devices=jax.devices()[:count])


def _batches() -> list[dict[str, np.ndarray]]:
    """Rows of unequal documents, one of them all padding in every other step."""
    rng = np.random.default_rng(0)
    made = []
    for step in range(STEPS):
        documents = [[int(rng.integers(1, 9)), int(rng.integers(1, 8))] for _ in range(8)]
        documents[step] = [1] if step % 2 else []
        made.append(tiny.batch(documents, length=16, seed=step))
    return made


def _start(job: Job) -> TrainState:
    weights = tiny.weights(job.model)
    state = TrainState(jnp.zeros((), jnp.int32), weights, jax.jit(job.optimizer.init)(weights), jax.random.key(0))
    return jax.device_put(state, shardings_of(job.abstract_state))


def _train(job: Job, state: TrainState, batches: list[dict[str, np.ndarray]]) -> tuple[TrainState, list[dict[str, float]]]:
    told = []
    for batch in batches:
        state, metrics = job.train_step(8)(state, jax.device_put(batch, batch_sharding(job.mesh)))
        told.append({name: float(value) for name, value in metrics.items()})
    return state, told


@pytest.fixture(scope="module")
def jobs() -> dict[str, Job]:
    return {layout: _job(layout) for layout in LAYOUTS if layout != "fsdp 2"}


@pytest.fixture(scope="module")
def runs(jobs: dict[str, Job]) -> dict[str, tuple[TrainState, list[dict[str, float]]]]:
    return {layout: _train(job, _start(job), _batches()) for layout, job in jobs.items()}


def test_losses_loads_and_balance_are_equal_on_every_mesh(runs: dict[str, tuple[TrainState, list[dict[str, float]]]]):
    _, expected = runs["one device"]
    assert expected[-1]["loss"] < expected[0]["loss"]
    assert expected[0]["expert_load_max"] > 1
    for layout, (_, told) in runs.items():
        for ours, wanted in zip(told, expected, strict=True):
            assert ours.keys() == wanted.keys()
            for name in ("loss", "balance", "router_z", "router_entropy", "expert_load_max", "expert_load_min", "tokens"):
                np.testing.assert_allclose(ours[name], wanted[name], rtol=1e-5, atol=1e-5, err_msg=f"{layout} {name}")
            np.testing.assert_allclose(ours["grad_norm"], wanted["grad_norm"], rtol=1e-4, err_msg=layout)


def test_biases_move_alike_by_the_loads_of_all_devices(runs: dict[str, tuple[TrainState, list[dict[str, float]]]]):
    def biases(layout: str) -> list[np.ndarray]:
        return [np.asarray(leaf) for path, leaf in flatten(runs[layout][0].weights).items() if path.endswith("selection_bias")]

    (first,) = biases("one device")
    assert np.unique(first).size > 2
    for layout in runs:
        np.testing.assert_allclose(biases(layout)[0], first, rtol=0, atol=1e-7, err_msg=layout)


@pytest.mark.parametrize("layout", ["expert 8", "expert 4, fsdp 2", "expert 2, fsdp 2, tensor 2"])
def test_each_device_holds_its_share_of_experts_and_their_moments(layout: str, runs: dict[str, tuple[TrainState, list[dict[str, float]]]]):
    state, _ = runs[layout]
    for tree, copies in ((state.weights, 1), (state.optimizer, 2)):
        held = dict.fromkeys(jax.devices(), 0)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if "experts" in jax.tree_util.keystr(path):
                for shard in leaf.addressable_shards:
                    held[shard.device] += shard.data.nbytes
        assert set(held.values()) == {copies * 4 * EXPERTS // 8}


def test_rows_travel_in_all_to_alls_where_there_is_an_axis_for_experts(jobs: dict[str, Job]):
    """A program that gathered all tokens, or all experts, would give the same numbers."""
    for layout, job in jobs.items():
        text = job.train_step(8).as_text()
        assert (" all-to-all(" in text) == ("expert" in layout), layout
        if layout == "expert 8":
            assert " all-gather(" not in text


@pytest.mark.slow
def test_muon_and_balance_by_document_are_the_same_with_experts_split():
    """Muon's products are of whole matrices, one an expert."""
    told = {}
    for layout in ("one device", "expert 4, fsdp 2"):
        job = _job(layout, "muon", balance="sequence")
        told[layout] = _train(job, _start(job), _batches()[:4])[1]
    assert told["one device"][0]["balance"] > 0
    for ours, wanted in zip(told["expert 4, fsdp 2"], told["one device"], strict=True):
        for name in ("loss", "balance"):
            np.testing.assert_allclose(ours[name], wanted[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_checkpoint_with_experts_split_continues_on_another_mesh(
    tmp_path: Any, jobs: dict[str, Job], runs: dict[str, tuple[TrainState, list[dict[str, float]]]]
):
    """Saved on eight devices along `expert` after three steps, continued on two along `fsdp`."""
    state, _ = _train(jobs["expert 8"], _start(jobs["expert 8"]), _batches()[:3])
    job = _job("fsdp 2")
    with CheckpointStore(tmp_path) as store:
        store.save(3, state, {})
        state = store.restore(3, job.abstract_state)[0]
    _, told = _train(job, state, _batches()[3:])
    expected = runs["one device"][1][3:]
    np.testing.assert_allclose([each["loss"] for each in told], [each["loss"] for each in expected], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["capacity", "dense"])
def test_other_ways_to_compute_run_on_a_mesh_too(path: str):
    """Places are counted in each row of a batch, which no mesh splits."""
    losses, text = [], ""
    for layout in ("one device", "expert 4, fsdp 2"):
        job = _job(layout, path=path, capacity_factor=1.0)
        losses.append([each["loss"] for each in _train(job, _start(job), _batches()[:2])[1]])
        text = job.train_step(8).as_text()
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    if path == "capacity":
        assert " all-to-all(" in text
        gathered = re.findall(r"= (\S+) all-gather\(", text)
        assert gathered and not [shape for shape in gathered if shape.startswith("f32[8,")], "neither all experts nor all rows"
