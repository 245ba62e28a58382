"""What some models add to attention, against loops in float64; packed documents as if alone; and token by token through the cache."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy
from flax import nnx
from pydantic import ValidationError

from telamon.layers.attention import AttentionConfig, TemperatureConfig
from telamon.layers.norm import NormConfig
from telamon.layers.parts import Context, LayerCache
from telamon.layers.rope import RopeConfig

D, N, K, H = 12, 4, 2, 6
THETA, EPS = 50.0, 1e-2
INTERLEAVED = RopeConfig(theta=THETA, pairs="interleaved")
LENGTHS = (11, 5)
POSITIONS = np.concatenate([np.arange(size) for size in (*LENGTHS, 2)])
SEGMENTS = np.repeat([1, 2, 0], (*LENGTHS, 2))

VARIANTS: dict[str, dict[str, Any]] = {
    "sinks": {"rope": RopeConfig(theta=THETA), "sinks": True},
    "sinks in a window": {"rope": RopeConfig(theta=THETA), "sinks": True, "window": 3},
    "chunks": {"rope": INTERLEAVED, "chunk": 4},
    "norm after": {"rope": INTERLEAVED, "qk_norm": NormConfig(kind="rms0", eps=EPS), "qk_norm_place": "after"},
    "norm before": {"rope": INTERLEAVED, "qk_norm": NormConfig(kind="rms", eps=EPS)},
    "temperature": {"rope": None, "temperature": TemperatureConfig(scale=0.7, floor=3)},
}


def _module(name: str) -> tuple[AttentionConfig, Any]:
    """With weights that make scores large enough to tell every rule apart."""
    config = AttentionConfig(n_heads=N, n_kv_heads=K, head_dim=H, **VARIANTS[name])
    module: Any = config.build(d_model=D, n_layers=1, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(3)
    state = nnx.state(module, nnx.Param)
    nnx.update(module, jax.tree.map(lambda x: x + 0.5 * rng.standard_normal(x.shape).astype(np.float32), state))
    return config, module


def _input() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((1, len(POSITIONS), D)).astype(np.float32)


def _context(places: slice) -> Context:
    positions, segments = jnp.asarray(POSITIONS[None, places]), jnp.asarray(SEGMENTS[None, places])
    return Context(positions, positions, segments, positions, segments)


def _by_loops(config: AttentionConfig, module: Any, x: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """The layer's output [T, D] for x [T, D], straight from what is published of these models."""
    weights = {name: np.asarray(getattr(module, name)[...], np.float64) for name in ("query", "key", "value", "out")}
    q, k, v = (np.einsum("td,dnh->tnh", x.astype(np.float64), weights[name]) for name in ("query", "key", "value"))
    norm, after = config.qk_norm, config.qk_norm_place == "after"

    def normed(heads: np.ndarray, learned: str) -> np.ndarray:
        scale = np.ones(H) if norm is None or norm.kind == "rms0" else np.asarray(getattr(module, learned).scale[...], np.float64)
        return heads if norm is None else reference_numpy.rms_norm(heads, scale, EPS)

    def placed(heads: np.ndarray, learned: str) -> np.ndarray:
        heads = heads if after else normed(heads, learned)
        if config.rope is not None:
            turn = reference_numpy.rotate_neighbours if config.rope.pairs == "interleaved" else reference_numpy.rotate
            heads = np.array([[turn(head, int(p), THETA) for head in token] for token, p in zip(heads, POSITIONS, strict=True)])
        return normed(heads, learned) if after else heads

    q, k = placed(q, "query_norm"), placed(k, "key_norm")
    if config.temperature is not None:
        q = q * np.array([1 + 0.7 * np.log(1 + (p + 1) // 3) for p in POSITIONS])[:, None, None]
    sees = reference_numpy.sees(POSITIONS, SEGMENTS)
    if config.window is not None:
        sees &= POSITIONS[:, None] - POSITIONS[None, :] < config.window
    if config.chunk is not None:
        sees &= POSITIONS[:, None] // config.chunk == POSITIONS[None, :] // config.chunk
    return np.einsum("tnh,nhd->td", reference_numpy.attention(q, k, v, sees, sinks), weights["out"])


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_loops_over_heads_and_tokens(name: str):
    """And differs visibly from the layer without what the variant is about."""
    config, module = _module(name)
    sinks = np.asarray(module.sinks[...], np.float64) if config.sinks else None
    x = _input()
    out, _, _ = jax.jit(lambda x: module(x, _context(slice(None)), None))(x)
    np.testing.assert_allclose(out[0], _by_loops(config, module, x[0], sinks), atol=2e-5)
    plain = config.model_copy(update={"chunk": None, "temperature": None, "qk_norm": None, "window": None})
    without = _by_loops(plain, module, x[0], None)
    assert np.abs(out[0] - without).max() > 0.05


@pytest.mark.parametrize("name", VARIANTS)
def test_documents_of_a_row_are_as_if_alone(name: str):
    """Chunks and temperatures count positions within the document, not places in the row."""
    _, module = _module(name)
    x = _input()
    together = module(x, _context(slice(None)), None)[0]
    start = 0
    for size in LENGTHS:
        places = slice(start, start + size)
        np.testing.assert_allclose(together[:, places], module(x[:, places], _context(places), None)[0], atol=1e-5)
        start += size
    np.testing.assert_array_equal(together[:, start:], 0.0)


@pytest.mark.parametrize("name", VARIANTS)
def test_token_by_token_through_the_cache(name: str):
    """Across the borders of chunks and of the temperature's steps: a prompt of 5 tokens, then one at a time."""
    config, module = _module(name)
    length = LENGTHS[0]
    x = _input()[:, :length]
    whole = module(x, _context(slice(length)), None)[0]
    cache = LayerCache({key: jnp.zeros((1, *shape)) for key, shape in config.cache_shapes(batch=1, length=16).items()}, jnp.int32(0))
    index = np.arange(16)

    @jax.jit
    def step(x: jax.Array, positions: jax.Array, written: jax.Array, cache: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        keys = jnp.asarray(index)[None], (jnp.asarray(index)[None] < written + x.shape[1]).astype(jnp.int32)
        ctx = Context(positions, positions, jnp.ones_like(positions), *keys, write_index=written)
        out, kept, _ = module(x, ctx, LayerCache(cache, jnp.int32(0)))
        return out, kept.stacked

    stacked, outs = cache.stacked, []
    for start, stop in [(0, 5), *((t, t + 1) for t in range(5, length))]:
        out, stacked = step(jnp.asarray(x[:, start:stop]), jnp.arange(start, stop)[None], jnp.int32(start), stacked)
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), whole, atol=1e-5)


def test_the_gradient_of_sinks_is_that_of_the_loops():
    """By differences in float64, for a cotangent other than 1; a sink that takes more leaves less of every value."""
    config, module = _module("sinks in a window")
    x, weight = _input(), np.random.default_rng(4).standard_normal((len(POSITIONS), D))
    sinks = np.asarray(module.sinks[...], np.float64)
    graph, state = nnx.split(module)

    def total(state: nnx.State) -> jax.Array:
        return jnp.sum(weight * nnx.merge(graph, state)(x, _context(slice(None)), None)[0][0])

    gradient = jax.jit(jax.grad(total))(state)["sinks"][...]
    step = 1e-5
    for n in range(N):
        values = [np.sum(weight * _by_loops(config, module, x[0], sinks + sign * step * np.eye(N)[n])) for sign in (1, -1)]
        assert gradient[n] == pytest.approx((values[0] - values[1]) / (2 * step), abs=2e-5)
    assert np.abs(gradient).min() > 1e-3


def test_a_fresh_sink_is_a_score_of_zero():
    module: Any = AttentionConfig(n_heads=N, n_kv_heads=K, head_dim=H, sinks=True).build(d_model=D, n_layers=1, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(module.sinks[...], np.zeros(N))
    assert module.sinks.axes == ("heads",)


def test_a_window_and_chunks_are_not_both_for_one_layer():
    with pytest.raises(ValidationError, match=r"not both; got window=3 and chunk=4"):
        AttentionConfig(n_heads=N, n_kv_heads=K, head_dim=H, window=3, chunk=4)
