"""A search as `telamon plan --search` does it: what was found, as people and as programs read it, and the run file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from telamon.config.load import Loaded, plain
from telamon.config.schema import RunConfig
from telamon.errors import ConfigError
from telamon.plan.aot import Compiled, compile_program
from telamon.plan.layouts import chosen, in_words
from telamon.plan.plan import Request
from telamon.plan.price import Price, price_of
from telamon.plan.report import not_compiled_note
from telamon.plan.run_file import check_run_file, write_run_yaml
from telamon.plan.search import MARGIN, Candidate, Found, search
from telamon.plan.topology import Topology, missing_compiler

_COMPILED = 3
"""Candidates that the compiler is to have accepted."""


@dataclass(frozen=True)
class FoundLayouts:
    """The layouts of a run that fit a machine, with prices where a chip's is known."""

    found: Found
    topology: Topology
    chip_hour: float | None
    file: Path
    """Where the run with the best layout was written."""
    not_compiled: str | None = None
    """What to install for the compiler to be asked, where it is missing."""

    def show(self, console: Console) -> None:
        """Print them."""
        for piece in self._render():
            console.print(piece, highlight=False)

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs; bytes are a device's."""
        return {
            "topology": self.topology.text,
            "considered": self.found.considered,
            "dropped": dict(self.found.dropped),
            "file": str(self.file),
            "not_compiled": self.not_compiled,
            "candidates": [self._candidate(candidate) for candidate in self.found.candidates],
        }

    def _candidate(self, candidate: Candidate) -> dict[str, Any]:
        prediction, price = candidate.prediction, self._price(candidate)
        return {
            "layout": chosen(candidate.config),
            "config": plain(candidate.config),
            "compiled": candidate.compiled is not None,
            "memory": candidate.memory.total,
            "step_seconds": prediction.step_seconds,
            "tokens_per_second_per_device": prediction.tokens_per_second_per_device,
            "mfu": prediction.mfu,
            "tokens_per_dollar": None if price is None else price.tokens_per_dollar,
        }

    def _render(self) -> Iterator[RenderableType]:
        title = f"layouts for {self.topology.text} that fit, the fastest first by prediction"
        columns = ["layout", "tokens/s\na device", "MFU", "GiB\na device"]  # narrow, so that a layout's words stay whole on 80 columns
        table = Table(*columns, *([] if self.chip_hour is None else ["tokens\na dollar"]), title=title, title_justify="left")
        table.columns[0].overflow = "fold"
        for column in table.columns[1:]:
            column.justify = "right"
        for candidate in self.found.candidates:
            prediction, price = candidate.prediction, self._price(candidate)
            memory = ("~" if candidate.compiled is None else "") + f"{candidate.memory.total / 2**30:.2f}"
            cells = [in_words(candidate.config), f"{prediction.tokens_per_second_per_device:,.0f}", f"{prediction.mfu:.1%}", memory]
            table.add_row(*cells, *([] if price is None else [f"{price.tokens_per_dollar:,.0f}"]))
        if self.not_compiled is not None:
            yield not_compiled_note(self.not_compiled)
        yield table
        usable = self.topology.chip.hbm_bytes / 2**30
        yield Text(f"  a program may use {usable:.2f} GiB of a device; where not compiled (~), {MARGIN:.0%} of it stays free", style="dim")
        yield Text(f"{self.found.considered:,} layouts considered, of which dropped:{'' if self.found.dropped else ' none'}")
        for reason, count in sorted(self.found.dropped.items(), key=lambda item: -item[1]):
            yield Text(f"  {count:>6,}  {reason}")
        yield Text(f"the first is in {self.file}; to train it:\n  telamon train {self.file}", style="green")

    def _price(self, candidate: Candidate) -> Price | None:
        return None if self.chip_hour is None else price_of(candidate.config, self.topology, candidate.prediction, chip_hour=self.chip_hour)


def look_for_layouts(loaded: Loaded, topology: Topology | None, request: Request, *, file: Path, free_batch: bool) -> FoundLayouts:
    """Search the layouts of a run, compile the best few where asked to, and write the run with the best.

    Args:
        loaded: the run.
        topology: the machine; none: this one, which cannot be searched for.
        request: whether to compile, within which bounds, and the price of a chip.
        file: where to write the run.
        free_batch: see `search`.

    Raises:
        ConfigError: no machine is named, something is asked that a search does not do, or nothing fits.
        CompileError: a compilation failed, or took longer or more memory than it may.
    """
    if topology is None:
        raise ConfigError("--search predicts speed from what is known of chips; name a machine, such as --on v6e:4x4")
    if request.save is not None:
        raise ConfigError(f"--search compiles several steps and keeps none; write the run first, then: telamon plan {file} --save FILE")
    check_run_file(file)
    not_compiled = missing_compiler(topology) if request.compile else None

    def compiler(config: RunConfig, topology: Topology) -> Compiled:
        return compile_program(config, topology, timeout=request.timeout, host_memory=int(request.host_memory * 2**30), quick=True)

    wanted = _COMPILED if request.compile and not_compiled is None else 0
    found = search(loaded.config, topology, free_batch=free_batch, compile_best=wanted, compiler=compiler)
    write_run_yaml(loaded, found.candidates[0], topology, file)
    return FoundLayouts(found, topology, request.chip_hour, file, not_compiled)
