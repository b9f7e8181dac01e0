"""Runs on a Ray cluster whose nodes, and processes, are lost on the way."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.report.check import check_run
from rlhf_pipeline.run.checkpoint import checkpoint_path
from rlhf_pipeline.run.folder import RunFolder
from tests.crash._s3 import missing, serve
from trajectory_store import TrajectoryStore

ABSENT = missing() or (None if importlib.util.find_spec("ray") else "ray is not installed: pip install ray")

pytestmark = [
    pytest.mark.crash,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT)),
    pytest.mark.filterwarnings("ignore"),  # what Ray warns of is about itself
]

LATE_S = 600.0
COMMAND = [sys.executable, "-m", "rlhf_pipeline", "run", "copy_digits"]
FEW = [
    *("--set", "collect.group_size=4", "--set", "collect.prompts_per_rollout=4", "--set", "learn.token_budget=64"),
    *("--set", "learn.stop_at_reward=none", "--set", "learn.checkpoint_every=2", "--steps", "6"),
]
SMALL = {"object_store_memory": 80_000_000, "include_dashboard": False}


def until(happens: Callable[[], Any], driver: subprocess.Popen[bytes]) -> Any:
    """Wait until something is there, and return it."""
    late = time.monotonic() + LATE_S
    while not (found := happens()):
        assert time.monotonic() < late, "nothing happens any more"
        assert driver.poll() is None, "the supervisor has ended"
        time.sleep(1.0)
    return found


def node_of(log: Path, name: str) -> list[str]:
    """The nodes on which a process was started, one after another."""
    return re.findall(rf"{name}: process \d+ on node (\w+)", log.read_text()) if log.exists() else []


def weights(run: RunFolder) -> bytes:
    """The weights behind the last step."""
    return (run.bring(checkpoint_path(run.checkpoints, run.metrics[-1]["step"])) / "model.safetensors").read_bytes()


@pytest.mark.nightly
def test_a_run_on_ray_whose_nodes_are_lost_ends_as_if_left_alone(tmp_path, monkeypatch):
    """Three nodes: those of a collector and of the learner go and others come, and the network is gone for 20 s.

    Every prompt and every step once, and the weights are those of a run in one process.
    """
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums in the order of one thread, wherever a process lives
    monkeypatch.setenv("RLHF_PIPELINE_LEASE_S", "4")
    monkeypatch.setenv("RLHF_PIPELINE_CACHE", str(tmp_path / "copies"))
    few = [*COMMAND, "--set", "learn.stop_at_reward=none", "--steps", "16"]
    subprocess.run([*few, "--out", str(tmp_path / "straight")], check=True, capture_output=True)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
    nodes = [cluster.add_node(num_cpus=1, **SMALL) for _ in range(3)]
    try:
        with serve(tmp_path, faults={}) as rig:
            command = [*few, "--collectors", "2", "--ray", cluster.address, "--out", rig.url]
            with (tmp_path / "driver.log").open("wb") as out:
                driver = subprocess.Popen(command, stdout=out, stderr=out, env=dict(os.environ))
            rig.calm()

            watched = RunFolder(rig.url)

            def learned(step: int) -> Callable[[], bool]:
                return lambda: watched.rows(watched.metrics_file).last_step >= step

            def log() -> Path:
                return next(iter((tmp_path / "copies").glob("*/supervisor.log")), tmp_path / "none")

            def lose(name: str) -> None:
                before = node_of(log(), name)
                node = next(node for node in nodes if node.node_id == before[-1])
                cluster.remove_node(node, allow_graceful=False)
                nodes.remove(node)
                nodes.append(cluster.add_node(num_cpus=1, **SMALL))
                until(lambda: len(node_of(log(), name)) > len(before), driver)

            until(learned(2), driver)
            lose("collector-0")
            until(learned(6), driver)
            lose("learner")
            until(learned(10), driver)
            rig.cut(20.0)
            assert driver.wait(LATE_S) == 0, (tmp_path / "driver.log").read_text()
            run, straight = RunFolder(rig.url), RunFolder(tmp_path / "straight")
            assert [finding.text for finding in check_run(run) if not finding.ok] == []
            steps = len(straight.metrics)
            assert [row["step"] for row in run.metrics] == [row["step"] for row in run.ledger] == [*range(1, steps + 1)]
            with TrajectoryStore.open(run.store_path) as store:
                _, counts = np.unique(store.read_scalars("trajectory_id"), return_counts=True)
                _, sizes = np.unique(store.read_scalars("group_id"), return_counts=True)
            assert (counts == 1).all()
            assert (sizes == 16).all()
            for mine, theirs in zip(run.metrics, straight.metrics, strict=True):
                assert (mine["step"], mine["loss"], mine["grad_norm"]) == (
                    theirs["step"],
                    theirs["loss"],
                    theirs["grad_norm"],
                )
            assert weights(run) == weights(straight)
    finally:
        cluster.shutdown()


def test_two_learners_on_ray_of_which_one_is_killed_learn_like_one(tmp_path, monkeypatch):
    """Both are started again, every step counts once, and the curve is that of a run in one process to 1e-5."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    subprocess.run([*COMMAND, *FEW, "--out", str(tmp_path / "straight")], check=True, capture_output=True)
    run, straight = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "straight")
    command = [*COMMAND, *FEW, "--collectors", "1", "--learners", "2", "--ray", "--out", str(run.path)]
    with (tmp_path / "driver.log").open("wb") as out:
        driver = subprocess.Popen(command, stdout=out, stderr=out)
    late, killed = time.monotonic() + LATE_S, None
    while driver.poll() is None:
        assert time.monotonic() < late, (tmp_path / "driver.log").read_text()
        time.sleep(0.2)
        pid = run.heartbeat_of("supervisor").get("processes", {}).get("learner-1")
        if killed is None and pid is not None and run.record.exists and run.rows(run.metrics_file).last_step >= 3:
            os.kill(pid, signal.SIGKILL)
            killed = pid
    said = (tmp_path / "driver.log").read_text()
    assert driver.returncode == 0, said
    assert killed is not None, said
    assert "learner-1 was killed by SIGKILL; the learner's processes are started again" in said
    assert [finding.text for finding in check_run(run) if not finding.ok] == []
    assert [row["step"] for row in run.ledger] == [1, 2, 3, 4, 5, 6]
    assert {row["processes"] for row in run.metrics} == {2}
    for mine, theirs in zip(run.metrics, straight.metrics, strict=True):
        for name in ("step", "loss", "grad_norm", "task_reward", "num_trajectories"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
