"""The parts of a block against loops in float64."""

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


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_gates_own_backward_pass_equals_autodiff(activation: str):
    """With a cotangent other than 1, for both inputs."""
    formulas = {
        "silu": lambda x: x / (1 + jnp.exp(-x)),
        "gelu_tanh": lambda x: x / 2 * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3))),
    }
    gate, up, d_out = (jnp.asarray(x, jnp.float32) for x in np.random.default_rng(0).standard_normal((3, 4, 9)))

    def both(function: Any) -> Any:
        return jax.jit(lambda gate, up: jax.vjp(function, gate, up)[1](2.5 * d_out))(gate, up)

    for ours, theirs in zip(
        both(lambda gate, up: gated(activation, gate, up)), both(lambda gate, up: formulas[activation](gate) * up), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


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
