"""Latent attention against loops in float64, its cache against the whole forward, and what the cache and its programs hold."""

import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy
import tiny
from flax import nnx
from jax.sharding import PartitionSpec

from telamon.config.schema import MeshConfig
from telamon.layers.latent_attention import LatentAttentionConfig
from telamon.layers.mlp import GatedMLPConfig
from telamon.layers.parts import Context
from telamon.layers.rope import LinearScaling, RopeConfig, YarnScaling
from telamon.models.decoder import Cache, Numerics
from telamon.models.spec import BlockSpec, ModelSpec
from telamon.models.weights import Model, Weights, flatten
from telamon.parallel.mesh import build_mesh
from telamon.parallel.rules import weight_partition
from telamon.plan.work import Attention
from telamon.plan.work import _attention as attention_layers
from telamon.train.job import model_flops

D, T = 12, 7
POSITIONS = np.array([0, 1, 2, 3, 0, 1, 0])
SEGMENTS = np.array([1, 1, 1, 1, 2, 2, 0])
SIZES: dict[str, Any] = {"n_heads": 3, "kv_rank": 10, "nope_dim": 8, "rope_dim": 6, "value_dim": 5}
YARN = YarnScaling(factor=40.0, original_length=64, mscale=0.707, mscale_all_dim=0.707)


def _module(config: LatentAttentionConfig) -> tuple[Any, dict[str, np.ndarray]]:
    """A layer with noise on every weight, and these by their path."""
    module = config.build(d_model=D, n_layers=2, rngs=nnx.Rngs(0))
    rng, weights = np.random.default_rng(0), {}
    for path, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        param[...] = param[...] + 0.3 * rng.standard_normal(param.shape).astype(np.float32)
        weights[".".join(map(str, path))] = np.asarray(param[...], np.float64)
    return module, weights


def _reference(config: LatentAttentionConfig, x: np.ndarray, weights: dict[str, np.ndarray], scale: float) -> np.ndarray:
    return reference_numpy.latent_mixer(
        x,
        weights,
        positions=POSITIONS,
        segments=SEGMENTS,
        angles=config.rope.inverse_frequencies(config.rope_dim).astype(np.float64),
        kv_rank=config.kv_rank,
        nope_dim=config.nope_dim,
        scale=scale,
        eps=1e-6,
    )


def _context() -> Context:
    positions, segments = jnp.asarray(POSITIONS)[None], jnp.asarray(SEGMENTS)[None]
    return Context(positions, positions, segments, positions, segments)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 14**-0.5),
        ({"q_rank": 9, "bias": True}, 14**-0.5),
        ({"q_rank": 9, "scale": 0.7, "value_dim": 16}, 0.7),
        ({"rope": RopeConfig(theta=50.0, scaling=YARN, pairs="interleaved")}, 14**-0.5 * 1.5896261651208736),
    ],
    ids=str,
)
def test_values_and_gradients_equal_loops_in_float64(options: dict[str, Any], scale: float):
    """Two packed documents and padding; of every weight and the input, the derivative in a random direction."""
    config = LatentAttentionConfig(**{**SIZES, **options})
    module, weights = _module(config)
    rng = np.random.default_rng(1)
    x, d_out = rng.standard_normal((T, D)), rng.standard_normal((T, D))
    graph, state = nnx.split(module)

    @jax.jit
    def ours(x: jax.Array, state: Any) -> Any:
        def loss(x, state):
            out, cache, aux = nnx.merge(graph, state)(x[None], _context(), None)
            assert cache is None and aux == {}
            return jnp.sum(out[0] * d_out), out[0]

        return jax.grad(loss, (0, 1), has_aux=True)(x, state)

    (d_x, d_state), out = ours(jnp.asarray(x, jnp.float32), state)
    x = np.asarray(x, np.float32).astype(np.float64)
    np.testing.assert_allclose(out, _reference(config, x, weights, scale), atol=2e-5)
    gradients = {".".join(map(str, path)): np.asarray(param[...]) for path, param in nnx.to_flat_state(d_state)} | {"x": np.asarray(d_x)}
    assert set(gradients) == {*weights, "x"}
    for name, gradient in gradients.items():
        direction, step = rng.standard_normal(gradient.shape), 1e-5

        def moved(by: float, name: str = name, direction: np.ndarray = direction) -> float:
            there = {**weights, "x": x} | {name: {**weights, "x": x}[name] + by * direction}
            return float(np.sum(d_out * _reference(config, there.pop("x"), there, scale)))

        expected = (moved(step) - moved(-step)) / (2 * step)
        assert np.sum(gradient * direction) == pytest.approx(expected, abs=1e-4 * np.sqrt(gradient.size)), name


