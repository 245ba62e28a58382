"""Programs under test as processes that take turns: all are started and warmed up, and only one runs at a time.

A program outside its turn is stopped by signal (SIGSTOP), not ended, so each round of turns costs no new start and no new
compilation, and what disturbs the machine for minutes disturbs every side alike.
"""

import collections
import contextlib
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import psutil

PATIENCE = 900.0
"""Seconds without the awaited line after which a program counts as hung."""
PAUSE = 0.2
"""Seconds between looks at a command's memory."""


class BenchmarkError(Exception):
    """A program under test did not do what the benchmark needs; the message ends with the program's last lines."""


@dataclass(frozen=True)
class Program:
    """A command that prints a line for each step."""

    name: str
    command: Sequence[str]
    step: str
    """Regular expression that finds the line of a step."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables set beside those of this process."""


class Running:
    """A program that was started; a context manager that ends it."""

    def __init__(self, program: Program):
        self.program = program
        self.began = time.perf_counter()
        # A session of its own, so that a signal reaches the program's children and nothing else.
        self._process = subprocess.Popen(
            program.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1", **program.env},
            start_new_session=True,
        )
        self._steps: queue.Queue[float | None] = queue.Queue()
        self._tail: collections.deque[str] = collections.deque(maxlen=25)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def steps(self, count: int) -> float:
        """Wait for `count` more steps; the time (of `time.perf_counter`) at which the last was seen.

        Raises BenchmarkError where the program ends or hangs before.
        """
        seen = self.began
        for _ in range(count):
            try:
                found = self._steps.get(timeout=PATIENCE)
            except queue.Empty:
                raise BenchmarkError(self._complaint(f"printed no step for {PATIENCE:.0f} s")) from None
            if found is None:
                raise BenchmarkError(self._complaint(f"ended with exit code {self._process.wait()} before its turn was over"))
            seen = found
        return seen

    def finish(self) -> float:
        """Wait for the program's end; the seconds since its start. Raises BenchmarkError where it fails."""
        code = self._process.wait()
        took = time.perf_counter() - self.began
        self._reader.join()
        if code:
            raise BenchmarkError(self._complaint(f"ended with exit code {code}"))
        return took

    def pause(self) -> None:
        """Stop the program until its next turn."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the program go on."""
        self._signal(signal.SIGCONT)

    def turn(self, steps: int) -> float:
        """Seconds a step, over `steps` steps. The first step after a pause is let pass: part of it lay before the pause."""
        self.resume()
        start = self.steps(1)
        end = self.steps(steps)
        self.pause()
        return (end - start) / steps

    def _read(self) -> None:
        pattern = re.compile(self.program.step)
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                now = time.perf_counter()
                self._tail.append(line)
                if pattern.search(line):
                    self._steps.put(now)
        self._steps.put(None)

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _complaint(self, what: str) -> str:
        return f"{self.program.name} {what}: {' '.join(self.program.command)}\n{''.join(self._tail)}"


@dataclass(frozen=True)
class Finished:
    """A command that came to its end, well or not."""

    code: int
    seconds: float
    peak_bytes: int
    """Highest memory resident in the command and all its children together, looked at every PAUSE seconds."""
    output: str
    """What it printed."""
    complaints: str
    """What it printed on stderr."""


def finish(program: Program, timeout: float) -> Finished:
    """Run a command to its end. Raises BenchmarkError where that takes more than `timeout` seconds; it is killed then."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaints:
        began = time.perf_counter()
        child = subprocess.Popen(
            program.command, stdout=output, stderr=complaints, env={**os.environ, **program.env}, start_new_session=True
        )
        peak = 0
        try:
            while child.poll() is None:
                peak = max(peak, _resident(child.pid))
                if time.perf_counter() - began > timeout:
                    raise BenchmarkError(f"{program.name} took more than {timeout:.0f} s: {' '.join(program.command)}")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(PAUSE)
        finally:
            if child.poll() is None:
                for process in _family(child.pid):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                child.wait()
        took = time.perf_counter() - began
        texts = []
        for file in (output, complaints):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Finished(child.returncode, took, peak, *texts)


def _resident(pid: int) -> int:
    """Bytes resident in a process and its children."""
    total = 0
    for process in _family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def take_turns(programs: Sequence[Program], *, rounds: int, steps: Mapping[str, int], warmup: int = 2) -> dict[str, list[float]]:
    """Seconds a step for each program, one figure a round.

    Args:
        programs: who takes part; each is started, and stopped again after `warmup` steps, before the next is started.
        rounds: turns of each program. Who begins a round changes from round to round.
        steps: steps of a turn, by the program's name.
        warmup: steps before the first turn.
    """
    taken: dict[str, list[float]] = {program.name: [] for program in programs}
    running: list[Running] = []
    try:
        for program in programs:
            running.append(Running(program))
            running[-1].steps(warmup)
            running[-1].pause()
        for number in range(rounds):
            for offset in range(len(running)):
                one = running[(number + offset) % len(running)]
                taken[one.program.name].append(one.turn(steps[one.program.name]))
                print(f"  round {number + 1}/{rounds}  {one.program.name}: {taken[one.program.name][-1]:.3f} s a step", flush=True)
    finally:
        for one in running:
            one.__exit__()
    return taken


def seconds_to_first_step(program: Program) -> float:
    """Seconds from the start of the process to the line of its first step; the process is ended then."""
    with Running(program) as running:
        return running.steps(1) - running.began
