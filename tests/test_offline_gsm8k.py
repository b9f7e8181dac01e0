"""Real data, offline: graded solutions of GSM8K into a store, 50 steps on it, and what held-out questions say."""

from __future__ import annotations

import json

import pytest

from benchmarks import experiment_offline_gsm8k as experiment
from rlhf_pipeline.run.rows import StepRows
from trajectory_store import TrajectoryStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = (
    ("learn.lr", "3e-3"),
    ("learn.steps", "50"),
    ("replay.epochs", "none"),
    ("sample.batch_size", "64"),
    ("learn.checkpoint_every", "50"),
)


def test_correct_solutions_gain_on_incorrect_ones_on_questions_that_were_never_seen(tmp_path, gsm8k_dir):
    """50 steps on the solutions of 600 questions: elsewhere, too, the margin rises by more than 3 standard errors."""
    del gsm8k_dir  # it skips where the files are not
    experiment.prepare(tmp_path, seed=0, questions=600)
    files = [tmp_path / "learned.jsonl", tmp_path / "held-out.jsonl"]
    questions = [list(map(json.loads, file.read_text().splitlines())) for file in files]
    assert not {row["question"] for row in questions[0]} & {row["question"] for row in questions[1]}
    held_out = tmp_path / "held-out"
    before = experiment.log_probs(tmp_path / "model", held_out)
    checkpoint = experiment.learn(tmp_path, seed=0, settings=SETTINGS)
    after = experiment.log_probs(checkpoint, held_out)

    rows = list(StepRows(tmp_path / "run" / "metrics.jsonl"))
    assert len(rows) == 50
    with TrajectoryStore.open(tmp_path / "run" / "store") as own:
        assert own.read_scalars("computed").tolist() == [5] * 2400  # behaviour log-probs and advantages
        assert {row["num_trajectories"] for row in rows} == {64}
    per_token = experiment.change(before, after, per_token=True)
    per_sequence = experiment.change(before, after, per_token=False)
    assert per_token.questions == per_sequence.questions > 150
    # With the grades of each question permuted, the benchmark's control, the change is within 0.008 of 0.
    assert per_token.change > 0.01
    assert per_token.t > 3
    assert per_token.rising > 0.58
    assert per_sequence.change > 0
    assert per_sequence.rising > 0.55
