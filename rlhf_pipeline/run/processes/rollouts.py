"""The stored rollouts: the set of consumed prompts, and the order in which the learner takes them."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from rlhf_pipeline.buffer.stored_groups import NewIds
from rlhf_pipeline.errors import DataError
from trajectory_store import Column, Schema, StoreNotFoundError, TrajectoryStore

ROLLOUTS_SCHEMA: Final = Schema(
    [
        Column("rollout", "int64"),
        Column("policy_version", "int64"),
        Column("num_trajectories", "int64"),
        Column("num_failed", "int64"),
        Column("task_reward", "float64", fill=math.nan),
        Column("num_tokens", "int64"),
        Column("seconds", "float64"),
        Column("created_at", "float64"),
        Column("figures", "str", fill=""),
    ]
)
"""One row per rollout whose trajectories are in the main store."""

_NUMBERS: Final = frozenset(column.name for column in ROLLOUTS_SCHEMA if not column.is_text)
_ROLLOUTS_PER_SEGMENT = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRollout:
    """The record of a rollout whose trajectories are in the store."""

    rollout: int
    policy_version: int
    num_trajectories: int
    num_failed: int
    task_reward: float | None
    """None if a collector was killed between storing the rows and their record, so that dropped rows are unknown."""
    num_tokens: int
    """0 if a killed collector stored the rollout, and another collector only added its record."""
    seconds: float
    created_at: float
    figures: Mapping[str, float | int | None] = field(default_factory=dict[str, "float | int | None"])
    """The output of `rollout_figures`; empty if part of the rollout is no longer known."""
    traffic: Mapping[str, int] | None = None
    """The collector's requests to an object store since its previous rollout; None if the run is a folder."""


class RolloutSet:
    """Rollouts by number, nearly without gaps: all below a number, and some above it.

    >>> done = RolloutSet()
    >>> for rollout in (0, 2, 1, 5):
    ...     done.add(rollout)
    >>> len(done), 5 in done, 4 in done, done.lowest_missing, done.to_json()
    (4, True, False, 3, [3, [5]])
    """

    def __init__(self, below: int = 0, above: Iterable[int] = ()) -> None:
        self.lowest_missing = below
        self._above = set(above)

    def __len__(self) -> int:
        return self.lowest_missing + len(self._above)

    def __contains__(self, rollout: int) -> bool:
        return rollout < self.lowest_missing or rollout in self._above

    def add(self, rollout: int) -> None:
        """Add a rollout, unless it is there already."""
        if rollout >= self.lowest_missing:
            self._above.add(rollout)
        while self.lowest_missing in self._above:
            self._above.remove(self.lowest_missing)
            self.lowest_missing += 1

    def to_json(self) -> list[Any]:
        """Return the set as JSON values."""
        return [self.lowest_missing, sorted(self._above)]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> RolloutSet:
        """Rebuild a set from `to_json`."""
        return cls(data[0], data[1])


class Rollouts(ABC):
    """The rollouts that are stored, each once."""

    @abstractmethod
    def add(self, done: StoredRollout) -> None:
        """Record a rollout whose trajectories are in the store; durable on return."""

    @abstractmethod
    def new(self, returned: RolloutSet) -> list[int]:
        """Return rollouts that are not known and were not returned before, in the order of learning."""

    @abstractmethod
    def get(self, rollout: int) -> StoredRollout | None:
        """Return the record of a rollout, or None if it is not stored."""

    def required(self, rollout: int) -> StoredRollout:
        """Return the record of a rollout that must be stored."""
        stored = self.get(rollout)
        if stored is None:
            raise DataError(f"the record of rollout {rollout} is missing. Restore the run from a copy.")
        return stored

    def close(self) -> None:  # noqa: B027 - not all keep files open
        """Close open files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class FolderRollouts(Rollouts):
    """The rollouts of a run in a folder: rows of a separate store, in the order of arrival."""

    def __init__(self, folder: Path, *, adds: bool = False) -> None:
        self._store = TrajectoryStore.open(folder, "a" if adds else "r")
        self._new = NewIds(self._store)
        self._row_ids: dict[int, int] = {}
        """Row ids of rollouts that were returned but are not yet known."""

    def add(self, done: StoredRollout) -> None:
        """Append a row."""
        values = {column.name: getattr(done, column.name) for column in self._store.schema}
        if "figures" in values:  # a run that an earlier version began has no such column
            values["figures"] = json.dumps(dict(done.figures))
        self._store.append({name: [value] for name, value in values.items() if value is not None})

    def new(self, returned: RolloutSet) -> list[int]:
        """Read the new rows; each is read once."""
        self._store.refresh()
        self._row_ids = {rollout: row_id for rollout, row_id in self._row_ids.items() if rollout not in returned}
        row_ids = self._new.take()
        self._store.intact(row_ids)
        new_rollouts: list[int] = []
        for row_id, rollout in zip(
            row_ids.tolist(), self._store.read_scalars("rollout", row_ids).tolist(), strict=True
        ):
            if rollout not in returned and rollout not in self._row_ids:
                self._row_ids[rollout] = row_id
                new_rollouts.append(rollout)
        return new_rollouts

    def get(self, rollout: int) -> StoredRollout | None:
        """Read a row."""
        row_id = self._row_ids.get(rollout)
        if row_id is None:  # recorded long ago
            ids = self._store.ids()  # of one moment: a read that follows a merge also finds newer rows
            ids = ids[self._store.read_scalars("rollout", ids) == rollout]
            if not len(ids):
                return None
            row_id = int(ids[0])
        row = self._store.read(np.asarray([row_id], np.int64))
        figures: dict[str, Any] = {"figures": json.loads(row["figures"][0] or "{}")} if "figures" in row else {}
        numbers = {name: values[0].item() for name, values in row.items() if name in _NUMBERS}
        stored = StoredRollout(**numbers, **figures)
        return replace(stored, task_reward=None) if math.isnan(row["task_reward"][0]) else stored

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def make_rollouts(folder: Path, *, durability: Any) -> None:
    """Make the store of rollouts in a folder, unless it exists."""
    try:
        TrajectoryStore.open(folder).close()
    except StoreNotFoundError:
        TrajectoryStore.create(
            folder, ROLLOUTS_SCHEMA, durability=durability, segment_rows=_ROLLOUTS_PER_SEGMENT
        ).close()
