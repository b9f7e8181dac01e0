"""Padded rows laid end to end: which tokens are computed, and which tokens each one attends to.

Only tokens that a scored token attends to are laid out: tokens after the last scored token of a row, and rows without
scored tokens, never reach the model. With `share_prefix`, a prefix that rows have in common, such as a group's prompt,
is laid out once. To find common prefixes, rows are sorted by their tokens, so the members of a group may be anywhere in
the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf_pipeline.data.upload import upload
from rlhf_pipeline.policies._scoring import HostBatch, Int64Array

MIN_SHARED_TOKENS = 8
"""A common prefix shorter than this is computed row by row, because another attention call costs more than it saves."""


@dataclass
class Segments:
    """Stretches of the packed axis that attend causally to themselves, and to a prefix laid out elsewhere.

    Segments are in order and fill the axis; a prefix is a separate segment.
    """

    starts: list[int]
    lengths: list[int]
    prefix_starts: list[int]
    prefix_lengths: list[int]
    calls: int = 0
    kernel: str = ""
    """The kernel of the last call: `varlen`, or `sdpa` for each segment."""
    _varlen: tuple[Tensor, Tensor, int, int, Tensor | None] | None = field(default=None, repr=False)

    @property
    def longest(self) -> int:
        """The most tokens that one token attends to, itself included."""
        return max((n + p for n, p in zip(self.lengths, self.prefix_lengths, strict=True)), default=0)

    @property
    def has_prefix(self) -> bool:
        """Whether any segment has a prefix."""
        return any(self.prefix_lengths)

    def varlen(self, device: torch.device) -> tuple[Tensor, Tensor, int, int, Tensor | None]:
        """Return the arguments of a variable-length kernel, built once for all layers.

        Returns:
            The boundaries of the queries and of the keys, int32 `[segments + 1]`; the longest of each; and the packed
            positions of the keys, int64, or None if the keys are all positions in order.
        """
        if self._varlen is None:
            lengths, prefixes = np.array(self.lengths), np.array(self.prefix_lengths)
            keys = lengths + prefixes
            arrays: list[npt.NDArray[Any]] = [np.cumsum([0, *n]).astype(np.int32) for n in (lengths, keys)]
            if self.has_prefix:
                parts = zip(self.prefix_starts, self.prefix_lengths, self.starts, self.lengths, strict=True)
                spans = [np.arange(at, at + n) for p, m, s, k in parts for at, n in ((p, m), (s, k))]
                arrays.append(np.concatenate(spans))
            on_device = upload([torch.from_numpy(array) for array in arrays], device)
            gather = on_device[2] if self.has_prefix else None
            self._varlen = (on_device[0], on_device[1], int(lengths.max()), int(keys.max()), gather)
        return self._varlen


@dataclass(frozen=True, slots=True)
class Packing:
    """Rows laid end to end.

    Attributes:
        input_ids: int64 `[N]`.
        position_ids: int64 `[N]`; they restart with every row, and continue after a shared prefix.
        segments: which tokens attend to which.
        predicting: int64 `[scored tokens]`: for each scored token, in row-major order, the packed position of the
            token before it.
        rows: how many rows have a scored token.
    """

    input_ids: Int64Array
    position_ids: Int64Array
    segments: Segments
    predicting: Int64Array
    rows: int


def pack(batch: HostBatch, *, share_prefix: bool) -> Packing:
    """Lay the rows of a padded batch end to end."""
    rows, columns = np.nonzero(batch.scored)
    place = batch.places[rows, columns]
    used = np.zeros(len(batch.ids), dtype=np.int64)
    np.maximum.at(used, rows, place)
    ids = batch.left_aligned(used)
    active = np.flatnonzero(used)
    shared = np.zeros(len(used), dtype=np.int64)
    leader = np.arange(len(used))
    if share_prefix and len(active) > 1:
        # Big-endian bytes sort as the numbers do, so rows with a common prefix become neighbours.
        words = ids.astype(">u4")
        active = np.array(sorted(active.tolist(), key=lambda row: words[row, : used[row]].tobytes()))
        for first, last, length in _runs(_common_starts(ids[active], used[active])):
            members = active[first:last]
            shared[members], leader[members] = length, members[0]
    own_start, prefix_start = np.zeros_like(shared), np.zeros_like(shared)
    segments = Segments([], [], [], [])
    spans: list[tuple[int, int, int]] = []  # of the packed axis: row, first column, tokens
    end = 0
    for row in active.tolist():
        prefix = int(shared[row])
        if prefix and leader[row] == row:
            _add(segments, end, prefix, 0, 0)
            spans.append((row, 0, prefix))
            prefix_start[row] = end
            end += prefix
        prefix_start[row] = prefix_start[leader[row]]
        own_start[row] = end
        remainder = int(used[row]) - prefix
        if remainder:
            _add(segments, end, remainder, int(prefix_start[row]), prefix)
            spans.append((row, prefix, remainder))
            end += remainder
    row_of, place_of = _expand(spans)
    before = place - 1
    in_own, in_prefix = own_start[rows] + before - shared[rows], prefix_start[rows] + before
    return Packing(
        input_ids=ids[row_of, place_of],
        position_ids=place_of,
        segments=segments,
        predicting=np.where(before < shared[rows], in_prefix, in_own),
        rows=len(active),
    )


def _add(segments: Segments, start: int, length: int, prefix_start: int, prefix_length: int) -> None:
    segments.starts.append(start)
    segments.lengths.append(length)
    segments.prefix_starts.append(prefix_start)
    segments.prefix_lengths.append(prefix_length)


def _common_starts(ids: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Return the length of the prefix that each row shares with the next, int64 `[rows - 1]`."""
    shorter = np.minimum(used[1:], used[:-1])
    same = (ids[1:] == ids[:-1]) & (np.arange(ids.shape[1]) < shorter[:, None])
    return np.minimum.accumulate(same, axis=1).sum(1)


def _runs(common: np.ndarray) -> list[tuple[int, int, int]]:
    """Cut rows into runs with a common prefix, saving the most tokens, given `_common_starts`.

    Returns `(first row, row after the last, shared tokens)` of each run of two or more rows.
    """
    common = np.where(common >= MIN_SHARED_TOKENS, common, 0)
    count = len(common) + 1
    saved = np.zeros(count + 1, dtype=np.int64)  # by the best cut of the first i rows
    cut = np.arange(-1, count)  # where its last run begins
    for end in range(1, count + 1):
        saved[end] = saved[end - 1]
        first = end - 1
        while first > 0 and common[first - 1]:
            first -= 1
        if first == end - 1:
            continue
        least = np.minimum.accumulate(common[first : end - 1][::-1])
        gain = saved[first : end - 1][::-1] + least * np.arange(1, len(least) + 1)
        best = int(gain.argmax())
        if gain[best] > saved[end]:
            saved[end], cut[end] = gain[best], end - 2 - best
    runs = []
    end = count
    while end > 0:
        first = int(cut[end])
        if end - first > 1:
            runs.append((first, end, int(common[first : end - 1].min())))
        end = first
    return runs[::-1]


def _expand(spans: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the column of every packed position."""
    if not spans:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    rows, firsts, lengths = np.array(spans, dtype=np.int64).T
    starts = np.cumsum(lengths) - lengths
    places = np.arange(lengths.sum()) - np.repeat(starts - firsts, lengths)
    return np.repeat(rows, lengths), places
