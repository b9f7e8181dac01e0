"""Writing: a process appends commits to segments of its own, and begins a new segment when one is full."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from trajectory_store import fork_safety, fs
from trajectory_store.backend import SealedError, SegmentWriter
from trajectory_store.batch import Batch
from trajectory_store.catalog_log import Entry, State
from trajectory_store.errors import StoreError, UnsyncedError
from trajectory_store.format import Durability, Kind, SegmentMeta, time_after
from trajectory_store.root import Root
from trajectory_store.schema import Schema

if TYPE_CHECKING:
    from trajectory_store.catalog import Catalog

GROWTH = 4
"""Each segment of a process is `2 ** GROWTH` times the size of the one before, up to a maximum."""

FIRST = 4
"""Batches that fit the first segment of a process: many processes that write little must take little space."""

FIRST_ROWS = 64
FIRST_ELEMENTS = 1 << 12


class Stream:
    """The segments of one kind that this process writes, one after another."""

    def __init__(self, catalog: Catalog, root: Root, kind: Kind, durability: Durability) -> None:
        self._catalog = catalog
        self._root = root
        self.kind: Kind = kind
        self.durability: Durability = durability
        self.made = 0
        """The number of segments that were begun."""
        self._first: tuple[int, int] = (0, 0)
        self._names: frozenset[str] = frozenset()
        self._writer: SegmentWriter | None = None
        self._ending: tuple[threading.Thread, SegmentWriter] | None = None
        self._finished: tuple[int, int] | None = None
        self._lock = threading.RLock()
        fork_safety.guard(self, 0, self._lock)
        self._pid = os.getpid()

    @property
    def ordinal(self) -> int | None:
        """The ordinal of the current segment, if there is one."""
        return None if self._writer is None else self._writer.ordinal

    def append(self, batch: Batch, schema: Schema, begin: Callable[[int], None] | None = None) -> tuple[int, int]:
        """Commit a batch of one row or more."""
        with self._lock:
            writer, first = (
                (None, -1) if self._writer is None or self._writer.pending is None else self._after_pending(batch)
            )
            while writer is None:
                writer = self._writer_for(batch, schema, begin)
                # After every commit that this process has seen, whatever the clock says.
                now = time_after(self._catalog.newest_ns)
                try:
                    first = writer.commit(batch.fitted(writer.meta.schema), now, self._catalog.state.number)
                except SealedError:  # another process ended the segment: the rows go to a new one
                    self._writer = writer = None
                except OSError as error:
                    if writer.pending is None:
                        self._give_up()
                    if isinstance(error, StoreError):
                        raise
                    raise fs.failed(error, self._catalog.medium.where, "appending") from error
            records = writer.records
        try:
            writer.wait_durable(records)
        except OSError as error:
            with self._lock:
                if self._writer is writer:
                    self._give_up()
            raise fs.unsynced(error, self._catalog.medium.where) from error
        self._catalog.medium.bucket.still_here()  # else the rows are in a folder that nobody reads
        return writer.ordinal, first

    def _after_pending(self, batch: Batch) -> tuple[SegmentWriter | None, int]:
        """Find out about the pending commit; return its writer and first row if it holds this batch, else None, -1."""
        writer, first = self._writer, None
        if writer is not None:
            try:
                first = writer.resolve(batch)
            except SealedError:
                self._writer = None
        return (None, -1) if first is None else (writer, first)

    def _writer_for(self, batch: Batch, schema: Schema, begin: Callable[[int], None] | None) -> SegmentWriter:
        if self._pid != os.getpid():
            self._drop()
            self._pid = os.getpid()
        writer = self._writer
        if writer is not None and self._names.issuperset(batch.values) and writer.has_room(batch):
            return writer
        self._end_segment()
        return self._roll(batch, schema, begin)

    def _end_segment(self) -> None:
        """Finish the current segment, with everything in it safe.

        Where no append waits for the disk, this one does not, either: a thread syncs the segment and ends it.
        """
        writer = self._writer
        if writer is None:
            return
        if self.durability == "process":
            self._join()
            thread = threading.Thread(target=writer.finish, name="trajectory-end")
            self._ending = thread, writer
            thread.start()
            self._finished, self._writer = (writer.ordinal, writer.rows), None
            return
        with fs.explained(self._catalog.medium.where, "syncing"):
            try:
                writer.wait_durable(writer.records)
            finally:
                self._give_up()

    def _roll(self, batch: Batch, schema: Schema, begin: Callable[[int], None] | None) -> SegmentWriter:
        required = {c.name for c in schema if not c.optional} if self.kind == "rows" else set[str]()
        self._names |= required.union(batch.values)
        columns = schema.only(self._names)
        fitted = batch.fitted(columns)
        longest = max((int(lengths.sum()) for lengths in fitted.lengths.values()), default=0)
        if not self.made:
            self._first = max(FIRST_ROWS, FIRST * batch.n_rows), max(FIRST_ELEMENTS, FIRST * longest)
        most = self._root.largest
        own = self.kind == "rows"
        rows = self._capacity(self._root.segment_rows if own else None, self._first[0], most[0])
        elements = self._capacity(self._root.segment_elements if own else None, self._first[1], most[1])
        meta = SegmentMeta(
            schema=columns,
            rows_cap=max(rows, batch.n_rows),
            elems_cap={axis: max(elements, int(fitted.lengths[axis].sum()), 1) for axis in columns.axes},
            kind=self.kind,
            durability=self.durability,
            preallocated=self._root.preallocate and own,
            store=self._root.uuid,
        )
        medium = self._catalog.medium
        try:
            writer = medium.make_segment(meta, self._claim, self._catalog.state.next_ordinal)
        except UnsyncedError as error:  # the segment may be there, but not these rows
            raise fs.failed(error, medium.where, "beginning a segment") from error
        self._writer = writer
        self.made += 1
        try:
            self._catalog.refresh()
            if begin is not None:
                begin(writer.ordinal)
        except BaseException:
            self._give_up()
            raise
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
        self._finished = None
        return ordinal

    def _noted(self, state: State) -> State:
        if self._finished is None:
            return state
        ordinal, rows = self._finished
        for entry in state.entries:
            if entry.ordinal == ordinal and not entry.merged:
                return state.with_entry(replace(entry, rows=rows))
        return state

    def _capacity(self, option: int | None, first: int, largest: int) -> int:
        return option if option is not None else min(first << (GROWTH * self.made), largest)

    def _give_up(self) -> None:
        """End the segment after its last good record; after an error this overwrites a torn record."""
        if self._writer is not None:
            self._writer.finish()
            self._finished = self._writer.ordinal, self._writer.rows
            self._writer = None

    def _join(self) -> None:
        """Wait until the segment before is ended."""
        if self._ending is not None:
            self._ending[0].join()
            self._ending = None

    def _drop(self) -> None:
        """After a fork: close the parent's files and leave its segments alone."""
        if self._ending is not None:
            self._ending[1].abandon()
            self._ending = None
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None

    def close(self) -> None:
        """Finish the current segment."""
        with self._lock:
            if self._pid != os.getpid():
                self._drop()
                return
            self._join()
            self._give_up()
            if self._finished is not None:
                self._note_rows()

    def _note_rows(self) -> None:
        """Enter the row count of the last segment in the catalog: if an older copy of it is put back, that is known."""

        def step(state: State) -> State | None:
            after = self._noted(state)
            return None if after is state else after

        try:
            self._catalog.journal.change(step, self._catalog.newest_ns)
        except StoreError:
            return
        self._finished = None
