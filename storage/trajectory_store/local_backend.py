"""The medium of raw segments on a local disk."""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trajectory_store import fork_safety, fs
from trajectory_store.backend import Claim, Medium, SealedError, Segment, SegmentWriter
from trajectory_store.batch import Batch
from trajectory_store.bucket import PARTIAL, FolderBucket
from trajectory_store.catalog_log import CATALOG, Entry, State
from trajectory_store.errors import CorruptionError, SegmentGoneError, StoreError, is_refused
from trajectory_store.file_access import Io, choose, open_file
from trajectory_store.format import (
    CHECKS,
    ENDING_AT,
    FENCE_AT,
    KIND_CLOSED,
    KIND_END,
    KIND_ROWS,
    MARK_SIZE,
    RECORD_SIZE,
    ROW_TIME,
    TEMPORARY,
    Log,
    Record,
    SegmentMeta,
    block_crcs,
    checks_cap,
    checks_path,
    chunk_path,
    commits_cap,
    commits_json,
    commits_path,
    crc32c,
    group_json,
    mark_path,
    ordinal_of,
    pack,
    pack_mark,
    page_elements,
    pages_per_block,
    parse,
    parse_mark,
    segment_name,
    spec_json,
    with_crc,
)
from trajectory_store.local_segment import LocalSegment, assert_local, check_segment, read_meta
from trajectory_store.rebuild import Unnamed, is_superfluous
from trajectory_store.verify import VerifyReport

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

