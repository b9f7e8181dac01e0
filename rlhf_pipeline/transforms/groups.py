"""Groups of trajectories: which of them wait, when they are complete, and their advantages."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlhf_pipeline.config import WritePath
from rlhf_pipeline.data.keys import (
    ASSISTANT_MASK,
    DEGENERATE,
    EPISODE_SIZE,
    KL_COEF,
    LOG_PROBS,
    PRIORITY,
    RETURN,
    TASK_REWARD,
    TURN_ADVANTAGES,
    TURN_REWARDS,
    TURN_SPANS,
    Key,
)
from rlhf_pipeline.data.tensordicts import ROWS, with_all_columns
from rlhf_pipeline.data.trajectories import (
    Flat,
    Text,
    Trajectories,
    concat,
    last_position,
    segment_sum,
    spread,
    step_sum,
)
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.functional.advantage import (
    FLOAT32_RESOLUTION,
    NamedRewards,
    group_advantage,
    penalty_rounding,
    turn_advantage,
    whitened_step_rewards,
)
from rlhf_pipeline.transforms.advantage_settings import AdvantageSettings, estimator_entry
from rlhf_pipeline.transforms.base import outcomes
from trajectory_store import BufferPool

Ints = npt.NDArray[np.int64]

MOST_LATE = 4096
"""The number of early-closed groups to remember, so that their stragglers do not begin a new group."""

_NUMBERS = 1 << 61

_log = logging.getLogger("rlhf_pipeline")


@dataclass(slots=True, eq=False)
class Member:
    """An episode of a group: usually one row.

    Attributes:
        group: the group's identity.
        name: identifies the episode in its group; -1 if it has no name.
        since: when it arrived.
        scores: see `MemberScores`.
        batch: its rows in memory, from `first` to `end`.
        rows: its row ids in a store.
        num_rows: how many rows of a store it takes.
        failed: how many members of the group have failed, as stored with it.
        turns: the rewards of its turns, row after row.
        named_rewards: its rewards one by one.
    """

    group: Hashable
    name: int
    since: float
    scores: tuple[float, float, float, float]
    batch: Trajectories | None = None
    first: int = 0
    end: int = 1
    rows: Sequence[int] = ()
    num_rows: int = 1
    failed: int = 0
    turns: Sequence[float] = ()
    named_rewards: Sequence[float] = ()


class Closed(NamedTuple):
    """A closed group."""

    members: list[Member]
    early: bool
    learned: bool


class GroupQueue:
    """Groups that wait for members, in the order in which the first of each arrived."""

    def __init__(self, settings: AdvantageSettings, stats: dict[str, float]) -> None:
        self.settings = settings
        self.entry = estimator_entry(settings)
        self.fewest = settings.min_group_size or settings.grpo_size
        """The minimum number of members with which a group may close after its timeout."""
        self.stats = stats
        self.waiting: dict[Hashable, list[Member]] = {}
        self.failed: dict[Hashable, int] = {}
        self.late: dict[Hashable, int] = {}
        self.unique = True

    def add(self, member: Member) -> None:
        """Add a waiting trajectory."""
        self.waiting.setdefault(member.group, []).append(member)

    def are_complete(self, arrived: Sequence[Member]) -> bool:
        """Return whether these are complete groups, and none of them has waited."""
        counts, each = Counter(member.group for member in arrived), self.settings.batch_groups
        if each is not None and set(Counter(batch_of(group, each) for group in counts).values()) - {each}:
            return False
        return set(counts.values()) <= {self.settings.grpo_size} and not counts.keys() & {*self.failed, *self.late}

    def arrive(self, arrived: Sequence[Member]) -> list[Closed]:
        """Add trajectories and return the groups that they complete."""
        groups = {member.group for member in arrived}
        arrivals = {(group, member.name) for group in groups for member in self.waiting.get(group, ())}
        for group, name in ((member.group, member.name) for member in arrived if member.name >= 0):
            if (group, name) in arrivals:
                raise DataError(
                    f"trajectory_id {name} arrived twice in group {group!r}, but a group may contain a member only "
                    "once. The call had no effect: remove from the call the members that are already "
                    "waiting (TrajectoryReplayBuffer.waiting() lists them), and use a unique id for each member, or no "
                    "ids."
                )
            arrivals.add((group, name))
        closed: list[Closed] = []
        for member in arrived:
            if self.late and self._is_late(member.group):
                self.stats["late_trajectories"] += 1
                continue
            self.add(member)
            if self._is_due(member.group, -math.inf):
                closed += self.complete([member.group])
        return closed

    def fail(self, group: Hashable, count: int) -> list[Closed]:
        """Record that `count` members of a group will never arrive, and return the groups that close."""
        while count and self._is_late(group):
            count -= 1
        if not count:
            return []
        self.failed[group] = self.failed.get(group, 0) + count
        closed = self.complete([group])
        if self.failed.get(group, 0) >= self.settings.grpo_size and self.settings.batch_groups is None:
            del self.failed[group]  # no member will arrive
        return closed

    def complete(self, groups: Iterable[Hashable], now: float = -math.inf) -> list[Closed]:
        """Remove the complete groups and return them; the groups of a batch close together."""
        closed: list[Closed] = []
        for group in groups:
            together, each = [group], self.settings.batch_groups
            if each is not None:
                first = batch_of(group, each) * each
                together = list(range(first, first + each))
            if all(self._is_due(name, now) for name in together):
                closed += [closed_group for name in together for closed_group in self.close(name)]
        return closed

    def close(self, group: Hashable) -> list[Closed]:
        """Remove a group and return it, complete or not; empty if it has no members."""
        settings, members = self.settings, self.waiting.pop(group, [])
        missing = settings.grpo_size - len(members) - self.failed.pop(group, 0)
        self.stats["completed_groups"] += 1
        if missing > 0:
            self.stats["early_closed_groups"] += 1
            if self.unique and settings.group_timeout_s is not None:
                self.late[group] = missing
                if len(self.late) > MOST_LATE:
                    del self.late[next(iter(self.late))]
        # A failed trajectory counts as one that earned nothing.
        mean = sum(member.scores[0] for member in members if math.isfinite(member.scores[0])) / max(len(members), 1)
        learned = (
            settings.keep_return_bounds is None
            or settings.keep_return_bounds[0] < mean < settings.keep_return_bounds[1]
        )
        self.stats["selected_trajectories"] += len(members) if learned else 0
        self.stats["dropped_groups"] += not learned
        return [Closed(members, missing > 0, learned)] if members else []

    def grade(self, groups: Sequence[Closed]) -> tuple[list[Member], Graded]:
        """Return the trajectories of groups to learn from, group after group, and their advantages."""
        stats, settings, groups = self.stats, self.settings, [group for group in groups if group.learned]
        members = [member for group in groups for member in group.members]
        scores, sizes = MemberScores.of(members), [len(group.members) for group in groups]
        codes, batches = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)), None
        if not members:
            return [], Graded(scores.returns, torch.zeros(0, dtype=torch.bool), codes, scores.returns.float())
        for group in groups:
            kind = "early_closed" if group.early else "full"
            stats[f"{kind}_tokens"] += sum(member.scores[1] for member in group.members)
            stats[f"{kind}_trajectories"] += len(group.members)
        if settings.batch_groups is not None:
            batches = torch.tensor([batch_of(member.group, settings.batch_groups) for member in members])
        graded = graded_groups(
            scores,
            codes,
            settings,
            batches,
            turns=[member.turns for member in members] if self.entry.by_turn else None,
            named_rewards=self._named_rewards(members),
        )
        flat = len(set(codes[graded.degenerate].tolist()))
        dropped = flat if settings.zero_variance == "drop" else 0
        if settings.verbose:
            message = "%d groups of %d to %d trajectories: mean return %.4g, %d of them without spread"
            _log.info(message, len(sizes), min(sizes), max(sizes), scores.returns.nanmean().item(), flat)
        stats["degenerate_groups"] += flat
        stats["written_groups"] += len(sizes) - dropped
        stats["dropped_groups"] += dropped
        if not dropped:
            return members, graded
        varied = torch.nonzero(~graded.degenerate).reshape(-1)
        return [members[i] for i in varied.tolist()], graded.take(varied)

    def _is_due(self, group: Hashable, now: float) -> bool:
        settings, members, failed = self.settings, self.waiting.get(group), self.failed.get(group, 0)
        if not members:  # the rest of a batch need not wait for a group whose members all failed
            return settings.batch_groups is not None and failed >= settings.grpo_size
        overdue = settings.group_timeout_s is not None and members[0].since + settings.group_timeout_s <= now
        return len(members) + failed >= settings.grpo_size or (overdue and len(members) >= self.fewest)

    def _is_late(self, group: Hashable) -> bool:
        """Return whether a trajectory arrives after its group has closed, and count it."""
        missing = 0 if group in self.waiting or group in self.failed else self.late.get(group, 0)
        if missing > 1:
            self.late[group] = missing - 1
        elif missing:
            del self.late[group]
        return missing > 0

    def _named_rewards(self, members: Sequence[Member]) -> NamedRewards | None:
        """Return the named rewards of members, if the estimator takes them and there are any."""
        rewards = self.settings.rewards
        if not self.entry.by_reward or not rewards:
            return None
        values = torch.tensor([[*member.named_rewards] for member in members], dtype=torch.float64)
        return NamedRewards(values.reshape(-1, len(rewards)), tuple(rewards), tuple(rewards.values()))

    def copy(self) -> GroupQueue:
        """Return an independent copy."""
        out = copy.copy(self)
        out.waiting = {group: members[:] for group, members in self.waiting.items()}
        out.failed, out.late = dict(self.failed), dict(self.late)
        return out


def batch_of(group: Hashable, batch_groups: int) -> int:
    """Return the batch of a group."""
    if not isinstance(group, int):
        raise DataError(
            f"batch_groups={batch_groups} requires integer group ids, but a trajectory has the group id {group!r}. Use "
            "integers as group ids, or an estimator that needs no batch."
        )
    return group // batch_groups


def gather(members: Iterable[Member], pool: BufferPool | None = None) -> tuple[Trajectories, list[int]]:
    """Return the steps of members that are in memory, in the given order, and the bounds of each member's steps.

    Steps of several batches are copied to memory of the pool, if there is one.
    """
    parts, starts, num = list[Trajectories](), dict[int, int](), 0
    steps, bounds = list[int](), [0]
    for member in members:
        batch = member.batch
        assert batch is not None
        if id(batch) not in starts:
            parts.append(batch)
            starts[id(batch)], num = num, num + batch.n
        steps += range(starts[id(batch)] + member.first, starts[id(batch)] + member.end)
        bounds.append(len(steps))
    if len(parts) != 1:
        if len({ROWS in part for part in parts}) == 2:
            parts = [with_all_columns(part) for part in parts]
        return concat(parts, steps, pool), bounds
    everything = len(steps) == num and steps == list(range(num))
    return parts[0] if everything else parts[0].select(torch.tensor(steps)), bounds


def hold(members: Sequence[Member]) -> None:
    """Copy the steps of members of one batch into separate memory, so that they can wait."""
    if not members:
        return
    batch, bounds = gather(members)
    copied = Trajectories(batch.n)
    for key, column in batch.items():
        if isinstance(column, Text):
            copied[key] = Text([item.clone() if isinstance(item, TensorDictBase) else item for item in column.items])
        else:
            copied[key] = replace(column, values=column.values.clone())
    for member, first, end in zip(members, bounds, bounds[1:], strict=False):
        member.batch, member.first, member.end = copied, first, end


class MemberScores(NamedTuple):
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

    def take(self, index: Tensor) -> MemberScores:
        """Return the scores of the given trajectories."""
        return MemberScores(*(values[index] for values in self))

    @classmethod
    def of(cls, members: Sequence[Member]) -> MemberScores:
        """Return the scores of members."""
        returns, lengths, task, rounding = torch.from_numpy(
            np.array([member.scores for member in members], np.float64).reshape(-1, 4).T.copy()
        )
        return cls(returns, lengths.to(torch.int64), task, rounding)

    def each(self) -> list[tuple[float, float, float, float]]:
        """Return the scores of each trajectory, as a member has them."""
        return list(zip(*(values.tolist() for values in self), strict=True))


def scores_of(
    batch: Trajectories, reward: Flat, bounds: Sequence[int], how: str | None, eps: float, counted: str = "sum"
) -> MemberScores:
    """Return the scores of trajectories; a trajectory without rewards has return 0.

    Args:
        batch: the rows.
        reward: their rewards, per row or per token.
        bounds: where each trajectory's rows begin, and the end.
        how: how rewards become a return.
        eps: of the dtype that the models compute in.
        counted: which rewards of an episode of several rows count, see `WritePath.episode_return`.
    """
    n, k = bounds[-1], len(bounds) - 1
    if EPISODE_SIZE in batch and k < n:
        return _episode_scores(batch, reward, bounds, eps, counted)
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


def _episode_scores(batch: Trajectories, reward: Flat, bounds: Sequence[int], eps: float, counted: str) -> MemberScores:
    """Return the scores of episodes.

    `sum` adds up the rewards of all rows: the outcome, which is stored with the last row, less the penalty of every
    token. `verl` counts the last row alone and `skyrl` its last turn: rewards of other turns, and the penalty of other
    tokens, are excluded.
    """
    last = torch.tensor(bounds[1:]) - 1
    rewards = outcomes(batch, reward.values) if reward.lengths is None else segment_sum(reward.values, reward.lengths)
    task = batch.get(TASK_REWARD)
    before = outcomes(batch, task.values) if isinstance(task, Flat) else rewards
    mask, tokens = batch.get(ASSISTANT_MASK), torch.ones(batch.n, dtype=torch.int64)
    if isinstance(mask, Flat) and mask.lengths is not None:
        tokens = segment_sum(mask.values, mask.lengths).to(torch.int64)
    scores = with_penalty(batch, rewards, tokens, eps, before)
    sizes = torch.tensor(bounds).diff()
    if counted == "sum":
        returns, lengths, before, rounding = (segment_sum(values, sizes) for values in scores)
        return MemberScores(returns, lengths.to(torch.int64), before, rounding)
    scores = scores.take(last)
    spans, excluded = batch.get(TURN_SPANS), uncounted_rewards(batch, sizes, counted)
    returns = scores.returns
    if counted == "skyrl" and reward.lengths is not None and isinstance(spans, Flat) and spans.lengths is not None:
        begins = spans.values[spans.lengths.cumsum(0) - 1, 0]  # a row ends with a turn of the policy
        place = torch.arange(len(reward.values)) - spread(reward.lengths.cumsum(0) - reward.lengths, reward.lengths)
        newest = torch.where(place >= spread(begins, reward.lengths), reward.values.double().reshape(-1), 0.0)
        returns = segment_sum(newest, reward.lengths)[last]
    return MemberScores(returns - excluded, scores.lengths, scores.task - excluded, scores.rounding)


def uncounted_rewards(batch: Trajectories, sizes: Tensor, counted: str) -> Tensor:
    """Return what an outcome has of turns that do not count, float64 `[k]`: the rewards of the turns add up to it.

    Args:
        batch: the rows of whole episodes.
        sizes: int64 `[k]`, the rows of each.
        counted: `verl` counts the turns of the last row, `skyrl` the last turn.
    """
    turns = batch.get(TURN_REWARDS)
    if not isinstance(turns, Flat) or turns.lengths is None:
        return torch.zeros(len(sizes), dtype=torch.float64)
    counts = segment_sum(turns.lengths, sizes).to(torch.int64)
    left = turns.lengths[sizes.cumsum(0) - 1] if counted == "verl" else counts.clamp_max(1)
    place = torch.arange(len(turns.values)) - spread(counts.cumsum(0) - counts, counts)
    return segment_sum(torch.where(place < spread(counts - left, counts), turns.values.double(), 0.0), counts)


def with_penalty(
    batch: Trajectories, returns: Tensor, lengths: Tensor, eps: float, task: Tensor | None = None
) -> MemberScores:
    """Return scores; if returns include a KL penalty, with the rewards before it and its rounding error.

    Args:
        batch: the rows.
        returns: float64 `[n]`, one for each row.
        lengths: int64 `[n]`, completion tokens.
        eps: of the dtype that the models compute in.
        task: float64 `[n]`, the rewards before the penalty; None takes those of the batch.
    """
    coef, stored_reward, log_probs = batch.get(KL_COEF), batch.get(TASK_REWARD), batch.get(LOG_PROBS)
    if (
        isinstance(coef, Flat)
        and bool((coef.values > 0).any())
        and isinstance(stored_reward, Flat)
        and isinstance(log_probs, Flat)
        and log_probs.lengths is not None
        and coef.values.numel() == stored_reward.values.numel() == log_probs.lengths.numel() == returns.numel()
    ):
        before = stored_reward.values.reshape(-1).double() if task is None else task
        weights = coef.values.reshape(-1)
        rounding = penalty_rounding(weights, before, log_probs.values, log_probs.lengths, lengths=lengths, eps=eps)
        return MemberScores(returns, lengths, before, rounding)
    return MemberScores(returns, lengths, returns, torch.zeros_like(returns))


class Graded(NamedTuple):
    """The advantages of the trajectories of complete groups.

    Attributes:
        advantages: float64 `[k]`.
        degenerate: bool `[k]`, whether the group has no spread, or the return is not finite.
        codes: int64 `[k]`, each trajectory's group.
        returns: `[k]`, float32.
        turns: of an estimator that compares turns, the advantages of each trajectory's turns, float32; otherwise None.
    """

    advantages: Tensor
    degenerate: Tensor
    codes: Tensor
    returns: Tensor
    turns: list[Tensor] | None = None

    def take(self, index: Tensor) -> Graded:
        """Return the given trajectories, or one for each time that they are named."""
        *columns, turns = self
        if turns is not None:
            turns = [turns[i] for i in torch.arange(len(turns))[index].tolist()]
        return Graded(*(values[index] for values in columns), turns=turns)

    def by_row(self, sizes: Tensor, turns: Tensor | None) -> Graded:
        """Return the same for each row of the episodes.

        Args:
            sizes: int64 `[k]`, rows of each episode.
            turns: int64, the turns in each row, which then has the advantages of its turns; None if they are not
                distinguished.
        """
        graded = self.take(spread(torch.arange(len(sizes)), sizes))
        if self.turns is None or turns is None:
            return graded
        each = list(torch.cat(self.turns).split(turns.tolist()))
        largest = [
            advantages[advantages.abs().argmax()].double() if len(advantages) else torch.zeros((), dtype=torch.float64)
            for advantages in each
        ]
        return graded._replace(advantages=torch.stack(largest), turns=each)

    def followed_by(self, waits: Sequence[Member]) -> Graded:
        """Append trajectories that have no advantage yet; their returns are exact, so all become float64."""
        returns = MemberScores.of(waits).returns
        nan = torch.full_like(returns, torch.nan)
        turns = self.turns and [*self.turns, *(torch.full((len(member.turns),), torch.nan) for member in waits)]
        return Graded(
            torch.cat([self.advantages, nan]),
            torch.cat([self.degenerate, nan.isfinite()]),
            torch.cat([self.codes, self.codes.new_full((len(returns),), len(self.codes))]),
            torch.cat([self.returns.double(), returns]),
            turns,
        )


def graded_groups(
    scores: MemberScores,
    codes: Tensor,
    settings: WritePath,
    batches: Tensor | None,
    *,
    turns: Sequence[Sequence[float]] | None = None,
    named_rewards: NamedRewards | None = None,
) -> Graded:
    """Return the advantages of groups; returns that are not finite are ignored.

    Args:
        scores: of each trajectory.
        codes: int64 `[n]`, the group of each trajectory.
        settings: the estimator and its discount of turns.
        batches: int64 `[n]`, the batch of each trajectory, for estimators that use batches; None is one batch.
        turns: the rewards of each trajectory's turns, for an estimator that compares turns.
        named_rewards: the rewards one by one, for an estimator that takes them.
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
            returns,
            codes[part],
            settings.estimator,
            lengths=lengths,
            named=None if named_rewards is None else named_rewards.take(part),
            resolution=FLOAT32_RESOLUTION,
            **penalised,
        )
    graded = Graded(advantages, degenerate, codes, scores.returns.to(torch.float32))
    return graded if turns is None else _of_turns(graded, turns, settings.turn_discount)


