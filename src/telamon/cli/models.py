"""`telamon models`: the model presets."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="List, show and compare the model presets.", no_args_is_help=True, rich_markup_mode="markdown")

Records = Annotated[Path, typer.Option(help="Folder of the records of checks (see `telamon verify`).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_models(
    part: Annotated[str, typer.Argument(help="Show the presets with this in their name or family.", show_default=False)] = "",
) -> None:
    """List the model presets by family and size; choose one in a run with `model.preset=NAME`.

    Of a mixture of experts, `active` says how many of its parameters work on a token.

    ```
    telamon models list
    telamon models list gemma3
    telamon train model.preset=tiny-qwen3
    ```
    """
    from itertools import groupby

    from rich.console import Console
    from rich.table import Table

    from telamon.config.presets import in_billions, model_lines

    # A family stands above its presets, so that a line with a long name is no wider than 80 columns.
    table = Table("preset", "layers", "width", "vocabulary", "parameters", "active")
    for column in table.columns[1:]:
        column.justify = "right"
    for family, lines in groupby(model_lines(part), key=lambda line: line.family):
        table.add_row(f"[bold]{family}[/]")
        for line in lines:
            active = "" if line.active == line.parameters else in_billions(line.active)
            sizes = (f"{size:,}" for size in (line.n_layers, line.d_model, line.vocab_size))
            table.add_row(f"  {line.name}", *sizes, in_billions(line.parameters), active)
        table.add_section()
    Console().print(table)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A model preset.", show_default=False)],
    records: Records = Path("docs/records"),
    as_json: AsJson = False,
) -> None:
    """Print what a model preset is: parameters, work and memory in figures, what was checked of it, and every size.

    ```
    telamon models show qwen3-8b
    telamon models show gemma3-27b --json
    ```

    Figures are those of the architecture; nothing is allocated. Records of checks are read from a checkout's `docs/records`.
    """
    import json

    from telamon.records.card import make_card
    from telamon.records.card_text import render

    card = make_card(name, records=records)
    typer.echo(json.dumps(card.as_json(), indent=2) if as_json else render(card), nl=as_json)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A model preset.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Print in what two model presets differ: sizes, and the figures that follow from them.

    ```
    telamon models diff llama3-8b llama3.1-8b
    telamon models diff qwen3-4b gemma3-4b
    ```
    """
    import json

    from telamon.records.comparison import compare, make_table

    comparison = compare(first, second)
    if as_json:
        typer.echo(json.dumps(comparison.as_json(), indent=2))
    elif not comparison.differing:
        typer.echo("no difference")
    else:
        from rich.console import Console

        Console().print(make_table(comparison))
