"""Texts and byte strings as they are stored, compared and searched without decoding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import SchemaError
from trajectory_store.ragged import Int64Array, RaggedArray

Mask = npt.NDArray[np.bool_]
_SAMPLE: Final = 1 << 16
"""Bytes that are counted to find the rarest byte of a needle."""


class Texts:
    """A column of texts or byte strings: their bytes one after another.

    Equality, `startswith` and searching work on the bytes, which for UTF-8 is the same as on characters: finding a
    value among 10^6 finish reasons takes milliseconds, where decoding them takes more than a second.

    >>> texts = Texts(RaggedArray(np.frombuffer(b"stoplength", np.uint8), [4, 6]), str)
    >>> (texts == "stop").tolist(), texts.contains("t").tolist(), texts.startswith("le").tolist()
    ([True, False], [True, True], [False, True])
    """

    __hash__ = None  # pyright: ignore[reportAssignmentType] - equality gives a mask

    def __init__(self, rows: RaggedArray, kind: type[str] | type[bytes]) -> None:
        self._flat: npt.NDArray[np.uint8] = rows.values
        self._offsets = rows.offsets
        self._lengths = rows.lengths
        self._kind = kind

    def __len__(self) -> int:
        return len(self._lengths)

    def __eq__(self, other: object) -> Mask:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`[N]` bool: which are equal to a value, or to the text in the same place."""
        if isinstance(other, Texts):
            return np.fromiter((a == b for a, b in zip(self.to_list(), other.to_list(), strict=True)), bool, len(self))
        value = self._bytes(other)
        return self._begin_with(value, np.flatnonzero(self._lengths == len(value)))

    def __ne__(self, other: object) -> Mask:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ~(self == other)

    def is_in(self, values: Iterable[object]) -> Mask:
        """`[N]` bool: which are equal to one of some values."""
        found = np.zeros(len(self), bool)
        for value in values:
            found |= self == value
        return found

    def startswith(self, prefix: object) -> Mask:
        """`[N]` bool: which begin with a value."""
        value = self._bytes(prefix)
        return self._begin_with(value, np.flatnonzero(self._lengths >= len(value)))

    def endswith(self, suffix: object) -> Mask:
        """`[N]` bool: which end with a value."""
        value = self._bytes(suffix)
        rows = np.flatnonzero(self._lengths >= len(value))
        return self._have(value, rows, self._offsets[rows + 1] - len(value))

    def contains(self, needle: object) -> Mask:
        """`[N]` bool: which contain a value: its rarest byte is looked for, then the others beside it."""
        value = self._bytes(needle)
        found = np.ones(len(self), bool) if not value else np.zeros(len(self), bool)
        if not value or len(self._flat) < len(value):
            return found
        counts = np.bincount(self._flat[:_SAMPLE], minlength=256)
        rarest = min(range(len(value)), key=lambda i: int(counts[value[i]]))
        starts = np.flatnonzero(self._flat == value[rarest]) - rarest
        starts = starts[(starts >= 0) & (starts <= len(self._flat) - len(value))]
        for i, byte in enumerate(value):
            if i != rarest:
                starts = starts[self._flat[starts + i] == byte]
        rows = self._offsets.searchsorted(starts, "right") - 1
        found[rows[starts + len(value) <= self._offsets[rows + 1]]] = True
        return found

    def lengths(self) -> Int64Array:
        """`[N]` int64: characters of each text, or bytes of each byte string."""
        if self._kind is bytes:
            return self._lengths
        begins = np.zeros(len(self._flat) + 1, np.int64)
        np.cumsum((self._flat & 0xC0) != 0x80, out=begins[1:])
        return np.diff(begins[self._offsets])

    def to_list(self) -> list[Any]:
        """Return the texts, or the byte strings."""
        data = self._flat.tobytes()
        rows = [data[a:b] for a, b in zip(self._offsets[:-1].tolist(), self._offsets[1:].tolist(), strict=True)]
        return rows if self._kind is bytes else [row.decode() for row in rows]

    def _begin_with(self, value: bytes, rows: Int64Array) -> Mask:
        return self._have(value, rows, self._offsets[rows])

    def _have(self, value: bytes, rows: Int64Array, starts: Int64Array) -> Mask:
        """Return which rows have a value at their places."""
        for i, byte in enumerate(value):
            same = self._flat[starts + i] == byte
            rows, starts = rows[same], starts[same]
        found = np.zeros(len(self), bool)
        found[rows] = True
        return found

    def _bytes(self, value: object) -> bytes:
        if not isinstance(value, self._kind):
            wanted = "text, such as 'stop'" if self._kind is str else "bytes, such as b'x'"
            raise SchemaError(f"{value!r} is compared with a column of {self._kind.__name__}: give {wanted}.")
        return value.encode() if isinstance(value, str) else value
