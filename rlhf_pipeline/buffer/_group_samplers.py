"""Strategies that draw complete groups: all trajectories of a `group_id`, or none."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

import numpy as np

from rlhf_pipeline.buffer._strategy import Floats, Ints, StoreView, TrajectorySampler, gumbel_order
from rlhf_pipeline.errors import DefinitionError


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a view whose trajectories are all allowed by the limits.

    Attributes:
        order: int64 `[n]`, positions in the view by group, in the order of arrival within a group.
        starts: int64 `[g]`, where each group begins in `order`.
        sizes: int64 `[g]`, trajectories of each group.
    """

    order: Ints
    starts: Ints
    sizes: Ints

    def __len__(self) -> int:
        return len(self.sizes)

    def rows(self, group: int) -> Ints:
        """Return the positions of one group in the view."""
        return self.order[self.starts[group] : self.starts[group] + self.sizes[group]]

    def mean(self, values: Floats) -> Floats:
        """Return each group's mean, float64 `[g]`, over the finite values of `[n]` in the view; NaN without any."""
        return self._mean(np.asarray(values, np.float64)[self.order])

    def variance(self, values: Floats) -> Floats:
        """Return each group's variance, float64 `[g]`, the mean square deviation of finite values; NaN without any."""
        ordered = np.asarray(values, np.float64)[self.order]
        return self._mean((ordered - np.repeat(self._mean(ordered), self.sizes)) ** 2)

    def _mean(self, ordered: Floats) -> Floats:
        if not len(self):
            return np.empty(0)
        finite = np.isfinite(ordered)
        with np.errstate(invalid="ignore"):
            return np.add.reduceat(np.where(finite, ordered, 0.0), self.starts) / np.add.reduceat(
                finite.astype(np.int64), self.starts
            )


def allowed_groups(view: StoreView, allowed: Ints, group_size: int | None = None) -> Groups:
    """Return the groups whose trajectories in the view are all allowed; a row without a group is its own group."""
    group_ids = view.column("group_id").astype(np.int64)
    group_ids = np.where(group_ids < 0, -1 - np.arange(len(group_ids)), group_ids)
    groups, code = np.unique(group_ids, return_inverse=True)
    sizes = np.bincount(code, minlength=len(groups))
    whole = np.bincount(code[allowed], minlength=len(groups)) == sizes
    if group_size is not None:
        whole &= sizes == group_size
    order = np.argsort(code, kind="stable")
    order, sizes = order[whole[code[order]]], sizes[whole]
    return Groups(order, np.cumsum(sizes) - sizes, sizes)


@dataclass(kw_only=True, eq=False, repr=False)
class GroupStrategy(TrajectorySampler):
    """Base of the strategies that draw complete groups."""

    group_size: int | None = None

    @abc.abstractmethod
    def _rank(self, view: StoreView, groups: Groups, rng: np.random.Generator) -> Ints:
        """Return the groups to draw, in order; excluded groups are never drawn."""

    def _members(self, view: StoreView, rows: Ints) -> Ints:
        """Return the trajectories to take from a drawn group: all of them by default."""
        del view
        return rows

    def _choose(self, view: StoreView, allowed: Ints, most: int, rng: np.random.Generator) -> Ints:
        groups = allowed_groups(view, allowed, self.group_size)
        parts: list[Ints] = []
        left = most
        for group in self._rank(view, groups, rng).tolist():
            rows = self._members(view, groups.rows(group))
            if len(rows) > left and parts:
                break  # at least one group is drawn, however small the batch
            parts.append(rows)
            left -= len(rows)
            if left <= 0:
                break
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


@dataclass(kw_only=True, eq=False, repr=False)
class GroupSampler(GroupStrategy):
    """Draws complete groups: all trajectories of a `group_id`, or none.

    A group is drawn only if the limits allow all its trajectories in the view.
    """

    order: str = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in ("uniform", "fresh"):
            raise DefinitionError(f"order is {self.order!r}; it must be 'uniform' or 'fresh'.")

    def _rank(self, view: StoreView, groups: Groups, rng: np.random.Generator) -> Ints:
        del view
        if self.order == "uniform":
            return rng.permutation(len(groups))
        completed = groups.order[groups.starts + groups.sizes - 1]
        return np.argsort(completed, kind="stable")


