"""The order of arrival: commit time, then segment, then row; recorded, so every reader agrees."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trajectory_store.ragged import Int64Array
from trajectory_store.segment import SegmentReader
from trajectory_store.writer import ORDINAL_SHIFT


class ArrivalOrder:
    """All ids of a store in the order in which they were committed.

    The key is (time of the commit, id); ids hold the segment's ordinal above the row, and a segment's times
    grow with its rows, so the order is total and the same for every reader. New commits are appended
    to what is known; only where several writers interleave is the order sorted again.
    """

    def __init__(self) -> None:
        self._ids: Int64Array = np.empty(0, np.int64)
        self._count = 0
        self._last = (-1, -1)
        self._seen: dict[int, tuple[int, int]] = {}

    def reset(self) -> None:
        """Forget everything: segments were removed or replaced."""
        self.__init__()

    def update(self, segments: Iterable[SegmentReader]) -> None:
        """Take in what the segments hold beyond what is known."""
        segments = list(segments)
        times, firsts, counts, loose = self._new_runs(segments)
        if not len(times):
            return
        order = np.lexsort((firsts, times))
        times, firsts, counts = times[order], firsts[order], counts[order]
        if (int(times[0]), int(firsts[0])) < self._last:
            self.reset()
            self.update(segments)
            return
        self._last = (int(times[-1]), int(firsts[-1]))
        self._append(firsts if loose else expand(firsts, counts))

    def _new_runs(self, segments: list[SegmentReader]) -> tuple[Int64Array, Int64Array, Int64Array, bool]:
        times: list[Int64Array] = []
        firsts: list[Int64Array] = []
        counts: list[Int64Array] = []
        compacted = any(s.meta.kind == "compacted" for s in segments)
        for segment in segments:
            records, rows = self._seen.get(segment.ordinal, (0, 0))
            if segment.records == records:
                continue
            self._seen[segment.ordinal] = (segment.records, segment.rows)
            if segment.meta.kind == "compacted":
                ids = segment.row_ids(rows, segment.rows)
                times.append(np.array(segment.row_times()[rows:]))
                firsts.append(ids)
                counts.append(np.ones(len(ids), np.int64))
                continue
            table = segment.commits(records)
            count = table["n_rows"].astype(np.int64)
            first = table["rows_end"].astype(np.int64) - count + (segment.ordinal << ORDINAL_SHIFT)
            time = table["time_ns"].astype(np.int64)
            if compacted:
                time, first = np.repeat(time, count), expand(first, count)
                count = np.ones(len(first), np.int64)
            times.append(time)
            firsts.append(first)
            counts.append(count)
        if not times:
            empty = np.empty(0, np.int64)
            return empty, empty, empty, compacted
        return np.concatenate(times), np.concatenate(firsts), np.concatenate(counts), compacted

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


def expand(firsts: Int64Array, counts: Int64Array) -> Int64Array:
    """Turn runs into their members.

    >>> expand(np.array([10, 20]), np.array([2, 3])).tolist()
    [10, 11, 20, 21, 22]
    """
    total = int(counts.sum())
    before = np.cumsum(counts) - counts
    return np.repeat(firsts - before, counts) + np.arange(total, dtype=np.int64)
