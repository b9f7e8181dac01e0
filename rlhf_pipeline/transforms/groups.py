"""Groups of trajectories: arrivals, failures, waiting, when a group closes, and its advantages."""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlhf_pipeline.data.keys import ASSISTANT_MASK, DEGENERATE, KL_COEF, LOG_PROBS, PRIORITY, RETURN, TASK_REWARD, Key
from rlhf_pipeline.data.trajectories import (
    Flat,
    Text,
    Trajectories,
    concat,
    copied_rows,
    last_position,
    segment_sum,
    spread,
    step_sum,
)
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.functional.advantage import (
    EstimatorFunction,
    group_advantage,
    penalty_rounding,
    whitened_step_rewards,
)
from trajectory_store import BufferPool

Ints = npt.NDArray[np.int64]

MOST_LATE = 4096
"""The number of early-closed groups to remember, so that their stragglers do not begin a new group."""

_NUMBERS = 1 << 61

_log = logging.getLogger("rlhf_pipeline")


class Scores(NamedTuple):
    """The inputs of advantages, one number per trajectory.

    Attributes:
        returns: float64 `[k]`.
        lengths: int64 `[k]`, completion tokens (or steps).
        task: float64 `[k]`, the reward without a KL penalty.
        rounding: float64 `[k]`, the rounding error that the penalty may add to the return; 0 without a penalty.
    """

    returns: Tensor
    lengths: Tensor
    task: Tensor
    rounding: Tensor

    def take(self, index: Tensor) -> Scores:
        """Return the scores of the given trajectories."""
        return Scores(*(values[index] for values in self))

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Scores:
        """Concatenate several scores."""
        return cls(*(torch.cat(values) for values in zip(*parts, strict=True)))


def scores_of(batch: Trajectories, reward: Flat, bounds: Sequence[int], how: str | None, eps: float) -> Scores:
    """Return the scores of trajectories; a trajectory without rewards has return 0.

    Args:
        batch: their steps.
        reward: per token or per step, one row per step.
        bounds: the first step of each trajectory, then the number of steps.
        how: `sum`, `mean` or `max` of a trajectory's rewards; None is `sum`.
        eps: machine epsilon of the dtype that log-probs were computed in.
    """
    n, k = bounds[-1], len(bounds) - 1
    values = reward.values.detach().double()
    counts = reward.lengths if reward.lengths is not None else torch.ones(n, dtype=torch.int64)
    counts = counts * (values[0].numel() if values.shape[0] else 1)
    counts = counts if k == n else step_sum(counts, bounds)
    if k == values.numel() and reward.lengths is None:
        returns = values.reshape(-1)
    elif how == "max":
        returns = torch.segment_reduce(values.reshape(-1), "max", lengths=counts)
    else:
        returns = segment_sum(values, counts)
        returns = returns / counts if how == "mean" else returns
    returns = torch.where(counts == 0, 0.0, returns)
    mask, lengths = batch.get(ASSISTANT_MASK), counts
    if isinstance(mask, Flat) and mask.lengths is not None:
        tokens = segment_sum(mask.values, mask.lengths).to(torch.int64)
        lengths = tokens if k == n else step_sum(tokens, bounds)
    return with_penalty(batch, returns, lengths, eps)


def with_penalty(batch: Trajectories, returns: Tensor, lengths: Tensor, eps: float) -> Scores:
    """Return scores; if returns include a KL penalty, with the rewards before it and its rounding error."""
    coef, task, log_probs = batch.get(KL_COEF), batch.get(TASK_REWARD), batch.get(LOG_PROBS)
    if (
        isinstance(coef, Flat)
        and bool((coef.values > 0).any())
        and isinstance(task, Flat)
        and isinstance(log_probs, Flat)
        and log_probs.lengths is not None
        and coef.values.numel() == task.values.numel() == log_probs.lengths.numel() == returns.numel()
    ):
        before, weights = task.values.reshape(-1).double(), coef.values.reshape(-1)
        rounding = penalty_rounding(weights, before, log_probs.values, log_probs.lengths, lengths=lengths, eps=eps)
        return Scores(returns, lengths, before, rounding)
    return Scores(returns, lengths, returns, torch.zeros_like(returns))


