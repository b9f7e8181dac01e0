"""Rows as plain values, and as lines of JSON or CSV: for the shell, spreadsheets and tools that read no Arrow."""

from __future__ import annotations

import base64
import csv
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import numpy.typing as npt

from trajectory_store.new_files import new_file
from trajectory_store.reads import Ids, as_ids

if TYPE_CHECKING:
    from trajectory_store.table import StoreTable

_ROWS_PER_READ: Final = 1024


def plain(value: Any) -> Any:
    """Return a value as JSON has it: NaN is null, an infinity is text, bytes are base64.

    >>> plain(np.array([1.0, np.nan, -np.inf])), plain(np.float32(0.5)), plain(b"a")
    ([1.0, None, '-Infinity'], 0.5, 'YQ==')
    """
    if isinstance(value, np.ndarray):
        array = cast("npt.NDArray[Any]", value)
        return _finite(array.tolist()) if array.dtype.kind == "f" else array.tolist()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return _finite(value.item() if isinstance(value, np.generic) else value)


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(number) for number in cast("list[Any]", value)]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def plain_rows(store: StoreTable, ids: Ids, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield trajectories as dicts with their id; a value that was not supplied is None."""
    names, row_ids = [column.name for column in store.schema.select(columns)], as_ids(ids)
    for start in range(0, len(row_ids), _ROWS_PER_READ):
        block = row_ids[start : start + _ROWS_PER_READ]
        values = store.read(block, names)
        supplied = {name: store.present(name, block) for name in names}
        for i, row_id in enumerate(block.tolist()):
            yield {"id": row_id} | {name: plain(values[name][i]) if supplied[name][i] else None for name in names}


def write_text_rows(store: StoreTable, path: Path, ids: Ids, columns: Sequence[str] | None = None) -> int:
    """Write trajectories to a JSON Lines or CSV file, as its suffix states; the file appears complete.

    In CSV a list is a JSON list in one cell, and a value that was not supplied is an empty cell.

    Returns:
        The number of trajectories in the file.
    """
    names = ["id", *(column.name for column in store.schema.select(columns))]
    count = 0
    with new_file(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, names, lineterminator="\n") if path.suffix == ".csv" else None
        if table is not None:
            table.writeheader()
        for row in plain_rows(store, ids, columns):
            count += 1
            if table is None:
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            else:
                cells = {name: json.dumps(cell) if isinstance(cell, list) else cell for name, cell in row.items()}
                table.writerow(cells)
    return count
