"""The interface of a medium: where segments are, and how they are read and written. Everything else is shared."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from trajectory_store import fs
from trajectory_store.batch import Batch
from trajectory_store.bucket import Bucket, FolderBucket
from trajectory_store.catalog_log import CATALOG, Entry, State
from trajectory_store.errors import CorruptionError, StoreError
from trajectory_store.file_access import AHEAD, FORMATS, PreadBytes, PreadItems, will_need
from trajectory_store.format import (
    KEY,
    ORDINAL_SHIFT,
    PRESENT,
    RECORD_SIZE,
    ROW_ID,
    ROW_MASK,
    ROW_TIME,
    TARGET,
    ArraySpec,
    SegmentMeta,
    offsets_name,
    ordinal_of,
)
from trajectory_store.ragged import Int64Array, expand
from trajectory_store.rebuild import Unnamed
from trajectory_store.root import Root
from trajectory_store.schema import Column
from trajectory_store.verify import VerifyReport

Rows = Int64Array | slice
"""Rows of a segment: their numbers, or a range."""

EDGES = np.dtype("V16")
_FEW_ROWS, _DENSE = 64, 1 << 12
"""If a file is not mapped, at most the first number of rows, in a range of more elements than the second, are read
individually.
"""
_LONG = 1 << 14


class Fills:
    """The items of a ragged column that a segment lacks: every slice holds the fill."""

    def __init__(self, column: Column) -> None:
        self._column = column
        self._blank = self._of(_LONG)

    def __getitem__(self, part: slice) -> memoryview:
        count = part.stop - part.start
        return self._blank[:count] if count <= _LONG else self._of(count)

    def _of(self, count: int) -> memoryview:
        values = np.full(count, self._column.fill_value, self._column.np_dtype)
        return memoryview(cast("bytes", values.view(f"u{values.itemsize}")))


_fills = functools.lru_cache(maxsize=256)(Fills)


class Gap(NamedTuple):
    """Rows that are not served: their commit is missing, or a block of one of its arrays does not match its checksum.

    `array` is that array, or empty for a commit that is missing as a whole.
    """

    seq: int
    first: int
    end: int
    why: str
    array: str = ""


class Segment(ABC):
    """One segment as a reader sees it."""

    def __init__(self, entry: Entry, meta: SegmentMeta) -> None:
        if (meta.salt, meta.kind, meta.merged) != (entry.salt, entry.kind, entry.merged):
            raise CorruptionError(
                f"{entry.name} is not the segment that the catalog lists (salt {meta.salt}, expected {entry.salt}): "
                "it was swapped or replaced. Restore the correct segment from a copy."
            )
        self.ordinal = entry.ordinal
        self.owners = entry.owners
        self.accepted = entry.accepted
        self.name = entry.name
        self.meta = meta
        self.schema = meta.schema
        self.rows: int = 0
        self.records: int = 0
        self.newest_ns: int = 0
        self.finished: bool = False
        self.gaps: list[Gap] = []
        """The rows that are not returned. This and the next six attributes apply to the files that were opened."""
        self.targets: dict[Gap, Int64Array] = {}
        """In a segment of updates: the target rows of `gaps`, once a read of their columns has reached them."""
        self.stale: list[Gap] = []
        """In a segment of rows: rows in the `targets` of updates; not returned, even if their files are intact."""
        self.noted = 0
        """The number of gaps that the catalog has reported; more may have been found since."""
        self.stamped: object = None
        """The state of the files when they were last compared to detect restored files."""
        self.is_read = False
        """Whether checked reads have used the segment, so that they check the state of its files."""
        self.is_unfit = False
        """Whether a merge has found damage in the segment."""
        self._maps: dict[str, memoryview | PreadBytes] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._loaded: dict[str, tuple[int, int]] = {}
        """The start and end of the loaded part of a per-row array."""
        self._span: tuple[int, int] | None = None
        self._used_bytes: int | None = None
        self.row_readers: dict[tuple[str, ...], Any] = {}
        """The readers that `single_row` prepares per list of columns; valid until an array is dropped."""

    @functools.cached_property
    def specs(self) -> dict[str, ArraySpec]:
        """The arrays of the segment by name."""
        return {spec.name: spec for spec in self.meta.arrays()}

    # What a medium defines

    @abstractmethod
    def commits(self, start: int = 0) -> npt.NDArray[Any]:
        """Return the commits of rows from number `start` on, with `rows_end`, `n_rows` and `time_ns`."""

    def see(self) -> None:  # noqa: B027 - elsewhere each record is looked at when it arrives
        """Look at the records of new commits, so that `gaps` has those that are not served."""

    @abstractmethod
    def is_live(self) -> bool:
        """Return whether a process may still append."""

    @abstractmethod
    def disk_bytes(self) -> int:
        """Return the disk space of the segment in bytes."""

    @abstractmethod
    def _open(self, name: str) -> memoryview | PreadBytes:
        """Open the bytes of an array."""

    def has_changed(self) -> bool:
        """Return whether files of arrays are others than those that were compared with their checksums.

        If so, or if none were compared yet, nothing that was read before is believed: arrays are opened again.
        """
        return False

    @property
    def is_checked(self) -> bool:
        """Whether no value that reads return is left to compare, and no update is damaged."""
        return True

    def has_compared(self, column: Column, *, flags: bool) -> bool:
        """Return whether no value of a column is left to compare, and no update is damaged."""
        return self.is_checked

    def stamp(self) -> object:
        """Return what changes when a file of the segment is restored, or None if only a full read shows it."""
        return None

    def check_rows(self, rows: Rows, columns: Iterable[Column], *, flags: bool = True) -> bool:
        """Compare columns of rows with their checksums, once per state of the files; return whether more fail.

        Those that fail are in `gaps` from then on. Other media compare whatever they fetch.
        """
        return False

    def compare(self, rows: Rows, columns: Iterable[Column], *, flags: bool) -> None:  # noqa: B027 - as `check_rows`
        """Compare values that updates have replaced: they are not compared again, and damage of them costs nothing."""

    def check_order(self) -> None:  # noqa: B027 - other media compare whatever they fetch
        """Compare what the order of the rows follows from with its checksums; damage is in `gaps` from then on."""

    @abstractmethod
    def holds_row(self, row: int, arrays: Iterable[str], *, compared: bool) -> bool:
        """Return whether open arrays have the values of a row and, with `compared`, they match their checksums."""

    def find_damage(self, rows: Rows, names: Iterable[str]) -> bool:
        """Read arrays of rows until all that is damaged among them is in `gaps`; return whether some was found."""
        return self.check_rows(rows, self.schema)

    def find_missing(self) -> bool:
        """Look for files or objects that are gone, and note what they held in `gaps`; return whether some are."""
        return False

    # What every medium shares

    def raw(self, name: str, rows: Rows | None = None) -> memoryview | PreadBytes:
        """Return the bytes of an array, opened at first use."""
        raw = self._maps.get(name)
        if raw is None:
            raw = self._maps[name] = self._open(name)
        return raw

    def opened(self, name: str) -> memoryview | None:
        """Return the bytes of an array if they are open and in memory."""
        raw = self._maps.get(name)
        return raw if isinstance(raw, memoryview) else None

    def drop(self, name: str) -> None:
        """Forget an array; it is opened again when it is read, and views in use stay valid."""
        for table in (self._maps, self._arrays, self._loaded):
            table.pop(name, None)
        self.row_readers = {}  # not the same table: a reader that another thread is making may have the array

    def release(self) -> None:  # noqa: B027  # a medium with a cache manages its memory itself
        """Forget arrays in memory that cost little to read again; views in use stay valid."""

    def array(self, name: str, rows: Rows | None = None) -> npt.NDArray[Any]:
        """Return a per-row array of the segment as a numpy array, valid for the rows that exist."""
        raw = self.raw(name, rows)
        array = self._arrays.get(name)
        if isinstance(raw, PreadBytes):
            return self._load(name, array, rows)
        if array is None:
            array = self._arrays[name] = np.frombuffer(raw, self.specs[name].dtype)
        return array

    def _load(self, name: str, array: npt.NDArray[Any] | None, rows: Rows | None) -> npt.NDArray[Any]:
        """Read what a per-row array lacks of these rows; what lies between them and the part that was read, too."""
        spec, end = self.specs[name], min(self.rows + 1, self.specs[name].capacity)
        first, last = _extent(rows, end)
        start, stop = (0, 0) if array is None else self._loaded.get(name, (0, 0))  # another thread may have released it
        if array is None or len(array) < end:  # memory that is never written takes no space
            grown = np.empty(min(spec.capacity, max(2 * end, 64)), spec.dtype)
            if array is not None:
                grown[start:stop] = array[start:stop]
            array = grown
        self._arrays[name] = array
        if first >= last:
            return array
        if last - first > _DENSE and isinstance(rows, np.ndarray) and len(rows) <= _FEW_ROWS:
            for row in rows.tolist():  # far apart: what lies between them is not read, and these are not remembered
                array[row : row + 2] = self.part(name, row, min(row + 2, end))
            return array
        if start >= stop:
            start = stop = first
        if first < start:
            array[first:start] = self.part(name, first, start)
            start = first
        if stop < last:
            array[stop:last] = self.part(name, stop, last)
            stop = last
        self._loaded[name] = (start, min(stop, end - 1))  # the last element may be one that is not written yet
        return array

    def part(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Return the values of a range of elements of any array, flat."""
        spec = self.specs[name]
        whole, size = self.raw(name), spec.itemsize
        if (stop - start) * size >= AHEAD:
            will_need(whole, start * size, stop * size)
        raw = whole[start * size : stop * size]
        return np.frombuffer(raw, spec.dtype) if len(raw) else np.empty(0, spec.dtype)

    def offsets(self, axis: str, rows: Rows | None = None) -> Int64Array:
        """Return the offsets of an axis, int64: row `i` begins at element `i` of them and ends at element `i + 1`."""
        return self.array(offsets_name(axis), rows)

    # Columns: where the segment lacks a column of the store, its rows have the fill.

    def values(self, column: Column, rows: Rows | None = None) -> npt.NDArray[Any]:
        """Return the values of a column as a flat numpy array, empty for a ragged column that the segment lacks."""
        if column.name in self.schema:
            return self.array(column.name, rows)
        size = self.meta.rows_cap if column.axis is None else 0
        return np.broadcast_to(np.array(column.fill_value, column.np_dtype), size)

    def edges(self, column: Column, rows: Rows | None = None) -> npt.NDArray[np.void]:
        """Return where each row of a ragged column begins and ends, two int64 as one item."""
        if column.axis in self.schema.axes:
            offsets = self.offsets(column.axis, rows)
            return np.ndarray(len(offsets) - 1, EDGES, offsets, strides=offsets.strides)
        return np.broadcast_to(np.array([0, len(column.fill_bytes)]).view(EDGES), self.meta.rows_cap)

    def items(self, column: Column, rows: Rows | None = None) -> memoryview | PreadItems | Fills:
        """Return the values of a ragged column as unsigned integers, from which rows are copied.

        An element with a shape counts as that many items.
        """
        if column.name not in self.schema:
            return memoryview(column.fill_bytes) if column.is_text else _fills(column)
        raw, size = self.raw(column.name, rows), column.np_dtype.itemsize
        return PreadItems(raw, size) if isinstance(raw, PreadBytes) else raw.cast(FORMATS[size])

    def present(self, column: Column, rows: Rows) -> npt.NDArray[np.bool_] | bool:
        """Return whether rows were given a value of a column: one bool for all if the segment has no presence flags."""
        names = [c.name for c in self.schema.optional]
        if column.name not in names or not self.meta.has_present:
            return column.name in self.schema
        bit = np.uint64(names.index(column.name))
        return (self.array(PRESENT, rows)[rows] >> bit & np.uint64(1)).astype(bool)

    def arrays_of(self, columns: Iterable[Column], *, flags: bool) -> Iterable[str]:
        """Return the arrays that a read of columns takes its values from; the offsets come first."""
        columns = list(columns)
        names = dict.fromkeys(
            [offsets_name(column.axis) for column in columns if column.axis in self.schema.axes and column.axis]
        )
        names |= dict.fromkeys(column.name for column in columns if column.name in self.schema)
        if flags and self.meta.has_present and any(column.optional for column in columns):
            names[PRESENT] = None
        if self.meta.kind == "update":
            names |= dict.fromkeys(self.meta.internal_rows)
        return names

    # Rows

    def row_ids(self, first: int, end: int) -> Int64Array:
        """Return the ids of a range of rows; for updates, the address where each was first written."""
        if self.meta.merged:
            return self._source_ids[first:end] if self.meta.kind == "rows" else np.array(self.array(ROW_ID)[first:end])
        base = self.ordinal << ORDINAL_SHIFT
        return np.arange(base + first, base + end, dtype=np.int64)

    @functools.cached_property
    def _source_ids(self) -> Int64Array:
        """The ids of the rows of a merged segment: all rows of each source, one source after another."""
        ordinals, counts = (np.array(part, np.int64) for part in zip(*self.meta.sources, strict=True))
        return expand(ordinals << ORDINAL_SHIFT, counts)

    def _hide_others(self) -> None:
        """Exclude the rows of sources that count elsewhere: segments named in place of this one while it was away."""
        mine, first = {o for a, b in self.owners for o in range(a, b + 1)}, 0
        for place, (ordinal, count) in enumerate(self.meta.sources if self.meta.kind == "rows" else ()):
            if ordinal not in mine:
                self.gaps.append(Gap(-1 - place, first, first + count, ""))
            first += count

    def row_times(self, records: int = 0, first: int = 0) -> Int64Array:
        """Return the commit times of the rows after the first `records` records, which hold the first `first` rows.

        The time of rows that are not served is -1.
        """
        if self.meta.merged:
            times = np.array(self.array(ROW_TIME)[first : self.rows])
        else:
            table = self.commits(records)
            counts = table["n_rows"].astype(np.int64)
            times = np.repeat(table["time_ns"].astype(np.int64), counts)
            if len(times) < self.rows - first:
                begins = table["rows_end"].astype(np.int64) - counts - first
                times, served_times = np.full(self.rows - first, -1, np.int64), times
                times[expand(begins, counts)] = served_times
        if self.meta.merged and self.meta.kind == "rows":
            self._estimate(times, first)
        for gap in self.hidden:
            times[max(0, gap.first - first) : max(0, gap.end - first)] = -1
        return times

    def _estimate(self, times: Int64Array, first: int) -> None:
        """Put rows whose time is damaged beside rows of their source, or of the sources around it, that have theirs."""
        unknown = np.zeros(len(times), np.bool_)
        for gap in self.gaps:
            if gap.array == ROW_TIME:
                unknown[max(0, gap.first - first) : max(0, gap.end - first)] = True
        if not unknown.any():
            return
        right = np.flatnonzero(~unknown)
        sources = self.row_ids(first, self.rows) >> ORDINAL_SHIFT
        for row in np.flatnonzero(unknown).tolist():
            at = int(right.searchsorted(row))
            beside = [int(right[i]) for i in (at - 1, at) if 0 <= i < len(right)]
            beside.sort(key=lambda place: sources[place] != sources[row])
            times[row] = times[beside[0]] if beside else self.meta.created_ns

    @property
    def lost(self) -> list[Gap]:
        """The gaps whose rows cannot be served; of merged rows whose times are damaged, the order is estimated."""
        return self.gaps if self.meta.kind == "update" else [gap for gap in self.gaps if gap.array != ROW_TIME]

    @property
    def hidden(self) -> list[Gap]:
        """The gaps whose rows are not served: these, and those with a damaged later value."""
        return [*self.lost, *self.stale]

    def add_gap(self, gap: Gap) -> None:
        """Exclude rows from now on; of a commit that is excluded as a whole, its first reason stays."""
        same_array = (earlier for earlier in self.gaps if earlier.array in ("", gap.array) and earlier.seq == gap.seq)
        if not any(earlier.first <= gap.first and gap.end <= earlier.end for earlier in same_array):
            self.gaps = sorted([*self.gaps, gap])

    def lost_commits(self) -> set[int]:
        """Return the commits that are excluded as a whole: their time and rows are not certain."""
        return {gap.seq for gap in self.gaps if not gap.array}

    def runs(self, records: int, rows: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return times, first ids and sizes of the runs of rows committed together, after those already seen."""
        if self.meta.merged or any(gap.array for gap in (*self.gaps, *self.stale)):
            self.check_order()
            ids, times = self.row_ids(rows, self.rows), self.row_times(records, rows)
            if self.gaps or self.stale:
                ids, times = ids[times >= 0], times[times >= 0]
            back = (times[1:] < times[:-1]) & (ids[1:] >> ORDINAL_SHIFT == ids[:-1] >> ORDINAL_SHIFT)
            if self.meta.kind == "rows" and back.any():  # times grow within each segment
                raise CorruptionError(
                    f"{self.name}/{ROW_TIME} is inconsistent: a time is earlier than the previous one."
                )
            new = np.ones(len(ids), bool)
            new[1:] = (times[1:] != times[:-1]) | (ids[1:] != ids[:-1] + 1)
            starts = np.flatnonzero(new)
            return times[starts], ids[starts], np.diff(np.append(starts, len(ids)))
        if (
            self.records == records + 1 and self.rows > rows and not self.gaps
        ):  # one commit, as after each append: known without a read
            run = (self.newest_ns, (self.ordinal << ORDINAL_SHIFT) + rows, self.rows - rows)
            return tuple(np.array(run, np.int64)[:, None])
        table = self.commits(records)
        counts = table["n_rows"].astype(np.int64)
        firsts = table["rows_end"].astype(np.int64) - counts + (self.ordinal << ORDINAL_SHIFT)
        return table["time_ns"].astype(np.int64), firsts, counts

    def gap_ids(self, gap: Gap) -> Int64Array:
        """Return the ids of the rows of a gap; for updates those of their targets, where these are known."""
        try:
            if self.meta.kind == "update":
                return np.array(self.array(TARGET)[gap.first : gap.end])
            return self.row_ids(gap.first, gap.end)
        except StoreError:
            return np.empty(0, np.int64)

    def sure_targets(self, gap: Gap) -> Int64Array | None:
        """Return the rows that a damaged update was for, or None if they are not known: it may be for any."""
        if gap not in self.targets:
            try:
                targets = self._find_targets(gap)
            except StoreError:  # it cannot be read now
                targets = None
            if targets is None:
                return None
            self.targets[gap] = targets
        return self.targets[gap]

    @abstractmethod
    def _find_targets(self, gap: Gap) -> Int64Array | None:
        """Read the rows that a damaged update was for; None if they are damaged as well."""

    def report(self, report: VerifyReport, gap: Gap) -> None:
        """Report a commit whose rows are not there: as a loss if the owner of the store has accepted it."""
        (report.loss if self.is_accepted(gap) else report.problem)(f"{self.name}: {gap.why}")
        if self.meta.kind == "update" or gap.array != ROW_TIME:
            report.damaged(self.gap_ids(gap))

    def is_accepted(self, gap: Gap) -> bool:
        """Return whether the owner of the store has accepted the loss of a commit's rows."""
        end = max(gap.end, gap.first + 1)
        return any(first <= gap.first and end - 1 <= last for first, last in self.accepted)

    def is_damage(self, gap: Gap) -> bool:
        """Return whether acknowledged rows are missing whose loss was not accepted."""
        return bool(gap.why) and not self.is_accepted(gap)

    def row_limits(self) -> Mapping[int, int]:
        """Return the number of rows per original segment."""
        if not self.meta.merged:
            return {self.ordinal: self.rows}
        if self.meta.kind == "rows":
            return {ordinal: count for ordinal, count in self.meta.sources if count}
        ids = np.sort(self.row_ids(0, self.rows))
        owners = ids >> ORDINAL_SHIFT
        lasts = np.flatnonzero(np.append(owners[1:] != owners[:-1], True)) if len(ids) else owners
        return dict(zip(owners[lasts].tolist(), ((ids[lasts] & ROW_MASK) + 1).tolist(), strict=True))

    def elements(self) -> dict[str, int]:
        """Return the number of elements in use per axis."""
        last = slice(self.rows, self.rows)
        return {axis: int(self.offsets(axis, last)[self.rows]) for axis in self.schema.axes}

    def value_bytes(self) -> int:
        """Return the bytes of the values in use, and of the row offsets."""
        ends = self.elements()
        counts = [self.rows if c.axis is None else ends[c.axis] * c.width for c in self.schema]
        values = sum(count * c.np_dtype.itemsize for count, c in zip(counts, self.schema, strict=True))
        return values + 8 * self.rows * len(ends)

    def used_bytes(self) -> int:
        """Return about what the segment takes on a disk, in whole blocks, without a look at its files."""
        if self._used_bytes is not None:
            return self._used_bytes
        ends = self.elements()
        used = _BLOCK * _SMALL_FILES + _blocks(self.records * RECORD_SIZE)
        for spec in self.specs.values():
            in_use = self.rows + 1 if spec.edges else self.rows if spec.axis is None else ends[spec.axis]
            used += _BLOCK + _blocks((spec.capacity if self.meta.preallocated else in_use) * spec.itemsize)
        self._used_bytes = used if self.finished else None
        return used

    def time_span(self) -> tuple[int, int]:
        """Return the times of the first and the last commit; for a finished segment they are looked up once."""
        if self._span is not None:
            return self._span
        times = self.row_times() if self.meta.merged else self.commits()["time_ns"]
        times = times[times >= 0]
        created = self.meta.created_ns
        span = (int(times.min()), int(times.max())) if len(times) else (created, created)
        self._span = span if self.finished else None
        return span


_BLOCK: Final = 4096
_SMALL_FILES: Final = 5
"""The files of a segment besides its arrays: metadata, records, checksums and a mark."""


def _extent(rows: Rows | None, end: int) -> tuple[int, int]:
    """Return the range of elements that rows need of a per-row array, the offset after the last row included."""
    if rows is None:
        return 0, end
    if isinstance(rows, slice):
        return rows.start or 0, min(rows.stop + 1, end)
    return (int(rows.min()), min(int(rows.max()) + 2, end)) if len(rows) else (0, 0)


def _blocks(size: int) -> int:
    """Return a number of bytes as the disk space of a file."""
    return -(-size // _BLOCK) * _BLOCK


class SegmentWriter(ABC):
    """Appends commits to one segment of this process.

    Args:
        ordinal: of the segment.
        meta: its metadata.

    Attributes:
        rows: rows committed so far.
        records: commits so far.
        ends: per axis the elements so far.
        last_time: of the last commit.
        pending: a call has begun to write a commit, and has not counted it.
    """

    pending = False

    def __init__(self, ordinal: int, meta: SegmentMeta) -> None:
        self.ordinal = ordinal
        self.meta = meta
        self.rows: int = 0
        self.records: int = 0
        self.ends: dict[str, int] = dict.fromkeys(meta.schema.axes, 0)
        self.last_time: int = 0
        self.specs = {spec.name: spec for spec in meta.arrays()}

    def fits(self, batch: Batch) -> bool:
        """Return whether a batch still fits."""
        if self.rows + batch.n_rows > self.meta.rows_cap:
            return False
        for axis, columns in self.meta.schema.axes.items():  # every column of an axis has its elements
            for column in columns:
                if column.name in batch.values:
                    new = len(batch.values[column.name]) // column.width
                    break
            else:
                new = int(batch.fitted(self.meta.schema).lengths[axis].sum())
            if self.ends[axis] + new > self.meta.elems_cap[axis]:
                return False
        return True

    @abstractmethod
    def commit(self, batch: Batch, time_ns: int, catalog: int) -> int:
        """Write a batch that fits, and return its first row; readers see the batch after that.

        Raises:
            UnsyncedError: the batch is visible; whether it is on the disk is not known.
            OSError: no part of the batch is visible, unless the outcome is unknown: see `finish`.
            SealedError: another process ended the segment; no part of the batch is in it.
        """

    def wait_durable(self, records: int) -> None:  # noqa: B027 - most commits are safe when they return
        """Wait until that many commits have the promised durability.

        Raises:
            OSError: they are visible; whether they are on the disk is not known.
        """

    @abstractmethod
    def finish(self) -> None:
        """Count what the log holds, write after it that nothing follows, and close; a second call does the rest.

        A commit whose call was interrupted keeps its number if it is complete; nothing is written over it.

        Raises:
            WriteFailedError: whether a pending commit is there is still unknown.
        """

    def abandon(self) -> None:  # noqa: B027
        """Close without an end record: after a fork the segment belongs to the parent."""


class SealedError(StoreError):
    """Another process took the writer for dead and ended the segment; the commit is not in it."""


Claim = Callable[[int, int], int]
"""Enters an ordinal with a salt in the catalog and returns it, or returns the least ordinal to try instead."""


Part = tuple[str, Rows | None]
"""The name of an array and its rows; None for all."""


class Medium(ABC):
    """The location of the segments of a store.

    Attributes:
        bucket: holds the catalog.
        where: the address, for messages.
        keeps_arrays: an open array of a segment shows everything that is written to it later.
        complete: an array of a segment holds all rows, so nothing has to be fetched.
    """

    bucket: Bucket
    where: str
    keeps_arrays = False
    complete = True

    @abstractmethod
    def open_segments(self, entries: Sequence[Entry]) -> list[Segment | Exception]:
        """Open segments for reading; return a StoreError or OSError for each that cannot be opened."""

    def fetch(self, parts_of: Mapping[Segment, Iterable[Part]]) -> None:  # noqa: B027 - most media have everything
        """Request together what will be read of some segments."""

    @abstractmethod
    def refresh(self, segments: Sequence[Segment]) -> None:
        """Read new commits of segments."""

    @abstractmethod
    def sync(self, segment: Segment, first: int) -> None:
        """Wait until the commits of a segment are on the disk, from number `first` on."""

    @abstractmethod
    def make_segment(self, meta: SegmentMeta, claim: Claim, least: int) -> SegmentWriter:
        """Make an empty segment for this process to append to.

        Args:
            meta: what it will hold.
            claim: enters the segment in the catalog.
            least: the least ordinal that may be free.

        Raises:
            WriteFailedError: the disk or the object store reported an error.
        """

    @abstractmethod
    def write_merged(self, entry: Entry, meta: SegmentMeta, parts: Iterable[Batch]) -> None:
        """Write a segment for rows that come from other segments, and wait until it is safe.

        After an error, the caller removes what was written.

        Args:
            entry: its future entry in the catalog; no other process uses its ordinal.
            meta: what it will hold; its capacities are exact.
            parts: the rows, some at a time.
        """

    @abstractmethod
    def remove(self, entry: Entry) -> None:
        """Remove the files or objects of a segment that no longer counts."""

    @abstractmethod
    def sweep(self, state: State, whole: Collection[int]) -> None:
        """Remove what killed processes left behind.

        Args:
            state: the newest record, which could be read.
            whole: the segments that it names and that are there as a whole.
        """

    @abstractmethod
    def check(self, segment: Segment, report: VerifyReport) -> None:
        """Recompute every checksum of a segment."""

    def check_segments(self, segments: Iterable[Segment], report: VerifyReport) -> None:
        """Recompute every checksum of some segments, whatever is wrong with one of them."""
        for segment in segments:
            report.segments += 1
            try:
                self.check(segment, report)
            except (StoreError, OSError, ValueError, IndexError, OverflowError) as error:
                fs.pass_external(error)
                report.problem(f"{segment.name}: cannot be checked: {error}")
                if segment.meta.kind == "rows" and not segment.meta.merged:
                    report.damaged(segment.row_ids(0, segment.rows))

    def check_root(self, root: Root) -> list[str]:
        """Return a description of what is wrong with the files of the store that never change."""
        expected = {KEY: root.to_json(), f"{CATALOG}/{KEY}": root.catalog_json()}
        return [f"{key} is damaged or missing" for key, raw in expected.items() if self.bucket.get(key) != raw]

    def has_later(self, state: State) -> bool:
        """Return whether there are segments that a later record of the catalog must have named, where that is cheap."""
        return isinstance(self.bucket, FolderBucket) and any(
            (ordinal_of(name) or 0) >= state.next_ordinal for name in os.listdir(self.bucket.root) if name[:4] == "seg-"
        )

    @abstractmethod
    def survey(self, state: State) -> list[Unnamed]:
        """Return the segments that are there and that a record of the catalog does not name."""

    @abstractmethod
    def close_dead(self, segment: Segment) -> bool:
        """End a segment whose writer died, so that it need not be checked again; return whether that was done.

        Before, all its commits are checked and synced. One with damage stays open: readers continue checking it.
        """

    def seal(self, segment: Segment) -> bool:
        """Make sure that no process can append to a segment whose writer seems dead; return whether that is certain."""
        return True

    def fence(self, segment: Segment) -> None:  # noqa: B027 - locks die with their holders
        """Make sure that no process can append to a segment any more."""

    def fresh(self) -> Medium:
        """Return the same place for a second reader in this process, which shares no mutable state with this one."""
        return self

    def forget(self, segment: Segment) -> None:  # noqa: B027 - most media keep nothing
        """Free what is kept for reading a segment that was removed."""

    def close(self) -> None:  # noqa: B027 - most media keep nothing
        """Free files and memory."""
