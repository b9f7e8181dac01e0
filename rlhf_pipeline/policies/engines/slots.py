"""Generation with slots: completions of very different lengths, side by side, without waiting for the longest.

A static batch runs until its longest member stops, so with lengths that vary tenfold most of its rows are finished and
still computed. Here a row that finishes leaves at once and the next of the queue takes its slot; a prompt is computed
once for its whole group; and a token's log-prob is taken from the very probabilities that it was sampled from, so no
`[B, T, V]` logits are kept and nothing is scored twice.

One step is: fill free slots from the queue; apply the head to the last hidden state of every row, those of fresh
prompts included; sample; drop what finished; copy the prompts of new rows that go on into slots; one forward pass of
the rest. A completion of one token therefore never takes a slot.

Profile (one thread, Qwen2 with hidden 256 and 4 layers, 64 slots, 8 x 8 completions of 4 to 400 tokens): at a
vocabulary of 4,000 the matmuls take 35 % of the time, attention 20 %, the rest of the model's forward 35 %, sampling
4 %, cache memory and the bookkeeping of this module 5 %; at 32,000 the matmuls take 56 %, two thirds of it the head. So
what counts is how many rows and columns are computed at all: hence rows that leave at once, live rows kept together,
and a window of columns no wider than the longest live row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.policies._model_parts import ModelParts
from rlhf_pipeline.policies.engines.cache_check import WITHOUT_SLOTS, verified_parts
from rlhf_pipeline.policies.engines.completions import Completion, Int64Array, RaggedCompletions, collect
from rlhf_pipeline.policies.engines.sampling import sample_rows
from rlhf_pipeline.policies.engines.slot_cache import PrefillCache, SlotCache
from rlhf_pipeline.policies.engines.uniforms import stream_keys, uniforms

__all__ = ["Completion", "RaggedCompletions", "SlotEngine", "WeightRefresh"]

_PREFILL_TOKENS = 4096
"""Padded tokens of one prefill pass. Prompts are prefilled that far ahead of their turn, so that slots which free up
one by one do not cost one small forward pass each."""


@dataclass(slots=True)
class WeightRefresh:
    """Newer weights in the middle of a rollout, as PipelineRL has it (https://arxiv.org/abs/2509.19128).

    What is in the caches was computed by earlier weights and is not computed again. Each token keeps the log-prob that
    it was sampled with, so importance weights stay right.

    Attributes:
        load: loads the newest weights in place and returns their version.
        every: sampled tokens of each slot between two calls.
        version: of the weights in use.
    """

    load: Callable[[], int]
    every: int
    version: int

    def due(self, step: int) -> bool:
        """Load newer weights if it is time; return True if they may have changed."""
        if step % self.every:
            return False
        before, self.version = self.version, self.load()
        return self.version != before


@dataclass(slots=True)
class _Prefilled:
    """A batch of prompts after their forward pass, kept until the last member of the last one has started."""

    states: list[tuple[Tensor, Tensor] | None]
    hidden: Tensor
    first_prompt: int
    last_prompt: int


class SlotEngine:
    """Samples completions of a causal language model on a fixed number of slots.

    Use it through `CausalLMPolicy.generate_groups`.

    Args:
        parts: trunk and head of the model.
        num_slots: the most completions that are live at once.
        eos_token_ids: tokens that end a completion; may be empty.

    Raises:
        DefinitionError: the model keeps a kind of cache that slots cannot hold, or computes something else with one.
    """

    def __init__(self, parts: ModelParts, *, num_slots: int, eos_token_ids: Sequence[int] = ()) -> None:
        if num_slots < 1:
            raise DefinitionError(f"num_slots is {num_slots}; it must be at least 1.")
        if parts.cache_refusal is not None:
            raise DefinitionError(
                f"The slot engine cannot generate with {type(parts.trunk).__name__}: {parts.cache_refusal}. "
                f"{WITHOUT_SLOTS}"
            )
        self.parts = verified_parts(parts)
        self.num_slots = num_slots
        vocab = int(parts.head.weight.shape[0])
        self._vocab = vocab
        self._is_eos = np.zeros(vocab, dtype=np.bool_)
        for token in eos_token_ids:
            if 0 <= token < vocab:
                self._is_eos[token] = True

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        group_size: int,
        max_new_tokens: int | Sequence[int],
        temperature: float,
        seed: int,
        stream_ids: Sequence[int] | None = None,
        refresh: WeightRefresh | None = None,
    ) -> RaggedCompletions:
        """Sample `group_size` completions of every prompt.

        Args:
            prompts: token ids, one sequence per prompt, no padding.
            group_size: completions per prompt, at least 1.
            max_new_tokens: the limit, for all, per prompt, or per completion (prompt-major).
            temperature: above 0, or 0 for the most probable token with log-probs at temperature 1.
            seed: with the stream id, the member and the token index it fixes every random number.
            stream_ids: one id per prompt; the prompt's index when None.
            refresh: replaces the weights while completions are sampled; None keeps them.

        Returns:
            The completions, prompt-major and member-minor. A completion also ends, with "length", where prompt and
            completion together fill the model's positions.

        Raises:
            DataError: a prompt is empty, has ids outside the vocabulary, or leaves no position for a new token; or the
                model gave logits that are not finite.
            DefinitionError: an argument is out of range.
        """
        lengths, limits = self._check(prompts, group_size, max_new_tokens, temperature)
        if stream_ids is None:
            stream_ids = range(len(prompts))
        elif len(stream_ids) != len(prompts):
            raise DefinitionError(f"{len(stream_ids)} stream_ids were given for {len(prompts)} prompts; give one each.")
        count = len(prompts) * group_size
        prompt_of = np.repeat(np.arange(len(prompts), dtype=np.int64), group_size)
        member_of = np.tile(np.arange(group_size, dtype=np.int64), len(prompts))
        if count == 0:
            none = None if refresh is None else []
            return collect([], [], [], prompt_of, member_of, np.zeros(0, np.bool_), none)
        streams = np.array([int(s) for s in stream_ids], dtype=object)[prompt_of].tolist()
        run = _Run(
            self,
            prompts=prompts,
            prompt_lengths=lengths,
            prompt_of=prompt_of,
            limits=limits,
            keys=stream_keys(seed, streams, member_of),
            temperature=temperature,
        )
        if refresh is None:
            while run.step():
                pass
            return collect(run.out_rows, run.out_tokens, run.out_log_probs, prompt_of, member_of, run.stopped)
        versions = [refresh.version]
        while run.step(refresh):
            versions.append(refresh.version)
        return collect(run.out_rows, run.out_tokens, run.out_log_probs, prompt_of, member_of, run.stopped, versions)

    def _check(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        max_new_tokens: int | Sequence[int],
        temperature: float,
    ) -> tuple[Int64Array, Int64Array]:
        """Return (prompt lengths `[P]`, new-token limits `[P * group_size]`) of valid arguments."""
        if group_size < 1:
            raise DefinitionError(f"group_size is {group_size}; it must be at least 1.")
        if not (temperature >= 0 and np.isfinite(temperature)):
            raise DefinitionError(f"temperature is {temperature}; it must be a finite number >= 0.")
        lengths = np.array([len(p) for p in prompts], dtype=np.int64)
        count = len(prompts) * group_size
        given = np.asarray(max_new_tokens, dtype=np.int64)
        if given.ndim == 0:
            limits = np.full(count, int(given), dtype=np.int64)
        elif given.shape == (len(prompts),):
            limits = np.repeat(given, group_size)
        elif given.shape == (count,):
            limits = given.copy()
        else:
            raise DefinitionError(
                f"max_new_tokens has shape {given.shape}; give one number, one per prompt ({len(prompts)}) "
                f"or one per completion ({count})."
            )
        if count and limits.min() < 1:
            raise DefinitionError(f"max_new_tokens is {limits.min()}; it must be at least 1.")
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise DataError(
                    f"Prompt {i} has no tokens, and a model needs at least one to start from. "
                    "Begin it with a BOS token, or drop it."
                )
            low, high = min(prompt), max(prompt)
            if low < 0 or high >= self._vocab:
                raise DataError(
                    f"Prompt {i} has the token id {low if low < 0 else high}; the model's vocabulary is "
                    f"0 .. {self._vocab - 1}. Encode it with this model's own tokenizer."
                )
        most = self.parts.max_positions
        if most is not None and count:
            longest = int(lengths.argmax())
            if lengths[longest] >= most:
                raise DataError(
                    f"Prompt {longest} has {lengths[longest]} tokens; the model has {most} positions "
                    f"({self.parts.positions_by}), and a completion needs at least one of them. Shorten or drop it."
                )
            limits = np.minimum(limits, most - np.repeat(lengths, group_size))
        return lengths, limits


class _Run:
    """The state of one call of `SlotEngine.generate`."""

    def __init__(
        self,
        engine: SlotEngine,
        *,
        prompts: Sequence[Sequence[int]],
        prompt_lengths: Int64Array,
        prompt_of: Int64Array,
        limits: Int64Array,
        keys: npt.NDArray[np.uint64],
        temperature: float,
    ) -> None:
        self.parts = engine.parts
        self.is_eos = engine._is_eos
        self.weight = engine.parts.sampling_weight()
        self.device = self.weight.device
        self.prompts = prompts
        self.prompt_lengths = prompt_lengths
        self.prompt_of = prompt_of
        self.limits = limits
        self.keys = keys
        self.temperature = temperature
        self.count = len(prompt_of)
        self.num_slots = min(engine.num_slots, self.count)
        self.cache = SlotCache(
            self.parts.num_layers,
            num_slots=self.num_slots,
            longest_prompt=int(prompt_lengths.max()),
            longest_completion=int(limits.max()),
            device=self.device,
        )
        # Per live slot: which completion, how many tokens its cache holds, how many it has sampled.
        self.live = np.zeros(0, dtype=np.int64)
        self.stored = np.zeros(0, dtype=np.int64)
        self.sampled = np.zeros(0, dtype=np.int64)
        self.hidden: Tensor | None = None
        self.next = 0
        self.batches: list[_Prefilled] = []
        self.prefilled_up_to = 0
        self.out_rows: list[Int64Array] = []
        self.out_tokens: list[Int64Array] = []
        self.out_log_probs: list[npt.NDArray[np.float32]] = []
        self.stopped = np.zeros(self.count, dtype=np.bool_)

    def step(self, refresh: WeightRefresh | None = None) -> bool:
        """Sample one token for every live and every new completion; False when none is left."""
        old = len(self.live)
        new = np.arange(self.next, min(self.count, self.next + self.num_slots - old), dtype=np.int64)
        rows, sampled, hidden = self.live, self.sampled, self.hidden
        if len(new):
            fresh = self._admit(new)
            hidden = fresh if hidden is None else torch.cat((hidden, fresh))
            rows = np.concatenate((rows, new))
            sampled = np.concatenate((sampled, np.zeros_like(new)))
        if hidden is None:
            return False
        tokens, log_probs = self._sample(hidden, rows, sampled)
        sampled = sampled + 1
        self.out_rows.append(rows)
        self.out_tokens.append(tokens)
        self.out_log_probs.append(log_probs)
        ended = self.is_eos[tokens]
        done = ended | (sampled >= self.limits[rows])
        if done.any():
            self.stopped[rows[ended]] = True
        if done.all():
            self.live = self.stored = self.sampled = np.zeros(0, dtype=np.int64)
            self.hidden = None
            return self.next < self.count
        if len(new) or done.any():
            source = self._place(old, new, done)
            rows, sampled, tokens = rows[source], sampled[source], tokens[source]
        self.live, self.sampled = rows, sampled
        if refresh is not None and refresh.due(len(self.out_rows)):
            # Between sampling a token and feeding it: head and trunk of the next one are then of the same weights.
            self.weight = self.parts.sampling_weight()
        self._forward(tokens)
        return True

    def _sample(
        self, hidden: Tensor, rows: Int64Array, sampled: Int64Array
    ) -> tuple[Int64Array, npt.NDArray[np.float32]]:
        u = torch.from_numpy(uniforms(self.keys[rows], sampled)).to(self.device)
        # Autocast would round the logits to half precision.
        with torch.autocast(self.device.type, enabled=False):
            tokens, log_probs = sample_rows(self.parts.logits(hidden, self.weight), u, self.temperature)
        if self.device.type == "cpu":
            host_tokens, host_log_probs = tokens.numpy(), log_probs.numpy()
        else:
            # One transfer, which is the one synchronisation of the step. float64 holds both exactly.
            both = torch.stack((tokens.double(), log_probs.double())).cpu().numpy()
            host_tokens, host_log_probs = both[0].astype(np.int64), both[1].astype(np.float32)
        if not np.isfinite(host_log_probs).all():
            bad = int(rows[int((~np.isfinite(host_log_probs)).argmax())])
            raise DataError(
                f"The model's logits are not finite at token {int(sampled[rows == bad][0])} of a completion of "
                f"prompt {self.prompt_of[bad]}. Its weights have diverged or overflow their dtype: load an earlier "
                "checkpoint, lower the learning rate, or use float32."
            )
        return host_tokens, host_log_probs

    def _admit(self, new: Int64Array) -> Tensor:
        """Return the last hidden state of the prompts of completions `new`, `[len(new), H]`."""
        self.next = int(new[-1]) + 1
        owners = self.prompt_of[new]
        while self.prefilled_up_to <= owners[-1]:
            self._prefill()
        first = owners[0]
        self.batches = [b for b in self.batches if b.last_prompt >= first]
        pieces = []
        for batch in self.batches:
            mine = owners[(owners >= batch.first_prompt) & (owners <= batch.last_prompt)]
            if len(mine):
                pieces.append(batch.hidden[self._index(mine - batch.first_prompt)])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _prefill(self) -> None:
        """Run the next prompts through the trunk, as many as fit the budget and at least one.

        They are padded on the right and need no mask: with causal attention no token sees what follows it.
        """
        first = last = self.prefilled_up_to
        width = int(self.prompt_lengths[first])
        while last + 1 < len(self.prompts):
            wider = max(width, int(self.prompt_lengths[last + 1]))
            if wider * (last + 2 - first) > _PREFILL_TOKENS:
                break
            width, last = wider, last + 1
        ids = np.zeros((last + 1 - first, width), dtype=np.int64)
        for i in range(first, last + 1):
            ids[i - first, : self.prompt_lengths[i]] = self.prompts[i]
        lengths = self._index(self.prompt_lengths[first : last + 1])
        cache = PrefillCache(self.parts.num_layers)
        hidden = self.parts.hidden(
            input_ids=self._index(ids),
            position_ids=torch.arange(width, device=self.device).expand(len(ids), -1),
            past_key_values=cache,
            use_cache=True,
        )
        rows = torch.arange(len(ids), device=self.device)
        states = cache.right_aligned(lengths)
        self.batches.append(_Prefilled(states, hidden[rows, lengths - 1], first, last))
        self.prefilled_up_to = last + 1

    def _place(self, old: int, new: Int64Array, done: npt.NDArray[np.bool_]) -> Int64Array:
        """Give every row that goes on a slot `0 .. k - 1`, move and insert what that takes.

        Args:
            old: how many rows hold slots now; they come first.
            new: the completions without a slot, which come after them.
            done: per row, whether it has finished, bool `[old + len(new)]`.

        Returns:
            For each slot the row that now owns it, int64 `[k]`.
        """
        going = np.flatnonzero(~done)
        total = len(going)
        slot_row = np.full(total, -1, dtype=np.int64)
        stay = going[going < min(old, total)]
        slot_row[stay] = stay
        homeless = going[going >= min(old, total)]
        holes = np.flatnonzero(slot_row < 0)
        slot_row[holes] = homeless
        movers = int((homeless < old).sum())
        kept = self.stored[going[going < old]]
        longest = int(kept.max()) if len(kept) else 0
        if movers:
            self.cache.move(self._index(homeless[:movers]), self._index(holes[:movers]), longest)
        self._begin(longest, total, closing=self.next == self.count and movers == len(homeless))
        if movers < len(homeless):
            self._insert(new[homeless[movers:] - old], holes[movers:])
        stored = np.concatenate((self.stored, self.prompt_lengths[self.prompt_of[new]]))
        self.stored = stored[slot_row]
        return slot_row

    def _insert(self, completions: Int64Array, slots: Int64Array) -> None:
        owners = self.prompt_of[completions]
        for batch in self.batches:
            mine = (owners >= batch.first_prompt) & (owners <= batch.last_prompt)
            if mine.any():
                self.cache.insert(
                    self._index(slots[mine]),
                    batch.states,
                    self._index(owners[mine] - batch.first_prompt),
                    self._index(self.prompt_lengths[owners[mine]]),
                )

    def _forward(self, tokens: Int64Array) -> None:
        """Feed the sampled tokens of the live rows and keep their hidden states."""
        longest = int(self.stored.max())
        self._begin(longest, len(tokens), closing=self.next == self.count)
        inputs = self._index(np.stack((tokens, self.stored)))
        mask = self.cache.open_column(len(tokens), longest)
        if not self.parts.builds_own_mask:
            mask = mask[:, None, None, :]
        hidden = self.parts.hidden(
            input_ids=inputs[0].unsqueeze(1),
            position_ids=inputs[1].unsqueeze(1),
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.hidden = hidden[:, 0]
        self.stored = self.stored + 1
        self.cache.close_column()

    def _begin(self, longest: int, rows: int, *, closing: bool) -> None:
        most_rows = min(self.num_slots, rows + self.count - self.next)
        self.cache.begin(longest, most_rows=most_rows, closing=closing)

    def _index(self, values: Int64Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
