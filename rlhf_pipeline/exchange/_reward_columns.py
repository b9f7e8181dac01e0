"""Which columns of a table are its rewards: named, or inferred from its advantages, and never guessed."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.errors import DataError, DefinitionError, did_you_mean
from rlhf_pipeline.exchange._completion import as_reward, shown

Array = npt.NDArray[np.float64]

MOST_COLUMNS = 10
"""Up to this many columns are tried in all their sums; with more, the user is asked."""
_TOLERANCE = 1e-3
"""Of the largest advantage of a step: advantages are float32, and some trainers compute in bfloat16."""
_ROUNDING = 1e-6
"""Of a group's rewards: a smaller deviation is none."""
_EPSILON = 1e-4
"""What trainers add to a standard deviation before they divide by it; a smaller advantage is none."""
_TERM = re.compile(r"\s*(?:(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*\*\s*)?(.+?)\s*\Z")


@dataclass(frozen=True, slots=True)
class RewardTerms:
    """The task reward as a weighted sum of fields; a field without a value does not count.

    >>> row = {"accuracy": 1.0, "format": 2.0}
    >>> RewardTerms.parse("accuracy+0.5*format", row).of(row.get)
    2.0
    """

    weights: Mapping[str, float]

    @classmethod
    def parse(cls, text: str, row: Mapping[str, Any]) -> RewardTerms:
        """Return what `NAME`, `A+B` or `A+0.5*B` says; a field whose name holds a sign is meant by its whole name.

        Raises:
            DefinitionError: a field is not in the row, or a weight is not a finite number.
        """
        if text in row:
            return cls({text: 1.0})
        weights: dict[str, float] = {}
        for part in text.split("+"):
            found = _TERM.match(part)
            weight, name = (1.0, part.strip()) if found is None else (float(found[1] or 1), found[2])
            if name not in row:
                raise DefinitionError(
                    f"--field reward={text}: the rows have no field '{name}'." + did_you_mean(name, map(str, row))
                )
            if not math.isfinite(weight):
                raise DefinitionError(f"--field reward={text}: the weight of '{name}' must be finite.")
            weights[name] = weights.get(name, 0.0) + weight
        return cls(weights)

    def of(self, value_of: Callable[[str], Any], *, per_token: bool = False) -> float:
        """Return the reward of a row; NaN where no field has a value.

        Args:
            value_of: gives the value of a field.
            per_token: the tool writes lists of rewards per token, which are summed.

        Raises:
            DataError: a value is not a finite number.
        """
        values = [(weight, _one(value_of(name), name, per_token)) for name, weight in self.weights.items()]
        known = [weight * value for weight, value in values if value == value]
        return as_reward(sum(known), str(self)) if known else math.nan

    def __str__(self) -> str:
        return "+".join(name if weight == 1 else f"{weight:g}*{name}" for name, weight in self.weights.items())


def _one(value: Any, name: str, per_token: bool) -> float:
    if not isinstance(value, list):
        return as_reward(value, name)
    values = [as_reward(item, name) for item in value]
    if per_token or len(values) == 1:
        return as_reward(sum(values), name) if values else math.nan
    raise DataError(
        f"field '{name}' must be one reward, got {len(values)} for one completion: {shown(value)}. Give the row one "
        "completion per reward, or one reward."
    )


@dataclass(slots=True)
class AdvantageCheck:
    """Finds out which sums of columns the advantages of a table follow from.

    The rows of a step are whole groups in turn. Their advantages follow from a reward if they are what GRPO makes of
    it: the reward less the mean of its group, times one factor for the whole step (TRL's `scale_rewards` none and
    batch) or over the group's own deviation (group), or the columns normalised in their groups and then summed
    (`multi_objective_aggregation="normalize_then_sum"`). Groups in which a member has no reward tell nothing.

    Args:
        columns: the columns that may be rewards, `k` of them.
        weights: `[c, k]` the sums that are tried.
    """

    columns: Sequence[str]
    weights: Array
    told: bool = False
    """Whether some advantage is not 0, so that the advantages tell something."""
    _fits: npt.NDArray[np.bool_] = field(init=False)
    _seen: npt.NDArray[np.bool_] = field(init=False)
    _prints: Array = field(init=False)
    _num_rows: int = 0

    def __post_init__(self) -> None:
        self._fits = np.ones((len(self.weights), 4), bool)
        self._seen = np.zeros(len(self.weights), bool)
        self._prints = np.zeros(len(self.weights))

    def add(self, values: Array, prompts: Sequence[Any], advantages: Array) -> None:
        """Add the rows of one step.

        Args:
            values: `[n, k]`, NaN where a function gave nothing.
            prompts: `n` prompts; rows in turn with equal ones are one group or several.
            advantages: `[n]`.
        """
        self.told |= bool(np.any(np.nan_to_num(advantages))) and _group_size(prompts) > 1
        draws = np.random.default_rng(self._num_rows).standard_normal(len(values))
        self._num_rows += len(values)
        alive = np.flatnonzero(self._fits.any(axis=1))
        if not len(alive):
            return
        weights = self.weights[alive]
        rewards = _weighted(values, weights)
        self._prints[alive] += np.nan_to_num(rewards, nan=1e3) @ draws
        size = _group_size(prompts)
        if size < 2:
            return
        wanted = np.nan_to_num(advantages).reshape(-1, size)
        groups = rewards.reshape(len(rewards), -1, size)
        whole = ~np.any(np.isnan(groups), axis=-1)
        self._seen[alive] |= np.any(whole & np.any(wanted, axis=-1), axis=-1)
        centred = groups - _mean(groups)
        deviation = _deviation(groups)
        each = values.T.reshape(values.shape[1], -1, size)
        each = (each - _mean(each)) / (_deviation(each) + _EPSILON)
        summed = _weighted(each.reshape(len(each), -1).T, weights).reshape(groups.shape)
        level = deviation <= _ROUNDING * np.maximum(np.abs(_mean(groups)), _EPSILON)
        plain = np.where(level, 0.0, centred / np.where(level, 1.0, deviation))
        shapes = (centred / (deviation + _EPSILON), plain, centred, summed)
        for place, shape in enumerate(shapes):
            self._fits[alive, place] &= _proportional(wanted, shape, whole, shifted=shape is summed)

    def fitting(self) -> list[RewardTerms]:
        """Return the sums that all advantages follow from, small ones first, equal ones once.

        All of them where no advantage tells anything.
        """
        found: dict[float, RewardTerms] = {}
        fitting = self._fits.any(1) & (self._seen | (not self.told))
        for weights, fits, mark in zip(self.weights, fitting, self._prints, strict=True):
            if fits:
                terms = {name: float(w) for name, w in zip(self.columns, weights, strict=True) if w}
                found.setdefault(round(float(mark), 6), RewardTerms(terms))
        return list(found.values())


