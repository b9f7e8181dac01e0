"""Trajectories for the tests of the write path and of the replay layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, lazy_stack

from rlhf_pipeline.data import keys


def build_rows(
    lengths: list[int],
    *,
    group_size: int = 2,
    prompt: int = 2,
    seed: int = 0,
    rewards: list[float] | None = None,
    ref: bool = True,
    first_group: int = 0,
    vocab: int = 50,
) -> list[TensorDict]:
    """One TensorDict per trajectory, ragged, as a collector would build it."""
    gen = torch.Generator().manual_seed(seed)
    rows = []
    for i, length in enumerate(lengths):
        assistant = torch.arange(length) >= prompt
        log_probs = torch.where(assistant, -torch.rand(length, generator=gen), torch.nan)
        row: dict[str, Any] = {
            "tokens": {"full": torch.randint(0, vocab, (length,), generator=gen)},
            "masks": {"all_assistant_mask": assistant},
            "log_probs": {"full": log_probs},
            "task_reward": torch.tensor(float(i % 3) if rewards is None else rewards[i]),
            "group_id": torch.tensor(first_group + i // group_size),
            "policy_version": torch.tensor(3),
            "num_prompt_tokens": torch.tensor(prompt),
            "trajectory_id": torch.tensor(first_group * group_size + i),
            "next": {"done": torch.tensor(True)},
            "finish_reason": "stop",
            "prompt": f"prompt {first_group + i // group_size}",
            "completion": f"completion {i}",
            "meta": "{}",
        }
        if ref:
            row["next"]["ref_log_probs"] = {
                "full": torch.where(assistant, -torch.rand(length, generator=gen), torch.nan)
            }
        rows.append(TensorDict(row, batch_size=[]))
    return rows


def as_form(rows: list[TensorDict], form: str) -> TensorDictBase:
    """The same trajectories as a lazy stack, with jagged leaves, or padded on the right."""
    stack = lazy_stack(rows)
    if form == "stack":
        return stack
    lengths = torch.tensor([row[keys.TOKENS].shape[0] for row in rows])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    out = TensorDict(batch_size=[len(rows)])
    for key in rows[0].keys(True, True, is_leaf=lambda t: not issubclass(t, TensorDict)):
        leaves = [row.get(key) for row in rows]
        if not isinstance(leaves[0], torch.Tensor):
            out.set(key, NonTensorStack(*[row[key] for row in rows]))
        elif leaves[0].ndim == 0:
            out.set(key, torch.stack(leaves))
        elif form == "jagged":
            out.set(key, torch.nested.nested_tensor_from_jagged(torch.cat(leaves), offsets))
        else:
            out.set(key, torch.nn.utils.rnn.pad_sequence(leaves, batch_first=True))
    if form == "padded":
        width = int(lengths.max())
        out.set(keys.ATTENTION_MASK, torch.arange(width) < lengths[:, None])
    return out


@pytest.fixture
def make_rows() -> Callable[..., list[TensorDict]]:
    """Builds trajectories, one TensorDict each."""
    return build_rows


@pytest.fixture
def to_form() -> Callable[[list[TensorDict], str], TensorDictBase]:
    """Puts trajectories into one of the three forms."""
    return as_form


@pytest.fixture(params=["stack", "jagged", "padded"])
def form(request: pytest.FixtureRequest) -> str:
    """Each form of the write path in turn."""
    return request.param
