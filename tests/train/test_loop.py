"""The training loop as a whole: stopped and resumed, seeded, along its plan, and with what looks inside it."""

import re
import signal
import time
import zlib
from functools import partial

import jax
import numpy as np
import pytest
import yaml
from kill_harness import Run
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from telamon.checkpoint.store import CheckpointStore
from telamon.config.load import load_run
from telamon.config.resume import load_resumed
from telamon.data.loader import open_loader
from telamon.train import loop
from telamon.train.job import make_job
from telamon.train.placement import place
from telamon.train.state import weights_hash
from telamon.watch import phases
from telamon.watch.trackers import read_metrics

STEPS = 300
CONFIG = {
    "model": {"preset": "tiny-llama", "tie_embeddings": False, "published_parameters": None},
    "data": {"sources": [{"kind": "synthetic", "documents": 128, "length": 48}], "tokenizer": {"vocab_size": 512}},
    "train": {"steps": STEPS, "batch_size": 8, "seq_len": 32, "compute_dtype": "float32", "log_every": 1},
    "eval": {"every": None, "batches": 1},
    "checkpoint": {"every": None},
    "watch": {"progress": False, "tensorboard": False, "peak_tflops": 1.0},
    "sample": {"tokens": 0},
}


@pytest.fixture
def one_device(monkeypatch):
    """Runs use one device, which compiles faster than eight and takes any batch size."""
    monkeypatch.setattr(loop, "make_job", partial(make_job, devices=jax.devices()[:1]))


