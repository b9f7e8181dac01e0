"""A reader's view of a store, the same for every medium: where rows are, the order of arrival, later values."""

from __future__ import annotations

import errno
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trajectory_store import fork_safety, fs
from trajectory_store.arrival import ArrivalOrder, Arrivals
from trajectory_store.backend import Gap, Medium, Rows, Segment
from trajectory_store.catalog_log import CATALOG, Entry, Journal, State
from trajectory_store.errors import CorruptionError, MissingRowError, SegmentGoneError, StoreError, counted
from trajectory_store.format import ORDINAL_SHIFT, ROW_MASK, ROW_TIME, TARGET
from trajectory_store.ragged import Int64Array, distinct, ranges_of
from trajectory_store.rebuild import rebuild
from trajectory_store.root import Root
from trajectory_store.schema import Column
from trajectory_store.verify import VerifyReport

_SHIFT = np.uint64(ORDINAL_SHIFT)
_NOWHERE = -1
_ROWS, _HOME, _FIRST = range(3)
"""For each segment ever written: its number of rows, the segment that now contains them, and their start in it."""

STAT_S, LOOK_RARELY, LEAST_LOOK_S = 3e-6, 600, 0.5
"""The time in seconds for a query of the state of one file; for how many times longer, and for how long at least,
checked reads continue without a query. Queries in one of ten batches slowed sampling from a small store by 3 %.
"""

_MOST_IDS = 8
"""Maximum number of ids in an error message."""


class Address(NamedTuple):
    """The location of rows: per row, the ordinal of its segment and its number in that segment."""

    ordinals: Int64Array
    rows: Int64Array


class Failed(NamedTuple):
    """A segment that a record names and that cannot be opened, or, without an error, a merged one that has damage."""

    entry: Entry
    error: Exception | None


def _may_hold(segment: Segment, ids: Int64Array) -> bool:
    """Return whether a segment may hold some of these rows."""
    try:
        return bool(np.isin(segment.row_ids(0, segment.rows), ids).any())
    except (StoreError, OSError) as error:  # its ids cannot be read
        fs.pass_external(error)
        return True


def _missing_rows(segment: Segment) -> int:
    """Return how many rows of a segment are not served."""
    count, end = 0, 0
    for gap in sorted(segment.hidden, key=lambda gap: gap.first):
        count, end = count + max(0, gap.end - max(gap.first, end)), max(end, gap.end)
    return count


