"""Help, exit codes and error messages of the command line."""

import subprocess
import sys

import pytest
import typer.main
from typer.core import TyperGroup

from telamon import errors
from telamon.cli.main import app


def in_a_process(*words):
    return subprocess.run([sys.executable, "-m", "telamon", *words], capture_output=True, text=True)


def commands(command, path=()):
    """The words that lead to every command below `command`."""
    if not isinstance(command, TyperGroup):
        return [path]
    return [found for name, below in command.commands.items() for found in commands(below, (*path, name))]


def test_help_imports_only_what_it_uses():
    program = (
        "import sys; from telamon.cli.main import app; print(*(set(sys.modules) & {'jax', 'pydantic', 'yaml', 'numpy', 'rich.markdown'}))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == ""


@pytest.mark.parametrize("path", commands(typer.main.get_command(app)), ids=" ".join)
def test_every_help_teaches_with_an_example_of_its_own_command(telamon, path):
    answer = telamon(*path, "--help")
    assert answer.code == 0
    assert "telamon " + " ".join(path) in answer.out.replace("Usage: telamon", "")


def test_a_misspelt_key_ends_with_code_2_and_a_short_message():
    done = in_a_process("config", "show", "optimizer.learning_rat=1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) < 5
    assert "learning_rate" in done.stderr.replace("learning_rat;", "")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (errors.ConfigError("no"), 2),
        (errors.DataError("no"), 3),
        (errors.NumericsError("no"), 4),
        (errors.CheckpointError("no"), 5),
        (errors.PeerError("no"), 6),
        (errors.Stopped("no"), 75),
        (errors.TelamonError("[no/markup]"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_an_error_for_the_user_is_its_message_and_its_exit_code(telamon, monkeypatch, raised, code):
    def fail(*_, **__):
        raise raised

    monkeypatch.setattr("telamon.config.load.load_run", fail)
    answer = telamon("config", "show")
    assert (answer.code, answer.out, answer.err.strip()) == (code, "", str(raised))


def test_a_bug_shows_its_traceback(telamon, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("telamon.config.load.load_run", fail)
    answer = telamon("config", "show")
    assert answer.code == 1 and "Traceback" in answer.err and "raise ZeroDivisionError" in answer.err


def test_an_unknown_verb_and_an_unknown_option_end_with_code_2(telamon):
    assert telamon("shw").code == 2
    assert telamon("config", "show", "--orgins").code == 2


def test_two_runs_are_refused(telamon):
    answer = telamon("config", "show", "tiny", "default")
    assert answer.code == 2 and "two runs are named, tiny and default" in answer.err
