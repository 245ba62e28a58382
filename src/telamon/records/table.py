"""The support table, rendered from records and from nothing else."""

from collections import defaultdict
from collections.abc import Sequence

from telamon.records.checks import CHECKS
from telamon.records.record import Record

_HEAD = """# Support

What was reproduced, and nothing else. Each cell is a record: a file under `docs/records/` with the figure, its threshold,
versions, hardware, commit and the command that made it. An empty cell was not checked. A row marked *tiny* ran the family's
blocks at shrunk sizes.

This page is written by `telamon records table`; do not edit it.
"""


def render(records: Sequence[Record]) -> str:
    """The page `docs/support.md`."""
    rows: dict[tuple[str, bool], dict[str, Record]] = defaultdict(dict)
    for record in records:
        rows[record.preset, record.tiny][record.check] = record
    names = [name for name in CHECKS if any(name in row for row in rows.values())]
    lines = [_HEAD, _row(["preset", *(CHECKS[name].title for name in names), "checked"]), _row(["---"] * (len(names) + 2))]
    for (preset, tiny), found in sorted(rows.items()):
        label = f"{preset} *(tiny)*" if tiny else preset
        lines.append(_row([label, *(_cell(found.get(name)) for name in names), max(record.date for record in found.values())]))
    lines += ["", "Figures must not exceed their thresholds:", ""]
    lines += [f"- **{CHECKS[name].title}**: {CHECKS[name].unit}, at most {CHECKS[name].threshold:g}." for name in names]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(record: Record | None) -> str:
    if record is None:
        return ""
    return f"[{'yes' if record.passed else '**no**'} ({record.figure:.2g})](records/{record.file_name})"
