"""Recomputing every checksum."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trajectory_store import fs
from trajectory_store.errors import StoreError
from trajectory_store.format import COMMITS, commits_json, commits_path, spec_json
from trajectory_store.ragged import Int64Array
from trajectory_store.record import KIND_END, KIND_ROWS, RECORD_SIZE
from trajectory_store.segment import SegmentReader


@dataclass
class VerifyReport:
    """What `verify` found.

    Attributes:
        path: the store.
        trajectories: trajectories that a reader sees.
        rows: rows checked: with those that wait for eviction, and those that carry later values.
        bytes: bytes whose checksum was recomputed.
        segments: segments checked.
        problems: each in words; empty where all is well.
        damaged_ids: `[N]` int64, the rows that cannot be trusted.
    """

    path: Path
    trajectories: int = 0
    rows: int = 0
    bytes: int = 0
    segments: int = 0
    problems: list[str] = field(default_factory=list[str])
    damaged_ids: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        rows = f"{self.trajectories} trajectories ({self.rows} rows)"
        size = f"{rows} in {self.segments} segments, {self.bytes / 1e6:.1f} MB"
        if self.ok:
            return f"{self.path}: {size} checked, all checksums hold."
        lines = "\n".join(f"  - {p}" for p in self.problems)
        return (
            f"{self.path}: {size} checked, {len(self.problems)} problems, "
            f"{len(self.damaged_ids)} trajectories damaged:\n{lines}\n"
            "Damaged rows cannot be repaired; restore the segment from a copy, or leave these ids out."
        )


def verify_segments(path: Path, segments: Iterable[SegmentReader], broken: list[str]) -> VerifyReport:
    """Check segments: metadata, records, offsets, data.

    Args:
        path: the store, for the report.
        segments: what could be opened.
        broken: problems met before.
    """
    report = VerifyReport(path, problems=list(broken))
    damaged: list[Int64Array] = []
    for segment in segments:
        report.segments += 1
        try:
            damaged.extend(_verify_segment(segment, report))
        except (StoreError, OSError, ValueError, IndexError) as error:
            report.problems.append(f"{segment.folder.name}: cannot be checked: {error}")
            damaged.append(segment.row_ids(0, segment.rows))
    if damaged:
        report.damaged_ids = np.unique(np.concatenate(damaged))
    return report


def _verify_segment(segment: SegmentReader, report: VerifyReport) -> list[Int64Array]:
    name = segment.folder.name
    for part, expected in _expected_metadata(segment):
        try:
            same = part.read_bytes() == expected
        except OSError:
            same = False
        if not same:
            report.problems.append(f"{name}: {part.relative_to(segment.folder)} is damaged or missing")
    damaged: list[Int64Array] = []
    covered = 0
    edges = dict.fromkeys(segment.schema.axes, 0)
    end = _last_written(segment)
    for seq in range(end):
        record = segment.log.get(seq)
        if record is None:
            if seq == end - 1 and segment.is_live():
                break
            report.problems.append(f"{name}: commit record {seq} is damaged")
            continue
        if record.meta_crc != segment.meta_crc:
            report.problems.append(f"{name}: zarr.json is not the one that record {seq} was written with")
        first = record.rows_end - record.n_rows
        if covered < first <= segment.meta.rows_cap:
            damaged.append(segment.row_ids(covered, first))
            report.problems.append(f"{name}: rows {covered} to {first - 1} have no valid record")
            edges = {axis: int(segment.offsets(axis)[first]) for axis in edges}
            covered = first
        if record.kind == KIND_END:
            if seq != end - 1:
                report.problems.append(f"{name}: records follow the end record {seq}")
            continue
        if record.kind != KIND_ROWS or first < covered or record.rows_end > segment.meta.rows_cap:
            report.problems.append(f"{name}: commit record {seq} contradicts the one before it")
            continue
        covered = record.rows_end
        crc = segment.data_crc(first, record.rows_end, edges)
        report.rows += record.n_rows
        if crc != record.data_crc or sum(edges.values()) != record.elems_end:
            damaged.append(segment.row_ids(first, record.rows_end))
            report.problems.append(
                f"{name}: the data of commit {seq} (rows {first} to {record.rows_end - 1}) is damaged"
            )
            edges = {axis: int(segment.offsets(axis)[record.rows_end]) for axis in edges}
    report.bytes += _used_bytes(segment)
    return damaged


def _expected_metadata(segment: SegmentReader) -> list[tuple[Path, bytes]]:
    folder = segment.folder
    out = [(folder / spec.name / "zarr.json", spec_json(spec)) for spec in segment.meta.arrays()]
    out.append((folder / COMMITS / "zarr.json", commits_json(segment.meta.rows_cap)))
    return out


def _last_written(segment: SegmentReader) -> int:
    """One past the last record slot that holds anything, valid or not."""
    table = segment.log.everything()
    used = np.flatnonzero(table.reshape(-1, RECORD_SIZE).any(axis=1))
    return int(used[-1]) + 1 if len(used) else 0


def _used_bytes(segment: SegmentReader) -> int:
    elements = segment.elements()
    total = segment.records * RECORD_SIZE
    for column in segment.schema:
        count = segment.rows if column.axis is None else elements[column.axis]
        total += count * column.np_dtype.itemsize
    return total + 8 * segment.rows * len(elements)


def leftovers(root: Path, prefix: str, older_than_s: float = 60.0) -> list[Path]:
    """Folders of segments whose maker died before they were named."""
    now = time.time()
    found: list[Path] = []
    for path in root.iterdir():
        if not path.name.startswith(prefix) or fs.is_locked(commits_path(path)):
            continue
        try:
            if now - path.stat().st_mtime > older_than_s:
                found.append(path)
        except FileNotFoundError:
            continue
    return found
