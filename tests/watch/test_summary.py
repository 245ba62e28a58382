"""summary.json."""

import json

import pytest

from telamon.errors import ConfigError
from telamon.watch.summary import Summary, write_summary

SUMMARY = Summary(
    steps=10,
    final_loss=float("nan"),
    val_bits_per_byte=2.1,
    gzip_bits_per_byte=2.3,
    seconds_to_beat_gzip=None,
    wall_seconds=12.5,
    tokens_per_second=100.0,
    mfu=None,
    extra={"preset": "tiny"},
)


def test_it_holds_every_figure_as_valid_json(tmp_path):
    write_summary(tmp_path, SUMMARY)
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "steps": 10,
        "final_loss": None,
        "val_bits_per_byte": 2.1,
        "gzip_bits_per_byte": 2.3,
        "seconds_to_beat_gzip": None,
        "wall_seconds": 12.5,
        "tokens_per_second": 100.0,
        "mfu": None,
        "preset": "tiny",
    }
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path, monkeypatch):
    from pathlib import Path

    write_summary(tmp_path, SUMMARY)
    before = (tmp_path / "summary.json").read_text()
    real = Path.write_bytes

    def full_disk(self, content):
        real(self, content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(ConfigError, match=r"summary\.json: No space left"):
        write_summary(tmp_path, SUMMARY)
    assert (tmp_path / "summary.json").read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
