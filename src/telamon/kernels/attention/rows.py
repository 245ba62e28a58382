"""What kernels share that work on whole rows of one device: how a batch is split between devices, and where documents lie."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from telamon.kernels.attention.rule import Places, Request, Scores
from telamon.parallel.rules import ACTIVATION_RULES, spec

_HEADS = spec(("batch", "seq", "heads", "head_dim"), ACTIVATION_RULES)
_KV_HEADS = spec(("batch", "seq", "kv_heads", "head_dim"), ACTIVATION_RULES)
_ROWS = spec(("batch", "seq"), ACTIVATION_RULES)
_SINKS = spec(("heads",), ACTIVATION_RULES)


def refusal(request: Request) -> str | None:
    """Why a request does not come apart into whole rows and heads, a share for each device; None: it does."""
    rows, parts, heads = (request.target.extent(names) for names in tuple(_HEADS)[:3])
    if not request.aligned:
        return "it masks by index, and the keys of a cache are not the queries'"
    if parts > 1:
        return f"a row would be split over {parts} devices (mesh axis context), and it needs whole rows"
    if request.B % rows:
        return f"{request.B} rows do not split evenly over {rows} devices"
    if request.K % heads or request.N % heads:
        return f"{request.K} kv heads do not split evenly over {heads} devices (mesh axis tensor)"
    return None


def rows_of_device(request: Request) -> int:
    """Rows that one device computes."""
    return request.B // request.target.extent(_HEADS[0])


def on_each_device(
    function: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, places: Places, sinks: jax.Array | None
) -> jax.Array:
    """`function(q, k, v, places, sinks)` of each device's own rows and heads: the compiler cannot split a kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        # A kernel's outputs do not say over which axes they vary, so that this cannot be checked.
        in_specs = (_HEADS, _KV_HEADS, _KV_HEADS, _ROWS, None if sinks is None else _SINKS)
        function = jax.shard_map(function, in_specs=in_specs, out_specs=_HEADS, check_vma=False)
    return function(q, k, v, places, sinks)


def first_keys(places: Places, scores: Scores) -> jax.Array:
    """Index of the first key that each query of an aligned row sees [B, T]; the last is the query itself, for padding too.

    A document's tokens lie together and their positions rise by one, so what a query sees has no gap.
    """
    index = jnp.arange(places.segments.shape[1], dtype=jnp.int32)[None]
    before = jnp.pad(places.segments, ((0, 0), (1, 0)))[:, :-1]
    first = jax.lax.cummax(jnp.where((places.segments != before) | (index == 0), index, 0), axis=1)
    if scores.window is not None:
        first = jnp.maximum(first, index - scores.window + 1)
    if scores.chunk is not None:
        first = jnp.maximum(first, index - places.positions % scores.chunk)
    return jnp.where(places.segments > 0, first, index)
