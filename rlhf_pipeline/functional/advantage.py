"""Group-relative advantages over ragged groups, without a loop over groups.

The suffix of a name gives a shape: `_N` is one value per trajectory (of turns: per turn), `_G` one per group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch

from rlhf_pipeline.errors import DefinitionError, did_you_mean, function_name, tried
from rlhf_pipeline.functional.policy_loss import indexed_sum

__all__ = [
    "BATCH_ESTIMATORS",
    "ESTIMATORS",
    "EstimatorEntry",
    "EstimatorFunction",
    "GroupAdvantage",
    "NamedRewards",
    "Returns",
    "check_estimator",
    "estimator_of",
    "group_advantage",
    "penalty_rounding",
    "turn_advantage",
    "whitened_step_rewards",
]

STD_FLOOR: Final = 1e-6
"""The smallest divisor, as in TorchRL."""

RELATIVE_SPREAD_FLOOR: Final = 1e-12
"""A range of at most this fraction of the largest absolute value is rounding, not signal, in float64 sums."""
FLOAT32_RESOLUTION: Final = 2.0**-23
"""The same for values rounded to float32, such as stored rewards: neighbours differ by up to this fraction."""


EstimatorFunction = Callable[..., torch.Tensor]
"""An estimator: `(returns float64 [N], groups int64 [N], lengths [N] or None) -> advantages [N]`, finite.

The members of a group have its number, from 0, and may come in any order; advantages of groups without spread are set
to 0 afterwards. A call contains complete groups; a custom estimator must not depend on which groups are in one call.

