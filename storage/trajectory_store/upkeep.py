"""Removing and merging whole segments: eviction, compaction, and finishing what a killed process began."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trajectory_store import fs
from trajectory_store.batch import Batch
from trajectory_store.catalog import Catalog
from trajectory_store.format import (
    MAX_ELEMENTS,
    MAX_ROWS,
    ROW_ID,
    ROW_TIME,
    TARGET,
    TEMPORARY,
    SegmentMeta,
    write_segment,
)
from trajectory_store.gather import Gather
from trajectory_store.local import LocalCatalog, removed_path
from trajectory_store.ragged import Int64Array, RaggedArray
from trajectory_store.root import RootMeta
from trajectory_store.schema import Schema
from trajectory_store.segment import SegmentReader
from trajectory_store.writer import (
    LEAVING,
    ORDINAL_SHIFT,
    SegmentWriter,
    claim,
    segment_name,
)

_OLD = re.compile(r"\.old-([0-9]+)-([0-9]+)\Z")
CHUNK_ROWS = 1024


@dataclass(frozen=True)
class CompactReport:
    """What `compact` did.

    Attributes:
        segments_before: segments of rows and patches before.
        segments_after: the same after.
        rows: rows that moved.
        bytes_before: disk space before.
        bytes_after: disk space after.
        skipped: why nothing was done, or empty.
    """

    segments_before: int
    segments_after: int
    rows: int
    bytes_before: int
    bytes_after: int
    skipped: str = ""


def evict(catalog: LocalCatalog, meta: RootMeta) -> int:
    """Remove the oldest segments that the limits of the store no longer cover.

    Returns:
        How many segments were removed. 0 also where another process is at it.
    """
    if meta.max_trajectories is None and meta.max_bytes is None:
        return 0
    with fs.locked(removed_path(catalog.root), wait=False) as mine:
        if not mine:
            return 0
        catalog.refresh()
        victims = victims_of(catalog, meta)
        for segment in victims:
            _remove(catalog, segment, segment.rows)
        if victims:
            catalog.refresh()
            for patch in useless_patches(catalog):
                _remove(catalog, patch, 0)
            catalog.refresh()
        return len(victims)


def victims_of(catalog: Catalog, meta: RootMeta) -> list[SegmentReader]:
    """The oldest segments that the limits no longer cover, oldest first."""
    newest = max((*catalog.segments, *catalog.patches), default=-1)
    spans = [(s.time_span(), s) for s in catalog.row_segments() if s.rows]
    spans.sort(key=lambda item: item[0][1])
    usage = {s.ordinal: s.disk_bytes() for _, s in spans} if meta.max_bytes else {}
    total = sum(usage.values())
    victims: list[SegmentReader] = []
    for (_, last), segment in spans:
        newer = sum(s.rows for (first, _), s in spans if first > last)
        dead = meta.max_trajectories is not None and newer >= meta.max_trajectories
        heavy = meta.max_bytes is not None and total > meta.max_bytes and newer > 0
        if not (dead or heavy) or segment.ordinal == newest or segment.is_live():
            break
        victims.append(segment)
        total -= usage.get(segment.ordinal, 0)
    return victims


def useless_patches(catalog: Catalog) -> list[SegmentReader]:
    """Patch segments whose trajectories are all gone."""
    newest = max((*catalog.segments, *catalog.patches), default=-1)
    known = {*catalog.segments, *catalog.moved}
    out: list[SegmentReader] = []
    for patch in catalog.patches.values():
        if patch.ordinal != newest and not patch.is_live():
            targets = np.unique(patch.array(TARGET)[: patch.rows] >> ORDINAL_SHIFT)
            if not known.intersection(targets.tolist()):
                out.append(patch)
    return out


def _remove(catalog: LocalCatalog, segment: SegmentReader, rows_lost: int) -> None:
    """Rename a segment away, note it, unlink it; a crash in between is finished by `sweep`."""
    old = catalog.root / f"{LEAVING}{segment.ordinal}-{rows_lost}"
    try:
        fs.rename(segment.folder, old)
        catalog.note_removed(segment.ordinal, rows_lost, time.time_ns())
    except OSError as error:
        raise fs.failed(error, segment.folder, "removing a segment") from error
    fs.remove_tree(old)


def sweep(catalog: LocalCatalog) -> None:
    """Finish removals that a killed process began; does nothing where another process is at it."""
    if not any(_OLD.match(p.name) for p in catalog.root.iterdir()) and not _replaced(catalog):
        return
    with fs.locked(removed_path(catalog.root), wait=False) as mine:
        if not mine:
            return
        noted = catalog.removed_ordinals()
        for path in catalog.root.iterdir():
            match = _OLD.match(path.name)
            if match is None:
                continue
            ordinal, rows = int(match.group(1)), int(match.group(2))
            if ordinal not in noted:
                catalog.note_removed(ordinal, rows, time.time_ns())
            fs.remove_tree(path)
        for folder, ordinal in _replaced(catalog):
            old = catalog.root / f"{LEAVING}{ordinal}-0"
            fs.rename(folder, old)
            catalog.note_removed(ordinal, 0, time.time_ns())
            fs.remove_tree(old)
        catalog.refresh()


def _replaced(catalog: LocalCatalog) -> list[tuple[Path, int]]:
    out = [(catalog.root / segment_name(o), o) for o in catalog.moved]
    return [(folder, o) for folder, o in out if folder.exists()]


def compact(catalog: LocalCatalog, schema: Schema) -> CompactReport:
    """Merge finished segments and fold patches in; ids and the order of arrival stay.

    Rows of segments that a living process appends to stay where they are. Readers go on with the old
    segments until they refresh. In-place updates of another process that happen during the move of
    their row may be lost.
    """
    before = len(catalog.segments) + len(catalog.patches)
    bytes_before = fs.disk_bytes(catalog.root)
    with fs.locked(removed_path(catalog.root), wait=False) as mine:
        if not mine:
            reason = "another process compacts or evicts"
            return CompactReport(before, before, 0, bytes_before, bytes_before, reason)
        catalog.refresh()
        still = [s for s in catalog.row_segments() if not s.is_live()]
        patches = [p for p in catalog.patches.values() if not p.is_live()]
        catalog.refresh()
        patched = patched_ids(catalog.patches.values())
        moved = 0
        for group in mergeable(still, patched, schema):
            moved += sum(s.rows for s in group)
            _merge(catalog, schema, group)
            for segment in group:
                _remove(catalog, segment, 0)
            catalog.refresh()
        for patch in folded_patches(catalog, patches, {s.ordinal for s in still}):
            _remove(catalog, patch, 0)
        catalog.refresh()
        after = len(catalog.segments) + len(catalog.patches)
        return CompactReport(before, after, moved, bytes_before, fs.disk_bytes(catalog.root))


def folded_patches(catalog: Catalog, patches: Iterable[SegmentReader], old: set[int]) -> list[SegmentReader]:
    """Patch segments whose values are all in compacted segments now, or whose rows are gone."""
    newest = max((*catalog.segments, *catalog.patches), default=-1)
    out: list[SegmentReader] = []
    for patch in patches:
        owners = np.unique(patch.array(TARGET)[: patch.rows] >> ORDINAL_SHIFT).tolist()
        homes = {catalog.moved.get(o, o) for o in owners}
        folded = all(h not in catalog.segments or is_new(catalog, h, old) for h in homes)
        if folded and patch.ordinal != newest:
            out.append(patch)
    return out


def is_new(catalog: Catalog, ordinal: int, old: set[int]) -> bool:
    """Whether a segment came out of the compaction that began with `old`."""
    return catalog.segments[ordinal].meta.kind == "compacted" and ordinal not in old


def patched_ids(patches: Iterable[SegmentReader]) -> Int64Array:
    """The ids that have later values."""
    parts = [np.array(p.array(TARGET)[: p.rows]) for p in patches]
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)


def mergeable(
    segments: list[SegmentReader],
    patched: Int64Array,
    schema: Schema,
    *,
    most_rows: int = MAX_ROWS,
    most_elements: int = MAX_ELEMENTS,
) -> list[list[SegmentReader]]:
    """Runs of segments that fit one full segment and gain from being merged."""
    groups: list[list[SegmentReader]] = []
    rows = 0
    elements: dict[str, int] = {}
    for segment in segments:
        used = segment.elements()
        total = {a: elements.get(a, 0) + used.get(a, 0) for a in {*elements, *used}}
        fits = rows + segment.rows <= most_rows and all(n <= most_elements for n in total.values())
        if not groups or not fits:
            groups.append([])
            rows, total = 0, dict(used)
        groups[-1].append(segment)
        rows, elements = rows + segment.rows, total
    return [g for g in groups if len(g) > 1 or _gains(g[0], patched, schema)]


def _gains(segment: SegmentReader, patched: Int64Array, schema: Schema) -> bool:
    ids = segment.row_ids(0, segment.rows)
    return bool(np.isin(ids, patched).any()) or segment.schema != schema


def _merge(catalog: LocalCatalog, schema: Schema, group: list[SegmentReader]) -> None:
    ids = np.sort(np.concatenate([s.row_ids(0, s.rows) for s in group]))
    times = times_of(group, ids)
    replaces = sorted({o for s in group for o in (s.ordinal, *s.meta.replaces)})
    used: dict[str, int] = {}
    for axis, columns in schema.axes.items():
        used[axis] = max(1, int(Gather(catalog, ids).lengths(columns[0]).sum()))
        if columns[0].is_text:
            used[axis] += len(str(columns[0].fill_value).encode()) * len(ids)
    segment_meta = SegmentMeta(
        schema=schema,
        rows_cap=max(1, len(ids)),
        elems_cap=used,
        kind="compacted",
        durability="power",
        replaces=tuple(replaces),
        folded=folded_by(catalog, group),
    )
    folder = catalog.root / f"{TEMPORARY}{fs.token(8)}"
    log_fd, meta_crc = write_segment(folder, segment_meta)
    try:
        writer = SegmentWriter(folder, segment_meta, log_fd, meta_crc)
        try:
            for first in range(0, len(ids), CHUNK_ROWS):
                part = slice(first, first + CHUNK_ROWS)
                rows = read_batch(catalog, schema, ids[part], times[part])
                writer.commit(rows, durable=False)
            writer.sync()
        finally:
            writer.finish()
        fs.sync_tree(folder)
        claim(catalog.root, folder, catalog.count_removals)
        fs.sync_path(catalog.root)
    except OSError as error:
        fs.remove_tree(folder)
        raise fs.failed(error, folder, "compacting") from error
    catalog.refresh()


def folded_by(catalog: Catalog, group: Iterable[SegmentReader]) -> dict[int, int]:
    """Per patch segment the rows that are taken in when these segments are merged now."""
    out: dict[int, int] = {}
    for segment in group:
        out.update({o: n for o, n in segment.meta.folded.items() if o in catalog.patches})
    out.update({o: p.rows for o, p in catalog.patches.items()})
    return out


def times_of(group: list[SegmentReader], ids: Int64Array) -> Int64Array:
    """The commit times of rows."""
    found: list[Int64Array] = []
    owners: list[Int64Array] = []
    for segment in group:
        owners.append(segment.row_ids(0, segment.rows))
        if segment.meta.kind == "compacted":
            found.append(np.array(segment.row_times()))
        else:
            table = segment.commits()
            counts = table["n_rows"].astype(np.int64)
            found.append(np.repeat(table["time_ns"].astype(np.int64), counts))
    known, times = np.concatenate(owners), np.concatenate(found)
    order = np.argsort(known)
    return times[order][np.searchsorted(known[order], ids)]


def read_batch(catalog: Catalog, schema: Schema, ids: Int64Array, times: Int64Array | None = None) -> Batch:
    """Read whole rows in the form in which they are written, patches folded in."""
    gather = Gather(catalog, ids)
    batch = Batch(len(ids), {}, {}, np.zeros(len(ids), "<u8"))
    for column in schema:
        if column.axis is None:
            batch.values[column.name] = gather.scalars(column)
            continue
        if column.is_text:
            parts = [t.encode() for t in gather.text(column)]
            lengths = np.array([len(p) for p in parts], np.int64)
            ragged = RaggedArray(np.frombuffer(b"".join(parts), np.uint8), lengths)
        else:
            ragged = gather.ragged(column)
        batch.values[column.name] = ragged.values
        batch.lengths[column.axis] = ragged.lengths
    for bit, column in enumerate(schema.optional):
        batch.present |= gather.present(column).astype(np.uint64) << np.uint64(bit)
    if times is not None:
        batch.extra = {ROW_ID: ids, ROW_TIME: times}
    return batch
