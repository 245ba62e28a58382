"""Predictions beyond the next token: what counts, what they cost, and how often they are accepted, against a float64 reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy
import tiny

from telamon.config.schema import ExpertsConfig, MeshConfig, OptimizerConfig, TrainConfig
from telamon.data.packing import next_token_mask
from telamon.layers.moe import MoEConfig
from telamon.layers.router import RouterConfig
from telamon.models.decoder import Numerics
from telamon.models.mtp import follows, later
from telamon.models.spec import ModelSpec
from telamon.models.weights import Model, Weights, flatten
from telamon.parallel.mesh import build_mesh
from telamon.parallel.rules import batch_sharding
from telamon.train.evaluation import acceptance_metrics, add_up
from telamon.train.further import Ahead
from telamon.train.loss import language_model_loss
from telamon.train.optimizer import build_optimizer
from telamon.train.state import TrainState
from telamon.train.step import eval_step, gradient, summarise, train_step

SIZES = tiny.sizes(d_model=16, d_ff=24, n_layers=1, vocab_size=24)
DEPTHS = 2
LAYERS = [("stacks.0.blocks.0.", 0, 1e4)]
EPS = 1e-6
KEY = jax.random.key(0)
DOCUMENTS: list[list[int]] = [[9, 2, 4], [1, 3], [16], [5, 5, 5]]
"""Some too short for any prediction beyond the next token, some for all but one."""


def _spec(**changes: Any) -> ModelSpec:
    spec = SIZES.spec()
    return spec.model_copy(update={"mtp": (spec.blocks[0],) * DEPTHS, **changes})


MODEL = Model(_spec())
HOW = TrainConfig(loss_chunk=16, mtp_weight=0.75)
EVALUATE = jax.jit(lambda weights, batch: eval_step(weights, batch, model=MODEL, loss=language_model_loss(HOW)).counts)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return tiny.weights(MODEL)


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    """Packed rows, of whose trained targets a few are not: as of a prompt."""
    batch = tiny.batch(DOCUMENTS, length=16, vocab=24)
    batch["mask"][0, 2:4] = 0
    batch["mask"][2, 7] = 0
    return batch


def _run(model: Model, how: TrainConfig, weights: Weights, batch: Any, *, accumulate: int = 1) -> tuple[dict[str, Any], dict[str, float]]:
    """Gradients by path, and metrics."""
    loss = language_model_loss(how)

    @jax.jit
    def run(weights: Weights, batch: Any) -> Any:
        grads, measured = gradient(model, loss, weights, batch, KEY, accumulate=accumulate)
        return grads, summarise(measured, loss)

    grads, metrics = run(weights, batch)
    return flatten(grads), {name: float(value) for name, value in metrics.items()}


def _documents(batch: dict[str, Any]) -> list[tuple[int, np.ndarray]]:
    """(row, places) of each document of a batch."""
    found = []
    for row, segments in enumerate(batch["segments"]):
        found += [(row, np.flatnonzero(segments == number)) for number in range(1, segments.max() + 1)]
    return found


def _numpy_loss(flat: dict[str, np.ndarray], batch: dict[str, Any], *, mtp_weight: float) -> tuple[float, float, float]:
    """The objective, the mean loss of next tokens, and that of all further ones, document by document."""
    sums, counts = np.zeros(2), np.zeros(2)
    for row, places in _documents(batch):
        tokens, mask = batch["tokens"][row, places], batch["mask"][row, places]
        for depth, logits in enumerate(reference_numpy.further_logits(flat, tokens, layers=LAYERS, depths=DEPTHS, eps=EPS)):
            log_probabilities = reference_numpy.log_softmax(logits)
            for i in range(len(tokens) - depth - 1):
                if mask[i + depth]:  # the token at i + depth + 1 is trained as the next one of its predecessor
                    sums[min(depth, 1)] -= log_probabilities[i, tokens[i + depth + 1]]
                    counts[min(depth, 1)] += 1
    means = sums / counts
    return means[0] + mtp_weight * means[1], *means


def test_the_objective_equals_numpy(weights: Weights, batch: dict[str, Any]):
    """Two depths, packed rows, masked targets: the whole loss and its parts."""
    _, metrics = _run(MODEL, HOW, weights, batch)
    whole, following, further = _numpy_loss(flatten(weights), batch, mtp_weight=HOW.mtp_weight)
    assert metrics["loss"] == pytest.approx(whole, rel=1e-5)
    assert metrics["cross_entropy"] == pytest.approx(following, rel=1e-5)
    assert metrics["mtp"] == pytest.approx(further, rel=1e-5)


def test_gradients_equal_finite_differences_of_numpy(weights: Weights, batch: dict[str, Any]):
    """Along a random direction of each weight, the shared tables and the model's own layers among them; the term's weight is not 1."""
    grads, _ = _run(MODEL, HOW, weights, batch)
    flat = {path: np.asarray(value, np.float64) for path, value in flatten(weights).items()}
    rng, step = np.random.default_rng(0), 1e-5
    for path, value in flat.items():
        direction = rng.standard_normal(value.shape)
        ends = [_numpy_loss(flat | {path: value + sign * step * direction}, batch, mtp_weight=HOW.mtp_weight)[0] for sign in (1, -1)]
        expected = (ends[0] - ends[1]) / (2 * step)
        scale = np.linalg.norm(np.asarray(grads[path])) * np.linalg.norm(direction)
        assert scale > 0, path
        assert float(np.sum(np.asarray(grads[path]) * direction)) == pytest.approx(expected, abs=2e-5 * scale), path


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_changes_neither_loss_nor_gradient(accumulate: int, weights: Weights, batch: dict[str, Any]):
    """The further predictions of microbatches differ in number, from none to most of them, and so do those of next tokens."""
    whole, expected = _run(MODEL, HOW, weights, batch)
    grads, metrics = _run(MODEL, HOW, weights, batch, accumulate=accumulate)
    assert metrics == pytest.approx(expected, rel=1e-6)
    norm = np.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in whole.values()))
    for path, leaf in grads.items():
        np.testing.assert_allclose(leaf, whole[path], rtol=1e-5, atol=1e-6 * norm, err_msg=path)


def test_packing_changes_neither_loss_nor_gradient(weights: Weights, batch: dict[str, Any]):
    """Documents in rows of their own, with padding behind them."""
    whole, expected = _run(MODEL, HOW, weights, batch)
    documents = _documents(batch)
    apart = {name: np.zeros((12, 16), array.dtype) for name, array in batch.items()}
    for number, (row, places) in enumerate(documents):
        for name, array in batch.items():
            apart[name][number, : len(places)] = np.minimum(array[row, places], 1) if name == "segments" else array[row, places]
    grads, metrics = _run(MODEL, HOW, weights, apart)
    assert metrics == pytest.approx(expected, rel=1e-5)
    norm = np.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in whole.values()))
    for path, leaf in grads.items():
        np.testing.assert_allclose(leaf, whole[path], rtol=1e-5, atol=2e-6 * norm, err_msg=path)


def test_what_follows_stays_within_the_document():
    segments = jnp.array([[1, 1, 1, 2, 2]])
    assert follows(segments, 1).astype(int).tolist() == [[1, 1, 0, 1, 0]]
    assert follows(segments, 2).astype(int).tolist() == [[1, 0, 0, 0, 0]]
    assert follows(segments, 5).astype(int).tolist() == [[0, 0, 0, 0, 0]]
    padded = jnp.array([[0, 1, 1, 1, 0, 0]])
    assert follows(padded, 1).astype(int).tolist() == [[0, 1, 1, 0, 0, 0]]
    # A row shorter than the shift, and one whose last document goes on in its first: rows are no rings.
    assert not follows(jnp.array([[1, 1, 1]]), 3).any()
    assert follows(jnp.array([[1, 2, 1]]), 2).astype(int).tolist() == [[1, 0, 0]]
    for steps in (1, 2, 3):
        rows = np.array([[1, 1, 1, 2, 2, 3, 3, 3, 3, 0, 0], [1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5]])
        np.testing.assert_array_equal(follows(jnp.asarray(rows), steps), next_token_mask(rows, ahead=steps))


def test_the_masks_of_a_small_row():
    """Documents of three and two tokens: the first place alone sees a token after the next; none of it where that one is not trained."""
    batch = tiny.batch([[3, 2]], length=5, vocab=24)
    assert batch["mask"].tolist() == [[1, 1, 0, 1, 0]]

    def masks(batch: Any) -> list[Any]:
        decoder: Any = type("Decoder", (), {"spec": MODEL.spec})
        return [mask.tolist() for mask in Ahead(decoder, batch, jnp.zeros(()), HOW, None).masks]

    assert masks(batch) == [[[1, 0, 0, 0, 0]], [[0, 0, 0, 0, 0]]]
    batch["mask"][0, 1] = 0
    assert masks(batch) == [[[0, 0, 0, 0, 0]], [[0, 0, 0, 0, 0]]]


@pytest.mark.xdist_group("mesh")
def test_a_row_over_two_devices_has_the_same_neighbours():
    """Places of one row on two devices, at the border and with a border of documents elsewhere."""
    mesh = build_mesh(MeshConfig(fsdp=1, context=2), devices=jax.devices()[:2])
    segments, tokens = np.array([[1, 1, 1, 2, 2, 2, 2, 0]]), np.arange(8)[None]
    split = [jax.device_put(x, batch_sharding(mesh)) for x in (segments, tokens)]
    assert split[0].addressable_shards[0].data.shape == (1, 4)
    for steps in (1, 2, 3):
        found = jax.jit(lambda s, t, steps=steps: (follows(s, steps), later(t, steps)))(*split)
        np.testing.assert_array_equal(found[0], next_token_mask(segments, ahead=steps))
        where = np.asarray(found[0])
        np.testing.assert_array_equal(np.asarray(found[1])[where], tokens[where] + steps)


@pytest.mark.xdist_group("mesh")
def test_devices_that_share_rows_and_weights_change_nothing(weights: Weights, batch: dict[str, Any]):
    whole, expected = _run(MODEL, HOW, weights, batch)
    mesh = build_mesh(MeshConfig(fsdp=2, tensor=2), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        shared = jax.device_put(weights, MODEL.shardings(mesh))
        grads, metrics = _run(MODEL, HOW, shared, jax.device_put(batch, batch_sharding(mesh)))
    assert shared["mtp"]["0"]["projection"].sharding.shard_shape((32, 16)) == (16, 8)
    assert metrics == pytest.approx(expected, rel=1e-5)
    norm = np.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in whole.values()))
    for path, leaf in grads.items():
        np.testing.assert_allclose(leaf, whole[path], rtol=1e-5, atol=2e-6 * norm, err_msg=path)


def test_recomputing_in_the_backward_pass_changes_no_gradient(weights: Weights, batch: dict[str, Any]):
    whole, _ = _run(MODEL, HOW, weights, batch)
    grads, _ = _run(Model(MODEL.spec, Numerics(remat="full")), HOW, weights, batch)
    for path, leaf in grads.items():
        np.testing.assert_allclose(leaf, whole[path], rtol=1e-5, atol=1e-6, err_msg=path)


def test_documents_without_a_token_after_the_next_train_nothing_of_it(weights: Weights):
    """Loss 0 and gradient 0 of what nothing reaches, not NaN."""
    grads, metrics = _run(MODEL, HOW, weights, tiny.batch([[2, 2, 1]], length=6, vocab=24))
    assert metrics["mtp"] == 0
    assert metrics["loss"] == metrics["cross_entropy"] > 0
    assert all(np.isfinite(leaf).all() for leaf in grads.values())
    assert all(not np.any(leaf) for path, leaf in grads.items() if path.startswith("mtp."))


def test_a_model_without_it_has_no_such_term(weights: Weights, batch: dict[str, Any]):
    """Nor does a forward read the further weights: generating costs the same with them."""
    main = Model(MODEL.spec.main)
    own: Any = {name: value for name, value in weights.items() if name != "mtp"}
    _, metrics = _run(main, HOW, own, batch)
    assert "mtp" not in metrics
    assert metrics["loss"] == pytest.approx(_numpy_loss(flatten(weights), batch, mtp_weight=0)[0], rel=1e-5)
    programs = [
        str(jax.make_jaxpr(lambda weights, model=model: tiny.logits(model.bind(weights), batch))(given)).count("dot_general")
        for model, given in ((MODEL, weights), (main, own))
    ]
    assert programs[0] == programs[1] > 0


def test_a_weight_of_zero_measures_and_trains_nothing(weights: Weights, batch: dict[str, Any]):
    grads, metrics = _run(MODEL, TrainConfig(loss_chunk=16, mtp_weight=0.0), weights, batch)
    assert metrics["mtp"] == pytest.approx(_numpy_loss(flatten(weights), batch, mtp_weight=0)[2], rel=1e-5)
    assert metrics["loss"] == metrics["cross_entropy"]
    assert all(not np.any(leaf) for path, leaf in grads.items() if path.startswith("mtp."))


def _greedy(flat: dict[str, np.ndarray], batch: dict[str, Any]) -> tuple[list[int], list[int]]:
    """For each depth the drafts that are the model's own choice, and all of them: document by document, token by token."""
    accepted, drafted = [0] * DEPTHS, [0] * DEPTHS
    for row, places in _documents(batch):
        tokens, mask = batch["tokens"][row, places], batch["mask"][row, places]
        own, *further = reference_numpy.further_logits(flat, tokens, layers=LAYERS, depths=DEPTHS, eps=EPS)
        for depth, logits in enumerate(further, 1):
            for i in range(len(tokens) - depth - 1):
                if mask[i + depth]:
                    drafted[depth - 1] += 1
                    accepted[depth - 1] += int(np.argmax(logits[i]) == np.argmax(own[i + depth]))
    return accepted, drafted


