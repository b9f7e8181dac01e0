"""Rows of a store as Arrow and JSON have them, and back, without loss."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_pipeline.errors import DataError
from trajectory_store import Column, Schema, StoreError
from trajectory_store.arrow import SCHEMA_KEY

SCHEMA_FILE = "trajectory_schema.json"
"""Next to an exported dataset: the columns of the store, which Arrow alone does not record."""

_FLOATS = {None: math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""JSON text for the floats that JSON does not support."""


def schema_beside(path: Path, container: str) -> Path:
    """Return where the columns of an export are written down."""
    return path / SCHEMA_FILE if container == "hf" else path.with_name(f"{path.name}.schema.json")


def schema_of(source: Any) -> Schema | None:
    """Return the store's columns that an export wrote down, or None."""
    if source.container == "parquet":
        metadata = source.parquet_metadata()
        written = metadata[SCHEMA_KEY].decode() if SCHEMA_KEY in metadata else None
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
    unknown_fields = [str(name) for name in row if name not in schema]
    if unknown_fields:
        raise DataError(
            f"the exported store has no columns for these fields of the row: {', '.join(unknown_fields)}. Remove the "
            "fields, or copy FILE.schema.json, which the export wrote, to the folder that contains this file."
        )
    columns: dict[str, Any] = {}
    for column in schema:
        if column.name in row:
            try:
                columns[column.name] = _value(column, row[column.name])
            except (TypeError, ValueError, OverflowError) as error:
                raise DataError(
                    f"the value of column '{column.name}' cannot be stored as {column.dtype}: {error}"
                ) from error
        elif not column.optional:
            raise DataError(f"the row lacks the field '{column.name}', which every row of the store has.")
    return columns


def _value(column: Column, json_value: Any) -> Any:
    if column.is_text:
        if column.dtype == "bytes":
            if not isinstance(json_value, (str, bytes)):
                raise ValueError("it is neither bytes nor Base64")
            return base64.b64decode(json_value, validate=True) if isinstance(json_value, str) else json_value
        if not isinstance(json_value, str):
            raise ValueError("it is not text")
        return json_value
    array = np.asarray(json_value)
    if column.np_dtype.kind == "f" and array.dtype.kind not in "biuf":
        array = np.asarray(_floats(json_value))
    if column.axis is not None:
        array = array.reshape(-1, *column.shape) if not array.size else array
    if array.shape[column.axis is not None :] != column.shape or array.dtype.kind not in "biuf":
        raise ValueError(
            "it is not a number" if column.axis is None else f"it is not a list of numbers of shape {column.shape}"
        )
    if array.dtype == column.np_dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(column.np_dtype)
    lost = np.isinf(converted) & np.isfinite(array) if converted.dtype.kind == "f" else converted != array
    if lost.any():
        raise ValueError(f"{array[lost].flat[0]} does not fit")
    return converted