@dataclass(slots=True, eq=False)
class Arrived:
    """Whole trajectories that arrived in one call.

    Attributes:
        batch: their steps; for language models every trajectory is one step. Without columns if a store holds them.
        bounds: `k + 1` step offsets of the `k` trajectories.
        groups: the identity of each trajectory's group.
        reward_key: the key of the reward.
        scores: of each trajectory.
        names: the `trajectory_id` of each, negative for one without; None if none has one.
        rows: int64 `[k]`, their row ids in the store; None while they are in memory.
    """

    batch: Trajectories
    bounds: list[int]
    groups: list[Hashable]
    reward_key: Key
    scores: Scores
    names: list[int] | None = None
    rows: Ints | None = None

    def owners(self) -> Tensor:
        """Return the trajectory of each step, int64."""
        return spread(torch.arange(len(self.groups)), torch.tensor(self.bounds).diff())

    def steps_of(self, trajectories: Sequence[int]) -> Tensor:
        """Return the step indices of the given trajectories, int64."""
        b = self.bounds
        if len(b) == b[-1] + 1:
            return torch.tensor(trajectories, dtype=torch.int64)
        return torch.tensor([s for i in trajectories for s in range(b[i], b[i + 1])], dtype=torch.int64)

    def take(self, trajectories: Sequence[int]) -> Arrived:
        """Return the given trajectories only, without references to the others."""
        if list(trajectories) == list(range(len(self.groups))):
            return self
        steps = self.steps_of(trajectories)
        bounds = [0]
        for i in trajectories:
            bounds.append(bounds[-1] + self.bounds[i + 1] - self.bounds[i])
        index = torch.tensor(trajectories, dtype=torch.int64)
        return Arrived(
            self.batch.select(steps),
            bounds,
            [self.groups[i] for i in trajectories],
            self.reward_key,
            self.scores.take(index),
            None if self.names is None else [self.names[i] for i in trajectories],
            None if self.rows is None else self.rows[index.numpy()],
        )

    def owned(self, source: Arrived) -> Arrived:
        """Return these trajectories, taken from `source`, in memory of their own, so that they can wait."""
        batch = Trajectories(self.batch.n)
        for key, column in self.batch.items():
            if isinstance(column, Text):
                given = column.items
                batch[key] = Text(copied_rows(given) if given and isinstance(given[0], TensorDictBase) else given)
            elif self is source:
                batch[key] = replace(column, values=column.values.clone())
            else:
                batch[key] = column
        return replace(self, batch=batch)

    def stored(self, rows: Ints) -> Arrived:
        """Return these trajectories as rows of a store with the given ids."""
        return replace(self, batch=Trajectories(len(rows)), bounds=list(range(len(rows) + 1)), rows=rows)


@dataclass(slots=True, eq=False)
class Member:
    """A trajectory of a group: number `index` of `arrived`."""

    arrived: Arrived
    index: int

    @property
    def value(self) -> float:
        """Its return."""
        return float(self.arrived.scores.returns[self.index])

    @property
    def group(self) -> Hashable:
        """The identity of its group."""
        return self.arrived.groups[self.index]

    @property
    def name(self) -> int:
        """Its `trajectory_id`; negative if it has none."""
        return -1 if self.arrived.names is None else self.arrived.names[self.index]

    @property
    def row(self) -> int:
        """Its row id in the store."""
        assert self.arrived.rows is not None
        return int(self.arrived.rows[self.index])


