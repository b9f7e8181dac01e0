"""Ragged arrays: flat values plus one length per row."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import BatchError

Int64Array = npt.NDArray[np.int64]


def offsets_of(lengths: npt.NDArray[Any]) -> Int64Array:
    """Return `[0, l0, l0+l1, ...]`, one element more than there are lengths.

    >>> offsets_of(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    out = np.zeros(len(lengths) + 1, np.int64)
    np.add.accumulate(lengths, out=out[1:])
    return out


def is_masked(values: object) -> bool:
    """Return whether some values are masked; for all other arrays it is faster than NumPy's function."""
    return isinstance(values, np.ma.MaskedArray) and bool(np.ma.is_masked(cast("Any", values)))


def ranges_of(numbers: Int64Array) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges: the first of each, and one past its last.

    >>> ranges_of(np.array([2, 3, 7]))
    [(2, 4), (7, 8)]
    """
    if not len(numbers):
        return []
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    firsts, lasts = numbers[np.append(0, breaks + 1)], numbers[np.append(breaks, len(numbers) - 1)] + 1
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def distinct(numbers: Int64Array) -> list[int]:
    """Return the distinct values of small numbers of 0 or more, ascending; `np.unique` sorts, which takes longer.

    >>> distinct(np.array([5, 2, 5]))
    [2, 5]
    """
    return np.flatnonzero(np.bincount(numbers)).tolist() if len(numbers) else []


class RaggedArray:
    """Rows of different lengths in one flat array: the fast representation of a ragged column.

    Args:
        values: the rows one after another: `[sum(lengths)]`, or `[sum(lengths), *shape]` if elements have a shape.
        lengths: `[N]` int64, the length of each row.

    Raises:
        BatchError: the lengths are negative or do not add up to the number of values.

    >>> ragged = RaggedArray(np.arange(5), np.array([2, 0, 3]))
    >>> len(ragged), ragged[2].tolist(), ragged.offsets.tolist()
    (3, [2, 3, 4], [0, 2, 2, 5])
    """

    __slots__ = ("_offsets", "lengths", "values")

    def __init__(self, values: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        if is_masked(values):
            raise BatchError("a RaggedArray cannot contain masked values. Fill them first.")
        self.values: npt.NDArray[Any] = np.asarray(values)
        counts: npt.NDArray[Any] = np.asarray(lengths)
        if counts.size == 0:
            counts = counts.astype(np.int64)
        if not self.values.ndim or counts.ndim != 1 or counts.dtype.kind not in "iu":
            raise BatchError(
                f"a RaggedArray needs flat values and 1-D integer lengths; got {self.values.ndim}-D "
                f"values and {counts.ndim}-D {counts.dtype} lengths."
            )
        self.lengths: Int64Array = counts.astype(np.int64, copy=False)
        if len(counts) and (least := int(np.minimum.reduce(self.lengths))) < 0:
            raise BatchError(f"a length is negative: {least}.")
        if (total := int(np.add.reduce(self.lengths))) != len(self.values):
            raise BatchError(f"the lengths add up to {total}, but there are {len(self.values)} values.")
        self._offsets: Int64Array | None = None

    @classmethod
    def from_rows(cls, rows: Iterable[npt.ArrayLike], dtype: npt.DTypeLike | None = None) -> RaggedArray:
        """Build an array from 1-D rows.

        >>> RaggedArray.from_rows([[1, 2], [], [3]], dtype="int32").values.tolist()
        [1, 2, 3]
        """
        arrays = [np.asarray(row) for row in rows]
        for i, array in enumerate(arrays):
            if array.ndim != 1:
                raise BatchError(f"row {i} has {array.ndim} dimensions; a ragged row has one.")
        filled = [a for a in arrays if a.size]
        values = np.concatenate(filled) if filled else np.empty(0, dtype or np.float64)
        if dtype is not None:
            values = values.astype(dtype, copy=False)
        return cls(values, np.array([len(a) for a in arrays], np.int64))

    def beside(self, values: npt.NDArray[Any]) -> RaggedArray:
        """Return an array of other values with the same row lengths, without checking the lengths again.

        >>> RaggedArray(np.arange(3), np.array([2, 1])).beside(np.array([7, 8, 9]))[1].tolist()
        [9]

        Raises:
            BatchError: the number of values differs.
        """
        if values.shape[:1] != self.values.shape[:1]:
            raise BatchError(
                f"the lengths add up to {len(self.values)}, but the values have shape {list(values.shape)}."
            )
        neighbour = RaggedArray.__new__(RaggedArray)
        neighbour.values, neighbour.lengths, neighbour._offsets = values, self.lengths, self._offsets
        return neighbour

    @property
    def offsets(self) -> Int64Array:
        """The bounds of the rows, int64 `[N + 1]`. Row `i` begins at `offsets[i]` and ends before `offsets[i + 1]`."""
        if self._offsets is None:
            self._offsets = offsets_of(self.lengths)
        return self._offsets

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        n = len(self.lengths)
        if not -n <= row < n:
            raise IndexError(f"there is no row {row} in a RaggedArray of {n} rows")
        row %= n
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"RaggedArray({len(self)} rows, {len(self.values)} values, {self.values.dtype})"

    def take(self, rows: Sequence[int] | Int64Array) -> RaggedArray:
        """Return the rows at these positions, in this order."""
        picked = [self[int(i)] for i in rows]
        lengths = self.lengths[np.asarray(rows, np.int64)]
        values = np.concatenate(picked) if picked else self.values[:0]
        return RaggedArray(values, lengths)

    def to_list(self) -> list[npt.NDArray[Any]]:
        """Return the rows as views of `values`."""
        edges = self.offsets.tolist()
        return [self.values[a:b] for a, b in itertools.pairwise(edges)]


def expand(firsts: Int64Array, counts: Int64Array) -> Int64Array:
    """Turn runs into their members.

    >>> expand(np.array([10, 20]), np.array([2, 3])).tolist()
    [10, 11, 20, 21, 22]
    """
    if len(firsts) == 1:
        return int(firsts[0]) + np.arange(counts[0], dtype=np.int64)
    firsts, counts = firsts[counts > 0], counts[counts > 0]
    steps = np.ones(int(counts.sum()), np.int64)
    if len(firsts):
        steps[0] = firsts[0]
        steps[np.cumsum(counts)[:-1]] = firsts[1:] - (firsts + counts)[:-1] + 1
    return np.cumsum(steps, out=steps)  # in place: needs no memory beyond that of the ids
