"""Evaluations that collectors do: the learner asks for them with the weights that it publishes, and reads their rows.

The learner does not wait for a result before its next step. Until it arrives, the published weights of the step are
kept, and its checkpoint as well, which may turn out to be the best.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.evaluation import Evaluations, EvaluationSet, FirstPrompts, evaluation_storage
from rlhf_pipeline.run.evaluation_rows import Figures, of_set
from rlhf_pipeline.run.events import EventHandler
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.heartbeat import Heartbeat, Pause
from rlhf_pipeline.run.processes.run_files import ALONE_S, report_if_alone
from rlhf_pipeline.run.processes.weights import read_published
from rlhf_pipeline.run.signals import StopRequest


class RemoteEvaluations(Evaluations):
    """The learner's record of a run's evaluations; created by `open_awaited`."""

    def __init__(
        self, sets: Sequence[EvaluationSet], *, run: RunFolder, heartbeat: Heartbeat, on_event: EventHandler
    ) -> None:
        super().__init__(sets, on_event)
        self._run = run
        self._heartbeat = heartbeat
        before = read_published(run)
        self.requested = {} if before is None else before.evaluate

    def ask(self, step: int, digest: int) -> dict[int, int]:
        """Return what to ask for with the newest weights, those of a step: digests by version."""
        self.requested = {version: requested for version, requested in self.requested.items() if version < step}
        if self.is_due(step) and not self.has(step):
            self.requested[step] = digest
        return dict(self.requested)

    def after(self, step: int, stop: StopRequest) -> Figures:
        """Return the figures of the newest evaluation that has arrived of each set, with its step."""
        return self._arrived() if step else {}

    def retained_steps(self, step: int) -> set[int]:
        """Return the best step, and those that may turn out to be."""
        return super().retained_steps(step) | (set() if self._deciding is None else {*self.requested})

    def wait(self, stop: StopRequest) -> bool:
        """Wait for all that was asked for."""
        pause, alone_at = Pause(self._run.patience_s), time.monotonic() + ALONE_S
        self._arrived()
        while self.requested and not stop:
            self._heartbeat.beat("waiting for an evaluation", step=min(self.requested))
            if time.monotonic() > alone_at:
                alone_at = float("inf")
                report_if_alone(self._run, "an evaluation", self._on_event)
            pause.sleep()
            self._arrived()
        return not self.requested

    def _arrived(self) -> Figures:
        """Report the evaluations stored since the last call; return the figures of each set's newest one."""
        all_figures: Figures = {}
        for evaluation_set in self.sets if self.requested else ():
            evaluation_set.store.refresh()
            for step, figures in evaluation_set.new():
                self._report(evaluation_set, step, figures, newest=max(evaluation_set.values))
                all_figures |= of_set(evaluation_set.name, {"evaluation/step": step, **figures})
        self.requested = {step: digest for step, digest in self.requested.items() if not self.has(step)}
        return all_figures


@contextmanager
def open_awaited(
    pipeline: Pipeline, policy: TokenPolicy, *, run: RunFolder, heartbeat: Heartbeat, on_event: EventHandler
) -> Iterator[RemoteEvaluations | None]:
    """Open what a learner knows of evaluations, or None if the definition does not ask for any."""
    if pipeline.evaluate is None:
        yield None
        return
    with ExitStack() as resources:
        sets: list[EvaluationSet] = []
        for name, evaluate in pipeline.evaluations.items():
            size = FirstPrompts.of(pipeline, evaluate, policy, on_event).count * evaluate.group_size
            storage = resources.enter_context(closing(evaluation_storage(run, pipeline, name)))
            sets.append(EvaluationSet(name, evaluate, storage.store, size=size))
        yield RemoteEvaluations(sets, run=run, heartbeat=heartbeat, on_event=on_event)
