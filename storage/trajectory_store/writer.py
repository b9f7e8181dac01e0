"""Writing: a process appends commits to separate segments, and begins a new segment when one is full."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from trajectory_store import fork_safety, fs
from trajectory_store.backend import SealedError, SegmentWriter
from trajectory_store.batch import Batch
from trajectory_store.catalog_log import Entry, State
from trajectory_store.errors import StoreError, UnsyncedError, WriteFailedError, is_unknown
from trajectory_store.format import Durability, Kind, SegmentMeta, time_after
from trajectory_store.root import Root
from trajectory_store.schema import Schema

if TYPE_CHECKING:
    from trajectory_store.catalog import Catalog

GROWTH = 4
"""Each segment of a process is `2 ** GROWTH` times the size of the one before, up to a maximum."""

FIRST = 4
"""Number of batches that fit in the first segment of a process: processes that write little must use little space."""

FIRST_ROWS = 64
FIRST_ELEMENTS = 1 << 12


Place = tuple[SegmentWriter, int, int]
"""The position of a commit: its writer, the number of records up to it, and its first row."""


class AppendCall(threading.local):
    """The call of a thread that appends.

    Attributes:
        place: where its commit is, or was about to be; None before it has begun.
        interrupted: the place, and the digest of the batch, of a call that an exception ended, until a call returns.
    """

    place: Place | None = None
    interrupted: tuple[Place, bytes] | None = None

    def retried(self, batch: Batch) -> Place | None:
        """Return where this batch is already, if the last call was interrupted after its commit was complete."""
        place, digest = self.interrupted or (None, b"")
        is_there = place is not None and place[0].records >= place[1] and digest == batch.digest()
        self.place = place if is_there else None
        return self.place


class Stream:
    """The segments of one kind that this process writes, one after another.

    The outcome of a call that an exception ended, whichever and wherever, is unknown until the next call has read the
    log: the writer is `pending` from before the first byte until the commit is counted. A segment of which that is
    unknown is ended, and a commit that is complete keeps its place in it.
    """

    def __init__(self, catalog: Catalog, root: Root, kind: Kind, durability: Durability) -> None:
        self._catalog = catalog
        self._root = root
        self.kind: Kind = kind
        self.durability: Durability = durability
        self.num_segments = 0
        """The number of segments that were begun."""
        self._first: tuple[int, int] = (0, 0)
        self._names: frozenset[str] = frozenset()
        self.writer: SegmentWriter | None = None
        """The writer of the current segment, if there is one."""
        self._ending: SegmentWriter | None = None
        self._rows: dict[int, int] = {}
        """The rows of ended segments whose number of rows is not yet in the catalog."""
        self._call = AppendCall()
        self._lock = threading.RLock()
        fork_safety.guard(self, 0, self._lock)
        self._pid = os.getpid()

    def begin(self) -> None:
        """Begin a call of this thread: no commit is its own yet."""
        self._call.place = None

    def append(self, batch: Batch, schema: Schema, begin: Callable[[int], None] | None = None) -> tuple[int, int]:
        """Commit a batch of one row or more; return the ordinal of its segment, and its first row there.

        If the thread's last call was interrupted with the same batch, and the commit is complete, that one is returned.
        """
        with self._lock:
            self._leave_parent()
            writer = self.writer
            if writer is not None and writer.pending:
                self._end_writer(writer)
                self._catalog.refresh_segment(writer.ordinal)  # its last commit may have been counted only now
            place = None if self._call.interrupted is None else self._call.retried(batch)
            writer, records, first = place or self._commit(batch, schema, begin)
        try:
            writer.wait_durable(records)
        except OSError as error:
            fs.pass_external(error)
            with self._lock:
                if self.writer is writer:
                    self._end_writer(writer)
            raise fs.unsynced(error, self._catalog.medium.where) from error
        self._catalog.medium.bucket.check_unmoved()  # else the rows are in a folder that is not read
        self._call.interrupted = None
        return writer.ordinal, first

    def interrupted(self, batch: Batch, error: BaseException) -> None:
        """Remember the commit of a call that an exception ended: a repeated call gets the ids of its rows.

        Those of an UnsyncedError are not remembered: no later sync proves that they are on the disk.
        """
        if isinstance(error, UnsyncedError):
            self._call.interrupted = None
        elif self._call.place is not None:  # else it ended before its commit began, and an earlier call is remembered
            self._call.interrupted = self._call.place, batch.digest()

    def _commit(self, batch: Batch, schema: Schema, begin: Callable[[int], None] | None) -> Place:
        """Commit a batch to the current segment, or to a new one; return where it is."""
        while True:
            writer = self._writer_for(batch, schema, begin)
            writer.pending = True  # from here on, only its log shows what is in it
            place = self._call.place = writer, writer.records + 1, writer.rows
            # After every commit that this process has seen, whatever the clock shows.
            now = time_after(self._catalog.newest_ns)
            try:
                writer.commit(batch.fitted(writer.meta.schema), now, self._catalog.state.number)
            except SealedError:  # another process ended the segment: the rows go to a new one
                writer.abandon()
                self.writer = None
                continue
            except OSError as error:
                fs.pass_external(error)
                if not is_unknown(error):
                    self._end_writer(writer)
                    if writer.records == place[1] and not isinstance(error, UnsyncedError):
                        return place  # its record was written before the error
                if isinstance(error, StoreError):
                    raise
                raise fs.failed(error, self._catalog.medium.where, "appending") from error
            writer.pending = False
            return place

    def _writer_for(self, batch: Batch, schema: Schema, begin: Callable[[int], None] | None) -> SegmentWriter:
        writer = self.writer
        if writer is not None and self._names.issuperset(batch.values) and writer.fits(batch):
            return writer
        if writer is not None:
            self._end_full(writer)
        return self._roll(batch, schema, begin)

    def _end_full(self, writer: SegmentWriter) -> None:
        """Finish the current segment, with everything in it safe.

        Where no append waits for the disk, this one does not, either: a thread syncs the segment and ends it.
        """
        if self.durability == "process":
            self._end_last()
            self._rows[writer.ordinal] = writer.rows
            self._ending, self.writer = writer, None
            thread = threading.Thread(target=writer.finish, name="trajectory-end")
            with suppress(RuntimeError):  # no thread can be started now: who ends the next segment ends this one
                thread.start()
            return
        with fs.explained(self._catalog.medium.where, "syncing"):
            try:
                writer.wait_durable(writer.records)
            finally:
                self._end_writer(writer)

    def _roll(self, batch: Batch, schema: Schema, begin: Callable[[int], None] | None) -> SegmentWriter:
        required = {c.name for c in schema if not c.optional} if self.kind == "rows" else set[str]()
        self._names |= required.union(batch.values)
        columns = schema.only(self._names)
        fitted = batch.fitted(columns)
        longest = max((int(lengths.sum()) for lengths in fitted.lengths.values()), default=0)
        if not self.num_segments:
            self._first = max(FIRST_ROWS, FIRST * batch.n_rows), max(FIRST_ELEMENTS, FIRST * longest)
        most = self._root.largest
        has_rows = self.kind == "rows"
        rows = self._capacity(self._root.segment_rows if has_rows else None, self._first[0], most[0])
        elements = self._capacity(self._root.segment_elements if has_rows else None, self._first[1], most[1])
        meta = SegmentMeta(
            schema=columns,
            rows_cap=max(rows, batch.n_rows),
            elems_cap={axis: max(elements, int(fitted.lengths[axis].sum()), 1) for axis in columns.axes},
            kind=self.kind,
            durability=self.durability,
            preallocated=self._root.preallocate and has_rows,
            store=self._root.uuid,
        )
        medium = self._catalog.medium
        try:
            writer = medium.make_segment(meta, self._claim, self._catalog.state.next_ordinal)
        except UnsyncedError as error:  # the segment may be there, but not these rows
            raise fs.failed(error, medium.where, "creating a segment") from error
        self.num_segments += 1
        try:
            self._catalog.refresh()
            if begin is not None:
                begin(writer.ordinal)
        except BaseException:
            self._end_writer(writer)
            raise
        self.writer = writer  # only now: nothing is committed to a segment that `begin` was not called for
        return writer

    def _claim(self, ordinal: int, salt: int) -> int:
        """Enter a segment in the catalog, with the row count of the previous one."""

        def step(state: State) -> State | None:
            if ordinal < state.next_ordinal:
                return None
            return self._noted(state).with_entry(Entry(ordinal, self.kind, salt))

        journal = self._catalog.journal
        if journal.change(step, self._catalog.newest_ns) is None:
            return journal.state.next_ordinal
        self._rows.clear()
        return ordinal

    def _noted(self, state: State) -> State:
        """Return a state that has the row counts of the segments that were ended."""
        ended = [e for e in state.entries if e.ordinal in self._rows and not e.merged]
        for entry in ended:
            state = state.with_entry(replace(entry, rows=self._rows[entry.ordinal]))
        return state

    def _capacity(self, option: int | None, first: int, largest: int) -> int:
        return option if option is not None else min(first << (GROWTH * self.num_segments), largest)

    def _end_writer(self, writer: SegmentWriter) -> None:
        """End a segment after the last commit that its log holds; after an error this overwrites a torn record."""
        writer.finish()
        self._rows[writer.ordinal] = writer.rows
        if self.writer is writer:
            self.writer = None

    def _end_last(self) -> None:
        """Wait until the segment before is ended, or end it: its thread may not have begun."""
        if self._ending is not None:
            self._ending.finish()
            self._ending = None

    def _leave_parent(self) -> None:
        """After a fork: close the parent's files and leave its segments alone."""
        if self._pid == os.getpid():
            return
        for writer in (self._ending, self.writer):
            if writer is not None:
                writer.abandon()
        self._ending = self.writer = None
        self._pid = os.getpid()

    def close(self) -> None:
        """Finish the current segment."""
        with self._lock:
            self._leave_parent()
            self._end_last()
            writer = self.writer
            if writer is not None:
                try:
                    self._end_writer(writer)
                except WriteFailedError:  # whether its last commit is there is not known: upkeep finds out
                    writer.abandon()
                    self.writer = None
            if self._rows:
                self._note_rows()

    def _note_rows(self) -> None:
        """Enter the row count of the last segment in the catalog: if an older copy of it is restored, that is known."""

        def step(state: State) -> State | None:
            after = self._noted(state)
            return None if after is state else after

        try:
            self._catalog.journal.change(step, self._catalog.newest_ns)
        except StoreError:
            return
        self._rows.clear()
