"""`TrajectoryStore`: the one door to a store."""

from __future__ import annotations

import functools
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from trajectory_store import _fs
from trajectory_store._batch import Batch, cast_values, prepare
from trajectory_store._engine import Engine, MemmapEngine, Stream
from trajectory_store._errors import (
    BatchError,
    ReadOnlyError,
    SchemaError,
    SegmentGoneError,
    StoreClosedError,
)
from trajectory_store._gather import Gather, Side
from trajectory_store._io import Io
from trajectory_store._layout import MAX_ROWS, TARGET
from trajectory_store._maintenance import CompactReport, read_batch
from trajectory_store._pool import BufferPool
from trajectory_store._ragged import Int64Array, RaggedArray
from trajectory_store._root import RootMeta, add_to_root, create_root, read_root, with_columns
from trajectory_store._schema import Column, Schema
from trajectory_store._snapshot import Snapshot
from trajectory_store._verify import VerifyReport
from trajectory_store._writer import (
    DURABILITIES,
    ORDINAL_SHIFT,
    Durability,
)

Ids = npt.ArrayLike
Columns = Sequence[str] | str | None
Mode = Literal["r", "a"]
Backend = Literal["memmap", "zarr"]


# A row and column that takes this long may have come from the disk; if it did, the next batches ask for their pages
# first, which costs a warm batch three times its own time and a cold one a third of it.
COLD_COPY_S = 15e-6
COLD_BATCHES = 8

P = ParamSpec("P")
R = TypeVar("R")


