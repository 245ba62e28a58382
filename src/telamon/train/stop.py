"""Being asked to stop: SIGTERM (a scheduler's preemption, a user's kill) ends the run after the step in hand."""

import signal
import threading
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Context manager that notes SIGTERM; the loop asks `requested` after each step.

    In a run of several processes JAX's own preemption service listens instead, and all agree on one step to stop after.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._before: Any = None

    def __enter__(self) -> Self:
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, lambda *_: self._asked.set())
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def requested(self, step: int) -> bool:
        """Whether to stop now, `step` steps being done; the same on every process."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked.is_set()
