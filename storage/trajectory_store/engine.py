"""What a backend gives to the store, and the memory-mapped backend."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Protocol

from trajectory_store import fs
from trajectory_store.batch import Batch
from trajectory_store.catalog import Catalog
from trajectory_store.format import TEMPORARY, Kind
from trajectory_store.local import LocalCatalog
from trajectory_store.maps import Io, choose
from trajectory_store.root import RootMeta
from trajectory_store.schema import Schema
from trajectory_store.upkeep import CompactReport, compact, evict, sweep
from trajectory_store.verify import VerifyReport, leftovers, verify_segments
from trajectory_store.writer import Durability, SegmentStream


class Stream(Protocol):
    """Where one process appends."""

    ordinal: int

    def append(self, batch: Batch, time_ns: int | None = None) -> tuple[int, int]:
        """Commit rows; returns the ordinal of their segment and the first row in it."""
        ...

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        ...

    def close(self) -> None:
        """Finish the current segment."""
        ...


class Engine(Protocol):
    """A backend."""

    @property
    def catalog(self) -> Catalog:
        """What this process sees."""
        ...

    def stream(self, schema: Schema, kind: Kind) -> Stream:
        """Return a new stream of segments for this process."""
        ...

    def evict(self) -> int:
        """Remove segments beyond the limits of the store."""
        ...

    def compact(self, schema: Schema) -> CompactReport:
        """Merge finished segments."""
        ...

    def verify(self) -> VerifyReport:
        """Recompute every checksum."""
        ...

    def clean_up(self) -> None:
        """Remove what killed processes left behind."""
        ...

    def close(self) -> None:
        """Let go of files and memory."""
        ...


class MemmapEngine:
    """Raw segments on a local disk.

    Args:
        path: the folder.
        root: what its zarr.json says.
        durability: what an append of this process waits for.
        writable: whether this process changes the store.
        io: how files are read; None chooses by the file system.
    """

    def __init__(self, path: Path, root: RootMeta, durability: Durability, *, writable: bool, io: Io | None) -> None:
        self._path = path
        self._root = root
        self._durability: Durability = durability
        self.io: Io = choose(path) if io is None else io
        self._catalog = LocalCatalog(path, root.salt, io=self.io, writable=writable)

    @property
    def catalog(self) -> Catalog:
        """What this process sees."""
        return self._catalog

    def stream(self, schema: Schema, kind: Kind) -> SegmentStream:
        """Return a new stream of segments for this process."""
        root, own = self._root, kind == "rows"
        return SegmentStream(
            self._path,
            schema,
            self._catalog.count_removals,
            kind,
            self._durability,
            segment_rows=root.segment_rows if own else None,
            segment_elements=root.segment_elements if own else None,
            preallocate=root.preallocate and own,
        )

    def evict(self) -> int:
        """Remove segments beyond the limits of the store."""
        return evict(self._catalog, self._root)

    def compact(self, schema: Schema) -> CompactReport:
        """Merge finished segments."""
        return compact(self._catalog, schema)

    def verify(self) -> VerifyReport:
        """Recompute every checksum of what is on the disk now."""
        with closing(LocalCatalog(self._path, self._root.salt, io=self.io, warn=False)) as fresh:
            segments = [*fresh.segments.values(), *fresh.patches.values()]
            return verify_segments(self._path, segments, list(fresh.problems))

    def clean_up(self) -> None:
        """Remove half-made segments, and finish removals."""
        for folder in leftovers(self._path, TEMPORARY):
            fs.remove_tree(folder)
        sweep(self._catalog)

    def close(self) -> None:
        """Drop the maps."""
        self._catalog.close()
