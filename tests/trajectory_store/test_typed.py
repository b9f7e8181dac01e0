"""A user's program is accepted by type checkers in their strictest form, and runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trajectory_store

PROGRAM = Path(__file__).with_name("typed") / "user_program.py"
PACKAGES = Path(trajectory_store.__file__).parents[1]


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder without the settings of this project, with the store beside it."""
    environment = os.environ | {"PYTHONPATH": str(PACKAGES), "MYPYPATH": str(PACKAGES)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_program_runs(tmp_path: Path):
    """It records lists, arrays and tensors, and reads them by each kind of key."""
    done = run(tmp_path, sys.executable, PROGRAM, tmp_path / "store")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        f"<TrajectoryRecorder '{tmp_path}/store', group_size=2: 4 recorded>",
        "[-1, -1, 3, 4]",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_accept_the_program(tmp_path: Path, checker: str):
    """In strict mode; and both reject a wrong argument, so that the check can fail."""
    pytest.importorskip(checker)
    (tmp_path / "pyrightconfig.json").write_text(f'{{"strict": ["*.py"], "extraPaths": ["{PACKAGES}"]}}')
    program = PROGRAM.read_text(encoding="utf-8")
    (tmp_path / "right.py").write_text(program)
    (tmp_path / "wrong.py").write_text(program.replace("policy_version=np.array([3, 4])", "policy_version='newest'"))
    options = ["--strict"] if checker == "mypy" else ["--pythonpath", sys.executable]
    right = run(tmp_path, sys.executable, "-m", checker, *options, "right.py")
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = run(tmp_path, sys.executable, "-m", checker, *options, "wrong.py")
    assert wrong.returncode == 1
    assert "policy_version" in wrong.stdout or "newest" in wrong.stdout
