"""Rewards of a table are named, or told by its advantages; they are never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange import import_files
from rlhf_pipeline.exchange._reward_columns import RewardTerms
from trajectory_store import TrajectoryStore

from .conftest import Write

SIZE = 4


def advantages(rewards: np.ndarray, scale: str) -> np.ndarray:
    """Return TRL 1.16's advantages of `[groups, SIZE]` rewards, from its formulas (scale_rewards)."""
    centred = rewards - rewards.mean(1, keepdims=True)
    if scale == "none":
        return centred
    deviation = rewards.std(1, ddof=1, keepdims=True) if scale == "group" else rewards.std(ddof=1)
    return centred / (deviation + 1e-4)


def table(scale: str = "group", weights: tuple[float, float] = (1.0, 1.0), steps: int = 2) -> list[dict[str, Any]]:
    """Return rows as TRL's completions table has them: two reward functions, and columns of numbers that are none."""
    rng = np.random.default_rng(7)
    rows = []
    for step in range(1, steps + 1):
        accuracy = rng.integers(0, 2, (3, SIZE)).astype(float)
        brevity = rng.random((3, SIZE))
        credit = advantages(weights[0] * accuracy + weights[1] * brevity, scale)
        rows += [
            {
                "step": step,
                "prompt": f"{step}+{group}=",
                "completion": str(i),
                "accuracy": accuracy[group, i],
                "brevity": brevity[group, i],
                "length": 100 * (i + 1),
                "advantage": credit[group, i],
            }
            for group in range(3)
            for i in range(SIZE)
        ]
    return rows


def rewards_of(store: Path) -> list[float]:
    """Return the rewards of a store."""
    with TrajectoryStore.open(store) as opened:
        return opened.read_scalars("task_reward").tolist()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_advantages_tell_the_rewards(tmp_path: Path, jsonl: Write, tokenizer: Any, scale: str):
    """The one sum of columns that the advantages follow from is the reward; a column of lengths is not added to it."""
    rows = table(scale)
    report = import_files([jsonl(rows)], tmp_path / "store", tokenizer=tokenizer)
    assert "reward=accuracy+brevity" in report.files[0].about
    assert np.allclose(rewards_of(tmp_path / "store"), [row["accuracy"] + row["brevity"] for row in rows])


def test_groups_that_hardly_differ(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """Rewards that differ by little, or by rounding alone, agree with advantages that have TRL's epsilon in them."""
    rewards = np.array([[0.0, 1.0, 0.0, 1.0], [0.5, 0.502, 0.501, 0.5], [0.1 + 0.2, 0.3, 0.3, 0.3]])
    credit = advantages(rewards, "group")
    rows = [
        {"step": 1, "prompt": str(group), "completion": "2", "accuracy": rewards[group, i], "length": i, "advantage": a}
        for group in range(3)
        for i, a in enumerate(credit[group].tolist())
    ]
    assert "reward=accuracy" in import_files([jsonl(rows)], tmp_path / "a", tokenizer=tokenizer).files[0].about


def test_rewards_that_are_normalised_before_they_are_summed(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """Advantages of TRL's `normalize_then_sum` tell the rewards as well."""
    rows = table(steps=1)
    columns = [np.array([row[name] for row in rows]).reshape(3, SIZE) for name in ("accuracy", "brevity")]
    summed = sum(advantages(column, "group") for column in columns)
    credit = (summed - np.mean(summed)) / (np.std(summed, ddof=1) + 1e-4)
    rows = [row | {"advantage": value} for row, value in zip(rows, credit.ravel().tolist(), strict=True)]
    report = import_files([jsonl(rows)], tmp_path / "store", tokenizer=tokenizer)
    assert "reward=accuracy+brevity" in report.files[0].about


def test_weighted_rewards_are_asked_for(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """Where no plain sum gives the advantages the user is asked; the right weights pass, wrong ones do not."""
    file = jsonl(table(weights=(2.0, 0.5)))
    with pytest.raises(DefinitionError, match=r"which columns are the rewards\?.*accuracy, brevity, length.*weighted"):
        import_files([file], tmp_path / "store", tokenizer=tokenizer)
    for wrong in ("accuracy+brevity", "accuracy", "length"):
        with pytest.raises(DefinitionError, match=r"advantages of this table do not follow from reward="):
            import_files([file], tmp_path / "store", tokenizer=tokenizer, fields={"reward": wrong})
    assert not (tmp_path / "store").exists()
    import_files([file], tmp_path / "store", tokenizer=tokenizer, fields={"reward": "2*accuracy+0.5*brevity"})
    wanted = [2 * row["accuracy"] + 0.5 * row["brevity"] for row in table(weights=(2.0, 0.5))]
    assert np.allclose(rewards_of(tmp_path / "store"), wanted)
    only = import_files([file], tmp_path / "b", tokenizer=tokenizer, fields={"reward": "accuracy", "advantage": "none"})
    assert only.num_without_reward == 0
    with TrajectoryStore.open(tmp_path / "b") as store:
        assert np.isnan(store.read_scalars("advantage")).all()


def test_advantages_that_do_not_decide(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """A column that is the same within each group may be a reward or not, so the user is asked."""
    rows = [row | {"level": 1 + row["step"]} for row in table()]
    with pytest.raises(DefinitionError, match=r"follow from accuracy\+brevity, accuracy\+brevity\+level alike"):
        import_files([jsonl(rows)], tmp_path / "store", tokenizer=tokenizer)
    zero = [row | {"advantage": 0.0} for row in table()]
    with pytest.raises(DefinitionError, match=r"no advantages to infer them from.*--field reward=accuracy"):
        import_files([jsonl(zero)], tmp_path / "store", tokenizer=tokenizer)


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
        assert store.read_scalars("policy_version").tolist() == [12, 12]


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


def test_terms():
    """A sum of fields with weights; a name with a sign in it; a field without a value does not count."""
    row = {"a": 2.0, "b": None, "x+y": 5, "c": [1.0, 0.5]}
    assert RewardTerms.parse("a+0.5*b", row).of(row.get) == 2.0
    assert RewardTerms.parse("x+y", row).of(row.get) == 5.0
    assert RewardTerms.parse("-1*a + a", row).of(row.get) == 0.0
    assert np.isnan(RewardTerms.parse("b", row).of(row.get))
    assert RewardTerms.parse("c", row).of(row.get, per_token=True) == 1.5
    with pytest.raises(DataError, match=r"field 'c' must be one reward, got 2 for one completion"):
        RewardTerms.parse("c", row).of(row.get)
    with pytest.raises(DefinitionError, match=r"--field reward=a\+d: the rows have no field 'd'"):
        RewardTerms.parse("a+d", row)
