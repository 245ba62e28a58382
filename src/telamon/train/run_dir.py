"""The directory of a run: made once, and found again to resume."""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from telamon.checkpoint.store import CheckpointStore
from telamon.config.load import to_yaml
from telamon.config.schema import RunConfig
from telamon.errors import ConfigError
from telamon.infer.run import CHECKPOINTS, CONFIG, HF_RECORD
from telamon.watch.environment import ENVIRONMENT
from telamon.watch.files import is_url, join, read_text, write_text


@dataclass(frozen=True)
class RunDirectory:
    """A run's folder or URL."""

    path: str

    def file(self, *parts: str) -> str:
        """A path below the run's."""
        return join(self.path, *parts)

    @property
    def name(self) -> str:
        """Last part of the path."""
        return os.path.basename(self.path.rstrip("/"))

    def store(self, config: RunConfig, *, readonly: bool = False) -> CheckpointStore:
        """The run's checkpoints."""
        settings = config.checkpoint
        return CheckpointStore(
            self.file(CHECKPOINTS),
            keep=settings.keep,
            keep_every=settings.keep_every,
            asynchronous=settings.asynchronous,
            readonly=readonly,
        )


def create_run(config: RunConfig) -> RunDirectory:
    """Make the directory of a new run and save its resolved config there.

    Raises:
        ConfigError: the directory cannot be written, or holds a run already.
    """
    name = config.run.name or f"{config.model.preset or config.model.family}-{_agreed_time()}"
    run = RunDirectory(join(config.run.root, name))
    problem: ConfigError | None = None
    try:
        if jax.process_index() == 0 and read_text(run.file(CONFIG)) is not None:
            raise ConfigError(f"{run.path} holds a run already; continue it with resume={run.path}, or choose another run.name")
        save_config(run, config)
    except ConfigError as error:
        problem = error
    if _first_says(problem is not None) and problem is None:
        problem = ConfigError(f"the first process could not make {run.path}; its message says why")
    if problem is not None:
        raise problem
    return run


def forget_run(run: RunDirectory) -> None:
    """Take back a new run whose data were refused, so that the mended command can use its name and no empty run stays behind."""
    if jax.process_index() == 0 and not is_url(run.path):
        Path(run.file(CONFIG)).unlink(missing_ok=True)
        Path(run.file(ENVIRONMENT)).unlink(missing_ok=True)
        for folder in (run.file(CHECKPOINTS), run.path):
            with contextlib.suppress(OSError):  # not empty: something of somebody else's is there
                os.rmdir(folder)


def open_run(path: str) -> RunDirectory:
    """The directory of a run to continue.

    Raises:
        ConfigError: there is no run, or it is an imported model.
    """
    run = RunDirectory(path.rstrip("/") if is_url(path) else str(Path(path)))
    if read_text(run.file(CONFIG)) is None:
        raise ConfigError(f"resume={path}: no run there (no {CONFIG})")
    if read_text(run.file(HF_RECORD)) is not None:  # its step 0 would look like a run that has not saved yet, and be drawn anew
        raise ConfigError(f"resume={path}: an imported model has no training to go on with; begin one with train.init_from={path}")
    return run


def save_config(run: RunDirectory, config: RunConfig) -> None:
    """Save the resolved config. In a resumed run only once its state fits, so that a refused change does not stay."""
    if jax.process_index() == 0:
        write_text(run.file(CONFIG), to_yaml(config))


def _agreed_time() -> str:
    """The time as text, the first process's on every process."""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(_first_says(int(time.time()))))


def _first_says(value: int) -> int:
    """The first process's value, on every process: none may go on alone and wait for the others for ever."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.uint32(value)))
