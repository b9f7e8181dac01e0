"""The run command as a person types it, in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
ENV = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'storage'}", "OMP_NUM_THREADS": "1"}
SMALL = ["--set", "collect.prompts_per_rollout=4", "--set", "collect.group_size=4", "--set", "policy.hidden_size=16"]


def command(*args: str) -> list[str]:
    """Return the command line of `rlhf-pipeline ARGS`."""
    return [sys.executable, "-m", "rlhf_pipeline.cli", *args]


def typed(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder."""
    line = command(*args)
    return subprocess.run(line, cwd=folder, env=ENV, capture_output=True, text=True, check=False, timeout=280)


def test_run_look_resume(tmp_path: Path):
    """A short run says what came of it; looking at it agrees; a resume goes on; all stays whole."""
    ran = typed(tmp_path, "run", "copy_digits", "--steps", "4", *SMALL)
    assert ran.returncode == 0, ran.stderr
    assert "importing torch" in ran.stdout.splitlines()[0]
    assert "in 4 steps" in ran.stdout
    assert "64 trajectories stored" in ran.stdout
    assert "rlhf-pipeline run copy_digits --resume --steps 8" in ran.stdout
    for name in ("reward.svg", "report.html", "metrics.jsonl", "ledger.jsonl", "config.json", "log.txt"):
        assert (tmp_path / "runs" / "copy_digits" / name).is_file()

    inspected = typed(tmp_path, "inspect", "runs/copy_digits", "--json")
    assert inspected.returncode == 0, inspected.stdout
    check = json.loads(inspected.stdout)["reward_check"]
    assert (check["num_trajectories"], check["num_rollouts"], check["agrees"]) == (64, 4, True)

    resumed = typed(tmp_path, "run", "copy_digits", "--resume", "--steps", "6")
    assert resumed.returncode == 0, resumed.stderr
    assert "going on after step 4" in resumed.stdout
    assert typed(tmp_path, "verify", "runs/copy_digits").returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path: Path, number: int, code: int):
    """A signal ends the run after a step; the exit code tells which signal; the run goes on afterwards."""
    line = command("run", "copy_digits", "--steps", "100000", "--set", "learn.stop_at_reward=none", *SMALL)
    with subprocess.Popen(
        line, cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        metrics = tmp_path / "runs" / "copy_digits" / "metrics.jsonl"
        deadline = time.monotonic() + 250
        while not metrics.is_file() and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        run.send_signal(number)
        out, err = run.communicate(timeout=200)
    assert run.returncode == code, err
    assert "stopped and saved: " in out
    assert "rlhf-pipeline run copy_digits --resume" in out
    assert "Traceback" not in err
    verified = typed(tmp_path, "verify", "runs/copy_digits")
    assert verified.returncode == 0, verified.stdout


def test_doctor_and_new_model(tmp_path: Path):
    """The doctor finds this machine fit, and a model made from a text file is a checkpoint folder."""
    checked = typed(tmp_path, "doctor")
    assert checked.returncode == 0, checked.stdout
    assert "store: " in checked.stdout
    assert "All is well" in checked.stdout
    (tmp_path / "text.txt").write_text("some words, again and again and again\n" * 50)
    sizes = ("--vocab-size", "300", "--hidden-size", "16", "--num-layers", "1")
    made = typed(tmp_path, "new-model", "model", "--text", "text.txt", *sizes)
    assert made.returncode == 0, made.stderr
    assert "rlhf-pipeline run gsm8k --set policy.path=model" in made.stdout
    assert (tmp_path / "model" / "model.safetensors").is_file()
