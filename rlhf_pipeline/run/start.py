"""One run, whole: build what a definition says, loop, save, resume."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rlhf_pipeline.collectors.collector import Rollout
from rlhf_pipeline.config import Learn, Pipeline
from rlhf_pipeline.run.build import Parts, build_models, build_parts
from rlhf_pipeline.run.events import EventHandler, RunFinished, RunStarted, ignore_events
from rlhf_pipeline.run.folder import check_folder, check_processes, check_unchanged, make_record, write_record
from rlhf_pipeline.run.locks import run_lock
from rlhf_pipeline.run.log import log_file, named_disk_errors
from rlhf_pipeline.run.loggers import with_logger
from rlhf_pipeline.run.loop import Loop, tell
from rlhf_pipeline.run.progress import Progress
from rlhf_pipeline.run.replay_stores import replay_stores
from rlhf_pipeline.run.rows import StepRows
from rlhf_pipeline.run.signals import stop_on_signals
from rlhf_pipeline.run.state import restore, save_run


def run(
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
    """Run a pipeline to its end, or until SIGINT or SIGTERM asks it to stop after a step.

    A pipeline with `replay` learns from stores and samples nothing; see `replay_stores`.

    Args:
        pipeline: the definition, overrides applied.
        run_dir: the run folder; must not exist, unless `resume`.
        seed: seeds the model made from scratch, the order of the prompts and every completion.
        device: where models live, for example `cpu` or `cuda`.
        resume: go on from the newest checkpoint in `run_dir`. On a CPU the weights come out as in a straight run,
            bit for bit: what was stored since the checkpoint is used again and not sampled anew.
        definition: where the definition came from, for `config.json`.
        overrides: the `--set` pairs already applied, for `config.json`.
        on_event: is told of the start, every step, notices and the end.

    Returns:
        The last event: why the run stopped and what it reached.

    Raises:
        RunExistsError: the folder exists (without `resume`) or another process uses it.
        MissingPathError: the folder is not there (with `resume`), or the model or the prompt file is not.
        RunMismatchError: the definition differs from the one that the run was started with.
        RunStorageError: the disk is full; everything acknowledged is still there.
        StoreError: the store refused a rollout; everything acknowledged is still there.
        RewardError: every reward call of a rollout failed.
    """
    if pipeline.replay is not None:
        return replay_stores(
            pipeline,
            run_dir=run_dir,
            seed=seed,
            device=device,
            resume=resume,
            definition=definition,
            overrides=overrides,
            on_event=on_event,
        )
    started = time.perf_counter()
    check_folder(run_dir, resume=resume)
    check_processes(run_dir, several=False)
    check_unchanged(run_dir, pipeline, seed)
    models = build_models(pipeline, seed=seed, device=device)
    pipeline.prompts.prompt(0, seed)  # reads and checks the whole prompt file before anything is made
    record = make_record(pipeline, definition=definition, overrides=overrides, seed=seed, device=device)
    with named_disk_errors(run_dir), run_lock(run_dir), log_file(run_dir / "log.txt"):
        check_folder(run_dir, resume=resume)  # again under the lock: another process may have been quicker
        write_record(run_dir, record)
        with build_parts(pipeline, models, run_dir=run_dir, seed=seed) as parts, stop_on_signals() as stop:
            progress = restore(run_dir, parts, on_event)
            on_event = with_logger(pipeline.learn.logger, run_dir, on_event)
            on_event(
                RunStarted(
                    run_dir=run_dir,
                    num_parameters=sum(p.numel() for p in models.policy.parameters()),
                    first_step=progress.step,
                    total_steps=pipeline.learn.steps,
                )
            )
            loop = Loop(
                run_dir=run_dir,
                learn=pipeline.learn,
                learner=parts.learner,
                progress=progress,
                total_steps=pipeline.learn.steps,
                save=lambda: save_run(run_dir, parts, progress, keep=pipeline.learn.keep_checkpoints),
                stop=stop,
                on_event=on_event,
            )
            reason = loop.run(
                lambda metrics_file: _one_step(parts, loop, metrics_file),
                reached=lambda: _has_reached_its_target(pipeline.learn, progress),
            )
            finished = RunFinished(
                run_dir=run_dir,
                reason=reason,
                steps=progress.step,
                seconds=time.perf_counter() - started,
                first_reward=progress.first_reward,
                last_reward=progress.last_reward,
                num_trajectories=len(parts.buffer.store),
            )
    on_event(finished)
    return finished


def _has_reached_its_target(learn: Learn, progress: Progress) -> bool:
    at_rollout = progress.step % learn.updates_per_rollout == 0
    return at_rollout and progress.reached(learn.stop_at_reward, learn.stop_window)


def _one_step(parts: Parts, loop: Loop, metrics_file: StepRows) -> None:
    learn, progress = loop.learn, loop.progress
    rollout_index, update = divmod(progress.step, learn.updates_per_rollout)
    rollout: Rollout | None = None
    if update == 0:
        rollout = parts.collector.collect(rollout_index, policy_version=progress.step)
        progress.note(rollout.task_reward, learn.stop_window)
        if rollout.num_failed:
            tell(
                loop.on_event,
                f"rollout {rollout_index}: {rollout.num_failed} of {rollout.num_trajectories} reward calls failed; "
                f"those trajectories are stored and not learned from."
                + (f" First error: {rollout.first_error}" if rollout.first_error else ""),
            )
    about = {
        "rollout": rollout_index,
        "task_reward": rollout.task_reward if rollout else None,
        "num_failed": rollout.num_failed if rollout else None,
        "rollout_s": rollout.seconds if rollout else None,
        "tokens_per_s": rollout.num_tokens / rollout.seconds if rollout and rollout.num_tokens else None,
        **parts.write_path_metrics(),
    }
    loop.step(metrics_file, about)
