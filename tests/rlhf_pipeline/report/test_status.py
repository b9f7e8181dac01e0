"""What a run does now, told from its folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.report.query import View
from rlhf_pipeline.report.status import status
from rlhf_pipeline.run.disk import disk_usage
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.heartbeat import process_lock
from rlhf_pipeline.run.rows import StepRows
from trajectory_store import Column, Schema, TrajectoryStore

from .conftest import write_run

NOW = 1_700_000_000.0


def told(run: Path, now: float = NOW) -> dict[str, Any]:
    """Return the status of a run."""
    view = View(run)
    try:
        return status(view, now)
    finally:
        view.close()


def says(run: Path, name: str, state: str, age: float, **fields: Any) -> None:
    """Write what a process last said of itself."""
    (run / "processes").mkdir(exist_ok=True)
    said = {"state": state, "time": NOW - age, "started": NOW - 600, **fields}
    (run / "processes" / f"{name}.json").write_text(json.dumps(said))


def timed(run: Path, seconds: float, **figures: Any) -> None:
    """Give the rows of a run's steps times, the newest at NOW."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("metrics.jsonl",):
        (run / name).unlink(missing_ok=True)
    for line in lines:
        StepRows(run / "metrics.jsonl").append({**line, "time": NOW - seconds * (len(lines) - line["step"]), **figures})


def test_a_run_that_stopped(run_dir: Path):
    """Without a process, before its last step: it says so, and the command with which it goes on.

    So after a `kill -9` of a supervisor, whose last word was that it runs.
    """
    timed(run_dir, 60.0)
    says(run_dir, "supervisor", "running", 300.0)
    found = told(run_dir)
    assert (found["state"], found["step"], found["seen"], found["waits_for"]) == ("stopped", 12, NOW, [])
    go_on = f"rlhf-pipeline run --resume --out {run_dir}"
    assert found["alarms"][0] == f"nothing runs, and it stopped after step 12 of 300. Go on: {go_on}"


def test_a_run_that_ended(tmp_path: Path):
    """All steps, or the target, or every process at its end: no alarm."""
    steps = write_run(tmp_path / "steps", overrides=(("learn.steps", "12"),))
    target = write_run(tmp_path / "target", overrides=(("learn.stop_at_reward", "0.5"),))
    several = write_run(tmp_path / "several")
    says(several, "learner", "ended", 5.0)
    for run in (steps, target, several):
        found = told(run)
        assert (found["state"], found["alarms"]) == ("ended", [])


def test_a_run_in_one_process(run_dir: Path):
    """The lock of the folder tells that it runs, and since when."""
    before = time.time()
    with RunFolder(run_dir).lock():
        found = told(run_dir)
        assert found["state"] == "running"
        assert before - 1 <= found["since"] <= time.time()
    assert told(run_dir)["state"] == "stopped"


def test_processes_that_wait_hang_or_are_gone(run_dir: Path):
    """What a process waits for is said; one that is silent, gone or whose rewards all fail is an alarm each."""
    says(run_dir, "learner", "waiting for a rollout", 1.0, step=12)
    says(run_dir, "collector-0", "collecting", 300.0)
    says(run_dir, "collector-1", "collecting", 2.0)
    says(run_dir, "collector-2", "failed: every reward call", 2.0)
    with (
        process_lock(run_dir / "processes", "learner"),
        process_lock(run_dir / "processes", "collector-0"),
        process_lock(run_dir / "processes", "collector-2"),
    ):
        found = told(run_dir)
    assert (found["state"], found["since"], found["seen"]) == ("running", NOW - 600, NOW - 1)
    assert found["waits_for"] == ["learner: waiting for a rollout"]
    assert found["alarms"][:3] == [
        "collector-0 has said nothing for 300 s (it was: collecting)",
        "collector-1 is not running (it was: collecting)",
        "collector-2 failed: every reward call",
    ]


