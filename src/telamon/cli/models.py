"""`telamon models`: the model presets."""

from typing import Annotated

import typer

app = typer.Typer(help="List and show the model presets.", no_args_is_help=True, rich_markup_mode="markdown")


@app.command("list")
def list_models() -> None:
    """List the model presets; choose one in a run with `model.preset=NAME`.

    ```
    telamon models list
    telamon train model.preset=tiny-qwen3
    ```
    """
    from rich.console import Console
    from rich.table import Table

    from telamon.config import presets
    from telamon.config.load import load_run
    from telamon.models.weights import Model

    table = Table("preset", "family", "layers", "width", "vocabulary", "parameters")
    for column in table.columns[2:]:
        column.justify = "right"
    for name in presets.names("models"):
        model = load_run(overrides=[f"model.preset={name}"]).config.model
        sizes = (model.n_layers, model.d_model, model.vocab_size, Model(model.spec()).parameter_count)
        table.add_row(name, model.family, *(f"{size:,}" for size in sizes))
    Console().print(table)


@app.command()
def show(name: Annotated[str, typer.Argument(help="A model preset.", show_default=False)]) -> None:
    """Print a model preset with every size filled in, and its number of parameters.

    ```
    telamon models show qwen3-8b
    ```
    """
    from telamon.config.load import load_run, plain
    from telamon.config.yamlio import dump
    from telamon.models.weights import Model

    model = load_run(overrides=[f"model.preset={name}"]).config.model
    typer.echo(f"# {Model(model.spec()).parameter_count:,} parameters")
    typer.echo(dump(plain(model)), nl=False)
