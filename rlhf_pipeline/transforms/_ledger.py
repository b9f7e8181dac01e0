"""Keeping the groups that wait: in memory, in a checkpoint, and in a log that no crash loses."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from tensordict import TensorDictBase

from rlhf_pipeline.data.trajectories import Flat, columns_from_state, columns_of, columns_state, td_of
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.keys import TRAJECTORY_ID, Key
from rlhf_pipeline.transforms._figures import GroupFigures
from rlhf_pipeline.transforms._groups import Chunk, read
from rlhf_pipeline.transforms._queue import Change, Entry, Failure, GroupLog, GroupQueue, Saved, Waiting


class _PerThread(threading.local):
    """The change that the calls of a thread belong to."""

    change: Change | None = None


class GroupLedger(GroupFigures):
    """The groups that wait, and what happens to them when a process dies or a write fails."""

    group_timeout_s: float | None

    def _init_ledger(self) -> None:
        self._queue = GroupQueue(self.group_timeout_s)
        self._lock = threading.RLock()
        self._local = _PerThread()
        self._log: GroupLog | None = None
        self._owner: int | None = None
        self._recovered = False
        self._stats = {}
        self.reset_stats()

    @abstractmethod
    def _chunk(
        self,
        td: TensorDictBase,
        bounds: list[int],
        *,
        groups: list[Hashable] | None = None,
        reward: Flat | None = None,
    ) -> Chunk: ...

    @abstractmethod
    def _now(self) -> float: ...

    # -- a log -------------------------------------------------------------------------------------------------

    @property
    def log(self) -> GroupLog | None:
        """Where waiting trajectories are kept on disk, or None where only `state_dict()` keeps them."""
        return self._log

    def attach(self, log: GroupLog) -> None:
        """Keep waiting trajectories in a log from now on; what it holds joins the queue at the first use.

        `TrajectoryReplayBuffer` does this where the store is a folder.
        """
        with self._lock:
            self._log, self._owner = log, None

    def _waiting(self) -> GroupQueue:
        log = self._log
        if log is None or self._owner == os.getpid():
            return self._queue
        with self._lock:
            forked = self._owner is not None  # the groups in memory are the parent's
            before = GroupQueue() if forked else self._queue
            saved, failures = log.recover()
            self._queue, self._owner = GroupQueue(self.group_timeout_s), os.getpid()
            self._refill(saved, failures)
            self._recovered = True
            for chunk, entries in before.chunks():
                part = chunk.take([entry.index for entry in entries])
                since = [before.waiting[group].since for group in part.groups]
                self._keep([(part, self._put(part, since))])
            for group, waiting in before.waiting.items():
                if waiting.failed:
                    self._put_failure(group, waiting.failed, waiting.since)
        return self._queue

    def _refill(self, saved: Sequence[Saved], failures: Sequence[Failure]) -> None:
        """Let what a log kept wait again, the oldest group first."""
        order: dict[int, tuple[float, Hashable]] = {}
        for part in saved:
            for group, ticket, since in zip(part.groups, part.tickets, part.since, strict=True):
                order[ticket] = min(order.get(ticket, (since, group)), (since, group), key=lambda item: item[0])
        for failure in failures:
            order.setdefault(failure.ticket, (failure.since, failure.group))
        for ticket, (since, group) in sorted(order.items(), key=lambda item: (item[1][0], item[0])):
            if group not in self._queue.waiting:
                self._queue.open(group, since).ticket = ticket
        for part in saved:
            chunk = self._chunk(td_of(part.columns), part.bounds, groups=part.groups, reward=part.reward)
            chunk.stored = True
            self._put(chunk, part.since)
        for failure in failures:
            self._queue.waiting[failure.group].failed += failure.members

    def _put(self, chunk: Chunk, since: Sequence[float]) -> list[Entry]:
        entries = []
        for i, group in enumerate(chunk.groups):
            waiting = self._queue.waiting.get(group) or self._queue.open(group, since[i])
            entries.append(Entry(chunk, i))
            waiting.entries.append(entries[-1])
        return entries

    def _put_failure(self, group: Hashable, count: int, since: float) -> Waiting:
        """Count failures of a group, on disk too where there is a log."""
        waiting = self._queue.waiting.get(group) or self._queue.open(group, since)
        if self._log is not None:
            self._note(self._log.add_failure(Failure(group, waiting.number(), waiting.since, count)))
        waiting.failed += count
        return waiting

    def _keep(self, kept: Sequence[tuple[Chunk, list[Entry]]]) -> None:
        """Log trajectories that have just begun to wait."""
        if self._log is None:
            return
        for chunk, _ in kept:
            groups = [self._queue.waiting[group] for group in chunk.groups]
            tickets, since = [w.number() for w in groups], [w.since for w in groups]
            columns = columns_of(chunk.td)
            self._note(self._log.add(Saved(columns, chunk.bounds, chunk.groups, tickets, since, chunk.reward)))

    # -- all or nothing ----------------------------------------------------------------------------------------

    @property
    def _change(self) -> Change | None:
        return self._local.change

    def _note(self, token: Any) -> None:
        change = self._change
        if change is not None:
            change.tokens.append(token)

    def _leave(self, group: Hashable) -> Waiting:
        """Take a group out of the queue; the log forgets it when the transaction ends."""
        waiting, change = self._queue.waiting.pop(group), self._change
        if change is not None:
            change.closed.append(waiting)
        elif self._log is not None and waiting.ticket:
            self._log.drop([waiting.ticket])
        return waiting

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What the calls in this block did to the queue stands if the block ends well.

        If it raises, for example because the disk is full, the trajectories that came in are forgotten and the groups
        that left wait again, so that the same call may be made once more. A group whose rows turn out to be in the
        store stays written.
        """
        queue = self._waiting()
        change = Change(stats=dict(self._stats), late=dict(queue.late))
        outer, self._local.change = self._change, change
        try:
            yield
        except BaseException:
            with self._lock:
                if not self._written(change):
                    self._queue.restore(change)
                    self._stats = change.stats
                    for token in change.tokens if self._log is not None else ():
                        self._log.undo(token)  # pyright: ignore[reportOptionalMemberAccess]
                elif self._log is not None:
                    self._log.drop(change.tickets())
            raise
        finally:
            self._local.change = outer
        tickets = change.tickets()
        if self._log is not None and tickets:
            with self._lock:
                self._log.drop(tickets)

    def _written(self, change: Change) -> bool:
        tickets = change.tickets()
        return self._log is not None and bool(tickets) and self._log.written(tickets)

    # -- state -------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """The waiting trajectories in the order of arrival, the failures reported and the counters."""
        with self._lock:
            queue, chunks = self._waiting(), []
            for chunk, entries in queue.chunks():
                part = chunk.take([entry.index for entry in entries])
                since = [queue.waiting[group].since for group in part.groups]
                chunks.append({"bounds": part.bounds, "columns": columns_state(columns_of(part.td)), "since": since})
            failed = [[group, waiting.failed] for group, waiting in queue.waiting.items() if waiting.failed]
            late = [[group, count] for group, count in queue.late.items()]
            state: dict[str, Any] = {"chunks": chunks, "failed": failed, "late": late, "stats": dict(self._stats)}
            return state if self._log is None else {**state, "log": str(self._log)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Replace the waiting trajectories by those of a checkpoint.

        Where they are kept in a log, and the checkpoint was taken with the same log, the log is the truth: it knows
        what came and went since.
        """
        with self._lock:
            self._stats.update(state["stats"])
            queue = self._waiting()
            if self._log is not None and state.get("log") == str(self._log):
                return
            self.clear_queues()
            queue = self._queue
            now = self._now()
            for saved in state["chunks"]:
                chunk = self._chunk(td_of(columns_from_state(saved["columns"])), list(saved["bounds"]))
                self._keep([(chunk, self._put(chunk, saved.get("since") or [now] * len(chunk.groups)))])
            for group, count in state["failed"]:
                self._put_failure(hashable(group), count, now)
            queue.late = {hashable(group): count for group, count in state.get("late", ())}

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_lock", "_local"):
            state.pop(name, None)
        if self._log is not None:  # the groups in the log stay with this process
            state |= {"_log": None, "_owner": None, "_queue": GroupQueue(self.group_timeout_s)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = threading.RLock()
        self._local = _PerThread()

    @property
    def queues(self) -> dict[Hashable, list[TensorDictBase]]:
        """The waiting trajectories of each incomplete group, for inspection."""
        waiting = self._waiting().waiting
        return {group: [e.trajectory() for e in found.entries] for group, found in waiting.items() if found.entries}

    def waiting_values(self, key: Key = TRAJECTORY_ID) -> list[Any]:
        """One value of each waiting trajectory, that of its last step; trajectories without it are left out."""
        out: list[Any] = []
        with self._lock:
            for chunk, entries in self._waiting().chunks():
                column = read(chunk.td, key)
                if column is not None:
                    last = torch.tensor([chunk.bounds[entry.index + 1] - 1 for entry in entries])
                    found = column.select(last)
                    out += found.values.tolist() if isinstance(found, Flat) else found.plain()
        return out

    @property
    def is_shared(self) -> bool:
        """False: the waiting groups belong to this process and to its store."""
        return False

    def share_memory_(self) -> Self:
        """Refused: TorchRL's shared queues live in a manager process and die with it.

        Raises:
            DefinitionError: always, with what to do instead.
        """
        raise DefinitionError(
            "MCAdvantage completes groups in one process, where they wait beside the store and outlive a kill. Let one "
            "process call extend and send it the trajectories of the others, or let each process sample whole groups "
            "into a buffer of its own on the same store."
        )

    def clear_queues(self) -> None:
        """Forget the waiting trajectories, on disk too."""
        with self._lock:
            tickets = [waiting.ticket for waiting in self._waiting().waiting.values() if waiting.ticket]
            if self._log is not None and tickets:
                self._log.drop(tickets)
            self._queue = GroupQueue(self.group_timeout_s)


def hashable(group: Any) -> Hashable:
    """The identity of a group that went through JSON or a checkpoint: lists are tuples again."""
    return tuple(hashable(item) for item in group) if isinstance(group, list) else group
