"""Tests of the token weights."""

from __future__ import annotations

import pytest
import torch

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.functional.aggregation import (
    AGGREGATIONS,
    canonical_aggregation,
    contributes,
    token_weights,
)

LENGTHS = torch.tensor([1, 0, 4])
VALUES = [[2.0], [], [1.0, 3.0, 5.0, 7.0]]
# The last two are a group, of which one is empty. token_mean 18 / 5; group_mean (2 + 16 / 4) / 2;
# sequence_mean (2 + 4) / 2; sequence_sum (2 + 16) / 2; dr_grpo 18 / (2 * 8).
WANT = {"token_mean": 3.6, "sequence_mean": 3.0, "group_mean": 3.0, "sequence_sum": 9.0, "dr_grpo": 1.125}


def aggregate(weights):
    """Sum weight times value over all tokens."""
    return sum(w * v for w, row in zip(weights.tolist(), VALUES, strict=True) for v in row)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_hand_computed_numbers(mode):
    """Each mode gives the mean worked out by hand, and the empty trajectory counts for nothing."""
    weights = token_weights(LENGTHS, mode, groups=torch.tensor([5, 2, 2]), max_completion_tokens=8, dtype=torch.float64)
    assert aggregate(weights) == pytest.approx(WANT[mode], rel=1e-14)
    assert weights[1] == 0


def test_nothing_to_learn_from_gives_zero_weights():
    """A step whose completions are all empty gives 0, not NaN."""
    assert token_weights(torch.zeros(3, dtype=torch.long)).tolist() == [0.0, 0.0, 0.0]


def test_who_has_a_gradient():
    """Advantage 0 has none, unless the loss has a KL or an entropy term."""
    a = torch.tensor([0.0, 1.0])
    assert contributes(a).tolist() == [False, True]
    assert contributes(a, kl_loss=True).tolist() == [True, True]
    assert contributes(a, entropy_bonus=True).tolist() == [True, True]


def test_wrong_modes_are_named():
    """An unknown mode suggests the nearest; dr_grpo asks for its constant."""
    assert canonical_aggregation("prompt_mean") == "sequence_mean"
    with pytest.raises(DefinitionError, match="Did you mean 'token_mean'"):
        token_weights(LENGTHS, "token_means")
    with pytest.raises(DefinitionError, match="max_completion_tokens"):
        token_weights(LENGTHS, "dr_grpo")
