"""The order of arrival: commit time, then segment, then row; recorded, so every reader agrees."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trajectory_store.ragged import Int64Array
from trajectory_store.segment import Segment


class ArrivalOrder:
    """All ids of a store in the order in which they were committed.

    The key is (time of the commit, id); ids hold the segment's ordinal above the row, and a segment's times
    grow with its rows, so the order is total and the same for every reader. New commits are appended
    to what is known; only where several writers interleave is the order sorted again.
    """

    def __init__(self) -> None:
        self._firsts: Int64Array = np.empty(0, np.int64)
        self._ends: Int64Array = np.empty(0, np.int64)
        self._ids: Int64Array = np.empty(0, np.int64)
        self._count = 0
        self._last = (-1, -1)
        self._seen: dict[int, tuple[int, int]] = {}

    def reset(self) -> None:
        """Forget everything: segments were removed."""
        self.__init__()

    def replace(self, sources: Iterable[int], merged: Segment) -> None:
        """The rows of some segments are in another one now. Where all of them were known, the order is as before."""
        seen = [self._seen.pop(source, (0, 0))[1] for source in sources]
        if sum(seen) == merged.rows:
            self._seen[merged.ordinal] = (merged.records, merged.rows)
        else:
            self.reset()

    def update(self, segments: Iterable[Segment]) -> None:
        """Take in what the segments hold beyond what is known."""
        segments = list(segments)
        news: list[tuple[Int64Array, Int64Array, Int64Array]] = []
        seen: dict[int, tuple[int, int]] = {}
        for segment in segments:
            records, rows = self._seen.get(segment.ordinal, (0, 0))
            if segment.records != records:
                seen[segment.ordinal] = (segment.records, segment.rows)
                news.append(segment.runs(records, rows))
        self._seen.update(seen)  # only now, as a segment may have left: then all of it is read again
        if not news:
            return
        times, firsts, counts = (np.concatenate(parts) for parts in zip(*news, strict=True))
        if not len(times):
            return
        order = np.lexsort((firsts, times))
        times, firsts, counts = times[order], firsts[order], counts[order]
        if (int(times[0]), int(firsts[0])) < self._last:
            self.reset()
            self.update(segments)
            return
        self._last = (int(times[-1]), int(firsts[-1]))
        self._append(expand(firsts, counts))

    def _append(self, ids: Int64Array) -> None:
        need = self._count + len(ids)
        if need > len(self._ids):
            grown = np.empty(max(need, 2 * len(self._ids)), np.int64)
            grown[: self._count] = self._ids[: self._count]
            self._ids = grown
        self._ids[self._count : need] = ids
        self._count = need

    def ids(self) -> Int64Array:
        """The ids; a read-only view that later calls leave as it is."""
        view = self._ids[: self._count]
        view.flags.writeable = False
        return view

    def runs(self) -> tuple[Int64Array, Int64Array]:
        """The same as runs of consecutive ids: the first of each, and how many. Found when they are asked for."""
        known = int(self._ends[-1]) if len(self._ends) else 0
        if known < self._count:
            start = max(known - 1, 0)
            ids = self._ids[start : self._count]
            ends = np.append(np.flatnonzero(ids[1:] != ids[:-1] + 1) + 1, len(ids)) + start
            if known:  # the last run may go on
                self._ends, self._firsts = self._ends[:-1], self._firsts[:-1]
            begins = np.concatenate([self._ends[-1:] if len(self._ends) else [0], ends[:-1]])
            self._firsts = np.concatenate([self._firsts, self._ids[begins]])
            self._ends = np.concatenate([self._ends, ends])
        return self._firsts, np.diff(self._ends, prepend=0)


def expand(firsts: Int64Array, counts: Int64Array) -> Int64Array:
    """Turn runs into their members.

    >>> expand(np.array([10, 20]), np.array([2, 3])).tolist()
    [10, 11, 20, 21, 22]
    """
    total = int(counts.sum())
    before = np.cumsum(counts) - counts
    return np.repeat(firsts - before, counts) + np.arange(total, dtype=np.int64)
