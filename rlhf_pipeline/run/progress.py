"""What the loop of a run remembers over a resume: how far it is, and the lines of `metrics.jsonl`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_pipeline.jsonl import append_row, keep_rows, last_row, mend_tail
from rlhf_pipeline.learner.ledger import Ledger


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


class MetricsFile:
    """`metrics.jsonl`: one line per optimizer step, each step once.

    The lines of steps that a resumed run takes again are on file already and stay, unless the ledger says that the
    step now learns from something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        mend_tail(path)
        last = last_row(path)
        self._last = last["step"] if last is not None else 0

    def append(self, row: dict[str, Any]) -> None:
        """Write the line of a step, unless it is there."""
        if row["step"] > self._last:
            append_row(self.path, row)
            self._last = row["step"]

    def drop_from(self, step: int) -> None:
        """Take off the lines of `step` and of later ones: they are about steps that will not happen."""
        if self._last >= step:
            keep_rows(self.path, lambda row: row["step"] < step)
            self._last = step - 1


def replaced(ledger: Ledger, step: int, before: dict[str, Any] | None) -> bool:
    """Return True if the ledger's row of `step` is no longer `before`, the one that was planned."""
    return before is not None and ledger.planned(step) != before
