"""Decode steps that run one after the other on a device, without the host between them.

On a GPU a step is short and has many kernels: most of the time goes to the host, which launches each kernel and reads
every token. Here the state of the slots consists of tensors at fixed addresses, so that a step can be captured as a
CUDA graph, and the host reads the tokens of up to K steps with one copy, at a *host sync*:

    cache      keys and values of all slots, and the shared column   see `bucket_cache`
    hidden     [S, H]      last hidden state             key    int64 [S]     key of the slot's random numbers
    length     int64 [S]   tokens in the cache           first  int64 [S]     tokens before the first sampled one
    end        int64 [S]   tokens at which a row ends    live   bool [S]      not so once it has ended
    forced     int64 [S, K]   tokens to feed in the next steps instead of sampled ones; -1 to sample
    tokens, log_probs, log_mass   [S, K]   of these steps

A step draws tokens with random numbers made on the device, marks the rows that end, and feeds all rows. A row that has
ended runs on until the host sync: its length stays, and so does its position; its further tokens are not used, and the
columns that they take are reserved. A slot without a row has length 0 and sees the one column that it writes. So no
shape and no kernel depends on data, and nothing leaves the device.

A *bucket* is a number of rows and a number of columns, each of a few kinds, and depends on the live rows of the call
alone. Its first step runs kernel by kernel and is captured; then the graph is replayed from the same state and compared
with it. What a graph holds by address or value is checked at each start of a call and after each change of weights: if
a tensor of the model was replaced, it is captured again. Weights that are copied into the same tensors leave it valid.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlhf_pipeline.data.upload import upload
from rlhf_pipeline.policies.attention import is_sdpa, repeats_keys
from rlhf_pipeline.policies.engines.bucket_cache import BucketCache
from rlhf_pipeline.policies.engines.cache_check import first_right, probe
from rlhf_pipeline.policies.engines.decode_step import DecodeStep, MaskForm, Masking, sliding_window, text_config
from rlhf_pipeline.policies.engines.protocol import Int64Array
from rlhf_pipeline.policies.engines.sampling import Truncation, device_uniforms
from rlhf_pipeline.policies.engines.slot_cache import prefill
from rlhf_pipeline.policies.engines.step_graphs import StepOutputs, check_replay, graphs_of
from rlhf_pipeline.policies.model_parts import ModelParts

_maskings: weakref.WeakKeyDictionary[nn.Module, Masking | None] = weakref.WeakKeyDictionary()


class StepBucket(NamedTuple):
    """The shape of a step, and the numbers that its graph contains."""

    rows: int
    columns: int
    temperature: float
    truncation: Truncation | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRows:
    """The live rows at a host sync, one per slot from the first on; all int64 `[rows]`, but `forced` `[rows, K]`."""

    length: Int64Array
    first: Int64Array
    end: Int64Array
    key: Int64Array
    forced: Int64Array | None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the buffers of a state: slots, maximum tokens of a row, maximum steps at a time."""

    num_slots: int
    longest: int
    ahead: int


