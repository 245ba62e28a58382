"""Checkpoints written and read part by part: whole or not there, like any other, and open to any program."""

import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import streamed_writer
from checkpoint_states import mesh
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from telamon.checkpoint import trees
from telamon.checkpoint.store import STATE, CheckpointStore
from telamon.checkpoint.streamed import StreamedReader, StreamedWriter
from telamon.errors import CheckpointError

WRITER = Path(__file__).with_name("streamed_writer.py")
QUERY = "stacks.0.blocks.0.mixer.query"
SHAPES = {
    "embedding": jax.ShapeDtypeStruct((48, 16), ml_dtypes.bfloat16),
    QUERY: jax.ShapeDtypeStruct((3, 16, 4, 2), ml_dtypes.bfloat16),
    "stacks.0.blocks.0.mixer_norm.scale": jax.ShapeDtypeStruct((3, 16), np.float32),
    "norm.scale": jax.ShapeDtypeStruct((16,), np.float16),
}


def values(seed=0):
    """Random bits, so that a detour through another type would show."""
    rng = np.random.default_rng(seed)
    return {path: rng.standard_normal(leaf.shape).astype(leaf.dtype) for path, leaf in SHAPES.items()}


def write(directory, arrays, *, step=0, leave_out=()):
    with StreamedWriter(directory, step=step, abstract=SHAPES, meta={"origin": "a test"}) as writer:
        for path, array in arrays.items():
            parts = [((), array)] if not path.startswith("stacks") else [((layer,), part) for layer, part in enumerate(array)]
            for index, part in parts:
                if (path, index) not in leave_out:
                    writer.write(path, index, part)


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == np.asarray(right).tobytes()


def test_a_streamed_checkpoint_is_read_by_slice_in_the_type_it_was_given(tmp_path):
    arrays = values()
    write(tmp_path, arrays)
    reader = StreamedReader(tmp_path, 0)
    assert {path: (info.shape, info.dtype) for path, info in reader.arrays.items()} == {
        path: (leaf.shape, np.dtype(leaf.dtype).name) for path, leaf in SHAPES.items()
    }
    assert reader.meta == {"origin": "a test"}
    assert all(same(reader.read(path, ()), array) for path, array in arrays.items())
    assert all(same(reader.read(QUERY, (layer,)), arrays[QUERY][layer]) for layer in range(3))


def test_the_newest_whole_checkpoint_is_read_unless_another_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="holds no whole checkpoint yet; let it train to its first"):
        StreamedReader(tmp_path)
    write(tmp_path / "other", values(1), step=1)
    next((tmp_path / "other").glob("*/manifest.json")).unlink()
    with pytest.raises(CheckpointError, match="other holds no whole checkpoint: 1 damaged; train or import it anew"):
        StreamedReader(tmp_path / "other")
    write(tmp_path, values(1), step=1)
    write(tmp_path, values(2), step=2)
    assert StreamedReader(tmp_path).step == 2
    assert same(StreamedReader(tmp_path, 1).read(QUERY, (0,)), values(1)[QUERY][0])


def test_any_orbax_program_opens_a_streamed_checkpoint(tmp_path):
    arrays = values()
    write(tmp_path, arrays)
    loaded = ocp.load(tmp_path / "step_00000000", checkpointable_name=STATE)["weights"]
    assert all(same(np.asarray(trees.lookup(loaded, path)), array) for path, array in arrays.items())


def test_a_streamed_checkpoint_restores_onto_any_mesh_and_widens_exactly(tmp_path):
    arrays = values()
    write(tmp_path, arrays)
    layout = mesh(fsdp=4, tensor=2)

    def wanted(path, dtype):
        spec = {"embedding": PartitionSpec("fsdp", "tensor"), QUERY: PartitionSpec(None, "fsdp", "tensor")}.get(path, PartitionSpec())
        return jax.ShapeDtypeStruct(SHAPES[path].shape, dtype, sharding=NamedSharding(layout, spec))

    store = CheckpointStore(tmp_path, readonly=True)
    got = store.restore_subtree(0, "weights", trees.nest({path: wanted(path, jnp.float32) for path in SHAPES}))
    for path, array in arrays.items():
        found = trees.lookup(got, path)
        assert found.sharding == wanted(path, jnp.float32).sharding
        assert same(np.asarray(found), array.astype(np.float32)), path
    kept = store.restore_subtree(0, "weights", trees.nest({path: wanted(path, leaf.dtype) for path, leaf in SHAPES.items()}))
    assert all(same(np.asarray(trees.lookup(kept, path)), array) for path, array in arrays.items())


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_each_16_bit_pattern_widens_to_the_same_number(tmp_path, dtype):
    bits = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    shapes = {"w": jax.ShapeDtypeStruct(bits.shape, dtype)}
    with StreamedWriter(tmp_path, step=0, abstract=shapes, meta={}) as writer:
        writer.write("w", (), bits)
    wanted = {"w": jax.ShapeDtypeStruct(bits.shape, jnp.float32)}
    got = np.asarray(CheckpointStore(tmp_path, readonly=True).restore_subtree(0, "weights", wanted)["w"])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, bits.astype(np.float32))


