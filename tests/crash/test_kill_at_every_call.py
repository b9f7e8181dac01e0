"""SIGKILL before a file-system call, each in turn: a run of one process, a learner that publishes, and their resumes.

By default a few calls, spread over all of them; `--full-sweep` takes every one, and a second kill inside each resume.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline import Buffer, Collect, CopyDigits, Learn, Pipeline, TinyPolicy, WritePath, token_match
from rlhf_pipeline.report.check import check_run
from rlhf_pipeline.run.events import Event, RolloutDone, RunFinished
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.jsonl import read_rows
from trajectory_store import TrajectoryStore

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(7200)]

STEPS = 5
FEW = 7
"""Kill points of the short form."""

PIPELINE = Pipeline(
    name="killed",
    policy=TinyPolicy(hidden_size=16, num_layers=1, num_heads=2),
    prompts=CopyDigits(num_digits=2),
    reward=token_match,
    collect=Collect(prompts_per_rollout=2, group_size=4, max_new_tokens=3),
    write=WritePath(kl_coef=0.2, kl_target=0.02, kl_horizon=100),
    buffer=Buffer(max_staleness=STEPS),
    learn=Learn(steps=STEPS, lr=1e-2, checkpoint_every=2, keep_checkpoints=2),
)


def go_on(run_dir: Path, on_event: Callable[[Event], None]) -> None:
    """Start a run in one process, or go on with it, as a person would who types the command again."""
    from rlhf_pipeline.run.start import run

    run(PIPELINE, run_dir=run_dir, resume=RunFolder(run_dir).is_recorded, on_event=on_event)


def go_on_learning(run_dir: Path, on_event: Callable[[Event], None]) -> None:
    """Start the learner of a run of several processes."""
    from rlhf_pipeline.run.processes.learn import learn

    learn(PIPELINE, run_dir=run_dir, on_event=on_event)


def work(act: Callable[[Path, Callable[[Event], None]], None], run_dir: Path, at: int, told: Connection) -> None:
    """In a child: count calls under the run folder, be killed before number `at`; else say how many there were."""
    import torch

    torch.set_num_threads(1)
    hook: Any = ctypes.CDLL(os.environ["LD_PRELOAD"])
    hook.kill_at_call(str(run_dir).encode(), at)
    finished: list[Event] = []
    act(run_dir, lambda event: finished.append(event) if isinstance(event, RunFinished) else None)
    told.send((hook.calls_counted(), finished[-1].steps if finished else -1))


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """Runs an action in a child that has imported everything; returns what it said, or None if it was killed."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the counting hook with")
    hook = tmp_path_factory.mktemp("hook") / "kill_at_call.so"
    source = Path(__file__).with_name("_kill_at_call.c")
    subprocess.run([compiler, "-O1", "-w", "-shared", "-fPIC", "-o", hook, source, "-ldl"], check=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rlhf_pipeline.run.start", "rlhf_pipeline.run.processes.learn"])
    before = os.environ.get("LD_PRELOAD")
    os.environ["LD_PRELOAD"] = str(hook)

    def act(action: Callable, run_dir: Path, at: int = 0) -> tuple[int, int] | None:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(action, run_dir, at, sending))
        process.start()
        sending.close()
        try:
            said = receiving.recv()
        except EOFError:
            said = None
        process.join(120)
        receiving.close()
        assert process.exitcode == (0 if said is not None else -9), "the child failed by itself"
        return said

    try:
        yield act
    finally:
        if before is None:
            del os.environ["LD_PRELOAD"]
        else:
            os.environ["LD_PRELOAD"] = before


def weights(run_dir: Path) -> dict[str, bytes]:
    folder = RunFolder(run_dir).checkpoints / f"step-{STEPS:08d}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def used(run_dir: Path) -> list[tuple[int, list[int]]]:
    return [(row["step"], row["trajectory_ids"]) for row in read_rows(RunFolder(run_dir).ledger_file)]


def curve(run_dir: Path) -> list[tuple]:
    rows = read_rows(RunFolder(run_dir).metrics_file)
    return [tuple(row[name] for name in ("step", "task_reward", "loss", "grad_norm", "kl_coef")) for row in rows]


