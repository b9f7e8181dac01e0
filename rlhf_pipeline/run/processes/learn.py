"""The learner as a process of its own: wait for a rollout, learn from it, publish the weights, go on."""

from __future__ import annotations

import logging
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.run.build import Models, Parts, build_models, build_parts
from rlhf_pipeline.run.checkpoint import list_checkpoints
from rlhf_pipeline.run.events import EventHandler, RunFinished, RunStarted, ignore_events
from rlhf_pipeline.run.log import log_file, named_disk_errors
from rlhf_pipeline.run.loggers import with_logger
from rlhf_pipeline.run.loop import take_step, tell
from rlhf_pipeline.run.processes.heartbeat import Heartbeat, Pause, is_alive, process_lock
from rlhf_pipeline.run.processes.run_files import shared_run
from rlhf_pipeline.run.processes.weights import Published, publish, read_published, weights_problem
from rlhf_pipeline.run.progress import Progress
from rlhf_pipeline.run.rows import StepRows
from rlhf_pipeline.run.signals import StopRequest, stop_on_signals
from rlhf_pipeline.run.state import restore, save_run
from trajectory_store import TrajectoryStore

logger = logging.getLogger(__name__)
Ints = npt.NDArray[np.int64]

_ALONE_S = 30.0
"""How long to wait for a rollout before the learner says that nobody collects."""


def learn(
    pipeline: Pipeline,
    *,
    run_dir: Path,
    seed: int = 0,
    device: str = "cpu",
    parent: int | None = None,
    definition: str = "",
    overrides: Sequence[tuple[str, str]] = (),
    on_event: EventHandler = ignore_events,
) -> RunFinished:
    """Learn from the rollouts that `collect` processes store, until the definition's end or a signal.

    The rollouts are taken in the order of their arrival, each for `learn.updates_per_rollout` steps. The ledger names
    the trajectories of a step before the step is taken, and a restarted learner takes the steps after its checkpoint
    again as the ledger says: on a CPU its weights are then those of a learner that was never killed, bit for bit.

    Args:
        pipeline: the definition, overrides applied.
        run_dir: the run folder; made if it is not there.
        seed: the run's seed.
        device: where the model lives.
        parent: stop when this process is gone; for a supervisor's child.
        definition: where the definition came from, for `config.json`.
        overrides: the `--set` pairs already applied, for `config.json`.
        on_event: is told of the start, every step, notices and the end.

    Raises:
        RunExistsError: the run has a live learner, or the folder is something else.
        RunMismatchError: the run was started with another definition or seed.
        RunStorageError: the disk is full; everything acknowledged is still there.
    """
    started = time.perf_counter()
    with (
        named_disk_errors(run_dir),
        stop_on_signals(parent) as stop,
        shared_run(
            run_dir,
            pipeline,
            seed=seed,
            device=device,
            definition=definition,
            overrides=overrides,
            record_again=True,
        ),
        process_lock(run_dir / "processes", "learner", wait_s=10.0),
        log_file(run_dir / "log.txt"),
        Heartbeat(run_dir / "processes", "learner") as heartbeat,
    ):
        heartbeat.beat("starting")
        # The collectors' write path scores with the reference model; the loss reads what it stored.
        models = Models(policy=build_models(pipeline, seed=seed, device=device).policy, reference=None)
        with (
            build_parts(pipeline, models, run_dir=run_dir, seed=seed) as parts,
            TrajectoryStore.open(run_dir / "rollouts") as rollouts,
        ):
            progress = restore(run_dir, parts, on_event)
            num_parameters = sum(p.numel() for p in models.policy.parameters())
            heartbeat.facts = {"num_parameters": num_parameters, "first_step": progress.step}
            on_event = with_logger(pipeline.learn.logger, run_dir, on_event)
            on_event(
                RunStarted(
                    run_dir=run_dir,
                    num_parameters=num_parameters,
                    first_step=progress.step,
                    total_steps=pipeline.learn.steps,
                )
            )
            worker = _Worker(pipeline, parts, rollouts, progress, run_dir, heartbeat, on_event)
            reason = worker.work(stop)
            parts.buffer.refresh()
            finished = RunFinished(
                run_dir=run_dir,
                reason=reason,
                steps=progress.step,
                seconds=time.perf_counter() - started,
                first_reward=progress.first_reward,
                last_reward=progress.last_reward,
                num_trajectories=len(parts.buffer.store),
            )
        heartbeat.beat("ended", reason=reason, step=progress.step)
    on_event(finished)
    return finished


