from __future__ import annotations

from rlhf_pipeline.jsonl import read_rows
from rlhf_pipeline.learner.ledger import Ledger
from rlhf_pipeline.run.progress import MetricsFile, Progress, replaced


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
    assert [kept["step"] for kept in last.rows()] == [1, 2, 3]


def test_a_step_with_other_trajectories_drops_what_was_planned_after_it(tmp_path):
    """Later rows were chosen from what the replaced step had left over, so they go."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for step in (1, 2, 3):
        ledger.record(row(step, [step]))
    planned = ledger.planned(2)
    assert not ledger.record(row(2, [9]))
    assert replaced(ledger, 2, planned)
    assert ledger.rows() == [row(1, [1]), row(2, [9])]


def test_the_same_trajectories_in_other_rows_are_the_same_step(tmp_path):
    """What a ring lost and a resume sampled again has new row ids and the old trajectory ids."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.record(row(1, [4, 5], trajectory_ids=[0, 1]))
    assert ledger.record(row(1, [8, 9], trajectory_ids=[0, 1]))
    assert ledger.rows() == [row(1, [8, 9], trajectory_ids=[0, 1])]


def test_a_torn_tail_is_taken_off_before_the_next_row(tmp_path):
    """A line that a kill cut short does not run into the next one."""
    for name, make in (("ledger.jsonl", Ledger), ("metrics.jsonl", MetricsFile)):
        path = tmp_path / name
        path.write_bytes(b'{"step":1,"row_ids":[1]}\n{"step":2,"ro')
        file = make(path)
        file.record(row(2, [2])) if isinstance(file, Ledger) else file.append(row(2, [2]))
        assert read_rows(path) == [row(1, [1]), row(2, [2])]


def test_metrics_of_a_step_are_written_once(tmp_path):
    """A resumed run that takes a step again leaves its line; a step that changed gets a new one."""
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in (1, 2, 3):
        first.append({"step": step, "loss": 0.5})
    again = MetricsFile(path)
    again.append({"step": 2, "loss": 0.7})
    assert [line["loss"] for line in read_rows(path)] == [0.5, 0.5, 0.5]
    again.drop_from(2)
    again.append({"step": 2, "loss": 0.7})
    assert read_rows(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.7}]


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
