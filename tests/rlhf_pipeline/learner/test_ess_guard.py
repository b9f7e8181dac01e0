from __future__ import annotations

import pytest
import torch

from rlhf_pipeline.learner.ess_guard import ess_guard

WEIGHTS = torch.tensor([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0], [1.0, 3.0, 9.0]])
MASK = torch.tensor([[True, True, False], [True, True, True], [True, True, False]])


def test_by_hand():
    """Ages 0, 0 and 5: (1+1+2+2+2)^2 / (5*14) = 64/70, and (1+3)^2 / (2*10) = 0.8."""
    verdict = ess_guard(WEIGHTS.log(), MASK, torch.tensor([0, 0, 5]), min_ess=1.0, skip_below=0.0)
    assert [found.age for found in verdict.ages] == [0, 5]
    assert [found.trajectories for found in verdict.ages] == [2, 1]
    assert [found.ess for found in verdict.ages] == pytest.approx([64 / 70, 0.8])
    assert verdict.weights.tolist() == pytest.approx([64 / 70, 64 / 70, 0.8])
    assert verdict.weights.dtype == torch.float32


def test_down_weighted_and_left_out():
    """Below `min_ess` in proportion, below `skip_below` not at all; what happened is said."""
    ages = torch.tensor([0, 0, 5])
    full = ess_guard(WEIGHTS.log(), MASK, ages, min_ess=0.75, skip_below=0.5)
    assert full.weights.tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert (full.message, full.skip) == ("", False)
    less = ess_guard(WEIGHTS.log(), MASK, ages, min_ess=0.9, skip_below=0.5)
    assert less.weights.tolist() == pytest.approx([1.0, 1.0, 0.8 / 0.9])
    assert less.message == "Age 5: the effective sample size of 1 trajectories is 0.800, they receive the weight 0.89."
    out = ess_guard(WEIGHTS.log(), MASK, ages, min_ess=0.9, skip_below=0.9)
    assert out.weights.tolist() == [1.0, 1.0, 0.0]
    assert out.message.endswith("is 0.800, they are excluded.")
    assert not out.skip
    assert ess_guard(WEIGHTS.log(), MASK, ages, min_ess=1.0, skip_below=1.0).skip


def test_the_young_do_not_hide_the_old():
    """A stale trajectory among a thousand fresh ones is judged by itself."""
    log_ratio, mask = torch.zeros(1001, 8), torch.ones(1001, 8, dtype=torch.bool)
    log_ratio[-1, 0] = 8.0
    ages = torch.zeros(1001, dtype=torch.int64)
    ages[-1] = 3
    verdict = ess_guard(log_ratio, mask, ages, min_ess=0.5, skip_below=0.2)
    assert verdict.weights[:-1].tolist() == [1.0] * 1000
    assert verdict.weights[-1] == 0.0
    # (7 + e^8)^2 / (8 * (7 + e^16)): nearly all weight on one token of eight.
    assert verdict.ages[1].ess == pytest.approx(0.1256, abs=1e-4)


def test_odd_values():
    """Ratios that are not finite, and padding, do not count; large ones are clamped; nothing to judge is no fault."""
    nan, inf = float("nan"), float("inf")
    log_ratio = torch.tensor([[0.0, nan, inf, 5.0], [nan, nan, nan, nan]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    verdict = ess_guard(log_ratio, mask, torch.tensor([1, 2]), min_ess=0.3, skip_below=0.1)
    assert [found.ess for found in verdict.ages] == [1.0, 0.0]
    assert verdict.weights.tolist() == [1.0, 1.0]
    huge = ess_guard(torch.tensor([[900.0, 900.0]]), mask[1:, :2], torch.tensor([1]), min_ess=0.3, skip_below=0.1)
    assert huge.ages[0].ess == pytest.approx(1.0)
    none = torch.empty(0, dtype=torch.int64)
    empty = ess_guard(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.bool), none, min_ess=0.3, skip_below=0.1)
    assert (empty.weights.shape, empty.ages, empty.skip) == ((0,), (), True)
