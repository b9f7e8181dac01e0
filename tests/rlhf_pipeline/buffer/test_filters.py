"""Conditions whose values are neither numbers nor text, and the count of a policy's tokens."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from rlhf_pipeline.buffer.filters import num_completion_tokens, select
from rlhf_pipeline.errors import DefinitionError
from trajectory_store import Column, Schema, TrajectoryStore


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("digest==ab", [0]),
        ("digest!=ab", [1, 2]),
        ("digest==''", [2]),
        ("reward==nan", [1]),
        ("reward != NaN", [0, 2]),
    ],
)
def test_bytes_and_nan(tmp_path: Path, condition: str, wanted: list[int]):
    """Bytes are compared with the UTF-8 of what is typed, and NaN with NaN, which has no order."""
    schema = Schema([Column("digest", "bytes"), Column("task_reward", "float32")])
    with TrajectoryStore.create(tmp_path / "store", schema) as store:
        store.append({"digest": [b"ab", b"ab\0", b""], "task_reward": [1.0, math.nan, 0.0]})
        assert select(store, [condition]).tolist() == wanted
        if "reward" in condition:
            with pytest.raises(DefinitionError, match=r"can only be compared using == or !="):
                select(store, [condition.replace("==", ">").replace("!=", "<")])


def test_the_tokens_of_the_policy(tmp_path: Path):
    """Replies do not count, nor does a mask of zeros; of an unknown mask, all after the prompt counts.

    The rows are read in three blocks.
    """
    tokens, masked = Column("input_ids", "int32", ragged=True), Column("assistant_mask", "bool", ragged=True)
    with TrajectoryStore.create(
        tmp_path / "a", Schema([tokens, masked, Column("num_prompt_tokens", "int32")])
    ) as store:
        masks = [np.array(mask, bool) for mask in ([0, 1, 0, 1], [0, 0], [], [0, 1, 1])] * 700
        rows = [np.zeros(len(mask), np.int32) for mask in masks]
        store.append({"input_ids": rows, "assistant_mask": masks, "num_prompt_tokens": [1, 1, 0, 1] * 700})
        assert num_completion_tokens(store, store.ids()).tolist() == [2, 0, 0, 2] * 700
        assert select(store, ["num_completion_tokens==2", "num_tokens>3"]).tolist() == [*range(0, 2800, 4)]
    with TrajectoryStore.create(tmp_path / "b", Schema([tokens])) as store:
        store.append({"input_ids": [[1, 2]]})
        assert select(store, ["num_completion_tokens==2"]).tolist() == [0]


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("reward==null", [1]),
        ("reward!=null", [0, 2, 3]),
        ("group==null", [3]),
        ("finish_reason==null", [2]),
        ("reward==0.25..0.75", [0]),
        ("reward!=0.25..0.75", [1, 2, 3]),
        ("reward==..0.5", [0, 2]),
        ("group==1..", [1, 2]),
        ("finish_reason=='a, b'", [0]),
        ("finish_reason~STOP", [1, 3]),
        ('finish_reason~"a,"', [0]),
    ],
)
def test_missing_values_ranges_and_texts(tmp_path: Path, condition: str, wanted: list[int]):
    """`null` is what was left out, NaN or empty; a range has both its ends; `~` finds a text within another."""
    columns = [Column("task_reward", "float32"), Column("group_id", "int64", fill=-1), Column("finish_reason", "str")]
    with TrajectoryStore.create(tmp_path / "store", Schema([*columns])) as store:
        store.append(
            {"task_reward": [0.5, math.nan, 0.0], "group_id": [0, 1, 2], "finish_reason": ["a, b", "Stop", ""]}
        )
        store.append({"task_reward": [1.0], "finish_reason": ["nonstop"]})
        assert select(store, [condition]).tolist() == [store.ids()[at] for at in wanted]
        with pytest.raises(DefinitionError, match="None can only be compared with a column"):
            select(store, ["reward>null"])
        with pytest.raises(DefinitionError, match="searches for text, so it requires a text column"):
            select(store, ["reward~1"])
