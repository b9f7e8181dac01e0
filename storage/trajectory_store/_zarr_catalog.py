"""Following a store of the zarr backend: new commits, new segments and removals, from their small metadata objects."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trajectory_store._remote import Remote
from trajectory_store._zarr_commit import Commit, commit_key
from trajectory_store._zarr_read import Cache, RemoteSegment
from trajectory_store.catalog import Address, Catalog
from trajectory_store.errors import StoreError
from trajectory_store.format import read_attributes
from trajectory_store.ragged import Int64Array
from trajectory_store.segment import SegmentReader
from trajectory_store.writer import segment_name

REMOVED = "removed"
WIDEST = 64


def _wider(width: int, found: int) -> int:
    """How many objects to probe for after a wave of `width` of which `found` were there."""
    return min(4 * width, WIDEST) if found >= width else 1


class RemoteCatalog(Catalog):
    """A reader's view of a store in an object store.

    Args:
        remote: the object store.
        cache: where fetched columns go.
        warn: say so when a segment cannot be opened.
    """

    mutable_in_place = False

    def __init__(self, remote: Remote, cache: Cache, *, warn: bool = True) -> None:
        super().__init__(Path(remote.where), warn=warn)
        self._remote = remote
        self._cache = cache
        self._removals = 0
        self._gone: set[int] = set()
        self._follow(width=16)

    def locate(self, ids: Int64Array) -> Address:
        """Find rows, and note what has to be fetched for them."""
        found = super().locate(ids)
        ordinals, rows = found
        if len(ids):
            first = int(ordinals[0])
            if bool((ordinals == first).all()):
                self._want(first, rows)
            else:
                for ordinal in np.unique(ordinals).tolist():
                    self._want(ordinal, rows[ordinals == ordinal])
        return found

    def _want(self, ordinal: int, rows: Int64Array) -> None:
        segment = self.segments[ordinal]
        if isinstance(segment, RemoteSegment):
            segment.want(rows)

    def _follow(self, width: int = 1) -> None:
        """Probe for the next objects of everything that can grow; one round trip where there is no news.

        Where a whole wave was there, the next one is larger; elsewhere one object tells whether more came meanwhile.
        """
        removals = segments = width
        widths: dict[int, int] = {}
        news = True
        while news:
            ends = [s for s in (*self.segments.values(), *self.patches.values()) if not s.finished]
            keys = [f"{REMOVED}/{self._removals + i:08d}/zarr.json" for i in range(removals)]
            keys += [f"{segment_name(self._next + i)}/zarr.json" for i in range(segments)]
            for s in ends:
                span = range(s.records, s.records + widths.setdefault(s.ordinal, width))
                keys += [f"{commit_key(s.ordinal, seq)}/zarr.json" for seq in span]
            found = self._remote.get_many(keys)
            before = (self._removals, self._next)
            news = self._take_removals(found[:removals])
            news |= self._take_segments(found[removals : removals + segments])
            at = removals + segments
            for s in ends:
                size, known = widths[s.ordinal], s.records
                news |= self._take_commits(s, found[at : at + size])
                widths[s.ordinal] = _wider(size, s.records - known)
                at += size
            removals = _wider(removals, self._removals - before[0])
            segments = _wider(segments, self._next - before[1])

    def _take_removals(self, found: list[bytes | None]) -> bool:
        news = False
        for raw in found:
            if raw is None:
                break
            notice = read_attributes(raw, Path(REMOVED), "removal")
            self._removals += 1
            self.evicted_rows = int(notice["total"])
            ordinal = int(notice["ordinal"])
            self._gone.add(ordinal)
            segment = self.segments.get(ordinal) or self.patches.get(ordinal)
            if isinstance(segment, RemoteSegment):
                self._cache.forget(segment)
            self._forget(ordinal)
            news = True
        return news

    def _take_segments(self, found: list[bytes | None]) -> bool:
        last = max((i for i, raw in enumerate(found) if raw is not None), default=-1)
        ahead = [o for o in self._gone if o >= self._next]
        known = max([self._next + last, *ahead])
        if known < self._next:
            return False
        for raw in found[: last + 1]:
            known_here = self._next in self.segments or self._next in self.patches
            if raw is not None and self._next not in self._gone and not known_here:
                self._take_segment(self._next, raw)
            self._next += 1
        self._next = max(self._next, known + 1)
        return True

    def _take_segment(self, ordinal: int, raw: bytes) -> None:
        try:
            segment = RemoteSegment(self._remote, ordinal, raw, self._cache)
        except StoreError as error:
            self._note_problem(ordinal, error)
            return
        if ordinal not in self.moved:
            self._add(segment)

    def _take_commits(self, segment: SegmentReader, found: list[bytes | None]) -> bool:
        if not isinstance(segment, RemoteSegment):
            return False
        news = False
        for raw in found:
            if raw is None or segment.finished:
                break
            try:
                commit = Commit.from_json(raw, f"{commit_key(segment.ordinal, segment.records)}/zarr.json")
            except StoreError as error:
                self._note_problem(segment.ordinal, error)
                segment.finished = True
                break
            if segment.add(commit):
                self._grew(segment)
            news = True
        return news

    def refresh_segment(self, ordinal: int) -> None:
        """After an own append: the stream hands its commit in, so there is nothing to fetch."""

    def own_segment(self, ordinal: int, raw: bytes) -> None:
        """Take in a segment that this process made."""
        with self._lock:
            if ordinal not in self.segments and ordinal not in self.patches:
                self._take_segment(ordinal, raw)
                if ordinal == self._next:
                    self._next += 1

    def own_commit(self, ordinal: int, commit: Commit) -> None:
        """Take in a commit that this process made."""
        with self._lock:
            segment = self.segments.get(ordinal) or self.patches.get(ordinal)
            if isinstance(segment, RemoteSegment) and segment.records == commit.seq and segment.add(commit):
                self._grew(segment)

    @property
    def gone(self) -> set[int]:
        """The segments that were removed."""
        return self._gone

    @property
    def removals(self) -> int:
        """How many removals this reader knows."""
        return self._removals
