"""Reading one row: what a batch prepares once for all its rows costs a single row more than its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store.backend import Segment
from trajectory_store.catalog import Catalog
from trajectory_store.format import offsets_name
from trajectory_store.schema import Column, Schema

ReadValue = Callable[[int], Any]
"""Returns the value of a row of a segment as in a batch of one row, or None if its bytes are inconsistent."""


class RowReader:
    """Reads columns of single rows of a segment whose arrays are open.

    Attributes:
        arrays: the names of the arrays that it reads; of offsets, it reads the item before a row as well.
    """

    def __init__(self, arrays: Sequence[str], readers: Sequence[tuple[str, ReadValue]]) -> None:
        self.arrays = arrays
        self._readers = readers

    def read(self, row: int) -> dict[str, Any] | None:
        """Return the values of a row by column, or None if its bytes contradict themselves."""
        values: dict[str, Any] = {}
        for name, read in self._readers:
            column_values = read(row)
            if column_values is None:
                return None
            values[name] = column_values
        return values


def read_row(
    catalog: Catalog, row_id: int, schema: Schema, names: tuple[str, ...], *, checked: bool
) -> dict[str, Any] | None:
    """Return columns of one row as `StoreReads.read` does, or None if it takes the steps of a batch.

    It does where bytes have to be fetched, opened or compared first, where rows of the segment are damaged, and for
    columns with later values.
    """
    place = catalog.intact_place(row_id)
    if place is None:
        return None
    segment, row = place
    readers = segment.row_readers
    reader = readers.get(names)
    if reader is None:
        reader = _reader_of(segment, schema.select(names))
        if reader is None:
            return None
        readers[names] = reader
    if any(name in update.schema for update in catalog.updates.values() for name in names):
        return None
    if checked and catalog.look_is_due:
        return None
    return reader.read(row) if segment.holds_row(row, reader.arrays, compared=checked) else None


def _reader_of(segment: Segment, columns: Sequence[Column]) -> RowReader | None:
    """Return a reader of these columns, or None if an array is not in memory."""
    arrays: dict[str, None] = {}
    readers: list[tuple[str, ReadValue]] = []
    for column in columns:
        names = [column.name] if column.name in segment.schema else []
        names += [offsets_name(column.axis)] if column.axis in segment.schema.axes and column.axis else []
        views = {name: segment.opened(name) for name in names}
        if None in views.values():
            return None
        arrays |= dict.fromkeys(names)
        readers.append((column.name, _value_reader(segment, column, views)))
    return RowReader(tuple(arrays), readers)


def _value_reader(segment: Segment, column: Column, views: dict[str, memoryview | None]) -> ReadValue:
    """Return the function that reads a column."""
    values = _array(views.get(column.name), column)
    if column.axis is None:
        fill = np.array([column.fill_value], column.np_dtype)
        return (lambda _: fill.copy()) if values is None else (lambda row: values[row : row + 1].copy())
    view = views.get(offsets_name(column.axis))
    if view is None:  # the segment lacks the axis: each row has the fill
        value: Any = column.fill_bytes if column.is_text else np.full(0, column.fill_value, column.np_dtype)
        return lambda _: [_text(value, column)] if column.is_text else [value.reshape(-1, *column.shape).copy()]
    offsets, capacity, width = view.cast("q"), segment.meta.elems_cap[column.axis], column.width

    def read(row: int) -> list[Any] | None:
        start, stop = offsets[row], offsets[row + 1]
        if not 0 <= start <= stop <= capacity:
            return None
        if values is None:
            return [np.full((stop - start, *column.shape), column.fill_value, column.np_dtype)]
        part = values[start * width : stop * width].copy()
        return [part.reshape(-1, *column.shape) if column.shape else part]

    def read_text(row: int) -> list[Any] | None:
        start, stop = offsets[row], offsets[row + 1]
        if not 0 <= start <= stop <= capacity:
            return None
        text = _text(raw[start:stop], column)
        return None if text is None else [text]

    raw = views.get(column.name) or memoryview(b"")
    return read_text if column.is_text else read


def _array(view: memoryview | None, column: Column) -> npt.NDArray[Any] | None:
    if view is None:
        return None
    return np.frombuffer(view, column.np_dtype) if len(view) else np.empty(0, column.np_dtype)


def _text(raw: memoryview | bytes, column: Column) -> str | bytes | None:
    if column.dtype == "bytes":
        return bytes(raw)
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        return None
