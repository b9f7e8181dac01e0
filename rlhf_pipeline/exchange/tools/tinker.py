"""tinker-cookbook (commit 9dfcc3a): `capture/sample.jsonl`, with rollout summaries for the rewards.

Writers: `tinker_cookbook/capture/instrument.py`, whose rows of kind `sample` have `prompt_tokens`, `samples` (of each
`tokens`, `logprobs`, `stop_reason`), `status`, `created_at` and `scope` (`split`, `iteration`, `group_idx`,
`traj_idx`); and `tinker_cookbook/rl/rollout_logging.py`, whose summaries have `total_reward` under the same keys. A
call is one trajectory: the turns of an episode are rows of one group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhf_pipeline.exchange.fields import Fields, RawRollout, Row, as_list, as_reward, part_of
from rlhf_pipeline.exchange.tool import Tool

Rewards = dict[tuple[Any, ...], dict[Any, float]]
"""By iteration, group and trajectory: the reward in each split."""


def is_summary(row: Row) -> bool:
    """Return True for a rollout summary: rewards, and no tokens."""
    return {"total_reward", "group_idx", "traj_idx"} <= row.keys()


def add_reward(rewards: Rewards, row: Row) -> None:
    """Take the reward of a trajectory from its rollout summary."""
    key = tuple(row.get(name) for name in ("iteration", "group_idx", "traj_idx"))
    rewards.setdefault(key, {})[row.get("split")] = as_reward(row["total_reward"], "total_reward")


def read_samples(rewards: Rewards, fields: Fields) -> Iterator[RawRollout | None]:
    """Yield the samples of one call; one that names no split gets a reward only where all splits agree on one."""
    row = fields.row
    if row.get("status") == "error":
        yield None
        return
    scope = part_of(row, "scope")
    split, iteration, group, traj = (scope.get(name) for name in ("split", "iteration", "group_idx", "traj_idx"))
    for place, sample in enumerate(as_list(row["samples"], "samples")):
        known = rewards.get((iteration, group, place if traj is None else traj), {})
        values = {known[split]} if split in known else {*known.values()} if split is None else set[float]()
        made = {
            "prompt_ids": row["prompt_tokens"],
            "completion_ids": sample["tokens"],
            "policy_version": iteration or 0,
        }
        made |= {"log_probs": sample.get("logprobs"), "finish_reason": sample.get("stop_reason")}
        made |= {"created_at": row.get("created_at"), "reward": values.pop() if len(values) == 1 else None}
        key = ("row", fields.number) if group is None else (split, iteration, group)
        yield RawRollout(**fields.made(made), group=key, meta={"scope": scope, "model_path": row.get("model_path")})


TOOL = Tool(
    name="tinker",
    summary="captured samples of tinker-cookbook, with its rollout summaries",
    signature=frozenset({"prompt_tokens", "samples", "scope"}),
    about="prompt_ids=prompt_tokens, completion_ids=samples[].tokens, group=iteration+group_idx",
    lacks=("rewards, unless the rollout summaries are named beside it",),
    read=lambda fields: read_samples({}, fields),
)
