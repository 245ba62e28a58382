"""The parts of a block against loops in float64."""

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy
from flax import nnx
from pydantic import ValidationError

from telamon.layers.attention import AttentionConfig
from telamon.layers.mlp import GatedMLPConfig, gated
from telamon.layers.norm import NormConfig
from telamon.layers.parts import Context, register
from telamon.layers.rope import RopeConfig
from telamon.models.spec import BlockSpec

D, T = 12, 7
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 0]])
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 0]])


def _noisy(module: nnx.Module) -> dict[str, np.ndarray]:
    """Put noise on every weight of a module; give them by dotted path."""
    rng = np.random.default_rng(0)
    flat = {}
    for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        value = param[...] + 0.3 * rng.standard_normal(param.shape).astype(np.float32)
        flat[".".join(map(str, path))] = np.asarray(value, np.float64)
        owner = module
        for name in path[:-1]:
            owner = getattr(owner, str(name))
        getattr(owner, str(path[-1]))[...] = value
    return flat


def _input() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((1, T, D)).astype(np.float32)


def _context() -> Context:
    positions, segments = jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS)
    return Context(positions, positions, segments, positions, segments)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_kv_heads": 1},
        {"n_kv_heads": 4},
        {"qkv_bias": True},
        {"qkv_bias": True, "out_bias": True, "qk_norm": NormConfig(eps=1e-2)},
        {"rope": RopeConfig(theta=50.0)},
    ],
    ids=str,
)
def test_attention_equals_loops_over_heads_and_tokens(options: dict[str, Any]):
    config = AttentionConfig(**{"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, **options})
    module: Any = config.build(d_model=D, n_layers=2, rngs=nnx.Rngs(0))
    weights = _noisy(module)
    x = _input()
    out, cache, aux = jax.jit(lambda x: module(x, _context(), None))(x)
    expected = reference_numpy.mixer(
        x[0].astype(np.float64),
        weights,
        positions=POSITIONS[0],
        segments=SEGMENTS[0],
        theta=config.rope.theta if config.rope else 0,
        eps=1e-2,
    )
    np.testing.assert_allclose(out[0], expected, atol=1e-5)
    assert cache is None
    assert aux == {}


@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp_equals_the_formula(bias: bool):
    module: Any = GatedMLPConfig(d_ff=20, bias=bias).build(d_model=D, n_layers=2, rngs=nnx.Rngs(0))
    weights = _noisy(module)
    assert len(weights) == (6 if bias else 3)
    x = _input()
    out, aux = jax.jit(lambda x: module(x, _context()))(x)
    np.testing.assert_allclose(out[0], reference_numpy.gated_mlp(x[0].astype(np.float64), weights), atol=1e-5)
    assert aux == {}


GATES = {
    "silu": lambda x, up: x / (1 + np.exp(-x)) * up,
    "gelu_tanh": lambda x, up: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) * up,
    "swiglu_oss": lambda x, up: x / (1 + np.exp(-1.702 * x)) * (up + 1),
}


@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("activation", GATES)
def test_gates_and_their_own_backward_pass_equal_the_formula(activation: str, limit: float | None):
    """Against differences in float64, with a cotangent other than 1; beyond the limit a gradient is zero, and a gate has no lower limit."""
    gate, up, d_out = np.random.default_rng(0).standard_normal((3, 4, 9)).astype(np.float32).astype(np.float64)

    def formula(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return GATES[activation](gate, up) if limit is None else GATES[activation](np.minimum(gate, limit), np.clip(up, -limit, limit))

    out, pullback = jax.vjp(functools.partial(gated, activation, limit), *(jnp.asarray(x, jnp.float32) for x in (gate, up)))
    d_gate, d_up = pullback(jnp.asarray(2.5 * d_out, jnp.float32))
    np.testing.assert_allclose(out, formula(gate, up), atol=1e-6)
    step = 1e-6
    np.testing.assert_allclose(d_gate, 2.5 * d_out * (formula(gate + step, up) - formula(gate - step, up)) / (2 * step), atol=1e-5)
    np.testing.assert_allclose(d_up, 2.5 * d_out * (formula(gate, up + step) - formula(gate, up - step)) / (2 * step), atol=1e-5)
    if limit is not None:
        assert not d_gate[gate > limit].any() and not d_up[np.abs(up) > limit].any()
        assert (gate > limit).any() and (up > limit).any() and (up < -limit).any()
        assert d_gate[gate < -limit].all()


def test_a_gate_at_its_limit_keeps_its_gradient():
    """As in PyTorch. In bfloat16 many values fall on the limit itself."""
    at = jnp.asarray([[7.0, -7.0]], jnp.bfloat16)
    d_gate, d_up = jax.vjp(functools.partial(gated, "swiglu_oss", 7.0), at, at)[1](jnp.ones((1, 2), jnp.bfloat16))
    np.testing.assert_allclose(d_up.astype(jnp.float32), [[7.0, -7.0 / (1 + np.exp(1.702 * 7))]], rtol=1e-2)
    np.testing.assert_allclose(d_gate[0, 0].astype(jnp.float32), 8.0, rtol=1e-2)


def test_the_mlp_hands_its_limit_on():
    plain, cut = (GatedMLPConfig(d_ff=20, activation="swiglu_oss", limit=limit) for limit in (None, 0.1))
    module: Any = plain.build(d_model=D, n_layers=2, rngs=nnx.Rngs(0))
    out = module(_input(), _context())[0]
    module.config = cut
    assert np.abs(module(_input(), _context())[0] - out).max() > 0.01


def test_maps_into_the_stream_start_smaller_in_deeper_models():
    """Each of 2 L outputs added to the stream has variance 1 / (2 L) of an input map's."""
    module: Any = GatedMLPConfig(d_ff=256).build(d_model=256, n_layers=8, rngs=nnx.Rngs(0))
    assert float(jnp.std(module.up[...])) == pytest.approx(256**-0.5, rel=0.02)
    assert float(jnp.std(module.down[...])) == pytest.approx(256**-0.5 / 4, rel=0.02)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValidationError, match=r"n_heads=6 is not divisible by n_kv_heads=4"):
        AttentionConfig(n_heads=6, n_kv_heads=4, head_dim=8)


def test_parts_are_found_by_kind():
    mixer, ffn = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=8, qk_norm=NormConfig()), GatedMLPConfig(d_ff=16)
    block = BlockSpec(mixer=mixer, ffn=ffn)
    assert BlockSpec.model_validate(block.model_dump()) == block
    with pytest.raises(ValidationError, match=r"no part of kind 'gated_mpl'; known: .*gated_mlp"):
        BlockSpec.model_validate({"mixer": mixer, "ffn": {"kind": "gated_mpl", "d_ff": 16}})


