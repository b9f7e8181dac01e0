"""The medium of raw segments on a local disk."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from trajectory_store import forks, fs
from trajectory_store.batch import Batch
from trajectory_store.bucket import PARTIAL, FolderBucket
from trajectory_store.errors import CorruptionError, SegmentGoneError, StoreError, UnsyncedError
from trajectory_store.format import (
    COMMITS,
    KIND_CLOSED,
    KIND_END,
    KIND_ROWS,
    MAGIC,
    PRESENT,
    RECORD_SIZE,
    ROW_TIME,
    TEMPORARY,
    ArraySpec,
    Log,
    Record,
    SegmentMeta,
    chunk_path,
    commits_cap,
    commits_json,
    commits_path,
    continued,
    crc32c,
    group_json,
    mark_path,
    offsets_name,
    ordinal_of,
    pack,
    pack_mark,
    parse,
    parse_mark,
    read_attributes,
    segment_name,
    spec_json,
)
from trajectory_store.journal import CATALOG, Entry, State
from trajectory_store.maps import Io, PreadBytes, choose, open_file
from trajectory_store.medium import Claim, Gap, Medium, Segment, SegmentWriter
from trajectory_store.root import Root, fill_root, taken
from trajectory_store.verify import VerifyReport

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

SYNC_THREADS = 6
OLD_S = 60.0
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST}


def create_folder(path: Path, root: Root) -> None:
    """Create the folder of a new store; it appears whole or not at all, and is on the disk, whatever appends promise.

    Raises:
        StoreExistsError: the path holds something.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise taken(str(path))
    temporary = path.parent / f".{path.name}.new-{fs.token(6)}"
    with fs.explained(path, "creating the store"):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fs.mkdir(temporary)
            fill_root(FolderBucket(temporary, durable=False), root)  # synced as a whole, before it has its name
            fs.sync_tree(temporary)
            fs.rename(temporary, path)
        except OSError as error:
            fs.remove_tree(temporary)
            if path.exists():
                raise taken(str(path)) from error
            raise
        fs.sync_path(path.parent)


