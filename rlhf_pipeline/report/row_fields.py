"""Which columns of a store can be shown, ordered and filtered by, whatever its schema has."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.filters import DERIVED, SHORT
from rlhf_pipeline.buffer.trajectory_schema import INTERNAL
from rlhf_pipeline.errors import MissingKeyError, did_you_mean
from rlhf_pipeline.report.stored import Ids, Stored

REWARD_PREFIX: Final = "reward_"
"""The prefix of the columns of named rewards; `reward_trusted` is not one of them."""
_FIRST: Final = (
    *("task_reward", "return", "advantage", "policy_version", "group_id", "num_completion_tokens", "finish_reason"),
    *("failure_reason", "reward_trusted", "degenerate", "num_tokens", "kl_coef", "created_at"),
)
_NO_FIELDS: Final = INTERNAL | {"prompt", "completion", "meta", "trajectory_id"}
_ALWAYS: Final = ("task_reward", "advantage", "policy_version", "group_id", "num_completion_tokens", "finish_reason")
_LABELS: Final = {column: short for short, column in SHORT.items()} | {
    "num_completion_tokens": "tokens",
    "finish_reason": "finish",
}


def is_named_reward(name: str) -> bool:
    """Return whether a column has one of the rewards that the task reward is made of.

    >>> is_named_reward("reward_format"), is_named_reward("reward_trusted"), is_named_reward("task_reward")
    (True, False, False)
    """
    return name.startswith(REWARD_PREFIX) and name != "reward_trusted"


def label(name: str) -> str:
    """Return the short name of a column.

    >>> label("task_reward"), label("reward_format"), label("kl_coef")
    ('reward', 'format', 'kl_coef')
    """
    return _LABELS.get(name, name.removeprefix(REWARD_PREFIX) if is_named_reward(name) else name)


def fields_of(stored: Stored) -> list[dict[str, Any]]:
    """Return the columns with one value per trajectory: name, label, kind, and whether a table shows it by default.

    `kind` is `number`, `flag` or `text`. Named rewards are shown unasked if there are several, the return if it is not
    the reward (a penalty or a discount is in it).
    """
    scalars = [column for column in stored.columns.values() if column.axis is None or column.is_text]
    names = [column.name for column in scalars if column.name not in _NO_FIELDS and column.dtype != "bytes"]
    names += [name for name in DERIVED if "input_ids" in stored.columns]
    rewards = sorted(filter(is_named_reward, names))
    order = [*_FIRST[:1], *rewards, *_FIRST[1:]]
    names.sort(key=lambda name: (order.index(name) if name in order else len(order), name))
    default_fields = {*_ALWAYS, *(rewards if len(rewards) > 1 else ())}
    if "kl_coef" in stored.columns and _is_shaped(stored):
        default_fields.add("return")
    return [
        {"name": name, "label": label(name), "kind": _kind(stored, name), "shown": name in default_fields}
        for name in names
    ]


def _is_shaped(stored: Stored) -> bool:
    """Return whether the newest trajectories have returns that are not their rewards."""
    ids = stored.store.arrivals()[-512:]
    returns, rewards = stored.scalars("return", ids), stored.scalars("task_reward", ids)
    if returns is None or rewards is None:
        return False
    comparable = np.isfinite(returns) & np.isfinite(rewards)
    return bool(
        (np.abs(returns[comparable] - rewards[comparable]) > 1e-6 * np.maximum(np.abs(rewards[comparable]), 1)).any()
    )


def _kind(stored: Stored, name: str) -> str:
    column = stored.columns.get(name)
    if column is None:
        return "number"
    return "text" if column.is_text else "flag" if column.dtype == "bool" else "number"


def values_of(stored: Stored, name: str, ids: Ids) -> list[Any] | npt.NDArray[Any]:
    """Return the values of a field for some trajectories: texts, or an array.

    Raises:
        MissingKeyError: the store has no such field.
    """
    name = SHORT.get(name, name)
    if name in DERIVED and "input_ids" in stored.columns:
        return DERIVED[name](stored.store, ids)
    if name in stored.columns and stored.columns[name].is_text:
        return stored.texts(name, ids)
    values = stored.scalars(name, ids)
    if values is None:
        names = [field["name"] for field in fields_of(stored)]
        raise MissingKeyError(f"there is no column '{name}' to show or order by." + did_you_mean(name, names))
    return values


def order_of(stored: Stored, name: str, ids: Ids) -> npt.NDArray[np.float64]:
    """Return the values by which trajectories are ordered, [N] float64; NaN where there is no value.

    Raises:
        MissingKeyError: the store has no such field, or it is text.
    """
    column = SHORT.get(name, name)
    if column in stored.columns and stored.columns[column].is_text:
        raise MissingKeyError(
            f"'{name}' is text, but rows can only be ordered by numbers. Filter by it instead: {name}=='...'"
        )
    array = np.asarray(values_of(stored, name, ids))
    values = array.astype(np.float64)
    if array.dtype.kind == "i" and column in stored.columns:
        values[~stored.store.present(column, ids)] = np.nan
    return values
