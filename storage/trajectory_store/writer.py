"""Writing: one process appends commits to its own segment and rolls to a new one when it is full."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from trajectory_store import fs
from trajectory_store.batch import Batch
from trajectory_store.errors import BatchError
from trajectory_store.format import (
    FIRST_ELEMENTS,
    FIRST_ROWS,
    GROWTH,
    MAX_ELEMENTS,
    MAX_ROWS,
    PRESENT,
    TAKEN,
    TEMPORARY,
    WHOLE_ELEMENTS,
    WHOLE_ROWS,
    Kind,
    SegmentMeta,
    chunk_path,
    offsets_name,
    write_segment,
)
from trajectory_store.record import KIND_END, KIND_ROWS, RECORD_SIZE, Record, crc32c, pack
from trajectory_store.schema import Schema

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

Durability = Literal["process", "power", "group"]
DURABILITIES: tuple[Durability, ...] = ("process", "power", "group")
ORDINAL_SHIFT = 32
ROW_MASK = (1 << ORDINAL_SHIFT) - 1
SYNC_THREADS = 6
LEAVING = ".old-"
MAX_ORDINAL = (1 << 31) - 1
_SEGMENT = re.compile(r"seg-([0-9]{8,10})\Z")


def segment_name(ordinal: int) -> str:
    """The folder of a segment."""
    return f"seg-{ordinal:08d}"


def list_ordinals(root: Path) -> list[int]:
    """The ordinals of the segments in a store's folder, ascending."""
    matches = (_SEGMENT.match(name) for name in os.listdir(root))
    return sorted(int(m.group(1)) for m in matches if m)


