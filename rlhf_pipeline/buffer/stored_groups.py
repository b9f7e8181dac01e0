"""Finds newly committed rows, and the rows of given groups, without scanning the complete store."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trajectory_store import Snapshot, TrajectoryStore

Ints = npt.NDArray[np.int64]

_BLOCK_ROWS = 4096
_READ_ROWS = 16 * _BLOCK_ROWS
"""The number of rows per read when a long run is resumed."""


class NewIds:
    """Returns the ids of rows committed since the last call, each once."""

    def __init__(self, store: TrajectoryStore, *, skip_stored: bool = False) -> None:
        self._store = store
        self._before: Snapshot | None = store.snapshot() if skip_stored else None

    def take(self) -> Ints:
        """Return the new ids, int64, in the order of arrival; rows evicted since are excluded."""
        before, watermark = self._before, self._store.watermark
        if before is not None and watermark == before.watermark:
            return np.empty(0, np.int64)
        self._before = self._store.snapshot()
        arrivals = self._store.arrivals()
        if before is None:
            return arrivals[:]
        num = watermark - before.watermark
        new = before.later(arrivals[-2 * num :])
        return new if len(new) >= num else before.later(arrivals[:])  # a slow writer's rows are further back


class StoredGroups:
    """Finds the rows of neighbouring groups; each row is read once.

    Rows are remembered in blocks of up to 4096, each with its smallest and its largest group. Groups arrive roughly in
    order, so that few blocks hold the requested ones.
    """

    def __init__(self, store: TrajectoryStore) -> None:
        self._store = store
        self._new = NewIds(store)
        self._blocks = np.empty((0, 4), np.int64)
        """First row id, number of consecutive rows, smallest group, largest group."""

    def rows(self, first: int, last: int) -> Ints:
        """Return the row ids of groups `first` to `last`, int64, in the order of arrival."""
        self._read_new()
        near = self._blocks[(self._blocks[:, 2] <= last) & (self._blocks[:, 3] >= first)]
        if not len(near):
            return np.empty(0, np.int64)
        ids = np.concatenate([np.arange(start, start + num) for start, num, *_ in near.tolist()])
        if len(self._store) < self._store.watermark:  # a ring has evicted some of them
            ids = ids[self._store.holds(ids)]
        groups = self._store.read_scalars("group_id", ids, checked=False)
        return ids[(groups >= first) & (groups <= last)]

    def largest(self) -> int:
        """Return the largest group of which a row is in the store, or was since this object was made; -1 without rows.

        >>> import tempfile
        >>> from trajectory_store import Column, Schema
        >>> store = TrajectoryStore.create(tempfile.mkdtemp() + "/store", Schema([Column("group_id", "int64")]))
        >>> found = StoredGroups(store)
        >>> found.largest(), len(store.append({"group_id": [5, 7, 6]})), found.largest()
        (-1, 3, 7)
        >>> store.close()
        """
        self._read_new()
        return int(self._blocks[:, 3].max(initial=-1))

    def _read_new(self) -> None:
        new = self._new.take()
        for at in range(0, len(new), _READ_ROWS):
            ids = new[at : at + _READ_ROWS]
            groups = self._store.read_scalars("group_id", ids, checked=False)
            breaks = np.flatnonzero(np.diff(ids) != 1) + 1
            for ids_part, groups_part in zip(np.split(ids, breaks), np.split(groups, breaks), strict=True):
                self._add(int(ids_part[0]), groups_part)

    def _add(self, start: int, groups: npt.NDArray[np.int64]) -> None:
        """Add consecutive rows, to the last block as long as it has room."""
        added: list[tuple[int, int, int, int]] = []
        if len(self._blocks):
            block = self._blocks[-1]
            room = _BLOCK_ROWS - int(block[1])
            if block[0] + block[1] == start and room > 0:
                block_groups, groups = groups[:room], groups[room:]
                block[1] += len(block_groups)
                block[2], block[3] = min(block[2], block_groups.min()), max(block[3], block_groups.max())
                start += len(block_groups)
        for at in range(0, len(groups), _BLOCK_ROWS):
            some = groups[at : at + _BLOCK_ROWS]
            added.append((start + at, len(some), int(some.min()), int(some.max())))
        if added:
            self._blocks = np.concatenate([self._blocks, np.asarray(added, np.int64)])
