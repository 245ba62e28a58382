"""Kills, full disks and lost threads: what was saved before stays, and what was not finished is not mistaken for whole."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from checkpoint_states import assert_same
from checkpoint_writer import STAGES, state_of

from telamon.checkpoint import manifest
from telamon.checkpoint.store import CheckpointStore
from telamon.errors import CheckpointError

WRITER = Path(__file__).with_name("checkpoint_writer.py")


def start(folder, first, last, rows, *options, **environment):
    command = [sys.executable, str(WRITER), str(folder), str(first), str(last), str(rows), *map(str, options)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)


def check_whole(store, step, rows):
    state, meta = store.restore(step, jax.eval_shape(lambda: state_of(0, rows)))
    assert_same(state, state_of(step, rows))
    assert meta == {"step": step}


@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_any_stage_of_a_save_leaves_whole_checkpoints_only(tmp_path, stage):
    writer = start(tmp_path, 1, 4, 64, "--stage", stage)
    _, errors = writer.communicate(timeout=60)
    assert writer.returncode == -signal.SIGKILL, errors
    assert list(tmp_path.glob("*.pending")), "the kill fell outside of a save"
    store = CheckpointStore(tmp_path)
    committed = stage.startswith(("after", "half-way"))
    assert store.latest_valid() == (4 if committed else 3)
    assert store.skipped == [] and not list(tmp_path.glob("*.pending")) and not list(tmp_path.glob("*tmp"))
    assert all(manifest.damage(store.path(step)) is None for step in store.steps())
    check_whole(store, 4 if committed else 3, 64)


def test_kills_at_random_moments_of_writing_leave_a_restorable_store(tmp_path):
    """Each time the writer goes on from the newest whole checkpoint, and is killed a seeded while after it begins some save."""
    folder, trace, rng = tmp_path / "checkpoints", tmp_path / "phases", random.Random(0)
    rows, newest, unfinished = 8192, 0, 0  # 8 MiB, so that writing takes a while
    for _ in range(5):
        trace.write_text("")
        writer = start(folder, newest + 1, 1000, rows, TELAMON_TRACE_PHASES=str(trace))
        saves, pause = rng.randint(2, 5), rng.uniform(0, 0.05)
        deadline = time.monotonic() + 60
        while trace.read_text().count("checkpoint begin") < saves:
            assert time.monotonic() < deadline and writer.poll() is None
            time.sleep(0.002)
        time.sleep(pause)
        writer.kill()
        writer.communicate()
        begun = newest + trace.read_text().count("checkpoint begin")
        unfinished += any(not (path.with_suffix("") / manifest.FILE_NAME).exists() for path in folder.glob("*.pending"))
        store = CheckpointStore(folder)
        newest = store.latest_valid() or 0
        assert newest in (begun - 1, begun) and store.skipped == []
        check_whole(store, newest, rows)
    assert unfinished >= 2, "most kills should fall between the first byte of a checkpoint and its commit"


@pytest.mark.parametrize("limit", [1_000_000, 300])
def test_a_full_disk_is_a_clear_error_and_costs_no_older_checkpoint(tmp_path, limit):
    """A write that fails in the middle of a checkpoint: of its arrays, or of a small file beside them."""
    writer = start(tmp_path, 1, 3, 2048, "--limit", limit)
    _, errors = writer.communicate(timeout=60)
    assert writer.returncode == 5, errors
    assert f"the checkpoint of step 3 could not be written: {tmp_path}/step_00000003" in errors and "File too large" in errors
    # Now and then a write of tensorstore's ends after the loop that waited for it, and it prints that itself.
    said = re.sub(r"Traceback \(most recent call last\):\n(?:  .*\n)+RuntimeError: Event loop is closed\n", "", errors)
    assert "Traceback" not in said and len(said.splitlines()) == 1
    store = CheckpointStore(tmp_path)
    assert store.steps() == [1, 2] and store.latest_valid() == 2 and store.skipped == []
    check_whole(store, 2, 2048)
    check_whole(store, 1, 2048)


def test_a_background_error_surfaces_once_on_the_next_call_and_the_store_goes_on(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save(1, state_of(1, 8), {"step": 1})
    store.wait()
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write_atomically", lambda path, data: (_ for _ in ()).throw(OSError(28, "No space left", str(path))))
        store.save(2, state_of(2, 8), {"step": 2})
        with pytest.raises(CheckpointError, match=r"step 2 could not be written: .*step_00000002/manifest\.json: No space left on device"):
            store.save(3, state_of(3, 8), {"step": 3})
    assert store.steps() == [1]
    store.save(3, state_of(3, 8), {"step": 3})
    store.wait()
    assert CheckpointStore(tmp_path).latest_valid() == 3


def test_a_program_that_ends_without_waiting_neither_hangs_nor_leaves_a_half_one(tmp_path):
    writer = start(tmp_path, 1, 1, 2048, "--no-wait")
    # What the abandoned threads print at the exit depends on where in the write it falls; the promise is about the folder.
    writer.communicate(timeout=60)
    assert writer.returncode == 0
    store = CheckpointStore(tmp_path)
    assert store.latest_valid() in (None, 1) and store.skipped == []


def test_leaving_the_with_block_waits_and_an_error_does_not_hide_another(tmp_path, monkeypatch, caplog):
    with CheckpointStore(tmp_path) as store:
        store.save(1, state_of(1, 2048), {})
    assert CheckpointStore(tmp_path).latest_valid() == 1
    monkeypatch.setattr(manifest, "scan", lambda folder: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(CheckpointError, match="step 2"), CheckpointStore(tmp_path) as store:
        store.save(2, state_of(2, 8), {})
    with pytest.raises(KeyError), CheckpointStore(tmp_path) as store:
        store.save(3, state_of(3, 8), {})
        raise KeyError
    assert "the checkpoint of step 3 could not be written" in caplog.text
