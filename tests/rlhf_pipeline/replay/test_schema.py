from __future__ import annotations

from rlhf_pipeline.keys import COLUMN_OF_KEY
from rlhf_pipeline.replay.schema import trajectory_schema
from trajectory_store import Column


def test_every_key_has_its_column():
    """The table of keys and the schema on disk agree."""
    assert set(COLUMN_OF_KEY.values()) <= set(trajectory_schema().names)


def test_a_token_costs_thirteen_bytes():
    """Ids 4, mask 1, two log-probs 4 each."""
    ragged = [c for c in trajectory_schema() if c.ragged]
    assert sum(c.np_dtype.itemsize for c in ragged) == 13


def test_only_the_token_ids_are_required():
    """A batch may leave the rest out."""
    assert [c.name for c in trajectory_schema() if not c.optional] == ["input_ids"]


def test_extra_columns_and_token_rewards():
    """Extra columns come last; rewards per token are asked for."""
    schema = trajectory_schema([Column("experts", "int16", ragged=True, fill=0)], token_rewards=True)
    assert schema.names[-1] == "experts"
    assert schema["reward"].ragged
    assert "reward" not in trajectory_schema()