A function with the additional arguments `rewards`, `names` or `weights` receives these fields of `NamedRewards` by
name: the named rewards float64 [N, R], unweighted and NaN where one does not apply, with the name and the weight of
each. A group then has spread if any of its rewards has spread.
"""


class NamedRewards(NamedTuple):
    """The rewards of trajectories, one by one.

    Attributes:
        rewards: float64 [N, R], without weights; NaN where one does not apply.
        names: [R].
        weights: [R]; the task reward is the sum of weight times reward over those that apply.
    """

    rewards: torch.Tensor
    names: tuple[str, ...]
    weights: tuple[float, ...]

    def take(self, index: torch.Tensor | slice) -> NamedRewards:
        """Return those of the given trajectories."""
        return self._replace(rewards=self.rewards[index])


class Returns(NamedTuple):
    """The inputs of estimators: the returns of complete groups, and their moments.

    Attributes:
        values: float64 [N].
        groups: int64 [N], the number of each one's group, from 0.
        lengths: [N] or None, assistant tokens.
        size: float64 [groups], members.
        centred: float64 [N], values less the mean of their group.
        std: float64 [groups], unbiased.
        degenerate: bool [N].
        named: the rewards one by one; without names, the returns alone.
        resolution: a range of at most this part of the largest absolute value is rounding.
    """

    values: torch.Tensor
    groups: torch.Tensor
    lengths: torch.Tensor | None
    size: torch.Tensor
    centred: torch.Tensor
    std: torch.Tensor
    degenerate: torch.Tensor
    named: NamedRewards
    resolution: float = RELATIVE_SPREAD_FLOOR


class EstimatorEntry(NamedTuple):
    """An estimator as `group_advantage` calls it.

    Attributes:
        advantages: float64 [N]; those of degenerate members are set to 0 afterwards.
        by_batch: it divides by the spread of a whole batch, so the caller must define the batch.
        of_batch: its baseline is the batch, so only a batch without spread is degenerate.
        by_turn: it compares turns, see `turn_advantage`; of one number per trajectory it makes one turn.
        by_reward: it takes the named rewards one by one, so a group has spread if one of them has.
    """

    advantages: Callable[[Returns], torch.Tensor]
    by_batch: bool = False
    of_batch: bool = False
    by_turn: bool = False
    by_reward: bool = False


class GroupAdvantage(NamedTuple):
    """The result of `group_advantage`.

    Attributes:
        advantages: [N], in the dtype of the returns (float32 for integer returns); 0 where degenerate.
        degenerate: bool [N], True for every member of a group of one or without spread.
    """

    advantages: torch.Tensor
    degenerate: torch.Tensor


def _batch_std(centred: torch.Tensor) -> torch.Tensor:
    """Return the unbiased standard deviation of values whose mean is 0; 0 for fewer than two values."""
    return (centred.square().sum() / max(centred.numel() - 1, 1)).sqrt()


def penalty_rounding(
    coef: torch.Tensor,
    task_rewards: torch.Tensor,
    log_probs: torch.Tensor,
    rows: torch.Tensor,
    *,
    lengths: torch.Tensor,
    eps: float = torch.finfo(torch.float32).eps,
) -> torch.Tensor:
    """Bound the rounding error of returns whose KL penalty is a sum of log-probs.

    The bound is `8 * coef * lengths * eps * max |log_prob|` plus the rounding of a float32 reward. A log-prob is a
    difference of logits, each rounded relative to its own size, so its error is a few `eps` of itself: hence the 8.

    Args:
        coef: [N], weight of the penalty.
        task_rewards: [N], the reward without the penalty.
        log_probs: flat [sum of rows], one trajectory after another; non-finite ones are ignored.
        rows: int64 [N], log-probs per trajectory.
        lengths: [N], tokens that the penalty is summed over.
        eps: machine epsilon of the dtype that the models compute in.

    Returns:
        float64 [N].

    >>> one = torch.ones(1)
    >>> penalty_rounding(one, 0 * one, torch.tensor([-2.0]), torch.tensor([1]), lengths=one, eps=0.5)
    tensor([8.], dtype=torch.float64)
    """
    sizes = log_probs.detach().double().abs().nan_to_num(0.0, 0.0, 0.0)
    largest_N = torch.segment_reduce(sizes, "max", lengths=rows, initial=0.0)
    penalty_N = 8.0 * eps * coef.double() * lengths.double() * largest_N
    return penalty_N + 2.0 * torch.finfo(torch.float32).eps * task_rewards.double().abs()


def _without_spread(values: torch.Tensor, index: torch.Tensor, groups: int, resolution: float) -> torch.Tensor:
    """Return whether the values of each group are equal but for rounding; bool [groups], True for a group of none.

    Args:
        values: float64 [N]; those that are not finite do not count.
        index: int64 [N], the group of each, from 0.
        groups: their number.
        resolution: a range of at most this part of the largest absolute value is rounding.
    """
    finite = values.isfinite()
    values, index = values[finite], index[finite]
    low_G = values.new_full((groups,), float("inf")).scatter_reduce(0, index, values, "amin")
    high_G = values.new_full((groups,), float("-inf")).scatter_reduce(0, index, values, "amax")
    return high_G - low_G <= resolution * torch.maximum(high_G.abs(), low_G.abs())


def group_advantage(
    returns: torch.Tensor,
    group_ids: torch.Tensor,
    estimator: str | EstimatorFunction | EstimatorEntry = "grpo",
    *,
    lengths: torch.Tensor | None = None,
    task_rewards: torch.Tensor | None = None,
    rounding: torch.Tensor | None = None,
    named: NamedRewards | None = None,
    resolution: float | None = None,
) -> GroupAdvantage:
    """Compute one advantage per trajectory, relative to the members of its group that arrived.

    `R` are the returns; `n`, `mean` and `std` (unbiased, n - 1) are the size, mean and spread of the group:

    * `grpo`: `(R - mean) / max(std, 1e-6)`. DeepSeekMath, arXiv:2402.03300.
    * `dr_grpo`, `mean`: `R - mean`. arXiv:2503.20783.
    * `rloo`: `R - mean of the others = n / (n - 1) * (R - mean)`. arXiv:2402.14740.
    * `reinforce_pp`: `(R - mean_batch) / std_batch`; `reinforce_pp_baseline`: `(R - mean) / std_batch(R - mean)`.
      arXiv:2501.03262. The batch is all `returns`.
    * `grpo_batch`: `(R - mean) / max(std_batch(R), 1e-6)`, TRL's `scale_rewards="batch"` (which adds 1e-4 to the
      spread). arXiv:2508.08221.
    * `opo`: `R - sum(L R) / sum(L)`, the baseline weighted by completion length `L`. arXiv:2505.23585.
    * `turn_grpo`: `grpo` for each turn, see `turn_advantage`; here, of one number per trajectory, it is `grpo`.
    * `gdpo`: of the rewards `r_k` one by one, `a_k = (r_k - mean_k) / (std_k + 1e-6)` within the group, their weighted
      sum `s = sum_k weight_k a_k`, then `(s - mean_batch(s)) / (std_batch(s) + 1e-6)`. A reward that does not apply to
      a trajectory is excluded from the group's `mean_k` and `std_k` and adds nothing to `s`. arXiv:2601.05242,
      equations 4 to 6.

    A group of one, or one whose members all have the same return, is degenerate: its advantages are 0 and
    flagged, never NaN. For `reinforce_pp` the baseline is the batch, so group members without spread keep
    their advantage, and only a batch without spread is degenerate. Sums are float64; groups may have any
    size, and their members any order.

    A KL penalty in the return hides that a group has no spread, because rounding alone makes its members differ. With
    `task_rewards` and `rounding`, a group is also degenerate if its task rewards are all equal and no return is further
    from the mean than its rounding.

    Args:
        returns: [N], float or integer.
        group_ids: int64 [N], any numbers.
        estimator: one of `ESTIMATORS`, an `EstimatorFunction`, or the entry of one.
        lengths: [N], the number of assistant tokens of each trajectory; only `opo` needs it.
        task_rewards: [N], the rewards without the penalty; used together with `rounding`.
        rounding: [N], the bound on each return's rounding error; see `penalty_rounding`.
        named: the rewards one by one, for `gdpo` and functions that request them; None takes the returns as the only
            one.
        resolution: a range within a group of at most this part of the largest absolute value is rounding; None takes
            that of the dtype of the returns. `FLOAT32_RESOLUTION` for returns that are sums of stored rewards.

    Returns:
        `(advantages [N], degenerate [N])` as a named tuple.

    Raises:
        DefinitionError: the estimator is unknown, shapes do not fit, a return is not finite, or `opo` lacks
            lengths.

    >>> returns = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0])
    >>> advantages, degenerate = group_advantage(returns, torch.tensor([7, 7, 3, 3, 9]))
    >>> advantages
    tensor([ 0.7071, -0.7071, -0.7071,  0.7071,  0.0000])
    >>> degenerate
    tensor([False, False, False, False,  True])
    """
    entry = estimator_of(estimator)
    if returns.ndim != 1 or group_ids.shape != returns.shape:
        raise DefinitionError(
            f"returns and group_ids must both have shape [N]; got {list(returns.shape)} and {list(group_ids.shape)}."
        )
    if not bool(torch.isfinite(returns).all()):
        bad = int((~torch.isfinite(returns)).nonzero()[0, 0])
        raise DefinitionError(
            f"returns[{bad}] is {returns[bad].item()}; returns must be finite. Check for a reward or a "
            "log-prob that is not finite."
        )
    dtype = returns.dtype if returns.dtype.is_floating_point else torch.float32
    is_exact = not returns.dtype.is_floating_point or returns.dtype == torch.float64
    resolution = resolution or (RELATIVE_SPREAD_FLOOR if is_exact else torch.finfo(returns.dtype).eps)
    returns_N = returns.double()
    if returns_N.numel() == 0:
        return GroupAdvantage(returns.to(dtype), torch.zeros_like(returns, dtype=torch.bool))
    index_N = _numbers(group_ids)
    groups = int(index_N.max()) + 1
    size_G = indexed_sum(torch.ones_like(returns_N), index_N, groups)
    mean_G = indexed_sum(returns_N, index_N, groups) / size_G
    centred_N = returns_N - mean_G[index_N]
    std_G = (indexed_sum(centred_N.square(), index_N, groups) / (size_G - 1).clamp_min(1)).sqrt()
    flat_G = (size_G < 2) | _without_spread(returns_N, index_N, groups, resolution)
    if task_rewards is not None and rounding is not None:
        beyond_G = indexed_sum((centred_N.abs() > rounding.double()).double(), index_N, groups)
        flat_G = flat_G | (_without_spread(task_rewards.double(), index_N, groups, resolution) & (beyond_G == 0))
    if named is None:
        named = NamedRewards(returns_N[:, None], ("task_reward",), (1.0,))
    elif entry.by_reward:
        named = named._replace(rewards=named.rewards.double())
        each_RG = [_without_spread(reward, index_N, groups, resolution) for reward in named.rewards.unbind(1)]
        flat_G = flat_G & (torch.stack(each_RG).all(0) if each_RG else torch.ones_like(flat_G))
    degenerate_N = flat_G[index_N]

    if entry.of_batch:
        batch_N = returns_N - returns_N.mean()
        flat = _without_spread(returns_N, torch.zeros_like(index_N), 1, resolution)[0]
        if task_rewards is not None and rounding is not None:
            flat = flat | ((task_rewards == task_rewards[0]).all() & (batch_N.abs() <= rounding.double()).all())
        degenerate_N = flat.expand_as(degenerate_N)
    advantages_N = entry.advantages(
        Returns(returns_N, index_N, lengths, size_G, centred_N, std_G, degenerate_N, named, resolution)
    )
    return GroupAdvantage(advantages_N.masked_fill(degenerate_N, 0.0).to(dtype), degenerate_N.clone())


def _grpo(returns: Returns) -> torch.Tensor:
    return returns.centred / returns.std.clamp_min(STD_FLOOR)[returns.groups]


def _mean(returns: Returns) -> torch.Tensor:
    return returns.centred


def _rloo(returns: Returns) -> torch.Tensor:
    size_G = returns.size
    return returns.centred * size_G[returns.groups] / (size_G - 1).clamp_min(1)[returns.groups]


def _reinforce_pp(returns: Returns) -> torch.Tensor:
    batch_N = returns.values - returns.values.mean()
    return batch_N / _batch_std(batch_N).clamp_min(STD_FLOOR)


def _reinforce_pp_baseline(returns: Returns) -> torch.Tensor:
    kept_N = returns.centred.masked_fill(returns.degenerate, 0.0)
    return kept_N / _batch_std(kept_N).clamp_min(STD_FLOOR)


def _grpo_batch(returns: Returns) -> torch.Tensor:
    return returns.centred / _batch_std(returns.values - returns.values.mean()).clamp_min(STD_FLOOR)


def _opo(returns: Returns) -> torch.Tensor:
    return returns.values - _length_baseline(returns.values, returns.groups, len(returns.size), returns.lengths)


def _moments(
    reward: torch.Tensor, index: torch.Tensor, groups: int, resolution: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a reward less its group's mean, 0 where it does not apply, and its unbiased spread in each group."""
    there_N = reward.isfinite()
    given_N, count_G = torch.where(there_N, reward, 0.0), indexed_sum(there_N.double(), index, groups)
    mean_G = indexed_sum(given_N, index, groups) / count_G.clamp_min(1)
    centred_N = torch.where(there_N, given_N - mean_G[index], 0.0)
    std_G = (indexed_sum(centred_N.square(), index, groups) / (count_G - 1).clamp_min(1)).sqrt()
    return centred_N, torch.where(_without_spread(reward, index, groups, resolution), 0.0, std_G)


