"""Reading run folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_pipeline.errors import DataError, MissingPathError
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.lookup import open_run_or_store


def test_reads_what_a_run_wrote(run_dir: Path):
    """Configuration, one metrics row per step, the curve and the ledger come back."""
    run = RunFolder.open(run_dir)
    assert run.config.definition == "copy_digits"
    assert run.config.overrides[0] == ("collect.prompts_per_rollout", "2")
    assert [row["step"] for row in run.metrics] == list(range(1, 13))
    assert [row["step"] for row in run.metrics if row["task_reward"] is not None] == [1, 3, 5, 7, 9, 11]
    assert len(run.ledger) == 12
    assert run.ledger[0]["row_ids"] == list(range(8))


def test_no_runs_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where there is no run at all, the way to make one is said."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingPathError, match="rlhf-pipeline run copy_digits"):
        RunFolder.open(tmp_path / "x")


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("{", "is not JSON"),
        ("[]", "has no 'definition'"),
        (json.dumps({"format": 2, "definition": "x"}), "has format 2; this version of rlhf-pipeline reads format 1"),
    ],
)
def test_damaged_config(run_dir: Path, text: str, pattern: str):
    """A config.json that cannot be read says why and what to do."""
    (run_dir / "config.json").write_text(text)
    with pytest.raises(DataError, match=pattern):
        RunFolder.open(run_dir)


def test_run_or_store(run_dir: Path):
    """A run, the store in it and a store alone are all found; a run's store finds its run."""
    run, store = open_run_or_store(run_dir)
    assert run is not None
    assert store == run_dir / "store"
    inner, _ = open_run_or_store(run_dir / "store")
    assert inner is not None
    (run_dir / "store").rename(run_dir.parent / "alone")
    assert open_run_or_store(run_dir.parent / "alone")[0] is None
    with pytest.raises(MissingPathError, match=r"the store of the run .* is missing.*Restore it from a copy.*verify"):
        open_run_or_store(run_dir)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        (run_dir / name).unlink()
    with pytest.raises(MissingPathError, match="has not stored any trajectories yet"):
        open_run_or_store(run_dir)
