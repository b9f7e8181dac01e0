"""Conversion of ragged rows to a padded batch.

The forms of a TensorDict are handled in `rlhf_pipeline.data.tensordicts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from rlhf_pipeline.errors import DefinitionError

__all__ = ["Side", "length_mask", "pad_rows", "under_mask"]

Side = Literal["left", "right"]


def length_mask(lengths: torch.Tensor, length: int | None = None, *, side: Side = "right") -> torch.Tensor:
    """Return the mask of the real positions of a padded batch.

    Args:
        lengths: int64 [B].
        length: the padded length T; the longest row by default.
        side: where the padding goes.

    Returns:
        bool [B, T].

    >>> length_mask(torch.tensor([1, 2]), side="left").tolist()
    [[False, True], [True, True]]
    """
    if side not in ("left", "right"):
        raise DefinitionError(f"side must be 'left' or 'right'; got {side!r}.")
    if length is None:
        length = int(lengths.max()) if lengths.numel() else 0
    position = torch.arange(length, device=lengths.device)
    return position < lengths[:, None] if side == "right" else position >= length - lengths[:, None]


def under_mask(mask: torch.Tensor, values: torch.Tensor, fill: float = 0) -> torch.Tensor:
    """Place values, row by row, where a mask is True.

    >>> under_mask(torch.tensor([[True, False], [True, True]]), torch.tensor([1, 2, 3]), fill=9).tolist()
    [[1, 9], [2, 3]]
    """
    out = values.new_full((*mask.shape, *values.shape[1:]), fill)
    out[mask.to(values.device)] = values
    return out


def pad_rows(
    rows: Sequence[torch.Tensor | Sequence[float]],
    *,
    pad_value: float = 0,
    side: Side = "right",
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad a list of rows to a batch.

    Args:
        rows: tensors [T, ...] or sequences of numbers.
        pad_value: the value at padded positions.
        side: where the padding goes.
        dtype: of the result; that of the first row by default.

    Returns:
        `(padded [B, T, ...], lengths int64 [B])`.

    >>> pad_rows([[1], [2, 3]])
    (tensor([[1, 0],
            [2, 3]]), tensor([1, 2]))
    """
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    lengths = torch.tensor([t.shape[0] for t in tensors], dtype=torch.int64)
    flat = torch.cat(tensors) if tensors else torch.zeros(0, dtype=dtype)
    return under_mask(length_mask(lengths, side=side), flat, pad_value), lengths
