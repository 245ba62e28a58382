"""`telamon chat`: talk with a run in the terminal."""

import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from telamon.cli.arguments import AllowMismatch, Greedy, Imports, Seed, Temperature, TopK, TopP, sampling_of


def chat(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run directory, or its name below runs/; none: the newest.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the first turn.", show_default=False)] = None,
    template: Annotated[
        Path | None, typer.Option(help="A file with a chat template (Jinja); none: the run's own.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    greedy: Greedy = False,
    seed: Seed = 0,
    allow_mismatch: AllowMismatch = False,
    imports: Imports = None,
) -> None:
    """Talk with a model, through its chat template.

    /reset begins a new conversation, Ctrl-C cuts an answer off, /quit or Ctrl-D ends. Where the input is no terminal, each line of it is a
    message, and the answers are all that is printed to the output.

    ```
    telamon import model-q8_0.gguf runs/small
    telamon chat small
    telamon chat small --system "You answer in one sentence." --top-p 0.9
    echo "What is the capital of France?" | telamon chat small --greedy
    telamon chat first --template chatml.jinja      # for a run without one
    ```
    """
    from telamon.infer.chat import QUIT, RESET, chat_with, converse
    from telamon.infer.run import find_run, open_run

    sampling = sampling_of(temperature=temperature, top_k=top_k, top_p=top_p, greedy=greedy, seed=seed)
    opened = open_run(find_run(run), imports=tuple(imports or ()), template=template, allow_mismatch=allow_mismatch)
    talk = chat_with(opened, max_tokens=max_tokens, sampling=sampling, seed=seed, system=system)
    terminal = sys.stdin.isatty()
    _note(f"{opened.folder}, step {opened.step}" + (f"; {RESET}, {QUIT}" if terminal else ""))
    converse(talk, read=_typed if terminal else _piped(), write=lambda text: typer.echo(text, nl=False), note=_note, forgiving=terminal)


def _note(text: str) -> None:
    typer.secho(text, dim=True, err=True)


def _typed() -> str | None:
    """A line from the keyboard, with the editing and history that `readline` gives."""
    import readline  # noqa: F401 - `input` uses it where it is loaded

    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        return None


def _piped() -> Callable[[], str | None]:
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # the chat says which message is not text
    lines = iter(sys.stdin)
    return lambda: next((line.rstrip("\r\n") for line in lines), None)