def _gdpo(returns: Returns) -> torch.Tensor:
    total_N, groups, at_N = torch.zeros_like(returns.values), len(returns.size), returns.groups
    for reward_N, weight in zip(returns.named.rewards.unbind(1), returns.named.weights, strict=True):
        centred_N, std_G = _moments(reward_N, at_N, groups, returns.resolution)
        total_N += weight * torch.where(std_G > 0, 1.0, 0.0)[at_N] * centred_N / (std_G + STD_FLOOR)[at_N]
    total_N = total_N.masked_fill(returns.degenerate, 0.0)
    batch_N = total_N - total_N.mean()
    return batch_N / (_batch_std(batch_N) + STD_FLOOR)


ESTIMATORS: Final[Mapping[str, EstimatorEntry]] = {
    "grpo": EstimatorEntry(_grpo),
    "dr_grpo": EstimatorEntry(_mean),
    "mean": EstimatorEntry(_mean),
    "rloo": EstimatorEntry(_rloo),
    "reinforce_pp": EstimatorEntry(_reinforce_pp, by_batch=True, of_batch=True),
    "reinforce_pp_baseline": EstimatorEntry(_reinforce_pp_baseline, by_batch=True),
    "grpo_batch": EstimatorEntry(_grpo_batch, by_batch=True),
    "opo": EstimatorEntry(_opo),
    "turn_grpo": EstimatorEntry(_grpo, by_turn=True),
    "gdpo": EstimatorEntry(_gdpo, by_batch=True, by_reward=True),
}
"""The built-in estimators; `group_advantage` has their formulas."""
BATCH_ESTIMATORS: Final = tuple(name for name, entry in ESTIMATORS.items() if entry.by_batch)
"""Estimators that divide by the spread of a whole batch, so the caller must define the batch."""


