"""`telamon models`."""

import re

import pytest

from telamon.config import presets


@pytest.mark.parametrize("name", presets.names("models"))
def test_a_preset_has_the_parameters_its_head_says(telamon, name):
    """The figures in the files are those of the published checkpoints."""
    head = presets.find("models", name).read_text(encoding="utf-8").splitlines()[0]
    published = re.search(r"([\d,]+) parameters", head)
    answer = telamon("models", "show", name)
    counted = re.fullmatch(r"# ([\d,]+) parameters", answer.out.splitlines()[0])
    assert answer.code == 0 and counted
    if published:
        assert counted[1] == published[1]


def test_list_shows_every_preset(telamon):
    out = telamon("models", "list").out
    assert all(name in out for name in presets.names("models"))


def test_an_unknown_preset_is_refused_with_the_nearest(telamon):
    answer = telamon("models", "show", "qwen3-8")
    assert answer.code == 2 and "did you mean 'qwen3-8b'?" in answer.err
