"""What goes in comes out: bit for bit, on any mesh, while training goes on."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import abstract, assert_same, make_state, mesh, raw
from jax.sharding import PartitionSpec

from telamon.checkpoint.store import CheckpointStore
from telamon.errors import CheckpointError


@pytest.fixture
def store(tmp_path):
    with CheckpointStore(tmp_path / "checkpoints") as store:
        yield store


def test_every_type_comes_back_bit_for_bit(store):
    state = make_state(7)
    store.save(3, state, {"position": {"epoch": 1, "row": 20}})
    got, meta = store.restore(3, abstract(state))
    assert_same(got, state)
    assert meta == {"position": {"epoch": 1, "row": 20}}


def test_the_next_step_may_donate_and_overwrite_what_is_being_saved(store):
    """The compiled step reuses the memory of the state it is given while the checkpoint of that state is being written."""
    layout = mesh(fsdp=8)
    step = jax.jit(lambda state: jax.tree.map(lambda x: x * 2 + 1, state), donate_argnums=0)
    arrays = {f"w{i}": jax.random.normal(jax.random.key(i), (512, 512)) for i in range(8)}
    state = jax.device_put(arrays, jax.sharding.NamedSharding(layout, PartitionSpec("fsdp")))
    first = jax.tree.map(np.array, state)
    unsaved = step(jax.tree.map(jnp.copy, state))
    again = step(unsaved)
    assert all(x.is_deleted() for x in jax.tree.leaves(unsaved)), "this test needs a step that does donate"
    del again
    like = abstract(state)
    store.save(0, state, {})
    for _ in range(5):
        state = step(state)
    jax.block_until_ready(state)
    got, _ = store.restore(0, like)
    for name, value in first.items():
        np.testing.assert_array_equal(np.asarray(got[name]), value)


def test_a_checkpoint_moves_between_meshes(store):
    fsdp, mixed = mesh(fsdp=8), mesh(data=2, fsdp=2, tensor=2)
    state = make_state(1, layout=fsdp, spec=PartitionSpec("fsdp"))
    store.save(1, state, {})
    on_mixed, _ = store.restore(1, abstract(state, mixed, PartitionSpec("fsdp", "tensor")))
    assert_same(on_mixed, state)
    embed = on_mixed["params"]["embed"]
    assert embed.sharding.spec == PartitionSpec("fsdp", "tensor") and embed.addressable_shards[0].data.shape == (32, 16)
    store.save(2, on_mixed, {})
    on_one, _ = store.restore(2, abstract(state, mesh(fsdp=1)))
    assert_same(on_one, state)
    assert len(on_one["params"]["embed"].devices()) == 1


def test_one_branch_can_be_read_alone(store):
    state = make_state(2)
    store.save(1, state, {"width": 32})
    assert_same(store.restore_subtree(1, "params", abstract(state["params"])), state["params"])
    assert store.meta(1) == {"width": 32}


def test_a_tree_of_another_class_with_the_same_names_fits(store):
    """Names count, not the Python classes: a list and a dict of "0" name their leaves alike."""
    state = make_state(2)
    store.save(1, state, {})
    other = abstract(state) | {"moments": {"0": abstract(state["moments"][0])}}
    got, _ = store.restore(1, other)
    assert raw(got["moments"]["0"]) == raw(state["moments"][0])


def test_another_width_names_the_parameter_both_shapes_and_their_origins(store):
    store.save(4, make_state(width=64), {})
    with pytest.raises(CheckpointError) as caught:
        store.restore(4, abstract(make_state(width=32)), target="the model of runs/small/config.yaml")
    message = str(caught.value)
    assert "params.embed: shape (64, 64) in the checkpoint, (64, 32) in the model of runs/small/config.yaml" in message
    assert "step_00000004" in message and len(message.splitlines()) < 8
    assert caught.value.exit_code == 5


def test_another_type_or_tree_is_named(store):
    state = make_state()
    store.save(1, state, {})
    wanted = abstract(state)
    with pytest.raises(CheckpointError, match="step: int32 in the checkpoint, float32 in the model"):
        store.restore(1, wanted | {"step": jax.ShapeDtypeStruct((), jnp.float32)})
    with pytest.raises(CheckpointError, match=r"params\.bias: in the model of this run, not in the checkpoint"):
        store.restore(1, wanted | {"params": wanted["params"] | {"bias": wanted["step"]}})
    with pytest.raises(CheckpointError, match=r"moments\.0: in the checkpoint, not in the model"):
        store.restore(1, wanted | {"moments": ()})


def test_a_step_that_is_not_there_lists_those_that_are(store):
    store.save(5, make_state(), {})
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 6 .* steps there: 5"):
        store.restore(6, abstract(make_state()))


def test_a_step_of_another_run_is_not_overwritten(store):
    store.save(5, make_state(1), {"run": "first"})
    store.wait()
    other = CheckpointStore(store.directory)
    assert other.latest_valid() == 5
    with pytest.raises(CheckpointError, match=r"step_00000005 is a whole checkpoint"):
        other.save(5, make_state(2), {})
    other.restore(5, abstract(make_state(1)))
    other.save(5, make_state(1), {})  # it is in this run's history now, so there is nothing to do
    assert other.meta(5) == {"run": "first"}


def test_a_meta_that_is_no_json_fails_at_once(store):
    with pytest.raises(TypeError):
        store.save(1, make_state(), {"position": object()})
    assert store.steps() == []


def test_synchronous_saves_are_committed_when_save_returns(tmp_path):
    store = CheckpointStore(tmp_path, asynchronous=False)
    store.save(1, make_state(), {})
    assert CheckpointStore(tmp_path, readonly=True).latest_valid() == 1


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match="run/checkpoints cannot be used: Not a directory"):
        CheckpointStore(tmp_path / "run" / "checkpoints")


def test_a_url_that_cannot_be_written_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as in an environment without the extra
    with pytest.raises(CheckpointError, match=r"gs://nowhere/run needs the extra `cloud`"):
        CheckpointStore("gs://nowhere/run")
    with pytest.raises(CheckpointError, match=r"cannot be written to memory://run: Orbax takes"):
        CheckpointStore("memory://run")


def test_a_reader_leaves_a_running_save_alone(store):
    store.save(1, make_state(), {})
    store.wait()
    pending = store.directory / "step_00000002.pending"
    pending.write_text("")
    (store.directory / "step_00000002.orbax-checkpoint-tmp").mkdir()
    reader = CheckpointStore(store.directory, readonly=True)
    assert reader.latest_valid() == 1 and reader.skipped == []
    assert pending.exists() and (store.directory / "step_00000002.orbax-checkpoint-tmp").exists()
    pending.unlink()
