"""Runs of models with recurrent states: adapters, shards, evaluations, weights in flight, and a server.

Turns are in `test_recurrent` and `test_model_families`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tensordict import lazy_stack

from rlhf_pipeline import (
    CopyDigits,
    Evaluate,
    GRPOLoss,
    Learn,
    MCAdvantage,
    PretrainedPolicy,
    TrajectoryReplayBuffer,
    scratch_policy,
)
from rlhf_pipeline.learner.distributed import shard_policy
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.model_families import family_model
from tests.rlhf_pipeline.policies.engines.fake_vllm import FakeVLLM
from tests.rlhf_pipeline.small import changed, drawn_trajectory, tiny

FAMILIES = ("qwen3_5_text", "lfm2")


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of a family, with a tokenizer of eleven characters."""
    policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2)
    ends = {"eos_token_id": policy.eos_token_ids[0], "pad_token_id": policy.pad_token_id}
    policy.model = family_model(request.param, vocab_size=policy.vocab_size, **ends)
    policy.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def learned(folder: Path, **changes: str) -> list[dict[str, Any]]:
    """Run three steps of copying digits, each followed by an evaluation; return the lines of metrics."""
    pipeline = dataclasses.replace(
        tiny(),
        policy=PretrainedPolicy(path=str(folder)),
        evaluate=Evaluate(prompts=CopyDigits(num_digits=2), every=1, num_prompts=4),
    )
    sizes = {"learn__steps": "3", "learn__epochs": "1", "buffer__max_staleness": "0", "collect__max_new_tokens": "6"}
    pipeline = changed(pipeline, **sizes, **changes)
    run(pipeline, run_dir=folder.parent / "run")
    return [*RunFolder(folder.parent / "run").metrics]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="all_weights"),
        pytest.param({"policy__lora_rank": "2", "policy__lora_targets": "all-linear"}, id="adapters"),
        pytest.param({"collect__refresh_weights_every": "2"}, id="weights_in_flight"),
        pytest.param({"learn__activation_checkpointing": "true"}, id="recomputed"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's call
def test_a_run_learns_on_policy_and_is_evaluated(folder: Path, changes: dict[str, str]) -> None:
    """The learner's log-probs are those of the sampler in each step, and each step has a gradient."""
    if "policy__lora_rank" in changes:
        pytest.importorskip("peft")
    lines = learned(folder, **changes)
    assert len(lines) == 3
    assert max(line["sampler_gap"] for line in lines) < 1e-5
    assert all(line["grad_norm"] > 0 for line in lines)
    assert all(0.0 <= line["evaluation/reward"] <= 1.0 for line in lines)


def test_what_a_server_samples_is_scored_here(folder: Path) -> None:
    """The fake of vLLM's server has its own copy of each version, and its log-probs are those of the learner."""
    with FakeVLLM(folder).serving() as server:
        lines = learned(folder, collect__engine=server.address)
    assert max(line["sampler_gap"] for line in lines) < 1e-5


@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.distributed.*")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_sharded_learner_takes_the_same_steps(name: str, tmp_path: Path) -> None:
    """Through the hooks of FSDP, in a group of one process: the losses and norms of the plain learner."""
    lines: list[list[float]] = []
    for sharded in (False, True):
        policy = TokenPolicy(family_model(name, vocab_size=13), eos_token_id=[1], pad_token_id=0)
        buffer = TrajectoryReplayBuffer(storage=tmp_path / str(sharded), transform=MCAdvantage(4, estimator="dr_grpo"))
        buffer.extend(lazy_stack([drawn_trajectory(number) for number in range(8)]))
        if sharded:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            learner = Learner(
                policy=policy,
                loss=GRPOLoss(policy),
                buffer=buffer,
                config=Learn(token_budget=40, lr=1e-2),
                max_staleness=8,
                max_completion_tokens=8,
                ledger=None,
                seed=0,
                shards=shard_policy(policy) if sharded else None,
            )
            steps = [learner.step(number) for number in (1, 2)]
        finally:
            buffer.trajectories.close()
            if sharded:
                dist.destroy_process_group()
        lines.append([step[figure] for step in steps for figure in ("loss", "grad_norm")])
    assert lines[1] == pytest.approx(lines[0], rel=1e-4)