def _following(read: Callable[Concatenate[TrajectoryStore, P], R]) -> Callable[Concatenate[TrajectoryStore, P], R]:
    """Read again after a refresh where a segment left in between; compacted rows are found in their new place."""

    @functools.wraps(read)
    def wrapper(self: TrajectoryStore, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return read(self, *args, **kwargs)
        except SegmentGoneError:
            self.refresh()
            return read(self, *args, **kwargs)

    return wrapper


class TrajectoryStore:
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

    def __init__(
        self,
        path: Path,
        root: RootMeta,
        mode: Mode,
        durability: Durability,
        engine: Engine,
        address: Any = None,
    ) -> None:
        self.path = path
        self._address = path if address is None else address
        self.schema = root.schema
        self.mode: Mode = mode
        self.durability: Durability = durability
        self._root = root
        self._pool = BufferPool()
        self._engine = engine
        self._catalog = engine.catalog
        self._stream = engine.stream(root.schema, "rows")
        self._patch_streams: dict[tuple[str, ...], Stream] = {}
        self._cold = COLD_BATCHES
        self._blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        self._closed = False

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
            segment_rows: rows per segment; by default 4096, growing to 65536.
            segment_elements: elements per ragged axis and segment; by default 1 Mi, growing to 16 Mi.
            compress: zarr backend: zstd for the chunks.
            cache_dir: zarr backend: where columns that were read are kept; default: a temporary folder.
            cache_bytes: zarr backend: how much is kept there.

        Raises:
            StoreExistsError: the path holds something.
            WriteFailedError: the disk refused.
        """
        if not isinstance(schema, Schema):
            schema = Schema(schema)
        if backend not in ("memmap", "zarr"):
            raise SchemaError(f"backend {backend!r} is not known. Use 'memmap' or 'zarr'.")
        _check_durability(durability)
        limits = {
            "max_trajectories": max_trajectories,
            "max_bytes": max_bytes,
            "segment_rows": segment_rows,
            "segment_elements": segment_elements,
        }
        for name, value in limits.items():
            if value is not None and value < 1:
                raise SchemaError(f"{name}={value} is too small; give at least 1, or None.")
        if max_trajectories is not None and segment_rows is None:
            segment_rows = min(max(512, max_trajectories // 8), MAX_ROWS)
        root = RootMeta(
            schema=schema,
            backend=backend,
            compress=compress and backend == "zarr",
            durability=durability,
            max_trajectories=max_trajectories,
            max_bytes=max_bytes,
            segment_rows=segment_rows,
            segment_elements=segment_elements,
            preallocate=preallocate,
        )
        if backend == "zarr":
            return cls._create_remote(path, root, cache_dir, cache_bytes)
        folder = Path(path)
        create_root(folder, root)
        engine = MemmapEngine(folder, root, durability, writable=True, io=None)
        return cls(folder, root, "a", durability, engine)

    @classmethod
    def _create_remote(
        cls, target: Any, root: RootMeta, cache_dir: str | os.PathLike[str] | None, cache_bytes: int
    ) -> TrajectoryStore:
        from trajectory_store._remote import Remote
        from trajectory_store._zarr_engine import ZarrEngine, create_remote

        remote = Remote(target)
        create_remote(remote, root)
        folder = None if cache_dir is None else Path(cache_dir)
        engine = ZarrEngine(remote, root, cache_dir=folder, cache_bytes=cache_bytes)
        return cls(Path(str(target)), root, "a", root.durability, engine, target)

    @classmethod
    def _open_remote(
        cls,
        target: Any,
        mode: Mode,
        cache_dir: str | os.PathLike[str] | None,
        cache_bytes: int,
        add_columns: Sequence[Column],
    ) -> TrajectoryStore:
        from trajectory_store._remote import Remote
        from trajectory_store._zarr_engine import ZarrEngine, read_remote_root

        remote = Remote(target, read_only=mode == "r")
        root = read_remote_root(remote)
        if add_columns:
            root = with_columns(root, add_columns)
            remote.put_many({"zarr.json": root.to_json()})
        folder = None if cache_dir is None else Path(cache_dir)
        engine = ZarrEngine(remote, root, cache_dir=folder, cache_bytes=cache_bytes)
        if mode == "a":
            engine.clean_up()
        return cls(Path(str(target)), root, mode, root.durability, engine, target)

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
        if mode not in ("r", "a"):
            raise SchemaError(f"mode {mode!r} is not known. Use 'r' to read or 'a' to append.")
        if durability is not None:
            _check_durability(durability)
        if io not in ("auto", "mmap", "pread"):
            raise SchemaError(f"io {io!r} is not known. Use 'auto', 'mmap' or 'pread'.")
        if add_columns and mode != "a":
            raise ReadOnlyError("add_columns changes the store: open it with mode 'a'.")
        if not isinstance(path, (str, os.PathLike)):
            return cls._open_remote(path, mode, cache_dir, cache_bytes, add_columns)
        folder = Path(cast("str", path))
        root = read_root(folder)
        if root.backend == "zarr":
            return cls._open_remote(folder, mode, cache_dir, cache_bytes, add_columns)
        if add_columns:
            root = add_to_root(folder, add_columns)
        level = durability or root.durability
        engine = MemmapEngine(folder, root, level, writable=mode == "a", io=None if io == "auto" else io)
        if mode == "a":
            engine.clean_up()
        return cls(folder, root, mode, level, engine)

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

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

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
            raise _fs.failed(error, self.path, "syncing") from error

    # Following

    def refresh(self) -> int:
        """Take in what other processes wrote; returns the watermark."""
        self._check_open()
        self._catalog.refresh()
        return self.watermark

    @property
    def watermark(self) -> int:
        """Trajectories committed since the store was made, as far as this reader has seen.

        It never falls: evicted trajectories still count.
        """
        self._check_open()
        return self._catalog.evicted_rows + self._catalog.total_rows()

    def __len__(self) -> int:
        self._check_open()
        total = self._catalog.total_rows()
        limit = self._root.max_trajectories
        return total if limit is None else min(total, limit)

    def snapshot(self) -> Snapshot:
        """Name the rows that this reader sees now, for `ids` of any reader at any later time."""
        self._check_open()
        return Snapshot(self._catalog.row_limits(), self.watermark)

    def ids(self, snapshot: Snapshot | None = None) -> Int64Array:
        """`[len(self)]` int64, read-only: the ids in the order of arrival, the same for every reader.

        Args:
            snapshot: the rows that this reader saw then; those that eviction has removed are left out.
        """
        self._check_open()
        ids = self._catalog.ids()
        if snapshot is not None:
            ids = snapshot.select(ids)
        limit = self._root.max_trajectories
        return ids if limit is None else ids[max(0, len(ids) - limit) :]

    # Reading

    @_following
    def read(self, ids: Ids, columns: Columns = None) -> dict[str, Any]:
        """Read trajectories as they are.

        Args:
            ids: `[B]` ids, in any order, repeated or not.
            columns: names; None for all.

        Returns:
            Per column a list of B 1-D arrays (ragged), a list of str (text), or a `[B]` array.

        Raises:
            MissingRowError: an id is not in the store.
            UnknownColumnError: the store has no such column.
        """
        gather = self._gather(ids)
        out: dict[str, Any] = {}
        for column in self.schema.select(columns):
            if column.is_text:
                out[column.name] = gather.text(column)
            elif column.axis is not None:
                out[column.name] = gather.ragged(column).to_list()
            else:
                out[column.name] = gather.scalars(column)
        return out

    @_following
    def read_batch(self, ids: Ids, schema: Schema | None = None) -> Batch:
        """Read whole rows in the form in which they are written, later values folded in."""
        self._check_open()
        return read_batch(self._catalog, schema or self.schema, as_ids(ids))

    @_following
    def read_ragged(self, column: str, ids: Ids | None = None) -> RaggedArray:
        """Read a ragged column in one flat array; None for all trajectories in the order of arrival."""
        found = self._ragged_column(column)
        if found.is_text:
            raise SchemaError(f"column '{column}' is text; use read().")
        return self._gather(self.ids() if ids is None else ids).ragged(found)

    @_following
    def read_padded(
        self,
        ids: Ids,
        columns: Columns = None,
        *,
        pad_value: Any = 0,
        side: Side = "right",
        pad_to_multiple_of: int = 1,
        out: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> dict[str, Any]:
        """Read trajectories as padded matrices.

        The memory of an earlier batch is reused once nothing refers to it, which makes a batch
        several times cheaper than fresh memory would.

        Args:
            ids: `[B]` ids.
            columns: names; None for all.
            pad_value: what fills the rest of a row: one value, or one per column name (default 0).
            side: where the padding goes.
            pad_to_multiple_of: T is rounded up to a multiple of this.
            out: arrays to write into, by column: contiguous, at least `[B, T]`.

        Returns:
            Per ragged column `[B, T]`, T the longest row of the column's axis; text as a list of str,
            scalars as `[B]`; `"lengths"` `[B]` int64 of the first ragged axis asked for, and
            `"<axis>.lengths"` for any further axis.
        """
        if side not in ("left", "right"):
            raise SchemaError(f"side {side!r} is not known. Use 'right' or 'left'.")
        if pad_to_multiple_of < 1:
            raise SchemaError(f"pad_to_multiple_of={pad_to_multiple_of} must be 1 or more.")
        begin = time.perf_counter()
        gather = self._gather(ids)
        selected = self.schema.select(columns)
        if self._cold:
            self._cold -= 1
            gather.prefetch(selected)
        pads = cast("Mapping[str, Any]", pad_value) if isinstance(pad_value, Mapping) else None
        result: dict[str, Any] = {}
        lengths: dict[str, Any] = {}
        first_axis: str | None = None
        for column in selected:
            name, axis = column.name, column.axis
            if axis is None:
                result[name] = gather.scalars(column)
                continue
            if column.is_text:
                result[name] = gather.text(column)
                continue
            spans = gather.spans(column)
            width = -(-spans.width // pad_to_multiple_of) * pad_to_multiple_of
            pad: Any = pad_value if pads is None else pads.get(name, 0)
            given = None if out is None else out.get(name)
            result[name] = gather.padded(column, width, pad, side, self._pool, given)
            first_axis = first_axis or axis
            lengths["lengths" if axis == first_axis else f"{axis}.lengths"] = spans.lengths
        if self._cold or time.perf_counter() - begin > COLD_COPY_S * (len(selected) * len(gather) + 64):
            self._note_reads()
        return result | lengths

    @_following
    def read_scalars(self, column: str, ids: Ids | None = None) -> npt.NDArray[Any]:
        """Read one scalar column.

        Args:
            column: its name; of a text column the texts come as an object array.
            ids: `[B]` ids; None for all trajectories in the order of arrival.
        """
        self._check_open()
        found = self.schema[column]
        gather = self._gather(self.ids() if ids is None else ids)
        if found.is_text:
            return np.array(gather.text(found), dtype=object)
        if found.axis is not None:
            raise SchemaError(f"column '{column}' is ragged; use read_ragged or read_padded.")
        return gather.scalars(found)

    @_following
    def lengths(self, column: str, ids: Ids | None = None) -> Int64Array:
        """`[B]` int64: the length of each row of a ragged column (UTF-8 bytes for text)."""
        found = self._ragged_column(column)
        return self._gather(self.ids() if ids is None else ids).lengths(found)

    @_following
    def present(self, column: str, ids: Ids | None = None) -> npt.NDArray[np.bool_]:
        """`[B]` bool: whether a value was given, at the append or by a patch, and not filled in."""
        self._check_open()
        found = self.schema[column]
        return self._gather(self.ids() if ids is None else ids).present(found)

    # Care

    def compact(self) -> CompactReport:
        """Merge finished segments into few and fold patches in; ids and their order stay.

        Other readers go on with the old segments until they refresh.
        """
        self._check_writable("compact")
        for stream in (self._stream, *self._patch_streams.values()):
            stream.close()
        return self._engine.compact(self.schema)

    def verify(self) -> VerifyReport:
        """Recompute every checksum and report what is damaged, in words."""
        self._check_open()
        report = self._engine.verify()
        report.trajectories = len(self)
        return report

    # Helpers

    def _note_reads(self) -> None:
        """Where the disk was read, by a fault or because a batch asked for its pages, the next batches ask first.

        Not doing so costs what the disk reads ahead at every fault, which may be megabytes.
        """
        blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        if blocks > self._blocks:
            self._cold = COLD_BATCHES
        self._blocks = blocks

    def _gather(self, ids: Ids) -> Gather:
        self._check_open()
        return Gather(self._catalog, as_ids(ids))

    def _ragged_column(self, name: str) -> Column:
        self._check_open()
        column = self.schema[name]
        if column.axis is None:
            raise SchemaError(f"column '{name}' is a scalar; it has no lengths. Use read_scalars.")
        return column

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"the store {self.path} is closed. Open it again with TrajectoryStore.open.")

    def _check_writable(self, what: str) -> None:
        self._check_open()
        if self.mode != "a":
            raise ReadOnlyError(
                f"{what} needs a store opened for writing; {self.path} is open with mode 'r'. Use "
                "TrajectoryStore.open(path, mode='a')."
            )


def _reopen(address: Any, mode: Mode, durability: Durability) -> TrajectoryStore:
    return TrajectoryStore.open(address, mode, durability=durability)


def as_ids(ids: Ids) -> Int64Array:
    """Turn what a caller gives as ids into `[B]` int64."""
    array: npt.NDArray[Any] = np.asarray(ids)
    if array.dtype == np.int64 and array.ndim == 1:
        return array
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim == 0:
        array = array.reshape(1)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BatchError(
            f"ids are a 1-D array of integers; got {array.dtype} {list(array.shape)}. Take them from append() or ids()."
        )
    return array.astype(np.int64, copy=False)


def _same_lengths(column: Column, given: Int64Array, known: Int64Array) -> None:
    wrong = np.flatnonzero(given != known)
    if len(wrong):
        row = int(wrong[0])
        raise BatchError(
            f"row {row} of column '{column.name}' has length {int(given[row])}, but the trajectory has "
            f"{int(known[row])} elements on axis '{column.axis}'."
        )


def _check_durability(durability: str) -> None:
    if durability not in DURABILITIES:
        raise SchemaError(f"durability {durability!r} is not known. Use one of {', '.join(DURABILITIES)}.")
