"""The KV cache of the slot engine, in the form that the models of `transformers` call.

All slots write at one *shared column*, and each slot's tokens are the consecutive columns that end there:

    column     0  1  2  3  4  5  6  7 | 8  <- written by the next forward pass
    slot 0           a  a  a  a  a  a |        6 tokens
    slot 1                    b  b  b |        3 tokens
    slot 2        c  c  c  c  c  c  c |        7 tokens

So a step writes one slice per layer instead of a scatter, keys and values are read through a view that begins at the
longest live slot, and a new slot puts its prompt right before the shared column, whatever the other slots hold.
Distances between columns are distances between positions, so sliding windows work as well. When the columns run out,
the live window moves back to the front, which happens once in many steps.

Masked columns hold stale but finite values: an attention weight of zero times a stale value is zero.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from rlhf_pipeline.policies.model_parts import ModelParts

_HEADROOM = 64
"""Columns kept free beyond the live window when the cache is laid out again."""


class CacheLayer(CacheLayerMixin):
    """The part of the layer protocol that all slot caches share.

    A layer refers to its cache weakly: a cycle would keep the buffers of a finished call until the garbage collector
    looks at old objects, many calls later.
    """

    is_compileable = False
    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: memory is allocated at the first write."""

    def storage(self, keys: Tensor, values: Tensor, num_slots: int, num_columns: int) -> tuple[Tensor, Tensor]:
        """Return the two buffers for all slots, `[slots, heads, columns, dim]`, allocated at the first call."""
        if self.keys is None or self.values is None:
            shape = (num_slots, keys.shape[1], num_columns)
            self.keys = keys.new_zeros((*shape, keys.shape[3]))
            self.values = values.new_zeros((*shape, values.shape[3]))
            self.is_initialized = True
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of key columns, offset of the first), for the model's own mask code."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    # The name of the same method in older releases of transformers 5.
    get_max_cache_shape = get_max_length


