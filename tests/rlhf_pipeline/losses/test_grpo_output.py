"""What a loss returns, as TorchRL's recipes use it."""

from __future__ import annotations

import pytest
import torch
from torchrl.objectives.llm import grpo as peer

from rlhf_pipeline import GRPOLossOutput


def output(**fields):
    """An output with two weights behind its terms, and diagnostics that a step must not follow."""
    weights = torch.tensor([2.0, 3.0], requires_grad=True)
    given = {"clip_fraction": torch.tensor(0.5), "kl_approx": torch.tensor(0.25), "ESS": torch.tensor(0.75)}
    return weights, GRPOLossOutput(loss_objective=weights[0] * 1.0, num_tokens=torch.tensor(100.0), **given, **fields)


@pytest.mark.parametrize("figures", [{}, {"entropy": torch.tensor(7.0), "ess_sequence": torch.tensor(0.5)}])
def test_reductions_are_over_the_loss_terms(figures):
    """`mean(reduce=True)`, the line of TorchRL's recipes, and `sum(reduce=True)`, however many diagnostics."""
    weights, out = output(**figures)
    out.loss_entropy = weights[1] * -0.5
    assert out.mean(reduce=True).item() == pytest.approx((2.0 - 1.5) / 2)
    assert out.sum(reduce=True).item() == pytest.approx(0.5)
    assert out.sum(reduce=True).item() == out.total_loss().item()
    out.mean(reduce=True).backward()
    assert weights.grad.tolist() == [0.5, -0.25]


def test_one_term_is_its_own_mean():
    """Without entropy bonus and KL the recipe's line is the loss."""
    _, out = output()
    assert out.mean(reduce=True).item() == out.total_loss().item() == 2.0


def test_losses_that_are_not_reduced():
    """Terms of shape [B, T] are reduced over all their entries."""
    _, out = output()
    out.loss_objective, out.loss_entropy = torch.ones(2, 3), torch.full((2, 3), 2.0)
    assert out.mean(reduce=True).item() == pytest.approx(1.5)
    assert out.sum(reduce=True).item() == pytest.approx(18.0)


def test_field_by_field():
    """Without `reduce`, every field is reduced by itself, as TensorDict does."""
    _, out = output()
    assert out.mean().num_tokens.item() == 100.0
    assert out.sum(reduce=False).clip_fraction.item() == 0.5


def test_torchrl_knows_it():
    """It is one of TorchRL's outputs, with the same leading fields."""
    _, out = output()
    assert isinstance(out, peer.GRPOLossOutput)
    assert isinstance(out, peer.LLMLossOutput)