def test_yarn_sharpens_the_scores_and_not_the_rotation():
    """With equal weights of both, cosines and sines keep their size, and 192 features a head are scaled by m(40, 0.707)^2."""
    deepseek: dict[str, Any] = {"n_heads": 16, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}

    def stretched(**of_yarn: Any) -> LatentAttentionConfig:
        return LatentAttentionConfig(**deepseek, rope=RopeConfig(scaling=YarnScaling(factor=40.0, original_length=4096, **of_yarn)))

    v2, v3 = stretched(mscale=0.707, mscale_all_dim=0.707), stretched(mscale=1.0, mscale_all_dim=1.0)
    assert v2.softmax_scale * 192**0.5 == pytest.approx(1.5896261651208736, rel=1e-14)
    assert v3.softmax_scale * 192**0.5 == pytest.approx(1.8738542070926265, rel=1e-14)
    assert v2.rope.amplitude == v3.rope.amplitude == 1.0
    assert stretched().softmax_scale == stretched(mscale=1.0).softmax_scale == 192**-0.5, (
        "without mscale_all_dim the scale is the plain one"
    )
    for scaling in (None, LinearScaling(factor=4.0)):
        assert LatentAttentionConfig(**deepseek, rope=RopeConfig(scaling=scaling)).softmax_scale == 192**-0.5


# Whole models. Eight heads and lengths that are no other size: a key or a value of every head is wider than what a cache holds.

LENGTH = 41
LATENT: dict[str, Any] = {"n_heads": 8, "q_rank": 20, "kv_rank": 12, "nope_dim": 10, "rope_dim": 6, "value_dim": 14}


def _model(numerics: Numerics | None = None, **changes: Any) -> Model:
    block = BlockSpec(mixer=LatentAttentionConfig(**{**LATENT, **changes}), ffn=GatedMLPConfig(d_ff=24))
    return Model(ModelSpec(vocab_size=64, d_model=16, blocks=(block, block)), numerics)


@functools.partial(jax.jit, static_argnums=0)
def _step(model: Model, weights: Weights, batch: dict[str, jax.Array], cache: Cache) -> tuple[jax.Array, Cache]:
    decoder = model.bind(weights)
    output = decoder(batch["tokens"], positions=batch["positions"], segments=batch["segments"], cache=cache)
    assert output.cache is not None
    return decoder.logits(output.hidden), output.cache


@functools.partial(jax.jit, static_argnums=0)
def _whole(model: Model, weights: Weights, batch: dict[str, jax.Array]) -> jax.Array:
    return tiny.logits(model.bind(weights), batch)


def _through_cache(model: Model, weights: Weights, batch: dict[str, Any], chunks: list[int]) -> np.ndarray:
    """Logits of a batch that is read in chunks of these numbers of tokens."""
    cache = model.bind(weights).init_cache(batch=len(batch["tokens"]), length=LENGTH)
    edges = np.cumsum([0, *chunks])
    parts = []
    for start, stop in itertools.pairwise(edges):
        logits, cache = _step(model, weights, {name: x[:, start:stop] for name, x in batch.items()}, cache)
        parts.append(np.asarray(logits))
    return np.concatenate(parts, axis=1)


MODEL = _model()


@pytest.mark.parametrize("q_rank", [20, None])
def test_prefill_and_decoding_over_latents_equal_the_whole_forward(q_rank: int | None):
    model = _model(q_rank=q_rank)
    weights, batch = tiny.weights(model), tiny.batch([[9], [9]], length=9)
    np.testing.assert_allclose(_through_cache(model, weights, batch, [5, 1, 1, 1, 1]), _whole(model, weights, batch), atol=1e-5)


def test_a_prompt_padded_on_the_left_decodes_as_it_would_alone():
    weights = tiny.weights(MODEL)
    alone = tiny.batch([[6]], length=6)
    padded = {name: np.pad(x, ((0, 0), (3, 0))) for name, x in alone.items()}
    np.testing.assert_allclose(_through_cache(MODEL, weights, padded, [5, 1, 1, 1, 1])[:, 3:], _whole(MODEL, weights, alone), atol=1e-5)


