"""Recomputing every checksum, and comparing the files with what the catalog says must exist."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from trajectory_store import fs
from trajectory_store.backend import Segment
from trajectory_store.catalog import Catalog
from trajectory_store.errors import StoreError
from trajectory_store.ragged import Int64Array
from trajectory_store.rebuild import rebuild
from trajectory_store.verify_report import VerifyReport

_NUMBER = re.compile(r"(?<!seg-)(?<!\d)\d+")
"""Numbers other than segment numbers: in a damaged segment that is being written, they differ at the second check."""


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
            fs.pass_external(error)
            report.problem(f"{segment.name}: cannot be checked: {error}")
            if segment.meta.kind == "rows" and not segment.meta.merged:
                report.damaged(segment.row_ids(0, segment.rows))


def _may_hold(segment: Segment, ids: Int64Array) -> bool:
    try:
        return bool(np.isin(segment.row_ids(0, segment.rows), ids).any())
    except (StoreError, OSError) as error:  # its ids cannot be read
        fs.pass_external(error)
        return True


def _check_once(catalog: Catalog, path: Path | str, ids: Int64Array | None) -> VerifyReport:
    report = VerifyReport(path, problems=list(catalog.problems))
    rows = [segment for segment in catalog.row_segments() if ids is None or _may_hold(segment, ids)]
    check_segments(catalog, (*rows, *catalog.updates.values()), report)
    if ids is not None:
        return report
    medium = catalog.medium
    for problem in (*catalog.journal.missing(), *medium.check_root(catalog.root)):
        report.problem(problem)
    state = catalog.journal.state
    for entry in rebuild(state, medium.survey(state), catalog.doubtful).entries:
        if entry not in state.entries:
            report.problem(f"{entry.name} holds commits, and no record of the catalog names it: records are missing")
    catalog.journal.catch_up()
    newest = max(report.catalog_numbers, default=0)
    last = catalog.journal.state.number
    if newest > last:
        report.problem(
            f"the catalog ends with record {last}, but commits refer to record {newest}: newer records are missing"
        )
    return report
