"""`telamon plan`: check a run on a machine that need not be there."""

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from telamon.cli.arguments import DEFAULT_RUN, Imports, RunArguments, split_run


def plan(
    on: Annotated[
        str,
        typer.Option(
            "--on",
            metavar="MACHINE",
            help="v6e:4x4, 2*v5p:4x4x4, v5p-512, h100:8x4, ... (see above); `here`: this one.",
            show_default=False,
        ),
    ],
    arguments: RunArguments = None,
    only: Annotated[Literal["train", "decode"] | None, typer.Option(help="Compile this program alone.", show_default=False)] = None,
    decode: Annotated[
        str | None,
        typer.Option(
            metavar="ROWSxLENGTH", help="The batch to decode, such as 32x8192; none: train.batch_size rows as long as train.seq_len."
        ),
    ] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Arithmetic alone, in a second; compile nothing.")] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Stop the compiler once memory is assigned: everything but machine code, in a fraction of the time."),
    ] = False,
    cost: Annotated[
        float | None, typer.Option(metavar="DOLLARS", help="Price of a chip for an hour: say what the run costs.", show_default=False)
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the compiled training step, for `telamon train --compiled FILE`.", show_default=False),
    ] = None,
    search: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Look for the fastest layout that fits (mesh, train.remat, train.accumulate, offloading), and write the run with it.",
            show_default=False,
        ),
    ] = None,
    free_batch: Annotated[bool, typer.Option("--free-batch", help="With --search: choose train.batch_size too.")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time that one compilation may take.")] = 900.0,
    host_memory: Annotated[float, typer.Option(metavar="GIB", help="Most of this host's memory that one compilation may take.")] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    imports: Imports = None,
) -> None:
    """Say what a run would need and do on a machine, without the machine.

    Compiles the run's own training step, and a decoding step, with the compiler of that machine's chips, on this host's CPU.
    Says what a device holds and what part of the run each byte belongs to, what moves between devices, and what a step should take.

    ```
    telamon plan my.yml --on v5p:4x4x4                 # does it fit?
    telamon plan my.yml --on v6e:4x4 --quick           # TPU: in seconds
    telamon plan my.yml --on v6e:4x4 --estimate        # with no compiler
    telamon plan my.yml --on v6e-256 --cost 2.7        # and its price
    telamon plan my.yml --on v6e:4x4 --search best.yml # the fastest layout?
    telamon plan my.yml train.remat=dots --on h100:8x4
    ```

    A machine is a slice of TPUs (v5e:4x4, v5p:4x4x4, v6e-256 in the cloud's words), several (2*v5p:4x4x4, with mesh.cross_slice.data=2),
    GPUs in nodes (h100:8 is one of eight, h100:8x4 four of these), or `here`. Chips: v4, v5e, v5p, v6e, tpu7x, a100, a100-40gb, h100, h200, b200.

    The compilers are packages: pip install 'telamon[plan-tpu]', 'telamon[plan-gpu]'. Without one the answer is an estimate, and says so.
    A search compiles the best three, as with --quick (none with --estimate).

    The exit code is 0 where everything fits, 2 where something does not or cannot be laid out so, 7 where the compiler failed or was stopped.
    """
    import json

    from telamon.config.load import load_run
    from telamon.errors import ConfigError
    from telamon.plan.found import look_for_layouts
    from telamon.plan.plan import Decoding, Request, make_plan
    from telamon.plan.report import show
    from telamon.plan.topology import parse_topology
    from telamon.watch.log import make_console

    topology = None if on == "here" else parse_topology(on)
    if cost is not None and not 0 < cost < math.inf:
        raise ConfigError(f"--cost {cost:g} is no price; give dollars for a chip and hour, such as --cost 2.7")
    if cost is not None and only == "decode":
        raise ConfigError("--cost is what the training costs, and --only decode leaves that out; leave one of them out")
    if topology is None and estimate:
        raise ConfigError("--on here compiles for the devices that are here; --estimate needs a machine by name")
    run, overrides = split_run(arguments, default=DEFAULT_RUN)
    loaded = load_run(run, overrides, imports=imports or ())
    for option, value in (("--timeout", timeout), ("--host-memory", host_memory)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{option} {value:g} is no bound for the compiler; give a number above 0")
    if save is not None and (estimate or only == "decode"):
        other = "--estimate compiles nothing" if estimate else "--only decode compiles another program"
        raise ConfigError(f"--save keeps the compiled training step, and {other}; leave one of them out")
    if quick and save is not None:
        raise ConfigError("--quick generates no code, so there is nothing that --save could keep; leave one of them out")
    if quick and estimate:
        raise ConfigError("--estimate compiles nothing, --quick most of it; leave one of them out")
    if free_batch and search is None:
        raise ConfigError("--free-batch says what a search may choose; give --search FILE with it")
    request = Request(
        programs=("train", "decode") if only is None else (only,),
        compile=not estimate,
        decoding=None if decode is None else Decoding.parse(decode),
        quick=quick,
        timeout=timeout,
        host_memory=host_memory,
        save=save,
        chip_hour=cost,
    )
    if search is not None:
        layouts = look_for_layouts(loaded, topology, request, file=search, free_batch=free_batch)
        if as_json:
            typer.echo(json.dumps(layouts.as_json(), indent=2))
        else:
            layouts.show(make_console())
        return
    made = make_plan(loaded.config, topology, request)
    if as_json:
        typer.echo(json.dumps(made.as_json(), indent=2))
    else:
        show(made, make_console())
    if not made.fits:
        raise typer.Exit(2)
