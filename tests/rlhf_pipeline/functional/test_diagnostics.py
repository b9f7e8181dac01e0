"""Tests of the diagnostics."""

from __future__ import annotations

import pytest
import torch

from rlhf_pipeline.functional.diagnostics import (
    ess_from_sums,
    row_mean,
    sequence_weight_sums,
    training_flops,
    weight_sums,
)


def test_ess_by_hand():
    """Weights 1, 2, 3: 36 / (3 * 14). A masked weight of e^20 does not count, and nothing gives 0, not NaN."""
    log_ratio = torch.tensor([1.0, 2.0, 3.0, 1.0]).log()
    log_ratio[3] = 20.0
    mask = torch.tensor([True, True, True, False])
    assert ess_from_sums(*weight_sums(log_ratio, mask)).item() == pytest.approx(36 / 42)
    assert ess_from_sums(*weight_sums(torch.zeros(7))).item() == 1.0
    assert ess_from_sums(*weight_sums(torch.zeros(3), ~mask[:3])).item() == 0.0


def test_ess_adds_up_over_micro_batches():
    """The sums of two parts give the size of the whole, which averaging the two sizes would not."""
    x = torch.tensor([0.0, 1.0, -1.0, 2.0])
    added = [a + b for a, b in zip(weight_sums(x[:1]), weight_sums(x[1:]), strict=True)]
    assert ess_from_sums(*added).item() == pytest.approx(ess_from_sums(*weight_sums(x)).item())


def test_ess_over_sequences_by_hand():
    """Two sequences with weights 1 and 3, and one without tokens: 16 / (2 * 10)."""
    log_ratio = torch.tensor([0.5, -0.5, 1.0, 1.0])
    log_ratio[2:] = torch.tensor(3.0).log() / 2
    sums = sequence_weight_sums(log_ratio, torch.tensor([0, 0, 2, 2]), 4)
    assert ess_from_sums(*sums).item() == pytest.approx(0.8)


def test_the_mean_of_no_row_is_zero():
    """A step without a token has figures of 0, and booleans average to a share."""
    assert row_mean(torch.zeros(0)).item() == 0.0
    assert row_mean(torch.tensor([True, True, False, False])).item() == 0.5


def test_flops_by_hand():
    """Weights of 100 and a head of 20 on 5 tokens, 3 of them scored, and two attention layers, 8 wide."""
    model = {"trained": 100, "head": 20, "layers": 2, "width": 8}
    lengths, scored = torch.tensor([4, 1]), torch.tensor([2, 1])
    attention = 2 * 2 * 8 * (16 + 1)  # forward, under a causal mask
    forward = 2 * 100 * 5 + 2 * 20 * 3 + attention
    assert training_flops(lengths, scored, **model, backward=False) == forward
    assert training_flops(lengths, scored, **model) == 3 * forward
    lora = {**model, "trained": 10, "frozen": 90, "head_is_trained": False}
    assert training_flops(lengths, scored, **lora) == (6 * 10 + 4 * 90) * 5 + 4 * 20 * 3 + 3 * attention
