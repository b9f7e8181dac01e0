"""What a medium gives to the store: how segments are read and written, and where they are. The rest is shared."""

from __future__ import annotations

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trajectory_store.batch import Batch
from trajectory_store.bucket import Bucket, Transient
from trajectory_store.errors import CorruptionError, ReadFailedError, StoreError
from trajectory_store.format import (
    ORDINAL_SHIFT,
    PRESENT,
    ROW_ID,
    ROW_MASK,
    ROW_TIME,
    ArraySpec,
    SegmentMeta,
    crc32c,
    offsets_name,
    whole,
)
from trajectory_store.journal import CATALOG, Entry, State
from trajectory_store.maps import FORMATS, PreadBytes, PreadItems
from trajectory_store.ragged import Int64Array
from trajectory_store.root import KEY, Root, catalog_json
from trajectory_store.schema import Column
from trajectory_store.verify import VerifyReport

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
        newest_ns: the time of the newest of them; of a merged segment the catalog has a later one.
        finished: nothing more will come.

    Raises:
        CorruptionError: the catalog says that another segment is there.
    """

    def __init__(self, entry: Entry, meta: SegmentMeta) -> None:
        if (meta.salt, meta.kind, meta.merged) != (entry.salt, entry.kind, entry.merged):
            raise CorruptionError(
                f"{entry.name} holds another segment than the catalog says (salt {meta.salt}, expected {entry.salt}): "
                "it was swapped or replaced. Put the right one back from a copy."
            )
        self.ordinal = entry.ordinal
        self.owners = entry.owners
        self.name = entry.name
        self.meta = meta
        self.schema = meta.schema
        self.rows: int = 0
        self.records: int = 0
        self.newest_ns: int = 0
        self.finished: bool = False
        self._maps: dict[str, memoryview | PreadBytes] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._loaded: dict[str, int] = {}
        self._span: tuple[int, int] | None = None

    @functools.cached_property
    def specs(self) -> dict[str, ArraySpec]:
        """The arrays of the segment by name."""
        return {spec.name: spec for spec in self.meta.arrays()}

    # What a medium defines

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
        """The times of the first and the last commit; of a finished segment they are looked up once."""
        if self._span is not None:
            return self._span
        times = self.row_times() if self.meta.merged else self.commits()["time_ns"]
        created = self.meta.created_ns
        span = (int(times.min()), int(times.max())) if len(times) else (created, created)
        self._span = span if self.finished else None
        return span


class SegmentWriter(ABC):
    """Appends commits to one segment of this process.

    Args:
        ordinal: of the segment.
        meta: what the segment says about itself.

    Attributes:
        rows: rows committed so far.
        records: commits so far.
        ends: per axis the elements so far.
        last_time: of the last commit.
        pending: the last commit, while it is not known whether it was made; else None.
    """

    pending: Any = None

    def __init__(self, ordinal: int, meta: SegmentMeta) -> None:
        self.ordinal = ordinal
        self.meta = meta
        self.rows: int = 0
        self.records: int = 0
        self.ends: dict[str, int] = dict.fromkeys(meta.schema.axes, 0)
        self.last_time: int = 0
        self.specs = {spec.name: spec for spec in meta.arrays()}

    def has_room(self, batch: Batch) -> bool:
        """Whether a batch still fits."""
        if self.rows + batch.n_rows > self.meta.rows_cap:
            return False
        for axis, columns in self.meta.schema.axes.items():  # every column of an axis has its elements
            given = next((c for c in columns if c.name in batch.values), None)
            if given is None:
                new = int(batch.fitted(self.meta.schema).lengths[axis].sum())
            else:
                new = len(batch.values[given.name]) // given.width
            if self.ends[axis] + new > self.meta.elems_cap[axis]:
                return False
        return True

    @abstractmethod
    def commit(self, batch: Batch, time_ns: int, catalog: int) -> int:
        """Write a batch that fits, and return its first row; readers see it then.

        Raises:
            OSError: nothing of the batch became visible, unless it is in doubt.
            SealedError: the segment was ended by another process; nothing of the batch is in it.
        """

    def resolve(self, batch: Batch) -> int | None:
        """Find out what became of a commit in doubt; its first row, if it holds just these rows and is there now.

        Raises:
            WriteFailedError: it still cannot be found out.
        """
        return None

    def wait_durable(self, records: int) -> None:  # noqa: B027 - most commits are safe when they are made
        """Return once that many commits have the durability that was promised."""

    def sync(self) -> None:  # noqa: B027
        """Wait until everything written so far is on the disk."""

    @abstractmethod
    def finish(self) -> None:
        """Say that nothing follows, and close."""

    def abandon(self) -> None:  # noqa: B027
        """Close without a word: after a fork the segment belongs to the parent."""


class SealedError(StoreError):
    """The segment was ended by somebody who took its writer for dead; the commit is not in it."""


Claim = Callable[[int, int], int]
"""From an ordinal and a salt to the same ordinal, which is entered in the catalog then, or to the least one to try."""


Part = tuple[str, Rows | None]
"""Rows of an array; None for all."""


class Medium(ABC):
    """Where a store is.

    Attributes:
        bucket: holds the catalog.
        where: the address, for messages.
        keeps_arrays: an array of a segment, once it is open, shows everything that is written to it later.
        complete: an array of a segment holds all rows, and nothing has to be fetched for some of them.
    """

    bucket: Bucket
    where: str
    keeps_arrays = False
    complete = True

    @abstractmethod
    def open_segments(self, entries: Sequence[Entry]) -> list[Segment | Exception]:
        """Open segments for reading; a StoreError or OSError for those that cannot be."""

    def fetch(self, wanted: Mapping[Segment, Iterable[Part]]) -> None:  # noqa: B027 - most media have everything
        """Ask at the same time for what will be read of some segments."""

    @abstractmethod
    def refresh(self, segments: Sequence[Segment]) -> None:
        """Take in new commits of segments."""

    @abstractmethod
    def make_segment(self, meta: SegmentMeta, claim: Claim, least: int) -> SegmentWriter:
        """Make an empty segment for this process to append to.

        Args:
            meta: what it will hold.
            claim: enters the segment in the catalog.
            least: ordinals below are taken.

        Raises:
            WriteFailedError: the disk or the object store refused.
        """

    @abstractmethod
    def write_merged(self, entry: Entry, meta: SegmentMeta, parts: Iterable[Batch]) -> None:
        """Write a segment for rows that come from other segments, and wait until it is safe.

        Whoever asks removes what an error leaves of it.

        Args:
            entry: what the catalog will say of it; its number is one that nobody else uses.
            meta: what it will hold; its capacities are exact.
            parts: the rows, some at a time.
        """

    @abstractmethod
    def remove(self, entry: Entry) -> None:
        """Remove the files or objects of a segment that no longer counts."""

    @abstractmethod
    def sweep(self, state: State) -> None:
        """Remove what killed processes left behind."""

    @abstractmethod
    def check(self, segment: Segment, report: VerifyReport) -> None:
        """Recompute every checksum of a segment."""

    def check_root(self) -> list[str]:
        """What is wrong with the files of the store that never change, in words."""
        out: list[str] = []
        raw = self.bucket.get(KEY)
        try:
            good = raw is not None and Root.from_json(raw, KEY).to_json() == raw
        except StoreError:
            good = False
        if not good:
            out.append(f"{KEY} is damaged or missing")
        if self.bucket.get(f"{CATALOG}/{KEY}") != catalog_json():
            out.append(f"{CATALOG}/{KEY} is damaged or missing")
        return out

    def complete_root(self) -> bool:
        """Put what the maker of the store has not put yet; returns whether it is there now. A folder appears whole."""
        return False

    @abstractmethod
    def unknown(self, state: State) -> list[str]:
        """Segments that hold commits of a later time than the newest record of the catalog, in words."""

    def seal(self, segment: Segment) -> bool:
        """See to it that nobody appends to a segment whose writer seems dead; returns whether that is certain."""
        return True

    def fence(self, segment: Segment) -> None:  # noqa: B027 - locks die with their holders
        """See to it that nobody appends to a segment any more."""

    def fresh(self) -> Medium:
        """The same place for a second reader in this process, with nothing shared that one could disturb."""
        return self

    def forget(self, segment: Segment) -> None:  # noqa: B027 - most media keep nothing
        """Give back what is kept for reading a segment that left."""

    def close(self) -> None:  # noqa: B027 - most media keep nothing
        """Give back files and memory."""


def trusted(bucket: Bucket, key: str, count: Callable[[], int]) -> int:
    """How many commits to trust that were not synced before the machine went down: found out once, and noted."""
    try:
        note = json.loads(bucket.get(key) or b"{}")
        known = whole(note["records"])
        if note["crc"] == crc32c(str(known).encode()):
            return known
    except (ReadFailedError, ValueError, KeyError, TypeError, RecursionError):  # missing or damaged
        pass
    known = count()
    with suppress(StoreError, Transient):
        bucket.put_new(key, json.dumps({"records": known, "crc": crc32c(str(known).encode())}).encode())
    return known