class SegmentWriter:
    """Appends commits to one segment; made by `SegmentStream`."""

    def __init__(self, folder: Path, meta: SegmentMeta, log_fd: int, meta_crc: int) -> None:
        self.folder = folder
        self.meta = meta
        self.rows = 0
        self.records = 0
        self.last_time = 0
        self.elements = dict.fromkeys(meta.schema.axes, 0)
        self._meta_crc = meta_crc
        self._log_fd = log_fd
        self._fds = {spec.name: fs.open_fd(chunk_path(folder, spec.name), os.O_WRONLY) for spec in meta.arrays()}
        self._pool: ThreadPoolExecutor | None = None
        self._files = threading.Lock()
        self._sync = threading.Condition()
        self._synced = 0
        self._syncing = False
        self._company = False

    def has_room(self, batch: Batch) -> bool:
        """Whether a batch still fits."""
        if self.rows + batch.n_rows > self.meta.rows_cap:
            return False
        for axis, columns in self.meta.schema.axes.items():  # every column of an axis has its elements
            if self.elements[axis] + len(batch.values[columns[0].name]) > self.meta.elems_cap[axis]:
                return False
        return True

    def commit(self, batch: Batch, time_ns: int | None = None, *, durable: bool | None = None) -> int:
        """Write a batch that fits and return its first row; on return readers see it.

        Args:
            batch: the rows.
            time_ns: the time of the commit; None for now.
            durable: sync before returning; None as the segment's metadata says.

        Raises:
            OSError: nothing of the batch became visible, unless the last sync failed.
        """
        first = self.rows
        if durable is None:
            durable = self.meta.durability == "power"
        touched, ends, crc = self._write_data(batch)
        if durable:
            self._datasync([self._fds[name] for name in touched])
        now = time.time_ns() if time_ns is None else time_ns
        record = Record(
            seq=self.records,
            time_ns=max(now, self.last_time + 1),
            rows_end=first + batch.n_rows,
            n_rows=batch.n_rows,
            elems_end=sum(ends.values()),
            kind=KIND_ROWS,
            meta_crc=self._meta_crc,
            data_crc=crc,
        )
        fs.pwrite(self._log_fd, pack(record, self.meta.salt), self.records * RECORD_SIZE)
        self.rows, self.elements, self.last_time = record.rows_end, ends, record.time_ns
        self.records += 1
        if durable:
            fs.datasync(self._log_fd)
        return first

    def _write_data(self, batch: Batch) -> tuple[list[str], dict[str, int], int]:
        schema, first, crc = self.meta.schema, self.rows, 0
        touched: list[str] = []
        for column in schema:
            array = batch.values[column.name]
            if not len(array):
                continue
            raw = array.view(np.uint8)
            start = first if column.axis is None else self.elements[column.axis]
            fs.pwrite(self._fds[column.name], raw, start * array.itemsize)
            if not column.mutable:  # after the write: the values are in the processor's cache then
                crc = crc32c(raw, crc)
            touched.append(column.name)
        ends = dict(self.elements)
        for axis in schema.axes:
            edges = np.cumsum(batch.lengths[axis])
            edges += ends[axis]
            ends[axis] = int(edges[-1])
            name, raw = offsets_name(axis), edges.view(np.uint8)
            crc = crc32c(raw, crc)
            fs.pwrite(self._fds[name], raw, (first + 1) * 8)
            touched.append(name)
        internal = {PRESENT: batch.present} if schema.optional else {}
        for name, array in {**internal, **batch.extra}.items():
            raw = array.view(np.uint8)
            crc = crc32c(raw, crc)
            fs.pwrite(self._fds[name], raw, first * 8)
            touched.append(name)
        return touched, ends, crc

    def wait_synced(self, records: int, delay_s: float) -> None:
        """Return once that many records are on the disk; one waiting thread syncs for all.

        Args:
            records: the number of records that must be safe.
            delay_s: how long the syncing thread lets others join, if others joined the last time.
        """
        with self._sync:
            while self._synced < records and self._syncing:
                self._sync.wait()
            if self._synced >= records:
                return
            self._syncing = True
        try:
            if delay_s > 0 and self._company:
                time.sleep(delay_s)
            before = self._synced
            self.sync()
            self._company = self._synced - before > 1
            if self._synced < records:
                raise OSError(errno.EIO, "the segment was closed before it was synced")
        finally:
            with self._sync:
                self._syncing = False
                self._sync.notify_all()

    def sync(self) -> None:
        """Wait until everything written so far is on the disk, data before records."""
        with self._files:
            if self._log_fd < 0:
                return
            done = self.records
            self._datasync(list(self._fds.values()))
            fs.datasync(self._log_fd)
            self._synced = max(self._synced, done)

    def _datasync(self, fds: list[int]) -> None:
        """Sync several files; at the same time they share the journal's commit and the disk's flush."""
        if len(fds) < 3:
            for fd in fds:
                fs.datasync(fd)
            return
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix="trajectory-sync")
        others = [self._pool.submit(fs.datasync, fd) for fd in fds[1:]]
        try:
            fs.datasync(fds[0])
        finally:  # nobody may close a file that is being synced
            errors = [other.exception() for other in others]
        for error in errors:
            if error is not None:
                raise error

    def finish(self) -> None:
        """Write the record that says nothing follows, and close; a failing disk does not matter here."""
        record = Record(
            seq=self.records,
            time_ns=max(time.time_ns(), self.last_time + 1),
            rows_end=self.rows,
            n_rows=0,
            elems_end=sum(self.elements.values()),
            kind=KIND_END,
            meta_crc=self._meta_crc,
            data_crc=0,
        )
        try:
            fs.pwrite(self._log_fd, pack(record, self.meta.salt), self.records * RECORD_SIZE)
        except OSError:
            pass
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files and drop the lock without a last record."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None
        with self._files:
            for fd in (*self._fds.values(), self._log_fd):
                os.close(fd)
            self._fds = {}
            self._log_fd = -1


