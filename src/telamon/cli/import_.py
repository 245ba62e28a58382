"""`telamon import`: a model of the Hugging Face Hub, a folder or a GGUF file becomes a run."""

from pathlib import Path
from typing import Annotated

import typer

from telamon.cli.arguments import Imports


def import_(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A folder with config.json and safetensors, a .gguf file, or a repository ORGANISATION/NAME.",
            show_default=False,
        ),
    ],
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="The run directory to make; none: runs/ and the model's name.", show_default=False),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a repository; none: the main branch.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run if it exists.")] = False,
    imports: Imports = None,
) -> None:
    """Make a run of a model that was trained elsewhere.

    Weights are copied tensor by tensor in the type they have, so that a large model needs little memory. The run is whole or not there.
    Repositories come through `huggingface_hub`: `HF_TOKEN`, `HF_ENDPOINT` and `HF_HOME` hold.

    ```
    telamon import HuggingFaceTB/SmolLM2-135M-Instruct
    telamon import Qwen/Qwen3-0.6B runs/qwen --revision main
    telamon import ~/models/llama-3.2-1b  # a folder; makes runs/llama-3.2-1b
    telamon import model-q8_0.gguf runs/small
    telamon generate --run qwen "The capital of France is"
    ```
    """
    from telamon.hub.importing import import_from, next_command
    from telamon.watch.log import line, make_console

    console = make_console()
    made = import_from(src, run, console=console, revision=revision, overwrite=overwrite, imports=tuple(imports or ()))
    line(console, f"{made} is ready: {next_command(made)}")
