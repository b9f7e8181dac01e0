"""The zarr backend: the same store in any object store that zarr can reach."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store import fs
from trajectory_store._remote import SEALED_LEVEL, Remote, zarr_module
from trajectory_store._zarr_catalog import REMOVED, RemoteCatalog
from trajectory_store._zarr_read import Cache, RemoteSegment
from trajectory_store._zarr_write import RemoteStream, batch_arrays, claim_segment
from trajectory_store.catalog import Catalog
from trajectory_store.errors import StoreError, StoreExistsError, StoreNotFoundError
from trajectory_store.format import (
    FORMAT_NAME,
    FORMAT_VERSION,
    WHOLE_ELEMENTS,
    WHOLE_ROWS,
    Kind,
    SegmentMeta,
    group_json,
    read_attributes,
)
from trajectory_store.ragged import Int64Array
from trajectory_store.record import crc32c
from trajectory_store.root import RootMeta
from trajectory_store.schema import Schema
from trajectory_store.segment import SegmentReader
from trajectory_store.upkeep import (
    CompactReport,
    folded_by,
    folded_patches,
    mergeable,
    patched_ids,
    read_batch,
    times_of,
    useless_patches,
    victims_of,
)
from trajectory_store.verify import VerifyReport
from trajectory_store.writer import segment_name

CHUNK = 1 << 15
SHARD = 1 << 22
CACHE_BYTES = 1 << 34


def create_remote(remote: Remote, meta: RootMeta) -> None:
    """Make a new store in an object store.

    Raises:
        StoreExistsError: there is one already.
    """
    key = "zarr.json"
    if remote.get(key) is not None or not remote.claim(key, meta.to_json()):
        raise StoreExistsError(
            f"{remote.where} holds a Zarr hierarchy already. Open it with TrajectoryStore.open(..., "
            "mode='a'), or choose another place."
        )
    remote.put_many({f"{REMOVED}/zarr.json": group_json({})})


def read_remote_root(remote: Remote) -> RootMeta:
    """Read what a store in an object store says about itself."""
    raw = remote.get("zarr.json")
    if raw is None:
        raise StoreNotFoundError(
            f"there is no trajectory store in {remote.where}. Check the address, or make one with "
            "TrajectoryStore.create(..., backend='zarr')."
        )
    path = Path(remote.where, "zarr.json")
    return RootMeta.from_attributes(read_attributes(raw, path, "store"), path)


class ZarrEngine:
    """A store in an object store, with a cache of columns on the local disk.

    Args:
        remote: the object store.
        root: what its zarr.json says.
        cache_dir: where the cache goes; None for a temporary folder. It is removed at the end.
        cache_bytes: how much of it is kept.
    """

    def __init__(
        self,
        remote: Remote,
        root: RootMeta,
        *,
        cache_dir: Path | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._remote = remote
        self._root = root
        if cache_dir is not None:
            cache_dir.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="trajectory-store-", dir=cache_dir))
        self._cache = Cache(self._folder, cache_bytes)
        self._catalog = RemoteCatalog(remote, self._cache)

    @property
    def catalog(self) -> Catalog:
        """What this process sees."""
        return self._catalog

    def stream(self, schema: Schema, kind: Kind) -> RemoteStream:
        """Return a new stream of segments for this process."""
        own = kind == "rows"
        return RemoteStream(
            self._remote,
            self._catalog,
            schema,
            kind,
            compress=self._root.compress,
            segment_rows=self._root.segment_rows if own else None,
            segment_elements=self._root.segment_elements if own else None,
        )

    def evict(self) -> int:
        """Remove segments beyond the limits of the store."""
        if self._root.max_trajectories is None and self._root.max_bytes is None:
            return 0
        self._catalog.refresh()
        victims = victims_of(self._catalog, self._root)
        for segment in victims:
            self._remove(segment, segment.rows)
        if victims:
            self._catalog.refresh()
            for patch in useless_patches(self._catalog):
                self._remove(patch, 0)
            self._catalog.refresh()
        return len(victims)

    def _remove(self, segment: SegmentReader, rows_lost: int) -> None:
        """Announce that a segment goes, then delete its commits; its claim stays, so its ordinal is never free."""
        while True:
            self._catalog.refresh()
            notice = {
                "format": FORMAT_NAME,
                "version": FORMAT_VERSION,
                "role": "removal",
                "ordinal": segment.ordinal,
                "rows": rows_lost,
                "total": self._catalog.evicted_rows + rows_lost,
                "time_ns": time.time_ns(),
            }
            if segment.ordinal in self._catalog.gone:
                return
            key = f"{REMOVED}/{self._catalog.removals:08d}/zarr.json"
            if self._remote.claim(key, group_json(notice)):
                break
        name = segment_name(segment.ordinal)
        self._remote.delete_folders([f"{name}/{c}" for c in self._remote.children(name) if c != "zarr.json"])
        if segment.meta.sealed is not None:
            self._remote.delete_folders([str(segment.meta.sealed["data"])])

    def compact(self, schema: Schema) -> CompactReport:
        """Merge finished segments into sharded, zstd-compressed groups that plain zarr reads."""
        catalog = self._catalog
        catalog.refresh()
        before = len(catalog.segments) + len(catalog.patches)
        still = [s for s in catalog.row_segments() if not s.is_live()]
        patches = [p for p in catalog.patches.values() if not p.is_live()]
        bytes_before = sum(s.disk_bytes() for s in (*catalog.segments.values(), *catalog.patches.values()))
        catalog.refresh()
        patched = patched_ids(catalog.patches.values())
        moved = 0
        groups = mergeable(still, patched, schema, most_rows=WHOLE_ROWS, most_elements=WHOLE_ELEMENTS)
        merged = {s.ordinal for group in groups for s in group}
        groups += [[s] for s in still if s.rows and s.ordinal not in merged and s.meta.kind == "rows"]
        for group in groups:
            moved += sum(s.rows for s in group)
            self._merge(schema, group)
            for segment in group:
                self._remove(segment, 0)
            catalog.refresh()
        for patch in folded_patches(catalog, patches, {s.ordinal for s in still}):
            self._remove(patch, 0)
        catalog.refresh()
        bytes_after = sum(s.disk_bytes() for s in (*catalog.segments.values(), *catalog.patches.values()))
        after = len(catalog.segments) + len(catalog.patches)
        return CompactReport(before, after, moved, bytes_before, bytes_after)

    def _merge(self, schema: Schema, group: list[SegmentReader]) -> None:
        folded = folded_by(self._catalog, group)
        ids: Int64Array = np.sort(np.concatenate([s.row_ids(0, s.rows) for s in group]))
        batch = read_batch(self._catalog, schema, ids, times_of(group, ids))
        arrays = batch_arrays(batch, schema)
        data = f"data-{fs.token(8)}"
        for name, values in arrays.items():
            column = schema.find(name)
            fill = 0 if column is None or column.is_text else column.fill_value
            self._write_array(f"{data}/{name}", values, fill)
        self._consolidate(data)
        ends = {axis: int(lengths.sum()) for axis, lengths in batch.lengths.items()}
        meta = SegmentMeta(
            schema=schema,
            rows_cap=max(1, len(ids)),
            elems_cap={axis: max(1, n) for axis, n in ends.items()},
            kind="compacted",
            durability="power",
            replaces=tuple(sorted({o for s in group for o in (s.ordinal, *s.meta.replaces)})),
            folded=folded,
            sealed={
                "data": data,
                "rows": len(ids),
                "ends": ends,
                "crc": {name: crc32c(values.view(np.uint8)) for name, values in arrays.items()},
            },
        )
        claim_segment(self._remote, meta, self._catalog.next_ordinal)
        self._catalog.refresh()

    def _write_array(self, path: str, values: npt.NDArray[Any], fill: Any) -> None:
        chunk = min(max(1, len(values)), CHUNK)
        shard = -(-min(max(1, len(values)), SHARD) // chunk) * chunk
        array = zarr_module().create_array(
            self._remote.store,
            name=path,
            shape=(len(values),),
            dtype=values.dtype,
            chunks=(chunk,),
            shards=(shard,),
            compressors=[{"name": "zstd", "configuration": {"level": SEALED_LEVEL, "checksum": False}}],
            fill_value=fill,
        )
        if len(values):
            array[:] = values

    def _consolidate(self, path: str) -> None:
        import warnings

        zarr = zarr_module()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Consolidated metadata")
            zarr.open_group(self._remote.store, path=path, mode="a")
            zarr.consolidate_metadata(self._remote.store, path=path)

    def verify(self) -> VerifyReport:
        """Fetch every object and recompute its checksum."""
        folder = Path(tempfile.mkdtemp(prefix="trajectory-store-"))
        try:
            cache = Cache(folder, CACHE_BYTES)
            fresh = RemoteCatalog(self._remote, cache, warn=False)
            report = VerifyReport(Path(self._remote.where), problems=list(fresh.problems))
            damaged: list[Int64Array] = []
            for segment in (*fresh.segments.values(), *fresh.patches.values()):
                if isinstance(segment, RemoteSegment):
                    report.segments += 1
                    damaged.extend(_verify_segment(segment, report))
            if damaged:
                report.damaged_ids = np.unique(np.concatenate(damaged))
            return report
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def clean_up(self) -> None:
        """Finish removals that a killed compaction began."""
        for ordinal in list(self._catalog.moved):
            if ordinal in self._catalog.gone:
                continue
            raw = self._remote.get(f"{segment_name(ordinal)}/zarr.json")
            if raw is not None:
                self._remove(RemoteSegment(self._remote, ordinal, raw, self._cache), 0)

    def close(self) -> None:
        """Drop the maps and the cache."""
        self._catalog.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _verify_segment(segment: RemoteSegment, report: VerifyReport) -> list[Int64Array]:
    damaged: list[Int64Array] = []
    names = [spec.name for spec in segment.meta.arrays()]
    for commit in segment.history:
        if not commit.n_rows:
            continue
        report.rows += commit.n_rows
        bad = False
        for name in names:
            try:
                report.bytes += segment.values(name, commit).nbytes
            except StoreError as error:
                bad = True
                report.problems.append(f"{segment.folder.name}, commit {commit.seq}: {error}")
        if bad:
            first = commit.rows_end - commit.n_rows
            try:
                damaged.append(segment.row_ids(first, commit.rows_end))
            except StoreError:
                report.problems.append(f"{segment.folder.name}: its ids cannot be read")
    return damaged
