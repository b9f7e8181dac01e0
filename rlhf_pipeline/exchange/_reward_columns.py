"""The reward of a row: a field, or a weighted sum of fields, that the format or the user names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError, did_you_mean
from rlhf_pipeline.exchange._completion import as_reward, shown

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


def question(columns: Sequence[str]) -> DefinitionError:
    """Return the error that asks which of several columns is the reward."""
    example = f"--field reward={columns[0]} or --field reward={columns[0]}+0.5*{columns[1]}"
    return DefinitionError(
        f"which columns are the rewards? The columns of numbers are {', '.join(columns)}. Name one or a sum, with the "
        f"training's weights: {example}"
    )
