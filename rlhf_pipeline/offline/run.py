"""A run that learns from stores alone: gather, then take steps; the folder is that of any other run."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from rlhf_pipeline.config import Pipeline, Replay
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.events import EventHandler, RunFinished, RunStarted, ignore_events
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.learner.ledger import Ledger
from rlhf_pipeline.learner.loggers import with_logger
from rlhf_pipeline.offline.batches import Batches
from rlhf_pipeline.offline.gather import GatherCounts, Gatherer, gather_schema
from rlhf_pipeline.offline.sources import Choice, Limits, choose, gathered, mark_gathered
from rlhf_pipeline.policies.causal_lm import CausalLMPolicy
from rlhf_pipeline.replay.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.replay.storage import TrajectoryStorage
from rlhf_pipeline.run_lock import run_lock
from rlhf_pipeline.run_log import log_file, named_disk_errors
from rlhf_pipeline.run_loop import Loop, Reason, tell
from rlhf_pipeline.run_progress import MetricsFile, Progress
from rlhf_pipeline.run_record import check_folder, check_processes, check_unchanged, make_record, write_record
from rlhf_pipeline.runtime_build import build_loss, build_policy
from rlhf_pipeline.runtime_state import restore, save_run
from rlhf_pipeline.signals import StopRequest, stop_on_signals
from trajectory_store import Schema


@dataclass(frozen=True, kw_only=True)
class ReplayParts:
    """The live objects of a run that collects nothing."""

    buffer: TrajectoryReplayBuffer
    learner: Learner

    def write_path_state(self) -> dict[str, Any]:
        """The write path of such a run has no state."""
        return {"kl_controller": None}

    def load_write_path_state(self, state: dict[str, Any]) -> None:
        """Nothing to put back."""


def replay_stores(
    pipeline: Pipeline,
    *,
    run_dir: Path,
    seed: int = 0,
    device: str = "cpu",
    resume: bool = False,
    definition: str = "",
    overrides: Sequence[tuple[str, str]] = (),
    on_event: EventHandler = ignore_events,
) -> RunFinished:
    """Learn from the stores that `pipeline.replay` names, to the definition's end or until a signal.

    First the chosen trajectories are copied into the run's own store, those that lack log-probs or an advantage
    through the write path. Then every step learns from some of them: which is a function of the gathered store, the
    seed and the step.

    Args:
        pipeline: the definition, overrides applied; `replay` is set.
        run_dir: the run folder; must not exist, unless `resume`.
        seed: seeds the model made from scratch and every batch.
        device: where the model lives.
        resume: go on with the gathering where it stopped, or from the newest checkpoint. On a CPU the weights come out
            as in a straight run, bit for bit. What was chosen at the first start stays chosen, though stores may have
            grown.
        definition: where the definition came from, for `config.json`.
        overrides: the `--set` pairs already applied, for `config.json`.
        on_event: is told of the start, every step, notices and the end.

    Returns:
        The last event: why the run stopped and what it learned from.

    Raises:
        RunExistsError: the folder exists (without `resume`) or another process uses it.
        MissingPathError: a store is not there, or the folder (with `resume`), or the model.
        RunMismatchError: the definition differs from the one that the run was started with.
        DefinitionError: no store is named, or a filter or weight cannot be used.
        DataError: nothing is left to learn from, or the policy cannot read it.
        RunStorageError: the disk is full; everything gathered is still there.
    """
    started = time.perf_counter()
    if pipeline.replay is None:
        raise DefinitionError("the definition has no replay=Replay(...): it does not learn from stores.")
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise DefinitionError("learning from stores takes one process: start it without torchrun.")
    check_folder(run_dir, resume=resume)
    check_processes(run_dir, several=False)
    check_unchanged(run_dir, pipeline, seed)
    policy = build_policy(pipeline, seed=seed, device=device)
    policy.scoring_layout = pipeline.learn.layout  # scored by the code path of the update
    limits = limits_of(policy)
    choice = Choice.load(run_dir) or choose(pipeline.replay, limits)
    schema = None if gathered(run_dir) is not None else gather_schema(choice)
    record = make_record(pipeline, definition=definition, overrides=overrides, seed=seed, device=device)
    with named_disk_errors(run_dir), run_lock(run_dir), log_file(run_dir / "log.txt"):
        check_folder(run_dir, resume=resume)  # again under the lock: another process may have been quicker
        write_record(run_dir, record)
        if Choice.load(run_dir) is None:
            choice.save(run_dir)
        with _store(pipeline, run_dir, schema) as storage, stop_on_signals() as stop:
            progress, reason = Progress(), cast("Reason", "interrupted")
            gatherer = Gatherer(
                pipeline, policy, choice, storage.store, limits=limits, say=functools.partial(_say, on_event)
            )
            if gathered(run_dir) is not None or _gather(gatherer, run_dir, stop):
                storage.refresh()
                parts = _build(pipeline, policy, storage, run_dir=run_dir, seed=seed)
                progress = restore(run_dir, parts)
                reason = _learn(pipeline, pipeline.replay, parts, progress, run_dir, stop, on_event)
            finished = RunFinished(
                run_dir=run_dir,
                reason=reason,
                steps=progress.step,
                seconds=time.perf_counter() - started,
                first_reward=progress.first_reward,
                last_reward=progress.last_reward,
                num_trajectories=len(storage.store),
            )
    on_event(finished)
    return finished


def limits_of(policy: CausalLMPolicy) -> Limits:
    """Return what a policy can read."""
    model: Any = policy.model
    config = (model.get_base_model() if hasattr(model, "get_base_model") else model).config.get_text_config(
        decoder=True
    )
    return Limits(
        vocabulary=int(policy.head_weight.shape[0]), positions=getattr(config, "max_position_embeddings", None)
    )


@contextmanager
def _store(pipeline: Pipeline, run_dir: Path, schema: Schema | None) -> Iterator[TrajectoryStorage]:
    """Open the run's store. It holds all that was chosen: `buffer.max_trajectories` is about what is collected."""
    storage = TrajectoryStorage(
        run_dir / "store", backend=pipeline.buffer.backend, durability=pipeline.buffer.durability, schema=schema
    )
    try:
        yield storage
    finally:
        storage.close()


