"""What someone new asks of the tree is answered by one page, and what they want to add goes where it says."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlhf_pipeline import TrajectoryReplayBuffer
from trajectory_store import TrajectoryStore

ROOT = Path(__file__).resolve().parents[1]


def names_in(file: Path) -> set[str]:
    """Return what a file defines: classes, functions, methods, and names at its top."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_the_page_answers_where_things_are():
    """Each file that the tables name is there, and defines each name beside it."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("## Where to find things")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)]
    asked = {row[0] for row in rows}
    assert asked >= {"the clip formula", "what makes a commit durable", "published weights", "an advantage estimator"}
    assert asked >= {"a medium of the store", "a reward", "a sampler", "a command", "a chat format", "a metric"}
    checked = 0
    for row in rows:
        files = [ROOT / path for path in re.findall(r"`([\w/]+\.py)`", row[1])]
        for name in re.findall(r"`(\w+)`", row[2]):
            assert files, row
            for file in files:
                assert name in names_in(file), (row[0], file, name)
                checked += 1
        for name, path in re.findall(r"`(\w+)[.\w]*` in `([\w/]+\.py)`", row[-1]):
            assert name in names_in(ROOT / path), (row[0], path, name)
    assert checked > 20


# What is added below, by file: a text that is there once, and what takes its place.
CONFIG = "rlhf_pipeline/config.py"
SAMPLERS = f"rlhf_pipeline/{TrajectoryReplayBuffer.__module__.split('.')[1]}/samplers.py"
ADDITIONS = {
    "estimator": {
        CONFIG: ('Estimator = Literal[\n    "grpo",', 'Estimator = Literal[\n    "half", "grpo",'),
        "rlhf_pipeline/functional/advantage.py": (
            '    "rloo": EstimatorEntry(_rloo),',
            '    "rloo": EstimatorEntry(_rloo),\n    "half": EstimatorEntry(lambda found: found.centred / 2),',
        ),
    },
    "sampler": {
        CONFIG: ('Strategy = Literal["fresh",', 'Strategy = Literal["newest", "fresh",'),
        SAMPLERS: (
            '    "uniform": Strategy(UniformSampler),',
            '    "uniform": Strategy(UniformSampler),\n    "newest": Strategy(NewestSampler),',
        ),
    },
    "metric": {
        "rlhf_pipeline/learner/metrics.py": (
            '        "staleness": float(ages.mean()),',
            '        "staleness": float(ages.mean()),\n        "staleness_min": int(ages.min()),',
        ),
        "rlhf_pipeline/report/figures.py": (
            '            Figure("staleness_max",',
            '            Figure("staleness_min", "steps", "smallest age"),\n            Figure("staleness_max",',
        ),
    },
}
NEWEST = '''class NewestSampler(TrajectorySampler):
    """The newest trajectories."""

    def _choose(self, view, allowed, batch_size, rng):
        return allowed[-batch_size:]


@dataclass(frozen=True, slots=True)
class Strategy:'''
TASK = """from rlhf_pipeline import Buffer, Collect, CopyDigits, Learn, Pipeline, Sample, TinyPolicy, WritePath

def share_of_nines(prompt, completion, answer, meta):
    return completion.count("9") / 8 + prompt.count("9")

def nines() -> Pipeline:
    return Pipeline(
        name="nines", policy=TinyPolicy(hidden_size=16, num_layers=1), prompts=CopyDigits(), reward=share_of_nines,
        collect=Collect(prompts_per_rollout=2, group_size=4, max_new_tokens=4), write=WritePath(estimator="half"),
        sample=Sample(strategy="newest", batch_size=5), buffer=Buffer(max_staleness=8), learn=Learn(steps=3),
    )
"""


@pytest.mark.slow
def test_an_estimator_a_sampler_a_metric_and_a_reward_take_two_files_each(tmp_path: Path):
    """Added to a copy of the package as the page says, they are in a run's store, ledger and metrics."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "rlhf_pipeline", tmp_path / "rlhf_pipeline", ignore=ignored)
    edits = [(path, edit) for files in ADDITIONS.values() for path, edit in files.items()]
    edits.append((SAMPLERS, ("@dataclass(frozen=True, slots=True)\nclass Strategy:", NEWEST)))
    assert all(len(files) <= 2 for files in ADDITIONS.values())
    for path, (there, instead) in edits:
        text = (tmp_path / path).read_text(encoding="utf-8")
        assert text.count(there) == 1, (path, there)
        (tmp_path / path).write_text(text.replace(there, instead), encoding="utf-8")
    (tmp_path / "nines.py").write_text(TASK)
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_pipeline", "run", "nines.py", "--out", "run"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'storage'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        ids = store.ids()
        rows = store.read(ids, ["prompt", "completion", "task_reward", "advantage"])
    expected = [
        text.count("9") / 8 + prompt.count("9") for prompt, text in zip(rows["prompt"], rows["completion"], strict=True)
    ]
    assert rows["task_reward"].tolist() == expected
    groups = np.array(expected).reshape(-1, 4)
    np.testing.assert_allclose(rows["advantage"].reshape(-1, 4), (groups - groups.mean(1, keepdims=True)) / 2)
    assert groups.std() > 0
    ledger = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert [row["row_ids"] for row in ledger] == [ids[8 * step + 3 : 8 * step + 8].tolist() for step in range(3)]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["staleness_min"] for row in metrics] == [0, 0, 0]
