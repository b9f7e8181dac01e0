"""Is a run whole."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rlhf_pipeline.buffer.trajectory_schema import PROVENANCE, trajectory_schema
from rlhf_pipeline.report.check import Finding, check_run, check_store
from rlhf_pipeline.run.files import new_folder
from rlhf_pipeline.run.folder import RunFolder
from trajectory_store import TrajectoryStore


def damage(folder: Path) -> list[Finding]:
    """Return what is wrong with a run."""
    return [finding for finding in check_run(RunFolder.open(folder)) if not finding.ok]


def rewrite(file: Path, change: object) -> None:
    """Rewrite a JSONL file through a function of its rows, as if they had been written so."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in change(rows)))  # type: ignore[operator]


def checkpoint(folder: Path, step: int) -> Path:
    """Write the files of a checkpoint."""
    made = folder / "checkpoints" / f"step-{step:08}"
    with new_folder(made) as temporary:
        save_file({"w": np.zeros(100, np.float32)}, temporary / "model.safetensors")
        (temporary / "state.json").write_text("{}")
    return made


def test_whole_run(run_dir: Path):
    """A run as it was written is whole, each part is named."""
    checkpoint(run_dir, 10)
    findings = list(check_run(RunFolder.open(run_dir)))
    assert all(finding.ok for finding in findings)
    assert {"run", "store", "metrics.jsonl", "ledger.jsonl", "ledger ids", "checkpoints"} == {
        item.part for item in findings
    }


def test_missing_step(run_dir: Path):
    """A line that is missing in the middle of the metrics is found."""
    rewrite(run_dir / "metrics.jsonl", lambda rows: rows[:4] + rows[5:])
    assert any("line 5 is step 6, expected step 5" in finding.text for finding in damage(run_dir))


def test_ledger_names_a_trajectory_that_is_not_there(run_dir: Path):
    """An id in the ledger that the store has not is found, with the step that used it."""

    def change(rows: list[dict[str, list[int]]]) -> list[dict[str, list[int]]]:
        rows[2]["row_ids"][0] = 4711
        return rows

    rewrite(run_dir / "ledger.jsonl", change)
    found = damage(run_dir)
    assert len(found) == 1
    assert "step 3 used trajectory 4711" in found[0].text


def test_evicted_trajectories_are_no_damage(run_dir: Path):
    """With max_trajectories the old ids of the ledger may be gone; newer ones may not."""
    config = json.loads((run_dir / "config.json").read_text())
    config["pipeline"]["buffer"]["max_trajectories"] = 48
    (run_dir / "config.json").write_text(json.dumps(config))

    def gone(rows: list[dict[str, list[int]]]) -> list[dict[str, list[int]]]:
        rows[0]["row_ids"] = [-2, -1]
        return rows

    rewrite(run_dir / "ledger.jsonl", gone)
    assert damage(run_dir) == []
    rewrite(run_dir / "ledger.jsonl", lambda rows: [{**rows[0], "row_ids": [99]}, *rows[1:]])
    assert len(damage(run_dir)) == 1


def test_ledger_may_be_one_step_ahead(run_dir: Path):
    """A kill between a step's ledger row and its metrics is no damage; two steps are."""
    rewrite(run_dir / "metrics.jsonl", lambda rows: rows[:-1])
    assert damage(run_dir) == []
    rewrite(run_dir / "metrics.jsonl", lambda rows: rows[:-1])
    assert len(damage(run_dir)) == 1


def test_torn_line_is_reported_and_is_no_damage(run_dir: Path):
    """A torn last line is what a kill leaves; it is said and does not count."""
    file = run_dir / "ledger.jsonl"
    file.write_bytes(file.read_bytes() + b'{"step": 13, "row')
    findings = list(check_run(RunFolder.open(run_dir)))
    assert all(finding.ok for finding in findings)
    assert any("last line is incomplete" in finding.text for finding in findings)


def test_damaged_line(run_dir: Path):
    """A line in the middle that is not JSON is damage, and the store is checked all the same."""
    file = run_dir / "metrics.jsonl"
    file.write_text("nonsense\n" + file.read_text())
    findings = list(check_run(RunFolder.open(run_dir)))
    assert any("metrics.jsonl:1" in finding.text for finding in findings if not finding.ok)
    assert any(finding.part == "store" and finding.ok for finding in findings)


def conversations(path: Path, **changed: Any) -> list[str]:
    """What is found of a group of two and of one that continues the first, with these columns changed."""
    nan = math.nan
    columns: dict[str, Any] = {
        "input_ids": [[5, 6, 7, 8, 9], [5, 6, 7, 9], [5, 6, 7, 8, 9, 4, 3]],
        "assistant_mask": [[0, 0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1]],
        "log_probs": [[nan, nan, -1, nan, -2], [nan, nan, -1, -1], [nan] * 6 + [-1]],
        "turn_spans": [[[2, 1], [3, 0], [4, 1]], [[2, 1]], [[6, 1]]],
        "num_prompt_tokens": [2, 2, 6],
        "group_id": [4, 4, 5],
        "trajectory_id": [8, 9, 10],
        "parent_id": [-1, -1, 8],
    } | changed
    columns["assistant_mask"] = [np.array(mask, bool) for mask in columns["assistant_mask"]]
    with TrajectoryStore.create(path, trajectory_schema(PROVENANCE)) as store:
        store.append(columns)
    return [finding.text for finding in check_store(path) if not finding.ok]


def test_conversations_that_drifted_are_named(tmp_path):
    """A turn against its mask, another prompt in a group, another beginning than the conversation continued."""
    assert conversations(tmp_path / "good") == []
    for number, (changed, wanted) in enumerate(
        (
            ({"turn_spans": [[[2, 1], [4, 0]], [[2, 1]], [[6, 1]]]}, "id 0: token 3 belongs to a turn of the policy"),
            ({"turn_spans": [[[2, 1], [3, 0], [4, 1]], [[1, 1]], [[6, 1]]]}, "id 1: its turns begin at [1]"),
            ({"log_probs": [[-1.0] * 5, [math.nan] * 4, [math.nan] * 7]}, "id 0: token 0 was not sampled but has"),
            (
                {"input_ids": [[5, 6, 7, 8, 9], [5, 5, 7, 9], [5, 6, 7, 8, 9, 4, 3]]},
                "id 1: its prompt has other tokens",
            ),
            (
                {"input_ids": [[5, 6, 7, 8, 9], [5, 6, 7, 9], [5, 6, 7, 3, 9, 4, 3]]},
                "id 2: it continues trajectory 8, but token 3 differs",
            ),
        )
    ):
        (text,) = conversations(tmp_path / str(number), **changed)
        assert text.startswith("1 conversation with tokens that differ from the sampled tokens (")
        assert wanted in text
