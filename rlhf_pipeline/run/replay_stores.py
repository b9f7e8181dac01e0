"""A run that learns from stores alone: gather, then take steps; the folder is that of any other run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from rlhf_pipeline.config import Pipeline, Replay
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.files import write_atomically
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.policies.causal_lm import CausalLMPolicy
from rlhf_pipeline.replay.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.replay.storage import TrajectoryStorage
from rlhf_pipeline.run.build import build_loss, build_policy
from rlhf_pipeline.run.choice import Choice, Limits, choose, gathered, mark_gathered
from rlhf_pipeline.run.events import EventHandler, RunFinished, RunStarted, ignore_events
from rlhf_pipeline.run.folder import check_folder, check_processes, check_unchanged, make_record, write_record
from rlhf_pipeline.run.gather import GatherCounts, Gatherer, gather_schema
from rlhf_pipeline.run.ledger import Ledger
from rlhf_pipeline.run.locks import run_lock
from rlhf_pipeline.run.log import log_file, named_disk_errors
from rlhf_pipeline.run.loggers import with_logger
from rlhf_pipeline.run.loop import Loop, Reason, tell
from rlhf_pipeline.run.progress import Progress
from rlhf_pipeline.run.signals import StopRequest, stop_on_signals
from rlhf_pipeline.run.sources import RECORDED_LEDGER, ledger_to_follow, steps_of
from rlhf_pipeline.run.state import restore, save_run
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
            followed = ledger_to_follow(Path(choice.sources[0].path)) if pipeline.replay.recorded_order else None
            if followed is not None:
                write_atomically(run_dir / RECORDED_LEDGER, followed)
            choice.save(run_dir)
        with _store(pipeline, run_dir, schema) as storage, stop_on_signals() as stop:
            progress, reason = Progress(), cast("Reason", "interrupted")
            gatherer = Gatherer(pipeline, policy, choice, storage.store, limits=limits, on_event=on_event)
            if gathered(run_dir) is not None or _gather(gatherer, run_dir, stop):
                storage.refresh()
                parts = _build(pipeline, policy, storage, run_dir=run_dir, seed=seed)
                progress = restore(run_dir, parts, on_event)
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
    return Limits(vocabulary=int(policy.head_weight.shape[0]), positions=policy.max_positions)


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
    tell(gatherer.on_event, _what_was_gathered(gatherer.choice, counts), level="info")
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
    steps = steps_of(pipeline, replay, parts.learner, run_dir)
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
