"""The one language of conditions: `task_reward >= 0.5 and policy_version < 100`; in a shell, `finish_reason=stop`."""

from __future__ import annotations

import ast
import datetime
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import SchemaError, StoreError, UnknownColumnError
from trajectory_store.ragged import RaggedArray
from trajectory_store.texts import Texts

Mask = npt.NDArray[Any]
Operand = Mask | Texts

_EXAMPLE: Final = "Write for example 'task_reward >= 0.5 and policy_version < 100', or 'finish_reason=stop'."
_SHORT: Final = re.compile(r"\s*([A-Za-z][\w./-]*)\s*(>=|<=|==|!=|>|<|=|~)\s*(.+?)\s*\Z", re.DOTALL)
"""One column, an operator and a value as it stands: what a shell is given without quotes inside."""
_RANGE: Final = re.compile(r"(?=.*[^.])(-?[\w.:+-]*?)\.\.(-?[\w.:+-]*)\Z")
_DATE: Final = re.compile(r"(?<![\w.'\"-])\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?(?![\w.'\"-])")
_QUOTED: Final = re.compile(r"('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
_WORDS: Final[dict[str, Any]] = {"nan": math.nan, "true": True, "false": False, "null": None, "none": None}


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Where a condition finds what it names.

    Attributes:
        read: the values `[n]` of a column, or its texts; an UnknownColumnError if there is none of the name.
        lengths: the lengths `[n]` of a column: characters of text, elements of a ragged one.
        ragged: a ragged column of numbers.
        missing: which rows, `[n]` bool, have no value in a column.
    """

    read: Callable[[str], Operand]
    lengths: Callable[[str], Mask]
    ragged: Callable[[str], RaggedArray]
    missing: Callable[[str], Mask]


@dataclass(frozen=True)
class _Word:
    """A name that is no column: a text without quotes, if it is compared with one."""

    name: str
    error: UnknownColumnError


def names_in(condition: str) -> set[str]:
    """Return the names in a condition, columns among them; empty if it cannot be read."""
    if not isinstance(condition, str):  # pyright: ignore[reportUnnecessaryIsInstance] - `evaluate` refuses it
        return set()
    short = _SHORT.match(condition)
    found = {short[1]} if short else set[str]()
    try:
        tree = ast.parse(_with_dates_quoted(condition), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    return found | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def evaluate(condition: str, source: Operands) -> npt.NDArray[np.bool_]:
    """Evaluate a condition for all rows at once.

    An expression is comparisons of columns, numbers and texts, joined by `and`, `or`, `not`; `in (1, 2)`; `+ - * / %`;
    `column is None`; `isnan(column)`; `len(column)`, and of a ragged column of numbers `sum`, `min`, `max` and `mean`
    of a row, without its NaN; of a text `'part' in column`, `column.startswith('x')`, `column.endswith('x')`. A row has
    no value, so that it `is None`, where none was given, or it is NaN or an empty text.

    The short form is one column, `>= <= == = != > < ~` and a value as it stands: `finish_reason=stop`. `~` asks whether
    a text contains another, ASCII letters of either case; `0.2..0.8` is a range, either end of which may be left out.

    In both, a date is `2026-01-31` or `2026-01-31T12:00`, UTC; `nan`, `null`, `true` and `false` are values.

    Args:
        condition: an expression, or the short form.
        source: the columns.

    Returns:
        `[n]` bool.

    Raises:
        SchemaError: the condition cannot be read.
    """
    if not isinstance(condition, str):  # pyright: ignore[reportUnnecessaryIsInstance] - a caller's mistake
        raise SchemaError(f"a condition is text, got {type(condition).__name__}. {_EXAMPLE}")
    try:
        found: Any = np.asarray(_meets(condition, source))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, StoreError):
            raise  # damage is one of these, and no fault of the condition
        raise SchemaError(f"the condition {condition!r} cannot be evaluated: {error}. {_EXAMPLE}") from None
    if found.dtype != np.bool_:
        raise SchemaError(f"the condition {condition!r} is a value, not a comparison. {_EXAMPLE}")
    return found


def _meets(condition: str, source: Operands) -> Any:
    short = _SHORT.match(condition)
    if short is not None and short[2] in ("=", "~"):
        return _Short(condition, short[1], short[2], short[3], source).meets()
    try:
        tree = ast.parse(_with_dates_quoted(condition), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if short is not None and not short[3].startswith((">", "<", "=")):
            return _Short(condition, short[1], short[2], short[3], source).meets()
        raise SchemaError(f"the condition {condition!r} cannot be read: {error}. {_EXAMPLE}") from None
    if short is not None and (_RANGE.match(short[3]) or _is_one_name(short[1], source)):
        return _Short(condition, short[1], short[2], short[3], source).meets()
    return _Expression(condition, source).value(tree)


def _is_one_name(name: str, source: Operands) -> bool:
    """Return whether a name such as `my-column`, which Python reads as a difference, is that of a column."""
    if name.isidentifier():
        return False
    try:
        source.read(name)
    except UnknownColumnError:
        return False
    return True


def _with_dates_quoted(condition: str) -> str:
    """Put bare dates in quotes: Python reads them as differences."""
    parts = _QUOTED.split(condition)
    return "".join(part if i % 2 else _DATE.sub(lambda found: repr(found[0]), part) for i, part in enumerate(parts))


def seconds_of(moment: str | datetime.datetime) -> float:
    """Return seconds since 1970 of a date or a date and time, UTC where it does not say; a ValueError if it is none."""
    found = datetime.datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return (found if found.tzinfo else found.replace(tzinfo=datetime.UTC)).timestamp()


# Comparisons, which both forms share


def _is_in(left: Any, right: Any) -> Any:
    """`value in column` searches each text; `column in (values)` compares with each value."""
    if isinstance(right, Texts):
        return right.contains(_plain(left))
    if not isinstance(right, list):
        raise SchemaError("what follows 'in' is a list of values, such as (1, 2), or a column of text.")
    values = cast("list[Any]", right)
    if isinstance(left, Texts):
        return left.is_in([part.name if isinstance(part, _Word) else part for part in values])
    return np.isin(left, np.asarray([_plain(part) for part in values]))


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a comparison of numbers, or of texts in the order of their characters."""

    def compared(left: Any, right: Any) -> Any:
        left, right = _alike(left, right), _alike(right, left)
        if isinstance(left, Texts) and compare in (operator.eq, operator.ne):
            return compare(left, right)
        if isinstance(right, Texts) and compare in (operator.eq, operator.ne):
            return compare(right, left)
        if _is_nan(left) or _is_nan(right):
            if compare not in (operator.eq, operator.ne):
                raise SchemaError("nan is compared by == and != only.")
            same: Any = np.isnan(cast("Mask", right if _is_nan(left) else left))
            return same if compare is operator.eq else ~same
        plain = [np.array(side.to_list(), object) if isinstance(side, Texts) else side for side in (left, right)]
        return compare(*plain)

    return compared


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value


def _plain(value: Any) -> Any:
    """Return an operand; a word that is no column is an error."""
    if isinstance(value, _Word):
        raise value.error
    return value


def _alike(value: Any, other: Any) -> Any:
    """Return an operand in the kind of the one that it is compared with: a word as text, a date as seconds."""
    if isinstance(value, _Word):
        if isinstance(other, Texts):
            return value.name.encode() if other.kind is bytes else value.name
        raise UnknownColumnError(f"'{value.name}' is not a number, a date or a column: {value.error}")
    if isinstance(value, str) and isinstance(other, Texts) and other.kind is bytes:
        return value.encode()
    if isinstance(value, str) and isinstance(other, np.ndarray):
        try:
            return seconds_of(value)
        except ValueError:
            raise SchemaError(f"{value!r} is not a number or a date, and is compared with numbers.") from None
    return value


_COMPARE: Final[dict[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Lt: _compared(operator.lt),
    ast.LtE: _compared(operator.le),
    ast.Gt: _compared(operator.gt),
    ast.GtE: _compared(operator.ge),
    ast.Eq: _compared(operator.eq),
    ast.NotEq: _compared(operator.ne),
    ast.In: _is_in,
    ast.NotIn: lambda a, b: ~_is_in(a, b),
}
_SIGNS: Final = {
    "<": _COMPARE[ast.Lt],
    "<=": _COMPARE[ast.LtE],
    ">": _COMPARE[ast.Gt],
    ">=": _COMPARE[ast.GtE],
    "==": _COMPARE[ast.Eq],
    "=": _COMPARE[ast.Eq],
    "!=": _COMPARE[ast.NotEq],
}
_ARITHMETIC: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b,
    ast.Mod: operator.mod,
}


# The short form


@dataclass(frozen=True)
class _Short:
    condition: str
    name: str
    sign: str
    text: str
    source: Operands

    def meets(self) -> Mask:
        operand, text = self.source.read(self.name), self.text
        if self.sign == "~":
            wanted = _unquoted(text)
            if not isinstance(operand, Texts) or not wanted:
                raise self._refused("~ looks for a text in a column of text.")
            return operand.contains(wanted.encode() if operand.kind is bytes else wanted, any_case=True)
        if text.lower() in ("null", "none"):
            return self._same_or_not(self.source.missing(self.name), "null")
        if isinstance(operand, Texts):
            return _SIGNS[self.sign](operand, _unquoted(text))
        ends = _RANGE.match(text)
        if ends is None:
            value = self._number(_unquoted(text))
            if value != value and self.sign not in ("==", "=", "!="):
                raise self._refused("nan is compared by == and != only.")
            return _SIGNS[self.sign](operand, value)
        low, high = (self._number(end) if end else None for end in ends.groups())
        inside = np.ones(len(operand), bool) if low is None else operand >= low
        return self._same_or_not(inside if high is None else inside & (operand <= high), "a range")

    def _same_or_not(self, same: Mask, what: str) -> Mask:
        if self.sign not in ("==", "=", "!="):
            raise self._refused(f"{what} is compared by == and != only.")
        return ~same if self.sign == "!=" else same

    def _number(self, text: str) -> float | int | bool:
        if text.lower() in ("true", "false", "nan"):
            return _WORDS[text.lower()]
        for kind in (int, float, seconds_of):
            try:
                return kind(text)
            except ValueError:
                continue
        if text.startswith((">", "<", "=")):
            raise self._refused("an operator is one of >= <= == != > < ~, for example >=.")
        raise self._refused(f"{text!r} is not a number or date.")

    def _refused(self, why: str) -> SchemaError:
        return SchemaError(f"the condition {self.condition!r}: {why}")


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


# Expressions


@dataclass(frozen=True)
class _Expression:
    condition: str
    source: Operands

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=None):
                return None
            case ast.Constant(value=bool() | int() | float() | str() | bytes() as value):
                return value
            case ast.Name(id=name):
                return self._named(name)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return [self.value(part) for part in parts]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -_plain(self.value(operand))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self._boolean(operand)
            case ast.BoolOp(op=op, values=values):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                return join.reduce([self._boolean(value) for value in values])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](_plain(self.value(left)), _plain(self.value(right)))
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [left, *others]
                return np.logical_and.reduce(
                    [self._compare(a, op, b) for op, a, b in zip(ops, sides[:-1], sides[1:], strict=True)]
                )
            case ast.Call(func=ast.Name(id=function), args=[argument], keywords=[]):
                return self._called(node, function, argument)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="startswith" | "endswith" as how),
                args=[argument],
                keywords=[],
            ):
                texts, part = self.source.read(name), self.value(argument)
                if not isinstance(texts, Texts):
                    raise SchemaError(f"{name}.{how} is for a column of text, and '{name}' is none. {_EXAMPLE}")
                return texts.startswith(part) if how == "startswith" else texts.endswith(part)
            case _:
                raise self._not_allowed(node)

    def _named(self, name: str) -> Any:
        try:
            return self.source.read(name)
        except UnknownColumnError as error:
            return _WORDS[name.lower()] if name.lower() in _WORDS else _Word(name, error)

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
        for side, other in ((left, right), (right, left)):
            if self._is_none(side):
                if not isinstance(other, ast.Name) or not isinstance(op, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)):
                    raise SchemaError(
                        f"the condition {self.condition!r}: null is compared by == and != only, and with a column: "
                        "'column is None'."
                    )
                missing = self.source.missing(other.id)
                return missing if isinstance(op, (ast.Is, ast.Eq)) else ~missing
        if type(op) not in _COMPARE:
            raise SchemaError(f"the condition {self.condition!r}: 'is' is for None; write ==. {_EXAMPLE}")
        return _COMPARE[type(op)](self.value(left), self.value(right))

    def _is_none(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id.lower() in ("null", "none") and self._named(node.id) is None
        return isinstance(node, ast.Constant) and node.value is None

    def _called(self, node: ast.expr, function: str, argument: ast.expr) -> Any:
        if function == "isnan":
            return np.isnan(_plain(self.value(argument)))
        if function not in ("len", *_AGGREGATES) or not isinstance(argument, ast.Name):
            raise self._not_allowed(node)
        if function == "len":
            return self.source.lengths(argument.id)
        return _AGGREGATES[function](self.source.ragged(argument.id))

    def _boolean(self, node: ast.expr) -> npt.NDArray[np.bool_]:
        found: Any = np.asarray(_plain(self.value(node)))
        if found.dtype != np.bool_:
            part = ast.get_source_segment(self.condition, node) or self.condition
            raise SchemaError(f"{part!r} in the condition {self.condition!r} is a value, not a comparison. {_EXAMPLE}")
        return found

    def _not_allowed(self, node: ast.expr) -> SchemaError:
        part = ast.get_source_segment(self.condition, node) or self.condition
        return SchemaError(f"{part!r} is not allowed in the condition {self.condition!r}. {_EXAMPLE}")


# Aggregates of the elements of each row


def _reduced(reduce: np.ufunc, empty: float) -> Callable[[RaggedArray], Mask]:
    def reduced(rows: RaggedArray) -> Mask:
        values, lengths = _known(rows)
        if values.dtype.kind == "f" or (reduce is not np.add and not lengths.all()):
            values = values.astype(np.float64, copy=False)
        elif reduce is np.add:
            values = values.astype(np.uint64 if values.dtype.kind == "u" else np.int64, copy=False)
        out = np.full(len(lengths), empty if values.dtype.kind == "f" else 0, values.dtype)
        filled = lengths > 0
        starts = (np.cumsum(lengths) - lengths)[filled]
        if len(starts):
            out[filled] = reduce.reduceat(values, starts)
        return out

    return reduced


def _known(rows: RaggedArray) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Return the elements that are no NaN, and how many there are of each row; one with a shape is several."""
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


def _mean(rows: RaggedArray) -> Mask:
    sums, (_, counts) = _SUM(rows), _known(rows)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


_SUM: Final = _reduced(np.add, 0.0)
_AGGREGATES: Final[dict[str, Callable[[RaggedArray], Mask]]] = {
    "sum": _SUM,
    "min": _reduced(np.minimum, math.nan),
    "max": _reduced(np.maximum, math.nan),
    "mean": _mean,
}
