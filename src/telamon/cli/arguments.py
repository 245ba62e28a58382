"""Positional arguments that several verbs share: a run, then values that override its own."""

from typing import Annotated

import typer

from telamon.errors import ConfigError

DEFAULT_RUN = "default"

RunArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN] [KEY=VALUE]",
        help=f"A run file, a run directory or the name of a run preset (none: `{DEFAULT_RUN}`), then values to change, such as `train.steps=200`.",
        show_default=False,
    ),
]

Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import", metavar="MODULE", help="A Python module with model families or blocks of your own; may be repeated.", show_default=False
    ),
]


def split_run(arguments: list[str] | None, *, default: str = DEFAULT_RUN) -> tuple[str, list[str]]:
    """The run and the overrides among the positional arguments. Raises ConfigError where there are two runs."""
    runs = [argument for argument in arguments or () if "=" not in argument]
    if len(runs) > 1:
        raise ConfigError(f"two runs are named, {runs[0]} and {runs[1]}; a value to change is written key=value")
    return (runs or [default])[0], [argument for argument in arguments or () if "=" in argument]
