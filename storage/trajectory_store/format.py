"""The files of a segment: its arrays as Zarr v3 metadata, and the 64-byte commit record.

A segment is a Zarr v3 group. On a local disk each array is uncompressed and has one chunk of fixed capacity, so the
chunk file holds the raw little-endian values and nothing else; `storage/FORMAT.md` is the normative text.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import google_crc32c as _crc  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import numpy.typing as npt

from trajectory_store import fs
from trajectory_store.errors import CorruptionError, FormatVersionError, NotAStoreError, StoreError, WriteFailedError
from trajectory_store.file_access import PreadBytes
from trajectory_store.ragged import Int64Array
from trajectory_store.schema import Fill, Schema

FORMAT_NAME = "ragged-trajectories"
FORMAT_VERSION = 6
OLDEST_VERSION = 5
"""The oldest version that is read. In segments of this version, blocks are counted from the beginning of each commit.
"""
KEY = "zarr.json"
"""The file with the metadata of the store, of its catalog, and of a segment, whose writer holds the lock of this file.
"""
COMMITS = "commits"
ACKNOWLEDGED = "acknowledged"
PRESENT = "present"
ROW_ID = "row_id"
ROW_TIME = "row_time"
TARGET = "target"
TEMPORARY = ".new-"
ORDINAL_SHIFT = 32
ROW_MASK = (1 << ORDINAL_SHIFT) - 1
MAX_ORDINAL = (1 << 24) - 1
MAX_TIME_NS = 1 << 62
MAX_SALT = MAX_CRC = (1 << 32) - 1
_MOST_ELEMENTS = 1 << 48

Kind = Literal["rows", "update"]
KINDS: tuple[Kind, ...] = ("rows", "update")
Durability = Literal["process", "power", "group"]
DURABILITIES: tuple[Durability, ...] = ("process", "power", "group")

crc32c = cast("Callable[[bytes | npt.NDArray[Any]], int]", _crc.value)  # pyright: ignore[reportUnknownMemberType]
"""The CRC32C of bytes or of a contiguous array."""
"""The CRC32C of the data of a first CRC32C followed by further bytes."""


def checked_int(value: Any, most: int = MAX_TIME_NS, least: int = 0) -> int:
    """Check an integer from a JSON document, and return it."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is not an integer from {least} to {most}")
    return value


def time_after(newest_ns: int) -> int:
    """Return the time in ns: that of the clock, or later than what was seen, whatever the time of the clock."""
    now = max(time.time_ns(), newest_ns + 1)
    if now >= MAX_TIME_NS:
        raise WriteFailedError(
            errno.EOVERFLOW,
            f"the time is {now} ns, but a store supports times below {MAX_TIME_NS} ns (in the year 2116). Nothing "
            "was written; correct the clock of this machine, then append again",
        )
    return now


def per_name(numbers: Any, most: Mapping[str, int]) -> dict[str, int]:
    """Check integers by name: exactly these names, each from 0 to its limit; raise as `whole` does."""
    if set(numbers) != set(most):
        raise ValueError(f"the names {list(numbers)} do not match {list(most)}")
    return {name: checked_int(numbers[name], limit) for name, limit in most.items()}


# Metadata


