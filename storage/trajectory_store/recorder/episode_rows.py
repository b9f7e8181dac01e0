"""Episodes of several rows: their rows in a call of the recorder, and the values that all of them share."""

# pyright: standard
# Foreign data, whose types are checked at run time.
from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import BatchError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRows:
    """Per row of a call, int64 [n]: the position of the first row of its episode, its position in it, and its size."""

    first: Ints
    position: Ints
    size: Ints

    @property
    def last(self) -> npt.NDArray[np.bool_]:
        """Which rows are the last of their episode, and so have its outcome."""
        return self.position == self.size - 1

    def share(self, fields: dict[str, Sequence[Any]]) -> None:
        """Give all rows of an episode the values that belong to it: a failure, the end, the version, the advantage.

        Raises:
            BatchError: a row that is not the last of its episode has a reward.
        """
        for i in np.flatnonzero(~self.last).tolist():
            reward = fields["reward"][i] if "reward" in fields else None
            if reward is not None and not math.isnan(float(reward)):
                raise BatchError(
                    f"row {i} has a reward, {float(reward):g}, but is not the last row of its episode. Assign the "
                    "reward of an episode to its last row, and None to the other rows; turn_rewards may contain the "
                    "rewards of individual turns."
                )
        ends = (self.first + self.size - 1).tolist()
        for name in ("finish_reason", "advantage"):
            if name in fields:
                fields[name] = [fields[name][end] for end in ends]
        spans = [slice(first, end + 1) for first, end in zip(self.first.tolist(), ends, strict=True)]
        if "failure" in fields:
            kinds = fields["failure"]
            fields["failure"] = [next((kind for kind in reversed(kinds[span]) if kind), "") for span in spans]
        fields["policy_version"] = [min(fields["policy_version"][span]) for span in spans]


def episode_rows(names: Sequence[Hashable | None]) -> EpisodeRows:
    """Return the rows of episodes by their names; None is an episode of one row.

    Raises:
        BatchError: rows of an episode are not next to each other.

    >>> rows = episode_rows(["a", "a", None, None])
    >>> rows.first.tolist(), rows.position.tolist(), rows.size.tolist()
    ([0, 0, 2, 3], [0, 1, 0, 0], [2, 2, 1, 1])
    """
    starts = [i == 0 or name is None or name != names[i - 1] for i, name in enumerate(names)]
    begun = [name for name, start in zip(names, starts, strict=True) if start and name is not None]
    if len(set(begun)) < len(begun):
        again = next(name for i, name in enumerate(begun) if name in begun[:i])
        raise BatchError(f"the rows of episode {again!r} are not consecutive. Pass them one after the other.")
    firsts = np.flatnonzero(starts)
    sizes = np.diff(np.append(firsts, len(names)))
    first = np.repeat(firsts, sizes)
    return EpisodeRows(first=first, position=np.arange(len(names)) - first, size=np.repeat(sizes, sizes))
