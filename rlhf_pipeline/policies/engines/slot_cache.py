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

Layers with a recurrence (linear attention, Mamba, short convolutions) keep a few states per row instead, of one size
whatever the row's length. A state has no columns to mask: it must never see padding. So the prompts of such models are
padded on the left, where transformers' own mask keeps the states at zero, and a slot's state is a row of a buffer.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from rlhf_pipeline.policies.model_parts import ModelParts

_HEADROOM = 64
"""Columns kept free beyond the live window when the cache is laid out again."""
_STATES = ("conv_states", "recurrent_states")
"""The attributes in which transformers' layers keep their states, by number."""


class LayerStates(NamedTuple):
    """The state that one layer keeps for a batch of rows.

    Attributes:
        columns: keys and values, `[N, heads, P, dim]`, each row's last token in the last column; None if it has none.
        rows: convolution and recurrent states, `[N, ...]`, by their position in the layer; empty for most layers.
    """

    columns: tuple[Tensor, Tensor] | None
    rows: dict[tuple[str, int], Tensor]


Window = tuple[slice, slice, slice]
"""Rows, heads and columns."""
States = list[LayerStates]
"""The states of all layers."""


class CacheLayer(LinearAttentionLayer, CacheLayerMixin):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The part of the layer protocol that all slot caches share; any layer may keep columns, states, both or neither.

    A layer refers to its cache weakly: a cycle would keep the buffers of a finished call until the garbage collector
    looks at old objects, many calls later.
    """

    is_sliding = False

    def __init__(self, num_states: int) -> None:
        CacheLayerMixin.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=num_states)

    @property
    def is_compileable(self) -> bool:
        """Return False: shapes change from step to step."""
        return False

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


class LayerCache(Cache):
    """A cache of layers that may keep columns, states, both or neither."""

    @property
    def is_linear(self) -> list[bool]:
        """Return False for each layer; transformers asks every layer for its class, in every step."""
        return [False] * len(self.layers)


class PrefillCache(LayerCache):
    """Captures what the layers keep of a batch of prompts."""

    def __init__(self, num_layers: int, num_states: int = 0) -> None:
        self.prefilled = [_PrefillLayer(num_states) for _ in range(num_layers)]
        super().__init__(layers=[*self.prefilled])

    def states(self, index: Tensor | None = None) -> States:
        """Return what each layer keeps.

        Args:
            index: the column that each column of keys and values is taken from, int64 `[N, P]`; by default its own.
        """
        at = None if index is None else index[:, None, :, None]
        return [_layer_states(layer, at) for layer in self.prefilled]


def _layer_states(layer: _PrefillLayer, at: Tensor | None) -> LayerStates:
    rows = {(kind, i): state for kind in _STATES for i, state in getattr(layer, kind).items() if state is not None}
    if layer.keys is None or layer.values is None:
        return LayerStates(None, rows)
    pair = layer.keys, layer.values
    if at is None:
        return LayerStates(pair, rows)
    keys, values = (x.gather(2, at.expand(-1, x.shape[1], -1, x.shape[3])) for x in pair)
    return LayerStates((keys, values), rows)


def prefill(parts: ModelParts, ids: Tensor, lengths: Tensor) -> tuple[States, Tensor]:
    """Return what the layers keep of right-padded rows, and the last hidden state of each row, `[N, H]`.

    Attention needs no mask: with all padding on the right no token sees any, and its keys are moved afterwards. A
    recurrence runs on through such padding, so a model with states gets its rows padded on the left, and a mask.
    """
    cache, (count, width) = PrefillCache(parts.num_layers, parts.num_states), ids.shape
    columns = torch.arange(width, device=ids.device)
    index = columns - (width - lengths)[:, None]
    if not parts.num_states:
        hidden = parts.hidden(input_ids=ids, position_ids=columns.expand(count, -1), cache=cache, use_cache=True)
        return cache.states(index.clamp(min=0)), hidden[torch.arange(count, device=ids.device), lengths - 1]
    places = index.clamp(min=0)
    hidden = parts.hidden(
        input_ids=ids.gather(1, places), position_ids=places, attention_mask=index >= 0, cache=cache, use_cache=True
    )
    return cache.states(), hidden[:, -1]


class _SlotLayer(CacheLayer):
    """Keys and values of one layer for all slots, `[slots, heads, columns, dim]`, and its states, `[slots, ...]`.

    A model reads and writes its states in place, in views of the live rows.
    """

    def __init__(self, owner: SlotCache, num_states: int) -> None:
        super().__init__(num_states)
        self.owner = weakref.proxy(owner)
        self.by_place: dict[tuple[str, int], Tensor] = {}
        self.has_previous_state = dict.fromkeys(range(num_states), True)

    def hold(self, target: Tensor, rows: dict[tuple[str, int], Tensor], source: Tensor) -> None:
        """Copy these states of rows `source` to slots `target`."""
        for place, state in rows.items():
            if place not in self.by_place:
                kind, i = place
                self.by_place[place] = state.new_zeros((self.owner.num_slots, *state.shape[1:]))
                getattr(self, f"is_{kind}_initialized")[i] = True
                if kind == "conv_states":
                    self.conv_kernel_size[i] = state.shape[-1]
            self.by_place[place][target] = state[source]

    def show(self, rows: int) -> None:
        """Let the model see the states of the first rows."""
        for (kind, i), tensor in self.by_place.items():
            getattr(self, kind)[i] = tensor[:rows]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        owner = self.owner
        keys, values = self.storage(key_states, value_states, owner.num_slots, owner.num_columns)
        owner.write((keys, values), (key_states, value_states))
        window = owner.window
        return keys[window], values[window]

    def get_seq_length(self) -> int:
        return self.owner.past


class SlotCache(LayerCache):
    """Keys and values of the live completions, in exactly the rows and columns that they need.

    Live slots are always rows `0 .. rows - 1`: the engine moves the last ones into the gaps, so a forward pass never
    computes a finished row.

    Attributes:
        column: the shared column, which the next step writes.
        rows: how many slots the next step computes, from the first on.
        low: the first column that it reads.
        high: the column after the last one that it reads.
        window: these rows, and these columns.
    """

    def __init__(
        self,
        num_layers: int,
        num_states: int = 0,
        *,
        num_slots: int,
        longest_prompt: int,
        longest_completion: int,
        device: torch.device,
    ) -> None:
        self.slot_layers = [_SlotLayer(self, num_states) for _ in range(num_layers)]
        super().__init__(layers=[*self.slot_layers])
        self.num_states = num_states
        self.num_slots = num_slots
        self.lead = longest_prompt
        self.bound = longest_prompt + longest_completion
        self.num_columns = longest_prompt + min(longest_completion, _HEADROOM)
        self.device = device
        self.rows = 0
        self.column = self.low = self.high = self.lead
        self.window: Window = (slice(0), slice(None), slice(0))
        self._distances = torch.arange(self.num_columns, -1, -1, device=device)

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
        rows = min(self.rows, most_rows)
        if columns > self.num_columns:
            # New buffers are sized for the remaining rows: near the end of a call these are few.
            self.num_slots = most_rows
        self.move_window(longest, window, rows=rows, columns=columns)

    def move_window(self, longest: int, column: int, *, rows: int, columns: int) -> None:
        """Move the last `longest` columns of rows `0 .. rows - 1` to end before `column`, in buffers of `columns`."""
        source = slice(self.column - longest, self.column)
        target = slice(column - longest, column)
        for layer in self.slot_layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys = self._moved(layer.keys, rows, source, target, columns)
                layer.values = self._moved(layer.values, rows, source, target, columns)
        self.num_columns = columns
        self.column = column

    def _moved(self, x: Tensor, rows: int, source: slice, target: slice, columns: int) -> Tensor:
        live = x[:rows, :, source]
        if columns > x.shape[2]:
            x = x.new_zeros((self.num_slots, x.shape[1], columns, x.shape[3]))
        elif source.start < target.stop and target.start < source.stop:
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
            for tensor in layer.by_place.values():
                tensor[target] = tensor[source]

    def insert(self, target: Tensor, states: States, source: Tensor) -> None:
        """Copy prompts into slots, so that each ends right before the shared column.

        Args:
            target: slots, int64 `[k]`.
            states: what each layer keeps of prompts, from `prefill`.
            source: which prompt goes to which slot, int64 `[k]`.
        """
        for layer, (pair, rows) in zip(self.slot_layers, states, strict=True):
            layer.hold(target, rows, source)
            if pair is None:
                continue
            keys, values = layer.storage(*pair, self.num_slots, self.num_columns)
            window = slice(self.column - pair[0].shape[2], self.column)
            keys[target, :, window] = pair[0][source]
            values[target, :, window] = pair[1][source]

    def open_window(self, rows: int, longest: int) -> None:
        """Let the next step compute rows `0 .. rows - 1`, whose longest has `longest` tokens, and no column more."""
        self._open(rows, self.column - longest, self.column + 1)

    def _open(self, rows: int, low: int, high: int) -> None:
        self.rows, self.low, self.high = rows, low, high
        self.window = slice(rows), slice(None), slice(low, high)
        if self.num_states:
            for layer in self.slot_layers:
                layer.show(rows)

    @property
    def past(self) -> int:
        """The columns of the window before the shared one."""
        return self.column - self.low

    def write(self, buffers: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
        """Write keys and values of one token per row, each `[rows, heads, 1, dim]`, at the shared column."""
        (keys, values), rows, column = buffers, self.rows, self.column
        keys[:rows, :, column] = new[0][:, :, 0]
        values[:rows, :, column] = new[1][:, :, 0]

    def visible(self, lengths: Tensor) -> Tensor:
        """Return which columns of the window a step sees: its own, and as many before it as the row has tokens.

        Args:
            lengths: int64, in any shape `[rows, ..., 1]`.

        Returns:
            bool `[rows, ..., high - low]`.
        """
        width = self.high - self.low
        if width > self._distances.shape[0]:
            self._distances = torch.arange(self.num_columns, -1, -1, device=self.device)
        return self._distances[-width:] <= lengths
