"""Trajectories as Arrow has them, out and in: lists for ragged columns, null for a value that was not given."""

# pyright: standard
# pyarrow has no type annotations.
from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trajectory_store import extras
from trajectory_store.batch import cast_values
from trajectory_store.errors import BatchError, SchemaError, StoreError
from trajectory_store.ragged import RaggedArray
from trajectory_store.schema import NUMERIC_DTYPES, Column, Schema

SCHEMA_KEY: Final = b"trajectory_schema"
"""In the metadata of an Arrow schema: the columns of the store, which Arrow alone does not record."""
BATCH_ROWS: Final = 16_384
"""The number of rows in one record batch of a stream."""
ROW_GROUP_BYTES: Final = 16 << 20
"""A Parquet file is written in row groups of about this size, each of which is in memory while it is written."""


def pyarrow(what: str) -> Any:
    """Return the module, or raise an error that names what needs it."""
    return extras.load("pyarrow", what)


# Out


def arrow_schema(schema: Schema, *, large: bool = True) -> Any:
    """Return the Arrow types of a store's columns, with these as metadata.

    Args:
        schema: the columns.
        large: offsets of 64 bits, as `to_arrow` gives them; False for 32, as files of other tools have them.
    """
    pa = pyarrow("an Arrow schema")
    fields = [(column.name, _type_of(pa, column, large)) for column in schema]
    return pa.schema(fields, metadata={SCHEMA_KEY: json.dumps(schema.to_json()).encode()})


def _type_of(pa: Any, column: Column, large: bool) -> Any:
    if column.is_text:
        kinds = {("bytes", True): pa.large_binary, ("bytes", False): pa.binary, ("str", True): pa.large_string}
        return kinds.get((column.dtype, large), pa.string)()
    arrow_type = pa.from_numpy_dtype(column.np_dtype)
    for size in reversed(column.shape):
        arrow_type = pa.list_(arrow_type, size)
    if column.axis is None:
        return arrow_type
    return pa.large_list(arrow_type) if large else pa.list_(arrow_type)


def array_of(column: Column, values: Any, absent: npt.NDArray[np.bool_]) -> Any:
    """Return a column's values as an Arrow array, null where `absent`, `[N]` bool; numbers are not copied.

    Args:
        column: the column.
        values: `[N]` numbers, a list of texts, or a RaggedArray.
        absent: which rows have no value.
    """
    pa = pyarrow("an Arrow array")
    mask = absent if absent.any() else None
    if column.is_text:
        return pa.array(values, _type_of(pa, column, True), mask=mask)
    if column.axis is None:
        return pa.array(values, mask=mask)
    flat = pa.array(np.ascontiguousarray(values.values).reshape(-1))
    for size in reversed(column.shape):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    # A mask, not nulls among the offsets: with a null, the row before would end where the row after begins.
    return pa.LargeListArray.from_arrays(pa.array(values.offsets), flat, mask=None if mask is None else pa.array(mask))


def write_parquet(path: Path, schema: Schema, tables: Iterable[Any]) -> None:
    """Write tables of a store's columns to one Parquet file, a few row groups at a time."""
    pa, parquet = pyarrow("a Parquet file"), extras.load("pyarrow.parquet", "a Parquet file")
    arrow = arrow_schema(schema, large=False)
    with parquet.ParquetWriter(path, arrow, compression="zstd") as file:
        waiting: list[Any] = []
        for table in tables:
            waiting.append(table.cast(arrow))
            if sum(ready.nbytes for ready in waiting) >= ROW_GROUP_BYTES:
                file.write_table(pa.concat_tables(waiting))  # one row group; write_batch would keep more
                waiting = []
        if waiting:
            file.write_table(pa.concat_tables(waiting))


def frame_of(table: Any, schema: Schema) -> Any:
    """Return a table as a pandas DataFrame: whole numbers and truth values that may be missing stay what they are."""
    pa, pandas = pyarrow("to_pandas"), extras.load("pandas", "to_pandas")
    kinds = {f"{sign}int{bits}": getattr(pandas, f"{name}{bits}Dtype")() for sign, name in (("", "Int"), ("u", "UInt"))
             for bits in (8, 16, 32, 64)} | {"bool": pandas.BooleanDtype()}  # fmt: skip
    frame = table.to_pandas()
    for column in schema.select(table.column_names):
        if column.axis is None and column.optional and column.dtype in kinds:
            # From Arrow, not from the frame, where an int64 with nulls has been a float64.
            values = table[column.name].combine_chunks()
            present = values.is_valid().to_numpy(zero_copy_only=False)
            filled = values.fill_null(pa.scalar(0, values.type) if column.dtype != "bool" else False)
            maker: Any = kinds[column.dtype].construct_array_type()
            frame[column.name] = maker(filled.to_numpy(zero_copy_only=False), ~present)
    return frame


# In


def schema_from(arrow: Any) -> Schema:
    """Return columns for an Arrow schema: those that a store wrote down, else one of its type for each field.

    Every column may be null, so it has a fill: nothing, or 0. Lists are ragged, each with a separate axis.

    Raises:
        SchemaError: a type is none that a store holds.
    """
    pa = pyarrow("an Arrow schema")
    written = (arrow.metadata or {}).get(SCHEMA_KEY)
    if written is not None:
        try:
            return Schema.from_json(json.loads(written)).only([field.name for field in arrow])
        except (ValueError, StoreError) as error:
            raise SchemaError(f"the list of columns in this Arrow schema cannot be read: {error}") from None
    return Schema([_column_of(pa, field.name, field.type) for field in arrow])


