"""Later values: which patch row holds the newest value of a column for a trajectory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trajectory_store.format import TARGET
from trajectory_store.ragged import Int64Array
from trajectory_store.segment import SegmentReader
from trajectory_store.writer import ORDINAL_SHIFT, ROW_MASK


class Overlay:
    """The newest patch row of one column, per trajectory.

    Patches count in the order of their commit times, so every reader ends with the same values, in
    whatever order it met the commits.

    Args:
        name: the column.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._seen: dict[int, int] = {}
        self._address: dict[int, Int64Array] = {}
        self._time: dict[int, Int64Array] = {}

    def update(self, patches: Iterable[SegmentReader]) -> None:
        """Take in the patch commits that are new."""
        targets: list[Int64Array] = []
        addresses: list[Int64Array] = []
        times: list[Int64Array] = []
        for patch in patches:
            seen = self._seen.get(patch.ordinal, 0)
            if patch.records == seen or self.name not in patch.schema:
                continue
            table = patch.commits(seen)
            self._seen[patch.ordinal] = patch.records
            counts = table["n_rows"].astype(np.int64)
            if not len(counts):
                continue
            first, end = int(table["rows_end"][0]) - int(counts[0]), int(table["rows_end"][-1])
            base = patch.ordinal << ORDINAL_SHIFT
            targets.append(np.array(patch.array(TARGET)[first:end]))
            addresses.append(np.arange(base + first, base + end, dtype=np.int64))
            times.append(np.repeat(table["time_ns"].astype(np.int64), counts))
        if targets:
            self._apply(np.concatenate(targets), np.concatenate(addresses), np.concatenate(times))

    def _apply(self, targets: Int64Array, addresses: Int64Array, times: Int64Array) -> None:
        order = np.lexsort((addresses, times))
        targets, addresses, times = targets[order], addresses[order], times[order]
        owners, rows = targets >> ORDINAL_SHIFT, targets & ROW_MASK
        for owner in np.unique(owners).tolist():
            mine = owners == owner
            where, new_times = rows[mine], times[mine]
            self._grow(owner, int(where.max()) + 1)
            known = self._time[owner]
            newer = new_times >= known[where]
            known[where[newer]] = new_times[newer]
            self._address[owner][where[newer]] = addresses[mine][newer]

    def _grow(self, owner: int, size: int) -> None:
        for table, fill in ((self._address, -1), (self._time, -1)):
            known = table.get(owner)
            if known is None or len(known) < size:
                grown = np.full(max(size, 2 * (0 if known is None else len(known)), 64), fill)
                if known is not None:
                    grown[: len(known)] = known
                table[owner] = grown.astype(np.int64, copy=False)

    def lookup(self, ids: Int64Array) -> Int64Array:
        """`[B]` int64: the address of the newest patch row (ordinal above row), or -1."""
        out = np.full(len(ids), -1, np.int64)
        if not self._address:
            return out
        owners, rows = ids >> ORDINAL_SHIFT, ids & ROW_MASK
        for owner in np.unique(owners).tolist():
            known = self._address.get(owner)
            if known is None:
                continue
            where = np.flatnonzero((owners == owner) & (rows < len(known)))
            out[where] = known[rows[where]]
        return out
