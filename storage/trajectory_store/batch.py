"""Check a caller's rows and flatten them to arrays in the dtypes on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import BatchError, UnknownColumnError, counted, did_you_mean
from trajectory_store.format import PRESENT, SegmentMeta, offsets_name
from trajectory_store.ragged import Int64Array, RaggedArray, is_masked, offsets_of
from trajectory_store.schema import Column, Schema


@dataclass
class Batch:
    """Rows ready to be written.

    Attributes:
        n_rows: the number of trajectories.
        values: per given column, the flat values `[elements * width]` or the scalars `[n_rows]`, little-endian.
        lengths: per axis `[n_rows]` int64.
        partial: per column that only some rows were given, which ones: `[n_rows]` bool; the others hold the fill.
        extra: internal per-row arrays by name (the targets of updates, the ids and times of merged rows).
        filled: columns that no row was given; their values are the fill.
    """

    n_rows: int
    values: dict[str, npt.NDArray[Any]]
    lengths: dict[str, Int64Array]
    partial: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict[str, "npt.NDArray[np.bool_]"])
    extra: dict[str, Int64Array] = field(default_factory=dict[str, "Int64Array"])
    filled: frozenset[str] = frozenset()

    def check(self, schema: Schema) -> None:
        """Check that each column has the values of its rows.

        Raises:
            BatchError: one has more or fewer.
        """
        sums = {axis: int(lengths.sum()) for axis, lengths in self.lengths.items()}
        for name, flat in self.values.items():
            column = schema[name]
            count = self.n_rows if column.axis is None else sums[column.axis] * column.width
            if len(flat) != count:
                raise BatchError(
                    f"column '{name}' has {len(flat)} values, but its {self.n_rows} rows need {count}: the columns "
                    "of an axis must have equal lengths. Pass them in the form that prepare() and read_batch() return."
                )

    def fitted(self, schema: Schema) -> Batch:
        """Return these rows with the fill in every column of the schema that was not given."""
        missing = [column for column in schema if column.name not in self.values]
        if not missing:
            return self
        values, lengths = dict(self.values), dict(self.lengths)
        for column in missing:
            _fill(column, self.n_rows, values, lengths)
        return Batch(self.n_rows, values, lengths, self.partial, self.extra, frozenset(c.name for c in missing))

    def present(self, schema: Schema) -> npt.NDArray[np.uint64]:
        """`[n_rows]` uint64: bit i is set where the i-th optional column of a schema was given."""
        all_rows, bits = 0, np.zeros(self.n_rows, "<u8")
        for i, column in enumerate(schema.optional):
            mask = self.partial.get(column.name)
            if mask is not None:
                bits |= mask.astype("<u8") << np.uint64(i)
            elif column.name in self.values and column.name not in self.filled:
                all_rows |= 1 << i
        return bits | np.uint64(all_rows)

    def arrays(self, meta: SegmentMeta) -> dict[str, npt.NDArray[Any]]:
        """Return these rows as the arrays of a segment, in the order of the format; offsets begin with 0."""
        schema, values = meta.schema, self.values
        out: dict[str, npt.NDArray[Any]] = {name: values[name] for name in schema.names}
        for axis in schema.axes:
            out[offsets_name(axis)] = offsets_of(self.lengths[axis])
        if meta.has_present:
            out[PRESENT] = self.present(schema)
        for name in meta.internal_rows:
            out[name] = self.extra[name]
        return out

    def put(self, column: Column, values: npt.NDArray[Any], present: npt.NDArray[np.bool_]) -> None:
        """Set the values of a column, and add `present` to the rows that were given one."""
        name = column.name
        if name not in self.values or name in self.filled:
            before = np.zeros(self.n_rows, bool)
        else:
            before = self.partial.get(name, np.ones(self.n_rows, bool))
        self.values[name] = np.ascontiguousarray(values.astype(column.np_dtype, copy=False))
        self.filled -= {name}
        self.partial[name] = before | present

    def digest(self) -> bytes:
        """Return what identifies these rows: 16 bytes, equal for equal values of the same columns."""
        hashed = hashlib.blake2b(str(self.n_rows).encode(), digest_size=16)
        for arrays in (self.values, self.lengths, self.partial, self.extra):
            for name in sorted(arrays):
                hashed.update(f"|{name}|".encode())
                hashed.update(cast("bytes", np.ascontiguousarray(arrays[name]).view(np.uint8)))
        return hashed.digest()

    def rows(self, keep: npt.NDArray[np.bool_], schema: Schema) -> Batch:
        """Return the rows where `keep`, `[n_rows]` bool, is True."""
        values: dict[str, npt.NDArray[Any]] = {}
        for name, flat in self.values.items():
            axis, width = schema[name].axis, schema[name].width
            values[name] = flat[keep if axis is None else np.repeat(keep, self.lengths[axis] * width)]
        return Batch(
            int(np.count_nonzero(keep)),
            values,
            {axis: lengths[keep] for axis, lengths in self.lengths.items()},
            {name: mask[keep] for name, mask in self.partial.items()},
            {name: array[keep] for name, array in self.extra.items()},
            self.filled,
        )


_LARGEST = {size: int(np.iinfo(f"i{size}").max) for size in (1, 2, 4, 8)}


def prepare(schema: Schema, data: Mapping[str, Any], n_rows: int | None = None) -> Batch:
    """Check a batch against a schema and flatten it.

    Floats are rounded to the nearest value of a smaller dtype; what would become infinite, and whole numbers that a
    float would round, are rejected.

    Args:
        schema: the columns of the rows.
        data: per column a RaggedArray or a sequence of 1-D rows (ragged), texts (str), or `[n]` values.
        n_rows: the number of rows, if it is known beforehand.
    """
    for name in data:
        if name not in schema:
            raise UnknownColumnError(f"the store has no column '{name}'." + did_you_mean(str(name), schema.names))
    values: dict[str, npt.NDArray[Any]] = {}
    lengths: dict[str, Int64Array] = {}
    first = ""
    for column in schema:
        if column.name not in data:
            if not column.optional:
                raise BatchError(
                    f"column '{column.name}' is missing from the batch and has no fill value. "
                    f"Columns of the batch: {', '.join(data) or 'none'}."
                )
            continue
        rows = data[column.name]
        if column.axis is None:
            values[column.name] = flat = _scalars(column, rows)
            count = len(flat)
        else:
            flat, sizes = _text(column, rows) if column.is_text else _ragged(column, rows)
            values[column.name] = flat
            count = len(sizes)
            _merge_lengths(column, sizes, lengths, schema)
        if n_rows is None:
            n_rows, first = count, column.name
        elif count != n_rows:
            where = f"'{first}' has {n_rows}" if first else f"the expected number is {n_rows}"
            raise BatchError(f"column '{column.name}' has {counted(count, 'row')}, but {where}.")
    return Batch(n_rows or 0, values, lengths)


def batch_of(schema: Schema, rows: Sequence[Mapping[str, Any]]) -> Batch:
    """Return rows as a batch; what a row lacks, or has as None, is filled there, and not marked as given.

    Columns that the schema does not have are omitted.

    Raises:
        BatchError: a row lacks a column that has no fill value, or a value does not fit.
    """
    names = [column.name for column in schema if any(row.get(column.name) is not None for row in rows)]
    return by_columns(schema, {name: [row.get(name) for row in rows] for name in names}, len(rows))


def by_columns(schema: Schema, data: Mapping[str, Any], n_rows: int | None = None) -> Batch:
    """Return columns as a batch; in a list, None means that a row has no value.

    Raises:
        BatchError: a row lacks a column that has no fill value, or a value does not fit.
    """
    values: dict[str, Any] = {}
    partial: dict[str, npt.NDArray[np.bool_]] = {}
    for name, column_values in data.items():
        unmasked = column_values.tolist() if is_masked(column_values) else column_values  # None where masked
        values[name] = unmasked
        column = schema.find(name) if isinstance(unmasked, (list, tuple)) else None
        if column is None:
            continue
        rows = cast("Sequence[Any]", unmasked)
        if type(None) not in set(map(type, rows)):
            continue
        present = np.array([value is not None for value in rows], bool)
        if not column.optional:
            raise BatchError(
                f"row {int(np.argmin(present))} has no value for column '{name}', which has no fill value. Set a "
                "value in every row."
            )
        if present.any():
            partial[name] = present
            if column.axis is None:
                values[name] = np.full(len(rows), column.fill_value, column.np_dtype)
                values[name][present] = _scalars(column, [value for value in rows if value is not None])
            else:
                values[name] = [_or_fill(column, schema, data, rows, row) for row in range(len(rows))]
        else:
            del values[name]
            n_rows = len(rows)
    batch = prepare(schema, values, n_rows)
    batch.partial |= partial
    return batch


def _or_fill(column: Column, schema: Schema, data: Mapping[str, Any], rows: Sequence[Any], row: int) -> Any:
    """Return the value of a row, or the fill, in a ragged column as long as the columns that it lies beside."""
    if rows[row] is not None:
        return rows[row]
    if column.is_text:
        return column.fill_bytes if column.dtype == "bytes" else column.fill_value
    length = 0
    for neighbour in schema.axes[column.axis or ""]:
        beside = data.get(neighbour.name)
        if neighbour is not column and beside is not None and beside[row] is not None:
            length = len(beside[row])
            break
    return np.full((length, *column.shape), column.fill_value, column.np_dtype)


def as_array(array_like: Any) -> npt.NDArray[Any]:
    """Return values as a numpy array, also of a tensor that requires a gradient, is bfloat16, or is on a device.

    Raises:
        ValueError: rows of different lengths, or masked values.
        TypeError: these are no values.
    """
    if is_masked(array_like):
        raise ValueError("some of its values are masked; fill them, or remove the row")
    if hasattr(array_like, "detach"):
        tensor = array_like.detach().cpu()
        return np.asarray(tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor)
    return np.asarray(array_like)


def _numbers(column: Column, numbers: Any) -> npt.NDArray[Any]:
    """Return values as an array; of Python's integers above 2^63 NumPy makes floats or objects."""
    array = as_array(numbers)
    if column.dtype != "uint64" or array.dtype.kind not in "fO" or isinstance(numbers, np.ndarray):
        return array
    integers = np.asarray(numbers, object)
    if not all(isinstance(value, (int, np.integer)) for value in integers.flat):
        return array
    bad = [value for value in integers.flat if not 0 <= value < 1 << 64]
    if bad:
        raise BatchError(f"column '{column.name}': {bad[0]} does not fit in {column.dtype}.")
    return integers.astype(np.uint64)


