"""Generation with slots: completions of very different lengths, in parallel, without waiting for the longest.

A static batch runs until its longest member stops, so with lengths that vary tenfold most of its rows are finished and
still computed. Here a finished row leaves at once and the next in the queue takes its slot; a prompt is computed once
for its whole group; and a token's log-prob comes from the very probabilities that it was sampled from, so no
`[B, T, V]` logits are kept and nothing is scored twice.

A step of the host: fill free slots from the queue; apply the head to the last hidden state of every row, new prompts
included; sample; drop finished rows; copy the prompts of the remaining new rows into slots; run one forward pass over
the live rows. A completion of one token therefore never takes a slot. On CUDA the same two halves, `decode_step`, run
several times between two reads of the host, see `device_steps`.

Profile (one thread, Qwen2 with hidden 256 and 4 layers, 64 slots, 8 x 8 completions of 4 to 400 tokens): at a
vocabulary of 4,000 the matmuls take 35 % of the time, attention 20 %, the rest of the model's forward 35 %, sampling
4 %, cache memory and the bookkeeping of this module 5 %; at 32,000 the matmuls take 56 %, two thirds of it the head.
The number of computed rows and columns dominates: hence rows that leave at once, live rows kept together, and a window
of columns no wider than the longest live row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.policies.engines.bucket_cache import bucket_columns, bucket_rows, power_of_two
from rlhf_pipeline.policies.engines.cache_check import WITHOUT_SLOTS, verified_parts
from rlhf_pipeline.policies.engines.decode_step import DecodeStep
from rlhf_pipeline.policies.engines.device_steps import DeviceSteps, RetainedSteps, Sizes, SlotRows, masking_of
from rlhf_pipeline.policies.engines.protocol import (
    Ended,
    Int64Array,
    RaggedCompletions,
    Request,
    WeightRefresh,
    Weights,
)
from rlhf_pipeline.policies.engines.rollout import EngineRollout, Gate
from rlhf_pipeline.policies.engines.sampling import UInt64Array, stream_keys, uniforms
from rlhf_pipeline.policies.engines.slot_cache import SlotCache
from rlhf_pipeline.policies.engines.turn_rows import (
    LONG_REPLY,
    Answer,
    Answers,
    EndedTurn,
    Partner,
    TurnRow,
    begin_rows,
)
from rlhf_pipeline.policies.model_parts import ModelParts
from rlhf_pipeline.policies.weight_files import load_weights

__all__ = ["SlotEngine"]

SYNC_EVERY: Final = 16
"""The number of tokens between two host syncs on CUDA."""


class SlotEngine:
    """Samples completions of a causal language model on a fixed number of slots, in this process.

    It samples with the given modules, which may be in training elsewhere: after changing their weights in place, set
    `version`. Several threads may generate at once; each has its own slots.

    Args:
        parts: trunk and head of the model.
        num_slots: the most live rows of a call.
        model: the model that `load_weights` loads into; None if it is never called.
        sync_every: tokens between two host syncs. At 1 the host reads every token, and only live rows and their columns
            are computed; above that, steps have the sizes of a bucket, and finished rows run on until the next sync.
            None is 16 on CUDA and 1 elsewhere.
    """

    name = "slots"

    def __init__(
        self, parts: ModelParts, *, num_slots: int, model: nn.Module | None = None, sync_every: int | None = None
    ) -> None:
        if num_slots < 1:
            raise DefinitionError(f"num_slots is {num_slots}; it must be at least 1.")
        if sync_every is not None and sync_every < 1:
            raise DefinitionError(f"sync_every is {sync_every}; it must be at least 1.")
        if parts.cache_refusal is not None:
            raise DefinitionError(
                f"The slot engine cannot generate with {type(parts.trunk).__name__}: {parts.cache_refusal}. "
                f"{WITHOUT_SLOTS}"
            )
        self.parts = verified_parts(parts)
        self.num_slots = num_slots
        self.version: int | None = None
        self.model = model
        self._vocab = int(parts.head.weight.shape[0])
        self.gate = Gate()
        self.sync_every = sync_every
        self.retained = RetainedSteps()
        self._notices: dict[str, bool] = {}
        """Each notice, and whether it was reported."""
        self.loads = 0
        self.aborts = 0

    @torch.inference_mode()
    def generate(
        self, request: Request, refresh: WeightRefresh | None = None, ended: Ended | None = None
    ) -> RaggedCompletions:
        """See `Engine.generate`.

        The random number behind a token is a pure function of (seed, stream id, member, token index). A completion also
        ends, with "length", where prompt and completion together fill the model's positions.
        """
        limits = request.limits(
            vocab=self._vocab, positions=self.parts.max_positions, positions_by=self.parts.positions_by
        )
        if request.count == 0:
            return RaggedCompletions.none(versioned=refresh is not None or self.version is not None)
        with self.gate:
            if refresh is not None:
                self.version = refresh.version
            run = SlotRun(self, request, limits=limits, refresh=refresh, ended=ended)
            while run.step():
                pass
            run.report()
            self._retain(run)
        return run.completions()

    @torch.inference_mode()
    def converse(
        self, request: Request, partner: Partner, *, row_tokens: int, refresh: WeightRefresh | None = None
    ) -> list[TurnRow]:
        """See `TurnEngine.converse`.

        The random number behind a token is a pure function of (seed, stream id, member, its place after the prompt).
        """
        with self.gate:
            if refresh is not None:
                self.version = refresh.version
            run = _Turns(self, request, partner, row_tokens=row_tokens, refresh=refresh)
            while run.step():
                pass
            self._retain(run)
        return run.turn_rows

    def steps_of(self, *, count: int, longest: int) -> DeviceSteps | None:
        """Return what a call of so many rows decodes on; None if the host reads every token.

        Args:
            count: of the rows.
            longest: the most tokens of a row.
        """
        cuda = self.parts.head.weight.device.type == "cuda"
        ahead = self.sync_every or (SYNC_EVERY if cuda else 1)
        if ahead == 1:
            return None
        masking = masking_of(self.parts)
        if masking is None:
            states = "keeps recurrent states" if self.parts.num_states else "accepts no prepared attention masks"
            self._notice(f"{states}, so the host reads every token and no step is captured as a CUDA graph")
            return None
        slots = min(self.num_slots, power_of_two(count))
        return self.retained.take(
            self.parts, masking, Sizes(num_slots=slots, longest=bucket_columns(longest), ahead=ahead)
        )

    def _retain(self, run: SlotRun) -> None:
        """Retain the state of a call that ended well."""
        if run.device_steps is not None:
            if run.device_steps.refusal is not None:
                self._notice(f"decodes kernel by kernel: its step was not captured ({run.device_steps.refusal})")
            self.retained.give(run.device_steps)

    def _notice(self, text: str) -> None:
        self._notices.setdefault(
            f"{type(self.parts.trunk).__name__} {text}. vLLM samples faster if it supports the architecture: "
            "--set collect.engine=vllm",
            False,
        )

    def take_notices(self) -> list[str]:
        """Return what a user should know about the way of decoding, each notice once; usually empty."""
        notices = [notice for notice, passed_on in self._notices.items() if not passed_on]
        self._notices = dict.fromkeys(self._notices, True)
        return notices

    def pause(self) -> None:
        """Stop between two tokens; see `Engine.pause`."""
        self.gate.close()

    def resume(self) -> None:
        """Resume after `pause`."""
        self.gate.open()

    def load_weights(self, weights: Weights, version: int) -> None:
        """Load weights into the model; caches of completions in progress are computed again with them."""
        if self.model is None:
            raise DefinitionError("This SlotEngine has no model to load weights into. Create it with model=...")
        with self.gate.still(), torch.inference_mode(False), torch.no_grad():
            if isinstance(weights, Path):
                load_weights(weights, self.model)
            else:
                self.model.load_state_dict(dict(weights))
            self.loads += 1
            self.version = version

    def abort(self) -> None:
        """End the completions in progress; see `Engine.abort`."""
        self.aborts += 1

    def close(self) -> None:
        """Free the memory that is retained for the next call; the model is not the engine's."""
        self.retained.drop()


