"""Every way to lay a run out on a machine: meshes, recomputation, microbatches, offloading."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, get_args

from telamon.config.checks import BATCH_AXES, NOT_YET, check_devices
from telamon.config.schema import AXES, AxisSizes, RunConfig, TrainConfig
from telamon.errors import ConfigError
from telamon.models.weights import Model, sharded_shapes
from telamon.parallel.rules import check_sharded
from telamon.plan.memory import abstract_mesh
from telamon.plan.topology import Topology

_WITHIN = tuple(axis for axis in AXES if axis not in NOT_YET)
_ACROSS = ("data", "fsdp")
"""Axes that are repeated across slices, or nodes: what these send hides behind products, or is sent once a step."""
_ROWS = " x ".join(BATCH_AXES)
_REASONS = {
    "train.batch_size": f"the batch does not divide over {_ROWS}",
    "eval.batch_size": f"evaluation's batch does not divide over {_ROWS}",
}
_MOST_ROWS = 64
"""Rows a device of a microbatch at most, where the batch is free."""


@dataclass
class Layouts:
    """The layouts of a run that divide, and a count of those that do not."""

    config: RunConfig
    topology: Topology
    free_batch: bool
    dropped: Counter[str] = field(default_factory=Counter)
    """How many were left out, for each reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """For each reason, the message for the first of these."""

    def __iter__(self) -> Iterator[RunConfig]:
        ways = list(itertools.product(_remats(), (False, True)))
        model = Model(self.config.model.spec())
        for within, across in self._meshes():
            mesh = self.config.mesh.model_copy(update={**within.sizes(), "cross_slice": across})
            # Where nothing divides the batch, the run's own is refused, with a message.
            batches = list(self._batches(mesh.totals())) or [{}]
            trains = [self.config.train.model_copy(update=batch) for batch in batches]
            laid = self.config.model_copy(update={"mesh": mesh, "train": trains[0]})
            reason = self._refused(laid, model)
            if reason is not None:
                self.dropped[reason] += len(ways) * len(batches)
                continue
            for (remat, offload), train in itertools.product(ways, trains):
                optimizer = laid.optimizer.model_copy(update={"offload": offload})
                yield laid.model_copy(update={"train": train.model_copy(update={"remat": remat}), "optimizer": optimizer})

    def _meshes(self) -> Iterator[tuple[AxisSizes, AxisSizes]]:
        idle = {"expert"} - self.config.model.divided().keys()
        for within in _splits(self.topology.devices_per_slice, tuple(axis for axis in _WITHIN if axis not in idle)):
            for across in _splits(self.topology.slices, _ACROSS):
                yield AxisSizes(**within), AxisSizes(**across)

    def _batches(self, totals: dict[str, int]) -> Iterator[dict[str, int]]:
        """Batch size and microbatches."""
        parts, how = prod(totals[axis] for axis in BATCH_AXES), self.config.train
        if self.free_batch:
            yield from ({"batch_size": rows * parts, "accumulate": 1} for rows in _powers(_MOST_ROWS))
            return
        sizes = {how.batch_size, *(stage.batch_size for stage in how.batch_ramp)}
        for accumulate in range(1, min(sizes) // parts + 1):
            if all(size % (parts * accumulate) == 0 for size in sizes):
                yield {"batch_size": how.batch_size, "accumulate": accumulate}

    def _refused(self, laid: RunConfig, model: Model) -> str | None:
        """Why a mesh cannot run, whatever is recomputed."""
        mesh = abstract_mesh(laid.mesh.totals())
        try:
            check_devices(laid, self.topology.device_count)
            check_sharded(mesh, shapes=sharded_shapes(model, mesh), limit=laid.mesh.replicated_limit)
        except ConfigError as error:
            reason = _REASONS.get(str(error).partition("=")[0], "the model does not divide over the mesh")
            self.examples.setdefault(reason, str(error))
            return reason
        return None


def chosen(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The values of a config that a layout consists of, as its sections. Axes and offloading are left out where they do nothing."""
    mesh, how = config.mesh, config.train
    sizes: dict[str, Any] = {axis: getattr(mesh, axis) for axis in _WITHIN if axis != "expert" or mesh.expert > 1}
    across = {axis: size for axis, size in mesh.cross_slice.sizes().items() if size > 1}
    sections = {
        "mesh": sizes | ({"cross_slice": across} if across else {}),
        "train": {"batch_size": how.batch_size, "accumulate": how.accumulate, "remat": how.remat},
    }
    return sections | ({"optimizer": {"offload": True}} if config.optimizer.offload else {})


def in_words(config: RunConfig) -> str:
    """The same as overrides on a command line, without what is 1."""
    return " ".join(f"{key}={value}" for key, value in _leaves(chosen(config), "") if value != 1)


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, "true" if value is True else value


def _remats() -> tuple[str, ...]:
    return get_args(TrainConfig.model_fields["remat"].annotation)


def _splits(count: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Sizes of axes whose product is `count`."""
    if len(axes) == 1:
        yield {axes[0]: count}
        return
    for size in (size for size in range(1, count + 1) if count % size == 0):
        for rest in _splits(count // size, axes[1:]):
            yield {axes[0]: size, **rest}


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2
