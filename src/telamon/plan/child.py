"""A process that works for this one: bounded in time and memory, watched, and never left behind."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING

from telamon.errors import CompileError
from telamon.watch.log import human_bytes, human_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

HOST_MEMORY = 20 * 2**30
"""Bytes of the host's memory that a compilation may take."""

_LOOK, _SAY = 0.25, 15.0
"""Seconds between two looks at the child, and between two lines where there is no terminal."""

_TAIL = 12
"""Lines of what the child said that a message repeats."""


def run_child(
    module: Sequence[str], *, environment: Mapping[str, str], what: str, timeout: float, host_memory: int, progress: bool = True
) -> None:
    """Run a module of Python to its end.

    Args:
        module: its name and arguments.
        environment: variables besides those of this process.
        what: what it does, as a line says while it runs, such as ``compiling the train step``.
        timeout: seconds.
        host_memory: bytes.
        progress: whether the line is shown, on stderr.

    Raises:
        CompileError: it failed, or was stopped at one of its bounds.
    """
    # -P: what stands in the working directory is not what is meant by our names.
    command = [sys.executable, "-P", "-m", *module]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said, _line(what, shown=progress) as say:
        child = subprocess.Popen(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            _watch(child, what=what, timeout=timeout, host_memory=host_memory, say=say)
        finally:  # Ctrl-C too
            child.kill()
            child.wait()
        if child.returncode:
            raise CompileError(f"{what}: the compiler's process failed ({_ending(child.returncode)}); the last it said:\n{_tail(said)}")


def die_with_parent(parent: int) -> None:
    """Ask the system to end this process with the one that started it, however that one ends. Linux only; elsewhere nothing is done.

    Args:
        parent: that process's id. Where it has ended before it could be asked, this process ends at once.
    """
    if sys.platform.startswith("linux"):
        import ctypes
        import signal

        parent_death_signal = 1  # PR_SET_PDEATHSIG of sys/prctl.h
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(f"the process {parent} that asked for this is gone")


def _watch(child: "subprocess.Popen[bytes]", *, what: str, timeout: float, host_memory: int, say: "Callable[[float, int], None]") -> None:
    start = time.monotonic()
    while child.poll() is None:
        elapsed, memory = time.monotonic() - start, _memory(child.pid)
        if elapsed > timeout:
            raise CompileError(f"{what} took longer than {human_seconds(timeout)} and was stopped; --timeout gives it more")
        if memory > host_memory:
            raise CompileError(
                f"{what} took {human_bytes(memory)} of this host's memory, more than the {human_bytes(host_memory)} it may, and was stopped; "
                "--host-memory gives it more, --quick (TPU) takes less"
            )
        if memory:
            say(elapsed, memory)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_LOOK)


def _memory(pid: int) -> int:
    import psutil

    try:
        process = psutil.Process(pid)
        return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
    except psutil.Error:  # it has just ended
        return 0


@contextlib.contextmanager
def _line(what: str, *, shown: bool) -> "Iterator[Callable[[float, int], None]]":
    """On a terminal a line that changes, elsewhere a new one from time to time; on stderr, since results go to stdout."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, quiet=not shown)

    def text(elapsed: float, memory: int) -> str:
        return f"{what}: {human_seconds(elapsed)}, {human_bytes(memory)} of host memory"

    if console.is_terminal:
        with console.status(what) as status:
            yield lambda elapsed, memory: status.update(text(elapsed, memory))
        return
    next_line = _SAY

    def say(elapsed: float, memory: int) -> None:
        nonlocal next_line
        if elapsed >= next_line:
            console.print(text(elapsed, memory), markup=False, soft_wrap=True)
            next_line += _SAY

    console.print(what, markup=False, soft_wrap=True)
    yield say


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _tail(said: IO[str]) -> str:
    said.seek(0)
    return "\n".join(f"  {line.rstrip()[:300]}" for line in said.readlines()[-_TAIL:] if line.strip())
