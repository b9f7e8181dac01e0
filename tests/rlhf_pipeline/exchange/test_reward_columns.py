"""Rewards of a table are named; they are never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange import import_files
from rlhf_pipeline.exchange.fields import Fields
from trajectory_store import TrajectoryStore

from .conftest import Write


def rewards_of(store: Path) -> list[float]:
    """Return the rewards of a store."""
    with TrajectoryStore.open(store) as opened:
        return opened.read_scalars("task_reward").tolist()


TABLE = {"step": 1, "prompt": "1+1=", "completion": "2", "accuracy": 1.0, "note": "a", "advantage": 0.5}


def test_the_one_column_of_numbers(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """A table of one reward function has one more column of numbers, whatever the function is called."""
    rows = [TABLE, TABLE | {"accuracy": None}]
    for place, given in enumerate((rows, rows[::-1])):
        report = import_files([jsonl(given)], tmp_path / f"{place}", tokenizer=tokenizer, one_turn=True)
        assert "reward=accuracy" in report.files[0].about
        assert np.array_equal(rewards_of(tmp_path / f"{place}"), [[1, np.nan], [np.nan, 1]][place], equal_nan=True)


@pytest.mark.parametrize("more", ["length", "reward"])
def test_several_columns_of_numbers(tmp_path: Path, jsonl: Write, tokenizer: Any, more: str):
    """Of several nothing is taken, not even one called reward; the error lists them, and what it says to type works."""
    last = {"advantage": TABLE["advantage"]}
    file = jsonl([{name: value for name, value in TABLE.items() if name not in last} | {more: 4} | last])
    with pytest.raises(DefinitionError, match=rf"has several numeric columns: accuracy, {more}\.") as raised:
        import_files([file], tmp_path / "store", tokenizer=tokenizer)
    assert not (tmp_path / "store").exists()
    assert str(raised.value).endswith(f"--field reward=accuracy or --field reward=accuracy+0.5*{more}")
    given = {"reward": f"accuracy+0.5*{more}", "advantage": "none"}
    import_files([file], tmp_path / "store", tokenizer=tokenizer, fields=given, one_turn=True)
    assert rewards_of(tmp_path / "store") == [3.0]
    with TrajectoryStore.open(tmp_path / "store") as store:
        assert np.isnan(store.read_scalars("advantage")).all()


def test_a_row_may_have_no_reward(tmp_path: Path, jsonl: Write):
    """`none` leaves the rewards out, where the rows have some and where they have none."""
    row = {"prompt_ids": [1], "completion_ids": [2], "score": 1.0}
    with pytest.raises(DefinitionError, match=r"no field for reward\."):
        import_files([jsonl([row])], tmp_path / "store")
    import_files([jsonl([row])], tmp_path / "none", fields={"reward": "none"})
    assert np.isnan(rewards_of(tmp_path / "none")).all()


def test_sums_of_fields():
    """A sum of fields with weights; a name with a sign in it; a field without a value does not count."""
    row = {"a": 2.0, "b": None, "x+y": 5, "z": [1.0, 0.5], "n": {"a": "0.5", "ok": True}}

    def reward(text: str) -> float:
        return Fields(row, {"reward": text}).take()["reward"]

    assert reward("a+0.5*b") == 2.0
    assert reward("x+y") == 5.0
    assert reward("-1*a + a") == 0.0
    assert reward("n.a+2*n.ok") == 2.5
    assert np.isnan(reward("b"))
    with pytest.raises(DataError, match=r"field 'z' must be one reward, got a list of 2"):
        reward("z")
    with pytest.raises(DataError, match=r"there is no field 'd'"):
        reward("a+d")
