"""A run killed with SIGKILL again and again ends like the run that was left alone.

By default five kills; `--full-sweep` takes twenty. Each starts the command, as a person would.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_pipeline.run.jsonl import read_rows
from trajectory_store import TrajectoryStore

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(3600)]

FULL_STEPS, FULL_KILLS = 80, 20
STEPS, KILLS = 24, 5


def start(run_dir: Path, steps: int, *extra: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "rlhf_pipeline",
        "run",
        "copy_digits",
        "--out",
        str(run_dir),
        "--steps",
        str(steps),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *extra], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)


def finish(process: subprocess.Popen[bytes]) -> str:
    output, _ = process.communicate(timeout=600)
    text = output.decode()
    assert process.returncode == 0, text
    return text


def acknowledged(run_dir: Path) -> set[int]:
    """The row ids that the ledger names: the run was told that they are stored."""
    return {row_id for row in read_rows(run_dir / "ledger.jsonl") for row_id in row["row_ids"]}


def last_weights(run_dir: Path, steps: int) -> bytes:
    return (run_dir / "checkpoints" / f"step-{steps:08d}" / "model.safetensors").read_bytes()


def test_kills_then_the_same_end(tmp_path, request):
    """SIGKILLs at random moments: nothing acknowledged is missing, and the weights equal the straight run's."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    full = request.config.getoption("--full-sweep")
    steps, kills = (FULL_STEPS, FULL_KILLS) if full else (STEPS, KILLS)
    finish(start(straight, steps))

    rng = random.Random(20)
    for kill in range(kills):
        resumed = (killed / "config.json").exists()
        before = count_lines(killed / "metrics.jsonl")
        process = start(killed, steps, *(["--resume"] if resumed else []))
        if kill % 5 == 0:  # while it starts: the folder, the store, the first checkpoint
            wait_for(process, killed.exists)
        else:  # a step or two after it has caught up with where it was killed
            enough = before + rng.randint(1, 2)
            wait_for(process, lambda enough=enough: count_lines(killed / "metrics.jsonl") >= enough)
        time.sleep(rng.uniform(0, 0.1))
        assert process.poll() is None, "the run ended before it was killed so many times; raise STEPS"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        if (killed / "store").exists():
            with TrajectoryStore.open(killed / "store") as store:
                report = store.verify()
                assert report.ok, str(report)
                assert acknowledged(killed) <= set(store.ids().tolist())
    assert (killed / "metrics.jsonl").exists()
    finish(start(killed, steps, "--resume"))
    assert last_weights(killed, steps) == last_weights(straight, steps)
    assert_no_group_lost_or_repeated(straight, killed)
    assert reward_curve(killed) == reward_curve(straight)


def wait_for(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()[0].decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def reward_curve(run_dir: Path) -> list[tuple[int, float | None]]:
    return [(row["step"], row["task_reward"]) for row in read_rows(run_dir / "metrics.jsonl")]


def assert_no_group_lost_or_repeated(straight: Path, killed: Path) -> None:
    found = []
    for run_dir in (straight, killed):
        with TrajectoryStore.open(run_dir / "store") as store:
            trajectory_ids = store.read_scalars("trajectory_id").tolist()
        assert len(trajectory_ids) == len(set(trajectory_ids)), "a trajectory was stored twice"
        found.append(sorted(trajectory_ids))
    assert found[0] == found[1]
    assert json.loads((killed / "config.json").read_text())["seed"] == 0
