"""Commands at a URL that are more than a run of one process, against an S3 server on loopback."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_pipeline.run.folder import RunFolder
from tests.crash._s3 import missing, serve
from tests.processes import Children

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

LATE_S = 400.0
PIPELINE = [
    "copy_digits",
    *("--set", "collect.group_size=4", "--set", "collect.prompts_per_rollout=4", "--set", "learn.token_budget=64"),
    *("--set", "learn.stop_at_reward=none", "--set", "learn.checkpoint_every=2", "--set", "learn.keep_checkpoints=9"),
]


Command = Callable[..., str]


@pytest.fixture
def said(children: Children) -> Command:
    """Types a command; returns what it prints."""

    def run(*words: str, code: int = 0) -> str:
        command = children.run(*words)
        assert command.wait() == code, f"{words}: {command.output()}"
        return command.output()

    return run


def assert_same_curve(run: RunFolder, straight: RunFolder, tolerance: float) -> None:
    """Every step once, and loss, gradient norm and reward of a run in one process."""
    assert [row["step"] for row in run.ledger] == [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    for mine, theirs in zip(run.metrics, straight.metrics, strict=True):
        for name in ("loss", "grad_norm", "task_reward", "num_trajectories"):
            assert mine[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance / 10), (mine["step"], name)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RLHF_PIPELINE_LEASE_S", "4")
    monkeypatch.setenv("RLHF_PIPELINE_CACHE", str(tmp_path / "copies"))
    with serve(tmp_path, faults={}) as rig:
        rig.calm()
        yield rig.url


def test_a_run_is_compacted_and_replayed_where_it_is(url: str, tmp_path: Path, said: Command):
    """Its steps come out again bit for bit: from a checkpoint, into a folder, and into another URL."""
    said("run", *PIPELINE, "--steps", "6", "--out", url)
    assert "-> 1 " in said("compact", url)
    assert "is intact" in said("verify", url)
    assert "bitwise equal to the record: 4 steps" in said("replay", url, "--from-step", "3")
    for out in (str(tmp_path / "again"), f"{url}-again"):
        assert "byte-identical" in said("replay", url, "--out", out)
        assert "is intact" in said("verify", out)
    assert "continuing after step 6" in said("replay", "--resume", "--out", f"{url}-again", "--steps", "6")


def test_a_run_that_was_killed_continues(url: str, children: Children, said: Command):
    """While it lives, another process is refused; once it is dead, the next one waits for the end of its lease."""
    first = children.run("run", *PIPELINE, "--steps", "100000", "--out", url)
    run = RunFolder(url)
    first.until(lambda: run.record.exists and run.rows(run.metrics_file).last_step >= 3, seconds=LATE_S, every=0.2)
    assert f"already has a process run: process {first.pid}" in said("run", "--resume", "--out", url, code=2)
    first.kill()
    steps = len(RunFolder(url).metrics)
    assert "continuing after step" in said("run", "--resume", "--out", url, "--steps", str(steps + 1))
    assert "is intact" in said("verify", url)


def test_two_learners_learn_like_one(url: str, tmp_path: Path, children: Children, said: Command):
    """One of them is killed on the way: both are started again, and take the steps after the checkpoint again."""
    straight = tmp_path / "straight"
    said("run", *PIPELINE, "--steps", "6", "--out", str(straight))
    words = ["run", *PIPELINE, "--steps", "6", "--collectors", "1", "--learners", "2", "--out", url]
    process = children.run(*words)
    run = RunFolder(url)
    process.until(lambda: run.record.exists and run.rows(run.metrics_file).last_step >= 3, seconds=LATE_S, every=0.2)
    pid = int(process.until(lambda: pid_of("learner-1"), seconds=LATE_S, every=0.2) or 0)
    os.kill(pid, signal.SIGKILL)
    assert "learner-1 was killed by SIGKILL; the learner's processes are restarted" in process.succeed(LATE_S)
    done = RunFolder(run.address)
    assert_same_curve(done, RunFolder(straight), 1e-5)
    assert {row["processes"] for row in done.metrics} == {2}
    assert "is intact" in said("verify", url)


def pid_of(member: str) -> str | None:
    """The process of a group's member, by the rank in its environment."""
    rank = f"RANK={member.rpartition('-')[2]}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"rlhf_pipeline\0learn\0" in words and rank in environment.split(b"\0") and _is_ours(environment):
            return folder.name
    return None


def _is_ours(environment: bytes) -> bool:
    own = f"RLHF_PIPELINE_CACHE={os.environ['RLHF_PIPELINE_CACHE']}"
    return own.encode() in environment.split(b"\0")
