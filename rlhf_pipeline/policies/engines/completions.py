"""What the slot engine returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion.

    Attributes:
        prompt_index: which prompt of the call it belongs to.
        member: its index in the prompt's group.
        token_ids: the new tokens, with the end-of-sequence token when that was sampled.
        log_probs: float32 `[len(token_ids)]`, the log-prob of each token in nats, at the sampling temperature.
        finish_reason: "stop" when it ends with an end-of-sequence token, else "length".
    """

    prompt_index: int
    member: int
    token_ids: list[int]
    log_probs: Tensor
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class RaggedCompletions:
    """All completions of a call in flat arrays, prompt-major and member-minor.

    Attributes:
        token_ids: int64 `[sum(lengths)]`.
        log_probs: float32 `[sum(lengths)]`.
        lengths: new tokens per completion, int64 `[N]`.
        prompt_index: int64 `[N]`.
        member: int64 `[N]`.
        stopped: bool `[N]`, True where the completion ends with an end-of-sequence token.
        versions: int64 `[N, 2]`, versions of the weights that sampled the first and the last token; None where no one
            counted them.
    """

    token_ids: Int64Array
    log_probs: npt.NDArray[np.float32]
    lengths: Int64Array
    prompt_index: Int64Array
    member: Int64Array
    stopped: npt.NDArray[np.bool_]
    versions: Int64Array | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Completion]:
        """Yield one `Completion` after the other."""
        ends = np.cumsum(self.lengths)
        tokens = self.token_ids.tolist()
        log_probs = torch.from_numpy(self.log_probs)
        for i, (end, length) in enumerate(zip(ends.tolist(), self.lengths.tolist(), strict=True)):
            yield Completion(
                prompt_index=int(self.prompt_index[i]),
                member=int(self.member[i]),
                token_ids=tokens[end - length : end],
                log_probs=log_probs[end - length : end],
                finish_reason="stop" if self.stopped[i] else "length",
            )


def collect(
    rows: list[Int64Array],
    tokens: list[Int64Array],
    log_probs: list[npt.NDArray[np.float32]],
    prompt_of: Int64Array,
    member_of: Int64Array,
    stopped: npt.NDArray[np.bool_],
    step_versions: list[int] | None = None,
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
    """
    flat = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    order = np.argsort(flat, kind="stable")
    lengths = np.bincount(flat, minlength=len(prompt_of)).astype(np.int64)
    versions = None
    if step_versions is not None:
        of_token = np.repeat(np.array(step_versions, np.int64), [len(part) for part in rows])[order]
        ends = np.cumsum(lengths)
        versions = np.stack((of_token[ends - lengths], of_token[ends - 1]), axis=1)
    return RaggedCompletions(
        token_ids=(np.concatenate(tokens) if tokens else np.zeros(0, np.int64))[order],
        log_probs=(np.concatenate(log_probs) if log_probs else np.zeros(0, np.float32))[order],
        lengths=lengths,
        prompt_index=prompt_of,
        member=member_of,
        stopped=stopped,
        versions=versions,
    )
