"""Groups of trajectories that are not complete yet: who arrived, who failed, since when they wait."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf_pipeline.data.keys import Key
from rlhf_pipeline.data.trajectories import Flat, Text, Trajectories, concat, concat_flat
from rlhf_pipeline.errors import DataError

Ints = npt.NDArray[np.int64]

MOST_LATE = 4096
"""Groups that closed early and are remembered, so that their stragglers do not begin a new group."""

_NUMBERS = 1 << 61


class Scores(NamedTuple):
    """What advantages are formed from, one number per trajectory.

    Attributes:
        returns: float64 `[k]`.
        lengths: int64 `[k]`, completion tokens (or steps).
        task: float64 `[k]`, the reward without a KL penalty.
        rounding: float64 `[k]`, how far the return may be from its exact value because of the penalty; 0 without one.
    """

    returns: Tensor
    lengths: Tensor
    task: Tensor
    rounding: Tensor

    def take(self, index: Tensor) -> Scores:
        """Those of some trajectories."""
        return Scores(*(values[index] for values in self))

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Scores:
        """Those of several, one after the other."""
        return cls(*(torch.cat(values) for values in zip(*parts, strict=True)))


@dataclass(slots=True, eq=False)
class Arrived:
    """Whole trajectories that came together.

    Attributes:
        batch: their steps; on the path of language models every trajectory is one step. None where a store holds them.
        bounds: `k + 1` step offsets of the `k` trajectories.
        groups: the identity of each trajectory's group.
        reward: the reward by step; None where a store holds the trajectories.
        scores: of each trajectory.
        rows: int64 `[k]`, their ids in the store; None where they are in memory.
    """

    batch: Trajectories | None
    bounds: list[int]
    groups: list[Hashable]
    reward: Flat | None
    scores: Scores
    rows: Ints | None = None

    @property
    def returns(self) -> Tensor:
        """The return of each trajectory, float64 `[k]`."""
        return self.scores.returns

    @property
    def steps(self) -> Trajectories:
        """The steps, which are in memory."""
        assert self.batch is not None
        return self.batch

    @property
    def rewards(self) -> Flat:
        """The reward by step."""
        assert self.reward is not None
        return self.reward

    def steps_of(self, trajectories: Sequence[int]) -> Tensor:
        """Step indices of some trajectories, int64."""
        b = self.bounds
        if len(b) == b[-1] + 1:
            return torch.tensor(trajectories, dtype=torch.int64)
        return torch.tensor([s for i in trajectories for s in range(b[i], b[i + 1])], dtype=torch.int64)

    def take(self, trajectories: Sequence[int]) -> Arrived:
        """Only some trajectories; keeps none of the others alive."""
        if self.is_whole(trajectories):
            return self
        steps = self.steps_of(trajectories)
        bounds = [0]
        for i in trajectories:
            bounds.append(bounds[-1] + self.bounds[i + 1] - self.bounds[i])
        index = torch.tensor(trajectories, dtype=torch.int64)
        return Arrived(
            None if self.batch is None else self.batch.select(steps),
            bounds,
            [self.groups[i] for i in trajectories],
            None if self.reward is None else self.reward.select(steps),
            self.scores.take(index),
            None if self.rows is None else self.rows[index.numpy()],
        )

    def is_whole(self, trajectories: Sequence[int]) -> bool:
        """Whether these are all trajectories, in their order."""
        return len(trajectories) == len(self.groups) and list(trajectories) == list(range(len(trajectories)))

    def stored(self, rows: Ints, *, keep_rewards: bool) -> None:
        """Note that a store holds the trajectories, under these ids; one row each."""
        self.batch, self.rows = None, rows
        self.reward = self.reward if keep_rewards else None


@dataclass(slots=True, eq=False)
class Member:
    """A trajectory of a group: number `index` of those it came with."""

    arrived: Arrived
    index: int

    @property
    def value(self) -> float:
        """Its return."""
        return float(self.arrived.returns[self.index])

    @property
    def group(self) -> Hashable:
        """The identity of its group."""
        return self.arrived.groups[self.index]

    @property
    def row(self) -> int:
        """Its id in the store."""
        assert self.arrived.rows is not None
        return int(self.arrived.rows[self.index])


@dataclass(slots=True, eq=False)
class Waiting:
    """An incomplete group.

    Attributes:
        members: its trajectories in the order of arrival.
        failed: members that will never arrive.
        since: when the first of them came, seconds.
        overdue: whether its time is up, so that it closes as soon as it has enough members.
    """

    members: list[Member] = field(default_factory=list)
    failed: int = 0
    since: float = 0.0
    overdue: bool = False


class Closed(NamedTuple):
    """A group that waits no longer.

    Attributes:
        members: the trajectories to learn from.
        left: the others.
        early: whether members were still missing.
    """

    members: list[Member]
    left: list[Member]
    early: bool


@dataclass(slots=True)
class GroupQueue:
    """Incomplete groups by identity, in the order in which their first member came.

    Args:
        timeout_s: after how many seconds a group is overdue; None never.

    Attributes:
        waiting: the groups.
        late: of groups that closed early: how many members may still come.
    """

    timeout_s: float | None = None
    waiting: dict[Hashable, Waiting] = field(default_factory=dict)
    late: dict[Hashable, int] = field(default_factory=dict)
    _deadlines: list[tuple[float, int, Hashable, Waiting]] = field(default_factory=list)
    _count: int = 0

    def open(self, group: Hashable, since: float) -> Waiting:
        """Begin to wait for a group."""
        waiting = self.waiting[group] = Waiting(since=since)
        self._watch(group, waiting)
        return waiting

    def expect_late(self, group: Hashable, missing: int) -> None:
        """Remember that members of a closed group may still come; only the newest groups are remembered."""
        self.late[group] = missing
        if len(self.late) > MOST_LATE:
            del self.late[next(iter(self.late))]

    def is_late(self, group: Hashable) -> bool:
        """Whether a trajectory comes after its group was closed; counts it."""
        missing = self.late.get(group)
        if missing is None:
            return False
        if missing > 1:
            self.late[group] = missing - 1
        else:
            del self.late[group]
        return True

    def _watch(self, group: Hashable, waiting: Waiting) -> None:
        """See to it that a group becomes overdue."""
        if self.timeout_s is not None:
            self._count += 1
            heapq.heappush(self._deadlines, (waiting.since + self.timeout_s, self._count, group, waiting))

    def is_overdue(self, now: float) -> bool:
        """Whether the time of a group may have come."""
        return bool(self._deadlines) and self._deadlines[0][0] <= now

    def take_overdue(self, now: float) -> list[tuple[Hashable, Waiting]]:
        """The groups whose time has just come; each comes once."""
        found = []
        while self.is_overdue(now):
            _, _, group, waiting = heapq.heappop(self._deadlines)
            if self.waiting.get(group) is waiting:
                waiting.overdue = True
                found.append((group, waiting))
        return found

    def members(self) -> Iterator[Member]:
        """All waiting trajectories, group by group."""
        for waiting in self.waiting.values():
            yield from waiting.members

    def parts(self) -> list[tuple[Arrived, list[Member]]]:
        """What waiting trajectories came with, each with those trajectories, in the order of arrival."""
        found: dict[int, tuple[Arrived, list[Member]]] = {}
        for member in self.members():
            found.setdefault(id(member.arrived), (member.arrived, []))[1].append(member)
        return [(arrived, sorted(members, key=lambda m: m.index)) for arrived, members in found.values()]

    def shrink(self, arrived: Arrived) -> None:
        """Forget the completed trajectories of what just arrived."""
        groups = (self.waiting.get(group) for group in dict.fromkeys(arrived.groups))
        kept = [m for waiting in groups if waiting is not None for m in waiting.members if m.arrived is arrived]
        if kept:
            kept.sort(key=lambda m: m.index)
            repoint(kept, arrived.take([m.index for m in kept]))

    def copy(self) -> GroupQueue:
        """The same groups, which change on their own."""
        out = GroupQueue(self.timeout_s, late=dict(self.late))
        for group, waiting in self.waiting.items():
            twin = out.open(group, waiting.since)
            twin.members, twin.failed, twin.overdue = waiting.members[:], waiting.failed, waiting.overdue
        return out


def repoint(members: Sequence[Member], arrived: Arrived) -> None:
    """Let members be the trajectories of `arrived`, in order."""
    for i, member in enumerate(members):
        member.arrived, member.index = arrived, i


def gather(members: Iterable[Member]) -> Arrived:
    """The members together, in the given order; they are in memory."""
    parts: dict[int, tuple[int, Arrived, list[int]]] = {}
    places: list[tuple[int, int]] = []
    for member in members:
        part, _, taken = parts.setdefault(id(member.arrived), (len(parts), member.arrived, []))
        places.append((part, len(taken)))
        taken.append(member.index)
    chosen = [(arrived, taken) for _, arrived, taken in parts.values()]
    if len(chosen) == 1:
        return chosen[0][0].take(chosen[0][1])
    first = torch.tensor([0, *(len(taken) for _, taken in chosen)]).cumsum(0).tolist()
    return _joined([arrived.take(taken) for arrived, taken in chosen]).take([first[p] + place for p, place in places])


def _joined(parts: Sequence[Arrived]) -> Arrived:
    bounds = [0]
    for part in parts:
        bounds += [bounds[-1] + end for end in part.bounds[1:]]
    return Arrived(
        concat([part.steps for part in parts]),
        bounds,
        [group for part in parts for group in part.groups],
        concat_flat([part.rewards for part in parts], [part.bounds[-1] for part in parts]),
        Scores.join([part.scores for part in parts]),
    )


def group_ids(column: Flat | Text, first: Sequence[int], key: Key) -> list[Hashable]:
    """Hashable identities of the groups of the trajectories whose first steps are `first`.

    Raises:
        DataError: if an identity is neither a string, nor a number, nor a tensor.
    """
    if isinstance(column, Text):
        items: list[Any] = column.plain()
        out: list[Hashable] = []
        for i in first:
            item = items[i]
            if isinstance(item, (list, tuple)):
                item = tuple(item)
            elif not isinstance(item, (str, int)):
                raise DataError(
                    f"the group identity under {key!r} is a {type(item).__name__}; it must be a string, a number "
                    "or a tensor"
                )
            out.append(item)
        return out
    if column.lengths is None:
        values = column.values[torch.tensor(first)] if len(first) != column.values.shape[0] else column.values
        if values.numel() == values.shape[0]:
            return values.reshape(-1).tolist()
        return [tuple(row) for row in values.reshape(values.shape[0], -1).tolist()]
    rows = column.values.split(column.lengths.tolist())
    return [tuple(rows[i].reshape(-1).tolist()) if rows[i].numel() != 1 else rows[i].item() for i in first]


def hashable(group: Any) -> Hashable:
    """The identity of a group that went through JSON or a checkpoint: lists are tuples again."""
    return tuple(hashable(item) for item in group) if isinstance(group, list) else group


def number_of_group(group: Hashable) -> int:
    """The number under which a store knows a group: an identity from 0 to 2^61 itself, of any other a hash.

    >>> number_of_group(7), number_of_group("a prompt") >= 2**61
    (7, True)
    """
    if type(group) is int and 0 <= group < _NUMBERS:
        return group
    digest = hashlib.blake2b(json.dumps(group).encode(), digest_size=8).digest()
    return _NUMBERS + int.from_bytes(digest, "little") % _NUMBERS
