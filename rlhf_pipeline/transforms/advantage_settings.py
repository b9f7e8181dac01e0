"""The settings of a live `MCAdvantage`: the settings of a definition, and further settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from rlhf_pipeline.config import WritePath
from rlhf_pipeline.data.keys import ADVANTAGE, DONE, REWARD, Key
from rlhf_pipeline.functional.advantage import BATCH_ESTIMATORS, EstimatorEntry, check_estimator, estimator_of
from rlhf_pipeline.settings import setting

__all__ = ["AdvantageSettings", "estimator_entry"]


def estimator_entry(settings: WritePath) -> EstimatorEntry:
    """Return what the estimator of a definition needs, and its function."""
    return estimator_of(settings.estimator)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageSettings(WritePath):
    """The settings of `MCAdvantage`: the settings of a definition, and further settings of a live transform.

    The KL settings of a definition are those of `KLReward`; they change nothing here.

    >>> AdvantageSettings(grpo_size=8, zero_variance="drop").drops_groups
    True
    """

    grpo_size: int = setting(min=1, help="Number of trajectories in a complete group.")
    prompt_key: Key | None = setting(
        None,
        help="Key whose value identifies the group if there is no `group_id`. The value is a string, a number or a "
        "tensor; under the keys `prompt`, `query` and `text`, it must be a string. None tries these three keys and "
        '`("tokens", "prompt")`.',
    )
    rewards_key: Key = setting(
        REWARD, help="Key of the rewards. Without rewards under this key, `task_reward` is used."
    )
    advantage_key: Key = setting(ADVANTAGE, help="Key of the advantage.")
    done_key: Key = setting(
        DONE,
        help="Key of the flag that is true at the last step of a trajectory. Without the flag, every row is a "
        "complete trajectory.",
    )
    verbose: bool = setting(False, help="Log a line for every batch of complete groups.")
    trajectory_return: Literal["sum", "mean", "max"] | None = setting(
        "sum",
        help="How the return of a trajectory is computed from its rewards. None normalises every reward over all "
        "rewards of the group instead, as TorchRL does by default.",
    )
    keep_return_bounds: tuple[float, float] | None = setting(
        None,
        finite=False,
        help="Groups whose mean return is not strictly between these bounds are excluded (dynamic sampling).",
    )
    group_key: Key | None = setting(
        None, help="Key whose value identifies the group. None uses `group_id` if present, otherwise `prompt_key`."
    )
    clock: Callable[[], float] = setting(
        time.time,
        help="Function that returns the time in seconds. The default is wall-clock time, because a group can "
        "wait longer than one process runs.",
    )
    batch_groups: int | None = setting(
        None,
        min=1,
        help="Number of groups per batch. The integer `group_id` divided by this number, rounded down, is the number "
        "of the batch. Groups of a batch wait for each other, so the batch does not depend on the order in which its "
        "trajectories arrive. None for estimators that need no batch.",
    )
    scored_in: torch.dtype = setting(
        torch.float32,
        help="The dtype in which the models compute log-probs. It determines the rounding error of the KL penalty: "
        "returns count as equal if the task rewards are equal and the returns differ only by this error.",
    )
    rewards: dict[str, float] = setting(
        factory=dict,
        help="The names and weights of the rewards that a batch stores separately under the keys `reward_NAME`. "
        "`gdpo` uses these rewards, as do custom estimators that request them. Without names, the return is the only "
        "reward.",
    )

    def checked_estimator(self) -> EstimatorEntry:
        """Return the entry of the estimator; a custom function is tried on two groups first."""
        check_estimator(self.estimator, self.rewards)
        return estimator_entry(self)

    @property
    def reads_steps(self) -> bool:
        """Whether the return is not the sum of the rewards, so that it needs the reward of each step."""
        return self.trajectory_return != "sum"

    def _rules(self) -> list[tuple[bool, str]]:
        size, least, bounds = self.grpo_size, self.min_group_size, self.keep_return_bounds
        return [
            *WritePath._rules(self),
            (
                bool(self.trajectory_return or bounds is None),
                "keep_return_bounds selects groups by their returns, so trajectory_return must be set.",
            ),
            (
                bounds is None or (len(bounds) == 2 and bounds[0] < bounds[1]),
                f"keep_return_bounds is {bounds}; it must be an increasing pair.",
            ),
            (
                (self.batch_groups is not None) == estimator_entry(self).by_batch,
                f"estimator is {self.estimator!r} and batch_groups is {self.batch_groups}. "
                f"{', '.join(BATCH_ESTIMATORS)} divide by the spread of a batch, so they need batch_groups, the "
                "number of groups in a batch (for example, in a rollout); other estimators do not use it.",
            ),
            (
                (least or size) <= size,
                f"min_group_size is {least}; it must be between 1 and grpo_size ({size}).",
            ),
        ]
