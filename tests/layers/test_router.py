"""The router against its formulas in NumPy float64, and what must not change a token's way."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError

from telamon.layers.parts import Context, HowExperts, Load
from telamon.layers.router import Router, RouterConfig
from telamon.train.loss import balance_term

D, E = 6, 8
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"top_k": 2},
    "Qwen3 without renormalisation": {"top_k": 3, "renormalize": False},
    "GPT-OSS": {"top_k": 4, "bias": True},
    "Llama 4": {"top_k": 1, "score": "sigmoid", "renormalize": False, "weight_on": "input"},
    "DeepSeek V2": {"top_k": 3, "renormalize": False, "scale": 16.0, "n_groups": 4, "top_groups": 2, "group_score": "best"},
    "DeepSeek V3": {"top_k": 3, "score": "sigmoid", "selection_bias": True, "scale": 2.5, "n_groups": 4, "top_groups": 2},
    "Kimi K2": {"top_k": 3, "score": "sigmoid", "selection_bias": True, "scale": 2.827},
    "square root of softplus": {"top_k": 2, "score": "sqrt_softplus", "selection_bias": True, "scale": 1.5},
}


def _context(segments: np.ndarray, **changes: Any) -> Context:
    places = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    ids = jnp.asarray(segments, jnp.int32)
    return replace(Context(ids, places, ids, places, ids), **changes)


def _router(config: RouterConfig, seed: int = 0) -> Router:
    router = config.build(d_model=D, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(seed)
    router.weight[...] = jnp.asarray(rng.standard_normal((D, config.n_experts)), jnp.float32)
    if config.bias:
        router.bias[...] = jnp.asarray(rng.standard_normal(config.n_experts), jnp.float32)
    if config.selection_bias:  # large enough to change choices, and to make scores negative
        router.selection_bias[...] = jnp.asarray(rng.standard_normal(config.n_experts), jnp.float32)
    return router


def _reference(config: RouterConfig, router: Router, x: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Experts and weights of one token, as the papers write them."""
    logits = x.astype(np.float64) @ np.asarray(router.weight[...], np.float64)
    logits += np.asarray(router.bias[...], np.float64) if config.bias else 0.0
    if config.score == "softmax":
        scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    elif config.score == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.sqrt(np.log1p(np.exp(logits)))
    ranked = scores + (np.asarray(router.selection_bias[...], np.float64) if config.selection_bias else 0.0)
    groups = ranked.reshape(config.n_groups, -1)
    taken = {"best": 1, "best_two": 2}[config.group_score]
    ranks = np.sort(groups, axis=1)[:, ::-1][:, :taken].sum(axis=1)
    for group in np.argsort(-ranks)[config.top_groups :]:
        groups[group] = -np.inf
    chosen = np.argsort(-groups.reshape(-1), kind="stable")[: config.top_k]
    weights = scores[chosen] / (scores[chosen].sum() if config.renormalize else 1.0)
    return chosen.tolist(), config.scale * weights


@pytest.mark.parametrize("kind", KINDS)
def test_choices_and_weights_are_those_of_the_formula(kind: str):
    config = RouterConfig(n_experts=E, **KINDS[kind])
    router = _router(config)
    x = np.random.default_rng(1).standard_normal((2, 24, D)).astype(np.float32)
    segments = np.ones((2, 24), int)
    segments[1, 20:] = 0
    routing, _ = jax.jit(router)(jnp.asarray(x), _context(segments))
    for row, place in np.ndindex(2, 24):
        if segments[row, place] == 0:
            assert routing.experts[row, place].tolist() == [E] * config.top_k, "padding goes to nobody"
            assert not routing.weights[row, place].any()
            continue
        experts, weights = _reference(config, router, x[row, place])
        assert routing.experts[row, place].tolist() == experts
        np.testing.assert_allclose(routing.weights[row, place], weights, rtol=1e-5)


def test_bfloat16_activations_are_routed_in_float32():
    """The same as the widened activations, to the bit: a router's logits that lie close would swap in bfloat16."""
    config = RouterConfig(n_experts=E, top_k=2)
    router = _router(config)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((1, 16, D)), jnp.bfloat16)
    narrow, wide = (router(x.astype(dtype), _context(np.ones((1, 16), int)))[0] for dtype in (jnp.bfloat16, jnp.float32))
    assert narrow.weights.dtype == jnp.float32
    assert (narrow.weights == wide.weights).all()


def test_logits_that_saturate_the_score_still_rank():
    """Sigmoids of 20 and 30 are both 1 in float32."""
    config = RouterConfig(n_experts=4, top_k=1, score="sigmoid", renormalize=False)
    router = config.build(d_model=1, rngs=nnx.Rngs(0))
    router.weight[...] = jnp.asarray([[20.0, 30.0, 25.0, 0.0]])
    assert router(jnp.ones((1, 1, 1)), _context(np.ones((1, 1), int)))[0].experts.item() == 1


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
def test_logits_of_any_size_have_gradients(score: Any):
    """Where every score is 0 in float32, too."""
    router = RouterConfig(n_experts=4, top_k=2, score=score).build(d_model=1, rngs=nnx.Rngs(0))

    graph, weights = nnx.split(router)

    def total(logits: jax.Array) -> jax.Array:
        changed = jax.tree.map(lambda leaf: logits.reshape(leaf.shape), weights)
        return jnp.sum(nnx.merge(graph, changed)(jnp.ones((1, 1, 1)), _context(np.ones((1, 1), int)))[0].weights * jnp.asarray([1.0, 2.0]))

    for logits in ([-1e4, -2e4, -3e4, -4e4], [-1e4, 1e4, 0.0, 2e4], [-47.0, -46.0, -45.0, -48.0]):
        assert jnp.isfinite(jax.grad(total)(jnp.asarray(logits))).all()


