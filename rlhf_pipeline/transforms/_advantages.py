"""Returns of trajectories and advantages of groups, on the flat columns of a chunk."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from rlhf_pipeline.data.trajectories import Flat, segment_sum, step_sum
from rlhf_pipeline.functional.advantage import group_advantage
from rlhf_pipeline.keys import ASSISTANT_MASK
from rlhf_pipeline.transforms._groups import Chunk, read
from rlhf_pipeline.transforms._segments import whitened


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


def group_advantages(chunk: Chunk, codes: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """Advantage `[n]` and whether the group has no spread `[n]`; a return that is not finite counts for nobody."""
    graded = chunk.returns.isfinite()
    if bool(graded.all()):
        return group_advantage(chunk.returns, codes, estimator, lengths=chunk.lengths)
    advantage, degenerate = torch.zeros_like(chunk.returns), torch.ones_like(graded)
    found = group_advantage(chunk.returns[graded], codes[graded], estimator, lengths=chunk.lengths[graded])
    advantage[graded], degenerate[graded] = found.advantages, found.degenerate
    return advantage, degenerate


def trajectory_of_row(chunk: Chunk) -> Tensor:
    """Int64 `[n]`: the trajectory that each row of a chunk, a step of it, belongs to."""
    n = chunk.td.shape[0]
    if len(chunk.bounds) == n + 1:
        return torch.arange(n)
    return torch.repeat_interleave(torch.tensor(chunk.bounds).diff())


def advantage_values(chunk: Chunk, owner: Tensor, advantage: Tensor, per_step: Tensor | None) -> Tensor:
    """The advantage in the shape of the rewards, float32, 0 outside the assistant's tokens.

    Args:
        chunk: the trajectories.
        owner: from `trajectory_of_row`.
        advantage: `[k]`, one per trajectory.
        per_step: the group of each trajectory, where rewards are whitened step by step within their group
            instead; else None.
    """
    reward, n = chunk.reward, chunk.td.shape[0]
    trailing = reward.values.shape[1:]
    element = owner if reward.lengths is None else torch.repeat_interleave(owner, reward.lengths)
    if per_step is not None:
        flat = reward.values.detach().double().nan_to_num(0.0, 0.0, 0.0).reshape(-1)
        each = torch.ones(n, dtype=torch.int64) if reward.lengths is None else reward.lengths
        values = whitened(flat, each * (flat.numel() // max(element.numel(), 1)), per_step[owner])
        values = values.reshape(reward.values.shape)
    else:
        values = advantage[element].reshape(-1, *(1 for _ in trailing)).expand(-1, *trailing)
    values = values.to(torch.float32).contiguous()
    if reward.lengths is not None:
        mask = read(chunk.td, ASSISTANT_MASK)
        if isinstance(mask, Flat) and mask.lengths is not None and torch.equal(mask.lengths, reward.lengths):
            keep = mask.values.to(torch.bool)
            values = values * keep.reshape(-1, *(1 for _ in trailing))
    return values
