"""Reading and checking a segment on a local disk."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trajectory_store import fs
from trajectory_store.backend import Gap, Rows, Segment
from trajectory_store.catalog_log import Entry
from trajectory_store.compared_rows import ALL, ComparedRows
from trajectory_store.errors import CorruptionError, SegmentGoneError, StoreError
from trajectory_store.file_access import Io, PreadBytes, open_file
from trajectory_store.format import (
    CHECKS,
    COMMITS,
    ENDING_AT,
    FENCE_AT,
    KEY,
    KIND_CLOSED,
    KIND_ROWS,
    MAGIC,
    MARK_SIZE,
    RECORD_SIZE,
    ROW_TIME,
    TARGET,
    ArraySpec,
    Blocks,
    Log,
    Record,
    SegmentMeta,
    blocks_of,
    checks_path,
    chunk_path,
    commits_json,
    commits_path,
    crc32c,
    group_json,
    mark_path,
    offsets_name,
    page_elements,
    parse_mark,
    read_intact,
    spec_json,
    with_crc,
)
from trajectory_store.ragged import Int64Array, distinct, expand, ranges_of
from trajectory_store.schema import Column
from trajectory_store.verify import VerifyReport

FRESH_NS = 50_000_000
"""A file that was written this recently may be written again without a new time stamp: kernels advance it every few ms.
"""

FULL_BYTES = 1 << 16
"""A commit of up to this size is first compared completely, because calls for the blocks of each array take longer."""
AGAIN_BYTES = 1 << 20
"""A commit of up to this size is compared completely when more of it is read."""

FileState = tuple[int, ...] | None
"""The identity of a file by `stat`; None if it was written too recently to be certain, or `stat` failed."""
GONE: FileState = (0,)
"""The state of a missing file."""


class LocalSegment(Segment):
    """A segment on a local disk."""

    def __init__(self, folder: Path, entry: Entry, io: Io) -> None:
        fs.check_folder(folder)
        meta = read_meta(folder, entry.salt)
        super().__init__(entry, meta)
        self.folder = folder
        self.meta_crc = crc32c(group_json(with_crc(meta.to_attributes())))
        self._io: Io = io
        self._log: Log | None = None
        self._marks: memoryview | PreadBytes | None = None
        self._elements = 0
        self._short: set[str] = set()
        self.closed = meta.merged
        """Whether no check is needed: the writer, or the process that found it dead, had synced everything."""
        self._states: dict[str, FileState] = {}
        self._compared = ComparedRows(self.specs)
        self._crcs: dict[int, Int64Array] = {}
        self._indexed = 0
        self._ends: Int64Array = np.empty(0, np.int64)
        self._seqs: Int64Array = np.empty(0, np.int64)
        self.dropped: set[int] = set()
        """Commits that were being written when the machine failed, and that were never acknowledged."""
        self.refresh()
        if self.finished or not self.is_live():  # its writer is gone for good, but may have written just before
            self._take_all(entry.rows)
        self.close_log()

    @property
    def log(self) -> Log:
        """The commit records."""
        log = self._log  # another thread may close it at any time
        if log is None:
            size = (self.meta.rows_cap + 1) * RECORD_SIZE
            log = self._log = Log(self._opened(COMMITS, commits_path(self.folder), size), self.meta.salt)
        return log

    def close_log(self) -> None:
        """Close the commit records if nothing more will be added."""
        if self.finished:
            self._log = self._marks = None

    def refresh(self) -> None:
        """Read new records."""
        if self.finished:
            return
        end, last = self.log.find_end(self.records)
        fence = self.fence()  # after the records: one that was seen before it is among those that count
        if fence is not None and fence < end:
            end, last = fence, self.log.get(fence - 1) if fence > self.records else None
        if last is not None:
            self._take(end, last)
        self.finished |= fence is not None

    def fence(self) -> int | None:
        """Return how many records count if another process ended the segment, or None."""
        marks = self._marks  # another thread may close them at any time
        if marks is None:
            try:
                marks = self._marks = open_file(mark_path(self.folder), MARK_SIZE, self._io)
            except (OSError, StoreError) as error:  # damaged or missing: `acknowledged` reports it
                fs.pass_external(error)
                return None
        if not marks[ENDING_AT : ENDING_AT + 1][0]:
            return None
        fenced_at = parse_mark(bytes(marks[:]), FENCE_AT)
        if fenced_at is None:  # it is being written now, or its writer was killed
            fd = fs.open_fd(mark_path(self.folder), os.O_RDONLY)
            try:
                with fs.short_lock(fd, mark_path(self.folder)):
                    fenced_at = parse_mark(bytes(marks[:]), FENCE_AT)
            finally:
                os.close(fd)
        return fenced_at

    def _take(self, records: int, last: Record | None) -> None:
        """Count the first records, given the last of them."""
        self.records = records
        self.rows, self.newest_ns, self._elements = (
            (last.rows_end, last.time_ns, last.elems_end) if last is not None else (0, 0, 0)
        )
        self.finished |= last is not None and last.kind != KIND_ROWS
        if self.finished:  # small files are loaded from now on, and hold no descriptor
            self.release()
            self.close_log()
        if self.rows > self.meta.rows_cap:
            raise CorruptionError(
                f"{self.folder}: a record covers {self.rows} rows, but the segment has space for {self.meta.rows_cap}."
            )

    def _take_all(self, promised: int | None) -> None:
        """Count every valid record of a writer that is gone, and find the commits that are not served.

        Where the writer had synced everything, nothing has to be checked.
        """
        self.finished = False  # while commits are checked, files are read whole
        log, mark = self.log, self.acknowledged()
        last = None if mark is None else log.get(mark) or (log.get(mark - 1) if mark else None)
        self.closed = self.meta.merged or (last is not None and last.kind == KIND_CLOSED)
        promised_all = self.meta.durability == "process"
        if mark is not None and (last is not None or not mark) and (self.closed or not promised_all):
            records, newer_record = log.find_end(mark)
            last = newer_record or last
        else:  # the mark, or the records there, are damaged, or may be older than what is on the disk
            records = log.last_valid()
            last = log.get(records - 1) if records else None
        self.closed |= last is not None and last.kind == KIND_CLOSED
        fence = self.fence()
        if fence is not None and fence < records:
            records, last = fence, log.get(fence - 1) if fence else None
        self._take(records, last)
        self.finished = False
        commits = records - (last is not None and last.kind != KIND_ROWS)
        self._short = {name for name, spec in self.specs.items() if self._is_short(spec)}
        first = commits  # of the commits to check
        if self._short or (promised_all and not self.closed):
            first = 0
        elif not self.closed:
            first = min(mark or 0, commits)
        for seq in range(first, commits):
            self._check_unsynced(seq, promised=promised_all or mark is None or seq < mark)
        for seq in range(first if self.accepted else 0):  # what was accepted as lost is still not served
            record = log.get(seq)
            begin, end = (0, 0) if record is None else (record.rows_end - record.n_rows, record.rows_end)
            if record is None or any(a < end and begin <= b for a, b in self.accepted):
                self._check(seq)
        while self.gaps and not self.gaps[-1].why and self.gaps[-1].seq == self.records - 1:
            gap = self.gaps.pop()
            self.records, self.rows = gap.seq, gap.first
        missing = 0 if mark is None or self.meta.merged else mark - commits
        if missing > 0 or self.rows < (promised or 0):
            count, (s, are) = max(missing, 0) or "some", ("", "is") if missing == 1 else ("s", "are")
            why = f"{count} acknowledged commit{s} from number {commits} on {are} missing"
            end = min(max(self.rows, promised or 0), self.meta.rows_cap)
            self.gaps.append(Gap(max(self.records, commits), self.rows, end, why))
            self.rows = end
        self._hide_others()
        self.finished = True

    def _is_short(self, spec: ArraySpec) -> bool:
        """Return whether the file of an array is missing or was cut."""
        try:
            return chunk_path(self.folder, spec.name, spec.shape).stat().st_size < spec.capacity * spec.itemsize
        except (FileNotFoundError, NotADirectoryError):
            return True

    def _check(self, seq: int) -> None:
        """Compare a commit, and exclude the rows of blocks that differ."""
        for gap in self.damage_in(seq):
            self.add_gap(gap)

    def _check_unsynced(self, seq: int, *, promised: bool) -> None:
        """Compare a commit that may not have reached the disk as a whole: it counts as a whole or not at all."""
        if self.damage_in(seq):
            self.add_gap(Gap(seq, *self.around(seq), f"commit {seq} is damaged" if promised else ""))
            if not promised:
                self.dropped.add(seq)

    def damage_in(self, seq: int) -> list[Gap]:
        """Compare a commit; return the rows that are damaged, by array."""
        record = self.log.get(seq)
        if record is None or record.meta_crc != self.meta_crc:
            return [Gap(seq, *self.around(seq), f"commit {seq} is damaged")]
        first, end, gaps = record.rows_end - record.n_rows, record.rows_end, list[Gap]()
        if not self._holds(record):
            parts = self._sure_parts(record)
            for name in sorted(self.specs, key=lambda name: not self.specs[name].edges):
                left = np.ones(end - first, np.bool_)
                for gap in gaps:
                    left[max(0, gap.first - first) : max(0, gap.end - first)] = False
                gaps += self._damage_of(record, parts, name, first + np.flatnonzero(left))
        return gaps

    def _holds(self, record: Record) -> bool:
        """Return whether all data of a commit matches its checksum."""
        first, end = record.rows_end - record.n_rows, record.rows_end
        try:
            return (self.data_crc(first, end), self.meta_crc) == (record.data_crc, record.meta_crc)
        except CorruptionError:  # a file ends early
            return False

    def last_record(self) -> Record | None:
        """Return the last record that counts, an end too."""
        return self.log.get(self.records - 1) if self.records else None

    def check_all(self) -> bool:
        """Check the data of all commits; return whether all hold."""
        for seq in range(self.records):
            record = self.log.get(seq)
            if record is None or record.kind == KIND_ROWS:
                self._check(seq)
        return not self.gaps

    def has_changed(self) -> bool:
        """Compare the state of files with that in which they were checked.

        A file that is gone was evicted, or merged into another: what is open keeps the values that were compared.
        """
        now = {name: self._state(name) for name in self.specs}
        here = {name: state for name, state in now.items() if state != GONE}
        if all(state is not None and self._states.get(name) == state for name, state in here.items()):
            return False
        self.release()
        self._forget_compared()
        self._states = now
        return True

    def stamp(self) -> object:
        """Return the states of all files."""
        folder = self.folder
        paths = [
            *self._paths.values(),
            folder / "zarr.json",
            commits_path(folder),
            checks_path(folder),
            mark_path(folder),
        ]
        return None if (states := [_stat(path) for path in paths]).count(None) else states

    def _state(self, name: str) -> FileState:
        """Return the state of an array's file. One that is appended to changes its times with every commit."""
        state = _stat(self._paths[name], settled=self.finished)
        return state if self.finished or state is None else state[:3]

    @functools.cached_property
    def _paths(self) -> dict[str, str]:
        """The file of each array."""
        return {name: str(chunk_path(self.folder, name, spec.shape)) for name, spec in self.specs.items()}

    def _forget_compared(self) -> None:
        self._compared, self._crcs = ComparedRows(self.specs), {}

    def check_rows(self, rows: Rows, columns: Iterable[Column], *, flags: bool = True) -> bool:
        """Compare columns of rows with their checksums, once per state of the files; return whether more fail."""
        if self._compared.are_all(ALL, self.rows):
            return False
        return self.check_arrays(rows, self.arrays_of(columns, flags=flags))

    def has_compared(self, column: Column, *, flags: bool) -> bool:
        """Return whether no value of a column is left to compare, and no update is damaged."""
        if self.meta.kind == "update" and self.gaps:
            return False
        names = self.arrays_of([column], flags=flags) if column.name in self.schema else ()
        return all(self._compared.are_all(name, self.rows) for name in names)

    def holds_row(self, row: int, arrays: Iterable[str], *, compared: bool) -> bool:
        """Return whether the values of a row match their checksums; an open array has all rows."""
        if not compared or self._compared.are_all(ALL, self.rows):
            return True
        before, has = max(0, row - 1), self._compared.has  # where a row begins is where the one before it ends
        if has(ALL, row) and has(ALL, before):
            return True
        return all(has(name, row) and (not self.specs[name].edges or has(name, before)) for name in arrays)

    def compare(self, rows: Rows, columns: Iterable[Column], *, flags: bool) -> None:
        """Compare values that updates have replaced: they are not compared again, and damage of them costs nothing."""
        if not self._compared.are_all(ALL, self.rows):
            self.check_arrays(rows, self.arrays_of(columns, flags=flags), is_read=False)

    def check_arrays(self, rows: Rows, names: Iterable[str], *, is_read: bool = True) -> bool:
        """Compare arrays of rows with their checksums; of ragged columns, the offsets come first.

        What is damaged is in `gaps` from then on, if it `is_read`.
        """
        unknown: dict[str, Int64Array] = {}
        for name in names:
            needed_rows = rows if not self.specs[name].edges else _with_those_before(rows)
            left = self._compared.left(name, needed_rows, self.rows)
            if left is not None:
                unknown[name] = left
        if not unknown:
            return False
        self.see()
        for name, some in self._without_matching(unknown).items():
            commits = self._ends.searchsorted(some, "right")
            for at in distinct(commits):
                if at < len(self._seqs):
                    self._check_part(int(self._seqs[at]), name, some[commits == at], is_read=is_read)
        for name in (*unknown, ALL):
            self._compared.settle(name, self.rows)
        self.close_log()
        return len(self.gaps) > self.noted

    def _without_matching(self, unknown: dict[str, Int64Array]) -> dict[str, Int64Array]:
        """Compare rows of arrays block by block, and return those that did not match, or are of small commits.

        Where nothing is damaged, this is all that has to be done: a few steps per commit and array. If some of a commit
        was compared before, all of it is, unless it is large: of a commit of which more and more is read, this takes
        less time, and a first batch reads little more than it returns.
        """
        left: dict[str, list[Int64Array]] = {}
        rows, commits = np.empty(0, np.int64), list[tuple[int, Int64Array]]()
        again: dict[int, bool] = {}
        for name, some in unknown.items():
            if not np.array_equal(some, rows):
                rows, commits = some, self._by_commit(some)
            for at, mine in commits:
                matching = self._matching(at, name, mine, again)
                if matching is None:
                    left.setdefault(name, []).append(mine)
                for part in matching or ():
                    self._compared.mark(name, part, self.rows)
        return {name: np.concatenate(parts) for name, parts in left.items()}

    def _by_commit(self, rows: Int64Array) -> list[tuple[int, Int64Array]]:
        """Return rows by the position of their commit among those of rows."""
        commits = self._ends.searchsorted(rows, "right")
        order = commits.argsort(kind="stable")
        commits, rows = commits[order], rows[order]
        edges = [0, *(np.flatnonzero(commits[1:] != commits[:-1]) + 1).tolist(), len(rows)]
        return [(int(commits[a]), rows[a:b]) for a, b in itertools.pairwise(edges)]

    def _matching(self, at: int, name: str, rows: Int64Array, again: dict[int, bool]) -> list[Rows] | None:
        """Return the rows of an array of a commit that were compared: these, and others in the same blocks.

        None if some do not match, or the whole commit has to be compared. `again` gets, per commit, whether some of it
        was compared before this read.
        """
        record = self.log.get(int(self._seqs[at])) if at < len(self._seqs) else None
        if record is None or record.meta_crc != self.meta_crc:
            return None
        first, end, spec = record.rows_end - record.n_rows, record.rows_end, self.specs[name]
        if spec.edges and not first and self.edge(spec.axis or "", 0):  # the first offset is in no block
            return None
        parts = self._parts(first, end)
        total = 0 if parts is None else self._bytes(parts)
        if parts is None or total <= FULL_BYTES:
            return None
        once_more = again.setdefault(record.seq, record.seq in self._crcs)
        crcs = self._block_crcs(record, self._count(parts))
        if crcs is None:
            return None
        blocks = parts[name]
        if len(rows) == record.n_rows or (once_more and total <= AGAIN_BYTES):
            matches = self._blocks_match(name, blocks, crcs, range(blocks.end - blocks.before))
            return [slice(first, end)] if matches else None
        if spec.axis is None or spec.edges:
            numbers = distinct((rows + spec.edges - blocks.origin) // blocks.size)
            spans = (blocks.span(number, number) for number in numbers)
            compared = [slice(begin - spec.edges, stop - spec.edges) for begin, stop in spans]
            return [*compared] if self._blocks_match(name, blocks, crcs, numbers) else None
        offsets = self.part(offsets_name(spec.axis), first, end + 1)
        starts, stops = offsets[rows - first], offsets[rows - first + 1]
        if int(starts.min()) < blocks.start or int((stops - starts).min()) < 0 or int(stops.max()) > blocks.stop:
            return None
        lows, highs = (starts - blocks.origin) // blocks.size, -((blocks.origin - stops) // blocks.size)
        ranges = itertools.starmap(range, zip(lows.tolist(), highs.tolist(), strict=True))
        numbers = sorted(set(itertools.chain.from_iterable(ranges))) if blocks.stop > blocks.start else []
        return [rows] if self._blocks_match(name, blocks, crcs, numbers) else None

    def _blocks_match(self, name: str, blocks: Blocks, crcs: Int64Array, numbers: Sequence[int]) -> bool:
        """Return whether blocks of an array of a commit match their checksums; adjacent ones are read together."""
        itemsize, i, right = self.specs[name].itemsize, 0, crcs[blocks.before : blocks.end]
        while i < len(numbers):
            j = i + 1
            while j < len(numbers) and numbers[j] == numbers[j - 1] + 1:
                j += 1
            first, last = numbers[i], numbers[j - 1]
            try:
                raw = self.part(name, *blocks.span(first, last)).view(np.uint8)
            except (CorruptionError, SegmentGoneError):
                return False
            if blocks.crcs(raw, itemsize, first) != right[first : last + 1].tolist():
                return False
            i = j
        return True

    def _check_part(self, seq: int, name: str, rows: Int64Array, *, is_read: bool) -> None:
        """Compare the blocks of an array that hold rows of a commit, and exclude the rows of those that differ."""
        for gap in self.lost:  # where a row that is appended later begins, may be in a block that is excluded
            part = slice(gap.first, gap.end if gap.end < self.rows else gap.end - 1)
            self._compared.mark(ALL, part, self.rows)
        left = self._compared.left(ALL, rows, self.rows)
        if left is None:
            return
        record = self.log.get(seq)
        if record is None or record.meta_crc != self.meta_crc:
            self._check(seq)
            return
        parts = self._sure_parts(record)
        if (parts is None or self._bytes(parts) <= FULL_BYTES) and self._holds(record):
            self._compared.mark(ALL, slice(record.rows_end - record.n_rows, record.rows_end), self.rows)
            return
        gaps = self._damage_of(record, parts, name, left)
        if gaps and not is_read:
            return
        for gap in gaps:
            self.add_gap(gap)
        self._compared.mark(name, left, self.rows)

    def _parts(self, first: int, end: int) -> dict[str, Blocks] | None:
        """Return the blocks of what a commit wrote to each array; None if its offsets contradict each other."""
        starts, stops = ({axis: self.edge(axis, row) for axis in self.schema.axes} for row in (first, end))
        return self._parts_between(first, end, starts, stops)

    def _parts_between(
        self, first: int, end: int, starts: Mapping[str, int], stops: Mapping[str, int]
    ) -> dict[str, Blocks] | None:
        out: dict[str, Blocks] = {}
        at = 0
        for spec, layout in self._layout:
            name, _, capacity, axis, edges, *_ = spec
            start, stop = (first + edges, end + edges) if axis is None or edges else (starts[axis], stops[axis])
            if not 0 <= start <= stop <= capacity:
                return None
            out[name] = blocks = blocks_of(self.meta, layout, start, stop, at)
            at = blocks.end
        return out

    def _bytes(self, parts: dict[str, Blocks]) -> int:
        written = zip(parts.values(), self._layout, strict=True)
        return sum((blocks.stop - blocks.start) * itemsize for blocks, (_, (itemsize, _)) in written)

    @functools.cached_property
    def _layout(self) -> list[tuple[ArraySpec, tuple[int, int]]]:
        """The arrays, with the bytes of an element and the elements of a page."""
        return [(spec, (spec.itemsize, page_elements(spec))) for spec in self.specs.values()]

    def _sure_parts(self, record: Record) -> dict[str, Blocks] | None:
        """Return the parts of a commit, also where the offset at one of its two ends is damaged.

        The record has the sum of the last offsets of all axes, so the value that one of them should have follows; the
        right one is that with which the offsets of the other axes match their checksums.
        """
        first, end, axes = record.rows_end - record.n_rows, record.rows_end, self.schema.axes
        starts, stops = ({axis: self.edge(axis, row) for axis in axes} for row in (first, end))
        before = self.log.get(record.seq - 1) if record.seq else None
        if not record.seq:
            starts = dict.fromkeys(axes, 0)
        elif before is not None and sum(starts.values()) != before.elems_end:
            parts = self._sure_parts(before)
            starts = starts if parts is None else {axis: self._range_on(parts, axis).stop for axis in axes}
        more = record.elems_end - sum(stops.values())
        if not more:
            return self._parts_between(first, end, starts, stops)
        for wrong in axes:
            parts = self._parts_between(first, end, starts, stops | {wrong: stops[wrong] + more})
            crcs = None if parts is None else self._block_crcs(record, self._count(parts))
            if parts is None or crcs is None:
                continue
            sure = (offsets_name(axis) for axis in axes if axis != wrong)
            if not any(len(self._wrong_blocks(crcs, parts, name, None)) for name in sure):
                return parts
        return None

    def _range_on(self, parts: Mapping[str, Blocks], axis: str | None) -> Blocks:
        """Return the blocks of a column on an axis: where the elements of a commit begin and end there."""
        return next(parts[spec.name] for spec in self.specs.values() if spec.axis == axis and not spec.edges)

    def _damage_of(self, record: Record, parts: dict[str, Blocks] | None, name: str, rows: Int64Array) -> list[Gap]:
        """Compare the blocks of an array that hold rows of a commit; return all rows of those that differ.

        Of a commit whose checksums are damaged as well it is not known which: those are all its rows.
        """
        if not len(rows):
            return []
        seq, first, end = record.seq, record.rows_end - record.n_rows, record.rows_end
        spec, words = self.specs[name], f"commit {seq} is damaged"
        crcs = None if parts is None else self._block_crcs(record, self._count(parts))
        if parts is None or crcs is None:
            return [] if self._holds(record) else [Gap(seq, first, end, words)]
        blocks, gaps = parts[name], list[Gap]()
        starts = stops = np.empty(0, np.int64)
        if spec.axis is None or spec.edges:
            numbers = np.unique((rows + spec.edges - blocks.origin) // blocks.size)
        else:
            offsets = self.part(offsets_name(spec.axis), first, end + 1)
            starts, stops = offsets[:-1], offsets[1:]
            holds = (starts >= blocks.start) & (stops > starts) & (stops <= blocks.stop)  # the others have a gap
            starts, stops = np.where(holds, starts, -1), np.where(holds, stops, -1)
            some = rows[holds[rows - first]] - first
            begins = (starts[some] - blocks.origin) // blocks.size
            numbers = np.unique(expand(begins, (stops[some] - 1 - blocks.origin) // blocks.size + 1 - begins))
        words += f": a block of {name}"
        for number in self._wrong_blocks(crcs, parts, name, numbers).tolist():
            low, high = blocks.span(number, number)
            begin, stop = low - spec.edges, high - spec.edges
            hit = [(begin, stop)]
            if spec.edges and (stop < end or self.edge(spec.axis or "", end) != self._range_on(parts, spec.axis).stop):
                hit = [(begin, min(stop + 1, self.rows))]  # where a row ends, the next one begins
            elif spec.axis is not None and not spec.edges:
                inside = (stops > low) & (starts < high)
                hit = ranges_of(first + np.flatnonzero(inside))
            gaps += [Gap(seq, begin, stop, words, name) for begin, stop in hit]
        if spec.edges and first in rows and self.edge(spec.axis or "", first) != self._range_on(parts, spec.axis).start:
            gaps.append(Gap(seq, first, first + 1, words, name))
        return gaps

    def _wrong_blocks(
        self, crcs: Int64Array, parts: Mapping[str, Blocks], name: str, numbers: Int64Array | None
    ) -> Int64Array:
        """Return which blocks of an array of a commit, by default of all, do not match their checksums."""
        itemsize, blocks, wrong = self.specs[name].itemsize, parts[name], list[int]()
        if numbers is None:
            numbers = np.arange(blocks.end - blocks.before)
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1) if len(numbers) else ():
            first, last = int(run[0]), int(run[-1])
            try:
                raw = self.part(name, *blocks.span(first, last)).view(np.uint8)
                actual_crcs = blocks.crcs(raw, itemsize, first)
            except CorruptionError:  # the file ends early: block by block
                actual_crcs = [self._crc_of(name, *blocks.span(block, block)) for block in range(first, last + 1)]
            wrong += [first + i for i, crc in enumerate(actual_crcs) if crc != crcs[blocks.before + first + i]]
        return np.array(wrong, np.int64)

    def _crc_of(self, name: str, begin: int, end: int) -> int:
        """Return the checksum of elements of an array; -1 if they cannot be read."""
        try:
            return crc32c(self.part(name, begin, end).view(np.uint8))
        except CorruptionError:
            return -1

    def has_block_crcs(self, record: Record) -> bool:
        """Return whether the checksums of the blocks of a commit are there."""
        parts = self._parts(record.rows_end - record.n_rows, record.rows_end)
        self._crcs.pop(record.seq, None)
        return parts is not None and self._block_crcs(record, self._count(parts)) is not None

    def _count(self, parts: dict[str, Blocks]) -> int:
        """Return the number of blocks of a commit."""
        return [*parts.values()][-1].end

    def _block_crcs(self, record: Record, count: int) -> Int64Array | None:
        """Return the checksums of the blocks of a commit, or None if they do not match theirs."""
        cached_crcs = self._crcs.get(record.seq)
        if cached_crcs is not None:
            return cached_crcs
        before = self.log.get(record.seq - 1) if record.seq else None
        start = 0 if not record.seq else -1 if before is None else before.checks_end
        if record.checks_end - start != count:
            return None
        try:
            raw = fs.read_part(checks_path(self.folder), 4 * start, 4 * count)
        except (OSError, StoreError) as error:
            fs.pass_external(error)
            return None
        if len(raw) != 4 * count or crc32c(raw) != record.data_crc:
            return None
        self._crcs[record.seq] = crcs = np.frombuffer(raw, "<u4").astype(np.int64)
        return crcs

    def check_order(self) -> None:
        """Compare the times of the rows of a merged segment with their checksums: they are read for all rows."""
        if self.meta.merged and self.meta.kind == "rows" and not self._compared.are_all(ALL, self.rows):
            self.check_arrays(slice(0, self.rows), (ROW_TIME,))

    def find_missing(self) -> bool:
        """Look for files that are gone or were cut since the segment was opened."""
        short = {name for name, spec in self.specs.items() if name not in self._short and self._is_short(spec)}
        if not short:
            return False
        self._short |= short
        self.release()
        self._forget_compared()
        return self.check_rows(slice(0, self.rows), self.schema)

    @property
    def is_checked(self) -> bool:
        """Whether no value that reads return is left to compare, and no update is damaged."""
        if self.meta.kind == "update" and self.gaps:
            return False
        return all(self._compared.are_all(name, self.rows) for name in self._read_arrays)

    @functools.cached_property
    def _read_arrays(self) -> tuple[str, ...]:
        """The arrays that reads take values from: not the times of merged rows, and not whether values were given."""
        return tuple(self.arrays_of(self.schema, flags=False))

    def _find_targets(self, gap: Gap) -> Int64Array | None:
        """Read the rows that a damaged update was for; None if they are damaged as well."""
        record = self.log.get(gap.seq) if 0 <= gap.seq < self.records else None
        rows = np.arange(gap.first, gap.end)
        if record is None or self._damage_of(record, self._sure_parts(record), TARGET, rows):
            return None
        return np.array(self.part(TARGET, gap.first, gap.end))

    def around(self, seq: int) -> tuple[int, int]:
        """Return the first row of a commit, and one past the last; from those beside it if its record is damaged."""
        record = self.log.get(seq)
        if record is not None:
            return record.rows_end - record.n_rows, record.rows_end
        before = self.log.get(seq - 1) if seq else None
        after = next((r for i in range(seq + 1, self.records) if (r := self.log.get(i)) is not None), None)
        end = self.rows if after is None else after.rows_end - after.n_rows
        if seq and before is None:  # the one before it is damaged as well, and has its rows
            return end, end
        first = 0 if before is None else before.rows_end
        return first, max(first, end)

    def acknowledged(self) -> int | None:
        """Return the number of acknowledged records, or None if the mark is damaged or missing."""
        try:
            num_records = parse_mark(fs.read_file(mark_path(self.folder)))
        except (OSError, StoreError) as error:
            fs.pass_external(error)
            return None
        return num_records if num_records is not None and num_records <= self.meta.rows_cap else None

    def data_crc(self, first: int, end: int) -> int:
        """Return the checksum of the checksums of the blocks of rows `first` to `end`; -1 if offsets contradict it."""
        starts, stops = ({axis: self.edge(axis, row) for axis in self.schema.axes} for row in (first, end))
        parts, crcs = self._parts_between(first, end, starts, stops), list[int]()
        if parts is None or (not first and any(starts.values())):
            return -1
        for (name, blocks), (_, (itemsize, _)) in zip(parts.items(), self._layout, strict=True):
            crcs += blocks.crcs(self.part(name, blocks.start, blocks.stop).view(np.uint8), itemsize)
        return crc32c(np.array(crcs, "<u4").view(np.uint8))

    def edge(self, axis: str, row: int) -> int:
        """Return where a row begins on an axis."""
        return int(self.part(offsets_name(axis), row, row + 1)[0])

    def release(self) -> None:
        """Close every array; each is opened again when it is read."""
        for name in list(self._maps):
            self.drop(name)

    def _open(self, name: str) -> memoryview | PreadBytes:
        spec = self.specs[name]
        path = chunk_path(self.folder, name, spec.shape)
        if name in self._short:
            return self._padded(path, spec)
        return self._opened(name, path, spec.capacity * spec.itemsize, self._used(spec))

    def _padded(self, path: Path, spec: ArraySpec) -> memoryview:
        """Return the values of a file that was cut or is missing, as far as they exist; `gaps` has the others."""
        values = np.zeros(spec.capacity * spec.itemsize, np.uint8)
        try:
            stored_bytes = np.frombuffer(fs.read_file(path, len(values)), np.uint8)
            values[: len(stored_bytes)] = stored_bytes
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise fs.unreadable(error, path) from None
        values.flags.writeable = False
        return memoryview(cast("bytes", values))

    def _opened(self, name: str, path: Path, size: int, used: int | None = None) -> memoryview | PreadBytes:
        try:
            for folder in (path.parent.parent, path.parent):
                fs.check_folder(folder)
            return open_file(path, size, self._io, used=used)
        except FileNotFoundError:
            raise SegmentGoneError.of(
                f"segment {self.name}", f"was evicted or compacted before its array '{name}' was read"
            ) from None
        except OSError as error:
            raise fs.unreadable(error, path) from None

    def _used(self, spec: ArraySpec) -> int | None:
        """Return the bytes of an array that hold values, or None while more may be added, or if that is not known."""
        if not self.finished:
            return None
        if spec.axis is None or spec.edges:
            return min(self.rows + spec.edges, spec.capacity) * spec.itemsize
        ends = {axis: self.edge(axis, self.rows) for axis in self.schema.axes}
        if sum(ends.values()) != self._elements or min(ends.values()) < 0:  # the last offsets are damaged
            return None
        return min(ends[spec.axis], spec.capacity) * spec.itemsize

    def commits(self, start: int = 0) -> npt.NDArray[Any]:
        """Return the commits of rows from record `start` on, as a structured array, without those of `gaps`."""
        table = self.log.table(self.records, start)
        if not len(table):
            return table
        good = (table["salt"] == self.meta.salt) & (table["seq"] == np.arange(start, start + len(table)))
        begins = table["rows_end"].astype(np.int64) - table["n_rows"]
        good[1:] &= begins[1:] == table["rows_end"][:-1]
        before = self.log.get(start - 1) if start else None
        good[0] &= int(begins[0]) == (before.rows_end if before is not None else 0)
        good &= table["magic"] == MAGIC
        good &= (table["kind"] >= KIND_ROWS) & (table["kind"] <= KIND_CLOSED)
        good[1:] &= table["time_ns"][1:] > table["time_ns"][:-1]
        is_served = table["kind"] == KIND_ROWS
        good &= is_served | ((table["n_rows"] == 0) & (table["seq"] == self.records - 1))  # nothing follows an end
        if not good.all():
            for seq in range(start, start + len(table)):
                if self.log.get(seq) is None:
                    self._check(seq)
        for seq in self.lost_commits():
            if start <= seq < start + len(table):
                is_served[seq - start] = False
        self.close_log()
        return table[is_served]

    def see(self) -> None:
        """Look at the records of new commits, and note where each ends."""
        if self._indexed < self.records:
            table = self.commits(self._indexed)
            self._ends = np.concatenate([self._ends, table["rows_end"].astype(np.int64)])
            self._seqs = np.concatenate([self._seqs, table["seq"].astype(np.int64)])
            self._indexed = self.records

    def disk_bytes(self) -> int:
        """Return the disk space of the segment in bytes."""
        return fs.disk_bytes(self.folder)

    def is_live(self) -> bool:
        """Return whether a living process may still append."""
        return not self.finished and fs.is_locked(commits_path(self.folder)) is not False  # without locks, none is gone


def _with_those_before(rows: Rows) -> Rows:
    """Return rows and the row before each: where a row begins is where the one before it ends."""
    if isinstance(rows, slice):
        return slice(max(0, rows.start - 1), rows.stop)
    return np.concatenate([rows, rows[rows > 0] - 1])


def _stat(path: str | Path, *, settled: bool = True) -> FileState:
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return GONE
    except OSError as error:  # not known now: its values are compared again
        fs.pass_external(error)
        return None
    if settled and abs(time.time_ns() - status.st_ctime_ns) < FRESH_NS:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


# Checking


def check_segment(segment: LocalSegment, report: VerifyReport) -> None:
    """Recompute every checksum of a segment: metadata, records, offsets, data."""
    name, mark = segment.name, segment.acknowledged()
    segment.refresh()
    for part, expected in _expected_metadata(segment):
        try:
            same = fs.read_file(part) == expected
        except (OSError, StoreError) as error:
            fs.pass_external(error)
            same = False
        if not same:
            report.problem(f"{name}: {part.relative_to(segment.folder)} is damaged or missing")
    end = _check_records(segment, report)
    for gap in segment.gaps:
        if gap.seq >= segment.records and gap.why:  # what is not there at all
            segment.report(report, gap)
    if mark is None:
        report.problem(f"{name}: commits/acknowledged is damaged or missing")
    elif mark > end and not any(gap.seq >= segment.records for gap in segment.gaps):
        report.problem(f"{name}: {mark} commits were acknowledged, but only {end} exist: records are missing")
    report.bytes += segment.records * RECORD_SIZE + segment.value_bytes()
    segment.close_log()


def _check_records(segment: LocalSegment, report: VerifyReport) -> int:
    """Check each record and its data; return the number of records."""
    name, log, covered = segment.name, segment.log, 0
    fence = segment.fence()
    end = log.last_written() if fence is None else min(log.last_written(), fence)
    for seq in range(end):
        record = log.get(seq)
        if seq in segment.dropped:
            report.loss(f"{name}: commit {seq} was being written and had not been acknowledged")
            continue
        if record is None:
            if seq == end - 1 and segment.is_live():
                return seq
            first, last = segment.around(seq) if seq < segment.records else (segment.rows, segment.rows)
            rows = f"rows {first} to {last - 1} have no valid record" if last > first else "it contains no known row"
            segment.report(report, Gap(seq, first, last, f"commit record {seq} is damaged; {rows}"))
            covered = max(covered, last)
            continue
        if record.meta_crc != segment.meta_crc or record.ordinal != segment.ordinal:
            report.problem(f"{name}: zarr.json or the folder does not match the commit record {seq}")
        report.catalog_numbers.add(record.catalog)
        if record.kind != KIND_ROWS:
            if seq != end - 1:
                report.problem(f"{name}: records follow the end record {seq}")
            continue
        first, last = record.rows_end - record.n_rows, record.rows_end
        if first < covered or last > segment.meta.rows_cap:
            report.problem(f"{name}: commit record {seq} contradicts the previous record")
            continue
        covered = last
        report.rows += record.n_rows
        try:
            right = segment.data_crc(first, last) == record.data_crc
            right &= sum(segment.edge(axis, last) for axis in segment.schema.axes) == record.elems_end
        except (CorruptionError, SegmentGoneError) as error:
            right = False
            report.problem(f"{name}: {error}")
        if right and not segment.has_block_crcs(record):
            report.problem(f"{name}: {CHECKS} is damaged or missing for commit {seq}; its data is intact")
        whole = Gap(seq, first, last, "")
        for gap in () if right else [whole] if seq in segment.lost_commits() else segment.damage_in(seq) or [whole]:
            words = f"the data of commit {seq} (rows {gap.first} to {gap.end - 1}) is damaged"
            segment.report(report, gap._replace(why=f"{words}: a block of {gap.array}" if gap.array else words))
    return end


def _expected_metadata(segment: LocalSegment) -> list[tuple[Path, bytes]]:
    folder, meta = segment.folder, segment.meta
    out = [(folder / spec.name / "zarr.json", spec_json(spec)) for spec in meta.arrays()]
    out.append((folder / "commits" / "zarr.json", commits_json(meta)))
    out.append((folder / KEY, group_json(with_crc(meta.to_attributes()))))
    return out


def read_meta(folder: Path, salt: int | None = None) -> SegmentMeta:
    """Read the metadata of a segment, or the copy of it beside the commits: that with the salt, if that is known."""
    copies: list[bytes | None] = []
    for path in (folder / KEY, folder / COMMITS / KEY):
        try:
            copies.append(fs.read_file(path))
        except (FileNotFoundError, NotADirectoryError):
            copies.append(None)
    if copies == [None, None]:
        raise FileNotFoundError(errno.ENOENT, "no such file", str(folder / KEY))
    attributes = read_intact(copies, folder / KEY, "segment", salt)
    return SegmentMeta.from_attributes(attributes, str(folder))


def assert_local(segment: Segment) -> LocalSegment:
    """Return the segment, checked to be a local one."""
    if not isinstance(segment, LocalSegment):
        raise TypeError(f"{segment.name} is not a segment on a local disk")
    return segment
