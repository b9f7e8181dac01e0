"""The order in which rows arrived."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trajectory_store.backend import Segment
from trajectory_store.ragged import Int64Array, expand

_BEFORE_ALL = -1 << 63


class Arrivals:
    """The ids of a store in the order of arrival at one moment, without one id per row in memory.

    The ids are stored as runs of consecutive ids, and a slice computes the ids of its rows. A store of 10^6 rows that
    one process wrote has a few runs. Later commits do not change the object.

    >>> arrivals = Arrivals(np.array([10, 40]), np.array([3, 5]))  # 10, 11, 12 and 40, 41
    >>> len(arrivals), arrivals[1:4].tolist(), arrivals[-1:].tolist(), arrivals.position(41), arrivals.position(13)
    (5, [11, 12, 40], [41], 4, None)
    """

    def __init__(self, firsts: Int64Array, ends: Int64Array) -> None:
        self._firsts, self._ends = firsts, ends
        """The first id of each run, and the position after its last one."""

    @classmethod
    def of_ids(cls, ids: Int64Array) -> Arrivals:
        """Return the runs of ids in a given order."""
        ends = np.append(np.flatnonzero(ids[1:] != ids[:-1] + 1) + 1, len(ids)) if len(ids) else ids
        return cls(ids[np.append(0, ends[:-1])] if len(ids) else ids, ends)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, part: slice) -> Int64Array:
        """Return the ids of a range of positions, [K] int64."""
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise IndexError("a range of positions must have a step of 1.")
        if start >= stop:
            return np.empty(0, np.int64)
        first, last = np.searchsorted(self._ends, [start, stop - 1], "right").tolist()
        runs = slice(first, last + 1)
        ends = np.minimum(self._ends[runs], stop)
        begins = np.concatenate([[start], ends[:-1]])
        before = self._ends[first - 1] if first else 0
        firsts = self._firsts[runs].copy()
        firsts[0] += start - before
        return expand(firsts, ends - begins)

    def take(self, positions: Int64Array) -> Int64Array:
        """Return the ids at some positions, [K] int64."""
        runs = np.searchsorted(self._ends, positions, "right")
        begins = np.append(0, self._ends[:-1])
        return self._firsts[runs] + positions - begins[runs]

    def position(self, row_id: int) -> int | None:
        """Return the position of an id, or None if it is not included."""
        begins = np.concatenate([[0], self._ends[:-1]]) if len(self._ends) else self._ends
        run = np.flatnonzero((self._firsts <= row_id) & (row_id < self._firsts + self._ends - begins))
        return int(begins[run[0]] + row_id - self._firsts[run[0]]) if len(run) else None

    def newest(self, most: int | None) -> Arrivals:
        """Return at most this many of the newest ids; None returns all."""
        skip = 0 if most is None else max(0, len(self) - most)
        return self.between(skip, len(self)) if skip else self

    def between(self, start: int, stop: int) -> Arrivals:
        """Return the ids at a range of positions."""
        start, stop, _ = slice(start, stop).indices(len(self))
        if start >= stop:
            return Arrivals(np.empty(0, np.int64), np.empty(0, np.int64))
        first, last = np.searchsorted(self._ends, [start, stop - 1], "right").tolist()
        firsts = self._firsts[first : last + 1].copy()
        firsts[0] += start - (int(self._ends[first - 1]) if first else 0)
        return Arrivals(firsts, np.minimum(self._ends[first : last + 1], stop) - start)

    def runs(self) -> tuple[Int64Array, Int64Array]:
        """Return the first id and the length of each run."""
        return self._firsts, np.diff(self._ends, prepend=0)


class ArrivalOrder:
    """All ids of a store in the order in which they were committed.

    The key is (time of the commit, id); ids hold the segment's ordinal above the row, and a segment's times
    grow with its rows, so the order is total and the same for every reader. New commits are appended
    to what is known; only where several writers interleave is the order sorted again. It is kept as runs; an array
    with an id per row is made when `ids` is called first, and extended from then on.
    """

    def __init__(self) -> None:
        self._firsts: Int64Array = np.empty(0, np.int64)
        self._ends: Int64Array = np.empty(0, np.int64)
        self._ids: Int64Array = np.empty(0, np.int64)
        self._count = 0
        """The number of ids in the array."""
        self._last = (_BEFORE_ALL, _BEFORE_ALL)
        self._read_up_to: dict[int, tuple[int, int]] = {}

    def reset(self) -> None:
        """Forget everything: segments were removed."""
        self.__init__()

    def replace(self, sources: Iterable[int], merged: Segment) -> None:
        """Note that a merged segment holds the rows of its sources. The order stays if all of them were known."""
        source_rows = [self._read_up_to.pop(source, (0, 0))[1] for source in sources]
        if sum(source_rows) == merged.rows:
            self._read_up_to[merged.ordinal] = (merged.records, merged.rows)
        else:
            self.reset()

    def update(self, segments: Iterable[Segment]) -> None:
        """Add the new rows of the segments."""
        segments = list(segments)
        news: list[tuple[Int64Array, Int64Array, Int64Array]] = []
        read_to: dict[int, tuple[int, int]] = {}
        for segment in segments:
            records, rows = self._read_up_to.get(segment.ordinal, (0, 0))
            if segment.records != records:
                read_to[segment.ordinal] = (segment.records, segment.rows)
                news.append(segment.runs(records, rows))
        self._read_up_to.update(read_to)  # only now: if reading failed because a segment is gone, all is read again
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
        self._append(firsts, counts)

    def _append(self, firsts: Int64Array, counts: Int64Array) -> None:
        """Add runs; one that continues the run before it becomes part of it."""
        run_end = int(self._ends[-1]) if len(self._ends) else 0
        if run_end:  # the last run may continue
            begin = int(self._ends[-2]) if len(self._ends) > 1 else 0
            firsts, counts = np.append(self._firsts[-1], firsts), np.append(run_end - begin, counts)
            self._firsts, self._ends, run_end = self._firsts[:-1], self._ends[:-1], begin
        starts = np.flatnonzero(np.append(True, firsts[1:] != firsts[:-1] + counts[:-1]))
        ends = run_end + np.cumsum(counts)[np.append(starts[1:], len(counts)) - 1]
        self._firsts, self._ends = np.concatenate([self._firsts, firsts[starts]]), np.concatenate([self._ends, ends])

    def _extend(self, ids: Int64Array) -> None:
        need = self._count + len(ids)
        if not self._count:
            self._ids = ids
        elif need > len(self._ids):
            grown = np.empty(max(need, 2 * len(self._ids)), np.int64)
            grown[: self._count] = self._ids[: self._count]
            self._ids = grown
        self._ids[self._count : need] = ids
        self._count = need

    def arrivals(self) -> Arrivals:
        """Return the order, which later calls do not change."""
        return Arrivals(self._firsts, self._ends)

    def ids(self) -> Int64Array:
        """Return the ids as a read-only view that later calls do not change."""
        arrivals = self.arrivals()
        if self._count < len(arrivals):
            self._extend(arrivals[self._count :])
        view = self._ids[: self._count]
        view.flags.writeable = False
        return view
