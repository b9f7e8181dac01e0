"""The problems that a check of all checksums finds, and those that two checks agree on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trajectory_store.ragged import Int64Array

_NUMBER = re.compile(r"(?<!seg-)(?<!\d)\d+")
"""Numbers other than segment numbers: in a damaged segment that is being written, they differ at the second check."""


@dataclass
class VerifyReport:
    """The findings of `verify`.

    Attributes:
        path: the store.
        trajectories: trajectories that a reader sees.
        rows: rows checked, including rows that wait for eviction and rows of updates.
        bytes: bytes whose checksum was recomputed.
        segments: segments checked.
        problems: a description of each problem; empty if there are none.
        losses: descriptions of data that is not returned but is not a problem: losses that the owner accepted, and
            commits that were being written when a machine failed and were never acknowledged.
        damaged_ids: `[N]` int64, the ids of damaged or lost rows.
        catalog_numbers: the catalog records that commits refer to.
    """

    path: Path | str
    trajectories: int = 0
    rows: int = 0
    bytes: int = 0
    segments: int = 0
    problems: list[str] = field(default_factory=list[str])
    losses: list[str] = field(default_factory=list[str])
    damaged_ids: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    catalog_numbers: set[int] = field(default_factory=set[int], repr=False)

    @property
    def ok(self) -> bool:
        """Whether no problems were found."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        rows = f"{self.trajectories} trajectories ({self.rows} rows)"
        size = f"{rows} in {self.segments} segments, {self.bytes / 1e6:.1f} MB"
        lost = "".join(f"\n  - lost: {words}" for words in self.losses)
        if self.ok:
            return f"{self.path}: {size} checked, all {'other ' if lost else ''}checksums match.{lost}"
        lines = "\n".join(f"  - {p}" for p in self.problems)
        return (
            f"{self.path}: {size} checked, {len(self.problems)} problems, {len(self.damaged_ids)} trajectories "
            "damaged:\n"
            f"{lines}{lost}\n"
            "Damaged rows cannot be repaired. Restore the segment from a copy, or accept the loss of these ids: "
            "TrajectoryStore.open(path, mode='a').accept_losses()"
        )

    def problem(self, words: str) -> None:
        """Record a problem."""
        if words not in self.problems:
            self.problems.append(words)

    def loss(self, words: str) -> None:
        """Record a loss that is not a problem."""
        if words not in self.losses:
            self.losses.append(words)

    def damaged(self, ids: Int64Array) -> None:
        """Record damaged or lost rows."""
        self.damaged_ids = np.union1d(self.damaged_ids, ids)

    def confirm(self, earlier: VerifyReport) -> None:
        """Keep only damage that an earlier check also found, because other processes may write to the store."""
        earlier_problems = {_NUMBER.sub("#", problem) for problem in earlier.problems}
        self.problems = [problem for problem in self.problems if _NUMBER.sub("#", problem) in earlier_problems]
        if not self.problems and not self.losses:
            self.damaged_ids = np.empty(0, np.int64)
