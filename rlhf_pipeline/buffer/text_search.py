"""Search in the texts of a store, straight from their stored bytes: nothing is decoded, and there is no index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trajectory_store import RaggedArray, Schema, TrajectoryStore
from trajectory_store.texts import occurrences

Ids = npt.NDArray[np.int64]

_BLOCK_BYTES = 1 << 22
_BLOCK_ROWS = 1 << 16


def stored_bytes(store: TrajectoryStore, name: str, ids: Ids) -> RaggedArray:
    """Return a text or bytes column in stored form, without decoding."""
    column = store.schema[name]
    batch = store.read_batch(ids, Schema([column]))
    if name not in batch.values:  # given to none of the rows
        fill = np.frombuffer(column.fill_bytes, np.uint8)
        return RaggedArray(np.tile(fill, len(ids)), np.full(len(ids), len(fill)))
    return RaggedArray(batch.values[name].view(np.uint8), batch.lengths[column.axis or ""])


def text_bytes(store: TrajectoryStore, name: str, ids: Ids) -> tuple[npt.NDArray[np.uint8], Ids]:
    """Return a text column in stored form, without decoding: UTF-8 bytes, [bytes], and where rows begin, [N + 1]."""
    rows = stored_bytes(store, name, ids)
    return rows.values, rows.offsets


class SomeIds(Protocol):
    """Ids of rows, whose slices are arrays: an array, or a sequence that makes them when they are needed."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Ids: ...


def search(store: Any, name: str, text: str, ids: SomeIds) -> Iterator[tuple[Ids, int]]:
    """Find a text in a text column, newest rows first, about 4 MB at a time.

    ASCII letters of either case are equal.

    Args:
        store: an open store.
        name: a text column.
        text: the text; not empty.
        ids: the rows to search, in the order of arrival.

    Yields:
        Places in `ids` that have the text, ascending, and the place down to which was searched.
    """
    needle = text.encode()
    end, rows = len(ids), 1024
    while end:
        first = max(end - rows, 0)
        flat, starts = text_bytes(store, name, ids[first:end])
        at = occurrences(flat, needle, any_case=True)
        row = np.searchsorted(starts, at, "right") - 1
        yield first + np.unique(row[at + len(needle) <= starts[row + 1]]), first
        rows = int(np.clip(_BLOCK_BYTES * (end - first) // max(len(flat), 1), 256, _BLOCK_ROWS))
        end = first