class Memmap(Medium):
    """Raw segments below a local folder.

    Args:
        folder: the folder.
        durable: catalog records and the names of segments wait for the disk.
        io: how files are read; None chooses by the file system.
    """

    def __init__(self, folder: Path, *, durable: bool, io: Io | None = None) -> None:
        self.bucket = FolderBucket(folder, durable=durable)
        self.folder = folder = self.bucket.root
        self.where = self.bucket.where
        self.io: Io = choose(folder) if io is None else io
        self.keeps_arrays = self.io == "mmap"
        self._durable = durable

    def open_segments(self, entries: Sequence[Entry]) -> list[Segment | Exception]:
        """Open segments for reading; return a StoreError or OSError for each that cannot be opened."""
        out: list[Segment | Exception] = []
        for entry in entries:
            folder = self.folder / entry.name
            try:
                out.append(LocalSegment(folder, entry, self.io))
            except (FileNotFoundError, SegmentGoneError) as error:
                missing = error.filename if isinstance(error, FileNotFoundError) else None
                name = os.path.relpath(missing or folder, self.folder)
                out.append(CorruptionError(f"{name} is missing, and the catalog says that the segment counts."))
            except (StoreError, OSError, ValueError) as error:
                out.append(error if isinstance(error, (StoreError, OSError)) else CorruptionError(str(error)))
        return out

    def refresh(self, segments: Sequence[Segment]) -> None:
        """Read new commits of segments."""
        for segment in segments:
            if isinstance(segment, LocalSegment):
                segment.refresh()

    def sync(self, segment: Segment, first: int) -> None:
        """Wait until a segment, with its name, is on the disk."""
        self.bucket.sync(segment.name)

    def make_segment(self, meta: SegmentMeta, claim: Claim, least: int) -> LocalWriter:
        """Make an empty segment, rename it to a free number, and enter it in the catalog.

        A rename onto a folder that holds something fails, so two processes never have the same number.
        """
        temporary = self.folder / f"{TEMPORARY}{os.getpid()}-{fs.token(6)}"
        with fs.explained(self.folder, "creating a segment"):
            log_fd, meta_crc = write_segment(temporary, meta)
            folder = temporary
            try:
                while True:
                    ordinal, folder = self._name(folder, least, merged=meta.merged)
                    least = claim(ordinal, meta.salt)
                    if least == ordinal:
                        return LocalWriter(folder, ordinal, meta, log_fd, meta_crc)
            except OSError as error:
                os.close(log_fd)
                if not isinstance(error, UnsyncedError):  # else the catalog names the segment
                    fs.remove_tree(folder)
                raise

    def _name(self, folder: Path, ordinal: int, *, merged: bool) -> tuple[int, Path]:
        """Give a finished folder the first free number."""
        while True:
            target = self.folder / segment_name(ordinal, merged=merged)
            try:
                fs.rename(folder, target)
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
                ordinal += 1
                continue
            if self._durable:
                fs.sync_path(self.folder)
            return ordinal, target

    def write_merged(self, entry: Entry, meta: SegmentMeta, parts: Iterable[Batch]) -> None:
        """Write a segment for rows that come from other segments, and wait until it is safe."""
        writer = self.make_segment(meta, lambda ordinal, _: ordinal, entry.ordinal)
        with fs.explained(writer.folder, "merging"):
            try:
                for batch in parts:
                    writer.commit(batch, int(batch.extra[ROW_TIME].max()), 0)
                writer.finish()
                fs.sync_tree(writer.folder)
                fs.sync_path(self.folder)
            finally:
                writer.abandon()

    def remove(self, entry: Entry) -> None:
        """Remove the folder of a segment that no longer counts: whole files, so maps of readers stay valid."""
        fs.remove_tree(self.folder / entry.name)

    def sweep(self, state: State) -> None:
        """Remove half-made segments, and those that no longer count and that no process holds."""
        counted = {entry.name for entry in state.entries}
        now = fs.now(self.folder)
        for path in [*self.folder.iterdir(), *(self.folder / CATALOG).glob(f"{PARTIAL}*")]:
            ordinal = ordinal_of(path.name)
            useless = path.name.startswith((TEMPORARY, PARTIAL)) if ordinal is None else path.name not in counted
            try:
                old = now - path.lstat().st_mtime > OLD_S or (ordinal is not None and ordinal < state.next_ordinal)
            except FileNotFoundError:
                continue
            if not useless or not old:
                continue
            if path.is_symlink() or not path.is_dir():
                fs.remove_file(path)
            elif not fs.is_locked(commits_path(path)):
                fs.remove_tree(path)

    def forgotten(self, state: State) -> list[Entry]:
        """Return the segments with commits that the catalog does not know of."""
        counted = {entry.name for entry in state.entries}
        out: list[Entry] = []
        for path in sorted(self.folder.glob("seg-*")):
            ordinal = ordinal_of(path.name)
            if ordinal is None or path.name in counted:
                continue
            try:
                attributes = read_attributes(fs.read_file(path / "zarr.json"), path, "segment")
                meta = SegmentMeta.from_attributes(attributes, str(path))
                record = parse(fs.read_file(commits_path(path))[:RECORD_SIZE], meta.salt, 0)
            except (OSError, StoreError, KeyError, TypeError, ValueError):
                continue
            if record is None or record.ordinal != ordinal:
                continue
            if record.catalog > state.number or ordinal >= state.next_ordinal:
                out.append(Entry(ordinal, meta.kind, meta.salt, meta.merged))
        return out

    def check(self, segment: Segment, report: VerifyReport) -> None:
        """Recompute every checksum of a segment."""
        check_segment(assert_local(segment), report)


