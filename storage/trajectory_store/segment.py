"""Reading one segment: its arrays, as far as its commits go.

`Segment` is what the rest of the store sees; `LocalSegment` is one on a local disk, and `objects.segment` has the one
whose commits are objects and whose columns are fetched into files of the same layout.
"""

from __future__ import annotations

import errno
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trajectory_store import fs
from trajectory_store.bucket import Bucket, FolderBucket, Transient
from trajectory_store.errors import CorruptionError, ReadFailedError, SegmentGoneError, StoreError
from trajectory_store.format import (
    COMMITS,
    KIND_END,
    KIND_ROWS,
    MAGIC,
    ORDINAL_SHIFT,
    PRESENT,
    RECORD_SIZE,
    ROW_ID,
    ROW_MASK,
    ROW_TIME,
    ArraySpec,
    Log,
    Record,
    SegmentMeta,
    chunk_path,
    commits_path,
    crc32c,
    mark_path,
    offsets_name,
    pack_verified,
    parse_mark,
    parse_verified,
    read_attributes,
)
from trajectory_store.journal import Entry
from trajectory_store.maps import FORMATS, Io, PreadBytes, PreadItems, open_file
from trajectory_store.ragged import Int64Array
from trajectory_store.schema import Column

Rows = Int64Array | slice
"""Some rows of a segment: their numbers, or all of a range."""

EDGES = np.dtype("V16")
_LONG = 1 << 14


class Fills:
    """The items of a ragged column that a segment lacks: every part of them is filled.

    Args:
        column: the column.
    """

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


