"""One run in one process: check, build the definition's objects, take steps, save, resume."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.build import build_parts, checked_models
from rlhf_pipeline.run.engines import chosen_engine
from rlhf_pipeline.run.evaluation import open_evaluator
from rlhf_pipeline.run.events import EventHandler, RunFinished, ignore_events
from rlhf_pipeline.run.folder import RunFolder, tell
from rlhf_pipeline.run.loop import Loop
from rlhf_pipeline.run.prompt_lengths import sampling_notices
from rlhf_pipeline.run.run import Run
from rlhf_pipeline.run.signals import stop_on_signals
from rlhf_pipeline.run.sources import MadeHere


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
        run_dir: the run folder; must not exist, unless `resume`. A folder that a failed start left is taken over.
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
        StoreError: the store refused a rollout; everything acknowledged is still there.
        RewardError: every reward call of a rollout failed.
    """
    asked = Run(
        pipeline=pipeline,
        run_dir=run_dir,
        seed=seed,
        device=device,
        resume=resume,
        definition=definition,
        overrides=overrides,
    )
    return asked.checked().start(parent=parent, on_event=on_event)


def collect_and_learn(asked: Run, *, parent: int | None, on_event: EventHandler) -> RunFinished:
    """Do the work of `run` for a definition that samples."""
    started, folder, pipeline = time.perf_counter(), RunFolder(asked.run_dir), asked.pipeline
    models = checked_models(asked, folder, on_event)
    with (
        asked.begun(folder, on_event),
        chosen_engine(pipeline, models.policy, run=folder, device=asked.device) as hand_over,
        build_parts(pipeline, models, run=folder, seed=asked.seed, hand_over=hand_over) as parts,
        open_evaluator(
            pipeline, models.policy, run=folder, seed=asked.seed, on_event=on_event, hand_over=hand_over
        ) as evaluator,
        stop_on_signals(parent) as stop,
    ):
        for notice in sampling_notices(pipeline, models.policy):
            tell(on_event, notice)
        source = MadeHere(pipeline, parts, on_event)
        loop = Loop(folder, parts.learner, source, stop=stop, on_event=on_event, evaluator=evaluator, started=started)
        loop.restore()
        finished = loop.finished(loop.run(), len(parts.buffer.store))
    on_event(finished)
    return finished
