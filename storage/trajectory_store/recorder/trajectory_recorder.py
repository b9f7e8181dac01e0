"""Recording what another trainer samples, while it trains: TRL's trainers, or any loop with token ids and rewards."""

# pyright: standard
# Foreign data, whose types are checked at run time.
from __future__ import annotations

import contextlib
import functools
import html
import inspect
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trajectory_store.errors import BatchError, SchemaError, StoreError, counted
from trajectory_store.recorder.argument_types import Array, Numbers, Scalar, TokenIds, TokenNumbers
from trajectory_store.recorder.episode_rows import EpisodeRows, episode_rows
from trajectory_store.recorder.raw_rollout import UNKNOWN_VERSION, Messages, as_failure, as_int, as_reward, weighted
from trajectory_store.recorder.record_batch import RecordBatch, as_list
from trajectory_store.recorder.recorded_names import Group, RecordedNames, group_names
from trajectory_store.recorder.row_encoder import Encoder
from trajectory_store.recorder.source_ids import SOURCE_BITS, alone, next_base, open_or_create, store_lock
from trajectory_store.recorder.standard import (
    EPISODE,
    EVALUATION,
    FAILURES,
    NEWEST_VERSION,
    SAMPLED_BY,
    SUPPORT,
    TEMPERATURE,
    TURN_REWARDS,
    TURNS,
    standard_schema,
)
from trajectory_store.schema import Column
from trajectory_store.store import TrajectoryStore

_log = logging.getLogger("trajectory_store")
_SAMPLED = (TEMPERATURE, next(column for column in SAMPLED_BY if column.name == "log_prob_mode"))
_FURTHER = (*FAILURES, *SAMPLED_BY, EVALUATION, SUPPORT, TURNS, TURN_REWARDS, *EPISODE)
"""Columns that are added to a store when a value for one of them is recorded."""
_ANSWERS = ("answer", "ground_truth", "solution", "target")
RewardFunction = Callable[..., Any]


