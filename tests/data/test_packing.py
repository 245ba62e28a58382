import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telamon.data.fit import best_fit, first_fit
from telamon.data.order import Order
from telamon.data.packing import (
    Bins,
    Documents,
    Spans,
    Stream,
    assemble,
    lay_out,
    next_token_mask,
    trainable,
)

PLAIN = Order(shuffle=False)

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)
packings = st.sampled_from(["split", "first_fit", "best_fit"])


def documents(sizes: list[int]) -> Documents:
    ends = np.cumsum(sizes)
    return Documents(ends - sizes, np.array(sizes, np.int64))


def epoch_batch(layout, rows: int, width: int, total: int) -> dict[str, np.ndarray]:
    """All rows of the first epoch; token i of the file is i + 1, so that 0 is padding alone."""
    return assemble(layout.spans(0, rows, epochs=1), layout.documents, np.arange(1, total + 1), rows=rows, width=width)


def test_split_keeps_every_token_once():
    layout = Stream(documents([5, 3, 4, 2, 6, 20]), width=8, order=Order())
    kept = layout.kept()
    batch = epoch_batch(layout, kept.rows, 8, 40)
    assert (kept.rows, kept.tokens, kept.dropped, kept.fill) == (5, 40, 0, 1.0)
    assert sorted(batch["tokens"].ravel()) == list(range(1, 41))


def test_drop_tail_reports_what_it_dropped():
    layout = Bins(documents([5, 3, 4, 2, 6, 20]), width=8, packing="drop_tail", order=Order())
    kept = layout.kept()
    batch = epoch_batch(layout, kept.rows, 8, 40)
    assert (kept.tokens, kept.dropped, kept.split) == (28, 12, 0)
    assert np.count_nonzero(batch["tokens"]) == 28
    assert batch["mask"].sum() == 28 - 6  # the dropped token after a cut is no target


def test_whole_documents_fill_three_rows():
    layout = Bins(documents([5, 3, 4, 2, 6]), width=8, packing="first_fit", order=PLAIN)
    assert (layout.kept().rows, layout.kept().tokens, layout.kept().fill) == (3, 20, 20 / 24)


def test_best_fit_fills_rows_that_first_fit_leaves_open():
    sizes = np.array([4, 6, 2, 4])
    assert first_fit(sizes, 8).tolist() == [0, 1, 0, 2]
    assert best_fit(sizes, 8).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("packing", ["first_fit", "best_fit", "drop_tail"])
def test_a_row_takes_no_more_documents_than_the_kernel(packing: str):
    layout = Bins(documents([1] * 8), width=8, packing=packing, max_segments=2, order=Order())
    batch = epoch_batch(layout, layout.kept().rows, 8, 8)
    assert batch["segments"].max(axis=1).tolist() == [2, 2, 2, 2]


def test_shifted_targets_stop_at_document_borders():
    segments = np.array([1, 1, 1, 2, 2])
    assert next_token_mask(segments).tolist() == [True, True, False, True, False]
    assert next_token_mask(segments, ahead=2).tolist() == [True, False, False, False, False]
    layout = Stream(documents([3, 2]), width=5, order=PLAIN)
    batch = epoch_batch(layout, 1, 5, 5)
    assert batch["segments"].tolist() == [[1, 1, 1, 2, 2]]
    assert batch["mask"].tolist() == [[1, 1, 0, 1, 0]]
    assert batch["targets"].tolist() == [[2, 3, 0, 5, 0]]


def test_targets_of_half_a_row_are_those_of_the_whole_row():
    # A row over two devices: the first half ends inside a document, and its last target lies in the other half.
    batch = epoch_batch(Stream(documents([3, 5]), width=8, order=PLAIN), 1, 8, 8)
    left, right = (np.split(batch[name][0], 2) for name in ("targets", "mask"))
    assert [part.tolist() for part in left] == [[2, 3, 0, 5], [6, 7, 8, 0]]
    assert [part.tolist() for part in right] == [[1, 1, 0, 1], [1, 1, 1, 0]]


def test_a_document_continued_in_the_next_row_is_predicted_across_the_edge():
    batch = epoch_batch(Stream(documents([10]), width=4, order=PLAIN), 3, 4, 10)
    assert batch["targets"].tolist() == [[2, 3, 4, 5], [6, 7, 8, 9], [10, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 0]]
    assert batch["segments"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]


