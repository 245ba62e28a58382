"""A TPU program as far as memory is assigned: what the compiler has decided before it generates machine code.

The passes over the program, its schedule and the assignment of memory take a twentieth of a compilation (a step of Llama 3.1 8B
on v6e:4x4: 5 of 87 seconds of a CPU core); the rest generates code, which nobody needs who asks what fits and what moves. Told
to, the compiler writes what it has come to into files; once they are there, its process ends, and they are read.

**What is not known then.** The size of the code. And what is refused while code is generated: above all a Pallas kernel that
asks for more of the chip's vector memory than there is. What does not fit in HBM is refused before.
"""

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from telamon.plan.hlo import count_program

_SCHEDULED = "*.after_optimizations_after_buffer_assignment.txt"
"""The last file before code is made: the scheduled program."""
_BUFFERS = "*.after_optimizations-buffer-assignment.txt"

_LOOK = 0.05
"""Seconds between two looks at the files."""

_HBM, _HOST = 0, 5
"""The compiler's numbers ("colors") of the memories that count here."""

_PAGE = 16 * 2**10
"""Bytes by which working memory is counted: `memory_analysis` gives that of the assignment, rounded up to this."""

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(?: color (\d+),)? page \d+, (.*)$", re.MULTILINE)


def dump_options(folder: str | Path) -> dict[str, Any]:
    """The compiler's options that have it write these files."""
    # The compact form leaves out the instructions that take a tuple apart, by which loops' turns are found.
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, "xla_dump_compact_gte": False}


@contextmanager
def ends_when_assigned(folder: Path, reply: Path, answer: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """While this is open, end the process as soon as the files in `folder` are whole, with an answer (as JSON) in `reply`."""
    stop = threading.Event()

    def watch() -> None:
        before = -1
        while not stop.wait(_LOOK):
            size = _whole_size(folder)
            if size is not None and size == before:
                reply.write_text(json.dumps(answer()), encoding="utf-8")
                os._exit(0)  # the compiler cannot be interrupted
            before = -1 if size is None else size

    watcher = threading.Thread(target=watch, name="assigned", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


def _whole_size(folder: Path) -> int | None:
    """Bytes of the scheduled program's file where it ends as such a file does, with sizes in the other that can be read; else none."""
    scheduled, buffers = (next(folder.glob(name), None) for name in (_SCHEDULED, _BUFFERS))
    if scheduled is None or buffers is None or not _ALLOCATION.search(buffers.read_text(encoding="utf-8")):
        return None
    with scheduled.open("rb") as text:
        size = text.seek(0, os.SEEK_END)
        text.seek(max(0, size - 8))
        return size if text.read().rstrip().endswith(b"}") else None


def read_assigned(folder: Path, axes: Mapping[str, int], *, across: Mapping[str, int]) -> dict[str, Any]:
    """What the files say, by the names of `Compiled`'s fields, as JSON has them.

    Args:
        folder: where they are.
        axes: see `count_program`.
        across: see `count_program`.
    """
    scheduled, buffers = (next(folder.glob(name)).read_text(encoding="utf-8") for name in (_SCHEDULED, _BUFFERS))
    counted = count_program(scheduled, axes, across=across)
    return {**read_sizes(buffers), **asdict(counted)}


def read_sizes(text: str) -> dict[str, int]:
    """The sizes in a buffer assignment, equal to those that `memory_analysis` gives of the compiled program but for the code.

    Each line is a place in memory: a parameter, an output of its own, a constant (which counts as code), or the heap in which all
    temporaries have theirs. A parameter that may be live at the end is one whose place an output takes.
    """
    sizes: Counter[tuple[int, str]] = Counter()
    for size, color, words in _ALLOCATION.findall(text):
        sizes[int(color or _HBM), _part(words)] += int(size)
    argument, alias = (sizes[_HBM, "argument"] + sizes[_HBM, "alias"], sizes[_HBM, "alias"])
    output, temp = sizes[_HBM, "output"] + alias, -(-sizes[_HBM, "temp"] // _PAGE) * _PAGE
    return {
        "argument_bytes": argument,
        "output_bytes": output,
        "alias_bytes": alias,
        "temp_bytes": temp,
        "code_bytes": 0,
        "host_bytes": sum(sizes[_HOST, part] for part in ("argument", "alias", "output", "temp")),
        "peak_bytes": argument + output - alias + temp,
    }


def _part(words: str) -> str:
    if words.startswith("parameter "):
        return "alias" if words.endswith("maybe-live-out:") else "argument"
    if words.endswith("maybe-live-out:"):
        return "output"
    return "temp" if "preallocated-temp" in words else "other"
