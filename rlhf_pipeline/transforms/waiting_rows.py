"""Groups that wait in a trajectory store: rows whose advantage is NaN, and the updates that complete them."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf_pipeline.data.keys import (
    ASSISTANT_MASK,
    CREATED_AT,
    FAILED_MEMBERS,
    LEFT_OUT,
    RETURN,
    REWARD,
    TASK_REWARD,
    TRAJECTORY_ID,
    WAITING,
    Key,
    column_name,
    key_of,
)
from rlhf_pipeline.data.trajectories import Flat, Text, Trajectories, one_advantage, segment_sum, spread
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.transforms.groups import (
    Arrived,
    Closed,
    Closing,
    Graded,
    Grader,
    GroupQueue,
    Ints,
    Member,
    Waiting,
    repoint,
    scores_together,
    with_penalty,
)
from trajectory_store import TrajectoryStore

_SCORED = ("task_reward", "kl_coef", "log_probs")
"""Columns from which the rounding error of a return follows."""

_NEWEST = 16_384
"""Rows of the store among which a member is looked for that begins a group."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Later(NamedTuple):
    """New values for rows that a store holds.

    Attributes:
        rows: int64 `[n]`, row ids.
        columns: the values by column name.
        complete: whether the rows can now be learned from.
    """

    rows: Ints
    columns: dict[str, Any]
    complete: bool

    @classmethod
    def left_out(cls, rows: Ints) -> Later:
        """Return the update of rows that waited and are left out of learning."""
        return cls(rows, {"waiting": np.full(len(rows), LEFT_OUT)}, complete=False)


