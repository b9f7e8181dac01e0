"""The learner as a separate process: wait for a rollout, learn from it, publish the weights, repeat."""

from __future__ import annotations

import time
from dataclasses import replace

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.run.build import Parts, build_parts, checked_models
from rlhf_pipeline.run.events import EventHandler, RunFinished, ignore_events, notify
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.log_file import write_log
from rlhf_pipeline.run.loop import Loop, Reason
from rlhf_pipeline.run.processes.remote_evaluations import RemoteEvaluations, open_awaited
from rlhf_pipeline.run.processes.run_files import at_work, shared_run
from rlhf_pipeline.run.processes.weights import Published, publish, read_published, weights_problem
from rlhf_pipeline.run.rows import Row
from rlhf_pipeline.run.run import Run
from rlhf_pipeline.run.signals import stop_on_signals
from rlhf_pipeline.run.sources import ArrivedRollouts


def learn(job: Run, *, parent: int | None = None, on_event: EventHandler = ignore_events) -> RunFinished:
    """Learn from the rollouts that `collect` processes store, until the definition's end or a signal.

    Rollouts are taken in the order of their arrival, each for `Learn.steps_per_rollout` steps. The ledger names the
    trajectories of a step before the step is taken, and a restarted learner repeats the steps after its checkpoint
    as the ledger records: on a CPU its weights are then those of a learner that was never killed, bit for bit.

    Args:
        job: the run; its folder is made if absent.
        parent: stop when this process is gone; for a supervisor's child.
        on_event: receives the start, every step, notices and the end.

    Raises:
        RunExistsError: the run has a live learner, or the folder is something else.
        RunMismatchError: the run was started with another definition or seed.
        DataError: parts of the run are missing or damaged, or a prompt is too long for the model.
        RunStorageError: the disk is full; everything acknowledged is still there.
    """
    started, run, pipeline = time.perf_counter(), RunFolder(job.run_dir), job.pipeline
    with (
        stop_on_signals(parent) as stop,
        shared_run(run, job, on_event=on_event, leads=True),
        at_work(run, "learner", progress_timeout_s=job.progress_timeout_s) as heartbeat,
        write_log(run),
    ):
        heartbeat.beat("starting")
        run.place.write_rows()
        # The collectors' write path scores with the reference model; the loss reads what it stored.
        models = replace(checked_models(job, run, on_event), reference=None)
        with (
            build_parts(pipeline, models, run=run, seed=job.seed) as parts,
            run.place.rollouts() as rollouts,
            open_awaited(pipeline, models.policy, run=run, heartbeat=heartbeat, on_event=on_event) as evaluations,
        ):
            source = ArrivedRollouts(pipeline, parts, rollouts, run, heartbeat, on_event)
            publisher = _Publisher(pipeline, parts, source, evaluations, run, on_event)
            loop = Loop(
                job,
                run,
                parts.learner,
                source,
                stop=stop,
                on_event=on_event,
                after=publisher.publish,
                evaluator=evaluations,
                started=started,
            )
            loop.restore()
            heartbeat.facts = {"num_parameters": loop.num_parameters, "first_step": loop.progress.step}
            reason = loop.run()
            parts.buffer.refresh()
            finished = loop.finished(reason, len(parts.buffer.store))
        heartbeat.beat("ended", reason=reason, step=finished.steps)
    on_event(finished)
    return finished


class _Publisher:
    """Publishes the weights of each step, and the end of the run.

    A restarted learner catches up: until it is past the version that it had published before, that stays the newest.
    But if the ledger lacks the step of those weights (a power loss took it), or has another step in its place
    (trajectories that it named are gone), they are not weights of this run and are replaced at once.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        parts: Parts,
        source: ArrivedRollouts,
        evaluations: RemoteEvaluations | None,
        run: RunFolder,
        on_event: EventHandler,
    ) -> None:
        self._updates = pipeline.learn.steps_per_rollout
        self._sync = pipeline.buffer.durability != "process"
        self._parts = parts
        self._ledger = parts.learner.ledger
        self._source = source
        self._evaluations = evaluations
        self._run = run
        self._published, self._row = self._published_before(on_event)
        """The last published weights, or None if they are incomplete, and the ledger's row of their step."""

    def publish(self, step: int, reason: Reason | None) -> None:
        """Publish the weights after a step, unless newer ones are published."""
        finished = None if reason == "interrupted" else reason
        newest = self._newest
        if finished is None and newest is not None and newest.version > step:
            return
        same = newest if newest is not None and newest.version == step else None
        digest = 0 if same is None else same.digest
        published = Published(
            version=step,
            next_version=-(-step // self._updates) * self._updates,
            rollouts_done=len(self._source.done),
            finished=finished,
            write_path=self._parts.write_path_state(),
            digest=digest,
            evaluate={} if self._evaluations is None else self._evaluations.ask(step, digest),
        )
        save = self._parts.policy.save_pretrained if same is None else None
        self._published = publish(self._run, published, save=save, sync=self._sync)
        if self._evaluations is not None:
            self._evaluations.requested = dict(self._published.evaluate)
        self._row = self._ledger.planned(step)
        self._source.note_weights(step, self._published.digest)

    @property
    def _newest(self) -> Published | None:
        """The newest published weights, or None if none are complete and of this run."""
        last = self._published
        return last if last is not None and self._ledger.planned(last.version) == self._row else None

    def _published_before(self, on_event: EventHandler) -> tuple[Published | None, Row | None]:
        before = read_published(self._run)
        if before is None:
            return None, None
        row, problem = self._ledger.planned(before.version), weights_problem(self._run, before)
        if problem is not None:
            notify(on_event, f"the published weights of step {before.version} are damaged: {problem}.")
            return None, None
        if row is None and before.version:
            notify(
                on_event,
                f"the ledger has no row for step {before.version}, so the weights that were published after that step "
                "are replaced.",
            )
            return None, None
        if before.finished is not None:  # the run continues
            publish(self._run, replace(before, finished=None), save=None)
        return before, row
