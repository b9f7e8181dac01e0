"""The ledger of the groups that are not complete yet: who arrived, who failed, since when they wait."""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDictBase

from rlhf_pipeline.data.trajectories import Flat, Trajectories
from rlhf_pipeline.transforms._groups import Chunk, select

MOST_LATE = 4096
"""Groups that closed early and are remembered, so that their stragglers do not begin a group anew."""


@dataclass(slots=True)
class Entry:
    """One waiting trajectory: number `index` of `chunk`."""

    chunk: Chunk
    index: int

    @property
    def value(self) -> float:
        """Its return."""
        return float(self.chunk.returns[self.index])

    def trajectory(self) -> TensorDictBase:
        """Its steps as a TensorDict `[steps]`."""
        return select(self.chunk.td, self.chunk.rows([self.index]))


@dataclass(slots=True, eq=False)
class Waiting:
    """An incomplete group.

    Attributes:
        entries: its trajectories in the order of arrival.
        failed: members that will never arrive.
        since: when the first of them came, seconds.
        ticket: the number under which a log knows the group, 0 before it was logged.
        overdue: whether its time is up, so that it closes as soon as it has enough members.
    """

    entries: list[Entry] = field(default_factory=list)
    failed: int = 0
    since: float = 0.0
    ticket: int = 0
    overdue: bool = False

    def number(self) -> int:
        """The ticket, drawn if there is none yet: 62 random bits, so no two groups of a store share one."""
        if not self.ticket:
            self.ticket = secrets.randbits(62) | 1
        return self.ticket


class ClosedGroup(NamedTuple):
    """A group on its way to the store.

    Attributes:
        entries: the trajectories to write.
        ticket: the number under which a log knows the group, or 0.
        early: whether members were still missing.
    """

    entries: list[Entry]
    ticket: int
    early: bool


class Saved(NamedTuple):
    """Waiting trajectories as a log gives them back, or is given them.

    Attributes:
        columns: their steps; no padding.
        bounds: `k + 1` step offsets of the `k` trajectories.
        groups: the identity of each trajectory's group.
        tickets: the number of each trajectory's group.
        since: when the first member of each trajectory's group came.
        reward: the reward column, by step, exactly as it was.
    """

    columns: Trajectories
    bounds: list[int]
    groups: list[Hashable]
    tickets: list[int]
    since: list[float]
    reward: Flat


class Failure(NamedTuple):
    """Members of a group that will never arrive."""

    group: Hashable
    ticket: int
    since: float
    members: int


class GroupLog(Protocol):
    """Where waiting trajectories are kept so that no crash loses them; `PendingLog` does."""

    def recover(self) -> tuple[list[Saved], list[Failure]]:
        """What waits on the disk and belongs to no living process; from now on it is this process's."""
        ...

    def add(self, saved: Saved) -> Any:
        """Keep trajectories; durable on return. What comes back undoes it."""
        ...

    def add_failure(self, failure: Failure) -> Any:
        """Keep a report of failures; durable on return. What comes back undoes it."""
        ...

    def undo(self, token: Any) -> None:
        """Forget what an `add` kept."""
        ...

    def drop(self, tickets: Sequence[int]) -> None:
        """Forget groups: they are written, or will never be."""
        ...

    def written(self, tickets: Sequence[int]) -> bool:
        """Whether one of the groups is among what was written."""
        ...


@dataclass(slots=True)
class Change:
    """What one call did to the queue, so that it can be taken back.

    Attributes:
        before: of each group that was touched: its record, trajectories and failures as they were.
        late: the stragglers that were still expected.
        arrived: trajectories that came.
        closed: groups that left.
        tokens: of what was logged.
        stats: the counters as they were.
    """

    before: dict[Hashable, tuple[Waiting | None, list[Entry], int]] = field(default_factory=dict)
    late: dict[Hashable, int] = field(default_factory=dict)
    arrived: list[Entry] = field(default_factory=list)
    closed: list[Waiting] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)

    def remember(self, group: Hashable, waiting: Waiting | None) -> None:
        """Note how a group is before it is touched; only the first call counts."""
        if group not in self.before:
            self.before[group] = (waiting, [], 0) if waiting is None else (waiting, waiting.entries[:], waiting.failed)

    def tickets(self) -> list[int]:
        """The numbers of the logged groups that left."""
        return [waiting.ticket for waiting in self.closed if waiting.ticket]


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
        self.watch(group, waiting)
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

    def watch(self, group: Hashable, waiting: Waiting) -> None:
        """See to it that a group becomes overdue."""
        if self.timeout_s is not None:
            self._count += 1
            heapq.heappush(self._deadlines, (waiting.since + self.timeout_s, self._count, group, waiting))

    def take_overdue(self, now: float) -> list[tuple[Hashable, Waiting]]:
        """The groups whose time has just come; each comes once."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, group, waiting = heapq.heappop(self._deadlines)
            if self.waiting.get(group) is waiting:
                waiting.overdue = True
                found.append((group, waiting))
        return found

    def entries(self) -> Iterator[Entry]:
        """All waiting trajectories, group by group."""
        for waiting in self.waiting.values():
            yield from waiting.entries

    def chunks(self) -> list[tuple[Chunk, list[Entry]]]:
        """The chunks that waiting trajectories belong to, each with those trajectories, in the order of arrival."""
        found: dict[int, tuple[Chunk, list[Entry]]] = {}
        for entry in self.entries():
            found.setdefault(id(entry.chunk), (entry.chunk, []))[1].append(entry)
        return [(chunk, sorted(entries, key=lambda e: e.index)) for chunk, entries in found.values()]

    def shrink(self, fresh: Sequence[Chunk]) -> list[tuple[Chunk, list[Entry]]]:
        """Let go of the completed trajectories of the chunks that just arrived.

        Returns:
            What stays of each: a chunk of nothing but waiting trajectories, and those, in order.
        """
        out: list[tuple[Chunk, list[Entry]]] = []
        for chunk in fresh:
            groups = (self.waiting.get(group) for group in dict.fromkeys(chunk.groups))
            kept = [e for waiting in groups if waiting is not None for e in waiting.entries if e.chunk is chunk]
            if not kept:
                continue
            kept.sort(key=lambda e: e.index)
            small = chunk.take([e.index for e in kept])
            for i, entry in enumerate(kept):
                entry.chunk, entry.index = small, i
            out.append((small, kept))
        return out

    def restore(self, change: Change) -> None:
        """Take a change back; what other threads added to the same groups since stays."""
        mine = {id(entry) for entry in change.arrived}
        for group, (waiting, entries, failed) in change.before.items():
            now, known = self.waiting.pop(group, None), {id(entry) for entry in entries}
            others = [] if now is None else [e for e in now.entries if id(e) not in mine and id(e) not in known]
            if waiting is not None:
                waiting.entries, waiting.failed = [*entries, *others], failed
                self.waiting[group] = waiting
                self.watch(group, waiting)
            elif now is not None and others:
                now.entries = others
                self.waiting[group] = now
        self.late = change.late
