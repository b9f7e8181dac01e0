"""One rule decides which rows may be learned from, for serving, replay and exports for training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.config import Replay
from rlhf_pipeline.exchange import export_store
from rlhf_pipeline.run.selection import Limits, choose
from tests.damage import flip
from trajectory_store import BatchError, Column, CorruptionError, SchemaError, TrajectoryStore
from trajectory_store.adapters import verl
from trajectory_store.adapters.trl import stored_rollouts
from trajectory_store.recorder import TrajectoryRecorder, learnable_rows
from trajectory_store.recorder.standard import SUPERSEDED

from . import peers


def record(recorder: TrajectoryRecorder, first: int, rewards: list[float | None], **columns: Any) -> None:
    """Record a group of one prompt, whose completions are numbered from `first` on."""
    ids = [[first + member] for member in range(len(rewards))]
    rows = {"prompts": ["a"] * len(ids), "prompt_ids": [[1]] * len(ids), "completions": [""] * len(ids)}
    recorder.record(**rows, completion_ids=ids, rewards=rewards, **columns)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of which 1004, 1005 and 1009 may be learned from."""
    folder = tmp_path / "store"
    with TrajectoryRecorder(folder, group_size=2) as recorder:
        record(recorder, 1002, [1.0, 0.0], policy_version=0)
    with TrajectoryRecorder(folder, group_size=2) as recorder:
        recorder.resume(0)
        record(recorder, 1004, [1.0, 0.0], policy_version=0)
        record(recorder, 1006, [1.0, 0.0], evaluation=True)
        record(recorder, 1008, [None, 0.5])
        record(recorder, 1010, [1.0, 0.0], failures=["timeout", "timeout"])
    with TrajectoryStore.open(folder, mode="a", add_columns=[SUPERSEDED]) as opened:
        rows = opened.append({"input_ids": [[1, 1012], [1, 1013]], "task_reward": [1.0, 1.0], "prompt": ["a", "a"]})
        opened.update(rows[:1], superseded=np.array([True]))
        opened.update(rows[1:], reward_trusted=np.array([False]))
    return folder


def test_every_consumer_learns_from_the_same_rows(store: Path, tmp_path: Path):
    """Not from evaluations, replaced rows, or rows without a trusted reward (T4)."""
    right = [1004, 1005, 1009]
    with TrajectoryStore.open(store) as opened:
        chosen = learnable_rows(opened)
        assert [ids[-1] for ids in opened.read(chosen.row_ids, ["input_ids"])["input_ids"]] == right
        assert (chosen.num_unscored, chosen.num_replaced) == (4, 2)
        replayed = choose(Replay(stores=(str(store),)), Limits(vocabulary=2000, positions=None))
        assert replayed.row.tolist() == chosen.row_ids.tolist()
    assert [ids[0] for ids in stored_rollouts(store)(["a"] * 3, None)["completion_ids"]] == right
    queue = peers.Queue()
    verl.serving(peers.Buffer, queue, str(store), list)(queue).sample(0, "train", 2)
    assert [fields["responses"][0] for fields in queue.rows.values()] == right
    export_store(store, tmp_path / "rows.jsonl", learnable=True, columns=["input_ids"])
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["input_ids"][-1] for line in lines] == right
    assert export_store(store, tmp_path / "all.jsonl").num_trajectories == 12


def test_a_filter_never_makes_an_older_row_count_again(store: Path):
    """The newest row of a trajectory is decided in the whole store."""
    with TrajectoryStore.open(store) as opened:
        chosen = learnable_rows(opened, opened.ids()[:2])
        assert (len(chosen.row_ids), chosen.num_replaced) == (0, 2)
        assert learnable_rows(opened, opened.ids()[[3, 0, 2]]).row_ids.tolist() == opened.ids()[[3, 2]].tolist()


def test_damaged_rows_are_an_error_or_excluded(store: Path, tmp_path: Path):
    """Nothing serves a flipped bit."""
    token = np.int32(1004).tobytes()
    (file,) = (file for file in store.glob("seg-*/input_ids/c/0") if token in file.read_bytes())
    flip(file, file.read_bytes().find(token))
    with TrajectoryStore.open(store) as opened, pytest.raises(CorruptionError):
        learnable_rows(opened)
    with pytest.raises(CorruptionError):
        stored_rollouts(store)
    with pytest.raises(CorruptionError):
        verl.serving(object, None, str(store), list)
    with TrajectoryStore.open(store) as opened:
        rows = learnable_rows(opened, skip_damaged=True).row_ids
        served = [int(ids[-1]) for ids in opened.read(rows, ["input_ids"])["input_ids"]]
    assert served == [1002, 1003, 1009]  # the commit of 1004 and 1005 is damaged, and the rows before it are intact


def test_an_episode_counts_with_all_of_its_rows(tmp_path: Path):
    """A repeated step recorded two rows in place of three: the third of the old episode is not learned from alone."""
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        episode = {"groups": ["q"] * 3, "episodes": ["e"] * 3, "policy_version": 0}
        record(recorder, 1000, [None, None, 1.0], **episode)
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        recorder.resume(0)
        shorter = {name: value[:2] if isinstance(value, list) else value for name, value in episode.items()}
        record(recorder, 1003, [None, 0.5], **shorter)
        ids = recorder.store.ids()
        assert learnable_rows(recorder.store).row_ids.tolist() == ids[3:].tolist()
        assert learnable_rows(recorder.store, ids[[2, 4]]).row_ids.tolist() == ids[4:].tolist()


def test_a_store_without_rewards_has_nothing_to_learn_from(tmp_path: Path):
    """It is named in an error, and what serves reports an empty selection."""
    with (
        TrajectoryStore.create(tmp_path / "plain", [Column("input_ids", "int32", ragged=True)]) as plain,
        pytest.raises(SchemaError, match="no column task_reward"),
    ):
        learnable_rows(plain)
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        record(recorder, 5, [math.nan])
    with pytest.raises(BatchError, match="no rows that may be used for training"):
        verl.serving(object, None, str(tmp_path / "store"), list)
