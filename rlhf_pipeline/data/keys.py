"""The one table of names: TensorDict keys, columns on disk, and how they map.

A TensorDict key is TorchRL's where TorchRL has one. Everything that reads or writes a trajectory imports
its names from here, so a key is spelled once.
"""

from __future__ import annotations

from typing import Final

Key = str | tuple[str, ...]

# Per token, ragged [T] on the write path, padded [B, T] in a batch.
TOKENS: Final[Key] = ("tokens", "full")
ASSISTANT_MASK: Final[Key] = ("masks", "all_assistant_mask")
ATTENTION_MASK: Final[Key] = ("masks", "all_attention_mask")
LOG_PROBS: Final[Key] = ("log_probs", "full")
REF_LOG_PROBS: Final[Key] = ("next", "ref_log_probs", "full")
REWARD: Final[Key] = ("next", "reward")
KL_PENALTY: Final[Key] = ("next", "kl_penalty")
ADVANTAGE: Final[Key] = "advantage"
LOSS_WEIGHT: Final[Key] = "loss_weight"

# One per trajectory.
TASK_REWARD: Final[Key] = "task_reward"
RETURN: Final[Key] = "return"
KL_COEF: Final[Key] = "kl_coef"
GROUP_ID: Final[Key] = "group_id"
POLICY_VERSION: Final[Key] = "policy_version"
NEWEST_POLICY_VERSION: Final[Key] = "newest_policy_version"
"""Where weights were replaced in the middle of a trajectory: the last ones' version; else -1."""
POLICY_DIGEST: Final[Key] = "policy_digest"
"""Of the published weights whose version `policy_version` is; 0 where none were published."""
NUM_PROMPT_TOKENS: Final[Key] = "num_prompt_tokens"
DONE: Final[Key] = ("next", "done")
FINISH_REASON: Final[Key] = "finish_reason"
CREATED_AT: Final[Key] = "created_at"
TRAJECTORY_ID: Final[Key] = "trajectory_id"
USE_COUNT: Final[Key] = "use_count"
PRIORITY: Final[Key] = "priority"
DEGENERATE: Final[Key] = "degenerate"
PROMPT: Final[Key] = "prompt"
COMPLETION: Final[Key] = "completion"
META: Final[Key] = "meta"
WAITING: Final[Key] = "waiting"
"""-1 where a trajectory's group came whole; the number of its group while it waits for the rest; -2 where it waited and
is not learned from; `-3 - i` where it waited and then came as number `i` of those that may be learned from."""
LEFT_OUT: Final = -2
"""Value of `waiting` of a trajectory that waited and is not learned from."""
FAILED_MEMBERS: Final[Key] = "failed_members"
"""On one row of a group that waits: how many of its members are reported failed."""

# The row id that the store gave; present on everything that was read from a store.
ROW_ID: Final[Key] = "row_id"

COLUMN_OF_KEY: Final[dict[Key, str]] = {
    TOKENS: "input_ids",
    ASSISTANT_MASK: "assistant_mask",
    LOG_PROBS: "log_probs",
    REF_LOG_PROBS: "ref_log_probs",
    ADVANTAGE: "advantage",
    TASK_REWARD: "task_reward",
    RETURN: "return",
    KL_COEF: "kl_coef",
    GROUP_ID: "group_id",
    POLICY_VERSION: "policy_version",
    NEWEST_POLICY_VERSION: "newest_policy_version",
    POLICY_DIGEST: "policy_digest",
    NUM_PROMPT_TOKENS: "num_prompt_tokens",
    DONE: "done",
    FINISH_REASON: "finish_reason",
    CREATED_AT: "created_at",
    TRAJECTORY_ID: "trajectory_id",
    USE_COUNT: "use_count",
    PRIORITY: "priority",
    DEGENERATE: "degenerate",
    PROMPT: "prompt",
    COMPLETION: "completion",
    META: "meta",
    WAITING: "waiting",
    FAILED_MEMBERS: "failed_members",
}
"""Which column on disk holds which key. `("next", "reward")` has none: it is derived on read."""

KEY_OF_COLUMN: Final[dict[str, Key]] = {column: key for key, column in COLUMN_OF_KEY.items()}

REWARD_COLUMN: Final = "reward"
"""Column of rewards per token, only where an environment gives them; otherwise the reward is derived on read."""

_NESTED = "__"
"""Between the names of a nested key, in the name of its column."""


def column_name(key: Key) -> str:
    """The column of a TensorDict key: that of the table, else its own name, with its parts joined.

    >>> column_name(("tokens", "full")), column_name("step_count"), column_name(("next", "step_count"))
    ('input_ids', 'step_count', 'next__step_count')
    """
    return COLUMN_OF_KEY.get(key) or (key if isinstance(key, str) else _NESTED.join(key))


def key_of(column: str) -> Key:
    """The TensorDict key of a column; an extra column has its name.

    >>> key_of("input_ids"), key_of("next__step_count")
    (('tokens', 'full'), ('next', 'step_count'))
    """
    if column == REWARD_COLUMN:
        return REWARD
    return KEY_OF_COLUMN.get(column) or (tuple(column.split(_NESTED)) if _NESTED in column else column)
