"""Two real processes, `jax.distributed` between them: the same batches and the same loss as one; and they end together."""

import signal
import time
import zlib

import jax
import numpy as np
import pytest
from process_pair import Pair

from telamon.checkpoint.store import CheckpointStore
from telamon.config.load import load_run
from telamon.config.resume import load_resumed
from telamon.data.loader import open_loader
from telamon.train.evaluation import evaluate
from telamon.train.job import make_job
from telamon.train.loop import train
from telamon.train.placement import place
from telamon.watch.trackers import read_metrics

LIMIT = 240.0
"""Seconds that processes may take to start and train; some machines are busy."""
SOON = 60.0
"""Seconds after which processes that cannot go on have ended: JAX alone would wait for 300."""

STEPS, STOP = 4, 2
SMALL = ["train.batch_size=8", "train.seq_len=32", "train.compute_dtype=float32", f"train.steps={STEPS}", "train.log_every=1"]
SHORT = ["eval.batches=2", "eval.every=none", "sample.prompts=['def ']", "sample.tokens=2"]
WATCH = ["watch.peak_tflops=1", "watch.tensorboard=false"]
TINY = ["tiny", "run.name=one", "train.steps=100000", "train.log_every=1000", "eval.every=none", *WATCH]


def logged(folder, key):
    return {line["step"]: line[key] for line in read_metrics(folder) if key in line}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The default model and data, trained for two of four steps by two processes."""
    folder = tmp_path_factory.mktemp("pair")
    ended = Pair(folder, "default", "run.name=one", f"train.stop_at={STOP}", *SMALL, *SHORT, *WATCH).wait(LIMIT)
    assert [process.code for process in ended] == [0, 0], [process.err[-2000:] for process in ended]
    return folder, ended


@pytest.fixture(scope="module")
def alone(trained):
    """The same run in this process, on two devices and through the step alone: losses, the last validation, and the batches."""
    folder, _ = trained
    config = load_run("default", [*SMALL, *SHORT, f"data.cache_dir={folder / '.cache/telamon'}"]).config
    job, loader = make_job(config, devices=jax.devices()[:2]), open_loader(config)
    state, losses, validations = job.fresh_state(), [], {}
    batches = [loader.batch_at(step) for step in range(STEPS)]
    step = job.train_step(config.train.batch_size)
    with jax.set_mesh(job.mesh):
        for number, batch in enumerate(batches, 1):
            state, metrics = step(state, place(batch, token_bytes=loader.tokenizer.token_bytes, mesh=job.mesh))
            losses.append(float(metrics["loss"]))
            if number in (STOP, STEPS):
                validation = evaluate(job, state.weights, loader)
                assert validation is not None
                validations[number] = validation.loss
    return config, losses, validations, batches


@pytest.mark.slow
def test_two_processes_get_the_batches_of_one(trained, alone):
    _, ended = trained
    config, _, _, batches = alone
    loaders = [open_loader(config, process_index=index, process_count=2) for index in (0, 1)]
    for step in range(STOP):
        parts = [loader.batch_at(step) for loader in loaders]
        for name, whole in batches[step].items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), whole)
    for process, loader in zip(ended, loaders, strict=True):
        sums = [zlib.crc32(loader.batch_at(step)["tokens"].tobytes()) for step in range(STOP)]
        assert [mark for mark in process.marks if mark.startswith("batch ")] == [f"batch {i} {s:08x}" for i, s in enumerate(sums)]


@pytest.mark.slow
def test_two_processes_have_the_loss_of_one_and_one_process_goes_on_with_their_run(trained, alone):
    """Within 1e-5 of the loss, in float32: the sums over rows are made in another order."""
    folder, ended = trained
    _, losses, validations, _ = alone
    run = folder / "runs" / "one"
    got = logged(run, "loss")
    assert list(got) == [1, 2] and list(got.values()) == pytest.approx(losses[:STOP], rel=1e-5)
    assert logged(run, "val_loss") == {STOP: pytest.approx(validations[STOP], rel=1e-5)}
    assert "2 x cpu: fsdp 2" in ended[0].out
    assert [line for line in ended[1].out.splitlines() if not line.startswith("[Gloo]")] == []

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(load_resumed("runs/one", ["train.stop_at=none"]).config, resume="runs/one")
    assert list(logged(run, "loss").values()) == pytest.approx(losses, rel=1e-5)
    assert logged(run, "val_loss") == {step: pytest.approx(loss, rel=1e-5) for step, loss in validations.items()}


@pytest.mark.slow
def test_a_run_that_is_refused_ends_both_processes(trained):
    folder, _ = trained
    ended = Pair(folder, "default", "run.name=one", *SMALL, *WATCH).wait(SOON)
    assert [process.code for process in ended] == [2, 2]
    assert "holds a run already" in ended[0].err and "the first process could not make" in ended[1].err
    assert not any("Traceback" in process.err for process in ended)


@pytest.mark.slow
def test_one_process_is_asked_to_stop_and_both_save_and_end(tmp_path):
    pair = Pair(tmp_path, *TINY, "checkpoint.every=none")
    wait_for(pair, "batch 3")
    pair.processes[1].send_signal(signal.SIGTERM)
    ended = pair.wait(SOON)
    assert [process.code for process in ended] == [75, 75], [process.err[-2000:] for process in ended]
    assert "telamon train resume=runs/one" in ended[0].err
    steps = [sum(mark.startswith("batch ") for mark in process.marks) for process in ended]
    assert steps[0] == steps[1] == CheckpointStore(tmp_path / "runs/one/checkpoints", readonly=True).latest_valid()


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_one_process_that_cannot_write_ends_the_other_too(tmp_path, failing):
    """The one that failed with its own code, the other as one that lost a peer, with the message of the first."""
    limits = (100_000, None) if failing == 0 else (None, 100_000)
    pair = Pair(tmp_path, *TINY, "checkpoint.every=2", longest_file=limits)
    wait_for(pair, "checkpoint begin")
    ended = pair.wait(SOON)
    assert [process.code for process in ended] == ([5, 6] if failing == 0 else [6, 5]), [process.err[-2000:] for process in ended]
    assert "the checkpoint of step 2 could not be written" in ended[failing].err
    assert f"process {failing} of 2 failed: the checkpoint of step 2" in ended[1 - failing].err
    assert CheckpointStore(tmp_path / "runs/one/checkpoints", readonly=True).latest_valid() is None


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_other_with_the_code_of_a_lost_peer(tmp_path):
    pair = Pair(tmp_path, *TINY, "checkpoint.every=none")
    wait_for(pair, "batch 3")
    pair.processes[1].kill()
    ended = pair.wait(SOON)
    assert [process.code for process in ended] == [6, -signal.SIGKILL], ended[0].err[-2000:]
    assert "another process of this run is gone" in ended[0].err and "Traceback" not in ended[0].err


def wait_for(pair, mark):
    """Return when the first process has gone through a phase."""
    deadline = time.monotonic() + LIMIT
    while not any(there.startswith(mark) for there in pair.marks(0)):
        if any(process.poll() is not None for process in pair.processes) or time.monotonic() > deadline:
            raise AssertionError([process.err[-2000:] for process in pair.wait(1)])
        time.sleep(0.05)
