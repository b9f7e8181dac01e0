"""A collector as a separate process: claim a rollout, sample it with the newest weights, store it, repeat.

An evaluation that the learner asks for comes before the next rollout.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Literal

from safetensors import SafetensorError

from rlhf_pipeline.collectors.collector import Rollout
from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.errors import DataError, LeaseLostError, RewardError, StopAskedError, typed
from rlhf_pipeline.policies.engines.protocol import WeightRefresh
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.build import Parts, build_parts, checked_models
from rlhf_pipeline.run.engines import chosen_engine, own_slots
from rlhf_pipeline.run.evaluation import Evaluator, open_evaluator
from rlhf_pipeline.run.events import CollectorFinished, EventHandler, RolloutDone, ignore_events, notify
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.freed_memory import FreedMemory
from rlhf_pipeline.run.log_file import write_log
from rlhf_pipeline.run.processes.claims import ClaimableWork, Claims, FreeRollouts, RequestedEvaluations, StalenessLimit
from rlhf_pipeline.run.processes.heartbeat import Heartbeat, Pause
from rlhf_pipeline.run.processes.rollouts import Rollouts, StoredRollout
from rlhf_pipeline.run.processes.run_files import at_work, shared_run
from rlhf_pipeline.run.processes.weights import Published, read_published, weights_folder, weights_problem
from rlhf_pipeline.run.prompt_lengths import sampling_notices
from rlhf_pipeline.run.run import Run
from rlhf_pipeline.run.signals import StopRequest, stop_on_signals
from trajectory_store import TrajectoryStore

_TRIES = 20
_LOOK_AGAIN_S = 0.05
_PAUSES_PER_CLAIM = 4
"""The number of longest pauses to wait before a rejected claim is retried with the same weights."""
_COPIES = 2
"""Versions of the weights of which a process keeps copies, if the run is at a URL."""


def collect(
    job: Run, *, name: str | None = None, parent: int | None = None, on_event: EventHandler = ignore_events
) -> CollectorFinished:
    """Collect rollouts into a run until its learner reports that it has ended, or a signal asks to stop.

    Any number of collectors may run beside each other and beside `learn`, and each may be killed at any time. No prompt
    is lost or repeated: the rollout of a killed collector is the next that another one claims.

    Args:
        job: the run; its folder is made if absent.
        name: of this process, unique in the run; None takes the first free of `collector-0`, `collector-1`, ...
        parent: stop when this process is gone; for a supervisor's children.
        on_event: receives every rollout, notices and the end.

    Raises:
        RunExistsError: the name is taken, or the folder is something else.
        RunMismatchError: the run was started with another definition or seed.
        DataError: parts of the run are missing or damaged, or a prompt is too long for the model.
        RewardError: every reward call of a rollout failed; the rollout is free for the next try.
        StoreError: the store could not take a rollout; no part of it was acknowledged.
    """
    run, pipeline, seed = RunFolder(job.run_dir), job.pipeline, job.seed
    with (
        stop_on_signals(parent) as stop,
        shared_run(run, job, on_event=on_event),
        at_work(run, name, progress_timeout_s=job.progress_timeout_s) as heartbeat,
        write_log(run),
    ):
        heartbeat.beat("starting")
        models = checked_models(job, run, on_event)
        for notice in sampling_notices(pipeline, models.policy):
            notify(on_event, notice)
        with (
            chosen_engine(pipeline, models.policy, run=run, device=job.device),
            build_parts(pipeline, models, run=run, seed=seed, learns=False) as parts,
            run.place.rollouts(adds=True) as rollouts,
            ExitStack() as resources,
        ):
            with own_slots(pipeline, models.policy):
                evaluator = resources.enter_context(
                    open_evaluator(pipeline, models.policy, run=run, seed=seed, on_event=on_event)
                )

            def claims(work: ClaimableWork, store: TrajectoryStore) -> Claims:
                return resources.enter_context(closing(run.place.claims(heartbeat.name, work, store)))

            flow = StalenessLimit(
                steps_per_rollout=pipeline.learn.steps_per_rollout, max_staleness=pipeline.max_staleness
            )
            worker = _Worker(
                pipeline=pipeline,
                run=run,
                parts=parts,
                claims=claims(FreeRollouts(rollouts, flow), parts.buffer.store),
                rollouts=rollouts,
                evaluator=evaluator,
                evaluation_claims=None
                if evaluator is None
                else claims(RequestedEvaluations(evaluator.stored), evaluator.store),
                heartbeat=heartbeat,
                on_event=on_event,
                stop=stop,
            )
            reason = worker.work()
        heartbeat.beat("ended", reason=reason, rollouts=worker.num_rollouts)
    finished = CollectorFinished(
        run_dir=run.address,
        collector=heartbeat.name,
        reason=reason,
        num_rollouts=worker.num_rollouts,
        num_trajectories=worker.num_trajectories,
    )
    on_event(finished)
    return finished


@dataclass(kw_only=True)
class _Worker:
    pipeline: Pipeline
    run: RunFolder
    parts: Parts
    claims: Claims
    rollouts: Rollouts
    evaluator: Evaluator | None
    evaluation_claims: Claims | None
    """On evaluations."""
    heartbeat: Heartbeat
    on_event: EventHandler
    stop: StopRequest
    freed: FreedMemory = field(default_factory=FreedMemory)
    version: int = -1
    digests: dict[int, int] = field(default_factory=dict[int, int])
    """Digests of the weights used for this rollout, by version."""
    num_rollouts: int = 0
    num_trajectories: int = 0

    def work(self) -> Literal["finished", "interrupted"]:
        patience_s = self.run.patience_s
        pause, last_published, ask_at = Pause(patience_s), None, 0.0
        while not self.stop:
            published = read_published(self.run)
            if published != last_published:  # the learner is taking steps, so more weights may come soon
                pause, last_published, ask_at = Pause(patience_s), published, 0.0
            claims, number = self.claims, None
            if published is not None and published.finished is not None:
                if not self.run.place.is_alive("learner"):
                    return "finished"
                # It is about to leave, or it was restarted to take more steps and will publish that soon.
            elif published is not None and time.monotonic() >= ask_at:
                claims, number = self._claim(published)
                # A refusal holds until there are new weights or another collector dies.
                ask_at = time.monotonic() + _PAUSES_PER_CLAIM * patience_s
            if published is None or number is None:
                state = "waiting for the first weights" if published is None else "waiting for the learner"
                self.heartbeat.beat(state, version=self.version, rollouts=self.num_rollouts)
                pause.sleep()
                continue
            done = False
            try:
                (self._store_rollout if claims is self.claims else self._evaluate)(number, published)
                done = True
            except LeaseLostError as error:
                notify(self.on_event, str(error))
            except StopAskedError as error:
                notify(self.on_event, f"{claims.work.what} {number} was cancelled: {error}.")
            finally:
                claims.release(done=done)
            last_published = None
        return "interrupted"

    def _claim(self, published: Published) -> tuple[Claims, int | None]:
        """Claim an evaluation that the learner asks for and that no collector does, else a rollout."""
        step = (
            None
            if self.evaluation_claims is None or not published.evaluate
            else self.evaluation_claims.claim(published)
        )
        if self.evaluation_claims is not None and step is not None:
            return self.evaluation_claims, step
        return self.claims, self.claims.claim(published)

    def _evaluate(self, step: int, published: Published) -> None:
        """Evaluate the published weights of a step."""
        assert self.evaluator is not None
        requested = replace(published, version=step, digest=published.evaluate[step])
        self.heartbeat.beat("evaluating", step=step, rollouts=self.num_rollouts)
        with own_slots(self.pipeline, self.parts.policy) as apart:
            try:
                load_policy(self.parts.policy, self.run, requested)
            except (OSError, SafetensorError, DataError):
                newest = read_published(self.run)
                if newest is not None and newest.evaluate.get(step) != requested.digest:
                    return  # another collector has evaluated them in the meantime
                raise
            if not apart:
                self.version, self.digests[step] = step, requested.digest
            self.evaluator.evaluate(step, self.stop, digests={step: requested.digest}, due=True)
        self.freed.trim()

    def _store_rollout(self, rollout: int, published: Published) -> None:
        """Store a rollout and record it."""
        self._take_weights(published)
        self.digests = {self.version: self.digests[self.version]}
        self.heartbeat.beat("collecting", rollout=rollout, version=self.version, rollouts=self.num_rollouts)
        self.parts.load_write_path_state(published.write_path)
        if not self.claims.is_first:
            self.parts.buffer.refresh()
        version = self.version
        done = self._collect(rollout)
        # After the trajectories: a row here means that the whole rollout is stored.
        self.rollouts.add(
            StoredRollout(
                rollout=rollout,
                policy_version=version,
                num_trajectories=done.num_trajectories,
                num_failed=done.num_failed,
                task_reward=done.task_reward,
                num_tokens=done.num_tokens,
                seconds=done.seconds,
                created_at=time.time(),
                figures=done.figures,
                traffic=self.run.place.traffic(self.parts.buffer.store),
            )
        )
        self.num_rollouts += 1
        self.num_trajectories += done.num_trajectories
        self.freed.trim()
        self.on_event(
            RolloutDone(
                collector=self.heartbeat.name,
                rollout=rollout,
                policy_version=version,
                num_trajectories=done.num_trajectories,
                task_reward=done.task_reward,
                seconds=done.seconds,
            )
        )

    def _collect(self, rollout: int) -> Rollout:
        try:
            done = self.parts.collector.collect(
                rollout,
                policy_version=self.version,
                refresh=self._refresh(),
                digests=self.digests,
                is_first=self.claims.is_first,
                stop=lambda: bool(self.stop),
                say=lambda sentence: notify(self.on_event, sentence),
            )
        except RewardError:
            self.heartbeat.beat("failed: every reward call", rollout=rollout, rollouts=self.num_rollouts)
            raise
        return done

    def _refresh(self) -> WeightRefresh | None:
        """Return what loads newer weights in the middle of a rollout, or None if the definition does not ask for it."""
        every = self.pipeline.collect.refresh_weights_every
        if not every:
            return None

        def load() -> int:
            newest = read_published(self.run)
            if newest is not None and newest.version > self.version:  # not if the run went back to earlier weights
                self._take_weights(newest)
            return self.version

        return WeightRefresh(load, every=every, version=self.version)

    def _take_weights(self, published: Published) -> None:
        """Load the published weights, or the newest ones if these have been replaced in the meantime."""
        tries = 0
        while (self.version, self.digests.get(self.version)) != (published.version, published.digest):
            try:
                load_policy(self.parts.policy, self.run, published)
                self.version, self.digests[published.version] = published.version, published.digest
            except (OSError, SafetensorError, DataError):
                newest = read_published(self.run)
                tries += newest is None or newest.version == published.version
                if tries > _TRIES:
                    raise
                time.sleep(_LOOK_AGAIN_S)  # the learner may be replacing them
                published = newest or published


def load_policy(policy: TokenPolicy, run: RunFolder, published: Published) -> None:
    """Load published weights into the policy's engine, or into the policy if it samples by itself."""
    problem, folder = weights_problem(run, published), weights_folder(run, published)
    if problem is not None:
        raise DataError(
            f"the published weights {folder.name} of {run.address} cannot be used: {problem}. Restart the learner, "
            f"which publishes them again: rlhf-pipeline learn --run {typed(run.address)}"
        )
    policy.engine.load_weights(folder, published.version)
    for older in sorted(folder.parent.glob("version-*"))[:-_COPIES]:
        if older != folder:
            run.place.remove_copy(older)