class _PrefillLayer(CacheLayer):
    """Keeps the keys and values of one forward pass over whole prompts."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = key_states, value_states
        self.is_initialized = True
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0


class PrefillCache(Cache):
    """Captures the keys and values of a batch of right-padded prompts."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_PrefillLayer() for _ in range(num_layers)])

    def right_aligned(self, lengths: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Return (keys, values) per layer, `[N, heads, P, dim]`, moved so that every prompt ends at column P.

        Args:
            lengths: the number of tokens of each prompt, int64 `[N]`.
        """
        out: list[tuple[Tensor, Tensor] | None] = []
        index: Tensor | None = None
        for layer in self.layers:
            if not isinstance(layer, _PrefillLayer) or layer.keys is None or layer.values is None:
                out.append(None)
                continue
            width = layer.keys.shape[2]
            if index is None:
                shift = width - lengths
                index = (torch.arange(width, device=lengths.device) - shift[:, None]).clamp_(min=0)
            at = index[:, None, :, None]
            keys, values = (x.gather(2, at.expand(-1, x.shape[1], -1, x.shape[3])) for x in (layer.keys, layer.values))
            out.append((keys, values))
        return out


def prefill(parts: ModelParts, ids: Tensor, lengths: Tensor) -> tuple[PrefillCache, Tensor]:
    """Return the keys and values of right-padded rows, and the last hidden state of each, `[N, H]`.

    They need no mask: with causal attention no token sees later ones.
    """
    cache, count = PrefillCache(parts.num_layers), len(ids)
    hidden = parts.hidden(
        input_ids=ids,
        position_ids=torch.arange(ids.shape[1], device=ids.device).expand(count, -1),
        cache=cache,
        use_cache=True,
    )
    return cache, hidden[torch.arange(count, device=ids.device), lengths - 1]


class _SlotLayer(CacheLayer):
    """Keys and values of one layer for all slots, `[slots, heads, columns, dim]`."""

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = weakref.proxy(owner)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        owner = self.owner
        keys, values = self.storage(key_states, value_states, owner.num_slots, owner.num_columns)
        rows, column, low = owner.rows, owner.column, owner.low
        keys[:rows, :, column] = key_states[:, :, 0]
        values[:rows, :, column] = value_states[:, :, 0]
        return keys[:rows, :, low : column + 1], values[:rows, :, low : column + 1]

    def get_seq_length(self) -> int:
        return self.owner.column - self.owner.low


class SlotCache(Cache):
    """Keys and values of the live completions.

    Live slots are always rows `0 .. rows - 1`: the engine moves the last ones into the gaps, so a forward pass never
    computes a finished row.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        num_slots: int,
        longest_prompt: int,
        longest_completion: int,
        device: torch.device,
    ) -> None:
        self.slot_layers = [_SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=[*self.slot_layers])
        self.num_slots = num_slots
        self.lead = longest_prompt
        self.bound = longest_prompt + longest_completion
        self.num_columns = longest_prompt + min(longest_completion, _HEADROOM)
        self.mask = torch.zeros((num_slots, self.num_columns), dtype=torch.bool, device=device)
        self.rows = 0
        self.column = self.lead
        self.low = self.lead

    def begin(self, longest: int, *, rows: int, to_come: int, widest: int = 0) -> None:
        """Make sure that the shared column is free. Call this before rows are inserted."""
        self.lead = max(self.lead, widest)
        if longest == 0:
            self.column = self.lead
        if not to_come:
            self.lead = 0
        if self.column >= self.num_columns or self.column < widest:
            self._relayout(longest, min(self.num_slots, rows + to_come))

    def _relayout(self, longest: int, most_rows: int) -> None:
        """Move the live window to the front, into wider buffers if it fills most of the current ones."""
        window = max(longest, self.lead)
        # Double while completions may still grow, then a quarter more than the window: fresh memory costs a page fault
        # per page, and a copy of the window is paid once per window / 4 steps, each of which reads the whole of it.
        growth = min(window, self.bound - window)
        columns = max(self.num_columns, window + max(growth, window // 4, _HEADROOM))
        source = slice(self.column - longest, self.column)
        target = slice(window - longest, window)
        rows = min(self.rows, most_rows)
        if columns > self.num_columns:
            # New buffers are sized for the remaining rows: near the end of a call these are few.
            self.num_slots = most_rows
        for layer in self.slot_layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys = self._moved(layer.keys, rows, source, target, columns)
                layer.values = self._moved(layer.values, rows, source, target, columns)
        mask = self.mask.new_zeros((self.num_slots, columns))
        mask[:rows, target] = self.mask[:rows, source]
        self.mask = mask
        self.num_columns = columns
        self.column = window

    def _moved(self, x: Tensor, rows: int, source: slice, target: slice, columns: int) -> Tensor:
        live = x[:rows, :, source]
        if columns > x.shape[2]:
            x = x.new_zeros((self.num_slots, x.shape[1], columns, x.shape[3]))
        elif source.start < target.stop:
            live = live.clone()
        x[:rows, :, target] = live
        return x

    def move(self, source: Tensor, target: Tensor, longest: int) -> None:
        """Copy rows `source` to rows `target` (disjoint int64 `[k]`), within the live window of `longest` tokens."""
        window = slice(self.column - longest, self.column)
        for layer in self.slot_layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys[target, :, window] = layer.keys[source, :, window]
                layer.values[target, :, window] = layer.values[source, :, window]
        self.mask[target] = self.mask[source]

    def insert(
        self,
        target: Tensor,
        states: list[tuple[Tensor, Tensor] | None],
        source: Tensor,
        lengths: Tensor,
    ) -> None:
        """Copy prompts into slots, so that each ends right before the shared column.

        Args:
            target: slots, int64 `[k]`.
            states: per layer, the right-aligned keys and values of prompts, from `PrefillCache.right_aligned`.
            source: which prompt goes to which slot, int64 `[k]`.
            lengths: the tokens of each of these prompts, int64 `[k]`.
        """
        for layer, pair in zip(self.slot_layers, states, strict=True):
            if pair is None:
                continue
            keys, values = layer.storage(*pair, self.num_slots, self.num_columns)
            window = slice(self.column - pair[0].shape[2], self.column)
            keys[target, :, window] = pair[0][source]
            values[target, :, window] = pair[1][source]
        columns = torch.arange(self.num_columns, device=self.mask.device)
        begin = self.column - lengths
        self.mask[target] = (columns >= begin[:, None]) & (columns < self.column)

    def open_column(self, rows: int, longest: int) -> Tensor:
        """Mark the shared column as used by rows `0 .. rows - 1` and return their mask."""
        self.rows = rows
        self.low = self.column - longest
        self.mask[:rows, self.column] = True
        return self.mask[:rows, self.low : self.column + 1]