def assert_local(segment: Segment) -> LocalSegment:
    """Return the segment, checked to be a local one."""
    if not isinstance(segment, LocalSegment):
        raise TypeError(f"{segment.name} is not a segment of a local disk")
    return segment


def write_segment(folder: Path, meta: SegmentMeta) -> tuple[int, int]:
    """Build the files of an empty segment in a folder that does not exist yet.

    Returns:
        The open, locked file of its commits, and the CRC32C of its zarr.json.
    """
    fd = -1
    try:
        for part in (folder, folder / "commits", folder / "commits" / "c", folder / "commits" / "c" / "0"):
            fs.mkdir(part)
        fs.create_sized(commits_path(folder), commits_cap(meta.rows_cap) * RECORD_SIZE, preallocate=False)
        fd = fs.open_fd(commits_path(folder), os.O_RDWR)
        if fs.try_lock(fd) is False:
            raise StoreError(f"{folder} was locked by another process while it was made.")
        fs.write_file(mark_path(folder), pack_mark(0))
        fs.write_file(folder / "commits" / "zarr.json", commits_json(meta.rows_cap))
        for spec in meta.arrays():
            path = chunk_path(folder, spec.name, spec.shape)
            for part in [*reversed(path.relative_to(folder).parents)][1:]:
                fs.mkdir(folder / part)
            fs.write_file(folder / spec.name / "zarr.json", spec_json(spec))
            fs.create_sized(path, spec.capacity * spec.itemsize, meta.preallocated)
        raw = group_json(meta.to_attributes())
        fs.write_file(folder / "zarr.json", raw)
        if meta.durability != "process":
            fs.sync_tree(folder)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        fs.remove_tree(folder)
        raise
    return fd, crc32c(raw)


