"""Which row each piece of text goes to: first fit and best fit, one piece at a time, in the order given."""

import heapq
from bisect import bisect_left, insort

import numpy as np


def first_fit(lengths: np.ndarray, width: int, *, max_segments: int | None = None) -> np.ndarray:
    """Row of each piece, i64[pieces]: the first row that has room for it, else a new one. A row takes at most `max_segments` pieces."""
    leaves = 1 << max(1, (len(lengths) - 1).bit_length())
    room = [width] * (2 * leaves)  # room[i] is the most room of any row below node i of a binary tree; rows are its leaves
    used = [0] * leaves
    rows = np.zeros(len(lengths), np.int64)
    for piece, length in enumerate(lengths.tolist()):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        row = node - leaves
        rows[piece] = row
        used[row] += 1
        room[node] = 0 if used[row] == max_segments else room[node] - length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


def best_fit(lengths: np.ndarray, width: int, *, max_segments: int | None = None) -> np.ndarray:
    """Row of each piece, i64[pieces]: the fullest row that still has room for it (the first of equals), else a new one.

    Pieces are taken in the order given, not sorted by length: sorting can save a few rows more, but puts documents of like length together.
    """
    rooms: list[int] = []  # the different amounts of room that open rows have, rising
    open_rows: dict[int, list[int]] = {}  # the rows with each amount, as heaps
    used: list[int] = []
    rows = np.zeros(len(lengths), np.int64)
    for piece, length in enumerate(lengths.tolist()):
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            row = heapq.heappop(open_rows[room])
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        else:
            room, row = width, len(used)
            used.append(0)
        rows[piece] = row
        used[row] += 1
        left = room - length
        if left and used[row] != max_segments:
            if left not in open_rows:
                insort(rooms, left)
            heapq.heappush(open_rows.setdefault(left, []), row)
    return rows
