"""Looking inside a step: a profiler window, and the compiled program's text."""

import os
from typing import Any

from telamon.config.schema import ProfileConfig
from telamon.errors import ConfigError
from telamon.watch.files import is_url, join, write_text


class ProfileWindow:
    """Traces the steps of `profile.steps` into the run's `profile/`, to be read with TensorBoard or Perfetto.

    Call :meth:`before_step` ahead of every step and :meth:`close` at the end of the run. A window that starts before
    a resumed run's first step covers what is left of it.

    Raises:
        ConfigError: the window is empty.
    """

    def __init__(self, config: ProfileConfig, run_dir: str | os.PathLike[str]) -> None:
        self._first, self._end = parse_window(config.steps) if config.steps else (0, 0)
        self._folder = join(run_dir, "profile")
        self._tracing = False

    def before_step(self, step: int, pending: Any = None) -> None:
        """Start or stop the trace where the window does.

        Args:
            step: number of the step about to be dispatched.
            pending: arrays of earlier steps; they are waited for, so that the trace holds the window's steps alone.
        """
        inside = self._first <= step < self._end
        if inside == self._tracing:
            return
        import jax

        jax.block_until_ready(pending)
        if inside:
            jax.profiler.start_trace(self._folder)
            self._tracing = True
        else:
            self.close()

    def close(self) -> None:
        """End the trace if one is running."""
        if self._tracing:
            import jax

            self._tracing = False
            jax.profiler.stop_trace()


def parse_window(steps: str) -> tuple[int, int]:
    """First step and end (exclusive) of a window such as ``10:13``.

    Raises:
        ConfigError: it holds no step.
    """
    first, end = map(int, steps.split(":"))
    if first >= end:
        raise ConfigError(f"profile.steps={steps} holds no step; FIRST:END traces the steps FIRST to END-1, such as 10:13")
    return first, end


def write_hlo(compiled: Any, run_dir: str | os.PathLike[str], name: str = "train_step") -> str:
    """Write a compiled function's optimised HLO to the run's `hlo/` and return the file's path.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returns.
        run_dir: the run's directory or URL.
        name: stem of the file.
    """
    path = join(run_dir, "hlo", f"{name}.txt")
    if not is_url(run_dir):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    write_text(path, compiled.as_text())
    return path
