"""Reading a segment of the zarr backend: its columns are fetched into a local cache.

A segment of this backend is a Zarr group that holds one immutable group per commit. The values of a column are
fetched when it is first read, into a raw file of the same layout as a segment of the memory-mapped backend, so
sampling runs from maps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store import fs
from trajectory_store._remote import Remote, decode
from trajectory_store._zarr_commit import Commit, commit_key
from trajectory_store._zarr_shard import read_sharded
from trajectory_store.errors import CorruptionError, StoreError
from trajectory_store.format import SegmentMeta, chunk_path, offsets_name
from trajectory_store.maps import PreadBytes, PreadItems
from trajectory_store.ragged import Int64Array
from trajectory_store.record import KIND_ROWS, RECORD_DTYPE, crc32c
from trajectory_store.schema import Column
from trajectory_store.segment import SegmentReader
from trajectory_store.writer import segment_name

ABANDONED_AFTER_S = 3600.0
WORKERS = min(4, os.cpu_count() or 1)
WORTH_A_THREAD = 1 << 23


class Cache:
    """Raw files of fetched columns, within a budget.

    Args:
        folder: where they are.
        max_bytes: how much is kept; the columns that were used longest ago go first.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._bytes = 0
        self._used: dict[tuple[RemoteSegment, str], int] = {}

    def touch(self, segment: RemoteSegment, name: str, fetched: int) -> None:
        """Note a use, and make room."""
        before = self._used.pop((segment, name), 0)
        self._used[segment, name] = before + fetched
        self._bytes += fetched
        for key in list(self._used):
            if self._bytes <= self._max_bytes or key == (segment, name):
                break
            self._bytes -= self._used.pop(key)
            key[0].drop(key[1])

    def forget(self, segment: RemoteSegment) -> None:
        """Drop everything of a segment that is gone."""
        for key in [k for k in self._used if k[0] is segment]:
            self._bytes -= self._used.pop(key)
            segment.drop(key[1])


