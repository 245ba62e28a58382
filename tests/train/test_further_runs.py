"""A run that predicts further tokens: what it reports, what generates from it, and what becomes of its weights in another run."""

import json

import jax
import numpy as np
import pytest
import yaml

from telamon.checkpoint.streamed import StreamedReader
from telamon.config.load import load_run
from telamon.errors import ConfigError
from telamon.infer.run import open_run
from telamon.models.weights import flatten
from telamon.train import loop
from telamon.train.job import make_job
from telamon.train.start import begin, describe_job

SIZES = {
    "vocab_size": 512,
    "d_model": 32,
    "n_layers": 1,
    "n_dense": 2,
    "d_ff": 48,
    "d_expert": 16,
    "n_experts": 4,
    "n_heads": 2,
}
LATENT = {"kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 8, "q_rank": None}
CONFIG = {
    "model": {"family": "deepseek_v3", "mtp_layers": 1, **SIZES, **LATENT},
    "data": {"sources": [{"kind": "synthetic", "documents": 64, "length": 48}], "tokenizer": {"vocab_size": 512}, "val_fraction": 0.2},
    "train": {"steps": 2, "batch_size": 8, "seq_len": 32, "compute_dtype": "float32", "log_every": 1, "mtp_weight": 0.5},
    "eval": {"every": None, "batches": 2},
    "watch": {"progress": False, "tensorboard": False, "peak_tflops": 1.0},
    "sample": {"tokens": 0},
}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    (folder / "run.yml").write_text(yaml.safe_dump(CONFIG))
    loop.train(load_run(folder / "run.yml", [f"run.root={folder}", "run.name=first", f"data.cache_dir={folder / 'cache'}"]).config)
    return folder / "first"


def _begun(first, *overrides):
    return load_run(None, [f"train.init_from={first}", "train.seq_len=32", "train.batch_size=8", *overrides]).config


def test_loss_and_acceptance_are_told(first):
    lines = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "mtp" in line]
    assert len(trained) == 2
    entropy = np.log(512)  # nothing can be learned of random tokens in two steps
    assert all(0.9 * entropy < line["mtp"] < 1.2 * entropy for line in trained)
    assert all(1.4 * entropy < line["loss"] < 1.8 * entropy for line in trained), "the next token, and half of one further"
    (validation,) = [line for line in lines if "val_loss" in line]
    assert 0 <= validation["val_mtp_acceptance"] <= 1
    assert json.loads((first / "summary.json").read_text())["val_mtp_acceptance"] == validation["val_mtp_acceptance"]
    assert "Drafts accepted" in (first / "report.html").read_text()


def test_what_generates_does_not_hold_it(first):
    opened = open_run(str(first))
    assert "mtp" not in opened.weights
    assert opened.model.spec.mtp == ()


def test_a_run_may_go_on_without_it(first):
    config = _begun(first, "model.mtp_layers=0")
    job = make_job(config)
    weights = flatten(begin(job, job.fresh_state()).weights)
    assert not any(path.startswith("mtp") for path in weights)
    saved = StreamedReader(first / "checkpoints")
    np.testing.assert_array_equal(weights["embedding"], saved.read("embedding", ()))
    assert describe_job(job)["weights"] == f"those of {first}, without 1 of its layers for multi-token prediction"


def test_a_run_goes_on_with_it(first):
    job = make_job(_begun(first))
    state = begin(job, job.fresh_state())
    saved = StreamedReader(first / "checkpoints")
    np.testing.assert_array_equal(state.weights["mtp"]["0"]["projection"], saved.read("mtp.0.projection", ()))
    assert describe_job(job)["weights"] == f"those of {first}"
    assert {leaf.sharding for leaf in jax.tree.leaves(state.weights)}  # placed as the mesh says


def test_layers_that_the_weights_lack_are_refused(first):
    with pytest.raises(ConfigError, match=r"model\.mtp_layers=2 does not fit the weights of train\.init_from=.*, which have 1"):
        _begun(first, "model.mtp_layers=2")


def test_a_weight_of_nothing_is_refused(tmp_path):
    """Of a family without such layers, and of a model of which there are none."""
    with pytest.raises(ConfigError, match=r"train\.mtp_weight=0\.1 has no effect with model\.mtp_layers=0; leave it out"):
        load_run(None, ["model.family=deepseek_v3", "model.mtp_layers=0", "train.mtp_weight=0.1"])
    with pytest.raises(
        ConfigError, match=r"train\.mtp_weight=0\.1 has no effect with model\.family=llama, which has no mtp_layers; leave it out"
    ):
        load_run(None, ["model.family=llama", "train.mtp_weight=0.1"])
    assert load_run(None, ["model.family=deepseek_v3", "model.mtp_layers=1", "train.mtp_weight=0.1"]).config.train.mtp_weight == 0.1
