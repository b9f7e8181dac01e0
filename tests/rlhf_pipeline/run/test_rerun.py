from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest

from rlhf_pipeline import Pipeline
from rlhf_pipeline.cli import main
from rlhf_pipeline.errors import DataError, MissingPathError
from rlhf_pipeline.run.checkpoint import list_checkpoints
from rlhf_pipeline.run.rerun import RepeatedSteps, plan_rerun, rerun
from rlhf_pipeline.run.rows import StepRows
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline import small
from trajectory_store import TrajectoryStore

tiny = functools.partial(
    small.tiny, write__kl_coef="0.1", write__kl_target="0.01", write__kl_horizon="20", learn__keep_checkpoints="9"
)


def again(pipeline: Pipeline, run_dir: Path, *, from_step: int, num_steps: int | None = None) -> list[RepeatedSteps]:
    plan = plan_rerun(run_dir, from_step=from_step, num_steps=num_steps)
    return list(rerun(pipeline, plan, seed=0, device="cpu"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    run(tiny(), run_dir=folder)
    return folder


def files(run_dir: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run_dir.rglob("*")) if path.is_file()}


def test_every_step_comes_out_bit_for_bit_and_nothing_changes(finished):
    """From step 1, and from a step between two checkpoints: batches, losses and norms are the recorded ones."""
    before = files(finished)
    found = again(tiny(), finished, from_step=1)
    assert [(one.step, one.num_trajectories, one.same_bits, one.ok) for one in found] == [
        (step, 12, True, True) for step in range(1, 7)
    ]
    recorded = [row["loss"] for row in StepRows(finished / "metrics.jsonl")]
    assert [one.computed for one in found] == recorded
    (only,) = again(tiny(), finished, from_step=4, num_steps=1)
    assert (only.step, only.ok, only.computed) == (4, True, recorded[3])
    assert plan_rerun(finished, from_step=4).start == 2
    assert files(finished) == before


def test_a_changed_weight_is_noticed(finished):
    """Another learning rate gives other losses from the second step on."""
    found = again(tiny(learn__lr="2e-2"), finished, from_step=1, num_steps=3)
    assert [one.ok for one in found] == [True, False, False]


def test_a_ledger_that_names_other_trajectories_is_noticed(finished, tmp_path):
    """A batch without one of its trajectories is not the batch that the learner would choose."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished, run_dir)
    row = StepRows(run_dir / "ledger.jsonl")[0]
    row |= {name: row[name][1:] for name in ("row_ids", "trajectory_ids", "ages")}
    rewrite_ledger(run_dir, row)
    (found,) = again(tiny(), run_dir, from_step=1)
    assert not found.ok
    assert found.batch_problem == "the learner would now select 12 trajectories instead of these 11"
    rewrite_ledger(run_dir, row | {"trajectory_ids": row["trajectory_ids"][::-1]})
    (found,) = again(tiny(), run_dir, from_step=1)
    assert found.batch_problem == "its rows contain different trajectories than the ledger lists"


def rewrite_ledger(run_dir: Path, *rows: dict) -> None:
    """Put rows in the place of those of their steps and all later ones."""
    ledger = StepRows(run_dir / "ledger.jsonl")
    ledger.drop_from(rows[0]["step"])
    for row in rows:
        ledger.append(row)


def test_what_cannot_be_replayed_says_why(tmp_path):
    """A step beyond the end, a checkpoint that is gone, and trajectories that were evicted."""
    folder = tmp_path / "run"
    with pytest.raises(DataError, match="no steps to replay"):
        plan_rerun(folder, from_step=1)
    run(tiny(learn__keep_checkpoints="2"), run_dir=folder)
    for step in (0, 7):
        with pytest.raises(DataError, match=rf"no step {step} to replay: .* steps 1 to 6"):
            plan_rerun(folder, from_step=step)
    with pytest.raises(MissingPathError, match=r"the first step that can be replayed is 5.*learn\.keep_checkpoints"):
        plan_rerun(folder, from_step=4)
    fifth, sixth = StepRows(folder / "ledger.jsonl")[4:]
    rewrite_ledger(folder, {**fifth, "row_ids": [10**6]}, sixth)
    with pytest.raises(DataError, match=r"step 5 used trajectories that are no longer in .* evicted"):
        again(tiny(), folder, from_step=5)


def test_a_resumed_run_is_replayed_like_any_other(tmp_path):
    """Steps before and after the resume agree with the ledger."""
    folder = tmp_path / "run"
    run(tiny(learn__steps="3"), run_dir=folder)
    run(tiny(), run_dir=folder, resume=True)
    assert all(one.same_bits and one.ok for one in again(tiny(), folder, from_step=2))


def test_the_command_prints_each_step_and_fails_on_a_difference(tmp_path, capsys):
    """Exit code 0 where all is equal, 1 where a recorded loss was changed, 2 with options that do not go together."""
    folder = tmp_path / "run"
    options = ["--steps", "3", "--set", "collect.group_size=4", "--set", "collect.prompts_per_rollout=2"]
    assert main(["run", "copy_digits", "--out", str(folder), *options]) == 0
    capsys.readouterr()
    assert main(["replay", str(folder), "--from-step", "2", "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "steps 2 to 2, from checkpoint step-00000000, after repeating 1 step before it, on cpu" in out
    assert "bitwise equal to the record: 1 step." in out
    assert len(list_checkpoints(folder / "checkpoints")) == 2
    metrics = list(StepRows(folder / "metrics.jsonl"))
    metrics[1]["loss"] += 1e-6
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    assert main(["replay", str(folder), "--from-step", "1"]) == 1
    out = capsys.readouterr().out
    assert "different from the record: 1 of 3 steps" in out
    assert out.count("DIFFERENT") == 1
    assert main(["replay", str(folder), "--from-step", "1", "--out", "elsewhere"]) == 2
    assert "--out cannot be combined with --from-step" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "nowhere"), "--from-step", "1"]) == 2
    with TrajectoryStore.open(folder / "store") as store:
        assert store.verify().ok