class TrajectoryRecorder:
    """Writes each completion of another trainer to a store: token ids, rewards, text and, if known, log-probs.

    Three ways to use it; the first records the most:

    - `recorder.attach(trainer)`: TRL's `GRPOTrainer` (1.16): exact prompt ids, all rewards with the trainer's weights,
      advantages, and vLLM's sampling log-probs; without vLLM, they are computed by one forward pass at sampling time.
    - `reward_funcs=recorder.reward_funcs([my_reward])`: any trainer that calls reward functions as TRL does, with
      `prompts`, `completions`, `completion_ids` and columns. Prompt ids come from the tokenizer, log-probs are NaN.
    - `recorder.record(...)`: any loop.

    A recorder on an existing store assigns new ids, except for the steps that a resumed training repeats, see `resume`.
    A call is one atomic commit, durable on return. The processes of one training may record into one store if each has
    its own recorder, all recorders are created before training starts, and all calls have the same number of rows.
    Several trainings may also record into one store at the same time, if each has one process. Threads may share a
    recorder.

    Args:
        store: folder of the store; created if it does not exist.
        tokenizer: a transformers tokenizer, or its folder or hub name, for prompts and completions without ids.
        group_size: completions per prompt (`num_generations`); None: consecutive rows with equal prompts form a group.
        durability: of a new store; see `TrajectoryStore.create`.
        on_error: `raise`, or `log` to continue training if the store cannot be written (a full disk) or a call is
            invalid.
        rank: the rank of this process; read from the environment if None.
        world_size: the number of processes that record.
        run_id: the name of the training, within which the names of groups and rows are unique. Keep the name when a
            training resumes, so that incomplete groups are completed and `give_rewards` finds earlier rows. Use a new
            name for a training that starts from scratch with the same store, because its group and row names may
            repeat.
        columns: additional columns, which `record(extra=...)` fills, such as routed experts per token:
            `Column("routed_experts", "int16", ragged=True, shape=(layers * top_k,), fill=0)`.

    Raises:
        StoreBusyError: an import is writing to the store.
        StoreError: the store cannot be opened.
    """

    def __init__(
        self,
        store: str | Path,
        *,
        tokenizer: Any | None = None,
        group_size: int | None = None,
        durability: Literal["process", "power", "group"] = "process",
        on_error: Literal["raise", "log"] = "raise",
        rank: int | None = None,
        world_size: int | None = None,
        run_id: str = "",
        columns: Sequence[Column] = (),
    ) -> None:
        if on_error not in ("raise", "log"):
            raise SchemaError(f"on_error is {on_error!r}; it must be 'raise' or 'log'.")
        self.path = Path(store).expanduser()
        self.group_size = None if group_size is None else _size(group_size)
        self.on_error = on_error
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        self.run_id = run_id
        self.session_id = uuid.uuid4().hex
        """Unique to this recorder. Adapters use it in group names if their trainer numbers groups from 0 in each
        process.
        """
        self._further = {column.name: column for column in (*_FURTHER, *columns)}
        self.store = open_or_create(self.path, standard_schema([*FAILURES, *_SAMPLED]), durability)
        self._locks = contextlib.ExitStack()
        refusal = f"an import is writing to {self.path}. Wait for it, or record into another store."
        self._locks.enter_context(store_lock(self.path, shared=True, refusal=refusal))
        self.num_recorded = 0
        self._base = next_base(self.store)
        self._offset = 0
        self._encoder = Encoder(tokenizer)
        self._pending: tuple[Any, dict[int, list[float]]] | None = None
        """Completions that some functions have not graded yet, and the rewards of the functions that have."""
        self._resumed_at: int | None = None
        self._names = RecordedNames()
        self._lock = threading.RLock()
        self._have_columns(column.name for column in (*FAILURES, *_SAMPLED))

    def __repr__(self) -> str:
        of = f", run_id={self.run_id!r}" if self.run_id else ""
        size = f", group_size={self.group_size}" if self.group_size else ""
        return f"<TrajectoryRecorder {str(self.path)!r}{of}{size}: {self.num_recorded} recorded>"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.store._repr_html_()}"

    def resume(self, step: int) -> None:
        """Announce that the training resumes from its checkpoint of `step` optimizer steps and repeats later ones.

        Later rows receive the ids of the rows that an earlier recorder recorded at those steps, if the prompts are the
        same, and supersede them: only the newest row of a trajectory id is learned from. `attach` and `callback` call
        this when a TRL trainer resumes.
        """
        self._resumed_at = step

    def record(
        self,
        *,
        completions: Sequence[Any],
        rewards: Numbers | None,
        prompts: Sequence[str | Messages] | None = None,
        prompt_ids: TokenIds | None = None,
        completion_ids: TokenIds | None = None,
        completion_masks: TokenIds | None = None,
        log_probs: TokenNumbers | None = None,
        ref_log_probs: TokenNumbers | None = None,
        advantages: Numbers | None = None,
        answers: Sequence[Any] | None = None,
        finish_reasons: Sequence[str] | None = None,
        metas: Sequence[Mapping[str, Any]] | None = None,
        policy_version: int | Sequence[int] | Array | None = None,
        token_versions: Sequence[Sequence[int] | Array | None] | Array | None = None,
        version_spans: Sequence[Sequence[tuple[int, int]] | None] | None = None,
        temperature: float | Numbers | None = None,
        log_prob_mode: Literal["processed", "raw"] | Sequence[str] | None = None,
        support_log_mass: TokenNumbers | None = None,
        failures: Sequence[str | None] | None = None,
        reward_trusted: Sequence[bool | Scalar] | Array | None = None,
        evaluation: bool | Sequence[bool | Scalar] | Array = False,
        engine: str | Sequence[str] = "",
        turn_spans: Sequence[Sequence[tuple[int, int]] | None] | None = None,
        turn_rewards: TokenNumbers | None = None,
        named_rewards: Mapping[str, Numbers] | None = None,
        extra: Mapping[str, Sequence[Any] | Array] | None = None,
        groups: Sequence[Hashable] | None = None,
        episodes: Sequence[Hashable | None] | None = None,
        names: Sequence[str] | None = None,
        run_id: str | None = None,
        one_prompt: bool = True,
        group_size: int | None = None,
        source: str = "record",
    ) -> np.ndarray:
        """Write completions in one commit; the members of a group are consecutive unless `groups` is given.

        Values that are not given are recorded as unknown.

        Args:
            completions: text or chat messages, `n` of them; empty text if only token ids are known.
            rewards: one per completion; None or NaN if the completion could not be graded. None for all if
                `give_rewards` sets them later.
            prompts: text or chat messages; may be omitted with `prompt_ids`.
            prompt_ids: token ids; encoded from `prompts` if None.
            completion_ids: token ids as sampled; encoded from `completions` if None.
            completion_masks: which completion tokens the policy produced; None for all.
            log_probs: per completion token, under the sampling policy at its temperature; None if unknown.
            ref_log_probs: the same under a reference policy.
            advantages: one per completion.
            answers: reference answers, against which `rlhf-pipeline inspect` grades.
            finish_reasons: `stop`, `length`, or a reason that the engine defines.
            metas: additional JSON values per completion.
            policy_version: the number of optimizer steps that produced the weights, for all rows or per row; None if
                unknown.
            token_versions: per completion token, the version that sampled it, for engines whose weights are replaced
                during sampling. The age of a trajectory is that of its oldest token.
            version_spans: the same as spans: the position of a span's first token in the row, and its version.
            temperature: the sampling temperature, one for all or one each. A replay scores at this temperature, and
                asks for it if it is unknown.
            log_prob_mode: `processed`, at the temperature, or `raw`, at 1.
            support_log_mass: per completion token, for sampling with top-p, top-k or min-p: the log of the total
                probability of the tokens that could be drawn; `log_probs` are under the complete distribution.
            failures: per completion, the kind of failure (`timeout`, `tool_error`, `grader_error`, `truncated`,
                `engine`, or a name that a tool defines), or empty. A failed completion has no reward to learn from.
            reward_trusted: False marks a failure of the grader.
            evaluation: samples of an evaluation, which are never used for training.
            engine: the name of the sampling engine, one for all or one each.
            turn_spans: for conversations, the position of each turn's first token in the row, and 1 for a turn of the
                policy or 0 for a reply.
            turn_rewards: one per turn of the policy.
            named_rewards: the components of the rewards by name, each in a column `reward_NAME`.
            extra: values of the recorder's additional `columns`.
            groups: the group name of each completion; the members of a group may be in any order and in any call of the
                run. Groups of training and evaluation are separate even if their names are equal.
            episodes: if episodes have several rows (a history was rewritten, or each step is a row): the name of each
                row's episode, unique in this call, or None for an episode of one row. The rows of an episode must be
                consecutive. They are one member of the group and share failure, finish reason, version and advantage;
                the last row has the reward.
            names: the unique name of each completion, with which `give_rewards` can set its reward later.
            run_id: the run in which the names are looked up; None means the recorder's run.
            one_prompt: reject a second prompt in a named group; use False if the episodes of a group begin differently.
            group_size: the number of members of each group of this call, which begins with a new group; None uses the
                recorder's setting.
            source: what `meta` records about the origin of the rows.

        Returns:
            `[n]` int64: the ids that the store assigned; empty if an error was logged.

        Raises:
            BatchError: the lengths do not match, a value is invalid, or the store is closed.
            SchemaError: token ids are missing and there is no tokenizer, or an additional column was not declared.
            StoreError: the store cannot be written.
        """
        fields: dict[str, Any] = {
            "prompt": prompts,
            "prompt_ids": prompt_ids,
            "completion": completions,
            "completion_ids": completion_ids,
            "completion_mask": completion_masks,
            "log_probs": log_probs,
            "ref_log_probs": ref_log_probs,
            "reward": rewards,
            "advantage": advantages,
            "answer": answers,
            "finish_reason": finish_reasons,
            "meta": metas,
            "temperature": _each(temperature, len(completions)),
            "log_prob_mode": _each(log_prob_mode, len(completions)),
            "failure": failures,
            "policy_version": _versions(policy_version, token_versions, version_spans, len(completions)),
        }
        more: dict[str, Any] = {
            "evaluation": _each(evaluation or None, len(completions)),
            "engine": _each(engine or None, len(completions)),
            "version_spans": version_spans,
            "turn_spans": turn_spans,
            "turn_rewards": turn_rewards,
            "support_log_mass": support_log_mass,
            **{f"reward_{name}": _floats(values) for name, values in (named_rewards or {}).items()},
            **(extra or {}),
        }
        try:
            with self._lock:
                offset = self._next_offset(len(completions), group_size)
            present = {name: values for name, values in fields.items() if values is not None}
            beside = {name: values for name, values in more.items() if values is not None}
            identity = {"groups": groups, "episodes": episodes, "names": names, "reward_trusted": reward_trusted}
            for name, values in (present | beside | identity).items():
                if values is not None and len(values) != len(completions):
                    raise BatchError(
                        f"{name} must contain one value per completion: expected {len(completions)}, got {len(values)}."
                    )
            if reward_trusted is not None:
                pairs = zip(present.get("failure") or [""] * len(completions), reward_trusted, strict=True)
                present["failure"] = [kind or ("" if trusted else "grader_error") for kind, trusted in pairs]
            rows = None if episodes is None else episode_rows(episodes)
            if rows is not None and groups is None and (rows.size > 1).any():
                raise BatchError("episodes of several rows require group names: record(groups=[...]).")
            source_of = _Sources(source, self.run_id if run_id is None else run_id, groups, names, one_prompt)
            with self._lock:
                return self._write(offset, present, beside, token_versions, rows, source_of, group_size)
        except StoreError as error:
            if self.on_error == "raise":
                raise
            lost = f"{counted(len(completions), 'completion')} {'was' if len(completions) == 1 else 'were'}"
            _log.error("%s: %s not recorded: %s", self.path, lost, error)
            return np.empty(0, np.int64)

    def _next_offset(self, num: int, group_size: int | None) -> int:
        """Return and store the position of a call's first row.

        Also where the call fails: the other processes continue, and a group may have members in several of them.
        """
        if group_size is not None:
            self._offset = -(-self._offset // _size(group_size)) * group_size
        offset, self._offset = self._offset, self._offset + self.world_size * num
        return offset

    def _write(
        self,
        offset: int,
        fields: dict[str, Sequence[Any]],
        beside: dict[str, Sequence[Any]],
        token_versions: Iterable[Any] | None,
        episodes: EpisodeRows | None,
        sources: _Sources,
        group_size: int | None,
    ) -> np.ndarray:
        num = len(fields["completion"])
        if "prompt" not in fields and "prompt_ids" not in fields:
            raise BatchError("prompts or prompt_ids is required.")
        if not num:
            return np.empty(0, np.int64)
        names, groups = sources.names, sources.groups
        if names is not None and len(set(names)) < num:
            raise BatchError("two names are equal, but each name must identify one completion.")
        if episodes is not None:
            episodes.share(fields)
        fields["created_at"] = [time.time()] * num
        batch = RecordBatch(fields, num, self._encoder, [sources.source(i) for i in range(num)])
        if token_versions is not None:
            beside["version_spans"] = [
                None if row is None else version_spans_of(row, len(batch.prompts[i]))
                for i, row in enumerate(token_versions)
            ]
        if "version_spans" in beside:
            oldest = np.asarray(fields["policy_version"], np.int64)
            newest = [
                max((pair[1] for pair in spans), default=-1) if spans else -1 for spans in beside["version_spans"]
            ]
            batch.add(NEWEST_VERSION, np.where(np.array(newest) > oldest, newest, -1).tolist())
        several = episodes is not None and bool((episodes.size > 1).any())
        self._have_columns([*beside, *(column.name for column in EPISODE if several)])
        for name, values in beside.items():
            batch.add(self.store.schema[name], values)
        starts = [True] * num if episodes is None else (episodes.position == 0).tolist()
        evaluations = beside.get("evaluation") or [False] * num
        scoped_groups = None if groups is None else group_names(sources.run, groups, evaluations)
        with alone(self.path):
            self.store.refresh()
            # Ranks share the ids that nothing had when they were made; one alone takes its own when it begins to write.
            base = self._base if self.world_size > 1 or self.num_recorded else next_base(self.store)
            if self._resumed_at is not None:
                step, self._resumed_at = self._resumed_at, None
                base, offset = self._retaken(step, batch.prompts, base, offset)
                self._base, self._offset = base, offset + self.world_size * num
            places = np.arange(num) + offset + self.rank * num
            row_names, members = (base + places).tolist(), list[Group]()
            if scoped_groups is None:
                group_ids = (base + self._groups(batch, places, group_size or self.group_size)).tolist()
            else:
                members = self._names.find_groups(
                    self.store, scoped_groups, row_names, batch.prompts, starts, one_prompt=sources.one_prompt
                )
                group_ids = [group.group_id for group in members]
            batch.add(self.store.schema["trajectory_id"], row_names)
            batch.add(self.store.schema["group_id"], group_ids)
            if episodes is not None and several:
                named_by_first = np.where(episodes.size > 1, base + places[episodes.first], -1)
                for column, values in zip(EPISODE, (named_by_first, episodes.position, episodes.size), strict=True):
                    batch.add(self.store.schema[column.name], values.tolist())
            ids = self.store.append_batch(batch.batch(self.store.schema))
            self._base = base
        self.num_recorded += num
        if scoped_groups is not None:
            self._names.add_groups(scoped_groups, members)
        if names is not None:
            self._names.rows |= zip([(sources.run, name) for name in names], ids.tolist(), strict=True)
        return ids

    def _have_columns(self, names: Iterable[str]) -> None:
        """Add the columns that a call is the first to need: a store has those alone of which something is known."""
        lacking = [name for name in names if name not in self.store.schema]
        if not lacking:
            return
        for name in lacking:
            if name not in self._further and not name.startswith("reward_"):
                column_names = ", ".join(self._further) or "none"
                raise SchemaError(
                    f"there is no column '{name}' among the additional columns ({column_names}). Declare it: "
                    "TrajectoryRecorder(..., columns=[Column(...)])"
                )
        durability = self.store.durability
        self.store.close()
        added = [self._further.get(name, Column(name, "float32", fill=math.nan)) for name in lacking]
        self.store = TrajectoryStore.open(self.path, mode="a", durability=durability, add_columns=added)

    def give_rewards(
        self,
        rewards: Mapping[str | int, float | None],
        *,
        failures: Mapping[str | int, str] | None = None,
        run_id: str | None = None,
    ) -> None:
        """Set the rewards of completions that were recorded without one.

        A completion without a reward is never used for training. The rewards of a call are one atomic commit, durable
        on return. A process other than the one that recorded the completions may set them. If a reward is set again,
        the last value applies.

        Args:
            rewards: by the name that was passed to `record`, or the id that it returned; None if the completion could
                not be graded.
            failures: the kind of failure of failed completions, see `record`; their rewards are not used.
            run_id: the run in which the names are looked up; None means the recorder's run.

        Raises:
            BatchError: a name is not in the store, a reward is not finite, or a row is not the last of its episode.
            StoreError: the store cannot be written.
        """
        kinds = {key: as_failure(kind, "failure") for key, kind in (failures or {}).items()}
        values = {key: as_reward(rewards.get(key), "reward") for key in {**rewards, **kinds}}
        with self._lock, alone(self.path):
            self.store.refresh()
            rows = self._rows_named(list(values), self.run_id if run_id is None else run_id)
            sizes = self._episode_sizes(list(values), rows)
            ends = np.cumsum(sizes) - 1  # an episode's failure is on all of its rows, and its reward on the last one
            scores = np.full(int(sizes.sum()), math.nan, np.float32)
            scores[ends] = [math.nan if kinds.get(key) else value for key, value in values.items()]
            failed = [kind for key, size in zip(values, sizes, strict=True) for kind in [kinds.get(key, "")] * size]
            self.store.update(
                np.repeat(np.array(rows, np.int64) - ends, sizes) + np.arange(len(scores)),
                task_reward=scores,
                failure_reason=failed,
                reward_trusted=np.array([not kind for kind in failed]),
            )

    def _rows_named(self, keys: Sequence[str | int], run: str) -> list[int]:
        names = [(run, key) for key in keys if isinstance(key, str)]
        if any(name not in self._names.rows for name in names):
            self._names.recall(self.store)
        unknown = [name for name in names if name not in self._names.rows]
        if unknown:
            of_run = f" of run {run!r}" if run else ""
            raise BatchError(
                f"{self.path} has no completion named {unknown[0][1]!r}{of_run}; `record(names=...)` sets the names."
            )
        return [self._names.rows[run, key] if isinstance(key, str) else int(key) for key in keys]

    def _episode_sizes(self, keys: Sequence[str | int], rows: Sequence[int]) -> np.ndarray:
        """Return how many rows the episode of each row has, int64 [n]; each must be the last one of its episode."""
        if EPISODE[2].name not in self.store.schema:
            return np.ones(len(rows), np.int64)
        position, sizes = (self.store.read_scalars(column.name, np.array(rows, np.int64)) for column in EPISODE[1:])
        inner = np.flatnonzero(position != sizes - 1)
        if len(inner):
            at = int(inner[0])
            raise BatchError(
                f"{keys[at]!r} is row {position[at]} of an episode of {sizes[at]} rows. Assign the reward of an "
                "episode to its last row."
            )
        return sizes.astype(np.int64)

    def _retaken(self, step: int, retaken: Sequence[np.ndarray], base: int, offset: int) -> tuple[int, int]:
        """Return where the previous recorder's ids of a step begin, to be used again; else what is given."""
        rows = self.store.ids()
        before = base - (1 << SOURCE_BITS)
        trajectory_ids = self.store.read_scalars("trajectory_id", rows)
        again = trajectory_ids >> SOURCE_BITS == before >> SOURCE_BITS
        again &= self.store.read_scalars("policy_version", rows) >= step
        if before < 0 or not again.any():
            return base, offset
        start = int(trajectory_ids[again].min()) - before
        for i, row in enumerate(retaken):
            earlier_row = rows[trajectory_ids == before + start + self.rank * len(retaken) + i][-1:]
            earlier_prompts = self.store.read(earlier_row, ["input_ids", "num_prompt_tokens"])
            prompts = [ids[:end] for ids, end in zip(*earlier_prompts.values(), strict=True)]
            if not prompts or not np.array_equal(prompts[0], row):
                _log.warning(
                    "%s: the prompts of step %d differ from the earlier ones, so the earlier rows are kept",
                    self.path,
                    step,
                )
                return base, offset
        return before, start

    def _groups(self, batch: RecordBatch, places: np.ndarray, size: int | None) -> np.ndarray:
        """Return the group of each row, called after its first row: sizes may differ between calls."""
        if size is not None:
            return places // size * size
        prompts = [(text, ids.tobytes()) for text, ids in zip(batch.texts, batch.prompts, strict=True)]
        starts = [i == 0 or prompt != prompts[i - 1] for i, prompt in enumerate(prompts)]
        return places[np.flatnonzero(starts)][np.cumsum(starts) - 1]

    # -- reward functions --------------------------------------------------------------------------------------------

    def reward_funcs(
        self, functions: RewardFunction | Sequence[RewardFunction], weights: Sequence[float] | None = None
    ) -> list[RewardFunction]:
        """Return reward functions that call the given ones, and record when the last one has returned.

        They are called as TRL calls them: `f(prompts=, completions=, completion_ids=, **columns)`, where columns may
        contain `trainer_state`, whose `global_step` becomes the policy version. A column called answer, ground_truth,
        solution or target is stored as the reference answer. Evaluations are recorded as well, because TRL does not
        mark them; pass the plain functions to the evaluating trainer, or use `attach`.

        Args:
            functions: plain or async functions; reward models cannot be wrapped, use `attach`.
            weights: per function, for the weighted sum that is the task reward (the trainer's `reward_weights`); None
                means 1.

        Raises:
            SchemaError: a function cannot be called, or the number of weights does not match.
        """
        reward_functions = list(functions) if isinstance(functions, Sequence) else [functions]
        if weights is not None and len(weights) != len(reward_functions):
            raise SchemaError(
                f"weights must contain one value per reward function: expected {len(reward_functions)}, got "
                f"{len(weights)}."
            )
        for function in reward_functions:
            if not callable(function) or hasattr(function, "forward"):
                raise SchemaError(
                    f"{type(function).__name__} is a model, not a reward function. Use recorder.attach(trainer)."
                )
        factors = np.ones(len(reward_functions)) if weights is None else np.asarray(weights, np.float64)
        return [self._wrapped(i, function, factors) for i, function in enumerate(reward_functions)]

    def _wrapped(self, index: int, function: RewardFunction, weights: np.ndarray) -> RewardFunction:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def graded_later(*, prompts: Any, completions: Any, **columns: Any) -> Any:
                rewards = await function(prompts=prompts, completions=completions, **columns)
                self._collect(index, rewards, weights, prompts, completions, columns)
                return rewards

            return graded_later

        def graded(*, prompts: Any, completions: Any, **columns: Any) -> Any:
            rewards = function(prompts=prompts, completions=completions, **columns)
            self._collect(index, rewards, weights, prompts, completions, columns)
            return rewards

        graded = functools.wraps(function, updated=())(graded)  # not the attributes of an object with `__call__`
        graded.__name__ = getattr(function, "__name__", type(function).__name__)
        return graded

    def _collect(
        self, index: int, graded: Any, weights: np.ndarray, prompts: Any, completions: Any, columns: Mapping[str, Any]
    ) -> None:
        pending = self._pending
        if pending is None or pending[0] is not completions:
            if pending is not None:
                _log.warning("%s: the grading of a batch did not finish, so the batch was not recorded", self.path)
            pending = self._pending = (completions, {})
        rewards = pending[1]
        rewards[index] = [math.nan if reward is None else float(reward) for reward in graded]
        if len(rewards) < len(weights):
            return
        self._pending = None
        step = int(getattr(columns.get("trainer_state"), "global_step", 0))
        if step and not self._offset and self._resumed_at is None:
            self.resume(step)  # a training whose first batch is not that of step 0 was resumed
        scores = np.array([rewards[i] for i in range(len(weights))]).T
        answers = next((columns[name] for name in _ANSWERS if isinstance(columns.get(name), list)), None)
        self.record(
            prompts=prompts,
            completions=completions,
            completion_ids=columns.get("completion_ids"),
            rewards=weighted(scores, weights).tolist(),
            answers=answers,
            policy_version=step,
            source="reward function",
        )

    # -- TRL ---------------------------------------------------------------------------------------------------------

    def attach(self, trainer: Any, *, compute_log_probs: bool = True, record_eval: bool = False) -> None:
        """Record everything that a TRL trainer samples from now on, without changing its training.

        Args:
            trainer: a `GRPOTrainer` of TRL 1.16, or a trainer with the same methods.
            compute_log_probs: if the trainer has no sampling log-probs (without vLLM), compute them right after
                generation, at the trainer's temperature, with one additional forward pass per generation.
            record_eval: also record the completions of evaluations.

        Raises:
            SchemaError: the trainer lacks the methods that are wrapped.
        """
        from trajectory_store.adapters.trl import listen

        listen(self, trainer, compute_log_probs=compute_log_probs, record_eval=record_eval)

    def callback(self) -> Any:
        """Return a `TrainerCallback` that syncs when the trainer saves and ends, and announces a resume."""
        from trajectory_store.adapters.trl import flush_callback

        return flush_callback(self)

    def flush(self) -> None:
        """Sync all recorded rows to the disk."""
        if not self.store.closed:
            self.store.flush()

    def close(self) -> None:
        """Close the store; recorded rows remain."""
        if not self.store.closed:
            self.store.close()
            self._locks.close()

    def __enter__(self) -> TrajectoryRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Sources:
    """The source of the rows of a call, and the names by which they are found again."""

    recorder: str
    run: str
    groups: Sequence[Hashable] | None
    names: Sequence[str] | None
    one_prompt: bool

    def source(self, i: int) -> dict[str, Any]:
        """Return what `meta` records of a row's source."""
        row_source: dict[str, Any] = {"recorder": self.recorder}
        if self.names is not None:
            row_source["name"] = self.names[i]
        if self.groups is not None:
            row_source["group"] = str(self.groups[i])
        if self.run and len(row_source) > 1:
            row_source["run"] = self.run
        return row_source


def _each(value: Any, num: int) -> Sequence[Any] | None:
    """Return one value for each of `num` rows; None where none is given."""
    if value is None:
        return None
    row_values = as_list(value)
    return row_values if isinstance(row_values, list) else [row_values] * num


def _floats(values: Iterable[Any]) -> list[float]:
    return [math.nan if value is None else float(value) for value in values]


def _versions(policy_version: Any, per_token: Iterable[Any] | None, spans: Sequence[Any] | None, num: int) -> list[int]:
    """Return the version of each row: what is given, or that of its oldest token."""
    row_versions = [
        as_int(version, "policy_version")
        for version in _each(UNKNOWN_VERSION if policy_version is None else policy_version, num) or ()
    ]
    for i, row in enumerate(() if per_token is None else per_token):
        if row is not None and len(row):
            row_versions[i] = int(min(as_list(row)))
    for i, pairs in enumerate(spans or ()):
        if pairs is not None and len(pairs):
            row_versions[i] = int(min(pair[1] for pair in pairs))
    return row_versions


def version_spans_of(versions: Sequence[int], start: int) -> list[tuple[int, int]]:
    """Return the spans of a completion that begins at `start`, from the version of each of its tokens.

    >>> version_spans_of([3, 3, 4], 5)
    [(5, 3), (7, 4)]
    """
    token_versions = np.asarray(as_list(versions), np.int64)
    begins = (
        np.flatnonzero(np.concatenate([[True], token_versions[1:] != token_versions[:-1]]))
        if len(token_versions)
        else []
    )
    return [(start + int(place), int(token_versions[place])) for place in begins]


def _size(group: int) -> int:
    """Return the members of a group, checked."""
    if group < 1:
        raise SchemaError(f"group_size is {group}; it must be at least 1, or None.")
    return group
