"""How a model turns the output of its head into logits, measured: one factor and a soft cap.

Fields of the same name mean different things: Granite divides by `logits_scaling`, and HyperCLOVAX multiplies by it. So
the map is fitted to the model's own logits, over hidden states from quiet ones to some that reach any cap. The values
of a config only make the fit exact: a factor of 0.2500001 is the 1/4 of a config that contains a 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LEVELS", "LogitMap", "fitted_map", "numbers_of"]

LEVELS = (1.0, 60.0, 1e6)
"""The largest logits, before factor and cap, of the hidden states that a map is fitted to: nearly linear under any cap;
as large as logits become; far beyond any cap."""
_LINEAR_PART = 0.5
"""Logits below this part of a cap determine the factor: the inverse of tanh is accurate there."""


class LogitMap(NamedTuple):
    """Logits are `scale * (hidden @ weight.T) + bias`, then capped.

    Attributes:
        scale: 1.0 for most models.
        soft_cap: logits `z` become `soft_cap * tanh(z / soft_cap)`; None for most models.
    """

    scale: float = 1.0
    soft_cap: float | None = None


def fitted_map(
    linear: Sequence[Tensor], logits: Sequence[Tensor], bias: Tensor | None, *, numbers: Iterable[float], exact: float
) -> LogitMap:
    """Return the map from the head's output to a model's own logits.

    Args:
        linear: `hidden @ weight.T` at each of `LEVELS`, `[N, V]` each.
        logits: the model's own, `[N, V]` each.
        bias: of the head, `[V]`, or None.
        numbers: what the config contains; a number, or its reciprocal, that is close to a fitted value replaces it.
        exact: how close, relative to the value.

    >>> linear = [level * torch.tensor([[0.1, -1.0, 0.5]]) for level in LEVELS]
    >>> logits = [30 * torch.tanh(level / 4 / 30) for level in linear]
    >>> fitted_map(linear, logits, None, numbers=[4, 30.0], exact=1e-5)
    LogitMap(scale=0.25, soft_cap=30.0)
    """
    offset = 0.0 if bias is None else bias.double()
    numbers = [*numbers]
    finite = [
        level_linear.isfinite() & level_logits.isfinite()
        for level_linear, level_logits in zip(linear, logits, strict=True)
    ]
    linear = [level.double().where(mask, 0.0) for level, mask in zip(linear, finite, strict=True)]
    logits = [level.double().where(mask, 0.0) for level, mask in zip(logits, finite, strict=True)]
    largest, uncapped = float(logits[-1].abs().max()), _factor(linear[:1], [logits[0] - offset])
    cap = None
    if 0 < largest < 0.5 * abs(uncapped) * float(linear[-1].abs().max()):
        cap = _nearest(largest, numbers, exact)
        near_linear = [level.abs() < _LINEAR_PART * cap for level in logits]
        logits = [cap * torch.atanh(level.where(at, 0.0) / cap) for level, at in zip(logits, near_linear, strict=True)]
        finite = [mask & is_near for mask, is_near in zip(finite, near_linear, strict=True)]
    linear = [level.where(at, 0.0) for level, at in zip(linear, finite, strict=True)]
    logits = [(level - offset).where(at, 0.0) for level, at in zip(logits, finite, strict=True)]
    return LogitMap(_nearest(_factor(linear, logits), [1.0, *numbers], exact), cap)


def numbers_of(values: object) -> list[float]:
    """Return the finite numbers other than 0 in a config, those of its parts included.

    >>> numbers_of({"a": 4, "b": {"c": [0.5, "x"]}, "d": True, "e": 0})
    [4.0, 0.5]
    """
    if isinstance(values, bool):
        return []
    if isinstance(values, int | float):
        return [float(values)] if values and math.isfinite(values) else []
    if isinstance(values, dict):
        values = [*values.values()]
    return [number for part in values for number in numbers_of(part)] if isinstance(values, list | tuple) else []


def _factor(linear: Sequence[Tensor], logits: Sequence[Tensor]) -> float:
    """Return the factor between two lists of tensors by least squares; 1.0 if the first are zero."""
    size = sum(float(level.square().sum()) for level in linear)
    return sum(float((x * y).sum()) for x, y in zip(linear, logits, strict=True)) / size if size else 1.0


def _nearest(value: float, numbers: list[float], exact: float) -> float:
    candidates = [*numbers, *(1 / number for number in numbers)]
    near = [number for number in candidates if abs(value - number) <= exact * abs(number)]
    return min(near, key=lambda number: abs(value - number), default=value)
