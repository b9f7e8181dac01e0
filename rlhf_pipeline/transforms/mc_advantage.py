"""Group-relative advantages on the write path."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.envs.transforms import Transform
from torchrl.objectives.llm import MCAdvantageSelector

from rlhf_pipeline.config import close_policy_rule
from rlhf_pipeline.data.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    DONE,
    GROUP_ID,
    KL_COEF,
    LOG_PROBS,
    PRIORITY,
    PROMPT,
    REWARD,
    ROW_ID,
    TASK_REWARD,
    TRAJECTORY_ID,
    Key,
)
from rlhf_pipeline.data.trajectories import (
    ROWS,
    Flat,
    Text,
    Trajectories,
    along_one_dimension,
    attach,
    columns_from_state,
    columns_state,
    ends,
    holds,
    in_form_of,
    is_stack,
    some_steps_of,
    stack_of,
    stack_with,
    td_of,
    whole,
)
from rlhf_pipeline.errors import DataError, DefinitionError, IncompleteError, MissingKeyError
from rlhf_pipeline.functional.advantage import BATCH_ESTIMATORS, EstimatorFunction, checked_estimator
from rlhf_pipeline.transforms.groups import (
    Arrived,
    Closed,
    CloseRules,
    Closing,
    Grader,
    GroupQueue,
    Member,
    Waiting,
    gather,
    graded_groups,
    group_ids,
    hashable,
    number_of_group,
    scores_of,
)
from rlhf_pipeline.transforms.waiting_rows import Later, StoreCall, WaitingRows
from trajectory_store import BufferPool

_PROMPT_KEYS: tuple[Key, ...] = (PROMPT, "query", "text", ("tokens", "prompt"))


_STATS = (
    "completed_trajectories",
    "completed_decisions",
    "trajectory_return_sum",
    "trajectory_return_max",
    "successful_trajectories",
    "failed_trajectories",
    "completed_groups",
    "written_groups",
    "dropped_groups",
    "rescued_groups",
    "degenerate_groups",
    "selected_trajectories",
    "unselected_trajectories",
    "full_trajectories",
    "full_tokens",
    "early_closed_groups",
    "early_closed_trajectories",
    "early_closed_tokens",
    "late_trajectories",
)
"""The counters, under TorchRL's names where those exist."""

_log = logging.getLogger("rlhf_pipeline")


