from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from rlhf_pipeline.data import keys
from rlhf_pipeline.data.trajectories import trajectories_of
from rlhf_pipeline.replay._stack import stack_data
from rlhf_pipeline.replay.storage import TrajectoryStorage, append_data
from rlhf_pipeline.replay.trajectory_schema import trajectory_schema
from trajectory_store import Column, RaggedArray, TrajectoryStore

SCHEMA = trajectory_schema([Column("top_k", "int32", ragged=True, fill=0)])


def as_lists(store, data):
    """What comes back of an append, without its time."""
    rows = store.read(store.append(data))
    del rows["created_at"]
    return {name: [np.asarray(row).tolist() for row in column] for name, column in rows.items()}


@pytest.mark.parametrize("lengths", [[4, 7, 3], [5, 5], [9]])
@pytest.mark.parametrize("ref", [True, False])
def test_the_short_way_and_the_general_way_agree(tmp_path, make_rows, lengths, ref):
    """The same rows are stored, to the last bit."""
    rows = make_rows(lengths, ref=ref, rewards=[0.1, float("nan"), -2.5][: len(lengths)])
    for i, row in enumerate(rows):
        row["top_k"] = torch.arange(lengths[i], dtype=torch.int32)
        row["advantage"] = torch.tensor(0.3 * i, dtype=torch.float64)
        row["next", "done"] = torch.ones(1, dtype=torch.bool)
    straight = stack_data(rows, SCHEMA)
    assert straight is not None
    with TrajectoryStore.create(tmp_path / "a", SCHEMA) as one, TrajectoryStore.create(tmp_path / "b", SCHEMA) as other:
        found = as_lists(one, straight)
        expected = as_lists(other, append_data(trajectories_of(lazy_stack(rows)), SCHEMA))
        np.testing.assert_equal(found, expected)


ODD = {
    "another key": lambda row: row.set("unknown", torch.tensor(1)),
    "no mask": lambda row: row.pop(keys.ASSISTANT_MASK),
    "padding": lambda row: row.set(keys.ATTENTION_MASK, torch.ones(row[keys.TOKENS].shape[0], dtype=torch.bool)),
    "a reward per token": lambda row: row.set(keys.REWARD, torch.zeros(row[keys.TOKENS].shape[0])),
    "an advantage per token": lambda row: row.set(keys.ADVANTAGE, torch.zeros(row[keys.TOKENS].shape[0])),
    "bfloat16": lambda row: row.set(keys.LOG_PROBS, row[keys.LOG_PROBS].bfloat16()),
    "a graph": lambda row: row.set(keys.LOG_PROBS, row[keys.LOG_PROBS].clone().requires_grad_()),
    "two dimensions": lambda row: row.set(keys.TOKENS, row[keys.TOKENS][:, None]),
    "not the end": lambda row: row.set(keys.DONE, torch.tensor(False)),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_needs_care_goes_the_general_way(make_rows, odd):
    """In one row, where that makes a difference to the others, and in every row."""
    rows = make_rows([4, 5])
    schema = trajectory_schema(token_rewards=True) if odd == "a reward per token" else SCHEMA
    assert stack_data(rows, schema) is not None
    ODD[odd](rows[1])
    if odd != "bfloat16":  # joined with float32 it is float32
        assert stack_data(rows, schema) is None
    ODD[odd](rows[0])
    assert stack_data(rows, schema) is None


def test_rows_of_another_kind(make_rows):
    """Nested stacks, and rows whose keys differ, are not for this way."""
    rows = make_rows([4, 5])
    assert stack_data([lazy_stack(rows)], SCHEMA) is None
    other = rows[1].clone()
    other.set("masks", TensorDict({"all_assistant_mask": other[keys.ASSISTANT_MASK], "extra": torch.tensor(1)}))
    assert stack_data([rows[0], other], SCHEMA) is None


def test_a_storage_extends_by_a_stack(tmp_path, make_rows):
    """Slots come back, the rows are there, and lengths are shared between the columns."""
    storage = TrajectoryStorage(tmp_path / "store")
    assert storage.extend(lazy_stack(make_rows([4, 5]))).tolist() == [0, 1]
    assert storage.extend(lazy_stack(make_rows([6], first_group=5))).tolist() == [2]
    assert storage.get([2, 0])[keys.ATTENTION_MASK].sum(1).tolist() == [6, 4]
    data = stack_data(make_rows([4, 5]), SCHEMA)
    assert data is not None
    ragged = [value for value in data.values() if isinstance(value, RaggedArray)]
    assert len({id(value.lengths) for value in ragged}) == 1
    storage.close()
