"""`telamon perplexity`: what a text costs a run's model."""

from pathlib import Path
from typing import Annotated

import typer

from telamon.cli.arguments import AllowMismatch, Imports


def perplexity(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or its name below runs/.", show_default=False)],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A text file in UTF-8, taken as one document.", show_default=False)],
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a window; none: the run's row length.", show_default=False)] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens from one window to the next; below --context, windows overlap and each token is predicted from more. None: --context.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Windows at a time; none: about 8,192 tokens' worth.", show_default=False)
    ] = None,
    end: Annotated[
        bool, typer.Option("--end", help="Score the token that ends a document too, as the evaluation during training does.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    allow_mismatch: AllowMismatch = False,
    imports: Imports = None,
) -> None:
    """Measure how well a model predicts a text: loss, perplexity, bits per byte.

    Every token is scored once, predicted from those before it in its window. Losses are added and divided as in training's evaluation.

    ```
    telamon perplexity first README.md
    telamon perplexity runs/small book.txt --context 1024 --stride 512
    telamon perplexity small book.txt --json > book.json
    ```
    """
    from dataclasses import asdict
    from json import dumps

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from telamon.evaluate.perplexity import perplexity as measure
    from telamon.evaluate.perplexity import read_text_file
    from telamon.infer.run import find_run, open_run

    text = read_text_file(file)
    opened = open_run(find_run(run), imports=tuple(imports or ()), allow_mismatch=allow_mismatch)
    columns = (TextColumn("windows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("windows")
        found = measure(
            opened,
            text,
            context=context,
            stride=stride,
            batch_size=batch_size,
            end=end,
            on_windows=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if json:
        typer.echo(dumps({"run": opened.folder, "step": opened.step, "file": str(file), **asdict(found)}))
        return
    typer.secho(f"{opened.folder}, step {opened.step}: {file}", dim=True, err=True)
    bits = "no text" if found.bits_per_byte is None else f"{found.bits_per_byte:.4f} bits per byte"
    windows = "1 window" if found.windows == 1 else f"{found.windows:,} windows of {found.context:,} tokens, {found.stride:,} apart"
    typer.echo(f"perplexity {found.perplexity:.4f}, {found.loss:.4f} nats per token, {bits}")
    typer.echo(f"{found.tokens:,} tokens in {windows}; {found.seconds:.1f} s, compilation included")
