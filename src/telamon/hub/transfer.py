"""A copy of tensors: what it will need, a bar while it runs, one line when it is done, Ctrl-C between two tensors."""

import signal
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from telamon.watch.log import human_bytes, human_seconds, line

if TYPE_CHECKING:
    from rich.console import Console

TENSORS_HELD = 3
"""Most copies of the largest tensor that exist at one time: as it was read, in the other layout, and being written."""


def say_expected_peak(console: "Console", sizes: Iterable[int]) -> None:
    """Print what a copy of tensors of these sizes (bytes) needs at most."""
    import psutil

    largest, now = max(sizes), psutil.Process().memory_info().rss
    line(
        console,
        f"memory: at most {human_bytes(TENSORS_HELD * largest)} beyond the process's own {human_bytes(now)} "
        f"({TENSORS_HELD} times the largest tensor, {human_bytes(largest)})",
    )


class Transfer:
    """A copy of `total` bytes under way; a context manager. A terminal gets a bar with its speed, and any console the last line.

    Ctrl-C counts when a tensor is done (a second one at once): in the middle of one, threads that write it would go on and make anew
    what is removed.
    """

    def __init__(self, console: "Console", task: str, total: int):
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        self._console, self._task_name, self._total = console, task, total
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(task, total=total)
        self._interrupted = False

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        self._bar.start()
        if threading.current_thread() is threading.main_thread():  # no other may set a handler, or gets the signal
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def advance(self, count: int) -> None:
        """`count` more bytes are copied."""
        self._bar.advance(self._task, count)
        if self._interrupted:
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._handler)
        self._bar.stop()
        if kind is None:
            if self._interrupted:
                raise KeyboardInterrupt
            seconds = time.perf_counter() - self._start
            rate = f"{self._total / 1e9 / max(seconds, 1e-9):.2f} GB/s"
            line(self._console, f"{self._task_name}: {human_bytes(self._total)} in {human_seconds(seconds)}, {rate}")

    def _interrupt(self, *_: object) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True
