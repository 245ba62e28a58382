"""One denominator for the whole step: accumulation, masks, devices and auxiliary terms leave loss and gradient alone."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy
import tiny
from flax import nnx

from telamon.config.schema import MeshConfig, TrainConfig
from telamon.layers.mlp import GatedMLP, GatedMLPConfig
from telamon.layers.param import vector
from telamon.layers.parts import Aux, Context, register
from telamon.models.decoder import Decoder
from telamon.models.spec import BlockSpec, ModelSpec
from telamon.models.weights import Model, Weights, flatten
from telamon.parallel.mesh import build_mesh
from telamon.parallel.rules import batch_sharding
from telamon.train.evaluation import evaluate
from telamon.train.loss import Loss, Measured, Term, language_model_loss
from telamon.train.placement import Batch
from telamon.train.step import eval_step, gradient, split_microbatches, summarise

MODEL = tiny.model(d_model=16, d_ff=24, n_layers=1)
KEY = jax.random.key(0)
GIVEN = "norm.scale"
"""The parameter that losses of given values multiply; it is 1."""


@pytest.fixture(scope="module")
def weights() -> Any:
    weights: Any = tiny.weights(MODEL)
    return weights | {"norm": {"scale": jnp.ones(16)}}


def _scale(decoder: Decoder) -> jax.Array:
    norm: Any = decoder.norm
    return norm.scale[...]


def _given(decoder: Decoder, batch: Batch, key: jax.Array) -> Measured:
    """A loss whose tokens' values are in the batch, times a parameter that is 1."""
    total = jnp.sum(batch["mask"] * batch["value"]) * _scale(decoder)[0]
    tokens = jnp.sum(batch["mask"])
    return Measured({"cross_entropy": Term(total, tokens)}, {"nll": total, "tokens": tokens, "bytes": tokens})


def _values(rows: list[list[float | None]]) -> dict[str, np.ndarray]:
    """A batch of given token losses; None is masked."""
    value = np.array([[0.0 if x is None else x for x in row] for row in rows], np.float32)
    return {"value": value, "mask": np.array([[x is not None for x in row] for row in rows], np.float32)}


def _run(loss: Loss, weights: Weights, batch: Any, *, accumulate: int, model: Model = MODEL) -> tuple[dict[str, Any], dict[str, float]]:
    """Gradients by path, and metrics."""

    @jax.jit
    def run(weights: Weights, batch: Batch) -> Any:
        grads, measured = gradient(model, loss, weights, batch, KEY, accumulate=accumulate)
        return grads, summarise(measured, loss)

    grads, metrics = run(weights, batch)
    return flatten(grads), {name: float(value) for name, value in metrics.items()}


def test_microbatches_of_unequal_length_have_one_denominator(weights: Any):
    """One token of loss 4, and three of loss 1: 7/4, not the mean of two means."""
    batch = _values([[4, None, None], [1, 1, 1]])
    for accumulate in (1, 2):
        grads, metrics = _run(Loss(_given), weights, batch, accumulate=accumulate)
        assert metrics["loss"] == pytest.approx(1.75, rel=1e-6)
        assert float(grads[GIVEN][0]) == pytest.approx(1.75, rel=1e-6)


def test_accumulation_changes_neither_loss_nor_gradient(weights: Any):
    """Uneven masks, a row without any trained token, z-loss on; accumulated over 1, 2, 4 and 8 microbatches."""
    batch = tiny.batch([[16], [3, 4], [1], [12], [2, 2, 2], [16], [5], [9, 7]], length=16)
    loss = language_model_loss(TrainConfig(loss_chunk=32, z_loss=1e-2))
    whole, expected = _run(loss, weights, batch, accumulate=1)
    assert expected["tokens"] == batch["mask"].sum()
    assert expected["bytes"] == (batch["mask"] * batch["bytes"]).sum()
    norm = math.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in whole.values()))
    for accumulate in (2, 4, 8):
        grads, metrics = _run(loss, weights, batch, accumulate=accumulate)
        assert metrics == pytest.approx(expected, rel=1e-6)
        assert math.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in grads.values())) == pytest.approx(norm, rel=1e-6)
        for path, leaf in grads.items():
            np.testing.assert_allclose(leaf, whole[path], rtol=1e-6, atol=1e-6 * norm, err_msg=path)


