"""The loop of every run, whatever its steps learn from: take a step, write its line, save, stop."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from rlhf_pipeline.errors import DataError, RunStorageError, StopAskedError
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.run.checkpoint import (
    CheckpointWriter,
    checkpoint_path,
    load_checkpoint,
    newest_checkpoint,
    outdated_checkpoints,
)
from rlhf_pipeline.run.choice_record import RESTORE
from rlhf_pipeline.run.disk import DiskWatch
from rlhf_pipeline.run.evaluation import Evaluations
from rlhf_pipeline.run.events import EventHandler, RepeatedNotices, RunFinished, RunStarted, StepDone, notify
from rlhf_pipeline.run.files import sync_path
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.freed_memory import FreedMemory
from rlhf_pipeline.run.loggers import SAMPLE, with_logger
from rlhf_pipeline.run.record import Setup
from rlhf_pipeline.run.repeated_rows import check_repeated, check_served, named_damage, served_rows
from rlhf_pipeline.run.rows import StepRows, without_nulls
from rlhf_pipeline.run.signals import StopRequest

Reason = Literal["target", "steps", "interrupted"]


@dataclass(kw_only=True)
class Progress:
    """How far a run is; part of each checkpoint."""

    step: int = 0
    first_reward: float | None = None
    last_reward: float | None = None
    recent_rewards: list[float] = field(default_factory=list[float])

    def note(self, task_reward: float, window: int) -> None:
        """Record the mean reward of the rollout that the next step learns from."""
        if self.first_reward is None:
            self.first_reward = task_reward
        self.last_reward = task_reward
        self.recent_rewards = list(deque([*self.recent_rewards, task_reward], maxlen=window))

    def reached(self, target: float | None, window: int) -> bool:
        """Return True if the last `window` rollouts reach the target on average."""
        recent = self.recent_rewards[-window:]
        return target is not None and len(recent) == window and sum(recent) / window >= target


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """The trajectories of one step, and further fields of its metrics line."""

    task_reward: float | None
    """Mean reward of the rollout that the step begins; None if it begins none or the reward is unknown."""
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    row_ids: np.ndarray | None = None
    """int64 [n]; None leaves the choice to the learner."""
    ages: np.ndarray | None = None
    """int64 [n], the ages of these rows, if the stored policy version does not determine them."""
    admitted: np.ndarray | None = None
    """int64 [n], the rows that this step and later steps may use, if more than `row_ids`; see `Learner.step`."""
    ledger_fields: Mapping[str, object] | None = None


class Source(ABC):
    """The source of a run's batches: rollouts made here, arrivals, draws from stores, or a recorded run.

    A subclass that defines only `next` has no state: a step's batch is a function of the store and the step.
    """

    last: int | None = None
    """The step after which there is nothing to learn from, or None if unknown."""
    samples_again: bool = False
    """Whether a resumed run samples again the rollouts since its checkpoint that a ring has evicted."""

    @abstractmethod
    def next(self, step: int, stop: StopRequest) -> StepBatch | None:
        """Return the batch of a step, or None if a signal asked to stop before there was one."""

    def begins(self, step: int) -> bool:
        """Return whether a step is the first on a rollout; the run checks before it whether its target is reached."""
        return False

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, JSON-ready."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:  # noqa: B027 - there may be none
        """Restore what `state` returned."""


def nothing_more(step: int, reason: Reason | None) -> None:
    """Do nothing after a step."""


class Loop:
    """The steps of one run.

    Args:
        asked: the run; its settings are recorded once its first step with them is taken.
        run: the run folder.
        learner: takes the steps; its settings determine when to stop and to save.
        source: gives their batches.
        stop: a signal's request to stop after a step.
        on_event: receives the start, the steps and the notices.
        after: called with the number of steps taken, at the start, after every step, and at the end with the reason;
            a learner with collectors publishes its weights here.
        evaluator: evaluates the weights of some steps; None evaluates nothing.
        started: when the run began, by `time.perf_counter`; None means now.
    """

    def __init__(
        self,
        setup: Setup,
        run: RunFolder,
        learner: Learner,
        source: Source,
        *,
        stop: StopRequest,
        on_event: EventHandler,
        after: Callable[[int, Reason | None], None] = nothing_more,
        evaluator: Evaluations | None = None,
        started: float | None = None,
    ) -> None:
        self.folder = run
        self.learn = learner.config
        self.learner = learner
        self.source = source
        self.total_steps = self.learn.steps if source.last is None else min(self.learn.steps, source.last)
        """The last step of the run."""
        self.stop = stop
        self.on_event = with_logger(setup, run, on_event, self._samples)
        self.after = after
        self.evaluator = evaluator
        self.progress = Progress()
        self.metrics = run.metrics
        self.metrics.refresh()
        self.num_parameters = sum(parameter.numel() for parameter in learner.policy.parameters())
        allowed = setup.pipeline.buffer.max_bytes
        self._disk = (
            None
            if run.place.is_remote
            else DiskWatch(run.path, allowed, lambda warning: notify(on_event, warning), written=self._written)
        )
        self._repeated = RepeatedNotices()
        self._evicts_nothing = setup.pipeline.buffer.max_trajectories is None
        self._samples_all_again = (
            source.samples_again
            and setup.pipeline.sample.strategy == "fresh"
            and setup.pipeline.max_staleness < self.learn.steps_per_rollout
        )
        """Whether a resumed run needs no trajectory from before its checkpoint, if the next step begins a rollout."""
        self._unrecorded: Setup | None = setup
        self._writer = CheckpointWriter(run.checkpoints, learner, on_notice=lambda notice: notify(on_event, notice))
        self._begun: int | None = None
        """The step of the newest checkpoint, finished or not, which is not saved again."""
        self._saved: int | None = None
        """The step of the newest finished checkpoint."""
        self._started = time.perf_counter() if started is None else started

    def restore(self) -> None:
        """Load the newest whole checkpoint, if there are checkpoints.

        Raises:
            DataError: there are checkpoints, but none is complete.
        """
        self.folder.place.write_rows()
        self.folder.saved()
        newest = newest_checkpoint(
            self.folder.checkpoints, skip=lambda message: notify(self.on_event, message), bring=self.folder.bring
        )
        if newest is None:
            torch.manual_seed(self.learner.seed)  # a run's random numbers depend only on its seed
            return
        state = load_checkpoint(newest, self.learner, checked=True)
        self.progress = Progress(**state["progress"])
        if state["source"]:  # else the checkpoint is another run's, with which this one begins
            self.source.load_state(state["source"])
        self._begun = self._saved = self.progress.step
        self.folder.ledger.recheck()
        self.metrics.recheck()
        problem = self.folder.lines_problem(self.progress.step, state.get("lines", {}))
        if problem is not None:
            raise DataError(f"the checkpoint {newest} does not match its run: {problem}. {RESTORE}")
        storage, oldest = self.learner.buffer.trajectories, self.learner.max_staleness
        with named_damage(self.folder, self.progress.step, self._saved):
            check_served(storage.store, state.get("rows", {}))
            check_repeated(self.folder, storage, self.progress.step, max_staleness=oldest)

    def run(self) -> Reason:
        """Take steps until the end, the target or a signal.

        Whatever ends it, a checkpoint that was begun is written before it returns or raises.
        """
        try:
            return self._run()
        finally:
            self._writer.wait()

    def _run(self) -> Reason:
        progress, freed = self.progress, FreedMemory()
        self.on_event(
            RunStarted(
                run_dir=self.folder.address,
                num_parameters=self.num_parameters,
                first_step=progress.step,
                total_steps=self.total_steps,
            )
        )
        if self._begun is None:
            self._save()  # the untrained weights, so that a run killed in its first steps can resume
            self._finish_checkpoint()
        self.after(progress.step, None)
        try:
            if progress.step == 0:
                self._evaluate(0)
            while (reason := self._ended()) is None:
                if not self._writer.is_writing:
                    self._finish_checkpoint()
                if self._disk is not None:
                    self._look_at(self._disk)
                with named_damage(self.folder, progress.step, self._saved):
                    batch = self.source.next(progress.step + 1, self.stop)
                if batch is None:
                    reason = "interrupted"
                    break
                self._step(batch)
                self.after(progress.step, None)
                freed.trim()
                if progress.step % self.learn.checkpoint_every == 0 or progress.step in self._retained_steps(
                    progress.step
                ):
                    self._save()
            self._save()
            self._finish_checkpoint()
            if self.evaluator is not None and reason != "interrupted":
                reason = reason if self.evaluator.wait(self.stop) else "interrupted"
                self._drop(progress.step)
                self._finish_checkpoint()
        except StopAskedError as error:  # the step being evaluated has no line yet, and is taken again
            notify(self.on_event, f"the evaluation was cancelled: {error}. --resume repeats it.")
            reason = "interrupted"
            self._finish_checkpoint()
        self.after(progress.step, reason)
        self.folder.flush()
        return reason

    def finished(self, reason: Reason, num_trajectories: int) -> RunFinished:
        """Return the event that ends the run."""
        return RunFinished(
            run_dir=self.folder.address,
            reason=reason,
            steps=self.progress.step,
            seconds=time.perf_counter() - self._started,
            first_reward=self.progress.first_reward,
            last_reward=self.progress.last_reward,
            num_trajectories=num_trajectories,
        )

    def _samples(self, step: int, most: int) -> list[list[Any]]:
        """Return prompt, completion, reward and advantage of the first trajectories that a step learned from."""
        planned, store = self.learner.ledger.planned(step), self.learner.buffer.store
        if planned is None:
            return []
        rows = np.asarray(planned["row_ids"][:most], np.int64)
        sampled = store.read(rows, [name for name in SAMPLE if name in store.schema])
        columns = [sampled.get(name, [""] * len(rows)) for name in SAMPLE]
        return [[cell if isinstance(cell, str) else float(cell) for cell in row] for row in zip(*columns, strict=True)]

    def _ended(self) -> Reason | None:
        learn, progress = self.learn, self.progress
        if self.source.begins(progress.step + 1) and progress.reached(learn.stop_at_reward, learn.stop_window):
            return "target"
        if progress.step >= self.total_steps:
            return "steps"
        return "interrupted" if self.stop else None

    def _step(self, batch: StepBatch) -> None:
        """Take one optimizer step, write its line and report it."""
        progress, learner = self.progress, self.learner
        if batch.task_reward is not None:
            progress.note(batch.task_reward, self.learn.stop_window)
        number = progress.step + 1
        with named_damage(self.folder, progress.step, self._saved):
            figures = learner.step(
                number,
                row_ids=batch.row_ids,
                ages=batch.ages,
                admitted=batch.admitted,
                ledger_fields=batch.ledger_fields,
            )
        if self._unrecorded is not None:
            self._settle(self._unrecorded, number)
        for notice in learner.take_notices():
            summary = self._repeated.text_of(notice)
            if summary is not None:
                notify(self.on_event, summary)
        row = {"step": number, "task_reward": batch.task_reward, **batch.about, "time": time.time(), **figures}
        row |= self.folder.place.traffic(learner.buffer.store)
        row |= self._evaluate(number)
        if number > self.metrics.last_step:  # a step that is taken again has its line already
            self.metrics.append(without_nulls(row))
        progress.step = number
        self.on_event(StepDone(step=number, total_steps=self.total_steps, metrics=row))

    def _written(self) -> int:
        """Return the bytes of all commits that this process has seen, and of the lines of all steps."""
        files = (self.folder.metrics_file, self.folder.ledger_file)
        lines = sum(file.stat().st_size for file in files if file.is_file())
        return self.learner.buffer.store.used_bytes + lines

    def _look_at(self, disk: DiskWatch) -> None:
        try:
            disk.look()
        except RunStorageError:
            self._save()
            self._finish_checkpoint()
            self.folder.flush()
            raise

    def _settle(self, setup: Setup, step: int) -> None:
        """Record the settings of this process once its first step is taken, before that step's line is written."""
        if self.folder.record.changed_from(setup.pipeline, step, last_step=self.folder.metrics.last_step):
            self.metrics.drop_from(step)  # figures of steps that were taken with other settings
        self.folder.record.write(setup, first_step=step)
        self._unrecorded = None

    def _evaluate(self, step: int) -> Mapping[str, float | int | None]:
        """Evaluate the weights of a step if that is due; return the figures."""
        return {} if self.evaluator is None else self.evaluator.after(step, self.stop)

    def _retained_steps(self, step: int) -> set[int]:
        """Return the steps up to this one whose checkpoints are kept beside the newest."""
        return set() if self.evaluator is None else self.evaluator.retained_steps(step)

    def _drop(self, step: int) -> None:
        """Drop, for all processes, the checkpoints that are no longer kept; that of this step is the newest."""
        keep, besides = self.learn.keep_checkpoints, self._retained_steps(step)
        outdated = outdated_checkpoints(self.folder.checkpoints, step, keep=keep, besides=besides)
        self._writer.remove(outdated)
        for path in outdated:
            self.folder.drop(path)

    def _save(self) -> None:
        """Begin to write a checkpoint of the last step."""
        step, store = self.progress.step, self.learner.buffer.store
        if self._begun == step:
            return
        self._finish_checkpoint()
        oldest = self.learner.max_staleness
        rows = served_rows(self.folder, store, step, max_staleness=oldest) if self._evicts_nothing else {}
        self._writer.begin(
            step,
            state={
                "progress": vars(self.progress),
                "source": self.source.state(),
                "rows": rows,
                "lines": self.folder.lines_of(step),
            },
            sync=partial(self._sync, self.folder.rows(self.folder.ledger_file)),
        )
        self._begun = step
        if not (self._evicts_nothing or (self._samples_all_again and self.source.begins(step + 1))):
            # Until it is finished, a resume starts from the one before it. The ring must not evict what that needs.
            self._finish_checkpoint()

    def _sync(self, ledger: StepRows) -> None:
        """Wait until everything that a checkpoint refers to is on the disk; the thread that writes it calls this."""
        self.learner.buffer.store.sync()
        if self.evaluator is not None:
            self.evaluator.sync()
        self.metrics.sync()
        ledger.sync()
        sync_path(self.folder.path)

    def _finish_checkpoint(self) -> None:
        """Wait for the checkpoint that was begun, if there is one; it counts from now on.

        Raises:
            RunStorageError: it could not be written.
        """
        step = self._writer.finish()
        if step is None:
            return
        self.folder.keep(checkpoint_path(self.folder.checkpoints, step))
        self._drop(step)
        self._saved = step
        if self._disk is not None:
            self._disk.note_checkpoint(checkpoint_path(self.folder.checkpoints, step))
