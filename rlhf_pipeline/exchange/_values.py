"""Rows of a store as Arrow and JSON have them, and back, without loss; and the batch that rows become."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.data.files import need
from rlhf_pipeline.errors import DataError
from trajectory_store import Column, RaggedArray, Schema, StoreError
from trajectory_store.batch import Batch, prepare

SCHEMA_FILE = "trajectory_schema.json"
"""Beside an exported data set: the columns of the store, which Arrow alone does not tell."""
SCHEMA_KEY = b"trajectory_schema"
"""The same in the metadata of an exported Parquet file."""

_FLOATS = {None: math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""What JSON writes for the floats that it does not have."""


def schema_beside(path: Path, container: str) -> Path:
    """Return where the columns of an export are written down."""
    return path / SCHEMA_FILE if container == "hf" else path.with_name(f"{path.name}.schema.json")


def schema_of(source: Any) -> Schema | None:
    """Return the store's columns that an export wrote down, or None."""
    if source.container == "parquet":
        found = need("pyarrow.parquet").read_schema(source.path).metadata or {}
        written = found[SCHEMA_KEY].decode() if SCHEMA_KEY in found else None
    else:
        beside = schema_beside(source.path, source.container)
        written = beside.read_text(encoding="utf-8") if beside.is_file() else None
    try:
        return None if written is None else Schema.from_json(json.loads(written))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StoreError) as error:
        raise DataError(
            f"{source.path}: the list of its columns, which `export` wrote, cannot be read ({type(error).__name__}: "
            f"{error}). Export the store again."
        ) from error


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


def to_json(column: Column, value: Any) -> Any:
    """Return one value as JSON: null for NaN, words for infinities, a list of a ragged column, Base64 of bytes.

    >>> to_json(Column("x", "float32", ragged=True), np.array([1.5, np.nan, np.inf], np.float32))
    [1.5, None, 'Infinity']
    """
    if column.is_text:
        return base64.b64encode(value).decode() if column.dtype == "bytes" else value
    plain = value.tolist() if hasattr(value, "tolist") else value
    return plain if np.isfinite(value).all() else _words(plain)


def _words(value: Any) -> Any:
    if isinstance(value, list):
        return [_words(item) for item in value]
    return value if math.isfinite(value) else None if value != value else "Infinity" if value > 0 else "-Infinity"


def _floats(value: Any) -> Any:
    return [_floats(item) for item in value] if isinstance(value, list) else _FLOATS.get(value, value)


def from_row(schema: Schema, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row of an export, as JSON or Arrow has it; a float may be rounded, nothing else."""
    other = [str(name) for name in row if name not in schema]
    if other:
        raise DataError(
            f"the fields {', '.join(other)} are no columns of the store that was exported. Leave them out, or put the "
            "export's own list of columns, FILE.schema.json, beside it."
        )
    made: dict[str, Any] = {}
    for column in schema:
        if column.name in row:
            try:
                made[column.name] = _value(column, row[column.name])
            except (TypeError, ValueError, OverflowError) as error:
                raise DataError(f"column '{column.name}' does not hold {column.dtype}: {error}") from error
        elif not column.optional:
            raise DataError(f"there is no field '{column.name}', which every row of the store has.")
    return made


def _value(column: Column, given: Any) -> Any:
    if column.is_text:
        if column.dtype == "bytes":
            if not isinstance(given, (str, bytes)):
                raise ValueError("it is neither bytes nor Base64")
            return base64.b64decode(given, validate=True) if isinstance(given, str) else given
        if not isinstance(given, str):
            raise ValueError("it is no text")
        return given
    array = np.asarray(given)
    if column.np_dtype.kind == "f" and array.dtype.kind not in "biuf":
        array = np.asarray(_floats(given))
    if column.axis is not None:
        array = array.reshape(-1, *column.shape) if not array.size else array
    if array.shape[column.axis is not None :] != column.shape or array.dtype.kind not in "biuf":
        raise ValueError(
            "it is no number" if column.axis is None else f"it is no list of numbers of shape {column.shape}"
        )
    if array.dtype == column.np_dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(column.np_dtype)
    lost = np.isinf(made) & np.isfinite(array) if made.dtype.kind == "f" else made != array
    if lost.any():
        raise ValueError(f"{array[lost].flat[0]} does not fit")
    return made


def batch_of(schema: Schema, rows: Sequence[Mapping[str, Any]]) -> Batch:
    """Return rows as a batch of a store; a column that some of them lack is filled there, and not said to be given."""
    data: dict[str, Any] = {}
    partial: dict[str, npt.NDArray[np.bool_]] = {}
    for column in schema:
        name, given = column.name, np.array([column.name in row for row in rows])
        if not given.any():
            continue
        if not given.all():
            partial[name] = given
        if column.is_text:
            fill = column.fill_bytes if column.dtype == "bytes" else column.fill_value
            data[name] = [row.get(name, fill) for row in rows]
        elif column.axis is None:
            data[name] = np.array([row.get(name, column.fill_value) for row in rows], column.np_dtype)
        else:
            beside = [other.name for other in schema.axes[column.axis]]
            values = [np.asarray(row[name]) if name in row else _filled(column, beside, row) for row in rows]
            data[name] = RaggedArray(np.concatenate(values), np.array([len(row) for row in values], np.int64))
    batch = prepare(schema, data)
    batch.partial |= partial
    return batch


def _filled(column: Column, beside: Sequence[str], row: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Return what stands for a ragged column in a row that lacks it: as long as the columns that it lies beside."""
    length = next((len(row[name]) for name in beside if name in row), 0)
    return np.full((length, *column.shape), column.fill_value, column.np_dtype)


def weighted(scores: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the weighted sum of `[n, functions]` rewards as TRL forms it: NaN counts as 0, unless all are NaN.

    >>> weighted(np.array([[1.0, np.nan], [np.nan, np.nan]]), np.array([2.0, 1.0])).tolist()
    [2.0, nan]
    """
    total = np.nansum(scores * weights, axis=1)
    total[np.isnan(scores).all(axis=1)] = np.nan
    return total