class Segment(ABC):
    """One segment as a reader sees it.

    Attributes:
        ordinal: its number.
        owners: of a merged segment, runs `(first, last)` of the ordinals whose rows or updates it holds.
        name: of its folder, for messages.
        meta: what its metadata says.
        schema: the columns of this segment.
        rows: rows that its commits cover.
        records: commits seen.
        finished: nothing more will come.

    Raises:
        CorruptionError: the catalog says that another segment is there.
    """

    def __init__(self, entry: Entry, name: str, meta: SegmentMeta) -> None:
        if (meta.salt, meta.kind, meta.merged) != (entry.salt, entry.kind, entry.merged):
            raise CorruptionError(
                f"{name} holds another segment than the catalog says (salt {meta.salt}, expected {entry.salt}): it was "
                "swapped or replaced. Put the right one back from a copy."
            )
        self.ordinal = entry.ordinal
        self.owners = entry.owners
        self.name = name
        self.meta = meta
        self.schema = meta.schema
        self.rows: int = 0
        self.records: int = 0
        self.finished: bool = False
        self._maps: dict[str, memoryview | PreadBytes] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._loaded: dict[str, int] = {}

    @functools.cached_property
    def specs(self) -> dict[str, ArraySpec]:
        """The arrays of the segment by name."""
        return {spec.name: spec for spec in self.meta.arrays()}

    # What a medium defines

    @abstractmethod
    def refresh(self) -> bool:
        """Take in new commits; returns whether rows were added."""

    @abstractmethod
    def commits(self, start: int = 0) -> npt.NDArray[Any]:
        """The commits of rows from number `start` on: `rows_end`, `n_rows` and `time_ns` of each."""

    @abstractmethod
    def is_live(self) -> bool:
        """Whether somebody may still append."""

    @abstractmethod
    def disk_bytes(self) -> int:
        """The space that the segment takes."""

    @abstractmethod
    def _open(self, name: str) -> memoryview | PreadBytes:
        """The bytes of an array."""

    # What every medium shares

    def raw(self, name: str, rows: Rows | None = None) -> memoryview | PreadBytes:
        """The bytes of an array, opened at first use.

        Args:
            name: of the array.
            rows: those that are read of it, where only these have to be there; None for all.
        """
        found = self._maps.get(name)
        if found is None:
            found = self._maps[name] = self._open(name)
        return found

    def drop(self, name: str) -> None:
        """Forget an array; it is opened again when it is read, and views that are in use stay valid."""
        for table in (self._maps, self._arrays, self._loaded):
            table.pop(name, None)

    def release(self) -> None:  # noqa: B027  # a medium with a cache has its own way
        """Forget what of the arrays is in memory and is read again at little cost; views in use stay valid."""

    def array(self, name: str, rows: Rows | None = None) -> npt.NDArray[Any]:
        """A per-row array of the segment as numpy sees it; valid as far as the rows go."""
        raw = self.raw(name, rows)
        found = self._arrays.get(name)
        if isinstance(raw, PreadBytes):
            return self._load(name, found)
        if found is None:
            found = self._arrays[name] = np.frombuffer(raw, self.specs[name].dtype)
        return found

    def _load(self, name: str, found: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
        """Read what is new of a per-row array."""
        spec = self.specs[name]
        start = 0 if found is None else self._loaded.get(name, 0)  # another thread may have released the array
        end = min(self.rows + 1, spec.capacity)
        if found is None or len(found) < end:
            grown = np.empty(min(spec.capacity, max(2 * end, 64)), spec.dtype)
            if found is not None:
                grown[: len(found)] = found
            found = grown
        if start < end:
            found[start:end] = self.part(name, start, end)
            self._loaded[name] = end - 1
        self._arrays[name] = found
        return found

    def part(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """The values of a range of elements of any array, flat."""
        spec = self.specs[name]
        raw = self.raw(name)[start * spec.itemsize : stop * spec.itemsize]
        return np.frombuffer(raw, spec.dtype) if len(raw) else np.empty(0, spec.dtype)

    def offsets(self, axis: str, rows: Rows | None = None) -> Int64Array:
        """Int64, element `i` and `i + 1` of which say where row `i` of an axis begins and ends."""
        return self.array(offsets_name(axis), rows)

    # Columns: where the segment lacks one of the store's, its rows have the fill.

    def values(self, column: Column, rows: Rows | None = None) -> npt.NDArray[Any]:
        """The values of a column as numpy sees them, flat; none of a ragged one that the segment lacks."""
        if column.name in self.schema:
            return self.array(column.name, rows)
        size = self.meta.rows_cap if column.axis is None else 0
        return np.broadcast_to(np.array(column.fill_value, column.np_dtype), size)

    def edges(self, column: Column, rows: Rows | None = None) -> npt.NDArray[np.void]:
        """Per row where it begins and ends among the items of a ragged column, two int64 as one item."""
        if column.axis in self.schema.axes:
            offsets = self.offsets(column.axis, rows)
            return np.ndarray(len(offsets) - 1, EDGES, offsets, strides=offsets.strides)
        return np.broadcast_to(np.array([0, len(column.fill_bytes)]).view(EDGES), self.meta.rows_cap)

    def items(self, column: Column, rows: Rows | None = None) -> memoryview | PreadItems | Fills:
        """The values of a ragged column as unsigned integers: what rows are copied from.

        Elements with a shape count as that many items.
        """
        if column.name not in self.schema:
            return memoryview(column.fill_bytes) if column.is_text else _fills(column)
        raw, size = self.raw(column.name, rows), column.np_dtype.itemsize
        return PreadItems(raw, size) if isinstance(raw, PreadBytes) else raw.cast(FORMATS[size])

    def present(self, column: Column, rows: Rows) -> npt.NDArray[np.bool_] | bool:
        """Whether rows were given a value of a column; one word for all of them where the segment does not tell."""
        names = [c.name for c in self.schema.optional]
        if column.name not in names or not self.meta.has_present:
            return column.name in self.schema
        bit = np.uint64(names.index(column.name))
        return (self.array(PRESENT, rows)[rows] >> bit & np.uint64(1)).astype(bool)

    # Rows

    def row_ids(self, first: int, end: int) -> Int64Array:
        """The ids of a range of rows; of updates, where each was first written."""
        if self.meta.merged:
            return np.array(self.array(ROW_ID)[first:end])
        base = self.ordinal << ORDINAL_SHIFT
        return np.arange(base + first, base + end, dtype=np.int64)

    def row_times(self, records: int = 0, first: int = 0) -> Int64Array:
        """The commit times of the rows behind so many records, which have the `first` rows."""
        if self.meta.merged:
            return np.array(self.array(ROW_TIME)[first : self.rows])
        table = self.commits(records)
        return np.repeat(table["time_ns"].astype(np.int64), table["n_rows"].astype(np.int64))

    def runs(self, records: int, rows: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Times, first ids and counts of the runs of rows that came together, behind what was seen before."""
        if self.meta.merged:
            ids, times = self.row_ids(rows, self.rows), self.row_times(records, rows)
            new = np.ones(len(ids), bool)
            new[1:] = (times[1:] != times[:-1]) | (ids[1:] != ids[:-1] + 1)
            starts = np.flatnonzero(new)
            return times[starts], ids[starts], np.diff(np.append(starts, len(ids)))
        table = self.commits(records)
        counts = table["n_rows"].astype(np.int64)
        firsts = table["rows_end"].astype(np.int64) - counts + (self.ordinal << ORDINAL_SHIFT)
        return table["time_ns"].astype(np.int64), firsts, counts

    def row_limits(self) -> Mapping[int, int]:
        """Per original segment how many of its rows there are."""
        if not self.meta.merged:
            return {self.ordinal: self.rows}
        ids = np.sort(self.row_ids(0, self.rows))
        owners = ids >> ORDINAL_SHIFT
        lasts = np.flatnonzero(np.append(owners[1:] != owners[:-1], True)) if len(ids) else owners
        return dict(zip(owners[lasts].tolist(), ((ids[lasts] & ROW_MASK) + 1).tolist(), strict=True))

    def elements(self) -> dict[str, int]:
        """Per axis the number of elements in use."""
        return {axis: int(self.offsets(axis)[self.rows]) for axis in self.schema.axes}

    def value_bytes(self) -> int:
        """The bytes of the values that are in use, and of where rows end."""
        ends = self.elements()
        counts = [self.rows if c.axis is None else ends[c.axis] * c.width for c in self.schema]
        values = sum(count * c.np_dtype.itemsize for count, c in zip(counts, self.schema, strict=True))
        return values + 8 * self.rows * len(ends)

    def time_span(self) -> tuple[int, int]:
        """The times of the first and the last commit."""
        times = self.row_times() if self.meta.merged else self.commits()["time_ns"]
        if not len(times):
            return self.meta.created_ns, self.meta.created_ns
        return int(times.min()), int(times.max())

    @abstractmethod
    def newest_ns(self) -> int:
        """The time of the newest commit seen; of a merged segment the catalog has a later one."""


class LocalSegment(Segment):
    """A segment on a local disk.

    Attributes:
        limit: records that can be trusted, where the machine went down before they were synced; else None.

    Args:
        folder: where it is.
        entry: what the catalog says of it.
        io: how its files are read.

    Raises:
        FileNotFoundError: the folder is gone.
        CorruptionError: it is damaged, or another segment lies in its place.
    """

    def __init__(self, folder: Path, entry: Entry, io: Io) -> None:
        fs.check_folder(folder)
        raw = fs.read_file(folder / "zarr.json")
        meta = SegmentMeta.from_attributes(read_attributes(raw, folder / "zarr.json", "segment"), str(folder))
        super().__init__(entry, folder.name, meta)
        self._span: tuple[int, int] | None = None
        self.folder = folder
        self.meta_crc = crc32c(raw)
        self._io: Io = io
        self._last_time = 0
        self._log: Log | None = None
        self.limit = self._limit_after_reboot()
        self.refresh()
        if not self.finished and not fs.is_locked(commits_path(folder)):
            self.refresh()  # its writer is gone for good, but may have written until just now
            self.finished = True
        self.let_log_go()

    @property
    def log(self) -> Log:
        """The commit records."""
        if self._log is None:
            size = (self.meta.rows_cap + 1) * RECORD_SIZE
            self._log = Log(self._opened(COMMITS, commits_path(self.folder), size), self.meta.salt)
        return self._log

    def let_log_go(self) -> None:
        """Close the commit records where nothing more will come."""
        if self.finished:
            self._log = None

    def refresh(self) -> bool:
        """Take in new records; returns whether rows were added."""
        if self.finished or (self.records and self.log.is_blank(self.records)):
            return False
        end, _ = self.log.find_end(self.records)
        if self.limit is not None:
            end, self.finished = min(end, self.limit), True
        if end == self.records:
            return False
        before, self.records = self.rows, end
        last = self.log.get(end - 1)
        if last is not None:
            self.rows = last.rows_end
            self._last_time = last.time_ns
            self.finished |= last.kind == KIND_END
        if self.finished:  # what is small is loaded from now on, and holds no descriptor
            for table in (self._maps, self._arrays, self._loaded):
                table.clear()
            self.let_log_go()
        if self.rows > self.meta.rows_cap:
            raise CorruptionError(f"{self.folder}: a record covers {self.rows} rows of {self.meta.rows_cap}.")
        return self.rows > before

    def acknowledged(self) -> int | None:
        """How many records were acknowledged, as far as the mark says; None where it is damaged or missing."""
        try:
            return parse_mark(fs.read_file(mark_path(self.folder)))
        except (OSError, StoreError):
            return None

    def newest_ns(self) -> int:
        """The time of the newest commit seen."""
        return self._last_time

    def time_span(self) -> tuple[int, int]:
        """The times of the first and the last commit; of a finished segment they are looked up once."""
        if not self.finished:
            return super().time_span()
        if self._span is None:
            self._span = super().time_span()
        return self._span

    @property
    def survived_reboot(self) -> bool:
        """Whether the machine went down since the segment was written without being synced."""
        return self.meta.durability == "process" and self.meta.boot_id != fs.boot_id()

    def _limit_after_reboot(self) -> int | None:
        """How many records to trust in a segment that was not synced before the machine went down."""
        if self.meta.durability == "power" or self.meta.boot_id == fs.boot_id():
            return None
        return trusted(FolderBucket(self.folder, durable=False), f"{COMMITS}/verified", self.check_prefix)

    def check_prefix(self) -> int:
        """Count the records whose data checksum holds, up to the first that does not."""
        seq = 0
        edges = dict.fromkeys(self.schema.axes, 0)
        try:
            for name in self.specs:
                self.raw(name)
        except (StoreError, OSError):
            return 0
        while (record := self.log.get(seq)) is not None:
            if record.kind == KIND_ROWS and not self._holds(record, edges):
                break
            seq += 1
        return seq

    def _holds(self, record: Record, edges: dict[str, int]) -> bool:
        try:
            crc = self.data_crc(record.rows_end - record.n_rows, record.rows_end, edges)
        except (StoreError, OSError, IndexError, ValueError):
            return False
        return crc == record.data_crc and record.meta_crc == self.meta_crc

    def data_crc(self, first: int, end: int, edges: dict[str, int] | None = None) -> int:
        """CRC32C over the values of rows `first` to `end`, in the order they were written.

        Args:
            first: the first row.
            end: one past the last row.
            edges: per axis the expected first element; updated to the next one.

        Returns:
            The checksum, or -1 where the offsets cannot be right.
        """
        crc = 0
        spans: dict[str, tuple[int, int]] = {}
        for axis in self.schema.axes:
            name = offsets_name(axis)
            start = int(self.part(name, first, first + 1)[0])
            stop = int(self.part(name, end, end + 1)[0])
            if not 0 <= start <= stop <= self.meta.elems_cap[axis]:
                return -1
            if edges is not None:
                if edges[axis] != start:
                    return -1
                edges[axis] = stop
            spans[axis] = (start, stop)
        for column in self.schema:
            start, stop = (first, end) if column.axis is None else spans[column.axis]
            crc = crc32c(self.part(column.name, start, stop).view(np.uint8), crc)
        for axis in self.schema.axes:
            crc = crc32c(self.part(offsets_name(axis), first + 1, end + 1).view(np.uint8), crc)
        for name in (*((PRESENT,) if self.meta.has_present else ()), *self.meta.internal_rows):
            crc = crc32c(self.part(name, first, end).view(np.uint8), crc)
        return crc

    def release(self) -> None:
        """Forget every array; each is opened again when it is read."""
        for name in list(self._maps):
            self.drop(name)

    def _open(self, name: str) -> memoryview | PreadBytes:
        spec = self.specs[name]
        path = chunk_path(self.folder, name, spec.shape)
        return self._opened(name, path, spec.capacity * spec.itemsize, self._used(spec))

    def _opened(self, name: str, path: Path, size: int, used: int | None = None) -> memoryview | PreadBytes:
        try:
            for folder in (path.parent.parent, path.parent):
                fs.check_folder(folder)
            return open_file(path, size, self._io, used=used)
        except FileNotFoundError:
            raise SegmentGoneError(
                f"segment {self.name} was evicted or compacted away before its array '{name}' was read. "
                "Call refresh() and take ids from ids()."
            ) from None
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise ReadFailedError(error.errno, _why(error), str(path)) from None

    def _used(self, spec: ArraySpec) -> int | None:
        """The bytes of an array that hold values; None while more may come."""
        if not self.finished:
            return None
        along = spec.axis is not None and not spec.edges
        count = int(self.offsets(spec.axis or "")[self.rows]) if along else self.rows + spec.edges
        return min(max(count, 0), spec.capacity) * spec.itemsize

    def commits(self, start: int = 0) -> npt.NDArray[Any]:
        """The commits of rows from record `start` on, as a structured array.

        A damaged record that valid ones follow is stood in for by one with its rows and the time before it.
        """
        table = self.log.table(self.records, start)
        if not len(table):
            return table
        good = (table["salt"] == self.meta.salt) & (table["seq"] == np.arange(start, self.records))
        begins = table["rows_end"] - table["n_rows"]
        good[1:] &= begins[1:] == table["rows_end"][:-1]
        before = self.log.get(start - 1) if start else None
        good[0] &= int(begins[0]) == (before.rows_end if before is not None else 0)
        good &= table["magic"] == MAGIC
        good &= (table["kind"] == KIND_ROWS) | (table["kind"] == KIND_END)
        good[1:] &= table["time_ns"][1:] > table["time_ns"][:-1]
        if not good.all():
            table = self._mend(table, start)
        self.let_log_go()
        return table[table["kind"] == KIND_ROWS]

    def _mend(self, table: npt.NDArray[Any], start: int) -> npt.NDArray[Any]:
        before = self.log.get(start - 1) if start else None
        rows, time = (before.rows_end, before.time_ns) if before is not None else (0, 0)
        table = table.copy()
        for i in range(len(table)):
            if self.log.get(start + i) is None:
                later = (self.log.get(seq) for seq in range(start + i + 1, self.records))
                following = next((r for r in later if r is not None), None)
                end = following.rows_end - following.n_rows if following is not None else rows
                table[i]["kind"], table[i]["time_ns"] = KIND_ROWS, time
                table[i]["rows_end"], table[i]["n_rows"] = end, end - rows
            rows, time = int(table[i]["rows_end"]), int(table[i]["time_ns"])
        return table

    def disk_bytes(self) -> int:
        """The space that the segment takes."""
        return fs.disk_bytes(self.folder)

    def is_live(self) -> bool:
        """Whether a living process may still append."""
        return not self.finished and fs.is_locked(commits_path(self.folder))


def trusted(bucket: Bucket, key: str, count: Callable[[], int]) -> int:
    """How many commits to trust that were not synced before the machine went down: found out once, and noted."""
    known = None
    with suppress(ReadFailedError):
        known = parse_verified(bucket.get(key))
    if known is None:
        known = count()
        with suppress(StoreError, Transient):
            bucket.put_new(key, pack_verified(known))
    return known


def _why(error: OSError) -> str:
    """What kept a file from being opened, and what to do."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many files are open. Raise `ulimit -n`, or run compact"
    if error.errno == errno.ENOMEM:
        return "the address space or memory is exhausted. Raise `ulimit -v`, or free memory"
    return f"opening failed: {os.strerror(error.errno or 0)}. Check the disk, then open the store again"
