"""Whitening within groups, on flat columns."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_pipeline.data.trajectories import segment_sum
from rlhf_pipeline.functional.advantage import RELATIVE_SPREAD_FLOOR, STD_FLOOR


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