class RemoteSegment(SegmentReader):
    """A segment in an object store, with the interface of one on a local disk.

    Args:
        remote: the object store.
        ordinal: its number.
        raw: its zarr.json.
        cache: where fetched columns go.
    """

    def __init__(self, remote: Remote, ordinal: int, raw: bytes, cache: Cache) -> None:
        self.ordinal = ordinal
        self.folder = cache.folder / segment_name(ordinal)
        self.rows = 0
        self.records = 0
        self.finished = False
        self.meta = SegmentMeta.from_json(raw, Path(segment_name(ordinal), "zarr.json"))
        self.meta_crc = crc32c(raw)
        self.history: list[Commit] = []
        self._io = "mmap"
        self._writable = False
        self._remote = remote
        self._cache = cache
        self._lock = threading.Lock()
        self._maps: dict[str, memoryview | PreadBytes] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._items: dict[str, tuple[memoryview | PreadBytes, memoryview | PreadItems]] = {}
        self._loaded: dict[str, int] = {}
        self._late: set[str] = set()
        self._whole = self.meta.kind != "rows"
        self._wanted = np.zeros(64, bool)
        self._edges: Int64Array = np.empty(0, np.int64)
        self._version = 0
        self._fetched: dict[str, npt.NDArray[np.bool_]] = {}
        self._current: dict[str, int] = {}
        fs.HOLDERS.add(self)
        if self.meta.sealed is not None:
            self._take_sealed(self.meta.sealed)

    def _take_sealed(self, sealed: Any) -> None:
        rows = int(sealed["rows"])
        ends = {str(k): int(v) for k, v in sealed["ends"].items()}
        crc = {str(k): int(v) for k, v in sealed["crc"].items()}
        self.add(Commit(0, self.meta.created_ns, rows, rows, ends, crc))
        self.finished = True

    def add(self, commit: Commit) -> bool:
        """Take in the next commit; returns whether rows were added."""
        self.history.append(commit)
        self.records += 1
        if self.records > len(self._wanted):
            self._wanted = np.concatenate([self._wanted, np.zeros_like(self._wanted)])
        if self._whole:
            self._wanted[commit.seq] = True
            self._version += 1
        self.rows = commit.rows_end
        self.finished |= commit.n_rows == 0
        return commit.n_rows > 0

    def refresh(self, *, first: bool = False) -> bool:
        """The catalog follows for all segments at once."""
        return False

    def has(self, column: Column) -> bool:
        """Whether the segment holds values of a column."""
        return column.name in self.schema

    def commits(self, start: int = 0) -> npt.NDArray[Any]:
        """The row commits from record `start` on."""
        rows = [c for c in self.history[start:] if c.n_rows]
        table = np.zeros(len(rows), RECORD_DTYPE)
        table["kind"] = KIND_ROWS
        for name in ("seq", "time_ns", "rows_end", "n_rows"):
            table[name] = [getattr(c, name) for c in rows]
        return table

    def elements(self) -> dict[str, int]:
        """Per axis the number of elements in use."""
        return dict(self.history[-1].ends) if self.history else dict.fromkeys(self.schema.axes, 0)

    def is_live(self) -> bool:
        """Whether a writer may still append: not finished, and its last commit is young."""
        if self.finished:
            return False
        last = self.history[-1].time_ns if self.history else self.meta.created_ns
        return time.time_ns() - last < ABANDONED_AFTER_S * 1e9

    def disk_bytes(self) -> int:
        """The bytes of the values, before compression."""
        ends = self.elements()
        total = 0
        for column in self.schema:
            count = self.rows if column.axis is None else ends[column.axis]
            total += count * column.np_dtype.itemsize
        return total + 8 * self.rows * len(ends)

    def want(self, rows: Int64Array) -> None:
        """Note that these rows will be read: their commits are fetched with the next array that is asked for."""
        if self._whole:
            return
        if len(self._edges) != self.records:
            self._edges = np.array([c.rows_end for c in self.history], np.int64)
        seqs = np.searchsorted(self._edges, rows, side="right")
        if not self._wanted[seqs].all():
            self._wanted[seqs] = True
            self._version += 1

    def raw(self, name: str) -> memoryview | PreadBytes:
        """The bytes of an array, fetched for the commits of all rows that were wanted so far.

        Patches and compacted segments are fetched whole.
        """
        fetched = 0
        if self._current.get(name) != self._version:
            with self._lock:
                version = self._version
                if self._current.get(name) != version:
                    fetched = self._fetch(name)
                    self._current[name] = version
        if self._version:
            self._cache.touch(self, name, fetched)
        else:
            self._make_file(name)
        return super().raw(name)

    def _make_file(self, name: str) -> Path:
        path = chunk_path(self.folder, name)
        if not path.exists():
            spec = self._specs[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            fs.create_sized(path, spec.capacity * spec.dtype.itemsize, preallocate=False)
        return path

    def _fetch(self, name: str) -> int:
        """Fetch what is wanted and not there yet; returns the bytes."""
        wanted = self._wanted.copy()
        done = self._fetched.get(name)
        if done is not None:
            wanted[: len(done)] &= ~done
        commits = [c for c in (self.history[i] for i in np.flatnonzero(wanted).tolist()) if c.n_rows]
        total = sum(self.count(name, c) for c in commits) * self._specs[name].dtype.itemsize
        with self._make_file(name).open("r+b") as file:
            workers = min(WORKERS, len(commits), total // WORTH_A_THREAD)
            if workers < 2:
                self._land(name, commits, file.fileno())
            else:
                with ThreadPoolExecutor(workers) as pool:
                    jobs = [pool.submit(self._land, name, commits[i::workers], file.fileno()) for i in range(workers)]
                for job in jobs:
                    job.result()
        if done is not None:
            wanted[: len(done)] |= done
        self._fetched[name] = wanted
        return total

    def _land(self, name: str, commits: list[Commit], fd: int) -> None:
        """Get the values of some commits and put them where they belong."""
        for commit, values in self._stream(name, commits):
            before = self._before(commit)
            axis = self._axis(name)
            start = commit.rows_end - commit.n_rows
            if axis and before is not None:
                if name.endswith(".offsets"):  # these count from the start of the segment there
                    values = values + before.ends[axis]
                else:
                    start = before.ends[axis]
            fs.pwrite(fd, values.view(np.uint8), start * values.itemsize)

    def _before(self, commit: Commit) -> Commit | None:
        return self.history[commit.seq - 1] if commit.seq else None

    def _axis(self, name: str) -> str:
        if name.endswith(".offsets"):
            return name.removesuffix(".offsets")
        return (self.schema[name].axis or "") if name in self.schema else ""

    def count(self, name: str, commit: Commit) -> int:
        """How many values of an array a commit has."""
        axis = self._axis(name)
        if axis and name != offsets_name(axis):
            before = self._before(commit)
            return commit.ends[axis] - (before.ends[axis] if before is not None else 0)
        return commit.n_rows + (1 if axis else 0)

    def values(self, name: str, commit: Commit) -> npt.NDArray[Any]:
        """Get and check the values of an array in a commit.

        Raises:
            CorruptionError: an object is missing or damaged.
        """
        return next(self._stream(name, [commit]))[1]

    def _stream(self, name: str, commits: list[Commit]) -> Iterator[tuple[Commit, npt.NDArray[Any]]]:
        """The checked values of an array, commit by commit; each is valid until the next."""
        if self.meta.sealed is not None:
            yield from ((c, self._sealed_values(name, c)) for c in commits)
            return
        dtype = self._specs[name].dtype
        sizes = [self.count(name, c) * dtype.itemsize for c in commits]
        scratch = np.empty(max(sizes, default=0), np.uint8)
        keys = [f"{commit_key(self.ordinal, c.seq)}/{name}/c/0" for c in commits]
        found = self._remote.stream([k for k, n in zip(keys, sizes, strict=True) if n])
        for commit, key, size in zip(commits, keys, sizes, strict=True):
            values = scratch[:size]
            if size:
                raw = next(found)
                if raw is None:
                    raise CorruptionError(f"object {key} is missing. Restore it from a copy, or refresh().")
                values = decode(raw, values, commit.crc.get(name, -1), key=key)
            yield commit, values.view(dtype)

    def _sealed_values(self, name: str, commit: Commit) -> npt.NDArray[Any]:
        sealed: Any = self.meta.sealed
        key = f"{sealed['data']}/{name}"
        try:
            values = read_sharded(self._remote, key, self._specs[name].dtype)
        except StoreError:
            raise
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise CorruptionError(f"array {key} cannot be read: {error}") from error
        if len(values) != self.count(name, commit) or crc32c(values.view(np.uint8)) != commit.crc[name]:
            raise CorruptionError(f"array {key} does not have the checksum of its segment.")
        return values

    def drop(self, name: str) -> None:
        """Give up the cached file of an array; maps that are in use stay valid."""
        self._maps.pop(name, None)
        self._arrays.pop(name, None)
        self._items.pop(name, None)
        self._fetched.pop(name, None)
        self._current.pop(name, None)
        chunk_path(self.folder, name).unlink(missing_ok=True)
