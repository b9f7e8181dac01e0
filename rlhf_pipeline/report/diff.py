"""Comparison of the trajectories of two runs or two stores."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.report.query import Answer
from rlhf_pipeline.report.stored import Ids, Stored
from trajectory_store import Column, SchemaError, diff

KEY = "trajectory_id"
CLOCKS = ("created_at",)
"""Columns with times of writing, which always differ and are not compared."""

_EXAMPLES = 5
_CHUNK_ROWS = 256


def compare_rows(
    left: Stored,
    right: Stored,
    *,
    ignore: Collection[str] = (),
    on_rows: Callable[[int, int], None] | None = None,
) -> Answer:
    """Compare the trajectories of two stores, paired by `trajectory_id` if each has one, else in order of arrival."""
    skip = {*ignore, *CLOCKS}
    key = KEY if all(KEY in side.columns and side.columns[KEY].axis is None for side in (left, right)) else None
    try:
        difference = diff(left.store, right.store, key, ignore=skip, on_rows=on_rows)
    except SchemaError:  # trajectories without ids
        key = None
        difference = diff(left.store, right.store, ignore=skip, on_rows=on_rows)
    columns = [
        {
            "name": name,
            "num": len(pairs),
            "first": pairs[:_EXAMPLES].tolist(),
            "example": _example(left, right, left.columns[name], pairs[:1]),
            "largest": _largest(left, right, left.columns[name], pairs),
        }
        for name, pairs in difference.changed.items()
    ]
    return {
        "same": not (len(difference.only_left) or len(difference.only_right) or difference.redefined or columns),
        "key": key,
        "num_both": difference.num_pairs,
        "num_only_left": len(difference.only_left),
        "num_only_right": len(difference.only_right),
        "first_only_left": difference.only_left[:_EXAMPLES].tolist(),
        "first_only_right": difference.only_right[:_EXAMPLES].tolist(),
        "columns_left": list(difference.columns_left),
        "columns_right": list(difference.columns_right),
        "redefined": list(difference.redefined),
        "columns": columns,
        "not_compared": [name for name in left.columns if name in skip and name in right.columns],
    }


def _example(left: Stored, right: Stored, column: Column, pair: Ids) -> tuple[str, str]:
    """Return the values of one pair as text; for a ragged column, at the first index that differs."""
    a, b = (side.store.read(pair[:, at], [column.name])[column.name][0] for at, side in enumerate((left, right)))
    if column.axis is None or column.is_text:
        return _text(a), _text(b)
    if len(a) != len(b):
        return f"{len(a)} values", f"{len(b)} values"
    at = int(np.flatnonzero(_unequal(a, b))[0])
    return f"{_text(a[at])} at position {at}", f"{_text(b[at])} at position {at}"


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
