"""Recomputing every checksum, and comparing the files with what the catalog says must exist."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trajectory_store.errors import StoreError
from trajectory_store.ragged import Int64Array

if TYPE_CHECKING:
    from trajectory_store.catalog import Catalog
    from trajectory_store.medium import Segment

_NUMBER = re.compile(r"(?<!seg-)(?<!\d)\d+")
"""Numbers other than segment numbers: in a damaged segment that is being written, they differ at the second check."""


@dataclass
class VerifyReport:
    """The findings of `verify`.

    Attributes:
        path: the store.
        trajectories: trajectories that a reader sees.
        rows: rows checked, including those that wait for eviction and those of updates.
        bytes: bytes whose checksum was recomputed.
        segments: segments checked.
        problems: each in words; empty if there are none.
        losses: what a power loss took although nothing promised to keep it, in words: recorded in the catalog, and no
            problem any more.
        damaged_ids: `[N]` int64, the rows that are damaged or lost.
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
        """Whether there are no problems."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        rows = f"{self.trajectories} trajectories ({self.rows} rows)"
        size = f"{rows} in {self.segments} segments, {self.bytes / 1e6:.1f} MB"
        lost = "".join(f"\n  - lost by a power loss: {words}" for words in self.losses)
        if self.ok:
            return f"{self.path}: {size} checked, all {'other ' if lost else ''}checksums hold.{lost}"
        lines = "\n".join(f"  - {p}" for p in self.problems)
        return (
            f"{self.path}: {size} checked, {len(self.problems)} problems, "
            f"{len(self.damaged_ids)} trajectories damaged:\n{lines}{lost}\n"
            "Damaged rows cannot be repaired; restore the segment from a copy, or leave these ids out."
        )

    def problem(self, words: str) -> None:
        """Note a problem."""
        if words not in self.problems:
            self.problems.append(words)

    def loss(self, words: str) -> None:
        """Note what the catalog has recorded as lost."""
        if words not in self.losses:
            self.losses.append(words)

    def damaged(self, ids: Int64Array) -> None:
        """Note rows that are damaged or lost."""
        self.damaged_ids = np.union1d(self.damaged_ids, ids)


def verify(
    look_in: Callable[[], AbstractContextManager[Catalog]], path: Path | str, ids: Int64Array | None = None
) -> VerifyReport:
    """Check a store that other processes may write to meanwhile: only damage that two checks agree on is reported.

    With `ids`, only the segments that hold these rows are checked, and those of updates.
    """
    with look_in() as catalog:
        report = _check_once(catalog, path, ids)
    if report.ok:
        return report
    with look_in() as catalog:
        again = _check_once(catalog, path, ids)
    known = {_NUMBER.sub("#", problem) for problem in report.problems}
    again.problems = [problem for problem in again.problems if _NUMBER.sub("#", problem) in known]
    if not again.problems and not again.losses:
        again.damaged_ids = np.empty(0, np.int64)
    return again


def check_segments(catalog: Catalog, segments: Iterable[Segment], report: VerifyReport) -> None:
    """Recompute every checksum of some segments."""
    for segment in segments:
        report.segments += 1
        try:
            catalog.medium.check(segment, report)
        except (StoreError, OSError, ValueError, IndexError, OverflowError) as error:
            report.problem(f"{segment.name}: cannot be checked: {error}")
            if segment.meta.kind == "rows" and not segment.meta.merged:
                report.damaged(segment.row_ids(0, segment.rows))


def _may_hold(segment: Segment, ids: Int64Array) -> bool:
    try:
        return bool(np.isin(segment.row_ids(0, segment.rows), ids).any())
    except (StoreError, OSError):  # its ids cannot be read
        return True


def _check_once(catalog: Catalog, path: Path | str, ids: Int64Array | None) -> VerifyReport:
    report = VerifyReport(path, problems=list(catalog.problems))
    rows = [segment for segment in catalog.row_segments() if ids is None or _may_hold(segment, ids)]
    check_segments(catalog, (*rows, *catalog.updates.values()), report)
    if ids is not None:
        return report
    medium = catalog.medium
    for problem in (*catalog.journal.missing(), *medium.check_root()):
        report.problem(problem)
    for entry in medium.forgotten(catalog.state):
        report.problem(f"{entry.name} holds commits, and no record of the catalog names it: records are missing")
    catalog.journal.follow()
    newest = max(report.catalog_numbers, default=0)
    last = catalog.journal.state.number
    if newest > last:
        report.problem(
            f"the catalog ends with record {last}, but commits refer to record {newest}: newer records are missing"
        )
    return report
