"""`telamon train`: run a training job, new or resumed."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from telamon.cli.arguments import DEFAULT_RUN, AllowMismatch, Imports, RunArguments, split_run
from telamon.errors import ConfigError

_RESUME = "resume="


def train(
    arguments: RunArguments = None,
    imports: Imports = None,
    allow_mismatch: AllowMismatch = False,
    compiled: Annotated[
        Path | None,
        typer.Option("--compiled", help="A file of `telamon plan --save`: train with the step compiled there. It is run like code."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the run against this machine's devices and say what it would be; train and write nothing."),
    ] = False,
) -> None:
    """Train a model, or go on with a run that was stopped.

    ```
    telamon train                                # the default run
    telamon train tiny                           # seconds: does it all work?
    telamon train my.yml train.steps=200 optimizer.learning_rate=3e-4
    telamon train my.yml --import my_blocks      # with a family of your own
    telamon train my.yml mesh.tensor=2 --dry-run # would it run here?
    telamon train resume=runs/first              # from its newest checkpoint
    ```

    `telamon config explain KEY` says what a value means.
    """
    from telamon.config.load import load_run
    from telamon.config.resume import load_resumed

    resume, rest = _take_resume(arguments or [])
    run, overrides = split_run(rest, default=resume or DEFAULT_RUN)
    if resume is None:
        config = load_run(run, overrides, imports=imports or ()).config
    elif run == resume:
        config = load_resumed(resume, overrides, imports=imports or ()).config
    else:
        raise ConfigError(f"{_RESUME}{resume} goes on with that run's own config; leave {run} out, or train it as a new run")
    programs = None
    if compiled is not None:
        from telamon.plan.saved import load_programs

        programs = partial(load_programs, path=compiled)
    if dry_run:
        from dataclasses import replace

        from telamon.train.job import make_job
        from telamon.train.start import describe_job
        from telamon.watch.log import facts, make_console

        job = make_job(config)
        facts(make_console(), describe_job(replace(job, ready=programs(job)) if programs else job))
    else:
        from telamon.infer.samples import write_samples
        from telamon.train.loop import Finished, train

        def samples(end: Finished) -> None:
            model, weights, mesh = end.job.model, end.state.weights, end.job.mesh
            write_samples(
                config, model=model, weights=weights, mesh=mesh, tokenizer=end.loader.tokenizer, run_dir=end.run.path, show=end.print
            )

        train(config, resume=resume, allow_mismatch=allow_mismatch, compiled=programs, at_end=[samples])


def _take_resume(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The run to resume, and the arguments without it: it says which config to load, and is not a value in one."""
    named = [argument.removeprefix(_RESUME) for argument in arguments if argument.startswith(_RESUME)]
    if len(named) > 1 or "" in named:
        raise ConfigError(f"write {_RESUME} once, with a run directory such as {_RESUME}runs/first")
    return (named or [None])[0], [argument for argument in arguments if not argument.startswith(_RESUME)]
