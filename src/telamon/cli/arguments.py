"""Arguments that several verbs share: a run and values that override its own, how tokens are drawn."""

from typing import TYPE_CHECKING, Annotated

import typer

from telamon.errors import ConfigError

if TYPE_CHECKING:
    from telamon.infer.sampling import Sampling

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

Temperature = Annotated[float | None, typer.Option(help="0 is greedy; higher is more varied; none: 0.8.", show_default=False)]
TopK = Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens.", show_default=False)]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens that together have this share.", show_default=False)]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
AllowMismatch = Annotated[
    bool,
    typer.Option("--allow-mismatch", help="Go on where the tokenizer or the chat template is not the one the weights were trained with."),
]


def split_run(arguments: list[str] | None, *, default: str = DEFAULT_RUN) -> tuple[str, list[str]]:
    """The run and the overrides among the positional arguments. Raises ConfigError where there are two runs."""
    runs = [argument for argument in arguments or () if "=" not in argument]
    if len(runs) > 1:
        raise ConfigError(f"two runs are named, {runs[0]} and {runs[1]}; a value to change is written key=value")
    return (runs or [default])[0], [argument for argument in arguments or () if "=" in argument]


def sampling_of(*, temperature: float | None, top_k: int | None, top_p: float | None, greedy: bool, seed: int) -> "Sampling":
    """How tokens are drawn. Raises ConfigError for options that contradict each other, or values that are not possible."""
    from telamon.infer.sampling import Sampling

    if greedy and (temperature, top_k, top_p) != (None, None, None):
        raise ConfigError("--greedy takes the likeliest token each time; leave out --temperature, --top-k and --top-p, or --greedy")
    if seed < 0:
        raise ConfigError(f"--seed {seed} is not possible; give 0 or more")
    return Sampling(temperature=0.0 if greedy else 0.8 if temperature is None else temperature, top_k=top_k, top_p=top_p)
