"""How long a collective takes over a mesh axis: which links join the axis's devices, and what they carry.

Inside a TPU slice an axis lies on whole ways of the torus where its size allows, and a way is a ring only where the slice
closes it; inside a GPU node every device reaches every other at its NVLink rate. Slices, and nodes, are joined by network.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from telamon.config.hardware import Chip
from telamon.config.schema import AXES
from telamon.plan.topology import Topology


@dataclass(frozen=True)
class Way:
    """Chips in a row."""

    size: int
    ring: bool
    """The last is joined to the first."""

    @property
    def links(self) -> int:
        """Links over which a chip receives: both neighbours' on a ring; at the end of a row there is one neighbour."""
        return 2 if self.ring and self.size > 2 else 1

    @property
    def hops(self) -> float:
        """Mean distance from a chip to any, itself included."""
        return self.size**2 // 4 / self.size if self.ring else (self.size**2 - 1) / 3 / self.size


@dataclass(frozen=True)
class Group:
    """The devices that one collective joins: `near` of them by fast links, and `far` such sets by the network."""

    near: int
    far: int
    near_bandwidth: float
    """Bytes a second that a device receives over fast links."""
    far_bandwidth: float
    """Bytes a second that a device receives over the network."""
    hops: float
    """Fast links that a byte passes on its way to one of the near devices, a mean over all of them."""

    @property
    def size(self) -> int:
        """Devices."""
        return self.near * self.far

    def gather(self, size: float) -> float:
        """Seconds of an all-gather, or of a reduce-scatter, of an array of `size` bytes when whole.

        On a ring that is size * (n - 1) / n / bandwidth. The network and the fast links work at one time, on different parts.
        """
        near = size * (self.near - 1) / self.near / self.near_bandwidth
        far = size / self.near * (self.far - 1) / self.far / self.far_bandwidth
        return max(near, far)

    def reduce(self, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes, which is a reduce-scatter and an all-gather."""
        return 2 * self.gather(size)

    def exchange(self, size: float) -> float:
        """Seconds of an all-to-all in which each device holds `size` bytes, and keeps its own share."""
        near = size * self.hops / self.near_bandwidth
        far = size * (self.far - 1) / self.far / self.far_bandwidth
        return max(near, far)


def groups(topology: Topology, within: Mapping[str, int], across: Mapping[str, int]) -> dict[str, Group]:
    """The group of each mesh axis, given the axes' sizes within a slice and how often each is repeated across slices."""
    if topology.chip.platform == "gpu":
        return _gpu_groups(topology, within, across)
    placed = _place(_closed(topology), topology.chip.devices_per_chip, within)
    return {axis: _tpu_group(topology.chip, placed[axis], size=within[axis] * across[axis]) for axis in AXES}


def _closed(topology: Topology) -> list[Way]:
    """The ways of a slice. In two dimensions the full length is closed to a ring; in three, cubes of four by four by four are."""
    shape, largest = topology.shape, topology.chip.largest
    if len(largest) == 2:
        return [Way(size, size == full) for size, full in zip(shape, largest, strict=True)]
    whole = all(size % 4 == 0 for size in shape)
    return [Way(size, whole) for size in shape]


@dataclass(frozen=True)
class _Placed:
    """The ways that an axis lies on, and how many of a chip's devices are in one group of it."""

    ways: tuple[Way, ...]
    devices: int


def _place(ways: Sequence[Way], devices_per_chip: int, sizes: Mapping[str, int]) -> dict[str, _Placed]:
    """Each axis on ways of its own, the largest axis first: on whole ways where some multiply to its size, else on what divides.

    A part of a way is a row, never a ring. A chip's devices, where it has several, go to the first axis that takes every way
    it needs and still lacks their number, else to the innermost that they divide.
    """
    left = {number: way for number, way in enumerate(ways)}
    devices, placed = devices_per_chip, {}
    for axis in sorted(AXES, key=lambda name: -sizes[name]):
        size, taken = sizes[axis], []
        whole = _whole_ways(left, size, devices)
        for number in whole if whole is not None else sorted(left, key=lambda n: -left[n].size):
            way = left[number]
            part = math.gcd(way.size, size)
            if part == 1:
                continue
            taken.append(way if part == way.size else Way(part, ring=False))
            left[number] = Way(way.size // part, ring=False)
            size //= part
        own = math.gcd(size, devices)
        devices //= own
        placed[axis] = _Placed(tuple(taken), own)
    return placed


def _whole_ways(left: Mapping[int, Way], size: int, devices: int) -> tuple[int, ...] | None:
    """The most ways whose product is `size`, or `size` over the devices of a chip; none where no ways' is."""
    open_ways = [number for number, way in left.items() if way.size > 1]
    for count in range(len(open_ways), 0, -1):
        for chosen in itertools.combinations(open_ways, count):
            if math.prod(left[number].size for number in chosen) in (size, size / devices):
                return chosen
    return None


def _tpu_group(chip: Chip, placed: _Placed, *, size: int) -> Group:
    near = math.prod(way.size for way in placed.ways) * placed.devices
    links = sum(way.links for way in placed.ways)
    # Devices of one chip in different groups share its links. Those in one group have them together, and pass on what came
    # over the much faster joint between them.
    shared = chip.devices_per_chip // placed.devices
    bandwidth = chip.link_gbps * 1e9 * max(links, 1) / shared
    hops = sum(way.hops for way in placed.ways)
    return Group(near, size // near, bandwidth, _network(chip), hops)


def _gpu_groups(topology: Topology, within: Mapping[str, int], across: Mapping[str, int]) -> dict[str, Group]:
    """The innermost axes take the devices of a node, as devices are numbered."""
    chip, left, found = topology.chip, topology.shape[0], {}
    for axis in reversed(AXES):
        near = math.gcd(within[axis], left)
        left //= near
        found[axis] = Group(near, within[axis] // near * across[axis], chip.link_gbps * 1e9, _network(chip), (near - 1) / near)
    return found


def _network(chip: Chip) -> float:
    """Bytes a second of network for a device."""
    return chip.network_gbps * 1e9 / chip.devices_per_chip
