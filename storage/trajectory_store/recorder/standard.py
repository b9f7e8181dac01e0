"""The standard columns of a trajectory, which a recorder writes and rlhf-pipeline learns from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from trajectory_store.schema import Column, Schema

REWARD_COLUMN: Final = "reward"
"""Column of rewards per token, only for environments that return them."""

SLOT = "slot"
"""Column of the TorchRL slot that the writer of a row chose; -1 for a row that took the next slot."""

NEWEST_VERSION = Column("newest_policy_version", "int64", fill=-1)
"""Column of the newest version that sampled a token if weights were replaced during sampling; otherwise -1."""

POLICY_DIGEST = Column("policy_digest", "int64", fill=0)
"""Column of the digest of the published weights that sampled the first token; 0 if no weights were published."""

WAITING = Column("waiting", "int64", mutable=True, fill=-1)
"""Column with the state of a row that waits or waited for its group; see `rlhf_pipeline.data.keys.WAITING`."""

LEFT_OUT: Final = -2
"""Value of `waiting` for a row that waited and was excluded from learning."""

FAILED_MEMBERS = Column("failed_members", "int32", mutable=True, fill=0)
"""Column of the number of members reported failed, on one row of each waiting group."""

INTERNAL = frozenset({SLOT, WAITING.name, FAILED_MEMBERS.name})
"""Columns that batches contain only on request."""


TEMPERATURE = Column("temperature", "float32", fill=math.nan)
"""The sampling temperature, which must equal the temperature of scoring. Every run that collects has this column."""

SAMPLED_BY: tuple[Column, ...] = (
    Column("version_spans", "int64", ragged=True, axis="versions", shape=(2,), fill=0),
    TEMPERATURE,
    Column("log_prob_mode", "str", fill=""),
    Column("engine", "str", fill=""),
)
"""How a trajectory was sampled. A run has these columns if its definition alone does not determine this: its engine is
not the slot engine in its own process, or weights are replaced during sampling.
"""

FAILURES: tuple[Column, ...] = (
    Column("failure_reason", "str", mutable=True, fill=""),
    Column("reward_trusted", "bool", mutable=True, fill=True),
)
"""The reason why a trajectory has no reward to learn from. Every run that collects has these columns."""
SUPPORT = Column("support_log_mass", "float32", ragged=True, fill=0.0)
"""See `keys.SUPPORT_LOG_MASS`; only a run with truncated sampling has this column."""

TURNS = Column("turn_spans", "int64", ragged=True, axis="turns", shape=(2,), fill=0)
"""See `keys.TURN_SPANS`; only a run with an environment has this column."""

TURN_REWARDS = Column("turn_rewards", "float32", ragged=True, axis="policy_turns", fill=math.nan)
"""See `keys.TURN_REWARDS`; only a run with an environment has this column."""

TURN_ADVANTAGES = Column("turn_advantages", "float32", ragged=True, mutable=True, axis="policy_turns", fill=math.nan)
"""See `keys.TURN_ADVANTAGES`; only a run whose estimator compares turns has this column."""

TURN_FIGURES = (TURN_REWARDS, TURN_ADVANTAGES)
"""The columns that an estimator that compares turns reads and writes."""

EPISODE: tuple[Column, ...] = (
    Column("episode_id", "int64", fill=-1),
    Column("episode_row", "int32", fill=0),
    Column("episode_size", "int32", fill=1),
)
"""The rows of one conversation: the episode of a row, or -1 if the row is a complete episode; its position in the
episode, from 0; and the number of rows of the episode. Only a store with an episode of several rows has these columns.
"""

CURSOR = Column("prompt_cursor", "int64", fill=-1)
"""See `keys.PROMPT_CURSOR`; only a run with dynamic sampling has this column."""

TOKEN_FIGURES = (
    Column("policy_log_probs", "float32", ragged=True, mutable=True, fill=math.nan),
    Column("entropy", "float32", ragged=True, mutable=True, fill=math.nan),
)
"""Figures of the newest step that used a token, computed before the step; only a run with `learn.keep_token_figures`
has these columns.
"""

EVALUATION = Column("evaluation", "bool", fill=False)
"""Marks the trajectories of an evaluation, which are never used for training."""

SUPERSEDED = Column("superseded", "bool", mutable=True, fill=False)
"""Marks rows that a newer version replaces, because a tool wrote their file again. They are never used for training."""

PROVENANCE: tuple[Column, ...] = (
    *SAMPLED_BY,
    TURNS,
    *FAILURES,
    *EPISODE,
    Column("parent_id", "int64", fill=-1),
    Column("branch", "int32", fill=0),
)
"""The origin of a trajectory, as far as its engine and environment report it: `standard_schema(PROVENANCE)`.

