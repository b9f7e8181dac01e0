"""Conditions on scalar and text columns, such as `task_reward >= 0.5 and policy_version < 100`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import SchemaError, StoreError
from trajectory_store.texts import Texts

Mask = npt.NDArray[Any]
Operand = Mask | Texts


def _is_in(left: Any, right: Any) -> Any:
    """`value in column` searches each text; `column in (values)` compares with each value."""
    if isinstance(right, Texts):
        return right.contains(left)
    if not isinstance(right, list):
        raise SchemaError("what follows 'in' is a list of values, such as (1, 2), or a column of text.")
    values = cast("list[Any]", right)
    return left.is_in(values) if isinstance(left, Texts) else np.isin(left, np.asarray(values))


def _ordered(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a comparison that decodes texts: their order is that of their characters."""

    def ordered(left: Any, right: Any) -> Any:
        plain = [np.array(side.to_list(), object) if isinstance(side, Texts) else side for side in (left, right)]
        return compare(*plain)

    return ordered


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: _ordered(operator.lt),
    ast.LtE: _ordered(operator.le),
    ast.Gt: _ordered(operator.gt),
    ast.GtE: _ordered(operator.ge),
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: _is_in,
    ast.NotIn: lambda a, b: ~_is_in(a, b),
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b,
    ast.Mod: operator.mod,
}


def names_in(condition: str) -> set[str]:
    """Return the names in a condition, columns among them; empty if it cannot be read."""
    try:
        return {node.id for node in ast.walk(ast.parse(condition, mode="eval")) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()


def evaluate(
    condition: str, read: Callable[[str], Operand], lengths: Callable[[str], Mask] | None = None
) -> npt.NDArray[np.bool_]:
    """Evaluate a condition for all rows at once.

    Args:
        condition: comparisons of column names, numbers and texts, joined by `and`, `or`, `not`; `in (1, 2)`;
            `+ - * / %`; `isnan(column)`, `len(column)`; of a text `'part' in column`, `column.startswith('x')`,
            `column.endswith('x')`.
        read: returns the values `[n]` of a column by its name, or its texts.
        lengths: returns the lengths `[n]` of a column: characters of text, elements of a ragged one.

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
        found: Any = np.asarray(_value(tree, condition, read, lengths))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, StoreError):  # damage too
            raise
        raise SchemaError(f"the condition {condition!r} cannot be evaluated: {error}. {_EXAMPLE}") from None
    if found.dtype != np.bool_:
        raise SchemaError(f"the condition {condition!r} is a value, not a comparison. {_EXAMPLE}")
    return found


_EXAMPLE = "Write for example 'task_reward >= 0.5 and policy_version < 100'."


Lengths = Callable[[str], Mask] | None


def _value(node: ast.expr, condition: str, read: Callable[[str], Operand], lengths: Lengths) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | bytes() as value):
            return value
        case ast.Name(id=name):
            return read(name)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [_value(part, condition, read, lengths) for part in parts]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, condition, read, lengths)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ~_boolean(operand, condition, read, lengths)
        case ast.BoolOp(op=op, values=values):
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            return join.reduce([_boolean(value, condition, read, lengths) for value in values])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](
                _value(left, condition, read, lengths), _value(right, condition, read, lengths)
            )
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_value(part, condition, read, lengths) for part in (left, *others)]
            pairs = zip(ops, values[:-1], values[1:], strict=True)
            return np.logical_and.reduce([_COMPARE[type(op)](a, b) for op, a, b in pairs])
        case ast.Call(func=ast.Name(id="isnan"), args=[argument], keywords=[]):
            return np.isnan(_value(argument, condition, read, lengths))
        case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)], keywords=[]) if lengths is not None:
            return lengths(name)
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id=name), attr="startswith" | "endswith" as how),
            args=[argument],
            keywords=[],
        ):
            texts, part = read(name), _value(argument, condition, read, lengths)
            if not isinstance(texts, Texts):
                raise SchemaError(f"{name}.{how} is for a column of text, and '{name}' is none. {_EXAMPLE}")
            return texts.startswith(part) if how == "startswith" else texts.endswith(part)
        case _:
            part = ast.get_source_segment(condition, node) or condition
            raise SchemaError(f"{part!r} is not allowed in the condition {condition!r}. {_EXAMPLE}")


def _boolean(node: ast.expr, condition: str, read: Callable[[str], Operand], lengths: Lengths) -> npt.NDArray[np.bool_]:
    found: Any = np.asarray(_value(node, condition, read, lengths))
    if found.dtype != np.bool_:
        part = ast.get_source_segment(condition, node) or condition
        raise SchemaError(f"{part!r} in the condition {condition!r} is a value, not a comparison. {_EXAMPLE}")
    return found
