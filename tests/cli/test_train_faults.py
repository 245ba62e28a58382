"""`telamon train` on input that is wrong and disks that are full: the exit code, one short message that names the file, nothing lost."""

import resource
import sys
from contextlib import contextmanager

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from telamon.checkpoint.store import CheckpointStore
from telamon.config.load import load_run
from telamon.train.job import make_job
from telamon.watch import report
from telamon.watch.trackers import JsonlTracker, TensorBoardTracker, read_metrics

QUICK = ("tiny", "run.name=one", "watch.peak_tflops=1", "watch.tensorboard=false", "train.compute_dtype=float32")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def longest_file(size):
    """Writing beyond `size` bytes of a file fails from here on, as on a full disk; the kernel sees to it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def full_disk(monkeypatch):
    """Makes one call of a method, the first for which `when` holds, find the disk full at `size` bytes a file."""

    def arrange(owner, name, *, size, when=lambda *_: True):
        whole, calls = getattr(owner, name), []

        def method(*arguments, **named):
            if calls or not when(*arguments):
                return whole(*arguments, **named)
            calls.append(arguments)
            with longest_file(size):
                return whole(*arguments, **named)

        monkeypatch.setattr(owner, name, method)

    return arrange


def refused(answer, code, *parts):
    """The message of a refusal, which is one line and holds `parts`."""
    message = answer.err.strip().splitlines()
    assert answer.code == code, answer.err
    assert len(message) == 1 and "Traceback" not in answer.err
    assert all(part in message[0] for part in parts), message[0]


def checkpoints(here):
    store = CheckpointStore(here / "runs/one/checkpoints", readonly=True)
    return store.latest_valid(), store.skipped


def empty_folder(path):
    path.mkdir()
    return f"{{kind: text, path: {path}}}"


def latin_file(path):
    path.mkdir()
    (path / "fine.txt").write_text("text " * 50)
    (path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    return f"{{kind: text, path: {path}}}"


def cut_parquet(path):
    path.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["some text"] * 100}), path / "whole.parquet")
    (path / "cut.parquet").write_bytes((path / "whole.parquet").read_bytes()[:-40])
    return f"{{kind: parquet, path: {path}}}"


@pytest.mark.parametrize(
    ("make", "named"),
    [(empty_folder, "input: no file"), (latin_file, "input/latin.txt"), (cut_parquet, "input/cut.parquet")],
    ids=["an empty folder", "a file that is not UTF-8", "a corrupt Parquet file"],
)
def test_unreadable_data_end_with_code_3_and_name_the_file(telamon, here, make, named):
    refused(telamon("train", *QUICK, f"data.sources=[{make(here / 'input')}]"), 3, named)
    assert not (here / "runs/one").exists(), "the mended command can use the run's name, and nothing stays behind"


def test_a_run_root_whose_parent_is_a_file_is_refused(telamon, here):
    (here / "file").write_text("")
    refused(telamon("train", *QUICK, "run.root=file/runs"), 2, "file/runs/one/config.yaml", "choose another run.root")
    assert [path.name for path in here.iterdir()] == ["file"]


def test_without_the_wandb_package_the_extra_is_named(telamon, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(telamon("train", *QUICK, "watch.wandb_project=mine"), 2, "watch.wandb_project='mine'", "telamon[wandb]")


def test_a_disk_that_fills_in_the_middle_of_a_checkpoint_costs_no_other_and_the_run_goes_on_later(telamon, here, full_disk):
    full_disk(CheckpointStore, "save", size=40_000, when=lambda store, step, *_: step == 4)
    answer = telamon("train", *QUICK, "train.steps=6", "checkpoint.every=2", "checkpoint.asynchronous=false")
    refused(answer, 5, "checkpoint of step 4", "File too large", "then resume")
    assert checkpoints(here) == (2, [])
    answer = telamon("train", "resume=runs/one")
    assert answer.code == 0 and "resumed after step 2" in answer.out, answer.err
    assert checkpoints(here) == (6, [])
    assert [line["step"] for line in read_metrics(here / "runs/one") if "loss" in line] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("tracker", [JsonlTracker, TensorBoardTracker])
def test_a_disk_that_is_full_when_metrics_are_written_ends_the_run_with_a_message(telamon, here, full_disk, tracker):
    full_disk(tracker, "log", size=100, when=lambda _, step, __: step >= 2)
    answer = telamon("train", *QUICK, "watch.tensorboard=true", "train.steps=3", "checkpoint.every=1", "checkpoint.asynchronous=false")
    refused(answer, 2, "metrics.jsonl" if tracker is JsonlTracker else "tensorboard/events.out", "File too large")
    assert checkpoints(here)[0] in (1, 2)


def test_a_disk_that_is_full_when_the_report_is_written_costs_the_report_alone(telamon, here, full_disk):
    full_disk(report, "write_text", size=1000)
    refused(telamon("train", *QUICK, "train.steps=2"), 2, "runs/one/report.html", "File too large")
    assert checkpoints(here) == (2, [])
    assert not list((here / "runs/one").glob("*.part"))


def test_a_loss_that_is_not_finite_ends_with_code_4_and_the_checkpoint_before_stays(telamon, here):
    assert telamon("train", *QUICK, "train.steps=8", "train.stop_at=2").code == 0
    answer = telamon("train", "resume=runs/one", "train.stop_at=none", "optimizer.learning_rate=1e30", "checkpoint.every=1")
    refused(answer, 4, "is nan at step", "optimizer.learning_rate")
    store = CheckpointStore(here / "runs/one/checkpoints", readonly=True)
    latest = store.latest_valid()
    assert store.skipped == [] and 2 in store.steps() and latest is not None
    weights = store.restore_subtree(latest, "weights", make_job(load_run(here / "runs/one").config).abstract_state.weights)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(weights))


def test_data_that_are_used_up_end_with_code_3_and_what_was_trained_is_saved(telamon, here):
    data = "data.sources=[{kind: synthetic, documents: 30, length: 48}]"
    answer = telamon("train", *QUICK, data, "data.epochs=1", "train.steps=50", "checkpoint.every=none")
    refused(answer, 3, "out of data at step 3", "data.epochs=1")
    assert checkpoints(here) == (3, [])
