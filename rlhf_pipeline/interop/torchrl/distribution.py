"""Distributions over the tokens of a batch that make `[B, T, V]` logits only on request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributions as D
from torchrl.modules.distributions.discrete import LLMMaskedCategorical
from torchrl.modules.llm.policies.common import LogProbDistribution as _TorchRLLogProbDistribution

from rlhf_pipeline.data.padding import under_mask
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.functional.head import Head, token_log_probs

__all__ = ["LogProbDistribution", "TokenDistribution"]


class LogProbDistribution(_TorchRLLogProbDistribution):
    """Known log-probs in the form of a distribution.

    With `tokens`, a request for the log-probs of other tokens is an error; TorchRL's class would return the stored
    numbers for any value.

    Args:
        log_probs: float `[B, T]`.
        mask: bool `[B, T]`, True where a log-prob counts; elsewhere it is 0. All True when None.
        tokens: int64 `[B, T]`, the tokens that the log-probs belong to.

    >>> dist = LogProbDistribution(torch.tensor([[-1.0, -2.0]]), tokens=torch.tensor([[5, 6]]))
    >>> dist.log_prob(torch.tensor([[5, 6]]))
    tensor([[-1., -2.]])
    >>> dist.log_prob(torch.tensor([[5, 7]]))
    Traceback (most recent call last):
    rlhf_pipeline.errors.DataError: these are not the tokens that were scored (differences: 1; ...
    """

    def __init__(self, log_probs: Tensor, mask: Tensor | None = None, tokens: Tensor | None = None) -> None:
        for name, value in (("mask", mask), ("tokens", tokens)):
            if value is not None and value.shape != log_probs.shape:
                raise DataError(
                    f"{name} has shape {list(value.shape)}, but log_probs has shape {list(log_probs.shape)}."
                )
        super().__init__(log_probs, mask)
        self.tokens = tokens

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probs `[B, T]`, 0 outside the mask.

        Args:
            value: int64 `[B, T]`, the tokens; ids outside the mask are ignored.

        Raises:
            DataError: the shape or the tokens differ from those of the log-probs.
        """
        if value.shape != self.log_probs.shape:
            raise DataError(
                f"value has shape {list(value.shape)}, but log_probs has shape {list(self.log_probs.shape)}."
            )
        if self.tokens is not None:
            wrong = self.tokens != value
            if self.mask is not None:
                wrong = wrong & self.mask
            if bool(wrong.any()):
                row, column = (int(i) for i in wrong.nonzero()[0])
                raise DataError(
                    f"these are not the tokens that were scored (differences: {int(wrong.sum())}; the first is in row "
                    f"{row}, column {column}: {int(value[row, column])}, not {int(self.tokens[row, column])}). Score "
                    "these tokens first."
                )
        return super().log_prob(value)


class TokenDistribution(LLMMaskedCategorical):
    """The distribution of each token of a padded batch given the tokens before it.

    It keeps hidden states and the head instead of logits: `log_prob` and `entropy` apply the head in chunks; only
    `logits`, `probs`, `mode` and `sample` build larger tensors. Position `t` is the distribution *of* token `t`, so
    `dist.log_prob(tokens)` needs no shift. Positions outside the mask read 0.

    Args:
        hidden: `[N, H]`, for each masked position, row by row, the state that predicts its token.
        head: maps hidden states to logits.
        mask: bool `[B, T]` with N True entries.

    >>> mask = torch.tensor([[False, True]])
    >>> dist = TokenDistribution(torch.zeros(1, 2), Head(torch.ones(4, 2)), mask)
    >>> dist.log_prob(torch.tensor([[0, 3]]))
    tensor([[ 0.0000, -1.3863]])
    """

    def __init__(self, hidden: Tensor, head: Head, mask: Tensor) -> None:
        self.hidden = hidden
        self.head = head
        self.ignore_index = -100
        self._mask = mask
        self._position_level_masking = True
        self._masked_logits = None
        self._masked_dist = None
        D.Distribution.__init__(self, batch_shape=mask.shape, event_shape=head.weight.shape[:1], validate_args=False)

    def _spread(self, values: Tensor, fill: float = 0.0) -> Tensor:
        return under_mask(self._mask, values, fill)

    def _row_logits(self) -> Tensor:
        weight, bias, temperature, soft_cap = self.head
        logits = self.hidden.float() @ weight.float().t()
        logits = logits if bias is None else logits + bias.float()
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        return logits / temperature

    @property
    def _original_logits(self) -> Tensor:
        return self.logits

    @property
    def logits(self) -> Tensor:
        """The logits at the temperature, float32 `[B, T, V]`, 0 outside the mask: a large tensor."""
        return self._spread(self._row_logits())

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-prob of each token, float32 `[B, T]`, 0 outside the mask; differentiable.

        Args:
            value: int64 `[B, T]`; ids outside the mask are ignored, and -100 inside it gives 0.
        """
        if value.shape != self._mask.shape:
            raise DataError(
                f"value has shape {list(value.shape)}, but the distribution has shape {list(self._mask.shape)}. Pad "
                "both on the same side."
            )
        targets = value[self._mask.to(value.device)].to(self.hidden.device)
        ignored = targets == self.ignore_index
        vocab = self.head.weight.shape[0]
        if bool(((targets < 0) & ~ignored | (targets >= vocab)).any()):
            raise DataError(f"A token id is outside the vocabulary (0 to {vocab - 1}).")
        scores = self._scores(targets.masked_fill(ignored, 0))[0]
        return self._spread(scores.float().masked_fill(ignored, 0.0))

    def entropy(self) -> Tensor:
        """Return the entropy of each position in nats, float32 `[B, T]`, 0 outside the mask; differentiable."""
        targets = torch.zeros(len(self.hidden), dtype=torch.int64, device=self.hidden.device)
        return self._spread(self._scores(targets)[1].float())

    def _scores(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        return token_log_probs(self.hidden, self.head, targets, return_entropy=True)

    def sample(self, sample_shape: Any = None) -> Tensor:
        """Draw tokens, int64 `[*sample_shape, B, T]`; -100 outside the mask."""
        shape = torch.Size(() if sample_shape is None else sample_shape)
        with torch.no_grad():
            drawn = D.Categorical(logits=self._row_logits(), validate_args=False).sample((shape.numel(),))
        return torch.stack([self._spread(d, self.ignore_index) for d in drawn]).reshape(*shape, *self._mask.shape)

    @property
    def mode(self) -> Tensor:
        """The most probable token of each position, int64 `[B, T]`; -100 outside the mask."""
        return self._spread(self._row_logits().argmax(-1), self.ignore_index)