def test_the_loss_is_the_mean_over_trained_tokens(weights: Any):
    batch = tiny.batch([[9, 7], [5]], length=16)
    _, metrics = _run(language_model_loss(TrainConfig(loss_chunk=8)), weights, batch, accumulate=2)
    total = correct = 0.0
    for row in range(2):
        where = {name: batch[name][row] for name in ("tokens", "positions", "segments")}
        logits = reference_numpy.decoder_logits(flatten(weights), **where, layers=[("stacks.0.blocks.0.", 0, 1e4)], eps=1e-6)
        picked = np.take_along_axis(reference_numpy.log_softmax(logits), batch["targets"][row][:, None], axis=-1)[:, 0]
        total -= (batch["mask"][row] * picked).sum()
        correct += (batch["mask"][row] * (logits.argmax(-1) == batch["targets"][row])).sum()
    assert metrics["nll"] == pytest.approx(total, rel=1e-5)
    assert metrics["loss"] == pytest.approx(total / batch["mask"].sum(), rel=1e-5)
    assert metrics["correct"] == correct


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_an_auxiliary_term_keeps_its_own_denominator(weights: Any, weight: float):
    """8 rows of 128 tokens, of which few are trained; the term's derivative by one parameter is 1 however the step is split."""

    def measure(decoder: Decoder, batch: Batch, key: jax.Array) -> Measured:
        measured = _given(decoder, batch, key)
        rows = jnp.sum(batch["rows"])
        return Measured(measured.terms | {"balance": Term(jnp.sum(batch["rows"]) * _scale(decoder)[1], rows)}, measured.counts)

    trained = [[1.0 if column < 3 * row else None for column in range(128)] for row in range(8)]
    batch = _values(trained) | {"rows": np.arange(1, 9, dtype=np.float32)}
    for accumulate in (1, 2, 4):
        grads, metrics = _run(Loss(measure, {"balance": weight}), weights, batch, accumulate=accumulate)
        np.testing.assert_allclose(grads[GIVEN][:3], [1.0, weight, 0.0], rtol=1e-6)
        assert metrics["balance"] == pytest.approx(1.0)
        assert metrics["loss"] == pytest.approx(1 + weight)


@register
class BalancedMLPConfig(GatedMLPConfig):
    """A gated MLP with an auxiliary term whose derivative by one parameter is 1 in each layer."""

    kind: str = "balanced_mlp_of_a_test"

    def build(self, *, d_model: int, n_layers: int, rngs: nnx.Rngs) -> "BalancedMLP":
        return BalancedMLP(self, d_model=d_model, n_layers=n_layers, rngs=rngs)


class BalancedMLP(GatedMLP):
    def __init__(self, config: GatedMLPConfig, *, d_model: int, n_layers: int, rngs: nnx.Rngs):
        super().__init__(config, d_model=d_model, n_layers=n_layers, rngs=rngs)
        self.balance = vector((1,), axes=("norm",), fill=1.0)

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, Aux]:
        y_BTD, _ = super().__call__(x_BTD, ctx)
        real = jnp.sum(ctx.segments > 0).astype(jnp.float32)
        return y_BTD, {"balance": (real * self.balance[...][0], real)}


def test_a_blocks_auxiliary_term_reaches_the_loss_with_its_own_denominator():
    """Through the scan over two layers: a mean over layers and real tokens, so 1/2 for each layer's parameter."""
    block = BlockSpec(mixer=tiny.sizes(d_model=16).attention(), ffn=BalancedMLPConfig(d_ff=24))
    model = Model(ModelSpec(vocab_size=64, d_model=16, blocks=(block, block), tie_embeddings=True))
    path = "stacks.0.blocks.0.ffn.balance"
    batch = tiny.batch([[16], [2], [5, 5], [9]], length=16)
    loss, weights = Loss(language_model_loss(TrainConfig(loss_chunk=32)).measure, {"balance": 10.0}), tiny.weights(model)
    for accumulate in (1, 4):
        grads, metrics = _run(loss, weights, batch, accumulate=accumulate, model=model)
        np.testing.assert_allclose(grads[path][:, 0], [5.0, 5.0], rtol=1e-6)
        assert metrics["balance"] == pytest.approx(float(jnp.mean(flatten(weights)[path])), rel=1e-5)


def test_a_masked_row_beside_a_trained_one_is_left_out(weights: Any):
    """Row 1 fully masked, row 2 with token losses 1 and 3: the loss is 2."""
    batch = _values([[None, None], [1, 3]])
    for accumulate in (1, 2):
        grads, metrics = _run(Loss(_given), weights, batch, accumulate=accumulate)
        assert metrics["loss"] == 2.0
        assert float(grads[GIVEN][0]) == 2.0


