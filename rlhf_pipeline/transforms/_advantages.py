"""Returns of trajectories and advantages of groups, on flat columns."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from rlhf_pipeline.data.keys import KL_COEF, LOG_PROBS, TASK_REWARD
from rlhf_pipeline.data.trajectories import Flat, Trajectories, segment_sum, step_sum
from rlhf_pipeline.functional.advantage import group_advantage, penalty_rounding, whitened_step_rewards
from rlhf_pipeline.transforms.groups import Scores


def trajectory_returns(reward: Flat, bounds: Sequence[int], how: str | None) -> tuple[Tensor, Tensor]:
    """One return per trajectory.

    Args:
        reward: per token or per step, one row per step.
        bounds: the first step of each trajectory, and one past the last of all.
        how: `sum`, `mean` or `max` of a trajectory's rewards; None is `sum`.

    Returns:
        Returns float64 `[k]`, 0 where there is no reward, and the number of rewards int64 `[k]`.
    """
    n, k = bounds[-1], len(bounds) - 1
    values = reward.values.detach().double()
    per_row = reward.lengths if reward.lengths is not None else torch.ones(n, dtype=torch.int64)
    per_row = per_row * (values[0].numel() if values.shape[0] else 1)
    per_trajectory = per_row if k == n else step_sum(per_row, bounds)
    if k == values.numel() and reward.lengths is None:
        returns = values.reshape(-1)
    else:
        returns = segment_sum(values, per_trajectory)
        if how == "max":
            returns = torch.segment_reduce(values.reshape(-1), "max", lengths=per_trajectory)
        elif how == "mean":
            returns = returns / per_trajectory
    return torch.where(per_trajectory == 0, 0.0, returns), per_trajectory


def group_codes(groups: Sequence[Hashable]) -> Tensor:
    """Int64 `[n]`: the group of each trajectory, numbered in the order of their first members."""
    seen: dict[Hashable, int] = {}
    return torch.tensor([seen.setdefault(group, len(seen)) for group in groups])


def group_advantages(scores: Scores, codes: Tensor, estimator: str, batches: Tensor | None) -> tuple[Tensor, Tensor]:
    """Advantage `[n]` and whether the group has no spread `[n]`; a return that is not finite counts for nobody.

    Args:
        scores: of each trajectory.
        codes: int64 `[n]`, its group.
        estimator: one of `functional.advantage.ESTIMATORS`.
        batches: int64 `[n]`, the batch of each, where the estimator looks at batches; None for one of all.
    """
    graded = scores.returns.isfinite()
    advantage, degenerate = torch.zeros_like(scores.returns), torch.ones_like(graded)
    parts = [graded] if batches is None else [graded & (batches == batch) for batch in batches.unique().tolist()]
    for part in parts:
        returns, lengths, task, rounding = scores.take(part)
        found = group_advantage(returns, codes[part], estimator, lengths=lengths, task_rewards=task, rounding=rounding)
        advantage[part], degenerate[part] = found.advantages, found.degenerate
    return advantage, degenerate


def scores_of(batch: Trajectories, returns: Tensor, lengths: Tensor, eps: float) -> Scores:
    """The scores of trajectories: with a KL penalty in their reward, what it was before, and how it was rounded.

    Args:
        batch: their steps.
        returns: float64 `[k]`.
        lengths: int64 `[k]`, completion tokens (or steps).
        eps: of the dtype that log-probs were computed in.
    """
    plain = Scores(returns, lengths, returns, torch.zeros_like(returns))
    coef, task, log_probs = batch.get(KL_COEF), batch.get(TASK_REWARD), batch.get(LOG_PROBS)
    if not isinstance(coef, Flat) or not bool((coef.values > 0).any()):
        return plain
    if not (isinstance(task, Flat) and isinstance(log_probs, Flat)) or log_probs.lengths is None:
        return plain
    if not coef.values.numel() == task.values.numel() == log_probs.lengths.numel() == returns.numel():
        return plain
    task_rewards = task.values.reshape(-1).double()
    rounding = penalty_rounding(
        coef.values.reshape(-1), task_rewards, log_probs.values, log_probs.lengths, lengths=lengths, eps=eps
    )
    return Scores(returns, lengths, task_rewards, rounding)


def step_owners(bounds: Sequence[int]) -> Tensor:
    """Int64 `[n]`: the trajectory that each of `n` steps belongs to.

    >>> step_owners([0, 2, 3]).tolist()
    [0, 0, 1]
    """
    if len(bounds) == bounds[-1] + 1:
        return torch.arange(bounds[-1])
    return torch.repeat_interleave(torch.tensor(bounds).diff())


def advantage_values(
    reward: Flat, mask: Flat | None, owner: Tensor, advantage: Tensor, per_step: Tensor | None
) -> Tensor:
    """The advantage in the shape of the rewards, float32, 0 outside the assistant's tokens.

    Args:
        reward: of `n` steps.
        mask: the assistant's tokens; used where it has the rewards' lengths.
        owner: int64 `[n]`, the trajectory of each step.
        advantage: `[k]`, one per trajectory.
        per_step: the group of each trajectory, where rewards are whitened step by step within their group
            instead; else None.
    """
    n, trailing = owner.numel(), reward.values.shape[1:]
    element = owner if reward.lengths is None else torch.repeat_interleave(owner, reward.lengths)
    if per_step is not None:
        flat = reward.values.detach().double().nan_to_num(0.0, 0.0, 0.0).reshape(-1)
        each = torch.ones(n, dtype=torch.int64) if reward.lengths is None else reward.lengths
        each = each * (flat.numel() // max(element.numel(), 1))
        values = whitened_step_rewards(flat, per_step[owner], each).advantages.reshape(reward.values.shape)
    else:
        values = advantage[element].reshape(-1, *(1 for _ in trailing)).expand(-1, *trailing)
    values = values.to(torch.float32).contiguous()
    if mask is not None and _same_lengths(mask, reward):
        keep = mask.values.to(torch.bool)
        values = values * keep.reshape(-1, *(1 for _ in trailing))
    return values


def _same_lengths(a: Flat, b: Flat) -> bool:
    return (
        a.lengths is not None
        and b.lengths is not None
        and (a.lengths is b.lengths or torch.equal(a.lengths, b.lengths))
    )
