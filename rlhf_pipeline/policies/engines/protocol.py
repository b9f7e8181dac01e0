"""The engine protocol: prompts of token ids in; token ids, log-probs, version spans and finish reasons out.

An engine holds weights and samples with them. The learner trusts its reports: a token's log-prob is that of the
distribution it was drawn from, at the sampling temperature, under the weights that the token's version names. The
contract tests hold every engine to this.

This module does not depend on TensorDict, stores or runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.policies.engines.sampling import Truncation
from rlhf_pipeline.policies.stop_strings import StopStrings

__all__ = ["Completion", "Ended", "Engine", "RaggedCompletions", "Request", "VersionSpans", "WeightRefresh", "Weights"]

FinishReason = Literal["stop", "length", "abort"]
Int64Array = npt.NDArray[np.int64]
Weights = Path | Mapping[str, Tensor]
"""The source of new weights: a checkpoint folder as `save_pretrained` writes it, or the model's state dict."""
Ended = Callable[[int, Sequence[int]], None]
"""Takes the index of a completion in its request, and its token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to sample."""

    prompts: Sequence[Sequence[int]]
    group_size: int = 1
    max_new_tokens: int | Sequence[int] = 64
    temperature: float = 1.0
    end_token_ids: Sequence[int] = ()
    seed: int = 0
    stream_ids: Sequence[int] | None = None
    members: Sequence[int] | None = None
    deadline_s: float | None = None
    truncation: Truncation | None = None
    stops: StopStrings | None = None

    @property
    def count(self) -> int:
        """The number of requested completions."""
        return len(self.prompts) * self.group_size

    @property
    def prompt_of(self) -> Int64Array:
        """The prompt of each completion, int64 `[count]`: prompt-major."""
        return np.repeat(np.arange(len(self.prompts), dtype=np.int64), self.group_size)

    @property
    def member_of(self) -> Int64Array:
        """The member of each completion, int64 `[count]`: member-minor."""
        if self.members is not None:
            return np.asarray(self.members, np.int64)
        return np.tile(np.arange(self.group_size, dtype=np.int64), len(self.prompts))

    def streams(self) -> list[int]:
        """Return the stream id of each prompt."""
        if self.stream_ids is None:
            return list(range(len(self.prompts)))
        if len(self.stream_ids) != len(self.prompts):
            raise DefinitionError(
                f"stream_ids has length {len(self.stream_ids)}, but prompts has length {len(self.prompts)}; pass one "
                "stream id per prompt."
            )
        return [int(stream) for stream in self.stream_ids]

    def limits(self, *, vocab: int | None = None, positions: int | None = None, positions_by: str = "") -> Int64Array:
        """Check the request and return the most new tokens of each completion, int64 `[count]`, prompt-major."""
        if self.group_size < 1:
            raise DefinitionError(f"group_size is {self.group_size}; it must be at least 1.")
        if not (self.temperature >= 0 and np.isfinite(self.temperature)):
            raise DefinitionError(f"temperature is {self.temperature}; it must be finite and at least 0.")
        lengths = np.array([len(p) for p in self.prompts], dtype=np.int64)
        requested = np.asarray(self.max_new_tokens, dtype=np.int64)
        if requested.ndim == 0:
            limits = np.full(self.count, int(requested), dtype=np.int64)
        elif requested.shape == (len(self.prompts),):
            limits = np.repeat(requested, self.group_size)
        elif requested.shape == (self.count,):
            limits = requested.copy()
        else:
            raise DefinitionError(
                f"max_new_tokens has shape {requested.shape}; pass one number, one per prompt ({len(self.prompts)}) "
                f"or one per completion ({self.count})."
            )
        if self.count and limits.min() < 1:
            raise DefinitionError(f"max_new_tokens is {limits.min()}; it must be at least 1.")
        if not lengths.all():
            raise DataError(
                f"Prompt {int(lengths.argmin())} has no tokens, but a model needs at least one. Begin the prompt with "
                "a BOS token, or remove the prompt."
            )
        ids = np.fromiter(chain.from_iterable(self.prompts), np.int64, int(lengths.sum()))
        outside = np.flatnonzero((ids < 0) | (False if vocab is None else ids >= vocab))
        if len(outside):
            owner = int(lengths.cumsum().searchsorted(outside[0], "right"))
            raise DataError(
                f"Prompt {owner} contains the token id {ids[outside[0]]}, which is outside the model's vocabulary (0 "
                f"to {'...' if vocab is None else vocab - 1}). Encode it with the tokenizer of this model."
            )
        if positions is not None and self.count:
            longest = int(lengths.argmax())
            if lengths[longest] >= positions:
                raise DataError(
                    f"Prompt {longest} has {lengths[longest]} tokens; the model has {positions} positions "
                    f"({positions_by}), but a completion needs at least one of them. Shorten or remove the prompt."
                )
            limits = np.minimum(limits, positions - np.repeat(lengths, self.group_size))
        return limits


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion.

    Attributes:
        prompt_index: which prompt of the call it belongs to.
        member: its index in the prompt's group.
        token_ids: the new tokens, with the end-of-sequence token if it was sampled.
        log_probs: float32 `[len(token_ids)]`, the log-prob of each token in nats, at the sampling temperature.
        finish_reason: "stop" when it ends with an end-of-sequence token, "abort" when it was cut short, else "length".
    """

    prompt_index: int
    member: int
    token_ids: list[int]
    log_probs: Tensor
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class VersionSpans:
    """Which weights sampled which tokens: per completion, spans of tokens, each up to the start of the next.

    Attributes:
        counts: spans per completion, int64 `[N]`; 0 for one without tokens.
        starts: the first token of each span, counted within its completion, int64 `[sum(counts)]`.
        versions: of the weights, int64 `[sum(counts)]`.
    """

    counts: Int64Array
    starts: Int64Array
    versions: Int64Array

    @classmethod
    def of_tokens(cls, versions: Int64Array, lengths: Int64Array) -> VersionSpans:
        """Return the spans of completions, given the versions of all their tokens in sequence.

        >>> spans = VersionSpans.of_tokens(np.array([7, 7, 8, 8, 8]), np.array([3, 0, 2]))
        >>> spans.counts.tolist(), spans.starts.tolist(), spans.versions.tolist()
        ([2, 0, 1], [0, 2, 0], [7, 8, 8])
        """
        firsts = np.cumsum(lengths) - lengths
        begins = np.zeros(len(versions), np.bool_)
        begins[1:] = versions[1:] != versions[:-1]
        begins[firsts[lengths > 0]] = True
        owner = np.repeat(np.arange(len(lengths)), lengths)
        at = np.flatnonzero(begins)
        return cls(np.bincount(owner[at], minlength=len(lengths)), at - firsts[owner[at]], versions[at])

    def lists(self) -> list[list[tuple[int, int]]]:
        """Return one list of (first token, version) per completion."""
        pairs = list(zip(self.starts.tolist(), self.versions.tolist(), strict=True))
        ends = np.cumsum(self.counts).tolist()
        return [pairs[end - count : end] for end, count in zip(ends, self.counts.tolist(), strict=True)]

    def placed(self, begins: Int64Array) -> Int64Array:
        """Return place and version of each span, int64 `[sum(counts), 2]`, in rows where completions begin there."""
        return np.stack([self.starts + np.repeat(begins, self.counts), self.versions], axis=1)

    def select(self, keep: npt.NDArray[np.bool_]) -> VersionSpans:
        """Return the spans of the completions whose flag is set."""
        inside = np.repeat(keep, self.counts)
        return VersionSpans(self.counts[keep], self.starts[inside], self.versions[inside])


@dataclass(frozen=True, slots=True)
class RaggedCompletions:
    """All completions of a call in flat arrays, prompt-major and member-minor.

    Attributes:
        token_ids: int64 `[sum(lengths)]`.
        log_probs: float32 `[sum(lengths)]`; NaN where the engine has none.
        lengths: new tokens per completion, int64 `[N]`; 0 only where it was aborted.
        prompt_index: int64 `[N]`.
        member: int64 `[N]`.
        stopped: bool `[N]`, True where the completion ends with an end-of-sequence token.
        spans: which weights sampled which tokens; None if their version is unknown.
        aborted: bool `[N]`, True where the completion was cut short; None where none was.
        support_log_mass: float32 `[sum(lengths)]`, of truncated sampling: the log of the mass of the tokens that could
            be drawn. `log_probs + support_log_mass` are log-probs under the whole distribution. None without
            truncation.
    """

    token_ids: Int64Array
    log_probs: npt.NDArray[np.float32]
    lengths: Int64Array
    prompt_index: Int64Array
    member: Int64Array
    stopped: npt.NDArray[np.bool_]
    spans: VersionSpans | None = None
    aborted: npt.NDArray[np.bool_] | None = None
    support_log_mass: npt.NDArray[np.float32] | None = None

    @classmethod
    def none(cls, *, versioned: bool) -> RaggedCompletions:
        """Return zero completions, with known versions or without."""
        ids, nothing = np.zeros(0, np.int64), np.zeros(0, np.bool_)
        spans = VersionSpans(ids, ids, ids) if versioned else None
        return cls(ids, np.zeros(0, np.float32), ids, ids, ids, nothing, spans)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Completion]:
        """Yield each `Completion`."""
        ends = np.cumsum(self.lengths)
        tokens = self.token_ids.tolist()
        log_probs = torch.from_numpy(self.log_probs)
        for i, (end, length) in enumerate(zip(ends.tolist(), self.lengths.tolist(), strict=True)):
            aborted = self.aborted is not None and bool(self.aborted[i])
            yield Completion(
                prompt_index=int(self.prompt_index[i]),
                member=int(self.member[i]),
                token_ids=tokens[end - length : end],
                log_probs=log_probs[end - length : end],
                finish_reason="abort" if aborted else "stop" if self.stopped[i] else "length",
            )

    def select(self, keep: npt.NDArray[np.bool_]) -> RaggedCompletions:
        """Return the completions whose flag is set."""
        tokens = np.repeat(keep, self.lengths)
        return RaggedCompletions(
            token_ids=self.token_ids[tokens],
            log_probs=self.log_probs[tokens],
            lengths=self.lengths[keep],
            prompt_index=self.prompt_index[keep],
            member=self.member[keep],
            stopped=self.stopped[keep],
            spans=None if self.spans is None else self.spans.select(keep),
            aborted=None if self.aborted is None else self.aborted[keep],
            support_log_mass=None if self.support_log_mass is None else self.support_log_mass[tokens],
        )

    def shortened(self, lengths: Int64Array, stopped: npt.NDArray[np.bool_]) -> RaggedCompletions:
        """Return the completions cut to these lengths, int64 `[N]`; those with a flag have stopped there."""
        if not stopped.any():
            return self
        at = np.arange(len(self.token_ids)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        tokens = at < np.repeat(lengths, self.lengths)
        spans = self.spans
        if spans is not None:
            inside = spans.starts < np.repeat(lengths, spans.counts)
            owner = np.repeat(np.arange(len(lengths)), spans.counts)[inside]
            counts = np.bincount(owner, minlength=len(lengths))
            spans = VersionSpans(counts, spans.starts[inside], spans.versions[inside])
        return replace(
            self,
            token_ids=self.token_ids[tokens],
            log_probs=self.log_probs[tokens],
            lengths=lengths,
            stopped=self.stopped | stopped,
            spans=spans,
            aborted=None if self.aborted is None else self.aborted & ~stopped,
            support_log_mass=None if self.support_log_mass is None else self.support_log_mass[tokens],
        )


@dataclass(slots=True)
class WeightRefresh:
    """Newer weights in the middle of a rollout, as in PipelineRL (https://arxiv.org/abs/2509.19128)."""

    load: Callable[[], int]
    every: int
    version: int

    def due(self, steps: int, *, since: int) -> bool:
        """Load newer weights if a check fell due after step `since`, up to `steps`; True if they may have changed."""
        return steps // self.every > since // self.every and self.look()

    def look(self) -> bool:
        """Load newer weights if there are any; return True if they may have changed."""
        before, self.version = self.version, self.load()
        return self.version != before


@runtime_checkable
class Engine(Protocol):
    """Samples completions.

    `generate` blocks; meanwhile the other methods may be called from other threads, and from `WeightRefresh.load`.
    """

    @property
    def name(self) -> str:
        """The engine's name in a definition and in messages: `slots`, `vllm`, or an address."""
        ...

    @property
    def version(self) -> int | None:
        """The version of the weights in use; None if unknown."""
        ...

    def generate(
        self, request: Request, refresh: WeightRefresh | None = None, ended: Ended | None = None
    ) -> RaggedCompletions:
        """Sample `group_size` completions of every prompt, prompt-major and member-minor."""
        ...

    def pause(self) -> None:
        """Stop between two tokens. Completions in progress are kept, and `generate` keeps blocking."""
        ...

    def resume(self) -> None:
        """Resume after `pause`."""
        ...

    def load_weights(self, weights: Weights, version: int) -> None:
        """Load new weights; completions in progress continue with them, and caches from other weights are dropped.

        So every token's log-prob is that of the weights of its span, given all tokens before it.
        """
        ...

    def abort(self) -> None:
        """End the completions in progress: `generate` returns the tokens sampled so far, with finish reason `abort`."""
        ...

    def close(self) -> None:
        """Release the engine's resources; it cannot be used afterwards."""
        ...
