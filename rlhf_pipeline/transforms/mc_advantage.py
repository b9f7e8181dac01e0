"""Group-relative advantages on the write path."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from rlhf_pipeline.config import WritePath
from rlhf_pipeline.data.episodes import episode_bounds
from rlhf_pipeline.data.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    DONE,
    EPISODE_ID,
    EPISODE_SIZE,
    GROUP_ID,
    KL_COEF,
    LOG_PROBS,
    PRIORITY,
    PROMPT,
    REWARD,
    TASK_REWARD,
    TRAJECTORY_ID,
    TURN_REWARDS,
    Key,
    column_name,
    reward_column,
)
from rlhf_pipeline.data.tensordicts import (
    ROWS,
    attach,
    holds,
    in_form_of,
    is_stack,
    some_steps_of,
    stack_of,
    stack_with,
    with_all_columns,
)
from rlhf_pipeline.data.trajectories import Flat, Text, Trajectories, columns_from_state, columns_state, ends
from rlhf_pipeline.errors import (
    DataError,
    DefinitionError,
    IncompleteError,
    MissingKeyError,
    PromptTypeError,
    refuse_unknown,
)
from rlhf_pipeline.settings import extended, lists_settings, settings_of
from rlhf_pipeline.transforms.advantage_settings import AdvantageSettings
from rlhf_pipeline.transforms.groups import (
    Closed,
    Graded,
    GroupQueue,
    Member,
    gather,
    group_ids,
    hashable,
    hold,
    new_columns,
    number_of_group,
    scores_of,
)
from rlhf_pipeline.transforms.waiting_rows import RowUpdate, WaitingRows
from trajectory_store import BufferPool

_PROMPT_KEYS: tuple[Key, ...] = (PROMPT, "query", "text", ("tokens", "prompt"))

_TEXT_KEYS: tuple[Key, ...] = _PROMPT_KEYS[:3]
"""The keys that contain text."""

_NO_CANDIDATES: dict[str, str] = dict.fromkeys(
    ("candidate_group_size", "candidate_selection_min_size", "candidate_selector"),
    "a group contains all trajectories of its prompt. Set grpo_size to their number, and exclude groups with "
    "keep_return_bounds.",
)

_REFUSED = _NO_CANDIDATES | dict.fromkeys(
    ("kl_coef", "kl_target", "kl_horizon"),
    "KLRewardTransform applies a penalty to the reward. Place it before this transform in the write path.",
)

_NAMES = frozenset(item.name for item in settings_of(AdvantageSettings))
_KEYWORDS = _NAMES - set(_REFUSED)

_STATS = (
    "completed_trajectories", "completed_decisions", "trajectory_return_sum", "trajectory_return_max",
    "successful_trajectories", "failed_trajectories", "completed_groups", "written_groups", "dropped_groups",
    "rescued_groups", "degenerate_groups", "selected_trajectories", "unselected_trajectories", "full_trajectories",
    "full_tokens", "early_closed_groups", "early_closed_trajectories", "early_closed_tokens", "late_trajectories",
)  # fmt: skip
"""The counters, under TorchRL's names where those exist."""

