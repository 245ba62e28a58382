"""Failing together: when one process of a run ends with an error, the others learn of it and end too.

Without this they would wait in a collective, or at a barrier of a checkpoint, for one that is gone; and that one would wait
minutes in JAX's shutdown for them.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import jax

# Processes have a key-value store in common, which JAX uses to find each other and offers to nobody by a public name.
from jax._src.distributed import global_state

from telamon.errors import PeerError

_KEY = "telamon/failed"
_LOOK = 1.0
"""Seconds between two looks for a failed peer."""
_PATIENCE = 5.0
"""Seconds between a failure and the end of a process, its own or another's: most failures strike all, each with its own message."""
_COLLECTIVES = ("Gloo", "NCCL")
"""Libraries whose name stands in the error of a collective that another process did not end."""
_leaving = threading.Event()


def joined() -> bool:
    """Whether this process belongs to a run of several."""
    return jax.distributed.is_initialized()


@contextmanager
def lost_peers() -> Iterator[None]:
    """Within a run of several, turn the failure of a collective, which another process left without a word, into a PeerError.

    (Where the first process is the one that is lost, JAX itself aborts the others, with its own message.)
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not joined() or not any(library in str(error) for library in _COLLECTIVES):
            raise
        reason = " ".join(str(error).split())[:300]
        raise PeerError(
            f"another process of this run is gone, killed or lost with its machine ({reason}); start all of them again with resume="
        ) from error


def watch_peers() -> None:
    """End this process, with PeerError's exit code, soon after another one has failed. Returns at once."""
    threading.Thread(target=_watch, name="peers", daemon=True).start()


def leave(code: int, message: str) -> NoReturn:
    """End this process after a failure, tell its peers why, and don't wait for them without end."""
    _leaving.set()
    client = global_state.client
    assert client is not None, "only a process that joined others leaves them"
    text = f"process {jax.process_index()} of {jax.process_count()} failed: {message}"
    sys.stdout.flush()

    def together() -> None:
        client.key_value_set(_KEY, text, allow_overwrite=True)
        jax.distributed.shutdown()  # returns when all are there

    thread = threading.Thread(target=together, daemon=True)
    thread.start()
    thread.join(_patience())
    _end(code)


def _watch() -> None:
    client = global_state.client
    while client is not None and not _leaving.wait(_LOOK):
        try:
            text = client.key_value_try_get(_KEY)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                continue
            return  # the run is over, or JAX itself ends this process now
        if _leaving.wait(_patience()):
            return
        sys.stderr.write(f"{text}\n")
        _end(PeerError.exit_code)


def _patience() -> float:
    # The others are connected through the first process, and JAX aborts them when it is gone: it goes last.
    return 2 * _PATIENCE if jax.process_index() == 0 else _PATIENCE


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: the main thread may be inside a collective, and exit handlers wait for the peers
