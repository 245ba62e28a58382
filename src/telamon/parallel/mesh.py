"""The one place where a mesh is built.

Every mesh has the same six axes (size 1 where unused), so a table of rules written once fits any layout.
Axes are of type Auto: the compiler places what the rules leave open, and Tunix builds on Auto meshes too.
"""

import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from telamon.config.schema import AXES, MeshConfig
from telamon.errors import ConfigError


def resolve_axes(config: MeshConfig, *, device_count: int) -> dict[str, int]:
    """Sizes of the six axes within a slice, with the -1 filled up.

    Raises:
        ConfigError: the axes do not multiply to `device_count`.
    """
    slices = math.prod(getattr(config.cross_slice, axis) for axis in AXES)
    sizes = {axis: getattr(config, axis) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis, size in sizes.items() if size == -1]
    if free:
        if device_count % (fixed * slices):
            raise ConfigError(
                f"mesh.{free[0]}=-1 cannot fill up: {device_count} devices are not divisible by the other axes, "
                f"{fixed}{f' times {slices} slices' if slices > 1 else ''}"
            )
        sizes[free[0]] = device_count // (fixed * slices)
    elif fixed * slices != device_count:
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1"
        raise ConfigError(f"mesh {product} needs {fixed * slices} devices, there are {device_count}; set one axis to -1 to fill up")
    return sizes


def build_mesh(config: MeshConfig, *, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a run, over `devices` (default: all, over all processes); enter it with `jax.set_mesh`."""
    devices = list(devices if devices is not None else jax.devices())
    sizes = resolve_axes(config, device_count=len(devices))
    within = [sizes[axis] for axis in AXES]
    across = [getattr(config.cross_slice, axis) for axis in AXES]
    if math.prod(across) > 1:
        # Slices are told apart by slice_index on TPU; elsewhere a process stands for a slice.
        by_process = getattr(devices[0], "slice_index", None) is None
        array = mesh_utils.create_hybrid_device_mesh(within, across, devices, process_is_granule=by_process)
    else:
        array = mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))
