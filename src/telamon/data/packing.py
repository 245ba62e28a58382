"""Laying documents out in rows of T places: arithmetic on lengths, no text and no state.

A *span* is a run of a document's tokens that fills places of one row. Every packing yields spans, and one function turns spans into a batch:
a place is trained when the document goes on after it, in this row or in the next; a row's segments can't see each other, so positions
restart with each.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from telamon.data.fit import best_fit, first_fit
from telamon.data.order import Order, key_of

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Spans:
    """Spans, in the order of rows and of places in them; each array is i64[spans].

    `row` counts from 0 in the batch (or epoch) at hand; `start` is the first token's index in its document.
    """

    row: np.ndarray
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray

    @classmethod
    def none(cls) -> "Spans":
        """No spans: rows without a token."""
        return cls(*(np.zeros(0, np.int64) for _ in range(4)))


@dataclass(frozen=True)
class Documents:
    """Where documents lie in a token file: first token and number of tokens of each, i64[documents]."""

    first: np.ndarray
    length: np.ndarray


@dataclass(frozen=True)
class Kept:
    """What a packing made of the documents, in one epoch."""

    rows: int
    tokens: int
    dropped: int
    split: int
    """Documents that are continued in another row."""
    fill: float
    """Share of the places that hold a token."""


def trainable(lengths: np.ndarray, *, prompts: np.ndarray | int = 1, limit: int | None = None) -> np.ndarray:
    """Which documents have a token to train, bool[documents], once they are cut to `limit` tokens.

    The first `prompts` tokens are given and not trained. Nothing comes before a plain text's first token, so that it counts as the prompt.
    """
    cut = lengths if limit is None else np.minimum(lengths, limit)
    return cut > np.maximum(prompts, 1)


def assemble(spans: Spans, documents: Documents, tokens: np.ndarray, *, rows: int, width: int) -> Batch:
    """The batch [rows, width] that spans describe; places without a token hold 0 everywhere, segment 0 included."""
    count = spans.length
    ends = np.cumsum(count)
    before = ends - count  # tokens in all spans before this one
    first_of_row = np.searchsorted(spans.row, np.arange(rows))
    row_base = np.append(before, ends[-1:] if len(ends) else 0)[first_of_row]
    place = spans.row * width + before - row_base[spans.row]
    segment = np.arange(len(count)) - first_of_row[spans.row] + 1
    position = np.arange(ends[-1] if len(ends) else 0) - np.repeat(before, count)
    source = np.repeat(documents.first[spans.document] + spans.start, count) + position
    trained = np.ones(len(source), bool)
    last = spans.start + spans.length == documents.length[spans.document]
    trained[ends[last] - 1] = False
    target = tokens[np.where(trained, source + 1, source)] * trained

    at = np.repeat(place, count) + position

    def placed(values: np.ndarray, dtype: type = np.int32) -> np.ndarray:
        array = np.zeros(rows * width, dtype)
        array[at] = values
        return array.reshape(rows, width)

    return {
        "tokens": placed(tokens[source]),
        "targets": placed(target),
        "mask": placed(trained, np.float32),
        "segments": placed(np.repeat(segment, count)),
        "positions": placed(position),
    }


class Stream:
    """Packing `split`: the epochs' documents end to end in one endless stream, cut into rows of T.

    So an epoch's last row goes on with the next epoch's first document, and every token is in exactly one row an epoch.
    The rows that begin in an epoch are visited in an order of their own: neighbours in the stream are mostly of one
    document, and a batch of them would be a batch of one voice.
    """

    def __init__(self, documents: Documents, *, width: int, order: Order):
        self.documents = documents
        self._width = width
        self._order = order
        self._total = int(documents.length.sum())
        self._epoch = lru_cache(maxsize=4)(self._epoch_borders)
        self._row_order = lru_cache(maxsize=4)(self._order_of_rows)

    def rows(self, epochs: int) -> int:
        """Rows in `epochs` epochs, a short last one included."""
        return -(-self._total * epochs // self._width)

    def kept(self) -> Kept:
        """Of the first epoch on its own. Nothing is dropped, and only the last row of all epochs can have empty places."""
        borders = self._epoch(0)[1]
        split = int(np.sum((borders[1:] - 1) // self._width > borders[:-1] // self._width))
        rows = self.rows(1)
        return Kept(rows, self._total, 0, split, self._total / (rows * self._width))

    def spans(self, begin: int, end: int, *, epochs: int | None = None) -> Spans:
        """Spans of the rows visited begin-th to before end-th, counted from 0 here; with `epochs`, nothing lies beyond the last one's end."""
        first = self._visited(begin, end) * self._width
        last = first + self._width
        if epochs is not None:
            first, last = np.minimum(first, epochs * self._total), np.minimum(last, epochs * self._total)
        parts = [self._in_epoch(epoch, first, last) for epoch in range(int(first.min()) // self._total, -(-int(last.max()) // self._total))]
        if not parts:
            return Spans.none()
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        by_row = np.argsort(columns[0], kind="stable")
        return Spans(*(column[by_row] for column in columns))

    def _in_epoch(self, epoch: int, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, ...]:
        """Row, document, start and length of each span of an epoch in the rows that hold places first .. last-1 of the stream."""
        order, borders = self._epoch(epoch)
        low, high = np.maximum(first - epoch * self._total, 0), np.minimum(last - epoch * self._total, self._total)
        rows = np.flatnonzero(high > low)
        low, high = low[rows], high[rows]
        opening = np.searchsorted(borders, low, "right") - 1
        count = np.searchsorted(borders, high, "left") - opening
        which = np.repeat(opening - (np.cumsum(count) - count), count) + np.arange(count.sum())
        begins = np.maximum(borders[which], np.repeat(low, count))
        ends = np.minimum(borders[which + 1], np.repeat(high, count))
        return np.repeat(rows, count), order[which], begins - borders[which], ends - begins

    def _visited(self, begin: int, end: int) -> np.ndarray:
        """Numbers in the stream of the rows visited begin-th to before end-th."""
        rows = np.arange(begin, end)
        epoch = rows * self._width // self._total
        for e in np.unique(epoch):
            opening, at = self.rows(int(e)), epoch == e
            rows[at] = opening + self._row_order(int(e))[rows[at] - opening]
        return rows

    def _epoch_borders(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's documents in order, i64[documents], and where in the epoch each begins, i64[documents + 1]."""
        order = self._order.of(len(self.documents.length), epoch=epoch)
        return order, np.concatenate([[0], np.cumsum(self.documents.length[order])])

    def _order_of_rows(self, epoch: int) -> np.ndarray:
        """A permutation of the rows that begin in an epoch; not the documents' own, lest the two undo each other."""
        order = replace(self._order, seed=int(key_of(self._order.seed, 1)[0] >> 1))
        return order.of(self.rows(epoch + 1) - self.rows(epoch), epoch=epoch)


class Bins:
    """Packings of whole documents: `first_fit`, `best_fit`, and `drop_tail`, which is first fit of documents cut to T tokens.

    Documents longer than a row are split into pieces of T first (not by drop_tail). Rows are made once, from the documents in the order of the
    first epoch, and each epoch visits them in an order of its own: so an epoch has a fixed number of rows, and any row is found by arithmetic.
    """

    def __init__(self, documents: Documents, *, width: int, packing: str, max_segments: int | None = None, order: Order):
        self._order = order
        given = documents.length
        self._dropped = int(np.maximum(given - width, 0).sum()) if packing == "drop_tail" else 0
        self.documents = Documents(documents.first, np.minimum(given, width)) if packing == "drop_tail" else documents
        self._width = width
        document, start, length = _pieces(self.documents.length, width, order.of(len(given), epoch=0))
        fit = best_fit if packing == "best_fit" else first_fit
        row = fit(length, width, max_segments=max_segments)
        by_row = np.argsort(row, kind="stable")
        self._all = Spans(row[by_row], document[by_row], start[by_row], length[by_row])
        self._per_epoch = int(row.max()) + 1
        self._edges = np.searchsorted(self._all.row, np.arange(self._per_epoch + 1))

    def rows(self, epochs: int) -> int:
        """Rows in `epochs` epochs."""
        return self._per_epoch * epochs

    def kept(self) -> Kept:
        """Of any epoch."""
        tokens = int(self._all.length.sum())
        pieces = np.bincount(self._all.document)
        return Kept(self._per_epoch, tokens, self._dropped, int(np.sum(pieces > 1)), tokens / (self._per_epoch * self._width))

    def spans(self, begin: int, end: int, *, epochs: int | None = None) -> Spans:
        """Spans of rows begin .. end-1 of the epochs' rows, counted from 0 here; with `epochs`, rows beyond the last one are empty."""
        end = end if epochs is None else min(end, self.rows(epochs))
        rows = np.arange(begin, end)
        epoch, place = np.divmod(rows, self._per_epoch)
        for e in np.unique(epoch):
            at = epoch == e
            rows[at] = self._row_order(int(e))[place[at]]
        first, count = self._edges[rows], self._edges[rows + 1] - self._edges[rows]
        take = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(count.sum())
        row = np.repeat(np.arange(len(rows)), count)
        return Spans(row, self._all.document[take], self._all.start[take], self._all.length[take])

    @lru_cache(maxsize=4)  # noqa: B019 - a loader lives as long as its process
    def _row_order(self, epoch: int) -> np.ndarray:
        return self._order.of(self._per_epoch, epoch=epoch)


Layout = Stream | Bins


def lay_out(documents: Documents, *, packing: str, width: int, max_segments: int | None = None, order: Order) -> Layout:
    """The layout that `data.packing` names."""
    if packing == "split":
        return Stream(documents, width=width, order=order)
    return Bins(documents, width=width, packing=packing, max_segments=max_segments, order=order)


def _pieces(lengths: np.ndarray, width: int, order: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(document, start, length) of each piece of at most `width` tokens, documents in this order."""
    count = -(-lengths[order] // width)
    document = np.repeat(order, count)
    start = (np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)) * width
    return document, start, np.minimum(width, lengths[document] - start)


def next_token_mask(segments: np.ndarray, *, ahead: int = 1) -> np.ndarray:
    """Where the token `ahead` places on belongs to the same segment, bool of the shape of `segments` [..., T]; padding (0) is never trained.

    Needs whole rows: a shard of a row does not know what follows it, so the mask is made before rows are split over devices.
    """
    later = np.zeros_like(segments)
    later[..., :-ahead] = segments[..., ahead:]
    return (segments == later) & (segments > 0)
