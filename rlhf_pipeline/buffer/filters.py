"""Choosing trajectories of a store by conditions such as `task_reward>=0.5`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.text_search import search, stored_bytes
from rlhf_pipeline.errors import DefinitionError, did_you_mean
from trajectory_store import TrajectoryStore
from trajectory_store.raw_rollout import seconds_of
from trajectory_store.texts import Texts
from trajectory_store.where import evaluate

Ids = npt.NDArray[np.int64]

_CONDITION = re.compile(r"\s*([A-Za-z][\w./-]*)\s*(>=|<=|==|!=|>|<|=|~)\s*(.+?)\s*\Z", re.DOTALL)
SHORT: Final = {"reward": "task_reward", "version": "policy_version", "group": "group_id", "date": "created_at"}
_RANGE = re.compile(r"(?=.*[^.])(-?[\w.:+-]*?)\.\.(-?[\w.:+-]*)\Z")
_BLOCK_ROWS = 1024
_TEXT_ROWS = 65_536


def select(store: TrajectoryStore, conditions: Sequence[str] = (), ids: Ids | None = None) -> Ids:
    """Return the ids of the trajectories that meet all conditions, in their order.

    Args:
        store: an open store.
        conditions: each a column, `num_tokens` or `num_completion_tokens` (those of the policy), then
            `>= <= == != > < ~`, then a value. `reward`, `version`, `group` and `date` are short for task_reward,
            policy_version, group_id and created_at. A date is a number of seconds, or `2026-01-31` or
            `2026-01-31T12:00`, UTC. Text, bytes and `nan` are compared by `==` and `!=`; a text may be quoted. `~` asks
            whether a text contains another, ASCII letters of either case. `== null` finds the rows that have no value,
            and `== 0.2..0.8`, either end of which may be left out, those from one number to another.
        ids: of these, [N] int64; None for all, in the order of arrival.

    Raises:
        DefinitionError: a condition cannot be read, or names no column.
        MissingRowError: one of `ids` is not in the store.

    >>> import tempfile
    >>> from trajectory_store import Column, Schema
    >>> schema = Schema([Column("input_ids", "int32", ragged=True), Column("task_reward", "float32")])
    >>> with TrajectoryStore.create(tempfile.mkdtemp() + "/store", schema) as store:
    ...     _ = store.append({"input_ids": [[1], [2, 3], [4]], "task_reward": [0.0, 1.0, 1.0]})
    ...     select(store, ["reward>0.5", "num_tokens == 1"]).tolist()
    [2]
    """
    ids = np.asarray(store.ids() if ids is None else ids)
    return ids[meets(store, conditions, ids)]


def meets(store: TrajectoryStore, conditions: Sequence[str], ids: Ids) -> npt.NDArray[np.bool_]:
    """Return which of `ids`, [N] int64, meet all conditions of `select`: [N] bool."""
    keep = np.ones(len(ids), bool)
    for condition in conditions:
        keep &= _meets(store, ids, condition)
    return keep


def _equals(store: TrajectoryStore, name: str, ids: Ids, value: bytes) -> npt.NDArray[np.bool_]:
    """Compare stored bytes block by block, as the store's `where` does."""
    blocks = (ids[first : first + _TEXT_ROWS] for first in range(0, len(ids), _TEXT_ROWS))
    same = [Texts(stored_bytes(store, name, block), bytes) == value for block in blocks]
    return np.concatenate([np.zeros(0, bool), *same])


def num_completion_tokens(store: TrajectoryStore, ids: Ids) -> Ids:
    """Return how many tokens of each trajectory the policy produced, [N]; without a mask, all after the prompt."""
    found = [np.zeros(0, np.int64)]
    for first in range(0, len(ids), _BLOCK_ROWS):  # a mask is as long as the tokens
        rows = ids[first : first + _BLOCK_ROWS]
        rest = store.lengths("input_ids", rows) if "input_ids" in store.schema else np.zeros(len(rows), np.int64)
        if "num_prompt_tokens" in store.schema:
            rest = rest - store.read_scalars("num_prompt_tokens", rows)
        if "assistant_mask" in store.schema:
            mask = store.read_ragged("assistant_mask", rows)
            own = np.diff(np.concatenate([[0], np.cumsum(mask.values)])[mask.offsets])
            rest = np.where(own > 0, own, rest)  # a mask that was left out reads as False
        found.append(rest)
    return np.concatenate(found)


