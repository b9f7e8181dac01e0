"""The sources of a run's batches: rollouts made here, arrivals, draws from stores, or a recorded run."""

from __future__ import annotations

import time
from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.trajectory_schema import POLICY_DIGEST
from rlhf_pipeline.collectors.collector import Rollout
from rlhf_pipeline.config import Pipeline, Replay
from rlhf_pipeline.data.episodes import episode_names, stored_last_rows
from rlhf_pipeline.errors import DataError, StopAskedError
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.learner.step_plan import ChosenRows, trajectory_names
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.build import Parts
from rlhf_pipeline.run.events import EventHandler, notify
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.lookup import run_of_store
from rlhf_pipeline.run.loop import Source, StepBatch
from rlhf_pipeline.run.offline_batches import Batches
from rlhf_pipeline.run.processes.heartbeat import Heartbeat, Pause
from rlhf_pipeline.run.processes.rollouts import Rollouts, RolloutSet, StoredRollout
from rlhf_pipeline.run.processes.run_files import ALONE_S, report_if_alone
from rlhf_pipeline.run.rows import Row, StepRows
from rlhf_pipeline.run.signals import StopRequest
from trajectory_store import TrajectoryStore

Ints = npt.NDArray[np.int64]


class _Collected(Source):
    """Rollouts, each for `Learn.steps_per_rollout` steps; the write path that stored them has a state."""

    def __init__(self, pipeline: Pipeline, parts: Parts, on_event: EventHandler) -> None:
        self._updates = pipeline.learn.steps_per_rollout
        self._parts = parts
        self._on_event = on_event

    def begins(self, step: int) -> bool:
        return (step - 1) % self._updates == 0

    def state(self) -> dict[str, Any]:
        return {"write_path": self._parts.write_path_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._parts.load_write_path_state(state["write_path"])


class LocalRollouts(_Collected):
    """Rollouts that this process collects, in order; no other process writes to its store."""

    samples_again = True

    def __init__(self, pipeline: Pipeline, parts: Parts, on_event: EventHandler) -> None:
        super().__init__(pipeline, parts, on_event)
        self._num_stored = parts.collector.stored.largest() // pipeline.collect.prompts_per_rollout + 1
        """Rollouts that an earlier process may have stored, if only in part; the store is not searched for later ones.

        Computed from the largest group and not from the newest rows, because a ring loses rollouts that a resume then
        stores again, after later ones.
        """

    def next(self, step: int, stop: StopRequest) -> StepBatch | None:
        """Collect a rollout if the step begins one; the learner chooses from the fresh trajectories."""
        index, update = divmod(step - 1, self._updates)
        rollout: Rollout | None = None
        if update == 0:
            is_first = index >= self._num_stored
            try:
                rollout = self._parts.collector.collect(
                    index,
                    policy_version=step - 1,
                    is_first=is_first,
                    stop=lambda: bool(stop),
                    say=lambda sentence: notify(self._on_event, sentence),
                )
            except StopAskedError as error:
                notify(self._on_event, f"rollout {index} was cancelled: {error}. --resume samples it again.")
                return None
        followed = self._parts.curriculum
        weights = [] if followed is None or rollout is None else followed.weights(index)
        return StepBatch(
            task_reward=rollout.task_reward if rollout else None,
            about=_about(index, rollout) | {f"source_weight/{source}": weight for source, weight in enumerate(weights)},
            ledger_fields={"source_weights": weights} if weights else None,
        )


class ArrivedRollouts(_Collected):
    """Rollouts that other processes store, in the order of arrival."""

    def __init__(
        self,
        pipeline: Pipeline,
        parts: Parts,
        rollouts: Rollouts,
        run: RunFolder,
        heartbeat: Heartbeat,
        on_event: EventHandler,
    ) -> None:
        super().__init__(pipeline, parts, on_event)
        self.done = RolloutSet()
        """Rollouts that steps have begun so far."""
        self._pipeline = pipeline
        self._rollouts = rollouts
        self._run = run
        self._heartbeat = heartbeat
        self._waiting: dict[int, StoredRollout] = {}
        """Rollouts that have arrived and that no step has learned from yet, in order."""
        self._news = self._read_new
        """Returns the rollouts that have arrived since; may be running while a step is taken."""
        self._current: tuple[StoredRollout, Ints, int] | None = None
        """The current rollout, its rows with a reward, and the number of rows without one."""
        self._digests: dict[int, int] = {}
        """Digests of the weights that this process published, by version, as far back as the staleness limit allows."""

    def note_weights(self, version: int, digest: int) -> None:
        """Note which weights are published: those of the next step, or newer ones while steps are taken again."""
        self._digests[version] = digest
        if len(self._digests) > self._pipeline.max_staleness + 2:
            del self._digests[min(self._digests)]

    def next(self, step: int, stop: StopRequest) -> StepBatch | None:
        """Wait for the next rollout if the step begins one; a step that was begun before is taken as planned."""
        planned, begins = self._parts.learner.ledger.planned(step), self.begins(step)
        if begins or self._current is None:
            before = planned if begins else self._parts.learner.ledger.planned(step - 1)
            index = self._wait(stop, step, planned=None if before is None else before["rollout"])
            if index is None:
                return None
            self._current = self._arrived(index)
            if begins:
                self._begin(index)
                self._news = self._run.place.ahead(self._read_new)
        current, graded, num_failed = self._current
        chosen = self._as_planned(planned, step) or self._usable(current.rollout, graded, num_failed, step)
        self._heartbeat.beat("learning", step=step, rollout=current.rollout)
        traffic = current.traffic or {} if begins else {}
        digest = self._digests.get(step - 1) or (planned or {}).get(POLICY_DIGEST.name, 0)
        return StepBatch(
            task_reward=current.task_reward if begins else None,
            about=_about(current.rollout, current if begins else None)
            | {f"rollout_{name}": value for name, value in traffic.items()},
            row_ids=chosen.row_ids,
            ages=chosen.ages,
            admitted=self._admitted(step),
            ledger_fields={
                "rollout": current.rollout,
                POLICY_DIGEST.name: digest,
                "left_out": dict(chosen.left_out),
            },
        )

    def state(self) -> dict[str, Any]:
        """Return the rollouts that were begun, and the state of the write path."""
        return {"done": self.done.to_json(), **super().state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.done = RolloutSet.from_json(state["done"])
        super().load_state(state)

    def _begin(self, index: int) -> None:
        self.done.add(index)
        self._waiting.pop(index, None)
        size = self._pipeline.collect.prompts_per_rollout
        self._parts.collector.observe(np.arange(index * size, (index + 1) * size))

    def _wait(self, stop: StopRequest, step: int, *, planned: int | None = None) -> int | None:
        """Return the planned rollout, or the first arrival not learned from; None if the process is to stop.

        A power loss may take the row of a planned rollout; a collector then stores it again.
        """
        pause, alone_at = Pause(self._run.patience_s), time.monotonic() + ALONE_S
        while not stop:
            self._waiting |= self._news()
            self._news = self._read_new
            if planned is not None and (planned in self._waiting or self._rollouts.get(planned) is not None):
                return planned
            if planned is None and self._waiting:
                return next(iter(self._waiting))
            self._heartbeat.beat("waiting for a rollout", step=step - 1)
            if time.monotonic() > alone_at:
                alone_at = float("inf")
                report_if_alone(self._run, "a rollout", self._on_event)
            pause.sleep()
        return None

    def _read_new(self) -> dict[int, StoredRollout]:
        """Return the new arrivals, without refreshing the store, whose content must not change during a step."""
        return {rollout: self._rollouts.required(rollout) for rollout in self._rollouts.new(self.done)}

    def _arrived(self, index: int) -> tuple[StoredRollout, Ints, int]:
        self._parts.buffer.refresh()  # after its record was read: its trajectories were stored before that
        self._parts.buffer.trajectories.check_new()
        store, size = self._parts.buffer.store, self._pipeline.collect.prompts_per_rollout
        row_ids = self._parts.collector.stored.rows(index * size, (index + 1) * size - 1)
        row_ids = row_ids[stored_last_rows(store, row_ids)]
        names = episode_names(store, row_ids, store.read_scalars("trajectory_id", row_ids))
        row_ids = row_ids[np.argsort(names, kind="stable")]
        stored = self._waiting.get(index) or self._rollouts.required(index)
        lost = stored.num_trajectories - len(row_ids)
        if lost > 0 and self._pipeline.buffer.max_trajectories is None and not self._pipeline.write.drops_groups:
            notify(
                self._on_event,
                f"rollout {index} had {lost + len(row_ids)} trajectories, and {lost} of them are missing from the "
                "store: with buffer.durability=process, a power loss can remove rows that were not yet synced. The "
                "step learns from the remaining ones.",
            )
        graded = np.isfinite(store.read_scalars("task_reward", row_ids))
        return stored, row_ids[graded], int((~graded).sum())

    def _usable(self, rollout: int, row_ids: Ints, num_failed: int, step: int) -> ChosenRows:
        """Return the trajectories that `step` learns from; report how many are too old."""
        if self._pipeline.sample.strategy != "fresh":
            return self._drawn(rollout, step)
        row_ids = row_ids[self._parts.learner.part(len(row_ids), step)]
        versions = self._versions(row_ids)
        of_this_run = self._of_this_run(row_ids, versions, step)
        if not of_this_run.all():
            notify(
                self._on_event,
                f"step {step}: {int((~of_this_run).sum())} of {len(of_this_run)} trajectories of rollout {rollout} "
                "were sampled with the weights of lost steps; they are kept but not used for training.",
            )
        lost, row_ids, ages = int((~of_this_run).sum()), row_ids[of_this_run], step - 1 - versions[of_this_run]
        young = ages <= self._pipeline.max_staleness
        if not young.all():
            notify(
                self._on_event,
                f"step {step}: {int((~young).sum())} of {len(young)} trajectories of rollout {rollout} are older "
                f"than {self._pipeline.max_staleness} steps (buffer.max_staleness) and are not used for training.",
            )
        left_out = {"failed": num_failed, "lost_weights": lost, "too_old": int((~young).sum())}
        names = trajectory_names(self._parts.buffer.store, row_ids[young])
        return ChosenRows(row_ids[young], ages[young], names, left_out)

    def _as_planned(self, planned: Row | None, step: int) -> ChosenRows | None:
        """Return a step's planned rows, or None if there is no plan or its rows have changed."""
        if planned is None:
            return None
        row_ids = np.asarray(planned["row_ids"], np.int64)
        if not self._parts.buffer.store.holds(row_ids).all():
            return None
        # A power loss may take rows that the ledger names; rows sampled in their place may have the same ids.
        versions = self._versions(row_ids)
        ages = step - 1 - versions
        recorded_names, names = planned.get("trajectory_ids"), trajectory_names(self._parts.buffer.store, row_ids)
        as_said = recorded_names is None or names.tolist() == recorded_names
        as_said &= ages.tolist() == planned["ages"] and bool(self._of_this_run(row_ids, versions, step).all())
        return ChosenRows(row_ids, ages, names, planned.get("left_out", {})) if as_said else None

    def _versions(self, row_ids: Ints) -> Ints:
        return self._parts.buffer.store.read_scalars("policy_version", row_ids)

    def _of_this_run(self, row_ids: Ints, versions: Ints, step: int) -> npt.NDArray[np.bool_]:
        """Return which trajectories, of these policy versions, were sampled with weights of this run before a step.

        The ledger knows the weights that a step began with, and this process those that it published. Both count,
        because steps taken again on a GPU give other last bits. Trajectories that name no weights are accepted.
        """
        ledger = self._parts.learner.ledger
        digests = self._parts.buffer.store.read_scalars(POLICY_DIGEST.name, row_ids)
        of_this_run = digests == 0
        for version in np.unique(versions[~of_this_run & (versions < step)]).tolist():
            row = ledger.planned(version + 1) or {}
            had = {row.get(POLICY_DIGEST.name, 0), self._digests.get(version, 0)} - {0}
            of_this_run |= (versions == version) & (np.isin(digests, list(had)) if had else True)
        return of_this_run

    def _drawn(self, rollout: int, step: int) -> ChosenRows:
        """Return what `sample.strategy` draws from the rollouts that were begun, as recorded in the ledger."""
        store, pipeline = self._parts.buffer.store, self._pipeline
        return self._parts.learner.chosen_rows(
            step,
            keep=partial(self._allowed, step),
            of_newest=lambda fresh: of_rollouts(store, fresh, [rollout], pipeline),
        )

    def _admitted(self, step: int) -> Ints | None:
        """Return what `_drawn` may draw at this step, if the loss must know it; else None."""
        if not self._parts.learner.chooses_a_part:
            return None
        if self._pipeline.sample.strategy == "fresh":
            return self._current[1] if self._pipeline.learn.minibatches > 1 and self._current is not None else None
        return self._parts.learner.admitted_rows(step, keep=partial(self._allowed, step)).row_ids

    def _allowed(self, step: int, fresh: ChosenRows) -> npt.NDArray[np.bool_]:
        """Return which trajectories are of rollouts that were begun, sampled with weights of this run."""
        begun = of_rollouts(self._parts.buffer.store, fresh, self.done, self._pipeline)
        return begun & self._of_this_run(fresh.row_ids, step - 1 - fresh.ages, step)


def of_rollouts(
    store: TrajectoryStore, chosen: ChosenRows, rollouts: Container[int], pipeline: Pipeline
) -> npt.NDArray[np.bool_]:
    """Return which trajectories are of some rollouts, bool `[n]`."""
    numbers = store.read_scalars("group_id", chosen.row_ids) // pipeline.collect.prompts_per_rollout
    return np.fromiter((rollout in rollouts for rollout in numbers.tolist()), bool, len(numbers))


def recorded_admission(pipeline: Pipeline, learner: Learner, ledger: StepRows, step: int) -> Ints | None:
    """Return what a step of a recorded run could draw from, int64 `[n]`; None if its loss need not know it."""
    row = ledger.required(step)
    if not learner.chooses_a_part or "newest_version" in row:  # drawn from a gathered store, which has no phases
        return None
    if "rollout" not in row:
        return learner.admitted_rows(step, watermark=row.get("watermark")).row_ids
    store = learner.buffer.store
    if pipeline.sample.strategy == "fresh":
        if pipeline.learn.minibatches == 1:
            return None
        of_this = [row["rollout"]]
        return learner.admitted_rows(step, keep=lambda fresh: of_rollouts(store, fresh, of_this, pipeline)).row_ids
    # What an earlier step began is too old by now.
    first = max(step - pipeline.max_staleness, 1)
    begun = {ledger.required(earlier)["rollout"] for earlier in range(first, step + 1)}
    return learner.admitted_rows(step, keep=lambda fresh: of_rollouts(store, fresh, begun, pipeline)).row_ids


def _about(rollout: int | None = None, begun: Rollout | StoredRollout | None = None) -> dict[str, Any]:
    """Return the fields of a step's line about its rollout; only the first step reports how it was collected."""
    return {
        "rollout": rollout,
        "num_failed": None if begun is None else begun.num_failed,
        "rollout_s": None if begun is None else begun.seconds,
        "tokens_per_s": begun.num_tokens / begun.seconds if begun is not None and begun.num_tokens else None,
        **({} if begun is None else begun.figures),
    }


class SampledBatches(Source):
    """Draws the batch of a step from everything that was gathered."""

    def __init__(self, pipeline: Pipeline, replay: Replay, learner: Learner) -> None:
        self._store = learner.buffer.store
        self._batches = Batches(
            self._store,
            replay=replay,
            sample=pipeline.sample,
            batch_size=pipeline.step_size,
            seed=learner.seed,
            ledger=learner.ledger,
        )
        self.last = self._batches.last_step

    def next(self, step: int, stop: StopRequest) -> StepBatch | None:
        """Draw the batch; its reward is the mean of the rewards stored with its trajectories."""
        row_ids, ages = self._batches.rows(step)
        reward = float(np.mean(self._store.read_scalars("task_reward", row_ids), dtype=np.float64))
        newest = {"newest_version": self._batches.newest}
        return StepBatch(task_reward=reward, about=_about(), row_ids=row_ids, ages=ages, ledger_fields=newest)


_OTHERWISE = (
    "To learn from the stored rows in a different order, replay them in another folder: --out OTHER_FOLDER --set "
    "replay.recorded_order=false"
)


class RecordedVersions(Source):
    """Step k takes the trajectories that are fresh for version k - 1, as the run that filled the store did."""

    def __init__(self, pipeline: Pipeline, learner: Learner) -> None:
        store = learner.buffer.store
        ids = store.ids()  # of one moment: a read that follows a merge also finds newer rows
        versions = np.asarray(store.read_scalars("policy_version", ids))
        order = np.argsort(versions, kind="stable")
        self._versions, self._rewards = versions[order], store.read_scalars("task_reward", ids)[order]
        if not pipeline.write.drops_groups:  # else a rollout may have left nothing, even the last one
            self.last = int(self._versions[-1]) + pipeline.learn.steps_per_rollout
            self._check(min(pipeline.learn.steps, self.last), pipeline.max_staleness)

    def next(self, step: int, stop: StopRequest) -> StepBatch | None:
        """Leave the choice to the learner; the reward is that of the rollout that the run had just collected."""
        first, end = np.searchsorted(self._versions, [step - 1, step]).tolist()
        return StepBatch(task_reward=_mean(self._rewards[first:end]), about=_about())

    def _check(self, num_steps: int, max_staleness: int) -> None:
        now = np.arange(num_steps)
        counts = np.searchsorted(self._versions, now, "right") - np.searchsorted(self._versions, now - max_staleness)
        lacking = np.flatnonzero(counts == 0)
        if len(lacking):
            step = int(lacking[0]) + 1
            raise DataError(
                f"in the recorded order, step {step} uses trajectories of policy versions "
                f"{max(step - 1 - max_staleness, 0)} to {step - 1}, but there are none; the store has versions "
                f"{self._versions[0]} to {self._versions[-1]}. Were they evicted, or excluded by a filter? "
                f"{_OTHERWISE}"
            )


class RecordedLedger(Source):
    """Step k takes the rows that the ledger of the run that filled the store names for it."""

    def __init__(self, pipeline: Pipeline, learner: Learner, ledger: Path) -> None:
        self._store, self._pipeline, self._learner = learner.buffer.store, pipeline, learner
        self._recorded = StepRows(ledger)
        ids = np.asarray(self._store.ids())
        rows = self._store.read_scalars("source_row", ids)
        order = np.argsort(rows)
        self._rows, self._ids = rows[order], ids[order]
        self.last = self._recorded.last_step

    def next(self, step: int, stop: StopRequest) -> StepBatch | None:
        """Take the rows that the ledger names; the reward is that of the rollout that the step begins."""
        recorded = self._recorded.required(step)
        recorded_ids = np.asarray(recorded["row_ids"], np.int64)
        at = np.searchsorted(self._rows, recorded_ids)
        is_stored = self._rows[np.minimum(at, len(self._rows) - 1)] == recorded_ids
        if not is_stored.all():
            raise DataError(
                f"the selection lacks {int((~is_stored).sum())} of the {len(recorded_ids)} trajectories that "
                f"step {step} of the run used. Were they evicted, or excluded by a filter? {_OTHERWISE}"
            )
        rollout = recorded.get("rollout")
        begins = (step - 1) % self._pipeline.learn.steps_per_rollout == 0
        return StepBatch(
            task_reward=self._rollout_reward(rollout) if begins and rollout is not None else None,
            about=_about(),
            row_ids=self._ids[at],
            admitted=recorded_admission(self._pipeline, self._learner, self._recorded, step),
            ledger_fields=None if rollout is None else {"rollout": rollout},
        )

    def _rollout_reward(self, rollout: int) -> float | None:
        """Return the mean reward of a rollout, whose groups are numbered by their prompts."""
        inside = (
            self._store.read_scalars("group_id", self._ids) // self._pipeline.collect.prompts_per_rollout == rollout
        )
        return _mean(self._store.read_scalars("task_reward", self._ids[inside]))


def stored_source(pipeline: Pipeline, replay: Replay, learner: Learner, run: RunFolder) -> Source:
    """Return the source that the definition of a run over stores asks for."""
    learner.buffer.trajectories.check_new()  # all of them: any may be drawn
    if not replay.recorded_order:
        return SampledBatches(pipeline, replay, learner)
    if run.bring(run.recorded_ledger).is_file():
        return RecordedLedger(pipeline, learner, run.recorded_ledger)
    return RecordedVersions(pipeline, learner)


def ledger_to_follow(store: Address) -> bytes | None:
    """Return the ledger of a store's run if its steps took rollouts as they arrived, else None.

    That is so if collectors were separate processes: the store does not show which rollouts had arrived at a step.
    """
    place = run_of_store(store)
    run = None if place is None else RunFolder(place)
    # The first row is enough: a run has several processes from its start, or never.
    if run is None or not len(run.ledger) or "rollout" not in run.ledger[0]:
        return None
    return run.ledger_file.read_bytes()


def _mean(rewards: npt.NDArray[Any]) -> float | None:
    return float(np.nanmean(rewards, dtype=np.float64)) if len(rewards) else None
