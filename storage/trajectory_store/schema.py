"""Columns and schemas: the structure of a trajectory."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from trajectory_store.errors import SchemaError, UnknownColumnError, did_you_mean

NUMERIC_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
DTYPES = (*NUMERIC_DTYPES, "str", "bytes")
DEFAULT_AXIS = "tokens"
MAX_OPTIONAL = 64
MAX_WIDTH = 1 << 16
RESERVED = frozenset({"catalog", "commits", "present", "row_id", "row_time", "target", "lengths", "ids"})
MAX_NAME = 128
_NAME = re.compile(rf"[A-Za-z][A-Za-z0-9_-]{{0,{MAX_NAME - 1}}}\Z")
"""Maximum length of the name of a column or an axis: files have these names, with a suffix, and a file system allows
255 bytes.
"""

Fill = bool | int | float | str


@dataclass(frozen=True)
class Column:
    """One column of a store.

    Args:
        name: at most 128 letters, digits, `_` and `-`, starting with a letter.
        dtype: a numpy name (`"int32"`, `"float32"`, `"bool"`, ...), `"str"` for UTF-8 text or `"bytes"`.
        ragged: each trajectory has one array of any length instead of one value.
        mutable: `TrajectoryStore.update` may change the values, unlike those of other columns. `append` may omit the
            column: a value is initially 0 unless a fill is given.
        axis: ragged columns that share an axis have the same length in each trajectory and share one
            offsets array. Default `"tokens"`; text and bytes need a separate axis.
        fill: the value for rows that were appended without the column, or before the column was added. A column without
            a fill, unless mutable, must be in every batch.
        shape: the shape of one element of a ragged column: `(8,)` for the 8 experts of each token.

    Raises:
        SchemaError: the definition is inconsistent.

    >>> Column("input_ids", "int32", ragged=True).axis
    'tokens'
    >>> Column("experts", "int16", ragged=True, shape=(8,), fill=0).width
    8
    """

    name: str
    dtype: str
    ragged: bool = False
    mutable: bool = False
    axis: str | None = None
    fill: Fill | None = None
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.match(self.name) or self.name in RESERVED:
            raise SchemaError(
                f"column name {self.name!r} is not valid: a name must start with a letter, consist of at most "
                f"{MAX_NAME} letters, digits, '_' and '-', and not be one of {', '.join(sorted(RESERVED))}."
            )
        if self.dtype not in DTYPES:
            raise SchemaError(
                f"column '{self.name}' has dtype {self.dtype!r}, which the format does not support."
                + did_you_mean(str(self.dtype), DTYPES)
            )
        if self.is_text and self.ragged:
            raise SchemaError(f"column '{self.name}' is {self.dtype}, so it cannot be ragged. Remove ragged=True.")
        self._set_axis()
        self._set_shape()
        self._check_fill()

    def _set_shape(self) -> None:
        shape = tuple(self.shape)
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in cast("tuple[Any, ...]", shape)):
            raise SchemaError(f"column '{self.name}' has shape {self.shape!r}: each size must be at least 1.")
        if shape and not self.ragged:
            raise SchemaError(f"column '{self.name}' has a shape per element, so it must be ragged: set ragged=True.")
        if math.prod(shape) > MAX_WIDTH:
            raise SchemaError(
                f"column '{self.name}' has {math.prod(shape)} values per element; the maximum is {MAX_WIDTH}."
            )
        object.__setattr__(self, "shape", shape)

    def _set_axis(self) -> None:
        if self.axis is None:
            axis = self.name if self.is_text else DEFAULT_AXIS if self.ragged else None
            object.__setattr__(self, "axis", axis)
        elif not (self.ragged or self.is_text):
            raise SchemaError(
                f"column '{self.name}' is a scalar, so it cannot have an axis. Set ragged=True, or omit axis=."
            )
        elif not _NAME.match(self.axis):
            raise SchemaError(
                f"axis {self.axis!r} of column '{self.name}' is not a valid name: it must start with a letter and "
                f"consist of at most {MAX_NAME} letters, digits, '_' and '-'."
            )

    def _check_fill(self) -> None:
        if self.fill is None:
            return
        if self.is_text:
            if not isinstance(self.fill, str) or (self.dtype == "bytes" and self.fill):
                raise SchemaError(
                    f"the fill value {self.fill!r} of column '{self.name}' is not a str."
                    if self.dtype == "str"
                    else f"the fill value {self.fill!r} of column '{self.name}' is not valid: a bytes column can only "
                    "have an empty one. Use fill=''."
                )
            return
        try:
            converted = np.asarray(self.fill).astype(self.dtype)
            same = bool(converted == self.fill) or (self.dtype.startswith("float") and self.fill != "")
        except (ValueError, TypeError, OverflowError):
            same = False
        if not same or isinstance(self.fill, str):
            raise SchemaError(f"the fill value {self.fill!r} of column '{self.name}' is not a valid {self.dtype}.")

    @functools.cached_property
    def is_text(self) -> bool:
        """Whether the column holds one text or byte string per row."""
        return self.dtype in ("str", "bytes")

    @functools.cached_property
    def width(self) -> int:
        """Values per element: the product of the shape."""
        return math.prod(self.shape)

    @functools.cached_property
    def optional(self) -> bool:
        """Whether `append` may omit the column."""
        return self.fill is not None or self.mutable

    @functools.cached_property
    def np_dtype(self) -> np.dtype[Any]:
        """The little-endian dtype on disk; uint8 for text and bytes."""
        return np.dtype("uint8") if self.is_text else np.dtype(self.dtype).newbyteorder("<")

    @functools.cached_property
    def fill_value(self) -> Fill:
        """The fill, or a default: NaN for floats unless mutable, else 0, False or the empty text."""
        if self.fill is not None:
            return self.fill
        if self.is_text:
            return ""
        if self.dtype.startswith("float") and not self.mutable:
            return math.nan
        return False if self.dtype == "bool" else 0

    @functools.cached_property
    def fill_bytes(self) -> bytes:
        """The fill of a text or bytes column as bytes; empty for other columns."""
        return str(self.fill_value).encode() if self.is_text else b""

    def to_json(self) -> dict[str, Any]:
        """Return the definition as JSON values, with NaN and infinities as their names."""
        out: dict[str, Any] = {"name": self.name, "dtype": self.dtype}
        if self.ragged:
            out["ragged"] = True
        if self.mutable:
            out["mutable"] = True
        if self.axis is not None:
            out["axis"] = self.axis
        if self.shape:
            out["shape"] = list(self.shape)
        if self.fill is not None:
            odd = isinstance(self.fill, float) and not math.isfinite(self.fill)
            out["fill"] = {"float": repr(self.fill)} if odd else self.fill
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Column:
        """Rebuild a column from `to_json`."""
        try:
            fields = dict(data)
            if isinstance(fields.get("fill"), dict):
                fields["fill"] = float(fields["fill"]["float"])
            fields["shape"] = tuple(fields.get("shape", ()))
            return cls(**fields)
        except (TypeError, ValueError, KeyError) as error:
            if isinstance(error, SchemaError):
                raise
            raise SchemaError(f"a column definition cannot be read: {data!r} ({error})") from None


class Schema:
    """The columns of a store, in order.

    Args:
        columns: the columns, with unique names; the columns of an axis must be all text or all numeric.

    Raises:
        SchemaError: there are no columns, a name appears twice, or a text column shares its axis.

    >>> schema = Schema([Column("input_ids", "int32", ragged=True), Column("reward", "float32")])
    >>> schema.names
    ('input_ids', 'reward')
    >>> Schema.from_json(schema.to_json()) == schema
    True
    """

    def __init__(self, columns: Iterable[Column]) -> None:
        self.columns: tuple[Column, ...] = tuple(columns)
        if not self.columns:
            raise SchemaError("a schema needs at least one column.")
        self._by_name: dict[str, Column] = {}
        axes: dict[str, list[Column]] = {}
        for column in self.columns:
            if not isinstance(column, Column):  # pyright: ignore[reportUnnecessaryIsInstance] - a caller's mistake
                raise SchemaError(
                    f"a schema must be a list of Column objects, for example [Column('a', 'int32')]; got {column!r}."
                )
            if column.name in self._by_name:
                raise SchemaError(f"column '{column.name}' appears twice in the schema.")
            self._by_name[column.name] = column
            if column.axis is not None:
                axes.setdefault(column.axis, []).append(column)
        for axis, members in axes.items():
            if len(members) > 1 and any(c.is_text for c in members):
                names = ", ".join(c.name for c in members)
                raise SchemaError(
                    f"axis '{axis}' is shared by {names}, but each text or bytes column needs a separate axis."
                )
        self.axes: dict[str, tuple[Column, ...]] = {a: tuple(m) for a, m in axes.items()}
        self.optional: tuple[Column, ...] = tuple(c for c in self.columns if c.optional)
        if len(self.optional) > MAX_OPTIONAL:
            raise SchemaError(
                f"{len(self.optional)} columns have a fill value or are mutable; the format has presence flags for "
                f"at most {MAX_OPTIONAL} such columns."
            )

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The column names, in order."""
        return tuple(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Column]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, name: str) -> Column:
        try:
            return self._by_name[name]
        except KeyError:
            raise UnknownColumnError(
                f"the schema has no column '{name}'." + did_you_mean(str(name), self._by_name)
            ) from None

    @functools.cached_property
    def _text(self) -> str:
        return json.dumps(self.to_json())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Schema) and self._text == other._text)

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return f"Schema({list(self.columns)!r})"

    def find(self, name: str) -> Column | None:
        """Return the column of this name, or None if there is none."""
        return self._by_name.get(name)

    def select(self, names: Sequence[str] | str | None) -> tuple[Column, ...]:
        """Return the columns with these names, or all columns for None."""
        if names is None:
            return self.columns
        if isinstance(names, str):
            return (self[names],)
        by_name = self._by_name
        return tuple([by_name[name] if name in by_name else self[name] for name in names])

    def only(self, names: Collection[str]) -> Schema:
        """Return a schema with only the columns of these names, in the order of this schema."""
        return self if len(names) == len(self.columns) else _subset(self, frozenset(names))

    def with_columns(self, columns: Iterable[Column]) -> Schema:
        """Return a schema with additional columns, each of which needs a fill for existing rows."""
        added = list(columns)
        for column in added:
            if not column.optional:
                raise SchemaError(
                    f"column '{column.name}' is added to existing rows, so it needs a fill value, for example "
                    f"Column({column.name!r}, {column.dtype!r}, fill=...)."
                )
        return Schema([*self.columns, *added])

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON values."""
        return {"columns": [c.to_json() for c in self.columns]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schema:
        """Rebuild a schema from `to_json`."""
        columns: Any = data.get("columns") if isinstance(data, Mapping) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if not isinstance(columns, list):
            raise SchemaError(f"a schema cannot be read: there is no list of columns in {str(data)[:200]}")
        return _schema_of(json.dumps(columns))


@functools.lru_cache(maxsize=256)
def _subset(schema: Schema, names: frozenset[str]) -> Schema:
    return Schema(c for c in schema if c.name in names)


@functools.lru_cache(maxsize=256)
def _schema_of(columns: str) -> Schema:
    """Return the schema of a JSON list of columns; the segments of a store share it."""
    return Schema([Column.from_json(c) for c in json.loads(columns)])
