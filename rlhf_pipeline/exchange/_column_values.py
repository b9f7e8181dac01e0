"""Columns of a store as Arrow arrays and as JSON values, and back, without loss."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.exchange._tables import SCHEMA_KEY
from trajectory_store import Column, RaggedArray, Schema

Values = dict[str, Any]
"""Per column what `TrajectoryStore.append` takes: a RaggedArray, a list of texts, or `[n]` values."""
Flags = npt.NDArray[np.bool_]


def take(values: Values, keep: Flags) -> Values:
    """Return some of the rows.

    >>> take({"x": np.array([1, 2]), "t": ["a", "b"]}, np.array([False, True]))
    {'x': array([2]), 't': ['b']}
    """
    taken: Values = {}
    for name, value in values.items():
        if isinstance(value, RaggedArray):
            taken[name] = RaggedArray(value.values[np.repeat(keep, value.lengths)], value.lengths[keep])
        elif isinstance(value, list):
            taken[name] = [item for item, on in zip(value, keep.tolist(), strict=True) if on]
        else:
            taken[name] = value[keep]
    return taken


def arrow_schema(pyarrow: Any, schema: Schema) -> Any:
    """Return the Arrow types of an export, lists with offsets of 32 bits, and the store's columns as its metadata."""
    fields = [(column.name, _arrow_type(pyarrow, column)) for column in schema]
    return pyarrow.schema(fields, metadata={SCHEMA_KEY: json.dumps(schema.to_json()).encode()})


def _arrow_type(pyarrow: Any, column: Column) -> Any:
    if column.is_text:
        return pyarrow.binary() if column.dtype == "bytes" else pyarrow.string()
    found = pyarrow.from_numpy_dtype(column.np_dtype)
    for size in reversed(column.shape):
        found = pyarrow.list_(found, size)
    return found if column.axis is None else pyarrow.list_(found)


def from_arrow(schema: Schema, batch: Any) -> Values:
    """Return the columns of an Arrow batch or table; those that are null in all rows are left out, as they were.

    Raises:
        DataError: a column is of another type than the schema says.
    """
    found: Values = {}
    gone: dict[str, Flags] = {}
    for column in schema:
        if column.name not in batch.schema.names:
            continue
        array = batch.column(column.name)
        array = array.combine_chunks() if hasattr(array, "chunks") else array
        if array.null_count == len(array) and len(array):
            continue
        gone[column.name] = np.asarray(array.is_null()) if array.null_count else np.zeros(len(array), bool)
        try:
            found[column.name] = _from_arrow(column, array.drop_null() if array.null_count else array)
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(f"column '{column.name}' is {array.type}, not {column.dtype}: {error}") from error
    return _filled(schema, found, gone)


def _from_arrow(column: Column, array: Any) -> Any:
    if column.is_text:
        return array.to_pylist()
    if column.axis is None:
        return _exact(column, array)
    lengths = np.asarray(array.value_lengths().to_numpy(zero_copy_only=False), np.int64)
    flat = array
    while flat.type.num_fields:  # lists, of rows of numbers where the column has a shape
        flat = flat.flatten()
    return RaggedArray(_exact(column, flat).reshape(-1, *column.shape), lengths)


def _exact(column: Column, array: Any) -> npt.NDArray[Any]:
    """Return numbers in the dtype of their column; a float may be rounded, nothing else may become another number."""
    given = np.asarray(array.to_numpy(zero_copy_only=False))
    if given.dtype == column.np_dtype:
        return given
    if given.dtype.kind not in "biuf":
        raise ValueError("they are no numbers" if not array.null_count else "there is a null in a row")
    with np.errstate(over="ignore", invalid="ignore"):
        made = given.astype(column.np_dtype)
    other = np.isinf(made) & np.isfinite(given) if made.dtype.kind == "f" else made != given
    if other.any():
        raise ValueError(f"{given[other][0]} does not fit")
    return made


def _filled(schema: Schema, found: Values, gone: Mapping[str, Flags]) -> Values:
    """Return columns with the fill in the rows that have no value.

    Such a row of a ragged column has the length of its axis, and length 0 where none of the axis's columns has it.

    Args:
        schema: the columns.
        found: the values of the rows that have one.
        gone: of each found column `[n]`, the rows that have none.
    """
    lengths: dict[str, npt.NDArray[np.int64]] = {}
    for name, value in found.items():
        if isinstance(value, RaggedArray):
            known = lengths.setdefault(schema[name].axis or "", np.zeros(len(gone[name]), np.int64))
            known[~gone[name]] = value.lengths
    filled: Values = {}
    for name, value in found.items():
        column, off = schema[name], gone[name]
        if not off.any():
            filled[name] = value
        elif isinstance(value, list):
            kept = iter(value)
            filled[name] = [column.fill_value if missing else next(kept) for missing in off.tolist()]
        elif isinstance(value, RaggedArray):
            sizes = lengths[column.axis or ""]
            flat = np.full((int(sizes.sum()), *column.shape), column.fill_value, column.np_dtype)
            flat[np.repeat(~off, sizes)] = value.values
            filled[name] = RaggedArray(flat, sizes)
        else:
            filled[name] = np.full(len(off), column.fill_value, column.np_dtype)
            filled[name][~off] = value
    return filled


def to_json(column: Column, value: Any) -> Any:
    """Return one value as JSON: null for NaN, words for infinities, a list of a ragged column, Base64 of bytes.

    >>> to_json(Column("x", "float32", ragged=True), np.array([1.5, np.nan, np.inf], np.float32))
    [1.5, None, 'Infinity']
    """
    if column.is_text:
        return base64.b64encode(value).decode() if column.dtype == "bytes" else value
    plain = value.tolist() if hasattr(value, "tolist") else value
    if not column.dtype.startswith("float"):
        return plain
    if column.axis is None:
        return _float_to_json(plain)
    return plain if np.isfinite(value).all() else [_float_to_json(item) for item in plain]


def _float_to_json(value: Any) -> Any:
    if isinstance(value, list):  # an element with a shape
        return [_float_to_json(item) for item in value]
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
        gone[name] = off
        try:
            found[name] = _from_json(column, [row[name] for row in rows if name in row])
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"field '{name}' does not hold {column.dtype}: {error}") from error
    return _filled(schema, found, gone)


def _from_json(column: Column, given: list[Any]) -> Any:
    if column.is_text:
        if not all(isinstance(item, str) for item in given):
            raise ValueError("it is no text")
        return [base64.b64decode(item, validate=True) for item in given] if column.dtype == "bytes" else given
    if column.axis is None:
        return _numbers(column, given)
    flat = [item for row in given for item in row]
    for _ in column.shape:
        flat = [item for element in flat for item in element]
    values = _numbers(column, flat).reshape(-1, *column.shape)
    return RaggedArray(values, np.array([len(row) for row in given], np.int64))


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
