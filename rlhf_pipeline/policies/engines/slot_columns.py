"""Which columns of a cache hold which tokens, where several slots share a row.

Attention in steps of one shape reads as many columns of every row as the fullest has in use. With a slot per row that
is the longest completion, for all. So up to four slots share a row, and any column of it may hold a token of any of
them: a mark in each column says whose it is, and new tokens take the first columns that are free. Rows with about as
many tokens each waste little, whatever the lengths.

    marks of a row     parked  a0  a1  b0  a2  b1  free  b2  ...     slots a and b, with three tokens each

Slot `s` of `r` rows is member `s // r` of row `s % r`; its token at position `p` has the mark `member * window + p`.
The first column is that of slots which are not live: they write to it, and see it alone.
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np

from rlhf_pipeline.policies.engines.protocol import Int64Array

FREE: Final = -1
PARKED: Final = -2
MOST_MEMBERS: Final = 4
FEWEST_ROWS = 32
"""Slots share rows only as far as this many are left: on a GPU, attention over fewer has too little in parallel."""


def rows_of(slots: int, most: int) -> int:
    """Return the number of rows for this many slots, if at most `most` share one."""
    shared = (m for m in (MOST_MEMBERS, 2) if m <= most and slots % m == 0 and slots >= m * FEWEST_ROWS)
    return slots // next(shared, 1)


def tokens_of(slots: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return slot and position of the first `counts` tokens of each slot, one slot after the other."""
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(slots, counts), np.arange(len(starts)) - starts


def balanced(counts: Int64Array, rows: int, members: int) -> tuple[Int64Array, int]:
    """Return a slot for each of these numbers of tokens, and how many the fullest row then has.

    The longest first, each to the row with the fewest tokens so far.
    """
    slots, most = np.zeros_like(counts), 0
    open_rows = [(0, row) for row in range(rows)]  # tokens, and the next slot
    for i in np.argsort(-counts, kind="stable").tolist():
        tokens, slots[i] = heapq.heappop(open_rows)
        tokens += int(counts[i])
        most = max(most, tokens)
        if slots[i] + rows < rows * members:
            heapq.heappush(open_rows, (tokens, int(slots[i]) + rows))
    return slots, most


class Columns:
    """The columns of all slots.

    Args:
        num_slots: S.
        rows: that they share.
        window: one more than the most tokens of a slot.

    Attributes:
        marks: of each column, int32 `[rows, columns]`.
        edge: the number of columns up to the last in use, when a slot was last extended.
    """

    def __init__(self, num_slots: int, rows: int, window: int) -> None:
        self.window = window
        self.marks = np.full((rows, num_slots // rows * window), FREE, dtype=np.int32)
        self.marks[:, 0] = PARKED
        self.edge = 1
        self._places = np.zeros((num_slots, window), dtype=np.int64)
        self._taken = np.zeros(num_slots, dtype=np.int64)

    def extend(self, slots: Int64Array, counts: Int64Array) -> None:
        """Give each slot columns for its tokens up to these counts, which are no fewer than it has."""
        rows = len(self.marks)
        by_row = np.argsort(slots % rows, kind="stable")
        slots, more = slots[by_row], (counts - self._taken[slots])[by_row]
        needed = np.bincount(slots % rows, more, rows).astype(np.int64)
        marks = self.marks[:, : self.edge + int(needed.max())]
        free = marks == FREE
        row, column = np.divmod(np.flatnonzero(free), free.shape[1])
        first = np.searchsorted(row, np.arange(rows))[row]
        taken = np.arange(len(row)) - first < needed[row]
        row, column = row[taken], column[taken]
        slot, position = tokens_of(slots, more)
        position += self._taken[slot]
        self._places[slot, position] = column
        marks[row, column] = slot // rows * self.window + position
        self._taken[slots] += more
        free[row, column] = False
        self.edge = 1 + int(np.flatnonzero(~free.all(0))[-1])

    def free(self, slot: int) -> None:
        """Take the columns of a slot back."""
        self.marks[slot % len(self.marks), self._places[slot, : self._taken[slot]]] = FREE
        self._taken[slot] = 0

    def cells(self, slots: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return row and column of the first `counts` tokens of each slot, one slot after the other."""
        slot, position = tokens_of(slots, counts)
        return slot % len(self.marks), self._places[slot, position]

    def ahead(self, start: Int64Array, steps: int) -> Int64Array:
        """Return the columns of `steps` tokens of every slot from position `start` on, `[S, steps]`.

        What they are beyond the columns of a slot does not matter, as it is not live by then.
        """
        positions = np.minimum(start[:, None] + np.arange(steps), self.window - 1)
        return np.take_along_axis(self._places, positions, 1)
