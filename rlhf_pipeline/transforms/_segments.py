"""Sums and positions within the rows of a flat column, faster than `torch.segment_reduce` on a CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlhf_pipeline.errors import DataError


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum of each row in float64.

    Args:
        values: flat, any number of elements per position; `lengths` counts elements.
        lengths: int64 `[n]`; a row without elements sums to 0.

    Returns:
        float64 `[n]`.

    >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 1])).tolist()
    [3.0, 0.0, 4.0]
    """
    flat = values.detach().reshape(-1).to(torch.float64).numpy()
    counts = lengths.numpy()
    filled = counts > 0
    out = np.zeros(len(counts))
    if filled.any():
        starts = np.cumsum(counts) - counts
        out[filled] = np.add.reduceat(flat, starts[filled])
    return torch.from_numpy(out)


def segment_any(flags: Tensor, lengths: Tensor) -> Tensor:
    """Whether any flag of each row is set, bool `[n]`.

    >>> segment_any(torch.tensor([False, True, False]), torch.tensor([2, 1])).tolist()
    [True, False]
    """
    return segment_sum(flags, lengths) > 0


def last_position(mask: Tensor, lengths: Tensor) -> Tensor:
    """Flat index of the last True of each row; the row's last position where there is none.

    Args:
        mask: bool, flat.
        lengths: int64 `[n]`, all at least 1.

    Raises:
        DataError: if a row has no tokens.

    >>> last_position(torch.tensor([True, True, False, False, False]), torch.tensor([3, 2])).tolist()
    [1, 4]
    """
    if bool((lengths <= 0).any()):
        raise DataError(f"trajectory {int((lengths <= 0).nonzero()[0])} has no tokens")
    ends = lengths.cumsum(0) - 1
    if bool(mask[ends].all()):
        return ends
    flat = np.where(mask.numpy(), np.arange(mask.numel()), -1)
    last = torch.from_numpy(np.maximum.reduceat(flat, (ends + 1 - lengths).numpy()))
    return torch.where(last < 0, ends, last)
