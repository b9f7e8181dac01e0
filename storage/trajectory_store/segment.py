"""Reading one segment: its files mapped read-only, its rows as far as the records go."""

from __future__ import annotations

import errno
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trajectory_store import fs
from trajectory_store.errors import CorruptionError, ReadFailedError, SegmentGoneError, StoreError
from trajectory_store.format import (
    COMMITS,
    ROW_ID,
    ROW_TIME,
    ArraySpec,
    SegmentMeta,
    chunk_path,
    commits_path,
    late_spec,
    offsets_name,
    write_late,
)
from trajectory_store.maps import FORMATS, Io, PreadBytes, PreadItems, open_file
from trajectory_store.ragged import Int64Array
from trajectory_store.record import KIND_END, KIND_ROWS, MAGIC, Log, Record, crc32c
from trajectory_store.schema import Column, Schema
from trajectory_store.writer import ORDINAL_SHIFT

VERIFIED = "verified"
_TOO_MANY = {errno.ENOMEM, errno.EMFILE, errno.ENFILE}


class SegmentReader:
    """One segment as a reader sees it.

    Attributes:
        rows: rows that the valid records cover.
        records: valid records seen.
        finished: nothing more will come.
    """

    def __init__(self, folder: Path, ordinal: int, *, io: Io = "mmap", writable: bool = False) -> None:
        self._io: Io = io
        self.folder = folder
        self.ordinal = ordinal
        self.rows = 0
        self.records = 0
        self.finished = False
        self._writable = writable
        raw = (folder / "zarr.json").read_bytes()
        self.meta = SegmentMeta.from_json(raw, folder / "zarr.json")
        self.meta_crc = crc32c(raw)
        self._late: set[str] = set()
        self._maps: dict[str, memoryview | PreadBytes] = {}
        self._items: dict[str, tuple[memoryview | PreadBytes, memoryview | PreadItems]] = {}
        self._loaded: dict[str, int] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        size = (self.meta.rows_cap + 1) * 64
        self.log = Log(open_file(commits_path(folder), size, io), self.meta.salt)
        fs.HOLDERS.add(self)
        self._limit = self._limit_after_reboot()
        self.refresh(first=True)

    @functools.cached_property
    def _specs(self) -> dict[str, ArraySpec]:
        return {spec.name: spec for spec in self.meta.arrays()}

    @property
    def schema(self) -> Schema:
        """The columns of this segment."""
        return self.meta.schema

    def drop_maps(self) -> None:
        """Close the arrays; they are opened again when they are read. Views that are in use stay valid."""
        for table in (self._items, self._arrays, self._loaded, self._maps):
            table.clear()

    def refresh(self, *, first: bool = False) -> bool:
        """Take in new records; returns whether rows were added."""
        if self.finished or (not first and self.log.is_blank(self.records)):
            return False
        end, _ = self.log.find_end(self.records)
        if self._limit is not None:
            end, self.finished = min(end, self._limit), True
        if end == self.records:
            return False
        before, self.records = self.rows, end
        last = self.log.get(end - 1)
        if last is not None:
            self.rows = last.rows_end
            self.finished |= last.kind == KIND_END or last.rows_end == self.meta.rows_cap
        if self.rows > self.meta.rows_cap:
            raise CorruptionError(f"{self.folder}: a record covers {self.rows} rows of {self.meta.rows_cap}.")
        return self.rows > before

    def _limit_after_reboot(self) -> int | None:
        """How many records to trust in a segment that was not synced before the machine went down."""
        if self.meta.durability == "power" or self.meta.boot_id == fs.boot_id():
            return None
        mark = self.folder / COMMITS / VERIFIED
        try:
            return int(json.loads(mark.read_bytes())["records"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        good = self.check_prefix()
        temporary = mark.with_name(f"{VERIFIED}.{os.getpid()}")
        try:
            fs.write_file(temporary, json.dumps({"records": good}).encode())
            fs.rename(temporary, mark)
        except OSError:
            pass
        return good

    def check_prefix(self) -> int:
        """Count the records whose data checksum holds, up to the first that does not."""
        seq = 0
        edges = dict.fromkeys(self.schema.axes, 0)
        try:
            for column in self.schema:
                self.raw(column.name)
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
        except (StoreError, OSError, IndexError):
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
            if column.mutable:
                continue
            start, stop = (first, end) if column.axis is None else spans[column.axis]
            crc = crc32c(self.part(column.name, start, stop).view(np.uint8), crc)
        for axis in self.schema.axes:
            crc = crc32c(self.part(offsets_name(axis), first + 1, end + 1).view(np.uint8), crc)
        for name in (*(("present",) if self.schema.optional else ()), *self.meta.internal_rows()):
            crc = crc32c(self.part(name, first, end).view(np.uint8), crc)
        return crc

    def has(self, column: Column) -> bool:
        """Whether the segment holds values of a column; a mutable one may have been added later."""
        if column.name in self._specs:
            return column.name in self.schema or column.name in self._late
        if not column.mutable or not chunk_path(self.folder, column.name).exists():
            return False
        self._specs[column.name] = late_spec(column, self.meta)
        self._late.add(column.name)
        return True

    def add_mutable(self, column: Column) -> None:
        """Give the segment an array for a mutable column that is younger than the segment."""
        if not self.has(column):
            write_late(self.folder, late_spec(column, self.meta))

    def _changes(self, name: str) -> bool:
        return name in self._late or (name in self.schema and self.schema[name].mutable)

    def raw(self, name: str) -> memoryview | PreadBytes:
        """The bytes of an array, opened at first use."""
        view = self._maps.get(name)
        if view is None:
            spec = self._specs[name]
            writable = self._writable and self._changes(name)
            path = chunk_path(self.folder, name)
            size = spec.capacity * spec.dtype.itemsize
            try:
                view = open_file(path, size, self._io, writable=writable)
            except FileNotFoundError:
                raise SegmentGoneError(
                    f"segment {self.folder.name} was evicted or compacted away before its column "
                    f"'{name}' was read. Call refresh() and take ids from ids()."
                ) from None
            except OSError as error:
                if error.errno not in _TOO_MANY:
                    raise
                raise ReadFailedError(
                    error.errno,
                    "too many files or maps are open. Run compact, or raise `ulimit -n` and vm.max_map_count",
                    str(path),
                ) from None
            self._maps[name] = view
        return view

    def items(self, name: str) -> memoryview | PreadItems:
        """The values of an array as unsigned integers of their size: what rows are copied from."""
        raw = self.raw(name)
        found = self._items.get(name)
        if found is None or found[0] is not raw:
            size = self._specs[name].dtype.itemsize
            view = PreadItems(raw, size) if isinstance(raw, PreadBytes) else raw.cast(FORMATS[size])
            found = self._items[name] = (raw, view)
        return found[1]

    def array(self, name: str) -> npt.NDArray[Any]:
        """A per-row array of the segment as numpy sees it; valid as far as the rows go."""
        found = self._arrays.get(name)
        if isinstance(self.raw(name), PreadBytes):
            return self._load(name, found)
        if found is None:
            view = cast("memoryview", self.raw(name))
            found = self._arrays[name] = np.frombuffer(view, self._specs[name].dtype)
        return found

    def _load(self, name: str, found: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
        """Read what is new of a per-row array; all of it where values change in place."""
        spec = self._specs[name]
        if found is None:
            found = np.empty(spec.capacity, spec.dtype)
        start = 0 if self._changes(name) else self._loaded.get(name, 0)
        end = min(self.rows + 1, spec.capacity)
        if start < end:
            found[start:end] = self.part(name, start, end)
            self._loaded[name] = end - 1
        self._arrays[name] = found
        return found

    def part(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """A range of the values of any array."""
        spec = self._specs[name]
        item = spec.dtype.itemsize
        raw = self.raw(name)[start * item : stop * item]
        return np.frombuffer(raw, spec.dtype) if len(raw) else np.empty(0, spec.dtype)

    def assign(self, name: str, rows: Int64Array, values: npt.NDArray[Any]) -> None:
        """Change values of a mutable column in place."""
        raw = self.raw(name)
        if isinstance(raw, PreadBytes):
            item = values.itemsize
            for row, value in zip(rows.tolist(), values, strict=True):
                raw.write(value.tobytes(), row * item)
        else:
            self.array(name)[rows] = values

    def offsets(self, axis: str) -> Int64Array:
        """`[rows_cap + 1]` int64: where the rows of an axis begin."""
        return self.array(offsets_name(axis))

    def offset_view(self, axis: str) -> memoryview:
        """The same as a memoryview of int64: the fast form for single rows."""
        raw = self.raw(offsets_name(axis))
        if isinstance(raw, PreadBytes):
            return memoryview(cast("bytearray", self.offsets(axis).view(np.uint8))).cast("q")
        return raw.cast("q")

    def commits(self, start: int = 0) -> npt.NDArray[Any]:
        """The row commits from record `start` on, as a structured array.

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

    def row_ids(self, first: int, end: int) -> Int64Array:
        """The ids of a range of rows."""
        if self.meta.kind == "compacted":
            return np.array(self.array(ROW_ID)[first:end])
        base = self.ordinal << ORDINAL_SHIFT
        return np.arange(base + first, base + end, dtype=np.int64)

    def row_times(self) -> Int64Array:
        """The commit times of a compacted segment's rows."""
        return self.array(ROW_TIME)[: self.rows]

    def elements(self) -> Mapping[str, int]:
        """Per axis the number of elements in use."""
        return {axis: int(self.offsets(axis)[self.rows]) for axis in self.schema.axes}

    def time_span(self) -> tuple[int, int]:
        """The times of the first and the last commit."""
        if self.meta.kind == "compacted":
            times = self.row_times()
            return int(times.min()), int(times.max())
        table = self.commits()
        if not len(table):
            return self.meta.created_ns, self.meta.created_ns
        return int(table["time_ns"][0]), int(table["time_ns"][-1])

    def disk_bytes(self) -> int:
        """The space that the segment takes."""
        return fs.disk_bytes(self.folder)

    def is_live(self) -> bool:
        """Whether a living process may still append."""
        return not self.finished and fs.is_locked(commits_path(self.folder))
