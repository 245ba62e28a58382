"""Balancing experts over a whole step: one strength however it is split, and biases that really move."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from telamon.checkpoint.store import CheckpointStore
from telamon.config.schema import ExpertsConfig, RunConfig, TrainConfig
from telamon.errors import ConfigError
from telamon.layers.parts import HowExperts, Load
from telamon.models.decoder import Numerics
from telamon.models.deepseek import DeepseekV3Config
from telamon.models.weights import Model, flatten
from telamon.train.balance import load_metrics, moved_biases
from telamon.train.job import make_job
from telamon.train.loss import language_model_loss
from telamon.train.placement import Batch
from telamon.train.step import gradient, summarise

SIZES: dict[str, Any] = {"n_experts": 4, "top_k": 2, "d_ff": 24, "d_model": 16, "n_layers": 2}
ROUTER = "stacks.0.blocks.0.ffn.router.weight"
KEY = jax.random.key(0)
LENGTHS = [[16], [3, 4], [1, 9], [12]]
BATCH = tiny.batch(LENGTHS, length=16)


def _model(*, by_document: bool = False) -> Model:
    return tiny.model("mixtral", numerics=Numerics(experts=HowExperts(by_document=by_document)), **SIZES)


@pytest.mark.parametrize("form", ["batch", "sequence"])
def test_terms_have_one_strength_however_the_step_is_split(form: str):
    """The same four rows as one, two and four microbatches, of unequal documents and padding: values and the router's gradient."""
    model, weights = _model(by_document=form == "sequence"), tiny.weights(_model())
    loss = language_model_loss(TrainConfig(loss_chunk=32, experts=ExpertsConfig(balance=form)))  # type: ignore[arg-type]
    loss = replace(loss, weights={"cross_entropy": 0.0, "router_entropy": 0.0, "balance": 1.0, "router_z": 1.0 if form == "batch" else 0.0})

    def run(accumulate: int) -> tuple[Any, dict[str, float]]:
        @jax.jit
        def of_batch(batch: Batch) -> Any:
            grads, measured = gradient(model, loss, weights, batch, KEY, accumulate=accumulate)
            return flatten(grads)[ROUTER], summarise(measured, loss)

        grads, metrics = of_batch(BATCH)
        return grads, {
            name: float(metrics[name]) for name in ("balance", "router_z", "router_entropy", "expert_load_max", "expert_load_min")
        }

    expected, metrics = run(1)
    size = float(jnp.abs(expected).max())
    assert size > 1e-3, "the terms reach the router"
    for accumulate in (2, 4):
        grads, others = run(accumulate)
        np.testing.assert_allclose(grads, expected, rtol=0, atol=1e-5 * max(size, 1.0))
        assert others == pytest.approx(metrics, rel=1e-5)


def _two_documents(*, rows: int) -> dict[str, Any]:
    """Tokens 0 and 1 as documents of their own, one a row or both in one, with padding behind."""
    length = 6
    batch: dict[str, Any] = {
        name: np.zeros((rows, length), np.int32) for name in ("tokens", "targets", "segments", "positions", "mask", "bytes")
    }
    for number in range(2):
        row, place = (number, 0) if rows == 2 else (0, number)
        batch["tokens"][row, place], batch["segments"][row, place] = number, number + 1
    batch["mask"] = batch["segments"].clip(max=1).astype(np.float32)
    return batch


@pytest.mark.parametrize(("form", "value"), [("batch", 1.0), ("sequence", 1.46212)])
def test_two_tokens_that_want_different_experts(form: str, value: float):
    """Two documents of a token each, logits [1, 0] and [0, 1], one expert a token. Over the batch their load is even: 1, and nothing to
    learn, in one microbatch or in two. By document it is 1.46212, in two rows or in one: a sequence is a document."""
    sizes = {"n_experts": 2, "top_k": 1, "d_ff": 4, "d_model": 2, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 2}
    model = tiny.model("mixtral", numerics=Numerics(experts=HowExperts(by_document=form == "sequence")), vocab_size=8, **sizes)
    weights: Any = jax.tree.map(jnp.zeros_like, tiny.weights(model))
    weights["embedding"] = weights["embedding"].at[:2].set(jnp.eye(2) * 1e3)  # so that an epsilon is nothing
    ffn = weights["stacks"]["0"]["blocks"]["0"]
    ffn["ffn_norm"]["scale"] = jnp.full_like(ffn["ffn_norm"]["scale"], 2**-0.5)  # a normed unit vector of two features is root 2 long
    ffn["ffn"]["router"]["weight"] = jnp.eye(2)[None]
    loss = language_model_loss(TrainConfig(loss_chunk=8, experts=ExpertsConfig(balance=form, balance_weight=1.0)))  # type: ignore[arg-type]
    for rows, accumulate in ((2, 2), (1, 1)):
        grads, measured = jax.jit(lambda batch, a=accumulate: gradient(model, loss, weights, batch, KEY, accumulate=a))(
            _two_documents(rows=rows)
        )
        assert float(summarise(measured, loss)["balance"]) == pytest.approx(value, abs=1e-5), (rows, accumulate)
        moved = float(jnp.abs(flatten(grads)[ROUTER]).max())
        assert moved < 1e-6 if form == "batch" else moved > 0.1


