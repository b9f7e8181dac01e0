"""Group-relative advantages on the write path."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.objectives.llm import MCAdvantageSelector

from rlhf_pipeline.data.trajectories import Flat, is_token_level, segment_any, segment_sum, step_sum, token_level
from rlhf_pipeline.errors import DataError, IncompleteError, MissingKeyError
from rlhf_pipeline.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    DEGENERATE,
    DONE,
    GROUP_ID,
    PENDING_ID,
    PRIORITY,
    PROMPT,
    RETURN,
    REWARD,
    ROW_ID,
    TASK_REWARD,
    Key,
)
from rlhf_pipeline.transforms._advantages import (
    advantage_values,
    group_advantages,
    group_codes,
    trajectory_of_row,
    trajectory_returns,
)
from rlhf_pipeline.transforms._arguments import check_arguments
from rlhf_pipeline.transforms._groups import Chunk, gather, group_ids, read, write
from rlhf_pipeline.transforms._ledger import GroupLedger
from rlhf_pipeline.transforms._queue import ClosedGroup, Entry, Waiting

_PROMPT_KEYS: tuple[Key, ...] = (PROMPT, "query", "text", ("tokens", "prompt"))


_log = logging.getLogger("rlhf_pipeline")


class MCAdvantage(GroupLedger):
    """Computes the advantage of complete groups of trajectories; incomplete groups wait.

    An inverse transform: `ReplayBuffer.extend` runs it before anything is written. A group passes as soon as its
    `grpo_size` trajectories have arrived or failed, in one call or over several. In a `TrajectoryReplayBuffer` over
    a folder the trajectories that wait, and the failures reported, are on disk when `extend` returns: a process that
    opens the store after a `kill -9` goes on with every group. Elsewhere they are part of `state_dict()`.

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
        estimator: `grpo`, `dr_grpo`, `mean`, `rloo`, `reinforce_pp`, `reinforce_pp_baseline` or `opo`.
        group_key: identity of the group. None takes `group_id` where present, else `prompt_key`.
        zero_variance: `keep` writes groups without spread (advantage 0, `degenerate` True); `mark` also sets their
            `priority` to 0, so that the samplers pass over them; `drop` leaves them out.
        min_group_size: members that are enough once the timeout is over; None waits for all.
        group_timeout_s: seconds from a group's first member until it may close early; None never.
        clock: tells the time in seconds. Waiting outlives a process, so the default is the time of day.

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
        self.in_keys = [key for key in (group_key, prompt_key, rewards_key, done_key) if key is not None]
        self.out_keys = [advantage_key]
        self._unique = False
        check_arguments(self, both=(min_group_size is None) == (group_timeout_s is None))
        self._init_ledger()

    # -- the write path ----------------------------------------------------------------------------------------

    def inv(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The complete groups, or None. The input is not changed, so nothing is cloned first."""
        return self._inv_call(tensordict)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if tensordict is None:
            return None
        with self._lock:
            queue, now = self._waiting(), self._now()
            chunks = self._chunks(tensordict)
            ready = [group for chunk in chunks for group in self._arrive(chunk, now)]
            out = self._emit([*ready, *self._overdue(now)])
            self._keep(queue.shrink(chunks))
        return out

    def _now(self) -> float:
        return self.clock() if self.group_timeout_s is not None or self.log is not None else 0.0

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
        chunks = self._chunks(tensordict)
        if not chunks:
            return tensordict
        chunk = gather([(c, i) for c in chunks for i in range(len(c.groups))])
        codes = group_codes(chunk.groups)
        return self._write(chunk, *group_advantages(chunk, codes, self.estimator), codes)

    def _chunks(self, td: TensorDictBase) -> list[Chunk]:
        if td.batch_dims == 0:
            return self._chunks(lazy_stack([td]))
        if td.batch_dims >= 2:
            flat: Any = td.flatten(0, -2) if td.batch_dims > 2 else td
            if is_token_level(flat):
                return self._chunks(token_level(flat))
            return [chunk for row in flat.unbind(0) for chunk in self._chunks(row)]
        n = td.shape[0]
        return [] if n == 0 else [self._chunk(td, self._bounds(td, n))]

    def _bounds(self, td: TensorDictBase, n: int) -> list[int]:
        done = read(td, self.done_key)
        if not isinstance(done, Flat):
            return list(range(n + 1))
        flags = done.values.to(torch.bool)
        ended = flags.reshape(n, -1).any(1) if done.lengths is None else segment_any(flags, done.lengths)
        if bool(ended.all()):
            return list(range(n + 1))
        bounds = [0, *(torch.nonzero(ended).reshape(-1) + 1).tolist()]
        if bounds[-1] != n:
            raise IncompleteError(
                f"the last trajectory of the batch is not complete: steps {bounds[-1]} to {n - 1} of {n} have no "
                f"{self.done_key!r}. Pass whole trajectories, so that nothing is lost."
            )
        return bounds

    def _chunk(
        self,
        td: TensorDictBase,
        bounds: list[int],
        *,
        groups: list[Hashable] | None = None,
        reward: Flat | None = None,
    ) -> Chunk:
        n, k = td.shape[0], len(bounds) - 1
        if groups is None:
            key, identity = self._identity(td)
            groups = group_ids(identity, bounds[:-1], key)
            self._unique = key == GROUP_ID  # only then is a straggler known from a new instance of a prompt
        else:
            self._unique = self.group_key in (None, GROUP_ID) and read(td, GROUP_ID) is not None
        found = reward if reward is not None else read(td, self.rewards_key)
        reward = found if isinstance(found, Flat) else _task_reward(td)
        if reward is None:
            raise MissingKeyError(f"the batch has neither {self.rewards_key!r} nor {TASK_REWARD!r}, to rank by")
        returns, per_trajectory = trajectory_returns(reward, bounds, self.trajectory_return)
        mask = read(td, ASSISTANT_MASK)
        if isinstance(mask, Flat) and mask.lengths is not None:
            tokens = segment_sum(mask.values, mask.lengths).to(torch.int64)
            lengths = tokens if k == n else step_sum(tokens, bounds)
        else:
            lengths = per_trajectory
        return Chunk(td, bounds, groups, reward, returns, lengths)

    def _identity(self, td: TensorDictBase) -> tuple[Key, Any]:
        keys = (self.group_key,) if self.group_key is not None else (GROUP_ID, self.prompt_key)
        if self.group_key is None and self.prompt_key is None:
            keys = (GROUP_ID, *_PROMPT_KEYS)
        for key in keys:
            column = None if key is None else read(td, key)
            if key is not None and column is not None:
                return key, column
        raise DataError(
            f"no trajectory says which group it belongs to: looked for {[k for k in keys if k is not None]}. "
            "Set group_id, or pass group_key=."
        )

    # -- groups ------------------------------------------------------------------------------------------------

    def _arrive(self, chunk: Chunk, now: float) -> list[ClosedGroup]:
        self._count_arrivals(chunk)
        queue, change, ready = self._queue, self._change, []
        for i, group in enumerate(chunk.groups):
            waiting = queue.waiting.get(group)
            if change is not None:
                change.remember(group, waiting)
            if waiting is None:
                if queue.late and queue.is_late(group):
                    self._stats["late_trajectories"] += 1
                    continue
                waiting = queue.open(group, now)
            entry = Entry(chunk, i)
            waiting.entries.append(entry)
            if change is not None:
                change.arrived.append(entry)
            if self._is_due(waiting):
                ready.append(self._complete(group))
        return ready

    def _is_due(self, waiting: Waiting) -> bool:
        arrived = len(waiting.entries)
        enough = self.min_group_size if waiting.overdue else self.candidate_selection_min_size
        return arrived > 0 and (arrived >= enough or arrived + waiting.failed >= self.candidate_selection_min_size)

    def _overdue(self, now: float) -> list[ClosedGroup]:
        """Close the groups whose time is up and that have enough members; the others close when they have."""
        recovered, self._recovered = self._recovered, False
        found = self._queue.take_overdue(now)
        if recovered:  # a group may be complete already: the process died before it wrote it, or wants fewer now
            found = list(self._queue.waiting.items())
        due = [group for group, waiting in found if self._is_due(waiting)]
        change = self._change
        if change is not None:
            for group in due:
                change.remember(group, self._queue.waiting[group])
        return [self._complete(group) for group in due]

    def _complete(self, group: Hashable, close: bool = False) -> ClosedGroup:
        """Take the trajectories to write out of a group that may be complete."""
        waiting = self._queue.waiting[group]
        entries, failed = waiting.entries, waiting.failed
        close = close or waiting.overdue
        early = len(entries) + failed < self.candidate_selection_min_size
        size = min(self.grpo_size, len(entries))
        chosen: list[int] | None = list(range(len(entries)))
        if self.candidate_group_size > self.grpo_size or self.keep_return_bounds is not None:
            chosen = self._choose(entries, size)
        if chosen is None and len(entries) < self.candidate_group_size - failed and not close:
            return ClosedGroup([], 0, early=False)
        self._leave(group)
        self._stats["completed_groups"] += 1
        if early:
            self._stats["early_closed_groups"] += 1
            if self._unique and self.group_timeout_s is not None:
                self._queue.expect_late(group, self.candidate_group_size - len(entries) - failed)
        if chosen is None:
            self._stats["dropped_groups"] += 1
            return ClosedGroup([], 0, early=early)
        self._stats["selected_trajectories"] += len(chosen)
        self._stats["unselected_trajectories"] += len(entries) - len(chosen)
        return ClosedGroup([entries[i] for i in chosen], waiting.ticket, early=early)

    def _choose(self, entries: Sequence[Entry], size: int) -> list[int] | None:
        # A failed trajectory ranks as one that earned nothing.
        values = torch.tensor([entry.value for entry in entries]).nan_to_num(0.0, 0.0, 0.0)
        candidates = TensorDict({"return": values}, batch_size=[len(entries)])
        names = [key if isinstance(key, str) else key[0] for key in self.candidate_selector.in_keys]
        if "trajectories" in names:
            candidates.set("trajectories", lazy_stack([entry.trajectory() for entry in entries]))
        chosen = self.candidate_selector.select(
            candidates.select(*self.candidate_selector.in_keys, strict=True),
            group_size=size,
            keep_return_bounds=self.keep_return_bounds,
        )
        if chosen is not None and self.keep_return_bounds is not None:
            low, high = self.keep_return_bounds
            if not low < float(values[torch.tensor(chosen)].mean()) < high:
                return None
            if len(entries) > size and not low < float(values[:size].mean()) < high:
                self._stats["rescued_groups"] += 1
        return chosen

    def report_failed(self, group: Hashable, count: int = 1) -> TensorDictBase | None:
        """Say that `count` trajectories of a group will never arrive.

        Args:
            group: the group's identity.
            count: how many failed.

        Returns:
            The group, if that completes it (write it with `TrajectoryReplayBuffer.extend_raw`), else None.
        """
        with self._lock:
            queue, change = self._waiting(), self._change
            waiting = queue.waiting.get(group)
            if waiting is None and queue.late:
                while count and queue.is_late(group):  # of a group that closed without it
                    count -= 1
                if not count:
                    return None
            if change is not None:
                change.remember(group, waiting)
            waiting = self._put_failure(group, int(count), self._now())
            if self._is_due(waiting):
                return self._emit([self._complete(group)])
            if waiting.failed >= self.candidate_group_size:
                self._leave(group)
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
            waiting, change = self._waiting().waiting, self._change
            names = list(waiting) if group is None else [group] if group in waiting else []
            due = [name for name in names if len(waiting[name].entries) >= max(min_size, 1)]
            if change is not None:
                for name in due:
                    change.remember(name, waiting[name])
            return self._emit([self._complete(name, close=True) for name in due])

    def close_overdue(self) -> TensorDictBase | None:
        """Close the groups whose time is up, as every call of the write path does.

        Returns:
            The trajectories of the closed groups, or None.
        """
        with self._lock:
            self._waiting()
            return self._emit(self._overdue(self._now()))

    # -- advantages --------------------------------------------------------------------------------------------

    def _emit(self, groups: Sequence[ClosedGroup]) -> TensorDictBase | None:
        groups = [group for group in groups if group.entries]
        if not groups:
            return None
        chunk = gather([(entry.chunk, entry.index) for group in groups for entry in group.entries])
        codes = torch.repeat_interleave(torch.tensor([len(group.entries) for group in groups]))
        early = torch.tensor([g.early for g in groups])[codes] if any(g.early for g in groups) else None
        self._count_lengths(chunk.lengths, early)
        waited = torch.tensor([g.ticket or -1 for g in groups])[codes] if any(g.ticket for g in groups) else None
        advantage, degenerate = group_advantages(chunk, codes, self.estimator)
        flat = int(codes[degenerate].unique().numel())
        drop = self.zero_variance == "drop"
        if self.verbose:
            sizes, returns = [len(group.entries) for group in groups], chunk.returns
            message = "%d groups of %d to %d trajectories: mean return %.4g, %d of them without spread; %d groups wait"
            waiting = len(self._queue.waiting)
            _log.info(message, len(groups), min(sizes), max(sizes), returns.nanmean().item(), flat, waiting)
        self._stats["degenerate_groups"] += flat
        self._stats["written_groups"] += len(groups) - (flat if drop else 0)
        self._stats["dropped_groups"] += flat if drop else 0
        if drop and flat:
            keep = torch.nonzero(~degenerate).reshape(-1)
            if not keep.numel():
                return None
            chunk = chunk.take(keep.tolist())
            advantage, degenerate, codes = advantage[keep], degenerate[keep], codes[keep]
            waited = None if waited is None else waited[keep]
        return self._write(chunk, advantage, degenerate, codes, waited)

    def _write(
        self, chunk: Chunk, advantage: Tensor, degenerate: Tensor, codes: Tensor, waited: Tensor | None = None
    ) -> TensorDictBase:
        reward, n, owner = chunk.reward, chunk.td.shape[0], trajectory_of_row(chunk)
        per_step = codes if self.trajectory_return is None else None
        values = advantage_values(chunk, owner, advantage, per_step)
        columns: dict[Key, Flat] = {
            self.advantage_key: Flat(values, reward.lengths, reward.shapes),
            RETURN: Flat(chunk.returns[owner].to(torch.float32)),
            DEGENERATE: Flat(degenerate[owner]),
        }
        if waited is not None:
            columns[PENDING_ID] = Flat(waited[owner])
        if self.zero_variance == "mark" and bool(degenerate.any()):
            old = read(chunk.td, PRIORITY)
            base = old.values.to(torch.float32) if isinstance(old, Flat) else torch.ones(n)
            columns[PRIORITY] = Flat(torch.where(degenerate[owner], 0.0, base))
        return write(chunk.td, columns)


def _task_reward(td: TensorDictBase) -> Flat | None:
    """The reward per trajectory, where there is none per token or step."""
    found = read(td, TASK_REWARD)
    return found if isinstance(found, Flat) else None
