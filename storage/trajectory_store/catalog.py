"""The segments that a reader knows: where an id lives, the order of arrival, later values."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import MissingRowError, SegmentGoneError, StoreError
from trajectory_store.order import ArrivalOrder
from trajectory_store.ragged import Int64Array
from trajectory_store.segment import SegmentReader
from trajectory_store.updates import Overlay
from trajectory_store.writer import ORDINAL_SHIFT, ROW_MASK, segment_name

_SHIFT = np.uint64(ORDINAL_SHIFT)


class Address(NamedTuple):
    """Where rows are: per row the ordinal of a segment and the row in it."""

    ordinals: Int64Array
    rows: Int64Array


class Catalog:
    """A reader's view of a store; the backends know how to follow it.

    Attributes:
        segments: the segments whose rows count, by ordinal.
        patches: the segments with later values, by ordinal.
        moved: ordinals of compacted-away segments and the segment that holds their rows now.
        generation: grows with every change that a reader can see.
        problems: segments that could not be opened, in words.
        evicted_rows: rows that eviction removed for good.
        mutable_in_place: mutable columns change in their arrays; otherwise their new values are patches.
        keeps_arrays: an array of a segment, once it is open, shows everything that is written to it later.
    """

    mutable_in_place = True
    keeps_arrays = False

    def __init__(self, root: Path, *, warn: bool = True) -> None:
        self._warn = warn
        self.root = root
        self.segments: dict[int, SegmentReader] = {}
        self.patches: dict[int, SegmentReader] = {}
        self.moved: dict[int, int] = {}
        self.generation = 0
        self.evicted_rows = 0
        self.problems: list[str] = []
        self.order = ArrivalOrder()
        self._order_generation = -1
        self._lock = threading.RLock()
        self._overlays: dict[str, Overlay] = {}
        self._fresh_overlays: set[str] = set()
        self._overlay_generation = -1
        self._next = 0
        self._limits: Int64Array = np.zeros(0, np.int64)
        self._tables: dict[str, dict[int, Any]] = {}

    def refresh(self) -> bool:
        """Take in new commits, new segments and removals; returns whether anything changed."""
        with self._lock:
            before = self.generation
            self._follow()
            return self.generation != before

    def _follow(self) -> None:
        raise NotImplementedError

    def refresh_segment(self, ordinal: int) -> None:
        """Take in the new commits of one segment: the cheap path after an own append."""
        raise NotImplementedError

    def _forget(self, ordinal: int) -> None:
        self.segments.pop(ordinal, None)
        if self.patches.pop(ordinal, None) is not None:
            self._overlays.clear()
            self._fresh_overlays.clear()
        if ordinal < len(self._limits) and ordinal not in self.moved:
            self._limits[ordinal] = 0
        for source in [o for o, target in self.moved.items() if target == ordinal]:
            del self.moved[source]
            self._limits[source] = 0
        self.drop_maps()
        self.order.reset()
        self.generation += 1

    def _add(self, segment: SegmentReader) -> None:
        """Take a segment in; the ones that it replaces go."""
        ordinal = segment.ordinal
        if ordinal >= len(self._limits):
            grown = np.zeros(max(64, 2 * (ordinal + 1)), np.int64)
            grown[: len(self._limits)] = self._limits
            self._limits = grown
        self.generation += 1
        if segment.meta.kind == "patch":
            self.patches[ordinal] = segment
            return
        self.segments[ordinal] = segment
        self._limits[ordinal] = segment.rows if segment.meta.kind == "rows" else 0
        for source in segment.meta.replaces:
            self._forget(source)
            self.moved[source] = ordinal
            self._limits[source] = -1

    def _grew(self, segment: SegmentReader) -> None:
        if segment.ordinal in self.segments:
            self._limits[segment.ordinal] = segment.rows
        self.generation += 1

    def _note_problem(self, ordinal: int, error: StoreError) -> None:
        problem = f"{segment_name(ordinal)}: cannot be opened: {error}"
        if problem in self.problems:
            return
        self.problems.append(problem)
        if self._warn:
            warnings.warn(
                f"{self.root}: {problem} The other segments are readable; run verify() for the whole list.",
                RuntimeWarning,
                stacklevel=4,
            )

    @property
    def next_ordinal(self) -> int:
        """The first ordinal that was free when this reader looked last."""
        return self._next

    def row_segments(self) -> list[SegmentReader]:
        """The segments whose rows count, by ordinal."""
        return [self.segments[o] for o in sorted(self.segments)]

    def total_rows(self) -> int:
        """Rows that can be read."""
        return sum(s.rows for s in list(self.segments.values()))

    def ids(self) -> Int64Array:
        """All ids in the order of arrival."""
        with self._lock:
            if self._order_generation != self.generation:
                self.order.update(self.row_segments())
                self._order_generation = self.generation
            return self.order.ids()

    def any_segment(self, ordinal: int) -> SegmentReader:
        """The segment of rows or patches with this ordinal."""
        found = self.segments.get(ordinal) or self.patches.get(ordinal)
        if found is None:
            raise SegmentGoneError(f"segment {ordinal} left while it was read. Call refresh() and take ids from ids().")
        return found

    def table(self, name: str) -> dict[int, Any]:
        """By ordinal what was looked up of the segments' array of this name; kept only where it stays right."""
        return self._tables.setdefault(name, {}) if self.keeps_arrays else {}

    def drop_maps(self) -> None:
        """Forget the arrays; they are looked up again when they are read. A read that is under way keeps its own."""
        self._tables = {}

    def locate(self, ids: Int64Array) -> Address:
        """Find rows.

        Raises:
            MissingRowError: an id was never given, is not visible yet, or was evicted.
        """
        ordinals, rows = (ids.view(np.uint64) >> _SHIFT).view(np.int64), ids & ROW_MASK
        try:  # a negative id has a large ordinal, because it was shifted as an unsigned number
            inside = rows < self._limits[ordinals]
        except IndexError:
            raise self._missing(int(ids[ordinals >= len(self._limits)][0])) from None
        if np.count_nonzero(inside) < len(ids):
            ordinals, rows = self._follow_moves(ids, ordinals, rows, ~inside)
        return Address(ordinals, rows)

    def _follow_moves(
        self,
        ids: Int64Array,
        ordinals: Int64Array,
        rows: Int64Array,
        outside: npt.NDArray[np.bool_],
    ) -> tuple[Int64Array, Int64Array]:
        ordinals, rows = ordinals.copy(), rows.copy()
        for source in {int(o) for o in ordinals[outside]}:
            where = np.flatnonzero(outside & (ordinals == source))
            target = self.moved.get(source)
            if target is None:
                raise self._missing(int(ids[where[0]]))
            segment = self.segments[target]
            known = segment.array("row_id")[: segment.rows]
            found = np.minimum(np.searchsorted(known, ids[where]), max(segment.rows - 1, 0))
            wrong = known[found] != ids[where] if segment.rows else np.ones(len(where), bool)
            if wrong.any():
                raise self._missing(int(ids[where[wrong]][0]))
            rows[where] = found
            ordinals[where] = target
        return ordinals, rows

    def _missing(self, row_id: int) -> MissingRowError:
        ordinal, row = row_id >> ORDINAL_SHIFT, row_id & ROW_MASK
        segment = self.segments.get(ordinal)
        if segment is not None:
            why = f"segment {ordinal} has {segment.rows} rows as seen from here, and this is row {row}"
        elif 0 <= ordinal < self._next:
            why = f"segment {ordinal} was evicted"
        else:
            why = f"there is no segment {ordinal}"
        return MissingRowError(
            f"no trajectory with id {row_id} in {self.root}: {why}. Ids come from append() and ids(); "
            "refresh() shows what other processes wrote or evicted."
        )

    def row_limits(self) -> Mapping[int, int]:
        """Rows visible per original segment: the vector that a snapshot keeps."""
        out: dict[int, int] = {}
        for segment in self.row_segments():
            if segment.meta.kind == "rows":
                out[segment.ordinal] = segment.rows
                continue
            ids = segment.row_ids(0, segment.rows)  # sorted: the last of each owner has the highest row
            owners = ids >> ORDINAL_SHIFT
            lasts = np.flatnonzero(np.append(owners[1:] != owners[:-1], True)) if len(ids) else owners
            out.update(zip(owners[lasts].tolist(), ((ids[lasts] & ROW_MASK) + 1).tolist(), strict=True))
        return out

    def overlay(self, name: str) -> Overlay | None:
        """The later values of a column, up to date; None where there are none."""
        if not self.patches:
            return None
        with self._lock:
            if self._overlay_generation != self.generation:
                self._fresh_overlays.clear()
                self._overlay_generation = self.generation
            found = self._overlays.get(name)
            if found is None:
                found = self._overlays[name] = Overlay(name)
            if name not in self._fresh_overlays:
                found.update([self.patches[o] for o in sorted(self.patches)])
                self._fresh_overlays.add(name)
            return found

    def close(self) -> None:
        """Drop the maps; arrays that callers still hold stay valid."""
        self.drop_maps()
        self.segments.clear()
        self.patches.clear()