def _merge_lengths(column: Column, sizes: Int64Array, lengths: dict[str, Int64Array], schema: Schema) -> None:
    axis = cast("str", column.axis)
    axis_lengths = lengths.setdefault(axis, sizes)
    if axis_lengths is sizes or axis_lengths.tobytes() == sizes.tobytes():  # faster than two calls of NumPy
        return
    if len(axis_lengths) == len(sizes):
        row = int(np.flatnonzero(axis_lengths != sizes)[0])
        first_column = next(c.name for c in schema.axes[axis])
        raise BatchError(
            f"row {row} of column '{column.name}' has length {int(sizes[row])}, but '{first_column}' on the "
            f"same axis '{axis}' has length {int(axis_lengths[row])}."
        )


def _fill(column: Column, n_rows: int, values: dict[str, npt.NDArray[Any]], lengths: dict[str, Int64Array]) -> None:
    if column.axis is None:
        values[column.name] = np.full(n_rows, column.fill_value, column.np_dtype)
    elif column.is_text:
        values[column.name] = np.frombuffer(column.fill_bytes * n_rows, np.uint8)
        lengths[column.axis] = np.full(n_rows, len(column.fill_bytes), np.int64)
    else:
        sizes = lengths.setdefault(column.axis, np.zeros(n_rows, np.int64))
        values[column.name] = np.full(int(sizes.sum()) * column.width, column.fill_value, column.np_dtype)


