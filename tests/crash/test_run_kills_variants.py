"""Runs with several updates per rollout, a KL controller, adapters or float32 masters, killed again and again.

The children come from a server that has imported everything, so that a kill costs a fraction of a second. By default
eight kills; `--full-sweep` takes twenty.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rlhf_pipeline import (
    GRPO,
    Buffer,
    Collect,
    CopyDigits,
    Learn,
    Pipeline,
    PretrainedPolicy,
    TinyPolicy,
    WritePath,
    override,
    token_match,
)
from rlhf_pipeline.run.events import Event, RunStarted, StepDone
from rlhf_pipeline.run.jsonl import read_rows
from trajectory_store import TrajectoryStore

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(1800)]

FULL_STEPS, FULL_KILLS = 120, 20
STEPS, KILLS = 60, 8


def base(steps: int, **changes: str) -> Pipeline:
    made = Pipeline(
        name="killed",
        policy=TinyPolicy(hidden_size=16, num_layers=1, num_heads=2),
        prompts=CopyDigits(num_digits=2),
        reward=token_match,
        collect=Collect(prompts_per_rollout=2, group_size=4, max_new_tokens=3),
        write=WritePath(estimator="dr_grpo", kl_coef=0.2, kl_target=0.02, kl_horizon=100),
        buffer=Buffer(max_staleness=2),
        loss=GRPO(entropy_coeff=0.01),
        learn=Learn(steps=steps, updates_per_rollout=3, lr=1e-2, checkpoint_every=4),
    )
    for path, text in changes.items():
        made = override(made, path.replace("__", "."), text)
    return made


def pipeline_of(variant: str, folder: Path, steps: int) -> Pipeline:
    if variant == "adapters":
        return base(steps, policy__lora_rank="4")
    if variant == "bfloat16-moving-reference":
        made = base(steps, learn__lr="1e-3", learn__reference_every="2", learn__reference_rate="0.5")
        return dataclasses.replace(made, policy=PretrainedPolicy(path=str(folder), dtype="bfloat16"))
    return base(steps)


def work(pipeline: Pipeline, run_dir: Path, told: Connection) -> None:
    """Run or resume in a child, and tell of the start and of every step."""
    import torch

    from rlhf_pipeline.run.start import run

    torch.set_num_threads(1)

    def tell(event: Event) -> None:
        if isinstance(event, RunStarted | StepDone):
            told.send(type(event).__name__)

    run(pipeline, run_dir=run_dir, resume=(run_dir / "config.json").exists(), on_event=tell)
    told.send("finished")


@pytest.fixture(scope="module")
def start():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rlhf_pipeline.run.start", "rlhf_pipeline.policies.new_model"])

    def begin(pipeline: Pipeline, run_dir: Path):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(pipeline, run_dir, sending))
        process.start()
        sending.close()
        return process, receiving

    return begin


def await_message(told: Connection) -> str:
    assert told.poll(300), "the child says nothing"
    return told.recv()


def last_files(run_dir: Path, steps: int) -> dict[str, bytes]:
    folder = run_dir / "checkpoints" / f"step-{steps:08d}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def curve(run_dir: Path) -> list[tuple]:
    names = ("step", "task_reward", "loss", "grad_norm", "kl_coef", "kl_k1", "clip_fraction")
    return [tuple(row[name] for name in names) for row in read_rows(run_dir / "metrics.jsonl")]


@pytest.mark.parametrize("variant", ["several-updates", "adapters", "bfloat16-moving-reference"])
def test_kills_then_the_same_end(tmp_path, start, variant, request):
    """Weights, masters, moments, reference and curves equal those of the run that was left alone, byte for byte."""
    full = request.config.getoption("--full-sweep")
    steps, kills = (FULL_STEPS, FULL_KILLS) if full else (STEPS, KILLS)
    if variant == "adapters":
        pytest.importorskip("peft")
    if variant == "bfloat16-moving-reference":
        from rlhf_pipeline.policies.new_model import scratch_policy

        policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=0)
        policy.save_pretrained(tmp_path / "model")
    pipeline = pipeline_of(variant, tmp_path / "model", steps)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    process, told = start(pipeline, straight)
    while await_message(told) != "finished":
        pass
    process.join()

    rng = random.Random(variant)
    for kill in range(kills):
        process, told = start(pipeline, killed)
        if kill % 5:  # else while it starts
            assert await_message(told) == "RunStarted"
            for _ in range(rng.randint(0, 6)):
                assert await_message(told) == "StepDone", (
                    "the run ended before it was killed so many times; raise STEPS"
                )
        time.sleep(rng.uniform(0, 0.02))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        told.close()
    process, told = start(pipeline, killed)
    while await_message(told) != "finished":
        pass
    process.join()
    found, expected = last_files(killed, steps), last_files(straight, steps)
    assert found.keys() == expected.keys()
    for name, content in expected.items():
        assert found[name] == content, name
    assert curve(killed) == curve(straight)
    assert len({row[4] for row in curve(straight)}) > 10  # the controller moved
    with TrajectoryStore.open(killed / "store") as store:
        assert store.verify().ok
        trajectories = store.read_scalars("trajectory_id").tolist()
    assert len(trajectories) == len(set(trajectories))
