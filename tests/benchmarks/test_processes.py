"""Programs that take turns: only one runs at a time, and time is counted between the lines it prints."""

import sys
import time

import pytest

from benchmarks.processes import BenchmarkError, Program, Running, finish, seconds_to_first_step, take_turns


def ticking(name: str, seconds: float) -> Program:
    code = f"import time\nprint('ready')\nfor i in range(10_000):\n    time.sleep({seconds})\n    print('step', i)"
    return Program(name, [sys.executable, "-c", code], r"^step \d+")


def test_a_turn_measures_seconds_between_step_lines():
    taken = take_turns([ticking("slow", 0.08), ticking("fast", 0.02)], rounds=2, steps={"slow": 3, "fast": 6}, warmup=1)
    assert [len(rounds) for rounds in taken.values()] == [2, 2]
    # A sleep is never shorter than asked for; a line may be read a little late, on a busy machine much.
    assert min(taken["slow"]) > 0.06
    assert min(taken["fast"]) > 0.014
    assert min(taken["fast"]) < min(taken["slow"])


def test_a_program_does_nothing_outside_its_turn():
    with Running(ticking("one", 0.01)) as running:
        running.steps(1)
        running.pause()
        time.sleep(0.05)  # what was in the pipe arrives
        before = running._steps.qsize()
        time.sleep(0.3)
        assert running._steps.qsize() == before
        running.resume()
        running.steps(before + 2)


def test_the_first_step_is_timed_from_the_start_of_the_process():
    assert 0.2 < seconds_to_first_step(ticking("late", 0.2)) < 30


def test_a_program_that_fails_is_named_with_its_last_lines():
    program = Program("broken", [sys.executable, "-c", "print('step 1'); raise SystemExit('no such option')"], "^step")
    with Running(program) as running, pytest.raises(BenchmarkError, match=r"broken ended with exit code 1(.|\n)*no such option"):
        running.steps(2)


def test_a_program_is_ended_with_its_children():
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('step'); import time; time.sleep(600)"
    with Running(Program("parent", [sys.executable, "-c", child], "^step")) as running:
        running.steps(1)
    # The pipe closes only when the last process that holds it is gone, and the reader says so with None.
    assert running._steps.get(timeout=20) is None


def test_a_command_is_measured_with_its_children():
    child = "import time; held = b'x' * 150_000_000; time.sleep(0.7)"
    parent = f"import subprocess, sys; print('out'); print('err', file=sys.stderr); subprocess.run([sys.executable, '-c', {child!r}]); sys.exit(3)"
    done = finish(Program("parent", [sys.executable, "-c", parent], ""), timeout=60)
    assert (done.code, done.output, done.complaints) == (3, "out\n", "err\n")
    assert done.seconds > 0.7
    assert 150_000_000 < done.peak_bytes < 300_000_000


def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path):
    child = f"import pathlib, time; time.sleep(2); pathlib.Path({str(tmp_path / 'lived')!r}).touch()"
    # A session of its own: a signal to the parent's group does not reach it.
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    with pytest.raises(BenchmarkError, match=r"parent took more than 1 s"):
        finish(Program("parent", [sys.executable, "-c", parent], ""), timeout=1)
    time.sleep(1.5)
    assert not (tmp_path / "lived").exists()
