"""A fixed view of a store: which rows and which updates existed at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trajectory_store.errors import SchemaError
from trajectory_store.format import ORDINAL_SHIFT, ROW_MASK
from trajectory_store.ragged import Int64Array


@dataclass(frozen=True)
class Snapshot:
    """Per segment that was ever written, how many rows, or updates, were visible.

    Several writers interleave, so a number of rows alone does not say which rows; this does. It is small
    (one number per segment) and goes into a ledger as JSON. `TrajectoryStore.ids` takes it for the rows of then,
    `TrajectoryStore.as_of` for their values.

    Attributes:
        rows: ordinal of a segment -> rows.
        watermark: rows committed since the store was made.
        updates: ordinal of a segment of updates -> updates.

    >>> Snapshot.from_json(Snapshot({0: 5}, 5).to_json())
    Snapshot(rows={0: 5}, watermark=5, updates={})
    """

    rows: Mapping[int, int]
    watermark: int
    updates: Mapping[int, int] = field(default_factory=dict[int, int])

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        rows, updates = ({str(k): v for k, v in part.items()} for part in (self.rows, self.updates))
        return {"rows": rows, "watermark": self.watermark, "updates": updates}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Snapshot:
        """Rebuild it from `to_json`."""
        try:
            rows, updates = ({int(k): int(v) for k, v in data[name].items()} for name in ("rows", "updates"))
            return cls(rows, int(data["watermark"]), updates)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SchemaError(f"a snapshot cannot be read: {error!r} in {dict(data)!r}") from None

    def select(self, ids: Int64Array) -> Int64Array:
        """Keep the ids that existed, in their order."""
        return ids[self._existed(ids)]

    def later(self, ids: Int64Array) -> Int64Array:
        """Keep the ids that did not exist yet, in their order: what was committed since, also between known rows.

        >>> Snapshot({0: 2}, 2).later(np.array([0, 1, 2, 1 << 32])).tolist()
        [2, 4294967296]
        """
        return ids[~self._existed(ids)]

    def _existed(self, ids: Int64Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
        if not self.rows or not len(ids):
            return np.zeros(len(ids), bool)
        owners, rows = ids >> ORDINAL_SHIFT, ids & ROW_MASK
        ordinals = np.array(sorted(self.rows), np.int64)
        limits = np.array([self.rows[ordinal] for ordinal in ordinals.tolist()], np.int64)
        at = np.minimum(np.searchsorted(ordinals, owners), len(ordinals) - 1)
        return (ordinals[at] == owners) & (rows < limits[at])