def _gather(gatherer: Gatherer, run_dir: Path, stop: StopRequest) -> bool:
    """Gather what is missing; False if a signal stopped it before the end."""
    counts = gatherer.run(lambda: bool(stop))
    if counts is None:
        return False
    gatherer.target.flush()
    mark_gathered(run_dir, counts.to_json())
    gatherer.say(_what_was_gathered(gatherer.choice, counts))
    return True


def _what_was_gathered(choice: Choice, counts: GatherCounts) -> str:
    num = len(choice.sources)
    said = [f"gathered {counts.trajectories:,} trajectories of {num} store{'s' if num > 1 else ''}"]
    ungraded = sum(source.num_ungraded for source in choice.sources)
    repeated = sum(source.num_repeated for source in choice.sources)
    for figure, what in (
        (counts.behaviour_scored, "got behaviour log-probs, of the initial policy"),
        (counts.reference_scored, "got reference log-probs"),
        (counts.advantages, "got an advantage"),
        (counts.dropped, "of groups without spread were dropped"),
        (ungraded, "have no reward and were left out"),
        (repeated, "are stored again later and were left out"),
    ):
        if figure:
            said.append(f"{figure:,} {what}")
    return "; ".join(said)


def _build(
    pipeline: Pipeline, policy: CausalLMPolicy, storage: TrajectoryStorage, *, run_dir: Path, seed: int
) -> ReplayParts:
    buffer = TrajectoryReplayBuffer(storage=storage, seed=seed)
    learner = Learner(
        policy=policy,
        loss=build_loss(pipeline, policy),
        buffer=buffer,
        config=pipeline.learn,
        max_staleness=pipeline.buffer.max_staleness,
        max_completion_tokens=pipeline.collect.max_new_tokens,
        ledger=Ledger(run_dir / "ledger.jsonl"),
        seed=seed,
        may_be_empty=pipeline.write.zero_variance == "drop",
        sample=pipeline.sample,
        batch_size=pipeline.collect.rollout_size,
    )
    return ReplayParts(buffer=buffer, learner=learner)


