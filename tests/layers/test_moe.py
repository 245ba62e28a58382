"""A mixture against a loop over tokens and experts in NumPy float64, on every way to compute it: values and gradients within 1e-5."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from telamon.kernels.picks import noted
from telamon.layers.dispatch import by_expert, collect, dispatch
from telamon.layers.mlp import GatedMLPConfig
from telamon.layers.moe import MoEConfig
from telamon.layers.parts import Context, HowExperts
from telamon.layers.router import RouterConfig

B, T, D, F, E = 2, 12, 8, 6, 4
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"router": {"top_k": 2}},
    "biases and a limit": {"router": {"top_k": 3, "bias": True}, "bias": True, "activation": "swiglu_oss", "limit": 0.7},
    "weights on the input": {"router": {"top_k": 2, "score": "sigmoid", "renormalize": False, "weight_on": "input"}},
    "shared": {"router": {"top_k": 2, "score": "sigmoid", "selection_bias": True, "scale": 2.5}, "shared": GatedMLPConfig(d_ff=5)},
}
PATHS = {
    "auto": HowExperts(),
    "ragged_dot": HowExperts("ragged_dot"),
    "capacity": HowExperts("capacity", 4.0),
    "dense": HowExperts("dense"),
}
SEGMENTS = np.ones((B, T), np.int32)
SEGMENTS[0, 9:] = 0
SEGMENTS[1, 5:] = 2


def _config(kind: str) -> MoEConfig:
    options = dict(KINDS[kind])
    return MoEConfig(router=RouterConfig(n_experts=E, **options.pop("router")), d_ff=F, **options)


@functools.cache
def _layer(kind: str) -> tuple[Any, Any, jax.Array]:
    """Graph and random weights of a layer, and its input."""
    graph, weights = nnx.split(_config(kind).build(d_model=D, n_layers=1, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(7)
    weights = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32) / 2, weights)
    return graph, weights, jnp.asarray(rng.standard_normal((B, T, D)), jnp.float32)


def _context(how: HowExperts) -> Context:
    segments, places = jnp.asarray(SEGMENTS), jnp.broadcast_to(jnp.arange(T), (B, T))
    return replace(Context(segments, places, segments, places, segments), experts=how)


@functools.cache
def _run(kind: str, path: str) -> tuple[np.ndarray, Any, dict[str, Any]]:
    """Output, gradients of 2.5 times a sum by weights and input, and auxiliary terms."""
    graph, weights, x = _layer(kind)

    def objective(weights: Any, x: jax.Array) -> Any:
        y, aux = nnx.merge(graph, weights)(x, _context(PATHS[path]))
        return 2.5 * jnp.sum(jnp.sin(y)), (y, aux)

    gradients, (y, aux) = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))(weights, x)
    return np.asarray(y), gradients, aux


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _reference(kind: str) -> np.ndarray:
    config = _config(kind)
    graph, weights, x = _layer(kind)
    module = nnx.merge(graph, weights)
    routing = module.router(x, _context(HowExperts()))[0]
    w = {name: np.asarray(value[...], np.float64) for name, value in vars(module.experts).items() if isinstance(value, nnx.Param)}
    out = np.zeros((B, T, D))
    for row, place in np.ndindex(B, T):
        given = np.asarray(x[row, place], np.float64)
        for expert, weight in zip(routing.experts[row, place].tolist(), routing.weights[row, place].tolist(), strict=True):
            if expert == E:
                continue
            on_input = config.router.weight_on == "input"
            token = given * weight if on_input else given
            gate = token @ w["gate"][expert] + (w["gate_bias"][expert] if config.bias else 0)
            up = token @ w["up"][expert] + (w["up_bias"][expert] if config.bias else 0)
            if config.limit:
                gate, up = np.minimum(gate, config.limit), np.clip(up, -config.limit, config.limit)
            hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate)) if config.activation == "swiglu_oss" else _silu(gate) * up
            made = hidden @ w["down"][expert] + (w["down_bias"][expert] if config.bias else 0)
            out[row, place] += made if on_input else weight * made
    if config.shared is not None:
        shared = {name: np.asarray(getattr(module.shared, name)[...], np.float64) for name in ("gate", "up", "down")}
        out += (_silu(np.asarray(x, np.float64) @ shared["gate"]) * (np.asarray(x, np.float64) @ shared["up"])) @ shared["down"]
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_that_of_a_loop_over_tokens_and_experts(kind: str):
    np.testing.assert_allclose(_run(kind, "auto")[0], _reference(kind), rtol=0, atol=1e-5)


@pytest.mark.parametrize("path", ["ragged_dot", "capacity", "dense"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_agree_where_nothing_is_dropped(kind: str, path: str):
    ours, gradients, aux = _run(kind, path)
    wanted, expected, _ = _run(kind, "auto")
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), gradients, expected)
    if path == "capacity":
        assert [float(value) for value in aux["expert_dropped"]] == [0.0, int((SEGMENTS > 0).sum()) * _config(kind).router.top_k]


def test_repeats_are_equal_to_the_bit():
    """What a token's experts give is gathered and added in a fixed order; and other tokens of the batch do not enter it."""
    graph, weights, x = _layer("plain")
    run = jax.jit(lambda x: nnx.merge(graph, weights)(x, _context(HowExperts()))[0])
    assert (run(x) == run(x)).all()


