"""Work that each device does on its own rows of a batch, with what it fetches and hands back written out.

The compiler's own partition of a loop that adds up a weight's gradient reduces the whole gradient over all devices in every
turn, and that of a look-up's gradient reduces whole tables. Here a device keeps its own sum, and one reduction at the end
leaves each device the part that it owns (Rajbhandari et al. 2020, ZeRO, section 5).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from telamon.parallel.rules import ACTIVATION_RULES, extent, spec, weight_partition

BLOCK_BYTES = 2**29
"""Of a gradient that is summed over devices at one time. Those of whole tables and heads of today take 2 to 8 GB."""


@dataclass(frozen=True)
class OwnRows:
    """How the mesh in use shares the rows of a batch; other mesh axes stay the compiler's."""

    axes: tuple[str, ...]
    """Mesh axes of more than one device that split rows."""

    def call(self, function: Callable[..., Any], arguments: Sequence[Any], *, ins: Sequence[PartitionSpec], outs: Any) -> Any:
        """`function` of each device's shares of `arguments`, inside which `gathered` and `scattered` may be used."""
        mapped = jax.shard_map(function, in_specs=tuple(ins), out_specs=outs, axis_names=set(self.axes), check_vma=False)
        return mapped(*arguments)

    @property
    def alone(self) -> bool:
        """Whether no other axis of the mesh splits anything, so that arrays in here are whole but for their rows."""
        mesh = jax.sharding.get_abstract_mesh()
        return extent(mesh, self.axes) == mesh.size

    @property
    def rows(self) -> PartitionSpec:
        """An array whose first dimension is the batch's rows."""
        return PartitionSpec(self.axes)

    def weight(self, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
        """A weight with these logical axes, as far as the axes that split rows split it too."""
        partition = weight_partition(jax.sharding.get_abstract_mesh(), axes, shape)
        return PartitionSpec(*(tuple(name for name in _names(part) if name in self.axes) or None for part in partition))

    def gathered(self, x: jax.Array, partition: PartitionSpec) -> jax.Array:
        """The whole array, from the parts that devices own."""
        for dim, part in enumerate(partition):
            if part is not None:
                x = jax.lax.all_gather(x, part, axis=dim, tiled=True)
        return x

    def scattered(self, x: jax.Array, partition: PartitionSpec) -> jax.Array:
        """The sum of a whole array over all devices, of which each gets the part that it owns."""
        owned = {name for part in partition for name in _names(part)}
        for dim, part in enumerate(partition):
            if part is not None:
                x = scatter_sum(x, part, dim=dim, most=BLOCK_BYTES if self.alone else None)
        return self.total(x, tuple(name for name in self.axes if name not in owned))

    def total(self, x: Any, axes: tuple[str, ...] | None = None) -> Any:
        """The sum over the devices along `axes` (none: all that share rows)."""
        axes = self.axes if axes is None else axes
        return jax.lax.psum(x, axes) if axes else x


def own_rows(rows: int) -> OwnRows | None:
    """How the mesh in use shares `rows`; None where one device has them all or they cannot be shared evenly."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    axes = tuple(name for name in ACTIVATION_RULES["batch"] if mesh.shape[name] > 1)
    return OwnRows(axes) if axes and rows % extent(mesh, axes) == 0 else None


def on_own_rows(function: Callable[[jax.Array], Any], x: jax.Array) -> Any:
    """`function` of x [B, T, ...], for each device's own rows and positions: for what a compiler would gather all of before it begins."""
    mesh = jax.sharding.get_abstract_mesh()
    names = ("batch", "seq")
    if mesh.empty or mesh.size == 1 or any(x.shape[dim] % extent(mesh, ACTIVATION_RULES[name]) for dim, name in enumerate(names)):
        return function(x)
    rows = spec(names, ACTIVATION_RULES)
    return jax.shard_map(function, in_specs=rows, out_specs=rows, check_vma=False)(x)


def scatter_sum(x: jax.Array, axes: str | tuple[str, ...], *, dim: int, most: int | None = BLOCK_BYTES) -> jax.Array:
    """The sum over devices of an array, of which each gets its part along `dim`; inside of a `shard_map`.

    XLA on TPU makes such a sum whole, in memory of its own, and takes the part wherever it is used. So where the first dimension
    is the one that is split, a large array is summed some rows of every part at a time, of at most `most` bytes together (None:
    all at once); and the part is settled here.
    """
    parts = jax.lax.axis_size(axes)
    rows = x.shape[dim] // parts
    size = rows if most is None or dim else block_size(rows, x.size // rows * x.dtype.itemsize, most=most)
    if size == rows:
        return jax.lax.optimization_barrier(jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True))
    by_part = x.reshape(parts, rows, *x.shape[1:])

    def block(start: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(jax.lax.dynamic_slice_in_dim(by_part, start, size, axis=1), axes)

    return jax.lax.map(block, jnp.arange(0, rows, size)).reshape(rows, *x.shape[1:])


def block_size(count: int, each: int, *, most: int) -> int:
    """The most of `count` things of `each` bytes that divide it evenly and take at most `most` bytes; at least 1."""
    return max((count // n for n in range(1, count + 1) if count % n == 0 and count // n * each <= most), default=1)


def _names(part: Any) -> tuple[str, ...]:
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)
