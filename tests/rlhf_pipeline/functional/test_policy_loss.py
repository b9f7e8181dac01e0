"""Tests of the token losses."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_pipeline.functional.kl import clamped_log_ratio
from rlhf_pipeline.functional.policy_loss import (
    clipped_loss,
    icepop_weight,
    kl_trust_mask,
    sequence_icepop_weight,
    sequence_mean_log_ratio,
    sequence_tis_weight,
    tis_weight,
)


def f64(*values):
    """A float64 vector."""
    return torch.tensor(values, dtype=torch.float64)


def slope(loss_of, log_ratio):
    """Value and derivative of a token loss with respect to the log-ratio."""
    x = log_ratio.clone().requires_grad_()
    out = loss_of(x)
    (grad,) = torch.autograd.grad(out.loss.sum(), x)
    return out, out.loss.detach().tolist(), grad.tolist()


def test_clipped_loss_by_hand():
    """Ratios 1, 1.5, 0.5 with both signs: values, slopes and which bound was taken."""
    w = f64(1.0, 1.5, 0.5, 1.0, 1.5, 0.5)
    a = f64(2.0, 2.0, 2.0, -2.0, -2.0, -2.0)
    out, loss, grad = slope(lambda x: clipped_loss(x, a, 0.2, 0.28), w.log())
    assert loss == pytest.approx([-2.0, -2.56, -1.0, 2.0, 3.0, 1.6])
    assert grad == pytest.approx([-2.0, 0.0, -1.0, 2.0, 3.0, 0.0])
    assert out.clipped_high.tolist() == [False, True, False, False, False, False]
    assert out.clipped_low.tolist() == [False, False, False, False, False, True]


def test_zero_advantage_is_never_counted_as_clipped():
    """Without an advantage no branch is taken, however far the ratio."""
    out = clipped_loss(f64(3.0, 0.1).log(), f64(0.0, 0.0))
    assert not (out.clipped_low | out.clipped_high).any()
    assert out.loss.abs().tolist() == [0.0, 0.0]


def test_two_sided_bound_caps_the_unclipped_branch():
    """With delta = 4 a ratio of 10 with A < 0 counts as 4 and has no gradient."""
    _, loss, grad = slope(lambda x: clipped_loss(x, f64(-1.0, -1.0), delta=4.0), f64(10.0, 3.0).log())
    assert loss == pytest.approx([4.0, 3.0])
    assert grad == pytest.approx([0.0, 3.0])


def test_log_ratios_are_clamped_before_the_exponential():
    """A ratio of e^200 becomes e^20 and stays finite, with a finite loss."""
    ratio = clamped_log_ratio(f64(200.0, -300.0), f64(0.0, 0.0))
    assert ratio.tolist() == [20.0, -20.0]
    assert torch.isfinite(clipped_loss(ratio, f64(-1.0, 1.0)).loss).all()


def test_gspo_of_an_empty_sequence_is_finite():
    """A sequence without rows has a mean of 0, not NaN."""
    mean = sequence_mean_log_ratio(f64(0.2), torch.tensor([1]), 3)
    assert mean.tolist() == [0.0, 0.2, 0.0]


def test_truncated_importance_sampling_by_hand():
    """Token weights exp(lo - lb) capped at 2; the sequence form uses the sum; no gradient either way."""
    lo = f64(math.log(0.6), math.log(0.3), math.log(0.5)).requires_grad_()
    lb = f64(math.log(0.2), math.log(0.3), math.log(1.0))
    token = tis_weight(lo, lb, 2.0)
    assert token.tolist() == pytest.approx([2.0, 1.0, 0.5])
    sequence = sequence_tis_weight(lo, lb, torch.tensor([0, 0, 1]), 2, 2.5)
    assert sequence.tolist() == pytest.approx([2.5, 2.5, 0.5])
    assert not token.requires_grad
    assert not sequence.requires_grad


def test_icepop_weights_by_hand():
    """Ratios 3, 1 and 0.5 against [0.6, 2.5]: inside, the weight is the ratio; of the sequence, sqrt(3) or 3."""
    lo = f64(math.log(0.6), math.log(0.3), math.log(0.5))
    lb = f64(math.log(0.2), math.log(0.3), math.log(1.0))
    index = torch.tensor([0, 0, 1])
    assert icepop_weight(lo, lb, 0.6, 2.5).tolist() == pytest.approx([0.0, 1.0, 0.0])
    assert icepop_weight(lo, lb, 0.4, 3.5).tolist() == pytest.approx([3.0, 1.0, 0.5])
    mean = sequence_icepop_weight(lo, lb, index, 2, 0.6, 2.5)
    assert mean.tolist() == pytest.approx([math.sqrt(3), math.sqrt(3), 0.0])
    assert sequence_icepop_weight(lo, lb, index, 2, 0.4, 2.5, product=True).tolist() == pytest.approx([0.0, 0.0, 0.5])


def test_trust_region_mask():
    """d^2 / 2 against the threshold, the bound itself included."""
    assert kl_trust_mask(f64(0.0, 1.0, -1.5), 0.5).tolist() == [True, True, False]
