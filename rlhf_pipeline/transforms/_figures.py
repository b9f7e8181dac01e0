"""What a group transform counts, under TorchRL's names."""

from __future__ import annotations

from typing import Any

from torchrl.envs.transforms import Transform

from rlhf_pipeline.transforms._groups import Chunk, GroupQueue

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
)


class GroupFigures(Transform):
    """Counters of written and dropped groups, and the size of the queue."""

    _queue: GroupQueue
    _stats: dict[str, float]

    def _count_arrivals(self, chunk: Chunk) -> None:
        stats = self._stats
        stats["completed_trajectories"] += len(chunk.groups)
        stats["completed_decisions"] += chunk.td.shape[0]
        returns = chunk.returns[chunk.returns.isfinite()]
        stats["failed_trajectories"] += chunk.returns.numel() - returns.numel()
        if returns.numel():
            stats["trajectory_return_sum"] += float(returns.sum())
            stats["trajectory_return_max"] = max(stats["trajectory_return_max"], float(returns.max()))
        stats["successful_trajectories"] += int((chunk.returns > 0).sum())

    def reset_stats(self) -> None:
        """Set the counters to zero."""
        self._stats = dict.fromkeys(_STATS, 0)
        self._stats["trajectory_return_max"] = float("-inf")

    def get_stats(self) -> dict[str, float]:
        """The counters and the size of the queue."""
        return {
            **self._stats,
            "queued_groups": self.queued_groups,
            "queued_trajectories": self.queued_trajectories,
            "max_queued_trajectories_per_group": self.max_queued_trajectories_per_group,
        }

    def __getattr__(self, name: str) -> Any:
        if name in _STATS:
            return self.__dict__["_stats"][name]
        return super().__getattr__(name)

    @property
    def queued_groups(self) -> int:
        """Number of incomplete groups."""
        return len(self._queue.waiting)

    @property
    def queued_trajectories(self) -> int:
        """Number of waiting trajectories."""
        return sum(len(entries) for entries in self._queue.waiting.values())

    @property
    def max_queued_trajectories_per_group(self) -> int:
        """Size of the largest incomplete group."""
        return max((len(entries) for entries in self._queue.waiting.values()), default=0)