def estimator_of(estimator: str | EstimatorFunction | EstimatorEntry) -> EstimatorEntry:
    """Return the entry of an estimator."""
    if isinstance(estimator, EstimatorEntry):
        return estimator
    if callable(estimator):
        return EstimatorEntry(lambda returns: _of_function(estimator, returns), by_reward=bool(_asks_for(estimator)))
    if estimator not in ESTIMATORS:
        raise DefinitionError(f"unknown advantage estimator {estimator!r}.{did_you_mean(estimator, ESTIMATORS)}")
    return ESTIMATORS[estimator]


def check_estimator(estimator: str | EstimatorFunction, rewards: Mapping[str, float] | None = None) -> None:
    """Try a custom estimator on two groups, with these names and weights of rewards."""
    if isinstance(estimator, str):
        return
    returns, lengths = torch.tensor([0.0, 1.0, 3.0, 2.0, 4.0]), torch.tensor([3, 1, 2, 5, 4])
    components = None
    if rewards:
        shifted = torch.stack([returns.double().roll(number) for number in range(len(rewards))], 1)
        components = NamedRewards(shifted, tuple(rewards), tuple(rewards.values()))
    contract = (
        "The function must accept returns [N], groups [N] and lengths ([N] or None), and may also have parameters "
        "named rewards ([N, R]), names and weights. It must return advantages [N]."
    )
    with tried(f"write.estimator {function_name(estimator)}", f"groups of 3 and 2. {contract}"):
        group_advantage(returns, torch.tensor([0, 0, 0, 1, 1]), estimator, lengths=lengths, named=components)


