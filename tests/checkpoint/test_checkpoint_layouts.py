"""How layers are stacked on disk is nobody's business: a checkpoint restores into any other way of stacking them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checkpoint_states import mesh
from jax.sharding import NamedSharding, PartitionSpec

from telamon.checkpoint import layouts
from telamon.checkpoint.store import CheckpointStore
from telamon.checkpoint.streamed import StreamedReader, StreamedWriter
from telamon.errors import CheckpointError
from telamon.layers.attention import AttentionConfig
from telamon.layers.mlp import GatedMLPConfig
from telamon.layers.rope import RopeConfig
from telamon.models.spec import BlockSpec, ModelSpec, StackSpec
from telamon.models.weights import Model, flatten

LAYOUTS = {"a pattern and a rest": [(6, 2), (1, 1)], "single layers": [(1, 1)] * 13, "one long pattern": [(13, 1)]}
BATCH = tiny.batch([[7, 9], [12]], length=16)


def blocks(count=13):
    """Every sixth block is different."""

    def block(layer):
        mixer = AttentionConfig(n_heads=2, n_kv_heads=1, head_dim=4, rope=RopeConfig(theta=50.0 if layer % 6 == 5 else 1e4))
        return BlockSpec(mixer=mixer, ffn=GatedMLPConfig(d_ff=12))

    return tuple(block(layer) for layer in range(count))


def model(name, count=13):
    class Cut(ModelSpec):
        @property
        def stacks(self):
            stacks, start = [], 0
            for period, repeats in LAYOUTS[name] if count == 13 else [(count, 1)]:
                stacks.append(StackSpec(self.blocks[start : start + period], repeats))
                start += period * repeats
            return tuple(stacks)

    return Model(Cut(vocab_size=64, d_model=8, blocks=blocks(count), tie_embeddings=True))


def logits(model, weights):
    return np.asarray(jax.jit(lambda w: tiny.logits(model.bind(w), BATCH))(weights))


@pytest.fixture(scope="module")
def original():
    """A model of 13 layers, its weights, and its logits."""
    first = model("a pattern and a rest")
    assert first.spec.stacks == ModelSpec(**dict(first.spec)).stacks, "what the library itself makes of these blocks"
    weights = tiny.weights(first)
    return first, weights, logits(first, weights)


@pytest.mark.parametrize("name", ["single layers", "one long pattern"])
def test_thirteen_layers_restore_into_another_stacking_and_back(tmp_path, original, name):
    first, weights, expected = original
    other = model(name)
    with CheckpointStore(tmp_path) as store:
        store.save(0, {"weights": weights}, {})
        recut = store.restore_subtree(0, "weights", other.abstract())
        np.testing.assert_array_equal(logits(other, recut), expected)
        store.save(1, {"weights": recut}, {})
        back = store.restore_subtree(1, "weights", first.abstract())
    for (path, got), want in zip(jax.tree.leaves_with_path(back), jax.tree.leaves(weights), strict=True):
        np.testing.assert_array_equal(got, want, err_msg=jax.tree_util.keystr(path))


def test_each_layer_is_found_once_in_every_stacking():
    want = None
    for name, cut in LAYOUTS.items():
        shapes = flatten(model(name).abstract())
        assert layouts.layouts(shapes) == {"": cut}
        names = set(layouts.by_layer(shapes))
        assert {int(found[1]) for part in names if (found := re.match(r"layers\.(\d+)\.", part))} == set(range(13))
        want = want or names
        assert names == want and len(names) == 13 * 9 + 2


def test_a_whole_training_state_moves_to_another_stacking_on_a_mesh(tmp_path, original):
    """Moments follow their weights; what is not stacked stays; each array lands where it is wanted."""
    _, weights, _ = original
    state = {
        "weights": weights,
        "optimizer": {"mu": jax.tree.map(lambda x: x * 2, weights), "count": jnp.int32(7)},
        "key": jax.random.key(3),
    }
    layout = mesh(fsdp=2)
    other = model("single layers")

    def place(leaf):
        split = PartitionSpec(None, "fsdp") if leaf.ndim > 1 and leaf.shape[1] % 2 == 0 else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(layout, split))

    abstract = jax.tree.map(place, other.abstract())
    with CheckpointStore(tmp_path) as store:
        store.save(4, state, {"position": 9})
        wanted = {
            "weights": abstract,
            "optimizer": {"mu": abstract, "count": place(state["optimizer"]["count"])},
            "key": place(state["key"]),
        }
        got, meta = store.restore(4, wanted)
    assert meta == {"position": 9} and int(got["optimizer"]["count"]) == 7
    assert jax.random.key_data(got["key"]).tolist() == jax.random.key_data(state["key"]).tolist()
    for path, array in flatten(got["weights"]).items():
        assert array.sharding == flatten(abstract)[path].sharding
        np.testing.assert_array_equal(flatten(got["optimizer"]["mu"])[path], array * 2)
    query = flatten(got["weights"])["stacks.10.blocks.0.mixer.query"]
    np.testing.assert_array_equal(query[0], flatten(weights)["stacks.0.blocks.4.mixer.query"][1])


def test_layers_streamed_one_by_one_in_16_bits_restore_stacked(tmp_path, original):
    first, weights, _ = original
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    parts = layouts.slots(flatten(first.abstract()))
    single = {path: jax.ShapeDtypeStruct(info.shape, jnp.bfloat16) for path, info in flatten(model("single layers").abstract()).items()}
    places = layouts.slots(single)
    arrays = flatten(half)
    with StreamedWriter(tmp_path, step=0, abstract=single, meta={}) as writer:
        for name, slot in places.items():
            writer.write(slot.name, (slot.row,), np.asarray(arrays[parts[name].name][parts[name].row]))
        for name in set(single) - {slot.name for slot in places.values()}:
            writer.write(name, (), np.asarray(arrays[name]))
    got = CheckpointStore(tmp_path, readonly=True).restore_subtree(0, "weights", first.abstract())
    for got_leaf, want in zip(jax.tree.leaves(got), jax.tree.leaves(half), strict=True):
        assert got_leaf.dtype == jnp.float32
        np.testing.assert_array_equal(got_leaf, want.astype(jnp.float32))


def test_layers_are_read_one_by_one_however_they_are_stacked(tmp_path, original):
    first, weights, _ = original
    with CheckpointStore(tmp_path) as store:
        store.save(0, {"weights": weights}, {})
    wanted = flatten(model("single layers").info)
    reader = StreamedReader(tmp_path, abstract=wanted)
    assert {path: info.shape for path, info in reader.arrays.items()} == {path: info.shape for path, info in wanted.items()}
    stored, arrays = layouts.slots(flatten(first.abstract())), flatten(weights)
    for name, slot in layouts.slots(wanted).items():
        np.testing.assert_array_equal(reader.read(slot.name, (slot.row,)), arrays[stored[name].name][stored[name].row])
    np.testing.assert_array_equal(reader.read("embedding", ()), arrays["embedding"])
    with pytest.raises(CheckpointError, match=r"layers\.12\.[a-z_.]+: in the checkpoint, not in the model"):
        StreamedReader(tmp_path, abstract=flatten(model("one long pattern", 12).info))


def test_another_depth_names_the_layers_that_are_missing(tmp_path, original):
    _, weights, _ = original
    with CheckpointStore(tmp_path) as store:
        store.save(0, {"weights": weights}, {})
        with pytest.raises(CheckpointError, match=r"weights\.layers\.12\.[a-z_.]+: in the checkpoint, not in the model"):
            store.restore_subtree(0, "weights", model("one long pattern", 12).abstract())


def test_blocks_that_are_in_no_stack_stay_where_they_are(tmp_path):
    """A layer for multi-token prediction beside layers that are stacked anew; and it may be left out of what is read, as nothing else may."""

    def with_further(name):
        first = model(name)
        return Model(first.spec.model_copy(update={"mtp": first.spec.blocks[:1]}))

    saved, wanted = with_further("a pattern and a rest"), with_further("one long pattern")
    weights = tiny.weights(saved)
    with CheckpointStore(tmp_path) as store:
        store.save(0, {"weights": weights}, {})
        restored = store.restore_subtree(0, "weights", wanted.abstract())
        np.testing.assert_array_equal(restored["mtp"]["0"]["block"]["mixer"]["query"], weights["mtp"]["0"]["block"]["mixer"]["query"])
        whole, main = restored["stacks"]["0"]["blocks"]["7"], Model(wanted.spec.main)
        np.testing.assert_array_equal(whole["mixer"]["query"][0], weights["stacks"]["0"]["blocks"]["1"]["mixer"]["query"][1])
        assert "mtp" not in store.restore_subtree(0, "weights", main.abstract(), spare="mtp")
        with pytest.raises(CheckpointError, match="in the checkpoint, not in the model of this run"):
            store.restore_subtree(0, "weights", main.abstract())
        with pytest.raises(CheckpointError, match=r"norm\.scale: in the checkpoint, not in"):
            store.restore_subtree(0, "weights", {"embedding": main.abstract()["embedding"]}, spare="mtp")
