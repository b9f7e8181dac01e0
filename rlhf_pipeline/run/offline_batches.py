"""The batches of gathered trajectories: a pure function of the store, the seed, the step and the ledger."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.samplers import StoreView, TrajectorySampler, step_generator
from rlhf_pipeline.config import Replay, Sample
from rlhf_pipeline.data.episodes import stored_last_rows
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.learner.step_plan import StepLedger, UseCounts, sampler_of
from trajectory_store import TrajectoryStore

Ints = npt.NDArray[np.int64]

_STEPS_LOOKED_AT = 65
"""The number of simulated steps. With ordinary weights, every size of a source's share of a batch occurs in them."""


def shares(weights: Sequence[float], total: int) -> Ints:
    """Divide the first `total` draws among sources with these weights, int64 `[S]`.

    Source `s` gets its draw number `j` at the time `(j - 1/2) / weight`, and draws are taken in the order of time
    (Webster's method; at equal times, the earlier source first). So a larger total never reduces a count, and with up
    to five sources every count is less than two draws from its exact share.

    >>> [shares([3.0, 1.0], total).tolist() for total in (4, 5, 8)]
    [[3, 1], [4, 1], [6, 2]]
    """
    exact = [Fraction(weight) for weight in weights]
    whole = sum(exact)
    counts = [int(total * weight / whole) for weight in exact]
    # Rounding down leaves less than one draw per source, so no count can be too large by more than one.
    counts = [max(count - 1, 0) for count in counts]
    for _ in range(total - sum(counts)):
        times = [(2 * count + 1) / weight for count, weight in zip(counts, exact, strict=True)]
        counts[times.index(min(times))] += 1
    return np.asarray(counts, np.int64)


class EpochOrder:
    """All trajectories once per epoch, groups together, in an order drawn for each epoch.

    Places are counted through all epochs: with `n` trajectories, places 0 to `n - 1` are the first epoch. If a batch
    ends one epoch and begins the next, the groups from its first part come after it in the next epoch, so that no
    trajectory is in a batch twice.

    Args:
        groups: int64 `[n]`, groups together.
        batch_at: returns where the batch of a place begins and ends; at most `n` apart.
        seed: of the run.
        salt: makes the orders of several sources different.

    >>> order = EpochOrder(np.array([0, 0, 1, 1, 2]), lambda place: (place - place % 2, place - place % 2 + 2), seed=0)
    >>> sorted(order.take(0, 5).tolist()), sorted(order.take(5, 10).tolist())
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    """

    def __init__(self, groups: Ints, batch_at: Callable[[int], tuple[int, int]], *, seed: int, salt: int = 0) -> None:
        edges = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
        self._starts, self._sizes = edges, np.diff(edges, append=len(groups))
        self._member = np.repeat(np.arange(len(edges)), self._sizes)
        self._batch_at = batch_at
        self._seed = seed + (salt << 32)
        self.num = len(groups)
        self._epoch = -1
        self._rows = np.empty(0, np.int64)
        self._before = np.empty(0, np.int64)

    def take(self, start: int, stop: int) -> Ints:
        """Return the rows at places `start` to `stop`, at most one epoch's worth."""
        epoch, at = divmod(start, self.num)
        rows = self._order(epoch)[at : at + stop - start]
        missing = stop - start - len(rows)
        return np.concatenate([rows, self._order(epoch + 1)[:missing]]) if missing else rows

    def _order(self, epoch: int) -> Ints:
        """Return the rows of an epoch in order. Each order depends on the one before, so they are drawn in turn."""
        if epoch == self._epoch - 1:
            return self._before
        if epoch < self._epoch:
            self._epoch = -1
        while self._epoch < epoch:
            self._epoch += 1
            start, stop = self._batch_at(self._epoch * self.num) if self._epoch else (0, 0)
            shared = self._epoch * self.num - start  # rows of the batch that are in the epoch before
            tail = self._rows[len(self._rows) - shared :]
            self._before, self._rows = self._rows, self._drawn(self._epoch, tail, stop - start - shared)
        return self._rows

    def _drawn(self, epoch: int, tail: Ints, head: int) -> Ints:
        order = step_generator(self._seed, epoch).permutation(len(self._starts))
        if not len(tail):
            return self._spread(order)
        ended = np.isin(order, self._member[tail])
        continuing = order[~ended]
        enough = int(np.searchsorted(np.cumsum(self._sizes[continuing]), head)) + 1
        if enough <= len(continuing):
            return self._spread(np.concatenate([continuing[:enough], order[ended], continuing[enough:]]))
        rows = self._spread(order)  # hardly more than one batch, so groups cannot stay together
        late = np.isin(rows, tail)
        return np.concatenate([rows[~late], rows[late]])

    def _spread(self, groups: Ints) -> Ints:
        sizes = self._sizes[groups]
        ends = np.cumsum(sizes)
        return np.arange(int(ends[-1])) + np.repeat(self._starts[groups] - (ends - sizes), sizes)


