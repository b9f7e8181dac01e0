"""Imports and recordings at their edges: a file named twice, values that are no numbers, calls that fail."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.exchange import TrajectoryRecorder, import_files
from rlhf_pipeline.exchange.importer import ImportReport
from trajectory_store import TrajectoryStore


def write(path: Path, *rows: object) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GROUP = {"prompt_ids": [1], "completion_ids": [[2], [3]], "reward": [0.0, 1.0]}


def test_a_file_that_is_named_twice(tmp_path: Path):
    """A file named twice, or beside its folder or a link to it, is imported once; a tool's figures are passed over."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    file = write(folder / "a.jsonl", GROUP)
    write(folder / "aggregated_results.jsonl", {"eval/all/avg_score": 0.5})
    (tmp_path / "link.jsonl").symlink_to(file)
    report = import_files([file, file, folder, tmp_path / "link.jsonl"], tmp_path / "s")
    assert (report.num_imported, len(report.files)) == (2, 1)
    with TrajectoryStore.open(tmp_path / "s") as store:
        assert store.read_scalars("trajectory_id").tolist() == [0, 1]


@pytest.mark.parametrize("step", [math.nan, math.inf, "v3", 2**63, 1.5, None])
def test_a_version_that_is_no_number(tmp_path: Path, step: object):
    """NaN and infinity, as data frames write them, are named like any other value that is no whole number."""
    for name, first in (
        ("a", GROUP),
        ("b", GROUP | {"policy_version": 1}),
    ):  # also where the first row has no such field
        file = write(tmp_path / f"{name}.jsonl", first, GROUP | {"policy_version": step})
        if step is None:
            assert import_files([file], tmp_path / name).num_imported == 4
            continue
        with pytest.raises(
            DataError,
            match=r"\.jsonl:2: field 'policy_version' must be a whole number( of at most \d+)?, got (float|str|int) ",
        ):
            import_files([file], tmp_path / name)


def test_a_mask_that_is_no_list(tmp_path: Path):
    """A mask of another kind is named with its row."""
    row = {"prompt_ids": [1], "completion_ids": [2], "reward": 1.0}
    file = write(tmp_path / "a.jsonl", row | {"completion_mask": [1]}, row | {"completion_mask": 1})
    with pytest.raises(DataError, match=r"a\.jsonl:2: field 'completion_mask' must be a list, got int 1"):
        import_files([file], tmp_path / "s")
    with TrajectoryStore.open(tmp_path / "s") as store:
        assert len(store) == 1


def test_rewards_of_two_splits_are_not_mixed(tmp_path: Path):
    """A sample that does not name its split gets a reward only where the splits agree on one."""
    sample = {
        "prompt_tokens": [1],
        "samples": [{"tokens": [2], "logprobs": [-1.0]}],
        "scope": {"iteration": 0, "group_idx": 0, "traj_idx": 0},
    }
    named = sample | {"scope": sample["scope"] | {"split": "test"}}
    summary = {"iteration": 0, "group_idx": 0, "traj_idx": 0, "total_reward": 1.0, "split": "train"}
    other = summary | {"split": "test", "total_reward": 0.0}
    for name, summaries, wanted in (("a", [summary], [1.0, math.nan]), ("b", [summary, other], [math.nan, 0.0])):
        files = [write(tmp_path / f"{name}1.jsonl", sample, named), write(tmp_path / f"{name}2.jsonl", *summaries)]
        report = import_files(files, tmp_path / name)
        assert f"reward=total_reward of {len(summaries)} summaries" in report.files[0].about
        with TrajectoryStore.open(tmp_path / name) as store:
            assert np.array_equal(store.read_scalars("task_reward"), wanted, equal_nan=True)


def test_a_call_that_was_not_recorded_keeps_the_ranks_in_step(tmp_path: Path):
    """Where one process could not record a call, its later calls still meet those of the other process in one group."""
    made = [
        TrajectoryRecorder(tmp_path / "s", group_size=4, on_error="log", rank=rank, world_size=2) for rank in (0, 1)
    ]

    def call(rank: int, number: int, **wrong: object) -> None:
        ids = [[number], [number]]
        given = {"prompt_ids": ids, "completion_ids": ids, "completions": ["", ""], "rewards": [0.0, 1.0]} | wrong
        made[rank].record(**given)  # type: ignore[arg-type]

    call(0, 1, rewards=[0.0])
    call(1, 1)
    call(0, 2)
    call(1, 2)
    for recorder in made:
        recorder.close()
    with TrajectoryStore.open(tmp_path / "s") as store:
        groups, tokens = store.read_scalars("group_id"), store.read_ragged("input_ids").values[::2]
        assert len(np.unique(store.read_scalars("trajectory_id"))) == len(store) == 6
        assert sorted(zip(groups.tolist(), tokens.tolist(), strict=True)) == [(0, 1)] * 2 + [(4, 2)] * 4


def test_two_trainings_at_once(tmp_path: Path):
    """Recorders that were opened together share neither groups nor ids, also where one was slow to begin."""
    recorders = [TrajectoryRecorder(tmp_path / "s", group_size=2) for _ in range(3)]
    for call in range(4):
        for number, recorder in enumerate(recorders[: call + 1]):
            ids = [[10 * number + call]] * 2
            recorder.record(prompt_ids=ids, completion_ids=ids, completions=["", ""], rewards=[0.5, 0.5])
    for recorder in recorders:
        recorder.close()
    with TrajectoryStore.open(tmp_path / "s") as store:
        assert store.verify().ok
        assert len(np.unique(store.read_scalars("trajectory_id"))) == len(store) == 18
        groups, tokens = store.read_scalars("group_id"), store.read_ragged("input_ids").values[::2]
    found = {group: tokens[groups == group].tolist() for group in np.unique(groups).tolist()}
    assert sorted(found.values()) == [[token] * 2 for token in (0, 1, 2, 3, 11, 12, 13, 22, 23)]


def test_rewards_that_are_not_finite_count_for_nobody(tmp_path: Path):
    """Infinities of both signs are no reward, as for the learner, and leave the mean of the others as it is."""
    report = ImportReport(store=tmp_path)
    for reward in (0.5, math.inf, -math.inf, math.nan):
        report.tally({"task_reward": reward})
    assert (report.num_without_reward, report.reward_sum) == (3, 0.5)
