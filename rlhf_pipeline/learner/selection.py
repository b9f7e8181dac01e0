"""Which stored trajectories an optimizer step learns from: a definition's `Sample` as a strategy, and the use limit."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.config import Sample
from rlhf_pipeline.learner.ledger import Ledger
from rlhf_pipeline.replay.samplers import (
    FreshSampler,
    GroupSampler,
    MixSampler,
    PrioritySampler,
    RecencySampler,
    SuccessSampler,
    TrajectorySampler,
    UniformSampler,
    VarianceSampler,
)

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
    tau = math.inf if sample.tau is None else sample.tau
    age, uses = max_staleness, sample.max_uses
    match sample.strategy:
        case "fresh":
            return FreshSampler(max_staleness=age, max_uses=uses)
        case "uniform":
            return UniformSampler(max_staleness=age, max_uses=uses)
        case "recency":
            return RecencySampler(tau=tau, max_staleness=age, max_uses=uses)
        case "priority":
            return PrioritySampler(column="advantage", alpha=sample.alpha, tau=tau, max_staleness=age, max_uses=uses)
        case "group":
            return GroupSampler(max_staleness=age, max_uses=uses)
        case "success":
            return SuccessSampler(tau=tau, max_staleness=age, max_uses=uses)
        case "variance":
            return VarianceSampler(alpha=sample.alpha, tau=tau, max_staleness=age, max_uses=uses)
        case "mix":
            newest = FreshSampler(max_staleness=updates_per_rollout - 1, max_uses=uses)
            return MixSampler(
                newest, RecencySampler(tau=tau, max_staleness=age, max_uses=uses), fraction=sample.fresh_fraction
            )


class UseCounts:
    """How many steps have used each row, counted from the ledger, which a crash cannot make count twice.

    >>> import tempfile
    >>> from pathlib import Path
    >>> ledger = Ledger(Path(tempfile.mkdtemp()) / "ledger.jsonl")
    >>> _ = ledger.record({"step": 1, "row_ids": [4, 5]})
    >>> _ = ledger.record({"step": 2, "row_ids": [5]})
    >>> UseCounts(ledger).before(3, np.array([4, 5, 6])).tolist()
    [1, 2, 0]
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._rows: Ints = np.empty(0, np.int64)
        self._counts: Ints = np.empty(0, np.int64)
        self._up_to = 0

    def before(self, step: int, row_ids: Ints) -> Ints:
        """Return how many of the steps before `step` learned from each row, int64 `[n]`."""
        if self._up_to >= step:
            self._rows, self._counts, self._up_to = self._rows[:0], self._counts[:0], 0
        for earlier in range(self._up_to + 1, step):
            row = self._ledger.planned(earlier)
            if row is not None:
                self._count(np.asarray(row["row_ids"], np.int64))
        self._up_to = step - 1
        places = np.searchsorted(self._rows, row_ids)
        found = np.append(self._rows, -1)[places] == row_ids
        return np.where(found, np.append(self._counts, 0)[places], 0)

    def forget_all_but(self, row_ids: Ints) -> None:
        """Drop the counts of rows that are not asked for again."""
        kept = np.isin(self._rows, row_ids)
        self._rows, self._counts = self._rows[kept], self._counts[kept]

    def _count(self, used: Ints) -> None:
        new = np.setdiff1d(used, self._rows)
        places = np.searchsorted(self._rows, new)
        self._rows, self._counts = np.insert(self._rows, places, new), np.insert(self._counts, places, 0)
        np.add.at(self._counts, np.searchsorted(self._rows, used), 1)
