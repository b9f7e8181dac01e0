"""Reading run folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_pipeline.errors import DataError, MissingPathError
from rlhf_pipeline.report.stored import open_run_or_store
from rlhf_pipeline.run.folder import RunFolder


def test_reads_what_a_run_wrote(run_dir: Path):
    """Configuration, one metrics row per step, the curve and the ledger come back."""
    run = RunFolder.open(run_dir)
    assert run.config.definition == "copy_digits"
    assert run.config.overrides[0] == ("collect.prompts_per_rollout", "2")
    assert [row["step"] for row in run.metrics] == list(range(1, 13))
    assert [step for step, _ in run.reward_points()] == [1, 3, 5, 7, 9, 11]
    assert len(run.ledger) == 12
    assert run.ledger[0]["row_ids"] == list(range(8))


def test_torn_last_line(run_dir: Path):
    """A line that a kill cut short is left out, in every file."""
    for name in ("metrics.jsonl", "ledger.jsonl"):
        file = run_dir / name
        file.write_bytes(file.read_bytes()[:-20])
    run = RunFolder.open(run_dir)
    assert len(run.metrics) == 11
    assert len(run.ledger) == 11


def test_damaged_line_in_the_middle(run_dir: Path):
    """A line that is not JSON is named with its number."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:3], '{"step": 4, "lo\n', *lines[4:]]))
    with pytest.raises(DataError, match=r"metrics\.jsonl:4: this line is not JSON"):
        RunFolder.open(run_dir).metrics  # noqa: B018 - read on access


def test_line_without_step(run_dir: Path):
    """A line without a step is named with its number."""
    file = run_dir / "metrics.jsonl"
    file.write_text(file.read_text() + '{"loss": 1}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:13: this line has no whole number 'step'"):
        RunFolder.open(run_dir).metrics  # noqa: B018 - read on access


def test_missing_run_names_the_runs_there(run_dir: Path):
    """A path that is no run names the nearest run."""
    with pytest.raises(MissingPathError, match=r"does not exist\. Did you mean '.*/demo'\?"):
        RunFolder.open(run_dir.with_name("dem"))


def test_no_runs_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where there is no run at all, the way to make one is said."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingPathError, match="rlhf-pipeline run copy_digits"):
        RunFolder.open(tmp_path / "x")


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("{", "is not JSON"),
        ("[]", "names no 'definition'"),
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
    with pytest.raises(MissingPathError, match=r"the store of the run .* is gone.*Restore it from a copy.*verify"):
        open_run_or_store(run_dir)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        (run_dir / name).unlink()
    with pytest.raises(MissingPathError, match="has stored nothing yet"):
        open_run_or_store(run_dir)
