"""No micro-batch of a step computes more positions than the token budget, whatever the model and its rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from transformers import PreTrainedModel

from rlhf_pipeline import GRPOLoss, Learn, MCAdvantage, TrajectoryReplayBuffer
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.losses.loss_batch import LossBatch
from rlhf_pipeline.policies.packed import Layout
from rlhf_pipeline.policies.token_policy import TokenPolicy
from tests.rlhf_pipeline.model_families import ARCHITECTURES, RECURRENT, family_model
from tests.rlhf_pipeline.small import trajectory

BUDGET = 150
CASES = [
    *((name, "auto") for name in ARCHITECTURES),
    *((name, "prefix_shared") for name in ARCHITECTURES if name not in RECURRENT),
]
CASES += [(name, layout) for name in ("llama", "mistral", "lfm2") for layout in ("padded", "packed")]
CASES += [("lfm2", "prefix_shared")]


def drawn_rows(draw: random.Random, *, most: int) -> list[TensorDict]:
    """Groups of four; some members share a long prompt, some only its length, and some completions are long."""
    rows: list[TensorDict] = []
    for group in range(4):
        prompt = [draw.randrange(2, 97) for _ in range(draw.choice((3, 20, 60)))]
        for member in range(4):
            own = prompt if group % 2 else [draw.randrange(2, 97) for _ in prompt]
            completion = [draw.randrange(2, 97) for _ in range(draw.choice((1, 5, 40, most)))]
            mask = [0] * len(own) + [1] * len(completion)
            tokens, number, reward = [*own, *completion], 4 * group + member, float(member)
            rows.append(trajectory(number, mask, reward, tokens=tokens, log_prob=-4.0, group_size=4))
    return rows


@contextmanager
def watched(learner: Learner) -> Iterator[tuple[list[torch.Size], list[tuple[int, int]]]]:
    """Yield the shape of each forward pass, and the positions and rows of each graph, checks excluded."""
    calls, graphs, plain = list[torch.Size](), list[tuple[int, int]](), learner.loss.forward

    def forward(batch: LossBatch) -> object:
        before = len(calls)
        output = plain(batch)
        graphs.append((sum(shape.numel() for shape in calls[before:]), len(batch.tokens)))
        return output

    embedding = learner.policy.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _module, ids, _out: calls.append(ids[0].shape))
    learner.loss.forward = forward
    yield calls, graphs
    learner.loss.forward = plain
    hook.remove()


def step(model: PreTrainedModel, folder: Path, layout: Layout, rows: list[TensorDict]) -> tuple[int, list[str]]:
    """Take one step within the budget; return how many graphs it took, and its notices."""
    policy = TokenPolicy(model, eos_token_id=[1], pad_token_id=0)
    buffer = TrajectoryReplayBuffer(storage=folder, transform=MCAdvantage(4, estimator="dr_grpo"))
    buffer.extend(lazy_stack(rows))
    learner = Learner(
        policy=policy,
        loss=GRPOLoss(policy),
        buffer=buffer,
        config=Learn(token_budget=BUDGET, layout=layout),
        max_staleness=0,
        max_completion_tokens=250,
        ledger=None,
        seed=0,
    )
    with watched(learner) as (calls, graphs):
        learner.step(1)
    buffer.trajectories.close()
    longest = max(len(row["tokens", "full"]) for row in rows)
    assert all(shape.numel() <= BUDGET or (shape[0] == 1 and shape[1] <= longest) for shape in calls)
    assert all(0 < positions <= BUDGET or rows_of_graph == 1 for positions, rows_of_graph in graphs)
    return len(graphs), learner.take_notices()


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_micro_batch_stays_within_the_budget(name: str, layout: Layout, tmp_path: Path) -> None:
    """Of any architecture; a row above the budget is alone."""
    rows = drawn_rows(random.Random(f"{name} {layout}"), most=170)
    assert step(family_model(name), tmp_path / "store", layout, rows)[0] > 3


@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_fails_its_check_stays_within_the_budget(seed: int, tmp_path: Path) -> None:
    """Log-probs of packed rows that differ from those of padded rows: planned again, padded, before the first graph."""
    model: Any = family_model("llama")
    longest = 100

    def differ(_module: Any, _inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 1.5 if hidden.shape[0] == 1 and hidden.shape[1] > longest else hidden

    hook = model.model.norm.register_forward_hook(differ)
    rows = drawn_rows(random.Random(seed), most=longest)
    _, notices = step(model, tmp_path / "store", "prefix_shared", rows)
    hook.remove()
    assert any("padded from this step on" in notice for notice in notices)
