"""The result of an import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(kw_only=True)
class FileReport:
    """The result of one file."""

    path: Path
    format: str
    about: str = ""
    """Which field was read as what."""
    num_imported: int = 0
    num_skipped: int = 0
    """Trajectories that the store had already."""
    num_left_out: int = 0
    """Rows that are not finished trajectories: failed calls, agents that are not trained."""


@dataclass(kw_only=True)
class ImportReport:
    """The result of an import.

    Attributes:
        store: the folder.
        files: one report per file, in order.
        num_groups: groups among the imported trajectories.
        num_tokens: their tokens, prompts included.
        num_encoded: trajectories whose text was encoded.
        num_without_log_probs: trajectories without behaviour log-probs.
        num_without_reward: trajectories whose reward is not finite.
        reward_sum: of the others.
    """

    store: Path
    files: list[FileReport] = field(default_factory=list[FileReport])
    num_groups: int = 0
    num_tokens: int = 0
    num_encoded: int = 0
    num_without_log_probs: int = 0
    num_without_reward: int = 0
    reward_sum: float = 0.0

    @property
    def num_imported(self) -> int:
        """Trajectories that were written."""
        return sum(file.num_imported for file in self.files)

    @property
    def num_skipped(self) -> int:
        """Trajectories that were in the store before."""
        return sum(file.num_skipped for file in self.files)

    @property
    def mean_reward(self) -> float | None:
        """The mean reward of the imported trajectories that have one."""
        graded = self.num_imported - self.num_without_reward
        return self.reward_sum / graded if graded else None

    def tally(self, columns: Mapping[str, Any]) -> None:
        """Count one batch of columns."""
        lengths = columns["input_ids"].lengths
        self.num_tokens += int(lengths.sum())
        rewards = np.asarray(columns["task_reward"], np.float64)
        finite = np.isfinite(rewards)  # as for the learner, which passes over the others
        self.num_without_reward += int((~finite).sum())
        self.reward_sum += float(rewards[finite].sum())
        rows = np.repeat(np.arange(len(lengths)), lengths)
        scored = columns["assistant_mask"].values & ~np.isnan(columns["log_probs"].values)
        known = np.bincount(rows[scored], minlength=len(lengths))
        self.num_without_log_probs += int((known == 0).sum())
