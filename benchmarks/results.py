"""What a benchmark found, in one template: ID.md for people, ID.json for programs, a table and one line of JSON on the terminal."""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Result:
    """The outcome of one benchmark."""

    id: str
    title: str
    """What was measured, in one sentence."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The table, ready to print."""
    figures: Mapping[str, float | str | None]
    """The figures that the target is about, and those they come from."""
    target: str
    holds: bool
    commands: Mapping[str, str]
    """For each side, the command that anyone can run."""
    versions: Mapping[str, Mapping[str, str]]
    """For each side, its packages."""
    threads: str
    """How many threads each side may use."""
    notes: Sequence[str] = ()
    """How it was measured, and what the reader must know."""
    records: Sequence[Mapping[str, Any]] = ()
    """One entry a release, where a record is kept."""
    machine: Mapping[str, Any] = field(default_factory=lambda: describe_machine())
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    load: str = field(default_factory=lambda: ", ".join(f"{x:.1f}" for x in os.getloadavg()))
    """The machine's load over 1, 5 and 15 minutes at the end: above its cores, something else was running too."""


def describe_machine() -> dict[str, Any]:
    """The machine and the checkout."""
    import psutil

    from telamon.watch.environment import git_state

    git = git_state(__file__) or {}
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "commit": (git.get("sha") or "none")[:12] + (" with changes" if git.get("dirty") else ""),
    }


def versions_here(*packages: str) -> dict[str, str]:
    """Telamon's version, and those of other packages in this environment."""
    from importlib.metadata import version

    import telamon

    return {"telamon": telamon.__version__, **{package: version(package) for package in packages}}


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are as wide as their cells, so that it reads well on a terminal too."""
    lines = [list(columns), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    padded = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([padded[0], rule, *padded[1:]])


def render(result: Result) -> str:
    """The page of a result."""
    machine = result.machine
    parts = [
        f"# {result.id}: {result.title}",
        f"{result.date}, commit {machine['commit']}. Run it again: `make bench ID={result.id}`.",
        table(result.columns, result.rows),
        f"**Target**: {result.target}. **{'Holds' if result.holds else 'Does not hold'}.**",
        table(("figure", "value"), [(name, _show(value)) for name, value in result.figures.items()]),
    ]
    if result.records:
        names = list(result.records[0])
        parts += ["## By release", table(names, [[_show(record[name]) for name in names] for record in result.records])]
    parts += [
        "## How",
        "\n".join(f"- {note}" for note in result.notes),
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}; load at the end {result.load}. "
        f"Threads: {result.threads}.",
        "\n\n".join(f"{side}:\n\n```bash\n{command}\n```" for side, command in result.commands.items()),
        "\n".join(f"- {side}: {', '.join(f'{n} {v}' for n, v in packages.items())}" for side, packages in result.versions.items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write(result: Result, folder: Path) -> None:
    """Write ID.md and ID.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result.id}.md").write_text(render(result))
    (folder / f"{result.id}.json").write_text(json.dumps(asdict(result), indent=2) + "\n")


def show(result: Result) -> None:
    """Print the table, and as the last line the figures as JSON."""
    print(f"{result.id}: {result.title}\n\n{table(result.columns, result.rows)}\n", flush=True)
    if result.records:
        names = list(result.records[0])
        print(table(names, [[_show(record[name]) for name in names] for record in result.records]) + "\n")
    print(json.dumps({"id": result.id, "figures": result.figures, "target": result.target, "holds": result.holds}), flush=True)


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