@dataclass(slots=True, eq=False)
class Waiting:
    """An incomplete group.

    Attributes:
        members: its trajectories in the order of arrival.
        failed: members that will never arrive.
        since: when the first of them arrived, seconds.
        overdue: whether its timeout has passed, so that it closes as soon as it has enough members.
    """

    members: list[Member] = field(default_factory=list)
    failed: int = 0
    since: float = 0.0
    overdue: bool = False


class Closed(NamedTuple):
    """A closed group.

    Attributes:
        members: the trajectories to learn from.
        left: the trajectories left out.
        early: whether members were still missing.
    """

    members: list[Member]
    left: list[Member]
    early: bool


class Closing(NamedTuple):
    """Several groups that close together, in order.

    Attributes:
        sizes: trajectories of each.
        groups: their identities.
        early: whether each group had members missing; None if all groups are complete.
    """

    sizes: list[int]
    groups: list[Any]
    early: list[bool] | None = None

    @classmethod
    def of(cls, closed: Sequence[Closed]) -> Closing:
        """Describe closed groups, each with members."""
        early = [group.early for group in closed]
        return cls(
            [len(group.members) for group in closed],
            [group.members[0].group for group in closed],
            early if any(early) else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseRules:
    """The rules by which a group closes.

    Attributes:
        size: trajectories of a complete group.
        most: wait for up to this many, to choose from.
        enough: close with this many, arrived or failed.
        least: close with this many after the timeout.
        timeout_s: seconds until a group is overdue; None for never.
        batch_groups: groups that close together; None if each closes alone.
        choose: returns which members to learn from, or None to leave the group out; None takes the first `size`.
    """

    size: int
    most: int
    enough: int
    least: int
    timeout_s: float | None = None
    batch_groups: int | None = None
    choose: Callable[[Sequence[Member], int], list[int] | None] | None = None


class GroupQueue:
    """Incomplete groups by identity, in the order in which their first member arrived.

    Args:
        rules: when groups close.
        stats: counters, continued from their current values.

    Attributes:
        waiting: the groups.
        late: the number of members that may still arrive, for groups that closed early.
        unique: whether group identities are unique, so that a straggler can be told from a new group.
        recovered: whether groups may be complete already, after a crash before their update or with changed rules.
    """

    def __init__(self, rules: CloseRules, stats: dict[str, float]) -> None:
        self.rules = rules
        self.stats = stats
        self.waiting: dict[Hashable, Waiting] = {}
        self.late: dict[Hashable, int] = {}
        self.unique = self.recovered = False
        self._deadlines: list[tuple[float, int, Hashable, Waiting]] = []
        self._count = 0

    def open(self, group: Hashable, since: float) -> Waiting:
        """Start to wait for a group."""
        waiting = self.waiting[group] = Waiting(since=since)
        if self.rules.timeout_s is not None:
            self._count += 1
            heapq.heappush(self._deadlines, (since + self.rules.timeout_s, self._count, group, waiting))
        return waiting

    def whole(self, arrived: Arrived, now: float) -> list[list[int]] | None:
        """Return the members of each group of a call if all of them arrived complete.

        Args:
            arrived: the trajectories of the call.
            now: seconds.

        Returns:
            Groups in the order of completion; None if one is incomplete or has a member twice, or others may close now.
        """
        rules = self.rules
        overdue = bool(self._deadlines) and self._deadlines[0][0] <= now
        if self.recovered or overdue or rules.most != rules.size or rules.choose is not None:
            return None
        if arrived.names is not None:
            named = [pair for pair in zip(arrived.groups, arrived.names, strict=True) if pair[1] >= 0]
            if len(set(named)) < len(named):
                return None
        members: dict[Hashable, list[int]] = {}
        for i, group in enumerate(arrived.groups):
            members.setdefault(group, []).append(i)
        for group, found in members.items():
            if len(found) != rules.size or group in self.waiting or group in self.late:
                return None
        if rules.batch_groups is None:
            return sorted(members.values(), key=itemgetter(-1))
        batches: dict[int, list[Any]] = {}
        for group in members:
            batches.setdefault(batch_of(group, rules.batch_groups), []).append(group)
        if any(len(found) != rules.batch_groups for found in batches.values()):
            return None
        together = sorted(batches.values(), key=lambda batch: max(members[group][-1] for group in batch))
        return [members[group] for batch in together for group in sorted(batch)]

    def arrive(self, arrived: Arrived, now: float) -> list[Closed]:
        """Add trajectories and return the groups that close, overdue groups last.

        Raises:
            DataError: a member arrives twice, or is waiting already: it would take the place of a missing member.
        """
        if arrived.names is not None:
            waiting = (self.waiting[group].members for group in dict.fromkeys(arrived.groups) if group in self.waiting)
            seen = {(member.group, member.name) for members in waiting for member in members}
            for group, name in zip(arrived.groups, arrived.names, strict=True):
                if name >= 0 and (group, name) in seen:
                    raise DataError(
                        f"trajectory_id {name} came to group {group!r} twice, and a member counts once. Nothing of "
                        "this call was taken: leave out what waits already (TrajectoryReplayBuffer.waiting() lists "
                        "it), and give each member an id of its own, or none."
                    )
                seen.add((group, name))
        closed: list[Closed] = []
        for i, group in enumerate(arrived.groups):
            waiting = self.waiting.get(group)
            if waiting is None:
                if self.late and self.is_late(group):
                    self.stats["late_trajectories"] += 1
                    continue
                waiting = self.open(group, now)
            waiting.members.append(Member(arrived, i))
            closed += self._close_due(group, waiting)
        return closed + self.close_overdue(now)

    def _close_due(self, group: Hashable, waiting: Waiting) -> list[Closed]:
        """Close a group if it is due; groups of one batch close together, once all are due."""
        if not self._is_due(waiting):
            return []
        if self.rules.batch_groups is None:
            return self.complete(group)
        first = batch_of(group, self.rules.batch_groups) * self.rules.batch_groups
        names = range(first, first + self.rules.batch_groups)
        if not all(name in self.waiting and self._is_due(self.waiting[name]) for name in names):
            return []
        return [closed for name in names for closed in self.complete(name)]

    def _is_due(self, waiting: Waiting) -> bool:
        rules, arrived = self.rules, len(waiting.members)
        if rules.batch_groups is not None and waiting.failed >= rules.most:
            return True  # all its members failed, so the rest of its batch need not wait for it
        enough = rules.least if waiting.overdue else rules.enough
        return arrived > 0 and (arrived >= enough or arrived + waiting.failed >= rules.enough)

    def close_overdue(self, now: float) -> list[Closed]:
        """Close the overdue groups that have enough members; the others close once they do."""
        found: list[Hashable] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, group, waiting = heapq.heappop(self._deadlines)
            if self.waiting.get(group) is waiting:
                waiting.overdue = True
                found.append(group)
        if self.recovered:
            self.recovered, found = False, list(self.waiting)
        closed: list[Closed] = []
        for group in found:
            if group in self.waiting:  # otherwise it closed with its batch
                closed += self._close_due(group, self.waiting[group])
        return closed

    def complete(self, group: Hashable, *, close: bool = False) -> list[Closed]:
        """Remove a group that may be complete from the queue and return it; empty if it must keep waiting."""
        rules, waiting = self.rules, self.waiting[group]
        members, failed = waiting.members, waiting.failed
        early = len(members) + failed < rules.enough
        chosen: list[int] | None = list(range(len(members)))
        if rules.choose is not None:
            chosen = rules.choose(members, min(rules.size, len(members)))
        if chosen is None and len(members) < rules.most - failed and not (close or waiting.overdue):
            return []
        del self.waiting[group]
        self.stats["completed_groups"] += 1
        if early:
            self.stats["early_closed_groups"] += 1
            if self.unique and rules.timeout_s is not None:
                self._expect_late(group, rules.most - len(members) - failed)
        if chosen is None:
            self.stats["dropped_groups"] += 1
            return [Closed([], members, early)]
        self.stats["selected_trajectories"] += len(chosen)
        self.stats["unselected_trajectories"] += len(members) - len(chosen)
        left = [member for i, member in enumerate(members) if i not in chosen] if len(chosen) < len(members) else []
        return [Closed([members[i] for i in chosen], left, early)]

    def fail(self, group: Hashable, count: int, now: float) -> tuple[Waiting | None, list[Closed]]:
        """Record that `count` members of a group will never arrive.

        Returns:
            The group, or None if it had closed without them; and the groups that close.
        """
        waiting = self.waiting.get(group)
        if waiting is None and self.late:
            while count and self.is_late(group):
                count -= 1
            if not count:
                return None, []
        waiting = waiting or self.open(group, now)
        waiting.failed += count
        return waiting, self._close_due(group, waiting)

    def _expect_late(self, group: Hashable, missing: int) -> None:
        """Remember that members of a closed group may still arrive; only the newest groups are remembered."""
        self.late[group] = missing
        if len(self.late) > MOST_LATE:
            del self.late[next(iter(self.late))]

    def is_late(self, group: Hashable) -> bool:
        """Return whether a trajectory arrives after its group has closed, and count it."""
        missing = self.late.get(group)
        if missing is None:
            return False
        if missing > 1:
            self.late[group] = missing - 1
        else:
            del self.late[group]
        return True

    def members(self) -> Iterator[Member]:
        """Yield all waiting trajectories, group by group."""
        for waiting in self.waiting.values():
            yield from waiting.members

    def parts(self) -> list[tuple[Arrived, list[Member]]]:
        """Return each batch of arrivals that has waiting trajectories, with these in the order of arrival."""
        found: dict[int, tuple[Arrived, list[Member]]] = {}
        for member in self.members():
            found.setdefault(id(member.arrived), (member.arrived, []))[1].append(member)
        return [(arrived, sorted(members, key=lambda m: m.index)) for arrived, members in found.values()]

    def shrink(self, arrived: Arrived) -> None:
        """Release the completed trajectories of a call's arrivals."""
        groups = (self.waiting.get(group) for group in dict.fromkeys(arrived.groups))
        kept = [m for waiting in groups if waiting is not None for m in waiting.members if m.arrived is arrived]
        if kept:
            kept.sort(key=lambda m: m.index)
            repoint(kept, arrived.take([m.index for m in kept]).owned(arrived))

    def copy(self) -> GroupQueue:
        """Return an independent copy."""
        out = GroupQueue(self.rules, self.stats)
        out.late, out.unique = dict(self.late), self.unique
        for group, waiting in self.waiting.items():
            twin = out.open(group, waiting.since)
            twin.members, twin.failed, twin.overdue = waiting.members[:], waiting.failed, waiting.overdue
        return out


def batch_of(group: Hashable, batch_groups: int) -> int:
    """Return the batch of a group.

    Raises:
        DataError: the group's identity is not an integer.
    """
    if not isinstance(group, int):
        raise DataError(
            f"batch_groups={batch_groups} counts groups by an integer group_id, and a trajectory's group is {group!r}. "
            "Number the groups, or use an estimator that needs no batch."
        )
    return group // batch_groups


def repoint(members: Sequence[Member], arrived: Arrived) -> None:
    """Make the members point to the trajectories of `arrived`, in order."""
    for i, member in enumerate(members):
        member.arrived, member.index = arrived, i


def _parts(members: Iterable[Member]) -> tuple[list[tuple[Arrived, list[int]]], list[int]]:
    """Return the arrivals of members, each with the indices of these, and each member's position among all of them."""
    parts: dict[int, tuple[Arrived, list[int]]] = {}
    places: list[tuple[int, int]] = []
    for member in members:
        _, taken = parts.setdefault(id(member.arrived), (member.arrived, []))
        places.append((id(member.arrived), len(taken)))
        taken.append(member.index)
    first, num = dict[int, int](), 0
    for part, (_, taken) in parts.items():
        first[part], num = num, num + len(taken)
    return list(parts.values()), [first[part] + place for part, place in places]


def scores_together(members: Iterable[Member]) -> Scores:
    """Return the scores of members, in the given order."""
    parts, order = _parts(members)
    return Scores.join([arrived.scores.take(torch.tensor(taken)) for arrived, taken in parts]).take(torch.tensor(order))


def gather(members: Iterable[Member], pool: BufferPool) -> Arrived:
    """Concatenate members that are in memory, in the given order, into memory of the pool."""
    parts, order = _parts(members)
    if len(parts) == 1:
        return parts[0][0].take(parts[0][1])
    found = [arrived.take(taken) for arrived, taken in parts]
    sizes = [end - start for part in found for start, end in pairwise(part.bounds)]
    groups = [group for part in found for group in part.groups]
    steps: Sequence[int] = order
    if max(sizes) > 1:
        first = [0, *accumulate(sizes)]
        steps = [step for i in order for step in range(first[i], first[i] + sizes[i])]
    return Arrived(
        concat([part.batch for part in found], steps, pool),
        [0, *accumulate(sizes[i] for i in order)],
        [groups[i] for i in order],
        found[0].reward_key,
        Scores.join([part.scores for part in found]).take(torch.tensor(order)),
    )


class Graded(NamedTuple):
    """The advantages of the trajectories of whole groups.

    Attributes:
        advantages: float64 `[k]`.
        degenerate: bool `[k]`, whether the group has no spread, or the return is not finite.
        codes: int64 `[k]`, each trajectory's group.
    """

    advantages: Tensor
    degenerate: Tensor
    codes: Tensor

    @classmethod
    def nothing(cls) -> Graded:
        """Return the advantages of no trajectories."""
        return cls(torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.bool), torch.zeros(0).long())

    def take(self, index: Tensor) -> Graded:
        """Return the given trajectories."""
        return Graded(*(values[index] for values in self))

    def followed_by(self, more: int) -> Graded:
        """Append `more` trajectories that have no advantage yet."""
        code = int(self.codes.max()) + 1 if self.codes.numel() else 0
        return Graded(
            torch.cat([self.advantages, torch.full((more,), torch.nan, dtype=torch.float64)]),
            torch.cat([self.degenerate, torch.zeros(more, dtype=torch.bool)]),
            torch.cat([self.codes, torch.full((more,), code)]),
        )