def _learn(
    pipeline: Pipeline,
    replay: Replay,
    parts: ReplayParts,
    progress: Progress,
    run_dir: Path,
    stop: StopRequest,
    on_event: EventHandler,
) -> Reason:
    steps = _RecordedSteps(pipeline, parts) if replay.recorded_order else _DrawnSteps(pipeline, replay, parts)
    total_steps = pipeline.learn.steps if steps.last is None else min(pipeline.learn.steps, steps.last)
    on_event = with_logger(pipeline.learn.logger, run_dir, on_event)
    on_event(
        RunStarted(
            run_dir=run_dir,
            num_parameters=sum(p.numel() for p in parts.learner.policy.parameters()),
            first_step=progress.step,
            total_steps=total_steps,
        )
    )
    loop = Loop(
        run_dir=run_dir,
        learn=pipeline.learn,
        learner=parts.learner,
        progress=progress,
        total_steps=total_steps,
        save=lambda: save_run(run_dir, parts, progress, keep=pipeline.learn.keep_checkpoints),
        stop=stop,
        on_event=on_event,
    )
    return loop.run(lambda metrics_file: steps.take(loop, metrics_file))


class _RecordedSteps:
    """Step k learns from what the weights of version k - 1 may learn from, as the run that filled the store did."""

    def __init__(self, pipeline: Pipeline, parts: ReplayParts) -> None:
        store = parts.buffer.store
        versions = np.asarray(store.read_scalars("policy_version"))
        order = np.argsort(versions, kind="stable")
        self._versions, self._rewards = versions[order], store.read_scalars("task_reward")[order]
        self.last: int | None = None
        if pipeline.write.zero_variance != "drop":  # else a rollout may have left nothing, the last one too
            self.last = int(self._versions[-1]) + pipeline.learn.updates_per_rollout
            self._check(min(pipeline.learn.steps, self.last), pipeline.buffer.max_staleness)

    def _check(self, num_steps: int, max_staleness: int) -> None:
        now = np.arange(num_steps)
        found = np.searchsorted(self._versions, now, "right") - np.searchsorted(self._versions, now - max_staleness)
        lacking = np.flatnonzero(found == 0)
        if len(lacking):
            step = int(lacking[0]) + 1
            raise DataError(
                f"recorded order: step {step} learns from trajectories of policy versions "
                f"{max(step - 1 - max_staleness, 0)} to {step - 1}, and there are none; the store has versions "
                f"{self._versions[0]} to {self._versions[-1]}. Were they evicted, or left out by a filter? To learn "
                "from what is there in another order: --set replay.recorded_order=false"
            )

    def take(self, loop: Loop, metrics_file: MetricsFile) -> None:
        """Take the next step. Its reward is that of the rollout which the run had just collected, if it had."""
        version = loop.progress.step
        first, last = np.searchsorted(self._versions, [version, version + 1]).tolist()
        reward = float(np.nanmean(self._rewards[first:last], dtype=np.float64)) if last > first else None
        _step(loop, metrics_file, reward)


class _DrawnSteps:
    """A step learns from a batch that is drawn from all that was gathered."""

    def __init__(self, pipeline: Pipeline, replay: Replay, parts: ReplayParts) -> None:
        self._store = parts.buffer.store
        self._batches = Batches(
            self._store,
            replay=replay,
            sample=pipeline.sample,
            batch_size=pipeline.collect.rollout_size,
            seed=parts.learner.seed,
            ledger=parts.learner.ledger,
        )
        self.last = self._batches.last_step

    def take(self, loop: Loop, metrics_file: MetricsFile) -> None:
        """Take the next step. Its reward is the mean of the rewards stored with its trajectories."""
        row_ids, ages = self._batches.rows(loop.progress.step + 1)
        reward = float(np.mean(self._store.read_scalars("task_reward", row_ids), dtype=np.float64))
        newest = {"newest_version": self._batches.newest}
        _step(loop, metrics_file, reward, row_ids=row_ids, ages=ages, ledger_fields=newest)


def _step(loop: Loop, metrics_file: MetricsFile, task_reward: float | None, **chosen: Any) -> None:
    if task_reward is not None:
        loop.progress.note(task_reward, loop.learn.stop_window)
    nothing_collected = dict.fromkeys(("num_failed", "rollout_s", "tokens_per_s"))
    loop.step(metrics_file, {"rollout": None, "task_reward": task_reward, **nothing_collected}, **chosen)


def _say(on_event: EventHandler, text: str) -> None:
    tell(on_event, text, level="info")
