"""Errors are also of the kinds that TorchRL's users catch."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from rlhf_pipeline import (
    GRPOLoss,
    KLRewardTransform,
    MCAdvantage,
    RetrieveLogProb,
    TrajectoryReplayBuffer,
    scratch_policy,
)
from rlhf_pipeline.errors import DataError, IncompleteError, MissingKeyError, PipelineError


@pytest.fixture(scope="module")
def policy():
    """A tiny random model."""
    return scratch_policy("".join(chr(33 + i) for i in range(60)), hidden_size=16, num_layers=1, num_heads=2)


@pytest.mark.parametrize("part", ["loss", "penalty", "scores", "advantage", "policy"])
def test_a_missing_key_is_a_key_error(policy, part):
    """And an error of this package, with the message as it is."""
    batch = lazy_stack([TensorDict({"next": {"done": torch.tensor(True)}, "group_id": torch.tensor(0)})])
    calls = {
        "loss": lambda: GRPOLoss(policy)(batch),
        "penalty": lambda: KLRewardTransform()(batch),
        "scores": lambda: RetrieveLogProb(policy)(batch),
        "advantage": lambda: MCAdvantage(2).inv(batch),
        "policy": lambda: policy.get_dist(batch),
    }
    with pytest.raises(KeyError) as caught:
        calls[part]()
    assert isinstance(caught.value, MissingKeyError)
    assert isinstance(caught.value, DataError)
    assert not str(caught.value).startswith("'")


@pytest.mark.parametrize("stack", [None, MCAdvantage(2)])
def test_a_trajectory_without_an_end_is_a_runtime_error(tmp_path, make_rows, stack):
    """As TorchRL's MCAdvantage raises it."""
    rb = TrajectoryReplayBuffer(storage=tmp_path / "store", transform=stack)
    row = make_rows([4])[0]
    row["next", "done"] = torch.tensor(False)
    with pytest.raises(RuntimeError, match="not complete") as caught:
        rb.extend(lazy_stack([row]))
    assert isinstance(caught.value, IncompleteError)
    assert isinstance(caught.value, PipelineError)
    rb.storage.close()
