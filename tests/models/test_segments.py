"""Packing and padding change nothing: documents of one row cannot see each other, and nobody sees padding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_numpy
import tiny

from telamon.models.weights import Weights

MODEL = tiny.model()
LENGTH = 16


@pytest.fixture(scope="module")
def weights() -> Any:
    return tiny.weights(MODEL)


@jax.jit
def _logits(weights: Weights, batch: dict[str, jax.Array]) -> jax.Array:
    return tiny.logits(MODEL.bind(weights), batch)


@jax.jit
def _prefill(weights: Weights, batch: dict[str, jax.Array]) -> jax.Array:
    decoder = MODEL.bind(weights)
    where = {name: batch[name] for name in ("positions", "segments")}
    cache = decoder.init_cache(batch=len(batch["tokens"]), length=2 * LENGTH)
    return decoder.logits(decoder(batch["tokens"], **where, cache=cache).hidden)


@jax.jit
def _gradient(weights: Weights, batch: dict[str, jax.Array]) -> Weights:
    """Of the summed negative log-likelihood."""

    def summed(weights: Weights) -> jax.Array:
        log_probs = jax.nn.log_softmax(tiny.logits(MODEL.bind(weights), batch))
        return -jnp.sum(batch["mask"] * jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0])

    return jax.grad(summed)(weights)


def test_a_changed_document_changes_no_logit_of_its_neighbour(weights: Any):
    batch = tiny.batch([[7, 9]], length=LENGTH)
    changed = batch | {"tokens": np.where(batch["segments"] == 1, (batch["tokens"] + 11) % 64, batch["tokens"])}
    before, after = _logits(weights, batch), _logits(weights, changed)
    assert np.abs(before[0, 7:] - after[0, 7:]).max() == 0.0
    assert np.abs(before[0, :7] - after[0, :7]).min() > 0


def test_the_gradient_of_a_packed_row_is_the_sum_over_its_documents(weights: Any):
    """5, 3 and 6 tokens, packed and each in a row of its own."""
    packed = tiny.batch([[5, 3, 6]], length=LENGTH)
    total = jax.tree.map(jnp.zeros_like, weights)
    for segment in (1, 2, 3):
        inside = packed["segments"][0] == segment
        alone: Any = {name: np.zeros_like(x) for name, x in packed.items()}
        for name, x in packed.items():
            alone[name][0, : inside.sum()] = x[0, inside]
        alone["segments"] = np.minimum(alone["segments"], 1)
        total = jax.tree.map(jnp.add, total, _gradient(weights, alone))

    def close(ours: jax.Array, theirs: jax.Array) -> None:
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * float(np.abs(theirs).max()))

    jax.tree.map(close, _gradient(weights, packed), total)


def test_copies_of_a_document_do_not_get_cheaper(weights: Any):
    """One random document four times in a row: without its segments, later copies could be read off the first."""
    one = tiny.batch([[LENGTH]], length=LENGTH)
    four = {name: np.tile(x, 4) for name, x in one.items()}
    four["segments"] = np.repeat([[1, 2, 3, 4]], LENGTH, axis=1)
    log_probs = reference_numpy.log_softmax(np.asarray(_logits(weights, four)[0], np.float64))
    nll = -np.take_along_axis(log_probs, four["targets"][0][:, None], axis=-1)[:, 0].reshape(4, LENGTH)
    for copy in nll[1:]:
        np.testing.assert_allclose(copy[:-1], nll[0, :-1], atol=1e-5)


@pytest.mark.parametrize("path", [_logits, _prefill], ids=["training", "prefill"])
def test_padding_changes_no_logit(weights: Any, path: Any):
    """0, 3 and 7 pads on the left, then on the right; in the second prompt the pad's id is a real token."""
    pad = 6
    for prompt in ([5, 6, 7], [pad, pad, 9]):
        alone: Any = None
        for left, right in ((0, 0), (3, 0), (7, 0), (0, 3), (0, 7), (3, 4)):
            real = slice(left, left + 3)
            batch = {name: np.zeros((1, left + 3 + right), np.int32) for name in ("tokens", "positions", "segments")}
            batch["tokens"][:] = pad
            batch["tokens"][0, real], batch["positions"][0, real], batch["segments"][0, real] = prompt, range(3), 1
            logits = np.asarray(path(weights, batch))[0, real]
            alone = logits if alone is None else alone
            np.testing.assert_allclose(logits, alone, atol=1e-5, err_msg=f"{prompt}, {left} left, {right} right")
