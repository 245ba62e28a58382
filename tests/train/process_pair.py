"""Two processes on loopback that train together, with one CPU device each."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from telamon.watch import phases


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str
    marks: list[str]
    """Phases it went through (see `telamon.watch.phases`), without their times."""


class Pair:
    """`telamon train ARGUMENTS` in two processes.

    Args:
        folder: where they run and leave their traces.
        arguments: words after `telamon train`.
        longest_file: for each process, bytes beyond which a file cannot be written (as on a full disk); none: no limit.
        environment: further variables.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        longest_file: tuple[int | None, int | None] = (None, None),
        environment: Mapping[str, str] | None = None,
    ):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._traces = [folder / f"trace{index}" for index in (0, 1)]
        self.processes = [
            subprocess.Popen(
                [*_limit(longest_file[index]), sys.executable, "-m", "telamon", "train", *arguments],
                cwd=folder,
                env={
                    **os.environ,
                    "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
                    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                    "JAX_NUM_PROCESSES": "2",
                    "JAX_PROCESS_ID": str(index),
                    phases.VARIABLE: str(self._traces[index]),
                    **(environment or {}),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index in (0, 1)
        ]

    def marks(self, index: int) -> list[str]:
        """Phases that a process has gone through so far."""
        trace = self._traces[index]
        return [line.split(" ", 1)[1] for line in trace.read_text().splitlines()] if trace.exists() else []

    def wait(self, timeout: float) -> list[Ended]:
        """Both processes' ends. One that hangs is killed, and fails the test."""
        try:
            printed = [process.communicate(timeout=timeout) for process in self.processes]
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        return [Ended(p.returncode, *texts, self.marks(i)) for i, (p, texts) in enumerate(zip(self.processes, printed, strict=True))]


def _limit(size: int | None) -> list[str]:
    if size is None:
        return []
    program = "import os, resource, sys; n = int(sys.argv[1]); resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)); os.execv(sys.argv[2], sys.argv[2:])"
    return [sys.executable, "-c", program, str(size)]