class WaitingRows:
    """The rows of a store that wait for their group, shared by all processes that write to the store.

    Args:
        store: open for appending, with the column `waiting`.
        look: refreshes the store and returns the ids of the waiting rows, int64, in order.

    Attributes:
        eps: machine epsilon of the dtype that log-probs were computed in.
        one_each: whether the store keeps one advantage per trajectory, and one is computed.
        held: the rows known to be waiting.
        is_known: False if the waiting rows must be looked up again.
    """

    def __init__(self, store: TrajectoryStore, look: Callable[[], Ints]) -> None:
        self.store = store
        self.look = look
        self.eps = torch.finfo(torch.float32).eps
        self.one_each = False
        self.held: set[int] = set()
        self.is_known = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock out other processes that complete groups; only if the store is a local folder."""
        folder = Path(self.store.path)
        if not folder.is_dir():
            yield
            return
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:  # without locks, only one process may write
                    raise
            yield
        finally:
            os.close(descriptor)

    def are(self, found: Ints) -> bool:
        """Return whether these are exactly the rows known to be waiting."""
        return self.is_known and len(found) == len(self.held) and self.held.issuperset(found.tolist())

    def fill(self, queue: GroupQueue, rows: Ints) -> None:
        """Add waiting rows to a new queue as members of their groups, identified by number."""
        read: Any = self.columns(["assistant_mask", *_SCORED, "return", "waiting", "created_at", "trajectory_id"], rows)
        mask, returns = read[ASSISTANT_MASK], read[RETURN].values.double()
        tokens = segment_sum(mask.values, mask.lengths).to(torch.int64)
        arrived = Arrived(
            batch=Trajectories(len(rows)),
            bounds=list(range(len(rows) + 1)),
            groups=read[WAITING].values.tolist(),
            reward_key=TASK_REWARD,
            scores=with_penalty(read, returns, tokens, self.eps),
            names=read[TRAJECTORY_ID].values.tolist() if TRAJECTORY_ID in read else None,
            rows=rows,
        )
        failed = [0] * len(rows)
        if "failed_members" in self.store.schema:
            failed = self.store.read_scalars("failed_members", rows).tolist()
        for i, (group, since) in enumerate(zip(arrived.groups, read[CREATED_AT].values.tolist(), strict=True)):
            waiting = queue.waiting.get(group) or queue.open(group, since)
            waiting.members.append(Member(arrived, i))
            waiting.failed += failed[i]
        self.held, self.is_known, queue.recovered = set(rows.tolist()), True, len(rows) > 0

    def check_new(self, members: Sequence[Member]) -> None:
        """Look for members that begin groups among the newest rows of the store.

        Raises:
            DataError: one is there, so its group has closed: a new group would wait for the others for ever.
        """
        begun, store = {(member.group, member.name) for member in members if member.name >= 0}, self.store
        if not begun or "group_id" not in store.schema or "trajectory_id" not in store.schema:
            return
        rows = store.ids()[-_NEWEST:]
        rows = rows[np.isin(store.read_scalars("group_id", rows), np.array([member.group for member in members]))]
        groups, names = (store.read_scalars(name, rows).tolist() for name in ("group_id", "trajectory_id"))
        for row, group, name in zip(rows.tolist(), groups, names, strict=True):
            if (group, name) in begun:
                raise DataError(
                    f"trajectory_id {name} came to group {group} again, which has closed with it: it is row {row} of "
                    f"{store.path}. Nothing of this call was taken: leave it out, or give a new group a group_id of "
                    "its own."
                )

    def column_of(self, key: Key) -> str | None:
        """Return the column that holds a key, or None."""
        name = column_name(key)
        return name if name in self.store.schema else None

    def columns(self, names: Sequence[str], rows: Ints) -> Trajectories:
        """Read columns of the given rows, by key; columns that the store lacks are left out."""
        out = Trajectories(len(rows))
        for name in (name for name in names if name in self.store.schema):
            key, column = key_of(name), self.store.schema[name]
            if column.ragged:
                found = self.store.read_ragged(name, rows)
                lengths = np.array(found.lengths, np.int64)
                out[key] = Flat(torch.from_numpy(np.array(found.values)), torch.from_numpy(lengths))
            elif column.is_text:
                out[key] = Text(self.store.read(rows, [name])[name])
            else:
                out[key] = Flat(torch.from_numpy(np.array(self.store.read_scalars(name, rows))))
        return out


class StoreCall:
    """One call of the write path that involves waiting groups: the rows it appends, and the updates that follow.

    Other processes cannot change the groups until it ends.

    Args:
        rows: the waiting rows.
        grader: computes the advantages of closed groups.

    Attributes:
        closed: groups that close and have members in the store, from earlier calls or from this one.
        failed: groups with failed members.
    """

    def __init__(self, rows: WaitingRows, grader: Grader) -> None:
        self.closed: list[Closed] = []
        self.failed: list[Waiting] = []
        self._rows = rows
        self._grader = grader
        self._num_whole = 0
        self.num_rows: int | None = None
        """The number of rows that `write` returned; None before."""
        self._part: Arrived | None = None
        self._waiting: list[Member] = []
        self._alone = ExitStack()
        self._alone.enter_context(rows.alone())

    def end(self) -> None:
        """Release the lock."""
        self._alone.close()

    def write(self, arrived: Arrived, queue: GroupQueue, now: float) -> Trajectories | None:
        """Return the rows to append in a call with trajectories that wait, or that complete waiting groups."""
        grader = self._grader
        ready = queue.arrive(arrived, now)
        inside = [g for g in ready if g.members and all(m.arrived is arrived for m in (*g.members, *g.left))]
        outside = [g for g in ready if any(m.arrived is not arrived for m in (*g.members, *g.left))]
        if grader.batch_groups is not None and outside:
            inside, outside = [], ready  # a batch is graded as a whole, so all of it waits for the update
        self.closed += outside
        chosen, graded = [m.index for g in inside for m in g.members], Graded.nothing()
        if inside:
            graded, kept = grader.grade(arrived.scores.take(torch.tensor(chosen)), Closing.of(inside))
            chosen = chosen if kept is None else [chosen[i] for i in kept.tolist()]
        waiting = self._waiting = self._members_that_wait(arrived, queue)
        if queue.unique:
            groups = ((member, queue.waiting.get(member.group)) for member in waiting)
            self._rows.check_new([member for member, group in groups if group and group.members[0].arrived is arrived])
        part = arrived.take([*chosen, *(m.index for m in waiting)])
        self._num_whole, self.num_rows = len(chosen), len(part.groups)
        if not part.groups:
            return None
        if not waiting:
            new = grader.columns(part, graded, one_each=self._rows.one_each)
            return Trajectories(part.batch.n, part.batch | new)
        self._part = part
        return self._with_waiting(part, graded, queue, now)

    def _members_that_wait(self, arrived: Arrived, queue: GroupQueue) -> list[Member]:
        """Return the members of this call that are stored as waiting, if only until the update that completes them."""
        groups = (queue.waiting.get(group) for group in dict.fromkeys(arrived.groups))
        found = [m for waiting in groups if waiting is not None for m in waiting.members if m.arrived is arrived]
        found += [m for group in self.closed for m in group.members if m.arrived is arrived]
        return sorted(found, key=lambda member: member.index)

    def _with_waiting(self, part: Arrived, graded: Graded, queue: GroupQueue, now: float) -> Trajectories:
        """Return rows; the last ones wait, without an advantage, with the exact return and their group's number."""
        k, more = len(part.groups) - len(self._waiting), len(self._waiting)
        columns = self._grader.columns(part, graded.followed_by(more), one_each=self._rows.one_each)
        owner = part.owners()
        late = owner >= k
        value = columns[self._grader.advantage_key]
        value.values[late if value.lengths is None else spread(late, value.lengths)] = torch.nan
        returns = part.scores.returns.clone()
        returns[:k] = returns[:k].to(torch.float32).double()
        columns[RETURN] = Flat(returns[owner])
        groups: Any = part.groups[k:]
        columns[WAITING] = Flat(torch.tensor([-1] * k + groups, dtype=torch.int64)[owner])
        failed = torch.zeros(k + more, dtype=torch.int32)
        for i, member in enumerate(self._waiting, start=k):
            group = queue.waiting.get(part.groups[i])
            if group is not None and group.failed and group.members[0] is member:
                failed[i] = group.failed
        if bool(failed.any()):
            columns[FAILED_MEMBERS] = Flat(failed[owner])
        if CREATED_AT not in part.batch:
            columns[CREATED_AT] = Flat(torch.full((part.batch.n,), now, dtype=torch.float64))
        return Trajectories(part.batch.n, part.batch | columns)

    def settle(self, rows: Ints) -> list[Later]:
        """Return the updates of stored rows, once the call's own rows are stored; see `MCAdvantage.settle`."""
        held = self._rows.held
        if self._part is not None:
            late = rows[self._num_whole :]
            repoint(self._waiting, self._part.take(range(self._num_whole, len(rows))).stored(late))
            held.update(late.tolist())
        if not self.closed and not self.failed:
            return []
        held.difference_update(
            m.row for group in self.closed for m in (*group.members, *group.left) if m.arrived.rows is not None
        )
        out: list[Later] = []
        left = [m.row for group in self.closed for m in group.left if m.arrived.rows is not None]
        if left:
            out.append(Later.left_out(np.array(left)))
        out += self._completed([group for group in self.closed if group.members])
        for waiting in self.failed:
            if waiting.members and self._rows.column_of(FAILED_MEMBERS):
                row = np.array([waiting.members[0].row])
                out.append(Later(row, {"failed_members": np.array([waiting.failed], np.int32)}, complete=False))
        return out

    def _completed(self, groups: Sequence[Closed]) -> list[Later]:
        """Return the updates that complete groups whose members are in the store."""
        if not groups:
            return []
        members = [member for group in groups for member in group.members]
        scores, store = scores_together(members), self._rows.store
        rows, returns = np.array([member.row for member in members], np.int64), scores.returns
        graded, kept = self._grader.grade(scores, Closing.of(groups))
        out: list[Later] = []
        if kept is not None:
            out.append(Later.left_out(np.delete(rows, kept.numpy())))
            rows, returns = rows[kept.numpy()], returns[kept]
        if len(store) < store.watermark:  # a ring may have evicted some
            there = torch.from_numpy(store.holds(rows))
            rows, returns, graded = rows[there.numpy()], returns[there], graded.take(there)
        if not len(rows):
            return out
        degenerate = graded.degenerate.numpy()
        columns: dict[str, Any] = {"return": returns.to(torch.float32).double().numpy(), "degenerate": degenerate}
        name = self._rows.column_of(self._grader.advantage_key)
        if name is not None:
            columns[name] = self._stored_advantage(name, rows, graded)
        if self._grader.zero_variance == "mark" and bool(degenerate.any()):
            columns["priority"] = np.where(degenerate, np.float32(0.0), store.read_scalars("priority", rows))
        columns = {column: values for column, values in columns.items() if column in store.schema}
        return [*out, Later(rows, columns, complete=True)]

    def _stored_advantage(self, name: str, rows: Ints, graded: Graded) -> Any:
        """Return the advantages in the form of their column."""
        if self._rows.one_each:
            return graded.advantages.to(torch.float32).numpy()
        store, by_step = self._rows.store, self._grader.trajectory_return is None
        read: Any = self._rows.columns(["assistant_mask", "task_reward"], rows)
        mask = reward = read[ASSISTANT_MASK]
        if by_step:
            reward = read[TASK_REWARD]
            if "reward" in store.schema:
                reward: Any = self._rows.columns(["reward"], rows)[REWARD]
        values = self._grader.values(reward, mask, graded.advantages, graded.codes)
        if not store.schema[name].ragged:
            return (values if reward.lengths is None else one_advantage(values, mask.values, mask.lengths)).numpy()
        if reward.lengths is None:
            values = torch.where(mask.values, spread(values, mask.lengths), 0.0)
        return [row.numpy() for row in values.split(mask.lengths.tolist())]