def weighted(scores: Array, weights: Array) -> Array:
    """Return the weighted sum of `[n, functions]` rewards as TRL forms it: NaN counts as 0, unless all are NaN.

    >>> weighted(np.array([[1.0, np.nan], [np.nan, np.nan]]), np.array([2.0, 1.0])).tolist()
    [2.0, nan]
    """
    total = np.nansum(scores * weights, axis=1)
    total[np.isnan(scores).all(axis=1)] = np.nan
    return total


def all_sums(num: int) -> Array:
    """Return `[2^num - 1, num]` weights: every sum of some of `num` columns, those of few columns first."""
    picks = [pick for size in range(1, num + 1) for pick in itertools.combinations(range(num), size)]
    made = np.zeros((len(picks), num))
    for row, pick in enumerate(picks):
        made[row, list(pick)] = 1.0
    return made


def question(columns: Iterable[str], fitting: Sequence[RewardTerms], *, told: bool, tried: bool) -> DefinitionError:
    """Return the error that asks for the rewards of a table."""
    names = list(columns)
    if not tried:
        why = f"There are too many to infer them from its advantages (at most {MOST_COLUMNS})."
    elif not told:
        why = "It has no advantages to infer them from."
    elif fitting:
        some = [str(terms) for terms in fitting[:3]]
        more = f" and {len(fitting) - 3} more sums" if len(fitting) > 3 else ""
        why = f"Its advantages follow from {', '.join(some)}{more} alike."
    else:
        why = "No plain sum of them explains its advantages; perhaps the training weighted its rewards."
    example = f"--field reward={names[0]}" + (f" or --field reward={names[0]}+0.5*{names[1]}" if names[1:] else "")
    return DefinitionError(
        f"which columns are the rewards? The columns of numbers are {', '.join(names)}. {why} Name one or a sum, with "
        f"the training's weights: {example}"
    )


def contradiction(terms: RewardTerms, fitting: Sequence[RewardTerms]) -> DefinitionError:
    """Return the error that says that a table's advantages are not of the rewards that were named."""
    better = f"; they follow from {fitting[0]}" if len(fitting) == 1 else ""
    return DefinitionError(
        f"the advantages of this table do not follow from reward={terms}{better}. Name the rewards that the training "
        "used, with their weights (--field reward=A+0.5*B), or leave the advantages out, so that they are computed "
        "from the reward when the store is learned from: --field advantage=none"
    )


def _weighted(values: Array, weights: Array) -> Array:
    """Return `[c, n]` sums of `[n, k]` values; NaN where none of a sum's columns has a value."""
    known = ~np.isnan(values)
    total = weights @ np.where(known, values, 0.0).T
    total[((weights != 0).astype(float) @ known.T) == 0] = np.nan
    return total


def _mean(values: Array) -> Array:
    known = ~np.isnan(values)
    return np.where(known, values, 0.0).sum(-1, keepdims=True) / np.maximum(known.sum(-1, keepdims=True), 1)


def _deviation(values: Array) -> Array:
    apart = values - _mean(values)
    num = (~np.isnan(values)).sum(-1, keepdims=True)
    return np.sqrt(np.nansum(apart * apart, -1, keepdims=True) / np.maximum(num - 1, 1))


def _proportional(wanted: Array, shape: Array, whole: Any, *, shifted: bool) -> npt.NDArray[np.bool_]:
    """Return for which of `[c, g, size]` shapes the wanted `[g, size]` is a positive multiple (of it less its mean)."""
    found = np.ones(len(shape), bool)
    for i, (values, kept) in enumerate(zip(shape, whole, strict=True)):
        a, b = wanted[kept].ravel(), values[kept].ravel()
        if not len(a):
            continue
        if shifted:
            a, b = a - a.mean(), b - b.mean()
        power = float(b @ b)
        scale = float(a @ b) / power if power > 0 else 0.0
        allowed = _TOLERANCE * max(float(np.abs(a).max()), _EPSILON)
        found[i] = float(np.abs(b * scale - a).max()) <= allowed and (scale > 0 or not a.any())
    return found


def _group_size(prompts: Sequence[Any]) -> int:
    """Return the size of a step's groups: what divides the length of every run of equal prompts."""
    starts = [i for i in range(len(prompts)) if i == 0 or prompts[i] != prompts[i - 1]]
    return math.gcd(*(end - start for start, end in zip(starts, [*starts[1:], len(prompts)], strict=True)))
