"""The interval and pass@k of an evaluation, compared with hand computations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rlhf_pipeline.functional.pass_at_k import mean_interval, pass_at_k


def test_the_interval_is_the_normal_one_over_prompts():
    """Four prompts with means 0, 0.5, 0.5, 1: s is 0.408248, half the width 1.96 times half of it."""
    mean, low, high = mean_interval(np.array([0.0, 0.5, 0.5, 1.0]))
    assert (mean, low, high) == pytest.approx((0.5, 0.5 - 0.400074, 0.5 + 0.400074), abs=1e-5)
    assert mean_interval(np.array([0.25])) == (0.25, None, None)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 2), (5, 2, 3), (6, 0, 2), (3, 3, 1), (4, 2, 4), (4, 3, 2)])
def test_pass_at_k_is_the_mean_over_all_choices(n, c, k):
    """Among all sets of k of n completions, the share with at least one of the c right ones."""
    sets = list(itertools.combinations(range(n), k))
    share = sum(min(chosen) < c for chosen in sets) / len(sets)
    assert pass_at_k(np.array([n]), np.array([c]), k) == pytest.approx(share)


def test_prompts_with_too_few_completions_are_left_out_of_pass_at_k():
    """A failed call leaves a prompt with fewer; without any prompt left there is no estimate."""
    assert pass_at_k(np.array([4, 1]), np.array([1, 1]), 2) == 0.5
    assert pass_at_k(np.array([1]), np.array([1]), 2) is None
