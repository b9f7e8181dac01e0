"""Other trainers killed with SIGKILL while they record: what they were told is stored is there, and there once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from trajectory_store import TrajectoryStore

from ._beside import NUM, WAYS

ROOT = Path(__file__).resolve().parents[2]


def train(way: str, store: Path, first: int, attempt: int, last: int | None, delay: float) -> list[tuple[int, int]]:
    """Take rollouts in a process of its own, killed in the middle of the one after `last`; return what it was told."""
    command = [sys.executable, "-m", "tests.crash._beside", way, str(store), str(first), str(attempt)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'storage'}"}
    told: list[tuple[int, int]] = []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=env, cwd=ROOT, bufsize=1, **pipes) as running:
        assert running.stdout is not None
        assert running.stdin is not None
        for line in running.stdout:
            number, of = line.split()
            told.append((int(number), int(of)))
            if number != str(last) and running.poll() is None:
                running.stdin.write("\n")
            elif number == str(last):
                running.stdin.write("\n")
                time.sleep(delay)
                running.send_signal(signal.SIGKILL)
    return told


@pytest.mark.crash
@pytest.mark.parametrize("way", [*WAYS, "nemo_gym"])
def test_what_a_trainer_was_told_is_there_once(tmp_path: Path, way: str):
    """Three kills in the middle of 200 rollouts of two completions; the trainer goes on after what it was told."""
    store, told, rng = tmp_path / "store", list[tuple[int, int]](), random.Random(way)
    for attempt, middle in enumerate([*(rng.randrange(at, at + 40) for at in (20, 80, 140)), None]):
        told += train(way, store, told[-1][0] + 1 if told else 0, attempt, middle, rng.uniform(0, 0.004))
    assert [number for number, _ in told] == list(range(NUM))
    assert len({attempt for _, attempt in told}) == (1 if way == "nemo_gym" else 4)
    with TrajectoryStore.open(store) as opened:
        rows = Counter(tuple(ids.tolist()) for ids in opened.read(opened.ids(), ["input_ids"])["input_ids"])
        groups = opened.read_scalars("group_id")
    for number, attempt in told:
        for member in range(2):
            assert rows[9, attempt + 1, number + 1, member] == 1, (number, attempt, member)
    assert set(rows.values()) == {1}
    assert len(rows) <= 2 * NUM + 2 * 3  # what was stored and not told of
    assert way == "nemo_gym" or len(groups) - len(set(groups.tolist())) >= NUM
