"""Imports killed with SIGKILL at random moments and typed again: every row is there once."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_pipeline.exchange import export_store, import_files
from trajectory_store import TrajectoryStore, diff

ROOT = Path(__file__).resolve().parents[2]
KILLS = 12
CODE = """
import sys, time
from rlhf_pipeline.exchange import import_files
import_files([sys.argv[1]], sys.argv[2], batch_rows=7, on_commit=lambda report: time.sleep(0.004))
"""


def start(file: Path, store: Path) -> subprocess.Popen[bytes]:
    """Start an import in its own process."""
    path = f"{ROOT}:{ROOT / 'storage'}"
    return subprocess.Popen([sys.executable, "-c", CODE, str(file), str(store)], env={"PYTHONPATH": path})


def kill_and_go_on(file: Path, store: Path, rng: random.Random) -> int:
    """Kill imports until one comes to its end; return how many were killed."""
    killed = 0
    while killed < KILLS:
        running = start(file, store)
        deadline = time.monotonic() + 120
        while not store.exists() and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.15))
        if running.poll() is not None:
            break
        running.send_signal(signal.SIGKILL)
        killed += 1
        running.wait()
    assert start(file, store).wait(300) == 0
    return killed


@pytest.mark.crash
def test_a_killed_import_goes_on_without_duplicates(tmp_path: Path):
    """Rollouts of another tool, and an export: after many kills the store equals that of a straight import."""
    rng = random.Random(5)
    file = tmp_path / "rollouts.jsonl"
    rows = [
        {"prompt_ids": [i // 4], "completion_ids": [i % 50] * rng.randrange(1, 60), "reward": i / 8}
        for i in range(3000)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    import_files([file], tmp_path / "straight")
    export_store(tmp_path / "straight", tmp_path / "export.jsonl")
    for source in (file, tmp_path / "export.jsonl"):
        store = tmp_path / f"killed_{source.stem}"
        assert kill_and_go_on(source, store, rng) >= 3
        with TrajectoryStore.open(tmp_path / "straight") as left, TrajectoryStore.open(store) as right:
            assert len(right) == 3000
            assert right.verify().ok
            assert diff(left, right, key="trajectory_id").same
            assert diff(left, right).same  # in the order of the file, too