def test_accepted_drafts_equal_a_loop_of_numpy(batch: dict[str, Any]):
    """Over batches of unequal size, divided once; few likely tokens, so that drafts are accepted at all."""
    skewed: Any = tiny.weights(MODEL)
    skewed["embedding"] = skewed["embedding"].at[:3].multiply(4.0)
    other = tiny.batch([[7, 9], [16], [3], [1, 2]], length=16, vocab=24, seed=5)
    accepted, drafted = np.zeros(DEPTHS), np.zeros(DEPTHS)
    for each in (batch, other):
        found = _greedy(flatten(skewed), each)
        accepted, drafted = accepted + found[0], drafted + found[1]
    assert all(0 < share < 1 for share in accepted / drafted)
    validation = add_up([EVALUATE(skewed, batch), EVALUATE(skewed, other)])
    assert validation is not None
    assert acceptance_metrics(validation) == pytest.approx(
        {"val_mtp_acceptance": accepted[0] / drafted[0], "val_mtp_acceptance_2": accepted[1] / drafted[1]}
    )


def test_drafts_that_repeat_the_model_are_all_accepted(weights: Weights, batch: dict[str, Any]):
    """Where head and hidden states say one token whatever comes, main model and drafts agree; where there are no drafts, there is no share."""
    constant = jax.tree.map(jnp.zeros_like, weights)
    validation = add_up([EVALUATE(constant, batch)])
    assert validation is not None
    assert validation.acceptance == {1: 1.0, 2: 1.0}
    none = add_up([EVALUATE(constant, tiny.batch([[2, 2]] * 4, length=16, vocab=24))])
    assert none is not None
    assert none.acceptance == {}


