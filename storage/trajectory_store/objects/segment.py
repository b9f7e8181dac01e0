"""Reading a segment whose commits are objects: its columns are fetched into files laid out like a local segment.

Sampling reads maps of these files, so once its data is fetched, an object store is read as fast as a local disk.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from trajectory_store import fork_safety, fs
from trajectory_store.backend import Gap, Part, Rows, Segment
from trajectory_store.bucket import Bucket
from trajectory_store.catalog_log import Entry
from trajectory_store.errors import CorruptionError, ReadFailedError, SegmentGoneError, StoreError
from trajectory_store.file_access import PreadBytes, open_file
from trajectory_store.format import (
    KEY,
    RECORD_DTYPE,
    TARGET,
    ArraySpec,
    SegmentMeta,
    blocks_of,
    crc32c,
    from_hex,
    offsets_name,
    page_elements,
)
from trajectory_store.objects.archive import (
    BLOCK,
    Commit,
    NeedMore,
    commit_key,
    decode,
    directory,
    entry_name,
    read_commit,
)
from trajectory_store.objects.sharded import CHECKS, PAGE, Layout, layout_of, pages, read_chunks, unpacked
from trajectory_store.ragged import Int64Array, distinct, ranges_of
from trajectory_store.schema import Column

ABANDONED_AFTER_S = 3600.0
FETCHED = 64
"""Maximum number of objects that are requested, or kept in memory, at the same time."""
SMALL = 1 << 14
"""A commit of up to this many bytes is read with all its arrays, because a request for each array takes longer."""
WHOLE = 1 << 40
"""More bytes than any object has."""


Places = dict[str, tuple[int, int]]
Crcs = Mapping[str, "int | str"]
T = TypeVar("T")


class Brief(NamedTuple):
    """The part of a commit's record that a reader keeps; a commit begins where the one before ends."""

    n_rows: int
    rows_end: int
    time_ns: int
    ends: tuple[int, ...]


def brief_of(commit: Commit) -> Brief:
    """Return the part of a commit's record that is kept."""
    return Brief(commit.n_rows, commit.rows_end, commit.time_ns, tuple(commit.ends.values()))


def _rows_end(commit: Brief) -> int:
    return commit.rows_end


def _grows(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(before, after, strict=True))


class Cache:
    """Files of fetched columns, within a budget."""

    def __init__(self, parent: str | os.PathLike[str] | None, max_bytes: int) -> None:
        self._parent = tempfile.gettempdir() if parent is None else parent
        self._max_bytes = max_bytes
        self.lock = threading.RLock()
        """Held while a column is fetched and until its file is open, so that it is not evicted in between."""
        fork_safety.guard(self, 2, self.lock)
        self._used: dict[tuple[ObjectSegment, str], int] = {}
        self.begin()

    def begin(self) -> None:
        """Start empty with a new folder; also after a fork, because the files are the parent's."""
        for segment, name in self._used:
            segment.forget(name)
        self._used.clear()
        self._bytes = 0
        self.folder = Path(self._parent, f"trajectory-store-{fs.token(8)}")
        """Created with its first file."""
        self.remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def add(self, segment: ObjectSegment, name: str, size: int) -> None:
        """Note a use, and the bytes that were fetched."""
        self._used[segment, name] = self._used.pop((segment, name), 0) + size
        self._bytes += size

    def use(self, segment: ObjectSegment, name: str) -> None:
        """Note a use, and make room."""
        self.add(segment, name, 0)
        for key in list(self._used):
            if self._bytes <= self._max_bytes or key == (segment, name):
                break
            self._bytes -= self._used.pop(key)
            key[0].drop(key[1])

    def forget(self, segment: ObjectSegment) -> None:
        """Drop everything of a segment that is gone."""
        for key in [k for k in self._used if k[0] is segment]:
            self._bytes -= self._used.pop(key)
            segment.drop(key[1])


