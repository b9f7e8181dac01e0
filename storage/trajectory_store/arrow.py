"""Trajectories as Arrow tables."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trajectory_store.ragged import Int64Array
from trajectory_store.schema import Column

if TYPE_CHECKING:
    from trajectory_store.reads import StoreReads


def to_table(store: StoreReads, columns: Sequence[Column], ids: Int64Array) -> Any:
    """Columns of some trajectories as a table; what was not given is null."""
    try:
        pa: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        raise ImportError("to_arrow needs the package pyarrow. Install it with `pip install pyarrow`.") from error
    arrays: dict[str, Any] = {}
    for column in columns:
        absent = ~store.present(column.name, ids)
        if column.is_text:
            kind = pa.large_string() if column.dtype == "str" else pa.large_binary()
            arrays[column.name] = pa.array(store.read(ids, [column.name])[column.name], kind, mask=absent)
        elif column.axis is None:
            arrays[column.name] = pa.array(store.read_scalars(column.name, ids), mask=absent)
        else:
            ragged = store.read_ragged(column.name, ids)
            values = pa.array(np.ascontiguousarray(ragged.values).reshape(-1))
            for size in reversed(column.shape):
                values = pa.FixedSizeListArray.from_arrays(values, size)
            # Not a null among the offsets: the row before would then end where the row after begins.
            mask = pa.array(absent)
            arrays[column.name] = pa.LargeListArray.from_arrays(pa.array(ragged.offsets), values, mask=mask)
    return pa.table(arrays)
