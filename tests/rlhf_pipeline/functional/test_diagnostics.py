"""Tests of the diagnostics."""

from __future__ import annotations

import pytest
import torch

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.functional.diagnostics import (
    clip_fractions,
    effective_sample_size,
    ess_from_sums,
    kl_approx,
    masked_entropy,
    mfu,
    padding_efficiency,
    sequence_effective_sample_size,
    training_flops,
    weight_sums,
)


def test_ess_by_hand():
    """Weights 1, 2, 3: 36 / (3 * 14). A masked weight of e^20 does not count."""
    log_ratio = torch.tensor([1.0, 2.0, 3.0, 1.0]).log()
    log_ratio[3] = 20.0
    mask = torch.tensor([True, True, True, False])
    assert effective_sample_size(log_ratio, mask).item() == pytest.approx(36 / 42)
    assert effective_sample_size(torch.zeros(7)).item() == 1.0


def test_ess_of_nothing_is_zero():
    """An all-false mask gives 0, not NaN."""
    mask = torch.zeros(3, dtype=torch.bool)
    assert effective_sample_size(torch.zeros(3), mask).item() == 0.0


def test_ess_adds_up_over_micro_batches():
    """The sums of two parts give the size of the whole, which averaging the two sizes would not."""
    x = torch.tensor([0.0, 1.0, -1.0, 2.0])
    parts = [weight_sums(x[:1]), weight_sums(x[1:])]
    added = [a + b for a, b in zip(*parts, strict=True)]
    assert ess_from_sums(*added).item() == pytest.approx(effective_sample_size(x).item())


def test_ess_over_sequences_by_hand():
    """Two sequences with weights 1 and 3, and one without tokens: 16 / (2 * 10)."""
    log_ratio = torch.tensor([0.5, -0.5, 1.0, 1.0]).mul(1.0)
    log_ratio[2:] = torch.tensor(3.0).log() / 2
    out = sequence_effective_sample_size(log_ratio, torch.tensor([0, 0, 2, 2]), 4)
    assert out.item() == pytest.approx(0.8)


def test_masked_means_ignore_padding():
    """Clip fractions, KL and entropy are means over the mask: padding does not dilute them."""
    mask = torch.tensor([True, True, False, False])
    low, high = clip_fractions(torch.tensor([True, False, True, True]), ~mask, mask)
    assert (low.item(), high.item()) == (0.5, 0.0)
    lp, lo = torch.tensor([-2.0, -1.0, 0.0, 0.0]), torch.tensor([-1.0, -1.0, 0.0, 5.0])
    assert kl_approx(lp, lo, mask).item() == 0.5
    assert masked_entropy(torch.tensor([2.0, 4.0, 0.0, 0.0]), mask).item() == 3.0


def test_padding_efficiency():
    """Three real tokens in six positions; an empty batch wastes nothing."""
    assert padding_efficiency(torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()).item() == 0.5
    assert padding_efficiency(torch.zeros(0, 4).bool()).item() == 1.0


def test_flops_by_hand():
    """6 * 100 * 5 tokens + 12 * 2 layers * 8 wide * (16 + 1) / 2, over the peak."""
    lengths = torch.tensor([4, 1])
    assert training_flops(100, 2, 8, lengths).item() == 3000 + 12 * 2 * 8 * 17 / 2
    assert mfu(100, 2, 8, lengths, seconds=2.0, peak_flops=4632.0) == 0.5
    with pytest.raises(DefinitionError, match="above 0"):
        mfu(1, 1, 1, lengths, seconds=0.0, peak_flops=1.0)
