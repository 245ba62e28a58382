"""Sampling against formulas written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telamon.errors import ConfigError
from telamon.infer.sampling import RowSampling, Sampling, keep_likeliest, likeliest, row_keys, sample


def kept_by_formula(logits, top_k, top_p):
    """Ids that stay, one token after the other from the likeliest."""
    ids = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
    shares = np.exp(np.array(logits, np.float64)[ids] - max(logits))
    shares /= shares.sum()
    kept, total = [], 0.0
    for index, share in zip(ids, shares, strict=True):
        if kept and total >= top_p:
            break
        kept.append(index)
        total += share
    return set(kept)


@given(
    logits=st.lists(st.integers(-40, 40).map(lambda x: x / 4), min_size=2, max_size=30),
    top_k=st.integers(1, 40),
    # No share that equally likely tokens add up to: the sums would be decided by rounding.
    top_p=st.sampled_from([0.0123, 0.317, 0.7071, 0.9513, 1.0]),
)
def test_top_k_and_top_p_keep_what_the_formula_keeps(logits, top_k, top_p):
    array = np.full((1, 30), -np.inf, np.float32)
    array[0, : len(logits)] = logits
    kept = np.asarray(keep_likeliest(jnp.asarray(array), top_k=np.array([top_k]), top_p=np.array([top_p], np.float32)))[0]
    expected = kept_by_formula(array[0, : len(logits)], top_k, top_p)
    assert set(np.flatnonzero(np.isfinite(kept))) == expected
    np.testing.assert_array_equal(kept[sorted(expected)], array[0][sorted(expected)])


def draws(logits, sampling, count=4000):
    rows = RowSampling.stack([sampling] * count)
    keys = jax.random.split(jax.random.key(7), count)
    return np.asarray(jax.jit(sample)(jnp.tile(jnp.asarray(logits, jnp.float32), (count, 1)), keys, rows))


LOGITS = np.array([1.0, 0.0, 2.0, -1.0, 0.5])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=0.7), {0, 1, 2, 3, 4}),
        (Sampling(temperature=1.3, top_k=3), {2, 0, 4}),
        (Sampling(temperature=1.0, top_p=0.6), {2, 0}),
        # The share is counted among the two that top-k leaves: 0.73 for the first, so one is enough.
        (Sampling(temperature=1.0, top_k=2, top_p=0.7), {2}),
    ],
)
def test_tokens_come_as_often_as_their_probabilities_say(sampling, kept):
    found = np.bincount(draws(LOGITS, sampling), minlength=5) / 4000
    expected = np.where([i in kept for i in range(5)], np.exp(LOGITS / sampling.temperature), 0.0)
    np.testing.assert_allclose(found, expected / expected.sum(), atol=0.03)


def test_greedy_takes_the_likeliest_beside_rows_that_draw():
    rows = RowSampling.stack([Sampling(temperature=0), Sampling(temperature=50.0)] * 100)
    keys = jax.random.split(jax.random.key(0), 200)
    ids = np.asarray(sample(jnp.tile(jnp.asarray(LOGITS, jnp.float32), (200, 1)), keys, rows))
    assert set(ids[::2]) == {2} and len(set(ids[1::2])) == 5


def test_the_likeliest_is_the_first_of_equals():
    logits = np.array([[-np.inf, 3, 1, 3], [2, 2, 2, 2], [-np.inf, -np.inf, -np.inf, -8], [0, 1, 5, 4]], np.float32)
    assert likeliest(jnp.asarray(logits)).tolist() == np.argmax(logits, axis=-1).tolist() == [1, 0, 3, 2]


def test_a_token_that_may_not_come_never_comes():
    assert 2 not in draws(np.where(np.arange(5) == 2, -np.inf, LOGITS), Sampling(temperature=2.0, top_p=0.99))


def test_keys_belong_to_the_prompt_and_tell_repeats_apart():
    keys = np.asarray(jax.random.key_data(row_keys([[1, 2], [3], [1, 2]], 0)))
    alone = np.asarray(jax.random.key_data(row_keys([[3]], 0)))
    np.testing.assert_array_equal(keys[1], alone[0])
    assert len({tuple(key) for key in keys}) == 3
    assert not np.array_equal(np.asarray(jax.random.key_data(row_keys([[3]], 1)))[0], alone[0])


@pytest.mark.parametrize("wrong", [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_impossible_settings_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)