def _balance(logits: list[list[float]], top_k: int) -> float:
    """Of tokens of one document with these logits."""
    router = RouterConfig(n_experts=len(logits[0]), top_k=top_k).build(d_model=len(logits), rngs=nnx.Rngs(0))
    router.weight[...] = jnp.asarray(logits)
    x = jnp.eye(len(logits))[None]
    _, aux = jax.jit(router)(x, _context(np.ones((1, len(logits)), int), experts=HowExperts(by_document=True)))
    load: Any = aux["load"]
    batch, sequence = balance_term({"": load}, {"": load}), aux["balance"]
    assert isinstance(sequence, tuple)
    assert float(batch.sum / batch.denominator) == pytest.approx(float(sequence[0] / sequence[1]), rel=1e-6), "of one document they are one"
    return float(batch.sum / batch.denominator)


def test_the_balance_uses_the_whole_softmax_once():
    """Loads sum to top_k. Other readings of the formula give 3.46212, 22.0 or 2.38217."""
    assert _balance([[4, 3, 0, 0], [4, 0, 3, 0]], 2) == pytest.approx(3.39790, abs=1e-5)
    assert _balance([[1, 1, 0, 0], [0, 0, 1, 1]], 2) == pytest.approx(2.0, abs=1e-6), "evenly spread"


@pytest.mark.parametrize("count", ["real", "some"])
def test_padding_and_other_documents_change_nothing(count: str):
    """Six pads behind a row, another document before it, and tokens that are left out: routing, load and terms of the rest stay."""
    config = RouterConfig(n_experts=E, top_k=2, score="sigmoid", selection_bias=True)
    router = _router(config)
    x = np.random.default_rng(3).standard_normal((1, 10, D)).astype(np.float32)
    more = np.concatenate([np.random.default_rng(4).standard_normal((1, 4, D)), x, np.full((1, 6, D), 9.0)], axis=1).astype(np.float32)
    segments = np.repeat([1, 2, 0], [4, 10, 6])[None]
    some = np.arange(10) % 3 > 0 if count == "some" else np.ones(10, bool)
    run = jax.jit(lambda x, ctx: router(x, ctx))
    how = HowExperts(by_document=True)
    alone, aux = run(x, _context(np.ones((1, 10), int), experts=how, counted=jnp.asarray(some)[None]))
    within, other = run(
        more, _context(segments, experts=how, counted=jnp.asarray(np.concatenate([np.zeros(4, bool), some, np.ones(6, bool)]))[None])
    )
    assert (within.experts[:, 4:14] == alone.experts).all()
    np.testing.assert_allclose(within.weights[:, 4:14], alone.weights, rtol=1e-6)
    assert int(aux["load"].counts.sum()) == 2 * some.sum()  # type: ignore[union-attr]
    for name, value in aux.items():
        jax.tree.map(lambda a, b, name=name: np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=name), value, other[name])


def test_jitter_moves_logits_in_training_alone():
    config = RouterConfig(n_experts=E, top_k=2)
    router = _router(config)
    x = jnp.asarray(np.random.default_rng(5).standard_normal((1, 400, D)), jnp.float32)
    ctx = _context(np.ones((1, 400), int), experts=HowExperts(jitter=0.1))
    still, _ = router(x, replace(ctx, experts=HowExperts()))
    without_key, _ = router(x, ctx)
    shaken, _ = router(x, replace(ctx, key=jax.random.key(0)))
    again, _ = router(x, replace(ctx, key=jax.random.key(0)))
    assert (without_key.weights == still.weights).all()
    assert (shaken.weights == again.weights).all()
    assert 0 < np.abs(shaken.weights - still.weights).mean() < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 9}, "top_k=9 is more than the n_experts=8"),
        ({"n_groups": 3}, r"n_experts=8 is not divisible by n_groups=3; allowed for n_groups: \[1, 2, 4, 8\]"),
        ({"n_groups": 4, "top_groups": 5}, "top_groups=5 is more than the n_groups=4"),
        ({"n_groups": 4, "top_k": 3}, "top_k=3 is more than the 2 experts in top_groups=1 groups of 2"),
        ({"n_groups": 8, "top_groups": 4}, "group_score=best_two needs groups of two or more"),
    ],
)
def test_counts_that_do_not_fit_are_refused_with_the_numbers(changes: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        RouterConfig(**{"n_experts": 8, "top_k": 2, **changes})


def test_loads_add_up():
    """Fields of a load are sums: those of two microbatches added are those of both together."""
    config = RouterConfig(n_experts=E, top_k=2)
    router = _router(config)
    x = jnp.asarray(np.random.default_rng(6).standard_normal((2, 7, D)), jnp.float32)
    ones = np.ones((2, 7), int)
    run = jax.jit(router)
    whole: Any = run(x, _context(ones))[1]["load"]
    parts: list[Any] = [run(x[i : i + 1], _context(ones[:1]))[1]["load"] for i in range(2)]
    total: Load = jax.tree.map(jnp.add, *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), whole, total)
