"""Arithmetic, comparisons and totals of numbers in conditions: exact for integers, IEEE float64 for the rest.

Numbers are arrays `[n]` of any width, or Python's. Integers are computed in int64 where the bounds of the operands show
that the outcome fits, else as Python's, element by element: slower, and never wrapped. A row whose divisor is 0 has no
value (NaN).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trajectory_store.ragged import RaggedArray

Array = npt.NDArray[Any]
Numbers = Array | float
"""Values of a column, `[n]`, or one Python number: bool, int or float."""
_INT64: Final = np.iinfo(np.int64)
_EXACT: Final = 1 << 53
"""Integers up to this size are represented exactly as float64."""


def _is_float(numbers: Numbers) -> bool:
    return isinstance(numbers, (float, np.floating)) or (isinstance(numbers, np.ndarray) and numbers.dtype.kind == "f")


def _is_python(numbers: Numbers) -> bool:
    """Return whether these are Python's numbers, in an array: integers of any size, and NaN."""
    return isinstance(numbers, np.ndarray) and numbers.dtype == object


def _bounds(numbers: Numbers) -> tuple[int, int]:
    """Return the smallest and the largest of some integers."""
    if not isinstance(numbers, np.ndarray):
        return int(numbers), int(numbers)
    return (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)


def _as_floats(numbers: Numbers) -> Any:
    return numbers.astype(np.float64) if isinstance(numbers, np.ndarray) else float(numbers)


def _as_python(numbers: Numbers) -> Any:
    return np.asarray(numbers).astype(object)


def _as_int64(numbers: Numbers) -> Any:
    return np.asarray(numbers).astype(np.int64)


def _fit(*integers: Numbers) -> bool:
    """Return whether integers are int64s."""
    bounds = [bound for numbers in integers for bound in _bounds(numbers)]
    return _INT64.min <= min(bounds) and max(bounds) <= _INT64.max


