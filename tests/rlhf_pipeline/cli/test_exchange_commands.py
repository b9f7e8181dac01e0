"""`rlhf-pipeline import` and `export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trajectory_store import TrajectoryStore, diff

from .conftest import Cli


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    """A JSONL file of two groups of two, with token ids."""
    file = tmp_path / "rollouts.jsonl"
    rows = [{"prompt_ids": [i], "completion_ids": [[1], [2, 3]], "reward": [1, 0]} for i in range(2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_import(cli: Cli, rollouts: Path, tmp_path: Path):
    """The format and its fields are said, what was made, what is missing, and what to type next."""
    shown = cli("import", rollouts, "--into", tmp_path / "a store")
    assert shown.code == 0
    assert f"{rollouts}: rows; prompt_ids, completion_ids" in shown.out
    assert "4 trajectories in 2 groups, 10 tokens, mean reward 0.500" in shown.out
    assert "4 trajectories without behaviour log-probs" in shown.out
    assert f"rlhf-pipeline inspect '{tmp_path / 'a store'}'" in shown.out
    assert "rlhf-pipeline show" in shown.out
    again = cli("import", rollouts, "--into", tmp_path / "a store")
    assert (again.code, again.out.splitlines()[1][:12]) == (0, "nothing new:")
    assert cli("inspect", tmp_path / "a store").code == 0


def test_import_that_leaves_all_out(cli: Cli, tmp_path: Path):
    """Rows that are no trajectories are not said to be in the store."""
    file = tmp_path / "traces.jsonl"
    file.write_text(json.dumps({"env": {}, "task": {}, "ok": False, "traces": [{"ok": False, "nodes": []}]}) + "\n")
    shown = cli("import", file, "--into", tmp_path / "store")
    assert "nothing new: 0 trajectories already in" in shown.out
    assert "1 skipped: not from the policy" in shown.out


def test_export_and_back(cli: Cli, rollouts: Path, tmp_path: Path):
    """What was written is said, with how to read it; importing it gives an equal store."""
    cli("import", rollouts, "--into", tmp_path / "a")
    shown = cli("export", tmp_path / "a", "--to", tmp_path / "a.jsonl")
    assert shown.code == 0
    assert f"{tmp_path / 'a.jsonl'}: 4 trajectories, " in shown.out
    assert f"rlhf-pipeline import {tmp_path / 'a.jsonl'} --into" in shown.out
    assert cli("import", tmp_path / "a.jsonl", "--into", tmp_path / "b").code == 0
    with TrajectoryStore.open(tmp_path / "a") as a, TrajectoryStore.open(tmp_path / "b") as b:
        assert diff(a, b, key="trajectory_id").same


def test_export_of_a_run(cli: Cli, run_dir: Path, tmp_path: Path):
    """A run is named by its folder; filters say how many they left out."""
    shown = cli(
        "export", run_dir, "--to", tmp_path / "x.jsonl", "--filter", "reward>=0.5", "--columns", "prompt", "meta"
    )
    assert shown.code == 0
    assert "19 excluded, 2 columns" in shown.out
    first = json.loads((tmp_path / "x.jsonl").read_text().splitlines()[0])
    assert list(first) == ["prompt", "meta"]


def test_a_field_that_no_row_has_leaves_nothing_behind(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The field is named, no summary is printed before it, and no folder is made; rows to skip do not change that."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt_ids": [n], "completion_ids": [[1], [2, 3]], "rewards": [1, 0]} for n in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for more in ((), ("--skip-bad", "2")):
        shown = cli("import", "rows.jsonl", "--into", "new", "--field", "reward=rewrds", *more)
        assert (shown.code, "'rewrds'" in shown.err, shown.out) == (2, True, "")
        assert not Path("new").exists()
    assert cli("import", "rows.jsonl", "--into", "new", "--field", "reward=rewards").code == 0