def _asks_for(estimator: EstimatorFunction) -> tuple[str, ...]:
    """Return the fields of `NamedRewards` that a function asks for by name."""
    try:
        parameters = inspect.signature(estimator).parameters
    except (TypeError, ValueError):
        return ()
    return tuple(name for name in NamedRewards._fields if name in parameters)


def _of_function(estimator: EstimatorFunction, returns: Returns) -> torch.Tensor:
    """Return a user's advantages in float64; reject another shape or values that are not finite."""
    name, r, lengths = function_name(estimator), returns.values, returns.lengths
    components = returns.named._replace(rewards=returns.named.rewards.clone())
    advantages: object = estimator(
        r.clone(),
        returns.groups.clone(),
        None if lengths is None else lengths.clone(),
        **{field: getattr(components, field) for field in _asks_for(estimator)},
    )
    if not isinstance(advantages, torch.Tensor) or advantages.shape != r.shape:
        is_tensor = isinstance(advantages, torch.Tensor)
        shape = f"a tensor of shape {list(advantages.shape)}" if is_tensor else type(advantages).__name__
        raise DefinitionError(f"estimator {name} returned {shape}; it must return a tensor of shape [{r.numel()}].")
    if not bool(torch.isfinite(advantages).all()):
        raise DefinitionError(f"estimator {name} returned an advantage that is not finite.")
    return advantages.detach().double()


def _numbers(group_ids: torch.Tensor) -> torch.Tensor:
    """Map group ids to small numbers; ids that are small already are not sorted, which saves time for long rollouts."""
    low, high = group_ids.aminmax()
    if not group_ids.is_floating_point() and int(low) >= 0 and int(high) < group_ids.numel():
        return group_ids.long()
    return torch.unique(group_ids, return_inverse=True)[1]


def _length_baseline(r: torch.Tensor, index: torch.Tensor, groups: int, lengths: torch.Tensor | None) -> torch.Tensor:
    """Return the length-weighted mean return of each member's group; the plain mean if all lengths are 0."""
    if lengths is None or lengths.shape != r.shape:
        shape = "None" if lengths is None else str(list(lengths.shape))
        raise DefinitionError(
            f"the estimator 'opo' weights the returns by completion length: pass lengths of shape [{r.numel()}]; got "
            f"{shape}."
        )
    weight_N = lengths.double()
    total_G = indexed_sum(weight_N, index, groups)
    weight_N = torch.where(total_G[index] > 0, weight_N, torch.ones_like(weight_N))
    total_G = indexed_sum(weight_N, index, groups)
    return indexed_sum(weight_N * r, index, groups)[index] / total_G[index]


