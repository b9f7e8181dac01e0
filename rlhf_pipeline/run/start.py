"""One run: the ways to do it, each of which imports torch only when it is taken."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.events import EventHandler, RunFinished, ignore_events
from rlhf_pipeline.run.processes.launch import Launcher
from rlhf_pipeline.run.run import Run


def run(
    pipeline: Pipeline,
    *,
    run_dir: Address,
    seed: int = 0,
    device: str = "cpu",
    resume: bool = False,
    parent: int | None = None,
    definition: str = "",
    overrides: Sequence[tuple[str, str]] = (),
    on_event: EventHandler = ignore_events,
) -> RunFinished:
    """Run a pipeline to its end, or until SIGINT, SIGTERM or SIGHUP asks it to stop after a step.

    A pipeline with `replay` learns from stores and samples nothing; see `replay_stores`.

    Args:
        pipeline: the definition, overrides applied.
        run_dir: the run folder; must not exist, unless `resume`. A folder that a failed start left is reused.
        seed: seeds the model made from scratch, the order of the prompts and every completion.
        device: where models live, for example `cpu` or `cuda`.
        resume: continue from the newest checkpoint in `run_dir`. On a CPU the weights are those of a straight run,
            bit for bit: trajectories stored since the checkpoint are used again and not sampled a second time.
        parent: also stop when this process, which started us, is gone.
        definition: where the definition came from, for `config.json`.
        overrides: the `--set` pairs already applied, for `config.json`.
        on_event: receives the start, every step, notices and the end.

    Returns:
        The last event: why the run stopped and what it reached.

    Raises:
        RunExistsError: the folder exists (without `resume`) or another process uses it.
        MissingPathError: the folder (with `resume`), the model or the prompt file does not exist.
        RunMismatchError: the definition differs from the one that the run was started with.
        DataError: parts of the run are missing or damaged, or a prompt is too long for the model.
        RunStorageError: the disk is full; everything acknowledged is still there.
        StoreError: the store rejected a rollout; everything acknowledged is still there.
        RewardError: every reward call of a rollout failed.
    """
    job = Run(
        pipeline=pipeline,
        run_dir=run_dir,
        seed=seed,
        device=device,
        resume=resume,
        definition=definition,
        overrides=overrides,
    )
    return start(job.checked(), parent=parent, on_event=on_event)


def start(
    job: Run, *, parent: int | None = None, launch: Launcher | None = None, on_event: EventHandler = ignore_events
) -> RunFinished:
    """Do a run to the end, or until a signal asks to stop; see `run.start.run`.

    Args:
        job: the run, checked.
        parent: also stop when this process, which started us, is gone.
        launch: starts the processes of a supervisor; None starts them on this machine.
        on_event: receives the start, every step, notices and the end.
    """
    if job.supervised is not None:
        from rlhf_pipeline.run.processes.supervise import supervise

        return supervise(job, job.supervised, launch=launch, on_event=on_event)
    if job.joins == "learn":
        from rlhf_pipeline.run.processes.learn import learn

        return learn(job, parent=parent, on_event=on_event)
    if job.pipeline.replay is not None:
        from rlhf_pipeline.run.replay_stores import replay_stores

        return replay_stores(job, job.pipeline.replay, on_event=on_event)
    from rlhf_pipeline.run.alone import collect_and_learn

    return collect_and_learn(job, parent=parent, on_event=on_event)