def test_a_prompt_that_fills_the_length_leaves_nothing_to_train():
    assert trainable(np.array([12, 9, 8, 20]), prompts=np.array([8, 8, 8, 8]), limit=8).tolist() == [False] * 4
    assert trainable(np.array([12, 9]), prompts=np.array([7, 8]), limit=8).tolist() == [True, False]
    assert trainable(np.array([0, 1, 2])).tolist() == [False, False, True]


@given(lengths, st.integers(2, 17), packings, st.booleans())
def test_an_epoch_holds_each_token_once_and_trains_each_but_the_first(sizes: list[int], width: int, packing: str, shuffle: bool):
    layout = lay_out(documents(sizes), packing=packing, width=width, order=Order(3, shuffle=shuffle))
    total = sum(sizes)
    batch = epoch_batch(layout, layout.kept().rows, width, total)
    assert sorted(batch["tokens"][batch["tokens"] > 0]) == list(range(1, total + 1))
    firsts = set((layout.documents.first + 1).tolist())
    assert sorted(batch["targets"][batch["mask"] > 0]) == [t for t in range(1, total + 1) if t not in firsts]
    check_rows(batch)


@given(lengths, st.integers(2, 17), st.sampled_from(["first_fit", "best_fit", "drop_tail"]), st.integers(1, 4))
def test_packers_respect_room_and_segments(sizes: list[int], width: int, packing: str, most: int):
    layout = Bins(documents(sizes), width=width, packing=packing, max_segments=most, order=Order())
    batch = epoch_batch(layout, layout.kept().rows, width, sum(sizes))
    kept = np.count_nonzero(batch["tokens"])
    assert kept == layout.kept().tokens == sum(sizes) - layout.kept().dropped
    assert batch["segments"].max() <= most
    check_rows(batch)


def check_rows(batch: dict[str, np.ndarray]) -> None:
    """Order within a document is kept, targets follow tokens, segments count up, positions restart, padding is zero."""
    real = batch["segments"] > 0
    for name in ("tokens", "targets", "positions", "mask"):
        assert not batch[name][~real].any()
    trained = batch["mask"] > 0
    assert np.all(batch["targets"][trained] == batch["tokens"][trained] + 1)
    for segments, positions, tokens in zip(batch["segments"], batch["positions"], batch["tokens"], strict=True):
        found = segments[segments > 0]
        assert sorted(set(found)) == list(range(1, found.max(initial=0) + 1)) and np.all(np.diff(found) >= 0)
        for segment in set(found):
            at = segments == segment
            assert positions[at].tolist() == list(range(at.sum()))
            assert np.all(np.diff(tokens[at]) == 1)


def test_an_epoch_visits_each_of_its_rows_once_and_neighbours_are_seldom_of_one_document():
    layout = Stream(documents([400] * 20), width=4, order=Order(5))
    assert sorted(layout._visited(0, 2000)) == list(range(2000))
    assert sorted(layout._visited(2000, 4000)) == list(range(2000, 4000))
    documents_of_rows = layout.spans(0, 2000).document
    assert np.mean(documents_of_rows[1:] == documents_of_rows[:-1]) < 0.1
    unshuffled = Stream(documents([400] * 20), width=4, order=Order(5, shuffle=False))
    assert unshuffled._visited(0, 2000).tolist() == list(range(2000))


@given(st.lists(st.integers(2, 30), min_size=1, max_size=12), st.integers(2, 9), st.integers(0, 30), st.integers(1, 20))
def test_rows_of_the_stream_are_the_epochs_end_to_end(sizes: list[int], width: int, begin: int, count: int):
    layout = Stream(documents(sizes), width=width, order=Order(5))
    total = sum(sizes)
    visited = layout._visited(begin, begin + count)
    orders = [layout._epoch(e)[0] for e in range(int(visited.max() + 1) * width // total + 1)]
    stream = np.concatenate([layout.documents.first[d] + np.arange(sizes[d]) for order in orders for d in order])
    batch = assemble(layout.spans(begin, begin + count), layout.documents, np.arange(total), rows=count, width=width)
    assert batch["tokens"].tolist() == [stream[row * width : (row + 1) * width].tolist() for row in visited]


def test_rows_without_spans_are_empty():
    batch = assemble(Spans.none(), documents([3]), np.arange(3), rows=2, width=4)
    assert all(array.shape == (2, 4) and not array.any() for array in batch.values())