def _mixture_model() -> Model:
    router = RouterConfig(n_experts=4, top_k=2, score="sigmoid", selection_bias=True)
    block = SIZES.spec().blocks[0].model_copy(update={"ffn": MoEConfig(router=router, d_ff=8)})
    return Model(_spec(blocks=(block,), mtp=(block,)))


def _state(model: Model, weights: Any, optimizer: Any) -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), weights, optimizer.init(weights), KEY)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_mixtures_loads_and_bias_are_those_of_the_places_that_predict(accumulate: int):
    """Its router counts no place without a token ahead, padding included, and its bias moves towards an even load of its own."""
    model = _mixture_model()
    weights: Any = tiny.weights(model)
    for path in (weights["stacks"]["0"]["blocks"]["0"], weights["mtp"]["0"]["block"]):
        path["ffn"]["router"]["selection_bias"] *= 0.0
    batch = tiny.batch(DOCUMENTS, length=16, vocab=24)
    how = TrainConfig(loss_chunk=16, experts=ExpertsConfig(balance="batch", z_weight=0.1))
    loss = language_model_loss(how)
    measured = jax.jit(lambda weights, batch: loss.measure(model.bind(weights), batch, KEY))(weights, batch)
    loads = measured.loads
    assert set(loads) == {"stacks.0.blocks.0.ffn", "mtp.0.block.ffn"}
    assert float(loads["stacks.0.blocks.0.ffn"].tokens[0]) == sum(map(sum, DOCUMENTS))
    predicting = sum(length - 1 for row in DOCUMENTS for length in row)
    assert float(loads["mtp.0.block.ffn"].tokens) == predicting
    assert float(loads["mtp.0.block.ffn"].counts.sum()) == 2 * predicting
    assert float(measured.terms["router_z"].denominator) == sum(map(sum, DOCUMENTS)) + predicting

    optimizer = build_optimizer(tiny.run().model_copy(update={"optimizer": OptimizerConfig()}), model)
    step = jax.jit(
        lambda state, batch: train_step(state, batch, model=model, optimizer=optimizer, loss=loss, accumulate=accumulate, bias_rate=0.5)
    )
    after, metrics = step(_state(model, weights, optimizer), batch)
    counts = np.asarray(loads["mtp.0.block.ffn"].counts)
    moved: Any = after.weights["mtp"]["0"]["block"]["ffn"]["router"]["selection_bias"]
    np.testing.assert_allclose(moved, -0.5 * np.sign(counts - counts.mean()), atol=1e-6)
    assert np.isfinite(float(metrics["balance"]))