class DeviceSteps:
    """The state above, and the steps over it.

    Args:
        parts: trunk and head of the model.
        masking: how its layers attend.
        sizes: of the buffers.
    """

    def __init__(self, parts: ModelParts, masking: Masking, sizes: Sizes) -> None:
        self.parts, self.masking, self.sizes = parts, masking, sizes
        device = self.device = parts.head.weight.device
        slots, ahead = sizes.num_slots, sizes.ahead
        self.cache = BucketCache(parts.num_layers, num_slots=slots, longest=sizes.longest, ahead=ahead, device=device)
        self.decode = DecodeStep(parts, self.cache, masking)
        self.is_end = torch.zeros(len(parts.head.weight), dtype=torch.bool, device=device)
        self.length, self.first, self.end, self.key = (
            torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.live = torch.zeros(slots, dtype=torch.bool, device=device)
        weight = parts.head.weight
        self.hidden = torch.zeros((slots, weight.shape[1]), dtype=weight.dtype, device=device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self.forced = torch.full((slots, ahead), -1, dtype=torch.int64, device=device)
        self.tokens = torch.zeros((slots, ahead), dtype=torch.int64, device=device)
        self.log_probs = torch.zeros((slots, ahead), dtype=torch.float32, device=device)
        self.log_mass = torch.zeros_like(self.log_probs)
        self.replays: dict[StepBucket, Callable[[], None]] = {}
        self.graphs = graphs_of(device)
        self.refusal: str | None = None
        """The reason why the steps of this model were not captured."""
        self._contents = contents_of(parts)

    def begin(self, is_end: npt.NDArray[np.bool_], temperature: float, truncation: Truncation | None) -> None:
        """Start a call on free slots."""
        self.cache.clear()
        self.hidden.zero_()
        self.is_end.copy_(self._upload(is_end))
        self.decode.temperature, self.decode.truncation = temperature, truncation
        self.renew()

    def renew(self) -> None:
        """Pick up changed weights, and drop the graphs if these are in other tensors than before."""
        contents, weight = contents_of(self.parts), self.parts.sampling_weight()
        if contents != self._contents:
            self._contents = contents
            self.replays.clear()
        elif weight.data_ptr() != self.decode.weight.data_ptr():
            weight = self.decode.weight.copy_(weight)  # a cast copy, which graphs refer to
        self.decode.weight = weight

    def fits(self, masking: Masking, sizes: Sizes) -> bool:
        """Return whether a call of these sizes can use this state: the same buffers, and a model on this device."""
        weight = self.parts.head.weight
        same = (weight.device, weight.dtype, len(weight)) == (self.device, self.hidden.dtype, len(self.is_end))
        return same and (masking, sizes) == (self.masking, self.sizes)

    def place(self, hidden: Tensor) -> None:
        """Set the last hidden states of the first slots."""
        self.hidden[: len(hidden)].copy_(hidden)

    def load(self, rows: SlotRows) -> None:
        """Set what the next steps need to know about the live rows."""
        count, computed = len(rows.length), self.cache.rows
        table = np.zeros((5, computed), np.int64)
        table[:4, :count] = rows.length, rows.first, rows.end, rows.key
        table[4, :count] = 1
        table = self._upload(table)
        for i, target in enumerate((self.length, self.first, self.end, self.key)):
            target[:computed].copy_(table[i])
        self.live[:computed].copy_(table[4])
        if rows.forced is None:
            self.forced[:computed].fill_(-1)
        else:
            forced = np.full((computed, self.sizes.ahead), -1, np.int64)
            forced[:count] = rows.forced
            self.forced[:computed].copy_(self._upload(forced))
        self.turn.zero_()

    def step(self) -> None:
        """Draw one token per row and feed it. No shape depends on data, and nothing leaves the device."""
        rows = self.cache.rows
        live, length = self.live[:rows], self.length[:rows]
        uniform = device_uniforms(self.key[:rows], length - self.first[:rows])
        drawn, log_probs, log_mass = self.decode.draw(self.hidden[:rows], uniform)
        forced = self.forced[:rows].index_select(1, self.turn)[:, 0]
        sampled = forced < 0
        tokens = torch.where(sampled, drawn, forced)
        self.tokens[:rows].index_copy_(1, self.turn, tokens[:, None])
        self.log_probs[:rows].index_copy_(1, self.turn, log_probs[:, None])
        if log_mass is not None:
            self.log_mass[:rows].index_copy_(1, self.turn, log_mass[:, None])
        ended = self.is_end.index_select(0, tokens) | (length + 1 >= self.end[:rows])
        live.logical_and_(~(ended & sampled))
        self.hidden[:rows].copy_(self.decode.feed(tokens, length))
        length.add_(live)
        self.cache.at.add_(1)
        self.turn.add_(1)

    def advance(self, steps: int) -> None:
        """Take at most K steps without waiting for them on the host."""
        bucket = StepBucket(self.cache.rows, self.cache.high, self.decode.temperature, self.decode.truncation)
        for _ in range(steps):
            replay = self.replays.get(bucket)
            if replay is not None:
                replay()
            elif self.graphs is None:
                self.step()
            else:
                self._first_step(bucket)
        self.cache.column += steps

    def read(
        self, count: int, steps: int
    ) -> tuple[Int64Array, npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
        """Return the tokens of the first rows in these steps, their log-probs and masses, `[count, steps]`.

        It is one copy, and the only time that the host waits.
        """
        parts = [self.tokens, self.log_probs] + ([] if self.decode.truncation is None else [self.log_mass])
        # float64 holds token ids and log-probs exactly.
        copied = torch.stack([part[:count, :steps].double() for part in parts]).cpu().numpy()
        floats = copied[1:].astype(np.float32)
        return copied[0].astype(np.int64), floats[0], floats[1] if len(floats) > 1 else None

    def _first_step(self, bucket: StepBucket) -> None:
        """Take the first step of a bucket kernel by kernel, capture it, and replay it from the same state."""
        rows = self.cache.rows
        changed = (self.hidden, self.length, self.live, self.cache.at, self.turn)
        before = [tensor.clone() for tensor in changed]
        at = self.turn.clone()
        self.step()
        eager = self._outputs(at)
        assert self.graphs is not None
        try:
            replay = self.graphs.capture(self.step)
        except RuntimeError as error:
            # It waits for the device somewhere. The step above counts, and so do all others, kernel by kernel.
            self.graphs, self.refusal = None, (str(error).strip() or type(error).__name__).splitlines()[0]
            return
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        replay()
        alive = before[2][:rows]
        outputs = self._outputs(at)
        check_replay(
            self.parts,
            StepOutputs(*(x[alive] for x in eager)),
            StepOutputs(*(x[alive] for x in outputs)),
            bucket=f"{bucket.rows} rows, {bucket.columns} columns",
        )
        self.replays[bucket] = replay

    def _outputs(self, at: Tensor) -> StepOutputs:
        rows = self.cache.rows
        tokens, log_probs = (x[:rows].index_select(1, at)[:, 0] for x in (self.tokens, self.log_probs))
        return StepOutputs(tokens, log_probs, self.hidden[:rows].clone())

    def _upload(self, values: npt.NDArray[np.generic]) -> Tensor:
        return upload([torch.from_numpy(np.ascontiguousarray(values))], self.device)[0]


@dataclass(eq=False)
class RetainedSteps:
    """The state that the next call of an engine decodes on, with its graphs.

    One call at a time has it; calls beside it make their own, and the state that is returned last is retained.
    """

    state: DeviceSteps | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[type[RetainedSteps], tuple[()]]:
        """Copy as empty, so that an engine can be copied."""
        return RetainedSteps, ()

    def take(self, parts: ModelParts, masking: Masking, sizes: Sizes) -> DeviceSteps:
        """Return a state of exactly these sizes: what a step computes never depends on earlier calls."""
        with self._lock:
            state, self.state = self.state, None
        if state is None or not state.fits(masking, sizes):
            state = None  # its memory is free before the new one takes its own
            state = DeviceSteps(parts, masking, sizes)
        return state

    def give(self, state: DeviceSteps) -> None:
        """Retain a state for the next call."""
        with self._lock:
            self.state = state

    def drop(self) -> None:
        """Free the memory of the state."""
        with self._lock:
            self.state = None


def contents_of(parts: ModelParts) -> list[Any]:
    """Return what a graph takes from a model: address and dtype of every tensor, and how adapters are switched."""
    modules = (parts.trunk, parts.head)
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    switches = [
        (str(module.active_adapters), bool(module.disable_adapters), bool(module.merged))
        for module in parts.trunk.modules()
        if hasattr(module, "disable_adapters") and hasattr(module, "merged")
    ]
    return [(tensor.data_ptr(), tensor.dtype) for tensor in tensors] + switches


def masking_of(parts: ModelParts) -> Masking | None:
    """Return how a trunk attends in device steps, found by one trial; None if it has to be run row by row.

    As in `verified_parts`: a wrong mask does not fail, it gives other hidden states.
    """
    if parts.num_states or hasattr(parts.head.weight, "full_tensor"):  # recurrent states; weights in shards
        return None
    if parts.trunk not in _maskings:
        config = text_config(parts)
        if getattr(config, "layer_types", None):
            forms: tuple[MaskForm, ...] = ("by_kind", "near", "full")
        else:
            forms = ("near", "by_kind") if sliding_window(config) else ("full", "by_kind")
        heads = getattr(config, "num_attention_heads", 1)
        shares = (getattr(config, "num_key_value_heads", None) or heads) < heads
        ways = [Masking(form=form) for form in forms]
        if shares and is_sdpa(config) and repeats_keys():
            ways = [Masking(form=form, grouped=True) for form in forms] + ways
        way, gap, _ = first_right(parts, ways, _through_device_steps)
        if gap is None:
            return ways[0]  # diverged weights: the host reports them when it reads the log-probs
        _maskings[parts.trunk] = way
    return _maskings[parts.trunk]


@torch.inference_mode()
def _through_device_steps(parts: ModelParts, masking: Masking) -> Tensor:
    """Return the states of `probe` by prefill and steps on two live rows beside two slots without one."""
    tokens, lengths, new = probe(parts)
    rows, longest = torch.arange(2, device=tokens.device), tokens.shape[1] - new
    states, hidden = prefill(parts, tokens[:, :longest], lengths)
    out = [hidden]
    state = DeviceSteps(parts, masking, Sizes(num_slots=4, longest=longest + new, ahead=1))
    stored = lengths.cpu().numpy()
    forced = tokens.cpu().numpy()
    state.cache.begin(0, rows=0, to_come=2, widest=longest)
    state.cache.insert(rows, states, rows)
    for step in range(new):
        state.cache.open_window(4, longest + step)
        length = stored + step
        state.load(
            SlotRows(
                length=length,
                first=stored,
                end=np.full(2, longest + new + 1),
                key=stored,
                forced=forced[np.arange(2), length][:, None],
            )
        )
        state.step()
        state.cache.column += 1
        out.append(state.hidden[rows])
    return torch.stack(out, 1)
