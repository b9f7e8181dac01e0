"""Other trainers killed with SIGKILL while they record: what they were told is stored is there, and there once."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.processes import Children
from trajectory_store import TrajectoryStore

from . import _beside
from ._beside import NUM, WAYS


def train(
    children: Children, way: str, store: Path, first: int, attempt: int, last: int | None, delay: float
) -> list[tuple[int, int]]:
    """Take rollouts in a process of its own, killed in the middle of the one after `last`; return what it was told."""
    ahead = store.with_name(f"ahead-{attempt}")
    ahead.write_bytes(bytes(NUM if last is None else last))
    trainer = children.call(_beside.train, way, str(store), first, attempt, str(ahead))
    if last is None:
        trainer.succeed()
    else:
        trainer.until(lambda: f"\n{last} " in f"\n{trainer.output()}", every=0.001)
        ahead.write_bytes(bytes(last + 1))
        time.sleep(delay)
        trainer.kill()
    return [(int(number), int(of)) for number, of in (line.split() for line in trainer.output().splitlines())]


@pytest.mark.crash
@pytest.mark.parametrize("way", [*WAYS, "nemo_gym"])
def test_what_a_trainer_was_sent_is_stored_once(tmp_path: Path, children: Children, way: str):
    """Three kills in the middle of 200 rollouts of two completions; the trainer goes on after what it was told."""
    store, told, rng = tmp_path / "store", list[tuple[int, int]](), random.Random(way)
    for attempt, middle in enumerate([*(rng.randrange(at, at + 40) for at in (20, 80, 140)), None]):
        told += train(children, way, store, told[-1][0] + 1 if told else 0, attempt, middle, rng.uniform(0, 0.004))
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