def graded_groups(scores: Scores, codes: Tensor, estimator: str | EstimatorFunction, batches: Tensor | None) -> Graded:
    """Return the advantages of groups; returns that are not finite are ignored.

    Args:
        scores: of each trajectory.
        codes: int64 `[n]`, the group of each trajectory.
        estimator: one of `functional.advantage.ESTIMATORS`, or a function.
        batches: int64 `[n]`, the batch of each trajectory, for estimators that use batches; None is one batch.
    """
    finite = scores.returns.isfinite()
    if batches is None and bool(finite.all()):
        parts: list[Any] = [slice(None)]
    else:
        parts = [finite] if batches is None else [finite & (batches == batch) for batch in batches.unique().tolist()]
    advantages, degenerate = torch.zeros_like(scores.returns), torch.ones_like(finite)
    for part in parts:
        returns, lengths, task, rounding = scores.take(part)
        penalised = {"task_rewards": task, "rounding": rounding} if bool(rounding.any()) else {}
        advantages[part], degenerate[part] = group_advantage(
            returns, codes[part], estimator, lengths=lengths, **penalised
        )
    return Graded(advantages, degenerate, codes)


class Grader:
    """Computes the advantages of closed groups.

    Args:
        estimator: one of `functional.advantage.ESTIMATORS`, or a function.
        zero_variance: the treatment of groups without spread: `keep`, `mark` or `drop`.
        trajectory_return: how rewards become returns; None whitens them step by step instead.
        advantage_key: the key of the advantages.
        batch_groups: see `CloseRules`.
        stats: counters, continued from their current values.
        verbose: log a line for every batch of groups.
    """

    def __init__(
        self,
        *,
        estimator: str | EstimatorFunction,
        zero_variance: str,
        trajectory_return: str | None,
        advantage_key: Key,
        batch_groups: int | None,
        stats: dict[str, float],
        verbose: bool,
    ) -> None:
        self.estimator = estimator
        self.zero_variance = zero_variance
        self.trajectory_return = trajectory_return
        self.advantage_key = advantage_key
        self.batch_groups = batch_groups
        self.stats = stats
        self.verbose = verbose

    def grade(self, scores: Scores, closing: Closing) -> tuple[Graded, Tensor | None]:
        """Compute the advantages of groups.

        Args:
            scores: of their members, group after group.
            closing: the groups.

        Returns:
            The trajectories to learn from, and their indices among the members, int64; None if all are kept.
        """
        stats, sizes = self.stats, closing.sizes
        codes, batches = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)), None
        lengths, short = scores.lengths, torch.zeros(0, dtype=torch.int64)
        if closing.early is not None:
            hurried = torch.tensor(closing.early)[codes]
            lengths, short = lengths[~hurried], lengths[hurried]
        stats["full_tokens"] += float(lengths.sum())
        stats["full_trajectories"] += lengths.numel()
        stats["early_closed_tokens"] += float(short.sum())
        stats["early_closed_trajectories"] += short.numel()
        if self.batch_groups is not None:
            batches = torch.tensor([batch_of(group, self.batch_groups) for group in closing.groups])[codes]
        graded = graded_groups(scores, codes, self.estimator, batches)
        flat = int(codes[graded.degenerate].unique().numel()) if bool(graded.degenerate.any()) else 0
        dropped = flat if self.zero_variance == "drop" else 0
        if self.verbose:
            message = "%d groups of %d to %d trajectories: mean return %.4g, %d of them without spread"
            _log.info(message, len(sizes), min(sizes), max(sizes), scores.returns.nanmean().item(), flat)
        stats["degenerate_groups"] += flat
        stats["written_groups"] += len(sizes) - dropped
        stats["dropped_groups"] += dropped
        if not dropped:
            return graded, None
        kept = torch.nonzero(~graded.degenerate).reshape(-1)
        return graded.take(kept), kept

    def columns(self, arrived: Arrived, graded: Graded, *, one_each: bool = False) -> dict[Key, Flat]:
        """Return the new columns of trajectories, one row per step; `one_each` leaves an advantage to one value."""
        batch, bounds, reward = arrived.batch, arrived.bounds, arrived.batch[arrived.reward_key]
        assert isinstance(reward, Flat)
        mask, returns, degenerate = batch.get(ASSISTANT_MASK), arrived.scores.returns, graded.degenerate
        advantages, codes = graded.advantages, graded.codes
        if len(bounds) != bounds[-1] + 1:
            owner = arrived.owners()
            returns, degenerate, advantages, codes = (x[owner] for x in (returns, degenerate, advantages, codes))
        if one_each:
            advantage = Flat(advantages.to(torch.float32))
        else:
            values = self.values(reward, mask if isinstance(mask, Flat) else None, advantages, codes)
            advantage = Flat(values, reward.lengths, reward.shapes)
        columns: dict[Key, Flat] = {
            self.advantage_key: advantage,
            RETURN: Flat(returns.to(torch.float32)),
            DEGENERATE: Flat(degenerate),
        }
        if self.zero_variance == "mark" and bool(degenerate.any()):
            old = batch.get(PRIORITY)
            base = old.values.to(torch.float32) if isinstance(old, Flat) else torch.ones(batch.n)
            columns[PRIORITY] = Flat(torch.where(degenerate, 0.0, base))
        return columns

    def values(self, reward: Flat, mask: Flat | None, advantages: Tensor, codes: Tensor) -> Tensor:
        """Return the advantages in the shape of the rewards, float32, 0 outside the assistant's tokens.

        A trajectory without assistant tokens has its advantage at the last token, as its reward.

        Args:
            reward: of `n` steps.
            mask: the assistant's tokens; used if it has the rewards' lengths.
            advantages: `[n]`, of each step's trajectory.
            codes: int64 `[n]`, the group of each step's trajectory.
        """
        shape, lengths = reward.values.shape, reward.lengths
        if self.trajectory_return is None:
            flat = reward.values.detach().double().nan_to_num(0.0, 0.0, 0.0).reshape(-1)
            each = torch.ones(len(codes), dtype=torch.int64) if lengths is None else lengths
            each = each * (flat.numel() // max(shape[0], 1))
            values = whitened_step_rewards(flat, codes, each).advantages.to(torch.float32).reshape(shape)
        else:
            values = advantages.to(torch.float32)
            values = values if lengths is None else spread(values, lengths)
            if len(shape) > 1:
                values = values.reshape(-1, *(1 for _ in shape[1:])).expand(shape).contiguous()
        if mask is None or mask.lengths is None or lengths is None:
            return values
        if mask.lengths is not lengths and not torch.equal(mask.lengths, lengths):
            return values
        keep = mask.values.to(torch.bool, copy=True)
        keep[last_position(keep, lengths)] = True
        keep = keep.reshape(-1, *(1 for _ in shape[1:]))
        np.multiply(values.numpy(), keep.numpy(), out=values.numpy())  # a third of the time of `mul_`
        return values


def group_ids(column: Flat | Text, first: Sequence[int], key: Key, *, numbers: bool) -> list[Hashable]:
    """Return hashable identities of the groups of the trajectories whose first steps are `first`.

    Args:
        column: the identity of each step's group.
        first: the first step of each trajectory.
        key: the column's key, for messages.
        numbers: return the numbers by which a store identifies groups.

    Raises:
        DataError: if an identity is neither a string, nor a number, nor a tensor.
    """
    out: list[Hashable] = []
    if isinstance(column, Text):
        items: list[Any] = column.plain()
        for i in first:
            item = tuple(items[i]) if isinstance(items[i], (list, tuple)) else items[i]
            if not isinstance(item, (str, int, tuple)):
                raise DataError(
                    f"the group identity under {key!r} is a {type(item).__name__}; it must be a string, a number "
                    "or a tensor"
                )
            out.append(item)
    elif column.lengths is None:
        values = column.values[torch.tensor(first)] if len(first) != column.values.shape[0] else column.values
        if values.numel() == values.shape[0]:
            out = values.reshape(-1).tolist()
            if (
                values.dtype == torch.int64
                and values.numel()
                and 0 <= int(values.min()) <= int(values.max()) < _NUMBERS
            ):
                return out
        else:
            out = [tuple(row) for row in values.reshape(values.shape[0], -1).tolist()]
    else:
        rows = column.values.split(column.lengths.tolist())
        out = [tuple(rows[i].reshape(-1).tolist()) if rows[i].numel() != 1 else rows[i].item() for i in first]
    return [number_of_group(group) for group in out] if numbers else out


def hashable(group: Any) -> Hashable:
    """Restore the identity of a group from JSON or a checkpoint: lists become tuples again."""
    return tuple(hashable(item) for item in group) if isinstance(group, list) else group


def number_of_group(group: Hashable) -> int:
    """Return the number by which a store identifies a group: an identity from 0 to 2^61 as it is, of others a hash.

    >>> number_of_group(7), number_of_group("a prompt") >= 2**61
    (7, True)
    """
    if type(group) is int and 0 <= group < _NUMBERS:
        return group
    digest = hashlib.blake2b(json.dumps(group).encode(), digest_size=8).digest()
    return _NUMBERS + int.from_bytes(digest, "little") % _NUMBERS
