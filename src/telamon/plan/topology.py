"""The machine that a plan is for, by its name, and its devices as a compiler sees them: none of them has to be there.

==================  ===================================================================================
``v6e:16x16``       TPU v6e, a slice of 16 x 16 chips; v4, v5p and tpu7x have three sizes
``2*v5p:4x4x4``     two such slices, joined by the data centre's network
``v6e-256``         a slice by its short name. v5e and v6e count chips, the others TensorCores (two a chip). Of the shapes
                    with that many chips it is the most compact one, sizes ascending: ``v5p-512`` is ``v5p:4x8x8``
``h100:8``          8 GPUs in one node, joined by NVLink
``h100:8x4``        8 GPUs in each of 4 nodes
==================  ===================================================================================
"""

import itertools
import math
import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from telamon.config.hardware import Chip, chips
from telamon.config.presets import ROOT
from telamon.errors import ConfigError, MissingCompiler

_NUMBER = "[1-9][0-9]{,4}"
"""No machine has more of anything than this can say, and a search goes through all ways to divide the devices."""

_CLOUD_NAMES = {"v5litepod": "v5e"}
"""Chips that the cloud's short names call otherwise."""

_FORMS = "a topology is written like v6e:4x4, 2*v5p:4x4x4, v6e-256, h100:8 or h100:8x4"

_COMPILERS = {
    "tpu": ("libtpu", "libtpu", "plan-tpu"),
    "gpu": ("jax_plugins.xla_cuda13", "jax-cuda13-plugin", "plan-gpu"),
}
"""For each platform the module that holds its compiler, the package it is in, and the extra of ours that installs it."""


@dataclass(frozen=True)
class Topology:
    """So many slices of chips."""

    text: str
    """Its name in full, the same for each way to write it."""
    chip: Chip
    shape: tuple[int, ...]
    """Chips of a slice each way; for GPUs, the number in a node."""
    slices: int
    """Slices, or nodes of GPUs: parts that only a slower network joins."""

    @property
    def chip_count(self) -> int:
        """Chips in all."""
        return math.prod(self.shape) * self.slices

    @property
    def devices_per_slice(self) -> int:
        """JAX devices in a slice or node."""
        return math.prod(self.shape) * self.chip.devices_per_chip

    @property
    def device_count(self) -> int:
        """JAX devices in all."""
        return self.devices_per_slice * self.slices


def parse_topology(text: str) -> Topology:
    """The topology of a name (see the head of this file).

    Raises:
        ConfigError: the chip is not known, or there is no slice of that shape.
    """
    times, star, name = text.strip().lower().rpartition("*")
    key, mark, rest = name.partition(":") if ":" in name else name.rpartition("-")
    if not mark or not re.fullmatch(rf"{_NUMBER}(x{_NUMBER}){{,5}}", rest) or (star and not re.fullmatch(_NUMBER, times)):
        raise ConfigError(f"topology {text!r} cannot be read: {_FORMS}")
    slices = int(times or 1)
    chip, sizes = _chip(key, text), tuple(map(int, rest.split("x")))
    if chip.platform == "gpu":
        return _gpu_topology(chip, sizes, slices, text)
    shape = _short_name_shape(chip, sizes, text) if mark == "-" else _checked_shape(chip, sizes, text)
    return Topology(f"{slices}*" * (slices > 1) + f"{chip.key}:{_times(shape)}", chip, shape, slices)


def missing_compiler(topology: Topology) -> str | None:
    """What to install where the compiler for a topology's chips is missing; none where it is there. Loads nothing heavy."""
    module, package, extra = _COMPILERS[topology.chip.platform]
    parent = module.partition(".")[0]
    if find_spec(parent) and find_spec(module):
        return None
    return (
        f"no compiler for {topology.chip.name} is installed: pip install {package}, or pip install 'telamon[{extra}]'; "
        "no such device has to be there"
    )


def require_compiler(topology: Topology) -> None:
    """Raise MissingCompiler where the compiler for a topology's chips is not installed. Loads nothing heavy."""
    if missing := missing_compiler(topology):
        raise MissingCompiler(missing)


def compiler_environment(topology: Topology) -> dict[str, str]:
    """What has to be in a process's environment before JAX starts, for :func:`aot_devices` to work in it.

    JAX itself runs on the CPU. libtpu is told not to ask the network what machine this is, and not to lock others out.
    """
    tpu = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return {"JAX_PLATFORMS": "cpu", **(tpu if topology.chip.platform == "tpu" else {})}


