"""Running checks on a preset."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path

from telamon.errors import ConfigError, NumericsError
from telamon.records.checks import CHECKS, Check, applicable, make_subject
from telamon.records.record import Record, run_check


def verify(preset: str, *, names: Sequence[str] | None, tiny: bool, folder: Path, show: Callable[[str], object]) -> list[Record]:
    """Run checks and write their records; all are run and written before a failure is raised.

    Args:
        preset: a model preset.
        names: which checks; none: all that apply, but those that are run by name only.
        tiny: shrink the model's sizes.
        folder: where records go.
        show: prints a line.

    Raises:
        ConfigError: an unknown preset or check, or one that does not apply.
        NumericsError: a figure exceeds its threshold.
    """
    subject = make_subject(preset, tiny=tiny)
    possible = {check.name: check for check in applicable(subject)}
    chosen = [_find(name.strip(), possible) for name in names] if names is not None else [c for c in possible.values() if not c.by_name]
    records = []
    for check in chosen:
        record = run_check(check, subject)
        path = record.write(folder)
        show(
            f"{'passed' if record.passed else 'FAILED'}  {check.name}: {record.figure:.3g} (at most {check.threshold:g}; {check.unit})  {path}"
        )
        records.append(record)
    failed = [record.check for record in records if not record.passed]
    if failed:
        raise NumericsError(f"{preset}: {', '.join(failed)} exceeded the threshold")
    return records


def _find(name: str, possible: dict[str, Check]) -> Check:
    if name in possible:
        return possible[name]
    if name in CHECKS:
        raise ConfigError(f"the check {name} makes no sense for shrunk sizes; leave --tiny out")
    near = get_close_matches(name, CHECKS, 1)
    raise ConfigError(f"no check is named {name!r}; {f'did you mean {near[0]}?' if near else 'there are ' + ', '.join(CHECKS)}")
