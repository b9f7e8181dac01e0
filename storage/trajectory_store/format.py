"""The layout of a segment: which arrays it has, as Zarr v3 metadata and as files.

A segment is a Zarr v3 group. Each array is uncompressed and has one chunk of fixed capacity, so the chunk
file holds the raw little-endian values and nothing else; `storage/FORMAT.md` is the normative text.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from trajectory_store import fs
from trajectory_store.errors import CorruptionError, FormatVersionError, NotAStoreError, StoreError
from trajectory_store.record import RECORD_SIZE, crc32c
from trajectory_store.schema import Column, Fill, Schema

FORMAT_NAME = "ragged-trajectories"
FORMAT_VERSION = 1
COMMITS = "commits"
PRESENT = "present"
ROW_ID = "row_id"
ROW_TIME = "row_time"
TARGET = "target"
TEMPORARY = ".new-"
TAKEN = {errno.ENOTEMPTY, errno.EEXIST}
FIRST_ROWS = 1 << 12
FIRST_ELEMENTS = 1 << 20
GROWTH = 4
"""Each segment of a process is `2 ** GROWTH` times the one before, up to a largest."""

MAX_ROWS = 1 << 19
MAX_ELEMENTS = 1 << 26
"""The largest segments on a local disk. A batch takes longer with every segment that its rows lie in; a reader of plain
Zarr reads the array of a segment as a whole."""

WHOLE_ROWS = 1 << 16
WHOLE_ELEMENTS = 1 << 24
"""The same where a segment is reserved on the disk, or held in memory, as a whole."""

Kind = Literal["rows", "patch", "compacted"]


class ArraySpec(NamedTuple):
    """One array of a segment."""

    name: str
    dtype: np.dtype[Any]
    capacity: int
    dimension: str
    fill: Fill


def offsets_name(axis: str) -> str:
    """The name of the offsets array of an axis."""
    return f"{axis}.offsets"


@dataclass(frozen=True)
class SegmentMeta:
    """What the `zarr.json` of a segment says about it.

    Attributes:
        schema: the columns of this segment.
        rows_cap: rows that fit.
        elems_cap: per axis the elements that fit.
        kind: `rows`, `patch` (later values of rows elsewhere) or `compacted` (rows moved from elsewhere).
        salt: random, in every record, so old bytes are never taken for records.
        replaces: ordinals of the segments whose rows moved here.
        folded: per patch segment the number of its rows that a compacted segment has taken in.
        sealed: of a compacted segment in an object store, where its arrays are and their checksums.
    """

    schema: Schema
    rows_cap: int
    elems_cap: Mapping[str, int]
    kind: Kind = "rows"
    durability: str = "process"
    preallocated: bool = False
    replaces: tuple[int, ...] = ()
    folded: Mapping[int, int] = field(default_factory=dict[int, int])
    sealed: Mapping[str, Any] | None = None
    salt: int = field(default_factory=lambda: fs.random_salt())
    writer: str = field(default_factory=lambda: f"{os.getpid()}@{os.uname().nodename}")
    boot_id: str = field(default_factory=fs.boot_id)
    created_ns: int = field(default_factory=time.time_ns)

    def internal_rows(self) -> tuple[str, ...]:
        """The names of the per-row int64 arrays that this kind of segment has."""
        return {"rows": (), "patch": (TARGET,), "compacted": (ROW_ID, ROW_TIME)}[self.kind]

    def arrays(self) -> list[ArraySpec]:
        """Every array but the commits: columns, offsets per axis, presence, internal rows."""
        out: list[ArraySpec] = []
        for column in self.schema:
            size, dimension = self.rows_cap, "rows"
            if column.axis is not None:
                size, dimension = self.elems_cap[column.axis], column.axis
            fill = 0 if column.is_text else column.fill_value
            out.append(ArraySpec(column.name, column.np_dtype, size, dimension, fill))
        int64 = np.dtype("<i8")
        edges = self.rows_cap + 1
        out.extend(ArraySpec(offsets_name(axis), int64, edges, "row_edges", 0) for axis in self.schema.axes)
        if self.schema.optional:
            out.append(ArraySpec(PRESENT, np.dtype("<u8"), self.rows_cap, "rows", 0))
        out.extend(ArraySpec(n, int64, self.rows_cap, "rows", 0) for n in self.internal_rows())
        return out

    def to_json(self) -> bytes:
        """The content of the segment's zarr.json."""
        attributes = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "role": "segment",
            "kind": self.kind,
            "salt": self.salt,
            "rows_cap": self.rows_cap,
            "elems_cap": dict(self.elems_cap),
            "schema": self.schema.to_json(),
            "durability": self.durability,
            "preallocated": self.preallocated,
            "replaces": list(self.replaces),
            "folded": {str(k): v for k, v in self.folded.items()},
            "writer": self.writer,
            "boot_id": self.boot_id,
            "created_ns": self.created_ns,
        }
        if self.sealed is not None:
            attributes["sealed"] = dict(self.sealed)
        return group_json(attributes)

    @classmethod
    def from_json(cls, raw: bytes, path: Path) -> SegmentMeta:
        """Parse a segment's zarr.json."""
        attributes = read_attributes(raw, path, "segment")
        try:
            return cls(
                schema=Schema.from_json(attributes["schema"]),
                rows_cap=int(attributes["rows_cap"]),
                elems_cap={str(k): int(v) for k, v in attributes["elems_cap"].items()},
                kind=attributes["kind"],
                durability=str(attributes["durability"]),
                preallocated=bool(attributes["preallocated"]),
                replaces=tuple(int(x) for x in attributes["replaces"]),
                folded={int(k): int(v) for k, v in attributes["folded"].items()},
                sealed=attributes.get("sealed"),
                salt=int(attributes["salt"]),
                writer=str(attributes["writer"]),
                boot_id=str(attributes["boot_id"]),
                created_ns=int(attributes["created_ns"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptionError(f"{path}: the attribute {error} is missing or damaged.") from None


def group_json(attributes: Mapping[str, Any]) -> bytes:
    """The zarr.json of a group."""
    doc = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
    return json.dumps(doc, indent=1).encode()


def read_attributes(raw: bytes, path: Path, role: str) -> dict[str, Any]:
    """Return the attributes of a store's or a segment's zarr.json after checking what wrote them."""
    try:
        doc: Any = json.loads(raw)
        attributes: Any = doc["attributes"]
        name: Any = attributes["format"]
        version: Any = attributes["version"]
        found: Any = attributes["role"]
    except (ValueError, KeyError, TypeError):
        name = version = found = None
        attributes = {}
    if name != FORMAT_NAME or found != role:
        raise NotAStoreError(
            f"{path} is not the metadata of a trajectory {role}. Give the folder that TrajectoryStore.create made."
        )
    if version != FORMAT_VERSION:
        way_out = (
            "Install a newer release of rlhf-pipeline"
            if isinstance(version, int) and version > FORMAT_VERSION
            else "Convert it with the release that wrote it"
        )
        raise FormatVersionError(
            f"{path} is format version {version!r}; this release reads version {FORMAT_VERSION}. {way_out}."
        )
    return cast("dict[str, Any]", attributes)


def array_json(
    shape: list[int],
    dtype: np.dtype[Any],
    dimensions: list[str],
    fill: Fill = 0,
    *,
    zstd: int | None = None,
) -> bytes:
    """The zarr.json of an array with one chunk, uncompressed or with a zstd level."""
    value: Any = fill
    if dtype.kind == "b":
        value = bool(fill)
    elif dtype.kind == "f":
        number = float(fill)
        value = number if np.isfinite(number) else {np.inf: "Infinity", -np.inf: "-Infinity"}.get(number, "NaN")
    codec: dict[str, Any] = {"name": "bytes"}
    if dtype.itemsize > 1:
        codec["configuration"] = {"endian": "little"}
    codecs = [codec]
    if zstd is not None:
        codecs.append({"name": "zstd", "configuration": {"level": zstd, "checksum": False}})
    doc = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(1, n) for n in shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": value,
        "codecs": codecs,
        "attributes": {},
        "dimension_names": dimensions,
    }
    return json.dumps(doc, indent=1).encode()


def spec_json(spec: ArraySpec) -> bytes:
    """The zarr.json of one array of a segment."""
    return array_json([spec.capacity], spec.dtype, [spec.dimension], spec.fill)


def commits_json(rows_cap: int) -> bytes:
    """The zarr.json of the commits array."""
    return array_json([commits_cap(rows_cap), RECORD_SIZE], np.dtype("uint8"), ["commits", "bytes"])


def commits_cap(rows_cap: int) -> int:
    """Records that fit: one per row, and the end."""
    return rows_cap + 1


def chunk_path(folder: Path, name: str) -> Path:
    """The file with the values of a 1-D array."""
    return folder / name / "c" / "0"


def commits_path(folder: Path) -> Path:
    """The file with the commit records."""
    return folder / COMMITS / "c" / "0" / "0"


def write_segment(folder: Path, meta: SegmentMeta) -> tuple[int, int]:
    """Build the files of an empty segment in a folder that does not exist yet.

    Returns:
        The open, locked file of its commits, and the CRC32C of its zarr.json.
    """
    try:
        fs.mkdir(folder)
        fs.mkdir(folder / COMMITS)
        fs.mkdir(folder / COMMITS / "c")
        fs.mkdir(folder / COMMITS / "c" / "0")
        size = commits_cap(meta.rows_cap) * RECORD_SIZE
        fs.create_sized(commits_path(folder), size, preallocate=False)
        fd = fs.open_fd(commits_path(folder), os.O_RDWR)
        try:
            if not fs.try_lock(fd):
                raise StoreError(f"{folder} was locked by another process while it was made.")
            fs.write_file(folder / COMMITS / "zarr.json", commits_json(meta.rows_cap))
            for spec in meta.arrays():
                fs.mkdir(folder / spec.name)
                fs.mkdir(folder / spec.name / "c")
                fs.write_file(folder / spec.name / "zarr.json", spec_json(spec))
                nbytes = spec.capacity * spec.dtype.itemsize
                fs.create_sized(chunk_path(folder, spec.name), nbytes, meta.preallocated)
            raw = meta.to_json()
            fs.write_file(folder / "zarr.json", raw)
            if meta.durability != "process":
                fs.sync_tree(folder)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        fs.remove_tree(folder)
        if isinstance(error, StoreError):
            raise
        raise fs.failed(error, folder, "creating a segment") from error
    return fd, crc32c(raw)


def late_spec(column: Column, meta: SegmentMeta) -> ArraySpec:
    """The array of a mutable column that is younger than its segment."""
    return ArraySpec(column.name, column.np_dtype, meta.rows_cap, "rows", column.fill_value)


def write_late(folder: Path, spec: ArraySpec) -> None:
    """Add an array to an existing segment in one step; one that is there already is fine."""
    temporary = folder.parent / f"{TEMPORARY}{os.getpid()}-{fs.token(6)}"
    try:
        fs.mkdir(temporary)
        fs.mkdir(temporary / "c")
        fs.write_file(temporary / "zarr.json", spec_json(spec))
        values = np.full(spec.capacity, spec.fill, spec.dtype)
        fs.write_file(temporary / "c" / "0", values.tobytes())
        fs.sync_tree(temporary)
        try:
            fs.rename(temporary, folder / spec.name)
        except OSError as error:
            if error.errno not in TAKEN:
                raise
            fs.remove_tree(temporary)
    except OSError as error:
        fs.remove_tree(temporary)
        raise fs.failed(error, folder, "adding a column to a segment") from error
