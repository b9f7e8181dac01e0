"""Collectors, learner and supervisor as a person types them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_pipeline.run.jsonl import read_rows

from .conftest import Cli

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
ENV = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'storage'}", "OMP_NUM_THREADS": "1"}
SMALL = ["--set", "collect.prompts_per_rollout=4", "--set", "collect.group_size=4", "--set", "policy.hidden_size=16"]


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    """Start `rlhf-pipeline ARGS` in a folder."""
    line = [sys.executable, "-m", "rlhf_pipeline", *args]
    return subprocess.Popen(line, cwd=folder, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a process; return its exit code and what it wrote."""
    out, err = process.communicate(timeout=280)
    return process.returncode, out, err


def test_supervise_stop_look_resume(cli: Cli, tmp_path: Path):
    """A signal stops and saves a supervised run; to go on needs no number of collectors and no definition."""
    supervisor = start(tmp_path, "run", "long_running", "--collectors", "1", "--steps", "100000", *SMALL)
    run_dir = tmp_path / "runs" / "long_running"
    while len(read_rows(run_dir / "metrics.jsonl")) < 3 and supervisor.poll() is None:
        time.sleep(0.1)
    supervisor.send_signal(signal.SIGTERM)
    code, out, err = end(supervisor)
    assert code == 143, out + err
    assert "1 collector and a learner" in out.splitlines()[0]
    assert "stopped and saved" in out
    steps = len(read_rows(run_dir / "metrics.jsonl"))
    assert (run_dir / "checkpoints" / f"step-{steps:08d}").is_dir()
    log = (run_dir / "supervisor.log").read_text()
    assert log.count("ended with code 143") == 2
    for look in ("verify", "inspect"):
        shown = cli(look, run_dir)
        assert shown.code == 0, shown
    code, out, err = end(start(tmp_path, "run", "runs/long_running", "--resume", "--steps", str(steps + 2)))
    assert code == 0, out + err
    assert f"going on after step {steps}" in out
    assert f"in {steps + 2} steps" in out
    assert f"rlhf-pipeline run --out runs/long_running --resume --steps {2 * (steps + 2)}" in out
    assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == list(range(1, steps + 3))
    for name in ("reward.svg", "report.html", "ledger.jsonl", "processes/learner.log"):
        assert (run_dir / name).is_file()
    log = (run_dir / "supervisor.log").read_text()
    assert log.count("supervisor: started") == log.count("supervisor: ended") == 2


def test_collect_and_learn_by_hand(tmp_path: Path):
    """A collector makes the run, a learner joins it by its folder; both leave when it has ended."""
    collector = start(tmp_path, "collect", "long_running", "--run", "mine", "--set", "learn.steps=3", *SMALL)
    while not (tmp_path / "mine" / "config.json").is_file() and collector.poll() is None:
        time.sleep(0.05)
    code, out, err = end(start(tmp_path, "learn", "--run", "mine"))
    assert code == 0, out + err
    assert "in 3 steps" in out
    assert "rlhf-pipeline learn --run mine --steps 6" in out
    code, out, err = end(collector)
    assert code == 0, out + err
    assert "collector-0: rollout 0  weights of step 0  reward" in out
    assert "collector-0: the run has ended" in out


def test_what_cannot_start_is_said_at_once(tmp_path: Path):
    """The supervisor itself imports no torch, so a child finds out; it is not started again and again."""
    code = (
        "import sys; from rlhf_pipeline.cli import main; "
        "code = main(['run', 'long_running', '--collectors', '1', '--device', 'cuda:99']); "
        "print('torch' in sys.modules, code)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=ENV, capture_output=True, text=True, check=False
    )
    assert shown.stdout.splitlines()[-1] == "False 2"
    assert "cannot start. It said last: rlhf-pipeline: --device cuda:99" in shown.stderr
