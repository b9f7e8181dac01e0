"""Mixtures whose weights follow the stored success: by hand, after kills, and where there can be none."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline import Curriculum, Mix, Pipeline
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.report.check import check_run
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.run import Run
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import changed, count_kills, tiny, weights
from trajectory_store import TrajectoryStore

PROMPTS = ["10=", "20=", "11=", "21=", "22=", "23=", "24=", "25=", "12=", "26=", "13=", "27="]
"""By hand, of six rollouts of two: with equal weights the sources take turns; then the first is solved and has a tenth
of its weight, and its turn would be at the time 0.5 / 0.1 = 5, after 4 prompts of the other, the last at 3.5. It then
gave none, so it has its own weight again."""
WEIGHTS = [[1.0, 1.0]] * 2 + [[0.1, 1.0]] * 2 + [[1.0, 1.0]] * 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Numbered:
    """Prompt number `n` is the name of the source, then `n=`."""

    name: str
    as_chat: bool = False

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return a prompt."""
        return Prompt(text=f"{self.name}{cursor}=")


def half(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Of the first source all are right, of the second two of four."""
    return [1.0 if prompt[0] == "1" else float(place % 2) for place, prompt in enumerate(prompts)]


def followed(reward: Callable[..., Any] = half, **changes: str) -> Pipeline:
    settings = {
        "collect__prompts_per_rollout": "2",
        "learn__steps": "6",
        "learn__epochs": "1",
        "buffer__max_staleness": "0",
    }
    mix = Mix((Numbered(name="1"), Numbered(name="2")), curriculum=Curriculum(every=2, least=0.1))
    pipeline = dataclasses.replace(tiny(reward=reward, **settings), prompts=mix)
    return changed(pipeline, **changes)


def rows_of(run_dir: Path) -> dict[str, list[Any]]:
    with TrajectoryStore.open(run_dir / "store", mode="r") as store:
        found = store.read(store.ids(), ["trajectory_id", "prompt", "completion", "task_reward", "advantage"])
    return {name: [np.asarray(one).tolist() for one in values] for name, values in found.items()}


def rows_by_step(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def test_weights_follow_the_success_of_the_interval_before(tmp_path):
    """The prompts of each rollout, computed by hand; ledger and metrics tell the weights, and `verify` agrees."""
    run(followed(), run_dir=tmp_path / "run")
    assert rows_of(tmp_path / "run")["prompt"][::4] == PROMPTS
    assert [row["source_weights"] for row in rows_by_step(tmp_path / "run", "ledger.jsonl")] == WEIGHTS
    lines = rows_by_step(tmp_path / "run", "metrics.jsonl")
    assert [[line["source_weight/0"], line["source_weight/1"]] for line in lines] == WEIGHTS
    assert [finding.text for finding in check_run(RunFolder.open(tmp_path / "run")) if not finding.ok] == []


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_kills_change_nothing(tmp_path, children):
    """Killed by its reward, also as an interval begins: prompts, rows and weights are the straight run's."""
    calls = tmp_path / "calls"

    def deadly(prompts, completions):
        count = int(calls.read_text()) + 1 if calls.exists() else 1
        calls.write_text(str(count))
        if count % 3 == 0 and count <= 15:
            os.kill(os.getpid(), signal.SIGKILL)
        return half(prompts, completions)

    run(followed(), run_dir=tmp_path / "straight")
    pipeline = followed(deadly, collect__reward_concurrency="1")
    assert count_kills(children, pipeline, tmp_path / "killed") == 5
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "straight")
    assert weights(tmp_path / "killed") == weights(tmp_path / "straight")
    assert [row["source_weights"] for row in rows_by_step(tmp_path / "killed", "ledger.jsonl")] == WEIGHTS


def test_weights_of_a_source_by_hand():
    """The mean over groups of 4 p (1 - p), between `least` and all of the own weight; failed members do not count."""
    curriculum = Curriculum(every=1, least=0.25)
    assert curriculum.weight(2.0, [0.5]) == 2.0
    assert curriculum.weight(2.0, [0.0, 1.0]) == 0.5
    assert curriculum.weight(1.0, [0.25, 1.0]) == pytest.approx(0.25 + 0.75 * 0.375, abs=1e-4)


def test_what_cannot_be_followed_is_refused(tmp_path):
    """Stores that lack groups, and collectors beside a learner, before anything is made."""
    for path, value in (
        ("write__zero_variance", "drop"),
        ("collect__dynamic", "2"),
        ("buffer__max_trajectories", "64"),
    ):
        with pytest.raises(DefinitionError, match="each remove groups from the store"):
            changed(followed(), **{path: value})
    with pytest.raises(DefinitionError, match="Collect in one process"):
        Run(pipeline=followed(), run_dir=tmp_path / "run", joins="learn").checked()
    assert not (tmp_path / "run").exists()
