"""A store as a table: rows by place, columns by name, and what tools that read tables ask for."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, SupportsIndex, cast, overload

import numpy as np
import numpy.typing as npt

from trajectory_store import arrow
from trajectory_store.errors import BatchError, PlaceError, counted
from trajectory_store.new_files import new_file
from trajectory_store.ragged import Int64Array
from trajectory_store.reads import Columns, Ids, StoreReads, as_ids, following
from trajectory_store.schema import Schema
from trajectory_store.snapshot import Snapshot

_SHOWN_ROWS: Final = 5
"""Number of newest rows that a notebook displays."""
_SHOWN_CHARACTERS: Final = 80
_ITER_ROWS: Final = 1024
"""Number of rows that a loop over a store reads at a time."""


class StoreTable(StoreReads):
    """The rows of an open store by their position in the order of arrival, as in tables and datasets."""

    _reopening: tuple[Callable[..., StoreTable], dict[str, Any]]
    """How to open the store again in another process."""

    def as_of(self, snapshot: Snapshot) -> StoreTable:
        """Return a view of the rows and values of a snapshot, without later rows and later updates.

        Reading raises SnapshotGoneError if a merge, such as `compact`, has removed superseded updates since then.
        """
        self._check_open()
        view = StoreTable(self.path, self._root, self._catalog, snapshot)
        reopen, settings = self._reopening
        view._reopening = reopen, {**settings, "mode": "r"}
        return view

    @following
    def _identity(self) -> tuple[str, int, int, int]:
        """Return what identifies the rows and values that this reader sees, however they are stored.

        It is the store's id, the watermark, the time of the last update, and the number of rows that were removed.
        """
        if self._closed:
            return self._root.uuid, 0, 0, 0
        self._check_open()
        last = self._catalog.last_update() if self._then is None else 0  # of a snapshot, no later one counts
        return self._root.uuid, self.watermark, last, self.watermark - len(self.ids())

    def __reduce__(self) -> tuple[Callable[..., StoreTable], tuple[Any, ...]]:
        """Reduce to `open` with the same settings: an unpickled store is opened again, and writes its own segments.

        The pickle also has what the store holds, which opening ignores: for `datasets` it identifies the data.
        """
        reopen, settings = self._reopening
        return reopen, (settings, self._then, self._identity())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the trajectories in the order of arrival, each as a dict of its values by column."""
        for block in self.batches(_ITER_ROWS):
            count = len(block.pop("ids"))
            yield from _rows(block, count)

    @overload
    def __getitem__(self, key: str | tuple[Any, str]) -> Any: ...
    @overload
    def __getitem__(self, key: Sequence[str] | tuple[Any, Sequence[str]]) -> dict[str, Any]: ...
    @overload
    def __getitem__(
        self, key: SupportsIndex | slice[Any, Any, Any] | Sequence[int] | npt.NDArray[Any]
    ) -> dict[str, Any]: ...
    def __getitem__(self, key: Any) -> Any:
        """Read by position in the order of arrival, as of a `datasets.Dataset`; `read` takes ids.

        `store[5]` is one trajectory, a dict of its values; `store[-1]` the newest. `store[10:20]`, `store[[3, 1]]` and
        `store[mask]` are several, a dict of columns. `store["reward"]` is a column of all rows, `store[["reward",
        "prompt"]]` several; `store[10:20, "reward"]` a column of some rows.

        Raises:
            PlaceError: there is no row in a place; also an IndexError.
            BatchError: the key is none of these.
        """
        rows, columns = cast("tuple[Any, Any]", key) if isinstance(key, tuple) else (key, None)
        if not isinstance(key, tuple) and _are_names(rows):
            columns_read = self._all_rows(rows)
            return columns_read[rows] if isinstance(rows, str) else columns_read
        if not (columns is None or _are_names(columns)) or rows is None or isinstance(rows, (bool, str)):
            raise BatchError(
                f"store[{key!r}]: the key must be a position, a slice, an array of positions, a mask, or column names; "
                "store[10:20, 'column'] reads one column of some rows. To read rows by id, use read(ids)."
            )
        if hasattr(rows, "__index__") and not isinstance(rows, np.ndarray):
            every, place = self.positions(), int(rows)
            if not -len(every) <= place < len(every):
                raise _no_row(place, len(every))
            row = {name: values[0] for name, values in self.read(every[[place]], columns).items()}
            return row[columns] if isinstance(columns, str) else row
        columns_read = self.read(self._at(rows, key), columns)
        return columns_read[columns] if isinstance(columns, str) else columns_read

    @following
    def _all_rows(self, columns: Columns) -> dict[str, Any]:
        """Return columns of all rows that can be read."""
        selected = self.schema.select(columns)
        reader, columns_read = self._reader(None, selected), dict[str, Any]()
        for column in selected:
            if column.is_text:
                columns_read[column.name] = reader.text(column)
            else:
                columns_read[column.name] = (
                    reader.scalars(column) if column.axis is None else reader.ragged(column).to_list()
                )
        return columns_read

    def __getitems__(self, places: Sequence[int]) -> list[dict[str, Any]]:
        """Read rows by position in one call, as PyTorch's DataLoader asks for a batch."""
        return list(_rows(self.read(self._at(places, places)), len(places)))

    def _at(self, places: Any, key: Any) -> Int64Array:
        """Return the ids of rows by their places: a slice, whole numbers, or a mask."""
        every = self.positions()
        if isinstance(places, slice):
            return every[places]
        numbers: npt.NDArray[Any] = np.asarray(places)
        if numbers.size == 0:
            return every[:0]
        if numbers.dtype == np.bool_:
            if numbers.shape != every.shape:
                raise BatchError(f"the mask has shape {list(numbers.shape)}, but the store has {len(every)} rows.")
            return every[numbers]
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise BatchError(
                f"store[{key!r}]: positions must be a one-dimensional array of integers; got "
                f"{numbers.dtype} of shape {list(numbers.shape)}."
            )
        outside = (numbers < -len(every)) | (numbers >= len(every))
        if outside.any():
            raise _no_row(int(numbers[outside][0]), len(every))
        return every[numbers]

    # Counting and sampling

    def count(self, condition: str | None = None) -> int:
        """Return the number of trajectories that meet a condition of `where`; without a condition, of all trajectories.

        Raises:
            SchemaError: the condition cannot be read.
        """
        return len(self) if condition is None else len(self.where(condition))

    def sample(
        self, n: int, seed: int | np.random.Generator | None = None, *, condition: str | None = None
    ) -> Int64Array:
        """Return the ids of different trajectories, drawn uniformly: `[n]` int64.

        Args:
            n: the number of trajectories.
            seed: the seed of the draw: the same seed selects the same positions of the same rows. Or a generator, which
                continues. None makes a new draw each time.
            condition: only trajectories that meet this condition, see `where`.

        Raises:
            BatchError: there are fewer trajectories.
        """
        among = self.ids() if condition is None else self.where(condition)
        if isinstance(n, bool) or not 0 <= n <= len(among):
            raise BatchError(f"{n!r} different trajectories cannot be drawn from {len(among)}.")
        rng = seed if isinstance(seed, np.random.Generator) else np.random.default_rng(seed)
        return among[rng.choice(len(among), n, replace=False)]

    # Arrow

    def to_arrow(self, columns: Columns = None, ids: Ids | None = None) -> Any:
        """Return trajectories as an Arrow table: ragged columns are lists, elements with a shape fixed-size lists.

        Args:
            columns: names; None for all.
            ids: which trajectories; None for all in the order of arrival.

        Returns:
            A `pyarrow.Table`; values that were not given are null.

        Raises:
            MissingPackageError: pyarrow is not installed.
        """
        pa = arrow.pyarrow("to_arrow")
        return pa.Table.from_batches([*self._record_batches(columns, ids, rows=None)])

    def _record_batches(self, columns: Columns, ids: Ids | None, rows: int | None) -> Iterator[Any]:
        """Yield rows as record batches, some at a time; of all rows those that can be read."""
        schema, among = Schema(self.schema.select(columns)), self.ids() if ids is None else as_ids(ids)
        if not len(among):
            yield self._record_batch(schema, among)
        for _, record_batch in self._parts(
            among, rows or max(len(among), 1), lambda part: self._record_batch(schema, part), every=ids is None
        ):
            yield record_batch

    @following
    def _record_batch(self, schema: Schema, ids: Int64Array) -> Any:
        """Return rows as one record batch, whose numbers are those that were read, not copies."""
        pa, reader, arrays = arrow.pyarrow("to_arrow"), self._reader(ids, schema), list[Any]()
        for column in schema:
            if column.is_text:
                values: Any = reader.text(column)
            else:
                values = reader.scalars(column) if column.axis is None else reader.ragged(column)
            arrays.append(arrow.array_of(column, values, ~reader.present(column)))
        return pa.record_batch(arrays, schema=arrow.arrow_schema(schema))

    def __arrow_c_schema__(self) -> object:
        """Return the columns as Arrow's protocol has them."""
        return arrow.arrow_schema(self.schema).__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return all rows as a stream of Arrow's protocol, some thousand at a time.

        It is what `pyarrow.table(store)`, `polars.DataFrame(store)` and DuckDB's `from store` read. Numbers are copied
        once, out of the store's files; the reader has those buffers.
        """
        pa = arrow.pyarrow("a stream of Arrow")
        parts = self._record_batches(None, None, arrow.BATCH_ROWS)
        return pa.RecordBatchReader.from_batches(arrow.arrow_schema(self.schema), parts).__arrow_c_stream__(
            requested_schema
        )

    def to_pandas(self, columns: Columns = None, ids: Ids | None = None) -> Any:
        """Return trajectories as a `pandas.DataFrame`; ragged columns contain arrays.

        A value that was not given is missing. Optional columns of integers and Booleans have pandas' nullable types,
        such as `Int64`, so their other values keep their type.

        Args:
            columns: names; None for all.
            ids: which trajectories; None for all in the order of arrival.

        Raises:
            MissingPackageError: pyarrow or pandas is not installed.
        """
        return arrow.frame_of(self.to_arrow(columns, ids), self.schema)

    def _repr_html_(self) -> str:
        """Return the newest rows as a table, which notebooks show."""
        if self._closed:
            return f"<p>{html.escape(repr(self))}</p>"
        newest = self.positions()[-_SHOWN_ROWS:]
        columns = [column.name for column in self.schema if self.has_value(column.name, newest).any()]
        rows, names = self.read(newest, columns), ["id", *columns]
        cells = [[str(row_id), *(_cell(rows[name][i]) for name in columns)] for i, row_id in enumerate(newest.tolist())]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
        return f"<p>{html.escape(repr(self))}</p><table><tr>{head}</tr>{body}</table>"

    def to_parquet(
        self, path: str | Path, columns: Columns = None, ids: Ids | None = None, *, skip_damaged: bool = False
    ) -> int:
        """Write trajectories to one Parquet file, streamed; values that were not given are null.

        The columns' definitions are in its metadata: `TrajectoryStore.from_parquet` creates an identical store from the
        file.

        Args:
            path: the file; it is replaced atomically.
            columns: names; None for all.
            ids: which trajectories; None for all in the order of arrival.
            skip_damaged: exclude damaged trajectories; otherwise they are an error, and nothing is written.

        Returns:
            The number of trajectories in the file.

        Raises:
            CorruptionError: some trajectories are damaged; the error lists them.
            MissingPackageError: pyarrow is not installed.
        """
        pa, target = arrow.pyarrow("to_parquet"), Path(path).expanduser()
        among = self.intact(ids, skip_damaged=skip_damaged)
        tables = (pa.Table.from_batches([rows]) for rows in self._record_batches(columns, among, _ITER_ROWS))
        with new_file(target) as part:
            arrow.write_parquet(part, Schema(self.schema.select(columns)), tables)
        return len(among)


def _cell(value: Any) -> str:
    text = str(value).replace("\n", " ")
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def _no_row(place: int, count: int) -> PlaceError:
    return PlaceError(
        f"there is no row at position {place}: the store has {counted(count, 'row')}. Positions start at 0, in the "
        "order of arrival. To read rows by id, use read(ids)."
    )


def _rows(block: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    return ({name: values[i] for name, values in block.items()} for i in range(count))


def _are_names(key: Any) -> bool:
    """Return whether a key names columns."""
    if not isinstance(key, (list, tuple)):
        return isinstance(key, str)
    names = cast("Sequence[object]", key)
    return bool(names) and all(isinstance(name, str) for name in names)