SYNC_THREADS = 6
OLD_S = 60.0
_NAME_EXISTS = {errno.ENOTEMPTY, errno.EEXIST}


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
                out.append(CorruptionError(f"{name} is missing, although the catalog lists the segment."))
            except (StoreError, OSError, ValueError) as error:
                fs.pass_external(error)
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
        folder = self.folder / f"{TEMPORARY}{os.getpid()}-{fs.token(6)}"
        is_claimed = False
        with fs.explained(self.folder, "creating a segment"):
            try:
                log, meta_crc = write_segment(folder, meta)
                while True:
                    ordinal, folder = self._name(folder, least, merged=meta.merged)
                    is_claimed = True
                    least = claim(ordinal, meta.salt)
                    if least == ordinal:
                        return LocalWriter(folder, ordinal, meta, log, meta_crc, self.io)
                    is_claimed = False
            except BaseException as error:
                if not is_claimed or is_refused(error):  # else the catalog may name the segment: a sweep finds out
                    fs.remove_tree(folder)
                raise

    def _name(self, folder: Path, ordinal: int, *, merged: bool) -> tuple[int, Path]:
        """Give a finished folder the first free number."""
        while True:
            target = self.folder / segment_name(ordinal, merged=merged)
            try:
                fs.rename(folder, target)
            except OSError as error:
                if error.errno not in _NAME_EXISTS:
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
        for unnamed in self.survey(state):
            path = self.folder / unnamed.entry.name
            if is_superfluous(state, unnamed, whole) and fs.is_locked(commits_path(path)) is False:
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
                    out.append(_unnamed(path, ordinal, meta))
            except (OSError, StoreError) as error:
                fs.pass_external(error)
                continue
        return out

    def close_dead(self, segment: Segment) -> bool:
        """End a segment whose writer died, once its commits are checked and synced."""
        local = assert_local(segment)
        if local.closed or not local.rows:
            return False
        try:
            fd = fs.open_fd(commits_path(local.folder), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            if fs.try_lock(fd) is not True:
                return False
            local.refresh()  # the writer may have committed since it was last looked at, and died or closed only then
            last = local.last_record()
            if not local.check_all() or last is None or last.kind != KIND_ROWS:
                return False
            self.bucket.sync(local.name)
            end = last._replace(
                seq=local.records, time_ns=last.time_ns + 1, n_rows=0, kind=KIND_CLOSED, data_crc=0, checks_end=0
            )
            fs.pwrite(fd, pack(end, local.meta.salt), local.records * RECORD_SIZE)
            fs.datasync(fd)
        finally:
            os.close(fd)
        return True

    def fence(self, segment: Segment) -> None:
        """End a segment whether its writer is alive or not: what counts is what its log holds now.

        A writer looks, after each record that it wrote, whether its segment is being ended. So either it sees that, and
        waits for the record of what counts, or its record was there before the log is read here.
        """
        local = assert_local(segment)
        if local.finished:
            return
        with fs.explained(local.folder, "ending a segment"):
            fd = fs.open_fd(mark_path(local.folder), os.O_RDWR)
            try:
                with fs.short_lock(fd, mark_path(local.folder)):
                    if parse_mark(os.pread(fd, MARK_SIZE, 0), FENCE_AT) is None:
                        fs.pwrite(fd, b"\1", ENDING_AT)
                        records = local.log.find_end(local.records)[0]
                        fs.pwrite(fd, pack_mark(records), FENCE_AT)
                        fs.datasync(fd)
            finally:
                os.close(fd)

    def check(self, segment: Segment, report: VerifyReport) -> None:
        """Recompute every checksum of a segment."""
        check_segment(assert_local(segment), report)


def _unnamed(path: Path, ordinal: int, meta: SegmentMeta) -> Unnamed:
    """Describe a segment that the catalog does not name. A log that cannot be read may hold anything."""
    entry = Entry(ordinal, meta.kind, meta.salt, meta.merged, meta.rows_cap if meta.merged else None)
    complete, commits, catalog = False, True, 0
    try:
        log = Log(memoryview(fs.read_file(commits_path(path))), meta.salt)
        last = log.get(log.last_valid() - 1) if log.last_written() else None
        commits = log.last_written() > 0 or parse_mark(fs.read_file(mark_path(path))) != 0
        complete = meta.merged and last is not None and last.kind == KIND_CLOSED and last.rows_end == meta.rows_cap
        first = log.get(0)
        catalog = 0 if first is None else first.catalog
        if first is not None and first.ordinal != ordinal:  # a folder that was copied under another number
            complete = commits = False
    except (OSError, StoreError) as error:
        fs.pass_external(error)
    sources = tuple(source for source, _ in meta.sources)
    return Unnamed(
        entry=entry, schema=meta.schema, sources=sources, is_complete=complete, commits=commits, catalog=catalog
    )


def write_segment(folder: Path, meta: SegmentMeta) -> tuple[fs.OpenFile, int]:
    """Build the files of an empty segment in a folder that does not exist yet; return its locked log and a checksum."""
    try:
        for part in (folder, folder / "commits", folder / "commits" / "c", folder / "commits" / "c" / "0"):
            fs.mkdir(part)
        fs.create_sized(commits_path(folder), commits_cap(meta.rows_cap) * RECORD_SIZE, preallocate=False)
        log = fs.OpenFile(commits_path(folder), os.O_RDWR)
        if fs.try_lock(log.fd) is False:
            raise StoreError(f"{folder} was locked by another process while it was being created.")
        fs.write_file(mark_path(folder), pack_mark(0).ljust(MARK_SIZE, b"\0"))
        fs.create_sized(checks_path(folder), 4 * checks_cap(meta), preallocate=False)
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
        return log, crc32c(raw)
    except BaseException:
        fs.remove_tree(folder)
        raise


class LocalWriter(SegmentWriter):
    """Appends commits to one segment on a local disk."""

    _elements = -1
    """The number of elements of all axes, if it was read from the log."""

    def __init__(
        self, folder: Path, ordinal: int, meta: SegmentMeta, log: fs.OpenFile, meta_crc: int, io: Io = "pread"
    ) -> None:
        super().__init__(ordinal, meta)
        self.folder = folder
        self._catalog = 0
        self._meta_crc = meta_crc
        self._pool: ThreadPoolExecutor | None = None
        self._files = threading.RLock()
        self._sync = threading.RLock()
        """Held by the thread that syncs on behalf of all waiting threads."""
        fork_safety.guard(self, 3, self._sync, self._files)
        self._log = log
        self._mark = fs.OpenFile(mark_path(folder), os.O_WRONLY)
        self._marks = open_file(mark_path(folder), MARK_SIZE, io)
        self._opened = {
            name: fs.OpenFile(chunk_path(folder, name, spec.shape), os.O_WRONLY) for name, spec in self.specs.items()
        }
        self._opened[CHECKS] = fs.OpenFile(checks_path(folder), os.O_WRONLY)
        self._fds = {name: file.fd for name, file in self._opened.items()}
        self._checks_end = 0
        self._sizes = {name: (spec.itemsize, spec.itemsize * page_elements(spec)) for name, spec in self.specs.items()}
        """Per array, the bytes of an element and of a page."""
        self._pid = os.getpid()
        self._synced = 0
        self._failed = False
        self._company = False
        self._waits = meta.durability != "process" and not meta.merged

    def commit(self, batch: Batch, time_ns: int, catalog: int) -> int:
        """Write a batch that fits and return its first row."""
        first = self.rows
        ends, crc, checks_end = self._write_data(batch)
        self._catalog = catalog
        time_ns = max(time_ns, self.last_time + 1)
        self._put_record(KIND_ROWS, first + batch.n_rows, batch.n_rows, sum(ends.values()), time_ns, crc, checks_end)
        if self._marks[ENDING_AT : ENDING_AT + 1][0] and self._is_fenced():
            raise SealedError(f"segment {self.folder} was ended by another process")
        self.rows, self.ends, self.last_time, self.records = first + batch.n_rows, ends, time_ns, self.records + 1
        self._checks_end = checks_end
        if not self._waits:
            self._acknowledge(self.records)
        return first

    def _is_fenced(self) -> bool:
        """Return whether another process ended the segment before record number `records`."""
        with fs.short_lock(self._mark.fd, mark_path(self.folder)):
            fence = parse_mark(bytes(self._marks[:]), FENCE_AT)
        return fence is not None and self.records >= fence

    def _acknowledge(self, records: int) -> None:
        """Note how many commits are acknowledged; they exist even if the note cannot be written."""
        try:
            fs.pwrite(self._mark.fd, pack_mark(records), 0)
        except OSError as error:
            fs.pass_external(error)

    def _put_record(
        self, kind: int, rows_end: int, n_rows: int, elements: int, time_ns: int, crc: int = 0, checks_end: int = 0
    ) -> None:
        record = Record(
            seq=self.records,
            checks_end=checks_end,
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
        fs.pwrite(self._log.fd, pack(record, self.meta.salt), self.records * RECORD_SIZE)

    def _write_data(self, batch: Batch) -> tuple[dict[str, int], int, int]:
        """Write the values and the checksums of their blocks after the existing ones.

        Returns:
            The new ends, the checksum of these checksums, and the number of checksums so far.
        """
        ends, crcs = dict(self.ends), list[int]()
        for name, values in batch.arrays(self.meta).items():
            spec, start = self.specs[name], self.rows
            if spec.axis is not None:
                start = self.ends[spec.axis]
                if spec.edges:
                    values, start = values[1:] + start, self.rows + 1
                    ends[spec.axis] = int(values[-1])
            if len(values):
                raw, (itemsize, page) = values.view(np.uint8), self._sizes[name]
                place, size = start * itemsize, page * pages_per_block(self.meta, len(raw))
                fs.pwrite(self._fds[name], raw, place)
                crcs += block_crcs(raw, size, place % size)  # after the write: now it is in the cache
        checks = struct.pack(f"<{len(crcs)}I", *crcs)
        fs.pwrite(self._fds[CHECKS], checks, 4 * self._checks_end)
        return ends, crc32c(checks), self._checks_end + len(crcs)

    def wait_durable(self, records: int) -> None:
        """Return once that many records are on the disk, with their data; one thread syncs for all that wait."""
        if not self._waits:
            return
        with self._sync:
            if self._synced >= records:
                return
            if self._company:
                time.sleep(GROUP_DELAY_S)
            before = self._synced
            self._make_safe()
            self._company = self.meta.durability == "group" and self._synced - before > 1
            if self._synced < records:
                raise OSError(errno.EIO, "the segment was closed before it was synced")

    def _make_safe(self) -> None:
        """Sync everything written so far, data and records in any order, and acknowledge it.

        After a sync has failed, the kernel may take the pages for clean: the next one would succeed, and prove nothing.
        """
        with self._files:
            if self._log.fd < 0:
                return
            if self._failed:
                raise OSError(errno.EIO, "an earlier sync of the segment failed")
            done, futures = self.records, list["Future[None]"]()
            try:
                self._failed = True  # until the sync has succeeded
                self._datasync([*self._fds.values(), self._log.fd], futures)
                self._failed, self._synced = False, done
            except BaseException as error:
                # No file may be closed while it is being synced. An exception from outside is unrelated to the disk.
                errors = [future.exception() for future in futures]
                self._failed = fs.is_of_system(error) or any(error is not None for error in errors)
                raise
            self._acknowledge(done)

    def _datasync(self, fds: list[int], futures: list[Future[None]]) -> None:
        """Sync several files at once, so that they share the journal's commit and the disk's flush.

        `futures` takes the syncs that other threads do.
        """
        if len(fds) < 3:
            for fd in fds:
                fs.datasync(fd)
            return
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(SYNC_THREADS, thread_name_prefix="trajectory-sync")
        for fd in fds[1:]:
            futures.append(self._pool.submit(fs.datasync, fd))  # noqa: PERF401 - each is known once it was submitted
        fs.datasync(fds[0])
        for future in futures:
            future.result()

    def finish(self) -> None:
        """Sync the segment, write the end record, and close; without the sync, the end does not show what is safe."""
        with self._files:
            if self._log.fd < 0:
                return
            if self._count_log():
                self._put_end()
            self.abandon()

    def _count_log(self) -> bool:
        """Count a commit that is in the log and not counted; return whether the log has no end yet.

        Its call was interrupted, and readers may have seen it.
        """
        record = parse(os.pread(self._log.fd, RECORD_SIZE, self.records * RECORD_SIZE), self.meta.salt, self.records)
        if self._marks[ENDING_AT : ENDING_AT + 1][0] and self._is_fenced():
            return False
        if record is not None and record.kind == KIND_ROWS:
            self.rows, self._elements = record.rows_end, record.elems_end
            self.last_time, self.records = record.time_ns, self.records + 1
            return self._count_log()
        return record is None

    def _put_end(self) -> None:
        kind = KIND_CLOSED
        try:
            self._make_safe()
            if not self._waits:
                FolderBucket(self.folder.parent, durable=False).sync(self.folder.name)
        except OSError as error:
            fs.pass_external(error)
            kind = KIND_END
        with fs.tolerated():
            elements = self._elements if self._elements >= 0 else sum(self.ends.values())
            self._put_record(kind, self.rows, 0, elements, self.last_time + 1)
            fs.datasync(self._log.fd)

    def abandon(self) -> None:
        """Close the files and drop the lock without an end record."""
        if self._pool is not None and self._pid == os.getpid():  # a fork has none of its threads
            self._pool.shutdown(wait=False)
        self._pool = None
        with self._files:
            self._fds = {}
            for file in (*self._opened.values(), self._mark, self._log):
                file.close()

    def __del__(self) -> None:
        if hasattr(self, "_pid"):  # a store that was not closed: its rows are safe, as after a kill
            self.abandon()


GROUP_DELAY_S = 0.005
"""The time for which a group sync waits for other commits, if the last one had several."""
