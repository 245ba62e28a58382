"""The template of results: a page, a JSON file, and a last line that programs can read."""

import json

import pytest

from benchmarks import peers
from benchmarks.processes import BenchmarkError
from benchmarks.results import Result, render, show, table, write

MACHINE = {"cpu": "a CPU", "cores": 2, "memory_gb": 24, "system": "Linux x86_64, Python 3.12.1", "commit": "0123456789ab"}


def result(**changes) -> Result:
    values = {
        "id": "P9",
        "title": "how fast it is",
        "columns": ("side", "tokens/s"),
        "rows": [["ours", "2,000"], ["theirs", "1,000"]],
        "figures": {"times": 2.0},
        "target": "at least 1.5 times",
        "holds": True,
        "commands": {"ours": "telamon train"},
        "versions": {"ours": {"jax": "0.12"}},
        "threads": "2",
        "notes": ["In turns."],
        "machine": MACHINE,
        "date": "2026-01-02",
        "load": "0.1, 0.2, 0.3",
    }
    return Result(**{**values, **changes})


def test_the_last_line_is_json(capsys):
    show(result())
    out = capsys.readouterr().out.splitlines()
    assert json.loads(out[-1]) == {"id": "P9", "figures": {"times": 2.0}, "target": "at least 1.5 times", "holds": True}
    assert "| theirs | 1,000    |" in out


def test_both_files_are_written_and_agree(tmp_path):
    write(result(), tmp_path)
    page, data = (tmp_path / "P9.md").read_text(), json.loads((tmp_path / "P9.json").read_text())
    assert data["figures"] == {"times": 2.0}
    for text in (
        "# P9: how fast it is",
        "2026-01-02",
        "0123456789ab",
        "make bench ID=P9",
        "**Holds.**",
        "telamon train",
        "jax 0.12",
        "a CPU",
    ):
        assert text in page


def test_a_missed_target_says_so():
    assert "**Does not hold.**" in render(result(holds=False))


def test_records_are_a_table_of_their_own():
    page = render(result(records=[{"release": "0.1.0", "seconds": 210.4}, {"release": "0.2.0", "seconds": None}]))
    assert "## By release" in page
    assert "| 0.1.0   | 210     |" in page


def test_columns_are_as_wide_as_their_cells():
    assert table(("a", "long"), [["wide", "b"]]) == "| a    | long |\n|------|------|\n| wide | b    |"


def test_a_peer_without_its_python_says_what_to_install():
    with pytest.raises(BenchmarkError, match=r"Python 3\.0 \(with venv\).*install one"):
        peers.find_python("3.0")
