"""What is trained here and exported, transformers loads unchanged and continues with the same tokens.

Needs torch, which the project does not have, so that it runs only when asked: TELAMON_TORCH=ENV/bin/python pytest
tests/hub/test_transformers.py, with the environment that tests/reference/README.md describes. The versions and figures of the last
such run are in tests/reference/trained_exports.json.
"""

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telamon.checkpoint.store import CheckpointStore
from telamon.config.load import load_run
from telamon.config.registry import families, family
from telamon.hub.exporting import export_run
from telamon.infer.engine import Generator
from telamon.infer.sampling import Sampling
from telamon.models.hf_family import HfFamily
from telamon.models.weights import Model
from telamon.train import loop
from telamon.train.job import make_job
from telamon.watch.log import make_console

PYTHON = os.environ.get("TELAMON_TORCH", "")
REFERENCE = Path(__file__).parent.parent / "reference"
RECORD = REFERENCE / "trained_exports.json"
PROMPT, TOKENS = [5, 17, 200, 3, 3, 90, 41, 7], 24
NAMES = [name for name in families() if issubclass(family(name), HfFamily) and family(name).__module__.startswith("telamon.")]

asked = pytest.mark.skipif(not PYTHON, reason="TELAMON_TORCH names no Python with torch and transformers")


def _train(name: str, folder: Path) -> str:
    """A run of 20 steps of a tiny model whose weights have left their beginnings; its path."""
    sizes = family(name)(tie_embeddings=False).shrunk()
    run = {
        "model": sizes.model_dump(mode="json"),
        "data": {"sources": [{"kind": "synthetic", "documents": 64, "length": 40}], "cache_dir": str(folder / "cache")},
        "train": {"steps": 20, "batch_size": 8, "seq_len": 48, "compute_dtype": "float32"},
        "optimizer": {"learning_rate": 0.01 if name == "llama4" else 0.03},  # at the higher one, Llama 4 comes to write one token alone
        "eval": {"every": None, "batches": 1},
        "sample": {"tokens": 0},
        "run": {"root": str(folder), "name": name},
        "watch": {"progress": False, "tensorboard": False, "peak_tflops": 1.0},
    }
    (folder / f"{name}.yml").write_text(json.dumps(run))
    loop.train(load_run(folder / f"{name}.yml").config)
    return str(folder / name)


def _ours(run: str) -> tuple[np.ndarray, list[int]]:
    """Logits after the prompt, and the greedy continuation."""
    config = load_run(f"{run}/config.yaml").config
    model = Model(config.model.spec())
    store = CheckpointStore(f"{run}/checkpoints", readonly=True)
    weights = store.restore_subtree(store.latest_valid() or 0, "weights", model.abstract())
    tokens, ones = jnp.asarray([PROMPT]), jnp.ones((1, len(PROMPT)), jnp.int32)
    decoder = model.bind(weights)
    hidden = jax.jit(lambda tokens: decoder(tokens, positions=jnp.arange(len(PROMPT))[None], segments=ones).hidden)(tokens)
    session = Generator(model, weights, eos_ids=set()).start([PROMPT], max_tokens=TOKENS, sampling=Sampling(temperature=0))
    while session.running:
        session.advance()
    return np.asarray(decoder.logits(hidden))[0, -1], session.tokens[0]


@asked
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_transformers_continues_a_trained_run_with_the_same_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "make_job", partial(make_job, devices=jax.devices()[:1]))
    run = _train(name, tmp_path)
    logits, ids = _ours(run)
    export_run(run, tmp_path / "out", console=make_console(quiet=True))
    if name == "kimi_k2":  # transformers 5 has the class, and knows it by another name
        file = tmp_path / "out" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "deepseek_v3"}))
    words = ["--prompt-ids", ",".join(map(str, PROMPT)), "--tokens", str(TOKENS)]
    done = subprocess.run([PYTHON, REFERENCE / "check_export.py", tmp_path / "out", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    difference = float(np.abs(logits - answer["logits"]).max())
    assert difference < 1e-4
    assert ids == answer["ids"]
    assert len(set(ids)) > 1, "a model that repeats one token would hide much"
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    record[name] = {"greedy_tokens_equal": TOKENS, "largest_logit_difference": float(f"{difference:.2g}"), "versions": answer["versions"]}
    RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=2) + "\n")


def test_every_family_was_proved_so():
    record = json.loads(RECORD.read_text())
    assert set(record) == set(NAMES)
    assert all(entry["largest_logit_difference"] < 1e-4 and entry["greedy_tokens_equal"] == TOKENS for entry in record.values())
