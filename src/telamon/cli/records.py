"""`telamon records`: the support table."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="What was reproduced, from the records.", no_args_is_help=True, rich_markup_mode="markdown")

Folder = Annotated[Path, typer.Option(help="Folder of the records.")]


@app.command()
def table(
    folder: Folder = Path("docs/records"), page: Annotated[Path, typer.Option(help="Page to write.")] = Path("docs/support.md")
) -> None:
    """Write the support table from the records, and from nothing else.

    ```
    telamon verify tiny-llama
    telamon records table
    ```
    """
    from telamon.errors import ConfigError
    from telamon.records.record import read_records
    from telamon.records.table import render
    from telamon.watch.files import write_text

    records = read_records(folder)
    if not records:
        raise ConfigError(f"no records in {folder}; make some with `telamon verify PRESET`")
    write_text(page, render(records), advice="choose another --page")
    typer.echo(f"{page}: {len(records)} record{'' if len(records) == 1 else 's'}")
