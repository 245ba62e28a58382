"""A record: one run of one check on one preset, as one JSON file. Every claim of support is such a file."""

import json
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from telamon.errors import ConfigError
from telamon.records.checks import Check, Elsewhere, Subject
from telamon.watch.environment import describe_environment

FOLDER = Path("docs/records")


@dataclass(frozen=True)
class Record:
    """What was measured, and where."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)  # for records that are read back

    preset: str
    tiny: bool
    """Whether the sizes were shrunk: the blocks are shown to work, not the model."""
    check: str
    figure: float
    unit: str
    threshold: float
    passed: bool
    versions: dict[str, str]
    """Of Python and the packages that figures depend on."""
    hardware: str
    git_sha: str | None
    """Commit; with `-dirty` where files had been changed since; none outside of a checkout."""
    date: str
    command: str

    @property
    def file_name(self) -> str:
        """One file for each preset, size and check: a new run replaces the old."""
        return f"{self.preset}{'.tiny' if self.tiny else ''}.{self.check}.json"

    def write(self, folder: Path = FOLDER) -> Path:
        """Write the record's file. Raises ConfigError where that fails."""
        path = folder / self.file_name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}; choose another --folder") from error
        return path


def run_check(check: Check, subject: Subject) -> Record:
    """Run a check and describe where it ran."""
    measured = check.measure(subject)
    figure = measured.figure if isinstance(measured, Elsewhere) else float(measured)
    environment = describe_environment()
    return Record(
        preset=subject.preset,
        tiny=subject.tiny,
        check=check.name,
        figure=figure,
        unit=check.unit,
        threshold=check.threshold,
        passed=figure <= check.threshold,
        versions={"python": environment["python"], **environment["packages"]},
        hardware=measured.hardware if isinstance(measured, Elsewhere) else _hardware(environment),
        git_sha=_git(environment["git"]),
        date=time.strftime("%Y-%m-%d"),
        command=shlex.join(["telamon", *sys.argv[1:]]),
    )


def read_records(folder: Path = FOLDER) -> list[Record]:
    """All records of a folder, sorted by file name.

    Raises:
        ConfigError: a file is no record; the message names it.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = TypeAdapter(Record).validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            problem = ": ".join([*map(str, first["loc"]), first["msg"]])
            raise ConfigError(f"{path} is not a record: {problem}; remove it, and make it anew with `telamon verify`") from error
        if path.name != record.file_name:
            raise ConfigError(f"{path} holds the record {record.file_name}; records are not renamed")
        records.append(record)
    return records


def _hardware(environment: dict[str, Any]) -> str:
    devices, cpu = environment["devices"], environment["cpu"]
    kind = f"{cpu['model']}, {cpu['cores']} cores" if devices["platform"] == "cpu" else devices["kind"]
    return f"{devices['count']} x {kind}"


def _git(state: dict[str, Any] | None) -> str | None:
    return None if state is None or state["sha"] is None else state["sha"] + ("-dirty" if state["dirty"] else "")