def whitened_step_rewards(rewards: torch.Tensor, group_ids: torch.Tensor, lengths: torch.Tensor) -> GroupAdvantage:
    """Normalise the rewards of all steps of a group over these steps: TorchRL's `trajectory_return=None`.

    Args:
        rewards: flat [sum of lengths], the steps of one trajectory after another.
        group_ids: int64 [N].
        lengths: int64 [N], steps per trajectory.

    >>> whitened_step_rewards(torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([4, 4]), torch.tensor([2, 2])).advantages
    tensor([-0.8660,  0.8660, -0.8660,  0.8660])
    """
    if int(lengths.sum()) != rewards.numel() or lengths.shape != group_ids.shape:
        raise DefinitionError(
            f"lengths must have the shape of group_ids, {list(group_ids.shape)}, and must sum to the number of "
            f"rewards, {rewards.numel()}; got shape {list(lengths.shape)} and sum {int(lengths.sum())}."
        )
    return group_advantage(rewards, torch.repeat_interleave(group_ids, lengths), "grpo")


def turn_advantage(
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    turns: torch.Tensor,
    *,
    discount: float = 1.0,
    resolution: float | None = None,
) -> GroupAdvantage:
    """Compute one advantage per turn: turn-level GRPO.

    With `r_il` the reward of turn `l` of trajectory `i`, weighted and selected, and mean and (unbiased) spread over the
    members of its group:

        A_ik = sum over l >= k of discount ** (l - k) * (r_il - mean_l) / max(std_l, 1e-6)

    A member that ended before turn `l` counts there with a reward of 0: it earns nothing more. So a lone success after
    the others have ended raises the mean above them. A member that failed, whose reward is not finite from
    some turn on, leaves mean and spread from that turn on, and its own advantages are 0.

    So a turn answers for itself and for what comes after it, and not for what came before. For two turns that all
    members have, the second with the outcome's reward, it is MT-GRPO: `A_1 = A(turn) + discount * A(outcome)`,
    `A_2 = A(outcome)` (arXiv:2505.11821v1, whose weight of the outcome is `discount`).

    Args:
        rewards: flat [sum of turns], the turns of one trajectory after another; not finite from the turn on in which a
            trajectory failed.
        group_ids: int64 [N].
        turns: int64 [N], turns per trajectory, 0 or more.
        discount: weight of the next turn's advantage, from 0 to 1.
        resolution: see `group_advantage`.

    Returns:
        One advantage per turn, in the dtype of the rewards. It is flagged as degenerate where no member of the group
        differs from another in this turn or a later one, and is then 0.

    Raises:
        DefinitionError: the turns do not add up to the number of rewards, or the discount is out of range.

    >>> rewards = torch.tensor([0.0, 1.0, 2.0, 0.0])  # two trajectories of two turns
    >>> turn_advantage(rewards, torch.tensor([7, 7]), torch.tensor([2, 2]), discount=0.5).advantages
    tensor([-0.3536,  0.7071,  0.3536, -0.7071])
    >>> turn_advantage(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([7, 7]), torch.tensor([1, 2])).advantages
    tensor([-0.7071,  0.7071,  0.7071])
    """
    if int(turns.sum()) != rewards.numel() or turns.shape != group_ids.shape:
        raise DefinitionError(
            f"turns must have the shape of group_ids, {list(group_ids.shape)}, and must sum to the number of rewards, "
            f"{rewards.numel()}; got shape {list(turns.shape)} and sum {int(turns.sum())}."
        )
    if not 0.0 <= discount <= 1.0:
        raise DefinitionError(f"discount is {discount}; it must be between 0 and 1.")
    if not rewards.numel():
        return group_advantage(rewards, rewards.long())
    most = int(turns.max())
    owner = torch.repeat_interleave(turns)
    number = torch.arange(rewards.numel(), device=rewards.device) - (turns.cumsum(0) - turns)[owner]
    earned = torch.zeros(len(turns), most, dtype=torch.float64, device=rewards.device)
    earned[owner, number] = rewards.double()
    counts = earned.isfinite().cumprod(1).bool()  # until it failed
    places = _numbers(group_ids)[:, None] * most + torch.arange(most, device=rewards.device)
    by_turn = group_advantage(earned[counts], places[counts], "grpo", resolution=resolution)
    values, varied = torch.zeros_like(earned), torch.zeros_like(counts)
    values[counts], varied[counts] = by_turn.advantages, ~by_turn.degenerate
    for turn in range(most - 2, -1, -1):
        values[:, turn] += discount * values[:, turn + 1]
        varied[:, turn] |= varied[:, turn + 1]
    failed = ~counts.all(1)
    values[failed], varied[failed] = 0.0, False
    dtype = rewards.dtype if rewards.dtype.is_floating_point else torch.float32
    return GroupAdvantage(values[owner, number].to(dtype), ~varied[owner, number])
