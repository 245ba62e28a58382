"""A run that is killed again and again ends as one that is left alone: weights, optimizer state and data order, bit for bit."""

import random
from collections import Counter
from itertools import chain
from pathlib import Path

import jax
import pytest
import yaml
from kill_harness import Kill, Run, plan
from orbax.checkpoint import v1 as ocp

from telamon.checkpoint.store import CheckpointStore

STEPS = 40
KINDS = ["checkpoint"] * 8 + ["eval"] * 4 + ["compile"] * 3 + ["steps"] * 3 + ["start"] * 2
AT_LEAST = {"checkpoint": 5, "eval": 2, "compile": 2}
LIMIT = 120.0
"""Seconds a process may take to reach a moment; some machines are busy."""


def write_corpus(folder: Path) -> None:
    """Files of seeded words, some longer than a row and some much shorter, so that a kill falls within documents."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(200)]
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02d}.txt").write_text(" ".join(rng.choices(words, k=rng.randint(5, 400))))


def write_config(path: Path, corpus: Path) -> None:
    config = {
        "model": {"preset": "tiny-llama"},
        "data": {
            "sources": [{"kind": "text", "path": str(corpus)}],
            "tokenizer": {"vocab_size": 300},
            "val_fraction": 0.3,
        },
        "train": {"steps": STEPS, "batch_size": 4, "seq_len": 64, "compute_dtype": "float32", "log_every": 10},
        "eval": {"every": 5, "batch_size": 2},
        "checkpoint": {"every": 2, "keep": 2},
        "watch": {"progress": False, "tensorboard": False, "peak_tflops": 1.0},
        "sample": {"tokens": 0},
    }
    path.write_text(yaml.safe_dump(config))


def saved_arrays(run: Run) -> dict[str, bytes]:
    """Bytes of every array of the last checkpoint, as Orbax reads them without us."""
    store = CheckpointStore(run.checkpoints, readonly=True)
    assert store.latest_valid() == STEPS and store.skipped == []
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    saved = ocp.metadata(store.path(STEPS), checkpointable_name="state").metadata
    wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), saved)
    leaves = jax.tree.leaves_with_path(ocp.load(store.path(STEPS), wanted, checkpointable_name="state"))
    return {jax.tree_util.keystr(path, simple=True, separator="."): jax.device_get(leaf).tobytes() for path, leaf in leaves}


@pytest.mark.slow
def test_a_run_killed_at_twenty_moments_ends_like_one_left_alone(tmp_path, capsys):
    write_corpus(tmp_path / "corpus")
    write_config(tmp_path / "config.yaml", tmp_path / "corpus")
    environment = {"XLA_FLAGS": "", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    runs = {name: Run(tmp_path / name, tmp_path / "config.yaml", environment) for name in ("alone", "killed")}
    for run in runs.values():
        run.root.mkdir()
    alone, killed = runs["alone"], runs["killed"]
    alone.finish(LIMIT)

    fell: list[list[str]] = []
    moments = plan(seed=20, kinds=KINDS)
    while moments:
        kind, kill = moments.pop(0)
        # A cached program is there too soon to be killed while it is compiled.
        cache = {"JAX_ENABLE_COMPILATION_CACHE": "false"} if kind == "compile" else {}
        fell.append(killed.kill(kill, timeout=LIMIT, **cache))
        with capsys.disabled():
            print(f"\nkill {len(fell)}: {kill}: fell in {' and '.join(fell[-1])}, after step {killed.reached()}", end="")
        missing = Counter(AT_LEAST) - Counter(chain(*fell))
        if not moments and missing and len(fell) < 30:  # the pauses are seeded, the process is not: it may be past the phase
            moments = plan(seed=len(fell), kinds=list(missing.elements()))
    killed.finish(LIMIT)

    assert len(fell) >= 20 and not Counter(AT_LEAST) - Counter(chain(*fell)), fell
    assert_same_order(alone, killed)
    want, got = saved_arrays(alone), saved_arrays(killed)
    assert {name.split(".")[0] for name in want} == {"step", "weights", "optimizer", "key"}
    assert got.keys() == want.keys() and [name for name in want if got[name] != want[name]] == []


def assert_same_order(alone: Run, killed: Run) -> None:
    """Each process of the killed run goes on, without a gap, from a step some process before it did, with the same batches."""
    order = dict(alone.batches())
    assert list(order) == list(range(STEPS)) and len(set(order.values())) > STEPS // 2
    reached = 0
    for trace in killed.traces:
        steps = [int(mark.split()[1]) for mark in trace if mark.startswith("batch ")]
        if steps:
            assert steps[0] <= reached and steps == list(range(steps[0], steps[0] + len(steps)))
            reached = max(reached, steps[-1] + 1)
    assert reached == STEPS
    assert [(step, checksum) for step, checksum in killed.batches() if order[step] != checksum] == []


def test_a_kill_says_when_it_is_due():
    assert str(Kill("eval begin", 2, 0.01)) == "10 ms after 'eval begin' no. 2"
    assert str(Kill("", 0, 0.5)) == "500 ms after the start"
