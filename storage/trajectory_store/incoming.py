"""Rows as people have them, by column and row: tables, data frames, data sets, generators, tensors."""

# pyright: standard
# Foreign data, whose types are checked at run time.
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trajectory_store import arrow
from trajectory_store.batch import Batch, batch_of, by_columns, prepare
from trajectory_store.errors import BatchError, UnknownColumnError, did_you_mean
from trajectory_store.schema import Schema


def rereadable(data: Any) -> Any:
    """Return rows that can be read more than once: what yields them, or streams them, is read."""
    if isinstance(data, Mapping) or _is_frame(data):
        return data
    if _is_table(data):
        return arrow.tables_of(data)
    return list(data) if hasattr(data, "__next__") else data


def _is_frame(data: Any) -> bool:
    return hasattr(data, "dtypes") and hasattr(data, "to_numpy") and hasattr(data, "iloc")


def _is_table(data: Any) -> bool:
    return any(hasattr(data, name) for name in ("__arrow_c_stream__", "__arrow_c_array__", "with_format"))


def batch_from(schema: Schema, data: Any) -> Batch:
    """Check rows in any form that `append` takes, and flatten them.

    Args:
        schema: the columns of the store.
        data: a mapping by column; what has Arrow's protocol (a table of pyarrow or polars, a relation of DuckDB), a
            `datasets.Dataset`, a DataFrame of pandas; or rows, each a mapping by column: a list, a generator.

    Raises:
        BatchError: it is none of these, or does not fit.
    """
    if isinstance(data, Mapping):
        return by_columns(schema, data)
    if _is_frame(data):
        return _from_frame(schema, data)
    if _is_table(data):
        return _from_table(schema, arrow.tables_of(data))
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise _neither(data)
    rows: list[Mapping[str, Any]] = []
    for row in data:
        if not isinstance(row, Mapping):
            raise _neither(data)
        for name in row:
            if name not in schema:
                raise UnknownColumnError(
                    f"row {len(rows)}: the store has no column '{name}'." + did_you_mean(str(name), schema.names)
                )
        rows.append(row)
    return batch_of(schema, rows)


def _neither(data: Any) -> BatchError:
    return BatchError(
        f"a batch must be a dict of columns, a table or data frame, or a list or generator of dicts; got "
        f"{type(data).__name__}."
    )


def _from_table(schema: Schema, table: Any) -> Batch:
    _check_unique(list(table.column_names))
    values, present = arrow.columns_of(table, schema)
    for columns in schema.axes.values():
        beside = [column for column in columns if column.name in values and not column.is_text]
        if not any(column.name in present for column in beside):
            continue
        # A null is as long as the columns beside it: of each row, the first that has a value has its length.
        lengths = np.zeros(table.num_rows, np.int64)
        for column in reversed(beside):
            ragged = values[column.name]
            lengths = np.where(present.get(column.name, True), ragged.lengths, lengths)
        for column in beside:
            if column.name in present:
                values[column.name] = _stretched(column, values[column.name], lengths, present[column.name])
    batch = prepare(schema, values, table.num_rows)
    batch.partial |= present
    return batch


def _stretched(column: Any, ragged: Any, lengths: Any, present: Any) -> Any:
    new_lengths = np.where(present, ragged.lengths, lengths)
    flat = np.full((int(new_lengths.sum()), *column.shape), column.fill_value, column.np_dtype)
    flat[np.repeat(present, new_lengths)] = ragged.values
    return type(ragged)(flat, new_lengths)


def _from_frame(schema: Schema, frame: Any) -> Batch:
    """Return a DataFrame as a batch. Its NaN is a value of a float column, and no value of any other."""
    values: dict[str, Any] = {}
    _check_unique([str(name) for name in frame.columns])
    for name in frame.columns:
        column, series = schema[str(name)], frame[name]
        numbers = isinstance(series.dtype, np.dtype) and series.dtype.kind in "biuf"
        if numbers and (column.np_dtype.kind == "f" or series.dtype.kind != "f"):
            values[column.name] = series.to_numpy()
            continue
        cells = [None if _is_missing(value) else value for value in series.tolist()]
        if numbers:  # whole numbers became floats where one was missing
            cells = [int(value) if value is not None and value.is_integer() else value for value in cells]
        values[column.name] = cells
    return by_columns(schema, values)


def _check_unique(names: list[str]) -> None:
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise BatchError(f"column '{twice[0]}' appears twice. Rename one of the two, or drop it.")


def _is_missing(value: Any) -> bool:
    """Return whether pandas means by a value that there is none: None, NaN, `pandas.NA`."""
    return value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and value != value)