class MCAdvantage(Transform):
    """Computes the advantage of complete groups of trajectories; incomplete groups wait.

    An inverse transform: `ReplayBuffer.extend` runs it before anything is written. A group passes as soon as its
    `grpo_size` trajectories have arrived or failed, in one call or over several. In a `TrajectoryReplayBuffer`, waiting
    trajectories are rows of the store when `extend` returns, without an advantage; a later update adds it, and samplers
    skip them until then. Any process that writes to the store, before or after a `kill -9`, continues with every group.
    Elsewhere they wait in memory and are part of `state_dict()`.

    A group with stragglers closes early if `group_timeout_s` and `min_group_size` are given: at the first call after
    the timeout at which that many members have arrived. Its advantages use the number that arrived; later stragglers
    are counted (`late_trajectories`) and left out. `get_stats()` reports how much that favours short trajectories
    (`early_closed_length_bias`).

    The batch may be a lazy stack `[n]`, a TensorDict `[n]` with jagged leaves, a padded one, or TorchRL's `[B, T]`
    and multi-step forms whose trajectories end where `done_key` is set. The output has the form of the input. Besides
    the advantage it has `return` (float32, the sum of the rewards) and `degenerate` (bool).

    A member counts once: a trajectory is refused if its `trajectory_id` is already waiting in the same group, or occurs
    twice in the call, or if it would begin a group and is among the newest rows of the store, in a closed group.

    A trajectory whose return is not finite has failed: it counts as arrived, but is ignored in its group's advantages,
    and its own advantage is 0 with `degenerate` True.

    The advantage has the shape of the reward: one value per trajectory where the reward is one per trajectory. Where
    the reward is per token, the advantage is broadcast, zero outside the assistant mask if there is one. A trajectory
    without assistant tokens has it at its last token, as its reward.

    Source: GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2; the other estimators are in
    `rlhf_pipeline.functional.advantage`.

    Args:
        grpo_size: trajectories of a complete group.
        prompt_key: identity of the group where no `group_id` is present: a string, a number or a tensor. None tries
            the usual names.
        rewards_key: key of the rewards. If missing, `task_reward` is used.
        advantage_key: key of the advantage.
        done_key: True at the last step of a trajectory. If missing, every row is a whole trajectory.
        verbose: log a line for every batch of complete groups.
        trajectory_return: how the rewards of one trajectory become its return. None normalises every reward over
            all rewards of the group instead, as TorchRL does by default.
        keep_return_bounds: groups whose mean return is not strictly inside are left out (dynamic sampling).
        candidate_group_size: wait for up to this many trajectories and choose `grpo_size` of them.
        candidate_selection_min_size: start choosing when this many have arrived.
        candidate_selector: chooses trajectories; TorchRL's `MCAdvantageSelector` by default.
        estimator: `grpo`, `dr_grpo`, `mean`, `rloo`, `reinforce_pp`, `reinforce_pp_baseline`, `grpo_batch` or
            `opo`. Both `reinforce_pp` and `grpo_batch` divide by the spread of a whole batch; they need `batch_groups`.
            Or a function of one's own, `functional.advantage.EstimatorFunction`.
        group_key: identity of the group. None takes `group_id` if present, otherwise `prompt_key`.
        zero_variance: `keep` writes groups without spread (advantage 0, `degenerate` True); `mark` also sets their
            `priority` to 0, so that samplers skip them; `drop` leaves them out.
        min_group_size: the members that suffice after the timeout; None waits for all.
        group_timeout_s: seconds from a group's first member until it may close early; None for never.
        clock: returns the time in seconds. Waiting outlives a process, so the default is the time of day.
        batch_groups: groups per batch. The integer `group_id` divided by this, rounded down, is the number of the
            batch. Groups of a batch wait for each other, so the batch is the same in whatever order its trajectories
            arrive. None for estimators that need no batch.
        scored_in: the dtype that the models compute log-probs in. With a KL penalty in the reward, a group has no
            spread if its task rewards are equal and its returns differ only by the penalty's rounding.

    Raises:
        DefinitionError: if an argument is out of range or two arguments contradict each other.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> transform = MCAdvantage(grpo_size=2)
    >>> half = TensorDict(group_id=torch.tensor([7]), task_reward=torch.tensor([0.0]), batch_size=[1])
    >>> transform.inv(half) is None, transform.queued_trajectories
    (True, 1)
    >>> out = transform.inv(TensorDict(group_id=torch.tensor([7]), task_reward=torch.tensor([1.0]), batch_size=[1]))
    >>> out["advantage"]
    tensor([-0.7071,  0.7071])
    """

    requires_shared_write_state = True

    def __init__(
        self,
        grpo_size: int,
        prompt_key: Key | None = None,
        rewards_key: Key = REWARD,
        advantage_key: Key = ADVANTAGE,
        done_key: Key = DONE,
        verbose: bool = False,
        *,
        trajectory_return: Literal["sum", "mean", "max"] | None = "sum",
        keep_return_bounds: tuple[float, float] | None = None,
        candidate_group_size: int | None = None,
        candidate_selection_min_size: int | None = None,
        candidate_selector: MCAdvantageSelector | None = None,
        estimator: str | EstimatorFunction = "grpo",
        group_key: Key | None = None,
        zero_variance: Literal["keep", "drop", "mark"] = "keep",
        min_group_size: int | None = None,
        group_timeout_s: float | None = None,
        clock: Callable[[], float] = time.time,
        batch_groups: int | None = None,
        scored_in: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.grpo_size = int(grpo_size)
        self.candidate_group_size = self.grpo_size if candidate_group_size is None else int(candidate_group_size)
        self.candidate_selection_min_size = (
            self.grpo_size if candidate_selection_min_size is None else int(candidate_selection_min_size)
        )
        self.prompt_key = prompt_key
        self.rewards_key = rewards_key
        self.advantage_key = advantage_key
        self.done_key = done_key
        self.verbose = verbose
        self.trajectory_return = trajectory_return
        self.keep_return_bounds = keep_return_bounds
        self.candidate_selector = candidate_selector or MCAdvantageSelector()
        self.estimator = checked_estimator(estimator)
        self.group_key = group_key
        self.zero_variance = zero_variance
        self.min_group_size = self.grpo_size if min_group_size is None else int(min_group_size)
        self.group_timeout_s = None if group_timeout_s is None else float(group_timeout_s)
        self.clock = clock
        self.batch_groups = batch_groups
        self.scored_in = scored_in
        self.in_keys = [key for key in (group_key, prompt_key, rewards_key, done_key) if key is not None]
        self.out_keys = [advantage_key]
        self._check_arguments(close_policy_rule(min_group_size, group_timeout_s))
        self._rules = CloseRules(
            size=self.grpo_size,
            most=self.candidate_group_size,
            enough=self.candidate_selection_min_size,
            least=self.min_group_size,
            timeout_s=self.group_timeout_s,
            batch_groups=batch_groups,
            choose=self._choose
            if self.candidate_group_size > self.grpo_size or keep_return_bounds is not None
            else None,
        )
        self._stats: dict[str, float] = {}
        self.reset_stats()
        self._queue = self._new_queue()
        self._lock, self._pool = threading.RLock(), BufferPool()
        self._grader = Grader(
            estimator=estimator,
            zero_variance=zero_variance,
            trajectory_return=trajectory_return,
            advantage_key=advantage_key,
            batch_groups=batch_groups,
            stats=self._stats,
            verbose=verbose,
        )
        self.rows: WaitingRows | None = None
        """The waiting rows of a store, or None if trajectories wait in memory."""
        self._is_writing = False
        """Whether a buffer's call on the store is in progress."""
        self._num_written: int | None = None
        self._store_call: StoreCall | None = None
        """The current call's work on waiting groups; None if it involves none."""

    def _check_arguments(self, close_policy: tuple[bool, str]) -> None:
        """Refuse arguments out of range or in conflict.

        Args:
            close_policy: the rule about the close-policy arguments as they were given, before the defaults.
        """
        size, most, least = self.grpo_size, self.candidate_group_size, self.candidate_selection_min_size
        bounds = self.keep_return_bounds
        rules = [
            (size >= 1, f"grpo_size is {size}; it must be at least 1."),
            (
                self.trajectory_return in (None, "sum", "mean", "max"),
                f"trajectory_return is {self.trajectory_return!r}; it must be 'sum', 'mean', 'max' or None.",
            ),
            (
                self.zero_variance in ("keep", "drop", "mark"),
                f"zero_variance is {self.zero_variance!r}; it must be 'keep', 'drop' or 'mark'.",
            ),
            (most >= size, f"candidate_group_size is {most}; it must be at least grpo_size ({size})."),
            (
                size <= least <= most,
                f"candidate_selection_min_size is {least}; it must lie between {size} and {most}.",
            ),
            (
                self.trajectory_return is not None or (bounds is None and most == size),
                "keep_return_bounds and candidate_group_size choose by return: set trajectory_return.",
            ),
            (
                bounds is None or (len(bounds) == 2 and bounds[0] < bounds[1]),
                f"keep_return_bounds is {bounds}; it must be an increasing pair.",
            ),
            (
                (self.batch_groups is not None) == (self.estimator in BATCH_ESTIMATORS),
                f"estimator is {self.estimator!r} and batch_groups {self.batch_groups}: "
                f"{', '.join(BATCH_ESTIMATORS)} divide by the spread of a batch, so they need batch_groups, how "
                "many groups a batch has, for example those of a rollout; the others take none.",
            ),
            (
                self.batch_groups is None or most == size,
                "candidate_group_size lets a group go on waiting when it could be written, and the groups of a batch "
                "are written together. Leave it out with batch_groups.",
            ),
            (
                self.batch_groups is None or self.batch_groups >= 1,
                f"batch_groups is {self.batch_groups}; it must be at least 1.",
            ),
            close_policy,
            (
                1 <= self.min_group_size <= size,
                f"min_group_size is {self.min_group_size}; it must lie between 1 and grpo_size ({size}).",
            ),
            (
                self.group_timeout_s is None or self.group_timeout_s >= 0,
                f"group_timeout_s is {self.group_timeout_s}; it must not be negative.",
            ),
        ]
        for is_met, message in rules:
            if not is_met:
                raise DefinitionError(message)

    # -- the write path ----------------------------------------------------------------------------------------

    def write(self, batch: Trajectories) -> Trajectories | None:
        """Return the trajectories of a batch to write to the store.

        Without an attached store (`attach`) these are the complete groups; the others wait in memory. With one, they
        are all trajectories: members of incomplete groups have no advantage yet, and `settle` adds it later.

        Returns:
            The rows, or None if there are none.
        """
        with self._lock:
            self._current()
            arrived, now = self._arrived(batch), self.clock()
            if self.rows is not None:
                return self._write_rows(arrived, now)
            done = self._in_memory(arrived, now)
        return None if done is None else done.batch

    def inv(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the complete groups, or None. The input is not changed, so nothing is cloned first."""
        return self._inv_call(tensordict)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if tensordict is None:
            return None
        with self._lock:
            self._current()
            if self.rows is not None and not self._is_writing:
                raise self._elsewhere("inv", "extend")
            if 0 in tensordict.batch_size:
                done = self._finish(self._queue.close_overdue(self.clock()))
                return None if done is None else done.in_form_of(tensordict)
            batch = some_steps_of(tensordict, self._needed(tensordict))
            arrived = self._arrived(batch)
            if ROWS in batch:  # the rest stays in the rows
                for key in [key for key in batch if key not in (ROWS, ASSISTANT_MASK, PRIORITY, arrived.reward_key)]:
                    del batch[key]
            done = self._in_memory(arrived, self.clock())
        if done is None:
            return None
        if done.source is batch and tensordict.batch_dims == 1:
            return attach(tensordict, done.columns)  # all rows in their order, so nothing else changes
        return done.in_form_of(tensordict)

    def _in_memory(self, arrived: Arrived, now: float) -> _Finished | None:
        """Return the groups that these arrivals complete; the others wait in memory."""
        queue = self._queue
        whole = queue.whole(arrived, now)
        closed = queue.arrive(arrived, now) if whole is None else []
        self._count_arrivals(arrived)
        if whole is not None:
            return self._finish_whole(arrived, whole)
        done = self._finish(closed)
        queue.shrink(arrived)
        return done

    def _needed(self, td: TensorDictBase) -> list[Key]:
        """Return the keys to read from a batch."""
        identities = (self.group_key,) if self.group_key is not None else (GROUP_ID, self.prompt_key, *_PROMPT_KEYS)
        named = [*identities, TRAJECTORY_ID, self.rewards_key, TASK_REWARD, ASSISTANT_MASK]
        named += [self.done_key, PRIORITY, KL_COEF]
        if not is_stack(td) or holds(td, KL_COEF):
            named.append(LOG_PROBS)  # for the rounding error of the penalty
        return list(dict.fromkeys(key for key in named if key is not None))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Set the advantages of the groups in the batch; a batch that has advantages passes unchanged.

        Args:
            tensordict: whole trajectories, in one of the forms of the write path.

        Returns:
            The same batch with the advantage set.
        """
        if tensordict is None:  # pyright: ignore[reportUnnecessaryComparison]
            return tensordict
        if tensordict.get(self.advantage_key, None) is not None or tensordict.get(ROW_ID, None) is not None:
            # Done already, or a sample of a store, in which the groups are not whole.
            return tensordict
        if 0 in tensordict.batch_size:
            return tensordict
        arrived = self._arrived(some_steps_of(tensordict, self._needed(tensordict)))
        seen: dict[Hashable, int] = {}
        codes = torch.tensor([seen.setdefault(group, len(seen)) for group in arrived.groups])
        graded = graded_groups(arrived.scores, codes, self.estimator, None)
        return attach(along_one_dimension(tensordict), self._grader.columns(arrived, graded))

    def _arrived(self, batch: Trajectories) -> Arrived:
        n, ended = batch.n, ends(batch, self.done_key)
        bounds = list(range(n + 1))
        if ended is not None and not bool(ended.all()):
            bounds = [0, *(torch.nonzero(ended).reshape(-1) + 1).tolist()]
            if bounds[-1] != n:
                raise IncompleteError(
                    f"the last trajectory of the batch is not complete: steps {bounds[-1]} to {n - 1} of {n} have no "
                    f"{self.done_key!r}. Pass whole trajectories, so that nothing is lost."
                )
        named = (self.group_key,) if self.group_key is not None else (GROUP_ID, self.prompt_key)
        named = (GROUP_ID, *_PROMPT_KEYS) if named == (GROUP_ID, None) else named
        key = next((key for key in named if key is not None and key in batch), None)
        if key is None:
            raise MissingKeyError(
                "no trajectory says which group it belongs to: looked for "
                f"{[key for key in named if key is not None]}. Set group_id, or pass group_key=."
            )
        groups = group_ids(batch[key], bounds[:-1], key, numbers=self.rows is not None)
        self._queue.unique = key == GROUP_ID
        reward_key = self.rewards_key if isinstance(batch.get(self.rewards_key), Flat) else TASK_REWARD
        reward = batch.get(reward_key)
        if not isinstance(reward, Flat):
            raise MissingKeyError(f"the batch has neither {self.rewards_key!r} nor {TASK_REWARD!r}, to rank by")
        scores = scores_of(batch, reward, bounds, self.trajectory_return, torch.finfo(self.scored_in).eps)
        given, names = batch.get(TRAJECTORY_ID), None
        if isinstance(given, Flat) and given.lengths is None and given.values.numel() == n:
            each = given.values.reshape(-1)
            names = (each if len(bounds) == n + 1 else each[torch.tensor(bounds[1:]) - 1]).tolist()
        return Arrived(batch, bounds, groups, reward_key, scores, names)

    # -- groups ------------------------------------------------------------------------------------------------

    def _choose(self, members: Sequence[Member], size: int) -> list[int] | None:
        # A failed trajectory ranks as one that earned nothing.
        values = torch.tensor([member.value for member in members]).nan_to_num(0.0, 0.0, 0.0)
        chosen: list[int] | None = list(range(len(members)))
        candidates = TensorDict({"return": values}, batch_size=[len(members)])
        names = [key if isinstance(key, str) else key[0] for key in self.candidate_selector.in_keys]
        if "trajectories" in names:
            candidates.set("trajectories", lazy_stack([self._trajectory(member) for member in members]))
        chosen = self.candidate_selector.select(
            candidates.select(*self.candidate_selector.in_keys, strict=True),
            group_size=size,
            keep_return_bounds=self.keep_return_bounds,
        )
        if chosen is not None and self.keep_return_bounds is not None:
            low, high = self.keep_return_bounds
            if not low < float(values[torch.tensor(chosen)].mean()) < high:
                return None
            if len(members) > size and not low < float(values[:size].mean()) < high:
                self._stats["rescued_groups"] += 1
        return chosen

    def _trajectory(self, member: Member) -> TensorDictBase:
        """Return a waiting trajectory as a TensorDict `[steps]`."""
        arrived = member.arrived
        if arrived.rows is None:
            return stack_of(whole(arrived.batch.select(arrived.steps_of([member.index]))))
        assert self.rows is not None
        return stack_of(self.rows.columns(self.rows.store.schema.names, np.array([member.row])))

    def report_failed(self, group: Hashable, count: int = 1) -> TensorDictBase | None:
        """Report that `count` trajectories of a group will never arrive.

        Args:
            group: the group's identity.
            count: how many failed.

        Returns:
            The group if this completes it (write it with `TrajectoryReplayBuffer.extend_raw`), otherwise None.
        """
        with self._lock:
            queue, group = self._begin("report_failed"), self._name(group)
            waiting, closed = queue.fail(group, int(count), self.clock())
            if waiting is None or closed:
                return self._out(closed)
            if self._store_call is not None:
                self._store_call.failed.append(waiting)
            if waiting.failed >= self.candidate_group_size and self.batch_groups is None:
                del queue.waiting[group]
                return self._out([Closed([], waiting.members, early=False)])
        return None

    def close(self, group: Hashable | None = None, min_size: int = 1) -> TensorDictBase | None:
        """Close waiting groups early; the advantages use the number that arrived.

        Args:
            group: only this group; None closes all.
            min_size: groups with fewer trajectories keep waiting.

        Returns:
            The trajectories of the closed groups, or None.
        """
        with self._lock:
            queue = self._begin("close_groups")
            waiting = queue.waiting
            names = list(waiting) if group is None else [name] if (name := self._name(group)) in waiting else []
            due = [name for name in names if len(waiting[name].members) >= max(min_size, 1)]
            return self._out([closed for name in due for closed in queue.complete(name, close=True)])

    def close_overdue(self) -> TensorDictBase | None:
        """Close the overdue groups that have enough members, as every call of the write path does.

        Returns:
            The trajectories of the closed groups, or None.
        """
        with self._lock:
            return self._out(self._begin("close_overdue").close_overdue(self.clock()))

    def _name(self, group: Hashable) -> Hashable:
        return group if self.rows is None else number_of_group(group)

    def _begin(self, method: str) -> GroupQueue:
        """Return the queue, prepared for closing groups."""
        queue = self._current()
        if self.rows is None:
            return queue
        if not self._is_writing:
            raise self._elsewhere(method, method)
        return self._meet()

    def _elsewhere(self, called: str, instead: str) -> DefinitionError:
        """Return the error for groups that wait in a store while no buffer is writing to it."""
        where = None if self.rows is None else self.rows.store.path
        return DefinitionError(
            f"the groups of this MCAdvantage wait in {where}, where MCAdvantage.{called} cannot write. Call {instead} "
            "of the TrajectoryReplayBuffer."
        )

    def _out(self, closed: list[Closed]) -> TensorDictBase | None:
        """Return groups closed outside the write path; with a store, leave them to `settle`."""
        if self._store_call is not None:
            self._store_call.closed += closed
            return None
        done = self._finish(closed)
        return None if done is None else td_of(done.batch)

    # -- advantages --------------------------------------------------------------------------------------------

    def _finish(self, closed: Sequence[Closed]) -> _Finished | None:
        """Return the trajectories of closed groups in memory, with their advantages; None if there are none."""
        groups = [group for group in closed if group.members]
        if not groups:
            return None
        arrived = gather([member for group in groups for member in group.members], self._pool)
        return self._finished(arrived, Closing.of(groups))

    def _finish_whole(self, arrived: Arrived, groups: list[list[int]]) -> _Finished | None:
        """Return the same for groups that arrived complete in one call, each given by its members."""
        if not groups:
            return None
        self._stats["completed_groups"] += len(groups)
        self._stats["selected_trajectories"] += len(arrived.groups)
        closing = Closing([len(members) for members in groups], [arrived.groups[members[0]] for members in groups])
        return self._finished(arrived.take([i for members in groups for i in members]), closing)

    def _finished(self, arrived: Arrived, closing: Closing) -> _Finished | None:
        graded, kept = self._grader.grade(arrived.scores, closing)
        if kept is not None:
            arrived = arrived.take(kept.tolist())
        if not arrived.groups:
            return None
        columns = self._grader.columns(arrived, graded, one_each=self.rows is not None and self.rows.one_each)
        return _Finished(arrived.batch, columns, len(arrived.groups))

    # -- groups that wait in a store ---------------------------------------------------------------------------

    def attach(self, rows: WaitingRows | None) -> None:
        """Make incomplete groups wait as rows of a store; called by `TrajectoryReplayBuffer`.

        Raises:
            DefinitionError: trajectories are waiting in memory.
        """
        with self._lock:
            if self.rows is None and self._queue.waiting:
                raise DefinitionError(
                    f"{self.queued_trajectories} trajectories wait in memory in this MCAdvantage. Write them first, or "
                    "give the buffer an MCAdvantage of its own."
                )
            self.rows = rows
            if rows is not None:
                rows.eps = torch.finfo(self.scored_in).eps
                name, schema = rows.column_of(self.advantage_key), rows.store.schema
                rows.one_each = name is not None and not schema[name].ragged and self.trajectory_return is not None
            self._queue = self._new_queue()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Enclose one call of the write path and its changes to groups; a call that raises may be repeated.

        Trajectories that the store did not take are forgotten; those that it took wait there.
        """
        with self._lock:
            stats, late = dict(self._stats), dict(self._queue.late)
            before = self._queue.copy() if self.rows is None and self._queue.waiting else None
            self._is_writing, self._num_written = self.rows is not None, None
            try:
                yield
            except BaseException:
                self._stats.update(stats)
                if self.rows is None:
                    self._queue = before or self._new_queue()
                else:
                    self.rows.is_known = False
                self._queue.late = late
                raise
            finally:
                self._is_writing = False
                if self._store_call is not None:
                    self._store_call.end()
                    self._store_call = None

    def _new_queue(self) -> GroupQueue:
        return GroupQueue(self._rules, self._stats)

    def _current(self) -> GroupQueue:
        """Return the queue, filled from the store if its waiting rows are not known."""
        if self.rows is not None and not self.rows.is_known:
            self._recover(self.rows, self.rows.look())
        return self._queue

    def _waiting(self) -> dict[Hashable, Waiting]:
        """Return the waiting groups."""
        with self._lock:
            return self._current().waiting

    def _meet(self) -> GroupQueue:
        """Lock the groups until the call ends, and pick up other processes' changes to them."""
        rows = self.rows
        assert rows is not None
        if self._store_call is None:
            self._store_call = StoreCall(rows, self._grader)
            found = rows.look()
            if not rows.are(found):
                self._recover(rows, found)
        return self._queue

    def _recover(self, rows: WaitingRows, found: np.ndarray) -> None:
        """Rebuild the groups from the store's waiting rows; failures of groups without a row are kept."""
        before, queue = self._queue, self._new_queue()
        queue.late, queue.unique = before.late, self.group_key in (None, GROUP_ID)
        rows.fill(queue, found)
        for group, lost in before.waiting.items():
            if lost.failed and not lost.members:
                (queue.waiting.get(group) or queue.open(group, self.clock())).failed += lost.failed
        self._queue = queue

    def _write_rows(self, arrived: Arrived, now: float) -> Trajectories | None:
        """Return the rows to append: complete groups with their advantages, then the trajectories that wait."""
        if not self._is_writing:
            raise self._elsewhere("write", "extend")
        whole = self._queue.whole(arrived, now)
        queue = self._meet() if whole is None else self._queue
        self._count_arrivals(arrived)
        if whole is None and self._store_call is not None:
            rows = self._store_call.write(arrived, queue, now)
            self._num_written = self._store_call.num_rows
            return rows
        done = self._finish_whole(arrived, whole or [])
        self._num_written = 0 if done is None else done.num
        return None if done is None else done.batch

    def settle(self, rows: np.ndarray) -> list[Later]:
        """Return the updates of stored rows that the call makes, once its own rows are stored.

        Args:
            rows: int64, the ids that the store gave to the rows from `write`, in order; empty if there were none.

        Raises:
            DataError: the store took another number of rows.
        """
        if self._num_written not in (None, len(rows)):
            raise DataError(
                f"{len(rows)} rows were stored of {self._num_written} trajectories that left MCAdvantage. Put "
                "transforms that change the number of trajectories behind it in the list, so that they run before."
            )
        return [] if self._store_call is None else self._store_call.settle(rows)

    # -- figures -----------------------------------------------------------------------------------------------

    def _count_arrivals(self, arrived: Arrived) -> None:
        stats = self._stats
        stats["completed_trajectories"] += len(arrived.groups)
        stats["completed_decisions"] += arrived.bounds[-1]
        returns = arrived.scores.returns[arrived.scores.returns.isfinite()]
        stats["failed_trajectories"] += arrived.scores.returns.numel() - returns.numel()
        if returns.numel():
            stats["trajectory_return_sum"] += float(returns.sum())
            stats["trajectory_return_max"] = max(stats["trajectory_return_max"], float(returns.max()))
        stats["successful_trajectories"] += int((arrived.scores.returns > 0).sum())

    def reset_stats(self) -> None:
        """Set the counters to zero."""
        self._stats.update(dict.fromkeys(_STATS, 0), trajectory_return_max=float("-inf"))

    def get_stats(self) -> dict[str, float]:
        """Return the counters, the size of the queue, and how much closing groups early favours short trajectories.

        `mean_length_full` and `mean_length_early_closed` are completion tokens per written trajectory of complete
        groups and of groups that closed early; `early_closed_length_bias` is the second over the first. Short
        trajectories arrive first, so a value well below 1 means that the timeout teaches the policy to be brief. The
        three are NaN without data.
        """
        stats = self._stats
        full = _ratio(stats["full_tokens"], stats["full_trajectories"])
        early = _ratio(stats["early_closed_tokens"], stats["early_closed_trajectories"])
        return {
            **stats,
            "mean_length_full": full,
            "mean_length_early_closed": early,
            "early_closed_length_bias": _ratio(early, full),
            "queued_groups": self.queued_groups,
            "queued_trajectories": self.queued_trajectories,
            "max_queued_trajectories_per_group": self.max_queued_trajectories_per_group,
        }

    def __getattr__(self, name: str) -> Any:
        if name in _STATS:
            return self.__dict__["_stats"][name]
        return super().__getattr__(name)

    @property
    def queued_groups(self) -> int:
        """Number of incomplete groups."""
        return sum(1 for waiting in self._waiting().values() if waiting.members)

    @property
    def queued_trajectories(self) -> int:
        """Number of waiting trajectories."""
        return sum(len(waiting.members) for waiting in self._waiting().values())

    @property
    def max_queued_trajectories_per_group(self) -> int:
        """Size of the largest incomplete group."""
        return max((len(waiting.members) for waiting in self._waiting().values()), default=0)

    # -- state -------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """Return the trajectories waiting in memory, in the order of arrival, reported failures and the counters."""
        with self._lock:
            queue, chunks = self._current(), []
            for arrived, members in queue.parts() if self.rows is None else ():
                part = arrived.take([member.index for member in members])
                since = [queue.waiting[group].since for group in part.groups]
                chunks.append({"bounds": part.bounds, "columns": columns_state(whole(part.batch)), "since": since})
            here = [
                (g, w.failed) for g, w in queue.waiting.items() if w.failed and (self.rows is None or not w.members)
            ]
            failed = [[group, count] for group, count in here]
            late = [[group, count] for group, count in queue.late.items()]
            return {"chunks": chunks, "failed": failed, "late": late, "stats": dict(self._stats)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Replace the trajectories waiting in memory by a checkpoint's; rows waiting in a store are not changed.

        Raises:
            DataError: the checkpoint holds trajectories, but this transform keeps them in a store.
        """
        with self._lock:
            self._stats.update(state["stats"])
            if self.rows is not None:
                if state["chunks"]:
                    raise DataError(
                        "the checkpoint holds trajectories that wait in memory, and here they wait in "
                        f"{self.rows.store.path}. Load it into an MCAdvantage without a store, close its groups, and "
                        "write what comes out."
                    )
                self.rows.is_known = False
                self._queue = self._new_queue()
            else:
                self.clear_queues()
            queue, now = self._queue, self.clock()
            for saved in state["chunks"]:
                arrived = self._arrived(columns_from_state(saved["columns"]))
                since = saved.get("since") or [now] * len(arrived.groups)
                for i, group in enumerate(arrived.groups):
                    waiting = queue.waiting.get(group) or queue.open(group, since[i])
                    waiting.members.append(Member(arrived, i))
            for group, count in state["failed"]:
                name = hashable(group)
                (queue.waiting.get(name) or queue.open(name, now)).failed += count
            queue.late = {hashable(group): count for group, count in state.get("late", ())}

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_lock", "_pool"):
            state.pop(name, None)
        if self.rows is not None:  # a process that gets a copy finds the waiting rows in the store
            state |= {"rows": None, "_queue": self._new_queue()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock, self._pool = threading.RLock(), BufferPool()

    @property
    def queues(self) -> dict[Hashable, list[TensorDictBase]]:
        """Return the waiting trajectories of each incomplete group; in a store, by the group's number."""
        return {g: [self._trajectory(m) for m in w.members] for g, w in self._waiting().items() if w.members}

    def waiting_values(self, key: Key = TRAJECTORY_ID) -> list[Any]:
        """Return one value of each waiting trajectory, from its last step; trajectories without it are left out."""
        out: list[Any] = []
        with self._lock:
            for arrived, members in self._current().parts():
                if arrived.rows is None:
                    index = torch.tensor([arrived.bounds[member.index + 1] - 1 for member in members])
                    batch = arrived.batch if key in arrived.batch else whole(arrived.batch)
                else:
                    assert self.rows is not None
                    index = torch.arange(len(members))
                    name = self.rows.column_of(key)
                    rows = np.array([member.row for member in members])
                    batch = self.rows.columns([] if name is None else [name], rows)
                column = batch.get(key)
                if column is not None:
                    found = column.select(index)
                    out += found.values.tolist() if isinstance(found, Flat) else found.plain()
        return out

    @property
    def is_shared(self) -> bool:
        """Return whether processes share the groups: they do if groups wait in a store."""
        return self.rows is not None

    def share_memory_(self) -> Self:
        """Refuse: TorchRL's shared queues live in a manager process and die with it.

        Raises:
            DefinitionError: always, with the alternative.
        """
        raise DefinitionError(
            "groups are shared through a store, where they outlive a kill, and not through memory. Let each process "
            "make a TrajectoryReplayBuffer over the same folder; members that any of them extends complete a group."
        )

    def clear_queues(self) -> None:
        """Discard the trajectories that wait in memory.

        Raises:
            DefinitionError: they wait in a store, which forgets nothing.
        """
        with self._lock:
            if self.rows is not None and self._current().waiting:
                raise DefinitionError(
                    f"the groups wait in {self.rows.store.path}, and a store forgets nothing. Close them: "
                    "TrajectoryReplayBuffer.close_groups()."
                )
            self._queue = self._new_queue()


@dataclass(slots=True)
class _Finished:
    """Complete groups: their original steps, their new columns, and the number of trajectories."""

    source: Trajectories
    columns: dict[Key, Flat]
    num: int

    @property
    def batch(self) -> Trajectories:
        """Both together."""
        return Trajectories(self.source.n, whole(self.source) | self.columns)

    def in_form_of(self, td: TensorDictBase) -> TensorDictBase:
        """Return steps and new columns together, in the form of a TensorDict."""
        rows = self.source.get(ROWS)
        if isinstance(rows, Text) and (is_stack(td) or td.batch_dims != 1):
            return stack_with(rows.items, self.columns)
        return in_form_of(td, self.batch)


def _ratio(over: float, under: float) -> float:
    return over / under if under else math.nan
