"""`telamon verify`."""

import dataclasses
import json
import re

import pytest

from telamon.records.checks import CHECKS
from telamon.records.record import read_records


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_check_passes_on_a_tiny_model_and_leaves_its_record(telamon, here):
    answer = telamon("verify", "tiny-llama")
    assert answer.code == 0, answer.out + answer.err
    assert re.findall(r"^passed  ([\w-]+):", answer.out, re.MULTILINE) == [name for name, check in CHECKS.items() if not check.by_name]
    records = {record.check: record for record in read_records(here / "docs/records")}
    assert records.keys() == {name for name, check in CHECKS.items() if not check.by_name} and all(
        record.passed for record in records.values()
    )
    one = records["train-step"]
    assert (one.preset, one.tiny, one.command) == ("tiny-llama", False, "telamon verify tiny-llama")
    assert {"python", "jax", "telamon"} <= one.versions.keys() and re.fullmatch(r"\d{4}-\d\d-\d\d", one.date)
    assert one.hardware.startswith("8 x ") and 0 < one.figure < one.threshold == 0.9


def test_a_figure_above_its_threshold_ends_with_code_4_and_is_recorded(telamon, here, monkeypatch):
    """The checks after it are still run."""
    count = CHECKS["parameter-count"]
    monkeypatch.setitem(CHECKS, "first", dataclasses.replace(count, name="first", threshold=-1.0, measure=lambda subject: 0.25))
    answer = telamon("verify", "qwen3-8b", "--checks", "first, parameter-count", "--folder", "elsewhere")
    assert answer.code == 4
    assert "FAILED  first: 0.25 (at most -1" in answer.out and "passed  parameter-count" in answer.out
    assert answer.err.strip() == "qwen3-8b: first exceeded the threshold"
    written = json.loads((here / "elsewhere" / "qwen3-8b.first.json").read_text())
    assert (written["passed"], written["figure"], written["threshold"]) == (False, 0.25, -1.0)
    assert [record.passed for record in read_records(here / "elsewhere")] == [False, True]


def test_a_large_models_blocks_are_checked_at_shrunk_sizes(telamon, here):
    answer = telamon("verify", "qwen3-8b", "--tiny", "--checks", "decode-equals-forward")
    assert answer.code == 0, answer.err
    [record] = read_records(here / "docs/records")
    assert record.tiny and record.file_name == "qwen3-8b.tiny.decode-equals-forward.json"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny-llama", "--checks", "train-stp"], "no check is named 'train-stp'; did you mean train-step?"),
        (["tiny-llama", "--checks", "zzzz"], "there are parameter-count, train-step, resume, decode-equals-forward"),
        (["tiny-llama", "--tiny", "--checks", "parameter-count"], "makes no sense for shrunk sizes; leave --tiny out"),
        (["tiny-lama"], "did you mean 'tiny-llama'?"),
        (["tiny-llama", "--checks", "parameter-count", "--folder", "a file/records"], "cannot write a file/records/"),
    ],
)
def test_what_cannot_be_checked_is_refused(telamon, here, words, message):
    (here / "a file").write_text("")
    answer = telamon("verify", *words)
    assert answer.code == 2 and message in answer.err and len(answer.err.strip().splitlines()) == 1
    assert answer.out == "" and [path.name for path in here.iterdir()] == ["a file"]
