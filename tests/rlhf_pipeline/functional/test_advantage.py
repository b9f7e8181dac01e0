"""Tests of the group-relative advantages."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.functional.advantage import (
    ESTIMATORS,
    NamedRewards,
    check_estimator,
    estimator_of,
    group_advantage,
    penalty_rounding,
    turn_advantage,
    whitened_step_rewards,
)

RETURNS = torch.tensor([1.0, 0.0, 2.0, 4.0, 8.0], dtype=torch.float64)
GROUPS = torch.tensor([5, 9, 5, 9, 5])
LENGTHS = torch.tensor([1, 2, 1, 6, 2])
# Group 5 holds 1, 2, 8 (mean 11/3); group 9 holds 0, 4 (mean 2, std sqrt 8).
MEAN5, STD5 = 11 / 3, math.sqrt(((1 - 11 / 3) ** 2 + (2 - 11 / 3) ** 2 + (8 - 11 / 3) ** 2) / 2)
CENTRED = [1 - MEAN5, -2.0, 2 - MEAN5, 2.0, 8 - MEAN5]
BATCH_STD = math.sqrt(((1 - 3) ** 2 + (0 - 3) ** 2 + (2 - 3) ** 2 + (4 - 3) ** 2 + (8 - 3) ** 2) / 4)
WANT = {
    "grpo": [
        CENTRED[0] / STD5,
        -1 / math.sqrt(2),
        CENTRED[2] / STD5,
        1 / math.sqrt(2),
        CENTRED[4] / STD5,
    ],
    "dr_grpo": CENTRED,
    "mean": CENTRED,
    "rloo": [1 - 5.0, 0 - 4.0, 2 - 4.5, 4 - 0.0, 8 - 1.5],
    "reinforce_pp": [(r - 3) / math.sqrt(40 / 4) for r in (1, 0, 2, 4, 8)],
    "grpo_batch": [c / BATCH_STD for c in CENTRED],
    "reinforce_pp_baseline": [c / math.sqrt(sum(x * x for x in CENTRED) / 4) for c in CENTRED],
    "opo": [1 - 19 / 4, 0 - 3.0, 2 - 19 / 4, 4 - 3.0, 8 - 19 / 4],
}
OF_GROUP = [c / (std + 1e-6) for c, std in zip(CENTRED, (STD5, 8**0.5, STD5, 8**0.5, STD5), strict=True)]
WANT["gdpo"] = [one / (statistics.stdev(OF_GROUP) + 1e-6) for one in OF_GROUP]  # of one reward
WANT["turn_grpo"] = WANT["grpo"]  # of one turn each


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_hand_computed_numbers(estimator):
    """Every estimator gives the numbers worked out by hand for groups of 3 and 2."""
    out = group_advantage(RETURNS, GROUPS, estimator, lengths=LENGTHS)
    assert out.advantages.dtype == torch.float64
    torch.testing.assert_close(
        out.advantages, torch.tensor(WANT[estimator], dtype=torch.float64), rtol=1e-13, atol=1e-13
    )
    assert not out.degenerate.any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_of_one_and_a_group_without_spread_are_zero_and_flagged(estimator):
    """No NaN and no advantage from a group that says nothing; TorchRL gives NaN for a group of one."""
    returns = torch.tensor([0.1, 0.1, 0.1, 7.0, 1.0, 3.0])
    groups = torch.tensor([0, 0, 0, 1, 2, 2])
    out = group_advantage(returns, groups, estimator, lengths=torch.ones(6))
    assert torch.isfinite(out.advantages).all()
    if estimator == "reinforce_pp":
        assert not out.degenerate.any()
        return
    assert out.degenerate.tolist() == [True, True, True, True, False, False]
    assert out.advantages[:4].tolist() == [0.0] * 4
    assert out.advantages[4] < 0 < out.advantages[5]


def test_a_batch_without_spread_is_degenerate_for_the_batch_baseline():
    """`reinforce_pp` has the batch as baseline, so a constant batch is what says nothing."""
    out = group_advantage(torch.full((4,), 0.3), torch.arange(4), "reinforce_pp")
    assert out.degenerate.all()
    assert out.advantages.tolist() == [0.0] * 4


def test_degenerate_members_do_not_widen_the_batch_spread():
    """`reinforce_pp_baseline` divides by a spread in which a group of one counts as 0, not as its return."""
    out = group_advantage(torch.tensor([1.0, 3.0, 1000.0]), torch.tensor([0, 0, 1]), "reinforce_pp_baseline")
    torch.testing.assert_close(out.advantages, torch.tensor([-1.0, 1.0, 0.0]))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("size", "apart", "is_flat"), [(1e-9, 1e-9, False), (1e9, 1e-2, False), (1e9, 5e-7, True), (1e-9, 1e-24, True)]
)
def test_spread_is_judged_beside_the_size_of_the_returns(estimator, size, apart, is_flat):
    """A difference counts from the twelfth digit on: a small one of small returns is spread, of large ones rounding."""
    returns = torch.tensor([size, size + apart], dtype=torch.float64)
    assert float(returns[1] - returns[0]) > 0
    found = group_advantage(returns, torch.zeros(2, dtype=torch.int64), estimator, lengths=torch.tensor([1, 1]))
    assert found.degenerate.tolist() == [is_flat, is_flat]
    assert (found.advantages == 0).all() == is_flat


def test_float32_returns_are_summed_in_float64():
    """A spread of 1 on top of a million comes out exact, which float32 sums would lose."""
    returns = torch.tensor([1e6, 1e6 + 1, 1e6 + 2])
    out = group_advantage(returns, torch.zeros(3, dtype=torch.long))
    assert out.advantages.dtype == torch.float32
    torch.testing.assert_close(out.advantages, torch.tensor([-1.0, 0.0, 1.0]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-100, 100, allow_nan=False)), min_size=1, max_size=30))
def test_equals_a_loop_over_groups(pairs):
    """For any ragged groups in any order, `grpo` equals the textbook loop."""
    groups = torch.tensor([g for g, _ in pairs])
    returns = torch.tensor([r for _, r in pairs], dtype=torch.float64)
    out = group_advantage(returns, groups)
    for i, (group, value) in enumerate(pairs):
        members = [r for g, r in pairs if g == group]
        spread = statistics.stdev(members) if len(members) > 1 else 0.0
        if out.degenerate[i]:
            assert spread <= 1e-9
            assert out.advantages[i] == 0
        else:
            want = (value - statistics.fmean(members)) / max(spread, 1e-6)
            assert out.advantages[i].item() == pytest.approx(want, rel=1e-6, abs=1e-9)


def test_integer_returns_and_empty_input():
    """Integer returns are accepted; no trajectory gives no advantage."""
    out = group_advantage(torch.tensor([0, 1]), torch.tensor([0, 0]), "mean")
    assert out.advantages.tolist() == [-0.5, 0.5]
    empty = group_advantage(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert empty.advantages.shape == empty.degenerate.shape == (0,)


def test_opo_with_empty_completions_uses_the_plain_mean():
    """A group whose completions are all empty has no lengths to weigh by."""
    out = group_advantage(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]), "opo", lengths=torch.tensor([0, 0]))
    assert out.advantages.tolist() == [-1.0, 1.0]


def test_step_rewards_are_whitened_over_the_steps_of_the_group():
    """TorchRL's per-step form: 0, 3 and 0 normalised with mean 1 and std sqrt 3; a lone step is flagged."""
    out = whitened_step_rewards(torch.tensor([0.0, 3.0, 0.0, 9.0]), torch.tensor([1, 1, 2]), torch.tensor([2, 1, 1]))
    s = math.sqrt(3)
    torch.testing.assert_close(out.advantages, torch.tensor([-1 / s, 2 / s, -1 / s, 0.0]))
    assert out.degenerate.tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((RETURNS, GROUPS, "grpoo"), "Did you mean 'grpo'"),
        ((RETURNS, GROUPS[:2]), "must both have shape"),
        ((torch.tensor([1.0, float("nan")]), torch.tensor([0, 0])), r"returns\[1\] is nan"),
        ((RETURNS, GROUPS, "opo"), "pass lengths"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    """An error names the value seen and what to pass."""
    with pytest.raises(DefinitionError, match=message):
        group_advantage(*arguments)


def test_step_lengths_must_add_up():
    """Lengths that do not add up to the number of rewards are refused with both numbers."""
    with pytest.raises(DefinitionError, match="sum 3"):
        whitened_step_rewards(torch.zeros(4), torch.tensor([0, 0]), torch.tensor([1, 2]))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rounding_of_a_penalty_is_no_advantage(estimator):
    """Equal task rewards and returns within the rounding of the penalty: 0 and flagged; a real difference counts."""
    eps = torch.finfo(torch.float32).eps
    noise = torch.tensor([1.0, -2.0, 0.5, 0.5], dtype=torch.float64) * 2 * eps
    groups, lengths = torch.tensor([0, 0, 0, 0]), torch.tensor([3, 3, 3, 3])
    task = torch.full((4,), 0.75)
    rounding = penalty_rounding(torch.full((4,), 0.5), task, torch.full((12,), -2.0), lengths, lengths=lengths)
    assert rounding.tolist() == pytest.approx([8 * 0.5 * 3 * eps * 2.0 + 2 * eps * 0.75] * 4)
    told = {"lengths": lengths, "task_rewards": task, "rounding": rounding}
    found = group_advantage(0.75 + noise, groups, estimator, **told)
    assert found.degenerate.all()
    assert found.advantages.tolist() == [0.0] * 4
    assert group_advantage(0.75 + noise, groups, estimator, lengths=lengths).advantages.abs().sum() > 0
    larger = group_advantage(0.75 + 100 * noise, groups, estimator, **told)
    assert not larger.degenerate.any()
    assert larger.advantages.abs().sum() > 0
    other = {**told, "task_rewards": torch.tensor([0.75, 0.75, 0.75, 0.5])}
    assert not group_advantage(0.75 + noise, groups, estimator, **other).degenerate.any()


def median_baseline(returns, groups, lengths):
    """Returns against the lower median of their group."""
    return returns - torch.stack([returns[groups == g].median() for g in groups])


def test_an_estimator_of_ones_own_is_used_and_checked():
    """Its numbers by hand, for groups numbered in any way; flat groups stay 0; a wrong result is one sentence."""
    returns, groups = torch.tensor([1.0, 4.0, 2.0, 7.0, 7.0]), torch.tensor([9, 9, 9, 2, 2])
    out = group_advantage(returns, groups, median_baseline)
    assert out.advantages.tolist() == [-1.0, 2.0, 0.0, 0.0, 0.0]
    assert out.degenerate.tolist() == [False, False, False, True, True]
    with pytest.raises(
        DefinitionError, match=r"<lambda> returned a tensor of shape \[1\]; it must return a tensor of shape \[5\]"
    ):
        group_advantage(returns, groups, lambda returns, groups, lengths: returns[:1])
    with pytest.raises(DefinitionError, match="not finite"):
        group_advantage(returns, groups, lambda returns, groups, lengths: returns / 0)


def turns_by_the_formula(conversations, k, i, discount):
    """Return A_ik as docs and docstring have it: ended members earn 0, failed ones leave from their failing turn on."""
    group, own = conversations[i]
    if not all(map(math.isfinite, own)):
        return 0.0
    total = 0.0
    for later in range(k, max(len(one) for other, one in conversations if other == group)):
        there = [one for other, one in conversations if other == group and all(map(math.isfinite, one[: later + 1]))]
        earned = [one[later] if later < len(one) else 0.0 for one in there]
        spread = statistics.stdev(earned) if len(earned) > 1 else 0.0
        mine = own[later] if later < len(own) else 0.0
        total += discount ** (later - k) * (mine - statistics.mean(earned)) / max(spread, 1e-6)
    return total


TALKS = [
    [(4, [0.5, 1.0, -2.0]), (9, [3.0]), (4, [1.5]), (9, [1.0, 2.0]), (4, [0.0, 4.0]), (9, [1.0, 2.0])],
    [(0, [0.0, 0.0])] * 3 + [(0, [0.0, 0.0, 0.0, 0.0, 0.0, 1.0])],  # one success, after the others have ended
    [(0, [1.0, 2.0, math.nan]), (0, [0.5]), (0, [2.0, 1.0, 3.0]), (0, [0.0, 1.5, 2.5, 1.0])],  # one failed in its third
]


@pytest.mark.parametrize("conversations", TALKS)
def test_turns_answer_for_themselves_and_for_what_follows(conversations):
    """Ragged turns against the formula, written out turn by turn in float64."""
    rewards = torch.tensor([r for _, one in conversations for r in one], dtype=torch.float64)
    groups = torch.tensor([group for group, _ in conversations])
    turns = torch.tensor([len(one) for _, one in conversations])
    found = turn_advantage(rewards, groups, turns, discount=0.7)
    want = [
        turns_by_the_formula(conversations, k, i, 0.7)
        for i, (_, one) in enumerate(conversations)
        for k in range(len(one))
    ]
    assert found.advantages.dtype == torch.float64
    assert found.advantages.tolist() == pytest.approx(want, abs=1e-12)
    assert turn_advantage(rewards[:0], groups[:0], turns[:0]).advantages.shape == (0,)


def test_a_lone_late_success_stands_out():
    """Three members end at turn 2 with nothing, one wins at turn 6: it is ahead in all its turns, they fall behind."""
    rewards, turns = torch.tensor([0.0] * 11 + [1.0]), torch.tensor([2, 2, 2, 6])
    found = turn_advantage(rewards, torch.zeros(4, dtype=torch.long), turns)
    assert found.advantages.tolist() == pytest.approx([-0.5] * 6 + [1.5] * 6)
    assert not found.degenerate.any()


def gdpo_by_the_paper(rewards, groups, weights):
    """Return GDPO's advantages (arXiv:2601.05242, equations 4 to 6) of [N, R] rewards, loop by loop."""
    sums = [0.0] * len(groups)
    for k, weight in enumerate(weights):
        for group in set(groups):
            members = [i for i, other in enumerate(groups) if other == group and math.isfinite(rewards[i][k])]
            given = [rewards[i][k] for i in members]
            spread = statistics.stdev(given) if len(given) > 1 else 0.0
            for i in members:
                sums[i] += weight * (rewards[i][k] - statistics.mean(given)) / (spread + 1e-6)
    return [(s - statistics.mean(sums)) / (statistics.stdev(sums) + 1e-6) for s in sums]


def test_gdpo_normalises_each_reward_then_their_weighted_sum():
    """Against the authors' formula: one that does not apply leaves its own statistics; equal sums are no tie."""
    nan = math.nan
    values = [[1, 0.2], [0, 0.9], [1, nan], [0, 0.3], [1, 5.0], [0, 6.0], [1, 5.0], [0, 6.0], [2, 2.0], [2, 2.0]]
    groups, weights = [7, 7, 7, 7, 3, 3, 3, 3, 5, 5], (1.0, 0.5)
    rewards = torch.tensor(values, dtype=torch.float64)
    named = NamedRewards(rewards, ("right", "short"), weights)
    returns = (rewards.nan_to_num() * torch.tensor(weights)).sum(1)
    found = group_advantage(returns, torch.tensor(groups), "gdpo", named=named)
    assert found.advantages.tolist() == pytest.approx(gdpo_by_the_paper(values, groups, weights), abs=1e-12)
    assert found.degenerate.tolist() == [False] * 8 + [True] * 2
    tie = NamedRewards(torch.tensor([[0.0, 3.0], [1.0, 2.0], [3.0, 0.0]]).double(), ("a", "b"), (1.0, 1.0))
    equal = group_advantage(torch.full((3,), 3.0), torch.zeros(3).long(), "gdpo", named=tie)
    assert not equal.degenerate.any()


def test_an_estimator_of_ones_own_sees_named_rewards():
    """[N, R], unweighted, with names and weights, as far as it asks for them; a tie of the sums is then no tie."""

    def right_alone(returns, groups, lengths, *, rewards, names):
        assert rewards.dtype == torch.float64
        column = rewards[:, names.index("right")]
        return column - column.mean()

    named = NamedRewards(torch.tensor([[0.0, 2.0], [1.0, 1.0]]), ("right", "short"), (1.0, 1.0))
    found = group_advantage(torch.tensor([2.0, 2.0]), torch.tensor([0, 0]), right_alone, named=named)
    assert found.advantages.tolist() == [-0.5, 0.5]
    assert not found.degenerate.any()


def test_rewards_one_by_one_change_nothing_for_an_estimator_of_their_sum():
    """It sees the returns alone, so a tie of them is one, whatever the rewards are."""
    named = NamedRewards(torch.tensor([[0.0, 2.0], [1.0, 1.0], [2.0, 0.0]]), ("a", "b"), (1.0, 1.0))
    for returns in (torch.full((3,), 2.0), torch.tensor([1.0, 2.0, 4.0])):
        with_them = group_advantage(returns, torch.zeros(3).long(), named=named)
        without = group_advantage(returns, torch.zeros(3).long())
        assert torch.equal(with_them.advantages, without.advantages)
        assert torch.equal(with_them.degenerate, without.degenerate)
    some = named.take(torch.tensor([2, 0]))
    assert (some.rewards.tolist(), some.names, some.weights) == ([[2.0, 0.0], [0.0, 2.0]], ("a", "b"), (1.0, 1.0))


def test_a_function_is_tried_before_a_run_uses_it():
    """On groups of two sizes, with the names and weights of the run; what fails is said with the contract."""
    seen = []

    def weighed(returns, groups, lengths, rewards, names, weights):
        seen.append((tuple(rewards.shape), names, weights, len(groups.unique()), tuple(lengths.shape)))
        return (rewards * torch.tensor(weights)).sum(1)

    check_estimator(weighed, {"right": 1.0, "short": 0.5})
    assert seen == [((5, 2), ("right", "short"), (1.0, 0.5), 2, (5,))]
    check_estimator("grpo", {"right": 1.0})
    check_estimator(median_baseline)
    with pytest.raises(
        DefinitionError, match=r"(?s)write.estimator .*groups of 3 and 2. The function must accept returns \[N\]"
    ):
        check_estimator(lambda returns, groups, lengths: returns.tolist()[7])
    with pytest.raises(DefinitionError, match=r"returned list; it must return a tensor of shape \[5\]"):
        check_estimator(lambda returns, groups, lengths: returns.tolist())


def test_who_takes_rewards_one_by_one():
    """`gdpo`, and functions that name a field of them; one whose signature is not known takes the three arguments."""
    assert estimator_of("gdpo").by_reward
    assert not estimator_of("grpo").by_reward
    assert estimator_of(lambda returns, groups, lengths, *, weights: returns).by_reward
    assert not estimator_of(median_baseline).by_reward
    no_signature = type("Own", (), {"__signature__": 3, "__call__": lambda self, r, groups, lengths: r - r.mean()})()
    assert not estimator_of(no_signature).by_reward
    entry = estimator_of("grpo")
    assert estimator_of(entry) is entry
    found = group_advantage(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), no_signature)
    assert found.advantages.tolist() == [-1.0, 1.0]


