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


@dataclass(frozen=True, slots=True)
class Step:
    """The numbers of a table's rows of one step, which are whole groups in turn."""

    prompts: list[Any] = field(default_factory=list[Any])
    """Rows in turn with equal ones are one group or several."""
    advantages: list[float] = field(default_factory=list[float])
    rows: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """By column; NaN where a function gave nothing."""


def explaining(steps: Sequence[Step], columns: Sequence[str], weights: Array) -> list[RewardTerms] | None:
    """Return the sums of columns that the advantages of a table follow from, small ones first, equal ones once.

    They follow from a reward if they are what GRPO makes of it: the reward less the mean of its group, times one factor
    for the whole step (TRL's `scale_rewards` none and batch) or over the group's own deviation (group), or the columns
    normalised in their groups and then summed (`multi_objective_aggregation="normalize_then_sum"`). Groups in which a
    member has no reward tell nothing.

    Args:
        steps: the table.
        columns: those that may be rewards, `k` of them.
        weights: `[c, k]` the sums that are tried.

    Returns:
        None where no advantage tells anything: all are 0, or alone in their group.
    """
    sizes = [_group_size(step.prompts) for step in steps]
    if not any(size > 1 and np.any(np.nan_to_num(s.advantages)) for s, size in zip(steps, sizes, strict=True)):
        return None
    fits = np.ones((len(weights), 4), bool)
    seen = np.zeros(len(weights), bool)
    prints = np.zeros(len(weights))
    for number, (step, size) in enumerate(zip(steps, sizes, strict=True)):
        alive = np.flatnonzero(fits.any(axis=1))
        if not len(alive):
            break
        values = np.array([[row.get(name, math.nan) for name in columns] for row in step.rows])
        rewards = _weighted(values, weights[alive])
        prints[alive] += np.nan_to_num(rewards, nan=1e3) @ np.random.default_rng(number).standard_normal(len(values))
        if size < 2:
            continue
        wanted = np.nan_to_num(step.advantages).reshape(-1, size)
        groups = rewards.reshape(len(rewards), -1, size)
        whole = ~np.any(np.isnan(groups), axis=-1)
        seen[alive] |= np.any(whole & np.any(wanted, axis=-1), axis=-1)
        centred, deviation = groups - _mean(groups), _deviation(groups)
        each = values.T.reshape(values.shape[1], -1, size)
        each = (each - _mean(each)) / (_deviation(each) + _EPSILON)
        summed = _weighted(each.reshape(len(each), -1).T, weights[alive]).reshape(groups.shape)
        level = deviation <= _ROUNDING * np.maximum(np.abs(_mean(groups)), _EPSILON)
        plain = np.where(level, 0.0, centred / np.where(level, 1.0, deviation))
        shapes = (centred / (deviation + _EPSILON), plain, centred, summed)
        for place, shape in enumerate(shapes):
            fits[alive, place] &= _proportional(wanted, shape, whole, shifted=shape is summed)
    found: dict[float, RewardTerms] = {}
    for at in np.flatnonzero(fits.any(axis=1) & seen).tolist():
        terms = {name: float(weight) for name, weight in zip(columns, weights[at], strict=True) if weight}
        found.setdefault(round(float(prints[at]), 6), RewardTerms(terms))
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


def question(columns: Iterable[str], fitting: Sequence[RewardTerms] | None, *, tried: bool) -> DefinitionError:
    """Return the error that asks for the rewards of a table; `fitting` is what `explaining` found."""
    names = list(columns)
    if not tried:
        why = f"There are too many to infer them from its advantages (at most {MOST_COLUMNS})."
    elif fitting is None:
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
