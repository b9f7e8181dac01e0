"""One commit as bytes: a Zarr v3 group in an uncompressed zip, written by hand and read from its end.

The form is canonical: the same arrays give the same bytes, and any other bytes are damage. The values of the arrays
come first, each at a multiple of 64, then their metadata, the group's own `zarr.json` with the record of the commit,
and the directory. So one read of the last bytes gives the record and the place of everything.
"""

from __future__ import annotations

import functools
import json
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from trajectory_store import extras
from trajectory_store.errors import CorruptionError
from trajectory_store.format import (
    FORMAT_NAME,
    MAX_CRC,
    ArraySpec,
    SegmentMeta,
    checked_int,
    per_name,
    read_attributes,
    spec_json,
)

BLOCK = 64
"""Commits per block. The last commit of a block repeats the records of all its commits, so that opening need not read
each.
"""

LEVEL = 1
"""zstd level of a commit, chosen with benchmarks/bench_store_codec.py."""
WORTH, SAMPLE = 0.8, 1 << 14
"""A chunk stays raw unless zstd makes it, and its first bytes, smaller than this fraction: reading is then a copy."""

_ALIGN = 64
_PAD = 0xD935
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_DATE = 33  # 1 January 1980


class Codec(Protocol):
    """A codec of numcodecs."""

    def encode(self, data: Any) -> Any: ...
    def decode(self, data: Any, out: Any = None) -> Any: ...


@functools.cache
def zstd(level: int = LEVEL) -> Codec:
    """Return the codec; decoding does not depend on the level."""
    return cast("Codec", extras.load("numcodecs.zstd", "a store with backend='zarr'").Zstd(level=level))


# The zip


def pack(entries: Sequence[tuple[str, bytes]]) -> bytes:
    """Build a zip without compression: aligned data, no gaps after it, fixed dates."""
    parts: list[bytes] = []
    directory: list[bytes] = []
    at = 0
    for name, data in entries:
        raw, size, crc = name.encode(), len(data), zlib.crc32(data)
        pad = -(at + 30 + len(raw) + 4) % _ALIGN
        extra = struct.pack("<2H", _PAD, pad) + bytes(pad)
        parts += [_LOCAL.pack(b"PK\3\4", 20, 0, 0, 0, _DATE, crc, size, size, len(raw), len(extra)), raw, extra, data]
        directory.append(
            _ENTRY.pack(b"PK\1\2", 20, 20, 0, 0, 0, _DATE, crc, size, size, len(raw), 0, 0, 0, 0, 0, at) + raw
        )
        at += 30 + len(raw) + len(extra) + size
    body = b"".join(directory)
    end = _END.pack(b"PK\5\6", 0, 0, len(entries), len(entries), len(body), at, 0)
    return b"".join([*parts, body, end])


def directory(tail: bytes, size: int, key: str) -> dict[str, tuple[int, int]]:
    """Return where the data of each entry begins and ends."""
    try:
        magic, _, _, _, count, length, start, _ = _END.unpack(tail[-_END.size :])
        if magic != b"PK\5\6" or start + length + _END.size != size:
            raise CorruptionError(f"object {key} is damaged: the end of the commit is missing.")
        at = len(tail) - _END.size - length
        if at < 0:
            raise NeedMore(length + _END.size)
        entries: list[tuple[str, int, int]] = []
        for _ in range(count):
            fields = _ENTRY.unpack_from(tail, at)
            name = tail[at + _ENTRY.size : at + _ENTRY.size + fields[10]].decode()
            entries.append((name, fields[9], fields[16]))
            at += _ENTRY.size + fields[10]
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptionError(f"object {key} is damaged: its directory cannot be read ({error}).") from None
    ends = [*(offset for _, _, offset in entries[1:]), start]
    return {name: (end - nbytes, end) for (name, nbytes, _), end in zip(entries, ends, strict=True)}


class NeedMore(Exception):
    """The tail does not reach back to the directory."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


# The commit


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The record of one commit."""

    ordinal: int
    seq: int
    salt: int
    time_ns: int
    n_rows: int
    rows_end: int
    starts: Mapping[str, int]
    ends: Mapping[str, int]
    catalog: int = 0
    sealed: bool = False
    synced: bool = False
    crc: Mapping[str, int | str] = field(default_factory=dict[str, "int | str"])
    """For each array, the CRC32C of each block in hexadecimal digits; in older commits, a number for all values."""
    before: Sequence[Sequence[int]] = ()
    version: int

    def to_json(self) -> bytes:
        """Return the group's zarr.json."""
        fields = {"format": FORMAT_NAME, "version": self.version, "role": "commit", **asdict(self)}
        doc = {"zarr_format": 3, "node_type": "group", "attributes": fields}
        return json.dumps(doc, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, raw: bytes, key: str, meta: SegmentMeta) -> Commit:
        """Parse the group's zarr.json: a record that no commit of this segment can have is damage.

        The reader, which knows the commits before it, checks whether it follows them.
        """
        attributes = read_attributes(raw, key, "commit")
        caps = {axis: meta.elems_cap[axis] for axis in meta.schema.axes}
        try:
            names = meta.array_names if attributes["n_rows"] else ()
            rows_end = checked_int(attributes["rows_end"], meta.rows_cap)
            ends = per_name(attributes["ends"], caps)
            commit = cls(
                ordinal=checked_int(attributes["ordinal"]),
                seq=checked_int(attributes["seq"]),
                salt=checked_int(attributes["salt"]),
                time_ns=checked_int(attributes["time_ns"]),
                n_rows=checked_int(attributes["n_rows"], rows_end),
                rows_end=rows_end,
                starts=per_name(attributes["starts"], ends),
                ends=ends,
                catalog=checked_int(attributes["catalog"]),
                sealed=bool(attributes["sealed"]),
                synced=bool(attributes["synced"]),
                crc=_crcs(attributes["crc"], names),
                before=tuple(_row_before(row, rows_end, ends) for row in attributes["before"]),
                version=checked_int(attributes["version"], meta.version, meta.version),
            )
            if not commit.n_rows and commit.starts != ends:
                raise ValueError("an end record contains elements")
            if commit.before and (len(commit.before) != BLOCK - 1 or commit.seq % BLOCK != BLOCK - 1):
                raise ValueError(
                    f"'before' must list {BLOCK - 1} commits in every {BLOCK}th commit, and be empty in all others"
                )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CorruptionError(
                f"object {key} is damaged: a field of its record is missing or wrong ({error})."
            ) from None
        return commit


