"""Rows on their way to the devices that own their experts, and back, in turns of bounded size.

Experts are split over the mesh axis `expert`, and so are tokens. A device sorts its rows by expert, so that those for one owner lie
together, and sends each owner at most `Turns.rows` of them at one time; what was sent comes back to where it was taken from. There are
as many turns as the longest list of rows needs, a number known only when the program runs: nothing is dropped however uneven experts
are, and memory does not grow with it. Buffers for the worst case at once would be large: with 2 x 4,096 tokens a device of width 7,168,
8 choices each and 8 devices along `expert`, one device may be sent 524,288 rows, 7.5 GB in bfloat16, where an even load is 0.94 GB.

Rows of uneven lists travel by a ragged all-to-all where XLA has one (TPU, GPU), padded elsewhere.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from telamon.parallel.target import target

AXIS = "expert"
"""The mesh axis that experts are split over."""

TURN_BYTES = 2**29
"""Of the rows that a device sends in a turn, and as many again of each thing that is made of them."""

_ROOM = 1.5
"""Rows of a turn for one owner over those of an even load; beyond it there is another turn."""


@dataclass(frozen=True)
class Turns:
    """How a device's rows are cut into turns. Owner p's experts are slots p * blocks * size to (p + 1) * blocks * size - 1."""

    peers: int
    """Devices along `expert`, P."""
    blocks: int
    """Parts that an owner's experts are worked on in, one after the other."""
    size: int
    """Experts G of a block."""
    rows: int
    """Most rows C for one owner in a turn."""

    @classmethod
    def of(cls, *, peers: int, blocks: int, size: int, tokens: int, choices: int, row_bytes: int) -> "Turns":
        """For `tokens` of a device that go to `choices` experts each, in rows of so many bytes."""
        even = -(-tokens * choices // (peers * blocks))
        unit = 128 if even > 128 else 8
        room = -(-int(_ROOM * even) // unit) * unit
        bound = max(TURN_BYTES // (peers * row_bytes) // unit, 1) * unit
        return cls(peers, blocks, size, min(tokens * min(choices, size), room, bound))


class Travel(NamedTuple):
    """Where a device's rows go, and what it gets from others."""

    turns: Turns
    order: jax.Array
    """Choice of each sorted row [R]."""
    starts: jax.Array
    """First sorted row for each owner and block [P, blocks]."""
    sent: jax.Array
    """Rows for each owner and block [P, blocks]."""
    received: jax.Array
    """Rows from each device, for each block and expert of it [P, blocks, G]."""
    places: jax.Array
    """First sorted row, on each device, of its rows for this one, by block [P, blocks]."""
    longest: jax.Array
    """Rows of the longest list of any device, by block [blocks]."""

    @classmethod
    def of(cls, turns: Turns, order: jax.Array, sizes: jax.Array, axes: tuple[str, ...]) -> "Travel":
        """Inside of a `shard_map` over `axes`.

        Args:
            turns: how rows are cut.
            order: choice of each row [R], sorted by slot; rows of nobody stand last.
            sizes: rows of each slot [P * blocks * G].
            axes: all mesh axes of several devices: their turns must be as many.
        """
        by_slot = sizes.reshape(turns.peers, turns.blocks, turns.size)
        sent = jnp.sum(by_slot, axis=-1)
        starts = (jnp.cumsum(sent.reshape(-1)) - sent.reshape(-1)).reshape(sent.shape)
        if turns.peers == 1:
            return cls(turns, order, starts, sent, by_slot, starts, sent[0])
        longest = jax.lax.pmax(jnp.max(sent, axis=0), axes)
        return cls(turns, order, starts, sent, _swapped(by_slot), _swapped(starts), longest)

    def count(self, block: jax.Array) -> jax.Array:
        """Turns that a block takes, the same on all devices that exchange rows."""
        return -(-self.longest[block] // self.turns.rows)

    def turn(self, block: jax.Array, number: jax.Array) -> "Turn":
        """One of a block's turns."""
        turns = self.turns
        before = number * turns.rows

        def within(count: jax.Array) -> jax.Array:
            return jnp.clip(count - before, 0, turns.rows)

        # A list that is shorter than another's has turns with nothing in them.
        starts, places = (jnp.minimum(first[:, block] + before, len(self.order)) for first in (self.starts, self.places))
        index_PC = starts[:, None] + jnp.arange(turns.rows)
        choices = self.order[jnp.minimum(index_PC, len(self.order) - 1).reshape(-1)]
        ends_PG = within(jnp.cumsum(self.received[:, block], axis=-1))
        counts_PG = jnp.diff(ends_PG, axis=-1, prepend=0)
        experts_PC = jnp.sum(jnp.arange(turns.rows)[None, :, None] >= ends_PG[:, None, :], axis=-1, dtype=jnp.int32)
        experts = experts_PC.reshape(-1)
        order = None if turns.peers == 1 else jnp.argsort(experts, stable=True)
        experts = experts if order is None else experts[order]
        sizes = jnp.sum(counts_PG, axis=0)
        return Turn(choices, experts, sizes, order, starts, places, within(self.sent[:, block]), ends_PG[:, -1])


class Turn(NamedTuple):
    """Rows that travel together: from each device at most C to each owner."""

    choices: jax.Array
    """What is sent [P * C], C to an owner: a choice each, or any where an owner's list is shorter."""
    experts: jax.Array
    """Expert within the block of each row that is worked on [P * C], rising; G for nobody."""
    sizes: jax.Array
    """Rows that each expert of the block works on [G]."""
    order: jax.Array | None
    """Received row of each row that is worked on [P * C]; None: they are sorted as they come."""
    starts: jax.Array
    """First of the sorted rows that are sent to each owner [P]."""
    places: jax.Array
    """The same of those that each device sends here [P]."""
    sent: jax.Array
    """How many these are [P]."""
    received: jax.Array

    def out(self, rows: jax.Array) -> jax.Array:
        """Rows of `choices` [P * C, ...] -> rows sorted by expert, at their owners [P * C, ...]."""
        if self.order is None:
            return rows
        P, C = len(self.sent), len(rows) // len(self.sent)
        if _ragged(rows):
            here = jnp.full(P, jax.lax.axis_index(AXIS) * C, jnp.int32)
            starts = jnp.arange(P, dtype=jnp.int32) * C
            rows = jax.lax.ragged_all_to_all(rows, jnp.zeros_like(rows), starts, self.sent, here, self.received, axis_name=AXIS)
        else:
            rows = _swapped(rows.reshape(P, C, *rows.shape[1:])).reshape(rows.shape)
        return rows[self.order]

    def back(self, rows: jax.Array, into: jax.Array) -> jax.Array:
        """`into` [R + C, ...], which holds something of sorted rows, with what owners made of those that were sent [P * C, ...]."""
        P, C = len(self.sent), len(rows) // len(self.sent)
        if self.order is not None:
            rows = rows[jnp.argsort(self.order)]
            if _ragged(rows):
                starts = jnp.arange(P, dtype=jnp.int32) * C
                return jax.lax.ragged_all_to_all(rows, into, starts, self.received, self.places, self.sent, axis_name=AXIS)
            rows = _swapped(rows.reshape(P, C, *rows.shape[1:])).reshape(rows.shape)

        def put(p: jax.Array, into: jax.Array) -> jax.Array:
            own = (jnp.arange(C) < self.sent[p]).reshape(C, *(1,) * (rows.ndim - 1))
            new = jax.lax.dynamic_slice_in_dim(rows, p * C, C)
            kept = jnp.where(own, new, jax.lax.dynamic_slice_in_dim(into, self.starts[p], C))
            return jax.lax.dynamic_update_slice_in_dim(into, kept, self.starts[p], 0)

        return put(jnp.zeros((), jnp.int32), into) if P == 1 else jax.lax.fori_loop(0, P, put, into)


def _ragged(rows: jax.Array) -> bool:
    """Whether rows travel ragged; of single numbers padding costs nothing."""
    return rows.ndim > 1 and target().platform in ("tpu", "gpu")


def _swapped(x: jax.Array) -> jax.Array:
    """x [P, ...], a part for each peer -> [P, ...], a part from each."""
    return jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True)