class TokenOutcome(NamedTuple):
    """The changes that the host makes after one token of each row.

    Attributes:
        tokens: to be fed, int64 `[rows]`.
        leaves: which rows leave their slots, bool `[rows]`.
        breaks: which rows do not continue with the token that the device feeds: those that leave, and those that wait.
    """

    tokens: Int64Array
    leaves: npt.NDArray[np.bool_]
    breaks: npt.NDArray[np.bool_]


class SlotRun(EngineRollout):
    """Decodes the rows of a call on slots.

    On a CPU the computation dominates, so the host reads every token: a finished row leaves at once, and the window is
    no wider than the longest row. With `device_steps` the host reads once in several tokens.
    """

    def __init__(
        self,
        engine: SlotEngine,
        request: Request,
        *,
        limits: Int64Array,
        refresh: WeightRefresh | None,
        ended: Ended | None,
        longest: int | None = None,
    ) -> None:
        super().__init__(engine, request, limits=limits, refresh=refresh, ended=ended)
        if longest is None:
            longest = int((self.prompt_lengths[self.prompt_of] + limits).max())
        self.device_steps = engine.steps_of(count=self.count, longest=longest)
        if self.device_steps is not None:
            self.device_steps.begin(self.is_end, self.temperature, self.truncation)
            self.cache: SlotCache = self.device_steps.cache
        else:
            self.cache = SlotCache(
                self.parts.num_layers,
                self.parts.num_states,
                num_slots=self.num_slots,
                longest_prompt=int(self.prompt_lengths.max()),
                longest_completion=int(self.limits.max()),
                device=self.device,
            )
        self.decode = DecodeStep(self.parts, self.cache, temperature=self.temperature, truncation=self.truncation)
        self.leaves = np.zeros(0, dtype=np.bool_)
        """Which live slots are free from the next step on."""
        self.strode = 1
        """The tokens of each row in this step, and the position of the step among them."""
        self.at_step = 0
        # Per live slot: its row, and the tokens in its cache.
        self.live = np.zeros(0, dtype=np.int64)
        self.stored = np.zeros(0, dtype=np.int64)
        self.hidden: Tensor | None = None
        self.waiting = 0
        """The number of rows that have left their slot and will return."""

    @property
    def to_come(self) -> int:
        """The maximum number of rows that have not started, or will return to a slot."""
        return self.count - self.next

    def step(self) -> bool:
        """Give every live and every new row its next token, or several; False when none is left."""
        self.come_back()
        return self._next_token() if self.device_steps is None else self._next_tokens(self.device_steps)

    def _next_token(self) -> bool:
        """Take one step, in which the host reads the tokens before they are fed."""
        old = len(self.live)
        new = np.arange(self.next, min(self.count, self.next + self.num_slots - old), dtype=np.int64)
        rows = np.concatenate((self.live, new))
        stored = np.concatenate((self.stored, self.prompt_lengths[self.prompt_of[new]]))
        tokens, leaves = np.zeros(0, np.int64), np.zeros(0, np.bool_)
        if len(rows):
            hidden, self.version = self._hidden_of(new), self.engine.version
            drawn = self._sample(hidden, rows, stored - self.firsts(rows))
            tokens, leaves, _ = self.take(rows, stored, *drawn)
        # Between sampling a token and feeding it, so that trunk and head use the same weights for the next one.
        changed = self.let_weights_change()
        if self.must_end():
            return self.cut(rows[~leaves])
        if changed:
            self.forget()
            self.decode.weight = self.weight
        if leaves.all():
            self.live = self.stored = np.zeros(0, dtype=np.int64)
            self.hidden = None
            return self.next < self.count or self.waiting > 0
        if len(new) or leaves.any():
            source = self._place(old, new, leaves, stored)
            rows, tokens = rows[source], tokens[source]
        self.live = rows
        if changed:
            self._fill_again(np.arange(len(rows)))
        self._forward(tokens)
        self.report()
        return True

    def _next_tokens(self, device: DeviceSteps) -> bool:
        """Let the device take several steps, then read the tokens."""
        self._settle(device)
        count = len(self.live)
        fed = np.zeros(count, np.int64)
        self.strode = 1
        if count:
            longest, ends = int(self.stored.max()), self.ends(self.live)
            self.strode = min(device.sizes.ahead, int((ends - self.stored).max()))
            self.cache.begin(longest, rows=count, to_come=self.to_come)
            self.cache.open_window(bucket_rows(count, device.sizes.num_slots), longest)
            device.load(
                SlotRows(
                    length=self.stored,
                    first=self.firsts(self.live),
                    end=ends,
                    key=self.row_keys(self.live).view(np.int64),
                    forced=self.forced(self.live, self.stored, device.sizes.ahead),
                )
            )
            self.version = self.engine.version
            device.advance(self.strode)
            self.report()
            fed = self._take_all(*device.read(count, self.strode))
        changed = self.let_weights_change()
        if self.must_end():
            return self.cut(self.live[~self.leaves])
        self.stored = self.stored + fed
        stay = np.flatnonzero(~self.leaves)
        if changed:
            self.forget()
            device.renew()
            if len(stay):
                self._fill_again(stay)
        else:
            behind = stay[fed[stay] < self.strode]
            if len(behind):
                gaps = self.strode - fed[behind]
                longest = int(self.stored[behind].max())
                device.cache.close_gaps(self.upload(behind), self.upload(gaps), longest, int(gaps.max()))
        return len(stay) > 0 or self.next < self.count or self.waiting > 0

    def _settle(self, device: DeviceSteps) -> None:
        """Take the rows that leave out of their slots, and give new ones a slot."""
        old = len(self.live)
        free = self.num_slots - old + int(self.leaves.sum())
        new = np.arange(self.next, min(self.count, self.next + free), dtype=np.int64)
        if len(new) or self.leaves.any():
            self.hidden = device.hidden[:old] if old else None
            hidden = self._hidden_of(new)
            rows = np.concatenate((self.live, new))
            stored = np.concatenate((self.stored, self.prompt_lengths[self.prompt_of[new]]))
            source = self._place(old, new, np.concatenate((self.leaves, np.zeros(len(new), np.bool_))), stored)
            self.live = rows[source]
            device.place(hidden.index_select(0, self.upload(source)))
        self.leaves = np.zeros(len(self.live), np.bool_)

    def _take_all(
        self, tokens: Int64Array, log_probs: npt.NDArray[np.float32], log_mass: npt.NDArray[np.float32] | None
    ) -> Int64Array:
        """Take the tokens of several steps, each row's up to where it ends; return how many of each row were fed."""
        fed = np.zeros(len(tokens), np.int64)
        going = np.ones(len(tokens), np.bool_)
        for step in range(tokens.shape[1]):
            at = np.flatnonzero(going)
            if not len(at):
                break
            self.at_step = step
            mass = None if log_mass is None else log_mass[at, step]
            _, leaves, breaks = self.take(
                self.live[at], self.stored[at] + step, tokens[at, step], log_probs[at, step], mass
            )
            self.leaves[at[leaves]] = True
            going[at[breaks]] = False
            fed[at[~breaks]] += 1
        return fed

    def _hidden_of(self, new: Int64Array) -> Tensor:
        """Return the last hidden state of each live row, then of these new ones."""
        pieces = [] if self.hidden is None else [self.hidden]
        if len(new):
            self.admit(new)
            pieces += [b.hidden[self.upload(source)] for b, _, source in self.places_of(self.prompt_of[new])]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def come_back(self) -> None:
        """Queue the rows that come back: completions never do."""

    def firsts(self, rows: Int64Array) -> Int64Array:
        """Return the tokens of these rows before the first sampled one."""
        return self.prompt_lengths[self.prompt_of[rows]]

    def ends(self, rows: Int64Array) -> Int64Array:
        """Return the tokens at which these rows end, if no end token comes before."""
        return self.prompt_lengths[self.prompt_of[rows]] + self.limits[rows]

    def row_keys(self, rows: Int64Array) -> npt.NDArray[np.uint64]:
        """Return the keys of the random numbers of these rows."""
        return self.keys[rows]

    def forced(self, rows: Int64Array, stored: Int64Array, ahead: int) -> Int64Array | None:
        """Return the next tokens of rows that are not sampled, `[rows, ahead]`, -1 after them; None if all are."""
        return None

    def take(
        self,
        rows: Int64Array,
        stored: Int64Array,
        tokens: Int64Array,
        log_probs: npt.NDArray[np.float32],
        log_mass: npt.NDArray[np.float32] | None,
    ) -> TokenOutcome:
        """Take a token of each row, of which `stored` tokens are in the cache."""
        self.emit(rows, tokens, log_probs, log_mass)
        stopped = self.is_end[tokens] | self.at_stop(rows)
        leaves = stopped | (self.num_sampled[rows] >= self.limits[rows])
        self.stopped[rows[stopped]] = True
        self.unreported += rows[leaves].tolist()
        return TokenOutcome(tokens, leaves, leaves)

    def _fill_again(self, slots: Int64Array) -> None:
        """Recompute the caches of these slots, so that their next tokens depend on the current weights only.

        Where the host reads every token, the last one of each row was sampled in this step, and is fed next.
        """
        stored = self.stored[slots]
        self.cache.begin(int(stored.max()), rows=len(self.live), to_come=self.to_come)
        for part, states, hidden in self.prefilled_again(self.live[slots], stored):
            target = self.upload(slots[part])
            self.cache.insert(target, states, self.upload(np.arange(part.stop - part.start)))
            if self.device_steps is not None:
                self.device_steps.hidden[target] = hidden

    def _sample(
        self, hidden: Tensor, rows: Int64Array, sampled: Int64Array
    ) -> tuple[Int64Array, npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
        u = self.upload(uniforms(self.keys[rows], sampled))
        tokens, log_probs, log_mass = self.decode.draw(hidden, u)
        if self.device.type == "cpu":
            return tokens.numpy(), log_probs.numpy(), None if log_mass is None else log_mass.numpy()
        # One transfer; float64 holds all of them exactly.
        parts = (tokens, log_probs) if log_mass is None else (tokens, log_probs, log_mass)
        drawn = torch.stack([part.double() for part in parts]).cpu().numpy()
        floats = drawn[1:].astype(np.float32)
        return drawn[0].astype(np.int64), floats[0], None if log_mass is None else floats[1]

    def _place(self, old: int, new: Int64Array, done: npt.NDArray[np.bool_], stored: Int64Array) -> Int64Array:
        """Give every unfinished row a slot `0 .. k - 1`, moving and inserting rows as needed; return each slot's row.

        The `old` rows that hold slots now come first, then `new`, the completions without one; `done` is for all of
        them whether they have finished.
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
        continued = stored[going[going < old]]
        longest = int(continued.max()) if len(continued) else 0
        if movers:
            self.cache.move(self.upload(homeless[:movers]), self.upload(holes[:movers]), longest)
        starting, slots = new[homeless[movers:] - old], holes[movers:]
        owners = self.prompt_of[starting]
        places = self.places_of(owners)
        widest = max(
            (pair[0].shape[2] for batch, _, _ in places for pair, _ in batch.states if pair is not None), default=0
        )
        to_come = len(starting) + self.to_come
        self.cache.begin(longest, rows=total - len(starting), to_come=to_come, widest=widest)
        for batch, mine, at in places:
            self.cache.insert(self.upload(slots[mine]), batch.states, self.upload(at))
        self.stored = stored[slot_row]
        return slot_row

    def _forward(self, tokens: Int64Array) -> None:
        """Feed the sampled tokens of the live rows and keep their hidden states."""
        longest = int(self.stored.max())
        self.cache.begin(longest, rows=len(tokens), to_come=self.to_come)
        self.cache.open_window(len(tokens), longest)
        self.hidden = self.decode.feed(*self.upload(np.stack((tokens, self.stored))).unbind())
        self.stored = self.stored + 1
        self.cache.column += 1


class _Turns(SlotRun):
    """Conversations turn by turn: a row that is answered at once keeps its slot, another one comes back as a prompt.

    A *stay* is a stretch of one conversation in one slot; the base class calls it a completion. Stays are added at any
    time. Where a row has more tokens than its cache, the next one is fed; where it has not, one is sampled.
    """

    def __init__(
        self, engine: SlotEngine, request: Request, partner: Partner, *, row_tokens: int, refresh: WeightRefresh | None
    ) -> None:
        parts = engine.parts
        limits = request.limits(
            vocab=int(parts.head.weight.shape[0]), positions=parts.max_positions, positions_by=parts.positions_by
        )
        most = row_tokens if parts.max_positions is None else min(row_tokens, parts.max_positions)
        super().__init__(engine, request, limits=limits, refresh=refresh, ended=None, longest=most)
        self.partner = partner
        self.seed, self.streams = request.seed, request.streams()
        self.turn_rows = begin_rows(request, most)
        """The row that each conversation is in."""
        self.stays = list(range(self.count))
        """The conversation of each stay."""
        self.reply_after = partner.reply_after
        self.clock = 0
        """Token steps, including steps that were skipped because no conversation was live."""
        self.due: dict[int, list[int]] = {}
        """By step, the conversations whose reply the step waits for."""
        self.came: dict[int, Answer] = {}

    @property
    def to_come(self) -> int:
        """The most rows that have not begun, or come back; a live one may leave and come back, too."""
        return self.count - self.next + self.waiting + 1

    def tokens_of(self, completion: int, length: int) -> Sequence[int]:
        """Return the first tokens of the conversation of a stay."""
        return self.turn_rows[self.stays[completion]].ids[:length]

    def cut(self, going: Int64Array) -> bool:
        """Mark the conversations that are not over; return False for `step`."""
        for row in self.turn_rows:
            row.aborted = not row.over
        return False

    def _rows(self, stays: Int64Array) -> list[TurnRow]:
        return [self.turn_rows[self.stays[stay]] for stay in stays.tolist()]

    def firsts(self, rows: Int64Array) -> Int64Array:
        """See `SlotRun.firsts`."""
        return np.array([row.num_prompt - row.branched[0] for row in self._rows(rows)], np.int64)

    def ends(self, rows: Int64Array) -> Int64Array:
        """Return the tokens at which the turns of these rows end."""
        limits = [int(self.limits[self.stays[stay]]) for stay in rows.tolist()]
        return np.array(
            [min(row.began + limit, row.most) for row, limit in zip(self._rows(rows), limits, strict=True)], np.int64
        )

    def forced(self, rows: Int64Array, stored: Int64Array, ahead: int) -> Int64Array | None:
        """Return the tokens of replies that come next; see `SlotRun.forced`."""
        out = np.full((len(rows), ahead), -1, np.int64)
        for line, row, length in zip(out, self._rows(rows), stored.tolist(), strict=True):
            reply = row.ids[length : length + ahead]
            line[: len(reply)] = reply
        return out

    def take(
        self,
        rows: Int64Array,
        stored: Int64Array,
        tokens: Int64Array,
        log_probs: npt.NDArray[np.float32],
        log_mass: npt.NDArray[np.float32] | None,
    ) -> TokenOutcome:
        """Take the next token of each row, fed or sampled; rows leave or wait where their turns have ended."""
        conversations = [self.stays[stay] for stay in rows.tolist()]
        those = [self.turn_rows[conversation] for conversation in conversations]
        tokens, leaves = tokens.copy(), np.zeros(len(those), np.bool_)
        ended: list[EndedTurn] = []
        at_of: dict[int, int] = {}
        for at, (row, length) in enumerate(zip(those, stored.tolist(), strict=True)):
            if length < len(row.ids):  # a reply is fed; what was sampled here is thrown away
                tokens[at] = row.ids[length]
                continue
            token = int(tokens[at])
            self.check_finite(float(log_probs[at]), len(row.ids) - row.num_prompt, int(self.prompt_of[rows[at]]))
            row.version(len(row.ids), self.version)
            row.sampled([token], [float(log_probs[at])], [] if log_mass is None else [float(log_mass[at])])
            turn = len(row.ids) - row.began
            stopped = bool(self.is_end[token])
            if self.stops is not None and not stopped:
                stopped = self.stops.ends(row.ids[row.began :])
            if stopped or turn >= self.limits[conversations[at]] or len(row.ids) >= row.most:
                ended.append(EndedTurn(conversations[at], row, stopped))
                at_of[conversations[at]] = at
        self.out_rows.append(rows[:0])
        answers: Answers = {}
        if ended:
            with self.engine.gate.sampling_interrupted():  # others need not wait for an environment
                answers = self.partner.answer(ended)
        if self.reply_after == 0:
            answers = {**answers, **self._fetch([turn.place for turn in ended if turn.place not in answers])}
        for turn in ended:
            if turn.place not in answers:
                self.waiting += 1
                self.due.setdefault(self.clock + self.at_step + self.reply_after, []).append(turn.place)
                leaves[at_of[turn.place]] = True
            else:
                leaves[at_of[turn.place]] = not self._go_on(turn.place, answers[turn.place], in_slot=True)
        breaks = np.zeros(len(those), np.bool_)
        breaks[list(at_of.values())] = True
        return TokenOutcome(tokens, leaves, breaks)

    def _go_on(self, conversation: int, reply: Answer, *, in_slot: bool) -> bool:
        """Take an answer; return whether the conversation keeps its slot."""
        row = self.turn_rows[conversation]
        if reply is None:
            row.over = True
            return False
        if isinstance(reply, TurnRow):
            row = self.turn_rows[conversation] = reply
        else:
            row.reply(reply)
            if in_slot and len(reply) <= LONG_REPLY:
                return True
        self.stays.append(conversation)
        self.prompts.append(row.ids)
        self.prompt_lengths = np.append(self.prompt_lengths, len(row.ids))
        self.prompt_of = np.append(self.prompt_of, len(self.prompts) - 1)
        self.keys = np.append(self.keys, self._key_of(conversation, row))
        self.count += 1
        return False

    def _key_of(self, conversation: int, row: TurnRow) -> UInt64Array:
        """Return the key of a row's random numbers, uint64 `[1]`."""
        stream = self.streams[int(self.prompt_of[conversation])] + row.key
        return stream_keys(self.seed, [stream], self.member_of[[conversation]])

    def come_back(self) -> None:
        """Queue the conversations whose reply is due; if nothing else is due, advance to the next such step."""
        if not len(self.live) and self.next >= self.count and self.due and not self.came:
            self.clock = min(self.due)
        came = self.came | self._fetch(self._due_by(self.clock))
        self.came = {}
        for conversation, reply in sorted(came.items()):
            self.waiting -= 1
            self._go_on(conversation, reply, in_slot=False)

    def step(self) -> bool:
        """See `SlotRun.step`; the clock continues."""
        going = super().step()
        self.clock += self.strode
        return going

    def let_weights_change(self) -> bool:
        """Wait for the replies that the next step takes, then see `EngineRollout.let_weights_change`."""
        self.came |= self._fetch(self._due_by(self.clock + self.strode))
        return super().let_weights_change()

    def _due_by(self, clock: int) -> list[int]:
        """Return, and forget, the conversations whose reply a step up to this one takes."""
        steps = sorted(step for step in self.due if step <= clock)
        return [place for step in steps for place in self.due.pop(step)]

    def _fetch(self, places: Sequence[int]) -> dict[int, Answer]:
        """Wait for exactly these replies, while other threads may change the weights or abort the call."""
        if not places:
            return {}
        with self.engine.gate.sampling_interrupted():
            answers = self.partner.fetch(places, lambda: not self.must_end())
        return {} if answers is None else dict(answers)
