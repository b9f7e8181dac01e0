"""What the loop of a run remembers over a resume: how far it is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Progress:
    """What a checkpoint holds beside weights, optimizer and write path."""

    step: int = 0
    first_reward: float | None = None
    last_reward: float | None = None
    recent_rewards: list[float] = field(default_factory=list[float])

    def note(self, task_reward: float, window: int) -> None:
        """Take in the mean reward of the rollout that the next step learns from."""
        if self.first_reward is None:
            self.first_reward = task_reward
        self.last_reward = task_reward
        self.recent_rewards = list(deque([*self.recent_rewards, task_reward], maxlen=window))

    def reached(self, target: float | None, window: int) -> bool:
        """Return True if the last `window` rollouts reach the target on average."""
        recent = self.recent_rewards[-window:]
        return target is not None and len(recent) == window and sum(recent) / window >= target
