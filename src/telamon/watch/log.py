"""How a command speaks: banners for its phases, plain lines, tables of two columns."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console(*, quiet: bool = False) -> "Console":
    """The console that a command writes to; `quiet` (processes other than 0) prints nothing."""
    from rich.console import Console

    return Console(quiet=quiet, highlight=False)


def banner(console: "Console", title: str) -> None:
    """Announce a phase: a rule across a terminal, one short line in a log file."""
    if console.is_terminal:
        console.rule(title, align="left", style="dim")
    else:
        line(console, f"== {title}")


def line(console: "Console", text: str) -> None:
    """Print a line as it is: no markup, and no wrapping, so that a log file keeps one line a message."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def facts(console: "Console", values: Mapping[str, object]) -> None:
    """Print names and values as two columns."""
    width = max(map(len, values), default=0)
    for name, value in values.items():
        line(console, f"  {name:<{width}}  {value}")


def human_bytes(count: float) -> str:
    """A number of bytes in decimal units, such as ``31.4 MB``."""
    if abs(count) < 1000:
        return f"{count:.0f} bytes"
    power = min(int(math.log10(abs(count)) // 3), 5)
    return f"{count / 1000**power:.1f} {('', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"


def human_seconds(seconds: float) -> str:
    """A duration, such as ``8.3 s``, ``4 min 07 s`` or ``3 h 02 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
