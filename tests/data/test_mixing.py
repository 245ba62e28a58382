import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telamon.data.mixing import mixture


@pytest.mark.parametrize(("rows", "counts"), [(7, [4, 2, 1]), (10_000, [5_000, 3_000, 2_000]), (0, [0, 0, 0])])
def test_shares_are_exact(rows: int, counts: list[int]):
    mixed = mixture((0.5, 0.3, 0.2))
    source, _ = mixed.locate(np.arange(rows))
    assert np.bincount(source, minlength=3).tolist() == counts == mixed.rows_of(rows).tolist()


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=6))
def test_every_prefix_is_within_one_row_of_its_share(weights: list[float]):
    mixed = mixture(tuple(weights))
    rows = np.arange(min(3 * len(mixed.source), 5000))
    source, _ = mixed.locate(rows)
    so_far = np.cumsum(source[:, None] == np.arange(len(weights)), axis=0)
    share = mixed.counts / mixed.counts.sum()
    assert np.all(np.abs(so_far - (rows[:, None] + 1) * share) < 1)
    assert np.allclose(share, np.array(weights) / sum(weights), atol=2e-4)


@given(st.lists(st.sampled_from([1.0, 2.0, 0.5, 0.3]), min_size=1, max_size=4), st.integers(0, 400))
def test_each_source_is_read_row_by_row(weights: list[float], first: int):
    mixed = mixture(tuple(weights))
    source, local = mixed.locate(np.arange(first, first + 50))
    for index in range(len(weights)):
        rows = local[source == index]
        assert rows.tolist() == list(range(mixed.rows_of(first)[index], mixed.rows_of(first + 50)[index]))


def test_the_mixture_ends_with_the_first_source_that_runs_out():
    mixed = mixture((0.5, 0.3, 0.2))
    for available in ([5, 30, 20], [50, 0, 20], [6, 3, 2], [10, 6, 4]):
        rows = mixed.rows_until(np.array(available))
        assert np.all(mixed.rows_of(rows) <= available)
        assert np.any(mixed.rows_of(rows + 1) > available)
