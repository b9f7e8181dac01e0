"""Our group advantage beside TorchRL's, where TorchRL's is right."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.objectives.llm import MCAdvantage as TorchRLAdvantage

from rlhf_pipeline.transforms.mc_advantage import MCAdvantage

pytestmark = pytest.mark.peer


def steps(group, length, gen):
    """A multi-step trajectory with random rewards."""
    return TensorDict(
        {
            "group_id": torch.full((length,), group),
            ("next", "reward"): torch.randn(length, 1, generator=gen),
            ("next", "done"): torch.arange(length).eq(length - 1).reshape(length, 1),
        },
        batch_size=[length],
    )


@pytest.mark.parametrize("how", ["sum", "mean", "max", None])
def test_multi_step_trajectories(how):
    """The same groups come out of the same calls, with the same advantages."""
    gen = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 7, (24,), generator=gen).tolist()
    groups = torch.randint(0, 4, (24,), generator=gen).tolist()
    ours = MCAdvantage(3, prompt_key="group_id", trajectory_return=how)
    theirs = TorchRLAdvantage(3, prompt_key="group_id", trajectory_return=how)
    written = 0
    for group, length in zip(groups, lengths, strict=True):
        td = steps(group, length, gen)
        mine, peer = ours.inv(td.clone()), theirs.inv(td.clone())
        assert (mine is None) == (peer is None)
        if mine is not None and peer is not None:
            written += 1
            torch.testing.assert_close(mine["advantage"], peer["advantage"], atol=1e-5, rtol=1e-5)
            assert torch.equal(mine["next", "reward"], peer["next", "reward"])
    assert written > 3
    assert ours.queued_trajectories == theirs.queued_trajectories
    mine, peer = ours.get_stats(), theirs.get_stats()
    for name in ("completed_trajectories", "completed_decisions", "completed_groups", "written_groups"):
        assert mine[name] == peer[name]


def test_ragged_responses_of_one_step():
    """Ragged rewards per token in a lazy stack, a string as identity."""
    gen = torch.Generator().manual_seed(1)
    rows = [
        TensorDict(
            {
                "query": f"prompt {i % 3}",
                "next": {"reward": torch.randn(2 + i, 1, generator=gen), "done": torch.ones(1, dtype=torch.bool)},
            }
        )
        for i in range(9)
    ]
    mine = MCAdvantage(3, prompt_key="query").inv(lazy_stack(rows))
    peer = TorchRLAdvantage(3, prompt_key="query", trajectory_return="sum").inv(lazy_stack(rows))
    by_size = {row["advantage"].shape: row["advantage"] for row in peer.unbind(0)}
    for row in mine.unbind(0):
        torch.testing.assert_close(row["advantage"], by_size[row["advantage"].shape], atol=1e-5, rtol=1e-5)
