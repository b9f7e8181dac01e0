"""What a reader knows of a store: where an id lives, the order of arrival, later values. One for every medium."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import CorruptionError, MissingRowError, SegmentGoneError
from trajectory_store.format import ORDINAL_SHIFT, ROW_ID, ROW_MASK
from trajectory_store.journal import Entry, Journal, State
from trajectory_store.medium import Medium
from trajectory_store.order import ArrivalOrder
from trajectory_store.ragged import Int64Array, distinct
from trajectory_store.schema import Column
from trajectory_store.segment import Segment
from trajectory_store.updates import Later

_SHIFT = np.uint64(ORDINAL_SHIFT)
_NOWHERE = _NOT_LEARNT = -1
_ROWS, _HOME, _FIRST = range(3)
"""Of each segment that was ever written: its rows, the segment that has them now, and where they begin in that."""

NOT_SEEN_YET = 1 << 20


class Address(NamedTuple):
    """Where rows are: per row the ordinal of a segment and the row in it."""

    ordinals: Int64Array
    rows: Int64Array


class Catalog:
    """A reader's view of a store.

    Args:
        medium: where the store is.
        warn: say so when a segment cannot be opened.

    Attributes:
        segments: the segments whose rows count, by ordinal.
        updates: the segments with later values, by ordinal.
        generation: grows with every change that a reader can see.
        problems: what is damaged as far as opening showed, in words.
    """

    def __init__(self, medium: Medium, *, warn: bool = True) -> None:
        self.medium = medium
        self._warn = warn
        try:
            self.journal = Journal(medium.bucket)
        except CorruptionError:
            if not medium.complete_root():
                raise
            self.journal = Journal(medium.bucket)
        self.segments: dict[int, Segment] = {}
        self.updates: dict[int, Segment] = {}
        self.generation = 0
        self.problems: list[str] = []
        self.newest_ns = 0
        self._watermark = 0
        self._state = self.journal.state
        self.claim: str | None = None
        self.order = ArrivalOrder()
        self._order_generation = -1
        self._lock = threading.RLock()
        self._known: dict[int, Entry] = {}
        self._failed: dict[int, Entry] = {}
        self._homes: Int64Array = np.zeros((0, 3), np.int64)
        self._moved = False
        self._tables: dict[str, dict[int, Any]] = {}
        self._later: dict[str, Later] = {}
        self._later_generation: dict[str, int] = {}
        self._take_state()

    @property
    def state(self) -> State:
        """The record of the catalog whose segments are the ones here; the journal may have read a newer one."""
        return self._state

    # Following

    def refresh(self) -> None:
        """Take in new commits, new segments and removals."""
        with self._lock:
            self.journal.follow()
            if self.journal.state.number != self._state.number:
                self._take_state()
            self._look([s for s in (*self.segments.values(), *self.updates.values()) if not s.finished])

    def follow_state(self) -> None:
        """Take in the record that this process just wrote."""
        with self._lock:
            self._take_state()

    def refresh_segment(self, ordinal: int) -> None:
        """Take in the new commits of one segment: the cheap path after an own append."""
        with self._lock:
            segment = self.segments.get(ordinal) or self.updates.get(ordinal)
            if segment is None:
                self.refresh()
            else:
                self._look([segment])

    def _look(self, segments: Sequence[Segment]) -> None:
        """Take in new commits of segments; also of some of them, where another cannot be read."""
        before = [(segment, segment.rows) for segment in segments]
        try:
            self.medium.refresh(segments)
        finally:
            for segment, rows in before:
                if segment.rows != rows:
                    self._grew(segment)

    def settled(self, segment: Segment) -> bool:
        """Whether nobody can append to a segment any more; all its rows are known then."""
        if not segment.finished:
            if segment.is_live() or not self.medium.seal(segment):
                return False
            self.refresh_segment(segment.ordinal)  # its writer may have committed until just before it ended
        return True

    def _take_state(self) -> None:
        """Follow the newest record: open segments that are new in it, forget those that left."""
        opened: dict[int, Segment | Exception] = {}
        while True:  # what is there when the catalog stands still, was not removed while it was opened
            state = self.journal.state
            new = [e for e in state.entries if self._known.get(e.ordinal) is None and e != self._failed.get(e.ordinal)]
            looked = [e for e in new if not isinstance(opened.get(e.ordinal), Segment)]
            opened.update(zip([e.ordinal for e in looked], self.medium.open_segments(looked), strict=True))
            if not new or not self.journal.follow():
                break
        for entry in new:
            found = opened[entry.ordinal]
            if isinstance(found, Segment) and found.schema != state.schema.only(found.schema.names):
                opened[entry.ordinal] = CorruptionError(
                    f"its columns are not those of the store: {found.schema.names}."
                )
            elif isinstance(found, Segment) and entry.rows is not None and found.rows < entry.rows:
                self.medium.refresh([found])  # its writer ended it after it was opened
        self._follow_to(state, {entry: opened[entry.ordinal] for entry in new})

    def _follow_to(self, state: State, new: Mapping[Entry, Segment | Exception]) -> None:
        """Let a record be the one that counts. Nothing is read here, so nothing fails half way."""
        gone = self._known.keys() - {entry.ordinal for entry in state.entries}
        homes = np.zeros((max(64, 2 * state.next_ordinal), 3), np.int64)
        homes[: len(self._homes)] = self._homes[: len(homes)]
        for entry, found in new.items():
            if isinstance(found, Segment):
                self._add(entry, found, homes)
        self._state = state
        self._homes = homes  # at once: another thread finds rows as they were, or as they are
        for ordinal in gone:
            self._forget(ordinal)
        self.newest_ns = max(self.newest_ns, state.time_ns)
        if new or gone:
            self.generation += 1
        for entry, found in new.items():
            if not isinstance(found, Segment):
                self._failed[entry.ordinal] = entry
                self._note(f"{entry.name}: cannot be opened: {found}")
            elif entry.rows is not None and found.rows < entry.rows:
                self._note(f"{found.name}: has {found.rows} rows; the catalog says {entry.rows}.")
        for problem in self.journal.problems:
            self._note(problem)

    def _add(self, entry: Entry, segment: Segment, homes: Int64Array) -> None:
        self._known[entry.ordinal] = entry
        self.newest_ns = max(self.newest_ns, segment.newest_ns())
        if entry.kind == "update":
            self.updates[entry.ordinal] = segment
            return
        self.segments[entry.ordinal] = segment
        sources = _sources(entry)
        homes[sources, _HOME] = entry.ordinal
        if not entry.merged:
            homes[entry.ordinal, _ROWS] = segment.rows
            return
        homes[sources, _ROWS] = _NOT_LEARNT
        self._moved = True
        inside = set(sources.tolist())
        known = [e for e in self._known.values() if e.kind == "rows" and e is not entry]
        self.order.replace([e.ordinal for e in known if (e.owners[0][0] if e.merged else e.ordinal) in inside], segment)

    def _forget(self, ordinal: int) -> None:
        """A segment left: its rows are in a merged one that was taken in before, or gone for good."""
        entry = self._known.pop(ordinal)
        self.updates.pop(ordinal, None)
        segment = self.segments.pop(ordinal, None)
        self._tables = {}
        if segment is None:
            return
        sources = _sources(entry)
        lost = sources[self._homes[sources, _HOME] == ordinal]
        if len(lost):
            self._homes[lost] = 0
            self.order.reset()
        self.medium.forget(segment)

    def _grew(self, segment: Segment) -> None:
        if segment.ordinal in self.segments and not segment.meta.merged:
            self._homes[segment.ordinal, _ROWS] = segment.rows
        self.newest_ns = max(self.newest_ns, segment.newest_ns())
        self.generation += 1

    def _note(self, problem: str) -> None:
        if problem in self.problems:
            return
        self.problems.append(problem)
        if self._warn:
            warnings.warn(
                f"{self.medium.where}: {problem} The other segments are readable; run verify() for the whole list.",
                RuntimeWarning,
                stacklevel=5,
            )

    # Rows

    def row_segments(self) -> list[Segment]:
        """The segments whose rows count, by ordinal."""
        return [self.segments[o] for o in sorted(self.segments)]

    def total_rows(self) -> int:
        """Rows that can be read."""
        with self._lock:
            return sum(s.rows for s in self.segments.values())

    def watermark(self) -> int:
        """Rows committed since the store was made, as far as this reader has seen: it never falls."""
        with self._lock:
            self._watermark = max(self._watermark, self.state.rows_gone + self.total_rows())
            return self._watermark

    def _ordered(self) -> ArrivalOrder:
        if self._order_generation != self.generation:
            self.order.update(self.row_segments())
            self._order_generation = self.generation
        return self.order

    def ids(self) -> Int64Array:
        """All ids in the order of arrival."""
        with self._lock:
            return self._ordered().ids()

    def runs(self, skip: int) -> list[tuple[int, int, int]]:
        """The rows in the order of arrival as runs: a segment, its first row, how many; less the first `skip` rows."""
        with self._lock:
            firsts, counts = self._ordered().runs()
        out: list[tuple[int, int, int]] = []
        if not len(firsts):
            return out
        ordinals, rows = self.locate(firsts)
        for ordinal, row, count in zip(ordinals.tolist(), rows.tolist(), counts.tolist(), strict=True):
            if skip >= count:
                skip -= count
                continue
            first, count, skip = row + skip, count - skip, 0
            if out and out[-1][0] == ordinal and out[-1][1] + out[-1][2] == first:
                out[-1] = (ordinal, out[-1][1], out[-1][2] + count)
            else:
                out.append((ordinal, first, count))
        return out

    def any_segment(self, ordinal: int) -> Segment:
        """The segment of rows or updates with this ordinal."""
        found = self.segments.get(ordinal) or self.updates.get(ordinal)
        if found is None:
            raise SegmentGoneError(f"segment {ordinal} left while it was read. Call refresh() and take ids from ids().")
        return found

    def table(self, name: str) -> dict[int, Any]:
        """By ordinal what was looked up of the segments' array of this name; kept only where it stays right."""
        return self._tables.setdefault(name, {}) if self.medium.keeps_arrays else {}

    def locate(self, ids: Int64Array) -> Address:
        """Find rows.

        Raises:
            MissingRowError: an id was never given, is not visible yet, or was evicted.
        """
        ordinals, rows = (ids.view(np.uint64) >> _SHIFT).view(np.int64), ids & ROW_MASK
        try:  # a negative id has a large ordinal, because it was shifted as an unsigned number
            homes = self._home(ordinals)
        except IndexError:
            raise self._missing(int(ids[ordinals >= len(self._homes)][0])) from None
        inside = rows < homes[:, _ROWS]
        if np.count_nonzero(inside) < len(ids):
            raise self._missing(int(ids[~inside][0]))
        return Address(homes[:, _HOME], rows + homes[:, _FIRST]) if self._moved else Address(ordinals, rows)

    def find(self, ids: Int64Array) -> Address:
        """The same with -1 for rows that are not there."""
        ordinals, rows = ids >> ORDINAL_SHIFT, ids & ROW_MASK
        known = (ordinals >= 0) & (ordinals < len(self._homes))
        homes = self._home(np.where(known, ordinals, 0))
        inside = known & (rows < homes[:, _ROWS])
        return Address(np.where(inside, homes[:, _HOME], _NOWHERE), rows + homes[:, _FIRST])

    def _home(self, ordinals: Int64Array) -> Int64Array:
        """`[B, 3]`: where the rows of some segments are."""
        homes = self._homes[ordinals]
        moved = homes[:, _ROWS] == _NOT_LEARNT
        if not moved.any():
            return homes
        for home in distinct(homes[moved, _HOME]):
            self._learn(self.any_segment(home), _sources(self._known[home]))
        return self._homes[ordinals]

    def _learn(self, segment: Segment, sources: Int64Array) -> None:
        """Where the rows of its sources are in a merged segment: it has all of each, one source after another."""
        ids = segment.array(ROW_ID)[: segment.rows]
        starts = ids.searchsorted(sources << ORDINAL_SHIFT)
        counts = ids.searchsorted((sources + 1) << ORDINAL_SHIFT) - starts
        held = counts > 0
        if not np.array_equal(ids[(starts + counts - 1)[held]] & ROW_MASK, counts[held] - 1):
            raise CorruptionError(
                f"{self.medium.where}: {segment.name}/{ROW_ID} is damaged: ids are not those of whole segments. Run "
                "verify(), and restore the segment from a copy."
            )
        with self._lock:
            homes = self._homes.copy()
            mine = homes[sources, _HOME] == segment.ordinal
            homes[sources[mine], _ROWS] = counts[mine]
            homes[sources[mine], _FIRST] = starts[mine]
            self._homes = homes

    def _missing(self, row_id: int) -> MissingRowError:
        ordinal, row = row_id >> ORDINAL_SHIFT, row_id & ROW_MASK
        segment = self.segments.get(ordinal)
        if segment is not None:
            why = f"segment {ordinal} has {segment.rows} rows as seen from here, and this is row {row}"
        elif ordinal in self._failed:
            why = f"segment {ordinal} is damaged"
        elif 0 <= ordinal < self.state.next_ordinal:
            why = f"segment {ordinal} was evicted"
        else:
            why = f"there is no segment {ordinal}"
        return MissingRowError(
            f"no trajectory with id {row_id} in {self.medium.where}: {why}. Ids come from append() and ids(); "
            "refresh() shows what other processes wrote or evicted."
        )

    def row_limits(self) -> dict[int, int]:
        """Rows visible per original segment: the vector that a snapshot keeps."""
        return _limits_of(self.segments)

    def update_limits(self) -> dict[int, int]:
        """The same for updates."""
        return _limits_of(self.updates)

    # Later values

    def later(self, column: Column) -> Later | None:
        """The later values of a column, up to date; None where there are none."""
        if not self.updates:
            return None
        with self._lock:
            found = self._later.get(column.name)
            if found is None or self._later_generation[column.name] != self.generation:
                found = self._follow_later(column, found)
            return found if found else None

    def _follow_later(self, column: Column, found: Later | None) -> Later:
        generation = self.generation
        if found is not None:
            found.bounds = self._bounds()
        if found is None or not found.follow(self.updates):
            found = Later(column, self._bounds())
            found.follow(self.updates)
        found.fold_news(self.find, self.segments, lambda at: self.values_at(column, at))
        self._later[column.name] = found
        self._later_generation[column.name] = generation
        return found

    def _bounds(self) -> tuple[int, int]:
        """Ordinals and rows that an update can name: no more than were ever written, and some not seen yet."""
        return self.state.next_ordinal, self.watermark() + NOT_SEEN_YET

    def later_as_of(self, column: Column, limits: Mapping[int, int]) -> Later:
        """The later values of a column as of a snapshot."""
        found = Later(column, self._bounds(), limits)
        found.follow(self.updates)
        return found

    def values_at(self, column: Column, addresses: Int64Array) -> npt.NDArray[Any]:
        """The values of a scalar column in rows of updates."""
        out = np.empty(len(addresses), column.np_dtype)
        owners, rows = addresses >> ORDINAL_SHIFT, addresses & ROW_MASK
        first = int(owners[0]) if len(owners) else 0
        for owner in [first] if bool((owners == first).all()) else distinct(owners):
            mine = owners == owner
            out[mine] = self.any_segment(owner).array(column.name)[rows[mine]]
        return out

    def close(self) -> None:
        """Drop the maps; arrays that callers still hold stay valid."""
        self._tables = {}
        self._later = {}
        self.segments.clear()
        self.updates.clear()


def _sources(entry: Entry) -> Int64Array:
    """The ordinals of the segments whose rows one holds."""
    return np.array([o for first, last in entry.owners for o in range(first, last + 1)] or [entry.ordinal], np.int64)


def _limits_of(segments: Mapping[int, Segment]) -> dict[int, int]:
    out: dict[int, int] = {}
    for segment in list(segments.values()):
        out.update(segment.row_limits())
    return out
