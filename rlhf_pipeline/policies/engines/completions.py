"""What an engine returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion.

    Attributes:
        prompt_index: which prompt of the call it belongs to.
        member: its index in the prompt's group.
        token_ids: the new tokens, with the end-of-sequence token when that was sampled.
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
    """Which weights sampled which tokens: per completion, spans of its tokens, each from its start to the next one's.

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
        """Return the spans of completions whose tokens' versions are given one behind the other.

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

    @classmethod
    def of_lists(cls, spans: Sequence[Sequence[tuple[int, int]]]) -> VersionSpans:
        """Return the spans given as one list of (first token, version) per completion."""
        flat = np.array([span for part in spans for span in part], dtype=np.int64).reshape(-1, 2)
        return cls(np.array([len(part) for part in spans], dtype=np.int64), flat[:, 0].copy(), flat[:, 1].copy())

    def lists(self) -> list[list[tuple[int, int]]]:
        """Return one list of (first token, version) per completion."""
        pairs = list(zip(self.starts.tolist(), self.versions.tolist(), strict=True))
        ends = np.cumsum(self.counts).tolist()
        return [pairs[end - count : end] for end, count in zip(ends, self.counts.tolist(), strict=True)]

    def select(self, keep: npt.NDArray[np.bool_]) -> VersionSpans:
        """Return those of the completions whose flag is set."""
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
        spans: which weights sampled which tokens; None where nobody named their version.
        aborted: bool `[N]`, True where the completion was cut short; None where none was.
    """

    token_ids: Int64Array
    log_probs: npt.NDArray[np.float32]
    lengths: Int64Array
    prompt_index: Int64Array
    member: Int64Array
    stopped: npt.NDArray[np.bool_]
    spans: VersionSpans | None = None
    aborted: npt.NDArray[np.bool_] | None = None

    @property
    def versions(self) -> Int64Array | None:
        """Versions of the weights that sampled the first and the last token, int64 `[N, 2]`; -1 without tokens."""
        if self.spans is None:
            return None
        out = np.full((len(self), 2), -1, dtype=np.int64)
        some = self.spans.counts > 0
        ends = np.cumsum(self.spans.counts)
        out[some, 0] = self.spans.versions[(ends - self.spans.counts)[some]]
        out[some, 1] = self.spans.versions[ends[some] - 1]
        return out

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Completion]:
        """Yield one `Completion` after the other."""
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
        )


def collect(
    rows: list[Int64Array],
    tokens: list[Int64Array],
    log_probs: list[npt.NDArray[np.float32]],
    prompt_of: Int64Array,
    member_of: Int64Array,
    stopped: npt.NDArray[np.bool_],
    step_versions: list[int] | None = None,
    aborted: npt.NDArray[np.bool_] | None = None,
) -> RaggedCompletions:
    """Bring the tokens of all steps into the order of the completions.

    Args:
        rows: per step, which completion each token belongs to.
        tokens: per step, the tokens.
        log_probs: per step, their log-probs.
        prompt_of: the prompt of each completion, int64 `[N]`.
        member_of: the member of each completion, int64 `[N]`.
        stopped: bool `[N]`.
        step_versions: per step, the version of the weights; None where no one counts them.
        aborted: bool `[N]`; None where none was.
    """
    flat = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    order = np.argsort(flat, kind="stable")
    lengths = np.bincount(flat, minlength=len(prompt_of)).astype(np.int64)
    spans = None
    if step_versions is not None:
        of_token = np.repeat(np.array(step_versions, np.int64), [len(part) for part in rows])[order]
        spans = VersionSpans.of_tokens(of_token, lengths)
    return RaggedCompletions(
        token_ids=(np.concatenate(tokens) if tokens else np.zeros(0, np.int64))[order],
        log_probs=(np.concatenate(log_probs) if log_probs else np.zeros(0, np.float32))[order],
        lengths=lengths,
        prompt_index=prompt_of,
        member=member_of,
        stopped=stopped,
        spans=spans,
        aborted=aborted,
    )
