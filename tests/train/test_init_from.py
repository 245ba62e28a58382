"""A new run that begins with another one's weights."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import yaml

from telamon.checkpoint.store import CheckpointStore
from telamon.config.load import load_run, to_yaml
from telamon.errors import CheckpointError, ConfigError
from telamon.infer.run import open_run
from telamon.train import loop
from telamon.train.job import make_job
from telamon.train.start import begin
from telamon.train.state import weights_hash

CONFIG = {
    "model": {"preset": "tiny-llama", "published_parameters": None, "d_model": 64},
    "data": {"sources": [{"kind": "synthetic", "documents": 64, "length": 48}], "tokenizer": {"vocab_size": 512}},
    "train": {"steps": 2, "batch_size": 8, "seq_len": 32, "compute_dtype": "float32"},
    "eval": {"every": None, "batches": 1},
    "watch": {"progress": False, "tensorboard": False, "peak_tflops": 1.0},
    "sample": {"tokens": 0},
}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run of two steps: its folder, and the checksum of its last weights."""
    folder, last = tmp_path_factory.mktemp("first"), []
    (folder / "run.yml").write_text(yaml.safe_dump(CONFIG))
    config = load_run(folder / "run.yml", [f"run.root={folder}", "run.name=first", f"data.cache_dir={folder / 'cache'}"]).config
    loop.train(config, at_end=[lambda end: last.append(weights_hash(end.state.weights, end.job.mesh))])
    return folder / "first", last[0]


def test_a_run_begins_with_the_weights_and_nothing_else(first):
    folder, weights = first
    # The model is that of the weights: no size is given here.
    loaded = load_run(None, [f"train.init_from={folder}", "train.seq_len=32", "train.batch_size=8"])
    assert loaded.config.model.d_model == 64
    assert loaded.origin("model.d_model").startswith(f"64 in {folder}")
    job = make_job(loaded.config)
    fresh = job.fresh_state()
    moments = [np.asarray(leaf) for leaf in jax.tree.leaves(fresh.optimizer)]
    state = begin(job, fresh)
    assert weights_hash(state.weights, job.mesh) == weights
    assert int(state.step) == 0
    for ours, theirs in zip(jax.tree.leaves(state.optimizer), moments, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_tables_get_the_spare_rows_that_a_mesh_needs(first, tmp_path):
    """A vocabulary of any size is split over any mesh, and back again without them."""
    folder, _ = first
    plain = _table(folder, "run.name=plain")
    padded = _table(folder, "run.name=padded", "model.vocab_multiple=768", "mesh.tensor=2", save=tmp_path / "padded")
    assert len(plain) == 512 and len(padded) == 768
    np.testing.assert_array_equal(padded[: len(plain)], plain)
    assert not padded[len(plain) :].any()
    np.testing.assert_array_equal(_table(tmp_path / "padded", "model.vocab_multiple=1"), plain)


def _table(begun, *overrides, save=None):
    """The embedding of a run that begins with the weights of another."""
    config = load_run(
        None, [f"train.init_from={begun}", "train.seq_len=32", "train.batch_size=8", "model.published_parameters=none", *overrides]
    ).config
    job = make_job(config)
    weights = begin(job, job.fresh_state()).weights
    assert jax.tree.map(lambda leaf: leaf.sharding, weights) == job.model.shardings(job.mesh)
    if save is not None:
        save.mkdir()
        (save / "config.yaml").write_text(to_yaml(config))
        with CheckpointStore(save / "checkpoints") as store:
            store.save(0, {"weights": weights}, {})
    return np.asarray(weights["embedding"])


@pytest.mark.parametrize("preset", ["default", "tiny"])
def test_a_run_preset_gives_way_in_its_model_and_tokenizer_alone(first, preset):
    loaded, alone = load_run(preset, [f"train.init_from={first[0]}"]), load_run(preset)
    assert loaded.config.model.d_model == 64
    assert loaded.config.train.steps == alone.config.train.steps
    assert loaded.config.data.sources == alone.config.data.sources


def test_another_size_is_refused_with_both_numbers_and_their_origins(first):
    folder, _ = first
    message = (
        r"model.d_model=32 does not fit the weights of train.init_from=.*first, which have 64: "
        r"32 from the override \(model.d_model=32\), 64 in .*first, 256 by default"
    )
    with pytest.raises(ConfigError, match=message):
        load_run(None, [f"train.init_from={folder}", "model.d_model=32"])
    # An equal value is no conflict, and what weights do not depend on may change.
    changed = load_run(None, [f"train.init_from={folder}", "model.d_model=64", "model.rope_theta=5e5", "model.max_positions=4096"])
    assert (changed.config.model.d_model, changed.config.model.max_positions) == (64, 4096)


def test_a_preset_of_other_sizes_is_refused(first):
    with pytest.raises(
        ConfigError, match=r"model.d_model=.* does not fit the weights .* in the preset tiny-qwen3|model.family='qwen3' does not fit"
    ):
        load_run(None, [f"train.init_from={first[0]}", "model.preset=tiny-qwen3"])


def test_texts_may_be_as_long_as_those_the_weights_have_seen(first):
    """Short rows to train on do not make a model forget that it was made for long texts."""
    folder, _ = first
    config = load_run(folder).config
    made_for = config.model_copy(update={"model": config.model.model_copy(update={"max_positions": 8192})})
    begun = made_for.model_copy(update={"train": config.train.model_copy(update={"init_from": str(folder)})})
    assert open_run(str(folder)).context == replace(open_run(str(folder)), config=made_for).context == 32
    assert replace(open_run(str(folder)), config=begun).context == 8192


def test_what_is_no_run_is_refused(tmp_path, first, monkeypatch):
    with pytest.raises(ConfigError, match=r"train.init_from=.*: no run there"):
        load_run(None, [f"train.init_from={tmp_path}"])
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"train.init_from='first': no run there .*; did you mean runs/first\?"):
        load_run(None, ["train.init_from=first"])
    (tmp_path / "config.yaml").write_text((first[0] / "config.yaml").read_text())
    job = make_job(load_run(None, [f"train.init_from={tmp_path}", "train.seq_len=32", "train.batch_size=8"]).config)
    with pytest.raises(CheckpointError, match="there is no whole checkpoint to begin with"):
        begin(job, job.fresh_state())
