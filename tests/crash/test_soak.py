"""The short form of `soak.py`: a supervised run in trouble, with commands that look at it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("effects", [False, True])
def test_forty_seconds_of_trouble(tmp_path, effects):
    """No prompt lost or repeated, every step once, nothing acknowledged lost, and every command beside it succeeds.

    Of conversations with effects outside, on frozen lakes, none that was stored is begun again.
    """
    shown = subprocess.run(
        [
            *(sys.executable, str(ROOT / "tests" / "crash" / "soak.py")),
            *("--minutes", "0.9", "--seed", "7", "--quiet-steps", "0", "--no-goal", "--out", str(tmp_path / "run")),
            *(["--effects"] if effects else []),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'storage'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "all met" in shown.stdout
