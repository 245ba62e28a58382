"""The lines and the bar a run shows: on a terminal both, elsewhere one plain line per logged step."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress


def format_step(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """A logged step as one readable line; a metric that is absent is left out (names: see `telamon.watch`)."""
    parts = [f"step {step}/{steps}"]
    for name, template in _LINE.items():
        value = metrics.get(name)
        if value is not None:
            parts.append(template.format(value * _SCALE.get(name, 1)))
    return "  ".join(parts)


_LINE = {
    "loss": "loss {:.3f}",
    "bits_per_byte": "{:.2f} bits/byte",
    "learning_rate": "lr {:.1e}",
    "grad_norm": "|g| {:.2f}",
    "tokens_per_second": "{:,.0f} tok/s",
    "expert_load_max": "busiest expert {:.1f}x",
    "mfu": "{:.0f} % of peak",
    "step_seconds": "{:,.0f} ms",
    "data_wait": "wait {:.1f} %",
}
_SCALE = {"mfu": 100, "step_seconds": 1000, "data_wait": 100}


def format_validation(step: int, steps: int, bits_per_byte: float, gzip_bits_per_byte: float | None) -> str:
    """An evaluation as one readable line, with gzip's figure beside it."""
    line = f"step {step}/{steps}  validation {bits_per_byte:.3f} bits/byte"
    if gzip_bits_per_byte is None:
        return line
    verdict = "beaten" if bits_per_byte < gzip_bits_per_byte else "not yet beaten"
    return f"{line}  gzip -9 {gzip_bits_per_byte:.3f}, {verdict}"


class RunDisplay:
    """Shows a run's progress; a context manager.

    Lines go through one console, and on a terminal the bar lives below them: whatever else is printed to stdout
    or stderr meanwhile appears above it too, so that the two never mix.

    Args:
        steps: steps of the run.
        first_step: steps already done.
        gzip_bits_per_byte: shown beside the validation figure.
        bar: whether a terminal gets a bar.
        console: where to print; none: stdout.
        quiet: print nothing (processes other than 0).
    """

    def __init__(
        self,
        steps: int,
        *,
        first_step: int = 0,
        gzip_bits_per_byte: float | None = None,
        bar: bool = True,
        console: "Console | None" = None,
        quiet: bool = False,
    ) -> None:
        from rich.console import Console

        self._console = console or Console(quiet=quiet, highlight=False)
        self._steps, self._gzip = steps, gzip_bits_per_byte
        self._latest: dict[str, float] = {}
        self._progress: Progress | None = None
        if bar and not quiet and self._console.is_terminal:
            self._progress = _make_bar(self._console, self._status)
            self._task = self._progress.add_task("train", total=steps, completed=first_step)

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def advance(self, step: int) -> None:
        """Move the bar: `step` steps are done."""
        if self._progress:
            self._progress.update(self._task, completed=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a logged step's line and show its figures at the bar."""
        self._latest.update(metrics)
        self.advance(step)  # first: printing draws the bar anew
        self.print(format_step(step, self._steps, metrics))

    def validation(self, step: int, bits_per_byte: float) -> None:
        """Print an evaluation's line and show its figure at the bar."""
        self._latest["val_bits_per_byte"] = bits_per_byte
        self.print(format_validation(step, self._steps, bits_per_byte, self._gzip))

    def print(self, text: str) -> None:
        """Print a line as it is: no markup, no wrapping (a log file keeps one line a step)."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _status(self) -> str:
        latest, parts = self._latest, []
        if "loss" in latest:
            parts.append(f"loss {latest['loss']:.3f}")
        if "val_bits_per_byte" in latest:
            gzip = "" if self._gzip is None else f" (gzip {self._gzip:.2f})"
            parts.append(f"val {latest['val_bits_per_byte']:.2f} bits/byte{gzip}")
        if "tokens_per_second" in latest:
            parts.append(f"{latest['tokens_per_second']:,.0f} tok/s")
        if "mfu" in latest:
            parts.append(f"{100 * latest['mfu']:.0f} % of peak")
        return " · ".join(parts)


def _make_bar(console: "Console", status) -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Bar(Progress):
        def get_renderables(self) -> "Iterable[RenderableType]":
            # Figures have a line of their own: beside the bar they would not fit 80 columns.
            yield from super().get_renderables()
            yield Text("  " + status(), style="dim", no_wrap=True, overflow="ellipsis")

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        refresh_per_second=2,
        speed_estimate_period=120,
        expand=True,
    )
