"""`telamon train`: what it takes, what it refuses before it starts, and going on with a run."""

import hashlib
import re

import numpy as np
import pytest

from telamon.config.load import load_run
from telamon.plan.saved import save_programs, uncached
from telamon.train.job import make_job
from telamon.train.schedule import learning_rate_schedule
from telamon.watch.trackers import read_metrics

QUICK = ("tiny", "train.steps=2", "watch.peak_tflops=1", "watch.tensorboard=false", "checkpoint.asynchronous=false")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dry_run_says_what_the_run_would_be_and_writes_nothing(telamon, here):
    answer = telamon("train", "tiny", "mesh.tensor=2", "--dry-run")
    assert answer.code == 0, answer.err
    assert "34,976 parameters" in answer.out and "fsdp 4 x tensor 2" in answer.out
    assert list(here.iterdir()) == []


def test_learning_rates_come_from_the_length_of_this_run(telamon, here):
    """500 steps with 10 % warm-up: the peak is at step index 50, and the rates at first, peak and last step are said at the start."""
    length = ("train.steps=500", "optimizer.schedule.warmup_fraction=0.1", "optimizer.learning_rate=0.01")
    schedule = learning_rate_schedule(load_run("tiny", length).config)
    rate = {step: np.asarray(schedule(step)).item() for step in (49, 50, 499)}
    assert rate[50] == pytest.approx(0.01)
    assert rate[49] < 0.01
    assert rate[499] == pytest.approx(0.05 * 0.01)
    out = telamon("train", "tiny", *length, "--dry-run").out
    assert re.search(r"0\.000196 at step 1, 0\.01 \(peak\) at step 51, 0\.0005 at step 500", out), out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["tiny", "optimizer.learning_rat=1"], ["learning_rate"]),
        (["tiny", "model.n_layers=30", "mesh.stage=4"], ["30", "4", "mesh.stage"]),
        (["tiny", "mesh.tensor=4"], ["n_kv_heads=2", "mesh.tensor=4", "1, 2"]),
        (["tiny", "mesh.tensor=8", "model.n_heads=8", "model.n_kv_heads=8", "mesh.data=2"], ["16", "8"]),
        (["tiny", "train.batch_size=12"], ["batch_size=12", "8 devices", "multiple of 8"]),
        (["tiny", "optimizer.schedule.warmup_steps=9"], ["warmup_steps=9", "steps=5"]),
        (["tiny", "train.attention=splash"], ["train.attention=splash", "not for cpu", "auto, chunked"]),
        (["tiny", "train.loss=tokamax"], ["train.loss=tokamax", "not for cpu", "auto, chunked"]),
        (["tinny"], ["tinny", "did you mean 'tiny'?"]),
        (["resume=runs/absent"], ["resume=runs/absent: no run there"]),
        (["resume="], ["resume=runs/first"]),
        (["tiny", "resume=runs/first"], ["leave tiny out"]),
        (["tiny", "--import", "no_such_module"], ["no_such_module"]),
    ],
)
def test_what_cannot_run_is_refused_with_code_2_before_anything_is_written(telamon, here, words, parts):
    answer = telamon("train", *words)
    assert answer.code == 2
    assert len(answer.err.splitlines()) < 5
    assert all(part in answer.err for part in parts), answer.err
    assert list(here.iterdir()) == []


def test_a_run_goes_on_from_its_own_config_with_further_changes(telamon, here):
    assert telamon("train", *QUICK, "run.name=first", "train.stop_at=1").code == 0
    saved = load_run(here / "runs/first").config
    assert saved == load_run("tiny", [*QUICK[1:], "run.name=first", "train.stop_at=1"]).config

    # A refused change leaves no trace in the run.
    refused = telamon("train", "resume=runs/first", "train.stop_at=none", "train.seed=7")
    assert refused.code == 2 and "data_hash" in refused.err
    assert load_run(here / "runs/first").config == saved

    answer = telamon("train", "resume=runs/first", "train.stop_at=none")
    assert answer.code == 0, answer.err
    assert "picked attention: chunked; loss: chunked" in answer.out
    assert "resumed after step 1" in answer.out and "step 2/2" in answer.out and "step 1/2" not in answer.out
    assert load_run(here / "runs/first").config.train.stop_at is None


def test_another_chat_template_needs_a_flag(telamon, here):
    """Both hashes are named, and the run stays as it was."""
    for name in ("one", "two"):
        (here / f"{name}.jinja").write_text(f"{{{{ messages[0].content }}}} {name}")
    template = "data.tokenizer.chat_template="
    assert telamon("train", *QUICK, "run.name=first", "train.stop_at=1", f"{template}one.jinja").code == 0
    saved = load_run(here / "runs/first").config
    words = ("resume=runs/first", "train.stop_at=none", f"{template}two.jinja")
    refused = telamon("train", *words)
    hashes = [hashlib.sha256((here / f"{name}.jinja").read_bytes()).hexdigest() for name in ("one", "two")]
    assert refused.code == 2 and all(each in refused.err for each in hashes)
    assert load_run(here / "runs/first").config == saved
    assert telamon("train", *words, "--allow-mismatch").code == 0


def test_a_run_is_not_written_over(telamon, here):
    assert telamon("train", *QUICK, "run.name=first", "train.stop_at=1").code == 0
    answer = telamon("train", *QUICK, "run.name=first")
    assert answer.code == 2 and "resume=runs/first" in answer.err


def test_a_step_compiled_before_gives_the_same_run_and_serves_no_other(telamon, here):
    job = make_job(load_run("tiny", QUICK[1:]).config)
    with uncached():
        save_programs(job, {8: job.train_step(8)}, here / "tiny.step")
    answer = telamon("train", *QUICK, "run.name=loaded", "--compiled", "tiny.step")
    assert answer.code == 0, answer.err
    assert "compiled before, from tiny.step" in answer.out
    assert telamon("train", *QUICK, "run.name=compiled").code == 0
    timed = {"seconds", "tokens_per_second", "padded_tokens_per_second", "step_seconds", "data_wait", "mfu"}
    loaded, compiled = (
        [{name: value for name, value in line.items() if name not in timed} for line in read_metrics(here / "runs" / name)]
        for name in ("loaded", "compiled")
    )
    assert loaded == compiled and loaded

    refused = telamon("train", *QUICK, "train.seq_len=32", "run.name=other", "--compiled", "tiny.step")
    assert refused.code == 2 and "train.seq_len: 64 in the file, 32 in this run" in refused.err
    assert not (here / "runs" / "other").exists()
    assert telamon("train", *QUICK, "train.seq_len=32", "--dry-run", "--compiled", "tiny.step").code == 2
