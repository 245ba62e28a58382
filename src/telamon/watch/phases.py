"""A trace of what a run is doing right now, for programs that watch it from outside.

With TELAMON_TRACE_PHASES=FILE, each mark is appended to FILE as one line, `SECONDS NAME`, and is there to be read
when the call returns, even if the process is killed next. Without it, a mark costs one dictionary look-up.
"""

import os
import time

VARIABLE = "TELAMON_TRACE_PHASES"


def mark(name: str) -> None:
    """Note that the phase `name` was reached, such as "compile begin" (Unix time, in seconds)."""
    path = os.environ.get(VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{time.time():.6f} {name}\n")


def enabled() -> bool:
    """Whether marks are kept; for marks that cost something to make."""
    return bool(os.environ.get(VARIABLE))
