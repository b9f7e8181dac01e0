"""Where the rows of a batch are: grouped by segment once, for all columns that are read of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trajectory_store.ragged import Int64Array, offsets_of

T = TypeVar("T")
FEW = 4
"""Rows of one segment for which looking at them first costs more than it saves."""


class Places:
    """The rows of a batch, segment by segment.

    "Run order" is the order of the runs one after another; it is the order of the batch where one segment has all rows.

    Attributes:
        ordinals: `[B]` int64, the segment of each row, in the order of the batch.
        rows: `[B]` int64, the row in it.
        order: `[B]` the place in the batch of each row in run order; None where the orders agree.
        runs: per segment its ordinal and the rows in it.

    >>> places = Places(np.array([5, 2, 5]), np.array([0, 1, 7]))
    >>> [(ordinal, rows.tolist()) for ordinal, rows in places.runs]
    [(2, [1]), (5, [0, 7])]
    >>> places.join([rows * 10 for _, rows in places.runs]).tolist()
    [0, 10, 70]
    """

    def __init__(self, ordinals: Int64Array, rows: Int64Array) -> None:
        self.ordinals = ordinals
        self.rows = rows
        self.order: Int64Array | None = None
        self.runs: list[tuple[int, Int64Array]] = []
        n = len(rows)
        if not n:
            return
        first = int(ordinals[0])
        if np.count_nonzero(ordinals == first) == n:
            self.runs.append((first, rows))
            return
        self.order = ordinals.argsort(kind="stable")
        ordinals, rows = ordinals[self.order], rows[self.order]
        edges = [0, *(np.flatnonzero(ordinals[1:] != ordinals[:-1]) + 1).tolist(), n]
        self.runs += [(int(ordinals[a]), rows[a:b]) for a, b in itertools.pairwise(edges)]

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def inverse(self) -> Int64Array:
        """`[B]` the place in run order of each row of the batch."""
        inverse = np.empty(len(self.rows), np.int64)
        inverse[self.order] = np.arange(len(inverse))
        return inverse

    @cached_property
    def owners(self) -> list[int]:
        """The segment of each row of the batch."""
        return self.ordinals.tolist()

    def restore(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """From run order to the order of the batch."""
        return values if self.order is None else values[self.inverse]

    def join(self, parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """From the values of each run to those of the batch, in its order."""
        return parts[0] if len(parts) == 1 else np.concatenate(parts)[self.inverse]

    def split(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """From values of the batch to those of each run."""
        if self.order is None:
            return [values] if self.runs else []
        return np.split(values[self.order], np.cumsum([len(rows) for _, rows in self.runs[:-1]]))

    def spread(self, table: Mapping[int, T]) -> list[T | None]:
        """Per row, in run order, what a table has for its segment."""
        out: list[T | None] = []
        for ordinal, rows in self.runs:
            out += [table.get(ordinal)] * len(rows)
        return out


class Spans:
    """Where the elements of rows are on one axis.

    Args:
        places: the rows.
        edges: `[B, 2]` int64, in run order: the first element in the segment and one past the last.

    Attributes:
        starts: `[B]` int64, in run order: the first elements.
        lengths: `[B]` int64, in the order of the batch.
        width: the longest row.
    """

    def __init__(self, places: Places, edges: Int64Array) -> None:
        self.places = places
        self.starts: Int64Array
        self.starts, self._ends = edges.T.copy()
        self._counts = self._ends - self.starts
        self.lengths: Int64Array = places.restore(self._counts)
        self._blanks: dict[tuple[int, int], tuple[memoryview, list[memoryview]]] = {}

    @cached_property
    def width(self) -> int:
        """The longest row."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    @cached_property
    def heads(self) -> list[tuple[int, Int64Array]]:
        """The first elements of the rows of each segment that has more than a few of them."""
        edges = itertools.accumulate((len(rows) for _, rows in self.places.runs), initial=0)
        starts = zip(self.places.runs, itertools.pairwise(edges), strict=True)
        return [(ordinal, self.starts[a:b]) for (ordinal, _), (a, b) in starts if b - a > FEW]

    @cached_property
    def slices(self) -> list[slice]:
        """Per row, in run order, what to copy."""
        return list(map(slice, self.starts.tolist(), self._ends.tolist()))

    @cached_property
    def parts(self) -> list[slice]:
        """The same in the order of the batch."""
        starts, ends = self.places.restore(self.starts), self.places.restore(self._ends)
        return list(map(slice, starts.tolist(), ends.tolist()))

    def blanks(self, width: int, blank: memoryview, item: int) -> list[memoryview]:
        """Per row, in the order of the batch, what pads it to a width: a part of `blank`, `item` bytes per element."""
        found = self._blanks.get((width, item))
        if found is None or found[0] is not blank:
            parts = [blank[:size] for size in ((width - self.lengths) * item).tolist()]
            found = self._blanks[width, item] = (blank, parts)
        return found[1]

    def flat(self, table: Mapping[int, T]) -> tuple[list[T | None], list[slice], list[slice]]:
        """How to copy the rows one after another: what a table has for the segment, what to copy, where it goes.

        Rows that are next to one another in a segment and in the batch are copied at once.
        """
        starts, ends = self.starts, self._ends
        begins = offsets_of(self.lengths)[:-1]
        begins = begins if self.places.order is None else begins[self.places.order]
        stops = begins + self._counts
        owners = np.repeat([o for o, _ in self.places.runs], [len(rows) for _, rows in self.places.runs])
        breaks = (starts[1:] != ends[:-1]) | (begins[1:] != stops[:-1]) | (owners[1:] != owners[:-1])
        cuts = np.flatnonzero(breaks)
        firsts, lasts = np.concatenate(([0], cuts + 1)), np.concatenate((cuts, [len(starts) - 1]))
        parts = map(slice, starts[firsts].tolist(), ends[lasts].tolist())
        targets = map(slice, begins[firsts].tolist(), stops[lasts].tolist())
        return [table.get(owner) for owner in owners[firsts].tolist()], list(parts), list(targets)
