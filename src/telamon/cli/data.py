"""`telamon data`: look at the data of a run."""

from typing import Annotated

import typer

from telamon.cli.arguments import Imports, RunArguments, split_run

app = typer.Typer(help="Look at the data of a run.", no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def _data() -> None:
    """Look at the data of a run."""


@app.command()
def preview(
    arguments: RunArguments = None,
    step: Annotated[int, typer.Option(min=0, help="Step whose batch is shown, from 0.")] = 0,
    row: Annotated[int, typer.Option(min=0, help="Row of the batch, from 0.")] = 0,
    imports: Imports = None,
) -> None:
    """Show what a run trains on: files, packing, and one row of a batch, token by token.

    ```
    telamon data preview
    telamon data preview train.seq_len=64 data.packing=best_fit --step 100 --row 3
    ```
    """
    from rich.console import Console

    from telamon.config.load import load_run
    from telamon.data.loader import open_loader
    from telamon.data.preview import batch_table, report_table, segment_table
    from telamon.errors import ConfigError

    run, overrides = split_run(arguments)
    config = load_run(run, overrides, imports=imports or ()).config
    size = config.train.batch_size_at(step)
    if row >= size:
        raise ConfigError(f"--row {row}: the batch of step {step} has {size} rows; allowed: 0 to {size - 1}")
    loader = open_loader(config)
    batch = loader.batch_at(step)
    console = Console()
    report = loader.report()
    console.print(report_table(report))
    console.print(f"held-out text: {report['held_out_bytes']:,} bytes; data hash {report['data_hash'][:16]}")
    console.print(f"step {step}, row {row} of {size}")
    console.print(batch_table(batch, row=row, tokenizer=loader.tokenizer))
    console.print(segment_table(batch, row=row))
