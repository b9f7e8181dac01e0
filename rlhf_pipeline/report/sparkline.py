"""A curve in one line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII = "_.-=+*%#"


def sparkline(values: Sequence[float | None], *, width: int = 20, ascii_only: bool = False) -> str:
    """Return `values` as one character each, higher is fuller; more values than `width` are averaged in buckets.

    Args:
        values: in order; None and NaN leave a gap.
        width: characters at most.
        ascii_only: use ASCII, for terminals that show nothing else.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], ascii_only=True)
    '_.-=+*%#'
    >>> sparkline([1, None, 1], ascii_only=True)
    '_ _'
    """
    buckets = _shrink([math.nan if value is None else float(value) for value in values], width)
    known = [value for value in buckets if math.isfinite(value)]
    if not known:
        return " " * len(buckets)
    bottom = min(known)
    span = max(known) - bottom
    blocks = _ASCII if ascii_only else _BLOCKS
    top = len(blocks) - 1

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        level = round((value - bottom) / span * top) if span > 0 else 0
        return blocks[level]

    return "".join(map(block, buckets))


def _shrink(values: list[float], width: int) -> list[float]:
    """Average neighbours so that at most `width` values are left."""
    if len(values) <= width:
        return values
    edges = [index * len(values) // width for index in range(width + 1)]
    return [_mean(values[start:stop]) for start, stop in itertools.pairwise(edges)]


def _mean(values: list[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
