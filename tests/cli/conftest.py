"""The command line, called in this process as the shell would call it."""

import sys
from dataclasses import dataclass

import pytest

from telamon.cli.main import main


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


@pytest.fixture
def telamon(monkeypatch, capsys):
    """A function of the words after `telamon` that gives the exit code and what was printed."""

    def call(*words: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["telamon", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        printed = capsys.readouterr()
        return Answer(int(stopped.value.code or 0), printed.out, printed.err)

    return call
