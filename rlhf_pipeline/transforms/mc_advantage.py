"""Group-relative advantages on the write path."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.objectives.llm import MCAdvantageSelector

from rlhf_pipeline.data.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    CREATED_AT,
    DEGENERATE,
    DONE,
    FAILED_MEMBERS,
    GROUP_ID,
    KL_COEF,
    LEFT_OUT,
    LOG_PROBS,
    PRIORITY,
    PROMPT,
    RETURN,
    REWARD,
    ROW_ID,
    TASK_REWARD,
    TRAJECTORY_ID,
    WAITING,
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
    in_form_of,
    is_stack,
    last_position,
    segment_sum,
    some_steps_of,
    stack_of,
    step_sum,
    td_of,
    whole,
)
from rlhf_pipeline.errors import DataError, DefinitionError, IncompleteError, MissingKeyError
from rlhf_pipeline.transforms._advantages import (
    advantage_values,
    group_advantages,
    group_codes,
    scores_of,
    step_owners,
    trajectory_returns,
)
from rlhf_pipeline.transforms._arguments import check_arguments
from rlhf_pipeline.transforms._figures import GroupFigures
from rlhf_pipeline.transforms.groups import (
    Arrived,
    Closed,
    GroupQueue,
    Member,
    Scores,
    Waiting,
    gather,
    group_ids,
    hashable,
    number_of_group,
    repoint,
)
from rlhf_pipeline.transforms.waiting_rows import Later, WaitingRows

_PROMPT_KEYS: tuple[Key, ...] = (PROMPT, "query", "text", ("tokens", "prompt"))


_log = logging.getLogger("rlhf_pipeline")


class MCAdvantage(GroupFigures):
    """Computes the advantage of complete groups of trajectories; incomplete groups wait.

    An inverse transform: `ReplayBuffer.extend` runs it before anything is written. A group passes as soon as its
    `grpo_size` trajectories have arrived or failed, in one call or over several. In a `TrajectoryReplayBuffer` the
    trajectories that wait are rows of its store when `extend` returns, without an advantage, which one update gives
    them later; samplers pass over them until then. Whichever process writes to the store, before or after a `kill -9`,
    goes on with every group. Elsewhere they wait in memory and are part of `state_dict()`.

    A group whose members straggle closes early if `group_timeout_s` and `min_group_size` are given: at the first call
    after its time is up at which that many members have arrived. Its advantages use the number that arrived, and
    stragglers that come later are counted (`late_trajectories`) and left out. `get_stats()` says how much that favours
    short trajectories (`early_closed_length_bias`).

    The batch may be a lazy stack `[n]`, a TensorDict `[n]` with jagged leaves, a padded one, or TorchRL's `[B, T]`
    and multi-step forms whose trajectories end where `done_key` is set. What comes out has the form that came in
    and, beside the advantage, `return` (float32, the sum of the rewards), `degenerate` (bool).

    A trajectory whose return is not finite has failed: it counts as arrived, the advantages of its group are those
    of the others, and its own is 0 with `degenerate` True.

    The advantage has the shape of the reward: one value per trajectory where the reward is one per trajectory;
    where the reward is per token it is broadcast, zero outside the assistant mask if there is one.

    Source: GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2; the other estimators are in
    `rlhf_pipeline.functional.advantage`.

    Args:
        grpo_size: trajectories of a complete group.
        prompt_key: identity of the group where no `group_id` is present: a string, a number or a tensor. None tries
            the usual names.
        rewards_key: rewards. Where the key is missing, `task_reward` is used.
        advantage_key: where the advantage goes.
        done_key: True at the last step of a trajectory. Where missing, every row is a whole trajectory.
        verbose: log a line for every batch of complete groups.
        trajectory_return: how the rewards of one trajectory become its return. None normalises every reward over
            all rewards of the group instead, as TorchRL does by default.
        keep_return_bounds: groups whose mean return is not strictly inside are left out (dynamic sampling).
        candidate_group_size: wait for up to this many trajectories and choose `grpo_size` of them.
        candidate_selection_min_size: start choosing when this many have arrived.
        candidate_selector: chooses; TorchRL's `MCAdvantageSelector` by default.
        estimator: `grpo`, `dr_grpo`, `mean`, `rloo`, `reinforce_pp`, `reinforce_pp_baseline` or `opo`. The two
            `reinforce_pp` divide by the spread of a whole batch, and need `batch_groups`.
        group_key: identity of the group. None takes `group_id` where present, else `prompt_key`.
        zero_variance: `keep` writes groups without spread (advantage 0, `degenerate` True); `mark` also sets their
            `priority` to 0, so that the samplers pass over them; `drop` leaves them out.
        min_group_size: members that are enough once the timeout is over; None waits for all.
        group_timeout_s: seconds from a group's first member until it may close early; None never.
        clock: tells the time in seconds. Waiting outlives a process, so the default is the time of day.
        batch_groups: groups of one batch: those whose `group_id`, an integer, gives the same whole number divided by
            this. They wait for each other, so the batch is the same however its trajectories arrive. None for
            estimators that need no batch.
        scored_in: the dtype that the models compute log-probs in. With a KL penalty in the reward, a group whose task
            rewards are equal and whose returns differ by its rounding only is without spread.

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
        estimator: str = "grpo",
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
        self.estimator = estimator
        self.group_key = group_key
        self.zero_variance = zero_variance
        self.min_group_size = self.grpo_size if min_group_size is None else int(min_group_size)
        self.group_timeout_s = None if group_timeout_s is None else float(group_timeout_s)
        self.clock = clock
        self.batch_groups = batch_groups
        self.scored_in = scored_in
        self.in_keys = [key for key in (group_key, prompt_key, rewards_key, done_key) if key is not None]
        self.out_keys = [advantage_key]
        self._unique = False
        check_arguments(self, both=(min_group_size is None) == (group_timeout_s is None))
        self._queue = GroupQueue(self.group_timeout_s)
        self._lock = threading.RLock()
        self._rows: WaitingRows | None = None
        self._held: set[int] = set()
        self._known, self._recovered = True, False
        self._settling: _Settling | None = None
        self.reset_stats()

    # -- the write path ----------------------------------------------------------------------------------------

    def write(self, batch: Trajectories) -> Trajectories | None:
        """The trajectories of a batch that go on to the store.

        Without a store (`attach`) those are the complete groups; the others wait in memory. With one, all of them:
        the members of incomplete groups have no advantage yet, and `settle` gives it to them later.

        Returns:
            The rows, or None where there are none.
        """
        with self._lock:
            self._current()
            now = self._now()
            arrived = self._arrived(batch)
            if self._rows is not None:
                return self._write_rows(arrived, now)
            done = self._finish([*self._arrive(arrived, now), *self._overdue(now)])
            self._queue.shrink(arrived)
        return None if done is None else done.batch

    def inv(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The complete groups, or None. The input is not changed, so nothing is cloned first."""
        return self._inv_call(tensordict)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if tensordict is None:
            return None
        with self._lock:
            self._current()
            self._refuse_rows("inv", "extend")
            now, ready, batch, arrived = self._now(), [], None, None
            if tensordict.numel():
                batch = some_steps_of(tensordict, self._needed())
                arrived = self._arrived(batch)
                if ROWS in batch:  # the rest is in the rows
                    for key in [key for key in batch if key not in (ROWS, ASSISTANT_MASK, PRIORITY)]:
                        del batch[key]
                ready = self._arrive(arrived, now)
            done = self._finish([*ready, *self._overdue(now)])
            if arrived is not None:
                self._queue.shrink(arrived)
        if done is None:
            return None
        if done.source is batch and tensordict.batch_dims == 1:
            return attach(tensordict, done.columns)  # all rows, in their order: nothing else changes
        return done.in_form_of(tensordict)

    def _needed(self) -> list[Key]:
        """The keys that are read of a batch."""
        identities = (self.group_key,) if self.group_key is not None else (GROUP_ID, self.prompt_key, *_PROMPT_KEYS)
        penalised = (KL_COEF, LOG_PROBS)  # what the rounding of a penalty is told from
        named = (*identities, self.rewards_key, TASK_REWARD, ASSISTANT_MASK, self.done_key, PRIORITY, *penalised)
        return list(dict.fromkeys(key for key in named if key is not None))

    def _now(self) -> float:
        return self.clock() if self.group_timeout_s is not None or self._rows is not None else 0.0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Set the advantage from the groups as they are in the batch; a batch that has one passes unchanged.

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
        if not tensordict.numel():
            return tensordict
        arrived = self._arrived(some_steps_of(tensordict, self._needed()))
        codes = group_codes(arrived.groups)
        advantage, degenerate = group_advantages(arrived.scores, codes, self.estimator, None)
        return attach(along_one_dimension(tensordict), self._columns(arrived, advantage, degenerate, codes))

    def _arrived(self, batch: Trajectories) -> Arrived:
        bounds = self._bounds(batch)
        key, identity = self._identity(batch)
        groups = group_ids(identity, bounds[:-1], key)
        if self._rows is not None:
            groups: list[Hashable] = [number_of_group(group) for group in groups]
        self._unique = key == GROUP_ID  # only then is a straggler known from a new instance of a prompt
        found = batch.get(self.rewards_key)
        reward = found if isinstance(found, Flat) else batch.get(TASK_REWARD)
        if not isinstance(reward, Flat):
            raise MissingKeyError(f"the batch has neither {self.rewards_key!r} nor {TASK_REWARD!r}, to rank by")
        returns, lengths = trajectory_returns(reward, bounds, self.trajectory_return)
        mask = batch.get(ASSISTANT_MASK)
        if isinstance(mask, Flat) and mask.lengths is not None:
            tokens = segment_sum(mask.values, mask.lengths).to(torch.int64)
            lengths = tokens if len(groups) == batch.n else step_sum(tokens, bounds)
        scores = scores_of(batch, returns, lengths, torch.finfo(self.scored_in).eps)
        return Arrived(batch, bounds, groups, reward, scores)

    def _bounds(self, batch: Trajectories) -> list[int]:
        n, ended = batch.n, ends(batch, self.done_key)
        if ended is None or bool(ended.all()):
            return list(range(n + 1))
        bounds = [0, *(torch.nonzero(ended).reshape(-1) + 1).tolist()]
        if bounds[-1] != n:
            raise IncompleteError(
                f"the last trajectory of the batch is not complete: steps {bounds[-1]} to {n - 1} of {n} have no "
                f"{self.done_key!r}. Pass whole trajectories, so that nothing is lost."
            )
        return bounds

    def _identity(self, batch: Trajectories) -> tuple[Key, Any]:
        keys = (self.group_key,) if self.group_key is not None else (GROUP_ID, self.prompt_key)
        if self.group_key is None and self.prompt_key is None:
            keys = (GROUP_ID, *_PROMPT_KEYS)
        for key in keys:
            column = None if key is None else batch.get(key)
            if key is not None and column is not None:
                return key, column
        raise MissingKeyError(
            f"no trajectory says which group it belongs to: looked for {[k for k in keys if k is not None]}. "
            "Set group_id, or pass group_key=."
        )

    # -- groups ------------------------------------------------------------------------------------------------

    def _arrive(self, arrived: Arrived, now: float) -> list[Closed]:
        self._count_arrivals(arrived)
        queue, ready = self._queue, []
        for i, group in enumerate(arrived.groups):
            waiting = queue.waiting.get(group)
            if waiting is None:
                if queue.late and queue.is_late(group):
                    self._stats["late_trajectories"] += 1
                    continue
                waiting = queue.open(group, now)
            waiting.members.append(Member(arrived, i))
            ready += self._complete_due(group)
        return ready

    def _complete_due(self, group: Hashable) -> list[Closed]:
        """Close a group if it is due, and with it the groups that have to come together."""
        together, waiting = self._together(group), self._queue.waiting
        if not all(name in waiting and self._is_due(waiting[name]) for name in together):
            return []
        return [closed for name in together for closed in self._complete(name)]

    def _together(self, group: Hashable) -> Sequence[Hashable]:
        """The groups of a group's batch; the group alone where the estimator needs no batch."""
        if self.batch_groups is None:
            return [group]
        first = self._batch_of(group) * self.batch_groups
        return range(first, first + self.batch_groups)

    def _batch_of(self, group: Hashable) -> int:
        assert self.batch_groups is not None
        if not isinstance(group, int):
            raise DataError(
                f"batch_groups={self.batch_groups} counts groups by an integer group_id, and a trajectory's group is "
                f"{group!r}. Number the groups, or use an estimator that needs no batch."
            )
        return group // self.batch_groups

    def _is_due(self, waiting: Waiting) -> bool:
        arrived = len(waiting.members)
        if self.batch_groups is not None and waiting.failed >= self.candidate_group_size:
            return True  # nothing of it will come, and the rest of its batch need not wait for it
        enough = self.min_group_size if waiting.overdue else self.candidate_selection_min_size
        return arrived > 0 and (arrived >= enough or arrived + waiting.failed >= self.candidate_selection_min_size)

    def _overdue(self, now: float) -> list[Closed]:
        """Close the groups whose time is up and that have enough members; the others close when they have."""
        recovered, self._recovered = self._recovered, False
        found = self._queue.take_overdue(now)
        if recovered:  # a group may be complete already: the process died before it wrote it, or wants fewer now
            found = list(self._queue.waiting.items())
        # One that is gone by its turn has left with its batch.
        return [closed for group, _ in found if group in self._queue.waiting for closed in self._complete_due(group)]

    def _complete(self, group: Hashable, close: bool = False) -> list[Closed]:
        """Take a group that may be complete out of the queue; empty where it goes on waiting."""
        waiting = self._queue.waiting[group]
        members, failed = waiting.members, waiting.failed
        close = close or waiting.overdue
        early = len(members) + failed < self.candidate_selection_min_size
        size = min(self.grpo_size, len(members))
        chosen: list[int] | None = list(range(len(members)))
        if self.candidate_group_size > self.grpo_size or self.keep_return_bounds is not None:
            chosen = self._choose(members, size)
        if chosen is None and len(members) < self.candidate_group_size - failed and not close:
            return []
        del self._queue.waiting[group]
        self._stats["completed_groups"] += 1
        if early:
            self._stats["early_closed_groups"] += 1
            if self._unique and self.group_timeout_s is not None:
                self._queue.expect_late(group, self.candidate_group_size - len(members) - failed)
        if chosen is None:
            self._stats["dropped_groups"] += 1
            return [Closed([], members, early)]
        self._stats["selected_trajectories"] += len(chosen)
        self._stats["unselected_trajectories"] += len(members) - len(chosen)
        left = (
            [member for i, member in enumerate(members) if i not in set(chosen)] if len(chosen) < len(members) else []
        )
        return [Closed([members[i] for i in chosen], left, early)]

    def _choose(self, members: Sequence[Member], size: int) -> list[int] | None:
        # A failed trajectory ranks as one that earned nothing.
        values = torch.tensor([member.value for member in members]).nan_to_num(0.0, 0.0, 0.0)
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
        """A waiting trajectory as a TensorDict `[steps]`."""
        arrived = member.arrived
        if arrived.batch is not None:
            return stack_of(whole(arrived.batch.select(arrived.steps_of([member.index]))))
        assert self._rows is not None
        return stack_of(self._rows.trajectory(member.row))

    def report_failed(self, group: Hashable, count: int = 1) -> TensorDictBase | None:
        """Say that `count` trajectories of a group will never arrive.

        Args:
            group: the group's identity.
            count: how many failed.

        Returns:
            The group, if that completes it (write it with `TrajectoryReplayBuffer.extend_raw`), else None.
        """
        with self._lock:
            self._begin("report_failed")
            queue, group = self._queue, self._name(group)
            waiting = queue.waiting.get(group)
            if waiting is None and queue.late:
                while count and queue.is_late(group):  # of a group that closed without it
                    count -= 1
                if not count:
                    return None
            waiting = waiting or queue.open(group, self._now())
            waiting.failed += int(count)
            closed = self._complete_due(group)
            if closed:
                return self._out(closed)
            if self._settling is not None:
                self._settling.failed.append(waiting)
            if waiting.failed >= self.candidate_group_size and self.batch_groups is None:
                del queue.waiting[group]
                return self._out([Closed([], waiting.members, early=False)])
        return None

    def close(self, group: Hashable | None = None, min_size: int = 1) -> TensorDictBase | None:
        """Close waiting groups early; the advantage uses the number that arrived.

        Args:
            group: only this group; None closes all.
            min_size: groups with fewer trajectories go on waiting.

        Returns:
            The trajectories of the closed groups, or None.
        """
        with self._lock:
            self._begin("close_groups")
            waiting = self._queue.waiting
            names = list(waiting) if group is None else [name] if (name := self._name(group)) in waiting else []
            due = [name for name in names if len(waiting[name].members) >= max(min_size, 1)]
            return self._out([closed for name in due for closed in self._complete(name, close=True)])

    def close_overdue(self) -> TensorDictBase | None:
        """Close the groups whose time is up, as every call of the write path does.

        Returns:
            The trajectories of the closed groups, or None.
        """
        with self._lock:
            self._begin("close_overdue")
            return self._out(self._overdue(self._now()))

    def _name(self, group: Hashable) -> Hashable:
        return group if self._rows is None else number_of_group(group)

    def _begin(self, method: str) -> None:
        """Get ready to close groups."""
        self._current()
        if self._rows is not None:
            self._refuse_rows(method, method)
            self._meet()

    def _refuse_rows(self, called: str, instead: str) -> None:
        if self._rows is not None and self._settling is None:
            raise DefinitionError(
                f"the groups of this MCAdvantage wait in {self._rows.store.path}, where MCAdvantage.{called} cannot "
                f"write. Call {instead} of the TrajectoryReplayBuffer."
            )

    def _out(self, closed: list[Closed]) -> TensorDictBase | None:
        """What closing groups outside the write path gives; with a store, `settle` does it."""
        if self._settling is not None:
            self._settling.closed += closed
            return None
        done = self._finish(closed)
        return None if done is None else td_of(done.batch)

    # -- advantages --------------------------------------------------------------------------------------------

    def _grade(self, closed: Sequence[Closed], scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        """Advantages of whole groups, one after the other, whether they have no spread, and the group of each."""
        sizes, early = [len(group.members) for group in closed], [group.early for group in closed]
        returns, batches = scores.returns, None
        codes = torch.repeat_interleave(torch.tensor(sizes))
        self._count_lengths(scores.lengths, torch.tensor(early)[codes] if any(early) else None)
        if self.batch_groups is not None:
            batches = torch.tensor([self._batch_of(group.members[0].group) for group in closed])[codes]
        advantage, degenerate = group_advantages(scores, codes, self.estimator, batches)
        flat = int(codes[degenerate].unique().numel())
        drop = self.zero_variance == "drop"
        if self.verbose:
            message = "%d groups of %d to %d trajectories: mean return %.4g, %d of them without spread; %d groups wait"
            waiting = len(self._queue.waiting)
            _log.info(message, len(sizes), min(sizes), max(sizes), returns.nanmean().item(), flat, waiting)
        self._stats["degenerate_groups"] += flat
        self._stats["written_groups"] += len(sizes) - (flat if drop else 0)
        self._stats["dropped_groups"] += flat if drop else 0
        return advantage, degenerate, codes

    def _finish(self, closed: Sequence[Closed]) -> _Finished | None:
        """The trajectories of closed groups that are in memory, with their advantages; None where there are none."""
        groups = [group for group in closed if group.members]
        if not groups:
            return None
        arrived = gather([member for group in groups for member in group.members])
        advantage, degenerate, codes = self._grade(groups, arrived.scores)
        if self.zero_variance == "drop" and bool(degenerate.any()):
            keep = torch.nonzero(~degenerate).reshape(-1)
            if not keep.numel():
                return None
            arrived = arrived.take(keep.tolist())
            advantage, degenerate, codes = advantage[keep], degenerate[keep], codes[keep]
        columns = self._columns(arrived, advantage, degenerate, codes)
        return _Finished(arrived.steps, columns)

    def _columns(self, arrived: Arrived, advantage: Tensor, degenerate: Tensor, codes: Tensor) -> dict[Key, Flat]:
        """The columns that trajectories get, by step."""
        batch, reward, owner = arrived.steps, arrived.rewards, step_owners(arrived.bounds)
        mask = batch.get(ASSISTANT_MASK)
        per_step = codes if self.trajectory_return is None else None
        values = advantage_values(reward, mask if isinstance(mask, Flat) else None, owner, advantage, per_step)
        columns: dict[Key, Flat] = {
            self.advantage_key: Flat(values, reward.lengths, reward.shapes),
            RETURN: Flat(arrived.returns[owner].to(torch.float32)),
            DEGENERATE: Flat(degenerate[owner]),
        }
        if self.zero_variance == "mark" and bool(degenerate.any()):
            old = batch.get(PRIORITY)
            base = old.values.to(torch.float32) if isinstance(old, Flat) else torch.ones(batch.n)
            columns[PRIORITY] = Flat(torch.where(degenerate[owner], 0.0, base))
        return columns

    # -- groups that wait in a store ---------------------------------------------------------------------------

    @property
    def rows(self) -> WaitingRows | None:
        """The rows of a store that wait, or None where trajectories wait in memory."""
        return self._rows

    def attach(self, rows: WaitingRows | None) -> None:
        """Let incomplete groups wait as rows of a store; `TrajectoryReplayBuffer` does this.

        Raises:
            DefinitionError: trajectories wait in memory.
        """
        with self._lock:
            if self._rows is None and self._queue.waiting:
                raise DefinitionError(
                    f"{self.queued_trajectories} trajectories wait in memory in this MCAdvantage. Write them first, or "
                    "give the buffer an MCAdvantage of its own."
                )
            self._rows, self._known = rows, rows is None
            if rows is not None:
                rows.eps = torch.finfo(self.scored_in).eps
            self._queue = GroupQueue(self.group_timeout_s)

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call of the write path with what it does to the groups: if it raises, the same call may be made again.

        What the store did not take is forgotten, and what it took waits there.
        """
        with self._lock, ExitStack() as stack:
            stats, late = dict(self._stats), dict(self._queue.late)
            before = self._queue.copy() if self._rows is None and self._queue.waiting else None
            self._settling = None if self._rows is None else _Settling(stack)
            try:
                yield
            except BaseException:
                self._stats = stats
                if self._rows is None:
                    self._queue = before or GroupQueue(self.group_timeout_s)
                else:
                    self._known = False
                self._queue.late = late
                raise
            finally:
                self._settling = None

    def _current(self) -> GroupQueue:
        """The queue; the first time, of what waits in the store."""
        if not self._known and self._rows is not None:
            self._recover(self._rows.look())
        return self._queue

    def _waiting(self) -> GroupQueue:
        with self._lock:
            return self._current()

    def _meet(self) -> None:
        """Take in what other processes did to the groups, and keep them from doing more until the call ends."""
        rows, call = self._rows, self._settling
        assert rows is not None
        assert call is not None
        if not call.alone:
            call.alone = True
            call.stack.enter_context(rows.alone())
            found = rows.look()
            if not self._known or len(found) != len(self._held) or not self._held.issuperset(found.tolist()):
                self._recover(found)

    def _recover(self, found: np.ndarray) -> None:
        """Let the rows of the store that wait be the groups; failures of groups without a row are kept."""
        assert self._rows is not None
        failures = {g: w.failed for g, w in self._queue.waiting.items() if w.failed and not w.members}
        self._queue = queue = GroupQueue(self.group_timeout_s, late=self._queue.late)
        arrived, since, failed = self._rows.find(found)
        for i, group in enumerate(arrived.groups):
            waiting = queue.waiting.get(group) or queue.open(group, since[i])
            waiting.members.append(Member(arrived, i))
            waiting.failed += failed[i]
        for group, count in failures.items():
            waiting = queue.waiting.get(group) or queue.open(group, self._now())
            waiting.failed += count
        self._unique = self.group_key in (None, GROUP_ID)
        self._held = set(found.tolist())
        self._known, self._recovered = True, len(found) > 0

    def _write_rows(self, arrived: Arrived, now: float) -> Trajectories | None:
        """The rows to append: groups that came whole with their advantages, then the trajectories that wait."""
        self._refuse_rows("write", "extend")
        call = self._settling
        assert call is not None
        if not self._came_whole(arrived, now):
            self._meet()
        ready = [*self._arrive(arrived, now), *self._overdue(now)]
        inside = [g for g in ready if g.members and all(m.arrived is arrived for m in (*g.members, *g.left))]
        outside = [g for g in ready if any(m.arrived is not arrived for m in (*g.members, *g.left))]
        if self.batch_groups is not None and outside:
            inside, outside = [], ready  # a batch is graded as one, so all of it waits for the update
        call.closed += outside
        whole = [m.index for g in inside for m in g.members]
        advantage, codes = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        degenerate = torch.zeros(0, dtype=torch.bool)
        if inside:
            index = torch.tensor(whole)
            advantage, degenerate, codes = self._grade(inside, arrived.scores.take(index))
            if self.zero_variance == "drop":
                keep = torch.nonzero(~degenerate).reshape(-1)
                whole = index[keep].tolist()
                advantage, degenerate, codes = advantage[keep], degenerate[keep], codes[keep]
        call.waiting = self._waiting_members(arrived, call.closed)
        call.num_whole = len(whole)
        call.part = part = arrived.take([*whole, *(m.index for m in call.waiting)])
        if not part.groups:
            return None
        if not call.waiting:
            return Trajectories(part.steps.n, part.steps | self._columns(part, advantage, degenerate, codes))
        return self._with_waiting(part, advantage, degenerate, codes, call.waiting, now)

    def _came_whole(self, arrived: Arrived, now: float) -> bool:
        """Whether every trajectory of a call belongs to a group that came whole, and no group's time is up."""
        queue, size = self._queue, self.grpo_size
        if self._recovered or queue.is_overdue(now) or self.candidate_group_size != size:
            return False
        counts = Counter(arrived.groups)
        if any(name not in counts for group in counts for name in self._together(group)):
            return False
        return all(n == size and g not in queue.waiting and g not in queue.late for g, n in counts.items())

    def _waiting_members(self, arrived: Arrived, closed: Sequence[Closed]) -> list[Member]:
        """Those that came with this call and wait, be it for the update that completes them."""
        groups = (self._queue.waiting.get(group) for group in dict.fromkeys(arrived.groups))
        found = [m for waiting in groups if waiting is not None for m in waiting.members if m.arrived is arrived]
        found += [m for group in closed for m in group.members if m.arrived is arrived]
        return sorted(found, key=lambda member: member.index)

    def _with_waiting(
        self,
        part: Arrived,
        advantage: Tensor,
        degenerate: Tensor,
        codes: Tensor,
        waiting: Sequence[Member],
        now: float,
    ) -> Trajectories:
        """Rows of which the last ones wait, with no advantage, the exact return and the number of their group."""
        k, more = len(part.groups) - len(waiting), len(waiting)
        advantage = torch.cat([advantage, torch.full((more,), torch.nan, dtype=torch.float64)])
        degenerate = torch.cat([degenerate, torch.zeros(more, dtype=torch.bool)])
        codes = torch.cat([codes, torch.full((more,), int(codes.max()) + 1 if codes.numel() else 0)])
        columns = self._columns(part, advantage, degenerate, codes)
        owner = step_owners(part.bounds)
        late = owner >= k
        value = columns[self.advantage_key]
        element = late if value.lengths is None else torch.repeat_interleave(late, value.lengths)
        value.values[element] = torch.nan
        returns = part.returns.clone()
        returns[:k] = returns[:k].to(torch.float32).double()
        columns[RETURN] = Flat(returns[owner])
        numbers: Any = part.groups[k:]
        numbers = torch.tensor([-1] * k + numbers, dtype=torch.int64)
        columns[WAITING] = Flat(numbers[owner])
        failed = torch.zeros(k + more, dtype=torch.int32)
        for i, member in enumerate(waiting, start=k):
            group = self._queue.waiting.get(part.groups[i])
            if group is not None and group.failed and group.members[0] is member:
                failed[i] = group.failed
        if bool(failed.any()):
            columns[FAILED_MEMBERS] = Flat(failed[owner])
        if CREATED_AT not in part.steps:
            columns[CREATED_AT] = Flat(torch.full((part.steps.n,), now, dtype=torch.float64))
        return Trajectories(part.steps.n, part.steps | columns)

    def settle(self, rows: np.ndarray) -> list[Later]:
        """What the call does to rows that the store holds, once what it wrote is there.

        Args:
            rows: int64, the ids of the rows that `write` gave and the store took, in order; empty if there were none.

        Raises:
            DataError: the store took another number of rows.
        """
        call = self._settling
        assert call is not None
        out: list[Later] = []
        if call.part is not None:
            if len(rows) != len(call.part.groups):
                raise DataError(
                    f"{len(rows)} rows were stored of {len(call.part.groups)} trajectories that left MCAdvantage. Put "
                    "transforms that change the number of trajectories behind it in the list, so that they run before."
                )
            if call.waiting:
                kept = call.part.take(list(range(call.num_whole, len(rows))))
                kept = replace(kept, bounds=list(range(len(call.waiting) + 1)))
                kept.stored(rows[call.num_whole :], keep_rewards=self.trajectory_return is None)
                repoint(call.waiting, kept)
                self._held.update(rows[call.num_whole :].tolist())
        stored = [m.row for group in call.closed for m in (*group.members, *group.left) if m.arrived.rows is not None]
        self._held.difference_update(stored)
        out += self._left_out([m for group in call.closed for m in group.left])
        out += self._completed([group for group in call.closed if group.members])
        for waiting in call.failed:
            if waiting.members and self._rows is not None and self._rows.column_of(FAILED_MEMBERS):
                row = np.array([waiting.members[0].row])
                out.append(Later(row, {"failed_members": np.array([waiting.failed], np.int32)}, complete=False))
        return out

    @staticmethod
    def _left_out(members: Sequence[Member]) -> list[Later]:
        rows = np.array([m.row for m in members if m.arrived.rows is not None], np.int64)
        return [Later(rows, {"waiting": np.full(len(rows), LEFT_OUT)}, complete=False)] if len(rows) else []

    def _completed(self, groups: Sequence[Closed]) -> list[Later]:
        """The one update that completes groups whose members the store holds."""
        if not groups:
            return []
        store_rows = self._rows
        assert store_rows is not None
        members = [member for group in groups for member in group.members]
        scores = Scores.join([member.arrived.scores.take(torch.tensor([member.index])) for member in members])
        returns = scores.returns
        advantage, degenerate, codes = self._grade(groups, scores)
        out: list[Later] = []
        rows = np.array([member.row for member in members], np.int64)
        if self.zero_variance == "drop" and bool(degenerate.any()):
            gone = degenerate.numpy()
            out += [Later(rows[gone], {"waiting": np.full(int(gone.sum()), LEFT_OUT)}, complete=False)]
            keep = ~degenerate
            rows, returns, codes = rows[keep.numpy()], returns[keep], codes[keep]
            advantage, degenerate = advantage[keep], degenerate[keep]
        if not len(rows):
            return out
        columns: dict[str, Any] = {}
        name = store_rows.column_of(self.advantage_key)
        if name is not None:
            columns[name] = self._stored_advantage(name, rows, advantage, codes)
        columns |= {"return": returns.to(torch.float32).double().numpy(), "degenerate": degenerate.numpy()}
        if self.zero_variance == "mark" and bool(degenerate.any()):
            old = store_rows.store.read_scalars("priority", rows)
            columns["priority"] = np.where(degenerate.numpy(), np.float32(0.0), old)
        columns = {column: values for column, values in columns.items() if column in store_rows.store.schema}
        return [*out, Later(rows, columns, complete=True)]

    def _stored_advantage(self, name: str, rows: np.ndarray, advantage: Tensor, codes: Tensor) -> Any:
        """Advantages in the form of their column."""
        store_rows = self._rows
        assert store_rows is not None
        ragged = store_rows.store.schema[name].ragged
        if self.trajectory_return is not None and not ragged:
            return advantage.to(torch.float32).numpy()
        mask, owner = store_rows.mask(rows), torch.arange(len(rows))
        reward, per_step = Flat(mask.values, mask.lengths), None
        if self.trajectory_return is None:
            reward, per_step = store_rows.rewards(rows), codes
        values = advantage_values(reward, mask, owner, advantage, per_step)
        assert mask.lengths is not None
        if not ragged:
            return (values if reward.lengths is None else values[last_position(mask.values, mask.lengths)]).numpy()
        if reward.lengths is None:
            values = torch.where(mask.values, torch.repeat_interleave(values, mask.lengths), 0.0)
        return [row.numpy() for row in values.split(mask.lengths.tolist())]

    # -- state -------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """The trajectories that wait in memory, in the order of arrival, the failures reported and the counters."""
        with self._lock:
            queue, chunks = self._current(), []
            for arrived, members in queue.parts() if self._rows is None else ():
                part = arrived.take([member.index for member in members])
                since = [queue.waiting[group].since for group in part.groups]
                chunks.append({"bounds": part.bounds, "columns": columns_state(whole(part.steps)), "since": since})
            here = [
                (g, w.failed) for g, w in queue.waiting.items() if w.failed and (self._rows is None or not w.members)
            ]
            failed = [[group, count] for group, count in here]
            late = [[group, count] for group, count in queue.late.items()]
            return {"chunks": chunks, "failed": failed, "late": late, "stats": dict(self._stats)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Replace the waiting trajectories by those of a checkpoint; those that wait in a store stay as they are.

        Raises:
            DataError: the checkpoint holds trajectories, and this transform keeps them in a store.
        """
        with self._lock:
            self._stats.update(state["stats"])
            if self._rows is not None:
                if state["chunks"]:
                    raise DataError(
                        "the checkpoint holds trajectories that wait in memory, and here they wait in "
                        f"{self._rows.store.path}. Load it into an MCAdvantage without a store, close its groups, and "
                        "write what comes out."
                    )
                self._known = False
                self._queue = GroupQueue(self.group_timeout_s)
            else:
                self.clear_queues()
            queue, now = self._queue, self._now()
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
        state.pop("_lock", None)
        if self._rows is not None:  # a process that gets a copy finds what waits in the store
            state |= {"_rows": None, "_known": True, "_queue": GroupQueue(self.group_timeout_s)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = threading.RLock()

    @property
    def queues(self) -> dict[Hashable, list[TensorDictBase]]:
        """The waiting trajectories of each incomplete group, for inspection; in a store, by the group's number."""
        waiting = self._waiting().waiting
        return {g: [self._trajectory(m) for m in found.members] for g, found in waiting.items() if found.members}

    def waiting_values(self, key: Key = TRAJECTORY_ID) -> list[Any]:
        """One value of each waiting trajectory, that of its last step; trajectories without it are left out."""
        out: list[Any] = []
        with self._lock:
            for arrived, members in self._current().parts():
                if arrived.batch is not None:
                    index = torch.tensor([arrived.bounds[member.index + 1] - 1 for member in members])
                    batch = arrived.batch if key in arrived.batch else whole(arrived.batch)
                else:
                    assert self._rows is not None
                    index = torch.arange(len(members))
                    batch = self._rows.values([key], np.array([member.row for member in members]))
                column = batch.get(key)
                if column is not None:
                    found = column.select(index)
                    out += found.values.tolist() if isinstance(found, Flat) else found.plain()
        return out

    @property
    def is_shared(self) -> bool:
        """Whether processes share the groups: they do where they wait in a store."""
        return self._rows is not None

    def share_memory_(self) -> Self:
        """Refused: TorchRL's shared queues live in a manager process and die with it.

        Raises:
            DefinitionError: always, with what to do instead.
        """
        raise DefinitionError(
            "groups are shared through a store, where they outlive a kill, and not through memory. Let each process "
            "make a TrajectoryReplayBuffer over the same folder; members that any of them extends complete a group."
        )

    def clear_queues(self) -> None:
        """Forget the trajectories that wait in memory.

        Raises:
            DefinitionError: they wait in a store, which forgets nothing.
        """
        with self._lock:
            if self._rows is not None and self._current().waiting:
                raise DefinitionError(
                    f"the groups wait in {self._rows.store.path}, and a store forgets nothing. Close them: "
                    "TrajectoryReplayBuffer.close_groups()."
                )
            self._queue = GroupQueue(self.group_timeout_s)


@dataclass(slots=True)
class _Finished:
    """Complete groups: their steps as they were, and the columns that they get."""

    source: Trajectories
    columns: dict[Key, Flat]

    @property
    def batch(self) -> Trajectories:
        """Both together."""
        return Trajectories(self.source.n, whole(self.source) | self.columns)

    def in_form_of(self, td: TensorDictBase) -> TensorDictBase:
        """Both together, in the form of a TensorDict."""
        rows = self.source.get(ROWS)
        if isinstance(rows, Text) and (is_stack(td) or td.batch_dims != 1):
            return attach(lazy_stack(rows.items), self.columns)  # pyright: ignore[reportArgumentType]
        return in_form_of(td, self.batch)


@dataclass(slots=True)
class _Settling:
    """One call of the write path over a store: what is left to do when its rows are there."""

    stack: ExitStack
    alone: bool = False
    closed: list[Closed] = field(default_factory=list)
    failed: list[Waiting] = field(default_factory=list)
    waiting: list[Member] = field(default_factory=list)
    num_whole: int = 0
    part: Arrived | None = None
