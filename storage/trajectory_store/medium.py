"""What a medium gives to the store: how the bytes of segments are written, read and removed. The rest is shared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trajectory_store.batch import Batch
from trajectory_store.bucket import Bucket
from trajectory_store.errors import StoreError
from trajectory_store.format import SegmentMeta
from trajectory_store.journal import CATALOG, Entry, State
from trajectory_store.root import KEY, Root, catalog_json
from trajectory_store.segment import Rows, Segment
from trajectory_store.verify import VerifyReport


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
        whole_segments: segments are reserved or held as a whole, so they stay smaller.
    """

    bucket: Bucket
    where: str
    keeps_arrays = False
    complete = True
    whole_segments = False

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
        return not segment.is_live()

    def fence(self, segment: Segment) -> None:
        """See to it that nobody appends to a segment any more; where locks die with their holders, that is so."""
        self.seal(segment)

    def fresh(self) -> Medium:
        """The same place for a second reader in this process, with nothing shared that one could disturb."""
        return self

    def forget(self, segment: Segment) -> None:  # noqa: B027 - most media keep nothing
        """Give back what is kept for reading a segment that left."""

    def close(self) -> None:  # noqa: B027 - most media keep nothing
        """Give back files and memory."""