def aot_devices(topology: Topology) -> list[Any]:
    """The devices of a topology, to compile for; nothing can run on them.

    The process's environment must hold :func:`compiler_environment`.

    Raises:
        MissingCompiler: the compiler is not installed.
    """
    require_compiler(topology)
    assert compiler_environment(topology).items() <= dict(os.environ).items()
    import jax
    from jax.experimental import topologies

    jax.devices()  # JAX looks for plugins now, and with the CPU chosen it does not ask for a driver
    chip, slices = topology.chip, topology.slices
    if chip.platform == "gpu":
        name = f"{slices}x1x{topology.devices_per_slice}"
        target = (ROOT / "hardware" / f"{chip.key}.txtpb").read_text(encoding="utf-8")
        return list(topologies.get_topology_desc(platform="cuda", topology_name=name, topology=name, target_config=target).devices)
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if chip.chip_config:
        options["chip_config_name"] = chip.chip_config
    if math.prod(topology.shape) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return list(topologies.get_topology_desc(platform="tpu", topology_name=f"{chip.key}:{_times(topology.shape)}", **options).devices)


def _chip(key: str, text: str) -> Chip:
    known = {chip.key: chip for chip in chips()}
    key = _CLOUD_NAMES.get(key, key)
    if key not in known:
        near = get_close_matches(key, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else _FORMS
        raise ConfigError(f"topology {text!r}: no chip is named {key!r}; {hint}; the chips are {', '.join(known)}")
    return known[key]


def _gpu_topology(chip: Chip, sizes: tuple[int, ...], slices: int, text: str) -> Topology:
    gpus, nodes = sizes[0], math.prod(sizes[1:]) * slices
    if len(sizes) > 2 or gpus > chip.largest[0] or not re.fullmatch(_NUMBER, str(nodes)):
        total, most = math.prod(sizes), chip.largest[0]
        raise ConfigError(
            f"topology {text!r}: GPUs are written as those of a node, at most {most}, times the nodes, such as "
            f"{chip.key}:{most}x{-(-total // most)} for {total} of them"
        )
    return Topology(f"{chip.key}:{gpus}" + f"x{nodes}" * (nodes > 1), chip, (gpus,), nodes)


def _checked_shape(chip: Chip, sizes: tuple[int, ...], text: str) -> tuple[int, ...]:
    if not _is_slice(chip, sizes):
        near = _near_shapes(chip, math.prod(sizes))
        raise ConfigError(
            f"topology {text!r}: there is no such slice of {chip.name} ({len(chip.largest)} sizes, up to {_times(chip.largest)}); near it are "
            + " and ".join(f"{chip.key}:{_times(shape)}" for shape in near)
        )
    return sizes


def _short_name_shape(chip: Chip, sizes: tuple[int, ...], text: str) -> tuple[int, ...]:
    count, rest = divmod(sizes[0], chip.cores_per_chip)
    shapes = _shapes(chip, count) if len(sizes) == 1 and not rest else []
    if not shapes:
        near = [f"{chip.key}-{math.prod(shape) * chip.cores_per_chip}" for shape in _near_shapes(chip, count)]
        what = "chips" if chip.cores_per_chip == 1 else "TensorCores, two a chip"
        raise ConfigError(
            f"topology {text!r}: no slice of {chip.name} has that name, which counts {what}; near it are {' and '.join(near)}"
        )
    return shapes[0]


def _is_slice(chip: Chip, sizes: tuple[int, ...]) -> bool:
    """Whether chips are joined in this shape.

    Hosts hold 2 x 2 chips. Slices with two sizes are cut from a board, in halves; those with three are made of whole
    blocks with sides of 4, or are a part of one.
    """
    if len(sizes) != len(chip.largest) or any(size > most for size, most in zip(sorted(sizes), chip.largest, strict=True)):
        return False
    if set(sizes) == {1}:
        return True
    whole = [size % 4 == 0 for size in sizes]
    return (
        min(sizes[:2]) > 1 and (all(whole) or set(sizes) <= {1, 2, 4}) and (len(sizes) > 2 or all(size.bit_count() == 1 for size in sizes))
    )


def _shapes(chip: Chip, count: int) -> list[tuple[int, ...]]:
    """The shapes of a slice with `count` chips, sizes ascending (ones at the end), the most compact first."""
    divisors = [size for size in range(1, max(chip.largest) + 1) if count % size == 0]
    found = [sizes for sizes in itertools.combinations_with_replacement(divisors, len(chip.largest)) if math.prod(sizes) == count]
    found = [tuple(sorted(sizes, key=lambda size: (size == 1, size))) for sizes in found]
    return sorted((sizes for sizes in found if _is_slice(chip, sizes)), key=sum)


def _near_shapes(chip: Chip, count: int) -> list[tuple[int, ...]]:
    """The shape of the largest slice with at most `count` chips, and of the smallest with more."""
    most = math.prod(chip.largest)
    below = next((shapes for n in range(min(count, most), 0, -1) if (shapes := _shapes(chip, n))), [])
    above = next((shapes for n in range(count + 1, most + 1) if (shapes := _shapes(chip, n))), [])
    return [*below[:1], *above[:1]]


def _times(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))
