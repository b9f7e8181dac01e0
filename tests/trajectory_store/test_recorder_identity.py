"""Groups, episodes and names of what a recorder writes: what is one member, one group, one run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajectory_store import BatchError
from trajectory_store.recorder import TrajectoryRecorder, learnable_rows


def rows(prompts: list[list[int]], **more: Any) -> dict[str, Any]:
    """Return what a call records: a completion of one token for each prompt."""
    num = len(prompts)
    ids = [[100 + i] for i in range(num)]
    return {"prompt_ids": prompts, "completions": [""] * num, "completion_ids": ids, "rewards": [1.0] * num, **more}


def column(recorder: TrajectoryRecorder, name: str) -> list[Any]:
    """Return a column of its store."""
    return list(recorder.store.read(recorder.store.ids(), [name])[name])


def test_groups_of_evaluations_are_apart(tmp_path: Path):
    """A data set of an evaluation may number its prompts as that of the training does (T5)."""
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        recorder.record(**rows([[1], [1]]), groups=["5/0", "5/0"])
        recorder.record(**rows([[2], [2]]), groups=["5/0", "5/0"], evaluation=True)
        recorder.record(**rows([[1], [2]]), groups=["5/0", "5/0"], evaluation=[False, True])
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        recorder.record(**rows([[2], [1]]), groups=["5/0", "5/0"], evaluation=[True, False])
        training, evaluation = column(recorder, "group_id")[0], column(recorder, "group_id")[2]
        assert training != evaluation
        assert column(recorder, "group_id") == [
            *(training, training, evaluation, evaluation, training, evaluation, evaluation, training)
        ]


def test_groups_are_of_a_run(tmp_path: Path):
    """A run that goes on completes its groups, and another one, whose names begin again, has groups of its own."""
    for run, prompt in (("one", 1), ("two", 2), ("one", 1)):
        with TrajectoryRecorder(tmp_path / "store", run_id=run) as recorder:
            recorder.record(**rows([[prompt]]), groups=[0], names=["0/0"])
    with TrajectoryRecorder(tmp_path / "store", run_id="two") as recorder:
        recorder.record(**rows([[3]]), groups=[0], run_id=recorder.session_id)
        one, two, again, scoped = column(recorder, "group_id")
        assert one == again
        assert len({one, two, scoped}) == 3


def test_rewards_by_name_are_of_a_run_and_go_to_its_newest_row(tmp_path: Path):
    """Another process finds the newest row of a name in its run, not the oldest, and not that of another run."""
    for run, prompt in (("one", 1), ("one", 1), ("two", 2)):
        with TrajectoryRecorder(tmp_path / "store", run_id=run) as recorder:
            recorder.record(**rows([[prompt]], rewards=None), names=["q"])
    with TrajectoryRecorder(tmp_path / "store", run_id="one") as other:
        other.give_rewards({"q": 0.5})
        other.give_rewards({"q": 0.25}, run_id="two")
        assert np.array_equal(column(other, "task_reward"), [math.nan, 0.5, 0.25], equal_nan=True)
        with pytest.raises(BatchError, match="no completion named 'q' of run 'three'"):
            other.give_rewards({"q": 1.0}, run_id="three")


def test_a_second_prompt_under_one_name_is_rejected(tmp_path: Path):
    """In one call, in a later one and after a restart; nothing of the call is stored."""
    with TrajectoryRecorder(tmp_path / "store", run_id="r") as recorder:
        with pytest.raises(BatchError, match="group 'g' of run 'r' has a different prompt from row 1"):
            recorder.record(**rows([[1], [2]]), groups=["g", "g"])
        recorder.record(**rows([[1]]), groups=["g"])
        with pytest.raises(BatchError, match="a different prompt from row 0"):
            recorder.record(**rows([[2]]), groups=["g"])
    with TrajectoryRecorder(tmp_path / "store", run_id="r") as recorder:
        with pytest.raises(BatchError, match="a different prompt from row 1"):
            recorder.record(**rows([[1], [3]]), groups=["g", "g"])
        recorder.record(**rows([[1]]), groups=["g"])
        recorder.record(**rows([[4]]), groups=["g"], one_prompt=False)
        assert len(set(column(recorder, "group_id"))) == 1
        assert len(column(recorder, "group_id")) == 3


def test_rows_of_an_episode_are_one_member(tmp_path: Path):
    """They share its version, failure and end, have one id, and are learned from if its last row is scored (T6)."""
    calls = rows([[1], [1, 2, 3], [1], [1, 4, 5], [1], [1]], rewards=[None, 1.0, None, None, 0.5, None])
    calls |= {"groups": ["q"] * 6, "episodes": ["a", "a", "b", "b", None, None], "policy_version": [4, 3, 4, 4, 4, 4]}
    calls |= {"failures": ["", "", "timeout", "", "", ""], "finish_reasons": ["step", "stop"] * 3}
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        recorder.record(**rows([[1]]), groups=["before"])
        assert "episode_id" not in recorder.store.schema
        ids = recorder.record(**calls, advantages=[None, 0.5, None, None, 0.0, 0.0])
        named = column(recorder, "trajectory_id")[1:]
        assert len(set(named)) == 6
        assert column(recorder, "episode_id")[1:] == [named[0], named[0], named[2], named[2], -1, -1]
        assert column(recorder, "episode_row")[1:] == [0, 1, 0, 1, 0, 0]
        assert column(recorder, "episode_size")[1:] == [2, 2, 2, 2, 1, 1]
        assert len(set(column(recorder, "group_id")[1:])) == 1
        assert column(recorder, "policy_version")[1:] == [3, 3, 4, 4, 4, 4]
        assert column(recorder, "failure_reason")[1:] == ["", "", "timeout", "timeout", "", ""]
        assert column(recorder, "finish_reason")[1:] == ["stop", "stop", "stop", "stop", "step", "stop"]
        assert column(recorder, "advantage")[1:3] == [0.5, 0.5]
        assert learnable_rows(recorder.store).row_ids.tolist()[1:] == ids[[0, 1, 4]].tolist()
        recorder.give_rewards({int(ids[3]): 1.0, int(ids[5]): 0.0})
        assert learnable_rows(recorder.store).row_ids.tolist()[1:] == ids.tolist()
        assert column(recorder, "reward_trusted")[1:] == [True] * 6
        recorder.give_rewards({}, failures={int(ids[1]): "timeout"})
        assert column(recorder, "failure_reason")[1:] == ["timeout", "timeout", "", "", "", ""]
        with pytest.raises(BatchError, match="row 0 of an episode of 2 rows"):
            recorder.give_rewards({int(ids[0]): 1.0})


def test_episodes_that_do_not_fit(tmp_path: Path):
    """A reward before the end, rows apart from each other, groups that are only counted; nothing is stored."""
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        for episodes, groups, wrong in (
            (["a", "a"], ["q", "q"], "row 0 has a reward, 1, but is not the last row of its episode"),
            (["a", "b", "a"], ["q"] * 3, "rows of episode 'a' are not consecutive"),
            (["a", "a"], None, "episodes of several rows require group names"),
        ):
            with pytest.raises(BatchError, match=wrong):
                recorder.record(**rows([[1]] * len(episodes)), episodes=episodes, groups=groups)
        assert not len(recorder.store)