def _of_turns(graded: Graded, rewards: Sequence[Sequence[float]], discount: float) -> Graded:
    """Give each turn its advantage, and each trajectory that of its turn furthest from 0; one without turns is one.

    A trajectory that failed did so in its last turn, unless a reward before it is not finite either.
    """
    finite = graded.returns.isfinite()
    each = [[*turn_rewards] or [value] for turn_rewards, value in zip(rewards, graded.returns.tolist(), strict=True)]
    each = [
        turn_rewards if is_finite else [*turn_rewards[:-1], math.nan]
        for turn_rewards, is_finite in zip(each, finite.tolist(), strict=True)
    ]
    counts = torch.tensor([len(turn_rewards) for turn_rewards in each])
    flat = torch.tensor([value for turn_rewards in each for value in turn_rewards], dtype=torch.float64)
    graded_turns = turn_advantage(flat, graded.codes, counts, discount=discount, resolution=FLOAT32_RESOLUTION)
    turns = graded_turns.advantages.float().split(counts.tolist())
    varied = spread(graded.codes, counts)[~graded_turns.degenerate]
    return graded._replace(
        advantages=torch.stack([turn_advantages[turn_advantages.abs().argmax()] for turn_advantages in turns]).double(),
        degenerate=~finite | ~torch.isin(graded.codes, varied),
        turns=[
            turn_advantages[: len(turn_rewards)] for turn_advantages, turn_rewards in zip(turns, rewards, strict=True)
        ],
    )


