"""Sums and positions within the rows of a flat column, faster than `torch.segment_reduce` on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.functional.advantage import RELATIVE_SPREAD_FLOOR, STD_FLOOR


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


def step_sum(values: Tensor, bounds: Sequence[int]) -> Tensor:
    """Sum of the steps of each trajectory, in the dtype of the values.

    Args:
        values: `[n]`, one per step.
        bounds: `k + 1` step offsets of the trajectories.

    >>> step_sum(torch.tensor([1, 2, 4]), [0, 2, 3]).tolist()
    [3, 4]
    """
    total = torch.zeros(values.numel() + 1, dtype=values.dtype)
    torch.cumsum(values, 0, out=total[1:])
    return total[torch.tensor(bounds)].diff()


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


def whitened(values: Tensor, lengths: Tensor, groups: Tensor) -> Tensor:
    """The values of all rows of a group, less their mean, over their standard deviation (n - 1, at least 1e-6).

    Args:
        values: float64, flat.
        lengths: int64 `[n]`, values of each row.
        groups: int64 `[n]`, the group of each row, numbered from 0.

    Returns:
        float64, flat; 0 where a group has no spread.

    >>> whitened(torch.tensor([0.0, 1.0, 2.0, 5.0]).double(), torch.tensor([1, 2, 1]), torch.tensor([0, 0, 1])).tolist()
    [-1.0, 0.0, 1.0, 0.0]
    """
    size = int(groups.max()) + 1 if groups.numel() else 0

    def total(parts: Tensor) -> Tensor:
        return torch.zeros(size, dtype=torch.float64).index_add_(0, groups, parts)

    count = total(lengths.double())
    mean = total(segment_sum(values, lengths)) / count.clamp_min(1)
    centred = values - torch.repeat_interleave(mean[groups], lengths)
    spread = (total(segment_sum(centred.square(), lengths)) / (count - 1).clamp_min(1)).sqrt()
    scale = total(segment_sum(values.abs(), lengths)) / count.clamp_min(1)
    factor = torch.where(spread <= RELATIVE_SPREAD_FLOOR * scale, 0.0, 1.0 / spread.clamp_min(STD_FLOOR))
    return centred * torch.repeat_interleave(factor[groups], lengths)
