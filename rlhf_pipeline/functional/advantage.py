"""Group-relative advantages over ragged groups, without a loop over groups."""

from __future__ import annotations

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
    "Returns",
    "checked_estimator",
    "estimator_of",
    "group_advantage",
    "penalty_rounding",
    "turn_advantage",
    "whitened_step_rewards",
]

STD_FLOOR: Final = 1e-6
"""The smallest divisor, as in TorchRL."""

RELATIVE_SPREAD_FLOOR: Final = 1e-12
"""A spread below this part of the group's mean absolute return is rounding, not signal (float64 sums)."""


EstimatorFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""An estimator: `(returns float64 [N], groups int64 [N], lengths [N] or None) -> advantages [N]`, finite.

The members of a group have its number, from 0, and may come in any order; advantages of groups without spread are set
to 0 afterwards. It sees whole groups, and one of your own must not depend on which of them come in one call.
"""


class Returns(NamedTuple):
    """What estimators see: the returns of whole groups, and their moments.

    Attributes:
        values: float64 [N].
        groups: int64 [N], the number of each one's group, from 0.
        lengths: [N] or None, assistant tokens.
        size: float64 [groups], members.
        centred: float64 [N], values less the mean of their group.
        std: float64 [groups], unbiased.
        degenerate: bool [N].
    """

    values: torch.Tensor
    groups: torch.Tensor
    lengths: torch.Tensor | None
    size: torch.Tensor
    centred: torch.Tensor
    std: torch.Tensor
    degenerate: torch.Tensor


class EstimatorEntry(NamedTuple):
    """An estimator as `group_advantage` calls it.

    Attributes:
        advantages: float64 [N]; those of degenerate members are set to 0 afterwards.
        by_batch: it divides by the spread of a whole batch, so the caller must define the batch.
        of_batch: its baseline is the batch, so only a batch without spread is degenerate.
        by_turn: it compares turns, see `turn_advantage`; of one number per trajectory it makes one turn.
    """

    advantages: Callable[[Returns], torch.Tensor]
    by_batch: bool = False
    of_batch: bool = False
    by_turn: bool = False


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
    largest = torch.segment_reduce(sizes, "max", lengths=rows, initial=0.0)
    penalty = 8.0 * eps * coef.double() * lengths.double() * largest
    return penalty + 2.0 * torch.finfo(torch.float32).eps * task_rewards.double().abs()


def _all_equal(values: torch.Tensor, index: torch.Tensor, groups: int) -> torch.Tensor:
    """Return whether all values of each group are equal; bool [groups]."""
    low = values.new_full((groups,), float("inf")).scatter_reduce(0, index, values, "amin")
    high = values.new_full((groups,), float("-inf")).scatter_reduce(0, index, values, "amax")
    return low == high


def group_advantage(
    returns: torch.Tensor,
    group_ids: torch.Tensor,
    estimator: str | EstimatorFunction = "grpo",
    *,
    lengths: torch.Tensor | None = None,
    task_rewards: torch.Tensor | None = None,
    rounding: torch.Tensor | None = None,
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
        estimator: one of `ESTIMATORS`, or an `EstimatorFunction`.
        lengths: [N], the number of assistant tokens of each trajectory; only `opo` needs it.
        task_rewards: [N], the rewards without the penalty; used together with `rounding`.
        rounding: [N], the bound on each return's rounding error; see `penalty_rounding`.

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
            f"returns and group_ids must both be [N]; got {list(returns.shape)} and {list(group_ids.shape)}."
        )
    if not bool(torch.isfinite(returns).all()):
        bad = int((~torch.isfinite(returns)).nonzero()[0, 0])
        raise DefinitionError(
            f"return {bad} is {returns[bad].item()}; an advantage needs finite returns. "
            "Look for a reward function or a log-prob that is not finite."
        )
    dtype = returns.dtype if returns.dtype.is_floating_point else torch.float32
    r = returns.double()
    if r.numel() == 0:
        return GroupAdvantage(returns.to(dtype), torch.zeros_like(returns, dtype=torch.bool))
    index = _numbers(group_ids)
    groups = int(index.max()) + 1
    size = indexed_sum(torch.ones_like(r), index, groups)  # per group, as are mean, std and scale
    mean = indexed_sum(r, index, groups) / size
    centred = r - mean[index]
    std = (indexed_sum(centred.square(), index, groups) / (size - 1).clamp_min(1)).sqrt()
    scale = indexed_sum(r.abs(), index, groups) / size
    flat = (size < 2) | (std <= RELATIVE_SPREAD_FLOOR * scale)
    if task_rewards is not None and rounding is not None:
        beyond = indexed_sum((centred.abs() > rounding.double()).double(), index, groups)
        flat = flat | (_all_equal(task_rewards.double(), index, groups) & (beyond == 0))
    degenerate = flat[index]

    if entry.of_batch:
        batch = r - r.mean()
        spread = _batch_std(batch)
        flat = spread <= RELATIVE_SPREAD_FLOOR * r.abs().amax()
        if task_rewards is not None and rounding is not None:
            flat = flat | ((task_rewards == task_rewards[0]).all() & (batch.abs() <= rounding.double()).all())
        degenerate = flat.expand_as(degenerate)
    advantages = entry.advantages(Returns(r, index, lengths, size, centred, std, degenerate))
    return GroupAdvantage(advantages.masked_fill(degenerate, 0.0).to(dtype), degenerate.clone())


def _grpo(found: Returns) -> torch.Tensor:
    return found.centred / found.std.clamp_min(STD_FLOOR)[found.groups]


def _mean(found: Returns) -> torch.Tensor:
    return found.centred


def _rloo(found: Returns) -> torch.Tensor:
    size = found.size
    return found.centred * size[found.groups] / (size - 1).clamp_min(1)[found.groups]


def _reinforce_pp(found: Returns) -> torch.Tensor:
    batch = found.values - found.values.mean()
    return batch / _batch_std(batch).clamp_min(STD_FLOOR)


def _reinforce_pp_baseline(found: Returns) -> torch.Tensor:
    kept = found.centred.masked_fill(found.degenerate, 0.0)
    return kept / _batch_std(kept).clamp_min(STD_FLOOR)


def _grpo_batch(found: Returns) -> torch.Tensor:
    return found.centred / _batch_std(found.values - found.values.mean()).clamp_min(STD_FLOOR)


def _opo(found: Returns) -> torch.Tensor:
    return found.values - _length_baseline(found.values, found.groups, len(found.size), found.lengths)


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
}
"""The built-in estimators; `group_advantage` has their formulas."""
BATCH_ESTIMATORS: Final = tuple(name for name, entry in ESTIMATORS.items() if entry.by_batch)
"""Estimators that divide by the spread of a whole batch, so the caller must define the batch."""


def estimator_of(estimator: str | EstimatorFunction) -> EstimatorEntry:
    """Return the entry of an estimator."""
    if callable(estimator):
        return EstimatorEntry(lambda found: _of_function(estimator, found))
    if estimator not in ESTIMATORS:
        raise DefinitionError(f"unknown advantage estimator {estimator!r}.{did_you_mean(estimator, ESTIMATORS)}")
    return ESTIMATORS[estimator]


def checked_estimator(estimator: str | EstimatorFunction) -> str | EstimatorFunction:
    """Return an estimator; a function of one's own is tried on two groups first."""
    if isinstance(estimator, str):
        return estimator
    returns, lengths = torch.tensor([0.0, 1.0, 3.0, 2.0, 4.0]), torch.tensor([3, 1, 2, 5, 4])
    contract = "It takes returns [N], groups [N] and lengths [N] or None, and returns advantages [N]."
    with tried(f"write.estimator {function_name(estimator)}", f"groups of 3 and 2. {contract}"):
        group_advantage(returns, torch.tensor([0, 0, 0, 1, 1]), estimator, lengths=lengths)
    return estimator


