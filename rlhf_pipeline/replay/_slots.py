"""Which row of the store a TorchRL slot means."""

from __future__ import annotations

import numpy as np

from rlhf_pipeline.replay.schema import SLOT
from trajectory_store import TrajectoryStore

UNBOUNDED = int(np.iinfo(np.int64).max)


class SlotMap:
    """Slots of a ring of `max_size`, filled in the order of arrival.

    Rows are never overwritten: a slot that is written again means a newer row. Every process that reads the store
    derives the same map, as it follows from the order of arrival, except for rows written to a slot on purpose
    (`storage[3] = td`), whose slot is a column.

    Args:
        max_size: slots of the ring.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._rows = np.empty(0, np.int64)
        self._size = 0
        self._count = 0
        self._mark = 0
        self._floor = 0
        self._newest = -1

    def __len__(self) -> int:
        return self._size

    @property
    def rows(self) -> np.ndarray:
        """int64 `[len]`: the row id of each slot, -1 where nothing was ever written."""
        return self._rows[: self._size]

    @property
    def floor(self) -> int:
        """The watermark before which all rows were forgotten by `clear`."""
        return self._floor

    @property
    def next_slot(self) -> int:
        """The slot of the next row that comes in turn."""
        return self._count % self.max_size

    def expected(self, n: int) -> np.ndarray:
        """The slots of the next `n` rows that come in turn."""
        first = self._count % self.max_size
        slots = np.arange(first, first + n, dtype=np.int64)
        return slots if first + n <= self.max_size else slots % self.max_size

    def clear(self) -> None:
        """Forget the rows that are there now; later ones start again at slot 0."""
        self._floor = self._mark
        self._size = self._count = 0

    def sync(self, store: TrajectoryStore) -> None:
        """Take in the rows that the store has shown since the last call."""
        mark = store.watermark
        fresh = mark - self._mark
        if fresh == 0:
            return
        ids = store.ids()
        known = len(ids) - fresh
        in_order = known >= 0 and (known == 0 or ids[known - 1] == self._newest) and self._mark > 0
        if not in_order:
            # Another writer's earlier commit came to light, or more rows came than the store keeps: start over.
            hidden = mark - len(ids)
            known = max(self._floor - hidden, 0)
            self._size, self._count = 0, max(hidden - self._floor, 0)
        self._take(store, np.asarray(ids[known:]))
        self._mark = mark
        self._newest = int(ids[-1]) if len(ids) else -1

    def push(self, ids: np.ndarray, slots: np.ndarray, in_turn: bool, mark: int) -> bool:
        """Take in rows that this process just appended; False if others came in between and `sync` must look.

        Args:
            ids: the new rows.
            slots: where they go.
            in_turn: whether these are the next slots.
            mark: the store's watermark after the append.
        """
        if mark != self._mark + len(ids):
            return False
        n, size = len(ids), self._size
        self._count += n if in_turn else 0
        if in_turn and n and slots[0] == size and slots[-1] == size + n - 1 and size + n <= len(self._rows):
            self._rows[size : size + n] = ids
            self._size = size + n
        else:
            self._place(slots, ids)
        self._mark, self._newest = mark, int(ids[-1])
        return True

    def _take(self, store: TrajectoryStore, ids: np.ndarray) -> None:
        if SLOT in store.schema:
            slots = store.read_scalars(SLOT, ids).astype(np.int64)
        else:
            slots = np.full(len(ids), -1, np.int64)
        in_turn = slots < 0
        n = int(in_turn.sum())
        slots[in_turn] = self.expected(n)
        self._count += n
        self._place(slots, ids)

    def _place(self, slots: np.ndarray, ids: np.ndarray) -> None:
        size = max(self._size, int(slots.max()) + 1) if len(slots) else self._size
        if size > len(self._rows):
            grown = np.full(min(max(size, 2 * len(self._rows), 1024), self.max_size), -1, np.int64)
            grown[: self._size] = self._rows[: self._size]
            self._rows = grown
        self._rows[self._size : size] = -1
        self._rows[slots] = ids  # of several rows for one slot the last wins
        self._size = size
