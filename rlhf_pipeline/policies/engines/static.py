"""Decoding with steps of one shape, entirely on the device, so that a CUDA graph can hold them.

On a GPU a decode step is short and has many kernels: most of the time goes to the host, which launches each kernel and
reads every token. Here the host reads once in several tokens. The state of S slots over a window of W columns consists
of tensors at fixed addresses:

    cache      2 x [S, key heads, W, head dim] per layer; column c of a slot holds its c-th token
    hidden     [S, H]      last hidden state                 key     int64 [S]   key of the slot's random numbers
    used       int64 [S]   tokens in the cache               count   int64 [S]   tokens sampled so far
    limit      int64 [S]   most tokens                       live    bool  [S]
    tokens, log_probs      [S, K]  of the last K steps; a token of -1 where a slot was not live

A step applies the head, samples with numbers made on the device, marks ended completions, and feeds S tokens. No shape
depends on data, and nothing leaves the device, so on CUDA it is captured as a graph, one per number of slots and
columns: both are among a few numbers, or the maximum, as small as the live completions allow. After at most K steps,
the host reads the sampled tokens with one copy, replaces weights, and fills free slots.

State and graphs outlive a call: an engine keeps those of the largest. A graph holds the addresses of the weights, so
it serves all weights that are copied into the same tensors, and is dropped when a tensor is replaced.

On a CPU, where every padded row and column costs time, this takes 1.2 to 2.2 times as long as `slots._Ragged`; there it
serves the tests, which compare the two.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from rlhf_pipeline.policies.engines.cache_check import first_right, probe
from rlhf_pipeline.policies.engines.protocol import Int64Array
from rlhf_pipeline.policies.engines.rollout import Rollout, States
from rlhf_pipeline.policies.engines.sampling import device_uniforms, sample_rows
from rlhf_pipeline.policies.engines.slot_cache import CacheLayer, PrefillCache, prefill
from rlhf_pipeline.policies.model_parts import ModelParts

logger = logging.getLogger(__name__)

LOOK_EVERY: Final = 16
"""Tokens between two reads by the host. A slot that finishes in between stays empty until the next read."""

MaskForm = Literal["full", "near", "by_kind"]
"""The form in which a trunk takes ready-made masks: one, one with the sliding window, or a dict by kind of layer."""

_FEWEST_COLUMNS = 64
_Places = list[tuple[int, torch.dtype]]
_forms: weakref.WeakKeyDictionary[nn.Module, MaskForm | None] = weakref.WeakKeyDictionary()
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
        keys, values = self.storage(key_states, value_states, owner.num_slots, owner.window)
        rows, column = owner.rows[: owner.size], owner.column[: owner.size]
        keys[rows, :, column] = key_states[:, :, 0]
        values[rows, :, column] = value_states[:, :, 0]
        return keys[: owner.size, :, : owner.columns], values[: owner.size, :, : owner.columns]

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.columns, 0


class StaticSlots(Cache):
    """The state above, and the step over it.

    Args:
        parts: trunk and head of the model.
        form: how the trunk takes its mask.
        num_slots: S.
        window: W; one more than the longest completion with its prompt: slots that are not live write to the last
            column.
        look_every: K.

    Attributes:
        size: how many slots a step computes, from the first on.
        columns: how many columns it reads, from the first on.
    """

    def __init__(
        self,
        parts: ModelParts,
        form: MaskForm,
        *,
        num_slots: int,
        window: int,
        look_every: int,
    ) -> None:
        self.static_layers = [_StaticLayer(self) for _ in range(parts.num_layers)]
        super().__init__(layers=[*self.static_layers])
        self.parts = parts
        self.form: MaskForm = form
        self.num_slots = self.size = num_slots
        self.window = self.columns = window
        self.temperature = 1.0
        self.sliding = _sliding_window(parts)
        self.additive = getattr(_config(parts), "_attn_implementation", None) == "eager"
        self.weight = parts.sampling_weight()
        device = self.device = self.weight.device
        self.is_end = torch.zeros(len(self.weight), dtype=torch.bool, device=device)
        self.rows = torch.arange(num_slots, device=device)
        self.all_columns = torch.arange(window, device=device)
        self.used, self.key, self.count, self.limit, self.column = (
            torch.zeros(num_slots, dtype=torch.int64, device=device) for _ in range(5)
        )
        self.live = torch.zeros(num_slots, dtype=torch.bool, device=device)
        hidden = parts.head.weight
        self.hidden = torch.zeros((num_slots, hidden.shape[1]), dtype=hidden.dtype, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.tokens = torch.full((num_slots, look_every), -1, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros((num_slots, look_every), dtype=torch.float32, device=device)
        self.replays: dict[tuple[int, int], Callable[[], None]] = {}
        self._graphs = graphs_of(device)
        self._places = _places_of(parts)

    def holds(self, *, num_slots: int, window: int, look_every: int) -> bool:
        """Whether a call can decode on this state: it is large enough, and the weights are where they were."""
        large = self.num_slots >= num_slots and self.window >= window and self.tokens.shape[1] == look_every
        return large and self._places == _places_of(self.parts)

    def begin(self, *, size: int, is_end: Tensor, temperature: float) -> None:
        """Start a call on `size` free slots. What its slots hold from an earlier one is never seen."""
        self.size = size
        self.live.fill_(False)
        self.is_end.copy_(is_end)
        self.weight = self.parts.sampling_weight()
        if temperature != self.temperature:  # a number in the graphs
            self.temperature = temperature
            self.replays.clear()

    def step(self) -> None:
        """Sample one token per live slot and feed it. No shape depends on data, and nothing leaves the device."""
        size = self.size
        live, count = self.live[:size], self.count[:size]
        with torch.autocast(self.device.type, enabled=False):
            logits = self.parts.logits(self.hidden[:size], self.weight)
            tokens, log_probs = sample_rows(logits, device_uniforms(self.key[:size], count), self.temperature)
        self.tokens[:size].index_copy_(1, self.turn, torch.where(live, tokens, -1)[:, None])
        self.log_probs[:size].index_copy_(1, self.turn, log_probs[:, None])
        self.turn.add_(1)
        count.add_(live)
        live.logical_and_(~self.is_end[tokens] & (count < self.limit[:size]))
        self.feed(tokens)

    def feed(self, tokens: Tensor) -> None:
        """Run one token of each slot, int64 `[size]`, through the trunk; results of dead slots are ignored."""
        size, columns = self.size, self.columns
        live, used = self.live[:size], self.used[:size]
        column = torch.where(live, used, self.window - 1)
        self.column[:size].copy_(column)
        # A slot that is not live sees its first column only: a fully masked row would be NaN.
        place, lives = self.all_columns[:columns], live[:, None]
        mask = (place <= column[:, None]) & (lives | (place == 0))
        near = mask if self.sliding is None else mask & ((place > column[:, None] - self.sliding) | ~lives)
        hidden = self.parts.hidden(
            input_ids=tokens[:, None],
            position_ids=torch.where(live, used, 0)[:, None],
            attention_mask=self._shaped(mask, near),
            cache=self,
            use_cache=True,
        )
        self.hidden[:size].copy_(hidden[:, 0])
        used.add_(live)

    def _shaped(self, mask: Tensor, near: Tensor) -> Any:
        """Return ready-made masks in the form that the trunk takes.

        A trunk that built its own from this cache would assume one length for all slots.
        """
        if self.additive:
            dtype = self.hidden.dtype
            low = torch.finfo(dtype).min
            mask, near = (torch.zeros_like(m, dtype=dtype).masked_fill_(~m, low) for m in (mask, near))
        full, sliding = mask[:, None, None], near[:, None, None]
        if self.form == "by_kind":
            return {"full_attention": full, "sliding_attention": sliding}
        return sliding if self.form == "near" else full

    def advance(self, steps: int, *, columns: int) -> None:
        """Take steps without waiting for them on the host.

        Args:
            steps: at most K.
            columns: how many the longest live slot needs by the last step.
        """
        self.turn.zero_()
        self.tokens[: self.size].fill_(-1)
        self.columns = min(self.window, _few_columns(columns))
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

    def insert(self, slots: Tensor, states: States, source: Tensor, facts: Tensor, hidden: Tensor) -> None:
        """Fill or refill slots with rows of a prefill.

        Args:
            slots: int64 `[k]`.
            states: keys and values of right-padded rows.
            source: the row for each slot, int64 `[k]`.
            facts: cached tokens, random keys, tokens sampled so far and limits of each slot, int64 `[4, k]`.
            hidden: last hidden states of the rows, `[N, H]`.
        """
        for layer, pair in zip(self.static_layers, states, strict=True):
            if pair is None:
                continue
            keys, values = layer.storage(*pair, self.num_slots, self.window)
            width = pair[0].shape[2]
            keys[slots, :, :width] = pair[0][source]
            values[slots, :, :width] = pair[1][source]
        self.hidden[slots] = hidden[source]
        for target, values in zip((self.used, self.key, self.count, self.limit), facts, strict=True):
            target[slots] = values
        self.live[slots] = torch.ones_like(slots, dtype=torch.bool)

    def keep(self, slots: Tensor, size: int) -> None:
        """Move the given slots to the front, in this order, and compute only `size` slots; the others are free."""
        count = len(slots)
        moved: list[Tensor] = [self.used, self.key, self.count, self.limit, self.hidden, self.live]
        for layer in self.static_layers:
            if layer.keys is not None and layer.values is not None:
                moved += [layer.keys, layer.values]
        for tensor in moved:
            tensor[:count] = tensor[slots]
        self.live[count:].fill_(False)
        self.size = size

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
        form: MaskForm,
        *,
        size: int,
        window: int,
        is_end: Tensor,
        temperature: float,
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
                form,
                num_slots=slots,
                window=columns,
                look_every=look_every,
            )
        state.begin(size=size, is_end=is_end, temperature=temperature)
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

    def __init__(self, *args: Any, form: MaskForm, look_every: int = LOOK_EVERY, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.look_every = look_every
        longest = int((self.prompt_lengths[self.prompt_of] + self.limits).max())
        # As for the sizes of a call that ends: few sizes have few graphs.
        self.num_slots = min(self.engine.num_slots, _power_of_two(self.count))
        self.state = self.engine.kept.take(
            self.parts,
            form,
            size=self.num_slots,
            window=-(-(longest + 1) // _FEWEST_COLUMNS) * _FEWEST_COLUMNS,
            is_end=self.upload(self.is_end),
            temperature=self.temperature,
            look_every=look_every,
        )
        # Per slot: its completion, or -1 if free; the tokens in its cache; the tokens it has sampled.
        self.owner = np.full(self.num_slots, -1, dtype=np.int64)
        self.stored = np.zeros(self.num_slots, dtype=np.int64)
        self.sampled = np.zeros(self.num_slots, dtype=np.int64)

    def step(self) -> bool:
        """Sample up to K tokens for every live and every new completion; False when none is left."""
        self._fill()
        held = self.owner >= 0
        if not held.any():
            self.engine.kept.give(self.state)
            return False
        left = self.limits[self.owner[held]] - self.sampled[held]
        steps = min(self.look_every, int(left.max()))
        self.state.advance(steps, columns=int(self.stored[held].max()) + steps + 1)
        self.report()
        self._look(steps)
        changed = self.give_way()
        if self.must_end():
            self.engine.kept.give(self.state)
            return self.cut(self.owner[self.owner >= 0])
        if changed:
            self._renew()
        self._shrink()
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
        for batch, mine, source in self.places_of(owners):
            self._insert(free[mine], batch.states, source, batch.hidden)

    def _insert(self, slots: Int64Array, states: States, source: Int64Array, hidden: Tensor) -> None:
        """Insert rows of a prefill into slots, with one upload."""
        owners = self.owner[slots]
        keys = self.keys[owners].view(np.int64)
        facts = (slots, source, self.stored[slots], keys, self.sampled[slots], self.limits[owners])
        there = self.upload(np.stack(facts))
        self.state.insert(there[0], states, there[1], there[2:], hidden)

    def _look(self, steps: int) -> None:
        """Read the sampled tokens in one copy, the only time that the host waits."""
        size = self.state.size
        # float64 holds token ids and log-probs exactly.
        parts = (self.state.tokens[:size, :steps].double(), self.state.log_probs[:size, :steps].double())
        both = torch.stack(parts).cpu().numpy()
        tokens, log_probs = both[0].astype(np.int64), both[1].astype(np.float32)
        for step in range(steps):
            slots = np.flatnonzero(tokens[:, step] >= 0)
            if not len(slots):
                break
            rows, drawn = self.owner[slots], tokens[slots, step]
            self.emit(rows, drawn, log_probs[slots, step])
            self.sampled[slots] += 1
            stopped = self.is_end[drawn]
            done = stopped | (self.sampled[slots] >= self.limits[rows])
            self.stopped[rows[stopped]] = True
            self.unreported += rows[done].tolist()
            # The token that ends a completion is not fed.
            self.stored[slots[~done]] += 1
            self.owner[slots[done]] = -1

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

    def _shrink(self) -> None:
        """Compute fewer slots once no completion is waiting and half of the slots are free."""
        held = np.flatnonzero(self.owner >= 0)
        size = _power_of_two(len(held))
        if self.next < self.count or not len(held) or size > self.state.size // 2:
            return
        self.state.keep(self.upload(held), size)
        for array in (self.owner, self.stored, self.sampled):
            array[: len(held)] = array[held]
        self.owner[len(held) :] = -1


def mask_form(parts: ModelParts) -> MaskForm | None:
    """Return the form in which a trunk takes masks of static slots, found by one trial; None if no form works.

    As in `verified_parts`: a wrong mask does not fail, it gives other hidden states.
    """
    if parts.trunk not in _forms:
        _forms[parts.trunk] = _find_form(parts)
    return _forms[parts.trunk]


def _find_form(parts: ModelParts) -> MaskForm | None:
    if getattr(_config(parts), "layer_types", None):
        candidates: tuple[MaskForm, ...] = ("by_kind", "near", "full")
    else:
        candidates = ("near", "by_kind") if _sliding_window(parts) else ("full", "by_kind")
    return first_right(parts, candidates, _through_static_slots)[0]


@torch.inference_mode()
def _through_static_slots(parts: ModelParts, form: MaskForm) -> Tensor:
    """Return the states of `probe` by prefill and single steps, on two slots and a third that is not live."""
    tokens, lengths, new = probe(parts)
    device, rows = tokens.device, torch.arange(2, device=tokens.device)
    cache, hidden = prefill(parts, tokens[:, :-new], lengths)
    out = [hidden]
    state = StaticSlots(parts, form, num_slots=3, window=_FEWEST_COLUMNS, look_every=new)
    facts = torch.stack((lengths, lengths, torch.zeros_like(lengths), torch.full_like(lengths, new + 1)))
    state.insert(rows, cache.left_aligned(), rows, facts, out[0])
    fed = torch.zeros(3, dtype=torch.int64, device=device)
    for step in range(new):
        fed[:2] = tokens[rows, lengths + step]
        state.feed(fed)
        out.append(state.hidden[:2].clone())
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