def _of_function(estimator: EstimatorFunction, returns: Returns) -> torch.Tensor:
    """Return a user's advantages in float64; refuse another shape or values that are not finite."""
    name, r, lengths = function_name(estimator), returns.values, returns.lengths
    found: object = estimator(r.clone(), returns.groups.clone(), None if lengths is None else lengths.clone())
    if not isinstance(found, torch.Tensor) or found.shape != r.shape:
        seen = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise DefinitionError(f"estimator {name} returned {seen}; it must return a tensor [{r.numel()}].")
    if not bool(torch.isfinite(found).all()):
        raise DefinitionError(f"estimator {name} returned an advantage that is not finite.")
    return found.detach().double()


def _numbers(group_ids: torch.Tensor) -> torch.Tensor:
    """Map group ids to small numbers; ids that are small already are not sorted, which saves time for long rollouts."""
    low, high = group_ids.aminmax()
    if not group_ids.is_floating_point() and int(low) >= 0 and int(high) < group_ids.numel():
        return group_ids.long()
    return torch.unique(group_ids, return_inverse=True)[1]


def _length_baseline(r: torch.Tensor, index: torch.Tensor, groups: int, lengths: torch.Tensor | None) -> torch.Tensor:
    """Return the length-weighted mean return of each member's group; the plain mean if all lengths are 0."""
    if lengths is None or lengths.shape != r.shape:
        seen = "None" if lengths is None else str(list(lengths.shape))
        raise DefinitionError(
            f"estimator 'opo' weighs returns by completion length: pass lengths [{r.numel()}]; got {seen}."
        )
    weight = lengths.double()
    total = indexed_sum(weight, index, groups)[index]
    weight = torch.where(total > 0, weight, torch.ones_like(weight))
    total = indexed_sum(weight, index, groups)[index]
    return indexed_sum(weight * r, index, groups)[index] / total


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
            f"lengths {list(lengths.shape)} add up to {int(lengths.sum())}, group_ids is "
            f"{list(group_ids.shape)} and there are {rewards.numel()} rewards."
        )
    return group_advantage(rewards, torch.repeat_interleave(group_ids, lengths), "grpo")