def test_turns_that_do_not_fit_are_refused():
    """Turns that do not add up, and a discount out of range."""
    groups = torch.tensor([0, 0])
    with pytest.raises(DefinitionError, match="sum 3"):
        turn_advantage(torch.zeros(4), groups, torch.tensor([1, 2]))
    with pytest.raises(DefinitionError, match="discount is"):
        turn_advantage(torch.zeros(3), groups, torch.tensor([1, 2]), discount=1.5)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "gdpo", "reinforce_pp_baseline", "grpo_batch"])
@pytest.mark.parametrize("level", [1.0, -0.3, 1000.0])
def test_neighbouring_float32_numbers_are_no_spread(estimator, level):
    """Rewards that differ by one unit of their last place are one reward summed in two orders."""
    reward = np.float32(level)
    upper = np.nextafter(reward, np.float32(np.inf))
    groups = torch.tensor([0, 0, 0, 0])
    for highest, is_flat in ((upper, True), (np.float32(level + abs(level) / 2), False)):
        returns = torch.tensor([reward, reward, highest, reward])
        named = NamedRewards(returns[:, None], ("one",), (1.0,))
        found = group_advantage(returns, groups, estimator, named=named)
        assert found.degenerate.tolist() == [is_flat] * 4
        assert bool((found.advantages == 0).all()) is is_flat


def test_a_reward_with_rounding_alone_adds_nothing_to_gdpo():
    """Of two rewards, one varies: the other, equal but for its last place, leaves the advantages as they are."""
    first = torch.tensor([0.0, 1.0, 0.0, 1.0])
    second = torch.full((4,), 0.7)
    groups, weights = torch.tensor([0, 0, 1, 1]), (1.0, 1.0)
    noisy = second.clone()
    noisy[::2] = torch.nextafter(noisy[::2], torch.tensor(2.0))
    found = [
        group_advantage(
            first + rest, groups, "gdpo", named=NamedRewards(torch.stack([first, rest], 1), ("a", "b"), weights)
        )
        for rest in (second, noisy)
    ]
    assert torch.equal(found[0].advantages, found[1].advantages)
