"""Decoding with steps of one shape, entirely on the device, so that a CUDA graph can hold them.

On a GPU a decode step is short and has many kernels: most of the time goes to the host, which launches each kernel and
reads every token. Here the host reads once in several tokens. The state of S slots, M to a row of W columns, consists
of tensors at fixed addresses:

    cache      2 x [S / M, key heads, W, head dim] per layer   marks   int32 [S / M, W]   see `slot_columns`
    hidden     [S, H]      last hidden state                   key     int64 [S]   key of the slot's random numbers
    used       int64 [S]   tokens in the cache                 count   int64 [S]   tokens sampled so far
    limit      int64 [S]   most tokens                         live    bool  [S]
    tokens, log_probs      [S, K]  of the last K steps; a token of -1 where a slot was not live
    ahead      int64 [S, K]  the columns for the tokens of these steps

A step applies the head, samples with numbers made on the device, marks ended completions, and feeds S tokens. No shape
depends on data, and nothing leaves the device, so on CUDA it is captured as a graph, one per number of slots and
columns: both are among a few numbers, or the maximum, as small as the live completions allow. After at most K steps,
the host reads the sampled tokens with one copy, replaces weights, fills free slots, and gives the next tokens columns.

State and graphs outlive a call: an engine keeps those of the largest. A graph holds the addresses of the weights, so
it serves all weights that are copied into the same tensors, and is dropped when a tensor is replaced.

On a CPU, where every padded row and column costs time, this takes 1.2 to 2.2 times as long as `slots.RaggedRun`; there
it serves the tests, which compare the two.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache

from rlhf_pipeline.policies.attention import is_sdpa, steps_attended_by
from rlhf_pipeline.policies.engines.cache_check import first_right, probe
from rlhf_pipeline.policies.engines.protocol import Int64Array
from rlhf_pipeline.policies.engines.rollout import Rollout, States
from rlhf_pipeline.policies.engines.sampling import Truncation, device_uniforms, drawn
from rlhf_pipeline.policies.engines.slot_cache import CacheLayer, PrefillCache, prefill
from rlhf_pipeline.policies.engines.slot_columns import MOST_MEMBERS, PARKED, Columns, balanced, rows_of, tokens_of
from rlhf_pipeline.policies.model_parts import ModelParts

logger = logging.getLogger(__name__)

LOOK_EVERY: Final = 16
"""Tokens between two reads by the host. A slot that finishes in between stays empty until the next read."""

MaskForm = Literal["full", "near", "by_kind"]
"""The form in which a trunk takes ready-made masks: one, one with the sliding window, or a dict by kind of layer."""


@dataclass(frozen=True)
class Masks:
    """How a trunk takes its masks, and whether slots may share rows: steps then use `_StepAttention`."""

    form: MaskForm
    shared: bool


_FEWEST_COLUMNS = 64
_Places = list[tuple[int, torch.dtype]]
_forms: weakref.WeakKeyDictionary[nn.Module, Masks | None] = weakref.WeakKeyDictionary()
_capturing = threading.Lock()
"""A process captures one graph at a time."""


class Graphs:
    """Captures steps as CUDA graphs on a device, which need not be the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One pool for all graphs of a state: they run one at a time, and all that outlives a step is in the state.
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Capture a step that has run before, without running it; return a function that runs it.

        Raises:
            RuntimeError: the step waits for the device.
        """
        graph = torch.cuda.CUDAGraph()
        with (
            _capturing,
            torch.cuda.device(self._device),
            # A capture that fails leaves its own stream as the current one; leaving this context sets the former.
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            # Other threads, such as one that loads data, may allocate memory and wait for the device meanwhile.
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            step()
        return graph.replay


def graphs_of(device: torch.device) -> Graphs | None:
    """Return what captures steps on a device; None where there are no graphs."""
    return Graphs(device) if device.type == "cuda" else None


class _StaticLayer(CacheLayer):
    """Writes one token of each slot at the slot's own column."""

    is_compileable = True

    def __init__(self, owner: StaticSlots) -> None:
        super().__init__()
        self.owner = weakref.proxy(owner)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        owner = self.owner
        keys, values = self.storage(key_states, value_states, owner.num_rows, owner.width)
        keys[owner.row, :, owner.column] = key_states[:, :, 0]
        values[owner.row, :, owner.column] = value_states[:, :, 0]
        return keys[: owner.rows, :, : owner.columns], values[: owner.rows, :, : owner.columns]

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.columns, 0


