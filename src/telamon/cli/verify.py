"""`telamon verify`: run checks on a preset and record what came out."""

from pathlib import Path
from typing import Annotated

import typer


def verify(
    preset: Annotated[str, typer.Argument(help="A model preset (see `telamon models list`).", show_default=False)],
    checks: Annotated[
        str | None,
        typer.Option(help="Names of checks, with commas between; if left out, all that apply and need no compiler for other machines."),
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Shrink the sizes, so that a large model's blocks run on a laptop.")] = False,
    folder: Annotated[Path, typer.Option(help="Where records are written.")] = Path("docs/records"),
) -> None:
    """Check that a model works here, and write a record of each check.

    ```
    telamon verify tiny-llama
    telamon verify qwen3-8b --tiny
    telamon verify qwen3-8b --checks parameter-count
    telamon verify qwen3-8b --checks fits-on-tpu,fits-on-gpu  # a minute each
    ```

    Exit code 4 when a figure exceeds its threshold. `telamon records table` turns all records into `docs/support.md`.
    """
    from telamon.records.verify import verify as run

    run(preset, names=checks.split(",") if checks else None, tiny=tiny, folder=folder, show=typer.echo)
