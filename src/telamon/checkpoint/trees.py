"""Pytrees as named arrays: what a checkpoint stores does not depend on the Python classes of the state.

A leaf's name is its path joined by dots, such as `params.layers.mlp.up`; on disk the names form nested dicts that
any Orbax program can open. PRNG keys are stored as their raw words; arrays without elements are not stored.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telamon.checkpoint.manifest import ArrayInfo
from telamon.errors import CheckpointError

_SHOWN = 3
_EXACT = {("bfloat16", "float32"), ("float16", "float32")}
"""(saved, wanted) types where each value of the one is one of the other: Orbax widens as it reads. Narrowing is refused."""


def named_leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of `tree` by dotted name, in the order of `jax.tree.leaves`."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {prefix + jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    assert len(leaves) == len(paths), "two leaves of the state have the same dotted name"
    return leaves


def nest(leaves: dict[str, Any]) -> dict[str, Any]:
    """Nested dicts from dotted names."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *folders, last = name.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = leaf
    return tree


def lookup(tree: dict[str, Any], name: str) -> Any:
    """The leaf of nested dicts that a dotted name stands for."""
    for key in name.split("."):
        tree = tree[key]
    return tree


def is_key(leaf: Any) -> bool:
    """Whether an array, or its abstract form, holds PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe(leaf: jax.Array) -> ArrayInfo:
    """What the manifest says of a leaf."""
    if is_key(leaf):
        stored = jax.eval_shape(jax.random.key_data, leaf)
        return ArrayInfo(leaf.shape, str(leaf.dtype), str(jax.random.key_impl(leaf)), stored.shape)
    return ArrayInfo(leaf.shape, str(leaf.dtype))


def to_stored(leaf: jax.Array) -> jax.Array:
    """The array Orbax writes for a leaf."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def to_abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, type and place of a leaf; without a sharding, on the first local device."""
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def to_abstract_stored(leaf: jax.ShapeDtypeStruct, info: ArrayInfo) -> jax.ShapeDtypeStruct:
    """What Orbax is asked to read for an abstract leaf."""
    if info.key_impl is None:
        return leaf
    assert info.stored_shape is not None
    return jax.ShapeDtypeStruct(info.stored_shape, jnp.uint32, sharding=leaf.sharding)


def empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """An array without elements, which Orbax does not store."""
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: np.empty(leaf.shape, leaf.dtype)[index])


def from_stored(array: jax.Array, info: ArrayInfo) -> jax.Array:
    """The inverse of :func:`to_stored`."""
    return jax.random.wrap_key_data(array, impl=info.key_impl) if info.key_impl is not None else array


def check_fits(saved: dict[str, ArrayInfo], wanted: dict[str, Any], *, checkpoint: str, target: str) -> None:
    """Refuse a checkpoint whose arrays are not those wanted: CheckpointError names parameters, both sides, and their origins."""
    faults = [f"{name}: in the checkpoint, not in {target}" for name in saved if name not in wanted]
    for name, leaf in wanted.items():
        if name not in saved:
            faults.append(f"{name}: in {target}, not in the checkpoint")
        elif saved[name].shape != tuple(leaf.shape):
            faults.append(f"{name}: shape {saved[name].shape} in the checkpoint, {tuple(leaf.shape)} in {target}")
        elif saved[name].dtype != str(leaf.dtype) and (saved[name].dtype, str(leaf.dtype)) not in _EXACT:
            faults.append(f"{name}: {saved[name].dtype} in the checkpoint, {leaf.dtype} in {target}")
    if faults:
        more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        lines = "".join(f"\n  {line}" for line in [*faults[:_SHOWN], *more])
        raise CheckpointError(f"checkpoint {checkpoint} does not fit {target}:{lines}\nUse the config it was saved with.")
