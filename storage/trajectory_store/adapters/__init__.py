"""Other trainers, a file each: what their hooks give, as rows of a store. No file imports its trainer at the top."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Hashable, Sequence
from functools import lru_cache

from trajectory_store.errors import SchemaError
from trajectory_store.recorder import TrajectoryRecorder

VARIABLE = "TRAJECTORY_STORE"
_LONGEST = 100
"""Letters of the name of a reward's part."""


def store_here() -> str:
    """Return the folder that `TRAJECTORY_STORE` names.

    Raises:
        SchemaError: the environment names no store.
    """
    store = os.environ.get(VARIABLE)
    if not store:
        raise SchemaError(f"set {VARIABLE} to the folder of the store.")
    return store


def recorder_here() -> TrajectoryRecorder:
    """Return this process's recorder into the store that `TRAJECTORY_STORE` names, for hooks that are named by a path.

    Raises:
        SchemaError: the environment names no store.
    """
    return _recorder(store_here(), os.getpid())


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


@lru_cache(maxsize=8)
def _recorder(store: str, process: int) -> TrajectoryRecorder:
    return TrajectoryRecorder(store, rank=0, world_size=1)
