"""What must hold between sections of a config: lengths, rows and sizes against the mesh.

Everything that can be known from the config alone is checked whenever a RunConfig is made; what depends on the number of
devices (a mesh axis of -1) waits for :func:`check_devices`.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from telamon.errors import ConfigError

if TYPE_CHECKING:
    from telamon.config.schema import AxisSizes, RunConfig

BATCH_AXES = ("data", "fsdp", "expert")
"""Axes that split the rows of a batch."""

_SHARED = " x ".join(f"mesh.{axis}" for axis in BATCH_AXES)

NOT_YET = {"stage": "pipeline parallelism", "context": "context parallelism"}
"""Axes of the design whose machinery is not there yet. They can be written down and are checked, but not run."""


def check_run(config: RunConfig) -> None:
    """Raise ConfigError for a combination that cannot run on any number of devices."""
    steps, warmup = config.train.steps, config.warmup_steps
    if warmup > steps:
        raise ConfigError(f"optimizer.schedule.warmup_steps={warmup} is longer than the run, train.steps={steps}; allowed: 0 to {steps}")
    limit = config.model.position_limit
    if limit is not None and config.train.seq_len > limit:
        raise ConfigError(
            f"train.seq_len={config.train.seq_len} is longer than the model's table of positions ({limit}); allowed: up to {limit}"
        )
    _check_sizes(config, config.mesh.totals())


def check_devices(config: RunConfig, device_count: int) -> AxisSizes:
    """The in-slice size of each mesh axis on `device_count` devices (over all processes), the -1 filled in.

    Raises ConfigError where the mesh doesn't fit the devices, or the batch or the model doesn't divide over the mesh.
    """
    sizes = config.mesh.filled(device_count)
    _check_sizes(config, {axis: getattr(sizes, axis) * times for axis, times in config.mesh.cross_slice.sizes().items()})
    return sizes


def _check_sizes(config: RunConfig, mesh: dict[str, int]) -> None:
    """`mesh` gives each axis's size over all slices, -1 where it isn't known yet."""
    divided = config.model.divided()
    if mesh["expert"] > 1 and "expert" not in divided:
        raise ConfigError(
            f"mesh.expert={mesh['expert']} splits the experts of a mixture, and model.family={config.model.family} has none; "
            f"set mesh.expert=1, and mesh.fsdp={mesh['expert']} times what it is (a family of your own names its experts in divided())"
        )
    for axis, fields in divided.items():
        for field, size in fields.items():
            _divides(f"model.{field}", size, axis, mesh[axis])
    _divides("train.seq_len", config.train.seq_len, "context", mesh["context"])
    for axis, machinery in NOT_YET.items():
        if mesh[axis] > 1:
            raise ConfigError(f"mesh.{axis}={mesh[axis]} is not available in this version ({machinery}); set mesh.{axis}=1")
    _check_rows(config, prod(max(mesh[axis], 1) for axis in BATCH_AXES))


def _divides(field: str, size: int, axis: str, parts: int) -> None:
    if parts < 1 or size % parts == 0:
        return
    divisors = [str(part) for part in range(1, min(size, 64) + 1) if size % part == 0]
    raise ConfigError(f"{field}={size} cannot be split evenly over mesh.{axis}={parts}; allowed for mesh.{axis}: {', '.join(divisors)}")


def _check_rows(config: RunConfig, parts: int) -> None:
    train = config.train
    for size in (train.batch_size, *(stage.batch_size for stage in train.batch_ramp)):
        rows = size // train.accumulate
        if rows % parts:
            raise ConfigError(
                f"train.batch_size={size} with train.accumulate={train.accumulate} gives {rows} rows a microbatch, which {parts} devices "
                f"({_SHARED}) cannot share evenly; make batch_size a multiple of {parts * train.accumulate}"
            )
    rows = config.eval.batch_size
    if rows is not None and rows % parts:
        raise ConfigError(f"eval.batch_size={rows} cannot be shared evenly by {parts} devices ({_SHARED}); use a multiple of {parts}")