def _column_of(pa: Any, name: str, kind: Any) -> Column:
    types, shape, ragged = pa.types, list[int](), False
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return Column(name, "str", fill="")
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return Column(name, "bytes", fill="")
    if types.is_list(kind) or types.is_large_list(kind):
        kind, ragged = kind.value_type, True
    while ragged and types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    dtype = {"double": "float64", "float": "float32", "halffloat": "float16"}.get(str(kind), str(kind))
    if dtype not in NUMERIC_DTYPES:
        raise SchemaError(
            f"column '{name}' has the Arrow type {kind}, which a store does not support: cast it to a number or text, "
            "write it as JSON text, or remove it."
        )
    fill: bool | float = False if dtype == "bool" else float("nan") if dtype.startswith("float") else 0
    return Column(name, dtype, ragged=ragged, axis=name if ragged else None, fill=fill, shape=tuple(shape))


def columns_of(table: Any, schema: Schema) -> tuple[dict[str, Any], dict[str, npt.NDArray[np.bool_]]]:
    """Return the columns of a table in the forms that `append` takes, and which rows have a value where not all have.

    Raises:
        BatchError: a type does not fit, or a value is null that every row must have.
    """
    values: dict[str, Any] = {}
    present: dict[str, npt.NDArray[np.bool_]] = {}
    for name in table.column_names:
        column = schema[name]
        array = _joined(table[name])
        if array.null_count:
            present[name] = array.is_valid().to_numpy(zero_copy_only=False)
            if not column.optional:
                row = int(np.flatnonzero(~present[name])[0])
                raise BatchError(
                    f"row {row} of column '{name}' is null, but the column has no fill value. Set a value, or "
                    "remove the row."
                )
        values[name] = _values_of(column, array)
    return values, present


def _joined(chunks: Any) -> Any:
    array = chunks.combine_chunks()
    pa = pyarrow("an Arrow table")
    if isinstance(array, pa.ChunkedArray):  # more than 2 GB of text
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _values_of(column: Column, array: Any) -> Any:
    pa = pyarrow("an Arrow table")
    kind, is_list = array.type, pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
    fixed = pa.types.is_fixed_size_list(kind)
    if column.is_text:
        fill = column.fill_bytes if column.dtype == "bytes" else column.fill_value
        return [fill if value is None else value for value in array.to_pylist()]
    if column.axis is None:
        if pa.types.is_null(kind):
            return np.full(len(array), column.fill_value, column.np_dtype)
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise BatchError(f"column '{column.name}' is {column.dtype} in the store and {kind} in Arrow.")
        if not array.null_count:
            return array.to_numpy(zero_copy_only=False)
        # Whole numbers stay whole: to_numpy would make floats of them where one is null.
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        out = np.full(len(array), column.fill_value, column.np_dtype)
        numbers = array.drop_null().to_numpy(zero_copy_only=False)
        out[valid] = cast_values(column, numbers)
        return out
    if fixed:
        array = array.cast(pa.large_list(kind.value_type))
        is_list = True
    if not is_list:
        raise BatchError(
            f"column '{column.name}' is ragged in the store, but its Arrow type, {kind}, is not a list type."
        )
    if array.null_count:
        array = array.fill_null(pa.scalar([], array.type))
    lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    flat = array.flatten()
    for size in column.shape:
        if not _is_list(pa, flat.type) or not (flat.value_lengths().to_numpy(zero_copy_only=False) == size).all():
            raise BatchError(
                f"column '{column.name}' has elements of shape {list(column.shape)}; in Arrow, the column has the "
                f"type {kind}, or some of its elements have a different shape."
            )
        flat = flat.flatten()
    if _is_list(pa, flat.type):
        raise BatchError(f"column '{column.name}' has one number per row, but is {kind} in Arrow.")
    if flat.null_count:
        fill = column.fill_value if column.dtype.startswith("float") else None
        if fill is None or fill == fill:
            raise BatchError(f"column '{column.name}' contains a null within a row. Set a value for every element.")
        flat = flat.fill_null(float("nan"))
    return RaggedArray(flat.to_numpy(zero_copy_only=False).reshape(-1, *column.shape), lengths)


def parquet_of(file: Any) -> tuple[Any, Iterator[Any]]:
    """Return the Arrow schema of a Parquet file, and its rows as record batches."""
    opened = extras.load("pyarrow.parquet", "a Parquet file").ParquetFile(Path(file).expanduser())
    return opened.schema_arrow, opened.iter_batches(BATCH_ROWS)


def _is_list(pa: Any, kind: Any) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def tables_of(data: Any) -> Any:
    """Return what speaks Arrow's stream or array protocol, a `datasets.Dataset` or a DataFrame among it, as a table."""
    pa = pyarrow("a table as rows")
    if isinstance(data, pa.Table):
        return data
    if hasattr(data, "iloc"):
        return pa.Table.from_pandas(data, preserve_index=False)
    if hasattr(data, "__arrow_c_stream__"):
        return pa.table(data)
    if hasattr(data, "__arrow_c_array__"):
        return pa.Table.from_batches([pa.record_batch(data)])
    return data.with_format("arrow")[:]