class Catalog:
    """A reader's view of a store."""

    def __init__(self, medium: Medium, root: Root, *, warn: bool = True) -> None:
        self.medium = medium
        self.root = root
        self._warn = warn
        self.journal = Journal(medium.bucket, root.catalog_json(), root.first_state)
        self.segments: dict[int, Segment] = {}
        self.updates: dict[int, Segment] = {}
        self.generation = 0
        self.problems: list[str] = []
        self._warned_of: set[str] = set()
        self.newest_ns = 0
        self._watermark = 0
        self.state = self.journal.state
        self.claim: str | None = None
        self.order = ArrivalOrder()
        self._order_generation = -1
        self._newest_runs: list[tuple[int, int, int]] | None = None
        self._runs_of = -1, -1
        self.lock = threading.RLock()
        self._open_entries: dict[int, Entry] = {}
        self.failed: dict[int, Failed] = {}
        """The segments that the newest record lists but that are missing or incomplete; other segments may have their
        rows.
        """
        self._homes: Int64Array = np.zeros((0, 3), np.int64)
        self._moved = False
        self._gappy: list[Segment] = []
        self._looked_generation = -1
        """The generation in which the records of all commits were read."""
        self._tables: dict[str, dict[int, Any]] = {}
        self.later_values: dict[str, Any] = {}
        """Values that other modules keep while the catalog is open."""
        self._syncing = threading.RLock()
        fork_safety.guard(self, 1, self.lock, self._syncing)
        self._synced: dict[int, int] = {}
        self._unsynced = False
        self._look_at = 0.0
        self._compared: dict[tuple[str, bool] | None, int] = {}
        """The generation in which every value was compared: per column, with or without its flags, and of all columns.
        """
        self.is_doubtful = False
        """Whether an external exception ended a call, possibly during a change of this view."""
        self._take_state(opening=True)

    # Following

    def begin_again(self) -> None:
        """Read everything again: a call was interrupted, and nothing that it left behind is used."""
        with self.lock:
            for segment in (*self.segments.values(), *self.updates.values()):
                self.medium.forget(segment)
            fresh = vars(Catalog(self.medium, self.root, warn=False))
            for name in ("lock", "_syncing", "_synced", "_unsynced", "_warn", "_warned_of", "claim"):
                del fresh[name]
            fresh["generation"] += self.generation + 1
            fresh["newest_ns"] = max(self.newest_ns, fresh["newest_ns"])
            fresh["_watermark"] = self._watermark
            vars(self).update(fresh)  # at once: another thread sees the view before or after it
            for problem in self.problems:
                self._warn_of(problem)

    def refresh(self) -> None:
        """Read new commits, new segments and removals; the next checked read looks at the files."""
        self._look_at = 0.0
        self.follow_others()

    def follow_others(self, own: int | None = None) -> None:
        """Read new commits, new segments and removals, but no commits of `own`: only this process appends to it."""
        with self.lock:
            self.medium.bucket.beside(self.journal.catch_up, partial(self._read_commits, own=own))
            changed = self.journal.state.number != self.state.number
            if changed or any(isinstance(failed.error, OSError) for failed in self.failed.values()):
                self._take_state()
            if changed:
                self._read_commits()  # a writer that began a new segment may have added to its previous one first

    def follow_state(self) -> None:
        """Apply the record that this process just wrote."""
        with self.lock:
            self._take_state()

    def refresh_segment(self, ordinal: int) -> None:
        """Read the new commits of one segment: the cheap path after an append of this process."""
        with self.lock:
            segment = self.segments.get(ordinal) or self.updates.get(ordinal)
            if segment is None:
                self.refresh()
            else:
                before = self.generation
                self._read_commits([segment])
                if self._looked_generation == before:
                    self._looked_generation = self.generation  # what this process wrote needs no look

    def _read_commits(self, segments: Sequence[Segment] | None = None, *, own: int | None = None) -> None:
        """Read new commits of segments, by default of all open ones but `own`, even if one cannot be read."""
        if segments is None:
            segments = [s for s in self.every_segment if not s.finished and s.ordinal != own]
        before = [(segment, segment.rows) for segment in segments]
        try:
            self.medium.refresh(segments)
        finally:
            for segment, rows in before:
                if segment.rows != rows or self._is_behind(segment):
                    self._grew(segment)

    def _is_behind(self, segment: Segment) -> bool:
        """Return whether the medium has read more of a segment than is known here, as when it ended it."""
        plain = segment.ordinal in self.segments and not segment.meta.merged
        return plain and int(self._homes[segment.ordinal, _ROWS]) != segment.rows

    def is_final(self, segment: Segment) -> bool:
        """Return whether no process can append to a segment any more; if so, all its rows are known."""
        if not segment.finished:
            if segment.is_live() or not self.medium.seal(segment):
                return False
            with self.lock:
                self._read_commits([segment])  # its writer may have committed just before it ended
        return True

    def _take_state(self, *, opening: bool = False) -> None:
        """Apply the newest record: open the segments that are new in it, and forget those that it no longer names.

        What the file system fails to deliver while a store is opened costs that segment only, until a refresh can read
        it. Later it is an error: rows that were there must not disappear because their merged segment cannot be read.
        """
        opened: dict[int, Segment | Exception] = {}
        while True:  # once the catalog no longer changes, no segment was removed while it was opened
            state = self.journal.state
            new = [e for e in state.entries if e.ordinal not in self._open_entries and self._may_open(e)]
            looked = [e for e in new if not isinstance(opened.get(e.ordinal), Segment)]
            opened.update(zip([e.ordinal for e in looked], self.medium.open_segments(looked), strict=True))
            if not new or not self.journal.catch_up():
                break
        for entry in new:
            segment = opened[entry.ordinal]
            if isinstance(segment, OSError) and not opening and entry.ordinal not in self.failed:
                raise fs.unreadable(segment, segment.filename or self.medium.where) from segment
            if isinstance(segment, Segment) and segment.schema != state.schema.only(segment.schema.names):
                opened[entry.ordinal] = CorruptionError(
                    f"its columns, {segment.schema.names}, differ from those of the store."
                )
            elif isinstance(segment, Segment) and entry.rows is not None and segment.rows < entry.rows:
                self.medium.refresh([segment])  # its writer ended it after it was opened
        after = self._in_place_of_lost(state, opened, opening=opening)
        if after is None:
            self._take_state(opening=opening)
            return
        more = [e for e in after.entries if e not in state.entries]
        opened.update(zip([e.ordinal for e in more], self.medium.open_segments(more), strict=True))
        self._follow_to(after, {e: opened[e.ordinal] for e in (*new, *more) if e in after.entries})

    def _in_place_of_lost(
        self, state: State, opened: Mapping[int, Segment | Exception], *, opening: bool
    ) -> State | None:
        """Return a state of the existing segments, where the newest record is missing or names missing segments.

        None if there is a newer record by now, which may name all that.
        """
        for entry in state.entries:
            segment = opened.get(entry.ordinal)
            if isinstance(segment, CorruptionError):
                self.failed[entry.ordinal] = Failed(entry, segment)
            elif entry.merged and isinstance(segment, Segment) and any(map(segment.is_damage, segment.gaps)):
                self.failed[entry.ordinal] = Failed(entry, None)
        failed = self.failed.keys()
        if not failed and self.journal.is_sound and not (opening and self.medium.has_later(state)):
            return state
        after = rebuild(state, self.medium.survey(state), failed)
        if after == state:
            return state
        if self.journal.catch_up():
            return None
        names = ", ".join(entry.name for entry in after.entries if entry not in state.entries)
        self._note(f"no record of the catalog lists {names}: records are missing.")
        return after

    def _may_open(self, entry: Entry) -> bool:
        failed = self.failed.get(entry.ordinal)
        return failed is None or failed.entry != entry or isinstance(failed.error, OSError)

    def _follow_to(self, state: State, new: Mapping[Entry, Segment | Exception]) -> None:
        """Switch to a record. Nothing is read here, so nothing fails halfway."""
        gone = self._open_entries.keys() - {entry.ordinal for entry in state.entries}
        homes = np.zeros((max(64, 2 * state.next_ordinal), 3), np.int64)
        homes[: len(self._homes)] = self._homes[: len(homes)]
        for entry, segment in new.items():
            if isinstance(segment, Segment):
                self._add(entry, segment, homes)
        self.state = state
        self._homes = homes  # in one assignment: another thread sees the rows before or after the change
        for ordinal in gone:
            self._forget(ordinal)
        entries = {*state.entries, *self.journal.state.entries}
        self.failed = {ordinal: failed for ordinal, failed in self.failed.items() if failed.entry in entries}
        self.newest_ns = max(self.newest_ns, state.time_ns)
        if new or gone:
            self.generation += 1
        for entry in state.entries:  # the owner may have accepted a loss
            followed = self.segments.get(entry.ordinal) or self.updates.get(entry.ordinal)
            if followed is not None:
                followed.accepted = entry.accepted
        self._note_gaps()
        for entry, segment in new.items():
            if isinstance(segment, Segment):
                if (failed := self.failed.get(entry.ordinal)) is not None and failed.error is not None:
                    del self.failed[entry.ordinal]
            else:
                self.failed[entry.ordinal] = Failed(entry, segment)
                self._note(f"{entry.name}: cannot be opened: {segment}")
        for problem in self.journal.problems:
            self._note(problem)

    def _add(self, entry: Entry, segment: Segment, homes: Int64Array) -> None:
        self._open_entries[entry.ordinal] = entry
        self.newest_ns = max(self.newest_ns, segment.newest_ns)
        if entry.kind == "update":
            self.updates[entry.ordinal] = segment
            return
        self.segments[entry.ordinal] = segment
        sources = np.array(entry.sources, np.int64)
        homes[sources, _HOME] = entry.ordinal
        if not entry.merged:
            homes[entry.ordinal, _ROWS] = segment.rows
            return
        ordinals, counts = (np.array(part, np.int64) for part in zip(*segment.meta.sources, strict=True))
        mine = np.isin(ordinals, sources)
        homes[ordinals[mine], _ROWS] = counts[mine]
        homes[ordinals[mine], _FIRST] = (counts.cumsum() - counts)[mine]
        self._moved = True
        inside, row_entries = (
            set(entry.sources),
            [e for e in self._open_entries.values() if e.kind == "rows" and e is not entry],
        )
        self.order.replace([e.ordinal for e in row_entries if e.sources[0] in inside], segment)

    def _forget(self, ordinal: int) -> None:
        """Drop a segment: its rows are in a merged one that was added before, or gone for good."""
        entry = self._open_entries.pop(ordinal)
        self.updates.pop(ordinal, None)
        segment = self.segments.pop(ordinal, None)
        self._tables = {}
        if segment is None:
            return
        sources = np.array(entry.sources, np.int64)
        lost = sources[self._homes[sources, _HOME] == ordinal]
        if len(lost):
            self._homes[lost] = 0
            self.order.reset()
        self.medium.forget(segment)

    def _grew(self, segment: Segment) -> None:
        if segment.ordinal in self.segments and not segment.meta.merged:
            self._homes[segment.ordinal, _ROWS] = segment.rows
        self.newest_ns = max(self.newest_ns, segment.newest_ns)
        self.generation += 1

    def _see(self) -> None:
        """Find the commits that are not served among those that are new: no row reads that `ids` excludes."""
        with self.lock:
            for segment in self.segments.values():
                segment.see()
            self._note_gaps()
            self._looked_generation = self.generation

    def _note_gaps(self) -> None:
        """Note the commits found so far that are not served, except those whose loss was accepted."""
        self._hide_stale()
        self._gappy = [s for s in self.segments.values() if s.gaps or s.stale]
        for segment in (*self._gappy, *(s for s in self.updates.values() if s.gaps)):
            new = [gap for gap in segment.gaps if segment.is_damage(gap)]
            before, segment.noted = segment.noted, len(segment.gaps)
            if new and before != segment.noted:
                rows, more = sum(gap.end - gap.first for gap in new), f" (and {len(new) - 1} more)" * (len(new) > 1)
                what = "row" if segment.meta.kind == "rows" else "later value"
                count = f"1 {what} is" if rows == 1 else f"{rows} {what}s are"
                lost = (
                    "not returned"
                    if any(gap in segment.lost for gap in new)
                    else "without a time, so the order is estimated"
                )
                self._note(f"{segment.name}: {count} {lost}: {new[0].why}{more}.")

    def _hide_stale(self) -> None:
        """Hide rows for which a read has found a damaged later value: only an older value could be read."""
        damaged = [(u, gap) for u in self.updates.values() for gap in u.targets if u.is_damage(gap)]
        if not damaged and not any(segment.stale for segment in self._gappy):
            return
        stale: dict[int, list[Gap]] = {}
        for update, gap in damaged:
            ordinals, rows = self._find(update.targets[gap])
            why = f"a later value is damaged: {update.name}: {gap.why}"
            for ordinal in distinct(ordinals[ordinals >= 0]):
                runs = ranges_of(np.unique(rows[ordinals == ordinal]))
                stale.setdefault(ordinal, []).extend(Gap(gap.seq, a, b, why, gap.array or TARGET) for a, b in runs)
        for segment in self.segments.values():
            if segment.stale != (gaps := stale.get(segment.ordinal, [])):
                segment.stale = gaps
                self.order.reset()
                self.generation += 1

    def _note(self, problem: str) -> None:
        if problem in self.problems:
            return
        self.problems.append(problem)
        self._warn_of(problem)

    def warn_of_problems(self) -> None:
        """Warn of problems that were noted without a warning because an error reported them, which a caller caught."""
        for problem in self.problems:
            self._warn_of(problem)

    def _warn_of(self, problem: str) -> None:
        """Warn of a problem, once."""
        if self._warn and problem not in self._warned_of:
            self._warned_of.add(problem)
            warnings.warn(
                f"{self.medium.where}: {problem} Everything else is readable; run verify() to list all damage.",
                RuntimeWarning,
                stacklevel=5,
            )

    # Checking

    @property
    def look_is_due(self) -> bool:
        """Whether checked reads shall ask again if the files are still the same."""
        return time.perf_counter() >= self._look_at

    def check(
        self,
        segment_rows: Sequence[tuple[Segment, Rows]],
        columns: Sequence[Column],
        *,
        flags: bool = True,
        warn: bool = False,
    ) -> bool:
        """Compare columns of rows with their checksums, once per state of the files; return whether some fail.

        Those are in `gaps` from then on. Files are asked now and then whether they are still the same.
        """
        failed = False
        with self.lock:
            new = {segment for segment, _ in segment_rows if not segment.is_read}
            for segment in new:
                segment.is_read = True
            self._look(self.every_segment if self.look_is_due else new)
        for segment, rows in segment_rows:
            if segment.check_rows(rows, columns, flags=flags):
                failed = True
                self._forget_unchecked(segment)
        if failed:
            with self.lock:
                before, self._warn = self._warn, warn and self._warn  # else an error follows that names the rows
                try:
                    self.note_damage()
                finally:
                    self._warn = before
        if not self.lost_updates:
            every = self.every_segment
            if all(segment.is_checked for segment in every):
                self._compared[None] = self.generation
            for column in columns:
                if all(segment.has_compared(column, flags=flags) for segment in every):
                    self._compared[column.name, flags] = self.generation
        return failed

    def damage(self, ids: Int64Array | None) -> list[tuple[Segment, Gap, Int64Array]]:
        """Compare rows, by default all, and all updates with their checksums; return what is damaged, and whose it is.

        Raises:
            CorruptionError: a segment cannot be opened, so that this is not known.
        """
        updates = [(update, slice(0, update.rows)) for update in self.updates.values()]
        if ids is None:
            runs: list[tuple[Segment, Rows]] = [(segment, slice(0, segment.rows)) for segment in self.row_segments()]
            lost = ", ".join(entry.name for entry in self.unopened)
        else:
            places, lost = self._find(ids), self.lost_updates
            owners = distinct(places.ordinals[places.ordinals >= 0])
            runs = [(self.segments[owner], places.rows[places.ordinals == owner]) for owner in owners]
        if lost:
            raise CorruptionError(
                f"{self.medium.where}: {lost} cannot be opened, so it is unknown which rows are damaged. Run "
                "verify(), and restore the damaged segments from a copy."
            )
        is_complete = self.medium.complete  # elsewhere rows are compared when they are fetched, and some may not be yet
        are_compared = is_complete and all(self.has_compared(column, flags=True) for column in self.state.schema)
        if not are_compared or self.look_is_due:
            for segment, rows in (*updates, *runs):
                self.check([(segment, rows)], segment.schema.columns)
            if not is_complete:
                self.find_damage([*updates, *runs])
        lost_updates = [(u, gap) for u, _ in updates for gap in u.gaps if u.is_damage(gap)]
        unknown = [(u, gap) for u, gap in lost_updates if u.sure_targets(gap) is None]
        with self.lock:
            self._note_gaps()  # the rows of the others are hidden
        out = [(s, gap, s.gap_ids(gap)) for s, _ in runs for gap in s.hidden if s.is_damage(gap)]
        out += [(u, gap, self.ids() if ids is None else ids) for u, gap in unknown]
        mine = [(s, gap, among if ids is None else among[np.isin(among, ids)]) for s, gap, among in out]
        return [damage for damage in mine if len(damage[2])]

    @property
    def lost_updates(self) -> str:
        """The names of segments of updates that cannot be opened: later values of any row may be in them."""
        return ", ".join(entry.name for entry in self.unopened if entry.kind == "update")

    @property
    def unopened(self) -> list[Entry]:
        """The segments that count and cannot be opened."""
        return [f.entry for f in self.failed.values() if f.error is not None and f.entry in self.state.entries]

    @property
    def every_segment(self) -> list[Segment]:
        """The segments of rows and of updates."""
        return [*self.segments.values(), *self.updates.values()]

    def _look(self, segments: Iterable[Segment]) -> None:
        """Ask whether the files of segments are still the same; the time until all are asked again is far longer."""
        count = 0
        for segment in segments:
            if not segment.is_read:
                continue
            count += len(segment.specs)
            if segment.has_changed():
                self._compared = {}
                self._forget_unchecked(segment)
        if self.look_is_due:
            self._look_at = time.perf_counter() + max(LEAST_LOOK_S, LOOK_RARELY * STAT_S * count)

    @property
    def is_checked(self) -> bool:
        """Whether reads of values have nothing to compare first, and files need not be looked at again yet.

        Where rows have to be fetched, they are compared as they arrive.
        """
        return self._compared.get(None) == self.generation and not self.look_is_due

    def has_compared(self, column: Column, *, flags: bool) -> bool:
        """Return whether all values of a column were compared, in the state of the files when they were looked at."""
        return self._compared.get((column.name, flags)) == self.generation

    def _forget_unchecked(self, segment: Segment) -> None:
        """Forget what was read of a segment before its files were compared with their checksums."""
        with self.lock:
            for table in self._tables.values():
                table.pop(segment.ordinal, None)
            for later in self.later_values.values():
                later.forget_segment(segment.ordinal)

    def look_again(self) -> None:
        """Open segments again in which damage was found and whose files have changed since: what is restored counts."""
        with self.lock:
            if self.failed:
                gone = tuple(f"{failed.entry.name}: cannot be opened" for failed in self.failed.values())
                self.problems = [words for words in self.problems if not words.startswith(gone)]
                self.failed = {}
                self._take_state(opening=True)
            damaged = [s for s in (*self.segments.values(), *self.updates.values()) if any(g.why for g in s.gaps)]
            for segment in damaged:
                stamp = segment.stamp()
                if stamp is not None and segment.stamped == stamp:
                    continue
                segment.stamped = stamp
                with suppress(SegmentGoneError):  # another process evicts it
                    self._open_again(segment)

    def _open_again(self, segment: Segment) -> None:
        entry = self._open_entries[segment.ordinal]
        reopened = self.medium.open_segments([entry])[0]
        if not isinstance(reopened, Segment) or reopened.rows < segment.rows:
            return
        names = tuple(reopened.specs) if reopened.meta.kind == "update" else ()  # rows are searched when they are read
        for gap in segment.gaps:
            reopened.find_damage(slice(gap.first, gap.end), names)
        if len(reopened.gaps) >= len(segment.gaps):
            return
        self.problems = [words for words in self.problems if not words.startswith(f"{segment.name}: ")]
        if segment.ordinal in self.updates:
            self.updates[segment.ordinal] = reopened
        else:
            self.segments[segment.ordinal] = reopened
            self._grew(reopened)
        self._forget_unchecked(reopened)  # only now: it reads later values again
        self.note_damage()

    def find_damage(self, among: Sequence[tuple[Segment, Rows]] | None = None, names: Sequence[str] = ()) -> bool:
        """Read rows, by default all, until all damage among them is in `gaps`; return whether some was found."""
        every = [(s, slice(0, s.rows)) for s in (*self.segments.values(), *self.updates.values())]
        is_damaged = False
        for segment, rows in every if among is None else among:
            if segment.find_damage(rows, names or tuple(segment.specs)):
                self._forget_unchecked(segment)
                is_damaged = True
        if is_damaged:
            self.note_damage()
        return is_damaged

    def find_missing(self) -> bool:
        """Look for files that are gone, of segments that still count; return whether some were found."""
        is_missing = False
        with self.lock:
            for segment in (*self.segments.values(), *self.updates.values()):
                if segment.find_missing():
                    self._forget_unchecked(segment)
                    is_missing = True
            if is_missing:
                self.note_damage()
        return is_missing

    def note_damage(self) -> None:
        """Exclude the commits that were found damaged since `ids` was asked."""
        with self.lock:
            self._note_gaps()
            self.order.reset()
            self.generation += 1

    def verify(self, path: Path | str, ids: Int64Array | None = None) -> VerifyReport:
        """Recompute every checksum, and compare the files with what must exist according to the catalog.

        With `ids`, only the segments that hold these rows are checked, and those of updates.
        """
        report = VerifyReport(path, problems=list(self.problems))
        rows = [segment for segment in self.row_segments() if ids is None or _may_hold(segment, ids)]
        for segment in (*rows, *self.updates.values()):
            self.medium.check_segments([segment], report)
            segment.release()  # the files of one segment at a time are open
        if ids is not None:
            return report
        for problem in (*self.journal.missing(), *self.medium.check_root(self.root)):
            report.problem(problem)
        state = self.journal.state
        for entry in rebuild(state, self.medium.survey(state), self.failed.keys()).entries:
            if entry not in state.entries:
                report.problem(
                    f"{entry.name} has commits but is not listed in any record of the catalog: records are missing"
                )
        self.journal.catch_up()
        newest = max(report.catalog_numbers, default=0)
        last = self.journal.state.number
        if newest > last:
            report.problem(
                f"the catalog ends with record {last}, but commits refer to record {newest}: newer records are missing"
            )
        return report

    # Rows

    def row_segments(self) -> list[Segment]:
        """The segments whose rows count, by ordinal."""
        return [self.segments[o] for o in sorted(self.segments)]

    def served_rows(self) -> int:
        """Rows that `ids` has, except for damage that only reading finds."""
        with self.lock:
            for segment in self.segments.values():
                segment.see()
            return sum(s.rows - _missing_rows(s) for s in self.segments.values())

    def watermark(self) -> int:
        """The number of rows committed since the store was created, as this reader has seen; it never decreases."""
        with self.lock:
            self._watermark = max(self._watermark, self.state.rows_gone + sum(s.rows for s in self.segments.values()))
            return self._watermark

    def last_update(self) -> int:
        """The time of the newest update that this reader sees, ns since the epoch; 0 if there is none."""
        return max((s.time_span()[1] for s in list(self.updates.values()) if s.rows), default=0)

    def arrivals(self) -> Arrivals:
        """Return the order of arrival of all rows."""
        with self.lock:
            self._order_rows()
            return self.order.arrivals()

    def ids(self) -> Int64Array:
        """All ids in the order of arrival."""
        with self.lock:
            self._order_rows()
            return self.order.ids()

    def _order_rows(self) -> None:
        """Bring the order up to date; the lock is taken."""
        while self._order_generation != self.generation:
            try:
                self.order.update(self.row_segments())
            except CorruptionError:
                rows = [(segment, slice(0, segment.rows)) for segment in self.row_segments() if segment.meta.merged]
                if not self.find_damage(rows, (ROW_TIME,)):
                    raise
                continue
            self._order_generation = self.generation
            if self._looked_generation != self.generation:
                self._see()

    def newest(self, most: int | None) -> tuple[Int64Array, list[tuple[int, int, int]] | None]:
        """Return the ids of the newest rows in the order of arrival, and their runs `(segment, first row, rows)`.

        The runs are None if they are many, or would have to be fetched.
        """
        with self.lock:
            ids = self.ids()
            skip = 0 if most is None else max(0, len(ids) - most)
            if self._runs_of != (self.generation, skip):
                self._newest_runs = self._runs(skip) if self.medium.complete else None
                self._runs_of = self.generation, skip
            runs = self._newest_runs
        few = runs is not None and len(runs) <= max(64, len(ids) // 64)
        return ids[skip:], runs if few else None

    def _runs(self, skip: int) -> list[tuple[int, int, int]]:
        """Return all rows but the first `skip`, as runs; `ids` has brought the order up to date."""
        firsts, counts = self.order.arrivals().runs()
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
        segment = self.segments.get(ordinal) or self.updates.get(ordinal)
        if segment is None:
            raise SegmentGoneError.of(f"segment {ordinal}", "was removed while it was being read")
        return segment

    def table(self, name: str) -> dict[int, Any]:
        """Return the results of look-ups in arrays of this name, by ordinal; kept only if they stay valid."""
        return self._tables.setdefault(name, {}) if self.medium.keeps_arrays else {}

    def locate(self, ids: Int64Array) -> Address:
        """Find rows."""
        ordinals, rows = (ids.view(np.uint64) >> _SHIFT).view(np.int64), ids & ROW_MASK
        every = self._homes  # before `_moved`, which another thread sets first: rows that moved are not in it then
        try:  # a negative id has a large ordinal, because it was shifted as an unsigned number
            homes = self._home(ordinals) if self._moved else None
            inside = rows < (every[:, _ROWS][ordinals] if homes is None else homes[:, _ROWS])
        except IndexError:
            raise self._missing(int(ids[ordinals >= len(every)][0])) from None
        if np.count_nonzero(inside) < len(ids):
            raise self._missing(int(ids[~inside][0]))
        if self._looked_generation != self.generation:
            self._see()
        address = Address(ordinals, rows) if homes is None else Address(homes[:, _HOME], rows + homes[:, _FIRST])
        for segment, gap, mine in self._gaps_among(address):
            raise self.unreadable(segment, gap, ids[mine])
        return address

    def intact_place(self, row_id: int) -> tuple[Segment, int] | None:
        """Return the segment of a row and its number there; None if `locate` or `check` may have to raise an error."""
        ordinal, row, homes = row_id >> ORDINAL_SHIFT, row_id & ROW_MASK, self._homes
        if self._looked_generation != self.generation or self.failed or not 0 <= ordinal < len(homes):
            return None
        rows, home, first = homes[ordinal].tolist()
        segment = self.segments.get(home)
        if segment is None or segment.gaps or segment.stale or row >= rows:
            return None
        return segment, first + row

    def unreadable(self, segment: Segment, gap: Gap, ids: Int64Array) -> CorruptionError:
        """Return the error for rows of a commit that is not served."""
        row_ids, more = np.unique(ids).tolist(), ""
        if len(row_ids) > _MOST_IDS:
            row_ids, more = row_ids[:_MOST_IDS], f" and {len(row_ids) - _MOST_IDS} more"
        which = f"trajector{'y' if len(row_ids) == 1 else 'ies'} {', '.join(map(str, row_ids))}{more}"
        why = gap.why or f"{'its' if len(row_ids) == 1 else 'their'} commit was never acknowledged"
        return CorruptionError(
            f"{self.medium.where}: {which} cannot be read: {segment.name}: {why}. Get the ids of readable "
            "trajectories from ids(), and run verify() to list all damage."
        )

    def _gaps_among(self, address: Address) -> Iterator[tuple[Segment, Gap, npt.NDArray[np.bool_]]]:
        """Yield the gaps that hold some of these rows, and which."""
        for segment in self._gappy:
            in_segment = address.ordinals == segment.ordinal
            for gap in segment.hidden if in_segment.any() else ():
                mine = in_segment & (address.rows >= gap.first) & (address.rows < gap.end)
                if mine.any():
                    yield segment, gap, mine

    def is_left_out(self, ordinals: Int64Array, rows: Int64Array) -> bool:
        """Return whether some rows of segments are not served."""
        return any(True for _ in self._gaps_among(Address(ordinals, rows)))

    def find(self, ids: Int64Array) -> Address:
        """Find rows as `locate` does, with segment -1 for missing ones."""
        out = self._find(ids)
        if self._looked_generation != self.generation:
            self._see()
        for _, _, mine in self._gaps_among(out):
            out.ordinals[mine] = _NOWHERE
        return out

    def _find(self, ids: Int64Array) -> Address:
        """Find rows, damaged ones as well."""
        ordinals, rows = ids >> ORDINAL_SHIFT, ids & ROW_MASK
        in_range = (ordinals >= 0) & (ordinals < len(self._homes))
        homes = self._home(np.where(in_range, ordinals, 0))
        inside = in_range & (rows < homes[:, _ROWS])
        return Address(np.where(inside, homes[:, _HOME], _NOWHERE), rows + homes[:, _FIRST])

    def _home(self, ordinals: Int64Array) -> Int64Array:
        """Return where the rows of some segments are: `[B, 3]`."""
        return self._homes[ordinals]

    def _missing(self, row_id: int) -> MissingRowError:
        ordinal, row = row_id >> ORDINAL_SHIFT, row_id & ROW_MASK
        segment = self.segments.get(ordinal)
        if segment is not None:
            why = f"segment {ordinal} has {counted(segment.rows, 'row')} in this view, and this id refers to row {row}"
        elif ordinal in self.failed:
            why = f"segment {ordinal} is damaged"
        elif 0 <= ordinal < self.state.next_ordinal:
            why = f"segment {ordinal} was evicted"
        else:
            why = f"there is no segment {ordinal}"
        return MissingRowError(
            f"there is no trajectory with id {row_id} in {self.medium.where}: {why}. Ids come from append() and ids(); "
            "refresh() shows what other processes wrote or evicted."
        )

    def sync(self) -> None:
        """Wait until everything that this reader sees is on the disk, except what its writer promised to sync.

        After a sync has failed, the kernel may take the pages for clean: the next one would succeed, and prove nothing.
        """
        with self._syncing:
            if self._unsynced:
                raise OSError(errno.EIO, "an earlier sync failed")
            with self.lock:
                segments = [*self.segments.values(), *self.updates.values()]
            try:
                for segment in segments:
                    done, records = self._synced.get(segment.ordinal, 0), segment.records
                    if segment.meta.durability == "process" and records > done:
                        self.medium.sync(segment, done)
                        self._synced[segment.ordinal] = records
                self.medium.bucket.sync(CATALOG)
            except OSError as error:
                self._unsynced = fs.is_of_system(error)
                raise

    def close(self) -> None:
        """Drop the maps; arrays that callers still hold stay valid."""
        self._tables = {}
        self.later_values = {}
        self.segments.clear()
        self.updates.clear()
