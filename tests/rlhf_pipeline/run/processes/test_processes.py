from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path

import numpy as np
import pytest

from rlhf_pipeline import GRPO, Buffer, Collect, CopyDigits, Learn, Pipeline, TinyPolicy, WritePath, token_match
from rlhf_pipeline.run.jsonl import read_rows
from trajectory_store import TrajectoryStore

STEPS, UPDATES, PROMPTS, GROUP = 40, 2, 3, 4


def definition() -> Pipeline:
    return Pipeline(
        name="tiny",
        policy=TinyPolicy(hidden_size=16, num_layers=1, num_heads=2),
        prompts=CopyDigits(num_digits=2),
        reward=token_match,
        collect=Collect(prompts_per_rollout=PROMPTS, group_size=GROUP, max_new_tokens=3, refresh_weights_every=1),
        write=WritePath(estimator="dr_grpo"),
        buffer=Buffer(max_staleness=3),
        loss=GRPO(entropy_coeff=0.01),
        learn=Learn(steps=STEPS, updates_per_rollout=UPDATES, lr=1e-2, checkpoint_every=4),
    )


def collecting(run_dir: Path) -> None:
    from rlhf_pipeline.run.processes.collect import collect

    collect(definition(), run_dir=run_dir)


def learning(run_dir: Path) -> None:
    from rlhf_pipeline.run.processes.learn import learn

    learn(definition(), run_dir=run_dir)


def check(run_dir: Path) -> None:
    """Count prompts, trajectories and steps from the store and the ledger alone."""
    ledger = read_rows(run_dir / "ledger.jsonl")
    assert [row["step"] for row in ledger] == list(range(1, STEPS + 1))
    learned = [row["rollout"] for row in ledger]
    assert learned[::UPDATES] == learned[1::UPDATES]  # each for its two updates, and
    assert len(set(learned)) == STEPS // UPDATES  # no rollout twice
    with TrajectoryStore.open(run_dir / "store") as store:
        assert store.verify().ok
        ids, trajectories = store.ids(), store.read_scalars("trajectory_id")
        groups, members = np.unique(store.read_scalars("group_id"), return_counts=True)
        first, last = store.read_scalars("policy_version"), store.read_scalars("newest_policy_version")
    assert ((last == -1) | (last > first)).all()
    assert len(np.unique(trajectories)) == len(trajectories)
    assert groups.tolist() == list(range(len(groups)))
    assert set(members.tolist()) == {GROUP}
    with TrajectoryStore.open(run_dir / "rollouts") as rollouts:
        assert sorted(rollouts.read_scalars("rollout").tolist()) == list(range(len(groups) // PROMPTS))
    for row in ledger:
        assert len(row["row_ids"]) == PROMPTS * GROUP
        assert np.isin(row["row_ids"], ids).all()
        assert 0 <= min(row["ages"]) <= max(row["ages"]) <= 3
    assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == list(range(1, STEPS + 1))


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_of_collectors_and_learner_lose_and_repeat_nothing(tmp_path):
    """Up to twelve SIGKILLs at random points over two collectors and a learner: every prompt once, every step once."""
    context, rng = multiprocessing.get_context("forkserver"), random.Random(7)
    context.set_forkserver_preload(["rlhf_pipeline.run.processes.collect", "rlhf_pipeline.run.processes.learn"])
    run_dir = tmp_path / "run"
    targets = [collecting, collecting, learning]

    def start(target):
        process = context.Process(target=target, args=(run_dir,))
        process.start()
        return process

    processes = [start(target) for target in targets]
    kills, deadline = 0, time.monotonic() + 400
    while time.monotonic() < deadline and processes[2].exitcode != 0:
        time.sleep(rng.uniform(0.2, 1.2) if kills < 12 else 0.2)
        if kills < 12:
            processes[rng.randrange(3)].kill()
            kills += 1
        for place, process in enumerate(processes):
            if process.exitcode not in (None, 0):
                processes[place] = start(targets[place])
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert kills >= 4
    check(run_dir)
