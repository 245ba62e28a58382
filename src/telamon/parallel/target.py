"""Which device a program is traced for: with a mesh of an absent machine (ahead-of-time compilation), not the one at hand."""

import math
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Target:
    """The devices of a program."""

    platform: str
    """tpu, gpu or cpu."""
    device_kind: str
    """As JAX names it, such as `TPU v6 lite`; empty without a mesh."""
    axes: tuple[tuple[str, int], ...]
    """Names and sizes of the mesh's axes; empty without a mesh."""

    @property
    def device_count(self) -> int:
        """Devices of the mesh; 1 without one."""
        return self.extent(tuple(name for name, _ in self.axes))

    def extent(self, names: str | tuple[str, ...] | None) -> int:
        """Devices along mesh axes; those that are not there have one."""
        listed = () if names is None else (names,) if isinstance(names, str) else names
        return math.prod(dict(self.axes).get(name, 1) for name in listed)


def platform_name(platform: str) -> str:
    """The platform of a device as in `Target`: a GPU calls itself by its maker's interface where no client stands behind it."""
    return "gpu" if platform in ("cuda", "rocm") else platform


def target() -> Target:
    """The target at this place of a trace: that of the mesh in force, else the default backend."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    platform = platform_name(jax.default_backend() if device is None else device.platform)
    return Target(platform, "" if device is None else device.device_kind, tuple(mesh.shape.items()))
