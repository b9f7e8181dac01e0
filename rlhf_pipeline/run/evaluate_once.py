"""An evaluation outside a run's steps: of a checkpoint that it has kept, or of a model folder."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.learner.state import read_weights
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.build import build_policy
from rlhf_pipeline.run.disk import named_disk_errors
from rlhf_pipeline.run.engines import chosen_engine
from rlhf_pipeline.run.evaluation import open_evaluator
from rlhf_pipeline.run.evaluation_rows import Figures
from rlhf_pipeline.run.events import EventHandler, ignore_events
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.signals import StopRequest


def evaluate_once(
    pipeline: Pipeline,
    *,
    run_dir: Address,
    checkpoint: Path | None = None,
    step: int = 0,
    seed: int = 0,
    device: str = "cpu",
    on_event: EventHandler = ignore_events,
) -> Figures:
    """Sample and grade completions of the held-out prompts, or read those of this step that are stored already.

    The rows go to the store that a run of this definition would use, so the figures of a step are the run's own.
    """
    folder = RunFolder(run_dir)
    policy = build_policy(pipeline, seed=seed, device=device)
    if checkpoint is not None:
        read_weights(checkpoint, policy=policy, learn=pipeline.learn)
    advice = "Stop that process first."
    with (
        named_disk_errors(folder),
        folder.lock(advice=advice),
        chosen_engine(pipeline, policy, run=folder, device=device) as hand_over,
        open_evaluator(pipeline, policy, run=folder, seed=seed, on_event=on_event, hand_over=hand_over) as evaluator,
    ):
        assert evaluator is not None  # the definition asks for one
        figures = evaluator.evaluate(step, StopRequest())
        evaluator.store.flush()
        folder.flush()
    return figures