def cast_values(column: Column, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert to the column's dtype on disk; the error names a value that does not fit."""
    target = column.np_dtype
    if array.dtype == target:
        return np.ascontiguousarray(array)
    if array.size == 0:
        return np.empty(array.shape, target)
    kind, target_kind = array.dtype.kind, target.kind
    if kind == "b":
        return array.astype(target)
    if target_kind == "b" and kind in "iu":
        if bool(((array != 0) & (array != 1)).any()):
            raise BatchError(f"column '{column.name}' is bool; the batch contains values other than 0 and 1.")
        return array.astype(target)
    if target_kind in "iu" and kind in "iu":
        limits = np.iinfo(target)
        if kind == "i":  # a negative value read as unsigned is large, so the maximum settles most batches
            largest = int(np.maximum.reduce(array.view(f"u{array.itemsize}")))
            if largest <= min(limits.max, _LARGEST[array.itemsize]):
                return array.astype(target)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            bad = low if low < limits.min else high
            raise BatchError(f"column '{column.name}': {bad} does not fit in {column.dtype}.")
        return array.astype(target)
    if target_kind == "f" and kind in "iuf":
        with np.errstate(over="ignore"):
            out = array.astype(target)
        if kind in "iu" and bool((lost := out.astype(np.float64) != array).any()):
            raise BatchError(
                f"column '{column.name}': {int(array[lost][0])} cannot be represented exactly as {column.dtype}. Use "
                "a larger dtype, or convert the value first."
            )
        if kind == "f" and out.itemsize < array.itemsize and bool((lost := np.isinf(out) & np.isfinite(array)).any()):
            raise BatchError(f"column '{column.name}': {float(array[lost][0])} is too large for {column.dtype}.")
        return out
    raise BatchError(
        f"column '{column.name}' is {column.dtype}; the batch has {array.dtype}, which cannot be converted without "
        "loss. Convert the values first."
    )


def _scalars(column: Column, numbers: Any) -> npt.NDArray[Any]:
    try:
        array = _numbers(column, numbers)
    except (ValueError, TypeError) as error:
        if isinstance(error, BatchError):
            raise
        raise BatchError(f"column '{column.name}' requires one value per row: {error}") from None
    if array.ndim != 1:
        raise BatchError(f"column '{column.name}' has one value per row: expected shape [n], got {list(array.shape)}.")
    return cast_values(column, array)


def _ragged(column: Column, column_rows: Any) -> tuple[npt.NDArray[Any], Int64Array]:
    if isinstance(column_rows, RaggedArray):
        if column_rows.values.shape[1:] != column.shape:
            raise BatchError(
                f"column '{column.name}' has elements of shape {list(column.shape)}; the elements in this batch have "
                f"shape {list(column_rows.values.shape[1:])}."
            )
        return cast_values(column, column_rows.values.reshape(-1)), column_rows.lengths
    if isinstance(column_rows, (str, bytes)) or not isinstance(column_rows, Iterable):
        raise BatchError(f"column '{column.name}' is ragged: pass a RaggedArray or a list of 1-D rows.")
    rows: list[npt.NDArray[Any]] = []
    for i, row in enumerate(cast("Iterable[Any]", column_rows)):
        try:
            array = row if type(row) is np.ndarray else _numbers(column, row)  # which would return it, in more steps
        except (ValueError, TypeError) as error:
            if isinstance(error, BatchError):
                raise
            raise BatchError(f"row {i} of column '{column.name}' is not an array: {error}") from None
        if column.shape and array.size == 0:
            array = array.reshape(0, *column.shape)
        if array.shape[1:] != column.shape or not array.ndim:
            dtype = (
                f"rows have shape [T, {', '.join(map(str, column.shape))}]" if column.shape else "a ragged row is 1-D"
            )
            raise BatchError(f"row {i} of column '{column.name}' has shape {list(array.shape)}; {dtype}.")
        rows.append(array)
    sizes = np.array([len(row) for row in rows], np.int64)
    filled = [row for row in rows if row.size]
    kinds = {row.dtype for row in filled}
    if len(kinds) > 1:
        filled = [cast_values(column, row) for row in filled]
    flat: npt.NDArray[Any] = np.concatenate(filled).reshape(-1) if filled else np.empty(0, column.np_dtype)
    return cast_values(column, flat), sizes


def _text(column: Column, texts: Any) -> tuple[npt.NDArray[Any], Int64Array]:
    """Return texts or byte strings as one flat array, and the length of each in bytes."""
    kind = str if column.dtype == "str" else bytes
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        raise BatchError(f"column '{column.name}' is {column.dtype}: pass a list of {kind.__name__}, one per row.")
    texts = list(cast("Iterable[Any]", texts))
    if kind is str and set(map(type, texts)) == {str}:
        joined = "".join(texts)
        if joined.isascii():  # every character is one byte
            return np.frombuffer(joined.encode(), np.uint8), np.array(list(map(len, texts)), np.int64)
    parts: list[bytes] = []
    for i, item in enumerate(texts):
        if not isinstance(item, kind):
            raise BatchError(f"row {i} of column '{column.name}' is {type(item).__name__}, not {kind.__name__}.")
        try:
            parts.append(item.encode() if isinstance(item, str) else item)
        except UnicodeEncodeError as error:
            raise BatchError(
                f"row {i} of column '{column.name}' is not valid Unicode text: {error.reason} at "
                f"character {error.start}. Encode it with errors='replace' first."
            ) from None
    sizes = np.array([len(part) for part in parts], np.int64)
    return np.frombuffer(b"".join(parts), np.uint8), sizes