Spans are `[n, 2]`: the position of a span's first token in the row, and the version of the weights or the role of the
turn. A trajectory that one version sampled has no version spans. `log_prob_mode` is `processed` or `raw`; `parent_id`
and `branch` identify the row whose tokens this one continues, and the columns `EPISODE` the conversation. An unused
column takes no space: a segment has only the columns for which its rows have values.
"""

USES = Column("use_count", "int32", mutable=True, fill=0)
"""The number of times a `ConsumingSampler` has drawn a trajectory. The sampler adds the column at its first draw. The
uses of a run are in its ledger.
"""


MACHINERY: frozenset[str] = INTERNAL | {
    *(column.name for column in (NEWEST_VERSION, POLICY_DIGEST, *EPISODE, CURSOR, SUPERSEDED, USES)),
    *("return", "kl_coef", "num_prompt_tokens", "done", "degenerate", "created_at", "trajectory_id", "priority"),
    *("parent_id", "branch"),
}
"""Columns without information about what was sampled: a listing prints them on request."""


def standard_schema(extra: Iterable[Column] = (), *, token_rewards: bool = False) -> Schema:
    """Return the default columns: 13 bytes per token (ids, mask, two log-probs), scalars and text per trajectory.

    Only the token ids, the mask and the behaviour log-probs grow with the tokens; the advantage is one number per
    trajectory and broadcast on read, and the shaped reward is derived on read.

    Args:
        extra: more columns, per token (`ragged=True`) or per trajectory.
        token_rewards: store a reward per token, for environments that reward single tokens or turns.

    Returns:
        The schema. All columns but `input_ids` may be omitted from a batch.

    >>> "ref_log_probs" in standard_schema(), "top_k" in standard_schema([Column("top_k", "int32", ragged=True)])
    (True, True)
    """
    nan = math.nan
    columns = [
        Column("input_ids", "int32", ragged=True),
        Column("assistant_mask", "bool", ragged=True, fill=False),
        Column("log_probs", "float32", ragged=True, fill=nan),
        Column("ref_log_probs", "float32", ragged=True, mutable=True, fill=nan),
        Column("advantage", "float32", mutable=True, fill=nan),
        Column("task_reward", "float32", mutable=True, fill=nan),
        Column("return", "float64", mutable=True, fill=nan),
        Column("kl_coef", "float32", fill=0.0),
        Column("group_id", "int64", fill=-1),
        Column("policy_version", "int64", fill=0),
        NEWEST_VERSION,
        POLICY_DIGEST,
        Column("num_prompt_tokens", "int32", fill=0),
        Column("done", "bool", fill=True),
        Column("degenerate", "bool", mutable=True, fill=False),
        Column("created_at", "float64", fill=nan),
        Column("trajectory_id", "int64", fill=-1),
        Column(SLOT, "int64", fill=-1),
        WAITING,
        FAILED_MEMBERS,
        Column("priority", "float32", mutable=True, fill=1.0),
        Column("finish_reason", "str", fill=""),
        Column("prompt", "str", fill=""),
        Column("completion", "str", fill=""),
        Column("meta", "str", fill=""),
    ]
    if token_rewards:
        columns.insert(4, Column(REWARD_COLUMN, "float32", ragged=True, fill=nan))
    return Schema([*columns, *extra])
