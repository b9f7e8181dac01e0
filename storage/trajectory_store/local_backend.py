"""The medium of raw segments on a local disk."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trajectory_store import fork_safety, fs
from trajectory_store.backend import Claim, Medium, SealedError, Segment, SegmentWriter
from trajectory_store.batch import Batch
from trajectory_store.bucket import PARTIAL, FolderBucket
from trajectory_store.catalog_log import CATALOG, Entry, State
from trajectory_store.errors import CorruptionError, SegmentGoneError, StoreError, UnsyncedError
from trajectory_store.file_access import Io, choose, open_file
from trajectory_store.format import (
    ENDING_AT,
    FENCE_AT,
    KIND_CLOSED,
    KIND_END,
    KIND_ROWS,
    MARK_SIZE,
    RECORD_SIZE,
    ROW_TIME,
    TARGET,
    TEMPORARY,
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
    ordinal_of,
    pack,
    pack_mark,
    parse_mark,
    segment_name,
    spec_json,
    with_crc,
)
from trajectory_store.local_segment import LocalSegment, assert_local, check_segment, read_meta
from trajectory_store.rebuild import Unnamed, is_superfluous
from trajectory_store.verify_report import VerifyReport

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

SYNC_THREADS = 6
OLD_S = 60.0
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST}


class Memmap(Medium):
    """Raw segments below a local folder."""

    def __init__(self, bucket: FolderBucket, io: Io | None = None) -> None:
        self.bucket = bucket
        self.folder = bucket.root
        self.where = bucket.where
        self.io: Io = choose(self.folder) if io is None else io
        self.keeps_arrays = self.io == "mmap"

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
                        return LocalWriter(folder, ordinal, meta, log_fd, meta_crc, self.io)
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
            if self.bucket.durable:
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

    def sweep(self, state: State, whole: Collection[int]) -> None:
        """Remove half-made segments, and those without which nothing is lost and that no process holds."""
        now = fs.now(self.folder)
        for path in [*self.folder.iterdir(), *(self.folder / CATALOG).glob(f"{PARTIAL}*")]:
            if not path.name.startswith((TEMPORARY, PARTIAL)):
                continue
            try:
                old = now - path.lstat().st_mtime > OLD_S
            except FileNotFoundError:
                continue
            if old and (path.is_symlink() or not path.is_dir()):
                fs.remove_file(path)
            elif old and fs.is_locked(commits_path(path)) is False:
                fs.remove_tree(path)
        for one in self.survey(state):
            path = self.folder / one.entry.name
            if is_superfluous(state, one, whole) and fs.is_locked(commits_path(path)) is False:
                fs.remove_tree(path)

    def survey(self, state: State) -> list[Unnamed]:
        """Return the segments that are there and that a record of the catalog does not name."""
        counted = {entry.name for entry in state.entries}
        out: list[Unnamed] = []
        for path in sorted(self.folder.glob("seg-*")):
            ordinal = ordinal_of(path.name)
            if ordinal is None or path.name in counted or path.is_symlink():
                continue
            try:
                meta = read_meta(path)
                if meta.store == state.store and path.name == segment_name(ordinal, merged=meta.merged):
                    out.append(_found(path, ordinal, meta))
            except (OSError, StoreError):
                continue
        return out

    def close_dead(self, segment: Segment) -> bool:
        """End a segment whose writer died, once its commits are checked and synced."""
        found = assert_local(segment)
        if found.closed or not found.rows:
            return False
        fd = fs.open_fd(commits_path(found.folder), os.O_RDWR)
        try:
            if fs.try_lock(fd) is not True:
                return False
            last = found.last_record()
            if not found.check_all() or last is None or last.kind != KIND_ROWS:
                return False
            self.bucket.sync(found.name)
            end = last._replace(
                seq=found.records, time_ns=last.time_ns + 1, n_rows=0, kind=KIND_CLOSED, data_crc=0, target_crc=0
            )
            fs.pwrite(fd, pack(end, found.meta.salt), found.records * RECORD_SIZE)
            fs.datasync(fd)
        finally:
            os.close(fd)
        return True

    def fence(self, segment: Segment) -> None:
        """End a segment whether its writer is alive or not: what counts is what its log holds now.

        A writer looks, after each record that it wrote, whether its segment is being ended. So either it sees that, and
        waits to be told what counts, or its record was there before the log is read here.
        """
        found = assert_local(segment)
        if found.finished:
            return
        with fs.explained(found.folder, "ending a segment"):
            fd = fs.open_fd(mark_path(found.folder), os.O_RDWR)
            try:
                with fs.short_lock(fd, mark_path(found.folder)):
                    if parse_mark(os.pread(fd, MARK_SIZE, 0), FENCE_AT) is None:
                        fs.pwrite(fd, b"\1", ENDING_AT)
                        records = found.log.find_end(found.records)[0]
                        fs.pwrite(fd, pack_mark(records), FENCE_AT)
                        fs.datasync(fd)
            finally:
                os.close(fd)

    def check(self, segment: Segment, report: VerifyReport) -> None:
        """Recompute every checksum of a segment."""
        check_segment(assert_local(segment), report)


def _found(path: Path, ordinal: int, meta: SegmentMeta) -> Unnamed:
    """Describe a segment that the catalog does not name. A log that cannot be read may hold anything."""
    entry = Entry(ordinal, meta.kind, meta.salt, meta.merged, meta.rows_cap if meta.merged else None)
    whole, commits, catalog = False, True, 0
    try:
        log = Log(memoryview(fs.read_file(commits_path(path))), meta.salt)
        last = log.get(log.last_valid() - 1) if log.last_written() else None
        commits = log.last_written() > 0 or parse_mark(fs.read_file(mark_path(path))) != 0
        whole = meta.merged and last is not None and last.kind == KIND_CLOSED and last.rows_end == meta.rows_cap
        first = log.get(0)
        catalog = 0 if first is None else first.catalog
        if first is not None and first.ordinal != ordinal:  # a folder that was copied under another number
            whole = commits = False
    except (OSError, StoreError):
        pass
    sources = tuple(source for source, _ in meta.sources)
    return Unnamed(entry=entry, schema=meta.schema, sources=sources, whole=whole, commits=commits, catalog=catalog)


def write_segment(folder: Path, meta: SegmentMeta) -> tuple[int, int]:
    """Build the files of an empty segment in a folder that does not exist yet."""
    fd = -1
    try:
        for part in (folder, folder / "commits", folder / "commits" / "c", folder / "commits" / "c" / "0"):
            fs.mkdir(part)
        fs.create_sized(commits_path(folder), commits_cap(meta.rows_cap) * RECORD_SIZE, preallocate=False)
        fd = fs.open_fd(commits_path(folder), os.O_RDWR)
        if fs.try_lock(fd) is False:
            raise StoreError(f"{folder} was locked by another process while it was made.")
        fs.write_file(mark_path(folder), pack_mark(0).ljust(MARK_SIZE, b"\0"))
        fs.write_file(folder / "commits" / "zarr.json", commits_json(meta))
        for spec in meta.arrays():
            path = chunk_path(folder, spec.name, spec.shape)
            for part in [*reversed(path.relative_to(folder).parents)][1:]:
                fs.mkdir(folder / part)
            fs.write_file(folder / spec.name / "zarr.json", spec_json(spec))
            fs.create_sized(path, spec.capacity * spec.itemsize, meta.preallocated)
        raw = group_json(with_crc(meta.to_attributes()))
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
    """Appends commits to one segment on a local disk."""

    def __init__(
        self, folder: Path, ordinal: int, meta: SegmentMeta, log_fd: int, meta_crc: int, io: Io = "pread"
    ) -> None:
        super().__init__(ordinal, meta)
        self.folder = folder
        self._ended = False
        self._catalog = 0
        self._meta_crc = meta_crc
        self._log_fd = log_fd
        self._mark_fd = fs.open_fd(mark_path(folder), os.O_WRONLY)
        self._marks = open_file(mark_path(folder), MARK_SIZE, io)
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
        fork_safety.guard(self, 3, self._files, self._sync)
        self._waits = meta.durability != "process" and not meta.merged

    def commit(self, batch: Batch, time_ns: int, catalog: int) -> int:
        """Write a batch that fits and return its first row."""
        first = self.rows
        ends, crc, target_crc = self._write_data(batch)
        self._catalog = catalog
        time_ns = max(time_ns, self.last_time + 1)
        self._put_record(KIND_ROWS, first + batch.n_rows, batch.n_rows, sum(ends.values()), time_ns, crc, target_crc)
        if self._marks[ENDING_AT : ENDING_AT + 1][0] and self._is_fenced():
            self._ended = True
            raise SealedError(f"{self.folder} was ended by another process")
        self.rows, self.ends, self.last_time = first + batch.n_rows, ends, time_ns
        self.records += 1
        if not self._waits:
            self._acknowledge(self.records)
        return first

    def _is_fenced(self) -> bool:
        """Return whether another process ended the segment before the record that was just written."""
        with fs.short_lock(self._mark_fd, mark_path(self.folder)):
            fence = parse_mark(bytes(self._marks[:]), FENCE_AT)
        return fence is not None and self.records >= fence

    def _acknowledge(self, records: int) -> None:
        """Note how many commits are acknowledged; they exist even if the note cannot be written."""
        with suppress(OSError):
            fs.pwrite(self._mark_fd, pack_mark(records), 0)

    def _put_record(
        self, kind: int, rows_end: int, n_rows: int, elements: int, time_ns: int, crc: int = 0, target_crc: int = 0
    ) -> None:
        record = Record(
            seq=self.records,
            target_crc=target_crc,
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

    def _write_data(self, batch: Batch) -> tuple[dict[str, int], int, int]:
        """Write the values after the existing ones; return the new ends, their checksum, and that of the targets."""
        ends, crc, target_crc = dict(self.ends), 0, 0
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
                if name == TARGET:
                    target_crc = crc32c(raw)
        return ends, crc, target_crc

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
        if self._ended:
            self.abandon()
            return
        kind = KIND_CLOSED
        try:
            self._make_safe()
            if not self._waits:
                FolderBucket(self.folder.parent, durable=False).sync(self.folder.name)
        except OSError:
            kind = KIND_END
        try:
            self._put_record(kind, self.rows, 0, sum(self.ends.values()), self.last_time + 1)
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
