"""`rlhf-pipeline diff` of runs and of stores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.run.rows import StepRows
from trajectory_store import Column, Schema, TrajectoryStore, copy_rows

from .conftest import Cli


@pytest.fixture
def twin(run_dir: Path) -> Path:
    """A copy of the run."""
    return Path(shutil.copytree(run_dir, "runs/twin"))


def change_rows(file: Path, step: int, **values: Any) -> None:
    """Write other values into one row of a file of rows."""
    rows = StepRows(file)
    before = list(rows)
    rows.drop_from(1)
    for row in before:
        rows.append(row | (values if row["step"] == step else {}))


def test_equal_runs(cli: Cli, run_dir: Path, twin: Path):
    """A run equals its copy; a priority that differs is a difference unless it is ignored."""
    shown = cli("diff", run_dir, twin)
    assert (shown.code, shown.out.splitlines()[-1]) == (0, "no difference")
    with TrajectoryStore.open(twin / "store", "a") as store:
        store.update([5, 6], priority=3)
    shown = cli("diff", run_dir, twin)
    assert shown.code == 1
    assert "  priority  2 of 48 differ, by at most 3; ids 5, 6\n" in shown.out
    assert "            the first: 0 | 3\n" in shown.out
    assert "rlhf-pipeline show runs/twin --id 5\n" in shown.out
    shown = cli("diff", run_dir, twin, "--ignore", "priority")
    assert (shown.code, shown.out.splitlines()[-1]) == (0, "no difference (priority not compared)")


def test_what_makes_no_difference_is_a_remark(cli: Cli, run_dir: Path, twin: Path):
    """Another configuration and more columns beside equal trajectories and equal steps are listed, and exit code 0."""
    config = json.loads((twin / "config.json").read_text())
    config["pipeline"]["learn"]["keep_checkpoints"] = 9
    (twin / "config.json").write_text(json.dumps(config))
    with TrajectoryStore.open(twin / "store") as store:
        rows = store.read(store.ids())
    shutil.rmtree(twin / "store")
    with TrajectoryStore.open(run_dir / "store") as old:
        schema = Schema([*old.schema.columns, Column("source", "int64", fill=0)])
    with TrajectoryStore.create(twin / "store", schema) as store:
        store.append(rows)
    shown = cli("diff", run_dir, twin)
    assert shown.code == 0
    assert "  pipeline.learn.keep_checkpoints  2 | 9" in shown.out
    assert "  columns only on the right: source" in shown.out
    wanted = "the same trajectories and the same optimizer steps; the settings listed above had no effect"
    assert shown.out.splitlines()[-1].startswith(wanted)
    assert json.loads(cli("diff", run_dir, twin, "--json").out)["same"] is True
    shown = cli("diff", run_dir / "store", twin / "store")  # a store in a run is that run's
    assert shown.code == 0


def test_where_two_runs_part(cli: Cli, run_dir: Path, twin: Path):
    """Configuration, the first step that differs in each respect, steps of one run only, and values."""
    config = json.loads((twin / "config.json").read_text())
    config["seed"] = 1
    config["inputs"] = {"prompts": {}}
    config["pipeline"]["learn"]["lr"] = 0.5
    (twin / "config.json").write_text(json.dumps(config))
    change_rows(twin / "ledger.jsonl", 4, row_ids=[8, 9])
    change_rows(twin / "metrics.jsonl", 3, loss=0.25)
    change_rows(twin / "metrics.jsonl", 5, loss=0.5, task_reward=2.0)
    StepRows(twin / "metrics.jsonl").append({"step": 13})
    with TrajectoryStore.open(twin / "store") as store:
        schema, rows = store.schema, store.read(store.ids())
    rows["advantage"][2] += 0.75
    rows["completion"][2] = "123"
    shutil.rmtree(twin / "store")
    with TrajectoryStore.create(twin / "store", schema) as store:
        store.append(rows)
    lines = cli("diff", run_dir, twin).out.splitlines()
    assert lines[2:5] == ["config.json", "  seed               0 | 1", "  pipeline.learn.lr  0.002 | 0.5"]
    assert "  only on the right: 1 step, 13" in lines
    assert f"  loss           first at step 3: {0.1 / 3} | 0.25 (in 2 of 12)" in lines
    assert "  batch          first at step 4: different trajectories; 8 | 2 trajectories (in 1 of 12)" in lines
    assert [line.split()[0] for line in lines if "first at step" in line] == ["loss", "batch", "reward"]
    assert "  advantage   1 of 48 differ, by at most 0.75; id 2" in lines
    assert "              the first: 4 values | 3 values" not in lines
    assert any(line.endswith(" | 123") for line in lines)


def test_json(cli: Cli, run_dir: Path, twin: Path):
    """Everything as JSON, with the first few ids."""
    shown = cli("diff", run_dir, twin, "--json")
    assert shown.code == 0
    data = json.loads(shown.out)
    assert (data["same"], data["config"], data["steps"]["differences"]) == (True, [], [])
    assert data["trajectories"]["key"] == "trajectory_id"
    with TrajectoryStore.open(twin / "store", "a") as store:
        store.update(store.ids(), priority=1)
    shown = cli("diff", run_dir, twin, "--json")
    [column] = json.loads(shown.out)["trajectories"]["columns"]
    assert (shown.code, column["name"], column["num"], column["first"][1]) == (1, "priority", 48, [1, 1])


def test_stores_in_another_order(cli: Cli, run_dir: Path):
    """Trajectories are paired by their id, whatever their order and place; those of one side are listed."""
    with TrajectoryStore.open(run_dir / "store") as source, TrajectoryStore.create("other", source.schema) as other:
        copy_rows(source, other, source.ids()[:40][::-1])
    shown = cli("diff", run_dir, "other")
    assert shown.code == 1
    assert "trajectories, paired by trajectory_id\n  only on the left: 8, ids 40, 41, 42, 43, 44, ...\n" in shown.out
    assert "optimizer steps" not in shown.out


def test_stores_without_ids(cli: Cli, run_dir: Path):
    """Trajectories that have no id of their own, or all the same one, are paired in the order of arrival."""
    schema = Schema([Column("x", "float32", ragged=True), Column("trajectory_id", "int64", fill=-1)])
    for name, last in (("a", [1.0, 2.5]), ("b", [1.0, 2.0])):
        with TrajectoryStore.create(name, schema) as store:
            store.append({"x": [[1.0], [float("nan")], last]})
    shown = cli("diff", "a", "b")
    assert shown.code == 1
    assert "paired in the order of arrival\n  x  1 of 3 differ, by at most 0.5; id 2\n" in shown.out
    assert "the first: 2.5 at position 1 | 2 at position 1\n" in shown.out
    with TrajectoryStore.create("c", schema.columns[1:]) as store:
        store.append({"trajectory_id": [0, 1, 2]})
    assert "  columns only on the left: x\n" in cli("diff", "a", "c").out


def test_damaged_ledger(cli: Cli, run_dir: Path, twin: Path):
    """A torn last line is left out; a line that is no row is named."""
    with (twin / "ledger.jsonl").open("a") as file:
        file.write('{"step": 1')
    assert cli("diff", run_dir, twin).code == 0
    (twin / "metrics.jsonl").write_text("{}\n")
    shown = cli("diff", run_dir, twin)
    assert shown.code == 2
    assert "runs/twin/metrics.jsonl:1: this line has no integer 'step'" in shown.err


@pytest.mark.parametrize("kept", [0, 1])
def test_a_ledger_that_lacks_steps_is_a_difference(cli: Cli, run_dir: Path, twin: Path, kept: int):
    """Equal figures of steps of which one run does not say what it learned from are not the same learning."""
    StepRows(twin / "ledger.jsonl").drop_from(kept + 1)
    shown = cli("diff", run_dir, twin)
    assert shown.code == 1
    assert f"  batch          first at step {kept + 1}: different trajectories" in shown.out