def _ring(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a sum, difference or product whose integers never wrap: it is monotonic, so its bounds suffice."""

    def applied(left: Numbers, right: Numbers) -> Any:
        if _is_python(left) or _is_python(right):
            return apply(_as_python(left), _as_python(right))
        if _is_float(left) or _is_float(right):
            return apply(_as_floats(left), _as_floats(right))
        reached = (apply(a, b) for a in _bounds(left) for b in _bounds(right))
        wide = _as_int64 if _fit(left, right, *reached) else _as_python
        return apply(wide(left), wide(right))

    return applied


add: Final = _ring(operator.add)
subtract: Final = _ring(operator.sub)
multiply: Final = _ring(operator.mul)


def negate(numbers: Numbers) -> Any:
    """Return numbers with the opposite sign.

    >>> negate(np.array([-128], np.int8)).tolist()
    [128]
    """
    return subtract(0, numbers) if not _is_float(numbers) else -_as_floats(numbers)


def divide(left: Numbers, right: Numbers) -> Any:
    """Return quotients as floats, rounded once."""
    floats = _is_float(left) or _is_float(right)
    if _is_python(left) or _is_python(right) or not (floats or (_is_small(left) and _is_small(right))):
        wide = _as_python
    else:
        wide = _as_floats
    return _but_by_zero(np.true_divide, wide(left), wide(right))


def modulo(left: Numbers, right: Numbers) -> Any:
    """Return remainders with the sign of the divisor, as Python's `%`.

    >>> modulo(np.array([-7, 7]), np.array([3, 0])).tolist()
    [2, nan]
    """
    if _is_python(left) or _is_python(right):
        wide = _as_python
    elif _is_float(left) or _is_float(right):
        wide = _as_floats
    else:
        wide = _as_int64 if _fit(left, right) and np.all(right) else _as_python
    return _but_by_zero(np.mod, wide(left), wide(right))


def _is_small(numbers: Numbers) -> bool:
    low, high = _bounds(numbers)
    return low >= -_EXACT and high <= _EXACT


def _but_by_zero(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Apply a division; a row whose divisor is 0 has no value."""
    zero = np.equal(right, 0)
    return np.where(zero, np.nan, function(left, np.where(zero, 1, right))) if np.any(zero) else function(left, right)


# Comparisons


def compare(how: Callable[[Any, Any], Any], left: Numbers, right: Numbers) -> npt.NDArray[np.bool_]:
    """Compare numbers exactly, whatever their types.

    A decimal beside values of float16 or float32 is the value that prints like it: 0.1 is no float32, and yet what
    people write to find the rows whose float32 is shown as 0.1.

    >>> compare(operator.eq, np.array([2**53 + 1]), 2.0**53).tolist()
    [False]
    >>> compare(operator.eq, np.float32([0.1]), 0.1).tolist()
    [True]
    """
    left, right = _as_printed(left, right), _as_printed(right, left)
    if _is_python(left) or _is_python(right) or _is_float(left) == _is_float(right):
        return np.asarray(how(_in_full(left, right), _in_full(right, left)), np.bool_)
    if isinstance(left, float) or isinstance(right, float):
        return np.asarray(how(_beside_integers(left), _beside_integers(right)), np.bool_)
    order, unordered = _order(left, right) if _is_float(right) else _order(right, left)
    return np.where(unordered, how is operator.ne, how(order, 0) if _is_float(right) else how(0, order))


def _beside_integers(number: Numbers) -> Any:
    """Return a float as the integer that it is; one between integers is in the order of its rounded neighbours too."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _as_printed(number: Numbers, beside: Numbers) -> Any:
    if isinstance(number, float) and isinstance(beside, np.ndarray) and beside.dtype.name in ("float16", "float32"):
        narrow = beside.dtype.type(number)
        if float(str(narrow)) == number:
            return narrow
    return number


def _in_full(number: Numbers, beside: Numbers) -> Any:
    """Return a number in a form that NumPy compares exactly, without rounding it to the type of the array."""
    if _is_python(beside):
        return np.asarray(number).astype(object)
    return np.float64(number) if type(number) is float else number


def _order(integers: Numbers, floats: Numbers) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.bool_]]:
    """Return -1, 0 or 1 where an integer is below, equal to or above a float, and where that is NaN.

    Rounding an integer to a float keeps the order with every float that it does not meet; where it meets one, both are
    integers.
    """
    whole, rounded, floats = np.asarray(integers), np.asarray(_as_floats(integers)), np.asarray(_as_floats(floats))
    order = (rounded > floats).astype(np.int8) - (rounded < floats).astype(np.int8)
    met = (rounded == floats) & (np.abs(rounded) >= _EXACT)
    if met.any():
        pairs = zip(*(np.broadcast_to(side, met.shape)[met].tolist() for side in (whole, floats)), strict=True)
        order = np.array(order)
        order[met] = [(a > b) - (a < b) for a, b in pairs]
    return order, np.isnan(floats)


def is_nan(numbers: Numbers) -> npt.NDArray[np.bool_]:
    """Return which numbers are NaN."""
    return np.asarray(numbers != numbers, np.bool_)


def is_in(numbers: Numbers, values: Sequence[Any]) -> npt.NDArray[np.bool_]:
    """Return which numbers are equal to one of some values."""
    if isinstance(numbers, np.ndarray) and numbers.dtype.kind in "iu":
        limits = np.iinfo(numbers.dtype)
        fitting = [int(value) for value in values if isinstance(value, int) and limits.min <= value <= limits.max]
        values = [value for value in values if not isinstance(value, int)]
        mask = np.isin(numbers, np.array(fitting, numbers.dtype))
    else:
        mask = np.zeros(np.shape(numbers), np.bool_)
    for value in values:
        mask = mask | compare(operator.eq, numbers, value)
    return mask


# Figures of the elements of each row


def _reduced(reduce: np.ufunc, values: Array, lengths: npt.NDArray[np.int64], empty: Any) -> Array:
    out = np.full(len(lengths), empty, values.dtype)
    filled = lengths > 0
    starts = (np.cumsum(lengths) - lengths)[filled]
    if len(starts):
        out[filled] = reduce.reduceat(values, starts)
    return out


def total(rows: RaggedArray) -> Array:
    """Return the sum of each row, ignoring NaN; 0 for an empty row."""
    values, lengths = _without_nan(rows)
    if values.dtype.kind == "f":
        return _reduced(np.add, values.astype(np.float64, copy=False), lengths, 0.0)
    longest = int(lengths.max(initial=0))
    fits = _fit(*(bound * longest for bound in _bounds(values)))
    return _reduced(np.add, values.astype(np.int64 if fits else object, copy=False), lengths, 0)


def _extreme(reduce: np.ufunc) -> Callable[[RaggedArray], Array]:
    def extreme(rows: RaggedArray) -> Array:
        values, lengths = _without_nan(rows)
        if values.dtype.kind != "f" and not lengths.all():
            values = values.astype(np.float64 if _is_small(values) else object)
        return _reduced(reduce, values, lengths, math.nan if values.dtype.kind in "fO" else 0)

    return extreme


smallest: Final = _extreme(np.minimum)
"""The smallest element of each row, ignoring NaN; NaN for an empty row."""
largest: Final = _extreme(np.maximum)
"""The largest element of each row, ignoring NaN; NaN for an empty row."""


def mean(rows: RaggedArray) -> Array:
    """Return the mean of each row, ignoring NaN; NaN for an empty row."""
    return divide(total(rows), _without_nan(rows)[1])


def _without_nan(rows: RaggedArray) -> tuple[Array, npt.NDArray[np.int64]]:
    """Return the elements that are not NaN, and their number per row; an element with a shape is several."""
    values, lengths = rows.values, rows.lengths
    if values.ndim > 1:
        lengths = lengths * int(np.prod(values.shape[1:]))
        values = values.reshape(-1)
    if values.dtype.kind == "f" and bool((unknown := np.isnan(values)).any()):
        before = np.zeros(len(values) + 1, np.int64)
        np.cumsum(~unknown, out=before[1:])
        edges = np.concatenate(([0], np.cumsum(lengths)))
        return values[~unknown], np.diff(before[edges])
    return values, lengths
