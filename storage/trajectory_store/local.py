"""Following a store on a local disk: new segments, new commits, removals."""

from __future__ import annotations

import os
from pathlib import Path

from trajectory_store import fs
from trajectory_store.catalog import Catalog
from trajectory_store.errors import StoreError
from trajectory_store.maps import Io, open_file
from trajectory_store.record import RECORD_SIZE, Log, Record, pack
from trajectory_store.segment import SegmentReader
from trajectory_store.writer import list_ordinals, segment_name

REMOVED = "removed"
REMOVED_CAP = 1 << 18
KIND_REMOVED = 3


def removed_path(root: Path) -> Path:
    """The file with the records of removed segments."""
    return root / REMOVED / "c" / "0" / "0"


class LocalCatalog(Catalog):
    """A reader's view of a store's folder.

    Args:
        root: the folder.
        salt: the salt of the store.
        io: how files are read.
        writable: mutable columns will be changed through it.
        warn: say so when a segment cannot be opened.
    """

    def __init__(self, root: Path, salt: int, *, io: Io = "mmap", writable: bool = False, warn: bool = True) -> None:
        super().__init__(root, warn=warn)
        self._io: Io = io
        self.keeps_arrays = io == "mmap"
        fs.HOLDERS.add(self)
        self._writable = writable
        self._salt = salt
        self._removed_seen = 0
        self._removed = Log(open_file(removed_path(root), REMOVED_CAP * RECORD_SIZE, io), salt)
        self._relist()

    def _follow(self) -> None:
        if not self._removed.is_blank(self._removed_seen):
            self._relist()
        else:
            while (self.root / segment_name(self._next)).exists():
                self._open(self._next)
                self._next += 1
        for segment in (*self.segments.values(), *self.patches.values()):
            if segment.refresh():
                self._grew(segment)

    def refresh_segment(self, ordinal: int) -> None:
        """Take in the new commits of one segment: the cheap path after an own append."""
        with self._lock:
            while self._next <= ordinal:
                self._open(self._next)
                self._next += 1
            segment = self.segments.get(ordinal) or self.patches.get(ordinal)
            if segment is not None and segment.refresh():
                self._grew(segment)

    def _relist(self) -> None:
        self._removed_seen, _ = self._removed.find_end(self._removed_seen)
        if self._removed_seen:
            last = self._removed.get(self._removed_seen - 1)
            if last is not None:
                self.evicted_rows = max(self.evicted_rows, last.elems_end)
        present = list_ordinals(self.root)
        known = set(present)
        for gone in [o for o in (*self.segments, *self.patches) if o not in known]:
            self._forget(gone)
        for ordinal in present:
            if ordinal not in self.segments and ordinal not in self.patches:
                self._open(ordinal)
        self._next = max(self._next, present[-1] + 1 if present else 0)

    def _open(self, ordinal: int) -> None:
        if ordinal in self.moved:
            return
        folder = self.root / segment_name(ordinal)
        try:
            segment = SegmentReader(folder, ordinal, io=self._io, writable=self._writable)
        except FileNotFoundError:
            return
        except StoreError as error:
            self._note_problem(ordinal, error)
            return
        self._add(segment)

    def count_removals(self) -> int:
        """How many removals were recorded so far."""
        return self._removed.find_end(self._removed_seen)[0]

    def note_removed(self, ordinal: int, rows: int, time_ns: int) -> None:
        """Record that a segment was removed; call with the store's lock held.

        Args:
            ordinal: the segment.
            rows: rows that are gone for good (0 where they moved to another segment).
            time_ns: now.
        """
        end, _ = self._removed.find_end(self._removed_seen)
        last = self._removed.get(end - 1) if end else None
        total = (last.elems_end if last is not None else 0) + rows
        record = Record(end, time_ns, rows, ordinal, total, KIND_REMOVED, 0, 0)
        fd = fs.open_fd(removed_path(self.root), os.O_WRONLY)
        try:
            fs.pwrite(fd, pack(record, self._salt), end * RECORD_SIZE)
        finally:
            os.close(fd)

    def removed_ordinals(self) -> set[int]:
        """The segments that were removed since the store was made."""
        end, _ = self._removed.find_end(self._removed_seen)
        return {int(o) for o in self._removed.table(end)["n_rows"]}
