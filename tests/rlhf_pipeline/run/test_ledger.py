from __future__ import annotations

import pytest

from rlhf_pipeline.run.ledger import Ledger
from rlhf_pipeline.run.loop import Progress
from rlhf_pipeline.run.rows import StepRows
from tests.moments import Call, at_call


def row(step: int, ids: list[int], **more: object) -> dict:
    return {"step": step, "row_ids": ids, **more}


def test_rows_survive_restarts_however_many(tmp_path):
    """After two restarts in a row, the second before the first caught up, every planned step is still on file."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    for step in (1, 2, 3):
        ledger.record(row(step, [step]))
    assert Ledger(path).record(row(1, [1]))  # the first restart gets as far as step 1
    last = Ledger(path)
    assert [last.planned(step) for step in (2, 3, 4)] == [row(2, [2]), row(3, [3]), None]
    assert [kept["step"] for kept in last.rows] == [1, 2, 3]


def test_a_step_with_other_trajectories_drops_what_was_planned_after_it(tmp_path):
    """Later rows were chosen from what the replaced step had left over, so they go."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for step in (1, 2, 3):
        ledger.record(row(step, [step]))
    planned = ledger.planned(2)
    assert not ledger.record(row(2, [9]))
    assert ledger.planned(2) != planned
    assert list(ledger.rows) == [row(1, [1]), row(2, [9])]


def test_a_kill_while_a_step_is_replaced_leaves_no_figures_of_what_did_not_happen(tmp_path):
    """The figures of a step go before its row does: a resume would take them for those of the step that replaces it."""
    ledger = Ledger(tmp_path / "ledger.jsonl", metrics=StepRows(tmp_path / "metrics.jsonl"))
    for step in (1, 2, 3):
        ledger.record(row(step, [step]))
        assert ledger.metrics is not None
        ledger.metrics.append({"step": step, "loss": 0.5})

    def killed(call: Call) -> None:
        if call.arguments["self"] is ledger.rows:
            raise SystemExit

    with at_call(type(ledger.rows).drop_from, before=killed), pytest.raises(SystemExit):
        ledger.record(row(2, [9]))
    assert (StepRows(tmp_path / "metrics.jsonl").last_step, ledger.rows.last_step) == (1, 3)
    ledger.record(row(2, [9]))
    assert (StepRows(tmp_path / "metrics.jsonl").last_step, ledger.rows.last_step) == (1, 2)


def test_a_power_loss_that_takes_the_ledger_alone_leaves_no_figures_of_other_steps(tmp_path):
    """A step that the ledger does not have, and whose figures are on file, is not taken for a new one."""
    metrics = StepRows(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        metrics.append({"step": step, "loss": 0.5})
    ledger = Ledger(tmp_path / "ledger.jsonl", metrics=metrics)
    assert ledger.record(row(2, [2]))
    assert (StepRows(tmp_path / "metrics.jsonl").last_step, ledger.rows.last_step) == (1, 2)


def test_the_same_trajectories_in_other_rows_are_the_same_step(tmp_path):
    """What a ring lost and a resume sampled again has new row ids and the old trajectory ids."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.record(row(1, [4, 5], trajectory_ids=[0, 1]))
    assert ledger.record(row(1, [8, 9], trajectory_ids=[0, 1]))
    assert list(ledger.rows) == [row(1, [8, 9], trajectory_ids=[0, 1])]


@pytest.mark.parametrize("ids", [[4, 5], [8, 9]], ids=["the same rows", "other rows"])
def test_the_same_trajectories_of_other_ages_are_another_step(tmp_path, ids):
    """Other weights have sampled them again, after a power loss took those that the ledger names."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.record(row(1, [4, 5], trajectory_ids=[0, 1], ages=[2, 2]))
    assert not ledger.record(row(1, ids, trajectory_ids=[0, 1], ages=[1, 2]))
    assert list(ledger.rows) == [row(1, ids, trajectory_ids=[0, 1], ages=[1, 2])]


def test_the_target_needs_a_whole_window():
    """Two rollouts above the target are not three."""
    progress = Progress()
    for reward in (0.2, 1.0, 1.0):
        progress.note(reward, window=3)
    assert not progress.reached(0.9, 3)
    assert progress.reached(0.9, 2)
    progress.note(0.9, window=3)
    assert progress.reached(0.9, 3)
    assert (progress.first_reward, progress.last_reward) == (0.2, 0.9)
