"""Which rows of a segment's arrays were compared with their checksums, in one state of its files."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from trajectory_store.ragged import Int64Array

Rows = Int64Array | slice
ALL = ""
"""Represents all arrays: rows of small commits are compared with all their values at once."""


class ComparedRows:
    """Which rows of some arrays were compared; each method is given the number of rows that there are by now.

    A row of an array was compared with the array, or with all arrays. Arrays of which every row was compared have a
    number in place of a mask: most of them, most of the time.

    Args:
        arrays: the names of all arrays.

    >>> compared = ComparedRows(["tag", "score"])
    >>> compared.mark("tag", np.array([0, 2]), 3)
    >>> compared.left("tag", slice(0, 3), 3), compared.has("tag", 2), compared.has("score", 2)
    (array([1]), True, False)
    >>> compared.mark(ALL, np.array([1]), 3)
    >>> compared.left("tag", slice(0, 3), 3) is None
    True
    """

    def __init__(self, arrays: Collection[str]) -> None:
        self._arrays = arrays
        self._first: dict[str, int] = {}
        """The number of first rows that were all compared, per array or for `ALL`."""
        self._masks: dict[str, npt.NDArray[np.bool_]] = {}
        """A mask per array and one for `ALL`. The mask of an array includes rows compared with all arrays."""

    def are_all(self, name: str, count: int) -> bool:
        """Return whether every row of an array was compared."""
        return self._first.get(ALL, 0) == count or self._first.get(name, 0) == count

    def has(self, name: str, row: int) -> bool:
        """Return whether a row of an array was compared."""
        for key in (name, ALL):
            mask = self._masks.get(key)
            if row < self._first.get(key, 0) or (mask is not None and row < len(mask) and bool(mask[row])):
                return True
        return False

    def left(self, name: str, rows: Rows, count: int) -> Int64Array | None:
        """Return which of some rows of an array were not compared; None if all were."""
        if self.are_all(name, count):
            return None
        is_compared = self._mask(name, count)[rows]
        return None if is_compared.all() else np.r_[rows][~is_compared]

    def mark(self, name: str, rows: Rows, count: int) -> None:
        """Note that rows of an array, or of all arrays, were compared."""
        if self.are_all(name, count):
            return
        for marked in (ALL, *self._masks) if name == ALL else (name,):
            self._mask(marked, count)[rows] = True

    def settle(self, name: str, count: int) -> None:
        """Drop the mask of an array once every row was compared; those of all arrays once that holds for each."""
        mask = self._masks.get(name)
        if mask is None or len(mask) < count or not mask.all():
            return
        self._first[name] = count
        del self._masks[name]
        if name == ALL or all(self._first.get(array) == count for array in self._arrays):
            self._first, self._masks = {ALL: count}, {}

    def _mask(self, name: str, count: int) -> npt.NDArray[np.bool_]:
        mask = self._masks.get(name)
        if mask is None or len(mask) < count:
            grown = np.zeros(count, np.bool_)
            before = max(self._first.get(name, 0), self._first.get(ALL, 0)) if mask is None else len(mask)
            grown[:before] = True if mask is None else mask
            if mask is None and (of_all := self._masks.get(ALL)) is not None:
                grown[: len(of_all)] |= of_all[:count]
            mask = self._masks[name] = grown
        return mask
