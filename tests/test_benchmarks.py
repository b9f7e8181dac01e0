"""The benchmarks that need no peer but TorchRL run to their end: a change of the library does not leave them behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bench_replay", "bench_write_path", "bench_memory", "bench_learner_h200"])
def test_a_benchmark_prints_its_figures(name):
    """Each prints a table; how fast the machine is does not matter here. That for a GPU runs a tiny model."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--quick"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert sum(any(map(str.isdigit, line)) for line in ended.stdout.splitlines()) > 2, ended.stdout
