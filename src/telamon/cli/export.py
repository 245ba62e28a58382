"""`telamon export`: a run becomes a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from telamon.cli.arguments import AllowMismatch, Imports


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or its name below runs/.", show_default=False)],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make.", show_default=False)],
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16; none: as the source of an import had them, float32 of a trained run.", show_default=False),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of tensors in a file, such as 5GB or 500MB.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is an earlier export.")] = False,
    allow_mismatch: AllowMismatch = False,
    imports: Imports = None,
) -> None:
    """Write a run's newest whole checkpoint as a folder that transformers and vLLM load as it is.

    It holds safetensors, config.json, generation_config.json and the tokenizer. The folder is whole or not there.

    ```
    telamon export first exported/first
    telamon export runs/qwen exported/qwen --dtype bfloat16 --max-shard-size 2GB
    ```
    """
    from telamon.errors import ConfigError
    from telamon.hub.exporting import DTYPES, export_run, parse_size
    from telamon.infer.run import find_run
    from telamon.watch.log import line, make_console

    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is not possible; choose {' or '.join(DTYPES)}")
    console = make_console()
    export_run(
        find_run(run),
        dst,
        console=console,
        dtype=dtype,
        shard_bytes=parse_size(max_shard_size),
        overwrite=overwrite,
        allow_mismatch=allow_mismatch,
        imports=tuple(imports or ()),
    )
    served = f", or vllm serve {dst}" if (dst / "tokenizer.json").is_file() else ""  # which asks for a tokenizer
    line(console, f'{dst} is ready: AutoModelForCausalLM.from_pretrained("{dst}") in transformers{served}')
