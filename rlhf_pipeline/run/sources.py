"""What each step of a run over stores learns from: a batch that is drawn, or what the steps of another run used."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.config import Pipeline, Replay
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.run.batches import Batches
from rlhf_pipeline.run.loop import Loop
from rlhf_pipeline.run.rows import StepRows
from trajectory_store import TrajectoryStore

RECORDED_LEDGER: Final = "recorded_ledger.jsonl"
"""A copy of the ledger of the run that is taken again, where its store alone does not tell what its steps used."""


class Steps(Protocol):
    """Takes the steps of a run, one after the other."""

    last: int | None
    """The step after which there is nothing to learn from; None where that is not known."""

    def take(self, loop: Loop, metrics_file: StepRows) -> None:
        """Take the next step."""
        ...


def steps_of(pipeline: Pipeline, replay: Replay, learner: Learner, run_dir: Path) -> Steps:
    """Return what the definition asks for.

    Raises:
        DataError: the trajectories that it needs are not there.
        DefinitionError: a store is too small for its share of a batch.
    """
    if not replay.recorded_order:
        return DrawnSteps(pipeline, replay, learner)
    recorded = run_dir / RECORDED_LEDGER
    return LedgerSteps(pipeline, learner, recorded) if recorded.is_file() else RecordedSteps(pipeline, learner)


def ledger_to_follow(store: Path) -> bytes | None:
    """Return the ledger of the run that a store belongs to, where its steps took rollouts as they arrived.

    That is so with collectors in processes of their own: which rollout had arrived at a step is not in the store.
    """
    ledger = store.parent / "ledger.jsonl"
    rows = StepRows(ledger)
    # The first row tells: a run is one of several processes from its start, or never.
    if not (store.parent / "config.json").is_file() or not len(rows) or "rollout" not in rows[0]:
        return None
    return ledger.read_bytes()


class RecordedSteps:
    """Step k learns from what the weights of version k - 1 may learn from, as the run that filled the store did."""

    def __init__(self, pipeline: Pipeline, learner: Learner) -> None:
        store = learner.buffer.store
        versions = np.asarray(store.read_scalars("policy_version"))
        order = np.argsort(versions, kind="stable")
        self._versions, self._rewards = versions[order], store.read_scalars("task_reward")[order]
        self.last: int | None = None
        if pipeline.write.zero_variance != "drop":  # else a rollout may have left nothing, the last one too
            self.last = int(self._versions[-1]) + pipeline.learn.updates_per_rollout
            self._check(min(pipeline.learn.steps, self.last), pipeline.buffer.max_staleness)

    def _check(self, num_steps: int, max_staleness: int) -> None:
        now = np.arange(num_steps)
        found = np.searchsorted(self._versions, now, "right") - np.searchsorted(self._versions, now - max_staleness)
        lacking = np.flatnonzero(found == 0)
        if len(lacking):
            step = int(lacking[0]) + 1
            raise DataError(
                f"recorded order: step {step} learns from trajectories of policy versions "
                f"{max(step - 1 - max_staleness, 0)} to {step - 1}, and there are none; the store has versions "
                f"{self._versions[0]} to {self._versions[-1]}. Were they evicted, or left out by a filter? To learn "
                "from what is there in another order: --set replay.recorded_order=false"
            )

    def take(self, loop: Loop, metrics_file: StepRows) -> None:
        """Take the next step. Its reward is that of the rollout which the run had just collected, if it had."""
        version = loop.progress.step
        first, last = np.searchsorted(self._versions, [version, version + 1]).tolist()
        _step(loop, metrics_file, _mean(self._rewards[first:last]))


class LedgerSteps:
    """Step k learns from the rows that the ledger of the run that filled the store names for it."""

    def __init__(self, pipeline: Pipeline, learner: Learner, ledger: Path) -> None:
        self._store, self._pipeline = learner.buffer.store, pipeline
        self._recorded = StepRows(ledger)
        ids, rows = np.asarray(self._store.ids()), self._store.read_scalars("source_row")
        order = np.argsort(rows)
        self._rows, self._ids = rows[order], ids[order]
        self.last: int | None = self._recorded.last_step

    def take(self, loop: Loop, metrics_file: StepRows) -> None:
        """Take the next step. Its reward is that of the rollout that it begins with."""
        step, updates = loop.progress.step + 1, self._pipeline.learn.updates_per_rollout
        recorded = self._recorded.of_step(step)
        if recorded is None:
            raise DataError(f"{self._recorded.path} has no row of step {step}. Restore it from a copy.")
        wanted = np.asarray(recorded["row_ids"], np.int64)
        at = np.searchsorted(self._rows, wanted)
        known = self._rows[np.minimum(at, len(self._rows) - 1)] == wanted
        if not known.all():
            raise DataError(
                f"step {step} of the run learned from {len(wanted)} trajectories, and {int((~known).sum())} of them "
                "are not among those chosen: evicted, or left out by a filter. To learn from what is there in another "
                "order: --set replay.recorded_order=false"
            )
        begins = (step - 1) % updates == 0 and "rollout" in recorded
        _step(
            loop,
            metrics_file,
            _rollout_reward(self._store, self._pipeline, recorded["rollout"]) if begins else None,
            row_ids=self._ids[at],
            ledger_fields={"rollout": recorded["rollout"]} if "rollout" in recorded else None,
        )


def _rollout_reward(store: TrajectoryStore, pipeline: Pipeline, rollout: int) -> float | None:
    """Mean reward of a rollout, whose groups are numbered by their prompts."""
    inside = store.read_scalars("group_id") // pipeline.collect.prompts_per_rollout == rollout
    return _mean(store.read_scalars("task_reward")[inside])


def _mean(rewards: npt.NDArray[Any]) -> float | None:
    return float(np.nanmean(rewards, dtype=np.float64)) if len(rewards) else None


class DrawnSteps:
    """A step learns from a batch that is drawn from all that was gathered."""

    def __init__(self, pipeline: Pipeline, replay: Replay, learner: Learner) -> None:
        self._store = learner.buffer.store
        self._batches = Batches(
            self._store,
            replay=replay,
            sample=pipeline.sample,
            batch_size=pipeline.collect.rollout_size,
            seed=learner.seed,
            ledger=learner.ledger,
        )
        self.last: int | None = self._batches.last_step

    def take(self, loop: Loop, metrics_file: StepRows) -> None:
        """Take the next step. Its reward is the mean of the rewards stored with its trajectories."""
        row_ids, ages = self._batches.rows(loop.progress.step + 1)
        reward = float(np.mean(self._store.read_scalars("task_reward", row_ids), dtype=np.float64))
        newest = {"newest_version": self._batches.newest}
        _step(loop, metrics_file, reward, row_ids=row_ids, ages=ages, ledger_fields=newest)


def _step(loop: Loop, metrics_file: StepRows, task_reward: float | None, **chosen: Any) -> None:
    if task_reward is not None:
        loop.progress.note(task_reward, loop.learn.stop_window)
    nothing_collected = dict.fromkeys(("num_failed", "rollout_s", "tokens_per_s"))
    loop.step(metrics_file, {"rollout": None, "task_reward": task_reward, **nothing_collected}, **chosen)
