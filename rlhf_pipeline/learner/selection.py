"""Which stored trajectories an optimizer step learns from: a definition's `Sample` as a strategy, and the use limit."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.config import Sample
from rlhf_pipeline.replay.samplers import STRATEGIES, TrajectorySampler, as_sampler

Ints = npt.NDArray[np.int64]


def sampler_of(sample: Sample, *, max_staleness: int | None, updates_per_rollout: int = 1) -> TrajectorySampler:
    """Return the strategy that a definition names.

    Args:
        sample: the definition's choice.
        max_staleness: largest age, in optimizer steps, of a trajectory that is learned from; None sets no limit.
        updates_per_rollout: optimizer steps on each rollout; what is younger is the newest rollout.

    >>> sampler_of(Sample(strategy="mix", tau=8.0), max_staleness=16)
    MixSampler(max_staleness=None, max_uses=None)
    """
    entry = STRATEGIES[sample.strategy]
    given = {
        "tau": math.inf if sample.tau is None else sample.tau,
        "alpha": sample.alpha,
        "fresh_fraction": sample.fresh_fraction,
        "updates_per_rollout": updates_per_rollout,
    }
    settings = {name: given[name] for name in entry.settings}
    return as_sampler(sample.strategy, max_staleness=max_staleness, max_uses=sample.max_uses, **settings)


class StepLedger(Protocol):
    """Where it is written down which trajectories enter which step; `run.ledger.Ledger`."""

    def planned(self, step: int) -> dict[str, Any] | None:
        """Return the row of a step that was begun before, or None."""
        ...

    def record(self, row: dict[str, Any]) -> bool:
        """Write a step's row; return False if an earlier try at this step used other trajectories."""
        ...


class UseCounts:
    """How many steps have used each trajectory, counted from the ledger, which a crash cannot make count twice.

    Trajectories are named by their ids, which a run that was killed shares with one that was not; its rows are others.

    Args:
        ledger: of the run.
        window: trajectories that no step of the last `window` used are not asked for again; None remembers all.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from rlhf_pipeline.run.ledger import Ledger
    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "ledger.jsonl")
    >>> _ = ledger.record({"step": 1, "row_ids": [0, 1], "trajectory_ids": [4, 5]})
    >>> _ = ledger.record({"step": 2, "row_ids": [1], "trajectory_ids": [5]})
    >>> UseCounts(ledger).before(3, np.array([4, 5, 6])).tolist()
    [1, 2, 0]
    """

    def __init__(self, ledger: StepLedger, *, window: int | None = None) -> None:
        self._ledger = ledger
        self._window = window
        self._ids: Ints = np.empty(0, np.int64)
        self._counts: Ints = np.empty(0, np.int64)
        self._last: Ints = np.empty(0, np.int64)
        """The last step that used each."""
        self._up_to = 0

    def before(self, step: int, trajectory_ids: Ints) -> Ints:
        """Return how many of the steps before `step` learned from each trajectory, int64 `[n]`."""
        first = 1 if self._window is None else max(step - self._window, 1)
        if self._up_to >= step:
            self._keep(np.zeros(len(self._ids), bool))
            self._up_to = 0
        for earlier in range(max(self._up_to + 1, first), step):
            row = self._ledger.planned(earlier)
            if row is not None:
                self._count(np.asarray(row["trajectory_ids"], np.int64), earlier)
        self._up_to = step - 1
        self._keep(self._last >= first)
        places = np.searchsorted(self._ids, trajectory_ids)
        found = np.append(self._ids, -1)[places] == trajectory_ids
        return np.where(found, np.append(self._counts, 0)[places], 0)

    def state(self) -> Ints:
        """Return the counts up to the last step that was asked for, int64 `[3, 1 + n]`, for a checkpoint."""
        return np.column_stack([np.full(3, self._up_to), np.stack([self._ids, self._counts, self._last])])

    def load_state(self, state: Ints) -> None:
        """Take up what `state` returned, so that the ledger is read from there on."""
        self._up_to = int(state[0, 0])
        self._ids, self._counts, self._last = state[0, 1:], state[1, 1:], state[2, 1:]

    def _keep(self, kept: npt.NDArray[np.bool_]) -> None:
        self._ids, self._counts, self._last = self._ids[kept], self._counts[kept], self._last[kept]

    def _count(self, used: Ints, step: int) -> None:
        new = np.setdiff1d(used, self._ids)
        places = np.searchsorted(self._ids, new)
        self._ids, self._counts = np.insert(self._ids, places, new), np.insert(self._counts, places, 0)
        self._last = np.insert(self._last, places, step)
        at = np.searchsorted(self._ids, used)
        np.add.at(self._counts, at, 1)
        self._last[at] = step
