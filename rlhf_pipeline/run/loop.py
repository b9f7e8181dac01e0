"""The loop that every run goes through, whatever a step learns from: take a step, write its line, save, stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlhf_pipeline.config import Learn
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.run.checkpoint import list_checkpoints
from rlhf_pipeline.run.events import EventHandler, Notice, StepDone
from rlhf_pipeline.run.progress import Progress
from rlhf_pipeline.run.rows import StepRows
from rlhf_pipeline.run.signals import StopRequest

logger = logging.getLogger(__name__)

Reason = Literal["target", "steps", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Steps of one run.

    Args:
        run_dir: the run folder.
        learn: when to stop and to save.
        learner: takes the steps.
        progress: how far the run is; changed.
        total_steps: where it ends.
        save: writes a checkpoint.
        stop: a signal's wish to stop after a step.
        on_event: is told of steps and notices.
    """

    run_dir: Path
    learn: Learn
    learner: Learner
    progress: Progress
    total_steps: int
    save: Callable[[], None]
    stop: StopRequest
    on_event: EventHandler

    def run(self, one_step: Callable[[StepRows], None], *, reached: Callable[[], bool] = lambda: False) -> Reason:
        """Take steps until the end, the target or a signal.

        Args:
            one_step: takes the next step, with `step`.
            reached: whether the target is reached; asked before every step.
        """
        learn, progress, saved = self.learn, self.progress, self.progress.step
        metrics_file = StepRows(self.run_dir / "metrics.jsonl")
        if not list_checkpoints(self.run_dir / "checkpoints"):
            self.save()  # the untrained weights: a run killed in its first steps resumes too
        while True:
            reason: Reason
            if reached():
                reason = "target"
            elif progress.step >= self.total_steps:
                reason = "steps"
            elif self.stop:
                reason = "interrupted"
            else:
                one_step(metrics_file)
                if progress.step % learn.checkpoint_every == 0:
                    self.save()
                    saved = progress.step
                continue
            if saved != progress.step:
                self.save()
            return reason

    def step(
        self,
        metrics_file: StepRows,
        about: Mapping[str, Any],
        *,
        row_ids: np.ndarray | None = None,
        ages: np.ndarray | None = None,
        ledger_fields: Mapping[str, object] | None = None,
    ) -> None:
        """Take one optimizer step and write its line.

        Args:
            metrics_file: where the line goes.
            about: what the line says beside the learner's figures, which win.
            row_ids: as for `Learner.step`.
            ages: as for `Learner.step`.
            ledger_fields: as for `Learner.step`.
        """
        take_step(
            self.learner,
            self.progress,
            metrics_file,
            about,
            total_steps=self.total_steps,
            on_event=self.on_event,
            row_ids=row_ids,
            ages=ages,
            ledger_fields=ledger_fields,
        )


def take_step(
    learner: Learner,
    progress: Progress,
    metrics_file: StepRows,
    about: Mapping[str, Any],
    *,
    total_steps: int,
    on_event: EventHandler,
    row_ids: np.ndarray | None = None,
    ages: np.ndarray | None = None,
    ledger_fields: Mapping[str, object] | None = None,
) -> None:
    """Take one optimizer step, write its line and tell of it; the same in a run of one process and of several.

    Args:
        learner: takes the step.
        progress: how far the run is; changed.
        metrics_file: where the line goes.
        about: what the line says beside the learner's figures, which win.
        total_steps: where the run ends.
        on_event: is told of the step and of notices.
        row_ids: as for `Learner.step`.
        ages: as for `Learner.step`.
        ledger_fields: as for `Learner.step`.
    """
    number = progress.step + 1
    planned = learner.ledger.planned(number)
    metrics = learner.step(number, row_ids=row_ids, ages=ages, ledger_fields=ledger_fields)
    if planned is not None and learner.ledger.planned(number) != planned:
        metrics_file.drop_from(number)  # its line and later ones are about steps that will not happen
    for notice in learner.take_notices():
        tell(on_event, notice)
    row = {"step": number, **about, "time": time.time(), **metrics}
    if number > metrics_file.last_step:  # a step that is taken again has its line
        metrics_file.append(row)
    progress.step = number
    on_event(StepDone(step=number, total_steps=total_steps, metrics=row))


def tell(on_event: EventHandler, message: str, *, level: Literal["info", "warning", "progress"] = "warning") -> None:
    """Say something to who looks on, and to the log."""
    logger.log(logging.WARNING if level == "warning" else logging.INFO, message)
    on_event(Notice(message=message, level=level))
