"""Lines for people."""

import io

import pytest
from rich.console import Console

from telamon.watch.log import banner, facts, human_bytes, human_seconds


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (31_400_000, "31.4 MB"), (2.5e15, "2.5 PB")]
)
def test_bytes(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.31, "8.3 s"), (59.97, "1 min 00 s"), (247, "4 min 07 s"), (3599.7, "1 h 00 min"), (10_921, "3 h 02 min")]
)
def test_seconds(seconds, text):
    assert human_seconds(seconds) == text


def test_a_log_file_gets_short_plain_lines():
    out = io.StringIO()
    console = Console(file=out, width=40)
    banner(console, "Data")
    facts(console, {"files": 12, "content hash": "[ab]" * 20})
    assert out.getvalue() == "== Data\n  files         12\n  content hash  " + "[ab]" * 20 + "\n"
