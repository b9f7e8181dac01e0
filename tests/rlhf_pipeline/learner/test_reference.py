from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.learner.reference import MovingReference


def pair(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, nn.Linear]:
    reference, policy = (nn.Linear(1, 1, bias=False, dtype=dtype) for _ in range(2))
    reference.weight.data.fill_(0.0)
    policy.weight.data.fill_(1.0)
    return reference, policy


def test_an_average_follows_the_policy():
    """With rate 1/4 at every step a constant policy of 1 is reached as 1 - (3/4)^n."""
    reference, policy = pair()
    moving = MovingReference(reference, policy, every=1, rate=0.25)
    for step in range(1, 5):
        assert moving.after_step(step)
        assert reference.weight.item() == pytest.approx(1 - 0.75**step)


def test_a_copy_every_k_steps():
    """With rate 1 the reference is the policy of the last multiple of k."""
    reference, policy = pair()
    moving = MovingReference(reference, policy, every=3, rate=1.0)
    seen = []
    for step in range(1, 8):
        policy.weight.data.fill_(float(step))
        moving.after_step(step)
        seen.append(reference.weight.item())
    assert seen == [0, 0, 3, 3, 3, 6, 6]


def test_small_rates_add_up_in_bfloat16_and_survive_a_checkpoint():
    """A thousand updates by 1e-4 reach 0.095 although each is below a bfloat16 step, stopped half-way or not."""
    found = []
    for stop in (None, 500):
        reference, policy = pair(torch.bfloat16)
        moving = MovingReference(reference, policy, every=1, rate=1e-4)
        for step in range(1, 1001):
            moving.after_step(step)
            if step == stop:
                saved = {name: tensor.clone() for name, tensor in moving.state_tensors().items()}
                reference, policy = pair(torch.bfloat16)
                moving = MovingReference(reference, policy, every=1, rate=1e-4)
                moving.load_state_tensors(saved)
        found.append((reference.weight.item(), moving.state_tensors()["weight"].item()))
    assert found[0] == found[1]
    assert found[0][1] == pytest.approx(1 - (1 - 1e-4) ** 1000, rel=1e-4)


def test_another_models_average_is_refused():
    """The names must be those of this model."""
    moving = MovingReference(*pair(), every=1, rate=1.0)
    with pytest.raises(DataError, match="another model"):
        moving.load_state_tensors({"other": torch.zeros(1)})
