"""`TrajectoryStore`: the one door to a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from trajectory_store import fs
from trajectory_store.batch import Batch, cast_values, prepare
from trajectory_store.engine import Stream
from trajectory_store.errors import BatchError, ReadOnlyError
from trajectory_store.format import TARGET
from trajectory_store.gather import Gather
from trajectory_store.maps import Io
from trajectory_store.open import Backend, CacheOptions, Mode, Opened, create_store, open_store
from trajectory_store.ragged import Int64Array
from trajectory_store.reads import Ids, StoreReads, as_ids
from trajectory_store.schema import Column, Schema
from trajectory_store.upkeep import CompactReport
from trajectory_store.verify import VerifyReport
from trajectory_store.writer import ORDINAL_SHIFT, Durability


class TrajectoryStore(StoreReads):
    """A durable, ragged, memory-mapped store of trajectories.

    Make one with `create` or `open`. Any number of processes may append (each to segments of its own) and
    read at the same time; a process that is killed holds nobody up and loses nothing that `append`
    returned for.

    Attributes:
        path: the folder.
        schema: the columns.
        mode: `"r"` or `"a"`.
        durability: what an append waits for.

    >>> import tempfile
    >>> schema = Schema([Column("input_ids", "int32", ragged=True), Column("reward", "float32")])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = TrajectoryStore.create(f"{folder}/store", schema)
    ...     ids = store.append({"input_ids": [[1, 2, 3], [4]], "reward": [1.0, 0.0]})
    ...     batch = store.read_padded(ids, ["input_ids"])
    ...     store.close()
    >>> batch["input_ids"].tolist(), batch["lengths"].tolist()
    ([[1, 2, 3], [4, 0, 0]], [3, 1])
    """

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened.path, opened.root, opened.engine)
        self._address = opened.address
        self.mode: Mode = opened.mode
        self.durability: Durability = opened.durability
        self._stream = self._engine.stream(self.schema, "rows")
        self._patch_streams: dict[tuple[str, ...], Stream] = {}

    # Opening and closing

    @classmethod
    def create(
        cls,
        path: Any,
        schema: Schema | Sequence[Column],
        *,
        backend: Backend = "memmap",
        durability: Durability = "process",
        max_trajectories: int | None = None,
        max_bytes: int | None = None,
        preallocate: bool = False,
        segment_rows: int | None = None,
        segment_elements: int | None = None,
        compress: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = 1 << 34,
    ) -> TrajectoryStore:
        """Make a store and open it for appending.

        Args:
            path: a folder that does not exist or is empty; for the zarr backend also a zarr `Store`.
            schema: the columns.
            backend: `"memmap"` for raw segments on a local disk; `"zarr"` for one immutable Zarr group per
                commit, in a folder or an object store.
            durability: `"process"`: an acknowledged row survives `kill -9`. `"power"`: it also survives
                a power loss, for one sync of the disk per append. `"group"`: the same, but appends of several
                threads share a sync.
            max_trajectories: keep the newest so many; older ones leave by whole segments.
            max_bytes: keep about so many bytes on the disk; older segments leave.
            preallocate: reserve disk blocks a segment at a time: faster appends, and a full disk shows
                when a segment is made.
            segment_rows: rows per segment; by default 4 Ki, growing to 512 Ki (preallocated, or zarr: 64 Ki).
            segment_elements: elements per ragged axis and segment; by default 1 Mi, growing to 64 Mi (16 Mi).
            compress: zarr backend: zstd for the chunks.
            cache_dir: zarr backend: where columns that were read are kept; default: a temporary folder.
            cache_bytes: zarr backend: how much is kept there.

        Raises:
            StoreExistsError: the path holds something.
            WriteFailedError: the disk refused.
        """
        options = {
            "backend": backend,
            "durability": durability,
            "max_trajectories": max_trajectories,
            "max_bytes": max_bytes,
            "segment_rows": segment_rows,
            "segment_elements": segment_elements,
            "preallocate": preallocate,
            "compress": compress,
        }
        return cls(create_store(path, schema, options, CacheOptions(cache_dir, cache_bytes)))

    @classmethod
    def open(
        cls,
        path: Any,
        mode: Mode = "r",
        *,
        durability: Durability | None = None,
        add_columns: Sequence[Column] = (),
        io: Io | Literal["auto"] = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = 1 << 34,
    ) -> TrajectoryStore:
        """Open a store.

        Args:
            path: its folder, or a zarr `Store`; which backend wrote it is found out.
            mode: `"r"` to read, `"a"` to read, append and update.
            durability: for the appends of this process; default: what the store was created with.
            add_columns: columns that the store gets from now on; rows that exist read as their fill, and
                `patch` gives them values. A column that is there already, defined alike, is fine.
            io: `"mmap"` or `"pread"`; by default maps, and positional reads where a map may end the process: on
                network file systems when the server fails, on tmpfs when it is full.
            cache_dir: zarr backend: where columns that were read are kept; default: a temporary folder.
            cache_bytes: zarr backend: how much is kept there.

        Raises:
            StoreNotFoundError: nothing is there.
            NotAStoreError: something else is there.
            FormatVersionError: another version of the format wrote it.
        """
        cache = CacheOptions(cache_dir, cache_bytes)
        found = open_store(path, mode, durability=durability, add_columns=add_columns, io=io, cache=cache)
        return cls(found)

    def close(self) -> None:
        """Finish the own segment and drop the maps; arrays that were read stay valid."""
        if self._closed:
            return
        self._closed = True
        for stream in (self._stream, *self._patch_streams.values()):
            stream.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True):
            return
        if self._catalog.mutable_in_place:
            self.close()
        else:  # at exit the event loop of an object store is gone: only give the cache back
            self._closed = True
            self._engine.close()

    def __reduce__(self) -> tuple[Callable[..., TrajectoryStore], tuple[Any, ...]]:
        """A pickled store is opened again at the other side, where it writes segments of its own."""
        return _reopen, (self._address, self.mode, self.durability)

    def __repr__(self) -> str:
        if self._closed:
            return f"<TrajectoryStore {str(self.path)!r} closed>"
        return (
            f"<TrajectoryStore {str(self.path)!r} mode={self.mode!r} durability={self.durability!r}: "
            f"{len(self)} trajectories, {len(self.schema)} columns, "
            f"{len(self._catalog.segments)} segments>"
        )

    # Writing

    def append(self, data: Mapping[str, Any]) -> Int64Array:
        """Append trajectories in one atomic commit.

        Args:
            data: per column a RaggedArray or a list of 1-D rows (ragged), a list of str (text), or `[n]`
                values (scalars). Columns with a fill, and mutable ones, may be left out.

        Returns:
            `[n]` int64 ids, stable and never given again. They are durable on return.

        Raises:
            BatchError: the rows do not fit the schema; nothing was written.
            WriteFailedError: the disk refused; what was acknowledged before is safe.
        """
        self._check_writable("append")
        return self.append_batch(prepare(self.schema, data))

    def append_batch(self, batch: Batch) -> Int64Array:
        """Append rows that are in the form on disk already; `append` and `copy_rows` end here."""
        self._check_writable("append")
        if not batch.n_rows:
            return np.empty(0, np.int64)
        known = self._stream.ordinal
        ordinal, first = self._stream.append(batch)
        self._catalog.refresh_segment(ordinal)
        if ordinal != known:
            self._engine.evict()
        start = (ordinal << ORDINAL_SHIFT) + first
        return np.arange(start, start + batch.n_rows, dtype=np.int64)

    def update(self, ids: Ids, **values: Any) -> None:
        """Set mutable scalars of some trajectories, in place.

        The new values are visible to every process at once and survive `kill -9`; a power loss may bring
        older values back. Where several processes update a row, the last one wins.

        Args:
            ids: `[n]` ids.
            **values: per column `[n]` values, or one for all.

        Raises:
            ReadOnlyError: the column is not mutable, or the store was opened with mode "r".
            MissingRowError: an id is not in the store.
        """
        self._check_writable("update")
        wanted = as_ids(ids)
        checked: list[tuple[Column, npt.NDArray[Any]]] = []
        for name, given in values.items():
            column = self.schema[name]
            if not column.mutable:
                raise ReadOnlyError(
                    f"column '{name}' does not change after its commit. Declare it with mutable=True, or "
                    "give later values with patch()."
                )
            array: npt.NDArray[Any] = np.asarray(given)
            if array.ndim == 0:
                array = np.broadcast_to(array, (len(wanted),))
            if array.shape != wanted.shape:
                raise BatchError(f"column '{name}' got {list(array.shape)} values for {len(wanted)} ids.")
            checked.append((column, cast_values(column, array)))
        if not self._catalog.mutable_in_place:
            self._append_patch(wanted, {column.name: array for column, array in checked})
            return
        gather = Gather(self._catalog, wanted)
        for column, array in checked:
            gather.assign(column, array)

    def patch(self, ids: Ids, **values: Any) -> None:
        """Give later values of columns that are not mutable, for trajectories that are there already.

        The values are appended to a segment of this process by one atomic commit, with the durability of
        an append; nothing is overwritten. Readers see them at their next refresh, and the last patch of
        a value wins.

        Args:
            ids: `[n]` ids.
            **values: per column a RaggedArray or a list of rows (ragged), a list of str (text), or `[n]` values.
                A ragged column that shares its axis keeps the length of its row.

        Raises:
            BatchError: a length or a dtype does not fit; nothing was written.
            MissingRowError: an id is not in the store.
        """
        self._check_writable("patch")
        if not values:
            raise BatchError("patch needs at least one column, for example patch(ids, advantage=values).")
        wanted = as_ids(ids)
        columns = [self.schema[name] for name in values]
        for column in columns:
            if column.mutable:
                raise BatchError(f"column '{column.name}' is mutable: set it with update(ids, {column.name}=...).")
        self._append_patch(wanted, values)

    def _append_patch(self, ids: Int64Array, values: Mapping[str, Any]) -> None:
        names = tuple(c.name for c in self.schema if c.name in values)
        schema = Schema([self.schema[name] for name in names])
        gather = Gather(self._catalog, ids)
        batch = prepare(schema, values, len(ids))
        for column in schema:
            if column.axis is not None and len(self.schema.axes[column.axis]) > 1:
                _same_lengths(column, batch.lengths[column.axis], gather.base_lengths(column.axis))
        if not len(ids):
            return
        batch.extra = {TARGET: ids}
        stream = self._patch_streams.get(names)
        if stream is None:
            stream = self._patch_streams[names] = self._engine.stream(schema, "patch")
        ordinal, _ = stream.append(batch)
        self._catalog.refresh_segment(ordinal)

    def flush(self) -> None:
        """Wait until everything this process appended is on the disk."""
        self._check_writable("flush")
        try:
            for stream in (self._stream, *self._patch_streams.values()):
                stream.sync()
        except OSError as error:
            raise fs.failed(error, self.path, "syncing") from error

    # Care

    def compact(self) -> CompactReport:
        """Merge finished segments into few and fold patches in; ids and their order stay.

        Other readers go on with the old segments until they refresh.
        """
        self._check_writable("compact")
        for stream in (self._stream, *self._patch_streams.values()):
            stream.close()
        return self._engine.compact(self.schema)

    def being_written(self) -> bool:
        """Whether a process may still append to a segment: `compact` leaves such segments as they are.

        memmap backend: a living process holds it. zarr backend: it was not closed, and the last commit is less than
        an hour old. A process that has the store open and has not appended yet is not seen.
        """
        self.refresh()
        return any(s.is_live() for s in (*self._catalog.segments.values(), *self._catalog.patches.values()))

    def verify(self) -> VerifyReport:
        """Recompute every checksum and report what is damaged, in words."""
        self._check_open()
        report = self._engine.verify()
        report.trajectories = len(self)
        return report

    def _check_writable(self, what: str) -> None:
        self._check_open()
        if self.mode != "a":
            raise ReadOnlyError(
                f"{what} needs a store opened for writing; {self.path} is open with mode 'r'. Use "
                "TrajectoryStore.open(path, mode='a')."
            )


def _reopen(address: Any, mode: Mode, durability: Durability) -> TrajectoryStore:
    return TrajectoryStore.open(address, mode, durability=durability)


def _same_lengths(column: Column, given: Int64Array, known: Int64Array) -> None:
    wrong = np.flatnonzero(given != known)
    if len(wrong):
        row = int(wrong[0])
        raise BatchError(
            f"row {row} of column '{column.name}' has length {int(given[row])}, but the trajectory has "
            f"{int(known[row])} elements on axis '{column.axis}'."
        )
