"""The commands that look answer at once: no torch, well under half a second."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_pipeline.cli.parser import COMMANDS

from .rlhf_pipeline.report.conftest import write_run

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 0.5
HELP_LIMIT_S = 0.15
NUMPY_S = 0.1
"""Time of a process that imports NumPy on the machine that the limits are for; this one may be slower."""
HEAVY = ("torch", "torchrl", "tensordict", "transformers", "zarr", "rich", "pyarrow", "datasets")
CODE = """
import sys
from rlhf_pipeline.cli import main
refused = sys.argv.pop(1).split(",")
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
heavy = [name for name in refused if name in sys.modules]
if heavy:
    sys.exit(f"imported {heavy}")
sys.exit(code)
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of an installation: byte code is kept between starts."""
    names = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = f"{ROOT}{os.pathsep}{ROOT / 'storage'}"
    return names | {"PYTHONPATH": path, "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("pycache"))}


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 48 trajectories."""
    return write_run(tmp_path_factory.mktemp("small") / "run")


@pytest.fixture(scope="module")
def large_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30,720 trajectories, graded again by `inspect`."""
    return write_run(tmp_path_factory.mktemp("large") / "run", num_rollouts=120, prompts=16, group_size=16)


def best_time(env: dict[str, str], *args: str, limit: float = LIMIT_S, heavy: tuple[str, ...] = HEAVY) -> float:
    """Run a command until it is quick enough, ten times at most, and return its best time in seconds.

    On a slow machine they are seconds of one where a process that imports NumPy takes `NUMPY_S`, measured in turns.
    """
    best = numpy = float("inf")
    for _ in range(10):
        numpy = min(numpy, time_of(env, "import numpy"))
        best = min(best, time_of(env, CODE, ",".join(heavy), *args))
        if best * min(1.0, NUMPY_S / numpy) < limit:
            break
    return best * min(1.0, NUMPY_S / numpy)


def time_of(env: dict[str, str], code: str, *args: str) -> float:
    """Return the wall time or the processor time of a process, whichever is less: the rest is waiting, or threads."""
    started, used = time.perf_counter(), processor_time()
    shown = subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, check=False)
    wall, used = time.perf_counter() - started, processor_time() - used
    assert shown.returncode == 0, shown.stderr
    return min(wall, used)


def processor_time() -> float:
    """Return the seconds of processor time of all finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("args", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_of_every_command(env: dict[str, str], args: list[str]):
    """Help needs neither NumPy nor torch, and takes under 0.15 s of processor time."""
    assert best_time(env, *args, limit=HELP_LIMIT_S, heavy=(*HEAVY, "numpy")) < HELP_LIMIT_S


@pytest.mark.parametrize("args", [["--version"], ["list"], ["config"]])
def test_commands_without_a_run(env: dict[str, str], args: list[str]):
    """What needs no run imports nothing heavy and answers in under half a second."""
    assert best_time(env, *args) < LIMIT_S


@pytest.mark.parametrize("command", ["inspect", "show", "tail", "verify"])
def test_commands_on_a_run(env: dict[str, str], small_run: Path, command: str):
    """Looking at a run imports nothing heavy and answers in under half a second."""
    assert best_time(env, command, str(small_run)) < LIMIT_S


def test_diff(env: dict[str, str], small_run: Path):
    """Comparing two runs imports nothing heavy and answers in under half a second."""
    assert best_time(env, "diff", str(small_run), str(small_run)) < LIMIT_S


def test_inspect_of_thirty_thousand_trajectories(env: dict[str, str], large_run: Path):
    """Counting and grading 30,720 trajectories takes under a second; a call of any form costs some 10 us."""
    assert best_time(env, "inspect", str(large_run), "--grade", limit=1.0) < 1.0


def test_mistakes_of_run(env: dict[str, str], small_run: Path):
    """A slip in `run` is answered before torch is imported."""
    shown = subprocess.run(
        [sys.executable, "-c", CODE, ",".join(HEAVY), "run", "copy_digits", "--out", str(small_run)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 2
    assert "already contains a run" in shown.stderr


@pytest.mark.parametrize(
    "module", ["rlhf_pipeline", "rlhf_pipeline.definitions", "rlhf_pipeline.report.one_file", "rlhf_pipeline.exchange"]
)
def test_modules_import_no_torch(env: dict[str, str], module: str):
    """Definitions, with all that a star import gives, and reports import nothing heavy."""
    code = f"import sys, {module}\nfrom rlhf_pipeline import *\nGRPO, Pipeline, override\n"
    code += f"sys.exit(str([m for m in {HEAVY!r} if m in sys.modules] or ''))"
    shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert shown.stderr.strip() == ""