class SegmentStream:
    """The segments that one process writes, one after another.

    Args:
        root: the store's folder.
        schema: the columns of its segments.
        removals: counts the removals that were recorded so far.
        kind: what its segments hold.
        durability: when a commit counts as done.
        segment_rows: rows of a full-size segment; None starts small and grows.
        segment_elements: elements per axis of a full-size segment; None starts small and grows.
        preallocate: reserve the blocks of a segment when it is made.
        group_delay_s: how long a group sync waits for company.
    """

    def __init__(
        self,
        root: Path,
        schema: Schema,
        removals: Callable[[], int],
        kind: Kind = "rows",
        durability: Durability = "process",
        *,
        segment_rows: int | None = None,
        segment_elements: int | None = None,
        preallocate: bool = False,
        group_delay_s: float = 0.005,
    ) -> None:
        self.root = root
        self.schema = schema
        self.kind: Kind = kind
        self._removals = removals
        self.durability: Durability = durability
        self.ordinal = -1
        self.replaces: tuple[int, ...] = ()
        self._rows_option = segment_rows
        self._elements_option = segment_elements
        self._preallocate = preallocate
        self._group_delay_s = group_delay_s
        self._made = 0
        self._writer: SegmentWriter | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def append(self, batch: Batch, time_ns: int | None = None) -> tuple[int, int]:
        """Commit a batch of one row or more.

        Returns:
            The ordinal of the segment and the first row in it.

        Raises:
            WriteFailedError: the disk refused; rows acknowledged before are safe.
        """
        if batch.n_rows == 0:
            raise BatchError("a commit needs at least one row.")
        with self._lock:
            writer = self._writer_for(batch)
            ordinal = self.ordinal
            try:
                first = writer.commit(batch, time_ns)
            except OSError as error:
                self._give_up()
                raise fs.failed(error, writer.folder, "appending") from error
            records = writer.records
        if self.durability == "group":
            try:
                writer.wait_synced(records, self._group_delay_s)
            except OSError as error:
                with self._lock:
                    self._give_up()
                raise fs.failed(error, writer.folder, "syncing") from error
        return ordinal, first

    def _writer_for(self, batch: Batch) -> SegmentWriter:
        if self._pid != os.getpid():
            self._drop()
            self._pid = os.getpid()
        if self._writer is not None and self._writer.has_room(batch):
            return self._writer
        if self._writer is not None:
            if self.durability == "group":
                try:
                    self._writer.sync()
                except OSError as error:
                    self._give_up()
                    raise fs.failed(error, self.root, "syncing") from error
            self._writer.finish()
            self._writer = None
        return self._roll(batch)

    def _roll(self, batch: Batch) -> SegmentWriter:
        most = (WHOLE_ROWS, WHOLE_ELEMENTS) if self._preallocate else (MAX_ROWS, MAX_ELEMENTS)
        elements = self._capacity(self._elements_option, FIRST_ELEMENTS, most[1])
        meta = SegmentMeta(
            schema=self.schema,
            rows_cap=max(self._capacity(self._rows_option, FIRST_ROWS, most[0]), batch.n_rows),
            elems_cap={axis: max(elements, int(batch.lengths[axis].sum()), 1) for axis in self.schema.axes},
            kind=self.kind,
            durability=self.durability,
            preallocated=self._preallocate,
            replaces=self.replaces,
        )
        folder = self.root / f"{TEMPORARY}{os.getpid()}-{fs.token(6)}"
        log_fd, meta_crc = write_segment(folder, meta)
        try:
            ordinal = claim(self.root, folder, self._removals)
            if self.durability != "process":
                fs.sync_path(self.root)
            writer = SegmentWriter(self.root / segment_name(ordinal), meta, log_fd, meta_crc)
        except OSError as error:
            os.close(log_fd)
            fs.remove_tree(folder)
            raise fs.failed(error, folder, "creating a segment") from error
        self._made += 1
        self.ordinal = ordinal
        self._writer = writer
        return writer

    def _capacity(self, option: int | None, first: int, largest: int) -> int:
        return option if option is not None else min(first << (GROWTH * self._made), largest)

    def _give_up(self) -> None:
        """After an error: end the segment where it is good, so a torn record is overwritten."""
        if self._writer is not None:
            self._writer.finish()
            self._writer = None

    def _drop(self) -> None:
        """After a fork: close the parent's files and leave its segment alone."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    def sync(self) -> None:
        """Wait until everything this stream wrote is on the disk."""
        with self._lock:
            if self._writer is not None and self._pid == os.getpid():
                self._writer.sync()

    def close(self) -> None:
        """Finish the current segment."""
        with self._lock:
            if self._writer is not None:
                if self._pid == os.getpid():
                    self._writer.finish()
                    self._writer = None
                else:
                    self._drop()


def claim(root: Path, folder: Path, removals: Callable[[], int]) -> int:
    """Rename a finished folder to the next free segment name and return its ordinal.

    A rename onto a folder that holds something fails, so two processes never get the same ordinal, and
    the newest segment is never removed, so no ordinal above all others was used before. What was listed may be
    old by the time of the rename, so an ordinal counts only if nothing was removed in between.

    Args:
        root: the store's folder.
        folder: the finished segment, in `root`.
        removals: counts the removals that were recorded so far.
    """
    while True:
        before = removals()
        ordinals = list_ordinals(root)
        ordinal = ordinals[-1] + 1 if ordinals else 0
        if ordinal > MAX_ORDINAL:
            raise OSError(errno.EOVERFLOW, "the store has used all its segment numbers")
        try:
            fs.rename(folder, root / segment_name(ordinal))
        except OSError as error:
            if error.errno not in TAKEN:
                raise
            continue
        leaving = f"{LEAVING}{ordinal}-"
        if not any(name.startswith(leaving) for name in os.listdir(root)) and removals() == before:
            return ordinal
        folder = root / segment_name(ordinal)
