"""The one place where a mesh is built.

Every mesh has the same six axes (size 1 where unused), so a table of rules written once fits any layout.
Axes are of type Auto: the compiler places what the rules leave open, and Tunix builds on Auto meshes too.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from telamon.config.schema import AXES, MeshConfig
from telamon.errors import ConfigError


def build_mesh(config: MeshConfig, *, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a run; enter it with `jax.set_mesh`.

    Args:
        config: sizes of the axes.
        devices: default all, over all processes.

    Raises:
        ConfigError: the axes do not multiply to the number of devices, or `cross_slice` to the number of slices.
    """
    devices = list(devices if devices is not None else jax.devices())
    within = list(config.filled(len(devices)).sizes().values())
    across = list(config.cross_slice.sizes().values())
    slices, by_process = _slices(devices)
    counted = "a process counts as a slice here" if by_process else "by their slice_index"
    check_slices(config, slices, f"the {len(devices)} devices are in {slices} ({counted})", platform=devices[0].platform)
    if math.prod(across) > 1:
        array = mesh_utils.create_hybrid_device_mesh(within, across, devices, process_is_granule=by_process, allow_split_physical_axes=True)
    else:
        array = mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_slices(config: MeshConfig, slices: int, found: str, *, platform: str) -> None:
    """Raise ConfigError where `cross_slice` asks for another number of slices than there are; `found` says in words what there is.

    TPUs of several slices have to be told apart. GPUs may be taken as one slice, whichever nodes they are in.
    """
    wanted = math.prod(config.cross_slice.sizes().values())
    if wanted != slices and (wanted > 1 or platform == "tpu"):
        raise ConfigError(
            f"mesh.cross_slice asks for {wanted} slice{'s' * (wanted > 1)}, and {found}; the product of its axes must be {slices}, "
            f"such as mesh.cross_slice.data={slices}"
        )


def _slices(devices: Sequence[Any]) -> tuple[int, bool]:
    """In how many slices the devices are, and whether a process stands for a slice.

    TPUs say it with slice_index. So do GPUs where some nodes share NVLink; where none do, or nobody says (devices that only
    a compiler knows), each process is a node of its own.
    """
    indices = {getattr(device, "slice_index", None) for device in devices}
    if devices[0].platform == "tpu" or len(indices) > 1:
        return len(indices), False
    return len({device.process_index for device in devices}), True
