"""A run that learns from stores, killed while it gathers and while it learns, ends like the one that was left alone."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from rlhf_pipeline import GRPO, Collect, Learn, Pipeline, Replay, Sample, TinyPolicy, WritePath
from rlhf_pipeline.replay.schema import trajectory_schema
from rlhf_pipeline.run.events import Event, StepDone
from rlhf_pipeline.run.jsonl import read_rows
from trajectory_store import RaggedArray, TrajectoryStore, diff

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 160
GATHER_KILLS, LEARN_KILLS = 6, 8
GROUPS = 600


def pipeline(*stores: Path) -> Pipeline:
    return Pipeline(
        name="killed",
        policy=TinyPolicy(hidden_size=16, num_layers=1, num_heads=2),
        replay=Replay(stores=tuple(map(str, stores)), weights=(2.0, 1.0), filters=("reward>=0",)),
        sample=Sample(batch_size=12),
        collect=Collect(max_new_tokens=8),
        write=WritePath(estimator="dr_grpo", kl_coef=0.1),
        loss=GRPO(entropy_coeff=0.01),
        learn=Learn(steps=STEPS, lr=1e-2, checkpoint_every=4),
    )


def fill(path: Path, seed: int) -> Path:
    """Write graded groups of three without log-probs and advantages."""
    rng, n = np.random.default_rng(seed), 3 * GROUPS
    lengths = rng.integers(5, 12, n)
    place = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    with TrajectoryStore.create(path, trajectory_schema()) as store:
        store.append(
            {
                "input_ids": RaggedArray(rng.integers(0, 13, int(lengths.sum())), lengths),
                "assistant_mask": RaggedArray(place >= 3, lengths),
                "task_reward": rng.integers(0, 2, n).astype(float),
                "group_id": np.arange(n) // 3,
                "trajectory_id": np.arange(n),
                "num_prompt_tokens": np.full(n, 3),
            }
        )
    return path


def work(made: Pipeline, run_dir: Path, told: Connection) -> None:
    """Run or resume in a child, with small batches while gathering, and tell of every step."""
    import torch

    from rlhf_pipeline.run import choice as sources
    from rlhf_pipeline.run.start import run

    torch.set_num_threads(1)
    sources.BATCH_ROWS = 6  # type: ignore[misc]

    def tell(event: Event) -> None:
        if isinstance(event, StepDone):
            told.send(event.step)

    run(made, run_dir=run_dir, resume=(run_dir / "config.json").exists(), on_event=tell)
    told.send("finished")


@pytest.fixture(scope="module")
def start():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rlhf_pipeline.run.start", "rlhf_pipeline.policies.new_model"])

    def begin(made: Pipeline, run_dir: Path):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(made, run_dir, sending))
        process.start()
        sending.close()
        return process, receiving

    return begin


def kill(process) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def num_gathered(run_dir: Path) -> int:
    if not (run_dir / "store" / "zarr.json").exists():
        return 0
    with TrajectoryStore.open(run_dir / "store") as store:
        return len(store)


def finish(process, told: Connection) -> None:
    while told.poll(300) and told.recv() != "finished":
        pass
    process.join()
    assert process.exitcode == 0


def last_weights(run_dir: Path) -> bytes:
    return (run_dir / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors").read_bytes()


def test_kills_while_gathering_and_while_learning_change_nothing(tmp_path, start):
    """Up to fourteen SIGKILLs: no row twice or lost, the same batches, losses and final weights as the straight run."""
    made = pipeline(fill(tmp_path / "a", 0), fill(tmp_path / "b", 1))
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    finish(*start(made, straight))

    rng = random.Random(6)
    kills = 0
    for _ in range(GATHER_KILLS):
        before = num_gathered(killed)
        process, _told = start(made, killed)
        enough, deadline = before + rng.randint(1, 150), time.monotonic() + 300
        while num_gathered(killed) < enough and time.monotonic() < deadline:
            time.sleep(0.002)
        kill(process)
        kills += 0 < num_gathered(killed) < 6 * GROUPS
    assert kills >= 3, "the gathering ended before it was killed three times; raise GROUPS"
    assert not (killed / "metrics.jsonl").exists()

    for _ in range(LEARN_KILLS):
        process, told = start(made, killed)
        for _step in range(rng.randint(5, 9)):
            assert told.poll(300)
            assert told.recv() != "finished", "the run ended before it was killed; raise STEPS"
        time.sleep(rng.uniform(0, 0.02))
        kill(process)
    finish(*start(made, killed))

    with TrajectoryStore.open(straight / "store") as left, TrajectoryStore.open(killed / "store") as right:
        assert right.verify().ok
        found = diff(left, right)
        found.changed.pop("use_count", None)  # a hint: a step that a kill cut short counts
        assert str(found) == "The stores hold the same rows."
    for name in ("trajectory_ids", "ages"):  # a restarted writer starts a segment, so the row ids are others
        assert [row[name] for row in read_rows(straight / "ledger.jsonl")] == [
            row[name] for row in read_rows(killed / "ledger.jsonl")
        ]
    losses = [[(row["step"], row["loss"]) for row in read_rows(path / "metrics.jsonl")] for path in (straight, killed)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS
    assert last_weights(killed) == last_weights(straight)