def test_narrowing_is_refused_and_names_both_types(tmp_path):
    write(tmp_path, values())
    wanted = trees.nest({path: jax.ShapeDtypeStruct(leaf.shape, ml_dtypes.bfloat16) for path, leaf in SHAPES.items()})
    with pytest.raises(CheckpointError, match=r"mixer_norm\.scale: float32 in the checkpoint, bfloat16 in the model"):
        CheckpointStore(tmp_path, readonly=True).restore_subtree(0, "weights", wanted)


def test_arrays_in_any_memory_order_and_of_many_chunks_come_back(tmp_path):
    """A transposed table of three chunks and a remainder, and one of 64-bit words."""
    rng = np.random.default_rng(0)
    arrays = {"table": rng.integers(0, 1 << 16, (70, 50_000), np.uint16).T, "long": rng.integers(0, 1 << 60, (30, 20), np.int64).T}
    with StreamedWriter(tmp_path, step=0, abstract=arrays, meta={}) as writer:
        for path, array in arrays.items():
            writer.write(path, (), array)
    reader = StreamedReader(tmp_path, 0)
    assert all(same(reader.read(path, ()), array) for path, array in arrays.items())


def test_what_was_not_written_is_named_and_leaves_nothing_behind(tmp_path):
    write(tmp_path, values(), step=1)
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path, values(), step=2, leave_out=[("embedding", ()), (QUERY, (0,)), (QUERY, (2,))])
    assert f"step 2 was not written: it lacks embedding, {QUERY} (layers 0, 2)" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_part_written_twice_is_a_bug_and_commits_nothing(tmp_path):
    arrays = values()
    with (
        pytest.raises(AssertionError, match=r"part \(1,\): written twice"),
        StreamedWriter(tmp_path, step=0, abstract=SHAPES, meta={}) as writer,
    ):
        writer.write(QUERY, (1,), arrays[QUERY][1])
        writer.write(QUERY, (1,), arrays[QUERY][1])
    assert list(tmp_path.iterdir()) == []


def test_an_exception_half_way_passes_and_leaves_nothing_behind(tmp_path, capfd):
    with pytest.raises(ZeroDivisionError), StreamedWriter(tmp_path, step=0, abstract=SHAPES, meta={}) as writer:
        writer.write("embedding", (), values()["embedding"])
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in capfd.readouterr().err


def run_writer(folder, *options):
    return subprocess.run([sys.executable, str(WRITER), str(folder), *map(str, options)], stderr=subprocess.PIPE, text=True, timeout=60)


def test_a_kill_half_way_leaves_what_the_next_start_removes(tmp_path):
    done = run_writer(tmp_path, "--kill-at", 3)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert CheckpointStore(tmp_path, readonly=True).latest_valid() is None
    with pytest.raises(CheckpointError, match="no checkpoint of step 0"):
        StreamedReader(tmp_path, 0)
    assert run_writer(tmp_path).returncode == 0
    reader = StreamedReader(tmp_path, 0)
    assert all(same(reader.read(streamed_writer.PATH, (index,)), streamed_writer.layer(index)) for index in range(4))
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000000"]


@pytest.mark.parametrize("limit", [100_000, 300])
def test_a_full_disk_is_a_clear_error_and_leaves_nothing_behind(tmp_path, limit):
    """A write that fails for a layer, or for a small file at the end."""
    done = run_writer(tmp_path, "--limit", limit)
    assert done.returncode == 5, done.stderr
    assert f"the checkpoint of step 0 could not be written: {tmp_path}/step_00000000" in done.stderr and "File too large" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_streamed_checkpoint_is_not_read(tmp_path):
    write(tmp_path, values())
    data = max(tmp_path.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="was altered"):
        StreamedReader(tmp_path, 0)
