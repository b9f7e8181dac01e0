"""What a recorder is told of rows is in its store: how they were sampled, why they failed, their groups and rewards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajectory_store import BatchError, Column, SchemaError, TrajectoryStore
from trajectory_store.recorder import TrajectoryRecorder
from trajectory_store.recorder.standard import standard_schema


def columns(store: Path) -> dict[str, Any]:
    """Return all columns of a store."""
    with TrajectoryStore.open(store) as opened:
        return opened.read(opened.ids())


def rows(num: int = 3, **more: Any) -> dict[str, Any]:
    """Return what a call records: a prompt of two tokens, completions of one token more each."""
    ids = [[3] * (i + 1) for i in range(num)]
    return {
        "prompt_ids": [[1, 2]] * num,
        "completions": [""] * num,
        "completion_ids": ids,
        "rewards": [1.0] * num,
        **more,
    }


def test_everything_that_a_run_says(tmp_path: Path):
    """Temperature, mode, support, versions, failures, evaluation, engine, turns, named rewards, further columns."""
    experts = Column("routed_experts", "int16", ragged=True, shape=(2,), fill=0)
    with TrajectoryRecorder(tmp_path / "store", columns=[experts]) as recorder:
        recorder.record(
            **rows(),
            log_probs=[[-0.5], None, [-0.5, None, -1.0]],
            completion_masks=[[1], [1, 1], [1, 0, 1]],
            temperature=[0.5, 0.5, None],
            log_prob_mode="processed",
            support_log_mass=[[-0.1], None, [-0.1, 0.0, -0.2]],
            token_versions=[[4], [4, 4], [4, 5, 6]],
            failures=["", "SandboxTimeout", ""],
            reward_trusted=[True, True, False],
            evaluation=[False, False, True],
            engine="vllm",
            turn_spans=[None, None, [(0, 0), (2, 1), (3, 0), (4, 1)]],
            turn_rewards=[None, None, [0.25, 0.75]],
            named_rewards={"right": [1.0, 0.0, None]},
            extra={"routed_experts": [[[7, 8]], None, [[1, 2], [3, 4], [5, 6]]]},
        )
    found = columns(tmp_path / "store")
    assert np.array_equal(found["temperature"], np.array([0.5, 0.5, math.nan], np.float32), equal_nan=True)
    assert (found["log_prob_mode"], found["engine"]) == (["processed"] * 3, ["vllm"] * 3)
    scores = np.array([math.nan, math.nan, -0.5, math.nan, -1.0], np.float32)
    assert np.array_equal(found["log_probs"][2], scores, equal_nan=True)
    assert found["assistant_mask"][2].tolist() == [False, False, True, False, True]
    assert np.array_equal(found["support_log_mass"][2], np.array([0, 0, -0.1, 0, -0.2], np.float32))
    assert found["policy_version"].tolist() == [4, 4, 4]
    assert found["newest_policy_version"].tolist() == [-1, -1, 6]
    assert [spans.tolist() for spans in found["version_spans"]] == [[[2, 4]], [[2, 4]], [[2, 4], [3, 5], [4, 6]]]
    assert found["failure_reason"] == ["", "timeout", "grader_error"]
    assert found["reward_trusted"].tolist() == [True, False, False]
    assert np.array_equal(found["task_reward"], [1.0, math.nan, math.nan], equal_nan=True)
    assert found["evaluation"].tolist() == [False, False, True]
    assert found["turn_spans"][2].tolist() == [[0, 0], [2, 1], [3, 0], [4, 1]]
    assert found["turn_rewards"][2].tolist() == [0.25, 0.75]
    assert np.array_equal(found["reward_right"], [1.0, 0.0, math.nan], equal_nan=True)
    assert found["routed_experts"][2].tolist() == [[0, 0], [0, 0], [1, 2], [3, 4], [5, 6]]
    assert found["routed_experts"][1].tolist() == [[0, 0]] * 4


def test_what_is_not_said_is_unknown(tmp_path: Path):
    """No version, temperature or mode takes the place of one that nobody named, and no column that nothing needs."""
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        recorder.record(**rows())
        assert "version_spans" not in recorder.store.schema
    found = columns(tmp_path / "store")
    assert np.isnan(found["temperature"]).all()
    assert (found["log_prob_mode"], found["policy_version"].tolist()) == ([""] * 3, [-1] * 3)
    assert found["reward_trusted"].all()


def test_groups_by_name(tmp_path: Path):
    """Members come in any order, in any call, and after a restart; each group has one id."""
    for groups in (["a", "b", "a"], ["b", "c", "a"]):
        with TrajectoryRecorder(tmp_path / "store") as recorder:
            recorder.record(**rows(2), groups=groups[:2])
            recorder.record(**rows(1), groups=groups[2:])
    ids = columns(tmp_path / "store")["group_id"].tolist()
    a, b, c = ids[0], ids[1], ids[4]
    assert ids == [a, b, a, b, c, a]
    assert len({a, b, c}) == 3


def test_rewards_that_come_later(tmp_path: Path):
    """A row first and its reward later, by its name or its id, in this process or another; the last one counts."""
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        ids = recorder.record(**rows(3) | {"rewards": None}, names=["x", "y", "z"])
        assert np.isnan(columns(tmp_path / "store")["task_reward"]).all()
        recorder.give_rewards({"x": 1.0, int(ids[1]): 0.25})
        with pytest.raises(BatchError, match=r"no completion named 'w'"):
            recorder.give_rewards({"w": 1.0})
        with pytest.raises(BatchError, match=r"names are equal"):
            recorder.record(**rows(2), names=["v", "v"])
    with TrajectoryRecorder(tmp_path / "store") as other:
        other.give_rewards({"x": 0.5}, failures={"z": "grader broke"})
    found = columns(tmp_path / "store")
    assert np.array_equal(found["task_reward"], [0.5, 0.25, math.nan], equal_nan=True)
    assert found["failure_reason"] == ["", "", "grader_error"]
    assert found["reward_trusted"].tolist() == [True, True, False]


def test_rows_alike_by_either_way(tmp_path: Path):
    """Rows that have to be encoded are written one by one, the others all at once, and come out the same."""

    class Letters:
        eos_token_id, chat_template, name_or_path = 0, None, "letters"

        def encode(self, text: str, **options: Any) -> list[int]:
            return [ord(letter) for letter in text]

        def decode(self, ids: list[int], **options: Any) -> str:
            return "".join(map(chr, ids))

    more: dict[str, Any] = {
        "log_probs": [np.array([-0.5]), [-1.0, -2.0]],
        "completion_masks": [[True], [1, 0]],
        "rewards": [np.float32(0.5), True],
        "advantages": [0.5, None],
        "finish_reasons": ["max_tokens", "abort"],
        "answers": ["1", ["1", "one"]],
        "metas": [{"level": 3}, None],
        "policy_version": [3, 4],
        "temperature": 0.7,
        "version_spans": [None, [(2, 4), (3, 5)]],
    }
    for name, tokenizer in (("one", Letters()), ("all", None)):
        with TrajectoryRecorder(tmp_path / name, tokenizer=tokenizer) as recorder:
            prompts = {"prompt_ids": [[97, 98]] * 2} if tokenizer is None else {}
            texts = {"prompts": ["ab"] * 2, "completions": ["c", "cd"], "completion_ids": [[99], [99, 100]]}
            recorder.record(**texts, **prompts, **more)
    one, both = columns(tmp_path / "one"), columns(tmp_path / "all")
    for name in one.keys() - {"created_at", "meta"}:
        for mine, theirs in zip(one[name], both[name], strict=True):
            equal = mine == theirs if isinstance(mine, str) else np.array_equal(mine, theirs, equal_nan=True)
            assert equal, (name, mine, theirs)
    assert (both["failure_reason"], both["finish_reason"]) == (["", "engine"], ["length", "abort"])
    for mine, theirs in zip(one["meta"], both["meta"], strict=True):
        assert {k: v for k, v in json.loads(mine).items() if k != "encoded"} == json.loads(theirs)


@pytest.mark.parametrize(
    ("more", "error", "wanted"),
    [
        ({"temperature": -1.0}, BatchError, r"'temperature' must be a temperature of at least 0"),
        ({"log_prob_mode": "other"}, BatchError, r"'log_prob_mode' must be 'processed' or 'raw'"),
        ({"temperature": [1.0]}, BatchError, r"temperature must contain one value per completion: expected 3, got 1"),
        ({"groups": ["a"]}, BatchError, r"groups must contain one value per completion: expected 3, got 1"),
        (
            {"support_log_mass": [[0.0], [0.0], [0.0]]},
            BatchError,
            r"support_log_mass must contain .* token: expected 2, got 1",
        ),
        ({"extra": {"experts": [1, 2, 3]}}, SchemaError, r"no column 'experts'.*columns=\[Column"),
        ({"completion_ids": [[1.5], [2], [3]]}, BatchError, r"'completion_ids' must be a list of token ids"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, more: dict[str, Any], error: type[Exception], wanted: str):
    """Nothing of a call with a wrong value is written, and the next call is."""
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        with pytest.raises(error, match=wanted):
            recorder.record(**rows() | more)
        assert len(recorder.record(**rows())) == 3
    assert len(columns(tmp_path / "store")["task_reward"]) == 3


def test_no_store_has_a_column_that_nothing_writes(tmp_path: Path):
    """The uses of a row are in the ledger of a run; a `ConsumingSampler` adds its column when it draws."""
    assert "use_count" not in standard_schema()
    with TrajectoryRecorder(tmp_path / "uses", group_size=1) as recorder:
        recorder.record(prompt_ids=[[1]], completion_ids=[[2]], completions=[""], rewards=[1.0], policy_version=0)
    with TrajectoryStore.open(tmp_path / "uses") as store:
        assert "use_count" not in store.schema
