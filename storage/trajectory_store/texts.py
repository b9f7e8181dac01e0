"""Texts and byte strings in stored form, compared and searched without decoding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import SchemaError
from trajectory_store.ragged import Int64Array, RaggedArray

Mask = npt.NDArray[np.bool_]
_SAMPLE: Final = 1 << 16
"""The number of bytes that are counted to find the rarest byte of a needle."""


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
        self.kind = kind

    def __len__(self) -> int:
        return len(self._lengths)

    def __eq__(self, compared: object) -> Mask:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`[N]` bool: which are equal to a value, or to the text in the same place."""
        if isinstance(compared, Texts):
            pairs = zip(self.to_list(), compared.to_list(), strict=True)
            return np.fromiter((mine == theirs for mine, theirs in pairs), bool, len(self))
        sought = self._bytes(compared)
        return self._begin_with(sought, np.flatnonzero(self._lengths == len(sought)))

    def __ne__(self, compared: object) -> Mask:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ~(self == compared)

    def is_in(self, values: Iterable[object]) -> Mask:
        """`[N]` bool: which are equal to one of some values."""
        mask = np.zeros(len(self), bool)
        for value in values:
            mask |= self == value
        return mask

    def startswith(self, prefix: object) -> Mask:
        """`[N]` bool: which begin with a value."""
        sought = self._bytes(prefix)
        return self._begin_with(sought, np.flatnonzero(self._lengths >= len(sought)))

    def endswith(self, suffix: object) -> Mask:
        """`[N]` bool: which end with a value."""
        sought = self._bytes(suffix)
        rows = np.flatnonzero(self._lengths >= len(sought))
        return self._have(sought, rows, self._offsets[rows + 1] - len(sought))

    def contains(self, needle: object, *, any_case: bool = False) -> Mask:
        """`[N]` bool: which contain a value; with `any_case`, ASCII letters of either case are equal."""
        sought = self._bytes(needle)
        mask = np.ones(len(self), bool) if not sought else np.zeros(len(self), bool)
        if not sought or len(self._flat) < len(sought):
            return mask
        starts = occurrences(self._flat, sought, any_case=any_case)
        rows = self._offsets.searchsorted(starts, "right") - 1
        mask[rows[starts + len(sought) <= self._offsets[rows + 1]]] = True
        return mask

    def lengths(self) -> Int64Array:
        """`[N]` int64: characters of each text, or bytes of each byte string."""
        if self.kind is bytes:
            return self._lengths
        begins = np.zeros(len(self._flat) + 1, np.int64)
        np.cumsum((self._flat & 0xC0) != 0x80, out=begins[1:])
        return np.diff(begins[self._offsets])

    def to_list(self) -> list[Any]:
        """Return the texts, or the byte strings."""
        data = self._flat.tobytes()
        rows = [data[a:b] for a, b in zip(self._offsets[:-1].tolist(), self._offsets[1:].tolist(), strict=True)]
        return rows if self.kind is bytes else [row.decode() for row in rows]

    def _begin_with(self, sought: bytes, rows: Int64Array) -> Mask:
        return self._have(sought, rows, self._offsets[rows])

    def _have(self, sought: bytes, rows: Int64Array, starts: Int64Array) -> Mask:
        """Return which rows have a value at their places."""
        for i, byte in enumerate(sought):
            same = self._flat[starts + i] == byte
            rows, starts = rows[same], starts[same]
        mask = np.zeros(len(self), bool)
        mask[rows] = True
        return mask

    def _bytes(self, value: object) -> bytes:
        if not isinstance(value, self.kind):
            literal = "text, such as 'stop'" if self.kind is str else "bytes, such as b'x'"
            raise SchemaError(f"{value!r} is compared with a {self.kind.__name__} column: use {literal}.")
        return value.encode() if isinstance(value, str) else value


def occurrences(flat: npt.NDArray[np.uint8], needle: bytes, *, any_case: bool = False) -> Int64Array:
    """Return where a needle begins, ascending: its rarest byte is looked for first, then the others are compared.

    >>> occurrences(np.frombuffer(b"a cat, a Cat", np.uint8), b"cat", any_case=True).tolist()
    [2, 9]
    """
    codes = np.frombuffer(needle.lower() if any_case else needle, np.uint8)
    either = (codes >= 97) & (codes <= 122) if any_case else np.zeros(len(codes), bool)
    last = len(flat) - len(codes) + 1
    if last <= 0:
        return np.zeros(0, np.int64)
    often = np.bincount(flat[:_SAMPLE], minlength=256)
    order = np.argsort(often[codes] + np.where(either, often[codes - 32 * either], 0), kind="stable")

    def same(values: npt.NDArray[np.uint8], place: int) -> Mask:
        return (values | 32 if either[place] else values) == codes[place]

    rarest = int(order[0])
    at = np.flatnonzero(same(flat[rarest : rarest + last], rarest))
    for place in order[1:].tolist():
        at = at[same(flat[at + place], place)]
    return at
