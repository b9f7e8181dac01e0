"""The benchmarks that need no peer but TorchRL run to their end: a change of the library does not leave them behind."""

from __future__ import annotations

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
