"""Host memory that one step frees is kept for the next."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Names of glibc's settings (malloc.h)."""

_MOST = 2**31 - 1
"""A setting is a C int: blocks above 2 GB still come from the system and go back to it."""


def keep_freed_memory() -> None:
    """Let the C library keep large blocks instead of handing them back to the system; call before JAX starts its threads.

    XLA on CPU allocates a step's working memory anew at each step. By default glibc takes such a block from the system and
    returns it, and the system clears every page again: a fifth of the CPU time of a step of 36 million parameters. One
    arena, since only the main one may grow without bound. Where there is no glibc, nothing is done.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for setting, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _MOST), (_TRIM_THRESHOLD, _MOST)):
        mallopt(setting, value)
