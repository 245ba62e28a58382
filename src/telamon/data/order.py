"""The order of an epoch, and hashing by arithmetic.

An order is a sort by a 64-bit hash of (seed, epoch, source, item). It reaches over the whole set, needs no generator state, and is the same
with every NumPy release (the streams of `numpy.random.Generator` may change between releases; a resumed run may not).
"""

from dataclasses import dataclass

import numpy as np

U64 = np.uint64


def mix(values: np.ndarray) -> np.ndarray:
    """Scramble an array of 64-bit integers one to one (the finaliser of SplitMix64; Steele, Lea and Flood 2014)."""
    z = np.asarray(values, U64) + U64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


def key_of(*parts: int) -> np.ndarray:
    """One 64-bit key of several non-negative integers; their order matters."""
    key = np.zeros(1, U64)
    for part in parts:
        key = mix(key ^ mix(np.array([part], U64)))
    return key


@dataclass(frozen=True)
class Order:
    """The order of a source's items in each epoch."""

    seed: int = 0
    source: int = 0
    """Number of the source in its mixture: sources of one size still get orders of their own."""
    shuffle: bool = True
    """Without it, items stay as they are."""

    def of(self, size: int, *, epoch: int) -> np.ndarray:
        """A permutation of 0 .. size-1, i64[size]."""
        if not self.shuffle:
            return np.arange(size)
        return np.argsort(mix(np.arange(size, dtype=U64) ^ key_of(self.seed, epoch, self.source)), kind="stable")
