"""The cache of the slots in sizes of a few kinds, at fixed addresses, so that a step can be replayed.

The layout is that of `slot_cache`: one shared column, and each row's tokens right before it. What differs is what a
step needs for a replay: it reads all columns from the first to one of a few numbers of columns, its mask follows from
the lengths and the shared column, and the shared column is a number in a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_pipeline.policies.engines.slot_cache import SlotCache

_FEWEST_COLUMNS = 64


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`.

    >>> [power_of_two(n) for n in (1, 3, 64)]
    [1, 4, 64]
    """
    return 1 << (n - 1).bit_length() if n > 0 else 0


def bucket_columns(n: int) -> int:
    """Return the smallest number of columns of a bucket that is at least `n`: multiples of 64, then eight per octave.

    >>> [bucket_columns(n) for n in (1, 65, 513, 2049)]
    [64, 128, 640, 2560]
    """
    step = max(_FEWEST_COLUMNS, power_of_two(n) // 8)
    return -(-n // step) * step


class BucketCache(SlotCache):
    """Keys and values of all slots of a call in buffers that are allocated once.

    Args:
        num_layers: of the model.
        num_slots: rows of the buffers.
        longest: the most tokens of a row.
        ahead: the most steps between two reads by the host; this many columns are reserved.
        device: of the buffers.

    Attributes:
        at: the shared column, int64 `[1]`; a step reads this one, and `column` is the host's copy.
    """

    def __init__(self, num_layers: int, *, num_slots: int, longest: int, ahead: int, device: torch.device) -> None:
        super().__init__(num_layers, num_slots=num_slots, longest_prompt=0, longest_completion=0, device=device)
        self.num_columns = bucket_columns(longest + ahead)
        self.ahead = ahead
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.columns = torch.arange(self.num_columns, device=device)

    def clear(self) -> None:
        """Forget an earlier call: a masked number is multiplied by zero, which does not remove a NaN."""
        self.column = self.rows = 0
        for layer in self.slot_layers:
            for buffer in (layer.keys, layer.values):
                if buffer is not None:
                    buffer.zero_()

    def begin(self, longest: int, *, rows: int, to_come: int, widest: int = 0) -> None:
        """See `SlotCache.begin`; also move the live window to the front where a step then reads a smaller bucket."""
        front = max(longest, widest)
        if longest == 0:
            self.column = front
        elif self.column < widest or bucket_columns(self.column + self.ahead) > bucket_columns(front + self.ahead):
            self.move_window(longest, front, rows=min(self.num_slots, rows + to_come), columns=self.num_columns)

    def open_window(self, rows: int, longest: int) -> None:
        """Let the next steps, at most `ahead`, compute rows `0 .. rows - 1`; see `SlotCache.open_window`."""
        self._open(rows, 0, bucket_columns(self.column + self.ahead))
        self.at.fill_(self.column)

    @property
    def past(self) -> int:
        """The columns before the newest one, for the model's own mask code: all of the bucket."""
        return self.high - 1

    def write(self, buffers: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
        """See `SlotCache.write`."""
        for buffer, states in zip(buffers, new, strict=True):
            buffer[: self.rows].index_copy_(2, self.at, states)

    def visible(self, lengths: Tensor) -> Tensor:
        """See `SlotCache.visible`. A row without tokens sees the column that it writes, as no row of NaN may arise."""
        columns = self.columns[: self.high]
        return (columns >= self.at - lengths) & (columns <= self.at)

    def close_gaps(self, slots: Tensor, gaps: Tensor, longest: int, most: int) -> None:
        """Move rows that ended before the other ones up to the shared column.

        Args:
            slots: int64 `[k]`.
            gaps: how many columns each of them is behind, int64 `[k]`.
            longest: the most tokens of any of them.
            most: the largest gap.
        """
        low = max(0, self.column - longest - most)
        index = (torch.arange(self.column - low, device=self.device) - gaps[:, None]).clamp(min=0)[:, None, :, None]
        for layer in self.slot_layers:
            for buffer in (layer.keys, layer.values):
                if buffer is not None:
                    window = buffer[slots, :, low : self.column]
                    buffer[slots, :, low : self.column] = window.gather(
                        2, index.expand(-1, window.shape[1], -1, window.shape[3])
                    )


def bucket_rows(live: int, num_slots: int) -> int:
    """Return how many rows a step computes for this many live ones: a power of two, or all.

    >>> [bucket_rows(live, 48) for live in (1, 5, 40)]
    [1, 8, 48]
    """
    return min(power_of_two(live), num_slots)
