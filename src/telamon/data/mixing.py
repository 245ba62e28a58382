"""Mixing sources by weight, exactly and by arithmetic: which source a row comes from, and which of that source's rows it is.

Weights become whole numbers that sum to a period P. Within a period the rows are dealt out by the quota method (Balinski and Young, "The Quota
Method of Apportionment", 1975): every prefix holds each source's share, rounded up or down. Periods repeat, so row r is looked up, whatever came before it.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

import numpy as np

LONGEST_PERIOD = 10_000
"""Weights that need a longer period are rounded to multiples of one part in this many."""


@dataclass(frozen=True)
class Mixture:
    """A period of rows: `source` i32[P] of each, its `rank` i64[P] among that source's rows, and how many each source has, `counts` i64[sources]."""

    source: np.ndarray
    rank: np.ndarray
    counts: np.ndarray

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, row within the source) of each of the mixture's rows."""
        period, place = np.divmod(np.asarray(rows, np.int64), len(self.source))
        source = self.source[place]
        return source, period * self.counts[source] + self.rank[place]

    def rows_of(self, rows: int) -> np.ndarray:
        """How many of the first `rows` rows each source gives, i64[sources]; within one row of its share."""
        periods, rest = divmod(rows, len(self.source))
        return periods * self.counts + np.bincount(self.source[:rest], minlength=len(self.counts))

    def rows_until(self, available: np.ndarray) -> int:
        """Rows before the first that would need more than `available` i64[sources] rows of some source."""
        periods = int(min(available // self.counts))
        left = available - periods * self.counts
        beyond = self.rank >= left[self.source]  # true somewhere: one source has less than a period's rows left
        return periods * len(self.source) + int(np.argmax(beyond))


def mixture(weights: tuple[float, ...]) -> Mixture:
    """The mixture with these relative weights (all above 0)."""
    counts = np.array(_whole_weights(weights), np.int64)
    period = int(counts.sum())
    source, taken = np.zeros(period, np.int32), np.zeros(len(counts), np.int64)
    for row in range(period):
        below_share = taken * period < (row + 1) * counts
        deadline = np.where(below_share, (taken + 1) / counts, np.inf)
        source[row] = np.argmin(deadline)
        taken[source[row]] += 1
    rank = np.zeros(period, np.int64)
    for index, count in enumerate(counts):
        rank[source == index] = np.arange(count)
    return Mixture(source, rank, counts)


def _whole_weights(weights: tuple[float, ...]) -> list[int]:
    """Whole numbers in the ratio of the weights, as small as possible, at least 1 each."""
    exact = [Fraction(repr(float(w))) for w in weights]
    scale = lcm(*(w.denominator for w in exact))
    whole = [int(w * scale) for w in exact]
    whole = [w // gcd(*whole) for w in whole]
    if sum(whole) <= LONGEST_PERIOD:
        return whole
    total = sum(whole)
    return [max(1, round(Fraction(w * LONGEST_PERIOD, total))) for w in whole]
