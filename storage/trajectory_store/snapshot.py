"""Snapshots: which rows and updates there were at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store.backend import Segment
from trajectory_store.errors import SchemaError
from trajectory_store.format import ORDINAL_SHIFT, ROW_MASK
from trajectory_store.ragged import Int64Array


@dataclass(frozen=True)
class Snapshot:
    """The number of rows or updates of each segment that were visible at one moment.

    The rows of several writers interleave, so the number of rows alone does not identify them, but a snapshot does. It
    is small (one number per segment) and can be stored in a ledger as JSON. `TrajectoryStore.ids` accepts it and
    returns the rows of that moment; `TrajectoryStore.as_of` reads their values at that moment.

    Attributes:
        rows: ordinal of a segment -> rows.
        watermark: rows committed since the store was created.
        updates: ordinal of a segment of updates -> updates.

    >>> Snapshot.from_json(Snapshot({0: 5}, 5).to_json())
    Snapshot(rows={0: 5}, watermark=5, updates={})
    """

    rows: Mapping[int, int]
    watermark: int
    updates: Mapping[int, int] = field(default_factory=dict[int, int])

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as JSON values."""
        rows, updates = ({str(k): v for k, v in part.items()} for part in (self.rows, self.updates))
        return {"rows": rows, "watermark": self.watermark, "updates": updates}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Snapshot:
        """Rebuild a snapshot from `to_json`."""
        try:
            rows, updates = ({int(k): int(v) for k, v in data[name].items()} for name in ("rows", "updates"))
            return cls(rows, int(data["watermark"]), updates)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SchemaError(f"a snapshot cannot be read: {error!r} in {dict(data)!r}") from None

    def select(self, ids: Int64Array) -> Int64Array:
        """Return the ids that existed at that moment, in their order."""
        return ids[within(self.rows, ids)]

    def later(self, ids: Int64Array) -> Int64Array:
        """Return the ids that were committed later, in their order; they may be between earlier rows.

        >>> Snapshot({0: 2}, 2).later(np.array([0, 1, 2, 1 << 32])).tolist()
        [2, 4294967296]
        """
        return ids[~within(self.rows, ids)]


def within(limits: Mapping[int, int], ids: Int64Array) -> npt.NDArray[np.bool_]:
    """Return which rows or updates are within the limit of the segment that they were written to: `[B]` bool."""
    if not limits or not len(ids):
        return np.zeros(len(ids), bool)
    owners, rows = ids >> ORDINAL_SHIFT, ids & ROW_MASK
    ordinals = np.array(sorted(limits), np.int64)
    counts = np.array([limits[ordinal] for ordinal in ordinals.tolist()], np.int64)
    at = np.minimum(np.searchsorted(ordinals, owners), len(ordinals) - 1)
    return (ordinals[at] == owners) & (rows < counts[at])


def limits_of(segments: Mapping[int, Segment]) -> dict[int, int]:
    """Return the visible rows or updates per original segment: the counts that a snapshot keeps."""
    out: dict[int, int] = {}
    for segment in list(segments.values()):
        out.update(segment.row_limits())
    return out