@dataclass(kw_only=True, eq=False, repr=False)
class SuccessSampler(GroupStrategy):
    """Draws complete groups by their success rate, groups of medium difficulty most often.

    Groups are put into buckets of equal width by the share of their trajectories whose task reward reaches
    `threshold`. A bucket's probability follows a normal curve of its middle around `target`, and within a bucket all
    groups are equally likely, so that many easy groups do not crowd out the rest. Groups in which all or none succeeded
    teach nothing and are excluded. Source: ExGRPO, https://arxiv.org/abs/2510.02245.

    >>> SuccessSampler(buckets=4).success_buckets(np.array([0.0, 0.25, 0.5, 0.9, 1.0])).tolist()
    [0, 1, 2, 3, 3]
    """

    buckets: int = 4
    target: float = 0.5
    spread: float = 0.25
    threshold: float = 0.5
    extremes: bool = False
    tau: float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buckets < 1 or not self.spread > 0 or not self.tau > 0 or not 0 <= self.target <= 1:
            raise DefinitionError(
                f"buckets ({self.buckets}) must be at least 1, spread ({self.spread}) and tau ({self.tau}) above 0, "
                f"and target ({self.target}) between 0 and 1."
            )

    def success_buckets(self, rates: Floats) -> Ints:
        """Return the bucket of each success rate, int64 `[g]`; the last bucket includes 1."""
        return np.minimum((rates * self.buckets).astype(np.int64), self.buckets - 1)

    def log_weights(self, view: StoreView, groups: Groups) -> Floats:
        """Return the log of each group's unnormalised probability, `[g]`; -inf if it is never drawn."""
        reward = view.column("task_reward").astype(np.float64)
        rates = groups.mean(np.where(np.isfinite(reward), reward >= self.threshold, np.nan))
        keep = np.isfinite(rates)
        if not self.extremes:
            keep &= (rates > 0) & (rates < 1)
        out = np.full(len(groups), -np.inf)
        bucket = self.success_buckets(rates[keep])
        members = np.bincount(bucket, minlength=self.buckets)
        middle = (bucket + 0.5) / self.buckets
        out[keep] = -((middle - self.target) ** 2) / (2 * self.spread**2) - np.log(members[bucket])
        return _aged(out, view, groups, self.tau)

    def _rank(self, view: StoreView, groups: Groups, rng: np.random.Generator) -> Ints:
        return gumbel_order(self.log_weights(view, groups), rng)


@dataclass(kw_only=True, eq=False, repr=False)
class VarianceSampler(GroupStrategy):
    """Whole groups with probability proportional to `variance^alpha * exp(-age / tau)`, of their task rewards.

    Groups without spread have no advantage and are never drawn. With `members`, only the trajectories of a group whose
    rewards vary most are taken: some of the lowest and some of the highest. Source: the variance-driven replay of
    RePO, https://arxiv.org/abs/2506.09340.
    """

    alpha: float = 1.0
    tau: float = math.inf
    members: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tau > 0 or (self.members is not None and self.members < 2):
            raise DefinitionError(
                f"tau ({self.tau}) must be above 0, and members ({self.members}) must be at least 2, or None."
            )

    def log_weights(self, view: StoreView, groups: Groups) -> Floats:
        """Return the log of each group's unnormalised probability, `[g]`; -inf if it is never drawn."""
        spread = groups.variance(view.column("task_reward"))
        out = np.full(len(groups), -np.inf)
        keep = np.nan_to_num(spread) > 0
        out[keep] = self.alpha * np.log(spread[keep])
        return _aged(out, view, groups, self.tau)

    def _rank(self, view: StoreView, groups: Groups, rng: np.random.Generator) -> Ints:
        return gumbel_order(self.log_weights(view, groups), rng)

    def _members(self, view: StoreView, rows: Ints) -> Ints:
        if self.members is None or len(rows) <= self.members:
            return rows
        return rows[most_varied(view.column("task_reward")[rows], self.members)]


def most_varied(rewards: Floats, count: int) -> Ints:
    """Return the subset of `count` values with the largest variance: some of the lowest and some of the highest.

    Args:
        rewards: `[n]`; values that are not finite come last.
        count: size of the subset, at most n.

    Returns:
        Positions, int64 `[count]`, ascending.

    >>> most_varied(np.array([0.0, 0.5, 0.4, 1.0, 0.1]), 2).tolist()
    [0, 3]
    """
    values = np.asarray(rewards, np.float64)
    order = np.argsort(np.where(np.isfinite(values), values, np.inf), kind="stable")
    finite = order[: int(np.isfinite(values).sum())]
    if len(finite) <= count:
        return np.sort(order[:count])
    splits = [np.concatenate([finite[:low], finite[len(finite) - count + low :]]) for low in range(count + 1)]
    best = max(splits, key=lambda subset: float(values[subset].var()))
    return np.sort(best)


def _aged(log_weights: Floats, view: StoreView, groups: Groups, tau: float) -> Floats:
    """Return the weights times `exp(-age / tau)`, with the mean age of a group's trajectories."""
    if not math.isfinite(tau):
        return log_weights
    return log_weights - groups.mean(view.age.astype(np.float64)) / tau
