"""Real data, offline: graded solutions of GSM8K into a store, 50 steps on it, and what held-out questions say."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from rlhf_pipeline.run.rows import StepRows
from trajectory_store import TrajectoryStore

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SETTINGS = (
    ("learn.lr", "3e-3"),
    ("learn.steps", "50"),
    ("replay.epochs", "none"),
    ("sample.batch_size", "64"),
    ("learn.checkpoint_every", "50"),
)


@pytest.fixture
def experiment(monkeypatch):
    """Return the module of the experiment."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("experiment_offline_gsm8k")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_correct_solutions_gain_on_incorrect_ones_on_questions_that_were_never_seen(experiment, tmp_path, gsm8k_dir):
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


def test_the_table_of_graded_solutions_is_that_of_the_committed_runs(experiment):
    """benchmarks/README.md prints what the results say; if not, the experiment's `--markdown` prints it again."""
    found = json.loads(experiment.RESULTS.read_text(encoding="utf-8"))
    page = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert "\n".join(experiment.markdown(found)) in page
    changes = [experiment.Change(**seed["held-out, per token"]) for seed in found["runs"]["true"]]
    counts, errors = [one.questions for one in changes], [one.t for one in changes]
    assert f"({min(counts)} to {max(counts)} of them)" in " ".join(page.split())
    assert f"questions is {min(errors):.1f} to {max(errors):.1f} standard errors" in " ".join(page.split())
    assert {len(seeds) for seeds in found["runs"].values()} == {found["seeds"]}
    assert found["seeds"] >= 5