def new_columns(
    batch: Trajectories,
    reward: Flat,
    bounds: Sequence[int],
    graded: Graded,
    settings: AdvantageSettings,
    *,
    one_each: bool,
) -> dict[Key, Flat]:
    """Return the new columns of trajectories, one row per step."""
    if len(bounds) != bounds[-1] + 1:
        turns = batch.get(TURN_REWARDS) if EPISODE_SIZE in batch else None
        counts = turns.lengths if isinstance(turns, Flat) else None
        graded = graded.by_row(torch.tensor(bounds).diff(), counts)
    mask, degenerate = batch.get(ASSISTANT_MASK), graded.degenerate
    if one_each:
        advantage = Flat(graded.advantages.to(torch.float32))
    else:
        values = shaped(graded, reward, mask if isinstance(mask, Flat) else None, settings)
        if bool((late := graded.advantages.isnan()).any()):
            values[late if reward.lengths is None else spread(late, reward.lengths)] = torch.nan
        advantage = Flat(values, reward.lengths, reward.shapes)
    columns = {settings.advantage_key: advantage, RETURN: Flat(graded.returns), DEGENERATE: Flat(degenerate)}
    if graded.turns is not None:
        columns[TURN_ADVANTAGES] = Flat(
            torch.cat(graded.turns), torch.tensor([len(turn_advantages) for turn_advantages in graded.turns])
        )
    if settings.zero_variance == "mark" and bool(degenerate.any()):
        old = batch.get(PRIORITY)
        base = old.values.to(torch.float32) if isinstance(old, Flat) else torch.ones(batch.n)
        columns[PRIORITY] = Flat(torch.where(degenerate, 0.0, base))
    return columns