def test_capacity_drops_what_comes_last():
    """One expert wanted by all: first choices in the order of the row keep their places, padding takes none, and the drops are counted."""
    config = MoEConfig(router=RouterConfig(n_experts=2, top_k=1), d_ff=F)
    module = config.build(d_model=D, n_layers=1, rngs=nnx.Rngs(0))
    module.router.weight[...] = jnp.zeros((D, 2)).at[:, 1].set(5.0)
    segments = jnp.ones((1, 8), jnp.int32).at[0, :2].set(0)  # padding in front
    places = jnp.broadcast_to(jnp.arange(8), (1, 8))
    ctx = Context(segments, places, segments, places, segments, experts=HowExperts("capacity", 0.5))  # 0.5 * 8 / 2 = 2 places
    with noted() as notes:
        y, aux = jax.jit(module)(jnp.ones((1, 8, D)), ctx)
    assert [str(pick) for pick in notes] == ["experts: capacity"]  # which the start of a run shows
    assert (np.abs(y[0]).sum(axis=-1) > 0).tolist() == [False, False, True, True, False, False, False, False]
    assert [float(value) for value in aux["expert_dropped"]] == [4.0, 6.0]


def test_second_choices_come_after_all_first_choices():
    """Tokens 0 and 1 want expert 0 second; tokens 2 and 3 want it first, and it has two places."""
    config = MoEConfig(router=RouterConfig(n_experts=2, top_k=2), d_ff=F)
    module = config.build(d_model=2, n_layers=1, rngs=nnx.Rngs(0))
    module.router.weight[...] = jnp.asarray([[0.0, 1.0], [1.0, 0.0]])
    x = jnp.asarray([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]])
    ones, places = jnp.ones((1, 4), jnp.int32), jnp.arange(4)[None]
    ctx = Context(ones, places, ones, places, ones)
    dropped, aux = jax.jit(module)(x, replace(ctx, experts=HowExperts("capacity", 0.5)))  # 0.5 * 4 * 2 / 2 = 2 places each
    assert float(aux["expert_dropped"][0]) == 4.0
    weight = float(jax.nn.sigmoid(1.0))
    first = [
        module.experts.weights.down[e].T
        @ (jax.nn.silu(x[0, t] @ module.experts.weights.gate[e]) * (x[0, t] @ module.experts.weights.up[e]))
        for t, e in ((0, 1), (1, 1), (2, 0), (3, 0))
    ]
    np.testing.assert_allclose(dropped[0], weight * np.stack(first), rtol=1e-5, atol=1e-6)


def test_sorting_and_its_gradient():
    experts = jnp.asarray([[2, 0], [4, 4], [1, 2], [0, 1]])  # 4 is nobody
    by = by_expert(experts, 4)
    assert by.experts.tolist() == [0, 0, 1, 1, 2, 2, 4, 4]
    assert by.order.tolist() == [1, 6, 4, 7, 0, 5, 2, 3], "of one expert, in the order of tokens"
    assert by.sizes.tolist() == [2, 2, 2, 0]
    x = jnp.asarray(np.random.default_rng(9).standard_normal((4, 3)), jnp.float32)
    probe = jnp.asarray(np.random.default_rng(10).standard_normal((4, 2, 3)), jnp.float32)

    def there_and_back(x: jax.Array) -> jax.Array:
        return jnp.sum(collect(dispatch(x, by), by, 2) * probe)

    np.testing.assert_allclose(jax.grad(lambda x: 2.5 * there_and_back(x))(x), 2.5 * probe.sum(axis=1), rtol=1e-6)
