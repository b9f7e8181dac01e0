"""A run in one process that samples: build the definition's objects, take steps, save, resume."""

from __future__ import annotations

import time

from rlhf_pipeline.run.build import build_parts, checked_models
from rlhf_pipeline.run.engines import chosen_engine
from rlhf_pipeline.run.evaluation import open_evaluator
from rlhf_pipeline.run.events import EventHandler, RunFinished, notify
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.loop import Loop
from rlhf_pipeline.run.prompt_lengths import sampling_notices
from rlhf_pipeline.run.run import Run
from rlhf_pipeline.run.signals import stop_on_signals
from rlhf_pipeline.run.sources import LocalRollouts


def collect_and_learn(job: Run, *, parent: int | None, on_event: EventHandler) -> RunFinished:
    """Do the work of `run` for a definition that samples."""
    started, folder, pipeline = time.perf_counter(), RunFolder(job.run_dir), job.pipeline
    models = checked_models(job, folder, on_event)
    with (
        job.begun(folder, on_event) as heartbeat,
        chosen_engine(pipeline, models.policy, run=folder, device=job.device) as hand_over,
        build_parts(pipeline, models, run=folder, seed=job.seed, hand_over=hand_over) as parts,
        open_evaluator(
            pipeline, models.policy, run=folder, seed=job.seed, on_event=on_event, hand_over=hand_over
        ) as evaluator,
        stop_on_signals(parent) as stop,
    ):
        for notice in sampling_notices(pipeline, models.policy):
            notify(on_event, notice)
        source = LocalRollouts(pipeline, parts, on_event)
        loop = Loop(
            job,
            folder,
            parts.learner,
            source,
            stop=stop,
            on_event=on_event,
            after=heartbeat.beat_step,
            evaluator=evaluator,
            started=started,
        )
        loop.restore()
        finished = loop.finished(loop.run(), len(parts.buffer.store))
    on_event(finished)
    return finished