class Batches:
    """The batches of a run over a gathered store.

    >>> import tempfile
    >>> from rlhf_pipeline.run.copy_rows import SOURCE
    >>> from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
    >>> with TrajectoryStore.create(tempfile.mkdtemp() + "/store", trajectory_schema([SOURCE])) as store:
    ...     _ = store.append({"input_ids": [[1]] * 4, "source": [0] * 4, "group_id": [7, 7, 8, 8]})
    ...     batches = Batches(store, replay=Replay(epochs=2), sample=Sample(), batch_size=2, seed=0, ledger=None)
    ...     batches.last_step, [batches.rows(step)[0].tolist() for step in (1, 2)]
    (4, [[0, 1], [2, 3]])
    """

    def __init__(
        self,
        store: TrajectoryStore,
        *,
        replay: Replay,
        sample: Sample,
        batch_size: int,
        seed: int,
        ledger: StepLedger | None,
    ) -> None:
        ids = np.asarray(store.ids())
        ids = ids[(store.read_scalars("priority", ids) > 0) & stored_last_rows(store, ids)]
        if not len(ids):
            raise DataError(
                "every trajectory has priority 0 (the rewards in each group are all equal): there is nothing to learn "
                "from."
            )
        source = store.read_scalars("source", ids)
        versions = store.read_scalars("policy_version", ids)
        self.newest = int(versions.max())
        self._ids, self._ages = ids, self.newest - versions
        self.num, self.seed, self.sample = len(ids), seed, sample
        self.batch_size = min(sample.batch_size or batch_size, len(ids))
        weighted = bool(replay.weights)
        self._weights = [w for at, w in enumerate(replay.weights) if (source == at).any()] if weighted else [1.0]
        parts = [np.flatnonzero(source == at) for at in np.unique(source)] if weighted else [np.arange(len(ids))]
        self._parts = parts
        self._check_sizes()
        groups = store.read_scalars("group_id", ids)
        self._orders = [
            EpochOrder(groups[part], functools.partial(self._batch_at, at), seed=seed, salt=at)
            for at, part in enumerate(parts)
        ]
        self._sampler: TrajectorySampler | None = None
        if sample.strategy != "fresh":
            self._sampler = sampler_of(sample, max_staleness=None)
        self._views = [StoreView(store, ids[part], version=self.newest) for part in parts]
        self._names = [store.read_scalars("trajectory_id", ids[part]) for part in parts]
        self._uses = UseCounts(ledger) if ledger is not None and sample.max_uses is not None else None
        self._most = self._most_draws(replay)
        self.last_step = None if self._most is None else math.ceil(self._most / self.batch_size)

    def rows(self, step: int) -> tuple[Ints, Ints]:
        """Return the row ids of a step, int64 `[n]`, ascending, and their ages in policy versions."""
        counts_before, counts = self._draws((step - 1) * self.batch_size), self._draws(step * self.batch_size)
        chosen: list[Ints] = []
        for at, (start, stop) in enumerate(zip(counts_before.tolist(), counts.tolist(), strict=True)):
            if stop > start:
                chosen.append(self._parts[at][self._draw(at, start, stop, step)])
        rows = np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)
        if not len(rows):
            raise DataError(
                f"step {step}: none of the {self.num:,} trajectories may be used again "
                f"(sample.strategy={self.sample.strategy}, sample.max_uses={self.sample.max_uses})."
            )
        return self._ids[rows], self._ages[rows]

    def _draw(self, at: int, start: int, stop: int, step: int) -> Ints:
        if self._sampler is None:
            return self._orders[at].take(start, stop)
        view = self._views[at]
        uses = None if self._uses is None else self._uses.before(step, self._names[at])
        view = StoreView(view.store, view.ids, version=view.version, uses=uses, _cache=view._cache)
        return self._sampler.select(view, stop - start, seed=self.seed + (at << 32), step=step)

    def _draws(self, total: int) -> Ints:
        total = total if self._most is None else min(total, self._most)
        return shares(self._weights, total)

    def _batch_at(self, at: int, place: int) -> tuple[int, int]:
        """Return the first and last draw from one source in the batch that holds a given draw from it."""
        high = place // self.batch_size + 1
        while self._draw_count(at, high) <= place:
            high *= 2
        step = bisect_right(range(high), place, key=functools.partial(self._draw_count, at))
        return self._draw_count(at, step - 1), self._draw_count(at, step)

    def _draw_count(self, at: int, step: int) -> int:
        return int(shares(self._weights, step * self.batch_size)[at])

    def _check_sizes(self) -> None:
        counts = [shares(self._weights, step * self.batch_size) for step in range(_STEPS_LOOKED_AT)]
        most = np.diff(counts, axis=0).max(axis=0)
        for at, part in enumerate(self._parts):
            if len(part) < most[at]:
                raise DefinitionError(
                    f"store {at + 1} of {len(self._parts)} has too few trajectories to learn from ({len(part):,}): its "
                    f"weight requires {int(most[at]):,} of the {self.batch_size:,} trajectories in a batch. Lower its "
                    "weight or sample.batch_size."
                )

    def _most_draws(self, replay: Replay) -> int | None:
        """Return the total number of draws, or None if nothing limits it."""
        limits: list[int] = []
        if replay.epochs is not None:
            limits.append(max(round(replay.epochs * self.num), 1))
        if self._sampler is None and self.sample.max_uses is not None:
            limits.append(self._until_used_up(self.sample.max_uses))
        return min(limits, default=None)

    def _until_used_up(self, max_uses: int) -> int:
        """Return the number of draws until a source has used each of its trajectories `max_uses` times."""
        room = np.asarray([max_uses * len(part) for part in self._parts])
        draws = range(max_uses * self.num + 1)
        return bisect_left(draws, True, key=lambda total: bool((shares(self._weights, total) > room).any())) - 1
