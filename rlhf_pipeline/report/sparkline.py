"""A curve in one line of text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII = "_.-=+*%#"


def sparkline(values: Sequence[float], *, width: int = 20, ascii_only: bool = False) -> str:
    """Return one character per value, fuller for higher values; more values than `width` are averaged in buckets.

    Args:
        values: in order, finite.
        width: the most characters.
        ascii_only: use ASCII, for terminals without Unicode.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], ascii_only=True)
    '_.-=+*%#'
    """
    num = min(len(values), width)
    edges = [place * len(values) // num for place in range(num + 1)] if num else []
    means = [sum(values[start:stop]) / (stop - start) for start, stop in itertools.pairwise(edges)]
    bottom = min(means, default=0.0)
    span = max(means, default=0.0) - bottom
    blocks = _ASCII if ascii_only else _BLOCKS
    return "".join(blocks[round((mean - bottom) / span * (len(blocks) - 1)) if span else 0] for mean in means)
