"""Maps TorchRL slots to rows of the store."""

from __future__ import annotations

import numpy as np

from rlhf_pipeline.buffer.trajectory_schema import SLOT, WAITING
from trajectory_store import TrajectoryStore

UNBOUNDED = int(np.iinfo(np.int64).max)

IN_TURN_AT = -2
"""The column value, minus the slot, of a row that used the next slot of a copied ring whose first slot is not 0."""


class SlotMap:
    """Slots of a ring of `max_size`, filled in the order of arrival.

    Rows are never overwritten: writing a slot again makes it refer to a newer row. Every process that reads the store
    derives the same map from the order of arrival; only rows written to a chosen slot (`storage[3] = td`) have theirs
    in a column. So have the rows of a copied ring, which begins at the slot of the first. A row that waits for its
    group has no slot; it gets the next one when the group is complete, and the column `waiting` records its number in
    that order. The limit of a store also counts rows without a slot, so fewer than `max_size` rows may have one: the
    slots then move up to fill the gaps, and a process that opens the store later renumbers them.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._rows = np.empty(0, np.int64)
        self._size = 0
        self._count = 0
        self._mark = 0
        self._floor = 0
        self._newest = -1
        self._waits = np.empty(0, np.int64)
        self._left = np.empty(0, np.int64)
        self._before = 0
        self._chosen = self._had_aside = False
        """Whether rows were ever written to chosen slots, and whether rows without a slot ever existed."""

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
    def waits(self) -> np.ndarray:
        """int64: the ids of the rows that wait for their group, in the order of arrival."""
        return self._waits

    @property
    def aside(self) -> np.ndarray:
        """int64: the ids of the rows without a slot: they wait, or waited and were excluded from learning."""
        return np.concatenate([self._waits, self._left]) if len(self._left) else self._waits

    @property
    def turn(self) -> int:
        """The number of rows that have used the next slot so far."""
        return self._before + self._count

    @property
    def next_slot(self) -> int:
        """The next slot."""
        return self._count % self.max_size

    def expected(self, n: int) -> np.ndarray:
        """Return the next `n` slots."""
        first = self.next_slot
        slots = np.arange(first, first + n, dtype=np.int64)
        return slots if first + n <= self.max_size else slots % self.max_size

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Return the slots of the given rows, one at least; rows without a slot are excluded."""
        order = np.argsort(ids)
        at = order[np.searchsorted(ids, self.rows, sorter=order).clip(max=len(ids) - 1)]
        slots = np.flatnonzero(ids[at] == self.rows)
        return slots[np.argsort(at[slots])]

    def clear(self) -> None:
        """Forget the current rows; later rows start again at slot 0."""
        self._floor = self._mark
        self._size = self._count = 0

    def drop_evicted(self, store: TrajectoryStore) -> bool:
        """Free the slots of rows that have left the store and close the gaps; return whether there were any.

        Rows leave in the order of arrival, which differs from the order of slots if some rows have waited.
        """
        num = len(store)
        counts = self.max_size == UNBOUNDED or not (self._chosen or self._had_aside)
        if num == store.watermark or (counts and self._size + len(self.aside) <= num):
            return False
        self._left = self._left[store.holds(self._left)]
        empty = np.flatnonzero(~store.holds(self.rows))
        if not len(empty):
            return False
        if not self._rows.flags.writeable:
            self._rows = self._rows.copy()
        if not self._chosen:  # stored rows had lost their slots to newer ones, while evicted rows kept theirs
            ids = store.ids()[max(self._floor - (store.watermark - num), 0) :]
            unmapped = ids[~np.isin(ids, np.concatenate([self.rows, self.aside]), assume_unique=True)]
            num = min(len(unmapped), len(empty))
            self._rows[empty[:num]] = unmapped[len(unmapped) - num :]
            empty = empty[num:]
        if len(empty):
            size = self._size - len(empty)
            self._rows[empty[empty < size]] = self._rows[np.setdiff1d(np.arange(size, self._size), empty)]
            self._before += self._count - size
            self._size = self._count = size
        return True

    def sync(self, store: TrajectoryStore) -> None:
        """Add the rows that have appeared in the store since the last call."""
        mark = store.watermark
        fresh = mark - self._mark
        if fresh == 0 and not len(self._waits):
            return
        ids = store.ids()
        num_mapped = len(ids) - fresh
        in_order = num_mapped >= 0 and (num_mapped == 0 or ids[num_mapped - 1] == self._newest) and self._mark > 0
        if not in_order:
            # Another writer's earlier commit has appeared, or more rows arrived than the store keeps: start over.
            hidden = mark - len(ids)
            num_mapped = max(self._floor - hidden, 0)
            self._size, self._before = 0, 0
            self._count = 0 if self.max_size == UNBOUNDED else max(hidden - self._floor, 0)
            self._waits = self._left = np.empty(0, np.int64)
        self._take(store, np.asarray(ids[num_mapped:]), mark)
        self._mark = mark
        self._newest = int(ids[-1]) if len(ids) else -1
        self.drop_evicted(store)

    def push(self, store: TrajectoryStore, ids: np.ndarray, slots: np.ndarray, in_turn: bool) -> bool:
        """Add rows that this process just appended; False if other rows arrived first: then `sync` must be called."""
        mark = store.watermark
        if mark != self._mark + len(ids):
            return False
        self._mark, self._newest = mark, int(ids[-1])
        n = len(slots)
        if n < len(ids):
            self._waits, self._had_aside = np.concatenate([self._waits, ids[n:]]), True
            ids = ids[:n]
        self._count += n if in_turn else 0
        self._chosen |= not in_turn
        if not (in_turn and self._catch_up(store, mark)):
            self._place(slots, ids)
        return True

    def complete(self, ids: np.ndarray) -> np.ndarray:
        """Give the next slots to rows that waited, and return these slots."""
        slots = self.expected(len(ids))
        self._waits = self._waits[~np.isin(self._waits, ids)]
        self._count += len(ids)
        self._place(slots, ids)
        return slots

    def leave_out(self, ids: np.ndarray) -> None:
        """Mark rows that waited as excluded from learning."""
        self._waits = self._waits[~np.isin(self._waits, ids)]
        self._left = np.concatenate([self._left, ids])

    def _take(self, store: TrajectoryStore, ids: np.ndarray, mark: int) -> None:
        # All rows of a long run are read at once, without looking up each id.
        some = ids if len(ids) < len(store) else None
        slots = _column(store, SLOT, some).copy()
        waiting = _column(store, WAITING.name, some)
        later, turns = np.empty(0, np.int64), np.empty(0, np.int64)
        if len(self._waits):
            before = self._waits[store.holds(self._waits)]
            now = _column(store, WAITING.name, before)
            self._waits, later, turns = before[now >= 0], before[now < -2], -3 - now[now < -2]
            self._left = np.concatenate([self._left, before[now == -2]])
        if waiting.size and (waiting != -1).any():
            self._had_aside = True
            self._waits = np.concatenate([self._waits, ids[waiting >= 0]])
            self._left = np.concatenate([self._left, ids[waiting == -2]])
            later = np.concatenate([later, ids[waiting < -2]])
            turns = np.concatenate([turns, -3 - waiting[waiting < -2]])
            ids, slots = ids[waiting == -1], slots[waiting == -1]
        del waiting  # in a long run these arrays have tens of megabytes each
        in_turn = slots < 0
        if len(slots) and slots[0] <= IN_TURN_AT:
            self._count += (IN_TURN_AT - int(slots[0]) - self._count) % self.max_size
        n = int(in_turn.sum())
        self._chosen |= n < len(slots)
        if len(later):
            # Rows completed later take the places recorded for them; the others fill the places between.
            order = np.lexsort((later, turns))
            count = np.arange(len(later))
            at = np.maximum.accumulate(turns[order] - self.turn - count).clip(0, n) + count
            places = self.expected(n + len(later))
            is_free = np.ones(len(places), bool)
            is_free[at] = False
            slots[in_turn] = places[is_free]
            slots, ids = np.concatenate([slots, places[at]]), np.concatenate([ids, later[order]])
        else:
            slots[in_turn] = self.expected(n)
        self._count += n + len(later)
        if not self._catch_up(store, mark):
            self._place(slots, ids)

    def _catch_up(self, store: TrajectoryStore, mark: int) -> bool:
        """Share the store's array of ids if slots are the order of arrival: it is the largest thing in memory."""
        if self._chosen or self._had_aside or self.max_size < UNBOUNDED or len(ids := store.ids()) != mark:
            return False
        self._rows = ids[self._floor :]
        self._size = len(self._rows)
        return True

    def _place(self, slots: np.ndarray, ids: np.ndarray) -> None:
        size = max(self._size, int(slots.max()) + 1) if len(slots) else self._size
        if size > len(self._rows) or not self._rows.flags.writeable:
            grown = np.empty(min(max(size, 2 * self._size, 1024), self.max_size), np.int64)
            grown[: self._size] = self._rows[: self._size]
            self._rows = grown
        self._rows[self._size : size] = -1
        self._rows[slots] = ids  # the last of several rows for one slot wins
        self._size = size


def _column(store: TrajectoryStore, name: str, ids: np.ndarray | None) -> np.ndarray:
    """Return a column of the given rows, or of all, int64 `[n]`; -1 if the store lacks the column."""
    if name not in store.schema:
        return np.full(len(store) if ids is None else len(ids), -1, np.int64)
    return store.read_scalars(name, ids).astype(np.int64, copy=False)
