"""The short form of `cloud.py`: a run in an object store whose processes are killed and replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash._s3 import missing

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(300),
]


def play(*arguments: str) -> None:
    """Play `cloud.py` in a process of its own: it forks, and whoever asked an object store has threads not to fork."""
    command = [sys.executable, "-m", "tests.crash.cloud", *arguments]
    played = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert played.returncode == 0, f"{played.stdout}\n{played.stderr}"


def test_a_run_at_a_url_ends_as_if_left_alone():
    """Every prompt and every step once, nothing acknowledged lost, and the weights of an undisturbed run."""
    play("--steps", "4", "--seed", "1")


@pytest.mark.slow
def test_a_network_that_is_gone_for_20_s_ends_no_process():
    """All three wait for it, and the weights are those of an undisturbed run."""
    play("--steps", "4", "--cut", "20")
