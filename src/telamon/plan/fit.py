"""The smallest machine of a list on which a model trains: what the records of every preset show."""

import math
from dataclasses import dataclass
from typing import Literal

from telamon.config.load import load_run
from telamon.errors import ConfigError
from telamon.plan.aot import Compiled, compile_program
from telamon.plan.memory import estimate_memory
from telamon.plan.topology import Topology, parse_topology

MACHINES = {
    "tpu": ("v6e:1x1", "v6e:2x2", "v6e:4x4", "v6e:8x8", "v6e:16x16", "v5p:4x8x8", "v5p:8x8x8"),
    "gpu": ("h100:1", "h100:8", "h100:8x2", "h100:8x4", "h100:8x8", "h100:8x16", "h100:8x32", "h100:8x64"),
}
"""From small to large. Published runs of models with 400 billion parameters use as many chips as the last but one; the last is for a trillion."""

_LENGTH = 4096
_ROOM = 1.1
"""Share of a device's memory that arithmetic may fill for the compiler to be asked: it is a few percent high at the median."""


@dataclass(frozen=True)
class Fit:
    """A training step that fits."""

    topology: Topology
    settings: tuple[str, ...]
    """What was set beside the preset."""
    compiled: Compiled

    @property
    def share(self) -> float:
        """Of a device's memory that the step uses at its peak."""
        return self.compiled.peak_bytes / self.topology.chip.hbm_bytes


def smallest_fit(preset: str, platform: Literal["tpu", "gpu"], *, progress: bool = True) -> Fit:
    """The first of `MACHINES` on which a preset's training step fits, by its own compiler.

    A row of 4,096 tokens a device (fewer where the model has no more positions), AdamW, weights over all devices, whole blocks
    made again. Where the devices do not divide a mixture's width, those that are too many are along `expert`. Machines that arithmetic rules out are not tried. TPU's compiler is stopped before it generates code, which is
    therefore no part of the peak (see `telamon.plan.assigned`).

    Raises:
        ConfigError: it fits on none.
        MissingCompiler: the compiler for these chips is not installed.
        CompileError: a compilation failed, or took longer or more memory than it may.
    """
    tried = []
    for name in MACHINES[platform]:
        topology = parse_topology(name)
        settings = _settings(preset, topology)
        config = load_run("default", [f"model.preset={preset}", *settings]).config
        room = _ROOM * topology.chip.hbm_bytes
        if estimate_memory(config, topology, at_least=True).total > room or estimate_memory(config, topology).total > room:
            continue
        compiled = compile_program(config, topology, "train", quick=True, progress=progress)
        if compiled.fits:
            return Fit(topology, settings, compiled)
        tried.append(f"{name}: {compiled.refusal}")
    raise ConfigError(f"{preset} fits on none of {', '.join(MACHINES[platform])}; {'; '.join(tried) or 'by arithmetic'}")


def _settings(preset: str, topology: Topology) -> tuple[str, ...]:
    model, devices = load_run("default", [f"model.preset={preset}"]).config.model, topology.device_count
    length = min(_LENGTH, model.position_limit or _LENGTH)
    fsdp = math.gcd(model.d_model, devices) if "expert" in model.divided() else devices
    mesh = () if fsdp == devices else (f"mesh.fsdp={fsdp}", f"mesh.expert={devices // fsdp}")
    return (f"train.seq_len={length}", f"train.batch_size={devices}", "train.remat=full", "optimizer.kind=adamw", *mesh)
