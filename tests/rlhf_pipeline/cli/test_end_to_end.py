"""Commands as a person types them: a run, and collectors, learner and supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_pipeline.run.rows import StepRows
from tests.processes import Children

from .conftest import Cli

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
ENV = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'storage'}", "OMP_NUM_THREADS": "1"}
SMALL = ["--set", "collect.prompts_per_rollout=4", "--set", "collect.group_size=4", "--set", "policy.hidden_size=16"]


def test_run_look_resume(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A short run says what came of it; looking at it agrees; a resume goes on; all stays whole."""
    monkeypatch.chdir(tmp_path)
    ran = cli("run", "copy_digits", "--steps", "4", *SMALL)
    assert ran.code == 0, ran.err
    assert "in 4 steps" in ran.out
    assert "64 trajectories stored" in ran.out
    assert "rlhf-pipeline run copy_digits --resume --steps 8" in ran.out
    for name in ("report.html", "metrics.jsonl", "ledger.jsonl", "config.json", "log.txt"):
        assert (tmp_path / "runs" / "copy_digits" / name).is_file()

    inspected = cli("inspect", "runs/copy_digits", "--grade", "--json")
    assert inspected.code == 0, inspected.out
    check = json.loads(inspected.out)["reward_check"]
    assert (check["trajectories"], check["rollouts"], check["agrees"]) == (64, 4, True)

    resumed = cli("run", "copy_digits", "--resume", "--steps", "6")
    assert resumed.code == 0, resumed.err
    assert "continuing after step 4" in resumed.out
    assert cli("verify", "runs/copy_digits").code == 0


def test_signals_save_and_say_how_to_go_on(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: Children
):
    """In a process of its own a signal ends the run after a step, the exit code tells which; it goes on from there."""
    monkeypatch.chdir(tmp_path)
    metrics = tmp_path / "runs" / "copy_digits" / "metrics.jsonl"
    new = [*SMALL, "--set", "learn.stop_at_reward=none"]
    for number, code, more in ((signal.SIGINT, 130, new), (signal.SIGTERM, 143, ["--resume"])):
        before = len(StepRows(metrics))
        run = children.run("run", "copy_digits", "--steps", "100000", *more)
        run.until(lambda before=before: len(StepRows(metrics)) > before, every=0.1)
        run.send_signal(number)
        assert run.wait() == code, run.output()
        assert "importing torch" in run.output().splitlines()[0]
        assert "stopped and saved: " in run.output()
        assert "rlhf-pipeline run copy_digits --resume" in run.output()
        assert "Traceback" not in run.output()
        assert cli("verify", "runs/copy_digits").code == 0
    steps = len(StepRows(metrics))
    assert (metrics.parent / "checkpoints" / f"step-{steps:08d}").is_dir()


def test_doctor_and_new_model(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The doctor finds this machine fit, and a model made from a text file is a checkpoint folder."""
    monkeypatch.chdir(tmp_path)
    checked = cli("doctor")
    assert checked.code == 0, checked.out
    assert "store: " in checked.out
    assert "No problem found" in checked.out
    (tmp_path / "text.txt").write_text("some words, again and again and again\n" * 50)
    sizes = ("--vocab-size", "300", "--hidden-size", "16", "--num-layers", "1")
    made = cli("new-model", "model", "--text", "text.txt", *sizes)
    assert made.code == 0, made.err
    assert "rlhf-pipeline run gsm8k --set policy.path=model" in made.out
    assert (tmp_path / "model" / "model.safetensors").is_file()


# -- processes of their own --------------------------------------------------------------------------------------------


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    """Start `rlhf-pipeline ARGS` in a folder."""
    line = [sys.executable, "-m", "rlhf_pipeline", *args]
    env = ENV | {"PATH": os.environ["PATH"]}
    return subprocess.Popen(line, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a process; return its exit code and what it wrote."""
    out, err = process.communicate(timeout=280)
    return process.returncode, out, err


def test_supervise_stop_look_resume(cli: Cli, tmp_path: Path):
    """A signal stops and saves a supervised run; to go on needs no number of collectors and no definition."""
    supervisor = start(tmp_path, "run", "long_running", "--collectors", "1", "--steps", "100000", *SMALL)
    run_dir = tmp_path / "runs" / "long_running"
    while len(StepRows(run_dir / "metrics.jsonl")) < 3 and supervisor.poll() is None:
        time.sleep(0.1)
    supervisor.send_signal(signal.SIGTERM)
    code, out, err = end(supervisor)
    assert code == 143, out + err
    assert "1 collector and a learner" in out.splitlines()[0]
    assert "stopped and saved" in out
    steps = len(StepRows(run_dir / "metrics.jsonl"))
    assert (run_dir / "checkpoints" / f"step-{steps:08d}").is_dir()
    log = (run_dir / "supervisor.log").read_text()
    assert log.count("ended with code 143") == 2
    for look in ("verify", "inspect"):
        shown = cli(look, run_dir)
        assert shown.code == 0, shown
    code, out, err = end(start(tmp_path, "run", "runs/long_running", "--resume", "--steps", str(steps + 2)))
    assert code == 0, out + err
    assert f"continuing after step {steps}" in out
    assert f"in {steps + 2} steps" in out
    assert f"rlhf-pipeline run --out runs/long_running --resume --steps {2 * (steps + 2)}" in out
    assert [row["step"] for row in StepRows(run_dir / "metrics.jsonl")] == list(range(1, steps + 3))
    for name in ("report.html", "ledger.jsonl", "processes/learner.log"):
        assert (run_dir / name).is_file()
    log = (run_dir / "supervisor.log").read_text()
    assert log.count("supervisor: started") == log.count("supervisor: ended") == 2


def test_collect_and_learn_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: Children):
    """A collector makes the run, a learner joins it by its folder; both leave when it has ended."""
    monkeypatch.chdir(tmp_path)
    collector = children.run("collect", "long_running", "--run", "mine", "--set", "learn.steps=3", *SMALL)
    collector.until((tmp_path / "mine" / "config.json").is_file)
    learned = children.run("learn", "--run", "mine").succeed()
    assert "in 3 steps" in learned
    assert "rlhf-pipeline learn --run mine --steps 6" in learned
    collected = collector.succeed()
    assert "collector-0: rollout 0  weights of step 0  reward" in collected
    assert "collector-0: the run has ended" in collected


def test_what_cannot_start_is_reported_at_once(tmp_path: Path):
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
    assert "cannot start. Last line of stderr: rlhf-pipeline: --device cuda:99" in shown.stderr
