"""Recording what another trainer samples, while it trains: TRL's trainers, or any loop with token ids and rewards."""

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
import numpy.typing as npt

from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange._completion import Messages, Rollout, as_answer, as_text
from rlhf_pipeline.exchange._encode import Encoder, columns_of, meta_of
from rlhf_pipeline.exchange.target import SOURCE_BITS, held, next_base, open_or_create
from trajectory_store import StoreError

_log = logging.getLogger("rlhf_pipeline")
_LOCK = ".recorder.lock"
_ANSWERS = ("answer", "ground_truth", "solution", "target")
RewardFunction = Callable[..., Any]


_AS: Mapping[str, Callable[[Any], Any]] = {
    "completion": lambda value: as_text(value, "completion"),
    "reward": lambda value: math.nan if value is None else float(value),
    "advantage": float,
    "answer": as_answer,
    "meta": dict,
}
"""How a value that was given becomes a field of a rollout, where it is not that already."""


class TrajectoryRecorder:
    """Writes each completion of another trainer to a store: token ids, rewards, text and, where known, log-probs.

    Three ways to use it; the first records the most:

    - `recorder.attach(trainer)`: TRL's `GRPOTrainer` (1.16): exact prompt ids, all rewards with the trainer's weights,
      advantages, sampling log-probs of vLLM; without vLLM they are computed by one forward pass at sampling time.
    - `reward_funcs=recorder.reward_funcs([my_reward])`: any trainer that calls reward functions as TRL does, with
      `prompts`, `completions`, `completion_ids` and columns. Prompt ids come from the tokenizer, log-probs are NaN.
    - `recorder.record(...)`: any loop.

    A training that resumes from a checkpoint takes some steps again; what is recorded of them takes the place of what
    was recorded before, see `resume`. Any other recorder on an old store gives new ids.

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
        RunExistsError: an import is writing to the store.
        StoreError: the store cannot be opened.

    >>> import tempfile
    >>> from trajectory_store import TrajectoryStore
    >>> recorder = TrajectoryRecorder(tempfile.mkdtemp() + "/store", group_size=2)
    >>> ids = recorder.record(
    ...     prompts=["1+1=", "1+1="], prompt_ids=[[5, 6], [5, 6]], completions=["2", "3"], completion_ids=[[7], [8]],
    ...     rewards=[1.0, 0.0], log_probs=[[-0.5], [-1.5]], policy_version=3)
    >>> recorder.close()
    >>> with TrajectoryStore.open(recorder.path) as store:
    ...     store.read(ids, ["group_id", "task_reward", "log_probs"])["log_probs"][1].tolist()
    [nan, nan, -1.5]
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
        if group_size is not None and group_size < 1:
            raise DefinitionError(f"group_size is {group_size}; it must be at least 1, or None.")
        if on_error not in ("raise", "log"):
            raise DefinitionError(f"on_error is {on_error!r}; it must be 'raise' or 'log'.")
        self.path = Path(store).expanduser()
        self.group_size = group_size
        self.on_error = on_error
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
        self.store = open_or_create(self.path, trajectory_schema(), durability)
        self._held = contextlib.ExitStack()
        self._held.enter_context(
            held(
                self.path,
                shared=True,
                refusal=f"an import is writing to {self.path}. Wait for it, or record into another store.",
            )
        )
        self.num_recorded = 0
        self._seen = self.store.snapshot()
        self._base = next_base(self.store)
        self._offset = 0
        self._encoder = Encoder(tokenizer)
        self._pending: tuple[Any, dict[int, list[float]]] | None = None
        """Completions that some functions have not graded yet, and the rewards of those that have."""
        self._resumed_at: int | None = None

    def resume(self, step: int) -> None:
        """Announce that the training resumes from its checkpoint of `step` optimizer steps and repeats later ones.

        What is recorded next then gets the ids of what an earlier recorder recorded at those steps, if it is of the
        same prompts, and takes its place when the store is learned from: of rows with one trajectory id the newest
        counts.
        `attach` and `callback` call this where a TRL trainer resumes.
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
            source: what `meta` says of where the rows come from.

        Returns:
            `[n]` int64: the ids that the store gave; empty where an error was logged.

        Raises:
            DataError: the lengths do not fit, or the store is closed.
            DefinitionError: token ids are missing and there is no tokenizer.
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
            return self._write(len(completions), there, policy_version, source)
        except (DataError, DefinitionError, StoreError) as error:
            if self.on_error == "raise":
                raise
            _log.error("%s: %d completions were not recorded: %s", self.path, len(completions), error)
            return np.empty(0, np.int64)

    def _write(self, num: int, given: Mapping[str, Sequence[Any]], policy_version: int, source: str) -> np.ndarray:
        # Also where this call fails: the other processes go on, and a group may have members in several of them.
        offset, self._offset = self._offset, self._offset + self.world_size * num
        for name, values in given.items():
            if len(values) != num:
                raise DataError(f"{len(values)} values of {name} for {num} completions.")
        if "prompt" not in given and "prompt_ids" not in given:
            raise DataError("neither prompts nor prompt_ids are given.")
        if not num:
            return np.empty(0, np.int64)
        more: list[str] = []
        rollouts: list[Rollout] = []
        now = time.time()
        for i in range(num):
            fields = {name: _AS[name](values[i]) if name in _AS else values[i] for name, values in given.items()}
            # TRL encodes a text prompt as it is; messages go through the template.
            rollout = Rollout(policy_version=policy_version, created_at=now, as_chat=False, **fields)
            encoded = self._encoder.encode(rollout)
            said = {"source": {"recorder": source}} | ({} if encoded is None else {"encoded": encoded})
            more.append(meta_of(rollout, said))
            rollouts.append(rollout)
        if self._resumed_at is not None:
            step, self._resumed_at = self._resumed_at, None
            offset = self._retaken(step, rollouts, offset)
            self._offset = offset + self.world_size * num
        first = offset + self.rank * num
        places = np.arange(first, first + num, dtype=np.int64)
        groups = self._groups(rollouts, places)
        with _alone(self.path):
            self._leave_to_others()
            ids = self.store.append(columns_of(rollouts, groups + self._base, places + self._base, more))
            self._seen = self.store.snapshot()
        self.num_recorded += num
        return ids

    def _retaken(self, step: int, rollouts: Sequence[Rollout], offset: int) -> int:
        """Reuse the previous recorder's ids from a step on; return the place of that step's first row."""
        rows = self.store.ids()
        base = self._base - (1 << SOURCE_BITS)
        named = self.store.read_scalars("trajectory_id", rows)
        before = named >> SOURCE_BITS == base >> SOURCE_BITS
        again = before & (self.store.read_scalars("policy_version", rows) >= step)
        if base < 0 or not again.any():
            return offset
        start = int(named[again].min()) - base
        for i, rollout in enumerate(rollouts):
            there = rows[named == base + start + self.rank * len(rollouts) + i]
            found = self.store.read(there[-1:], ["input_ids", "num_prompt_tokens"])
            ends = found["num_prompt_tokens"]
            prompts = [ids[:end].tolist() for ids, end in zip(found["input_ids"], ends, strict=True)]
            if prompts != [list(rollout.prompt_ids or ())]:
                _log.warning("%s: other prompts than before at step %d, so the earlier rows stay", self.path, step)
                return offset
        self._base = base
        return start

    def _leave_to_others(self) -> None:
        """Switch to other ids if another recorder, opened before this one had written, uses the same ones."""
        before, watermark = self._seen, self.store.refresh()
        if self.world_size > 1 or watermark == before.watermark:
            return  # of several ranks each has its own places among the same ids
        new = self.store.read_scalars("trajectory_id", before.later(self.store.ids()))
        if (new >> SOURCE_BITS == self._base >> SOURCE_BITS).any():
            self._base = next_base(self.store)

    def _groups(self, rollouts: Sequence[Rollout], places: np.ndarray) -> np.ndarray:
        if self.group_size is not None:
            return places // self.group_size
        starts = [
            i == 0 or (rollout.prompt, rollout.prompt_ids) != (rollouts[i - 1].prompt, rollouts[i - 1].prompt_ids)
            for i, rollout in enumerate(rollouts)
        ]
        return places[np.flatnonzero(starts)][np.cumsum(starts) - 1]  # a group is called after its first row

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
            DefinitionError: a function cannot be called, or the weights do not fit.
        """
        wanted = list(functions) if isinstance(functions, Sequence) else [functions]
        if weights is not None and len(weights) != len(wanted):
            raise DefinitionError(f"{len(weights)} weights for {len(wanted)} reward functions.")
        for function in wanted:
            if not callable(function) or hasattr(function, "forward"):
                raise DefinitionError(
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

        name = getattr(function, "__name__", type(function).__name__)
        functools.update_wrapper(graded, function) if hasattr(function, "__name__") else None
        graded.__name__ = name
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
        """Record everything that a TRL trainer samples from now on, without changing its numbers.

        Args:
            trainer: a `GRPOTrainer` of TRL 1.16, or a trainer with the same methods.
            compute_log_probs: where the trainer has no sampling log-probs (without vLLM), compute them when the
                completions are fresh, at the trainer's temperature: one forward pass more per generation.
            record_eval: also record what evaluation samples.

        Raises:
            DefinitionError: the trainer lacks the methods that are wrapped.
        """
        from rlhf_pipeline.exchange._trl import listen

        listen(self, trainer, compute_log_probs=compute_log_probs, record_eval=record_eval)

    def callback(self) -> Any:
        """Return a `TrainerCallback` that syncs when the trainer saves and ends, and announces a resume."""
        from rlhf_pipeline.exchange._trl import flush_callback

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


@contextlib.contextmanager
def _alone(store: Path) -> Iterator[None]:
    """Hold the lock that recorders take to write."""
    with (store / _LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def weighted(scores: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the weighted sum of `[n, functions]` rewards as TRL forms it: NaN counts as 0, unless all are NaN.

    >>> weighted(np.array([[1.0, np.nan], [np.nan, np.nan]]), np.array([2.0, 1.0])).tolist()
    [2.0, nan]
    """
    total = np.nansum(scores * weights, axis=1)
    total[np.isnan(scores).all(axis=1)] = np.nan
    return total
