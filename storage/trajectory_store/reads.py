"""The reading half of a store: its rows and their columns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt

from trajectory_store.arrival import Arrivals
from trajectory_store.backend import Gap, Segment
from trajectory_store.batch import Batch
from trajectory_store.catalog import Catalog
from trajectory_store.columns import ColumnReader, Side
from trajectory_store.errors import (
    BatchError,
    CorruptionError,
    DamageFoundError,
    SchemaError,
    SegmentGoneError,
    StoreClosedError,
    StoreError,
    UnknownColumnError,
    did_you_mean,
)
from trajectory_store.pool import BufferPool
from trajectory_store.ragged import Int64Array, RaggedArray, distinct
from trajectory_store.root import Root
from trajectory_store.schema import Column, Schema
from trajectory_store.single_row import read_row
from trajectory_store.snapshot import Snapshot, limits_of
from trajectory_store.texts import Texts
from trajectory_store.upkeep import read_batch
from trajectory_store.where import Operands, evaluate, names_in

Ids = npt.ArrayLike
Columns = Sequence[str] | str | None
Names = Mapping[str, "str | Callable[[Any, Int64Array], npt.NDArray[Any]]"]
"""Additional names in a condition; see `StoreReads.where`."""

_WHERE_BYTES = 64 << 20
"""The number of bytes of text that a condition searches at a time; longer texts are searched in parts."""

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="StoreReads")


def following(read: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Repeat a read during which a segment was removed, until the catalog no longer changes: merged rows have moved.

    A read that found damage is repeated as well: it excludes those rows, or names them if they were asked for.
    """

    @functools.wraps(read)
    def wrapper(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        looks = 0
        while True:
            number = self.catalog_number
            try:
                return read(self, *args, **kwargs)
            except DamageFoundError:
                continue
            except UnknownColumnError:  # another process may have added it
                schema = self.schema
                self.follow()
                if self.schema == schema:
                    raise
            except SegmentGoneError as error:
                self.follow()
                looks += self.catalog_number == number
                if looks > 2 and not self._catalog.find_missing():  # pyright: ignore[reportPrivateUsage]
                    raise CorruptionError(
                        f"{self.path}: {error.missing} is missing, although the catalog still lists the segment: "
                        "something other than the store removed the files. Run verify(), and restore the segment "
                        "from a copy."
                    ) from None
            except StoreError:
                raise
            except BaseException:
                self._catalog.is_doubtful = True  # pyright: ignore[reportPrivateUsage]
                raise

    return wrapper


class StoreReads:
    """Reads an open store; `TrajectoryStore` adds writing and upkeep.

    Args:
        path: the folder, or the address of an object store.
        root: the content of the root's zarr.json.
        catalog: this process's view of the store.
        then: the snapshot whose rows and values are read; None reads all.
    """

    def __init__(self, path: Path | str, root: Root, catalog: Catalog, then: Snapshot | None = None) -> None:
        self.path = path
        self._root = root
        self._catalog = catalog
        self._then = then
        self._limits: Mapping[int, int] | None = None if then is None else {-1: 0, **then.updates}
        self._pool = BufferPool()
        self._positions: Int64Array | None = None
        self._closed = False

    @property
    def catalog_number(self) -> int:
        """The number of the newest catalog record that this reader has seen."""
        return self._catalog.state.number

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def schema(self) -> Schema:
        """The columns of the store, as of the last `refresh`."""
        return self._catalog.state.schema

    @property
    def used_bytes(self) -> int:
        """The approximate disk space of the commits that this reader has seen, in bytes.

        It is computed from counts, without reading the files, so it is cheap enough to query after each commit.
        """
        return sum(s.used_bytes() for s in (*self._catalog.segments.values(), *self._catalog.updates.values()))

    @property
    def max_trajectories(self) -> int | None:
        """The number of newest trajectories that are kept; None for all."""
        return self._root.max_trajectories

    # Following

    def refresh(self) -> int:
        """Read the commits of other processes, and damaged files that were restored; return the watermark."""
        self.follow()
        self._positions = None
        return self.watermark

    def follow(self) -> None:
        """Read the commits of other processes; row positions do not change."""
        self._check_open()
        self._catalog.refresh()
        self._catalog.look_again()

    @property
    def watermark(self) -> int:
        """The number of trajectories committed since the store was created, as seen by this reader.

        It never decreases: evicted trajectories are included.
        """
        self._check_open()
        return self._catalog.watermark() if self._then is None else self._then.watermark

    @following
    def __len__(self) -> int:
        """Return the number of row positions, which is that of `ids()` after a `refresh`."""
        self._check_open()
        if self._positions is not None or self._then is not None:
            return len(self.positions())
        total = self._catalog.served_rows()
        limit = self._root.max_trajectories
        return total if limit is None else min(total, limit)

    def positions(self) -> Int64Array:
        """Return the ids of the rows by position: `[len(self)]` int64, read-only.

        They are the ids that `ids()` returned at the last `refresh`, or at the last write of this store. Damage found
        later moves no row; reading a damaged position raises an error that reports the row.
        """
        if self._positions is None:
            self._positions = self.ids()
        return self._positions

    @following
    def snapshot(self) -> Snapshot:
        """Record the rows and updates that this reader sees now, for use by any reader at any later time.

        `ids(snapshot)` returns the rows of that moment, and `as_of(snapshot)` their values at that moment.
        """
        self._check_open()
        catalog = self._catalog
        return Snapshot(limits_of(catalog.segments), self.watermark, limits_of(catalog.updates))

    @following
    def ids(self, snapshot: Snapshot | None = None) -> Int64Array:
        """Return the ids in the order of arrival, the same for every reader: `[len(self)]` int64, read-only.

        Args:
            snapshot: return only the rows of this snapshot, without those evicted since.
        """
        self._check_open()
        ids = self._catalog.ids()
        for moment in (snapshot, self._then):
            ids = ids if moment is None else moment.select(ids)
        limit = self._root.max_trajectories
        return ids if limit is None else ids[max(0, len(ids) - limit) :]

    @following
    def arrivals(self) -> Arrivals:
        """Return the rows of `ids()` as a sequence whose slices are ids, with no id per row in memory.

        This is sufficient for code that reads the newest rows, or all rows in parts.
        """
        self._check_open()
        if self._then is not None:
            return Arrivals.of_ids(self.ids())
        return self._catalog.arrivals().newest(self._root.max_trajectories)

    @following
    def holds(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return which of some ids are in `ids()`, `[B]` bool, in a time that depends only on these ids."""
        self._check_open()
        row_ids = as_ids(ids)
        mask = self._catalog.find(row_ids).ordinals >= 0
        if self._then is not None:
            mask &= np.isin(row_ids, self._then.select(row_ids))
        limit = self._root.max_trajectories
        if limit is not None:  # rows leave by whole segments: the oldest that are there may count no more
            every = self._catalog.ids()
            passed = np.sort(every[: max(0, len(every) - limit)])
            mask &= passed.searchsorted(row_ids) == passed.searchsorted(row_ids, "right")
        return mask

    @following
    def where(
        self, condition: str, ids: Ids | None = None, *, names: Names | None = None, checked: bool = True
    ) -> Int64Array:
        """Return the ids of the trajectories that meet a condition, in the order of arrival: `[K]` int64.

        Texts are compared as the bytes that are stored: `finish_reason == 'length'` over 10^6 rows takes
        milliseconds.

        Args:
            condition: for example `"task_reward >= 0.5 and 'def ' in completion"`; see `where.evaluate`.
            ids: the trajectories to search; None for all.
            names: additional names: an alias of a column, or a function of this store and ids that returns one value
                per id, `[n]`.
            checked: as in `read`; damaged rows are excluded from all rows.

        Raises:
            SchemaError: the condition cannot be read, or contains an unknown column.
            CorruptionError: one of `ids` is damaged.
        """
        reader = self._reader(ids, (), checked=checked)  # one for all columns, so that new rows are in none of them
        schema, further = self.schema, names or {}
        named_columns = [further.get(name, name) for name in names_in(condition)]
        sized = [
            schema[name] for name in named_columns if isinstance(name, str) and name in schema and schema[name].axis
        ]
        size = sum(int(reader.spans(c).lengths.sum()) * c.width * c.np_dtype.itemsize for c in sized)
        blocks = -(-size // _WHERE_BYTES) if size > _WHERE_BYTES else 1
        matching_ids = [
            self._meeting(condition, part, further)
            for part in (
                [reader]
                if blocks == 1
                else (
                    self._reader(some, (), checked=checked, every=ids is None)
                    for some in np.array_split(reader.ids, blocks)
                )
            )
        ]
        return np.concatenate(matching_ids)

    def _meeting(self, condition: str, reader: ColumnReader, names: Names) -> Int64Array:
        """Return the ids of a reader's rows that meet a condition."""

        def column(name: str) -> Column:
            stored_name = names.get(name, name)
            schema_column = self.schema.find(stored_name) if isinstance(stored_name, str) else None
            if schema_column is None:
                raise UnknownColumnError(
                    f"{self.path} has no column '{name}', which the condition {condition!r} uses."
                    + did_you_mean(name, [*self.schema.names, *names])
                )
            return schema_column

        def read(name: str) -> npt.NDArray[Any] | Texts:
            compute = names.get(name)
            if callable(compute):
                return compute(self, reader.ids)
            read_column = column(name)
            if read_column.axis is not None and not read_column.is_text:
                raise SchemaError(
                    f"the condition {condition!r}: '{name}' has several values per trajectory; compare its len, "
                    f"sum, min, max or mean, for example max({name}) > 0."
                )
            reader.fetch([read_column])
            if not read_column.is_text:
                return reader.scalars(read_column)
            return Texts(reader.ragged(read_column), str if read_column.dtype == "str" else bytes)

        def lengths(name: str) -> Int64Array:
            read_column = column(name)
            texts = read(name) if read_column.is_text else None
            return (
                texts.lengths()
                if isinstance(texts, Texts)
                else reader.spans(self._ragged_column(read_column.name)).lengths
            )

        def ragged(name: str) -> RaggedArray:
            read_column = self._ragged_column(column(name).name)
            if read_column.is_text:
                raise SchemaError(f"the condition {condition!r}: '{name}' is text; only its len can be compared.")
            reader.fetch([read_column])
            return reader.ragged(read_column)

        def missing(name: str) -> npt.NDArray[np.bool_]:
            if callable(names.get(name)):
                return np.zeros(len(reader.ids), bool)
            return ~_has_value(reader, column(name))

        source = Operands(read=read, lengths=lengths, ragged=ragged, missing=missing)
        return reader.ids[np.broadcast_to(evaluate(condition, source), len(reader.ids))]

    def batches(
        self, rows: int, columns: Columns = None, ids: Ids | None = None, *, checked: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Yield batches of the values that `read` returns, with the ids as `"ids"`.

        In addition to the ids, a pass over a store in a folder needs only the memory for the segments of one batch: the
        arrays of a segment are released after its last row.

        Args:
            rows: rows per batch; the last one may have fewer.
            columns: names; None for all.
            ids: which trajectories; None for all in the order of arrival.
            checked: as in `read`; damaged rows are excluded from all rows.
        """
        if rows < 1:
            raise SchemaError(f"rows is {rows}; it must be at least 1.")
        among, before = self.arrivals() if ids is None else as_ids(ids), set[int]()
        for part, values in self._parts(
            among, rows, lambda part: self.read(part, columns, checked=checked), every=ids is None
        ):
            yield {"ids": part, **values}
            before = self._passed(before, part)

    def _parts(
        self, ids: Int64Array | Arrivals, rows: int, read: Callable[[Int64Array], R], *, every: bool
    ) -> Iterator[tuple[Int64Array, R]]:
        """Yield ids, some at a time, and what was read of them; of all rows without those that are found damaged."""
        for first in range(0, len(ids), rows):
            part = ids[first : first + rows]
            while True:
                try:
                    yield part, read(part)
                    break
                except CorruptionError:
                    left = part[self.holds(part)] if every else part
                    if len(left) == len(part):
                        raise
                    self._catalog.warn_of_problems()  # these rows are missing, and no error reports it
                    part = left

    @following
    def _passed(self, before: set[int], ids: Int64Array) -> set[int]:
        """Release the segments that a pass has left; return those of the current batch."""
        now = set(distinct(self._catalog.locate(ids)[0]))
        for ordinal in before - now & self._catalog.segments.keys():
            self._catalog.segments[ordinal].release()
        return now

    # Damage

    @following
    def damaged(self, ids: Ids | None = None) -> Int64Array:
        """Compare trajectories, with all columns and later values, with their checksums.

        Args:
            ids: which trajectories; None for all.

        Returns:
            `[K]` int64, ascending: the ids of damaged rows whose loss was not accepted.

        Raises:
            CorruptionError: a segment cannot be opened, so the damaged trajectories are unknown.
        """
        self._check_open()
        return _ids_of(self._catalog.damage(None if ids is None else as_ids(ids)))

    @following
    def intact(self, ids: Ids | None = None, *, skip_damaged: bool = False) -> Int64Array:
        """Return the ids of trajectories that match their checksums, for code that writes the rows elsewhere.

        Copies and exports call this first, so that damaged rows do not receive new, valid checksums.

        Args:
            ids: which trajectories; None for all in the order of arrival.
            skip_damaged: exclude damaged trajectories; otherwise they are an error.

        Raises:
            CorruptionError: some trajectories are damaged; the error lists them.
        """
        self._check_open()
        damage = self._catalog.damage(None if ids is None else as_ids(ids))
        damaged = _ids_of(damage)
        if damage and not skip_damaged:
            error = self._catalog.unreadable(damage[0][0], damage[0][1], damaged)
            raise CorruptionError(
                f"{error} Restore the files from a copy, or skip the damaged trajectories (skip_damaged=True or "
                "--skip-damaged)."
            )
        among = self.ids() if ids is None else as_ids(ids)
        return among[~np.isin(among, damaged)] if len(damaged) else among

    # Reading

    @following
    def read(self, ids: Ids, columns: Columns = None, *, checked: bool = True) -> dict[str, Any]:
        """Read trajectories, unpadded.

        Args:
            ids: `[B]` ids, in any order, repeated or not.
            columns: names; None for all.
            checked: first compare these rows, and their later values, with their checksums. Each is compared once per
                process and state of its files, so later reads take hardly longer; `refresh`, and reads from time to
                time, check whether files have changed. False returns the content of the files unchecked.

        Returns:
            Per column a list of B 1-D arrays (ragged), a list of str (text), or a `[B]` array.

        Raises:
            MissingRowError: an id is not in the store.
            UnknownColumnError: the store has no such column.
            CorruptionError: a row does not match its checksum; the error reports the rows and the segment.
        """
        ids = as_ids(ids)
        if len(ids) == 1 and self._then is None:
            self._check_open()
            schema = self.schema
            names = schema.names if columns is None else (columns,) if isinstance(columns, str) else tuple(columns)
            row = read_row(self._catalog, int(ids[0]), schema, names, checked=checked)
            if row is not None:
                return row
        selected = self.schema.select(columns)
        reader = self._reader(ids, selected, checked=checked)
        out: dict[str, Any] = {}
        for column in selected:
            if column.is_text:
                out[column.name] = reader.text(column)
            elif column.axis is not None:
                out[column.name] = reader.ragged(column).to_list()
            else:
                out[column.name] = reader.scalars(column)
        return out

    @following
    def read_batch(self, ids: Ids, schema: Schema | None = None, *, checked: bool = True) -> Batch:
        """Read complete rows in the form in which they are written, with later values; `checked` as in `read`."""
        schema = schema or self.schema
        return read_batch(self._reader(ids, schema, checked=checked), schema)

    @following
    def read_ragged(self, column: str, ids: Ids | None = None, *, checked: bool = True) -> RaggedArray:
        """Read a ragged column in one flat array; `ids=None` reads all trajectories in the order of arrival.

        Reads of all trajectories exclude damaged trajectories, see `damaged`; `checked` is as in `read`.
        """
        ragged_column = self._ragged_column(column)
        if ragged_column.is_text:
            raise SchemaError(f"column '{column}' is text; use read().")
        return self._reader(ids, [ragged_column], checked=checked).ragged(ragged_column)

    @following
    def read_padded(
        self,
        ids: Ids,
        columns: Columns = None,
        *,
        pad_value: Any = 0,
        side: Side = "right",
        pad_to_multiple_of: int = 1,
        out: Mapping[str, npt.NDArray[Any]] | None = None,
        checked: bool = True,
    ) -> dict[str, Any]:
        """Read trajectories as padded matrices.

        The memory of an earlier batch is reused once there is no reference to it, which is several times faster than
        new memory.

        Args:
            ids: `[B]` ids.
            columns: names; None for all.
            pad_value: fills the rest of a row: one value, or one per column name (default 0).
            side: the side of the padding.
            pad_to_multiple_of: T is rounded up to a multiple of this.
            out: arrays to write into, by column: contiguous, at least `[B, T]`.
            checked: compare the rows with their checksums, as `read` does.

        Returns:
            Per ragged column `[B, T]` or `[B, T, *shape]`, where T is the length of the longest row of the column's
            axis; text as a list, scalars as `[B]`; `"lengths"` `[B]` int64 for the first requested ragged axis, and
            `"<axis>.lengths"` for any further axis.
        """
        if side not in ("left", "right"):
            raise SchemaError(f"side {side!r} is unknown. Use 'right' or 'left'.")
        if pad_to_multiple_of < 1:
            raise SchemaError(f"pad_to_multiple_of is {pad_to_multiple_of}; it must be at least 1.")
        selected = self.schema.select(columns)
        reader = self._reader(ids, selected, checked=checked)
        by_name = isinstance(pad_value, Mapping)
        result: dict[str, Any] = {}
        lengths: dict[str, Any] = {}
        first_axis: str | None = None
        for column in selected:
            name, axis = column.name, column.axis
            if axis is None:
                result[name] = reader.scalars(column)
                continue
            if column.is_text:
                result[name] = reader.text(column)
                continue
            pad = cast("Mapping[str, Any]", pad_value).get(name, 0) if by_name else pad_value
            target = None if out is None else out.get(name)
            result[name], sizes = reader.padded(column, pad_to_multiple_of, pad, side, self._pool, target)
            first_axis = first_axis or axis
            lengths["lengths" if axis == first_axis else f"{axis}.lengths"] = sizes
        return result | lengths

    @following
    def read_scalars(self, column: str, ids: Ids | None = None, *, checked: bool = True) -> npt.NDArray[Any]:
        """Read one scalar column.

        Args:
            column: its name; for a text column, an object array of texts is returned.
            ids: `[B]` ids; None for all trajectories in the order of arrival.
            checked: as in `read`.
        """
        scalar_column = self.schema[column]
        if scalar_column.axis is not None and not scalar_column.is_text:
            raise SchemaError(f"column '{column}' is ragged; use read_ragged or read_padded.")
        reader = self._reader(ids, [scalar_column], checked=checked)
        return (
            np.array(reader.text(scalar_column), dtype=object)
            if scalar_column.is_text
            else reader.scalars(scalar_column)
        )

    @following
    def lengths(self, column: str, ids: Ids | None = None, *, checked: bool = True) -> Int64Array:
        """Return the length of each row of a ragged column (UTF-8 bytes for text): `[B]` int64."""
        ragged_column = self._ragged_column(column)
        return self._reader(ids, [ragged_column], checked=checked).spans(ragged_column).lengths

    @following
    def present(self, column: str, ids: Ids | None = None, *, checked: bool = True) -> npt.NDArray[np.bool_]:
        """Return whether a value was given, by the append or an update, and not filled in: `[B]` bool."""
        store_column = self.schema[column]
        return self._reader(ids, [store_column], checked=checked).present(store_column)

    @following
    def has_value(self, column: str, ids: Ids | None = None, *, checked: bool = True) -> npt.NDArray[np.bool_]:
        """Return whether a value was given that is neither NaN nor an empty text: `[B]` bool.

        `column is not None` in a condition has this meaning.
        """
        return _has_value(self._reader(ids, (), checked=checked), self.schema[column])

    # Helpers

    def _reader(
        self, ids: Ids | None, columns: Collection[Column] | Schema, *, checked: bool = True, every: bool = False
    ) -> ColumnReader:
        """Return a reader of these rows, or of all rows in the order of arrival; `every`: as of `ColumnReader`."""
        self._check_open()
        if ids is None and self._then is None:
            reader = ColumnReader.of_all(self._catalog, self._root.max_trajectories, self._limits, checked=checked)
        else:
            among, every = (self.ids(), True) if ids is None else (as_ids(ids), every)
            reader = ColumnReader(self._catalog, among, self._limits, checked=checked, every=every)
        reader.fetch(columns)
        reader.check(columns)
        return reader

    def _ragged_column(self, name: str) -> Column:
        column = self.schema[name]
        if column.axis is None:
            raise SchemaError(f"column '{name}' has one value per row, so it has no lengths. Use read_scalars.")
        return column

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"the store {self.path} is closed. Open it again with TrajectoryStore.open.")
        if self._catalog.is_doubtful:
            self._catalog.begin_again()


def _has_value(reader: ColumnReader, column: Column) -> npt.NDArray[np.bool_]:
    """Return which rows have a value that is neither NaN nor an empty text; text itself is not read."""
    present = reader.present(column)
    if column.is_text:
        return present & (reader.spans(column).lengths > 0)
    if column.axis is not None or column.np_dtype.kind != "f":
        return present
    reader.fetch([column])
    return present & ~np.isnan(reader.scalars(column))


def _ids_of(damage: Iterable[tuple[Segment, Gap, Int64Array]]) -> Int64Array:
    return np.unique(np.concatenate([np.empty(0, np.int64), *(ids for *_, ids in damage)]))


def as_ids(ids: Ids) -> Int64Array:
    """Convert a caller's ids to `[B]` int64."""
    array: npt.NDArray[Any] = np.asarray(ids)
    if array.dtype == np.int64 and array.ndim == 1:
        return array
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim == 0:
        array = array.reshape(1)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BatchError(
            f"ids must be a 1-D array of integers; got {array.dtype} of shape {list(array.shape)}. Get them from "
            "append() or ids()."
        )
    return array.astype(np.int64, copy=False)
