"""Recording what another trainer samples, while it trains: TRL's trainers, or any loop with token ids and rewards."""

# pyright: standard
# Foreign data, whose types are told apart at run time.
from __future__ import annotations

import contextlib
import fcntl
import functools
import inspect
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trajectory_store.batch import batch_of
from trajectory_store.errors import BatchError, SchemaError, StoreError
from trajectory_store.raw_rollout import Messages, RawRollout, Row, as_int, values_of, weighted
from trajectory_store.row_encoder import Encoder
from trajectory_store.source_ids import SOURCE_BITS, held, next_base, open_or_create
from trajectory_store.standard import standard_schema

_log = logging.getLogger("trajectory_store")
_LOCK = ".recorder.lock"
_ANSWERS = ("answer", "ground_truth", "solution", "target")
RewardFunction = Callable[..., Any]


class TrajectoryRecorder:
    """Writes each completion of another trainer to a store: token ids, rewards, text and, where known, log-probs.

    Three ways to use it; the first records the most:

    - `recorder.attach(trainer)`: TRL's `GRPOTrainer` (1.16): exact prompt ids, all rewards with the trainer's weights,
      advantages, sampling log-probs of vLLM; without vLLM they are computed by one forward pass at sampling time.
    - `reward_funcs=recorder.reward_funcs([my_reward])`: any trainer that calls reward functions as TRL does, with
      `prompts`, `completions`, `completion_ids` and columns. Prompt ids come from the tokenizer, log-probs are NaN.
    - `recorder.record(...)`: any loop.

    A recorder on an old store gives new ids, except for the steps that a resumed training takes again, see `resume`.
    A call is one atomic commit, durable on return. The processes of one training may record into one store, each with
    its own recorder, all made before training starts, and all with equally many rows per call. So may several trainings
    at once, if each is one process. Not thread safe.

    Args:
        store: folder of the store; made if it is not there.
        tokenizer: of transformers, or the folder or hub name of one; for prompts and completions without ids.
        group_size: completions per prompt (`num_generations`); None: rows in turn with equal prompts are one group.
        durability: of a new store; see `TrajectoryStore.create`.
        on_error: `raise`, or `log` to train on when the store cannot be written (a full disk) or a call does not fit.
        rank: of this process; from the environment if None.
        world_size: the number of processes that record.

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
    ) -> None:
        if on_error not in ("raise", "log"):
            raise SchemaError(f"on_error is {on_error!r}; it must be 'raise' or 'log'.")
        self.path = Path(store).expanduser()
        self.group_size = None if group_size is None else _size(group_size)
        self.on_error = on_error
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        self.store = open_or_create(self.path, standard_schema(), durability)
        self._held = contextlib.ExitStack()
        refusal = f"an import is writing to {self.path}. Wait for it, or record into another store."
        self._held.enter_context(held(self.path, shared=True, refusal=refusal))
        self.num_recorded = 0
        self._base = next_base(self.store)
        self._offset = 0
        self._encoder = Encoder(tokenizer)
        self._pending: tuple[Any, dict[int, list[float]]] | None = None
        """Completions that some functions have not graded yet, and the rewards of those that have."""
        self._resumed_at: int | None = None

    def resume(self, step: int) -> None:
        """Announce that the training resumes from its checkpoint of `step` optimizer steps and repeats later ones.

        What is recorded next then gets the ids of what an earlier recorder recorded at those steps, if it is of the
        same prompts, and takes its place when the store is learned from, as of rows with one trajectory id the newest
        counts. `attach` and `callback` call this where a TRL trainer resumes.
        """
        self._resumed_at = step

    def record(
        self,
        *,
        completions: Sequence[Any],
        rewards: Sequence[float | None],
        prompts: Sequence[str | Messages] | None = None,
        prompt_ids: Sequence[Sequence[int]] | None = None,
        completion_ids: Sequence[Sequence[int]] | None = None,
        completion_masks: Sequence[Sequence[bool]] | None = None,
        log_probs: Sequence[Sequence[float | None] | None] | None = None,
        ref_log_probs: Sequence[Sequence[float | None] | None] | None = None,
        advantages: Sequence[float] | None = None,
        answers: Sequence[Any] | None = None,
        finish_reasons: Sequence[str] | None = None,
        metas: Sequence[Mapping[str, Any]] | None = None,
        policy_version: int = 0,
        group_size: int | None = None,
        source: str = "record",
    ) -> np.ndarray:
        """Write completions, the members of a group in turn, in one commit.

        Args:
            completions: text or chat messages, `n` of them.
            rewards: None or NaN where a completion could not be graded.
            prompts: text or chat messages; may be left out with `prompt_ids`.
            prompt_ids: token ids; encoded from `prompts` if None.
            completion_ids: token ids as they were sampled; encoded from `completions` if None.
            completion_masks: which completion tokens the policy produced; None for all.
            log_probs: per completion token, of the policy that sampled, at its temperature; None where unknown.
            ref_log_probs: the same of a reference policy.
            advantages: one per completion.
            answers: reference answers, which `rlhf-pipeline inspect` grades by.
            finish_reasons: `stop` or `length`.
            metas: more about each, JSON-ready.
            policy_version: the number of optimizer steps behind the weights.
            group_size: members of each group of this call, which begins with a new one; None goes on as the recorder
                was made.
            source: what `meta` says of where the rows come from.

        Returns:
            `[n]` int64: the ids that the store gave; empty where an error was logged.

        Raises:
            BatchError: the lengths do not fit, or the store is closed.
            SchemaError: token ids are missing and there is no tokenizer.
            StoreError: the store cannot be written.
        """
        given = {
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
        }
        try:
            there = {name: values for name, values in given.items() if values is not None}
            return self._write(len(completions), there, policy_version, group_size, source)
        except StoreError as error:
            if self.on_error == "raise":
                raise
            _log.error("%s: %d completions were not recorded: %s", self.path, len(completions), error)
            return np.empty(0, np.int64)

    def _write(
        self, num: int, given: Mapping[str, Sequence[Any]], policy_version: int, group_size: int | None, source: str
    ) -> np.ndarray:
        if group_size is not None:
            self._offset = -(-self._offset // _size(group_size)) * group_size
        # Also where this call fails: the other processes go on, and a group may have members in several of them.
        offset, self._offset = self._offset, self._offset + self.world_size * num
        for name, values in given.items():
            if len(values) != num:
                raise BatchError(f"{len(values)} values of {name} for {num} completions.")
        if "prompt" not in given and "prompt_ids" not in given:
            raise BatchError("neither prompts nor prompt_ids are given.")
        if not num:
            return np.empty(0, np.int64)
        now, version = time.time(), as_int(_as_list(policy_version), "policy_version")
        rows: list[dict[str, Any]] = []
        for i in range(num):
            mine = {name: _as_list(values[i]) for name, values in given.items()}
            # TRL encodes a text prompt as it is; messages go through the template.
            about = {
                "policy_version": version,
                "created_at": now,
                "as_chat": False,
                "meta": mine.get("meta", {}),
            }
            rows.append(self._encoder.row(RawRollout(**values_of(mine) | about), {"recorder": source}))
        with _alone(self.path):
            self.store.refresh()
            # Ranks share the ids that nothing had when they were made; one alone takes its own when it begins to write.
            base = self._base if self.world_size > 1 or self.num_recorded else next_base(self.store)
            if self._resumed_at is not None:
                step, self._resumed_at = self._resumed_at, None
                base, offset = self._retaken(step, rows, base, offset)
                self._base, self._offset = base, offset + self.world_size * num
            places = np.arange(num) + offset + self.rank * num
            groups = self._groups(rows, places, group_size or self.group_size)
            for row, place, group in zip(rows, places.tolist(), groups.tolist(), strict=True):
                row |= {"trajectory_id": base + place, "group_id": base + group}
            ids = self.store.append_batch(batch_of(self.store.schema, rows))
            self._base = base
        self.num_recorded += num
        return ids

    def _retaken(self, step: int, retaken: Sequence[Row], base: int, offset: int) -> tuple[int, int]:
        """Return where the previous recorder's ids of a step begin, to be used again; else what is given."""
        rows = self.store.ids()
        before = base - (1 << SOURCE_BITS)
        named = self.store.read_scalars("trajectory_id", rows)
        again = named >> SOURCE_BITS == before >> SOURCE_BITS
        again &= self.store.read_scalars("policy_version", rows) >= step
        if before < 0 or not again.any():
            return base, offset
        start = int(named[again].min()) - before
        for i, row in enumerate(retaken):
            there = rows[named == before + start + self.rank * len(retaken) + i][-1:]
            found = self.store.read(there, ["input_ids", "num_prompt_tokens"])
            prompts = [ids[:end] for ids, end in zip(*found.values(), strict=True)]
            if not prompts or not np.array_equal(prompts[0], _prompt_of(row)):
                _log.warning("%s: other prompts than before at step %d, so the earlier rows stay", self.path, step)
                return base, offset
        return before, start

    def _groups(self, rows: Sequence[Row], places: np.ndarray, size: int | None) -> np.ndarray:
        """Return the group of each row, called after its first row: sizes may differ between calls."""
        if size is not None:
            return places // size * size
        prompts = [(row["prompt"], _prompt_of(row).tolist()) for row in rows]
        starts = [i == 0 or prompt != prompts[i - 1] for i, prompt in enumerate(prompts)]
        return places[np.flatnonzero(starts)][np.cumsum(starts) - 1]

    # -- reward functions --------------------------------------------------------------------------------------------

    def reward_funcs(
        self, functions: RewardFunction | Sequence[RewardFunction], weights: Sequence[float] | None = None
    ) -> list[RewardFunction]:
        """Return reward functions that do what the given ones do, and record once the last has answered.

        They are called as TRL calls them: `f(prompts=, completions=, completion_ids=, **columns)`, where columns
        may hold `trainer_state`, whose `global_step` becomes the policy version. A column called answer, ground_truth,
        solution or target is stored as the reference answer. Evaluation is recorded too, as TRL does not say which is
        which; give the evaluating trainer the plain functions, or use `attach`.

        Args:
            functions: plain or async functions; reward models cannot be wrapped, use `attach`.
            weights: per function, for the sum that is the task reward (the trainer's `reward_weights`); None is 1.

        Raises:
            SchemaError: a function cannot be called, or the weights do not fit.
        """
        wanted = list(functions) if isinstance(functions, Sequence) else [functions]
        if weights is not None and len(weights) != len(wanted):
            raise SchemaError(f"{len(weights)} weights for {len(wanted)} reward functions.")
        for function in wanted:
            if not callable(function) or hasattr(function, "forward"):
                raise SchemaError(
                    f"{type(function).__name__} is a model, not a reward function. Use recorder.attach(trainer)."
                )
        factors = np.ones(len(wanted)) if weights is None else np.asarray(weights, np.float64)
        return [self._wrapped(i, function, factors) for i, function in enumerate(wanted)]

    def _wrapped(self, index: int, function: RewardFunction, weights: np.ndarray) -> RewardFunction:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def graded_later(*, prompts: Any, completions: Any, **columns: Any) -> Any:
                found = await function(prompts=prompts, completions=completions, **columns)
                self._collect(index, found, weights, prompts, completions, columns)
                return found

            return graded_later

        def graded(*, prompts: Any, completions: Any, **columns: Any) -> Any:
            found = function(prompts=prompts, completions=completions, **columns)
            self._collect(index, found, weights, prompts, completions, columns)
            return found

        graded = functools.wraps(function, updated=())(graded)  # not the attributes of an object with `__call__`
        graded.__name__ = getattr(function, "__name__", type(function).__name__)
        return graded

    def _collect(
        self, index: int, found: Any, weights: np.ndarray, prompts: Any, completions: Any, columns: Mapping[str, Any]
    ) -> None:
        pending = self._pending
        if pending is None or pending[0] is not completions:
            if pending is not None:
                _log.warning("%s: the grading of a batch was not finished, so it is not recorded", self.path)
            pending = self._pending = (completions, {})
        rewards = pending[1]
        rewards[index] = [math.nan if reward is None else float(reward) for reward in found]
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
        """RawRollout everything that a TRL trainer samples from now on, without changing its numbers.

        Args:
            trainer: a `GRPOTrainer` of TRL 1.16, or a trainer with the same methods.
            compute_log_probs: where the trainer has no sampling log-probs (without vLLM), compute them when the
                completions are fresh, at the trainer's temperature: one forward pass more per generation.
            record_eval: also record what evaluation samples.

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
        """Sync everything recorded to the disk."""
        if not self.store.closed:
            self.store.flush()

    def close(self) -> None:
        """Close the store; what was recorded stays."""
        if not self.store.closed:
            self.store.close()
            self._held.close()

    def __enter__(self) -> TrajectoryRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _as_list(value: Any) -> Any:
    """Return an array, a tensor or a tuple as a list, and anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, tuple) else value


def _size(group: int) -> int:
    """Return the members of a group, checked."""
    if group < 1:
        raise SchemaError(f"group_size is {group}; it must be at least 1, or None.")
    return group


def _prompt_of(row: Row) -> np.ndarray:
    return row["input_ids"][: row["num_prompt_tokens"]]


@contextlib.contextmanager
def _alone(store: Path) -> Iterator[None]:
    """Hold the lock that recorders take to write."""
    with (store / _LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