def shaped(graded: Graded, reward: Flat, mask: Flat | None, settings: AdvantageSettings) -> Tensor:
    """Return the advantages of steps in the shape of their rewards, float32, 0 outside the assistant's tokens.

    A trajectory without assistant tokens has its advantage at the last token, as its reward. The mask is used if it has
    the rewards' lengths.
    """
    shape, lengths = reward.values.shape, reward.lengths
    if settings.trajectory_return is None:
        flat = reward.values.detach().double().nan_to_num(0.0, 0.0, 0.0).reshape(-1)
        each = torch.ones(len(graded.codes), dtype=torch.int64) if lengths is None else lengths
        each = each * (flat.numel() // max(shape[0], 1))
        values = whitened_step_rewards(flat, graded.codes, each).advantages.to(torch.float32).reshape(shape)
    else:
        values = graded.advantages.to(torch.float32)
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
    """Return hashable identities of the groups of the trajectories whose first steps are `first`."""
    if isinstance(column, Text):
        items: list[Any] = column.plain()
        identities: list[Hashable] = [
            tuple(items[i]) if isinstance(items[i], (list, tuple)) else items[i] for i in first
        ]
        odd = [type(item).__name__ for item in identities if not isinstance(item, (str, int, tuple))]
        if odd:
            raise DataError(
                f"the group identity under {key!r} is of type {odd[0]}; it must be a string, a number or a tensor"
            )
    else:
        values, lengths = column.values, column.lengths
        parts: Any = values.reshape(values.shape[0], -1) if lengths is None else values.split(lengths.tolist())
        rows = [part.reshape(-1).tolist() for part in parts] if lengths is not None else parts.tolist()
        identities = [tuple(rows[i]) if len(rows[i]) != 1 else rows[i][0] for i in first]
    return [number_of_group(group) for group in identities] if numbers else identities


def hashable(group: Any) -> Hashable:
    """Restore the identity of a group from JSON or a checkpoint: lists become tuples again."""
    return tuple(hashable(item) for item in group) if isinstance(group, list) else group


def number_of_group(group: Hashable) -> int:
    """Return the number by which a store identifies a group: an identity from 0 to 2^61 unchanged, of others a hash.

    >>> number_of_group(7), number_of_group("a prompt") >= 2**61
    (7, True)
    """
    if type(group) is int and 0 <= group < _NUMBERS:
        return group
    digest = hashlib.blake2b(json.dumps(group).encode(), digest_size=8).digest()
    return _NUMBERS + int.from_bytes(digest, "little") % _NUMBERS
