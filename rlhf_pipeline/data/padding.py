"""Ragged and padded batches.

Rows come as flat values with lengths, or as a list; `rlhf_pipeline.data.trajectories` knows the forms of a TensorDict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from rlhf_pipeline.errors import DataError, DefinitionError

__all__ = [
    "Side",
    "length_mask",
    "pad_flat",
    "pad_rows",
]

Side = Literal["left", "right"]


def _check_side(side: str) -> None:
    if side not in ("left", "right"):
        raise DefinitionError(f"side must be 'left' or 'right'; got {side!r}.")


def _padded_length(lengths: torch.Tensor, length: int | None, multiple_of: int) -> int:
    """The padded length: the longest row or `length`, rounded up."""
    if multiple_of < 1:
        raise DefinitionError(f"multiple_of must be 1 or more; got {multiple_of}.")
    if length is None:
        length = int(lengths.max()) if lengths.numel() else 0
    return -(-length // multiple_of) * multiple_of


def length_mask(
    lengths: torch.Tensor,
    length: int | None = None,
    *,
    side: Side = "right",
    multiple_of: int = 1,
) -> torch.Tensor:
    """The mask of the real positions of a padded batch.

    Args:
        lengths: int [B].
        length: the padded length T; the longest row by default.
        side: where the padding goes.
        multiple_of: T is rounded up to a multiple of this.

    Returns:
        bool [B, T].

    >>> length_mask(torch.tensor([1, 2]), side="left").tolist()
    [[False, True], [True, True]]
    """
    _check_side(side)
    total = _padded_length(lengths, length, multiple_of)
    position = torch.arange(total, device=lengths.device)
    if side == "right":
        return position < lengths[:, None]
    return position >= total - lengths[:, None]


def pad_flat(
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    pad_value: float = 0,
    side: Side = "right",
    length: int | None = None,
    multiple_of: int = 1,
) -> torch.Tensor:
    """Flat rows to a padded batch.

    Args:
        values: [sum of lengths, ...], row after row.
        lengths: int64 [B].
        pad_value: what stands at padded positions.
        side: where the padding goes.
        length: the padded length T; the longest row by default (then one synchronisation on CUDA).
        multiple_of: T is rounded up to a multiple of this.

    Returns:
        [B, T, ...] in the dtype of `values`.

    Raises:
        DataError: lengths that do not add up, or a row longer than `length`.

    >>> pad_flat(torch.tensor([1, 2, 3]), torch.tensor([1, 2]), pad_value=9)
    tensor([[1, 9],
            [2, 3]])
    """
    _check_side(side)
    rows = lengths.numel()
    if int(lengths.sum()) != values.shape[0]:
        raise DataError(
            f"lengths add up to {int(lengths.sum())} but there are {values.shape[0]} values; "
            "pass the lengths of exactly these rows."
        )
    total = _padded_length(lengths, length, multiple_of)
    if length is not None and rows and int(lengths.max()) > total:
        raise DataError(f"a row has {int(lengths.max())} tokens but length is {length}.")
    row = torch.repeat_interleave(torch.arange(rows, device=lengths.device), lengths, output_size=values.shape[0])
    start = lengths.cumsum(0) - lengths
    column = torch.arange(values.shape[0], device=lengths.device) - start[row]
    if side == "left":
        column = column + (total - lengths)[row]
    out = values.new_full((rows * total, *values.shape[1:]), pad_value)
    out = out.index_copy(0, (row * total + column).to(values.device), values)
    return out.view(rows, total, *values.shape[1:])


def pad_rows(
    rows: Sequence[torch.Tensor | Sequence[float]],
    *,
    pad_value: float = 0,
    side: Side = "right",
    multiple_of: int = 1,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A list of rows to a padded batch.

    Args:
        rows: 1-D tensors or sequences of numbers.
        pad_value: what stands at padded positions.
        side: where the padding goes.
        multiple_of: T is rounded up to a multiple of this.
        dtype: of the result; that of the first row by default.

    Returns:
        `(padded [B, T], lengths int64 [B])`.

    >>> pad_rows([[1], [2, 3]])
    (tensor([[1, 0],
            [2, 3]]), tensor([1, 2]))
    """
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    lengths = torch.tensor([t.shape[0] for t in tensors], dtype=torch.int64)
    flat = torch.cat(tensors) if tensors else torch.zeros(0, dtype=dtype)
    padded = pad_flat(flat, lengths, pad_value=pad_value, side=side, multiple_of=multiple_of)
    return padded, lengths