class LocalWriter(SegmentWriter):
    """Appends commits to one segment on a local disk.

    Args:
        folder: the segment.
        ordinal: its number.
        meta: its metadata.
        log_fd: its commits, open and locked.
        meta_crc: the checksum of its zarr.json.
    """

    def __init__(self, folder: Path, ordinal: int, meta: SegmentMeta, log_fd: int, meta_crc: int) -> None:
        super().__init__(ordinal, meta)
        self.folder = folder
        self._catalog = 0
        self._meta_crc = meta_crc
        self._log_fd = log_fd
        self._mark_fd = fs.open_fd(mark_path(folder), os.O_WRONLY)
        self._fds = {
            name: fs.open_fd(chunk_path(folder, name, spec.shape), os.O_WRONLY) for name, spec in self.specs.items()
        }
        self._pool: ThreadPoolExecutor | None = None
        self._files = threading.Lock()
        self._sync = threading.Condition(threading.Lock())
        self._pid = os.getpid()
        self._synced = 0
        self._failed = False
        self._syncing = False
        self._company = False
        forks.guard(self, 3, self._files, self._sync)
        self._waits = meta.durability != "process" and not meta.merged

    def commit(self, batch: Batch, time_ns: int, catalog: int) -> int:
        """Write a batch that fits and return its first row."""
        first = self.rows
        ends, crc = self._write_data(batch)
        self._catalog = catalog
        time_ns = max(time_ns, self.last_time + 1)
        self._put_record(KIND_ROWS, first + batch.n_rows, batch.n_rows, sum(ends.values()), time_ns, crc)
        self.rows, self.ends, self.last_time = first + batch.n_rows, ends, time_ns
        self.records += 1
        if not self._waits:
            self._acknowledge(self.records)
        return first

    def _acknowledge(self, records: int) -> None:
        """Note how many commits are acknowledged; they exist even if the note cannot be written."""
        with suppress(OSError):
            fs.pwrite(self._mark_fd, pack_mark(records), 0)

    def _put_record(self, kind: int, rows_end: int, n_rows: int, elements: int, time_ns: int, crc: int) -> None:
        record = Record(
            seq=self.records,
            time_ns=time_ns,
            rows_end=rows_end,
            n_rows=n_rows,
            elems_end=elements,
            kind=kind,
            meta_crc=self._meta_crc,
            ordinal=self.ordinal,
            catalog=self._catalog,
            data_crc=crc,
        )
        fs.pwrite(self._log_fd, pack(record, self.meta.salt), self.records * RECORD_SIZE)

    def _write_data(self, batch: Batch) -> tuple[dict[str, int], int]:
        """Write the values after the existing ones; return the new ends and the checksum."""
        ends, crc = dict(self.ends), 0
        for name, values in batch.arrays(self.meta).items():
            spec, start = self.specs[name], self.rows
            if spec.axis is not None:
                start = self.ends[spec.axis]
                if spec.edges:
                    values, start = values[1:] + start, self.rows + 1
                    ends[spec.axis] = int(values[-1])
            if len(values):
                raw = values.view(np.uint8)
                fs.pwrite(self._fds[name], raw, start * spec.itemsize)
                crc = continued(crc, raw)  # after the write, when the values are in the processor's cache
        return ends, crc

    def wait_durable(self, records: int) -> None:
        """Return once that many records are on the disk, with their data; one waiting thread syncs for all."""
        if not self._waits:
            return
        with self._sync:
            while self._synced < records and self._syncing:
                self._sync.wait()
            if self._synced >= records:
                return
            self._syncing = True
        try:
            if self._company:
                time.sleep(GROUP_DELAY_S)
            before = self._synced
            self._make_safe()
            self._company = self.meta.durability == "group" and self._synced - before > 1
            if self._synced < records:
                raise OSError(errno.EIO, "the segment was closed before it was synced")
        finally:
            with self._sync:
                self._syncing = False
                self._sync.notify_all()

    def _make_safe(self) -> None:
        """Sync everything written so far, data and records in any order, and acknowledge it.

        After a sync has failed, the kernel may take the pages for clean: the next one would succeed, and prove nothing.
        """
        with self._files:
            if self._log_fd < 0:
                return
            if self._failed:
                raise OSError(errno.EIO, "an earlier sync of the segment failed")
            done = self.records
            try:
                self._datasync([*self._fds.values(), self._log_fd])
            except OSError:
                self._failed = True
                raise
            self._synced = done
            self._acknowledge(done)

    def _datasync(self, fds: list[int]) -> None:
        """Sync several files at once, so that they share the journal's commit and the disk's flush."""
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
        finally:  # no file may be closed while it is being synced
            errors = [other.exception() for other in others]
        for error in errors:
            if error is not None:
                raise error

    def finish(self) -> None:
        """Sync the segment, write the end record, and close; without the sync, the end says nothing of what is safe."""
        if self._log_fd < 0:
            return
        kind = KIND_CLOSED
        try:
            self._make_safe()
            if not self._waits:
                FolderBucket(self.folder.parent, durable=False).sync(self.folder.name)
        except OSError:
            kind = KIND_END
        try:
            self._put_record(kind, self.rows, 0, sum(self.ends.values()), self.last_time + 1, 0)
            fs.datasync(self._log_fd)
        except OSError:
            pass
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files and drop the lock without an end record."""
        if self._pool is not None and self._pid == os.getpid():  # a fork has none of its threads
            self._pool.shutdown(wait=False)
        self._pool = None
        with self._files:
            if self._log_fd < 0:
                return
            for fd in (*self._fds.values(), self._mark_fd, self._log_fd):
                os.close(fd)
            self._fds = {}
            self._log_fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_files"):  # a store that nobody closed: its rows are safe, as after a kill
            self.abandon()


GROUP_DELAY_S = 0.005
"""How long a group sync waits for other commits, if the last one had several."""


# Reading


class LocalSegment(Segment):
    """A segment on a local disk.

    Args:
        folder: where it is.
        entry: its entry in the catalog.
        io: how its files are read.

    Raises:
        FileNotFoundError: the folder is gone.
        CorruptionError: it is damaged, or another segment is in its place.
    """

    def __init__(self, folder: Path, entry: Entry, io: Io) -> None:
        fs.check_folder(folder)
        raw = fs.read_file(folder / "zarr.json")
        meta = SegmentMeta.from_attributes(read_attributes(raw, folder / "zarr.json", "segment"), str(folder))
        super().__init__(entry, meta)
        self.folder = folder
        self.meta_crc = crc32c(raw)
        self._io: Io = io
        self._log: Log | None = None
        self._elements = 0
        self._short: set[str] = set()
        self._torn = False
        self._seen = 0
        self.dropped: set[int] = set()
        """Commits that were being written when the machine went down, and that nobody was told of."""
        self.refresh()
        if self.finished or not self.is_live():  # its writer is gone for good, but may have written just before
            self._take_all(entry.rows)
        self.close_log()

    @property
    def log(self) -> Log:
        """The commit records."""
        if self._log is None:
            size = (self.meta.rows_cap + 1) * RECORD_SIZE
            self._log = Log(self._opened(COMMITS, commits_path(self.folder), size), self.meta.salt)
        return self._log

    def close_log(self) -> None:
        """Close the commit records if nothing more will be added."""
        if self.finished:
            self._log = None

    def refresh(self) -> None:
        """Read new records."""
        if self.finished:
            return
        end, last = self.log.find_end(self.records)
        if last is not None:
            self._take(end, last)

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
            raise CorruptionError(f"{self.folder}: a record covers {self.rows} rows of {self.meta.rows_cap}.")

    def _take_all(self, promised: int | None) -> None:
        """Count every valid record of a writer that is gone, and find the commits that are not served.

        Where the writer had synced everything, or the machine still runs that it ran on, nothing has to be checked.

        Args:
            promised: the rows that the catalog says it has; None if it does not know.
        """
        self.finished = False  # while commits are checked, files are read whole
        log, mark = self.log, self.acknowledged()
        last = None if mark is None else log.get(mark) or (log.get(mark - 1) if mark else None)
        torn = self.may_be_torn and not self.meta.merged and (last is None or last.kind != KIND_CLOSED)
        self._torn = torn
        if mark is not None and not torn and (last is not None or not mark):
            records, found = log.find_end(mark)
            last = found or last
        else:  # the mark, or the records there, are damaged, or may be older than what is on the disk
            records = log.last_valid()
            last = log.get(records - 1) if records else None
        self._take(records, last)
        self.finished = False
        commits = records - (last is not None and last.kind != KIND_ROWS)
        self._short = {name for name, spec in self.specs.items() if self._is_short(spec)}
        first = commits  # of the commits to check
        if torn or self._short:
            first = 0
        elif not self.meta.merged and self.meta.durability != "process":
            first = min(mark or 0, commits)
        for seq in range(first, commits):
            if self._short or self.lost is None or self.is_lost(seq) or not torn:
                self._check(seq, acknowledged=mark is None or seq < mark or torn)
        while self.gaps and not self.gaps[-1].why and self.gaps[-1].seq == self.records - 1:
            gap = self.gaps.pop()
            self.records, self.rows = gap.seq, gap.first
        missing = 0 if mark is None or self.meta.merged else mark - commits
        if missing > 0 or self.rows < (promised or 0):
            why = f"{max(missing, 0) or 'some'} acknowledged commits from number {commits} on are missing"
            end = min(max(self.rows, promised or 0), self.meta.rows_cap)
            self.gaps.append(Gap(max(self.records, commits), self.rows, end, why))
            self.rows = end
        self.finished = True

    def _is_short(self, spec: ArraySpec) -> bool:
        """Return whether the file of an array is missing or was cut."""
        try:
            return chunk_path(self.folder, spec.name, spec.shape).stat().st_size < spec.capacity * spec.itemsize
        except (FileNotFoundError, NotADirectoryError):
            return True

    def _check(self, seq: int, *, acknowledged: bool = True) -> None:
        """Leave a commit out if its record or its data does not match its checksum."""
        record, why = self.log.get(seq), f"commit {seq} is damaged"
        if record is None:
            first, end = self.around(seq)
        else:
            first, end = record.rows_end - record.n_rows, record.rows_end
            try:
                if (self.data_crc(first, end), self.meta_crc) == (record.data_crc, record.meta_crc):
                    return
            except (CorruptionError, SegmentGoneError) as error:
                why = f"commit {seq} cannot be read: {str(error).rstrip('.')}"
        if not any(gap.seq == seq for gap in self.gaps):
            self.gaps.append(Gap(seq, first, max(first, end), why if acknowledged else ""))
            if not acknowledged:
                self.dropped.add(seq)
            self.gaps.sort()

    def around(self, seq: int) -> tuple[int, int]:
        """Return the first row, and one past the last, of a commit whose record is damaged, from those beside it."""
        before = self.log.get(seq - 1) if seq else None
        after = next((r for i in range(seq + 1, self.records) if (r := self.log.get(i)) is not None), None)
        end = self.rows if after is None else after.rows_end - after.n_rows
        if seq and before is None:  # the one before it is damaged as well, and has its rows
            return end, end
        return (0 if before is None else before.rows_end), end

    def acknowledged(self) -> int | None:
        """Return the number of acknowledged records, or None if the mark is damaged or missing."""
        try:
            found = parse_mark(fs.read_file(mark_path(self.folder)))
        except (OSError, StoreError):
            return None
        return found if found is not None and found <= self.meta.rows_cap else None

    def data_crc(self, first: int, end: int) -> int:
        """Return the CRC32C of the values of rows `first` to `end`, in the order they were written.

        Returns:
            The checksum, or -1 if the offsets cannot be right.
        """
        crc = 0
        spans: dict[str, tuple[int, int]] = {}
        for axis in self.schema.axes:
            start, stop = self.edge(axis, first), self.edge(axis, end)
            if not 0 <= start <= stop <= self.meta.elems_cap[axis]:
                return -1
            spans[axis] = (start, stop)
        for column in self.schema:
            start, stop = (first, end) if column.axis is None else spans[column.axis]
            crc = continued(crc, self.part(column.name, start, stop).view(np.uint8))
        for axis in self.schema.axes:
            crc = continued(crc, self.part(offsets_name(axis), first + 1, end + 1).view(np.uint8))
        for name in (*((PRESENT,) if self.meta.has_present else ()), *self.meta.internal_rows):
            crc = continued(crc, self.part(name, first, end).view(np.uint8))
        return crc

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
        """Return the values of a file that was cut or is missing, as far as they are there; `gaps` has the others."""
        values = np.zeros(spec.capacity * spec.itemsize, np.uint8)
        try:
            found = np.frombuffer(fs.read_file(path, len(values)), np.uint8)
            values[: len(found)] = found
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
            raise SegmentGoneError(
                f"segment {self.name} was evicted or compacted away before its array '{name}' was read. "
                "Call refresh() and take ids from ids()."
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
        kept = table["kind"] == KIND_ROWS
        good &= kept | ((table["n_rows"] == 0) & (table["seq"] == self.records - 1))  # nothing follows an end
        if not good.all():
            for seq in range(start, start + len(table)):
                if self.log.get(seq) is None:
                    self._check(seq)
        for gap in self.gaps:
            if start <= gap.seq < start + len(table):
                kept[gap.seq - start] = False
        self.close_log()
        return table[kept]

    def see(self) -> None:
        """Look at the records of new commits."""
        if self._seen < self.records:
            self.commits(self._seen)
            self._seen = self.records

    @property
    def unsettled(self) -> bool:
        """Whether a power loss may have taken commits, and the catalog does not say yet which."""
        return self._torn and self.lost is None

    def disk_bytes(self) -> int:
        """Return the disk space of the segment in bytes."""
        return fs.disk_bytes(self.folder)

    def is_live(self) -> bool:
        """Return whether a living process may still append."""
        return not self.finished and fs.is_locked(commits_path(self.folder))


# Checking


def check_segment(segment: LocalSegment, report: VerifyReport) -> None:
    """Recompute every checksum of a segment: metadata, records, offsets, data."""
    name, mark = segment.name, segment.acknowledged()
    segment.refresh()
    for part, expected in _expected_metadata(segment):
        try:
            same = fs.read_file(part) == expected
        except (OSError, StoreError):
            same = False
        if not same:
            report.problem(f"{name}: {part.relative_to(segment.folder)} is damaged or missing")
    end = _check_records(segment, report)
    for gap in segment.gaps:
        if gap.seq >= segment.records and gap.why:  # what is not there at all
            _say(segment, report, gap.seq, f"{name}: {gap.why}", gap.first, gap.end)
    if mark is None:
        report.problem(f"{name}: commits/acknowledged is damaged or missing")
    elif mark > end and not any(gap.seq >= segment.records for gap in segment.gaps):
        report.problem(f"{name}: {mark} commits were acknowledged, and {end} are there: records are missing")
    report.bytes += segment.records * RECORD_SIZE + segment.value_bytes()
    segment.close_log()


def _say(segment: LocalSegment, report: VerifyReport, seq: int, words: str, first: int, end: int) -> None:
    """Report a commit whose rows are not there: as a loss if the catalog has recorded it as one."""
    (report.loss if segment.is_lost(seq) else report.problem)(words)
    report.damaged(segment.gap_ids(Gap(seq, first, end, words)))


def _check_records(segment: LocalSegment, report: VerifyReport) -> int:
    """Check each record and its data; return the number of records."""
    name, log, covered = segment.name, segment.log, 0
    end = log.last_written()
    for seq in range(end):
        record = log.get(seq)
        if seq in segment.dropped:
            continue
        if record is None:
            if seq == end - 1 and segment.is_live():
                return seq
            first, last = segment.around(seq) if seq < segment.records else (segment.rows, segment.rows)
            rows = f"rows {first} to {last - 1} have no valid record" if last > first else "it holds no known row"
            _say(segment, report, seq, f"{name}: commit record {seq} is damaged; {rows}", first, last)
            covered = max(covered, last)
            continue
        if record.meta_crc != segment.meta_crc or record.ordinal != segment.ordinal:
            report.problem(f"{name}: zarr.json or folder is not the one that record {seq} was written with")
        report.catalog_numbers.add(record.catalog)
        if record.kind != KIND_ROWS:
            if seq != end - 1:
                report.problem(f"{name}: records follow the end record {seq}")
            continue
        first, last = record.rows_end - record.n_rows, record.rows_end
        if first < covered or last > segment.meta.rows_cap:
            report.problem(f"{name}: commit record {seq} contradicts the one before it")
            continue
        covered = last
        report.rows += record.n_rows
        try:
            right = segment.data_crc(first, last) == record.data_crc
            right &= sum(segment.edge(axis, last) for axis in segment.schema.axes) == record.elems_end
        except (CorruptionError, SegmentGoneError) as error:
            right = False
            report.problem(f"{name}: {error}")
        if not right:
            words = f"{name}: the data of commit {seq} (rows {first} to {last - 1}) is damaged"
            _say(segment, report, seq, words, first, last)
    return end


def _expected_metadata(segment: LocalSegment) -> list[tuple[Path, bytes]]:
    folder, meta = segment.folder, segment.meta
    out = [(folder / spec.name / "zarr.json", spec_json(spec)) for spec in meta.arrays()]
    out.append((folder / "commits" / "zarr.json", commits_json(meta.rows_cap)))
    out.append((folder / "zarr.json", group_json(meta.to_attributes())))
    return out
