"""A small training state, sharded in some ways, and its abstract form."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

REPLICATED = PartitionSpec()


def mesh(**sizes):
    count = int(np.prod(list(sizes.values())))
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[:count])


def make_state(seed=0, *, width=32, layout=None, spec=REPLICATED):
    """fp32, bf16 and int leaves and PRNG keys, with bit patterns that a detour through another type would lose."""
    key = jax.random.key(seed)
    bits = jax.random.bits(key, (64, width), jnp.uint16)
    state = {
        "params": {"embed": jax.random.normal(key, (64, width)), "layers": [jax.lax.bitcast_convert_type(bits, jnp.bfloat16)]},
        "moments": (jax.random.normal(jax.random.fold_in(key, 1), (64, width)) * 1e-20,),
        "step": jnp.int32(seed),
        "empty": jnp.zeros((0, 4)),
        "special": jnp.array([0.0, -0.0, jnp.nan, jnp.inf, 1e-45, 3.4e38]),
        "key": jax.random.key(seed + 5),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 8),
    }
    if layout is None:
        return state
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(layout, spec if x.ndim == 2 and x.size else PartitionSpec())), state)


def abstract(state, layout=None, spec=REPLICATED):
    def one(x):
        sharding = x.sharding if layout is None else NamedSharding(layout, spec if x.ndim == 2 and x.size else PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(one, state)


def raw(leaf):
    """The bytes of an array, keys included."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b), path
