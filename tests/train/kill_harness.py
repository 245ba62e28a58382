"""Runs `telamon train` in a process of its own, kills it with SIGKILL at chosen moments, and tells where each kill fell.

The process leaves a trace of its phases (see `telamon.watch.phases`), which the harness follows while it waits for the
moment, and reads once more after the kill: what counts is where the process was when it died, not where it was meant to be.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from telamon.checkpoint import manifest
from telamon.watch import phases

POLL = 0.002
"""Seconds between two looks at the trace."""


@dataclass(frozen=True)
class Kill:
    """A moment: `pause` seconds after the `count`-th mark that begins with `mark`, or after the start where mark is "".

    With `first_byte`, the pause counts from the moment a byte of an uncommitted checkpoint is on disk.
    """

    mark: str
    count: int
    pause: float
    first_byte: bool = False

    def __str__(self) -> str:
        moment = f"{self.mark!r} no. {self.count}" if self.mark else "the start"
        return f"{1000 * self.pause:.0f} ms after {'the first byte after ' if self.first_byte else ''}{moment}"


@dataclass
class Run:
    """A training run under `root`, its processes one after another, and what their traces say."""

    root: Path
    config: Path
    environment: Mapping[str, str]
    traces: list[list[str]] = field(default_factory=list)
    """Marks of each process, in the order of the processes."""

    @property
    def folder(self) -> Path:
        return self.root / "runs" / "run"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def trace(self) -> Path:
        return self.root / "trace"

    def start(self, **environment: str) -> subprocess.Popen:
        """Start the run, or go on with it."""
        self.trace.write_text("")
        if (self.folder / "config.yaml").exists():
            arguments = [f"resume={self.folder}"]
        else:
            arguments = [str(self.config), f"run.root={self.root / 'runs'}", "run.name=run", f"data.cache_dir={self.root / 'cache'}"]
        with open(self.root / "output", "ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "telamon", "train", *arguments],
                env={**os.environ, **self.environment, phases.VARIABLE: str(self.trace), **environment},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def marks(self) -> list[str]:
        """Marks of the process that runs now, without their times and without a last line that is cut short."""
        *whole, _ = self.trace.read_text().split("\n")
        return [line.split(" ", 1)[1] for line in whole]

    def finish(self, timeout: float) -> None:
        """Let the run go on to its end."""
        process = self.start()
        try:
            code = process.wait(timeout)
        finally:
            self._end(process)
        assert code == 0, f"exit code {code}: {self._output()}"

    def kill(self, kill: Kill, *, timeout: float, **environment: str) -> list[str]:
        """Go on with the run, kill it at that moment, and return the phases it was in: a checkpoint is written beside the others."""
        process = self.start(**environment)
        try:
            deadline = time.monotonic() + timeout
            while not self._reached(kill):
                assert process.poll() is None, f"the run ended before {kill}, with exit code {process.returncode}: {self._output()}"
                assert time.monotonic() < deadline, f"{timeout:.0f} s are over before {kill}: {self._output()}"
                time.sleep(POLL)
            time.sleep(kill.pause)
        finally:
            self._end(process)
        assert process.returncode == -signal.SIGKILL, f"the run ended before {kill}, with exit code {process.returncode}"
        return self._where()

    def batches(self) -> list[tuple[int, str]]:
        """(step, checksum of its tokens) of every batch that any process trained on, in order."""
        marks = (mark.split() for trace in self.traces for mark in trace if mark.startswith("batch "))
        return [(int(step), checksum) for _, step, checksum in marks]

    def reached(self) -> int:
        """Steps begun so far, by any process."""
        return max((step + 1 for step, _ in self.batches()), default=0)

    def unfinished(self) -> bool:
        """Whether a checkpoint has a byte on disk and is not committed."""
        for pending in self.checkpoints.glob("*.pending"):
            folders = (self.checkpoints / (pending.stem + suffix) for suffix in ("", ".orbax-checkpoint-tmp"))
            written = [path for folder in folders for path in folder.rglob("*")]
            if not any(path.name == manifest.FILE_NAME for path in written) and any(_size(path) for path in written):
                return True
        return False

    def _reached(self, kill: Kill) -> bool:
        if kill.mark and sum(mark.startswith(kill.mark) for mark in self.marks()) < kill.count:
            return False
        return not kill.first_byte or self.unfinished()

    def _end(self, process: subprocess.Popen) -> None:
        """End the process and whatever it started; keep its trace."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.traces.append(self.marks())

    def _where(self) -> list[str]:
        marks = self.traces[-1]
        phases = [phase for phase in ("compile", "eval") if marks.count(f"{phase} begin") > marks.count(f"{phase} end")]
        if not phases:
            phases = ["steps" if any(mark.startswith("batch ") for mark in marks) else "start"]
        writing = marks.count("checkpoint begin") > marks.count("checkpoint commit") and self.unfinished()
        return [*phases, "checkpoint"] if writing else phases

    def _output(self) -> str:
        return (self.root / "output").read_text(errors="replace")[-3000:]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # renamed or removed since it was listed
        return 0


def plan(seed: int, kinds: Sequence[str]) -> list[tuple[str, Kill]]:
    """Seeded moments of the given kinds, in a seeded order."""
    rng = random.Random(seed)
    moments = [(kind, _moment(kind, rng)) for kind in kinds]
    rng.shuffle(moments)
    return moments


def _moment(kind: str, rng: random.Random) -> Kill:
    match kind:
        case "start":
            return Kill("", 0, rng.uniform(0, 2))
        case "compile":
            return Kill("compile begin", rng.randint(1, 2), rng.uniform(0, 0.2))
        case "eval":
            return Kill("eval begin", 1, rng.uniform(0, 0.005))
        case "checkpoint":
            return Kill("checkpoint begin", rng.randint(1, 3), rng.uniform(0, 0.02), first_byte=True)
        case "steps":
            return Kill("batch ", rng.randint(1, 8), rng.uniform(0, 0.03))
    raise AssertionError(kind)
