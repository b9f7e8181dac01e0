"""The one table of names: TensorDict keys, columns on disk, and how they map.

A TensorDict key is TorchRL's where TorchRL has one. All code that reads or writes trajectories imports its names from
here, so each key is spelled once.
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
"""The version of the weights that sampled the trajectory; the oldest if weights were replaced within it."""
NEWEST_POLICY_VERSION: Final[Key] = "newest_policy_version"
"""The newest version if weights were replaced within the trajectory; otherwise -1."""
VERSION_SPANS: Final[Key] = "version_spans"
"""Which weights sampled which tokens, `[n, 2]`: the position of a span's first token in the row, and the version. Empty
if one version sampled the complete trajectory.
"""
TURN_SPANS: Final[Key] = "turn_spans"
"""Turns of a conversation, `[n, 2]`: the position of a span's first token in the row, and 1 for a turn of the policy or
0 for a reply. Empty for a trajectory of one turn.
"""
REPLY_ROLE, POLICY_ROLE = 0, 1
"""The roles in `TURN_SPANS`."""
TURN_REWARDS: Final[Key] = "turn_rewards"
"""One per turn of the policy, for estimators that compare turns; their sum is the reward of the trajectory."""
TURN_ADVANTAGES: Final[Key] = "turn_advantages"
"""One per turn of the policy, from such an estimator; `advantage` is then the value furthest from 0."""
POLICY_DIGEST: Final[Key] = "policy_digest"
"""The digest of the published weights of version `policy_version`; 0 if none were published."""
NUM_PROMPT_TOKENS: Final[Key] = "num_prompt_tokens"
DONE: Final[Key] = ("next", "done")
FINISH_REASON: Final[Key] = "finish_reason"
CREATED_AT: Final[Key] = "created_at"
TRAJECTORY_ID: Final[Key] = "trajectory_id"
EPISODE_ID: Final[Key] = "episode_id"
"""The conversation to which a row belongs; -1 for a row that is a complete conversation."""
EPISODE_ROW: Final[Key] = "episode_row"
"""The position of a row in its episode, from 0; the last row has the outcome."""
EPISODE_SIZE: Final[Key] = "episode_size"
"""The number of rows of the episode."""
PRIORITY: Final[Key] = "priority"
DEGENERATE: Final[Key] = "degenerate"
PROMPT: Final[Key] = "prompt"
COMPLETION: Final[Key] = "completion"
META: Final[Key] = "meta"
PROMPT_CURSOR: Final[Key] = "prompt_cursor"
"""With dynamic sampling: the cursor of the group's prompt in the source; otherwise `group_id` identifies the prompt."""
TEMPERATURE: Final[Key] = "temperature"
LOG_PROB_MODE: Final[Key] = "log_prob_mode"
ENGINE: Final[Key] = "engine"
FAILURE_REASON: Final[Key] = "failure_reason"
"""The reason why a trajectory has no reward: `timeout`, `tool_error`, `grader_error`, `truncated` or `engine`; empty
otherwise."""
REWARD_TRUSTED: Final[Key] = "reward_trusted"
"""False for a trajectory whose reward must not be used for training."""
SUPPORT_LOG_MASS: Final[Key] = "support_log_mass"
"""Per token, for sampling with top-k, top-p or min-p: the log of the total probability of the tokens that could be
drawn, under the complete distribution at the temperature; 0 for other tokens. Log-probs are stored under the complete
distribution, as a policy scores them, so ratios need no correction; `log_probs - support_log_mass` are the log-probs
under the distribution that was drawn from.
"""
EVALUATION: Final[Key] = "evaluation"
"""True for a trajectory of an evaluation, which is never used for training."""
WAITING: Final[Key] = "waiting"
"""-1: the trajectory's group arrived complete; >= 0: the trajectory waits for the group of this number; `LEFT_OUT`
(-2): it waited and was excluded from learning; `-3 - i`: it waited and then became trajectory number `i` that may be
used for training.
"""
FAILED_MEMBERS: Final[Key] = "failed_members"
"""The number of members reported failed, on one row of a waiting group."""

# The row id of the store; present in every batch read from a store.
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
    PRIORITY: "priority",
    DEGENERATE: "degenerate",
    PROMPT: "prompt",
    COMPLETION: "completion",
    META: "meta",
    WAITING: "waiting",
    FAILED_MEMBERS: "failed_members",
}
"""The column on disk for each key. `("next", "reward")` has none: it is derived on read."""

KEY_OF_COLUMN: Final[dict[str, Key]] = {column: key for key, column in COLUMN_OF_KEY.items()}

REWARD_COLUMN: Final = "reward"
"""Column of rewards per token, only for environments that return them; otherwise the reward is derived on read."""

_NESTED = "__"
"""Separates the parts of a nested key in the name of its column."""


def reward_column(name: str) -> str:
    """Return the column, and the key, of a named reward: one number per trajectory, without its weight.

    >>> reward_column("accuracy")
    'reward_accuracy'
    """
    return f"reward_{name}"


def turn_reward_column(name: str) -> str:
    """Return the column, and the key, of what an environment gave under a name in each turn of the policy."""
    return f"turn_reward_{name}"


def column_name(key: Key) -> str:
    """Return the column of a TensorDict key: the table's, or the key's own name with its parts joined.

    >>> column_name(("tokens", "full")), column_name("step_count"), column_name(("next", "step_count"))
    ('input_ids', 'step_count', 'next__step_count')
    """
    return COLUMN_OF_KEY.get(key) or (key if isinstance(key, str) else _NESTED.join(key))


def key_of(column: str) -> Key:
    """Return the TensorDict key of a column; the key of an extra column is its name.

    >>> key_of("input_ids"), key_of("next__step_count")
    (('tokens', 'full'), ('next', 'step_count'))
    """
    if column == REWARD_COLUMN:
        return REWARD
    return KEY_OF_COLUMN.get(column) or (tuple(column.split(_NESTED)) if _NESTED in column else column)
