from __future__ import annotations

from rlhf_pipeline.buffer.trajectory_schema import PROVENANCE, trajectory_schema
from rlhf_pipeline.data.keys import COLUMN_OF_KEY
from trajectory_store import Column, TrajectoryStore


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


def test_provenance_costs_nothing_where_nobody_gives_it(tmp_path):
    """Columns that no row was given have no files; a row that has some reads them back, others read their fills."""
    with TrajectoryStore.create(tmp_path / "s", trajectory_schema(PROVENANCE)) as store:
        plain = store.append({"input_ids": [[1, 2, 3]]})
        names = {path.name for path in (tmp_path / "s" / "seg-00000000").iterdir()}
        assert not names & {column.name for column in PROVENANCE}
        told = store.append({"input_ids": [[4, 5]], "version_spans": [[[0, 7], [1, 8]]], "engine": ["slots"]})
        rows = store.read([*plain, *told], ["version_spans", "engine", "reward_trusted", "parent_id"])
    assert [spans.tolist() for spans in rows["version_spans"]] == [[], [[0, 7], [1, 8]]]
    assert rows["engine"] == ["", "slots"]
    assert rows["reward_trusted"].tolist() == [True, True]
    assert rows["parent_id"].tolist() == [-1, -1]
