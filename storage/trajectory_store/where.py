"""The one language of conditions: `task_reward >= 0.5 and policy_version < 100`; in a shell, `finish_reason=stop`."""

from __future__ import annotations

import ast
import datetime
import functools
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from trajectory_store import arithmetic
from trajectory_store.errors import SchemaError, StoreError, UnknownColumnError
from trajectory_store.ragged import RaggedArray
from trajectory_store.texts import Texts

Mask = npt.NDArray[Any]
Operand = Mask | Texts

_EXAMPLE: Final = "Write, for example, 'task_reward >= 0.5 and policy_version < 100' or 'finish_reason=stop'."
_SHORT: Final = re.compile(r"\s*([A-Za-z][\w./-]*)\s*(>=|<=|==|!=|>|<|=|~)\s*(.+?)\s*\Z", re.DOTALL)
"""One column, an operator and an unquoted value: the form for a shell, without inner quotes."""
_RANGE: Final = re.compile(r"(?=.*[^.])(-?[\w.:+-]*?)\.\.(-?[\w.:+-]*)\Z")
_DATE: Final = re.compile(r"(?<![\w.'\"-])\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?(?![\w.'\"-])")
_QUOTED: Final = re.compile(r"('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
_WORDS: Final[dict[str, Any]] = {"nan": math.nan, "true": True, "false": False, "null": None, "none": None}


@dataclass(frozen=True, kw_only=True)
class Operands:
    """The source of the values that a condition refers to.

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


class _Written(ast.Constant):
    """The value of the short form, as written: a text, a number, a date or a range, as the column needs."""


@dataclass(frozen=True)
class _Word:
    """A text without quotes: the value of the short form, or a name that is not a column."""

    text: str
    error: UnknownColumnError | None = None


def names_in(condition: str) -> frozenset[str]:
    """Return the names in a condition, columns among them; empty if it cannot be read."""
    if not isinstance(condition, str):  # pyright: ignore[reportUnnecessaryIsInstance] - `evaluate` rejects it
        return frozenset()
    return _names_in(condition)


@functools.lru_cache(maxsize=256)
def _names_in(condition: str) -> frozenset[str]:
    short = _SHORT.match(condition)
    names = frozenset([short[1]] if short else [])
    try:
        tree = _tree_of(condition)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return names
    return names.union(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


@functools.lru_cache(maxsize=256)
def _tree_of(condition: str) -> ast.expr:
    """Return the expression of a condition; parsing takes longer than comparing some thousand rows."""
    return ast.parse(_with_dates_quoted(condition), mode="eval").body


def evaluate(condition: str, source: Operands) -> npt.NDArray[np.bool_]:
    """Evaluate a condition for all rows at once.

    An expression is comparisons of columns, numbers and texts, joined by `and`, `or`, `not`; `in (1, 2)`; `+ - * / %`;
    `column is None`; `isnan(column)`; `len(column)`, and of a ragged column of numbers `sum`, `min`, `max` and `mean`
    of a row, ignoring NaN; of a text `'part' in column`, `column.startswith('x')`, `column.endswith('x')`, and
    `column.contains('x')`, which takes ASCII letters of either case. A row has no value, so that it `is None`, where
    none was given, or it is NaN or an empty text.

    Integers are computed and compared exactly, whatever the types of the columns; floats as float64. A decimal beside
    a column of float16 or float32 is the value that prints like it, so `temperature == 0.7` finds what is shown as 0.7.
    A row whose divisor is 0 has no value.

    The short form represents one comparison: a column, `>= <= == = != > < ~` and the value without quotes:
    `finish_reason=stop`. `~` is `contains`; `0.2..0.8` is a range, and either end may be omitted.

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
        raise SchemaError(f"a condition must be text, got {type(condition).__name__}. {_EXAMPLE}")
    try:
        with np.errstate(all="ignore"):
            mask: Any = np.asarray(_Expression(condition, source).value(_parsed(condition, source)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, StoreError):
            raise  # damage is one of these, and no fault of the condition
        raise SchemaError(f"the condition {condition!r} cannot be evaluated: {error}. {_EXAMPLE}") from None
    if mask.dtype != np.bool_:
        raise SchemaError(f"the condition {condition!r} is a value, not a comparison. {_EXAMPLE}")
    return mask


def _parsed(condition: str, source: Operands) -> ast.expr:
    """Return the expression that a condition is; the short form is one comparison."""
    short_form = _SHORT.match(condition)
    short = None if short_form is None else _comparison(*short_form.groups())
    if short_form is not None and short is not None and short_form[2] in ("=", "~"):
        return short
    try:
        tree = _tree_of(condition)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if short_form is not None and short is not None and not short_form[3].startswith((">", "<", "=")):
            return short
        raise SchemaError(f"the condition {condition!r} cannot be read: {error}. {_EXAMPLE}") from None
    if (
        short_form is not None
        and short is not None
        and (_RANGE.match(short_form[3]) or _is_one_name(short_form[1], source))
    ):
        return short
    return tree


def _comparison(name: str, sign: str, text: str) -> ast.expr:
    """Return the comparison that the short form represents; `~` is `contains`."""
    column, literal = ast.Name(name), _Written(text)
    if sign == "~":
        return ast.Call(ast.Attribute(column, "contains"), [literal], [])
    return ast.Compare(column, [_SIGNS[sign]()], [literal])


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
    return "".join(part if i % 2 else _DATE.sub(lambda date: repr(date[0]), part) for i, part in enumerate(parts))


def seconds_of(moment: str | datetime.datetime) -> float:
    """Return seconds since 1970 of a date or a date and time, UTC without a time zone; a ValueError for other text."""
    time = datetime.datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()


# Comparisons


def _is_in(left: Any, right: Any) -> Any:
    """`value in column` searches each text; `column in (values)` compares with each value."""
    if isinstance(right, Texts):
        return right.contains(_plain(left))
    if not isinstance(right, list):
        raise SchemaError("'in' must be followed by a list of values, such as (1, 2), or a text column.")
    values = [_alike(value, left) for value in cast("list[Any]", right)]
    return left.is_in(values) if isinstance(left, Texts) else arithmetic.is_in(_plain(left), values)


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a comparison of numbers, or of texts in the order of their characters."""

    def compared(left: Any, right: Any) -> Any:
        if isinstance(right, _Word) and isinstance(left, np.ndarray) and (ends := _RANGE.match(right.text)):
            return within(left, *ends.groups())
        left, right = _alike(left, right), _alike(right, left)
        if isinstance(left, Texts) or isinstance(right, Texts):
            return of_texts(left, right)
        if isinstance(left, (str, bytes)) or isinstance(right, (str, bytes)):
            return compare(left, right)
        if not (_is_nan(left) or _is_nan(right)):
            return arithmetic.compare(compare, left, right)
        same = arithmetic.is_nan(right if _is_nan(left) else left)
        return same_or_not(same, "nan")

    def of_texts(left: Any, right: Any) -> Any:
        if compare in (operator.eq, operator.ne):
            return compare(left, right) if isinstance(left, Texts) else compare(right, left)
        return compare(
            *(np.array(side.to_list(), object) if isinstance(side, Texts) else side for side in (left, right))
        )

    def within(values: Any, low: str, high: str) -> Any:
        inside = np.ones(len(values), bool)
        for end, side in ((low, operator.ge), (high, operator.le)):
            if end:
                inside &= arithmetic.compare(side, values, _number(end))
        return same_or_not(inside, "a range")

    def same_or_not(same: Any, what: str) -> Any:
        if compare not in (operator.eq, operator.ne):
            raise SchemaError(f"{what} can only be compared using == or !=.")
        return same if compare is operator.eq else ~same

    return compared


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value


def _plain(value: Any) -> Any:
    """Return an operand; a word that is not a column is an error."""
    if isinstance(value, _Word) and value.error is not None:
        raise value.error
    return value


def _alike(value: Any, compared_with: Any) -> Any:
    """Return an operand in the kind of the one that it is compared with: a word as text, a date as seconds."""
    if isinstance(compared_with, Texts):
        text = _unquoted(value.text) if isinstance(value, _Word) else value
        return text.encode() if isinstance(text, str) and compared_with.kind is bytes else text
    if isinstance(value, _Word):
        try:
            return _number(_unquoted(value.text))
        except SchemaError:
            if value.error is None:
                raise
        raise UnknownColumnError(f"'{value.text}' is not a number, a date or a column. {value.error}")
    if isinstance(value, str) and isinstance(compared_with, np.ndarray):
        try:
            return seconds_of(value)
        except ValueError:
            raise SchemaError(f"{value!r} is compared with numbers, but is not a number or a date.") from None
    return value


def _number(text: str) -> float | int | bool:
    if text.lower() in ("true", "false", "nan"):
        return _WORDS[text.lower()]
    for kind in (int, float, seconds_of):
        try:
            return kind(text)
        except ValueError:
            continue
    if text.startswith((">", "<", "=")):
        raise SchemaError("the operator must be >=, <=, ==, !=, >, < or ~ (for example, >= and not =>).")
    raise SchemaError(f"{text!r} is not a number or a date.")


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


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
_SIGNS: Final[dict[str, type[ast.cmpop]]] = {
    "<": ast.Lt,
    "<=": ast.LtE,
    ">": ast.Gt,
    ">=": ast.GtE,
    "==": ast.Eq,
    "=": ast.Eq,
    "!=": ast.NotEq,
}
_ARITHMETIC: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: arithmetic.add,
    ast.Sub: arithmetic.subtract,
    ast.Mult: arithmetic.multiply,
    ast.Div: arithmetic.divide,
    ast.Mod: arithmetic.modulo,
}
_FIGURES: Final[dict[str, Callable[[RaggedArray], Mask]]] = {
    "sum": arithmetic.total,
    "min": arithmetic.smallest,
    "max": arithmetic.largest,
    "mean": arithmetic.mean,
}


# Expressions


def _of_numbers(operand: Any) -> Any:
    """Return an operand of arithmetic; texts have none."""
    if isinstance(_plain(operand), (Texts, str, bytes, list)):
        raise SchemaError(f"arithmetic requires numbers. {_EXAMPLE}")
    return operand


@dataclass(frozen=True)
class _Expression:
    condition: str
    source: Operands

    def value(self, node: ast.expr) -> Any:
        match node:
            case _Written(value=str() as text):
                return _Word(text)
            case ast.Constant(value=None):
                return None
            case ast.Constant(value=bool() | int() | float() | str() | bytes() as value):
                return value
            case ast.Name(id=name):
                return self._operand(name)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return [self.value(part) for part in parts]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return arithmetic.negate(_of_numbers(self.value(operand)))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self._boolean(operand)
            case ast.BoolOp(op=op, values=values):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                return join.reduce([self._boolean(value) for value in values])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _ARITHMETIC[type(op)](_of_numbers(self.value(left)), _of_numbers(self.value(right)))
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [left, *others]
                return np.logical_and.reduce(
                    [self._compare(a, op, b) for op, a, b in zip(ops, sides[:-1], sides[1:], strict=True)]
                )
            case ast.Call(func=ast.Name(id=function), args=[argument], keywords=[]):
                return self._call(node, function, argument)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="startswith" | "endswith" | "contains" as how),
                args=[argument],
                keywords=[],
            ):
                return self._searched(name, how, self.value(argument))
            case _:
                raise self._not_allowed(node)

    def _searched(self, name: str, how: str, part: Any) -> Any:
        texts = self.source.read(name)
        if how == "contains":
            if not isinstance(texts, Texts) or not (sought := _alike(part, texts)):
                raise SchemaError(
                    f"the condition {self.condition!r}: ~ searches for text, so it requires a text column."
                )
            return texts.contains(sought, any_case=True)
        if not isinstance(texts, Texts):
            raise SchemaError(f"{name}.{how} requires a text column, but '{name}' is not one. {_EXAMPLE}")
        return texts.startswith(part) if how == "startswith" else texts.endswith(part)

    def _operand(self, name: str) -> Any:
        try:
            return self.source.read(name)
        except UnknownColumnError as error:
            return _WORDS[name.lower()] if name.lower() in _WORDS else _Word(name, error)

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
        for side, opposite in ((left, right), (right, left)):
            if self._is_none(side):
                if not isinstance(opposite, ast.Name) or not isinstance(op, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)):
                    raise SchemaError(
                        f"the condition {self.condition!r}: None can only be compared with a column, using 'is', 'is "
                        "not', == or !=, for example 'column is None'."
                    )
                missing = self.source.missing(opposite.id)
                return missing if isinstance(op, (ast.Is, ast.Eq)) else ~missing
        if type(op) not in _COMPARE:
            raise SchemaError(
                f"the condition {self.condition!r}: 'is' can only be used with None; otherwise, use ==. {_EXAMPLE}"
            )
        return _COMPARE[type(op)](self.value(left), self.value(right))

    def _is_none(self, node: ast.expr) -> bool:
        if isinstance(node, _Written):
            return str(node.value).lower() in ("null", "none")
        if isinstance(node, ast.Name):
            return node.id.lower() in ("null", "none") and self._operand(node.id) is None
        return isinstance(node, ast.Constant) and node.value is None

    def _call(self, node: ast.expr, function: str, argument: ast.expr) -> Any:
        if function == "isnan":
            return arithmetic.is_nan(_of_numbers(self.value(argument)))
        if function not in ("len", *_FIGURES) or not isinstance(argument, ast.Name):
            raise self._not_allowed(node)
        if function == "len":
            return self.source.lengths(argument.id)
        return _FIGURES[function](self.source.ragged(argument.id))

    def _boolean(self, node: ast.expr) -> npt.NDArray[np.bool_]:
        mask: Any = np.asarray(_plain(self.value(node)))
        if mask.dtype != np.bool_:
            part = ast.get_source_segment(self.condition, node) or self.condition
            raise SchemaError(f"{part!r} in the condition {self.condition!r} is a value, not a comparison. {_EXAMPLE}")
        return mask

    def _not_allowed(self, node: ast.expr) -> SchemaError:
        part = ast.get_source_segment(self.condition, node) or self.condition
        return SchemaError(f"{part!r} is not allowed in the condition {self.condition!r}. {_EXAMPLE}")
