"""Copying a store into another one, of any backend, and comparing two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store._errors import SchemaError
from trajectory_store._ragged import Int64Array, RaggedArray
from trajectory_store._schema import Column
from trajectory_store._store import TrajectoryStore

CHUNK_ROWS = 1024


def copy_rows(
    source: TrajectoryStore, target: TrajectoryStore, ids: npt.ArrayLike | None = None, *, batch_rows: int = CHUNK_ROWS
) -> Int64Array:
    """Append the rows of one store to another, in order, patches folded in.

    Which values were given and which filled in is kept, and so are mutable values. Columns that only the
    target has are filled.

    Args:
        source: where rows come from.
        target: a store open for appending; every column of the source must be in it, with the same dtype.
        ids: which rows; None for all in the order of arrival.
        batch_rows: rows per commit.

    Returns:
        `[n]` int64: the ids in the target, in the order of `ids`.

    Raises:
        SchemaError: the target lacks a column, or has it with another dtype.
    """
    for column in source.schema:
        known = target.schema.find(column.name)
        if known is None or (known.dtype, known.axis) != (column.dtype, column.axis):
            raise SchemaError(
                f"column '{column.name}' ({column.dtype}, axis {column.axis}) has no counterpart in the target. "
                "Create the target with the source's schema, or open it with add_columns=[...]."
            )
    for column in target.schema:
        if column.name not in source.schema and not column.optional:
            raise SchemaError(f"column '{column.name}' of the target has no fill, and the source lacks it.")
    wanted = source.ids() if ids is None else np.asarray(ids, np.int64)
    parts = [
        target.append_batch(source.read_batch(wanted[first : first + batch_rows], target.schema))
        for first in range(0, len(wanted), batch_rows)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


@dataclass
class StoreDiff:
    """How two stores differ.

    Attributes:
        only_left: `[N]` int64 ids of rows that the right store lacks.
        only_right: `[N]` int64 ids of rows that the left store lacks.
        changed: per column, the pairs `[K, 2]` of ids (left, right) whose values differ.
        columns_left: columns that only the left store has.
        columns_right: columns that only the right store has.
    """

    only_left: Int64Array
    only_right: Int64Array
    changed: dict[str, Int64Array] = field(default_factory=dict[str, "Int64Array"])
    columns_left: list[str] = field(default_factory=list[str])
    columns_right: list[str] = field(default_factory=list[str])

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        sides = len(self.only_left) + len(self.only_right) + len(self.columns_left) + len(self.columns_right)
        return not sides and not self.changed

    def __str__(self) -> str:
        if self.same:
            return "The stores hold the same rows."
        lines: list[str] = []
        for side, ids in (("left", self.only_left), ("right", self.only_right)):
            if len(ids):
                lines.append(f"{len(ids)} trajectories only on the {side}, first id {int(ids[0])}")
        for side, names in (("left", self.columns_left), ("right", self.columns_right)):
            if names:
                lines.append(f"columns only on the {side}: {', '.join(names)}")
        for name, pairs in self.changed.items():
            left, right = pairs[0].tolist()
            lines.append(f"column '{name}' differs in {len(pairs)} trajectories, first ids {left} and {right}")
        return "\n".join(lines)


def diff(left: TrajectoryStore, right: TrajectoryStore, key: str | None = None) -> StoreDiff:
    """Compare the rows of two stores.

    Args:
        left: one store.
        right: the other; the backends may differ.
        key: a scalar column whose values name a row in both, for example `"trajectory_id"`; without it the
            rows are paired in the order of arrival.

    Returns:
        What differs; NaN equals NaN.

    Raises:
        SchemaError: values of the key appear twice in one store.
    """
    mine, theirs = left.ids(), right.ids()
    if key is None:
        n = min(len(mine), len(theirs))
        pairs = np.stack([mine[:n], theirs[:n]], axis=1)
        result = StoreDiff(mine[n:], theirs[n:])
    else:
        pairs, result = _pair_by(left, right, key)
    names = [c.name for c in left.schema if c.name in right.schema]
    result.columns_left = [c.name for c in left.schema if c.name not in right.schema]
    result.columns_right = [c.name for c in right.schema if c.name not in left.schema]
    for name in names:
        wrong = [
            _differ(left, right, left.schema[name], pairs[first : first + CHUNK_ROWS])
            for first in range(0, len(pairs), CHUNK_ROWS)
        ]
        found = np.concatenate(wrong) if wrong else pairs[:0]
        if len(found):
            result.changed[name] = found
    return result


def _pair_by(left: TrajectoryStore, right: TrajectoryStore, key: str) -> tuple[Int64Array, StoreDiff]:
    sides: list[dict[Any, int]] = []
    for store in (left, right):
        ids = store.ids()
        values = store.read_scalars(key, ids).tolist()
        named = dict(zip(values, ids.tolist(), strict=True))
        if len(named) != len(ids):
            raise SchemaError(f"column '{key}' does not name rows in {store.path}: a value appears twice.")
        sides.append(named)
    mine, theirs = sides
    pairs = [(row, theirs[value]) for value, row in mine.items() if value in theirs]
    only_left = np.array([row for value, row in mine.items() if value not in theirs], np.int64)
    only_right = np.array([row for value, row in theirs.items() if value not in mine], np.int64)
    return np.array(pairs, np.int64).reshape(-1, 2), StoreDiff(only_left, only_right)


def _differ(left: TrajectoryStore, right: TrajectoryStore, column: Column, pairs: Int64Array) -> Int64Array:
    name = column.name
    if column.axis is None or column.is_text:
        a, b = left.read_scalars(name, pairs[:, 0]), right.read_scalars(name, pairs[:, 1])
        wrong = a != b
        if column.np_dtype.kind == "f":
            wrong &= ~(np.isnan(a) & np.isnan(b))
        return pairs[np.asarray(wrong, bool)]
    x, y = left.read_ragged(name, pairs[:, 0]), right.read_ragged(name, pairs[:, 1])
    return pairs[_ragged_differ(x, y)]


def _ragged_differ(x: RaggedArray, y: RaggedArray) -> npt.NDArray[np.bool_]:
    wrong = x.lengths != y.lengths
    floats = x.values.dtype.kind == "f"
    for row in np.flatnonzero(~wrong).tolist():
        wrong[row] = not np.array_equal(x[row], y[row], equal_nan=floats)
    return wrong
