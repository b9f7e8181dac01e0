"""Take the optimizer steps of a finished run again, from its store, ledger and checkpoints, and compare.

This is not a run: nothing is written, saved or continued, so `run.loop` has no part in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.errors import DataError, MissingPathError
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.build import build_learner, build_policy
from rlhf_pipeline.run.checkpoint import load_checkpoint, step_of
from rlhf_pipeline.run.config_diff import definition_at
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.offline_batches import Batches
from rlhf_pipeline.run.sources import recorded_admission
from rlhf_pipeline.run.temperatures import sampled_at
from trajectory_store import MissingRowError, TrajectoryStore

_OWN_FIELDS = frozenset(
    {
        "step",
        "row_ids",
        "trajectory_ids",
        "watermark",
        "seed",
        "ages",
        "ess",
        "source_weights",
        "no_gradient",
        "left_out",
    }
)
"""The fields of a ledger row if the learner selected the rows; other fields mean that a caller selected them."""

_CLOSE = 1e-3
"""The largest relative difference from the recorded loss on a device without bitwise repeatability."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedSteps:
    """One optimizer step, taken again."""

    step: int
    num_trajectories: int
    batch_problem: str | None
    recorded: float | None
    computed: float | None
    recorded_norm: float | None
    computed_norm: float | None
    exact: bool

    @property
    def same_bits(self) -> bool:
        """Whether loss and gradient norm are the recorded ones, bit for bit."""
        return self.recorded == self.computed and self.recorded_norm == self.computed_norm

    @property
    def ok(self) -> bool:
        """Whether batch, loss and gradient norm agree, as far as the device can repeat them."""
        if self.batch_problem is not None:
            return False
        pairs = ((self.recorded, self.computed), (self.recorded_norm, self.computed_norm))
        return self.same_bits or (not self.exact and all(_close(a, b) for a, b in pairs))


@dataclass(frozen=True, kw_only=True, slots=True)
class RerunPlan:
    """Which steps to take again, and from where."""

    run: RunFolder
    checkpoint: Path
    start: int
    first: int
    last: int


def plan_rerun(run_dir: Address, *, from_step: int, num_steps: int | None = None) -> RerunPlan:
    """Find the checkpoint to start from, and check that everything needed is recorded."""
    run = RunFolder(run_dir)
    ledger, metrics = run.ledger, run.metrics
    num_steps_taken = min(ledger.last_step, metrics.last_step)
    if not 1 <= from_step <= num_steps_taken:
        raise DataError(
            f"{run_dir} has no step {from_step} to replay: its ledger and metrics have steps 1 to {num_steps_taken}."
            if num_steps_taken
            else f"{run_dir} has no steps to replay: its ledger or its metrics are empty."
        )
    checkpoints = [(step_of(path), path) for path in run.saved()]
    before = [(step, path) for step, path in checkpoints if step < from_step]
    if not before:
        oldest = min((step for step, _ in checkpoints), default=None)
        raise MissingPathError(
            f"{run_dir} has no checkpoint to replay step {from_step} from: "
            + (
                f"the oldest is from step {oldest}, so the first step that can be replayed is {oldest + 1}. "
                if oldest is not None and oldest < num_steps_taken
                else "there is no checkpoint of an earlier step. "
            )
            + "To be able to replay any step, start the run with --set learn.keep_checkpoints=1000000."
        )
    start, checkpoint = before[-1]
    run.bring(checkpoint)
    last = num_steps_taken if num_steps is None else min(from_step + num_steps - 1, num_steps_taken)
    lacking = [
        step for step in range(start + 1, last + 1) if ledger.place_of(step) is None or metrics.place_of(step) is None
    ]
    if lacking:
        raise DataError(f"{run_dir}: step {lacking[0]} is missing from ledger.jsonl or metrics.jsonl.")
    return RerunPlan(run=run, checkpoint=checkpoint, start=start, first=from_step, last=last)


