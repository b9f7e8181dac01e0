"""The order in which rows arrived."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trajectory_store.backend import Segment
from trajectory_store.ragged import Int64Array, expand

_BEFORE_ALL = -1 << 63


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
        self._last = (_BEFORE_ALL, _BEFORE_ALL)
        self._seen: dict[int, tuple[int, int]] = {}

    def reset(self) -> None:
        """Forget everything: segments were removed."""
        self.__init__()

    def replace(self, sources: Iterable[int], merged: Segment) -> None:
        """Note that a merged segment holds the rows of its sources. The order stays if all of them were known."""
        seen = [self._seen.pop(source, (0, 0))[1] for source in sources]
        if sum(seen) == merged.rows:
            self._seen[merged.ordinal] = (merged.records, merged.rows)
        else:
            self.reset()

    def update(self, segments: Iterable[Segment]) -> None:
        """Add the new rows of the segments."""
        segments = list(segments)
        news: list[tuple[Int64Array, Int64Array, Int64Array]] = []
        seen: dict[int, tuple[int, int]] = {}
        for segment in segments:
            records, rows = self._seen.get(segment.ordinal, (0, 0))
            if segment.records != records:
                seen[segment.ordinal] = (segment.records, segment.rows)
                news.append(segment.runs(records, rows))
        self._seen.update(seen)  # only now: if reading failed because a segment is gone, all is read again
        if not news:
            return
        times, firsts, counts = news[0] if len(news) == 1 else map(np.concatenate, zip(*news, strict=True))
        if not len(times):
            return
        if len(times) > 1:
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
        if not self._count:
            self._ids = ids
        elif need > len(self._ids):
            grown = np.empty(max(need, 2 * len(self._ids)), np.int64)
            grown[: self._count] = self._ids[: self._count]
            self._ids = grown
        self._ids[self._count : need] = ids
        self._count = need

    def ids(self) -> Int64Array:
        """Return the ids as a read-only view that later calls do not change."""
        view = self._ids[: self._count]
        view.flags.writeable = False
        return view

    def runs(self) -> tuple[Int64Array, Int64Array]:
        """Return the ids as runs of consecutive ones: the first id and the length of each. Computed on demand."""
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
