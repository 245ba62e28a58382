"""The `telamon` command.

Every verb imports what it needs inside its function, so that help and refusals come at once.
"""

import atexit
import gc
import sys
import traceback
from typing import NoReturn

import typer

from telamon.cli import chat, config, data, doctor, export, generate, import_, models, perplexity, plan, records, train, verify
from telamon.cli.platforms import spare_absent_accelerators
from telamon.errors import TelamonError

app = typer.Typer(
    name="telamon",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.train)
app.command("plan")(plan.plan)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("import")(import_.import_)
app.command("export")(export.export)
app.command("perplexity")(perplexity.perplexity)
app.command("doctor")(doctor.doctor)
app.add_typer(models.app, name="models")
app.add_typer(config.app, name="config")
app.add_typer(data.app, name="data")
app.command("verify")(verify.verify)
app.add_typer(records.app, name="records")


@app.callback()
def _root() -> None:
    """Train large language models on JAX, and write with them, from a laptop to a cluster.

    A run is a YAML file or a preset, and any value of it can be set on the command line as `key=value`:

    ```
    telamon train                                   # the default run
    telamon train tiny train.steps=20               # a preset, changed
    telamon config explain optimizer.learning_rate  # what a value means
    ```
    """


def main() -> None:
    """Run the command line; a TelamonError becomes one short message and its exit code, anything else is a bug and shows."""
    _collect_garbage_less()
    spare_absent_accelerators()
    try:
        app()
    except TelamonError as error:
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True, soft_wrap=True).print(Text(str(error), style="red"))
        _leave(error.exit_code, str(error))
    except Exception as error:
        traceback.print_exc()
        _leave(1, repr(error))


def _collect_garbage_less() -> None:
    """Of the half million objects that JAX and its kin make as they are imported, none is garbage.

    Python would look through them time and again, and once more at the exit: half a second for a command, a quarter of a short one.
    """
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)


def _leave(code: int, message: str) -> NoReturn:
    """Exit; a process of several tells the others (JAX need not have been imported)."""
    peers = sys.modules.get("telamon.parallel.peers")
    if peers is not None and peers.joined():
        peers.leave(code, message)
    sys.exit(code)