def test_padding_and_other_documents_change_no_load_of_a_further_mixture():
    """A document by itself, with another one behind it, and with other tokens where the padding is."""
    model = _mixture_model()
    weights, loss = tiny.weights(model), language_model_loss(HOW)
    loads = jax.jit(lambda batch: loss.measure(model.bind(weights), batch, KEY).loads["mtp.0.block.ffn"].counts)
    alone, both = tiny.batch([[9]], length=20, vocab=24), tiny.batch([[9, 7]], length=20, vocab=24)
    assert (alone["tokens"][0, :9] == both["tokens"][0, :9]).all()
    filled = alone | {"tokens": both["tokens"]}
    first, second = np.asarray(loads(alone)), np.asarray(loads(both))
    np.testing.assert_array_equal(first, loads(filled))
    assert second.sum() == first.sum() + 2 * 6
    assert (second >= first).all()


@pytest.mark.slow
@pytest.mark.xdist_group("mesh")
def test_a_further_mixture_whose_experts_are_on_several_devices_changes_nothing():
    """Rows and weights are shared by two and experts by two: terms, loads' metrics, gradients, and the drafts that are accepted."""
    model = _mixture_model()
    weights, batch = tiny.weights(model), tiny.batch(DOCUMENTS, length=16, vocab=24)
    loss = language_model_loss(HOW)
    counts = jax.jit(lambda weights, batch: eval_step(weights, batch, model=model, loss=loss).counts)
    whole, expected = _run(model, HOW, weights, batch)
    drafts = counts(weights, batch)
    mesh = build_mesh(MeshConfig(fsdp=2, expert=2), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        shared, rows = jax.device_put(weights, model.shardings(mesh)), jax.device_put(batch, batch_sharding(mesh))
        grads, metrics = _run(model, HOW, shared, rows)
        drafts_of_devices = counts(shared, rows)
    assert metrics == pytest.approx(expected, rel=1e-5)
    norm = np.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in whole.values()))
    for path, leaf in grads.items():
        np.testing.assert_allclose(leaf, whole[path], rtol=1e-5, atol=2e-6 * norm, err_msg=path)
    assert drafts["mtp_drafted_1"] > 0
    for name in drafts:
        np.testing.assert_allclose(drafts_of_devices[name], drafts[name], rtol=1e-6, err_msg=name)
