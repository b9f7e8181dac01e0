"""The benchmarks that need no peer but TorchRL run to their end: a change of the library does not leave them behind."""

from __future__ import annotations

import collections
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "benchmarks"


COMMANDS = {
    "bench_replay": ["bench_replay.py", "--quick"],
    "bench_write_path": ["bench_write_path.py", "--quick"],
    "bench_memory": ["bench_memory.py", "--quick"],
    "bench_learner_h200": ["bench_learner_h200.py", "--tiny", "--sections", "grpo"],
    "gpu_check": ["gpu_check.py", "--tiny", "--out", "FOLDER"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_prints_its_figures(name, tmp_path):
    """Each prints a table; how fast the machine is does not matter here. Those for a GPU run a tiny model."""
    file, *options = COMMANDS[name]
    command = [sys.executable, str(HERE / file), *(str(tmp_path) if one == "FOLDER" else one for one in options)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sum(any(map(str.isdigit, line)) for line in ended.stdout.splitlines()) > 2, ended.stdout


def test_the_tables_of_replay_are_those_of_the_committed_runs(monkeypatch):
    """docs/offline.md prints what the results say; if not, `experiment_replay.py --markdown` prints it again."""
    monkeypatch.syspath_prepend(str(HERE))
    experiment = importlib.import_module("experiment_replay")
    page = (HERE.parent / "docs" / "offline.md").read_text(encoding="utf-8")
    tasks = [name for name in experiment.TASKS if experiment.results_of(name).exists()]
    assert len(tasks) >= 2
    for name in tasks:
        runs = experiment.committed(name)
        assert "\n".join(experiment.markdown(name, runs)) in page, name
        per_arm = collections.Counter(run["arm"] for run in runs)
        assert min(per_arm.values()) >= 4, per_arm


def test_a_paired_difference_is_taken_seed_by_seed(monkeypatch):
    """Gains of 0.1 and 0.3 of two seeds: a mean of 0.2, and the half width of Student's t with one degree."""
    monkeypatch.syspath_prepend(str(HERE))
    experiment = importlib.import_module("experiment_replay")
    arms = {"a": {0: {"last": 0.6}, 1: {"last": 0.9}}, "b": {0: {"last": 0.5}, 1: {"last": 0.6}, 2: {"last": 0.0}}}
    assert experiment.paired(arms, "a", "b", "last") == pytest.approx((0.2, 12.706 * 0.1), abs=1e-9)
