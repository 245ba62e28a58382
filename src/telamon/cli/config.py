"""`telamon config`: look at a run's settings without running it."""

from pathlib import Path
from typing import Annotated

import typer

from telamon.cli.arguments import Imports, RunArguments, split_run

app = typer.Typer(help="Show, explain and compare the settings of a run.", no_args_is_help=True, rich_markup_mode="markdown")


@app.command()
def show(
    arguments: RunArguments = None,
    origins: Annotated[bool, typer.Option("--origins", help="Say after each value where it came from.")] = False,
    imports: Imports = None,
) -> None:
    """Print a run's config with every value filled in, as YAML that is itself a run file.

    ```
    telamon config show
    telamon config show tiny train.steps=20 --origins
    telamon config show runs/first > again.yml
    ```
    """
    from telamon.config.explain import annotated
    from telamon.config.load import load_run, to_yaml

    run, overrides = split_run(arguments)
    loaded = load_run(run, overrides, imports=imports or ())
    typer.echo(annotated(loaded) if origins else to_yaml(loaded.config), nl=False)


@app.command()
def explain(
    key: Annotated[str, typer.Argument(help="A dotted key, or a section.", show_default=False)],
    arguments: RunArguments = None,
    imports: Imports = None,
) -> None:
    """Say what a setting means, what it may be, its value, and where that came from.

    ```
    telamon config explain optimizer.learning_rate
    telamon config explain model.d_model tiny model.d_model=64
    telamon config explain train
    ```
    """
    from telamon.config.explain import explain_key
    from telamon.config.load import load_run

    run, overrides = split_run(arguments)
    typer.echo(explain_key(load_run(run, overrides, imports=imports or ()), key))


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A run file, run directory or run preset.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    imports: Imports = None,
) -> None:
    """Print the settings in which two runs differ.

    ```
    telamon config diff tiny default
    telamon config diff runs/first runs/second
    ```
    """
    from rich.console import Console
    from rich.table import Table

    from telamon.config.explain import difference
    from telamon.config.load import load_run

    rows = difference(*(load_run(run, imports=imports or ()).config for run in (first, second)))
    if not rows:
        typer.echo("no difference")
        return
    table = Table("key", first, second)
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


@app.command()
def schema(imports: Imports = None) -> None:
    """Print the JSON schema of run files, for an editor that completes and checks them.

    ```
    telamon config schema > telamon.schema.json
    ```
    """
    import json

    from telamon.config.explain import json_schema

    typer.echo(json.dumps(json_schema(imports or ()), indent=2))


@app.command("from-maxtext")
def from_maxtext(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="[FILE] [KEY=VALUE]", help="A YAML file of MaxText's, then its own words on top.", show_default=False),
    ],
    devices: Annotated[int | None, typer.Option(min=1, help="Devices of the run, which a batch size per device is for.")] = None,
    output: Annotated[Path | None, typer.Option(help="File to write; the terminal if left out.")] = None,
) -> None:
    """Turn settings of MaxText's into a run file, and say what could not be carried, and why.

    ```
    telamon config from-maxtext pretrain.yml steps=1000
    telamon config from-maxtext model_name=llama3.1-8b per_device_batch_size=4 --devices 8 --output run.yml
    telamon train run.yml
    ```

    A file need not name everything: MaxText's defaults (release 0.2.5) hold for the rest. A `base_config` is read where it is there.
    """
    from rich.console import Console
    from rich.text import Text

    from telamon.config.maxtext.convert import convert
    from telamon.watch.files import write_text

    converted = convert(arguments, devices=devices)
    if output is None:
        typer.echo(converted.text(), nl=False)
    else:
        write_text(output, converted.text(), advice="choose another --output")
    notes = Console(stderr=True, soft_wrap=True)
    for note in converted.notes:
        notes.print(Text(str(note)))
    if output is not None:
        notes.print(Text(f"{output} is written", style="dim"))
