"""The 64-byte commit record, and how to find the end of the valid prefix.

offset  type   field
0       4s     magic "TRJ1"
4       u32    salt of the segment
8       u64    sequence number, from 0
16      u64    time of the commit, ns since the epoch, growing within a segment
24      u32    rows_end: rows in the segment after this commit
28      u32    n_rows: rows of this commit
32      u64    elems_end: elements of all axes after this commit, added up
40      u32    kind: 1 rows, 2 end of the segment (no rows; nothing follows)
44      u32    CRC32C of the segment's zarr.json
48      u64    0
56      u32    CRC32C of the data of this commit
60      u32    CRC32C of bytes 0 to 59
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import google_crc32c as _crc  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import numpy.typing as npt

from trajectory_store.maps import PreadBytes

RECORD_SIZE = 64
MAGIC = b"TRJ1"
KIND_ROWS = 1
KIND_END = 2
LOOK_AHEAD = 64
_BODY = struct.Struct("<4sIQQIIQIIQI")
_TAIL = struct.Struct("<I")
_BLANK = bytes(RECORD_SIZE)
_NOTHING = bytes(RECORD_SIZE * (LOOK_AHEAD + 1))
_extend = cast("Callable[[int, bytes | npt.NDArray[Any]], int]", _crc.extend)  # pyright: ignore[reportUnknownMemberType]
RECORD_DTYPE = np.dtype(
    [
        ("magic", "S4"),
        ("salt", "<u4"),
        ("seq", "<u8"),
        ("time_ns", "<u8"),
        ("rows_end", "<u4"),
        ("n_rows", "<u4"),
        ("elems_end", "<u8"),
        ("kind", "<u4"),
        ("meta_crc", "<u4"),
        ("zero", "<u8"),
        ("data_crc", "<u4"),
        ("self_crc", "<u4"),
    ]
)


def crc32c(data: bytes | npt.NDArray[Any], start: int = 0) -> int:
    """CRC32C of bytes or of a contiguous array, continued from `start`."""
    if isinstance(data, np.ndarray):
        data = data.view()
        data.flags.writeable = False
    return _extend(start, data)


class Record(NamedTuple):
    """One commit."""

    seq: int
    time_ns: int
    rows_end: int
    n_rows: int
    elems_end: int
    kind: int
    meta_crc: int
    data_crc: int


def pack(record: Record, salt: int) -> bytes:
    """Return the 64 bytes of a record."""
    body = _BODY.pack(
        MAGIC,
        salt,
        record.seq,
        record.time_ns,
        record.rows_end,
        record.n_rows,
        record.elems_end,
        record.kind,
        record.meta_crc,
        0,
        record.data_crc,
    )
    return body + _TAIL.pack(crc32c(body))


def parse(raw: bytes, salt: int, seq: int) -> Record | None:
    """Return the record, or None where these 64 bytes are not record `seq` of this segment."""
    if raw[:4] != MAGIC or len(raw) != RECORD_SIZE:
        return None
    if _TAIL.unpack_from(raw, 60)[0] != crc32c(raw[:60]):
        return None
    fields = _BODY.unpack_from(raw)
    if fields[1] != salt or fields[2] != seq:
        return None
    return Record(*fields[2:9], data_crc=fields[10])


class Log:
    """A reader's view of a `commits` array: bytes that only grow.

    Args:
        data: the array, `capacity * 64` bytes, mapped or read on demand.
        salt: the salt of the segment.
    """

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

    def find_end(self, known: int = 0) -> tuple[int, bool]:
        """Return the number of records and whether a damaged one lies among them.

        Gallops from `known` (records known to be valid) and bisects, so it reads O(log new) records; a
        look-ahead over the next records tells the end of the log from a damaged record in its middle.
        """
        damaged = False
        while True:
            end = self._valid_prefix(known)
            beyond = self._valid_after(end)
            if beyond is None:
                return end, damaged
            if self.get(end) is None:
                damaged = True
            known = beyond + 1

    def _valid_prefix(self, known: int) -> int:
        if self.get(known) is None:
            return known
        if self.is_blank(known + 1):  # one new record: what an append that is followed closely looks like
            return known + 1
        low, step = known + 1, 1
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

    def _valid_after(self, end: int) -> int | None:
        stop = min(end + 1 + LOOK_AHEAD, self.capacity)
        ahead = bytes(self._data[end * RECORD_SIZE : stop * RECORD_SIZE])
        if _NOTHING.startswith(ahead):
            return None
        for seq in range(end, stop):
            if self.get(seq) is not None:
                return seq
        return None

    def table(self, count: int, start: int = 0) -> npt.NDArray[Any]:
        """Records `start` to `count` as one structured array, unchecked."""
        if count <= start:
            return np.empty(0, RECORD_DTYPE)
        raw = self._data[start * RECORD_SIZE : count * RECORD_SIZE]
        return np.frombuffer(raw, RECORD_DTYPE)

    def everything(self) -> npt.NDArray[np.uint8]:
        """All bytes, whole capacity."""
        return np.frombuffer(self._data[: self.capacity * RECORD_SIZE], np.uint8)

    def is_blank(self, seq: int) -> bool:
        """Whether nothing was written at a position: the cheap test for "no news"."""
        if seq >= self.capacity:
            return True
        return self.raw(seq) == _BLANK
