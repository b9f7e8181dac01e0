"""Comparison of the trajectories of two runs or two stores."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.report.diff_steps import FieldDifference, StepsDifference
from rlhf_pipeline.report.stored import Ids, Stored
from trajectory_store import Column, SchemaError, diff

KEY = "trajectory_id"
CLOCKS = ("created_at",)
"""Columns with times of writing, which always differ and are not compared."""

_EXAMPLES = 5
_CHUNK_ROWS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnDifference:
    """One column whose values differ."""

    name: str
    num: int
    """Trajectories that differ."""
    first: tuple[tuple[int, int], ...]
    """The first few pairs of ids, left and right."""
    example: tuple[str, str]
    """The first pair's values as text; for a ragged column, at the first index that differs."""
    largest: float | None
    """The largest difference between two floating-point values; None if only lengths or NaNs differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsDifference:
    """The differences between the trajectories of two stores."""

    key: str | None
    """The column by which trajectories are paired; None if they are paired in the order of arrival."""
    num_both: int
    num_only_left: int
    num_only_right: int
    first_only_left: tuple[int, ...]
    first_only_right: tuple[int, ...]
    columns_left: tuple[str, ...]
    columns_right: tuple[str, ...]
    redefined: tuple[str, ...]
    columns: tuple[ColumnDifference, ...]
    not_compared: tuple[str, ...]

    @property
    def same(self) -> bool:
        """True if both have the same trajectories, with equal values in the shared columns."""
        return not (self.num_only_left or self.num_only_right or self.redefined or self.columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Everything that differs."""

    left: str
    right: str
    config: tuple[FieldDifference, ...] | None
    """None unless both are runs."""
    steps: StepsDifference | None
    trajectories: RowsDifference

    @property
    def same(self) -> bool:
        """True if the trajectories and the learning are the same.

        Settings that made no difference, and columns that only one side has, count as remarks.
        """
        return (self.steps is None or self.steps.same) and self.trajectories.same

    @property
    def has_remarks(self) -> bool:
        """True if there are other differences."""
        return bool(self.config or self.trajectories.columns_left or self.trajectories.columns_right)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON-ready data."""
        return {"same": self.same, **asdict(self)}


def compare_rows(
    left: Stored,
    right: Stored,
    *,
    ignore: Collection[str] = (),
    on_rows: Callable[[int, int], None] | None = None,
) -> RowsDifference:
    """Compare the trajectories of two stores, paired by `trajectory_id` if each has one, otherwise in order of arrival.

    Args:
        left: one store.
        right: the other.
        ignore: columns to leave out, besides `CLOCKS`.
        on_rows: called with the numbers of trajectories compared so far and in total.

    Raises:
        StoreError: a store is damaged, or its trajectories were evicted meanwhile.
    """
    skip = {*ignore, *CLOCKS}
    key = KEY if all(KEY in side.columns and side.columns[KEY].axis is None for side in (left, right)) else None
    try:
        found = diff(left.store, right.store, key, ignore=skip, on_rows=on_rows)
    except SchemaError:  # trajectories without ids
        key = None
        found = diff(left.store, right.store, ignore=skip, on_rows=on_rows)
    return RowsDifference(
        key=key,
        num_both=found.num_pairs,
        num_only_left=len(found.only_left),
        num_only_right=len(found.only_right),
        first_only_left=tuple(found.only_left[:_EXAMPLES].tolist()),
        first_only_right=tuple(found.only_right[:_EXAMPLES].tolist()),
        columns_left=tuple(found.columns_left),
        columns_right=tuple(found.columns_right),
        redefined=tuple(found.redefined),
        columns=tuple(
            ColumnDifference(
                name=name,
                num=len(pairs),
                first=tuple((int(a), int(b)) for a, b in pairs[:_EXAMPLES].tolist()),
                example=_example(left, right, left.columns[name], pairs[:1]),
                largest=_largest(left, right, left.columns[name], pairs),
            )
            for name, pairs in found.changed.items()
        ),
        not_compared=tuple(name for name in left.columns if name in skip and name in right.columns),
    )


def _example(left: Stored, right: Stored, column: Column, pair: Ids) -> tuple[str, str]:
    """Return the values of one pair as text; for a ragged column, at the first index that differs."""
    a, b = (side.store.read(pair[:, at], [column.name])[column.name][0] for at, side in enumerate((left, right)))
    if column.axis is None or column.is_text:
        return _text(a), _text(b)
    if len(a) != len(b):
        return f"{len(a)} values", f"{len(b)} values"
    at = int(np.flatnonzero(_unequal(a, b))[0])
    return f"{_text(a[at])} at place {at}", f"{_text(b[at])} at place {at}"


def _text(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, (float, np.floating)) else str(value)


def _unequal(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return (a != b) & ~((a != a) & (b != b))


def _largest(left: Stored, right: Stored, column: Column, pairs: Ids) -> float | None:
    """Return the largest difference between finite values at the same index."""
    if column.is_text or column.np_dtype.kind != "f":
        return None
    largest: float | None = None
    for first in range(0, len(pairs), _CHUNK_ROWS):
        some = pairs[first : first + _CHUNK_ROWS]
        values = [side.store.read(some[:, at], [column.name])[column.name] for at, side in enumerate((left, right))]
        rows = [values] if column.axis is None else zip(*values, strict=True)
        for a, b in rows:
            if len(a) == len(b):
                apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
                apart = apart[np.isfinite(apart)]
                largest = largest if not len(apart) else max(largest or 0.0, float(apart.max()))
    return largest