@dataclass(frozen=True, kw_only=True, slots=True)
class _Arrived:
    """A rollout to learn from."""

    index: int
    row_ids: Ints
    task_reward: float
    num_failed: int
    rollout_s: float
    tokens_per_s: float | None


class _Worker:
    def __init__(
        self,
        pipeline: Pipeline,
        parts: Parts,
        rollouts: TrajectoryStore,
        progress: Progress,
        run_dir: Path,
        heartbeat: Heartbeat,
        on_event: EventHandler,
    ) -> None:
        self.pipeline = pipeline
        self.parts = parts
        self.rollouts = rollouts
        self.progress = progress
        self.run_dir = run_dir
        self.heartbeat = heartbeat
        self.on_event = on_event
        self.metrics = StepRows(run_dir / "metrics.jsonl")
        self.done = self._learned_from()
        self.published = self._published_before()
        # What was just loaded is not saved again.
        self.saved = progress.step if list_checkpoints(run_dir / "checkpoints") else -1
        self.current: _Arrived | None = None

    def work(self, stop: StopRequest) -> Literal["target", "steps", "interrupted"]:
        learn, progress = self.pipeline.learn, self.progress
        self._checkpoint()  # the untrained weights: a learner killed in its first steps resumes too
        self._publish()
        while True:
            begins = progress.step % learn.updates_per_rollout == 0
            if begins and progress.reached(learn.stop_at_reward, learn.stop_window):
                reason = "target"
            elif progress.step >= learn.steps:
                reason = "steps"
            elif stop or not self._prepare(stop, begins=begins):
                reason = "interrupted"
            else:
                self._step()
                self._publish()
                if progress.step % learn.checkpoint_every == 0:
                    self._checkpoint()
                continue
            self._checkpoint()
            self._publish(finished=None if reason == "interrupted" else reason)
            return reason

    def _prepare(self, stop: StopRequest, *, begins: bool) -> bool:
        """Have a rollout to learn from in `current`; return False if the process shall stop instead."""
        if not begins and self.current is not None:
            return True
        planned = self.parts.learner.ledger.planned(self.progress.step + (1 if begins else 0))
        if planned is not None and "rollout" in planned:
            index = planned["rollout"]
        else:
            waiting = self._wait(stop)
            if waiting is None:
                return False
            index = waiting
        self.current = self._arrived(index)
        if begins:
            self.done.add(index)
            first = index * self.pipeline.collect.prompts_per_rollout
            self.parts.collector.observe(np.arange(first, first + self.pipeline.collect.prompts_per_rollout))
            self.progress.note(self.current.task_reward, self.pipeline.learn.stop_window)
        return True

    def _wait(self, stop: StopRequest) -> int | None:
        """Return the rollout that arrived first among those not learned from; None if the process shall stop."""
        pause, alone_at = Pause(), time.monotonic() + _ALONE_S
        while not stop:
            self.rollouts.refresh()
            arrived = self.rollouts.read_scalars("rollout")
            fresh = arrived[~np.isin(arrived, np.fromiter(self.done, np.int64, len(self.done)))]
            if len(fresh):
                return int(fresh[0])
            self.heartbeat.beat("waiting for a rollout", step=self.progress.step)
            if time.monotonic() > alone_at:
                alone_at = math.inf
                self._say_if_alone()
            pause.sleep()
        return None

    def _say_if_alone(self) -> None:
        """Say what is missing where the learner waits and nobody collects."""
        folder = self.run_dir / "processes"
        names = {file.stem for file in folder.glob("*.lock")} - {"learner", "supervisor"}
        if not any(is_alive(folder, name) for name in names):
            command = shlex.join(["rlhf-pipeline", "collect", "--run", str(self.run_dir)])
            tell(self.on_event, f"the learner waits for a rollout, and no collector is alive. Start one: {command}")

    def _arrived(self, index: int) -> _Arrived:
        self.parts.buffer.refresh()
        store, size = self.parts.buffer.store, self.pipeline.collect.prompts_per_rollout
        at = int(np.flatnonzero(self.rollouts.read_scalars("rollout") == index)[0])
        groups = store.read_scalars("group_id")
        row_ids = store.ids()[(groups >= index * size) & (groups < (index + 1) * size)]
        row_ids = row_ids[np.argsort(store.read_scalars("trajectory_id", row_ids), kind="stable")]
        said = self.rollouts.read(self.rollouts.ids()[at : at + 1])
        num_tokens, seconds = int(said["num_tokens"][0]), float(said["seconds"][0])
        return _Arrived(
            index=index,
            row_ids=row_ids[np.isfinite(store.read_scalars("task_reward", row_ids))],
            task_reward=float(said["task_reward"][0]),
            num_failed=int(said["num_failed"][0]),
            rollout_s=seconds,
            # 0 tokens: a collector that was killed had stored it, and another one only added its row.
            tokens_per_s=num_tokens / seconds if num_tokens else None,
        )

    def _usable(self, arrived: _Arrived, step: int) -> Ints:
        """Return the trajectories that `step` learns from; say how many of the rollout are too old."""
        if self.pipeline.sample.strategy != "fresh":
            return self._drawn(step)
        ages = step - 1 - self.parts.buffer.store.read_scalars("policy_version", arrived.row_ids)
        young = ages <= self.pipeline.buffer.max_staleness
        if not young.all():
            tell(
                self.on_event,
                f"step {step}: {int((~young).sum())} of {len(young)} trajectories of rollout {arrived.index} are older "
                f"than buffer.max_staleness={self.pipeline.buffer.max_staleness} steps and are not learned from.",
            )
        return arrived.row_ids[young]

    def _has(self, row_ids: Ints) -> bool:
        return bool(np.isin(row_ids, self.parts.buffer.store.ids()).all())

    def _drawn(self, step: int) -> Ints:
        """Return what `sample.strategy` draws from the rollouts that were begun, which is what the ledger counts on."""
        store, size = self.parts.buffer.store, self.pipeline.collect.prompts_per_rollout
        done = np.fromiter(self.done, np.int64, len(self.done))

        def begun(row_ids: Ints) -> npt.NDArray[np.bool_]:
            return np.isin(store.read_scalars("group_id", row_ids) // size, done)

        return self.parts.learner.chosen_rows(step, keep=begun)[0]

    def _step(self) -> None:
        current, step, learner = self.current, self.progress.step + 1, self.parts.learner
        if current is None:
            raise AssertionError("a step without a rollout")
        planned = learner.ledger.planned(step)
        was = None if planned is None else np.asarray(planned["row_ids"], np.int64)
        # A step that was begun before is taken as it was planned, unless its trajectories are gone.
        row_ids = was if was is not None and self._has(was) else self._usable(current, step)
        self.heartbeat.beat("learning", step=step, rollout=current.index)
        begins = (step - 1) % self.pipeline.learn.updates_per_rollout == 0
        about = {
            "rollout": current.index,
            "task_reward": current.task_reward if begins else None,
            "num_failed": current.num_failed if begins else None,
            "rollout_s": current.rollout_s if begins else None,
            "tokens_per_s": current.tokens_per_s if begins else None,
            **self.parts.write_path_metrics(),
        }
        take_step(
            learner,
            self.progress,
            self.metrics,
            about,
            total_steps=self.pipeline.learn.steps,
            on_event=self.on_event,
            row_ids=row_ids,
            ledger_fields={"rollout": current.index},
        )

    def _learned_from(self) -> set[int]:
        """Return the rollouts that the steps up to the checkpoint began with."""
        rows = self.parts.learner.ledger.rows
        return {row["rollout"] for row in rows if "rollout" in row and row["step"] <= self.progress.step}

    def _published_before(self) -> int | None:
        """Return the version that collectors use now; None if there is none, or if its files are damaged."""
        folder = self.run_dir / "weights"
        before = read_published(folder)
        if before is None:
            return None
        problem = weights_problem(folder, before.version)
        if problem is not None:
            tell(self.on_event, f"the published weights of step {before.version} are damaged: {problem}.")
            return None
        if before.finished is not None:  # the run goes on
            publish(folder, replace(before, finished=None), save=None)
        return before.version

    def _publish(self, finished: str | None = None) -> None:
        step, updates = self.progress.step, self.pipeline.learn.updates_per_rollout
        published = Published(
            version=step,
            next_version=-(-step // updates) * updates,
            rollouts_done=len(self.done),
            finished=finished,
            write_path=self.parts.write_path_state(),
        )
        if finished is None and self.published is not None and self.published > step:
            return  # a restarted learner catches up; what it had published before stays the newest
        save = self.parts.policy.save_pretrained if self.published != step else None
        sync = self.pipeline.buffer.durability != "process"
        publish(self.run_dir / "weights", published, save=save, sync=sync)
        self.published = step

    def _checkpoint(self) -> None:
        if self.saved != self.progress.step:
            save_run(self.run_dir, self.parts, self.progress, keep=self.pipeline.learn.keep_checkpoints)
            self.saved = self.progress.step
