"""Rewards of other trainers as a recorder takes them: an episode's on its last row, parts by names of columns."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence

_LONGEST = 100
"""Maximum number of characters in the name of a reward component."""


def episode_outcomes(rewards: Sequence[float | None], episodes: Sequence[Hashable | None]) -> list[float | None]:
    """Return the rewards of rows with each episode's on its last row: the one that its last scored row has.

    Args:
        rewards: of each row; None or NaN where there is none.
        episodes: the name of each row's episode, None for an episode of one row; its rows are next to each other.

    >>> episode_outcomes([0.0, 1.0, 0.5, None, 2.0], ["a", "a", "b", "b", None])
    [None, 1.0, None, 0.5, 2.0]
    """
    outcomes = list[float | None](rewards)
    for i in range(len(rewards) - 1):
        if episodes[i] is not None and episodes[i] == episodes[i + 1]:
            later = outcomes[i + 1]
            outcomes[i + 1] = outcomes[i] if later is None or math.isnan(later) else later
            outcomes[i] = None
    return outcomes


def reward_part(name: str) -> str:
    """Return the name of a part of a reward as a column can have it.

    >>> reward_part("accuracy_reward"), reward_part("<lambda>"), reward_part("trusted")
    ('accuracy_reward', '_lambda_', 'trusted_')
    """
    word = re.sub(r"[^\w-]", "_", name, flags=re.ASCII)[:_LONGEST]
    return f"{word}_" if word == "trusted" else word  # there is a column reward_trusted
