"""An option is honoured or refused, never accepted and ignored: each option of each verb is used by a test of that verb.

(What a verb does with the settings of the config is tested in `tests/config`: each is read somewhere, and one that another
makes idle is refused.)
"""

import ast
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup, TyperOption

from telamon.cli.main import app

SHARED = {"--help", "--install-completion", "--show-completion"}


def options(command, path=()):
    """(words of the command, option) for every option of every verb."""
    if isinstance(command, TyperGroup):
        return [found for name, below in command.commands.items() for found in options(below, (*path, name))]
    names = [max(parameter.opts, key=len) for parameter in command.params if isinstance(parameter, TyperOption)]
    return [(path, name) for name in names if name not in SHARED]


def words_in_tests(verb):
    """For each test of a verb, the words it gives to commands."""
    tree = ast.parse((Path(__file__).parent / f"test_{verb}.py").read_text(encoding="utf-8"))
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [{part.value for part in ast.walk(test) if isinstance(part, ast.Constant) and isinstance(part.value, str)} for test in tests]


@pytest.mark.parametrize(
    ("path", "option"), options(typer.main.get_command(app)), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_every_option_is_used_in_a_test_of_its_verb(path, option):
    assert any(option in words and set(path) & words for words in words_in_tests(path[0])), f"no test uses {' '.join(path)} {option}"