def test_bfloat16_over_latents_stays_near_float32():
    """As near as the forward without a cache: the products that are joined differ in rounding only."""
    narrow = _model(Numerics(dtype="bfloat16"))
    weights, batch = tiny.weights(MODEL), tiny.batch([[9], [9]], length=9)
    exact = np.asarray(_whole(MODEL, weights, batch))
    for logits in (_through_cache(narrow, weights, batch, [5, 1, 1, 1, 1]), np.asarray(_whole(narrow, weights, batch))):
        assert np.linalg.norm(logits - exact) < 2e-2 * np.linalg.norm(exact)


def test_a_cache_holds_one_latent_and_one_rotated_key_a_token():
    """12 + 6 values, where keys and values of eight heads would be 8 * (16 + 14)."""
    cache = jax.eval_shape(lambda: MODEL.bind(tiny.weights(MODEL)).init_cache(batch=3, length=LENGTH))
    assert [x.shape for x in jax.tree.leaves(cache.layers)] == [(2, 3, LENGTH, 18)]


def _largest_over_keys(compiled: Any) -> int:
    """Values a key in the largest array of a compiled program that has the cache's length among its sizes."""
    shapes = [[int(size) for size in text.split(",")] for text in set(re.findall(r"\w+\[([\d,]+)\]", compiled.as_text()))]
    return max(math.prod(shape) // LENGTH for shape in shapes if LENGTH in shape)


def test_decoding_makes_no_keys_or_values_of_every_head():
    """For a row of 41 places nothing is larger than the cache of both layers; the whole forward has keys of all heads."""
    weights, batch = MODEL.abstract(), tiny.batch([[1]], length=1)
    cache = jax.eval_shape(lambda: MODEL.bind(tiny.weights(MODEL)).init_cache(batch=1, length=LENGTH))
    decoding = _step.lower(MODEL, weights, batch, cache).compile()
    assert _largest_over_keys(decoding) == 2 * 18 < 8 * 10
    whole = _whole.lower(MODEL, weights, tiny.batch([[LENGTH]], length=LENGTH)).compile()
    assert _largest_over_keys(whole) >= 8 * (10 + 14)


def test_weights_are_split_over_features_and_heads():
    mesh = build_mesh(MeshConfig(fsdp=2, tensor=4), devices=jax.devices())
    declared = {path.rpartition(".mixer.")[2]: info for path, info in flatten(MODEL.info).items() if ".mixer." in path}
    parts = {name: weight_partition(mesh, info.axes, info.shape)[1:] for name, info in declared.items() if info.matrix is not None}
    assert parts == {
        "query_down": ("fsdp", None),
        "query_up": ("fsdp", "tensor", None),
        "kv_down": ("fsdp", None),
        "kv_up": ("fsdp", "tensor", None),
        "out": ("tensor", None, "fsdp"),
    }
    (query,) = (info for path, info in flatten(_model(q_rank=None).info).items() if path.endswith("mixer.query"))
    assert weight_partition(mesh, query.axes, query.shape) == PartitionSpec("stage", "fsdp", "tensor", None)


def test_on_a_mesh_it_computes_and_decodes_as_on_one_device():
    weights, batch = tiny.weights(MODEL), tiny.batch([[9], [9]], length=9)
    alone = np.asarray(_whole(MODEL, weights, batch))
    model, mesh = _model(), build_mesh(MeshConfig(fsdp=2, tensor=2), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = jax.device_put(weights, model.shardings(mesh))
        np.testing.assert_allclose(_whole(model, placed, batch), alone, atol=1e-5)
        np.testing.assert_allclose(_through_cache(model, placed, batch, [8, 1]), alone, atol=1e-5)


def test_the_flops_rule_counts_keys_and_values_by_their_own_widths():
    """A pair costs 2 N H for its score and 2 N U for its value, three times with the backward pass; T / 2 pairs a token."""
    by_hand = 6 * MODEL.matmul_parameters + 2 * 3 * 2 * 8 * (16 + 14) * 100 / 2
    assert model_flops(MODEL, seq_len=100) == pytest.approx(by_hand)
    assert list(attention_layers(MODEL)) == [Attention(8, 16, count=2, value_dim=14)]