class ArraySpec(NamedTuple):
    """One array of a segment: `capacity` elements of `shape` values each.

    There is one per row, or they lie along an axis; `edges` marks the offsets of an axis: where its rows begin and end.
    """

    name: str
    dtype: np.dtype[Any]
    capacity: int
    axis: str | None = None
    edges: bool = False
    fill: Fill = 0
    shape: tuple[int, ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize * math.prod(self.shape)


def offsets_name(axis: str) -> str:
    """The name of the offsets array of an axis."""
    return f"{axis}.offsets"


def segment_name(ordinal: int, *, merged: bool = False) -> str:
    """The folder of a segment; a number reserved for a merge is never used for a writer's folder.

    >>> segment_name(7), segment_name(8, merged=True)
    ('seg-00000007', 'seg-00000008-merged')
    """
    return f"seg-{ordinal:08d}-merged" if merged else f"seg-{ordinal:08d}"


def ordinal_of(name: str) -> int | None:
    """The ordinal in the name of a segment's folder, or None if the name is another."""
    digits = name.removeprefix("seg-").removesuffix("-merged")
    return int(digits) if name.startswith("seg-") and digits.isdigit() and len(digits) == 8 else None


@dataclass(frozen=True, kw_only=True)
class SegmentMeta:
    """The metadata of a segment."""

    kind: Kind = "rows"
    merged: bool = False
    salt: int = field(default_factory=lambda: fs.random_salt())
    rows_cap: int
    elems_cap: Mapping[str, int]
    schema: Schema
    durability: str = "process"
    preallocated: bool = False
    writer: str = field(default_factory=lambda: f"{os.getpid()}@{os.uname().nodename}")
    store: str = ""
    sources: tuple[tuple[int, int], ...] = ()
    created_ns: int = field(default_factory=lambda: time_after(0))
    version: int = FORMAT_VERSION

    @functools.cached_property
    def internal_rows(self) -> tuple[str, ...]:
        """The names of the per-row int64 arrays that this kind of segment has."""
        return (TARGET,) * (self.kind == "update") + (ROW_ID, ROW_TIME) * self.merged

    def arrays(self) -> list[ArraySpec]:
        """Every array but the commits: columns, offsets per axis, presence, internal rows."""
        out: list[ArraySpec] = []
        for column in self.schema:
            size = self.rows_cap if column.axis is None else self.elems_cap[column.axis]
            fill = 0 if column.is_text else column.fill_value
            out.append(ArraySpec(column.name, column.np_dtype, size, column.axis, fill=fill, shape=column.shape))
        int64 = np.dtype("<i8")
        out.extend(ArraySpec(offsets_name(a), int64, self.rows_cap + 1, a, edges=True) for a in self.schema.axes)
        if self.has_present:
            out.append(ArraySpec(PRESENT, np.dtype("<u8"), self.rows_cap))
        out.extend(ArraySpec(name, int64, self.rows_cap) for name in self.internal_rows)
        return out

    @functools.cached_property
    def array_names(self) -> tuple[str, ...]:
        """The names of all arrays but the commits."""
        return tuple(spec.name for spec in self.arrays())

    @functools.cached_property
    def has_present(self) -> bool:
        """Whether rows record which optional columns they were given; an update gives all of its columns."""
        return bool(self.schema.optional) and self.kind == "rows"

    def to_attributes(self) -> dict[str, Any]:
        """The attributes of the segment's group."""
        attributes = {f.name: getattr(self, f.name) for f in fields(self)}
        attributes |= {"elems_cap": dict(self.elems_cap), "schema": self.schema.to_json()}
        attributes |= {"sources": [list(source) for source in self.sources]}
        return {"format": FORMAT_NAME, "version": self.version, "role": "segment", **attributes}

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any], where: str) -> SegmentMeta:
        """Parse the attributes of a segment's group."""
        try:
            meta = cls(
                schema=Schema.from_json(attributes["schema"]),
                rows_cap=checked_int(attributes["rows_cap"], ROW_MASK),
                elems_cap={k: checked_int(v, _MOST_ELEMENTS) for k, v in attributes["elems_cap"].items()},
                kind=attributes["kind"],
                merged=bool(attributes["merged"]),
                durability=str(attributes["durability"]),
                preallocated=bool(attributes["preallocated"]),
                salt=checked_int(attributes["salt"], MAX_SALT),
                writer=str(attributes["writer"]),
                store=str(attributes["store"]),
                sources=tuple(_source(*fields) for fields in attributes["sources"]),
                created_ns=checked_int(attributes["created_ns"]),
                version=attributes["version"],
            )
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise CorruptionError(f"{where} is damaged: an attribute is missing or wrong ({error}).") from None
        if meta.kind not in KINDS or set(meta.elems_cap) != set(meta.schema.axes):
            raise CorruptionError(f"{where} is damaged: kind {meta.kind!r} or elems_cap {meta.elems_cap} is wrong.")
        return meta


def _source(ordinal: Any, rows: Any) -> tuple[int, int]:
    return checked_int(ordinal, MAX_ORDINAL), checked_int(rows, ROW_MASK)


