"""From logical axes to mesh axes: two tables, one for weights and one for activations.

A weight declares what its dimensions mean ("embed", "heads", ...); the tables say which mesh axes split them.
To change how a model is sharded, change a row here; nothing else names a mesh axis.
"""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from telamon.config.checks import BATCH_AXES
from telamon.errors import ConfigError

Rules = Mapping[str, tuple[str, ...]]

WEIGHT_RULES: Rules = {
    "layers": ("stage",),
    "vocab": ("tensor",),
    "positions": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "joined": ("tensor",),  # two streams side by side, where a map reads both
    "rank": (),  # of a latent, where it is made; every head reads all of it
    "latent": ("fsdp",),  # the same, where it is read
    "mlp": ("tensor",),
    "experts": ("expert",),
    "routes": (),
    "norm": (),
}

SECOND_CHOICE = ("fsdp",)
"""Mesh axes that only say where a weight is kept. One that does not divide the dim which the table gives it takes the largest other dim
of the weight that it does divide and no other axis splits, layers aside."""

ACTIVATION_RULES: Rules = {
    "batch": BATCH_AXES,
    "experts": ("expert",),
    "batch_of_experts": tuple(axis for axis in BATCH_AXES if axis != "expert"),  # where experts have rows of all of a batch
    "seq": ("context",),
    "embed": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}


def spec(axes: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """The partition of an array whose dimensions have these logical names (None: never split)."""
    parts = []
    for axis in axes:
        names = rules[axis] if axis is not None else ()
        parts.append(names[0] if len(names) == 1 else (names or None))
    return PartitionSpec(*parts)


def weight_partition(mesh: Mesh | AbstractMesh, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """How a weight is split. A dim that its mesh axes do not divide is not split by them; those of `SECOND_CHOICE` take another."""
    first = spec(axes, WEIGHT_RULES)
    parts = [names if names is None or size % extent(mesh, names) == 0 else None for names, size in zip(first, shape, strict=True)]
    for name in SECOND_CHOICE:
        if name in first and name not in parts:
            free = [dim for dim in _free(mesh, parts, axes) if shape[dim] % mesh.shape[name] == 0]
            if free:
                parts[max(free, key=lambda dim: (shape[dim], -dim))] = name
    return PartitionSpec(*parts)


def _free(mesh: Mesh | AbstractMesh, parts: Sequence[str | tuple[str, ...] | None], axes: Sequence[str | None]) -> list[int]:
    """Dims that no mesh axis of several devices splits, or ever will."""
    return [dim for dim, names in enumerate(parts) if axes[dim] != "layers" and (names is None or extent(mesh, names) == 1)]


def weight_sharding(mesh: Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """Where a weight lives, see `weight_partition`."""
    return NamedSharding(mesh, weight_partition(mesh, axes, shape))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Where a batch [B, T] lives: rows over data, fsdp and expert, positions over context."""
    return NamedSharding(mesh, spec(("batch", "seq"), ACTIVATION_RULES))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pin an activation's layout at a block's border; does nothing without a mesh of several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, ACTIVATION_RULES))


def check_sharded(mesh: Mesh, *, shapes: Mapping[str, tuple[tuple[int, ...], NamedSharding]], limit: float) -> None:
    """Refuse a layout that leaves more than `limit` of the parameters whole on a mesh that shards weights.

    Where there is an axis `fsdp`, what it does not split counts as whole, whatever else does: each of its devices holds all of that.
    The axis `expert` is for experts alone, which it has to divide: on a mesh of no other such axis the rest is whole by design.

    Raises:
        ConfigError: naming the largest parameters that stay whole, and what would divide the first.
    """
    if math.prod(mesh.shape[axis] for axis in ("fsdp", "stage", "tensor")) == 1:
        return
    sizes = {path: math.prod(shape) for path, (shape, _) in shapes.items()}
    whole = {path: sizes[path] for path, (shape, where) in shapes.items() if _whole(mesh, shape, where)}
    share = sum(whole.values()) / sum(sizes.values())
    if share > limit:
        largest = sorted(whole, key=lambda path: -whole[path])[:3]
        raise ConfigError(
            f"{share:.1%} of the parameters would stay unsharded on mesh {dict(mesh.shape)} (limit mesh.replicated_limit={limit:.1%}): "
            f"{', '.join(f'{path} {shapes[path][0]}' for path in largest)}; choose axis sizes that divide these "
            f"({_dividing(mesh, *shapes[largest[0]])}model.vocab_multiple makes the rows of tables divisible), or raise the limit"
        )


def _whole(mesh: Mesh, shape: tuple[int, ...], where: NamedSharding) -> bool:
    if mesh.shape["fsdp"] > 1:
        return "fsdp" not in _mesh_axes(where.spec)
    return where.shard_shape(shape) == tuple(shape)


def _dividing(mesh: Mesh, shape: tuple[int, ...], where: NamedSharding) -> str:
    """Which sizes of `fsdp` would split a weight that it does not split; nothing where that is not what is missing."""
    taken = [names is not None and extent(mesh, names) > 1 for names in (*where.spec, *(None,) * (len(shape) - len(where.spec)))]
    free = [size for size, names in zip(shape, taken, strict=True) if not names][-3:]
    sizes = [str(n) for n in range(2, mesh.size + 1) if mesh.size % n == 0 and any(size % n == 0 for size in free)]
    if mesh.shape["fsdp"] == 1 or not sizes:
        return ""
    return f"of the {mesh.size} devices mesh.fsdp={', '.join(sizes)} divide a dim of the first, and other axes can take the rest; "


def _mesh_axes(partition: PartitionSpec) -> set[str]:
    return {name for names in partition if names is not None for name in ((names,) if isinstance(names, str) else names)}


def table(rules: Rules) -> str:
    """The rules as text, a line a logical axis."""

    def line(axis: str, names: tuple[str, ...]) -> str:
        other = ", or the largest other dim that it divides" if rules is WEIGHT_RULES and set(names) & set(SECOND_CHOICE) else ""
        return f"{axis:<10} {' x '.join(names) or 'whole'}{other}"

    return "\n".join(line(axis, names) for axis, names in rules.items())


def extent(mesh: Mesh | AbstractMesh, names: str | tuple[str, ...]) -> int:
    """Devices along one or several mesh axes."""
    return math.prod(mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))