_QUEUED = ("queued_groups", "queued_trajectories", "max_queued_trajectories_per_group")

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
    are counted (`late_trajectories`) and excluded. `get_stats()` reports how much that favours short trajectories
    (`early_closed_length_bias`).

    The batch may be a lazy stack `[n]`, a TensorDict `[n]` with jagged leaves, a padded one, or TorchRL's `[B, T]`
    and multi-step forms whose trajectories end where `done_key` is set. The output has the form of the input. Besides
    the advantage it has `return` (float32, the sum of the rewards) and `degenerate` (bool).

    A member counts once: a trajectory is rejected if its `trajectory_id` is already waiting in the same group, or
    occurs twice in the call, or if it would begin a group and is among the newest rows of the store, in a closed group.

    A trajectory whose return is not finite has failed: it counts as arrived, but is ignored in its group's advantages,
    and its own advantage is 0 with `degenerate` True.

    The advantage has the shape of the reward: one value per trajectory where the reward is one per trajectory. Where
    the reward is per token, the advantage is broadcast, zero outside the assistant mask if there is one. A trajectory
    without assistant tokens has the advantage at its last token, like its reward.

    Source: GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2; the other estimators are in
    `rlhf_pipeline.functional.advantage`.

    Args:
        grpo_size: trajectories of a complete group.
        prompt_key: identity of the group where no `group_id` is present.
        rewards_key: key of the rewards.
        advantage_key: key of the advantage.
        done_key: True at the last step of a trajectory.
        verbose: log a line for every batch of complete groups.
        settings: the settings of a definition, `WritePath(...)`; None takes the defaults.
        **keywords: settings by name, in place of those of `settings`: the fields of `WritePath` (docs/settings.md) but
            its KL penalty, and of `transforms.advantage_settings.AdvantageSettings`, each with its meaning there.

    Attributes:
        settings: all of these, frozen; each is also an attribute to read.

    Raises:
        DefinitionError: if a setting is unknown or out of range, or two contradict each other.

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

    @lists_settings(AdvantageSettings, without=_REFUSED)
    def __init__(
        self,
        grpo_size: int,
        prompt_key: Key | None = None,
        rewards_key: Key = REWARD,
        advantage_key: Key = ADVANTAGE,
        done_key: Key = DONE,
        verbose: bool = False,
        *,
        settings: WritePath | None = None,
        **keywords: Any,
    ) -> None:
        unknown = {name: keywords[name] for name in keywords if name not in _KEYWORDS}
        refuse_unknown("MCAdvantage", unknown, _KEYWORDS, _REFUSED, dict.fromkeys(_NO_CANDIDATES, (None,)))
        super().__init__()
        self.settings = settings = extended(
            settings or WritePath(),
            AdvantageSettings,
            grpo_size=grpo_size,
            prompt_key=prompt_key,
            rewards_key=rewards_key,
            advantage_key=advantage_key,
            done_key=done_key,
            verbose=verbose,
            **{name: keywords[name] for name in keywords if name not in unknown},
        )
        self._entry = settings.checked_estimator()
        prompts = _PROMPT_KEYS if prompt_key is None else (prompt_key,)
        self._identities: list[Key] = [GROUP_ID, *prompts] if settings.group_key is None else [settings.group_key]
        self.in_keys = [key for key in (settings.group_key, prompt_key, rewards_key, done_key) if key is not None]
        self.out_keys = [advantage_key]
        self._stats: dict[str, float] = {}
        self.reset_stats()
        self.rows: WaitingRows | None = None
        """The waiting rows of a store, or None if trajectories wait in memory."""
        self._queue = GroupQueue(settings, self._stats)
        self._lock, self._pool = threading.RLock(), BufferPool()
        self._store_call: _StoreCall | None = None
        """The current call of the buffer, if groups wait in its store."""

    # -- the write path ----------------------------------------------------------------------------------------

    def write(self, batch: Trajectories) -> Trajectories | None:
        """Return the trajectories of a batch to write to the store, or None.

        Without an attached store (`attach`) these are the complete groups; the others wait in memory. With one, they
        are all trajectories: members of incomplete groups have no advantage yet, and `stored_updates` adds it later.
        """
        done = self._take_members(batch, "write")
        return None if done is None else done.batch

    def inv(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the complete groups, or None. The input is not changed and not cloned."""
        return self._inv_call(tensordict)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if tensordict is None:
            return None
        empty = 0 in tensordict.batch_size
        batch = None if empty else some_steps_of(tensordict, self._needed(tensordict))
        done = self._take_members(batch, "inv")
        if done is None:
            return None
        if done.source is batch and tensordict.batch_dims == 1:
            return attach(tensordict, done.columns)  # all rows in their order, so nothing else changes
        rows = done.source.get(ROWS)
        if isinstance(rows, Text) and (is_stack(tensordict) or tensordict.batch_dims != 1):
            return stack_with(rows.items, done.columns)
        return in_form_of(tensordict, done.batch)

    def _take_members(self, batch: Trajectories | None, method: str) -> _Finished | None:
        """Take trajectories into their groups, and return those to write."""
        with self._lock:
            call, queue, now = self._on_store(method, "extend"), self._queue, self.settings.clock()
            arrived = [] if batch is None else self._members(batch, now)
            if batch is not None and ROWS in batch:  # the rest stays in the rows
                needed = (ROWS, ASSISTANT_MASK, PRIORITY, self._reward_key(batch))
                for key in [key for key in batch if key not in needed]:
                    del batch[key]
            if call is not None and (len(call.rows.waiting_positions()) or not queue.are_complete(arrived)):
                call.read(queue, {member.group for member in arrived})
            closed = queue.arrive(arrived)
            if call is not None or self.settings.group_timeout_s is not None:
                closed += queue.complete(list(queue.waiting), now)  # overdue, or complete since before a crash
            self._count_arrivals(arrived, 0 if batch is None else batch.n)
            if call is None:
                done = self._finish(closed)
                hold([member for member in arrived if member in queue.waiting.get(member.group, ())])
                return done
            # A group with members in the store is completed there once the others are stored, and a batch as a whole.
            apart = [group for group in closed if any(member.rows for member in group.members)]
            apart = closed if apart and self.settings.batch_groups is not None else apart
            call.close(apart)
            later = {id(member) for group in apart if group.learned for member in group.members}
            call.waits = [m for m in arrived if id(m) in later or m in queue.waiting.get(m.group, ())]
            if queue.unique:
                call.rows.check_new(
                    [m for m in call.waits if m.group in queue.waiting and not queue.waiting[m.group][0].rows]
                )
            return self._finish([group for group in closed if not any(group is separate for separate in apart)])

    def _needed(self, td: TensorDictBase) -> list[Key]:
        """Return the keys to read from a batch."""
        needed = [*self._identities, TRAJECTORY_ID, self.settings.rewards_key, TASK_REWARD, ASSISTANT_MASK]
        needed += [self.settings.done_key, PRIORITY, KL_COEF, *([TURN_REWARDS] if self._entry.by_turn else [])]
        needed += map(reward_column, self.settings.rewards if self._entry.by_reward else ())
        if not is_stack(td) or holds(td, KL_COEF):
            needed.append(LOG_PROBS)  # for the rounding error of the penalty
        return list(dict.fromkeys(needed))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the batch unchanged: advantages need complete groups, which only the write path sees."""
        return tensordict

    def _members(self, batch: Trajectories, now: float) -> list[Member]:
        """Return the trajectories of a batch, which arrive now."""
        n, ended = batch.n, ends(batch, self.settings.done_key)
        bounds, has_episodes = episode_bounds(batch), EPISODE_SIZE in batch
        if ended is not None and not bool(ended.all()):
            bounds = [0, *(torch.nonzero(ended).reshape(-1) + 1).tolist()]
            if bounds[-1] != n:
                raise IncompleteError(
                    f"the last trajectory of the batch is not complete: {self.settings.done_key!r} is not set in any "
                    f"of the steps {bounds[-1]} to {n - 1} of {n}. Pass complete trajectories, so that nothing is lost."
                )
        key = next((key for key in self._identities if key in batch), None)
        if key is None:
            raise MissingKeyError(
                f"no trajectory has a group identity: the batch has none of the keys {self._identities}. Set group_id, "
                "or pass group_key=."
            )
        if key in _TEXT_KEYS and not (
            isinstance(texts := batch[key], Text) and all(isinstance(text, str) for text in texts.plain())
        ):
            kinds = {type(text).__name__ for text in texts.plain()} - {"str"} if isinstance(texts, Text) else {"Tensor"}
            raise PromptTypeError(
                f"the prompt under {key!r} is of type {min(kinds)}; it must be a string. If numbers or token ids "
                "identify the groups, pass another key with prompt_key= or group_key=."
            )
        groups = group_ids(batch[key], bounds[:-1], key, numbers=self.rows is not None)
        self._queue.unique = key == GROUP_ID
        reward = batch.get(self._reward_key(batch))
        if not isinstance(reward, Flat):
            raise MissingKeyError(
                f"the batch has neither {self.settings.rewards_key!r} nor {TASK_REWARD!r}, so its trajectories cannot "
                "be ranked"
            )
        eps = torch.finfo(self.settings.scored_in).eps
        scores = scores_of(
            batch, reward, bounds, self.settings.trajectory_return, eps, self.settings.episode_return
        ).each()
        trajectory_ids, names = batch.get(TRAJECTORY_ID), [-1] * len(groups)
        if isinstance(trajectory_ids, Flat) and trajectory_ids.lengths is None and trajectory_ids.values.numel() == n:
            names = trajectory_ids.values.reshape(-1)[torch.tensor(bounds[1:]) - 1].tolist()
        if has_episodes and EPISODE_ID in batch:
            episodes = batch.numbers(EPISODE_ID)[bounds[:-1]].tolist()
            names = [name if episode < 0 else episode for name, episode in zip(names, episodes, strict=True)]
        each = zip(groups, names, scores, bounds, bounds[1:], strict=False)
        members = [Member(group, name, now, score, batch, first, end) for group, name, score, first, end in each]
        if has_episodes:
            for member in members:
                member.num_rows = member.end - member.first
        if self._entry.by_turn:
            self._give_turns(members, batch.get(TURN_REWARDS))
        if self._entry.by_reward and self.settings.rewards:
            self._give_rewards(members, batch)
        return members

    def _give_rewards(self, members: Sequence[Member], batch: Trajectories) -> None:
        """Give members their rewards one by one, of their last step."""
        last = torch.tensor([member.end - 1 for member in members])
        columns = list[Tensor]()
        for name in map(reward_column, self.settings.rewards):
            column = batch.get(name)
            if not isinstance(column, Flat) or column.lengths is not None:
                raise MissingKeyError(
                    f"the estimator needs the named rewards, but the batch has no {name!r} (one number per "
                    "trajectory). Add it, or use estimator='grpo'."
                )
            columns.append(column.values.reshape(batch.n, -1)[last, -1].double())
        for member, values in zip(members, torch.stack(columns, 1).tolist(), strict=True):
            member.named_rewards = values

    def _give_turns(self, members: Sequence[Member], turns: Flat | Text | None) -> None:
        """Give members the rewards of their turns."""
        if not isinstance(turns, Flat):
            raise MissingKeyError(
                f"the estimator compares turns, but the batch has no {TURN_REWARDS!r} (one "
                "number per turn of the policy). Add it, or use estimator='grpo'."
            )
        rows = turns.values if turns.lengths is None else turns.values.split(turns.lengths.tolist())
        for member in members:
            steps = [rows[step].reshape(-1) for step in range(member.first, member.end)]
            member.turns = torch.cat(steps).tolist()

    def _reward_key(self, batch: Trajectories) -> Key:
        return self.settings.rewards_key if isinstance(batch.get(self.settings.rewards_key), Flat) else TASK_REWARD

    # -- groups ------------------------------------------------------------------------------------------------

    def report_failed(self, group: Hashable, count: int = 1) -> TensorDictBase | None:
        """Report that `count` trajectories of a group will never arrive.

        Args:
            group: the group's identity.
            count: how many failed.

        Returns:
            The group if this completes it (write it with `TrajectoryReplayBuffer.extend_raw`), otherwise None.
        """
        with self._lock:
            queue, name = self._begin("report_failed"), self._name(group)
            return self._out(queue.fail(name, int(count)))

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
            only = None if group is None else self._name(group)
            due = [g for g, members in queue.waiting.items() if only in (None, g) and len(members) >= min_size]
            return self._out([closed for name in due for closed in queue.close(name)])

    def close_overdue(self) -> TensorDictBase | None:
        """Close the overdue groups that have enough members, as every call of the write path does.

        Returns:
            The trajectories of the closed groups, or None.
        """
        with self._lock:
            queue = self._begin("close_overdue")
            return self._out(queue.complete(list(queue.waiting), self.settings.clock()))

    def _name(self, group: Hashable) -> Hashable:
        return group if self.rows is None else number_of_group(group)

    def _begin(self, method: str) -> GroupQueue:
        """Return the queue, prepared for closing groups."""
        if (call := self._on_store(method, method)) is not None:
            call.read(self._queue)
        return self._queue

    def _on_store(self, method: str, instead: str) -> _StoreCall | None:
        """Return the buffer's current call on the store; None if trajectories wait in memory."""
        if self.rows is not None and self._store_call is None:
            raise DefinitionError(
                f"the groups of this MCAdvantage are waiting in {self.rows.store.path}, where MCAdvantage.{method} "
                f"cannot write. Call TrajectoryReplayBuffer.{instead} instead."
            )
        return self._store_call

    def _out(self, closed: list[Closed]) -> TensorDictBase | None:
        """Return groups closed outside the write path; with a store, leave them to `stored_updates`."""
        if self._store_call is not None:
            self._store_call.close(closed)
            return None
        done = self._finish(closed)
        return None if done is None else stack_of(done.batch)

    def _finish(self, closed: Sequence[Closed]) -> _Finished | None:
        """Return the trajectories of closed groups with their advantages, then those that wait in the store."""
        (members, graded), call = self._queue.grade(closed), self._store_call
        waits = [] if call is None else call.waits
        if call is not None:
            call.num_rows = sum(member.num_rows for member in (*members, *waits))
        if not members and not waits:
            return None
        batch, bounds = gather([*members, *waits], self._pool)
        if call is None or not waits:
            return _Finished(batch, self._new_columns(batch, bounds, graded))
        columns = self._new_columns(batch, bounds, graded.followed_by(waits))
        return _Finished(batch, columns | call.rows.waiting_columns(batch, bounds, waits, self._queue))

    def _new_columns(self, batch: Trajectories, bounds: Sequence[int], graded: Graded) -> dict[Key, Flat]:
        reward: Any = batch[self._reward_key(batch)]
        one_each = self.rows is not None and self.rows.one_each
        return new_columns(batch, reward, bounds, graded, self.settings, one_each=one_each)

    # -- groups that wait in a store ---------------------------------------------------------------------------

    def attach(self, rows: WaitingRows | None) -> None:
        """Make incomplete groups wait as rows of a store; called by `TrajectoryReplayBuffer`.

        Raises:
            DefinitionError: trajectories are waiting in memory, or a column that rows get later cannot be updated.
        """
        with self._lock:
            if rows is not None:
                rows.check(self.settings.advantage_key)
            if self.rows is None and self._queue.waiting:
                raise DefinitionError(
                    f"{self.queued_trajectories} trajectories are waiting in memory in this MCAdvantage. Write them "
                    "first, or use a separate MCAdvantage for the buffer."
                )
            self.rows = rows
            if rows is not None:
                rows.settings = self.settings
                name, schema = rows.column_of(self.settings.advantage_key), rows.store.schema
                rows.by_turn = self._entry.by_turn and column_name(TURN_REWARDS) in schema
                rows.by_reward = tuple(self.settings.rewards) if self._entry.by_reward else ()
                rows.one_each = (
                    name is not None and not schema[name].ragged and self.settings.trajectory_return is not None
                )
            self._queue = GroupQueue(self.settings, self._stats)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Enclose one call of the write path and its changes to groups; a call that raises may be repeated.

        Trajectories that the store did not write are discarded; the others wait in the store.
        """
        with self._lock:
            stats, before = dict(self._stats), self._queue.copy()
            with ExitStack() as alone:
                self._store_call = None if self.rows is None else _StoreCall(self.rows, alone)
                try:
                    yield
                except BaseException:
                    self._stats.update(stats)
                    self._queue = before
                    raise
                finally:
                    self._store_call, queue = None, self._queue
                    if self.rows is not None:  # what waits is in the store, with the failures of its groups
                        queue.failed = {g: num for g, num in queue.failed.items() if g not in queue.waiting}
                        queue.waiting = {}

    def _waiting(self) -> dict[Hashable, list[Member]]:
        """Return the waiting trajectories of each group."""
        with self._lock:
            queue = self._queue.copy()
            if self.rows is not None:
                self.rows.read(queue)
            return queue.waiting

    def stored_updates(self, rows: np.ndarray) -> list[RowUpdate]:
        """Return the updates of stored rows that the call makes, once its own rows are stored.

        Args:
            rows: int64, the ids that the store gave to the rows from `write`, in order; empty if there were none.

        Raises:
            DataError: the store wrote another number of rows.
        """
        call = self._store_call
        if call is None:
            return []
        if call.num_rows not in (None, len(rows)):
            raise DataError(
                f"{len(rows)} rows were stored for {call.num_rows} trajectories from MCAdvantage. In the list of "
                "transforms, MCAdvantage must come before those that change the number of trajectories: inverses run "
                "in reverse order."
            )
        at = len(rows) - sum(member.num_rows for member in call.waits)
        for member in call.waits:
            member.rows, member.batch, at = rows[at : at + member.num_rows].tolist(), None, at + member.num_rows
        return call.rows.completed(call.closed, self._queue) + call.rows.failures(self._queue)

    # -- figures -----------------------------------------------------------------------------------------------

    def _count_arrivals(self, arrived: Sequence[Member], steps: int) -> None:
        stats, returns = self._stats, [member.scores[0] for member in arrived if math.isfinite(member.scores[0])]
        stats["completed_trajectories"] += len(arrived)
        stats["completed_decisions"] += steps
        stats["failed_trajectories"] += len(arrived) - len(returns)
        stats["trajectory_return_sum"] += sum(returns)
        stats["trajectory_return_max"] = max([stats["trajectory_return_max"], *returns])
        stats["successful_trajectories"] += sum(value > 0 for value in returns)

    def reset_stats(self) -> None:
        """Set the counters to zero."""
        self._stats.update(dict.fromkeys(_STATS, 0), trajectory_return_max=float("-inf"))

    def get_stats(self) -> dict[str, float]:
        """Return the counters, the size of the queue, and how much closing groups early favours short trajectories.

        `mean_length_full` and `mean_length_early_closed` are completion tokens per written trajectory of complete
        groups and of groups that closed early; `early_closed_length_bias` is the second over the first. Short
        trajectories arrive first, so a value well below 1 means that the timeout biases the policy towards short
        completions. The three are NaN without data.
        """
        stats = self._stats
        full = _ratio(stats["full_tokens"], stats["full_trajectories"])
        sizes = [len(members) for members in self._waiting().values()]
        early = _ratio(stats["early_closed_tokens"], stats["early_closed_trajectories"])
        return {
            **stats,
            "mean_length_full": full,
            "mean_length_early_closed": early,
            "early_closed_length_bias": _ratio(early, full),
            **dict(zip(_QUEUED, (len(sizes), sum(sizes), max(sizes, default=0)), strict=True)),
        }

    def __getattr__(self, name: str) -> Any:
        if name in _NAMES:
            return getattr(self.settings, name)
        if name in _STATS:
            return self.__dict__["_stats"][name]
        return self.get_stats()[name] if name in _QUEUED else super().__getattr__(name)

    # -- state -------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """Return the trajectories waiting in memory, in the order of arrival, reported failures and the counters."""
        with self._lock:
            queue, chunks = self._queue, list[dict[str, Any]]()
            for waiting in queue.waiting.values():
                for members in (
                    list(batch_members) for _, batch_members in groupby(waiting, lambda member: id(member.batch))
                ):
                    (batch, bounds), since = gather(members), [member.since for member in members]
                    chunks.append({"bounds": bounds, "columns": columns_state(with_all_columns(batch)), "since": since})
            failed, late = ([[group, num] for group, num in of.items()] for of in (queue.failed, queue.late))
            return {"chunks": chunks, "failed": failed, "late": late, "stats": dict(self._stats)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Replace the trajectories waiting in memory by a checkpoint's; rows waiting in a store are not changed.

        Raises:
            DataError: the checkpoint contains trajectories, but this transform keeps them in a store.
        """
        with self._lock:
            self._stats.update(state["stats"])
            if self.rows is not None and state["chunks"]:
                raise DataError(
                    "the checkpoint contains trajectories that were waiting in memory, but this MCAdvantage stores "
                    f"waiting trajectories in {self.rows.store.path}. Load the checkpoint into an MCAdvantage without "
                    "a store, close its groups, and write the result."
                )
            queue, now = GroupQueue(self.settings, self._stats), self.settings.clock()
            for saved in state["chunks"]:
                members = self._members(columns_from_state(saved["columns"]), now)
                for member, since in zip(members, saved.get("since") or [now] * len(members), strict=True):
                    member.since = since
                    queue.add(member)
            queue.failed, queue.late = ({hashable(g): n for g, n in state.get(of, ())} for of in ("failed", "late"))
            self._queue = queue

    def __getstate__(self) -> dict[str, Any]:
        # A process that gets a copy finds the waiting rows in the store.
        state = {name: value for name, value in super().__getstate__().items() if name not in ("_lock", "_pool")}
        return state | {"rows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock, self._pool = threading.RLock(), BufferPool()

    @property
    def queues(self) -> dict[Hashable, list[TensorDictBase]]:
        """Return the waiting trajectories of each incomplete group; in a store, by the group's number."""
        groups = self._waiting().items()
        return {group: [stack_of(self._steps(member)) for member in members] for group, members in groups}

    def _steps(self, member: Member, key: Key | None = None) -> Trajectories:
        """Return the steps of a waiting trajectory; with only this key if a store holds them."""
        if self.rows is None:
            return with_all_columns(gather([member])[0])
        name, names = None if key is None else self.rows.column_of(key), self.rows.store.schema.names
        return self.rows.columns(names if key is None else [name] if name else [], np.array(member.rows))

    def waiting_values(self, key: Key = TRAJECTORY_ID) -> list[Any]:
        """Return one value of each waiting trajectory, from its last step; trajectories without it are excluded."""
        with self._lock:
            members = [member for group in self._waiting().values() for member in group]
            last_steps = [self._steps(member, key) for member in members]
        ends = [batch.select(torch.tensor([batch.n - 1])).get(key) for batch in last_steps]
        values = [column.values.tolist() if isinstance(column, Flat) else column.plain() for column in ends if column]
        return [value for each in values for value in each]

    @property
    def is_shared(self) -> bool:
        """Return whether processes share the groups: they do if groups wait in a store."""
        return self.rows is not None

    def share_memory_(self) -> Self:
        """Raise an error: TorchRL's shared queues live in a manager process and die with it.

        Raises:
            DefinitionError: always, with the alternative.
        """
        raise DefinitionError(
            "groups are shared through a store, not through memory, so that they survive a kill. Create a "
            "TrajectoryReplayBuffer for the same folder in each process; a group may then have members from several "
            "processes."
        )

    def clear_queues(self) -> None:
        """Discard the trajectories that wait in memory.

        Raises:
            DefinitionError: they wait in a store, from which nothing is discarded.
        """
        with self._lock:
            if self.rows is not None and self._waiting():
                raise DefinitionError(
                    f"the groups are waiting in {self.rows.store.path}, and stored rows cannot be discarded. Close the "
                    "groups: TrajectoryReplayBuffer.close_groups()."
                )
            self._queue = GroupQueue(self.settings, self._stats)


@dataclass(slots=True)
class _StoreCall:
    """A call of a buffer on the store in which groups wait."""

    rows: WaitingRows
    alone: ExitStack
    closed: list[Closed] = field(default_factory=list)
    waits: list[Member] = field(default_factory=list)
    num_rows: int | None = None

    def read(self, queue: GroupQueue, among: set[Hashable] | None = None) -> None:
        """Lock the groups until the call ends, and add the store's to the queue."""
        self.rows.lock(self.alone)
        self.rows.read(queue, among)

    def close(self, groups: Sequence[Closed]) -> None:
        """Complete groups at the end of the call."""
        self.closed += groups
        self.rows.score([member for group in groups for member in group.members if member.rows])


@dataclass(slots=True)
class _Finished:
    """Trajectories to write: their original steps and the new columns."""

    source: Trajectories
    columns: dict[Key, Flat]

    @property
    def batch(self) -> Trajectories:
        """The batch with both."""
        source = with_all_columns(self.source) if ROWS in self.source else self.source
        return Trajectories(source.n, source | self.columns)


def _ratio(over: float, under: float) -> float:
    return over / under if under else math.nan