def _crcs(crcs: Any, names: Collection[str]) -> dict[str, int | str]:
    if set(crcs) != set(names):
        raise ValueError(f"the names {list(crcs)} do not match {list(names)}")
    for crc in crcs.values():
        if isinstance(crc, str):
            bytes.fromhex(crc)
        else:
            checked_int(crc, MAX_CRC)
    return dict(crcs)


def _row_before(row: Any, most_rows: int, ends: Mapping[str, int]) -> tuple[int, ...]:
    n_rows, time_ns, *edges = row
    inside = (checked_int(edge, end) for edge, end in zip(edges, ends.values(), strict=True))
    return checked_int(n_rows, most_rows, 1), checked_int(time_ns), *inside


def commit_key(name: str, seq: int) -> str:
    """The object of a commit."""
    return f"{name}/{seq:08d}.zip"


def seq_of(key: str) -> int | None:
    """The number of the commit that an object holds; None for other objects of a segment."""
    name, _, end = key.rpartition("/")[2].partition(".")
    return int(name) if end == "zip" and name.isdigit() else None


def entry_name(spec: ArraySpec) -> str:
    """The location of the values of an array in the zip."""
    return f"{spec.name}/c/{'/'.join('0' for _ in (0, *spec.shape))}"


def build(commit: Commit, arrays: Mapping[str, tuple[ArraySpec, npt.NDArray[Any]]], *, compress: bool) -> bytes:
    """Build the object of a commit."""
    data: list[tuple[str, bytes]] = []
    docs: list[tuple[str, bytes]] = []
    for name, (spec, values) in arrays.items():
        level = None
        if len(values):
            raw = values.tobytes()
            packed = _compressed(raw) if compress else raw
            if packed is not raw:
                raw, level = packed, LEVEL
            data.append((entry_name(spec), raw))
        docs.append((f"{name}/zarr.json", spec_json(spec, zstd=level, indent=None)))
    return pack([*data, *docs, ("zarr.json", commit.to_json())])


def _compressed(raw: bytes) -> bytes:
    """Return the bytes as a zstd frame if that is worth it, else unchanged: most floats do not compress."""
    for part in (raw[:SAMPLE], raw):
        packed = bytes(zstd().encode(part))
        if len(packed) > WORTH * len(part):
            return raw
    return packed


def read_commit(tail: bytes, size: int, key: str, meta: SegmentMeta) -> Commit:
    """Read the record of a commit of a segment from the end of its object."""
    return Commit.from_json(read_record(tail, size, key), key, meta)


def read_record(tail: bytes, size: int, key: str) -> bytes:
    """Return the group's zarr.json, the last entry, from the end of a commit's object; raise as `read_commit` does."""
    name = b"zarr.json"
    at = len(tail) - _END.size - _ENTRY.size - len(name)
    if at < 0:
        if len(tail) < size:
            raise NeedMore(size)
        raise CorruptionError(f"object {key} is damaged: the end of the commit is missing.")
    fields, start = _ENTRY.unpack_from(tail, at), _END.unpack_from(tail, len(tail) - _END.size)[6]
    crc, nbytes, header = fields[7], fields[9], fields[16]
    ends = tail[at + _ENTRY.size : -_END.size] == name and header + nbytes <= start <= size
    first = start - nbytes - size + len(tail)
    if ends and first < 0 < size - len(tail):
        raise NeedMore(size - start + nbytes)
    raw = tail[first : first + nbytes] if ends and first >= 0 else b""
    if not ends or zlib.crc32(raw) != crc:
        raise CorruptionError(f"object {key} is damaged: its record does not match its checksum.")
    return raw


def decode(raw: bytes | memoryview, size: int, where: str) -> npt.NDArray[np.uint8]:
    """Return the bytes of a chunk's values, raw or a zstd frame; they are compared with checksums elsewhere."""
    if len(raw) == size:
        return np.frombuffer(raw, np.uint8)
    values = np.empty(size, np.uint8)
    try:
        zstd().decode(raw, values)
    except (RuntimeError, ValueError) as error:
        raise CorruptionError(f"{where} is damaged: it cannot be decompressed ({error}).") from None
    return values


def is_canonical(raw: bytes, key: str) -> bool:
    """Return whether writing an object's entries again gives the same bytes."""
    places = directory(raw, len(raw), key)
    return pack([(name, raw[start:end]) for name, (start, end) in places.items()]) == raw
