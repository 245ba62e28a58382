"""Records and the page rendered from them; and that the page of this repository is that of its records."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from telamon.config import presets
from telamon.errors import ConfigError
from telamon.records.checks import CHECKS
from telamon.records.record import Record, read_records
from telamon.records.table import render

ROOT = Path(__file__).parents[2]


def record(preset: str = "tiny-llama", check: str = "train-step", **changes) -> Record:
    values = {
        "preset": preset,
        "tiny": False,
        "check": check,
        "figure": 0.5,
        "unit": CHECKS[check].unit,
        "threshold": CHECKS[check].threshold,
        "passed": True,
        "versions": {"python": "3.12"},
        "hardware": "1 x test",
        "git_sha": None,
        "date": "2026-01-02",
        "command": "telamon verify",
    }
    return Record(**(values | changes))


def test_records_come_back_as_they_were_written(tmp_path):
    records = [record("a"), record("b", figure=float("inf"), passed=False), record("b", tiny=True), record("b", "resume")]
    for one in records:
        one.write(tmp_path)
    assert sorted(read_records(tmp_path), key=repr) == sorted(records, key=repr)
    record("a", figure=0.25).write(tmp_path)
    assert len(read_records(tmp_path)) == 4, "a new run of a check replaces its record"


@pytest.mark.parametrize(
    "harm",
    [
        lambda fields: "not JSON",
        lambda fields: json.dumps([fields]),
        lambda fields: json.dumps({key: value for key, value in fields.items() if key != "figure"}),
        lambda fields: json.dumps(fields | {"more": 1}),
        lambda fields: json.dumps(fields | {"figure": "0.5"}),
        lambda fields: json.dumps(fields | {"passed": None}),
        lambda fields: b"\xff".decode("latin-1"),
    ],
    ids=["no JSON", "a list", "a field is missing", "a field too many", "a figure in quotes", "neither passed nor failed", "other text"],
)
def test_a_file_that_is_no_record_is_refused_by_name(tmp_path, harm):
    path = record().write(tmp_path)
    path.write_text(harm(dataclasses.asdict(record())))
    with pytest.raises(ConfigError, match=f"{path.name} is not a record"):
        read_records(tmp_path)


def test_a_renamed_record_is_refused_by_name(tmp_path):
    """A failed check must not stand in the table as another preset's."""
    path = record().write(tmp_path)
    path.rename(tmp_path / "qwen3-8b.train-step.json")
    with pytest.raises(ConfigError, match=r"qwen3-8b\.train-step\.json holds the record tiny-llama\.train-step\.json"):
        read_records(tmp_path)


def test_the_page_depends_on_the_records_alone_and_not_on_their_order():
    records = [record("b"), record("a", passed=False, figure=2.0), record("a", tiny=True), record("b", "resume", date="2026-03-04")]
    page = render(records)
    for seed in range(5):
        random.Random(seed).shuffle(records)
        assert render(records) == page
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert table == [
        "| preset | train step | resume | checked |",
        "| --- | --- | --- | --- |",
        "| a | [**no** (2)](records/a.train-step.json) |  | 2026-01-02 |",
        "| a *(tiny)* | [yes (0.5)](records/a.tiny.train-step.json) |  | 2026-01-02 |",
        "| b | [yes (0.5)](records/b.train-step.json) | [yes (0.5)](records/b.resume.json) | 2026-03-04 |",
    ]


def faults(docs: Path) -> list[str]:
    """What is wrong with the records below `docs` and the page beside them."""
    records = read_records(docs / "records")
    page = docs / "support.md"
    found = [f"{one.file_name}: there is no preset {one.preset}" for one in records if one.preset not in presets.names("models")]
    found += [f"{one.file_name}: there is no check {one.check}" for one in records if one.check not in CHECKS]
    if (page.read_text(encoding="utf-8") if page.exists() else None) != (render(records) if records else None):
        found.append("support.md is not what `telamon records table` writes")
    return found


def test_the_support_page_is_that_of_the_records_and_each_names_a_preset_and_a_check_that_exist():
    assert faults(ROOT / "docs") == []


@pytest.mark.parametrize("check", ["fits-on-tpu", "fits-on-gpu"])
def test_each_preset_has_a_machine_on_which_it_was_seen_to_fit(check: str):
    fitting = {one.preset for one in read_records(ROOT / "docs" / "records") if one.check == check and one.passed and not one.tiny}
    assert fitting == set(presets.names("models"))


def test_a_stale_page_and_records_of_what_is_gone_would_be_noticed(tmp_path):
    assert faults(tmp_path) == []
    record().write(tmp_path / "records")
    assert faults(tmp_path) == ["support.md is not what `telamon records table` writes"]
    (tmp_path / "support.md").write_text(render([record()]))
    assert faults(tmp_path) == []
    (tmp_path / "support.md").write_text(render([record(figure=0.6)]))
    assert len(faults(tmp_path)) == 1
    gone = [record("gone"), record(check="resume"), record()]
    gone[1] = dataclasses.replace(gone[1], check="gone")
    for one in gone:
        one.write(tmp_path / "records")
    (tmp_path / "support.md").write_text(render(gone))
    assert faults(tmp_path) == [
        "gone.train-step.json: there is no preset gone",
        "tiny-llama.gone.json: there is no check gone",
    ]