def assert_as_straight(run_dir: Path, straight: Path, at: object) -> None:
    assert used(run_dir) == used(straight), at
    assert curve(run_dir) == curve(straight), at
    found, expected = weights(run_dir), weights(straight)
    assert found.keys() == expected.keys(), at
    assert [name for name in expected if found[name] != expected[name]] == [], at
    assert [finding.text for finding in check_run(RunFolder.open(run_dir)) if not finding.ok] == [], at
    with TrajectoryStore.open(RunFolder(run_dir).store_path) as store:
        trajectories = store.read_scalars("trajectory_id").tolist()
        assert len(trajectories) == len(set(trajectories)), at
        rows = {row for line in read_rows(RunFolder(run_dir).ledger_file) for row in line["row_ids"]}
        assert rows <= set(store.ids().tolist()), at


def points(total: int, request: pytest.FixtureRequest) -> list[int]:
    if request.config.getoption("--full-sweep"):
        return list(range(1, total + 1))
    return sorted({1 + round(i * (total - 1) / (FEW - 1)) for i in range(FEW)})


def sweep(child, action, make: Callable[[Path], None], straight: Path, total: int, request, tmp_path: Path) -> None:
    """Kill at each point, sometimes again in the resume, let it finish, and compare."""
    rng = random.Random(total)
    for place, at in enumerate(points(total, request)):
        run_dir = tmp_path / f"killed-{at}"
        make(run_dir)
        assert child(action, run_dir, at) is None, at
        again = rng.randint(1, total) if place % 2 or request.config.getoption("--full-sweep") else 0
        said = child(action, run_dir, again)
        if said is None:
            said = child(action, run_dir)
        assert said is not None, (at, again)
        assert said[1] == STEPS, (at, again)
        assert_as_straight(run_dir, straight, (at, again))
        shutil.rmtree(run_dir)


def test_a_run_killed_at_each_call_ends_as_the_straight_one(child, tmp_path, request):
    """A start, rollouts, steps and checkpoints: weights, moments, random state, ledger and metrics are the same."""
    total, steps = child(go_on, tmp_path / "straight")
    assert steps == STEPS
    assert total > 100
    sweep(child, go_on, lambda folder: None, tmp_path / "straight", total, request, tmp_path)


def test_a_learner_killed_at_each_call_ends_as_the_straight_one(child, tmp_path, request):
    """A start beside rollouts that wait, steps, publications and checkpoints, and the resume of each."""
    waiting = tmp_path / "waiting"
    context = multiprocessing.get_context("forkserver")
    collector = context.Process(target=collect_all, args=(waiting,))
    collector.start()
    assert child(start_and_stop, waiting) is not None
    collector.join(180)
    assert collector.exitcode == 0
    straight = tmp_path / "straight"
    shutil.copytree(waiting, straight)
    total, steps = child(go_on_learning, straight)
    assert steps == STEPS
    sweep(child, go_on_learning, lambda folder: shutil.copytree(waiting, folder), straight, total, request, tmp_path)


def start_and_stop(run_dir: Path, on_event: Callable[[Event], None]) -> None:
    """Publish the first weights, and stop before the first step."""
    import signal

    from rlhf_pipeline.run.events import RunStarted
    from rlhf_pipeline.run.processes.learn import learn

    def stop(event: Event) -> None:
        if isinstance(event, RunStarted):
            os.kill(os.getpid(), signal.SIGTERM)

    learn(PIPELINE, run_dir=run_dir, on_event=stop)


def collect_all(run_dir: Path) -> None:
    """Collect as many rollouts as the run has steps, all with the first weights."""
    import signal

    from rlhf_pipeline.run.processes.collect import collect

    done: list[int] = []

    def count(event: Event) -> None:
        if isinstance(event, RolloutDone):
            done.append(event.rollout)
            if len(done) == STEPS:
                os.kill(os.getpid(), signal.SIGTERM)

    collect(PIPELINE, run_dir=run_dir, on_event=count)
