"""Runs on a Ray cluster whose nodes, and processes, are lost on the way."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlhf_pipeline.report.check import check_run
from rlhf_pipeline.run.checkpoint import checkpoint_path
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.on_ray import HERE, on_ray
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
COMMAND = ["run", "copy_digits"]
FEW = [
    *("--set", "collect.group_size=4", "--set", "collect.prompts_per_rollout=4", "--set", "learn.token_budget=64"),
    *("--set", "learn.stop_at_reward=none", "--set", "learn.checkpoint_every=2", "--steps", "6"),
]
SMALL = {"object_store_memory": 80_000_000, "include_dashboard": False}


def node_of(log: Path, name: str) -> list[str]:
    """The nodes on which a process was started, one after another."""
    return re.findall(rf"{name}: process \d+ on node (\w+)", log.read_text()) if log.exists() else []


def weights(run: RunFolder) -> bytes:
    """The weights behind the last step."""
    return (run.bring(checkpoint_path(run.checkpoints, run.metrics[-1]["step"])) / "model.safetensors").read_bytes()


@pytest.mark.nightly
def test_a_run_on_ray_whose_nodes_are_lost_ends_as_if_left_alone(tmp_path, monkeypatch, children):
    """Three nodes: those of a collector and of the learner go and others come, and the network is gone for 20 s.

    Every prompt and every step once, and the weights are those of a run in one process.
    """
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # sums in the order of one thread, wherever a process lives
    monkeypatch.setenv("RLHF_PIPELINE_LEASE_S", "4")
    monkeypatch.setenv("RLHF_PIPELINE_CACHE", str(tmp_path / "copies"))
    few = [*COMMAND, "--set", "learn.stop_at_reward=none", "--steps", "16"]
    children.run(*few, "--out", tmp_path / "straight").succeed()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **SMALL})
    nodes = [cluster.add_node(num_cpus=1, **SMALL) for _ in range(3)]
    try:
        with serve(tmp_path, faults={}) as rig:
            command = [*few, "--collectors", "2", "--ray", cluster.address, "--out", rig.url]
            driver = children.python("-m", "rlhf_pipeline", *command, name="driver")
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
                driver.until(lambda: len(node_of(log(), name)) > len(before), seconds=LATE_S, every=1.0)

            driver.until(learned(2), seconds=LATE_S, every=1.0)
            lose("collector-0")
            driver.until(learned(6), seconds=LATE_S, every=1.0)
            lose("learner")
            driver.until(learned(10), seconds=LATE_S, every=1.0)
            rig.cut(20.0)
            driver.succeed(LATE_S)
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


def test_two_learners_on_ray_of_which_one_is_killed_learn_like_one(tmp_path, monkeypatch, children):
    """Both are started again, every step counts once, and the curve is that of a run in one process to 1e-5."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    children.run(*COMMAND, *FEW, "--out", tmp_path / "straight").succeed()
    run, straight = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "straight")
    command = [*COMMAND, *FEW, "--collectors", "1", "--learners", "2", "--ray", "--out", str(run.path)]
    driver = children.python("-m", "rlhf_pipeline", *command, name="driver")

    def learner() -> int | None:
        pid = run.place.heartbeat_of("supervisor").get("processes", {}).get("learner-1")
        return pid if run.record.exists and run.rows(run.metrics_file).last_step >= 3 else None

    os.kill(driver.until(learner, seconds=LATE_S, every=0.2) or 0, signal.SIGKILL)
    said = driver.succeed(LATE_S)
    assert "learner-1 was killed by SIGKILL; the learner's processes are restarted" in said
    assert [finding.text for finding in check_run(run) if not finding.ok] == []
    assert [row["step"] for row in run.ledger] == [1, 2, 3, 4, 5, 6]
    assert {row["processes"] for row in run.metrics} == {2}
    for mine, theirs in zip(run.metrics, straight.metrics, strict=True):
        for name in ("step", "loss", "grad_norm", "task_reward", "num_trajectories"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


def test_a_process_on_ray_is_gone_when_it_was_killed(tmp_path, caplog):
    """`kill` returns after the process has ended, and the log names process and node once."""
    caplog.set_level(logging.INFO, logger="rlhf_pipeline.run.processes.on_ray")
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    with on_ray(HERE, tmp_path / "run", processes=1, collector_gpus=0.0, learner_gpus=0.0) as launch:
        process = launch("collector-0", sleeping, tmp_path / "collector-0.log", {})
        end = time.monotonic() + 60.0
        while process.pid is None and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.05)
        for _ in range(20):  # some reports of the actor later
            assert process.poll() is None
            time.sleep(0.05)
        assert Path(f"/proc/{process.pid}").exists()
        process.kill()
        assert not Path(f"/proc/{process.pid}").exists()
        assert process.poll() == -signal.SIGKILL
    assert re.findall(r"collector-0: process (\d+) on node \w+", caplog.text) == [str(process.pid)]
