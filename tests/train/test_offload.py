"""Moments and activations that wait in the host's memory: the same numbers to the bit, and a checkpoint that fits either way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from telamon.checkpoint.store import CheckpointStore
from telamon.config.schema import GroupConfig, OptimizerConfig
from telamon.errors import ConfigError
from telamon.parallel.target import Target
from telamon.train.job import Job, make_job
from telamon.train.optimizer import build_optimizer
from telamon.train.placement import place
from telamon.train.state import TrainState


def job(*, offload: bool = False, remat: str = "full") -> Job:
    """Of two devices, as moments are cut as their weights are."""
    optimizer = OptimizerConfig(offload=offload)
    return make_job(tiny.run(optimizer=optimizer, remat=remat, model={"d_model": 16, "d_ff": 24}), devices=jax.devices()[:2])


def steps(of: Job, state: TrainState, count: int) -> TrainState:
    batch = place(tiny.batch([[16]] * 8, length=16), token_bytes=np.ones(64, np.int32), mesh=of.mesh)
    for _ in range(count):
        state, _ = of.train_step(8)(state, batch)
    return state


def bits(state: TrainState) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path((state.weights, state.optimizer))
    return {jax.tree_util.keystr(name): np.asarray(leaf) for name, leaf in leaves}


def memory_kinds(tree) -> set[str]:
    """Of the arrays that are larger than a number."""
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


@pytest.fixture(scope="module")
def usual():
    made = job()
    return made, bits(steps(made, made.fresh_state(), 3))


def test_moments_in_the_hosts_memory_give_the_same_bits_and_a_checkpoint_for_either(usual, tmp_path):
    plain, expected = usual
    offloaded = job(offload=True)
    state = steps(offloaded, offloaded.fresh_state(), 2)
    assert memory_kinds(state.optimizer) == {"pinned_host"} and memory_kinds(state.weights) == {"device"}
    with CheckpointStore(tmp_path) as store, jax.set_mesh(plain.mesh):
        store.save(2, state, {})
        store.wait()
        for of, kind in ((plain, "device"), (offloaded, "pinned_host")):
            restored, _ = store.restore(2, of.abstract_state)
            assert memory_kinds(restored.optimizer) == {kind}
            found = bits(steps(of, restored, 1))
            assert all(np.array_equal(found[name], expected[name]) for name in expected), kind


def test_inputs_of_blocks_in_the_hosts_memory_give_the_same_bits(usual):
    _, expected = usual
    offloaded = job(remat="offload")
    found = bits(steps(offloaded, offloaded.fresh_state(), 3))
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("settings", "named"), [({"offload": True}, "optimizer.offload=true"), ({"remat": "offload"}, "train.remat=offload")]
)
def test_devices_that_cannot_reach_the_hosts_memory_are_refused(monkeypatch, settings, named):
    monkeypatch.setattr("telamon.train.job.HOST", "memory_of_mars")
    with pytest.raises(ConfigError, match=f"{named} needs devices .*cpu has device, pinned_host"):
        job(**settings)


def test_moments_that_come_for_one_weight_at_a_time_give_the_same_update(monkeypatch):
    """As on a device whose memory is not the host's; 1e-6 of the largest, for other loops round otherwise. Two rules, a group, a clip."""
    monkeypatch.setattr("telamon.train.optimizer.target", lambda: Target("tpu", "TPU v6 lite", ()))
    model = tiny.model(d_model=16, d_ff=24)
    weights = tiny.weights(model)
    groups = (GroupConfig(match="embedding", learning_rate=0.5),)
    found = []
    for offload in (False, True):
        settings = OptimizerConfig(kind="muon", groups=groups, offload=offload)
        optimizer = build_optimizer(tiny.run(optimizer=settings), model)

        @jax.jit
        def update(weights, optimizer=optimizer):
            state = optimizer.init(weights)
            _, state = optimizer.update(weights, state, weights)
            return optimizer.update(jax.tree.map(jnp.sin, weights), state, weights)

        found.append(update(weights))
    plain, streamed = map(jax.tree_util.tree_leaves_with_path, found)
    assert jax.tree.structure(found[0]) == jax.tree.structure(found[1])
    for (path, expected), (_, value) in zip(plain, streamed, strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6 * np.abs(expected).max(), err_msg=jax.tree_util.keystr(path))