def test_the_bias_falls_for_busy_experts_and_rises_for_idle_ones():
    """From counts alone, by the rate and no more; an expert with the mean load stays."""
    bias: Any = {"stacks": {"0": {"ffn": {"router": {"selection_bias": jnp.zeros((1, 4)), "weight": jnp.ones(3)}}}}}
    load = Load(counts=jnp.asarray([[4.0, 0.0, 2.0, 2.0]]), probabilities=jnp.zeros((1, 4)), tokens=jnp.ones(1))
    moved: Any = moved_biases(bias, {"stacks.0.ffn": load}, rate=1e-3)
    np.testing.assert_allclose(moved["stacks"]["0"]["ffn"]["router"]["selection_bias"], [[-1e-3, 1e-3, 0.0, 0.0]], rtol=1e-6)
    assert moved["stacks"]["0"]["ffn"]["router"]["weight"] is bias["stacks"]["0"]["ffn"]["router"]["weight"]
    assert moved_biases(bias, {"stacks.0.ffn": load}, rate=0.0) is bias
    without = {"stacks": {"0": {"ffn": {"router": {"weight": jnp.ones(3)}}}}}
    assert moved_biases(without, {"stacks.0.ffn": load}, rate=1e-3) == without
    assert {name: float(value) for name, value in load_metrics({"a": load}).items()} == {"expert_load_max": 2.0, "expert_load_min": 0.0}
    assert load_metrics({}) == {}


def test_a_step_moves_the_bias_once_and_nothing_else_does(tmp_path: Path):
    """By the counts of both microbatches, at the rate; the optimizer keeps no moments for it, and a checkpoint brings it back."""
    model = DeepseekV3Config(vocab_size=64, d_model=16, n_layers=1, n_heads=2, n_experts=4, n_dense=0)
    train = TrainConfig(
        batch_size=4, seq_len=16, accumulate=2, compute_dtype="float32", loss_chunk=32, experts=ExpertsConfig(bias_rate=0.25)
    )
    job = make_job(RunConfig(model=model, train=train), devices=jax.devices()[:1])
    assert not [path for path, _ in jax.tree.leaves_with_path(job.abstract_state.optimizer) if "selection_bias" in str(path)]
    before = job.fresh_state()
    path = "stacks.0.blocks.0.ffn.router.selection_bias"
    assert not flatten(before.weights)[path].any()
    with jax.set_mesh(job.mesh):
        counts = jax.jit(lambda weights: job.loss.measure(job.model.bind(weights), BATCH, KEY).loads["stacks.0.blocks.0.ffn"].counts)(
            before.weights
        )
        after, metrics = job.train_step(4)(before, BATCH)
    wanted = -0.25 * np.sign(np.asarray(counts) - np.asarray(counts).mean(axis=-1, keepdims=True))
    assert np.abs(wanted).any()
    np.testing.assert_array_equal(flatten(after.weights)[path], wanted)
    assert {"router_z", "router_entropy", "expert_load_max", "expert_load_min"} <= metrics.keys()
    store = CheckpointStore(tmp_path)
    store.save(1, after, {})
    store.wait()
    np.testing.assert_array_equal(flatten(store.restore(1, job.abstract_state)[0].weights)[path], wanted)


@pytest.mark.parametrize(
    ("family", "experts", "message"),
    [
        (
            "llama",
            {"balance": "batch"},
            "train.experts.balance=batch has no effect: a model of the family llama has no experts; leave it out",
        ),
        ("mixtral", {"bias_rate": 0.5}, "train.experts.bias_rate=0.5 has no effect: routers of the family mixtral have no selection bias"),
    ],
)
def test_a_setting_of_experts_that_has_nothing_to_act_on_is_refused(family: str, experts: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        make_job(tiny.run(family=family, experts=ExpertsConfig(**experts)), devices=jax.devices()[:1])
    assert make_job(tiny.run(family=family), devices=jax.devices()[:1])
