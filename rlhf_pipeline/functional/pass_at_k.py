"""Figures of an evaluation: the mean over prompts with an interval, and pass@k. Pure functions of NumPy arrays."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def mean_interval(per_prompt: npt.NDArray[np.floating]) -> tuple[float, float | None, float | None]:
    """Return the mean over prompts and its 95 % confidence interval, `mean -+ 1.96 s / sqrt(n)`.

    Prompts are the independent units, not completions: completions of one prompt are not independent.

    Args:
        per_prompt: float [n], the mean of each prompt; n is at least 1.

    >>> mean_interval(np.array([0.0, 1.0, 1.0, 0.0]))[0]
    0.5
    """
    mean = float(np.mean(per_prompt, dtype=np.float64))
    if len(per_prompt) < 2:
        return mean, None, None
    half = 1.959963984540054 * float(np.std(per_prompt, ddof=1, dtype=np.float64)) / math.sqrt(len(per_prompt))
    return mean, mean - half, mean + half


def pass_at_k(counts: npt.NDArray[np.integer], successes: npt.NDArray[np.integer], k: int) -> float | None:
    """Return the unbiased estimate of the share of prompts that one of `k` completions solves.

    For a prompt with `n` completions of which `c` are right it is `1 - C(n - c, k) / C(n, k)`; the mean is over prompts
    with at least `k`. Source: arXiv:2107.03374, equation 1.

    >>> pass_at_k(np.array([4, 4]), np.array([1, 0]), 2)
    0.25
    """
    pairs = [(int(n), int(c)) for n, c in zip(counts, successes, strict=True) if n >= k]
    if not pairs:
        return None
    return math.fsum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in pairs) / len(pairs)
