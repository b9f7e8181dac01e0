"""The host's state in a call of the slot engine, for every way of decoding, and the gate that lets weights change."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf_pipeline.data.upload import upload
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.policies.engines.protocol import (
    Ended,
    Int64Array,
    RaggedCompletions,
    Request,
    VersionSpans,
    WeightRefresh,
)
from rlhf_pipeline.policies.engines.sampling import stream_keys
from rlhf_pipeline.policies.engines.slot_cache import States, prefill

if TYPE_CHECKING:
    from rlhf_pipeline.policies.engines.slots import SlotEngine

PREFILL_TOKENS: Final = 4096
"""Padded tokens of one prefill pass. Prompts are prefilled this far ahead, so that slots that
become free one by one do not each require a small forward pass."""
PREFILL_NUMBERS: Final = 1 << 24
"""Hidden values of one prefill pass on CUDA, where a pass of few tokens waits for the host: 4,096 tokens of a 0.5B
model took 30 ms on an H200, of which the matrix products took 8."""


def prefill_tokens(width: int, device: torch.device) -> int:
    """Return the padded tokens of one prefill pass of a model with hidden states of this width.

    >>> [prefill_tokens(width, torch.device("cuda")) for width in (896, 8192)], prefill_tokens(896, torch.device("cpu"))
    ([18724, 4096], 4096)
    """
    return max(PREFILL_TOKENS, PREFILL_NUMBERS // width) if device.type == "cuda" else PREFILL_TOKENS


@dataclass(slots=True)
class Prefilled:
    """A batch of prompts after their forward pass, kept until all their completions have started."""

    states: States
    hidden: Tensor
    first_prompt: int
    last_prompt: int


class Gate:
    """Lets other threads pause sampling threads between two tokens, or change the weights.

    Any number of threads may sample at once, each within `with gate:`; none samples while the gate is closed, or while
    another thread is within `still()`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sampling = 0
        self._closed = False
        self._needed_still = 0

    def __reduce__(self) -> tuple[type[Gate], tuple[()]]:
        """Copy a gate as a new, open one, so that its owner can be copied."""
        return Gate, ()

    def __enter__(self) -> None:
        """Start sampling, waiting until that is allowed."""
        with self._changed:
            while self._closed or self._needed_still:
                self._changed.wait()
            self._sampling += 1

    def __exit__(self, *_: object) -> None:
        """Stop sampling."""
        with self._changed:
            self._sampling -= 1
            self._changed.notify_all()

    @contextmanager
    def sampling_interrupted(self) -> Iterator[None]:
        """Interrupt sampling within `with gate:`; leaving the context waits until sampling is allowed again."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def close(self) -> None:
        """Block sampling until `open`; returns when no thread is sampling."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._sampling == 0)

    def open(self) -> None:
        """Allow sampling again."""
        with self._changed:
            self._closed = False
            self._changed.notify_all()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Hold all sampling within the context, which one thread at a time can enter."""
        with self._changed:
            self._needed_still += 1
            self._changed.wait_for(lambda: self._sampling == 0)
            try:
                yield
            finally:
                self._needed_still -= 1
                self._changed.notify_all()


class EngineRollout:
    """The state of one call of `SlotEngine.generate`; its subclasses decode.

    Args:
        engine: whose call it is.
        request: what to sample.
        limits: the most new tokens of each completion, int64 `[N]`.
        refresh: loads newer weights during sampling.
        ended: takes the completions that have ended.
    """

    def __init__(
        self,
        engine: SlotEngine,
        request: Request,
        *,
        limits: Int64Array,
        refresh: WeightRefresh | None,
        ended: Ended | None,
    ) -> None:
        self.engine = engine
        self.refresh = refresh
        self.ended = ended
        self.parts = engine.parts
        self.weight = engine.parts.sampling_weight()
        self.device = self.weight.device
        self.prefill_tokens = prefill_tokens(int(self.weight.shape[1]), self.device)
        vocab = int(self.weight.shape[0])
        self.is_end = np.zeros(vocab, dtype=np.bool_)
        self.is_end[[token for token in request.end_token_ids if 0 <= token < vocab]] = True
        self.prompts: list[Sequence[int]] = [*request.prompts]
        self.prompt_lengths = np.array([len(p) for p in request.prompts], dtype=np.int64)
        self.prompt_of, self.member_of = request.prompt_of, request.member_of
        self.limits = limits
        streams = np.array(request.streams(), dtype=object)[self.prompt_of]
        self.keys = stream_keys(request.seed, streams.tolist(), self.member_of)
        """Keys of the completions' random numbers, uint64 `[N]`."""
        self.temperature, self.truncation, self.stops = request.temperature, request.truncation, request.stops
        self.count = request.count
        self.num_slots = min(engine.num_slots, self.count)
        self.next = 0
        """The first completion that has not started."""
        self.batches: list[Prefilled] = []
        self.prefilled_up_to = 0
        self.num_sampled = np.zeros(self.count, dtype=np.int64)
        """The number of tokens of each completion so far."""
        self.sampled_ids = np.zeros((self.count, 0), dtype=np.int32)
        self.sampled_log_probs = np.zeros((self.count, 0), dtype=np.float32)
        """Tokens of each completion, with space for further tokens: `[N, W]`."""
        self.sampled_log_mass = None if self.truncation is None else self.sampled_log_probs
        self.version = engine.version
        """The version of the weights that sampled the current tokens: a reply may arrive after newer weights."""
        self.out_rows: list[Int64Array] = []
        self.out_versions: list[int | None] = []
        """Per step, the completions that received a token, and the version of the weights."""
        self.unreported: list[int] = []
        """Completions that have ended since the last `report`."""
        self.stopped = np.zeros(self.count, dtype=np.bool_)
        self.unfinished: npt.NDArray[np.bool_] | None = None
        """Which completions were truncated; None if none was."""
        self._deadline = None if request.deadline_s is None else time.monotonic() + request.deadline_s
        self._loads, self._aborts = engine.loads, engine.aborts
        self._looked = 0

    def completions(self) -> RaggedCompletions:
        """Return the sampled completions, in the order of the request."""
        lengths, spans = self.num_sampled, None
        # If the version was first set during the call, it is unknown for earlier tokens.
        if None not in self.out_versions:
            versions = np.repeat(np.array(self.out_versions, np.int64), [len(part) for part in self.out_rows])
            order = np.argsort(np.concatenate(self.out_rows), kind="stable")
            spans = VersionSpans.of_tokens(versions[order], lengths)
        sampled = np.arange(self.sampled_ids.shape[1]) < lengths[:, None]
        return RaggedCompletions(
            token_ids=self.sampled_ids[sampled].astype(np.int64),
            log_probs=self.sampled_log_probs[sampled],
            lengths=lengths,
            prompt_index=self.prompt_of,
            member=self.member_of,
            stopped=self.stopped,
            spans=spans,
            aborted=self.unfinished,
            support_log_mass=None if self.sampled_log_mass is None else self.sampled_log_mass[sampled],
        )

    def emit(
        self,
        rows: Int64Array,
        tokens: Int64Array,
        log_probs: npt.NDArray[np.float32],
        log_mass: npt.NDArray[np.float32] | None,
    ) -> None:
        """Record one token of each of these completions, and of truncated sampling the mass of its support."""
        if not np.isfinite(log_probs).all():
            bad = int(rows[int((~np.isfinite(log_probs)).argmax())])
            self.check_finite(math.nan, int(self.num_sampled[bad]), int(self.prompt_of[bad]))
        at, room = self.num_sampled[rows], self.sampled_ids.shape[1]
        if len(at) and at.max() >= room:
            more = ((0, 0), (0, max(room, 64)))
            self.sampled_ids = np.pad(self.sampled_ids, more)
            self.sampled_log_probs = np.pad(self.sampled_log_probs, more)
            if self.sampled_log_mass is not None:
                self.sampled_log_mass = np.pad(self.sampled_log_mass, more)
        self.sampled_ids[rows, at] = tokens
        self.sampled_log_probs[rows, at] = log_probs
        if self.sampled_log_mass is not None and log_mass is not None:
            self.sampled_log_mass[rows, at] = log_mass
        self.num_sampled[rows] = at + 1
        self.out_rows.append(rows)
        self.out_versions.append(self.version)

    @staticmethod
    def check_finite(log_prob: float, token: int, prompt: int) -> None:
        """Reject a log-prob that is not finite."""
        if not math.isfinite(log_prob):
            raise DataError(
                f"The model's logits are not finite at token {token} of a completion of prompt {prompt}. The "
                "weights have diverged or overflow their dtype: load an earlier checkpoint, lower the learning rate, "
                "or use float32."
            )

    def at_stop(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which of these completions end with one of the texts that stop them, bool `[len(rows)]`."""
        if self.stops is None:
            return np.zeros(len(rows), np.bool_)
        ends = [self.stops.ends(self.sampled_ids[row, : self.num_sampled[row]].tolist()) for row in rows.tolist()]
        return np.array(ends, np.bool_)

    def report(self) -> None:
        """Pass on the completions that have ended; called where the host would wait for the device next."""
        rows, self.unreported = self.unreported, []
        if self.ended is not None:
            for row in rows:
                self.ended(row, self.sampled_ids[row, : self.num_sampled[row]].tolist())

    def let_weights_change(self) -> bool:
        """Let other threads change the weights, and wait until they are done; True if the weights may have changed."""
        changed, steps = False, len(self.out_rows)
        with self.engine.gate.sampling_interrupted():
            if self.refresh is not None:
                changed = self.refresh.due(steps, since=self._looked)
                if changed:
                    self.engine.version = self.refresh.version
        self._looked = steps
        changed |= self._loads != self.engine.loads
        self._loads = self.engine.loads
        return changed

    def must_end(self) -> bool:
        """Return whether to end the call early: it is past its deadline, or was aborted."""
        late = self._deadline is not None and time.monotonic() > self._deadline
        return late or self._aborts != self.engine.aborts

    def cut(self, going: Int64Array) -> bool:
        """Mark these completions, and all that have not started, as cut short; return False for `step`."""
        unfinished = np.zeros(self.count, dtype=np.bool_)
        unfinished[going] = True
        unfinished[self.next :] = True
        self.unfinished = unfinished if unfinished.any() else None
        return False

    def forget(self) -> None:
        """Drop everything computed with other weights, except the caches of live completions."""
        self.weight = self.parts.sampling_weight()
        self.batches = []
        self.prefilled_up_to = int(self.prompt_of[self.next]) if self.next < self.count else len(self.prompts)

    def admit(self, new: Int64Array) -> None:
        """Prefill the prompts of these new completions, and drop prefilled batches that are no longer needed."""
        self.next = int(new[-1]) + 1
        owners = self.prompt_of[new]
        while self.prefilled_up_to <= owners[-1]:
            self._prefill_next()
        self.batches = [b for b in self.batches if b.last_prompt >= owners[0]]

    def places_of(self, owners: Int64Array) -> list[tuple[Prefilled, npt.NDArray[np.bool_], Int64Array]]:
        """Return each batch that holds any of these prompts, with a mask of those it holds and their rows in it."""
        places = []
        for batch in self.batches:
            mine = (owners >= batch.first_prompt) & (owners <= batch.last_prompt)
            if mine.any():
                places.append((batch, mine, owners[mine] - batch.first_prompt))
        return places

    def _prefill_next(self) -> None:
        """Run the next prompts through the trunk: at least one, and as many as fit the budget."""
        first = last = self.prefilled_up_to
        width = int(self.prompt_lengths[first])
        while last + 1 < len(self.prompts):
            wider = max(width, int(self.prompt_lengths[last + 1]))
            if wider * (last + 2 - first) > self.prefill_tokens:
                break
            width, last = wider, last + 1
        ids = np.zeros((last + 1 - first, width), dtype=np.int64)
        for i in range(first, last + 1):
            ids[i - first, : self.prompt_lengths[i]] = self.prompts[i]
        states, hidden = self._prefilled(ids, self.prompt_lengths[first : last + 1])
        self.batches.append(Prefilled(states, hidden, first, last))
        self.prefilled_up_to = last + 1

    def prefilled_again(self, completions: Int64Array, lengths: Int64Array) -> list[tuple[slice, States, Tensor]]:
        """Run the first tokens of live completions through the trunk again, in batches.

        Args:
            completions: their indices, int64 `[n]`.
            lengths: how many tokens of each to run, prompt included, int64 `[n]`.
        """
        most = max(1, self.prefill_tokens // int(lengths.max()))
        out = []
        for first in range(0, len(completions), most):
            part = slice(first, min(first + most, len(completions)))
            ids = np.zeros((part.stop - first, int(lengths[part].max())), dtype=np.int64)
            for i, completion in enumerate(completions[part].tolist()):
                ids[i, : lengths[first + i]] = self.tokens_of(completion, int(lengths[first + i]))
            out.append((part, *self._prefilled(ids, lengths[part])))
        return out

    def tokens_of(self, completion: int, length: int) -> Sequence[int]:
        """Return the first tokens of a completion, prompt included."""
        prompt = self.prompts[int(self.prompt_of[completion])]
        return [*prompt, *self.sampled_ids[completion, : length - len(prompt)].tolist()]

    def _prefilled(self, ids: Int64Array, token_counts: Int64Array) -> tuple[States, Tensor]:
        """Return what the layers keep of rows, and the rows' last hidden states `[len(ids), H]`."""
        return prefill(self.parts, self.upload(ids), self.upload(token_counts))

    def upload(self, values: npt.NDArray[np.generic]) -> Tensor:
        """Return an array as a tensor on the device; the host does not wait for the copy."""
        return upload([torch.from_numpy(np.ascontiguousarray(values))], self.device)[0]
