"""Groups that wait in a trajectory store: rows without an advantage, and the updates that complete them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf_pipeline.data.episodes import stored_last_rows
from rlhf_pipeline.data.keys import (
    ASSISTANT_MASK,
    CREATED_AT,
    DEGENERATE,
    FAILED_MEMBERS,
    PRIORITY,
    RETURN,
    REWARD,
    TASK_REWARD,
    TURN_ADVANTAGES,
    TURN_REWARDS,
    WAITING,
    Key,
    column_name,
    key_of,
    reward_column,
)
from rlhf_pipeline.data.trajectories import Flat, Text, Trajectories, one_advantage, segment_sum, spread
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.transforms.advantage_settings import AdvantageSettings
from rlhf_pipeline.transforms.groups import (
    Closed,
    Graded,
    GroupQueue,
    Ints,
    Member,
    MemberScores,
    shaped,
    uncounted_rewards,
    with_penalty,
)
from trajectory_store import TrajectoryStore
from trajectory_store.locks import locked
from trajectory_store.recorder.standard import LEFT_OUT

_SCORED = ("task_reward", "kl_coef", "log_probs")
"""Columns that determine the rounding error of a return."""

_NEWEST = 16_384
"""The number of rows of the store that are searched for a member that begins a group."""


class RowUpdate(NamedTuple):
    """New values for rows of a store.

    Attributes:
        rows: int64 `[n]`, row ids.
        columns: the values by column name.
        complete: whether the rows can now be used for training.
    """

    rows: Ints
    columns: dict[str, Any]
    complete: bool


class WaitingRows:
    """The rows of a store that wait for their group, shared by all processes that write to the store.

    Args:
        store: open for appending, with the column `waiting`.
        known: returns the ids of the rows known to be waiting, int64, in order.
        refresh: shows the rows of other processes.
    """

    def __init__(
        self, store: TrajectoryStore, waiting_positions: Callable[[], Ints], refresh: Callable[[], object]
    ) -> None:
        self.store = store
        self.waiting_positions = waiting_positions
        self.refresh = refresh
        self.settings: AdvantageSettings
        """The settings of the `MCAdvantage` that is attached to the rows."""
        self.one_each = self.by_turn = False
        self.by_reward: tuple[str, ...] = ()
        """The named rewards that the estimator uses separately."""

    def check(self, advantage_key: Key) -> None:
        """Check that the columns which rows get when their group is complete can be updated."""
        later = (WAITING, FAILED_MEMBERS, RETURN, DEGENERATE, PRIORITY, TURN_ADVANTAGES, advantage_key)
        later_columns = (self.store.schema.find(column_name(key)) for key in later)
        if fixed := [column.name for column in later_columns if column is not None and not column.mutable]:
            raise DefinitionError(
                f"rows of {self.store.path} receive {', '.join(fixed)} when their group is "
                "complete: create these columns with mutable=True."
            )

    def lock(self, until: ExitStack) -> None:
        """Lock out other processes that complete groups, until the stack is closed; only if the store is a folder."""
        folder = Path(self.store.path)
        if folder.is_dir():
            until.enter_context(locked(folder, required=False))  # without locks, only one process may write

    def read(self, queue: GroupQueue, among: Collection[Hashable] | None = None) -> None:
        """Add the waiting rows of all processes to an empty queue, identified by their group's number."""
        self.refresh()
        rows, batch_groups = self.waiting_positions(), queue.settings.batch_groups
        groups, failed = (self._scalars(name, rows, 0) for name in ("waiting", "failed_members"))
        if among is not None and batch_groups is None and len(rows):
            _, code, count = np.unique(groups, return_inverse=True, return_counts=True)
            open_groups = np.array([*among, *queue.failed, *groups[failed > 0]], np.int64)
            near = (count >= queue.fewest)[code] | np.isin(groups, open_groups)
            rows, groups, failed = rows[near], groups[near], failed[near]
        names, since = self._scalars("trajectory_id", rows, -1), self._scalars("created_at", rows, math.nan)
        returns, last = self._scalars("return", rows, 0.0), np.flatnonzero(stored_last_rows(self.store, rows))
        if len(last) < len(rows):
            episodes = self.store.read_scalars("episode_id", rows)
            names = np.where(episodes < 0, names, episodes)
        of_members = np.split(rows, last + 1)[: len(last)]
        read = (values[last].tolist() for values in (groups, failed, names, since, returns))
        for own_rows, group, lost, name, at, value in zip(of_members, *read, strict=True):
            member = Member(group, name, at, (value, 0.0, value, 0.0), rows=own_rows.tolist(), failed=lost)
            member.num_rows = len(own_rows)
            queue.add(member)
            if lost:
                queue.failed[group] = queue.failed.get(group, 0) + lost

    def _scalars(self, name: str, rows: Ints, missing: float) -> Any:
        is_stored = name in self.store.schema
        return self.store.read_scalars(name, rows) if is_stored else np.full(len(rows), missing)

    def score(self, members: Sequence[Member]) -> None:
        """Complete the scores of members that `read` gave."""
        if not members:
            return
        rows = np.array([row for member in members for row in member.rows], np.int64)
        sizes = torch.tensor([len(member.rows) for member in members])
        last = sizes.cumsum(0) - 1
        read: Any = self.columns(["assistant_mask", *_SCORED, "return"], rows)
        mask, returns = read[ASSISTANT_MASK], read[RETURN].values.double()
        tokens = segment_sum(mask.values, mask.lengths).to(torch.int64)
        if len(last) == len(rows):
            scores = with_penalty(read, returns, tokens, torch.finfo(self.settings.scored_in).eps)
        else:
            scores = self._episode_scores(read, returns, tokens, rows, sizes)
        for member, member_scores in zip(members, scores.each(), strict=True):
            member.scores = member_scores
        if self.by_reward:
            ends = rows[last.numpy()]
            reward_values = np.stack([self._scalars(reward_column(name), ends, math.nan) for name in self.by_reward], 1)
            for member, values in zip(members, reward_values.tolist(), strict=True):
                member.named_rewards = values
        if self.by_turn:
            turns = self.store.read_ragged(column_name(TURN_REWARDS), rows)
            of_rows = iter(np.split(turns.values, np.cumsum(turns.lengths)[:-1]))
            for member in members:
                member.turns = [value for _ in member.rows for value in next(of_rows).tolist()]

    def _episode_scores(
        self, read: Trajectories, returns: torch.Tensor, tokens: torch.Tensor, rows: Ints, sizes: torch.Tensor
    ) -> MemberScores:
        """Return the scores of stored episodes of several rows, each of which has the return of its episode."""
        last, rewards = sizes.cumsum(0) - 1, read[TASK_REWARD]
        assert isinstance(rewards, Flat)
        is_last = torch.zeros(len(rows), dtype=torch.bool)
        is_last[last] = True
        outcome = torch.where(is_last | rewards.values.isfinite(), rewards.values.double(), 0.0)
        eps, counted = torch.finfo(self.settings.scored_in).eps, self.settings.episode_return
        of_rows = with_penalty(read, returns, tokens, eps, outcome)
        if counted == "sum":
            rounding, lengths = segment_sum(of_rows.rounding, sizes), segment_sum(tokens, sizes).to(torch.int64)
            task = segment_sum(outcome, sizes)
        else:
            rounding, lengths = of_rows.rounding[last], tokens[last]
            turns = self.columns([column_name(TURN_REWARDS)], rows)
            task = outcome[last] - uncounted_rewards(turns, sizes, counted)
        return MemberScores(returns[last], lengths, task if bool(rounding.any()) else returns[last], rounding)

    def check_new(self, members: Sequence[Member]) -> None:
        """Look for members that begin groups among the newest rows of the store."""
        begun, store = {(member.group, member.name) for member in members if member.name >= 0}, self.store
        if not begun or "group_id" not in store.schema or "trajectory_id" not in store.schema:
            return
        rows = store.ids()[-_NEWEST:]
        rows = rows[np.isin(store.read_scalars("group_id", rows), np.array([member.group for member in members]))]
        groups, names = (store.read_scalars(name, rows).tolist() for name in ("group_id", "trajectory_id"))
        for row, group, name in zip(rows.tolist(), groups, names, strict=True):
            if (group, name) in begun:
                raise DataError(
                    f"trajectory_id {name} arrived again in group {group}, which is closed and already contains it "
                    f"(row {row} of {store.path}). The call had no effect: remove this trajectory from the call, or "
                    "use a different group_id for a new group."
                )

    def column_of(self, key: Key) -> str | None:
        """Return the column of a key, or None."""
        name = column_name(key)
        return name if name in self.store.schema else None

    def columns(self, names: Sequence[str], rows: Ints) -> Trajectories:
        """Read columns of the given rows, by key; columns that the store lacks are omitted."""
        out = Trajectories(len(rows))
        for name in (name for name in names if name in self.store.schema):
            key, column = key_of(name), self.store.schema[name]
            if column.ragged:
                ragged = self.store.read_ragged(name, rows)
                lengths = np.array(ragged.lengths, np.int64)
                out[key] = Flat(torch.from_numpy(np.array(ragged.values)), torch.from_numpy(lengths))
            elif column.is_text:
                out[key] = Text(self.store.read(rows, [name])[name])
            else:
                out[key] = Flat(torch.from_numpy(np.array(self.store.read_scalars(name, rows))))
        return out

    def waiting_columns(
        self, batch: Trajectories, bounds: Sequence[int], waits: Sequence[Member], queue: GroupQueue
    ) -> dict[Key, Flat]:
        """Return the columns by which the last trajectories of a batch wait: the group's number, failures and time."""
        for member in waits:
            if queue.waiting.get(member.group, [])[:1] == [member]:
                member.failed = queue.failed.get(member.group, 0)
        num, steps = len(bounds) - 1 - len(waits), torch.tensor(bounds).diff()
        groups: Any = [member.group for member in waits]
        columns = {WAITING: Flat(spread(torch.tensor([-1] * num + groups), steps))}
        if any(member.failed for member in waits):
            failed = torch.tensor([0] * num + [member.failed for member in waits], dtype=torch.int32)
            columns[FAILED_MEMBERS] = Flat(spread(failed, steps))
        if CREATED_AT not in batch:
            columns[CREATED_AT] = Flat(torch.full((batch.n,), waits[0].since, dtype=torch.float64))
        return columns

    def completed(self, groups: Sequence[Closed], queue: GroupQueue) -> list[RowUpdate]:
        """Return the updates that complete closed groups whose members are in the store."""
        (members, graded), settings = queue.grade(groups), queue.settings
        sizes = np.array([len(member.rows) for member in members], np.int64)
        rows = np.array([row for member in members for row in member.rows], np.int64)
        graded_members = {id(member) for member in members}
        if len(rows) > len(members):
            turns = self.column_of(TURN_ADVANTAGES) and self.store.lengths(column_name(TURN_REWARDS), rows)
            graded = graded.by_row(
                torch.from_numpy(sizes), None if turns is None else torch.from_numpy(np.array(turns))
            )
        left = [
            row
            for group in groups
            for member in group.members
            if id(member) not in graded_members
            for row in member.rows
        ]
        out = [RowUpdate(np.array(left), {"waiting": np.full(len(left), LEFT_OUT)}, complete=False)] if left else []
        is_present = self.store.holds(rows)  # a ring may have evicted some
        rows, graded = rows[is_present], graded.take(torch.from_numpy(is_present))
        if not len(rows):
            return out
        degenerate = graded.degenerate.numpy()
        if settings.zero_variance == "mark" and degenerate.any() and "priority" in self.store.schema:
            flat = rows[degenerate]
            out.append(RowUpdate(flat, {"priority": np.zeros(len(flat), np.float32)}, complete=False))
        columns: dict[str, Any] = {"return": graded.returns.double().numpy(), "degenerate": degenerate}
        name = self.column_of(settings.advantage_key)
        if name is not None:
            columns[name] = self._stored_advantage(name, rows, graded, settings)
        if graded.turns is not None:
            columns[column_name(TURN_ADVANTAGES)] = [turn_advantages.numpy() for turn_advantages in graded.turns]
        columns = {column: values for column, values in columns.items() if column in self.store.schema}
        return [*out, RowUpdate(rows, columns, complete=True)]

    def failures(self, queue: GroupQueue) -> list[RowUpdate]:
        """Return the updates that record the failed members of waiting groups, each in its first row."""
        if self.column_of(FAILED_MEMBERS) is None:
            return []
        first = [(members[0], queue.failed.get(group, 0)) for group, members in queue.waiting.items()]
        new = [(row, failed) for member, failed in first if failed != member.failed for row in member.rows]
        rows, counts = np.array(new, np.int64).reshape(-1, 2).T
        return [RowUpdate(rows, {"failed_members": counts.astype(np.int32)}, complete=False)] if new else []

    def _stored_advantage(self, name: str, rows: Ints, graded: Graded, settings: AdvantageSettings) -> Any:
        """Return the advantages in the form of their column."""
        if self.one_each:
            return graded.advantages.to(torch.float32).numpy()
        read: Any = self.columns(["assistant_mask", "task_reward", "reward"], rows)
        mask = reward = read[ASSISTANT_MASK]
        if settings.trajectory_return is None:
            reward = read.get(REWARD, read[TASK_REWARD])
        values = shaped(graded, reward, mask, settings)
        if not self.store.schema[name].ragged:
            return (values if reward.lengths is None else one_advantage(values, mask.values, mask.lengths)).numpy()
        if reward.lengths is None:
            values = torch.where(mask.values, spread(values, mask.lengths), 0.0)
        return [row.numpy() for row in values.split(mask.lengths.tolist())]