class ObjectSegment(Segment):
    """A segment in a bucket."""

    def __init__(
        self, bucket: Bucket, cache: Cache, entry: Entry, meta: SegmentMeta, sealed: Mapping[str, Any] | None
    ) -> None:
        super().__init__(entry, meta)
        self.bucket = bucket
        self.promised = entry.rows
        self._cache = cache
        self._files_of = f"{entry.name}-{entry.salt:08x}"
        self._axes = tuple(meta.schema.axes)
        self.history: list[Brief] = []
        self.sealed = sealed
        self.closed = sealed is not None
        """Whether the writer had synced everything when it ended the segment."""
        self._reads_objects = bucket.costly or meta.kind == "update"
        """Whether objects are read completely; an update with any damage is not applied."""
        self._edges: Int64Array = np.empty(0, np.int64)
        self._fetched: dict[str, npt.NDArray[np.bool_]] = {}
        self._complete: set[str] = set()
        """The arrays of a merged segment that are completely in cached files."""
        self._indexes: dict[str, Int64Array] = {}
        self._contents_by_seq: dict[int, tuple[Places, Crcs]] = {}
        self._pages: dict[tuple[str, int], Int64Array] = {}
        self.got: dict[str, bytes] = {}
        """Objects that were fetched but not yet used."""
        if sealed is not None:
            ends = tuple(int(sealed["ends"][axis]) for axis in self._axes)
            rows = int(sealed["rows"])
            self._add(Brief(rows, rows, 0, ends))
            self.finished = True
            self._hide_others()

    # Commits

    @property
    def _last(self) -> Brief:
        return self.history[-1] if self.history else Brief(0, 0, 0, self.starts(0))

    def starts(self, seq: int) -> tuple[int, ...]:
        """Return the elements per axis before a commit."""
        return self.history[seq - 1].ends if seq else (0,) * len(self._axes)

    def add(self, commit: Commit) -> bool:
        """Add the next commit, and the new ones of its block that it records; return False if they contradict."""
        chain, first_new = [self._last], self.records - commit.seq + len(commit.before)
        for n_rows, time_ns, *ends in commit.before[first_new:]:
            chain.append(Brief(n_rows, chain[-1].rows_end + n_rows, time_ns, tuple(ends)))
        begins = (chain[-1].rows_end + commit.n_rows, chain[-1].ends) == (
            commit.rows_end,
            tuple(commit.starts.values()),
        )
        chain.append(brief_of(commit))
        if not begins or not all(
            b.time_ns > a.time_ns and _grows(a.ends, b.ends) for a, b in itertools.pairwise(chain)
        ):
            self.leave_out(commit.seq, f"object {self.key(commit.seq)} is damaged: it contradicts the previous commits")
            return False
        for brief in chain[1:]:
            self._add(brief)
        self.finished |= commit.n_rows == 0
        self.closed |= commit.synced
        return True

    def pass_over(self, following: Commit) -> bool:
        """Exclude commits that are missing or unreadable: the one that follows records which rows they contained."""
        last, rows_end = self._last, following.rows_end - following.n_rows - sum(row[0] for row in following.before)
        starts = tuple(following.before[0][2:]) if following.before else tuple(following.starts.values())
        first = following.seq - len(following.before)
        if following.before or rows_end < last.rows_end or not _grows(last.ends, starts) or first < self.records:
            return False
        while self.records < first:
            seq = self.records
            self._add(Brief(rows_end - self.rows, rows_end, last.time_ns, starts))
            self.leave_out(seq, f"object {self.key(seq)} is missing")
        return self.add(following)

    def is_missing(self, seq: int) -> bool:
        """Return whether the object of a commit is not there, asked now."""
        return self.bucket.tails([self.key(seq)], [1])[0] is None

    def leave_out(self, seq: int, words: str) -> None:
        """Note a commit that is not served; the first reason stays."""
        earlier_gap = next((gap for gap in self.gaps if gap.seq == seq and not gap.array), None)
        brief = self.history[seq] if seq < len(self.history) else Brief(0, self.rows, 0, ())
        gap = Gap(seq, brief.rows_end - brief.n_rows, brief.rows_end, words if earlier_gap is None else earlier_gap.why)
        self.gaps = sorted([*(g for g in self.gaps if g is not earlier_gap), gap])

    def expect_rows(self, promised: int | None) -> None:
        """Exclude the rows that the catalog knows of and that no commit has."""
        if promised is not None and self.rows < promised <= self.meta.rows_cap:
            last = self._last
            earlier_gap = next((gap for gap in self.gaps if gap.seq == self.records), None)
            why = f"the commits from number {self.records} on are missing" if earlier_gap is None else earlier_gap.why
            self.gaps = [gap for gap in self.gaps if gap.seq != self.records]
            self.gaps.append(Gap(self.records, self.rows, promised, why))
            self._add(Brief(promised - self.rows, promised, last.time_ns, last.ends))
            self.finished = True

    def _add(self, brief: Brief) -> None:
        self.history.append(brief)
        self.records += 1
        self.rows, self.newest_ns = brief.rows_end, brief.time_ns

    @property
    def next_size(self) -> int:
        """How much of the next commit to request: all of it if values of the last one were read."""
        last = self.records - 1
        fetched = list(self._fetched.values()) if self._reads_objects and self.records else []
        return WHOLE if any(last < len(done) and done[last] for done in fetched) else self.bucket.tail

    def take_next(self, tail: tuple[bytes, int] | None) -> bool:
        """Add the next commit, if it is there; an object that was fetched whole is kept and not requested again."""
        key = self.key(self.records)
        commit = self.parse(self.records, tail)
        if commit is None or not self.add(commit):
            return False
        if tail is not None and len(tail[0]) == tail[1] and commit.n_rows and len(self.got) < FETCHED:
            self.got[key] = tail[0]
        return True

    def next_seqs(self, seqs: Sequence[int]) -> list[int]:
        """Return which of the existing commits to request: of a whole block only the last, which records all."""
        ends = {seq for seq in seqs if seq % BLOCK == BLOCK - 1} - self.lost_commits()
        new = (seq for seq in seqs if seq >= self.records)
        return sorted({end if (end := seq - seq % BLOCK + BLOCK - 1) in ends else seq for seq in new})

    def take(self, parsed_commits: Sequence[Commit | None]) -> None:
        """Add the commits that were found, up to the first gap."""
        commits = {c.seq: c for c in parsed_commits if c is not None}
        while not self.finished:
            n = self.records
            commit = commits.get(n - n % BLOCK + BLOCK - 1)
            if commit is None or commit.seq - len(commit.before) > n:
                commit = commits.get(n)
            if commit is None or not self.add(commit):
                break

    def key(self, seq: int) -> str:
        """Return the key of a commit's object."""
        return commit_key(self.name, seq)

    def parse(self, seq: int, object_end: tuple[bytes, int] | None) -> Commit | None:
        """Return the record at the end of an object, or None if the object is missing or damaged."""
        key = self.key(seq)
        try:
            commit = self._from_end(key, object_end, lambda tail, size: read_commit(tail, size, key, self.meta))
            if commit is None or self._is_named(commit, seq):
                return commit
            self.leave_out(seq, f"object {key} contains a different commit from the one that its name specifies")
        except StoreError as error:
            if isinstance(error, ReadFailedError):
                raise
            self.leave_out(seq, str(error).rstrip("."))
        return None

    def _is_named(self, commit: Commit, seq: int) -> bool:
        """Return whether an object contains the commit that its name states."""
        return (commit.ordinal, commit.seq, commit.salt) == (self.ordinal, seq, self.meta.salt)

    def _from_end(self, key: str, tail: tuple[bytes, int] | None, read: Callable[[bytes, int], T]) -> T | None:
        """Read something from the end of an object; request more of it where that is needed."""
        while tail is not None:
            try:
                return read(*tail)
            except NeedMore as more:
                tail = self.bucket.tails([key], [more.size])[0]
        return None

    def commits(self, start: int = 0) -> npt.NDArray[Any]:
        """Return the commits of rows from number `start` on, without those of `gaps`."""
        out = self.lost_commits()
        commits = [brief for seq, brief in enumerate(self.history[start:], start) if brief.n_rows and seq not in out]
        table = np.zeros(len(commits), RECORD_DTYPE)
        for name in ("time_ns", "rows_end", "n_rows"):
            table[name] = [getattr(commit, name) for commit in commits]
        return table

    def elements(self) -> dict[str, int]:
        """Return the number of elements in use per axis."""
        return dict(zip(self._axes, self._last.ends, strict=True))

    def is_live(self) -> bool:
        """Return whether a writer may still append: it holds its lock or, where there is none, has committed lately."""
        if self.finished:
            return False
        is_locked = self.bucket.is_locked(f"{self.name}/{KEY}")
        if is_locked is not None:
            return is_locked
        last = self.history[-1].time_ns if self.history else self.meta.created_ns
        return abs(time.time_ns() - last) < ABANDONED_AFTER_S * 1e9

    @property
    def may_be_torn(self) -> bool:
        """Whether the machine may have gone down after commits that did not wait for the disk."""
        waited = self.meta.durability != "process" or not self.bucket.can_tear
        return not (waited or self.closed or self.is_live())

    def disk_bytes(self) -> int:
        """Return the bytes of the values before compression."""
        return self.value_bytes()

    # Fetching

    def check_rows(self, rows: Rows, columns: Iterable[Column], *, flags: bool = True) -> bool:
        """Fetch columns of rows, or all updates: what is fetched is compared; return whether damage was found."""
        return self._look(rows, self.arrays_of(columns, flags=flags), self._fetch)

    def holds_row(self, row: int, arrays: Iterable[str], *, compared: bool) -> bool:
        """Return whether the values of a row were fetched: they are compared as they arrive."""
        if self.meta.kind == "update":
            return False
        with self._cache.lock:
            for name in arrays:
                fetched = self._fetched.get(name)
                if fetched is None or not self._is_fetched(name, row, fetched):
                    return False
                self._cache.use(self, name)
        return True

    def _is_fetched(self, name: str, row: int, fetched: npt.NDArray[np.bool_]) -> bool:
        if self.sealed is None:
            seq = bisect.bisect_right(self.history, row, key=_rows_end)
            return seq < len(fetched) and bool(fetched[seq])
        spec, size = self.specs[name], self.layouts[name].elements
        if spec.axis is None or spec.edges:
            return bool(fetched[row // size] and fetched[(row + spec.edges) // size])
        offsets = self._arrays.get(offsets_name(spec.axis))
        return offsets is not None and bool(fetched[offsets[row] // size : -(-offsets[row + 1] // size)].all())

    def find_damage(self, rows: Rows, names: Iterable[str]) -> bool:
        """Fetch arrays of rows, and skip what is gone; return whether damage was found that is not noted yet."""

        def fetch(name: str, rows: Rows) -> None:
            try:
                self._fetch(name, rows)
            except SegmentGoneError:
                for unit in self._missing(name, rows).tolist():
                    self._find_missing(name, unit)

        return self._look(rows, names, fetch)

    def _look(self, rows: Rows, names: Iterable[str], fetch: Callable[[str, Rows], None]) -> bool:
        with self._cache.lock:
            for name in sorted(names, key=lambda name: not self.specs[name].edges):  # where rows are follows from them
                fetch(name, rows)
        return len(self.gaps) > self.noted

    def _find_missing(self, name: str, unit: int) -> None:
        """Fetch a part of an array, or skip it if its object is gone."""
        try:
            if self.sealed is None:
                self._fetch_commits(name, [unit])
            else:
                self._fetch_chunks(name, np.array([unit]))
        except FileNotFoundError as error:
            self._file(name)
            if self.sealed is None:
                self.leave_out(unit, f"object {error} is missing")
            else:
                self._lose_chunk(name, unit, f"object {error} is missing")

    def _lose_chunk(self, name: str, chunk: int, why: str) -> None:
        """Exclude the rows with values in a chunk of an array of a merged segment; its values stay zeros."""
        self._have(name, chunk, 0)
        for first, end in self.rows_of_chunk(self.specs[name], chunk):
            self.add_gap(Gap(0, first, end, why, name))

    def rows_of_chunk(self, spec: ArraySpec, chunk: int) -> list[tuple[int, int]]:
        """Return the rows with values in a chunk of an array of a merged segment, as ranges."""
        size = self.layouts[spec.name].elements
        begin, stop = chunk * size, (chunk + 1) * size
        if spec.axis is None or spec.edges:
            return [(max(0, begin - spec.edges), min(stop, self.rows))]
        self._fetch(offsets_name(spec.axis), None)  # notes what is damaged among them, so that the next line does not
        edges = self.offsets(spec.axis)[: self.rows + 1]
        hit = (edges[:-1] < stop) & (edges[1:] > begin) & (edges[:-1] < edges[1:])
        for gap in self.gaps:
            if gap.array in ("", offsets_name(spec.axis)):
                hit[max(0, gap.first) : gap.end] = False
        return ranges_of(np.flatnonzero(hit))

    @functools.cached_property
    def layouts(self) -> dict[str, Layout]:
        """How each array of a merged segment is divided."""
        return {name: layout_of(spec, self.sealed) for name, spec in self.specs.items()}

    def _objects_of(self, name: str, units: Sequence[int]) -> list[str]:
        """Return the keys of the objects that hold parts of an array."""
        if self.sealed is None:
            return [self.key(seq) for seq in units]
        return self.layouts[name].shards(self.name, self.specs[name])

    def find_missing(self) -> bool:
        """Look for objects that are gone."""
        before = len(self.gaps)
        keys = set(self.bucket.keys(f"{self.name}/"))
        if self.sealed is None:
            for seq in range(self.records):
                if self.history[seq].n_rows and self.key(seq) not in keys and seq not in self.lost_commits():
                    self.leave_out(seq, f"object {self.key(seq)} is missing")
            return len(self.gaps) > before
        gone = [
            name for name, spec in self.specs.items() if not keys.issuperset(self.layouts[name].shards(self.name, spec))
        ]
        return self.find_damage(slice(0, self.rows), gone)

    @property
    def is_checked(self) -> bool:
        """Whether no update is left to fetch, or damaged."""
        return self.meta.kind == "rows" or not (self.gaps or len(self._missing(TARGET, None)))

    def missing(self, parts: Iterable[Part]) -> list[str]:
        """Return the keys of the objects of which all, or most, has to be fetched before some arrays can be read."""
        keys: dict[str, None] = {}
        if not self._reads_objects:
            parts = list(parts)
            parts = parts[:1] if self.sealed is None and 2 * len(parts) > len(self.specs) else []
        with self._cache.lock:
            for name, rows in parts:
                units = self._missing(name, rows).tolist()
                keys |= dict.fromkeys(self._objects_of(name, units) if units else ())
        return [key for key in keys if key not in self.got]

    def _objects(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return whole objects; those not fetched before are requested together."""
        new_keys = [key for key in keys if key not in self.got]
        new_objects = dict(zip(new_keys, self.bucket.get_many(new_keys), strict=True))
        out: dict[str, bytes] = {}
        for key in keys:
            raw = new_objects[key] if key in new_objects else self.got.pop(key)
            if raw is None:
                raise FileNotFoundError(key)
            out[key] = raw
        return out

    def raw(self, name: str, rows: Rows | None = None) -> memoryview | PreadBytes:
        """Return the bytes of an array, fetched as far as these rows need it; for updates, always all of it.

        Raises:
            CorruptionError: something that was fetched is damaged, and is in `gaps` now.
        """
        with self._cache.lock:
            before = len(self.gaps)
            self._fetch(name, rows)
            if len(self.gaps) > before:
                raise CorruptionError(f"{self.name}: {self.gaps[-1].why}.")
            self._cache.use(self, name)
            return super().raw(name)

    def _open(self, name: str) -> memoryview | PreadBytes:
        spec, path = self.specs[name], self._cached(name)
        try:
            return open_file(path, spec.capacity * spec.itemsize, "mmap")
        except OSError as error:
            raise fs.unreadable(error, path) from error

    def _file(self, name: str) -> Path:
        """Return the cached file of an array, laid out like the chunk of a local segment."""
        path = self._cached(name)
        if not path.exists():  # new, or the temporary folder was cleaned
            self.forget(name)
            os.makedirs(path.parent, 0o700, exist_ok=True)
            spec = self.specs[name]
            try:
                fs.create_sized(path, spec.capacity * spec.itemsize, preallocate=False)
            except OSError:
                with fs.tolerated():  # a file that is too short would be taken for a damaged one
                    fs.remove_file(path)
                raise
        return path

    def _cached(self, name: str) -> Path:
        return self._cache.folder / f"{self._files_of}.{name}"  # no subfolders: making and removing them takes longest

    def _fetch(self, name: str, rows: Rows | None) -> None:
        """Fetch the missing parts of an array that rows need."""
        if name in self._maps and (name in self._complete or not len(self._missing(name, rows))):
            return
        try:
            self._file(name)
            missing = self._missing(name, rows)
            if self.sealed is None:
                self._fetch_commits(name, missing.tolist())
            elif len(missing):
                self._fetch_chunks(name, missing)
        except FileNotFoundError as error:
            raise SegmentGoneError.of(f"object {error}", "was evicted or compacted before it was read") from None
        except OSError as error:
            if isinstance(error, StoreError) or fs.is_external(error):
                raise
            raise ReadFailedError(
                error.errno,
                f"caching {self.name}/{name} failed: {error.strerror}. Choose a cache_dir with free space, or a "
                "smaller cache_bytes",
                str(self._cache.folder),
            ) from error

    def _missing(self, name: str, rows: Rows | None) -> Int64Array:
        """Return the units with values of rows that are not in the cached file."""
        units = self._units(name, rows)
        return units[~self._done(name)[units]]

    def _units(self, name: str, rows: Rows | None) -> Int64Array:
        """Return the units that hold the values of rows: commits, or chunks of the array in a merged segment."""
        spec = self.specs[name]
        if self.meta.kind == "update" or (self.sealed is not None and self._reads_objects) or isinstance(rows, slice):
            rows = None  # few requests are better than few bytes
        if self.sealed is None:
            if len(self._edges) != len(self.history):
                self._edges = np.array([c.rows_end for c in self.history], np.int64)
            if rows is None:
                units = np.flatnonzero(np.diff(self._edges, prepend=0))
                return units[~np.isin(units, [*self.lost_commits()])] if self.gaps else units
            return np.array(distinct(self._edges.searchsorted(rows, side="right")), np.int64)
        size, count = self.layouts[name].elements, self.layouts[name].count(spec)
        if rows is None:
            return np.arange(count)
        if spec.axis is None or spec.edges:
            return np.array(distinct(np.concatenate([rows // size, (rows + spec.edges) // size])), np.int64)
        offsets = self.offsets(spec.axis, rows)
        starts, ends = offsets[rows], offsets[rows + 1]
        some = (starts >= 0) & (ends > starts) & (ends <= spec.capacity)  # those of damaged rows may be any
        edges = np.zeros(count + 1, np.int64)
        np.add.at(edges, starts[some] // size, 1)
        np.subtract.at(edges, (ends[some] - 1) // size + 1, 1)
        return np.flatnonzero(edges.cumsum()[:count])

    def _done(self, name: str) -> npt.NDArray[np.bool_]:
        """Return which units are in the cached file."""
        done = self._fetched.get(name)
        count = len(self.history) if self.sealed is None else self.layouts[name].count(self.specs[name])
        if done is None or len(done) < count:
            grown = np.zeros(max(64, 2 * count), bool)
            if done is not None:
                grown[: len(done)] = done
            done = self._fetched[name] = grown
        return done

    def _fetch_commits(self, name: str, seqs: Sequence[int]) -> None:
        whole = set(seqs) if self._reads_objects else {seq for seq in seqs if self._size(seq) <= SMALL}
        with self._files([*self.specs] if whole else [name]) as files:
            only = {name: files[name]}
            for first in range(0, len(seqs), FETCHED):
                part = seqs[first : first + FETCHED]
                objects = self._objects([self.key(seq) for seq in part if seq in whole])
                for seq in part:
                    self._land(seq, files if seq in whole else only, objects.get(self.key(seq)), name)

    def _size(self, seq: int) -> int:
        """Return the bytes of the values of a commit."""
        return sum(self.extent(spec, seq)[0] * spec.itemsize for spec in self.specs.values())

    def _fetch_chunks(self, name: str, chunks: Int64Array) -> None:
        item, size = self.specs[name].itemsize, self.layouts[name].elements
        lost: list[tuple[int, str]] = []
        landed, nbytes = list[int](), 0
        with self._files([name]) as files:
            waiting, at = list[npt.NDArray[np.uint8]](), 0

            def land() -> None:
                if waiting:
                    fs.pwrite(files[name], np.concatenate(waiting), at * size * item)
                waiting.clear()

            for chunk, values in self.chunks(name, chunks.tolist()):
                if isinstance(values, str):
                    lost.append((chunk, values))
                    continue
                if chunk != at + len(waiting) or len(waiting) == FETCHED:
                    land()
                    at = chunk
                waiting.append(values.view(np.uint8))
                landed.append(chunk)
                nbytes += values.nbytes
            land()
        done = self._done(name)
        done[landed] = True
        self._cache.add(self, name, nbytes)
        for chunk, why in lost:
            self._lose_chunk(name, chunk, why)
        if done[: self.layouts[name].count(self.specs[name])].all():
            self._complete.add(name)

    def _have(self, name: str, unit: int, size: int) -> None:
        self._done(name)[unit] = True
        self._cache.add(self, name, size)

    def chunks(self, name: str, chunks: Sequence[int]) -> Iterator[tuple[int, npt.NDArray[Any] | str]]:
        """Get some chunks of an array of a merged segment; of one that is damaged, the words for it."""
        spec, layout = self.specs[name], self.layouts[name]
        objects = self._objects(layout.shards(self.name, spec)) if self._reads_objects else {}
        expected = dict(zip(chunks, self._crcs(name, chunks, objects).tolist(), strict=True))
        for chunk, raw in read_chunks(self.bucket, objects, self.name, spec, layout, chunks, self._indexes):
            where = f"object {self.name}/{name}, chunk {chunk},"
            if layout.sums is None and crc32c(raw) != expected[chunk]:
                yield chunk, f"{where} is damaged: its bytes do not match their checksum"
                continue
            try:
                values = unpacked(raw, spec, layout, chunk, where)
            except CorruptionError as error:
                yield chunk, str(error).rstrip(".")
                continue
            wrong = layout.sums is not None and crc32c(values.view(np.uint8)) != expected[chunk]
            yield chunk, f"{where} is damaged: its values do not match their checksum" if wrong else values

    def _crcs(self, name: str, chunks: Sequence[int], objects: Mapping[str, bytes]) -> Int64Array:
        """Return the checksums of some chunks of an array."""
        sums = self.layouts[name].sums
        if sums is not None:
            return sums[chunks]
        for page in distinct(np.array(chunks, np.int64) // PAGE):
            if (name, page) not in self._pages:
                self._pages[name, page] = self._page(name, page, objects)
        return np.array([self._pages[name, chunk // PAGE][chunk % PAGE] for chunk in chunks], np.int64)

    def _page(self, name: str, page: int, objects: Mapping[str, bytes]) -> Int64Array:
        """Return a page of the checksums of an array; if it is damaged, computed again, which intact data allows."""
        spec, layout, sealed = self.specs[name], self.layouts[name], self.sealed or {}
        first, last = page * PAGE, min((page + 1) * PAGE, layout.count(spec))
        right = int(from_hex(sealed["checks"][name], pages(layout.count(spec)))[page])
        raw = self._stored_crcs(name, first, last)
        if crc32c(raw) != right:
            stored = read_chunks(self.bucket, objects, self.name, spec, layout, range(first, last), self._indexes)
            raw = np.array([crc32c(chunk) for _, chunk in stored], "<u4").tobytes()
        crcs = np.frombuffer(raw, "<u4").astype(np.int64)
        return crcs if crc32c(raw) == right else np.full(last - first, -1, np.int64)

    def has_checks(self, name: str) -> bool:
        """Return whether the stored checksums of the chunks of an array match theirs."""
        layout, sealed = self.layouts[name], self.sealed or {}
        if layout.sums is not None:
            return True
        count = layout.count(self.specs[name])
        right = from_hex(sealed["checks"][name], pages(count)).tolist()
        parts = (self._stored_crcs(name, first, min(first + PAGE, count)) for first in range(0, count, PAGE))
        return [crc32c(part) for part in parts] == right

    def _stored_crcs(self, name: str, first: int, last: int) -> bytes:
        """Return the stored checksums of some chunks of an array, as far as they exist."""
        key, before = f"{self.name}/{CHECKS}", 0
        for array_name, spec in self.specs.items():
            if array_name == name:
                break
            before += self.layouts[array_name].count(spec)
        try:
            return self.bucket.ranges(key, [(4 * (before + first), 4 * (before + last))])[0]
        except (FileNotFoundError, NotADirectoryError, CorruptionError):
            return b""

    @contextmanager
    def _files(self, names: Sequence[str]) -> Generator[Mapping[str, int]]:
        """Open the cached files of some arrays for writing."""
        files: dict[str, int] = {}
        try:
            for name in names:
                files[name] = fs.open_fd(self._file(name), os.O_RDWR)
            yield files
        finally:
            for fd in files.values():
                os.close(fd)

    def _land(self, seq: int, files: Mapping[str, int], raw: bytes | None, read_array: str) -> None:
        """Write the values of some arrays of a commit to their cached files, and exclude damaged rows.

        Of an array that was not asked for, and is damaged, nothing is noted: a read costs what it returns.
        """
        try:
            places, crcs = self._contents(seq, raw)
        except CorruptionError as error:
            self.leave_out(seq, str(error).rstrip("."))
            for name in files:
                self._have(name, seq, 0)
            return
        for name, fd in files.items():
            if self._done(name)[seq]:
                continue
            spec = self.specs[name]
            values, gaps = self.compared(seq, spec, places, crcs, raw)
            if gaps and name != read_array:
                continue
            for gap in gaps:
                self.add_gap(gap)
            if len(values):
                if spec.edges:  # in the cached file they count from the start of the segment
                    at = self._axes.index(spec.axis or "")
                    values = values + self.starts(seq)[at]
                    values[0], values[-1] = self.starts(seq)[at], self.history[seq].ends[at]  # others count from these
                fs.pwrite(fd, values.view(np.uint8), self.extent(spec, seq)[1] * spec.itemsize)
            self._have(name, seq, values.nbytes)

    def compared(
        self, seq: int, spec: ArraySpec, places: Places, crcs: Crcs, raw: bytes | None
    ) -> tuple[npt.NDArray[Any], list[Gap]]:
        """Return the values of an array of a commit, flat, and the rows that are damaged; request what is not given."""
        brief, name = self.history[seq], spec.name
        first, words = brief.rows_end - brief.n_rows, f"object {self.key(seq)} is damaged: a block of {spec.name}"
        count = self.extent(spec, seq)[0]
        whole = [Gap(seq, first, brief.rows_end, words, name)]
        try:
            values = self._values(seq, spec, places, raw)
            if isinstance(crc := crcs.get(name, -1), int):  # a commit of an older writer
                return values, [] if crc32c(values.view(np.uint8)) == crc else whole
            start, layout = self.extent(spec, seq)[1] + spec.edges, (spec.itemsize, page_elements(spec))
            blocks = blocks_of(self.meta, layout, start, start + count - spec.edges)
            inner = values[1:] if spec.edges else values
            right = from_hex(crc, blocks.end).tolist()
        except (CorruptionError, ValueError) as error:
            why = str(error).rstrip(".") if isinstance(error, CorruptionError) else words
            zeros = np.zeros(count * (spec.itemsize // spec.dtype.itemsize), spec.dtype)
            return zeros, [whole[0]._replace(why=why)]
        gaps, actual_crcs = list[Gap](), blocks.crcs(inner.view(np.uint8), spec.itemsize)
        for block in (i for i, (a, b) in enumerate(zip(actual_crcs, right, strict=True)) if a != b):
            begin, end = blocks.span(block, block)
            hit = self._rows_of_block(seq, spec, begin - start, end - start)
            gaps += [Gap(seq, first + begin, first + end, words, name) for begin, end in hit]
        if spec.edges and values[0]:
            gaps.append(Gap(seq, first, first + 1, words, name))
        return values, gaps

    def _rows_of_block(self, seq: int, spec: ArraySpec, begin: int, stop: int) -> list[tuple[int, int]]:
        """Return the rows of a commit with elements of a block of an array, as ranges."""
        rows = self.history[seq].n_rows
        if spec.axis is None or spec.edges:
            return [(begin, min(stop + spec.edges, rows))]  # where a row ends, the next one begins
        places, _ = self._contents(seq, None)
        try:
            offsets = self._values(seq, self.specs[offsets_name(spec.axis)], places, None)
        except CorruptionError:
            return [(0, rows)]
        inside = (offsets[:-1] < stop) & (offsets[1:] > begin) & (offsets[:-1] < offsets[1:])
        return ranges_of(np.flatnonzero(inside))

    def _values(self, seq: int, spec: ArraySpec, places: Places, raw: bytes | None) -> npt.NDArray[Any]:
        """Return the values of an array of a commit, flat; without the object, request that part."""
        key, size = self.key(seq), self.extent(spec, seq)[0] * spec.itemsize
        if not size:
            return np.empty(0, spec.dtype)
        place = places.get(entry_name(spec))
        if place is None:
            raise CorruptionError(f"object {key} is damaged: it lacks the array {spec.name}.")
        chunk = self.bucket.ranges(key, [place])[0] if raw is None else raw[slice(*place)]
        return decode(chunk, size, f"object {key}").view(spec.dtype)

    def _contents(self, seq: int, raw: bytes | None) -> tuple[Places, Crcs]:
        """Return where the arrays are in the object of a commit, and their checksums."""
        key = self.key(seq)

        def read(tail: bytes, size: int) -> tuple[Places, Crcs]:
            commit = read_commit(tail, size, key, self.meta)
            if not self._is_named(commit, seq):
                raise CorruptionError(f"object {key} contains a different commit from the one that its name specifies.")
            return directory(tail, size, key), commit.crc

        if raw is not None:
            return read(raw, len(raw))
        if seq not in self._contents_by_seq:
            contents = self._from_end(key, self.bucket.tails([key], [self.bucket.tail])[0], read)
            if contents is None:
                raise FileNotFoundError(key)
            self._contents_by_seq[seq] = contents
        return self._contents_by_seq[seq]

    def gap_ids(self, gap: Gap) -> Int64Array:
        """Return the ids of the rows of a gap; for updates those of their targets, where these are known."""
        if self.meta.kind == "rows" or gap.first == gap.end:
            return super().gap_ids(gap)
        targets = self.sure_targets(gap)
        return np.empty(0, np.int64) if targets is None else targets

    def _find_targets(self, gap: Gap) -> Int64Array | None:
        """Read the rows that a damaged update was for; None if they are damaged as well."""
        if self.sealed is not None:
            self.find_damage(slice(0, self.rows), (TARGET,))
            if any(
                gap_of_targets.array == TARGET and gap_of_targets.first < gap.end and gap.first < gap_of_targets.end
                for gap_of_targets in self.gaps
            ):
                return None
            return np.array(self.array(TARGET)[gap.first : gap.end])
        try:
            targets, gaps = self.compared(gap.seq, self.specs[TARGET], *self._contents(gap.seq, None), None)
        except (StoreError, FileNotFoundError, IndexError):
            return None
        first = self.history[gap.seq].rows_end - self.history[gap.seq].n_rows
        damaged = any(damage.first < gap.end and gap.first < damage.end for damage in gaps)
        return None if damaged else targets[gap.first - first : gap.end - first]

    def extent(self, spec: ArraySpec, seq: int) -> tuple[int, int]:
        """Return how many elements of an array a commit has, and where they begin in the segment."""
        brief = self.history[seq]
        if spec.axis is not None and not spec.edges:
            at = self._axes.index(spec.axis)
            return brief.ends[at] - self.starts(seq)[at], self.starts(seq)[at]
        return brief.n_rows + spec.edges, brief.rows_end - brief.n_rows

    def forget(self, name: str) -> None:
        """Forget the cached file of an array; maps in use stay valid."""
        super().drop(name)
        self._fetched.pop(name, None)
        self._complete.discard(name)

    def drop(self, name: str) -> None:
        """Remove the cached file of an array; maps in use stay valid."""
        self.forget(name)
        fs.remove_file(self._cached(name))