def turn_advantage(
    rewards: torch.Tensor, group_ids: torch.Tensor, turns: torch.Tensor, *, discount: float = 1.0
) -> GroupAdvantage:
    """Compute one advantage per turn: turn-level GRPO.

    With `r_ik` the reward of turn `k` of trajectory `i`, and mean and (unbiased) spread over the members of its group
    that have a turn `k`:

        A_ik = sum over l >= k of discount ** (l - k) * (r_il - mean_l) / max(std_l, 1e-6)

    So a turn answers for itself and for what comes after it, and not for what came before. For two turns, the second
    with the outcome's reward, it is MT-GRPO: `A_1 = A(turn) + discount * A(outcome)`, `A_2 = A(outcome)`
    (arXiv:2505.11821v1, whose weight of the outcome is `discount`).

    Args:
        rewards: flat [sum of turns], the turns of one trajectory after another.
        group_ids: int64 [N].
        turns: int64 [N], turns per trajectory, 0 or more.
        discount: weight of the next turn's advantage, from 0 to 1.

    Returns:
        One advantage per turn, in the dtype of the rewards. It is flagged as degenerate where no member of the group
        differs from another in this turn or a later one, and is then 0.

    Raises:
        DefinitionError: the turns do not add up to the number of rewards, a reward is not finite, or the discount is
            out of range.

    >>> rewards = torch.tensor([0.0, 1.0, 2.0, 0.0])  # two trajectories of two turns
    >>> turn_advantage(rewards, torch.tensor([7, 7]), torch.tensor([2, 2]), discount=0.5).advantages
    tensor([-0.3536,  0.7071,  0.3536, -0.7071])
    """
    if int(turns.sum()) != rewards.numel() or turns.shape != group_ids.shape:
        raise DefinitionError(
            f"turns {list(turns.shape)} add up to {int(turns.sum())}, group_ids is {list(group_ids.shape)} and there "
            f"are {rewards.numel()} rewards."
        )
    if not 0.0 <= discount <= 1.0:
        raise DefinitionError(f"discount is {discount}; it must be between 0 and 1.")
    if not rewards.numel():
        return group_advantage(rewards, rewards.long())
    most = int(turns.max())
    owner = torch.repeat_interleave(turns)
    number = torch.arange(rewards.numel(), device=rewards.device) - (turns.cumsum(0) - turns)[owner]
    own = group_advantage(rewards, _numbers(group_ids)[owner] * most + number, "grpo")
    values = torch.zeros(len(turns), most, dtype=torch.float64, device=rewards.device)
    varied = torch.zeros(len(turns), most, dtype=torch.bool, device=rewards.device)
    values[owner, number], varied[owner, number] = own.advantages.double(), ~own.degenerate
    for turn in range(most - 2, -1, -1):
        values[:, turn] += discount * values[:, turn + 1]
        varied[:, turn] |= varied[:, turn + 1]
    return GroupAdvantage(values[owner, number].to(own.advantages.dtype), ~varied[owner, number])
