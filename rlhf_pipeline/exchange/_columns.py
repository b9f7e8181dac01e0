"""Columns of a store as Arrow arrays and as JSON values, and back, without loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.errors import DataError
from trajectory_store import Column, RaggedArray, Schema

Values = dict[str, Any]
"""Per column what `TrajectoryStore.append` takes: a RaggedArray, a list of texts, or `[n]` values."""
Flags = npt.NDArray[np.bool_]


def take(values: Values, keep: Flags) -> Values:
    """Return some of the rows.

    >>> take({"x": np.array([1, 2]), "t": ["a", "b"]}, np.array([False, True]))
    {'x': array([2]), 't': ['b']}
    """
    return {name: _take(value, keep) for name, value in values.items()}


def _take(value: Any, keep: Flags) -> Any:
    if isinstance(value, RaggedArray):
        return RaggedArray(value.values[np.repeat(keep, value.lengths)], value.lengths[keep])
    if isinstance(value, list):
        return [item for item, on in zip(value, keep.tolist(), strict=True) if on]
    return value[keep]


def to_arrow(pyarrow: Any, column: Column, value: Any, present: Flags | None) -> Any:
    """Return a column as an Arrow array; null where the store has only its fill."""
    gone = None if present is None or present.all() else ~present
    if column.is_text:
        texts = value if gone is None else [None if off else text for text, off in zip(value, gone, strict=True)]
        return pyarrow.array(texts, arrow_type(pyarrow, column))
    if not isinstance(value, RaggedArray):
        return pyarrow.array(value, arrow_type(pyarrow, column), mask=gone, from_pandas=False)
    if gone is not None:
        value = _take(value, ~gone)
    lengths = np.zeros(len(present) if present is not None else len(value.lengths), np.int64)
    lengths[... if gone is None else ~gone] = value.lengths
    flat = pyarrow.array(np.ascontiguousarray(value.values), arrow_type(pyarrow, column).value_type, from_pandas=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    mask = None if gone is None else pyarrow.array(gone)
    return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), flat, mask=mask)


def arrow_type(pyarrow: Any, column: Column) -> Any:
    """Return the Arrow type of a column: a list of numbers where it is ragged."""
    if column.is_text:
        return pyarrow.string()
    plain = pyarrow.from_numpy_dtype(np.dtype(column.dtype))
    return pyarrow.list_(plain) if column.axis is not None else plain


def from_arrow(schema: Schema, batch: Any) -> Values:
    """Return the columns of an Arrow batch or table; those that are null in all rows are left out, as they were.

    Raises:
        DataError: a column is of another type than the schema says.
    """
    found: Values = {}
    partly: dict[str, Flags] = {}
    for column in schema:
        if column.name not in batch.schema.names:
            continue
        array = batch.column(column.name)
        array = array.combine_chunks() if hasattr(array, "chunks") else array
        if array.null_count == len(array) and len(array):
            continue
        try:
            found[column.name] = _from_arrow(column, array)
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(f"column '{column.name}' is {array.type}, not {column.dtype}: {error}") from error
        if array.null_count and isinstance(found[column.name], RaggedArray):
            partly[column.name] = np.asarray(array.is_null())
    _fill(schema, found, partly)
    return found


def _from_arrow(column: Column, array: Any) -> Any:
    if column.is_text:
        return [column.fill_value if text is None else text for text in array.to_pylist()]
    if column.axis is not None:
        lengths = np.asarray(array.value_lengths().drop_null().to_numpy(zero_copy_only=False), np.int64)
        flat = array.flatten().to_numpy(zero_copy_only=False)
        return RaggedArray(np.asarray(flat).astype(column.np_dtype, copy=False), lengths)
    if array.null_count:
        gone = np.asarray(array.is_null())
        filled = np.full(len(array), column.fill_value, column.np_dtype)
        filled[~gone] = array.drop_null().to_numpy(zero_copy_only=False)
        return filled
    return np.asarray(array.to_numpy(zero_copy_only=False)).astype(column.np_dtype, copy=False)


def _fill(schema: Schema, found: Values, gone: Mapping[str, Flags]) -> None:
    """Give absent rows of ragged columns the length of their axis, filled; 0 where none of its columns has the row."""
    axes = {name: schema[name].axis or "" for name in gone}
    lengths_of: dict[str, npt.NDArray[np.int64]] = {}
    for axis in set(axes.values()):
        columns = [column.name for column in schema.axes[axis] if column.name in found]
        lengths = np.zeros(len(gone[next(name for name in columns if name in gone)]), np.int64)
        for name in columns:
            lengths[~gone[name] if name in gone else slice(None)] = found[name].lengths
        lengths_of[axis] = lengths
    for name, off in gone.items():
        column, lengths = schema[name], lengths_of[axes[name]]
        filled = np.full(int(lengths.sum()), column.fill_value, column.np_dtype)
        filled[np.repeat(~off, lengths)] = found[name].values
        found[name] = RaggedArray(filled, lengths)


def to_json(column: Column, value: Any) -> Any:
    """Return one value as JSON: null for NaN, words for infinities, a list where the column is ragged.

    >>> to_json(Column("x", "float32", ragged=True), np.array([1.5, np.nan, np.inf], np.float32))
    [1.5, None, 'Infinity']
    """
    if column.is_text:
        return value
    plain = value.tolist() if hasattr(value, "tolist") else value
    if not column.dtype.startswith("float"):
        return plain
    if column.axis is None:
        return _float_to_json(plain)
    return plain if np.isfinite(value).all() else [_float_to_json(item) for item in plain]


def _float_to_json(value: float) -> float | str | None:
    if math.isfinite(value):
        return value
    return None if value != value else "Infinity" if value > 0 else "-Infinity"


def from_json(schema: Schema, rows: Sequence[Mapping[str, Any]]) -> Values:
    """Return the columns of rows that `to_json` made; columns that no row has are left out, as they were.

    Raises:
        DataError: a value is not what the schema says.
    """
    found: Values = {}
    gone: dict[str, Flags] = {}
    for column in schema:
        name = column.name
        off = np.array([name not in row for row in rows])
        if off.all():
            continue
        given = [row[name] for row in rows if name in row]
        try:
            value = _from_json(column, given)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"field '{name}' does not hold {column.dtype}: {error}") from error
        if not off.any():
            found[name] = value
        elif isinstance(value, RaggedArray):
            gone[name], found[name] = off, value
        elif isinstance(value, list):
            kept = iter(value)
            found[name] = [column.fill_value if missing else next(kept) for missing in off.tolist()]
        else:
            found[name] = np.full(len(rows), column.fill_value, column.np_dtype)
            found[name][~off] = value
    _fill(schema, found, gone)
    return found


def _from_json(column: Column, given: list[Any]) -> Any:
    if column.is_text:
        if not all(isinstance(item, str) for item in given):
            raise ValueError("it is no text")
        return given
    if column.axis is None:
        return _numbers(column, given)
    flat = [item for row in given for item in row]
    return RaggedArray(_numbers(column, flat), np.array([len(row) for row in given], np.int64))


def _numbers(column: Column, values: list[Any]) -> npt.NDArray[Any]:
    kind = column.np_dtype.kind
    if kind == "f":
        exact = [math.nan if item is None else float(item) for item in values]
        with np.errstate(over="ignore"):
            made = np.array(exact, np.float64).astype(column.np_dtype)
        lost = np.flatnonzero(np.isinf(made) & np.isfinite(exact))
        if len(lost):
            raise ValueError(f"{exact[lost[0]]!r} is too large")
        return made
    allowed = (bool,) if kind == "b" else (int,)
    if not all(type(item) in allowed for item in values):
        raise ValueError(f"{next(item for item in values if type(item) not in allowed)!r}")
    exact = np.array(values, np.dtype(bool) if kind == "b" else object)
    return exact.astype(column.np_dtype)
