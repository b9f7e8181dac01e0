"""Conditions on scalar columns, such as `task_reward >= 0.5 and policy_version < 100`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import SchemaError

Mask = npt.NDArray[Any]
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda a, b: np.isin(a, np.asarray(b)),
    ast.NotIn: lambda a, b: ~np.isin(a, np.asarray(b)),
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b,
    ast.Mod: operator.mod,
}


def evaluate(condition: str, read: Callable[[str], Mask]) -> npt.NDArray[np.bool_]:
    """Evaluate a condition for all rows at once.

    Args:
        condition: comparisons of column names, numbers and texts, joined by `and`, `or`, `not`; `in (1, 2)`;
            `+ - * / %`; `isnan(column)`.
        read: returns the values `[n]` of a column by its name.

    Returns:
        `[n]` bool.

    Raises:
        SchemaError: the condition cannot be read.

    >>> evaluate("x >= 2 and x != 3", {"x": np.arange(5)}.__getitem__).tolist()
    [False, False, True, False, True]
    """
    try:
        tree = ast.parse(condition, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SchemaError(f"the condition {condition!r} cannot be read: {error}. {_EXAMPLE}") from None
    try:
        found: Any = np.asarray(_value(tree, condition, read))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, SchemaError):
            raise
        raise SchemaError(f"the condition {condition!r} cannot be evaluated: {error}. {_EXAMPLE}") from None
    if found.dtype != np.bool_:
        raise SchemaError(f"the condition {condition!r} is a value, not a comparison. {_EXAMPLE}")
    return found


_EXAMPLE = "Write for example 'task_reward >= 0.5 and policy_version < 100'."


def _value(node: ast.expr, condition: str, read: Callable[[str], Mask]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name):
            return read(name)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [_value(part, condition, read) for part in parts]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, condition, read)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ~_boolean(operand, condition, read)
        case ast.BoolOp(op=op, values=values):
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            return join.reduce([_boolean(value, condition, read) for value in values])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](_value(left, condition, read), _value(right, condition, read))
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_value(part, condition, read) for part in (left, *others)]
            pairs = zip(ops, values[:-1], values[1:], strict=True)
            return np.logical_and.reduce([_COMPARE[type(op)](a, b) for op, a, b in pairs])
        case ast.Call(func=ast.Name(id="isnan"), args=[argument], keywords=[]):
            return np.isnan(_value(argument, condition, read))
        case _:
            part = ast.get_source_segment(condition, node) or condition
            raise SchemaError(f"{part!r} is not allowed in the condition {condition!r}. {_EXAMPLE}")


def _boolean(node: ast.expr, condition: str, read: Callable[[str], Mask]) -> npt.NDArray[np.bool_]:
    found: Any = np.asarray(_value(node, condition, read))
    if found.dtype != np.bool_:
        part = ast.get_source_segment(condition, node) or condition
        raise SchemaError(f"{part!r} in the condition {condition!r} is a value, not a comparison. {_EXAMPLE}")
    return found