def with_crc(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes with a checksum of them."""
    return {**attributes, "crc": crc32c(json.dumps(attributes, sort_keys=True).encode())}


def group_json(attributes: Mapping[str, Any]) -> bytes:
    """The zarr.json of a group."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}, indent=1).encode()


def read_attributes(raw: bytes, where: str | Path, role: str) -> dict[str, Any]:
    """Return the attributes of a group's zarr.json after checking its format, role and version."""
    try:
        doc: Any = json.loads(raw)
        attributes: Any = doc["attributes"]
        name: Any = attributes["format"]
        version: Any = attributes["version"]
        stored_role: Any = attributes["role"]
    except (ValueError, KeyError, TypeError, RecursionError):
        name = version = stored_role = None
        attributes = {}
    if name != FORMAT_NAME or stored_role != role:
        raise NotAStoreError(
            f"{where} is not the metadata of a trajectory {role}. Pass the folder that TrajectoryStore.create created."
        )
    if version not in range(OLDEST_VERSION, FORMAT_VERSION + 1):
        way_out = (
            "Install a newer release of rlhf-pipeline"
            if isinstance(version, int) and version > FORMAT_VERSION
            else "No release has written this version; create the store again"
        )
        raise FormatVersionError(
            f"{where} has format version {version!r}; this release reads versions {OLDEST_VERSION} to "
            f"{FORMAT_VERSION}. {way_out}."
        )
    return cast("dict[str, Any]", attributes)


def read_intact(
    copies: Iterable[bytes | None], where: str | Path, role: str, salt: int | None = None
) -> dict[str, Any]:
    """Return the attributes of the first copy that matches its checksum, and the salt if that is known.

    Raises:
        StoreError: no copy matches its checksum; the error is that of the first.
    """
    first: StoreError | None = None
    other_copy: dict[str, Any] | None = None
    for raw in copies:
        try:
            if raw is None:
                raise CorruptionError(f"{where} is missing.")
            attributes = read_attributes(raw, where, role)
            if attributes != with_crc({k: v for k, v in attributes.items() if k != "crc"}):
                raise CorruptionError(f"{where} is damaged: its attributes do not match their checksum.")
            if salt is None or attributes.get("salt") == salt:
                return attributes
            other_copy = other_copy or attributes
        except StoreError as error:
            first = first or error
    if other_copy is not None:
        return other_copy
    raise first or CorruptionError(f"{where} is missing.")


def array_json(
    shape: list[int],
    dtype: np.dtype[Any],
    dimensions: list[str],
    fill: Fill = 0,
    *,
    zstd: int | None = None,
    indent: int | None = 1,
    attributes: Mapping[str, Any] | None = None,
) -> bytes:
    """The zarr.json of an array with one chunk, uncompressed or compressed at a zstd level."""
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
        "attributes": attributes or {},
        "dimension_names": dimensions,
    }
    return json.dumps(doc, indent=indent, separators=None if indent else (",", ":")).encode()


def spec_json(spec: ArraySpec, *, zstd: int | None = None, indent: int | None = 1) -> bytes:
    """The zarr.json of one array of a segment."""
    dimensions = [
        "row_edges" if spec.edges else spec.axis or "rows",
        *(f"{spec.name}.{i}" for i in range(len(spec.shape))),
    ]
    return array_json([spec.capacity, *spec.shape], spec.dtype, dimensions, spec.fill, zstd=zstd, indent=indent)


def commits_json(meta: SegmentMeta) -> bytes:
    """The zarr.json of the commits array; its attributes are the second copy of those of the segment."""
    shape, copy = [commits_cap(meta.rows_cap), RECORD_SIZE], with_crc(meta.to_attributes())
    return array_json(shape, np.dtype("uint8"), ["commits", "bytes"], attributes=copy)


def commits_cap(rows_cap: int) -> int:
    """Records that fit: one per row, and the end record."""
    return rows_cap + 1


def chunk_path(folder: Path, name: str, shape: tuple[int, ...] = ()) -> Path:
    """The file with the values of an array."""
    return Path(folder, name, "c", "0", *("0" for _ in shape))


def commits_path(folder: Path) -> Path:
    """The file with the commit records."""
    return folder / COMMITS / "c" / "0" / "0"


# Records

RECORD_SIZE = 64
MAGIC = b"TRJ5"
KIND_ROWS = 1
KIND_END = 2
KIND_CLOSED = 3
"""An end record whose writer had synced everything before it, so no check is needed."""
_BODY = struct.Struct("<4sIIIQIIQIIIII")
_TAIL = struct.Struct("<I")
_NOTHING = bytes(2 * RECORD_SIZE)
RECORD_DTYPE = np.dtype(
    [
        ("magic", "S4"),
        ("salt", "<u4"),
        ("seq", "<u4"),
        ("checks_end", "<u4"),
        ("time_ns", "<u8"),
        ("rows_end", "<u4"),
        ("n_rows", "<u4"),
        ("elems_end", "<u8"),
        ("kind", "<u4"),
        ("meta_crc", "<u4"),
        ("ordinal", "<u4"),
        ("catalog", "<u4"),
        ("data_crc", "<u4"),
        ("self_crc", "<u4"),
    ]
)