def test_disk_and_its_growth(run_dir: Path):
    """Bytes are those of the folder; per hour, what a trajectory takes times how many the steps added.

    Weights do not count there: a run keeps a few checkpoints, however long it goes on.
    """
    timed(run_dir, 60.0)
    weights = run_dir / "checkpoints" / "step-00000010" / "model.safetensors"
    weights.parent.mkdir(parents=True, exist_ok=True)
    weights.write_bytes(bytes(1 << 24))
    with RunFolder(run_dir).lock():
        found = told(run_dir)
    assert found["bytes"] == disk_usage(run_dir)
    # 48 trajectories, 8 of them before the first step: 40 in 11 minutes.
    grows = found["bytes"] - disk_usage(run_dir / "checkpoints")
    assert found["bytes_per_hour"] == pytest.approx(grows / 48 * 40 / (11 / 60))


def test_figures_that_look_wrong(tmp_path: Path):
    """Failed reward calls, groups without spread and a gradient that is not finite are alarms."""
    run = write_run(tmp_path / "run", failed=3)
    timed(run, 1.0, num_trajectories=40, num_taught=2)
    StepRows(run / "metrics.jsonl").append({"step": 13, "grad_norm": None, "time": NOW})
    with RunFolder(run).lock():
        alarms = told(run)["alarms"]
    assert alarms[0].startswith("3 trajectories of the newest 13 steps failed; why: ")
    assert alarms[1:3] == [
        "95% of the newest step's trajectories have no gradient, so they teach nothing",
        "step 13 has no finite gradient",
    ]


def test_a_finished_run_of_a_hundred_thousand_steps(tmp_path: Path):
    """It answers in under a second of processor time."""
    run = write_run(tmp_path / "run", num_rollouts=1, overrides=(("learn.steps", "100000"),))
    (run / "store").rename(tmp_path / "old")
    with TrajectoryStore.create(run / "store", Schema([Column("task_reward", "float32")])) as store:
        store.append({"task_reward": np.ones(400_000, np.float32)})
    row = {"loss": 0.1, "task_reward": 0.5, "grad_norm": 1.0, "ess": 0.9, "num_failed": 0}
    (run / "metrics.jsonl").write_text(
        "".join(f"{json.dumps({'step': n, 'time': NOW - 100_000 + n, **row})}\n" for n in range(1, 100_000))
    )
    StepRows(run / "metrics.jsonl").append({"step": 100_000, "time": NOW, **row})  # with the index of all
    began = time.process_time()
    found = told(run)
    assert time.process_time() - began < 1.0
    assert (found["state"], found["step"], found["stored"], found["alarms"]) == ("ended", 100_000, 400_000, [])


def test_a_run_of_one_process_that_is_frozen_or_stands_still(run_dir: Path):
    """No sign of life for half a minute, or no step for ten times the longest, is an alarm; a step is not."""
    timed(run_dir, 60.0)
    says(run_dir, "run", "running", 40.0)
    with process_lock(run_dir / "processes", "run"):
        assert told(run_dir)["alarms"] == ["run has said nothing for 40 s (it was: running)"]
        says(run_dir, "run", "running", -899.0)
        assert told(run_dir, NOW + 599)["alarms"] == []
        (alarm,) = told(run_dir, NOW + 900)["alarms"]
        assert alarm == "no step for 15 min 0 s; one of the newest 12 took 1 min 0 s at most"


def test_a_learner_that_nobody_feeds(run_dir: Path):
    """It is alive and waits, and no collector is: an alarm with the command that starts one."""
    timed(run_dir, 1.0)
    says(run_dir, "learner", "waiting for a rollout", 1.0, since=NOW - 45)
    with process_lock(run_dir / "processes", "learner"):
        (alarm,) = told(run_dir)["alarms"]
        assert alarm.startswith(
            "the learner waits for 45 s, and no collector is alive. Start one: rlhf-pipeline collect"
        )
        says(run_dir, "collector-0", "collecting", 1.0)
        with process_lock(run_dir / "processes", "collector-0"):
            assert told(run_dir)["alarms"] == []


def test_a_rate_is_of_a_minute_and_of_a_run_that_runs(run_dir: Path):
    """Steps of a second say nothing about an hour, and what has ended does not grow."""
    timed(run_dir, 60.0)
    assert told(run_dir)["bytes_per_hour"] is None
    timed(run_dir, 0.1)
    with RunFolder(run_dir).lock():
        assert told(run_dir)["bytes_per_hour"] is None
