"""DeepSeek V2, V3 and Kimi: what transformers 5.12.1 cannot answer for, constants of the presets, and what a config.json may say."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError
from reference import fixtures

from telamon.config.load import load_run
from telamon.errors import ConfigError
from telamon.layers.parts import Context
from telamon.models.deepseek import DeepseekSizes, DeepseekV2Config, DeepseekV3Config
from telamon.models.hf import config_from_hf

D, T = 6, 40


def _routed(config: DeepseekSizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits of random tokens in float64, and the experts and weights that the family's router gives them."""
    router = config.router().build(d_model=D, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((T, D)), rng.standard_normal((D, config.n_experts))
    router.weight[...] = jnp.asarray(weight, jnp.float32)
    if config.router().selection_bias:
        router.selection_bias[...] = jnp.asarray(BIAS, jnp.float32)
    places = jnp.arange(T)[None]
    ctx = Context(places, places, jnp.ones_like(places), places, jnp.ones_like(places))
    routing, _ = jax.jit(lambda x: router(x, ctx))(jnp.asarray(x[None], jnp.float32))
    return x @ weight, np.asarray(routing.experts[0]), np.asarray(routing.weights[0])


BIAS = np.tile([0.3, 0.2, -1.2, -1.4], 3)
"""Of twelve experts; half have biased scores below zero, so that a mask of zeros would rank hidden experts above them."""


def _by_token(experts: np.ndarray, weights: np.ndarray) -> list[dict[int, float]]:
    return [dict(zip(e.tolist(), w.tolist(), strict=True)) for e, w in zip(experts, weights, strict=True)]


def _check(ours: list[dict[int, float]], expected: list[dict[int, float]]) -> None:
    assert [set(token) for token in ours] == [set(token) for token in expected]
    for token, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose([token[e] for e in sorted(token)], [other[e] for e in sorted(other)], atol=1e-5)


def test_v2_chooses_within_the_groups_of_the_best_experts():
    """Four groups of three: the two with the best single scores are kept, and three experts of those, weighted by the softmax over all."""
    config = DeepseekV2Config(n_experts=12, top_k=3, n_groups=4, top_groups=2, expert_scale=16.0)
    logits, experts, weights = _routed(config)
    expected, plain = [], 0
    for token in logits:
        scores = np.exp(token - token.max())
        scores /= scores.sum()
        groups = np.argsort(-scores.reshape(4, 3).max(axis=1))[:2]
        allowed = [e for e in range(12) if e // 3 in groups]
        best = sorted(allowed, key=lambda e: -scores[e])[:3]
        plain += set(best) == set(np.argsort(-scores)[:3].tolist())
        expected.append({e: 16.0 * scores[e] for e in best})
    _check(_by_token(experts, weights), expected)
    assert plain < T, "the groups decide for some token"


def test_v3_chooses_by_biased_scores_and_weighs_by_the_scores_themselves():
    """Groups are ranked by the sum of their two best biased scores; the weights of the chosen sum to the factor."""
    config = DeepseekV3Config(n_experts=12, top_k=4, n_groups=3, top_groups=1, expert_scale=2.5)
    logits, experts, weights = _routed(config)
    expected, below_zero = [], 0
    for token in logits:
        scores = 1 / (1 + np.exp(-token))
        biased = scores + BIAS
        group = int(np.argmax(np.sort(biased.reshape(3, 4), axis=1)[:, -2:].sum(axis=1)))
        best = sorted(range(4 * group, 4 * group + 4), key=lambda e: -biased[e])[:4]
        below_zero += any(biased[e] < 0 for e in best)
        expected.append({e: 2.5 * scores[e] / sum(scores[best]) for e in best})
    _check(_by_token(experts, weights), expected)
    np.testing.assert_allclose(weights.sum(axis=-1), 2.5, rtol=1e-5)
    assert below_zero, "some chosen expert has a score below zero"


def preset(name: str) -> Any:
    return load_run(overrides=[f"model.preset={name}"]).config.model


@pytest.mark.parametrize(
    ("name", "sharpened", "low", "high"),
    [
        ("deepseek-v2-lite-16b", 1.5896261651208736, 10, 23),
        ("deepseek-v2-236b", 1.5896261651208736, 10, 23),
        ("deepseek-v3-671b", 1.8738542070926265, 10, 23),
        ("kimi-k2-1t", 1.3465735902799727**2, 19, 20),
        ("kimi-k2-0905", 2.004739701682487, 19, 20),
        ("kimi-k2-thinking", 2.004739701682487, 19, 20),
        ("kimi-k2.5-text", 2.004739701682487, 8, 20),
    ],
)
def test_rotary_constants_of_the_presets(name: str, sharpened: float, low: int, high: int):
    """YaRN keeps cosines and sines as they are and multiplies the softmax's scale; pairs up to `low` turn as before, from `high` on slower."""
    model = preset(name)
    mixer = model.spec().blocks[0].mixer
    assert mixer.softmax_scale == pytest.approx(192**-0.5 * sharpened, rel=1e-12)
    assert mixer.rope.amplitude == 1.0
    assert mixer.rope.pairs == "interleaved"
    plain = model.rope_theta ** (-np.arange(32) / 32)
    frequencies = mixer.rope.inverse_frequencies(64)
    np.testing.assert_allclose(frequencies[: low + 1], plain[: low + 1], rtol=1e-6)
    np.testing.assert_allclose(frequencies[high:], plain[high:] / model.rope_scaling.factor, rtol=1e-6)


def test_latents_have_an_epsilon_of_their_own():
    """1e-6, whatever the other norms have."""
    block = preset("kimi-k2.5-text").spec().blocks[0]
    assert (block.norm.eps, block.mixer.norm.eps) == (1e-5, 1e-6)


@pytest.mark.parametrize(
    ("fixture", "changes", "message"),
    [
        (
            "deepseek-v2",
            {"norm_topk_prob": True},
            "norm_topk_prob=True cannot be read; the weights of the chosen experts are not made to sum",
        ),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' cannot be read; .*'greedy' or 'group_limited_greedy'"),
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' cannot be read; the family scores experts so: 'softmax'"),
        ("deepseek-v2", {"mlp_bias": True}, "mlp_bias=True cannot be read"),
        ("deepseek-v2", {"num_key_value_heads": 2}, "num_key_value_heads=2 cannot be read; every head has keys and values of its own"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 cannot be read; behind the dense layers, all have experts"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method='greedy' cannot be read"),
        ("deepseek-v3", {"num_local_experts": 9}, "num_local_experts=9 cannot be read; n_routed_experts=8 says otherwise"),
        ("deepseek-v3", {"n_group": 3}, r"model.n_experts=8 is not divisible by model.n_groups=3; allowed for n_groups: \[1, 2, 4, 8\]"),
        ("kimi-k2", {"index_topk": 2048}, "not known here: index_topk=2048"),
    ],
)
def test_what_would_change_numbers_is_refused_by_name(fixture: str, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(fixtures.load(fixture).config | changes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"n_experts": 8, "n_groups": 2, "top_groups": 3}, "model.top_groups=3 is more than the model.n_groups=2 that there are"),
        ({"n_experts": 8, "n_groups": 4, "top_k": 3}, "model.top_k=3 is more than the 2 experts of model.top_groups=1"),
        ({"n_experts": 8, "top_k": 9}, "model.top_k=9 is more than the model.n_experts=8 that there are"),
    ],
)
def test_experts_that_cannot_be_chosen_are_refused_with_the_numbers(sizes: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        DeepseekV3Config(**sizes)


def test_v2_files_name_groups_that_only_one_method_heeds():
    """As in transformers: with `greedy`, the groups of the file are not looked at."""
    raw = fixtures.load("deepseek-v2").config | {"n_group": 2, "topk_group": 1}
    read: Any = functools.partial(config_from_hf)
    assert read(raw).n_groups == 1
    limited = read(raw | {"topk_method": "group_limited_greedy"})
    assert (limited.n_groups, limited.top_groups) == (2, 1)
    assert config_from_hf(limited.to_hf()) == limited


def test_layers_that_predict_further_tokens_are_those_that_the_file_has():
    """What transformers saves names such a layer in its config.json, and lacks its tensors."""
    config = config_from_hf(fixtures.load("deepseek-v3-mtp").config)
    assert config.as_stored(["model.norm.weight", "model.layers.2.enorm.weight"]) == config
    without = config.as_stored(["model.norm.weight", "model.layers.1.mlp.gate.weight"])
    assert without.spec() == config.spec().main != config.spec()
    assert len(config.model_copy(update={"mtp_layers": 2}).spec().mtp) == 2