class _StepAttention:
    """Attention of one step over rows of the cache, see `steps_attended_by`.

    All that attends to the same keys is one set of queries: the slots of a row, and the heads that share keys. Where a
    mask is given, transformers 5.17 and 5.19 copy the whole cache in use for each of these heads instead.
    """

    def __init__(self) -> None:
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
        rows, shared = key.shape[:2]
        slots, heads = (len(query) // rows, rows), (shared, query.shape[1] // shared)
        by_row = query[:, :, 0].unflatten(1, heads).unflatten(0, slots).permute(1, 2, 0, 3, 4)
        bias = self._bias(mask, by_row)
        out = scaled_dot_product_attention(by_row.flatten(2, 3), key, value, attn_mask=bias, scale=scaling)
        return out.unflatten(2, by_row.shape[2:4]).permute(2, 0, 1, 3, 4).flatten(2, 3).flatten(0, 1)[:, None]

    def _bias(self, mask: Tensor, by_row: Tensor) -> Tensor:
        """Return a mask `[rows, 1, M, columns]` as numbers to add to scores, once per query, made once per step."""
        if id(mask) not in self._biases:
            bias = torch.zeros_like(mask, dtype=by_row.dtype).masked_fill_(~mask, -torch.inf)
            # The mask is kept too, so that no other gets its id.
            self._biases[id(mask)] = mask, bias[:, :, :, None].expand(-1, -1, -1, by_row.shape[3], -1).flatten(2, 3)
        return self._biases[id(mask)][1]


class StaticSlots(Cache):
    """The state above, and the step over it.

    Args:
        parts: trunk and head of the model.
        masks: how the trunk takes its masks.
        num_slots: S.
        num_rows: S / M.
        window: W / M; one more than the longest completion with its prompt.
        look_every: K.

    Attributes:
        size: how many slots a step computes, from the first on.
        rows: how many rows they share.
        columns: how many columns it reads, from the first on.
    """

    def __init__(
        self,
        parts: ModelParts,
        masks: Masks,
        *,
        num_slots: int,
        num_rows: int,
        window: int,
        look_every: int,
    ) -> None:
        self.static_layers = [_StaticLayer(self) for _ in range(parts.num_layers)]
        super().__init__(layers=[*self.static_layers])
        self.parts = parts
        self.form, self.shared = masks.form, masks.shared
        self.num_slots = self.size = num_slots
        self.num_rows = self.rows = num_rows
        self.members, self.window = num_slots // num_rows, window
        self.width = self.columns = self.members * window
        self.temperature = 1.0
        self.truncation: Truncation | None = None
        self.sliding = _sliding_window(parts)
        self.additive = getattr(_config(parts), "_attn_implementation", None) == "eager"
        self.weight = parts.sampling_weight()
        device = self.device = self.weight.device
        self.is_end = torch.zeros(len(self.weight), dtype=torch.bool, device=device)
        self.slots = torch.arange(num_slots, device=device)
        self.marks = torch.zeros(num_rows * self.width, dtype=torch.int32, device=device)
        self.ahead = torch.zeros((num_slots, look_every), dtype=torch.int64, device=device)
        self.row = self.column = self.slots  # of the slots' tokens in a step
        self.used, self.key, self.count, self.limit = (
            torch.zeros(num_slots, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.live = torch.zeros(num_slots, dtype=torch.bool, device=device)
        hidden = parts.head.weight
        self.hidden = torch.zeros((num_slots, hidden.shape[1]), dtype=hidden.dtype, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.tokens = torch.full((num_slots, look_every), -1, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros((num_slots, look_every), dtype=torch.float32, device=device)
        self.log_mass = torch.zeros_like(self.log_probs)
        self.replays: dict[tuple[int, int], Callable[[], None]] = {}
        self._graphs = graphs_of(device)
        self._places = _places_of(parts)

    def holds(self, *, num_slots: int, window: int, look_every: int) -> bool:
        """Whether a call can decode on this state: it is large enough, and the weights are where they were."""
        large = self.num_slots >= num_slots and self.window >= window and self.tokens.shape[1] == look_every
        return large and self._places == _places_of(self.parts)

    def begin(self, *, size: int, is_end: Tensor, temperature: float, truncation: Truncation | None = None) -> None:
        """Start a call on `size` free slots. What its slots hold from an earlier one is never seen."""
        self.size, self.rows = size, rows_of(size, self.members)
        self.live.fill_(False)
        self.is_end.copy_(is_end)
        self.weight = self.parts.sampling_weight()
        if (temperature, truncation) != (self.temperature, self.truncation):  # numbers in the graphs
            self.temperature, self.truncation = temperature, truncation
            self.replays.clear()

    def step(self) -> None:
        """Sample one token per live slot and feed it. No shape depends on data, and nothing leaves the device."""
        size = self.size
        live, count = self.live[:size], self.count[:size]
        with torch.autocast(self.device.type, enabled=False):
            logits = self.parts.logits(self.hidden[:size], self.weight)
            numbers = device_uniforms(self.key[:size], count)
            tokens, log_probs, log_mass = drawn(logits, numbers, self.temperature, self.truncation)
        self.tokens[:size].index_copy_(1, self.turn, torch.where(live, tokens, -1)[:, None])
        self.log_probs[:size].index_copy_(1, self.turn, log_probs[:, None])
        if log_mass is not None:
            self.log_mass[:size].index_copy_(1, self.turn, log_mass[:, None])
        count.add_(live)
        live.logical_and_(~self.is_end[tokens] & (count < self.limit[:size]))
        self.feed(tokens)

    def feed(self, tokens: Tensor) -> None:
        """Run one token of each slot, int64 `[size]`, through the trunk; results of dead slots are ignored."""
        size, rows, columns = self.size, self.rows, self.columns
        live, used, slots = self.live[:size], self.used[:size], self.slots[:size]
        ahead = self.ahead[:size].index_select(1, self.turn)[:, 0]
        self.row, self.column = slots % rows, torch.where(live, ahead, 0)
        # A slot that is not live sees the first column only: a fully masked row would be NaN.
        first = (slots // rows * self.window).int()
        last = torch.where(live, first + used.int(), PARKED).view(-1, rows, 1)
        first = torch.where(live, first, PARKED).view(-1, rows, 1)
        marks = self.marks[: rows * columns].view(rows, columns)
        mask = (marks >= first) & (marks <= last)
        near = mask if self.sliding is None else mask & (marks > last - self.sliding)
        with steps_attended_by(_config(self.parts), _StepAttention()) if self.shared else nullcontext():
            hidden = self.parts.hidden(
                input_ids=tokens[:, None],
                position_ids=torch.where(live, used, 0)[:, None],
                attention_mask=self._shaped(mask, near),
                cache=self,
                use_cache=True,
            )
        self.hidden[:size].copy_(hidden[:, 0])
        used.add_(live)
        self.turn.add_(1)

    def _shaped(self, mask: Tensor, near: Tensor) -> Any:
        """Return ready-made masks in the form that the trunk takes.

        A trunk that built its own from this cache would assume one length for all slots.
        """
        if self.additive:
            dtype = self.hidden.dtype
            low = torch.finfo(dtype).min
            mask, near = (torch.zeros_like(m, dtype=dtype).masked_fill_(~m, low) for m in (mask, near))
        full, sliding = (m.transpose(0, 1)[:, None] for m in (mask, near))
        if self.form == "by_kind":
            return {"full_attention": full, "sliding_attention": sliding}
        return sliding if self.form == "near" else full

    def look_ahead(self, marks: Tensor, ahead: Tensor) -> None:
        """Set the marks of the columns that steps read, int32 `[rows, columns]`, and the columns that they write."""
        self.columns = marks.shape[1]
        self.marks[: marks.numel()].copy_(marks.flatten())
        self.ahead[: self.size, : ahead.shape[1]].copy_(ahead)
        self.turn.zero_()

    def advance(self, steps: int) -> None:
        """Take at most K steps without waiting for them on the host."""
        self.tokens[: self.size].fill_(-1)
        for _ in range(steps):
            replay = self.replays.get((self.size, self.columns))
            if replay is not None:
                replay()
                continue
            self.step()
            if self._graphs is not None:
                self._capture(self._graphs)

    def _capture(self, graphs: Graphs) -> None:
        """Capture the step for the current numbers of slots and columns; it has just run once outside a graph."""
        try:
            self.replays[self.size, self.columns] = graphs.capture(self.step)
        except RuntimeError as error:
            # The step of this model waits for the device. It still decodes, kernel by kernel.
            logger.warning("the decode step of %s was not captured: %s", type(self.parts.trunk).__name__, error)
            self._graphs = None

    def insert(self, facts: Tensor, cells: Tensor, states: States, hidden: Tensor) -> None:
        """Fill or refill slots with rows of a prefill.

        Args:
            facts: slots, the row of the prefill for each, its cached tokens, random key, tokens sampled so far and
                limit, int64 `[6, k]`.
            cells: of every token its row and column here, and there, int64 `[4, n]`.
            states: keys and values of right-padded rows.
            hidden: last hidden states of the rows, `[N, H]`.
        """
        row, column, source, position = cells
        for layer, pair in zip(self.static_layers, states, strict=True):
            if pair is None:
                continue
            keys, values = layer.storage(*pair, self.num_rows, self.width)
            keys[row, :, column] = pair[0][source, :, position]
            values[row, :, column] = pair[1][source, :, position]
        slots = facts[0]
        self.hidden[slots] = hidden[facts[1]]
        for target, values in zip((self.used, self.key, self.count, self.limit), facts[2:], strict=True):
            target[slots] = values
        self.live[slots] = torch.ones_like(slots, dtype=torch.bool)

    def move(self, slots: Tensor, cells: Tensor, *, size: int) -> None:
        """Move slots and their tokens, and compute only `size` slots; all others are free.

        Args:
            slots: where the live slots are and will be, int64 `[2, k]`.
            cells: row and column where every token is, and where it will be, int64 `[4, n]`.
            size: of the state from now on.
        """
        row, column, new_row, new_column = cells
        for layer in self.static_layers:
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    tensor[new_row, :, new_column] = tensor[row, :, column]
        for tensor in (self.used, self.key, self.count, self.limit, self.hidden):
            tensor[slots[1]] = tensor[slots[0]]
        self.live.fill_(False)
        self.live[slots[1]] = torch.ones_like(slots[1], dtype=torch.bool)
        self.size, self.rows = size, rows_of(size, self.members)

    def renew(self) -> None:
        """Pick up changed weights, and drop the graphs if they are in other tensors than before."""
        self.weight = self.parts.sampling_weight()
        places = _places_of(self.parts)
        if places != self._places:
            self._places = places
            self.replays.clear()


class KeptSlots:
    """The state that the next call of an engine decodes on.

    One call at a time has it; others make their own, and the one that is given back last is kept.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: StaticSlots | None = None

    def __reduce__(self) -> tuple[type[KeptSlots], tuple[()]]:
        """Copy as empty, so that an engine can be copied."""
        return KeptSlots, ()

    def take(
        self,
        parts: ModelParts,
        masks: Masks,
        *,
        size: int,
        window: int,
        is_end: Tensor,
        temperature: float,
        truncation: Truncation | None,
        look_every: int,
    ) -> StaticSlots:
        """Return a state of at least `size` slots and `window` columns, with `size` free slots.

        One that is made because the kept one is too small has as many of either as that one, or more: so that a run
        ends up with one state for all its calls.
        """
        with self._lock:
            state, self._state = self._state, None
        if state is None or not state.holds(num_slots=size, window=window, look_every=look_every):
            slots, columns = (
                (size, window) if state is None else (max(size, state.num_slots), max(window, state.window))
            )
            state = None  # its memory is free before the new one takes its own
            state = StaticSlots(
                parts,
                masks,
                num_slots=slots,
                num_rows=rows_of(slots, MOST_MEMBERS if masks.shared else 1),
                window=columns,
                look_every=look_every,
            )
        state.begin(size=size, is_end=is_end, temperature=temperature, truncation=truncation)
        return state

    def give(self, state: StaticSlots) -> None:
        """Keep a state after a call that ended well. After another one, its cache may hold NaN."""
        with self._lock:
            self._state = state

    def drop(self) -> None:
        """Free the memory of the state."""
        with self._lock:
            self._state = None


class StaticRun(Rollout):
    """Decodes on `StaticSlots`, and reads once in K tokens.

    Weights are replaced, calls aborted and deadlines enforced at these reads.
    """

    def __init__(self, *args: Any, masks: Masks, look_every: int = LOOK_EVERY, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.look_every = look_every
        longest = int((self.prompt_lengths[self.prompt_of] + self.limits).max())
        # As for the sizes of a call that ends: few sizes have few graphs.
        self.num_slots = min(self.engine.num_slots, _power_of_two(self.count))
        self.state = self.engine.kept.take(
            self.parts,
            masks,
            size=self.num_slots,
            window=-(-(longest + 1) // _FEWEST_COLUMNS) * _FEWEST_COLUMNS,
            is_end=self.upload(self.is_end),
            temperature=self.temperature,
            truncation=self.truncation,
            look_every=look_every,
        )
        self.columns = Columns(self.num_slots, self.state.rows, self.state.window)
        # Per slot: its completion, or -1 if free; the tokens in its cache; the tokens it has sampled.
        self.owner = np.full(self.num_slots, -1, dtype=np.int64)
        self.stored = np.zeros(self.num_slots, dtype=np.int64)
        self.sampled = np.zeros(self.num_slots, dtype=np.int64)

    def step(self) -> bool:
        """Sample up to K tokens for every live and every new completion; False when none is left."""
        self._fill()
        held = np.flatnonzero(self.owner >= 0)
        if not len(held):
            self.engine.kept.give(self.state)
            return False
        left = self.limits[self.owner[held]] - self.sampled[held]
        steps = min(self.look_every, int(left.max()))
        self._give_columns(held, self.stored[held] + np.minimum(left, steps), steps)
        self.state.advance(steps)
        self.report()
        self._look(steps)
        changed = self.give_way()
        if self.must_end():
            self.engine.kept.give(self.state)
            return self.cut(self.owner[self.owner >= 0])
        if changed:
            self._renew()
        return True

    def arrange(self, cache: PrefillCache, lengths: Tensor) -> States:
        """Return states in which every prompt begins at the first column."""
        return cache.left_aligned()

    def _fill(self) -> None:
        """Start completions in the free slots."""
        free = np.flatnonzero(self.owner < 0)[: self.count - self.next]
        if not len(free):
            return
        new = np.arange(self.next, self.next + len(free), dtype=np.int64)
        self.admit(new)
        owners = self.prompt_of[new]
        self.owner[free], self.stored[free], self.sampled[free] = new, self.prompt_lengths[owners], 0
        self.columns.extend(free, self.stored[free])
        for batch, mine, source in self.places_of(owners):
            self._insert(free[mine], batch.states, source, batch.hidden)

    def _insert(self, slots: Int64Array, states: States, source: Int64Array, hidden: Tensor) -> None:
        """Insert rows of a prefill into slots."""
        owners, stored = self.owner[slots], self.stored[slots]
        keys = self.keys[owners].view(np.int64)
        facts = np.stack((slots, source, stored, keys, self.sampled[slots], self.limits[owners]))
        cells = np.stack((*self.columns.cells(slots, stored), *tokens_of(source, stored)))
        self.state.insert(self.upload(facts), self.upload(cells), states, hidden)

    def _give_columns(self, held: Int64Array, counts: Int64Array, steps: int) -> None:
        """Give the live slots columns for these numbers of tokens, those of the next steps included.

        They are moved where a step then has fewer columns, and, once no completion is waiting, where half of the slots
        are enough.
        """
        self.columns.extend(held, counts)
        before, size = self.state.size, _power_of_two(len(held))
        if self.next < self.count or size > before // 2:
            size = before
        rows, read = rows_of(size, self.state.members), _few_columns(self.columns.edge)
        least = max(int(counts.max()), -(-int(counts.sum()) // rows))
        if size < before or _few_columns(1 + least) < read:
            slots, most = balanced(counts, rows, size // rows)
            if size < before or _few_columns(1 + most) < read:
                self._move(held, slots, counts, size)
        marks = self.columns.marks[:, : _few_columns(self.columns.edge)]
        ahead = self.columns.ahead(self.stored[: self.state.size], steps)
        self.state.look_ahead(self.upload(marks), self.upload(ahead))

    def _move(self, held: Int64Array, slots: Int64Array, counts: Int64Array, size: int) -> None:
        """Move the live slots to these, of `size` slots, and their tokens to the first columns of their rows."""
        facts = tuple(array[held] for array in (self.owner, self.stored, self.sampled))
        before = self.columns.cells(held, facts[1])
        self.columns = Columns(size, rows_of(size, self.state.members), self.state.window)
        self.columns.extend(slots, counts)
        cells = np.stack((*before, *self.columns.cells(slots, facts[1])))
        self.state.move(self.upload(np.stack((held, slots))), self.upload(cells), size=size)
        self.owner.fill(-1)
        for array, values in zip((self.owner, self.stored, self.sampled), facts, strict=True):
            array[slots] = values

    def _look(self, steps: int) -> None:
        """Read the sampled tokens in one copy, the only time that the host waits."""
        size = self.state.size
        # float64 holds token ids and log-probs exactly.
        state = self.state
        parts = [state.tokens, state.log_probs] + ([] if self.truncation is None else [state.log_mass])
        found = torch.stack([part[:size, :steps].double() for part in parts]).cpu().numpy()
        tokens, floats = found[0].astype(np.int64), found[1:].astype(np.float32)
        for step in range(steps):
            slots = np.flatnonzero(tokens[:, step] >= 0)
            if not len(slots):
                break
            rows, ids = self.owner[slots], tokens[slots, step]
            self.emit(rows, ids, floats[0][slots, step], None if self.truncation is None else floats[1][slots, step])
            self.sampled[slots] += 1
            stopped = self.is_end[ids]
            done = stopped | (self.sampled[slots] >= self.limits[rows])
            self.stopped[rows[stopped]] = True
            self.unreported += rows[done].tolist()
            # The token that ends a completion is not fed.
            self.stored[slots[~done]] += 1
            self.owner[slots[done]] = -1
            for slot in slots[done].tolist():
                self.columns.free(slot)

    def _renew(self) -> None:
        """Recompute the caches of the live slots, so that their next tokens depend on the current weights only."""
        self.forget()
        self.state.renew()
        slots = np.flatnonzero(self.owner >= 0)
        if not len(slots):
            return
        for part, states, hidden in self.prefilled_again(self.owner[slots], self.stored[slots]):
            source = np.arange(part.stop - part.start, dtype=np.int64)
            self._insert(slots[part], states, source, hidden)


def mask_form(parts: ModelParts) -> Masks | None:
    """Return how a trunk takes masks of static slots, found by one trial; None if no form works.

    As in `verified_parts`: a wrong mask does not fail, it gives other hidden states.
    """
    if parts.trunk not in _forms:
        _forms[parts.trunk] = _find_form(parts)
    return _forms[parts.trunk]


def _find_form(parts: ModelParts) -> Masks | None:
    if getattr(_config(parts), "layer_types", None):
        forms: tuple[MaskForm, ...] = ("by_kind", "near", "full")
    else:
        forms = ("near", "by_kind") if _sliding_window(parts) else ("full", "by_kind")
    sharing = (True, False) if is_sdpa(_config(parts)) else (False,)
    ways = [Masks(form, shared) for shared in sharing for form in forms]
    return first_right(parts, ways, _through_static_slots)[0]


@torch.inference_mode()
def _through_static_slots(parts: ModelParts, masks: Masks) -> Tensor:
    """Return the states of `probe` by prefill and single steps, on two slots of one row if any, and two not live."""
    tokens, lengths, new = probe(parts)
    device, rows = tokens.device, torch.arange(2, device=tokens.device)
    cache, hidden = prefill(parts, tokens[:, :-new], lengths)
    out = [hidden]
    state = StaticSlots(
        parts, masks, num_slots=4, num_rows=2 if masks.shared else 4, window=_FEWEST_COLUMNS, look_every=new
    )
    columns, slots, stored = Columns(4, state.rows, state.window), np.array([0, 2]), lengths.cpu().numpy()
    columns.extend(slots, stored + new)
    there = torch.from_numpy(slots).to(device)
    facts = torch.stack((there, rows, lengths, lengths, torch.zeros_like(lengths), torch.full_like(lengths, new + 1)))
    cells = np.stack((*columns.cells(slots, stored), *tokens_of(np.arange(2), stored)))
    state.insert(facts, torch.from_numpy(cells).to(device), cache.left_aligned(), hidden)
    start = np.zeros(4, dtype=np.int64)
    start[slots] = stored
    marks, ahead = (torch.from_numpy(x).to(device) for x in (columns.marks, columns.ahead(start, new)))
    state.look_ahead(marks, ahead)
    fed = torch.zeros(4, dtype=torch.int64, device=device)
    for step in range(new):
        fed[there] = tokens[rows, lengths + step]
        state.feed(fed)
        out.append(state.hidden[there])
    return torch.stack(out, 1)


def _places_of(parts: ModelParts) -> _Places:
    """Return address and dtype of every tensor of a model, which a graph refers to."""
    tensors = [t for module in (parts.trunk, parts.head) for t in (*module.parameters(), *module.buffers())]
    return [(tensor.data_ptr(), tensor.dtype) for tensor in tensors]


def _config(parts: ModelParts) -> Any:
    config: Any = parts.trunk.config
    return config.get_text_config(decoder=True)


def _sliding_window(parts: ModelParts) -> int | None:
    config = _config(parts)
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None)


def _few_columns(n: int) -> int:
    """Return the smallest number of columns for which a graph is made that is at least `n`.

    Four between a power of two and the next: with powers alone, attention reads a quarter more columns at log-normal
    lengths.
    """
    step = max(_FEWEST_COLUMNS, _power_of_two(n) // 8)
    return -(-n // step) * step


def _power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length() if n > 0 else 0
