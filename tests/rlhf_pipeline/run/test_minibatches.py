"""Several steps on each rollout: passes over it, and parts of a pass that have no trajectory in common."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_pipeline.config import Learn, Pipeline
from rlhf_pipeline.learner.step_plan import part_of_rollout
from rlhf_pipeline.run.events import RolloutDone, RunStarted, StepDone
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.rerun import plan_rerun, rerun
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.run.processes.test_learn import stop_at
from tests.rlhf_pipeline.small import collect, learn, tiny, weights


def in_parts(steps: int, **changes: str) -> Pipeline:
    """A run of two passes in three parts over rollouts of 8 trajectories."""
    shape = {"collect__prompts_per_rollout": "2", "collect__group_size": "4", "buffer__max_staleness": "0"}
    shape |= {"learn__epochs": "2", "learn__minibatches": "3", "learn__keep_checkpoints": "9"}
    return tiny(**{**shape, "learn__steps": str(steps), **changes})


def assert_replayed(pipeline: Pipeline, run_dir: Path, *, from_step: int) -> None:
    """All steps from this one on are the recorded ones, bit for bit."""
    steps = list(rerun(pipeline, plan_rerun(run_dir, from_step=from_step), seed=0, device="cpu"))
    last = pipeline.learn.steps
    assert [(step.step, step.ok and step.same_bits) for step in steps] == [
        (n, True) for n in range(from_step, last + 1)
    ]


def test_parts_are_disjoint_and_whole_and_new_in_each_pass():
    """Whatever the number of rows: each is in one part of a pass; sizes differ by one at most; the seed decides."""
    config = Learn(epochs=2, minibatches=3)
    for rows in (1, 7, 9):
        for seed in (0, 1):
            parts = [part_of_rollout(rows, step=step, config=config, seed=seed) for step in range(1, 13)]
            for first in range(0, 12, 3):
                together = np.concatenate(parts[first : first + 3])
                assert sorted(together.tolist()) == list(range(rows))
                assert np.ptp([len(part) for part in parts[first : first + 3]]) <= 1
    of_nine = [part.tolist() for part in parts]
    assert of_nine[:3] != of_nine[3:6] != of_nine[6:9]
    assert part_of_rollout(5, step=3, config=Learn(epochs=4), seed=0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("loss", [{}, {"loss__tis_cap": "2"}], ids=["plain", "scored before"])
def test_a_run_takes_each_part_once_and_resumes_within_a_rollout(tmp_path, loss):
    """Two rollouts, each in two passes of three steps; stopped in a pass and resumed, or replayed, it is the same."""
    run(in_parts(12, **loss), run_dir=tmp_path / "straight")
    folder = RunFolder(tmp_path / "straight")
    used = [row["trajectory_ids"] for row in folder.ledger]
    assert [row["rollout"] for row in folder.metrics] == [0] * 6 + [1] * 6
    for first in range(0, 12, 3):
        rollout = first // 6
        together = [name for part in used[first : first + 3] for name in part]
        assert sorted(together) == list(range(8 * rollout, 8 * rollout + 8))
    assert used[0] != used[3]
    assert [row["ages"][0] for row in folder.ledger] == [*range(6)] * 2
    for steps in (4, 5, 9, 12):
        run(in_parts(steps, **loss), run_dir=tmp_path / "cut", resume=steps > 4)
    assert weights(tmp_path / "cut") == weights(tmp_path / "straight")
    assert [row["trajectory_ids"] for row in RunFolder(tmp_path / "cut").ledger] == used
    assert_replayed(in_parts(12, **loss), tmp_path / "straight", from_step=7)


def test_two_parts_of_an_even_gradient_are_the_whole(tmp_path):
    """With one part, a pass is the step of a run without parts, to the last bit."""
    run(in_parts(4, learn__minibatches="1"), run_dir=tmp_path / "one")
    base = in_parts(4, learn__minibatches="1")
    plain = dataclasses.replace(base, buffer=dataclasses.replace(base.buffer, max_staleness=1))
    run(plain, run_dir=tmp_path / "plain")
    assert weights(tmp_path / "one") == weights(tmp_path / "plain")
    assert torch.isfinite(torch.tensor([row["loss"] for row in RunFolder(tmp_path / "one").metrics])).all()


def test_a_learner_beside_collectors_takes_each_part_once(tmp_path):
    """A rollout that arrived, over a learner that is stopped in a pass and started again: the parts of a run alone.

    The loss scores the whole rollout before its first step, and so does a replay.
    """
    asked = in_parts(6, loss__tis_cap="2")
    run(asked, run_dir=tmp_path / "alone")
    run_dir = tmp_path / "several"
    learn(asked, run_dir=run_dir, on_event=stop_at(RunStarted))
    collect(asked, run_dir=run_dir, on_event=stop_at(RolloutDone))
    for steps in (2, 2, 2):
        learn(asked, run_dir=run_dir, on_event=stop_at(StepDone, steps))
    used = [row["trajectory_ids"] for row in RunFolder(run_dir).ledger]
    assert used == [row["trajectory_ids"] for row in RunFolder(tmp_path / "alone").ledger]
    assert weights(run_dir) == weights(tmp_path / "alone")
    assert_replayed(asked, run_dir, from_step=1)
