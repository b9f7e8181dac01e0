"""Tests of the KL estimators."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_pipeline.functional.kl import kl_k1, kl_k2, kl_k3, kl_loss


def test_hand_computed_numbers():
    """D = ln 2 and d = -ln 2 give the values worked out by hand."""
    log_probs = torch.tensor([math.log(0.5), math.log(0.25)], dtype=torch.float64)
    ref = torch.tensor([math.log(0.25), math.log(0.5)], dtype=torch.float64)
    d = math.log(2.0)
    assert kl_k1(log_probs, ref).tolist() == pytest.approx([d, -d])
    assert kl_k2(log_probs, ref).tolist() == pytest.approx([d * d / 2, d * d / 2])
    assert kl_k3(log_probs, ref).tolist() == pytest.approx([0.5 - 1 + d, 2.0 - 1 - d])


def test_k3_is_accurate_near_zero_and_finite_far_away():
    """A gap of 1e-4 keeps its digits in float32 and a gap of 1000 stays finite."""
    gap = torch.tensor([1e-4])
    assert kl_k3(gap, torch.zeros(1)).item() == pytest.approx(0.5e-8, rel=2e-2)
    assert torch.isfinite(kl_k3(torch.tensor([-1000.0]), torch.zeros(1))).all()


def test_expectations_over_a_distribution():
    """Over an exact expectation k1 and k3 give the KL."""
    log_p = torch.log_softmax(torch.tensor([0.3, -0.8, 1.1], dtype=torch.float64), -1)
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, -0.2], dtype=torch.float64), -1)
    p = log_p.exp()
    kl = (p * (log_p - ref)).sum()
    assert (p * kl_k1(log_p, ref)).sum().item() == pytest.approx(kl.item(), rel=1e-12)
    assert (p * kl_k3(log_p, ref)).sum().item() == pytest.approx(kl.item(), rel=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+"])
def test_the_weighted_loss_has_the_gradient_of_the_kl_off_policy(estimator):
    """Tokens of another policy, summed over its whole distribution: the KL's gradient, which it has not unweighted."""
    logits = torch.tensor([0.3, -0.8, 1.1, 0.2], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, -0.2, -1.0], dtype=torch.float64), -1)
    behaviour = torch.log_softmax(torch.tensor([0.9, -0.3, 0.2, 0.5], dtype=torch.float64), -1)
    log_p = torch.log_softmax(logits, -1)
    (want,) = torch.autograd.grad((log_p.exp() * (log_p - ref)).sum(), logits, retain_graph=True)
    for given, far in ((behaviour, False), (None, True)):
        term = kl_loss(log_p, ref, estimator, behaviour=given)
        (found,) = torch.autograd.grad((behaviour.exp() * term).sum(), logits, retain_graph=True)
        assert bool((found - want).norm() > 0.05 * want.norm()) is far
        if not far:
            torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+"])
def test_a_token_without_the_other_log_prob_has_no_term(estimator):
    """Neither has one that the policy bans as well."""
    log_probs, other = torch.tensor([-1.0, -math.inf, -1.0]), torch.tensor([math.nan, math.nan, -2.0])
    term = kl_loss(log_probs, other, estimator)
    assert term[:2].tolist() == [0.0, 0.0]
    assert term[2] > 0
