"""What a group transform counts, under TorchRL's names."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torchrl.envs.transforms import Transform

from rlhf_pipeline.transforms.groups import Arrived, GroupQueue

_STATS = (
    "completed_trajectories",
    "completed_decisions",
    "trajectory_return_sum",
    "trajectory_return_max",
    "successful_trajectories",
    "failed_trajectories",
    "completed_groups",
    "written_groups",
    "dropped_groups",
    "rescued_groups",
    "degenerate_groups",
    "selected_trajectories",
    "unselected_trajectories",
    "full_trajectories",
    "full_tokens",
    "early_closed_groups",
    "early_closed_trajectories",
    "early_closed_tokens",
    "late_trajectories",
)


class GroupFigures(Transform):
    """Counters of written and dropped groups, and the size of the queue."""

    _queue: GroupQueue
    _stats: dict[str, float]

    def _count_arrivals(self, arrived: Arrived) -> None:
        stats = self._stats
        stats["completed_trajectories"] += len(arrived.groups)
        stats["completed_decisions"] += arrived.bounds[-1]
        returns = arrived.returns[arrived.returns.isfinite()]
        stats["failed_trajectories"] += arrived.returns.numel() - returns.numel()
        if returns.numel():
            stats["trajectory_return_sum"] += float(returns.sum())
            stats["trajectory_return_max"] = max(stats["trajectory_return_max"], float(returns.max()))
        stats["successful_trajectories"] += int((arrived.returns > 0).sum())

    def reset_stats(self) -> None:
        """Set the counters to zero."""
        self._stats = dict.fromkeys(_STATS, 0)
        self._stats["trajectory_return_max"] = float("-inf")

    def get_stats(self) -> dict[str, float]:
        """The counters, the size of the queue, and how much closing groups early favours short trajectories.

        `mean_length_full` and `mean_length_early_closed` are completion tokens per written trajectory of complete
        groups and of groups that closed early; `early_closed_length_bias` is the second over the first. Short
        trajectories arrive first, so a figure well below 1 says that the timeout teaches the policy to be brief. The
        three are NaN where there is nothing to divide.
        """
        stats = self._stats
        full = _ratio(stats["full_tokens"], stats["full_trajectories"])
        early = _ratio(stats["early_closed_tokens"], stats["early_closed_trajectories"])
        return {
            **stats,
            "mean_length_full": full,
            "mean_length_early_closed": early,
            "early_closed_length_bias": _ratio(early, full),
            "queued_groups": self.queued_groups,
            "queued_trajectories": self.queued_trajectories,
            "max_queued_trajectories_per_group": self.max_queued_trajectories_per_group,
        }

    def __getattr__(self, name: str) -> Any:
        if name in _STATS:
            return self.__dict__["_stats"][name]
        return super().__getattr__(name)

    def _waiting(self) -> GroupQueue:
        """The queue, with what a store brought back."""
        return self._queue

    def _count_lengths(self, lengths: Tensor, early: Tensor | None) -> None:
        """Take in the completion lengths of what is written, and which of it belongs to groups that closed early."""
        stats, total, count = self._stats, float(lengths.sum()), lengths.numel()
        if early is not None:
            found = lengths[early]
            stats["early_closed_tokens"] += float(found.sum())
            stats["early_closed_trajectories"] += found.numel()
            total, count = total - float(found.sum()), count - found.numel()
        stats["full_tokens"] += total
        stats["full_trajectories"] += count

    @property
    def queued_groups(self) -> int:
        """Number of incomplete groups."""
        return sum(1 for waiting in self._waiting().waiting.values() if waiting.members)

    @property
    def queued_trajectories(self) -> int:
        """Number of waiting trajectories."""
        return sum(len(waiting.members) for waiting in self._waiting().waiting.values())

    @property
    def max_queued_trajectories_per_group(self) -> int:
        """Size of the largest incomplete group."""
        return max((len(waiting.members) for waiting in self._waiting().waiting.values()), default=0)


def _ratio(over: float, under: float) -> float:
    return over / under if under else math.nan
