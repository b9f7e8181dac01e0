"""The columns of a trajectory on disk, and the TensorDict keys that they have in a batch.

The columns themselves are `trajectory_store.recorder.standard`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from rlhf_pipeline.data.keys import Key, column_name, key_of, reward_column, turn_reward_column
from trajectory_store import Column, Schema
from trajectory_store.recorder.standard import (
    CURSOR,
    EPISODE,
    EVALUATION,
    FAILED_MEMBERS,
    FAILURES,
    INTERNAL,
    NEWEST_VERSION,
    POLICY_DIGEST,
    PROVENANCE,
    SAMPLED_BY,
    SLOT,
    SUPERSEDED,
    SUPPORT,
    TEMPERATURE,
    TOKEN_FIGURES,
    TURN_ADVANTAGES,
    TURN_FIGURES,
    TURN_REWARDS,
    TURNS,
    USES,
    WAITING,
    standard_schema,
)

__all__ = [
    "CURSOR", "EPISODE", "EVALUATION", "FAILED_MEMBERS", "FAILURES", "INTERNAL", "NEWEST_VERSION", "POLICY_DIGEST",
    "PROVENANCE", "SAMPLED_BY", "SLOT", "SUPERSEDED", "SUPPORT", "TEMPERATURE", "TOKEN_FIGURES", "TURNS",
    "TURN_ADVANTAGES", "TURN_FIGURES", "TURN_REWARDS", "USES", "WAITING", "column_of_key", "extra_columns",
    "named_reward", "reward_names", "trajectory_schema", "turn_reward",
]  # fmt: skip


@lru_cache(maxsize=16)
def column_of_key(schema: Schema) -> dict[Key, Column]:
    """Return the column of each key that a batch may contain."""
    return {key_of(column.name): column for column in schema if column.name != SLOT}


def extra_columns(extra: Mapping[Key, str] | Iterable[Column]) -> list[Column]:
    """Return the columns of further keys.

    Args:
        extra: columns, or a dtype per key (`"int64"`, `"float32"`, `"bool"`, `"str"`), one value per trajectory, which
            can be updated, as any key of a batch can.

    >>> [column.name for column in extra_columns({("next", "step_count"): "int64"})]
    ['next__step_count']
    """
    if not isinstance(extra, Mapping):
        return [*extra]
    fills = {"bool": False, "str": "", "f": math.nan}
    out = []
    dtypes: Any = extra
    for key, dtype in dtypes.items():
        out.append(Column(column_name(key), dtype, mutable=True, fill=fills.get(dtype, fills.get(dtype[:1], 0))))
    return out


def named_reward(name: str) -> Column:
    """Return the column of a named reward, or of a component of one: without a weight, NaN where it does not apply."""
    return Column(reward_column(name), "float32", fill=math.nan)


def turn_reward(name: str) -> Column:
    """Return the column of an environment's reward with a name in each turn of the policy, without a weight.

    It has a separate axis, so that it can be added when a name first occurs.
    """
    column = turn_reward_column(name)
    return Column(column, "float32", ragged=True, axis=column, fill=math.nan)


def reward_names(schema: Schema) -> list[str]:
    """Return the names of the rewards, and components of rewards, for which a store has columns.

    >>> reward_names(trajectory_schema([named_reward("format"), *FAILURES]))
    ['format']
    """
    prefix = reward_column("")
    columns = [column for column in schema if column.name.startswith(prefix) and column.dtype == "float32"]
    return [column.name.removeprefix(prefix) for column in columns if column.axis is None]


def trajectory_schema(extra: Mapping[Key, str] | Iterable[Column] = (), *, token_rewards: bool = False) -> Schema:
    """Return the standard columns and more: see `trajectory_store.recorder.standard.standard_schema`.

    Args:
        extra: more columns: a dtype per TensorDict key, one value per trajectory, which can be updated; or columns, per
            token (`ragged=True`) or per trajectory, whose key is their name.
        token_rewards: store `("next", "reward")` per token, for environments that reward single tokens or turns.

    >>> "ref_log_probs" in trajectory_schema(), "top_k" in trajectory_schema([Column("top_k", "int32", ragged=True)])
    (True, True)
    """
    return standard_schema(extra_columns(extra), token_rewards=token_rewards)