def rerun(current: Pipeline, plan: RerunPlan, *, seed: int, device: str) -> Iterator[RepeatedSteps]:
    """Take the steps again and yield those from `plan.first` on; nothing in the run folder changes.

    Each is taken with the settings that the run had at that step.

    Args:
        current: the definition now, with the recorded overrides.
        plan: the steps.
        seed: of the run.
        device: where the steps are taken.
    """
    exact = torch.device(device).type == "cpu"
    run, history = plan.run, plan.run.record.history
    with closing(TrajectoryStorage(run.store_path, mode="r", backend=current.buffer.backend)) as storage:
        heat = sampled_at([(storage.store, None)])
        buffer = TrajectoryReplayBuffer(storage=storage, seed=seed)

        def learner_of(defined: Pipeline) -> Learner:
            policy = build_policy(defined, seed=seed, device=device)
            policy.temperature = heat or policy.temperature
            return build_learner(defined, policy, buffer, ledger=None, seed=seed, may_be_empty=True)

        pipeline = definition_at(current, history, plan.start + 1)
        learner = learner_of(pipeline)
        load_checkpoint(plan.checkpoint, learner)
        batches = _batches(pipeline, storage.store, seed)
        for step in range(plan.start + 1, plan.last + 1):
            if (defined := definition_at(current, history, step)) != pipeline:
                pipeline, before, learner = defined, learner, learner_of(defined)
                _go_on(before, learner)
            row, line = run.ledger.required(step), run.metrics.required(step)
            rows = np.asarray(row["row_ids"], dtype=np.int64)
            try:
                problem = _batch_problem(learner, storage.store, row, rows)
                if problem is None and batches is not None:
                    drawn, _ = batches.rows(step)
                    if drawn.tolist() != rows.tolist():
                        problem = f"{len(drawn)} different trajectories would be drawn now"
                figures = learner.step(
                    step,
                    row_ids=rows,
                    ages=np.asarray(row["ages"], dtype=np.int64),
                    admitted=recorded_admission(pipeline, learner, run.ledger, step),
                )
            except MissingRowError as error:
                raise DataError(
                    f"step {step} used trajectories that are no longer in {storage.store.path}: they were "
                    "evicted. Only a run without buffer.max_trajectories can be replayed from any step."
                ) from error
            if step >= plan.first:
                yield RepeatedSteps(
                    step=step,
                    num_trajectories=len(rows),
                    batch_problem=problem,
                    recorded=line.get("loss"),
                    computed=_recorded_form(figures["loss"]),
                    recorded_norm=line.get("grad_norm"),
                    computed_norm=_recorded_form(figures["grad_norm"]),
                    # Several processes sum their gradients in another order.
                    exact=exact and line.get("processes", 1) == 1,
                )


def _go_on(before: Learner, learner: Learner) -> None:
    """Bring a learner with other settings to where another one is."""
    with TemporaryDirectory() as folder:
        before.write(Path(folder))
        learner.read(Path(folder))


def _batch_problem(learner: Learner, store: TrajectoryStore, row: Mapping[str, Any], rows: np.ndarray) -> str | None:
    """Return how the batch differs from the ledger's record of it, or return None.

    The rows must hold the trajectories and ages of the ledger; and if the learner chose them itself, the choice is
    repeated on the store of that time.
    """
    version = row.get("newest_version", row["step"] - 1)  # recorded by runs over stores
    if len(rows):
        trajectories = store.read_scalars("trajectory_id", rows).tolist()
        if row.get("trajectory_ids", trajectories) != trajectories:
            return "its rows contain different trajectories than the ledger lists"
        if (version - store.read_scalars("policy_version", rows)).tolist() != row["ages"]:
            return "its trajectories have different policy versions than the ledger lists"
    # The use counts of that time are not known here, so a choice with a use limit is not repeated.
    if row.keys() <= _OWN_FIELDS and len(store) == store.watermark and learner.sample.max_uses is None:
        chosen = learner.chosen_rows(row["step"], watermark=row["watermark"]).row_ids
        if chosen.tolist() != rows.tolist():
            return f"the learner would now select {len(chosen)} trajectories instead of these {len(rows)}"
    return None


def _batches(pipeline: Pipeline, store: TrajectoryStore, seed: int) -> Batches | None:
    """Return the batches of a run over stores; None for other runs, and if uses are limited."""
    replay = pipeline.replay
    if replay is None or replay.recorded_order or pipeline.sample.max_uses is not None:
        return None
    return Batches(
        store,
        replay=replay,
        sample=pipeline.sample,
        batch_size=pipeline.step_size,
        seed=seed,
        ledger=None,
    )


def _recorded_form(value: float | int | str | None) -> float | None:
    """Return a figure as in `metrics.jsonl`, where a non-finite number is null."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _close(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=_CLOSE, abs_tol=1e-7)
