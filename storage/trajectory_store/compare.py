"""Comparing two stores row by row."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store.copying import CHUNK_ROWS, parts_of
from trajectory_store.errors import SchemaError
from trajectory_store.ragged import Int64Array
from trajectory_store.schema import Column
from trajectory_store.store import TrajectoryStore


@dataclass
class StoreDiff:
    """The differences between two stores.

    Attributes:
        only_left: `[N]` int64 ids of rows that the right store lacks.
        only_right: `[N]` int64 ids of rows that the left store lacks.
        changed: per column, the pairs `[K, 2]` of ids (left, right) whose values differ.
        columns_left: columns that only the left store has.
        columns_right: columns that only the right store has.
        redefined: columns that have one value per row in one store and several in the other, or text in one and numbers
            in the other; their values are not compared.
        num_pairs: number of rows that are in both stores.
    """

    only_left: Int64Array
    only_right: Int64Array
    changed: dict[str, Int64Array] = field(default_factory=dict[str, "Int64Array"])
    columns_left: list[str] = field(default_factory=list[str])
    columns_right: list[str] = field(default_factory=list[str])
    redefined: list[str] = field(default_factory=list[str])
    num_pairs: int = 0

    @property
    def same(self) -> bool:
        """Whether there are no differences."""
        sides = len(self.only_left) + len(self.only_right) + len(self.columns_left) + len(self.columns_right)
        return not sides and not self.changed and not self.redefined

    def __str__(self) -> str:
        if self.same:
            return "The stores contain the same rows."
        lines: list[str] = []
        for side, ids in (("left", self.only_left), ("right", self.only_right)):
            if len(ids):
                lines.append(f"{len(ids)} trajectories only on the {side}, first id {int(ids[0])}")
        for side, names in (("left", self.columns_left), ("right", self.columns_right)):
            if names:
                lines.append(f"columns only on the {side}: {', '.join(names)}")
        if self.redefined:
            lines.append(f"columns with a different definition: {', '.join(self.redefined)}")
        for name, pairs in self.changed.items():
            left, right = pairs[0].tolist()
            lines.append(f"column '{name}' differs in {len(pairs)} trajectories, first ids {left} and {right}")
        return "\n".join(lines)


def diff(
    left: TrajectoryStore,
    right: TrajectoryStore,
    key: str | None = None,
    *,
    ignore: Collection[str] = (),
    on_rows: Callable[[int, int], None] | None = None,
) -> StoreDiff:
    """Compare the rows of two stores. Apart from the ids, memory use does not depend on their size.

    Args:
        left: one store.
        right: the other store; the backends may differ.
        key: a scalar column whose values identify a row in both stores, for example `"trajectory_id"`; without a key,
            rows are paired in the order of arrival.
        ignore: columns that are not compared.
        on_rows: called with the number of pairs compared so far and the total.

    Returns:
        The differences; NaN equals NaN.

    Raises:
        SchemaError: a value of the key appears twice in one store.
    """
    mine, theirs = left.ids(), right.ids()
    if key is None:
        n = min(len(mine), len(theirs))
        pairs = np.stack([mine[:n], theirs[:n]], axis=1)
        result = StoreDiff(mine[n:], theirs[n:])
    else:
        pairs, result = _pair_by(left, right, key)
    result.num_pairs = len(pairs)
    result.columns_left = [c.name for c in left.schema if c.name not in right.schema and c.name not in ignore]
    result.columns_right = [c.name for c in right.schema if c.name not in left.schema and c.name not in ignore]
    shared_columns = [c for c in left.schema if c.name in right.schema and c.name not in ignore]
    result.redefined = [c.name for c in shared_columns if _kind(c) != _kind(right.schema[c.name])]
    shared_columns = [c for c in shared_columns if c.name not in result.redefined]
    wrong: dict[str, list[Int64Array]] = {}
    for first in range(0, len(pairs), CHUNK_ROWS):
        chunk = pairs[first : first + CHUNK_ROWS]
        for column in shared_columns:
            bad = _differ(left, right, column, chunk)
            if bad.any():
                wrong.setdefault(column.name, []).append(chunk[bad])
        if on_rows is not None:
            on_rows(first + len(chunk), len(pairs))
    result.changed = {c.name: np.concatenate(wrong[c.name]) for c in shared_columns if c.name in wrong}
    return result


def _kind(column: Column) -> tuple[bool, bool]:
    return column.axis is None, column.is_text


def _pair_by(left: TrajectoryStore, right: TrajectoryStore, key: str) -> tuple[Int64Array, StoreDiff]:
    mine, theirs = left.ids(), right.ids()
    my_values, their_values = (_names(store, key, ids) for store, ids in ((left, mine), (right, theirs)))
    order = np.argsort(their_values)
    near = np.minimum(np.searchsorted(their_values[order], my_values), max(len(theirs) - 1, 0))
    at = order[near] if len(theirs) else near
    hit = np.asarray(their_values[at] == my_values, bool) if len(theirs) else np.zeros(len(mine), bool)
    pairs = np.stack([mine[hit], theirs[at[hit]]], axis=1) if len(theirs) else np.empty((0, 2), np.int64)
    unpaired = np.ones(len(theirs), bool)
    unpaired[at[hit]] = False
    return pairs, StoreDiff(mine[~hit], theirs[unpaired])


def _names(store: TrajectoryStore, key: str, ids: Int64Array) -> npt.NDArray[Any]:
    values = store.read_scalars(key, ids)
    if len(np.unique(values)) != len(ids):
        raise SchemaError(f"column '{key}' does not identify rows in {store.path}: a value appears twice.")
    return values


def _differ(left: TrajectoryStore, right: TrajectoryStore, column: Column, pairs: Int64Array) -> npt.NDArray[np.bool_]:
    """Return which pairs differ in a column: `[K]` bool."""
    name, mine, theirs = column.name, pairs[:, 0], pairs[:, 1]
    if column.axis is None:
        return _unequal(left.read_scalars(name, mine), right.read_scalars(name, theirs))
    lengths = left.lengths(name, mine)
    wrong = lengths != right.lengths(name, theirs)
    equal = np.flatnonzero(~wrong)
    for part in parts_of(lengths[equal]):
        rows = equal[part]
        if column.is_text:
            wrong[rows] = _unequal(left.read_scalars(name, mine[rows]), right.read_scalars(name, theirs[rows]))
            continue
        x, y = left.read_ragged(name, mine[rows]), right.read_ragged(name, theirs[rows])
        places = np.flatnonzero(_unequal(x.values, y.values))
        wrong[rows[np.searchsorted(x.offsets[1:], places, side="right")]] = True
    return wrong


def _unequal(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    wrong = np.asarray(a != b, bool)
    if a.dtype.kind == "f" and b.dtype.kind == "f":
        wrong &= ~(np.isnan(a) & np.isnan(b))
    return wrong