def test_a_kind_is_registered_once():
    with pytest.raises(ValueError, match="kind 'gated_mlp' is registered already"):

        @register
        class Impostor(GatedMLPConfig):
            pass


def test_what_layers_share_is_used_for_the_settings_and_the_arrays_that_it_was_made_for():
    """A mixer may hold an attention that no pattern names, and have it see other positions: what others share is not for that one."""
    shared, own = (AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=6, rope=RopeConfig(theta=theta)) for theta in (50.0, 7.0))
    plain, x = _context(), jnp.asarray(_input())
    prepared = plain.prepared([shared])
    module = own.build(d_model=D, n_layers=1, rngs=nnx.Rngs(0))
    _noisy(module)
    np.testing.assert_array_equal(module(x, prepared, None)[0], module(x, plain, None)[0])
    module.config = shared
    alone, together = (module(x, ctx, None)[0] for ctx in (plain, prepared))
    np.testing.assert_array_equal(together, alone)
    moved = [replace(ctx, positions=3 * plain.positions, key_positions=3 * plain.positions) for ctx in (plain, prepared)]
    elsewhere, expected = (module(x, ctx, None)[0] for ctx in moved[::-1])
    np.testing.assert_array_equal(elsewhere, expected)
    assert not np.allclose(expected, alone)


def test_layers_with_the_same_settings_turn_positions_once():
    """In a loop over layers too, whose body is traced apart."""
    config = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=6, rope=RopeConfig())
    module = config.build(d_model=D, n_layers=1, rngs=nnx.Rngs(0))

    def layers(x, positions, segments):
        ctx = Context(positions, positions, segments, positions, segments).prepared([config])
        layer = jax.checkpoint(lambda x: module(x, ctx, None)[0])
        return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=3)[0]

    jaxpr = jax.make_jaxpr(layers)(jnp.asarray(_input()), POSITIONS, SEGMENTS)
    assert len(re.findall(r"\bsin\b", str(jaxpr))) == 1