class Record(NamedTuple):
    """One commit."""

    seq: int
    checks_end: int
    time_ns: int
    rows_end: int
    n_rows: int
    elems_end: int
    kind: int
    meta_crc: int
    ordinal: int
    catalog: int
    data_crc: int


def pack(record: Record, salt: int) -> bytes:
    """Return the 64 bytes of a record."""
    body = _BODY.pack(MAGIC, salt, *record)
    return body + _TAIL.pack(crc32c(body))


def parse(raw: bytes, salt: int, seq: int) -> Record | None:
    """Return the record, or None if these 64 bytes are not record `seq` of this segment."""
    if raw[:4] != MAGIC or len(raw) != RECORD_SIZE:
        return None
    if _TAIL.unpack_from(raw, 60)[0] != crc32c(raw[:60]):
        return None
    fields = _BODY.unpack_from(raw)
    if fields[1] != salt or fields[2] != seq:
        return None
    return Record(*fields[2:])


class Log:
    """A reader's view of a `commits` array: bytes that only grow."""

    def __init__(self, data: memoryview | PreadBytes, salt: int) -> None:
        self._data = data
        self.salt = salt
        self.capacity = len(data) // RECORD_SIZE

    def raw(self, seq: int) -> bytes:
        """The 64 bytes at a position."""
        return bytes(self._data[seq * RECORD_SIZE : (seq + 1) * RECORD_SIZE])

    def get(self, seq: int) -> Record | None:
        """The record at a position, or None."""
        if seq >= self.capacity:
            return None
        return parse(self.raw(seq), self.salt, seq)

    def find_end(self, start: int = 0) -> tuple[int, Record | None]:
        """Return the number of records up to the first that is not valid, and the last of them, or None if none is new.

        A reader that follows closely finds none or one, which takes one read. Else this gallops from `start` (records
        that are valid) and bisects, so it reads O(log new) records.
        """
        ahead = bytes(self._data[start * RECORD_SIZE : (start + 2) * RECORD_SIZE])
        if _NOTHING.startswith(ahead):
            return start, None
        if _NOTHING.startswith(ahead[RECORD_SIZE:]):
            first = parse(ahead[:RECORD_SIZE], self.salt, start)
            return start + (first is not None), first
        end = self._valid_prefix(start)
        return end, self.get(end - 1) if end > start else None

    def _valid_prefix(self, first: int) -> int:
        if self.get(first) is None:
            return first
        low, step = first + 1, 1
        while self.get(low + step - 1) is not None:
            low += step
            step *= 2
        high = low + step - 1
        while low < high:
            middle = (low + high) // 2
            if self.get(middle) is not None:
                low = middle + 1
            else:
                high = middle
        return low

    def table(self, count: int, start: int = 0) -> npt.NDArray[Any]:
        """Records `start` to `count` as one structured array, unchecked."""
        if count <= start:
            return np.empty(0, RECORD_DTYPE)
        raw = self._data[start * RECORD_SIZE : count * RECORD_SIZE]
        return np.frombuffer(raw, RECORD_DTYPE)

    def last_valid(self) -> int:
        """One past the last valid record, wherever it lies."""
        end = self.last_written()
        while end and self.get(end - 1) is None:
            end -= 1
        return end

    def last_written(self) -> int:
        """One past the last position that holds anything, valid or not."""
        whole = np.frombuffer(self._data[: self.capacity * RECORD_SIZE], np.uint8)
        used = np.flatnonzero(whole.reshape(-1, RECORD_SIZE).any(axis=1))
        return int(used[-1]) + 1 if len(used) else 0


# Checksums of blocks: what a reader of a few rows of a column compares, without reading the rest of a commit

CHECKS = "commits/checks"
BLOCK_BYTES = 4096
"""Bytes per block of an array, as far as complete elements fit: one page, which is the unit of a disk read. With larger
blocks, a read of a random row reads more than it returns.
"""
SMALL_BLOCKS = 4
"""Number of these per block if a commit wrote few bytes to an array. With one call per page, an append of 64 rows (750
KB) took an eighth longer; and a small commit is compared completely when more of it is read.
"""
SMALL_PART = 1 << 19
"""Maximum number of bytes of such a part, in a segment that is not merged."""


