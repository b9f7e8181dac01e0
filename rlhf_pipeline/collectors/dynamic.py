"""Dynamic sampling: which groups of a rollout are kept, and the figures about the others.

Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.2 and equation 11, whose constraint `0 < right answers < G` is
here that rewards of a group are not all equal, so that it holds for any reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.collectors.grading import Grade
from rlhf_pipeline.collectors.rollout_figures import Figures, spread_groups
from rlhf_pipeline.collectors.sampled_rows import OWNER, joined
from rlhf_pipeline.data.episodes import last_rows
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.data.trajectories import Trajectories

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """The samples of one round of a rollout, or of several rounds together.

    Attributes:
        prompts: [P].
        cursors: int64 [P], which prompts of the source they are.
        rows: what was sampled, [n].
        grades: the rewards, one for each of m episodes.
        steered: what must differ within a group, [m]: the rewards, or the one of them that `collect.dynamic_by` names.
    """

    prompts: Sequence[Prompt]
    cursors: Ints
    rows: Trajectories
    grades: Sequence[Grade]
    steered: npt.NDArray[np.float32]

    @property
    def owner(self) -> Ints:
        """The number of each episode's prompt, int64 [m]."""
        return self.rows.numbers(OWNER)[last_rows(self.rows)]

    @property
    def spread(self) -> Ints:
        """The prompts whose group has rewards that are not all equal, ascending, int64 [k]."""
        return spread_groups(self.steered, self.owner)


def as_one(rounds: Sequence[Round]) -> Round:
    """Return several rounds as one."""
    return Round(
        prompts=[prompt for part in rounds for prompt in part.prompts],
        cursors=np.concatenate([part.cursors for part in rounds]),
        rows=joined([part.rows for part in rounds]),
        grades=[grade for part in rounds for grade in part.grades],
        steered=np.concatenate([part.steered for part in rounds]),
    )


def groups_to_store(spread: Ints, num_sampled: int, num_groups: int) -> Ints:
    """Return the groups to store, ascending, int64 `[wanted]`: the first with spread, then the first without.

    Args:
        spread: int64 [k], the groups with spread, ascending.
        num_sampled: of groups 0, 1, 2, ..., at least `num_groups`.
        num_groups: the groups of a rollout.

    >>> groups_to_store(np.array([1, 4, 5]), 6, 2).tolist(), groups_to_store(np.array([4]), 6, 2).tolist()
    ([1, 4], [0, 4])
    """
    rest = np.setdiff1d(np.arange(num_sampled), spread)[: max(num_groups - len(spread), 0)]
    return np.sort(np.concatenate([spread[:num_groups], rest]))


def dynamic_figures(
    offsets: npt.NDArray[np.int64], rewards: npt.NDArray[np.floating], *, num_groups: int, most_rounds: int
) -> Figures:
    """Return the figures of a rollout's dynamic sampling, which the stored groups alone determine.

    The last group of a full rollout is in the last round, and groups before it that are not stored had no spread. A
    rollout in which a stored group has none was not full after all rounds.

    Args:
        offsets: int64 [n], for each stored trajectory, how many groups of the rollout were sampled before its own.
        rewards: [n], theirs.
        num_groups: the groups of a rollout, and of each round.
        most_rounds: the most rounds.

    >>> dynamic_figures(np.array([1, 1, 4, 4]), np.array([0.0, 1.0, 0.0, 1.0]), num_groups=2, most_rounds=4)
    {'rounds': 3, 'dropped_groups': 0.6}
    >>> dynamic_figures(np.array([0, 0, 4, 4]), np.array([0.0, 0.0, 0.0, 1.0]), num_groups=2, most_rounds=4)
    {'rounds': 4, 'dropped_groups': 0.75}
    """
    full = len(spread_groups(rewards, offsets)) == num_groups
    looked_at = int(offsets.max()) + 1 if full else num_groups * most_rounds
    return {"rounds": -(-looked_at // num_groups), "dropped_groups": 1.0 - num_groups / looked_at}
