"""What a run does now, told from its folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.cli import main
from rlhf_pipeline.report.query import View
from rlhf_pipeline.report.status import status
from rlhf_pipeline.run import start
from rlhf_pipeline.run.disk import disk_usage
from rlhf_pipeline.run.files import new_folder
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.heartbeat import process_lock
from rlhf_pipeline.run.remote.copies import CACHE, new_copy
from rlhf_pipeline.run.rows import StepRows
from tests.rlhf_pipeline.small import tiny
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


def texts(run: Path, now: float = NOW) -> list[str]:
    """Return the sentences of a run's alarms."""
    return [alarm["text"] for alarm in told(run, now)["alarms"]]


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
    resume = f"rlhf-pipeline run --resume --out {run_dir}"
    assert found["alarms"][0] == {
        "name": "stopped",
        "severity": "page",
        "text": f"no process is running; the run stopped after step 12 of 300. To continue: {resume}",
        "process": None,
        "window_s": None,
        "window_steps": None,
        "since": NOW,
    }


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
    assert [alarm["text"] for alarm in found["alarms"][:3]] == [
        "collector-0 has not reported for 300 s (its last state: collecting)",
        "collector-1 is not running (its last state: collecting)",
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


def test_a_run_of_one_process_that_is_frozen_or_stalls(run_dir: Path):
    """No sign of life for half a minute, or no step for ten times the longest, is an alarm; a step is not."""
    timed(run_dir, 60.0)
    says(run_dir, "run", "running", 40.0)
    with process_lock(run_dir / "processes", "run"):
        assert texts(run_dir) == ["run has not reported for 40 s (its last state: running)"]
        says(run_dir, "run", "running", -899.0)
        assert texts(run_dir, NOW + 599) == []
        (alarm,) = texts(run_dir, NOW + 900)
        assert alarm == "no step for 15 min 0 s; the longest of the newest 12 took 1 min 0 s"


def test_a_learner_that_nobody_feeds(run_dir: Path):
    """It is alive and waits, and no collector is: an alarm with the command that starts one."""
    timed(run_dir, 1.0)
    says(run_dir, "learner", "waiting for a rollout", 1.0, since=NOW - 45)
    with process_lock(run_dir / "processes", "learner"):
        (alarm,) = texts(run_dir)
        assert alarm.startswith(
            "the learner has waited for 45 s, but no collector is alive. To start one: rlhf-pipeline collect"
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


def test_a_liveness_probe_reads_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """A heartbeat in the copy of a run whose bucket cannot be reached decides; what a process reports does not."""
    monkeypatch.setenv(CACHE, str(tmp_path))
    check = ["status", "s3://no-such-bucket/run", "--check", "--local", "--process", "learner"]
    assert main(check) == 1
    assert capsys.readouterr().out == "page: learner has not reported yet\n"
    owners = type("Owner", (), {})(), type("Owner", (), {})()
    other, copy = new_copy(owners[0], "s3://no-such-bucket/other"), new_copy(owners[1], "s3://no-such-bucket/run")
    for folder, age in ((other, 1.0), (copy, 60.0)):
        (folder / "processes").mkdir()
        (folder / "processes" / "learner.json").write_text(json.dumps({"state": "x", "time": time.time() - age}))
    assert main(check) == 1
    assert capsys.readouterr().out == "page: learner is not running (its last state: x)\n"
    with process_lock(copy / "processes", "learner"):
        assert main(check) == 1
        assert "learner has not reported for 60 s" in capsys.readouterr().out
        (copy / "processes" / "learner.json").write_text(json.dumps({"state": "failed: x", "time": time.time()}))
        assert main(check) == 0
    assert capsys.readouterr().out == "healthy\n"


def test_a_run_that_ended_reports_so(tmp_path: Path):
    """The last heartbeat of a run in one process is that it ended, so nothing of it is gone."""
    start.run(tiny(learn__steps="1"), run_dir=tmp_path / "run")
    (process,) = told(tmp_path / "run")["processes"]
    assert (process["state"], process["alive"], process["step"]) == ("ended", False, 1)


# -- what `status --check` reports -----------------------------------------------------------------------------------


@contextmanager
def at_work(folder: Path, /, **states: tuple[str, float]) -> Iterator[None]:
    """Hold the locks of processes that are in a state for 100 s, with how long ago they last reported it."""
    with ExitStack() as locks:
        for name, (state, age) in states.items():
            process = name.replace("_", "-")
            says(folder, process, state, age, since=time.time() - 100)
            heartbeat = folder / "processes" / f"{process}.json"
            heartbeat.write_text(json.dumps({**json.loads(heartbeat.read_text()), "time": time.time() - age}))
            locks.enter_context(process_lock(folder / "processes", process))
        yield


def steps_of(run: Path, num: int, ago_s: float = 0.0, **figures: Any) -> None:
    """Give a run new metrics: `num` steps up to some seconds ago, whose figures go evenly along lists of values."""
    (run / "metrics.jsonl").unlink()
    rows, end = StepRows(run / "metrics.jsonl"), time.time() - ago_s
    for step in range(1, num + 1):
        at = {name: values[(step - 1) * len(values) // num] for name, values in figures.items()}
        rows.append({"step": step, "time": end + step - num, "watermark": 48, "num_trajectories": 8, **at})


def healthy(run: Path) -> ExitStack:
    """A learner and a collector that work."""
    steps_of(run, 30, num_taught=[8, 6])
    stack = ExitStack()
    stack.enter_context(at_work(run, learner=("learning", 1.0), collector_0=("collecting", 1.0)))
    return stack


def ended(run: Path) -> ExitStack:
    """All steps were taken, and the last one has its checkpoint."""
    change(run, "learn", "steps", 12)
    with new_folder(run / "checkpoints" / "step-00000012") as checkpoint:
        (checkpoint / "state.json").write_text('{"step": 12}')
    return ExitStack()


def change(run: Path, section: str, name: str, value: int) -> None:
    """Change a setting in a run's record."""
    config = json.loads((run / "config.json").read_text())
    config["pipeline"][section][name] = value
    (run / "config.json").write_text(json.dumps(config))


def without(name: str) -> Callable[[Path], ExitStack]:
    """An ended run, one part of which was removed since."""

    def situation(run: Path) -> ExitStack:
        stack = ended(run)
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return stack

    return situation


def stopped(run: Path) -> ExitStack:
    """Killed before its last step."""
    return ExitStack()


def with_processes(steps_ago_s: float = 0.0, /, **states: tuple[str, float]) -> Callable[[Path], ExitStack]:
    """A run whose processes are in some states."""

    def situation(run: Path) -> ExitStack:
        steps_of(run, 30, ago_s=steps_ago_s, num_taught=[8])
        stack = ExitStack()
        stack.enter_context(at_work(run, **states))
        return stack

    return situation


def gone(run: Path) -> ExitStack:
    """A collector was killed, and the learner works."""
    stack = with_processes(learner=("learning", 1.0))(run)
    says(run, "collector-0", "collecting", 100.0)
    return stack


def working(**figures: Any) -> Callable[[Path], ExitStack]:
    """A run that takes steps with some figures."""

    def situation(run: Path) -> ExitStack:
        steps_of(run, 60, **figures)
        stack = ExitStack()
        stack.enter_context(at_work(run, run=("running", 1.0)))
        return stack

    return situation


def over_budget(run: Path) -> ExitStack:
    """A run that takes more than `buffer.max_bytes`."""
    change(run, "buffer", "max_bytes", 1000)
    return healthy(run)


SITUATIONS: dict[str, tuple[Callable[[Path], ExitStack], list[tuple[str, str]]]] = {
    "all works": (healthy, []),
    "ended": (ended, []),
    "ended, and the store is gone": (without("store"), [("missing_parts", "page")]),
    "ended, and the checkpoints are gone": (without("checkpoints"), [("missing_parts", "page")]),
    "ended, and the ledger is gone": (without("ledger.jsonl"), [("missing_parts", "page")]),
    "killed before its end": (stopped, [("stopped", "page")]),
    "a frozen learner": (with_processes(learner=("learning", 60.0)), [("silent", "page")]),
    "a collector that was killed": (gone, [("gone", "page")]),
    "every reward call fails": (
        with_processes(learner=("learning", 1.0), collector_0=("failed: every reward call", 1.0)),
        [("failed", "page")],
    ),
    "a learner without collectors": (
        with_processes(learner=("waiting for a rollout", 1.0)),
        [("no_collector", "page")],
    ),
    "no step for two hours": (with_processes(7200.0, run=("running", 1.0)), [("no_step", "page")]),
    "some failed trajectories": (working(num_failed=[0, 2], num_taught=[8]), [("failed_trajectories", "note")]),
    "one step without a gradient": (working(num_taught=[*[8] * 59, 0], task_reward=[0.1]), []),
    "no gradients, and nothing is learned": (
        working(num_taught=[0], task_reward=[0.0]),
        [("no_gradient", "note")],
    ),
    "no gradients after a collapse": (
        working(num_taught=[8, 8, 0], task_reward=[0.2, 0.9, 0.1]),
        [("no_gradient", "note")],
    ),
    "no gradients, because the task is solved": (working(num_taught=[8, 0], task_reward=[0.1, 1.0]), []),
    "no space is left": (over_budget, [("disk", "page")]),
}
"""What a run is in, and the name and severity of each alarm."""


@pytest.mark.parametrize("situation", SITUATIONS)
def test_what_status_check_reports(run_dir: Path, capsys: pytest.CaptureFixture[str], situation: str):
    """Each situation raises its alarms and no other; the exit code is 1 if one of them is a `page`."""
    prepare, expected = SITUATIONS[situation]
    with prepare(run_dir):
        code = main(["status", str(run_dir), "--check", "--json"])
        alarms = json.loads(capsys.readouterr().out)["alarms"]
        assert [(alarm["name"], alarm["severity"]) for alarm in alarms] == expected
        assert code == int(any(severity == "page" for _, severity in expected))
        assert main(["status", str(run_dir), "--check"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0] == "healthy") == (code == 0)
    assert [line.partition(": ")[0] for line in lines[code == 0 :]] == [severity for _, severity in expected]
