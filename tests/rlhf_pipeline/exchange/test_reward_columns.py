"""Rewards of a table are named; they are never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange import import_files
from rlhf_pipeline.exchange._reader import Format, Reader
from trajectory_store import TrajectoryStore

from .conftest import Write


def rewards_of(store: Path) -> list[float]:
    """Return the rewards of a store."""
    with TrajectoryStore.open(store) as opened:
        return opened.read_scalars("task_reward").tolist()


TABLE = {"step": 1, "prompt": "1+1=", "completion": "2", "accuracy": 1.0, "advantage": 0.5, "note": "a"}


def test_the_one_column_of_numbers(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """A table of one reward function has one more column of numbers, whatever the function is called."""
    rows = [TABLE, TABLE | {"accuracy": None}]
    for place, given in enumerate((rows, rows[::-1])):
        report = import_files([jsonl(given)], tmp_path / f"{place}", tokenizer=tokenizer)
        assert "reward=accuracy" in report.files[0].about
        assert np.array_equal(rewards_of(tmp_path / f"{place}"), [[1, np.nan], [np.nan, 1]][place], equal_nan=True)


@pytest.mark.parametrize("more", ["length", "reward"])
def test_several_columns_of_numbers(tmp_path: Path, jsonl: Write, tokenizer: Any, more: str):
    """Of several nothing is taken, not even one called reward; the error lists them, and what it says to type works."""
    file = jsonl([TABLE | {more: 4}])
    with pytest.raises(DefinitionError, match=rf"which columns are the rewards\?.* are accuracy, {more}\.") as raised:
        import_files([file], tmp_path / "store", tokenizer=tokenizer)
    assert not (tmp_path / "store").exists()
    assert str(raised.value).endswith(f"--field reward=accuracy or --field reward=accuracy+0.5*{more}")
    given = {"reward": f"accuracy+0.5*{more}", "advantage": "none"}
    import_files([file], tmp_path / "store", tokenizer=tokenizer, fields=given)
    assert rewards_of(tmp_path / "store") == [3.0]
    with TrajectoryStore.open(tmp_path / "store") as store:
        assert np.isnan(store.read_scalars("advantage")).all()


def test_a_table_of_older_versions(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """`step` as text, `reward` as the total and no advantages, as TRL wrote before 0.18."""
    rows = [
        {"step": "12", "prompt": "1+1=", "completion": "2", "reward": 1.5, "accuracy": 1.0},
        {"step": "12", "prompt": "1+1=", "completion": "3", "reward": 0.5, "accuracy": 0.0},
    ]
    report = import_files([jsonl(rows)], tmp_path / "store", tokenizer=tokenizer)
    assert report.files[0].format == "trl"
    assert rewards_of(tmp_path / "store") == [1.5, 0.5]
    with TrajectoryStore.open(tmp_path / "store") as store:
        assert store.read_scalars("policy_version").tolist() == [11, 11]


def test_two_fields_that_may_be_the_reward(tmp_path: Path, jsonl: Write):
    """Of two known names neither is taken unasked."""
    row = {"prompt_ids": [1], "completion_ids": [2], "score": 1.0, "is_correct": False}
    with pytest.raises(
        DefinitionError, match=r"which columns are the rewards\? The columns of numbers are score, is_c"
    ):
        import_files([jsonl([row])], tmp_path / "store")
    import_files([jsonl([row])], tmp_path / "store", fields={"reward": "is_correct"})
    assert rewards_of(tmp_path / "store") == [0.0]
    import_files([jsonl([row])], tmp_path / "none", fields={"reward": "none"})
    assert np.isnan(rewards_of(tmp_path / "none")).all()


def test_sums_of_fields():
    """A sum of fields with weights; a name with a sign in it; a field without a value does not count."""
    row = {"prompt": "p", "completion": "c", "a": 2.0, "b": None, "x+y": 5, "z": [1.0, 0.5]}

    def reward(text: str, **more: Any) -> float:
        (made,) = Reader(Format(name="", summary="", **more), row, {"reward": text}).read(row)
        return made.reward if made is not None else np.nan

    assert reward("a+0.5*b") == 2.0
    assert reward("x+y") == 5.0
    assert reward("-1*a + a") == 0.0
    assert np.isnan(reward("b"))
    assert reward("z", per_token=True) == 1.5
    with pytest.raises(DataError, match=r"field 'z' must be one reward, got 2 for one completion"):
        reward("z")
    with pytest.raises(DefinitionError, match=r"--field reward=a\+d: the rows have no field 'd'"):
        reward("a+d")