def train(folder, *overrides, resumed=False):
    """Train below `folder`, or go on there; returns the checksum of the last weights."""
    run, last = str(folder / "runs" / "run"), []
    if resumed:
        config = load_resumed(run, overrides).config
    else:
        (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
        here = [f"run.root={folder / 'runs'}", "run.name=run", f"data.cache_dir={folder / 'cache'}"]
        config = load_run(folder / "config.yaml", [*here, *overrides]).config
    loop.train(config, resume=run if resumed else None, at_end=[lambda end: last.append(weights_hash(end.state.weights, end.job.mesh))])
    return last[0]


def logged(folder, key):
    """A metric of every step that has it."""
    return {line["step"]: line[key] for line in read_metrics(folder / "runs" / "run") if key in line}


def first_hashes(output):
    """Checksums of the weights and data before the first step, as a run prints them."""
    found = re.search(r"weights (\w{8}), data (\w{16})", output)
    assert found, output
    return found.groups()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run in a process of its own that got SIGTERM in the middle of training: its folder, exit code and output."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    run = Run(folder, folder / "config.yaml", {})
    process = run.start()
    deadline = time.monotonic() + 200
    while process.poll() is None and not any(mark.startswith("batch 5") for mark in run.marks()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    code = process.wait(100)
    return folder, code, (folder / "output").read_text()


@pytest.mark.slow
def test_sigterm_saves_the_last_step_and_ends_with_code_75_and_says_how_to_go_on(stopped):
    folder, code, output = stopped
    assert code == 75, output
    done = re.search(rf"stopped after step (\d+) of {STEPS} and saved; continue with: telamon train resume=(\S+)$", output.strip())
    assert done and done[2] == str(folder / "runs/run") and 5 < int(done[1]) < STEPS, output
    assert CheckpointStore(folder / "runs/run/checkpoints", readonly=True).latest_valid() == int(done[1])
    assert output.count("continue with") == 1 and "Traceback" not in output


@pytest.mark.slow
def test_a_stopped_run_ends_like_one_left_alone_and_a_seed_is_a_run(stopped, tmp_path, capsys):
    """Two fresh processes with one config begin with equal weights (an untied head included) and data and have the same
    losses; the one that was stopped and went on ends with the same weights, bit for bit."""
    folder, _, output = stopped
    losses = logged(folder, "loss")  # of the process that was stopped
    last = train(folder, resumed=True)
    capsys.readouterr()
    assert train(tmp_path) == last
    assert first_hashes(capsys.readouterr().out) == first_hashes(output)
    whole = logged(tmp_path, "loss")
    assert list(whole) == list(range(1, STEPS + 1)) and whole == logged(folder, "loss")
    assert len(losses) > 5 and losses.items() <= whole.items()
    assert logged(tmp_path, "val_loss") == logged(folder, "val_loss")

    train(tmp_path, "train.seed=1", "run.name=other", "train.stop_at=3")
    assert first_hashes(capsys.readouterr().out)[0] != first_hashes(output)[0]
    other = [line["loss"] for line in read_metrics(tmp_path / "runs" / "other") if "loss" in line]
    assert len(other) == 3 and not set(other) & set(whole.values())


def test_a_resumed_run_goes_on_along_the_plan_and_the_ramp_of_its_batch(tmp_path, one_device, monkeypatch):
    """A plan of 500 steps, stopped at 15 and again at 22: batches of 2, from step 10 of 4, from step 20 of 8."""
    ramp = "train.batch_ramp=[{step: 10, batch_size: 4}, {step: 20, batch_size: 8}]"
    plan = [
        "train.steps=500",
        "optimizer.schedule.warmup_fraction=0.1",
        "optimizer.learning_rate=0.051",
        "train.batch_size=2",
        "eval.batch_size=2",
        ramp,
    ]
    train(tmp_path, *plan, "train.stop_at=15")
    monkeypatch.setenv(phases.VARIABLE, str(tmp_path / "trace"))
    train(tmp_path, "train.stop_at=22", resumed=True)

    config = load_run(tmp_path / "runs/run").config
    # The warm-up is a tenth of the plan, 50 steps, and rises by a 51st of the peak each step.
    assert logged(tmp_path, "learning_rate") == {step: pytest.approx(0.001 * step, rel=1e-5) for step in range(1, 23)}

    loader = open_loader(config)
    order = [loader.batch_at(step)["tokens"] for step in range(22)]
    assert [len(rows) for rows in order] == [2] * 10 + [4] * 10 + [8] * 2
    marks = [line.split(" ", 1)[1] for line in (tmp_path / "trace").read_text().splitlines()]
    sums = [f"batch {step} {zlib.crc32(order[step].tobytes()):08x}" for step in range(15, 22)]
    assert [mark for mark in marks if mark.startswith("batch ")] == sums
    # What the steps trained on is what the loader gave: all but each document's last token, in rows that are full.
    tokens = logged(tmp_path, "tokens")
    assert all(0.9 * rows.size < tokens[step] <= rows.size for step, rows in enumerate(order, 1))


def test_a_finished_run_that_is_resumed_says_so_and_keeps_its_figures(tmp_path, one_device, capsys):
    last, summary = train(tmp_path, "train.steps=2"), tmp_path / "runs/run/summary.json"
    figures = summary.read_text()
    assert "nothing is left" not in capsys.readouterr().out
    assert train(tmp_path, resumed=True) == last and summary.read_text() == figures
    assert "resumed after step 2, its last: nothing is left to train" in capsys.readouterr().out
    train(tmp_path, "train.steps=3", resumed=True)
    assert '"steps": 3' in summary.read_text() and "nothing is left" not in capsys.readouterr().out


def test_an_interrupted_run_says_how_it_goes_on(tmp_path, one_device, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Loop, "steps", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    assert f"telamon train resume={tmp_path / 'runs' / 'run'}" in capsys.readouterr().out


def test_a_checkpoint_brings_the_optimizers_state_back(tmp_path):
    """Three steps, a save, one more: as without the save, bit for bit; and unlike a restart from the weights alone."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    config = load_run(tmp_path / "config.yaml", [f"data.cache_dir={tmp_path / 'cache'}"]).config
    job, loader = make_job(config, devices=jax.devices()[:1]), open_loader(config)
    step = job.train_step(config.train.batch_size)

    def go(state, *numbers):
        for number in numbers:
            state, _ = step(state, place(loader.batch_at(number), token_bytes=loader.tokenizer.token_bytes, mesh=job.mesh))
        return state

    def bits(tree):
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]

    with jax.set_mesh(job.mesh), CheckpointStore(tmp_path / "checkpoints") as store:
        whole = go(job.fresh_state(), 0, 1, 2, 3)
        store.save(3, go(job.fresh_state(), 0, 1, 2), {})
        resumed = go(store.restore(3, job.abstract_state)[0], 3)
        restored, _ = store.restore(3, job.abstract_state)
        fresh = job.fresh_state()
        weights_alone = go(type(fresh)(restored.step, restored.weights, fresh.optimizer, restored.key), 3)
    assert int(whole.step) == int(resumed.step) == int(weights_alone.step) == 4
    assert bits(resumed.weights) == bits(whole.weights) and bits(resumed.optimizer) == bits(whole.optimizer)
    assert bits(weights_alone.weights) != bits(whole.weights)


def test_looking_inside_a_run_and_saving_memory_change_no_loss(tmp_path, one_device):
    look = ["profile.steps=2:4", "profile.hlo=true", "watch.tensorboard=true"]
    losses = {}
    for name, settings in {
        "plain": look,
        "accumulated and recomputed": ["train.accumulate=4", "train.remat=full"],
        "all but products recomputed": ["train.remat=dots"],
    }.items():
        (tmp_path / name).mkdir()
        train(tmp_path / name, "train.steps=5", *settings)
        losses[name] = logged(tmp_path / name, "loss")
    plain = losses.pop("plain")
    assert list(plain) == [1, 2, 3, 4, 5]
    for name, found in losses.items():
        assert found == {step: pytest.approx(loss, rel=1e-6) for step, loss in plain.items()}, name

    run = tmp_path / "plain/runs/run"
    assert any(path.stat().st_size > 1000 for path in (run / "profile").rglob("*.xplane.pb"))
    assert "HloModule" in (run / "hlo/train_step.txt").read_text()
    [events] = (run / "tensorboard").iterdir()
    seen = [event.step for event in EventFileLoader(str(events)).Load() if any(v.tag == "loss" for v in event.summary.value)]
    assert seen == [1, 2, 3, 4, 5]