DERIVED: Final[Mapping[str, Callable[[TrajectoryStore, Ids], Ids]]] = {
    "num_tokens": lambda store, ids: store.lengths("input_ids", ids),
    "num_completion_tokens": num_completion_tokens,
}


def _meets(store: TrajectoryStore, ids: Ids, condition: str) -> npt.NDArray[np.bool_]:
    read = _CONDITION.match(condition)
    if read is None:
        raise DefinitionError(
            f"the filter {condition!r} cannot be read. Write a column, an operator and a value: reward>=0.5"
        )
    name, sign, text = read.groups()
    name = SHORT.get(name, name)
    known = [column.name for column in store.schema if column.axis is None or column.is_text]
    values: npt.NDArray[Any] = ids
    if name in DERIVED:
        values = DERIVED[name](store, ids)
    elif name in known and store.schema[name].is_text:
        pass  # compared as bytes below
    elif name in known:
        values = store.read_scalars(name, ids)
    else:
        raise DefinitionError(
            f"the filter {condition!r}: {store.path} has no column '{name}' with one value per trajectory."
            + did_you_mean(name, [*known, *SHORT, *DERIVED])
        )
    if sign == "~":
        return _contains(store, name, text, ids, condition)
    if text.lower() in ("null", "none"):
        return _same_or_not(_is_missing(store, name, ids, values), sign, condition, "null")
    if (ends := _RANGE.match(text)) is not None and values is not ids:
        low, high = (_value(name, end, condition) if end else None for end in ends.groups())
        inside = np.ones(len(ids), bool) if low is None else values >= low
        return _same_or_not(inside if high is None else inside & (values <= high), sign, condition, "a range")
    value: float | int | str | bytes
    if name in store.schema and store.schema[name].is_text:
        quoted = unquoted(text)
        value = quoted.encode() if store.schema[name].dtype == "bytes" else quoted
    else:
        value = _value(name, text, condition)
    sign = "==" if sign == "=" else sign
    comparison = f"column {sign} value"
    if isinstance(value, (str, bytes)) or value != value:
        if sign not in ("==", "!="):
            what = "text" if isinstance(value, (str, bytes)) else "nan"
            raise DefinitionError(f"the filter {condition!r}: {what} is compared by == and != only.")
        if value != value:  # which equals nothing
            comparison = "isnan(column)" if sign == "==" else "not isnan(column)"
        else:
            same = _equals(store, name, ids, value if isinstance(value, bytes) else str(value).encode())
            return same if sign == "==" else ~same
    operands: dict[str, Any] = {"column": values, "value": value}
    return evaluate(comparison, operands.__getitem__)


def unquoted(text: str) -> str:
    """Return a text without the quotes around it.

    >>> unquoted("'a, b'"), unquoted('"b"'), unquoted("plain")
    ('a, b', 'b', 'plain')
    """
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _same_or_not(same: npt.NDArray[np.bool_], sign: str, condition: str, what: str) -> npt.NDArray[np.bool_]:
    if sign not in ("==", "=", "!="):
        raise DefinitionError(f"the filter {condition!r}: {what} is compared by == and != only.")
    return ~same if sign == "!=" else same


def _is_missing(store: TrajectoryStore, name: str, ids: Ids, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which rows have no value in a column: it was left out, is NaN, or is an empty text."""
    if name in DERIVED:
        return np.zeros(len(ids), bool)
    absent = ~store.present(name, ids)
    if store.schema[name].is_text:
        return absent | _equals(store, name, ids, b"")
    return absent | np.isnan(values) if values.dtype.kind == "f" else absent


def _contains(store: TrajectoryStore, name: str, text: str, ids: Ids, condition: str) -> npt.NDArray[np.bool_]:
    wanted = unquoted(text)
    if name not in store.schema or not store.schema[name].is_text or not wanted:
        raise DefinitionError(f"the filter {condition!r}: ~ looks for a text in a column of text.")
    keep = np.zeros(len(ids), bool)
    for places, _ in search(store, name, wanted, ids):
        keep[places] = True
    return keep


def _value(name: str, text: str, condition: str) -> float | int:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    if name == "created_at":
        with suppress(ValueError):
            return seconds_of(text)
    if text.startswith((">", "<", "=")):
        raise DefinitionError(f"the filter {condition!r}: an operator is one of >= <= == != > <, for example >=.")
    raise DefinitionError(
        f"the filter {condition!r}: {text!r} is not a number" + (" or date." if name == "created_at" else ".")
    )
