"""What writes rows elsewhere rejects damaged ones by name, or leaves them out and counts them when asked to."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.exchange.copier import copy_store
from rlhf_pipeline.exchange.exporter import export_store
from tests.damage import flip, flip_value
from trajectory_store import Column, CorruptionError, TrajectoryStore, copy_rows
from trajectory_store.adapters.trl import stored_rollouts
from trajectory_store.cli import main
from trajectory_store.options import Backend
from trajectory_store.recorder.standard import standard_schema

NAMED = "trajectories 35, 36, 37, 38, 39 cannot be read: seg-00000000"


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Twenty commits of five rows; a reward of the eighth has another sign."""
    path = tmp_path / "s"
    with TrajectoryStore.create(path, [Column("reward", "float32"), Column("x", "int32", ragged=True)]) as store:
        for first in range(0, 100, 5):
            store.append({"reward": np.ones(5), "x": [[tag] * 3 for tag in range(first, first + 5)]})
    flip(path / "seg-00000000" / "reward" / "c" / "0", 4 * 37 + 3, 7)
    return path


def test_every_rewriting_method_rejects_or_skips(damaged: Path, tmp_path: Path):
    """Nothing is made of a damaged store; with `skip_damaged` the other 95 rows are."""
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    with TrajectoryStore.open(damaged) as store:
        target = TrajectoryStore.create(tmp_path / "rows", store.schema)
        for refused in (
            lambda: copy_rows(store, target),
            lambda: store.copy(tmp_path / "backup"),
            lambda: store.to_parquet(tmp_path / "x.parquet"),
        ):
            with pytest.raises(CorruptionError, match=NAMED):
                refused()
        for refused in (
            lambda: copy_store(store, tmp_path / "copy"),
            lambda: export_store(store, tmp_path / "y.parquet"),
        ):
            with pytest.raises(DataError, match=f"{NAMED}.*rlhf-pipeline verify"):
                refused()
        assert len(target) == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "s"]
        assert len(copy_rows(store, target, skip_damaged=True)) == target.count("reward == 1") == 95
        assert store.copy(tmp_path / "backup", skip_damaged=True).tolist() == [35, 36, 37, 38, 39]
        assert store.to_parquet(tmp_path / "x.parquet", skip_damaged=True) == 95
        assert copy_store(store, tmp_path / "copy", skip_damaged=True).num_left_out == 5
        assert export_store(store, tmp_path / "y.parquet", skip_damaged=True).num_left_out == 5
        target.close()
    with TrajectoryStore.open(tmp_path / "backup") as backup:
        assert backup.damaged().tolist() == [35, 36, 37, 38, 39]
        assert len(backup.intact(skip_damaged=True)) == 95


def test_the_commands_name_and_count_damaged_rows(damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`copy` and `export` make nothing of a damaged store, or count what `--skip-damaged` leaves out."""
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    for command, made in (("copy", "copy"), ("export", "x.parquet")):
        for part in ([], ["--where", "reward > 0"]):
            typed = [command, str(damaged), "--to", str(tmp_path / made), *part]
            assert main(typed) == 2
            assert NAMED in capsys.readouterr().err
            assert not (tmp_path / made).exists()
        assert main([command, str(damaged), "--to", str(tmp_path / made), "--skip-damaged"]) == 0
        assert "95 trajectories" in (out := capsys.readouterr().out)
        assert "5 damaged trajectories were skipped: 35, 36, 37, 38, 39" in out
    assert main(["show", str(damaged), "--where", "reward < 0"]) == main(["stats", str(damaged)]) == 0
    assert capsys.readouterr().out.count("5 damaged trajectories were skipped: 35, 36, 37, 38, 39") == 2


def test_every_way_to_read_omits_or_rejects_damaged_rows(damaged: Path):
    """No read gives the value that is damaged, and whoever asks for its row by id or place meets an error."""
    for read in (
        lambda store: store.where("reward > 0"),
        lambda store: store["reward"],
        list,
        lambda store: store.read_scalars("reward"),
        lambda store: store.to_arrow(),
        lambda store: [row for batch in store.batches(7) for row in batch["reward"]],
    ):
        with TrajectoryStore.open(damaged) as store, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert len(read(store)) == 95
            assert store.count("reward < 0") == 0
    for read in (
        lambda store: store.read([37]),
        lambda store: store[37],
        lambda store: store.__getitems__([1, 37]),
        lambda store: store.read_padded([37]),
        lambda store: store.read_batch([37]),
        lambda store: store.where("reward > 0", [36, 37]),
        lambda store: store.read_scalars("reward", [37]),
        lambda store: store.to_arrow(ids=[37]),
    ):
        with TrajectoryStore.open(damaged) as store, pytest.raises(CorruptionError, match="37"):
            read(store)
    with TrajectoryStore.open(damaged) as store:
        assert store.read([37], checked=False)["reward"].tolist() == [-1.0]


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_a_read_of_all_rows_warns_of_those_that_it_omits(tmp_path: Path, backend: Backend):
    """Also where it reads some rows at a time, and in the first pass, which finds the damage."""
    pytest.importorskip("pyarrow", reason="tables need pyarrow")
    path = tmp_path / "s"
    with TrajectoryStore.create(path, [Column("reward", "float32")], backend=backend) as store:
        for _ in range(20):
            store.append({"reward": np.ones(5)})
    file = path / "seg-00000000" / ("reward/c/0" if backend == "memmap" else "00000007.zip")
    flip(file, 4 * 37 + 3 if backend == "memmap" else file.read_bytes().index(np.ones(5, np.float32).tobytes()) + 3, 7)
    for read in (
        lambda store: store.where("reward > 0"),
        lambda store: store["reward"],
        list,
        lambda store: [row for batch in store.batches(7) for row in batch["reward"]],
        lambda store: store.to_arrow(),
        lambda store: store.to_pandas(),
    ):
        with TrajectoryStore.open(path) as store, pytest.warns(RuntimeWarning, match="5 rows are not returned"):
            assert len(read(store)) == 95


def test_damaged_rows_are_not_served(tmp_path: Path):
    """Another trainer is not given the rows of a store that a flipped bit has changed."""
    with TrajectoryStore.create(tmp_path / "s", standard_schema()) as store:
        store.append({"input_ids": [[1, 2], [1, 3]], "prompt": ["a", "a"], "task_reward": [1.0, 0.0]})
    flip_value(tmp_path / "s", "input_ids", 1)
    with pytest.raises(CorruptionError, match="trajectories 0, 1 cannot be read"):
        stored_rollouts(tmp_path / "s")
