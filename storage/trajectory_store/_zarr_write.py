"""Writing with the zarr backend: one immutable Zarr group per commit, in two round trips."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store._remote import Remote, chunk_doc, encode
from trajectory_store._zarr_catalog import RemoteCatalog
from trajectory_store._zarr_commit import Commit, attributes_crc, commit_key
from trajectory_store.batch import Batch
from trajectory_store.errors import BatchError
from trajectory_store.format import (
    FORMAT_NAME,
    FORMAT_VERSION,
    PRESENT,
    WHOLE_ELEMENTS,
    WHOLE_ROWS,
    Kind,
    SegmentMeta,
    group_json,
    offsets_name,
)
from trajectory_store.ragged import offsets_of
from trajectory_store.record import crc32c
from trajectory_store.schema import Schema
from trajectory_store.writer import segment_name


def batch_arrays(batch: Batch, schema: Schema) -> dict[str, npt.NDArray[Any]]:
    """Every array of a batch by name: columns, offsets from 0, presence, internal rows."""
    arrays = {column.name: batch.values[column.name] for column in schema}
    for axis in schema.axes:
        arrays[offsets_name(axis)] = offsets_of(batch.lengths[axis])
    if schema.optional:
        arrays[PRESENT] = batch.present
    return {**arrays, **batch.extra}


def claim_segment(remote: Remote, meta: SegmentMeta, ordinal: int) -> tuple[int, bytes]:
    """Take the next free ordinal for a segment; put-if-absent decides between processes.

    Returns:
        The ordinal and the zarr.json that was put.
    """
    raw = meta.to_json()
    while not remote.claim(f"{segment_name(ordinal)}/zarr.json", raw):
        ordinal += 1
    return ordinal, raw


class RemoteStream:
    """The segments that one process writes to an object store.

    A commit puts all arrays at the same time and then, when they are there, the group's own zarr.json:
    the commit exists if and only if that object does. A commit that fails ends the segment, so a commit
    number is never used for two contents.

    Args:
        remote: the object store.
        catalog: told of every own commit.
        schema: the columns.
        kind: what the segments hold.
        compress: zstd for the chunks.
        segment_rows: rows of a segment.
        segment_elements: elements per axis of a segment.
    """

    def __init__(
        self,
        remote: Remote,
        catalog: RemoteCatalog,
        schema: Schema,
        kind: Kind,
        *,
        compress: bool,
        segment_rows: int | None = None,
        segment_elements: int | None = None,
    ) -> None:
        self.ordinal = -1
        self._remote = remote
        self._catalog = catalog
        self._schema = schema
        self._kind: Kind = kind
        self._compress = compress
        self._rows_cap = segment_rows or WHOLE_ROWS
        self._elements_cap = segment_elements or WHOLE_ELEMENTS
        self._meta: SegmentMeta | None = None
        self._last: Commit | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def append(self, batch: Batch, time_ns: int | None = None) -> tuple[int, int]:
        """Commit rows; returns the ordinal of their segment and the first row in it."""
        if batch.n_rows == 0:
            raise BatchError("a commit needs at least one row.")
        with self._lock:
            if self._pid != os.getpid():
                self._meta, self._pid = None, os.getpid()
            if self._meta is None or not self._fits(batch, self._meta):
                self._end()
                self._begin(batch)
            try:
                commit = self._commit(batch, time.time_ns() if time_ns is None else time_ns)
            except BaseException:
                self._meta = None
                raise
            self._catalog.own_commit(self.ordinal, commit)
            return self.ordinal, commit.rows_end - commit.n_rows

    def _fits(self, batch: Batch, meta: SegmentMeta) -> bool:
        last = self._last
        if (last.rows_end if last else 0) + batch.n_rows > meta.rows_cap:
            return False
        return all(
            (last.ends[axis] if last else 0) + int(batch.lengths[axis].sum()) <= cap
            for axis, cap in meta.elems_cap.items()
        )

    def _begin(self, batch: Batch) -> None:
        need = {axis: max(1, int(batch.lengths[axis].sum())) for axis in self._schema.axes}
        meta = SegmentMeta(
            schema=self._schema,
            rows_cap=max(self._rows_cap, batch.n_rows),
            elems_cap={axis: max(self._elements_cap, n) for axis, n in need.items()},
            kind=self._kind,
            durability="power",
        )
        self._catalog.refresh()
        self.ordinal, raw = claim_segment(self._remote, meta, self._catalog.next_ordinal)
        self._meta, self._last = meta, None
        self._catalog.own_segment(self.ordinal, raw)

    def _commit(self, batch: Batch, time_ns: int) -> Commit:
        last = self._last
        seq = last.seq + 1 if last else 0
        arrays = batch_arrays(batch, self._schema)
        commit = Commit(
            seq=seq,
            time_ns=max(time_ns, last.time_ns + 1 if last else 0),
            rows_end=(last.rows_end if last else 0) + batch.n_rows,
            n_rows=batch.n_rows,
            ends={a: (last.ends[a] if last else 0) + int(n.sum()) for a, n in batch.lengths.items()},
            crc={name: crc32c(values.view(np.uint8)) for name, values in arrays.items()},
        )
        folder = commit_key(self.ordinal, seq)
        objects: dict[str, bytes] = {}
        for name, values in arrays.items():
            column = self._schema.find(name)
            fill = 0 if column is None or column.is_text else column.fill_value
            dimension = (column.axis if column is not None else None) or "rows"
            dimension = "row_edges" if name.endswith(".offsets") else dimension
            chunk, packed = encode(values, compress=self._compress) if len(values) else (b"", False)
            doc = chunk_doc(values.dtype, len(values), dimension, fill, compress=packed)
            objects[f"{folder}/{name}/zarr.json"] = doc
            if len(values):
                objects[f"{folder}/{name}/c/0"] = chunk
        self._remote.put_many(objects)
        self._put(commit)
        return commit

    def _put(self, commit: Commit) -> None:
        attributes: dict[str, Any] = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "role": "commit",
            "seq": commit.seq,
            "time_ns": commit.time_ns,
            "rows_end": commit.rows_end,
            "n_rows": commit.n_rows,
            "ends": commit.ends,
            "crc": commit.crc,
        }
        attributes["self_crc"] = attributes_crc(attributes)
        key = f"{commit_key(self.ordinal, commit.seq)}/zarr.json"
        self._remote.put_if_absent(key, group_json(attributes))
        self._last = commit

    def _end(self) -> None:
        """Say that nothing follows in the current segment."""
        last = self._last
        if self._meta is not None and last is not None:
            end = Commit(last.seq + 1, last.time_ns + 1, last.rows_end, 0, last.ends, {})
            self._put(end)
            self._catalog.own_commit(self.ordinal, end)
        self._meta = self._last = None

    def sync(self) -> None:
        """Nothing to wait for: an acknowledged commit is in the object store."""

    def close(self) -> None:
        """Finish the current segment."""
        with self._lock:
            if self._pid == os.getpid():
                self._end()
