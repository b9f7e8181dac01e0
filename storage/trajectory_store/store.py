"""`TrajectoryStore`: the public interface to a store."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

import numpy as np

from trajectory_store import fork_safety, fs
from trajectory_store.arrow import parquet_of, schema_from, tables_of
from trajectory_store.backend import Medium
from trajectory_store.batch import Batch, prepare
from trajectory_store.bucket import Traffic
from trajectory_store.catalog import Catalog
from trajectory_store.catalog_log import State
from trajectory_store.columns import ColumnReader
from trajectory_store.copying import copy_folder
from trajectory_store.errors import BatchError, ReadOnlyError, SchemaError, SegmentGoneError, StoreError
from trajectory_store.file_access import Io
from trajectory_store.format import ORDINAL_SHIFT, TARGET, Durability
from trajectory_store.incoming import batch_from, rereadable
from trajectory_store.options import (
    Backend,
    backend_of,
    bounded,
    bucket_of,
    check_durability,
    count_of,
    medium_of,
    size_of,
)
from trajectory_store.ragged import Int64Array
from trajectory_store.reads import Ids, as_ids, following
from trajectory_store.root import Root, create_root, read_root
from trajectory_store.schema import Column, Schema
from trajectory_store.snapshot import Snapshot
from trajectory_store.table import StoreTable
from trajectory_store.upkeep import Background, CompactReport, accept_losses, compact, recover, recover_claimed, sweep
from trajectory_store.verify import VerifyReport
from trajectory_store.writer import Stream

Mode = Literal["r", "a"]
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="TrajectoryStore")


def settled(write: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Leave nothing behind that the next call cannot use, if an exception of any kind ends this one.

    The next call reads the log before it writes, and reads its view of the store again.
    """

    @functools.wraps(write)
    def wrapper(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return write(self, *args, **kwargs)
        except StoreError:
            raise
        except BaseException:
            self._catalog.is_doubtful = True  # pyright: ignore[reportPrivateUsage]
            fork_safety.release_locks()
            raise

    return wrapper


class TrajectoryStore(StoreTable):
    """A durable, ragged store of trajectories, on a local disk or in an object store.

    Create one with `create`, or open it with `open`. Any number of processes may append (each to separate segments) and
    read at the same time. A killed process does not block others, and loses no row for which `append` returned.

    Attributes:
        path: the folder.
        schema: the columns.
        mode: `"r"` or `"a"`.
        durability: the guarantee that an append waits for.

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
        self, address: Any, root: Root, medium: Medium, mode: Mode, durability: Durability, **more: Any
    ) -> None:
        super().__init__(medium.bucket.address, root, Catalog(medium, root))
        settings = {"path": self.path.absolute() if isinstance(self.path, Path) else address, "mode": mode}
        self._reopening = _reopen, {**settings, "durability": durability, **more}
        self.mode: Mode = mode
        self.durability: Durability = durability
        self._stream = Stream(self._catalog, root, "rows", durability)
        self._update_streams: dict[tuple[str, ...], Stream] = {}
        self._on_segment: Callable[[int], None] | None = None
        self._background = Background(self._look_in, root)
        self._pid = os.getpid()
        medium.bucket.durable = durability != "process"
        if mode == "a":
            medium.bucket.hold(root.to_json())

    # Opening and closing

    @classmethod
    def create(
        cls,
        path: Any,
        schema: Schema | Sequence[Column],
        *,
        backend: Backend | None = None,
        durability: Durability = "process",
        max_trajectories: int | None = None,
        max_bytes: int | str | None = None,
        preallocate: bool = False,
        segment_rows: int | None = None,
        segment_elements: int | None = None,
        compress: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
    ) -> TrajectoryStore:
        """Create a store and open it for appending.

        Args:
            path: a folder that does not exist or is empty. With the zarr backend also a URL such as
                `s3://bucket/prefix` (credentials come from the environment), an obstore store or a zarr `Store`.
            schema: the columns.
            backend: `"memmap"` for raw segments on a local disk, `"zarr"` for one immutable object per commit; by
                default memmap for a folder and zarr for all other targets.
            durability: `"process"`: an acknowledged row survives `kill -9`. `"power"`: it also survives a power loss;
                each append syncs the disk once. `"group"`: the same, but a sync waits a few milliseconds for appends of
                other threads, if there are any. In an object store, every put has the guarantee of that store.
            max_trajectories: keep only this many of the newest trajectories; older ones are evicted in complete
                segments.
            max_bytes: keep about this many bytes on the disk (`"20GB"`, `"512MiB"`); older segments are evicted.
            preallocate: reserve the disk blocks of each segment in advance: appends are faster, and a full disk is
                detected when a segment is created.
            segment_rows: rows per segment; by default few, growing to 512 Ki (preallocated, or zarr: 64 Ki).
            segment_elements: elements per ragged axis and segment; by default few, growing to 64 Mi (16 Mi).
            compress: zarr backend: compress chunks with zstd if this makes them smaller.
            cache_dir: zarr backend: where columns that were read are kept; default: a temporary folder.
            cache_bytes: zarr backend: how much is kept there; None for `TRAJECTORY_STORE_CACHE_BYTES`, else 16 GiB.

        Raises:
            StoreExistsError: the path is not empty.
            WriteFailedError: the disk rejected a write.
        """
        check_durability(durability)
        kind = backend_of(path, backend)
        root = Root(
            schema=schema if isinstance(schema, Schema) else Schema(schema),
            backend=kind,
            durability=durability,
            max_trajectories=count_of("max_trajectories", max_trajectories, 1 << 62),
            max_bytes=size_of("max_bytes", max_bytes),
            segment_rows=count_of("segment_rows", segment_rows, (1 << 32) - 1),
            segment_elements=count_of("segment_elements", segment_elements, 1 << 40),
            preallocate=preallocate,
            compress=compress and kind == "zarr",
        )
        root, cache_limit, bucket = bounded(root), size_of("cache_bytes", cache_bytes, least=0), bucket_of(path)
        create_root(bucket, root)
        cache: dict[str, Any] = {"cache_dir": cache_dir, "cache_bytes": cache_limit}
        return cls(path, root, medium_of(bucket, root, None, cache_dir, cache_limit), "a", durability, **cache)

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
        cache_bytes: int | str | None = None,
    ) -> TrajectoryStore:
        """Open a store.

        Args:
            path: its folder, a URL, an obstore store or a zarr `Store`; the backend is detected.
            mode: `"r"` to read, `"a"` to read, append and update.
            durability: for the appends of this process; default: the durability with which the store was created.
            add_columns: columns to add to the store; existing rows read as the fill until `update` gives them values. A
                column that exists with the same definition is not an error. A column cannot join the axis of a single
                mutable column, whose lengths `update` may change.
            io: `"mmap"` or `"pread"`; by default maps, but positional reads if a map might end the process: on network
                file systems when the server fails, and on tmpfs when it is full.
            cache_dir: zarr backend: where columns that were read are kept; default: a temporary folder.
            cache_bytes: zarr backend: how much is kept there; None for `TRAJECTORY_STORE_CACHE_BYTES`, else 16 GiB.

        Raises:
            StoreNotFoundError: the path does not exist.
            NotAStoreError: the path is not a store.
            FormatVersionError: it was written in another version of the format.
            CorruptionError: its catalog cannot be read.
        """
        if mode not in ("r", "a"):
            raise SchemaError(f"mode {mode!r} is unknown. Use 'r' to read or 'a' to append.")
        if durability is not None:
            check_durability(durability)
        if io not in ("auto", "mmap", "pread"):
            raise SchemaError(f"io {io!r} is unknown. Use 'auto', 'mmap' or 'pread'.")
        if add_columns and mode != "a":
            raise ReadOnlyError("add_columns changes the store: open it with mode 'a'.")
        cache_limit, bucket = size_of("cache_bytes", cache_bytes, least=0), bucket_of(path)
        root = read_root(bucket)
        medium = medium_of(bucket, root, None if io == "auto" else io, cache_dir, cache_limit)
        settings: dict[str, Any] = {"io": io, "cache_dir": cache_dir, "cache_bytes": cache_limit}
        store = cls(path, root, medium, mode, durability or root.durability, **settings)
        if add_columns:
            store.add_columns(add_columns)
        if mode == "a":
            with medium.bucket.upkeep_lock() as mine:
                if mine:
                    recover(store._catalog)
                    sweep(store._catalog, store._catalog.state)
            if mine is None:
                recover_claimed(store._catalog)
        return store

    @classmethod
    def from_arrow(cls, path: Any, data: Any, schema: Schema | None = None, **options: Any) -> TrajectoryStore:
        """Create a store from a table, or from a stream of record batches, and leave it open for appending.

        Args:
            path: as of `create`.
            data: an object with Arrow's protocol, such as a `datasets.Dataset` or a DataFrame.
            schema: the columns; None uses the columns that a store recorded in the table's metadata, or otherwise one
                nullable column of the same type per field.
            **options: of `create`.

        Raises:
            SchemaError: a store cannot contain a type; nothing is created.
            BatchError: a value does not fit.
        """
        table = tables_of(data)
        store = cls.create(path, schema_from(table.schema) if schema is None else schema, **options)
        store.append(table)
        return store

    @classmethod
    def from_parquet(
        cls, path: Any, file: str | os.PathLike[str], schema: Schema | None = None, **options: Any
    ) -> TrajectoryStore:
        """Create a store from a Parquet file, with some thousand rows per commit, and leave it open for appending.

        Args:
            path: as of `create`.
            file: the file.
            schema: as of `from_arrow`.
            **options: of `create`.

        Raises:
            SchemaError: a store cannot contain a type; nothing is created.
            BatchError: a value does not fit.
        """
        arrow_schema, parts = parquet_of(file)
        store = cls.create(path, schema_from(arrow_schema) if schema is None else schema, **options)
        for part in parts:
            store.append(part)
        return store

    @settled
    def add_columns(self, columns: Sequence[Column]) -> None:
        """Add columns to a store that is open for appending, as `open(add_columns=...)` does.

        Args:
            columns: existing rows read as the fill until `update` sets values; a column that already exists is not an
                error.

        Raises:
            SchemaError: a column contradicts an existing column, or cannot join its axis.
            ReadOnlyError: the store is open for reading.
        """
        if self.mode != "a":
            raise ReadOnlyError("add_columns changes the store: open it with mode 'a'.")
        self._catalog.refresh()
        self._catalog.journal.change(functools.partial(_with_columns, columns=columns), self._catalog.newest_ns)
        self._catalog.follow_state()

    @contextmanager
    def _look_in(self) -> Generator[Catalog]:
        """Open a second catalog of the store, which shares nothing with the first."""
        medium = self._catalog.medium.fresh()
        catalog = Catalog(medium, self._root, warn=False)
        try:
            yield catalog
        finally:
            catalog.close()
            if medium is not self._catalog.medium:
                medium.close()

    @settled
    def close(self) -> None:
        """Finish this process's segments and release the maps; arrays that were read remain valid."""
        self._closed = True
        if self._pid == os.getpid():
            self._background.pause()
        for stream in (self._stream, *self._update_streams.values()):
            stream.close()
        self._catalog.close()
        self._catalog.medium.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"<TrajectoryStore {str(self.path)!r} closed>"
        return (
            f"<TrajectoryStore {str(self.path)!r} mode={self.mode!r} durability={self.durability!r}: "
            f"{len(self)} trajectories, {len(self.schema)} columns, "
            f"{len(self._catalog.segments)} segments>"
        )

    # Writing

    @settled
    def append(self, data: Any) -> Int64Array:
        """Append trajectories in one atomic commit.

        Args:
            data: per column a RaggedArray or a list of 1-D rows (ragged), a list of str (text), or `[n]` values
                (scalars). Columns with a fill, and mutable columns, may be omitted, also in single rows: None means no
                value. Alternatively, dicts, one per trajectory, in a list or from a generator; or a table: from
                pyarrow, polars or DuckDB, a pandas DataFrame, or a `datasets.Dataset`. Numbers may be tensors.

        Returns:
            `[n]` int64 ids, stable and never reused. The rows are durable on return.

        After an exception that interrupts the call, such as `KeyboardInterrupt`, the rows may be in the store. If the
        next call of this thread appends the same rows, the store contains them only once, and the call returns their
        ids.

        Raises:
            BatchError: the rows do not fit the schema; nothing was written.
            UnsyncedError: the rows are in the store, but their sync failed: do not append them again.
            WriteFailedError: the write failed; rows acknowledged before are safe.
        """
        self._check_writable("append")
        return self._append(self._prepared(rereadable(data)))

    @following
    def _prepared(self, data: Any) -> Batch:
        return batch_from(self.schema, data)

    @settled
    def append_batch(self, batch: Batch) -> Int64Array:
        """Append rows that are already in the form on disk, as `copy_rows` does.

        Raises:
            BatchError: a column does not have as many values as its rows.
        """
        self._check_writable("append")
        batch.check(self.schema)
        return self._append(batch)

    def _append(self, batch: Batch) -> Int64Array:
        if not batch.n_rows:
            return np.empty(0, np.int64)
        if self._catalog.medium.complete:  # elsewhere a refresh costs as much as the append
            self._catalog.follow_others(self.segment)
        return self._commit(self._stream, batch, self.schema, self._on_segment)

    @settled
    def update(self, ids: Ids, **values: Any) -> None:
        """Update columns of existing trajectories.

        Only a column with `mutable=True` can be updated; the values of other columns never change. The values are
        appended by one atomic commit, with the durability and the checksum of an append; nothing is overwritten. This
        process reads them immediately, other processes after their next `refresh`. The last update of a value applies,
        regardless of the writers' clocks.

        Args:
            ids: `[n]` ids.
            **values: per column a RaggedArray or a list of rows (ragged), a list of str (text), `[n]` values, or one
                value for all rows. A ragged column that shares its axis keeps the length of its row.

        Raises:
            BatchError: a column is not mutable, or a length or a dtype does not fit; nothing was written.
            MissingRowError: an id is not in the store.
            UnsyncedError: the values are in the store, but their sync failed.
            WriteFailedError: the write failed; no part of this update is visible.
        """
        self._check_writable("update")
        if not values:
            raise BatchError("update needs at least one column, for example update(ids, advantage=values).")
        row_ids = as_ids(ids)
        self._catalog.follow_others()
        for name in values:
            if not self.schema[name].mutable:
                raise BatchError(
                    f"column '{name}' of {self.path} cannot be updated: only columns with mutable=True can. To "
                    "store later values, add a column: add_columns([Column(..., mutable=True)])."
                )
        names = tuple(c.name for c in self.schema if c.name in values)
        schema = self.schema.only(names)
        batch = self._update_batch(schema, row_ids, values)
        if not len(row_ids):
            return
        stream = self._update_streams.get(names)
        if stream is None:
            stream = self._update_streams[names] = Stream(self._catalog, self._root, "update", self.durability)
        self._commit(stream, batch, schema, None)

    def _commit(self, stream: Stream, batch: Batch, schema: Schema, begin: Callable[[int], None] | None) -> Int64Array:
        """Commit rows or updates and read them back; return their addresses, which are the ids of rows."""
        stream.begin()
        try:
            num_segments = stream.num_segments
            ordinal, first = stream.append(batch, schema, begin)
            self._catalog.refresh_segment(ordinal)
            self._background.tidy(self._catalog, began=stream.num_segments != num_segments)
            self._positions = None
            start = (ordinal << ORDINAL_SHIFT) + first
            return np.arange(start, start + batch.n_rows, dtype=np.int64)
        except BaseException as error:
            stream.interrupted(batch, error)
            raise

    def _update_batch(self, schema: Schema, ids: Int64Array, values: Mapping[str, Any]) -> Batch:
        """Return the rows of an update, checked against the trajectories that they belong to."""
        columns = {column.name: _for_all(column, values[column.name], len(ids)) for column in schema}
        batch = prepare(schema, columns, len(ids))
        self._check_lengths(schema, ids, batch)
        batch.extra = {TARGET: np.ascontiguousarray(ids)}
        return batch

    @following
    def _check_lengths(self, schema: Schema, ids: Int64Array, batch: Batch) -> None:
        """Check that the rows of an update exist, and that those on a shared axis keep their lengths."""
        shared = [axis for axis in batch.lengths if len(self.schema.axes[axis]) > 1]
        if not shared:  # as of scalars: their rows are not looked at
            self._catalog.locate(ids)
            return
        reader = ColumnReader(self._catalog, ids, {})
        for axis in shared:
            column = schema.axes[axis][0]
            _same_lengths(column, batch.lengths[axis], reader.base_lengths(column))

    @settled
    def flush(self) -> None:
        """Wait until every acknowledged commit is on the disk, including those of other processes.

        Raises:
            UnsyncedError: everything is in the store, but a sync failed, now or before.
        """
        self._check_writable("flush")
        if self._catalog.medium.bucket.can_tear:
            self._catalog.refresh()
        self.sync()

    def sync(self) -> None:
        """Wait until every row that this object sees is on the disk, without checking for new rows.

        Unlike `flush`, it does not change what the store's other methods return: a thread may call it while another
        thread reads and appends.

        Raises:
            UnsyncedError: everything is in the store, but a sync failed, now or before.
        """
        if not self._catalog.medium.bucket.can_tear:
            return  # an object store makes its own promise
        try:
            self._catalog.sync()
        except OSError as error:
            raise fs.unsynced(error, self.path) from error

    # Upkeep

    @property
    def traffic(self) -> Traffic:
        """The requests of this process to an object store so far; all zero if the store is a folder."""
        return self._catalog.medium.bucket.traffic

    def copy(self, target: str | os.PathLike[str], *, skip_damaged: bool = False) -> Int64Array:
        """Copy the store with its ids, consistently, while any process may write to it: a backup.

        The copy contains at least the rows that this process sees, and passes `verify`. `copy_rows` and `rlhf-pipeline
        copy` create a store with new ids instead.

        Args:
            target: the new folder, which must not exist, or must be empty.
            skip_damaged: copy a store with damaged rows. Their files are copied unchanged, so that these rows are
                damaged in the copy as well; otherwise they are an error.

        Returns:
            `[K]` int64: the ids of the damaged rows.

        Raises:
            CorruptionError: some rows are damaged; the error lists them.
            StoreExistsError: the target is not empty, or is inside the store's folder.
            SchemaError: the store is not in a folder.
        """
        self._check_open()
        if not isinstance(self.path, Path):
            raise SchemaError(
                f"copy() copies a store in a folder; {self.path} is in an object store. Copy its objects with the "
                "tools of the object store, the catalog first (see FORMAT.md), or copy its rows: rlhf-pipeline copy "
                f"{self.path} --to FOLDER"
            )
        damaged = self.damaged()
        self.intact(damaged, skip_damaged=skip_damaged)
        with self._catalog.medium.bucket.upkeep_lock():  # if another process merges, a round is repeated instead
            copy_folder(self.path, Path(target).expanduser(), self._root)
        return damaged

    @property
    def segment(self) -> int | None:
        """The number of the segment that this process appends rows to, or None if it has none open."""
        writer = self._stream.writer
        return None if writer is None else writer.ordinal

    def on_segment(self, begin: Callable[[int], None] | None) -> None:
        """Register a function to call with the number of each new segment of this process, before its first commit.

        Together with `fence`, this makes a lease safe: the holder publishes the segment's number, and a process that
        takes over the lease from a holder without a heartbeat ends that segment. If the function raises, the append
        fails, and none of its rows is in the store.
        """
        self._on_segment = begin

    @settled
    def fence(self, segment: int) -> None:
        """End a segment of another process: its later appends go to a new segment.

        After this call, all commits of the segment are visible here.
        """
        self._check_writable("fence")
        self._catalog.refresh()
        known_segment = self._catalog.segments.get(segment)
        if known_segment is not None:
            self._catalog.medium.fence(known_segment)
        self._catalog.refresh()
        self._catalog.refresh_segment(segment)

    @settled
    def compact(self) -> CompactReport:
        """Merge finished segments into fewer segments, without superseded updates; ids and their order do not change.

        Calling it is optional: small segments are merged in the background. Other readers use the old segments until
        they refresh.
        """
        self._check_writable("compact")
        self._background.pause()
        for stream in (self._stream, *self._update_streams.values()):
            stream.close()
        with self._look_in() as catalog:
            while True:
                try:
                    report = compact(catalog, self._root)
                    break
                except SegmentGoneError:  # another process removed segments that were to be merged
                    catalog.refresh()
        self._catalog.refresh()
        self._positions = None
        return report

    def being_written(self) -> bool:
        """Return whether a process may still append to a segment; `compact` leaves such segments unchanged.

        memmap backend: a live process has it open. zarr backend: it was not closed, and its last commit is less than
        an hour old. A process that has the store open but has not appended yet is not detected.
        """
        self.refresh()
        return any(s.is_live() for s in (*self._catalog.segments.values(), *self._catalog.updates.values()))

    def verify(self, ids: Ids | None = None) -> VerifyReport:
        """Recompute every checksum, compare the files with the catalog, and describe any damage.

        Other processes may append, update, evict and compact at the same time.

        Args:
            ids: check only the segments that contain these trajectories, and the updates; None checks the complete
                store.
        """
        self._check_open()
        among = None if ids is None else as_ids(ids)
        report = self._verified(among)
        if not report.ok:
            earlier, report = report, self._verified(among)
            report.confirm(earlier)
        report.trajectories = len(self)
        return report

    def _verified(self, ids: Int64Array | None) -> VerifyReport:
        with self._look_in() as catalog:
            return catalog.verify(self.path, ids)

    @settled
    def accept_losses(self, ids: Ids | None = None) -> int:
        """Accept the loss of rows and updates that are damaged now: later checks do not report them as problems.

        Nothing is removed: if the correct files are restored, the rows are valid again. Segments that cannot be opened
        are not included.

        Args:
            ids: accept only the damaged commits that contain some of these trajectories; None accepts all.

        Returns:
            The number of commits, or of parts of merged segments, whose loss was accepted.
        """
        self._check_writable("accept_losses")
        with self._look_in() as catalog:
            catalog.find_damage()
            accepted = accept_losses(catalog, None if ids is None else as_ids(ids))
        self.refresh()
        return accepted

    def _check_writable(self, what: str) -> None:
        self._check_open()
        if self.mode != "a":
            raise ReadOnlyError(
                f"{what} needs a store opened for writing; {self.path} was opened with mode 'r'. Use "
                "TrajectoryStore.open(path, mode='a')."
            )


def _reopen(settings: Mapping[str, Any], then: Snapshot | None, identity: object) -> StoreTable:
    """Open a pickled store, or a view of it as of a snapshot; what it held is only its identity."""
    store = TrajectoryStore.open(**settings)
    return store if then is None else store.as_of(then)


def _same_lengths(column: Column, new_lengths: Int64Array, stored_lengths: Int64Array) -> None:
    wrong = np.flatnonzero(new_lengths != stored_lengths)
    if len(wrong):
        row = int(wrong[0])
        raise BatchError(
            f"row {row} of column '{column.name}' has length {int(new_lengths[row])}, but the trajectory has "
            f"{int(stored_lengths[row])} elements on axis '{column.axis}'."
        )


def _for_all(column: Column, column_rows: Any, count: int) -> Any:
    """Turn one value for all rows into one value per row."""
    if column.is_text and isinstance(column_rows, (str, bytes)):
        return [column_rows] * count
    if column.axis is None:
        array = np.asarray(column_rows)
        if array.ndim == 0 and array.dtype.kind != "O":
            return np.broadcast_to(array, (count,))
    return column_rows


def _with_columns(state: State, columns: Sequence[Column]) -> State | None:
    """Return a state with more columns, or None if all of them exist already."""
    new: list[Column] = []
    for column in columns:
        existing = state.schema.find(column.name)
        if existing is None:
            new.append(_fits(column, state.schema))
        elif existing.to_json() != column.to_json():
            raise SchemaError(
                f"the store already has a column '{column.name}', defined as {existing}. Choose another name."
            )
    return replace(state, schema=state.schema.with_columns(new)) if new else None


def _fits(column: Column, schema: Schema) -> Column:
    """Reject a column on an axis whose only column may be updated to other lengths, else return it."""
    others = schema.axes.get(column.axis or "", ())
    if len(others) == 1 and others[0].mutable:
        raise SchemaError(
            f"no column can join axis '{column.axis}': its only column, '{others[0].name}', is mutable, so "
            "an update may change its lengths. Choose a separate axis, for example Column(name, dtype, ragged=True, "
            "axis=name, fill=...)."
        )
    return column