@pytest.mark.xdist_group("mesh")
def test_a_device_with_nothing_to_train_changes_nothing(weights: Any):
    """The same two rows, one on each of two devices; then a real loss with a row of padding alone."""
    mesh = build_mesh(MeshConfig(), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        grads, metrics = _run(Loss(_given), weights, jax.device_put(_values([[None, None], [1, 3]]), batch_sharding(mesh)), accumulate=1)
    assert metrics["loss"] == 2.0
    assert float(grads[GIVEN][0]) == 2.0

    batch = tiny.batch([[], [11]], length=16)
    loss = language_model_loss(TrainConfig(loss_chunk=32))
    expected_grads, expected = _run(loss, weights, batch, accumulate=1)
    with jax.set_mesh(mesh):
        grads, metrics = _run(loss, weights, jax.device_put(batch, batch_sharding(mesh)), accumulate=1)
    assert metrics == pytest.approx(expected, rel=1e-6)
    for path, leaf in grads.items():
        np.testing.assert_allclose(leaf, expected_grads[path], atol=1e-6, err_msg=path)


def test_a_batch_with_nothing_to_train_has_loss_and_gradients_of_zero(weights: Any):
    batch = tiny.batch([[], [1], [16], []], length=16) | {"mask": np.zeros((4, 16), np.float32)}
    for accumulate in (1, 2):
        grads, metrics = _run(language_model_loss(TrainConfig(loss_chunk=32, z_loss=0.1)), weights, batch, accumulate=accumulate)
        assert metrics["loss"] == metrics["tokens"] == 0.0
        for path, leaf in grads.items():
            np.testing.assert_array_equal(leaf, 0.0, err_msg=path)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_microbatches_hold_each_row_once(count: int):
    rows = np.arange(4)[:, None] * np.ones((1, 3), np.int32)
    parts = np.asarray(split_microbatches({"tokens": jnp.asarray(rows)}, count)["tokens"])
    assert parts.shape == (count, 4 // count, 3)
    assert sorted(parts[:, :, 0].ravel().tolist()) == [0, 1, 2, 3]
    np.testing.assert_array_equal(parts, parts[:, :, :1] * np.ones(3))


def test_evaluation_divides_once_over_all_batches(weights: Any):
    """4 tokens of mean loss 2 and 8 of mean loss 1: 16/12, whatever the batches, and each row once."""
    rows: list[list[float | None]] = [[2, 2, 2, 2, None, None, None, None], [1] * 8]

    def divided(batches: list[Any]) -> float:
        measured = [eval_step(weights, batch, model=MODEL, loss=Loss(_given)) for batch in batches]
        return float(summarise(jax.tree.map(lambda *x: sum(x), *measured), Loss(_given))["loss"])

    assert divided([_values(rows[:1]), _values(rows[1:])]) == pytest.approx(16 / 12)
    assert divided([_values(rows)]) == pytest.approx(16 / 12)


@pytest.mark.xdist_group("mesh")
def test_evaluation_over_two_devices_divides_once(weights: Any):
    mesh = build_mesh(MeshConfig(), devices=jax.devices()[:2])
    batch = jax.device_put(_values([[2, 2, 2, 2, None, None, None, None], [1] * 8]), batch_sharding(mesh))
    with jax.set_mesh(mesh):
        measured = jax.jit(lambda weights, batch: eval_step(weights, batch, model=MODEL, loss=Loss(_given)))(weights, batch)
    assert float(summarise(measured, Loss(_given))["loss"]) == pytest.approx(16 / 12)


def test_validation_is_the_mean_over_tokens_of_all_batches():
    """The loop's own evaluation, over a loader of two batches of 4 and 8 tokens."""
    batches = [tiny.batch([[5]], length=9, seed=1), tiny.batch([[9]], length=9, seed=2)]

    def counts(_: Any, batch: Any) -> Any:
        tokens = jnp.sum(batch["mask"])
        return SimpleNamespace(counts={"nll": jnp.where(tokens == 4, 2.0, 1.0) * tokens, "tokens": tokens, "bytes": 3 * tokens})

    config = tiny.run()
    job: Any = SimpleNamespace(
        config=config, mesh=build_mesh(MeshConfig(), devices=jax.devices()[:1]), eval_rows=1, eval_step=lambda rows: counts
    )
    loader: Any = SimpleNamespace(eval_batches=lambda rows: batches, tokenizer=SimpleNamespace(token_bytes=np.ones(64, np.int32)))
    found = evaluate(job, {}, loader)
    assert found is not None
    assert found.tokens == 12
    assert found.loss == pytest.approx(16 / 12)
    assert found.bits_per_byte == pytest.approx(16 / 36 / math.log(2))
