"""Imports killed with SIGKILL at random moments and typed again: every row is there once."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from rlhf_pipeline.exchange import export_store, import_files
from tests.processes import Children
from trajectory_store import TrajectoryStore, diff

KILLS = 12


def import_slowly(file: Path, store: Path) -> None:
    """Import in small batches, with a pause after each."""
    import_files([file], store, batch_rows=7, on_commit=lambda report: time.sleep(0.004))


def kill_and_go_on(children: Children, file: Path, store: Path, rng: random.Random) -> int:
    """Kill imports until one comes to its end; return how many were killed."""
    killed = 0
    for _ in range(KILLS):
        running = children.call(import_slowly, file, store)
        running.until(lambda running=running: store.exists() or running.poll() is not None)
        time.sleep(rng.uniform(0, 0.15))
        if not running.killed():
            break
        killed += 1
    children.call(import_slowly, file, store).succeed(300)
    return killed


@pytest.mark.crash
def test_a_killed_import_continues_without_duplicates(tmp_path: Path, children: Children):
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
        assert kill_and_go_on(children, source, store, rng) >= 3
        with TrajectoryStore.open(tmp_path / "straight") as left, TrajectoryStore.open(store) as right:
            assert len(right) == 3000
            assert right.verify().ok
            assert diff(left, right, key="trajectory_id").same
            assert diff(left, right).same  # in the order of the file, too