def page_elements(spec: ArraySpec) -> int:
    """Return the elements of an array in the smallest blocks."""
    return max(1, BLOCK_BYTES // spec.itemsize)


class Blocks(NamedTuple):
    """The blocks of what a commit wrote to an array; the elements are numbered as in the segment.

    They end where those of the whole array do, on a local disk at the end of a page: a reader that compares a block of
    one page does not read two. The block at each end of a commit may be shared with the commit beside it, which has a
    checksum of its own part.

    Attributes:
        start: the first element.
        stop: one past the last element.
        size: the elements of a block.
        origin: where the first block begins, which may be before `start`.
        before: the blocks of the commit before these.
    """

    start: int
    stop: int
    size: int
    origin: int
    before: int = 0

    @property
    def end(self) -> int:
        """The blocks of the commit up to the last of these."""
        return self.before + (-(-(self.stop - self.origin) // self.size) if self.stop > self.start else 0)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Return the first element of a block, and one past the last element of another."""
        return max(self.start, self.origin + first * self.size), min(self.origin + (last + 1) * self.size, self.stop)

    def crcs(self, raw: npt.NDArray[np.uint8], itemsize: int, first: int = 0) -> list[int]:
        """Return the CRC32C of each block of the bytes that begin with block `first`."""
        return block_crcs(raw, self.size * itemsize, 0 if first else (self.start - self.origin) * itemsize)


def block_crcs(raw: npt.NDArray[np.uint8], size: int, absent: int = 0) -> list[int]:
    """Return the CRC32C of each block of `size` bytes; the first lacks some, and the last may be shorter."""
    length, lead = len(raw), size - absent
    if length <= lead:
        return [crc32c(raw)] if length else []
    whole = length - (length - lead) % size
    crcs = [crc32c(raw[:lead]), *map(crc32c, raw[lead:whole].reshape(-1, size))]
    if whole < length:
        crcs.append(crc32c(raw[whole:]))
    return crcs


def pages_per_block(meta: SegmentMeta, num_bytes: int) -> int:
    """Return the size of a block where a commit wrote so many bytes to an array, in pages."""
    return 1 if num_bytes > SMALL_PART or meta.merged or meta.version == OLDEST_VERSION else SMALL_BLOCKS


def blocks_of(meta: SegmentMeta, layout: tuple[int, int], start: int, stop: int, before: int = 0) -> Blocks:
    """Return the blocks of the elements of an array that a commit wrote.

    Args:
        meta: of the segment.
        layout: the bytes of an element, and `page_elements`.
        start: the first element.
        stop: one past the last element.
        before: the blocks of the commit before these.
    """
    itemsize, page = layout
    size = page * pages_per_block(meta, (stop - start) * itemsize)
    origin = start if meta.version == OLDEST_VERSION else start - start % size
    return Blocks(start, stop, size, origin, before)


def to_hex(crcs: Iterable[int]) -> str:
    """Return checksums as text, eight hexadecimal digits each.

    >>> to_hex([1, 255])
    '00000001000000ff'
    """
    return "".join(f"{crc:08x}" for crc in crcs)


def from_hex(text: Any, count: int) -> Int64Array:
    """Parse `count` checksums; raise ValueError if the text is not that."""
    if not isinstance(text, str) or len(raw := bytes.fromhex(text)) != 4 * count:
        raise ValueError(f"{str(text)[:40]!r} does not contain {count} checksums")
    return np.frombuffer(raw, ">u4").astype(np.int64)


def checks_path(folder: Path) -> Path:
    """The file with the checksums of blocks, four bytes each, commit after commit."""
    return folder / CHECKS


def checks_cap(meta: SegmentMeta) -> int:
    """Checksums that fit: of each array, one more per row than of all its elements in one commit."""
    specs = meta.arrays()
    return len(specs) * meta.rows_cap + sum(-(-spec.capacity // page_elements(spec)) for spec in specs)


# The marks of a segment: how many records are acknowledged, and how many count if another process ended it. Each is two
# u64, a number and its complement; zeros are none. The last byte records that another process is about to end it.

_MARK = struct.Struct("<QQ")
_ALL_ONES = (1 << 64) - 1
FENCE_AT = _MARK.size
ENDING_AT = 2 * _MARK.size
MARK_SIZE = ENDING_AT + 8


def mark_path(folder: Path) -> Path:
    """The file with the number of acknowledged records of a segment."""
    return folder / COMMITS / ACKNOWLEDGED


def pack_mark(records: int) -> bytes:
    """Return the 16 bytes of a mark."""
    return _MARK.pack(records, records ^ _ALL_ONES)


def parse_mark(raw: bytes, at: int = 0) -> int | None:
    """Return the number of acknowledged records, or that at another place; None if the bytes are none or damaged."""
    if len(raw) < at + _MARK.size:
        return None
    records, complement = _MARK.unpack_from(raw, at)
    return records if records ^ complement == _ALL_ONES else None
