"""The tensors of a loss, and how they are read from a TensorDict of any form."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rlhf_pipeline.data import keys
from rlhf_pipeline.data.padding import Side
from rlhf_pipeline.data.tensordicts import leaves_of, rows_of
from rlhf_pipeline.data.upload import upload
from rlhf_pipeline.errors import DataError, DefinitionError, MissingKeyError
from rlhf_pipeline.functional.aggregation import scorable
from rlhf_pipeline.policies.token_batches import TokenBatch, prompt_lengths

__all__ = ["LossBatch", "MaskingStrategy", "read_batch"]

MaskingStrategy = Literal["sft", "rlhf", "generic"]
NestedKey = Any
_PROMPT_TOKENS = ("tokens", "prompt")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossBatch:
    """The padded tensors of a loss.

    Attributes:
        tokens: int64 [B, T].
        attention: bool [B, T], the real tokens.
        candidates: bool [B, T], the tokens that the masking strategy chose.
        mask: bool [B, T], the tokens of the loss: the candidates that have a token before them to be predicted from,
            and whose log-probs that the loss reads are finite; see `functional.aggregation.scorable`.
        behaviour: [B, T].
        advantage: [B, T].
        ref: [B, T] or None.
        proximal: [B, T] or None.
        weight: [B, T] or None.
        group: int64 [B], the group of each row, where the batch has it, or None.
        keep: bool [B, T], the tokens that keep their policy loss, as `GRPOLoss.choose_tokens` chose them; or None.
        source: the TensorDict that they were read from, or None.
    """

    tokens: torch.Tensor
    attention: torch.Tensor
    candidates: torch.Tensor
    mask: torch.Tensor
    behaviour: torch.Tensor
    advantage: torch.Tensor
    ref: torch.Tensor | None = None
    proximal: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    group: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    source: TensorDictBase | None = None

    def to(self, device: torch.device) -> LossBatch:
        """Return the batch on a device; the batch itself if it is there already."""
        if self.tokens.device == device:
            return self
        present = [field.name for field in fields(self)[:-1] if getattr(self, field.name) is not None]
        moved = dict(zip(present, upload([getattr(self, name) for name in present], device), strict=True))
        return replace(self, **moved, source=None if self.source is None else self.source.to(device))


class _Reader:
    def __init__(self, td: TensorDictBase, side: Side, device: torch.device | None) -> None:
        # The typed signature of `get` does not list the arguments for ragged stacks.
        self.td: Any = td
        self.side: Side = side
        self.device = device

    def get(self, key: NestedKey, pad: float = 0.0) -> torch.Tensor | None:
        """Return the tensor under a key, padded on the side that all leaves share, or None if it is absent."""
        if isinstance(self.td, LazyStackedTensorDict):
            leaves = leaves_of(rows_of(self.td), key) or ()
            if leaves and all(isinstance(leaf, torch.Tensor) and leaf.ndim == 0 for leaf in leaves):
                value = torch.stack(tuple(leaves))  # one value per trajectory, which cannot be padded
            else:
                value = self.td.get(key, None, as_padded_tensor=True, padding_side=self.side, padding_value=pad)
        else:
            value = self.td.get(key, None)
        if value is None:
            return None
        if value.requires_grad:
            raise DataError(
                f"{key!r} requires a gradient, but the loss treats the batch as constant: only the actor has a "
                f"gradient. Detach it first: td.set({key!r}, td.get({key!r}).detach())."
            )
        if value.is_nested:
            if self.side != "right":
                raise DefinitionError(
                    f"{key!r} is a nested tensor, which is padded on the right; pass padding_side='right'."
                )
            value = torch.nested.to_padded_tensor(value, pad)
        return value if self.device is None else value.to(self.device)

    def need(self, key: NestedKey, advice: str) -> torch.Tensor:
        value = self.get(key)
        if value is None:
            batch_keys = sorted(str(k) for k in self.td.keys(include_nested=True, leaves_only=True) if k != key)
            raise MissingKeyError(
                f"the batch has no {key!r}. {advice} Keys of the batch: {', '.join(batch_keys[:12]) or 'none'}."
            )
        return value

    def per_token(self, value: torch.Tensor | None, key: NestedKey, like: torch.Tensor) -> Any:
        """Bring a leaf to [B, T]: drop a trailing dimension of one, and expand one value per trajectory."""
        if value is None:
            return None
        if value.ndim == 3 and value.shape[-1] == 1:
            value = value.squeeze(-1)
        if value.ndim == 1 and value.shape[0] == like.shape[0]:
            value = value[:, None]
        if value.shape == (like.shape[0], 1):
            value = value.expand(like.shape)
        if value.shape != like.shape:
            raise DataError(
                f"{key!r} has shape {list(value.shape)}, but the tokens have shape {list(like.shape)}: one value per "
                "token or one per trajectory is required. Was it padded to another length, or computed for the "
                "response only?"
            )
        return value


def read_batch(
    td: TensorDictBase,
    names: Any,
    *,
    masking_strategy: MaskingStrategy,
    side: Side,
    device: torch.device | None,
    decoupled: bool,
    kl_to_ref: bool,
) -> LossBatch:
    """Read and check the tensors that a loss needs.

    Args:
        td: batch of size [B], padded on any side, or ragged (a lazy stack, or jagged leaves).
        names: the loss's tensor keys.
        masking_strategy: which tokens count.
        side: where ragged leaves are padded; one side for all of them.
        device: where the tensors go; None leaves them where they are.
        decoupled: whether proximal log-probs are read.
        kl_to_ref: whether the loss has a term against the reference log-probs.
    """
    read = _Reader(td, side, device)
    tokens = read.need(
        names.action, "GRPOLoss scores token ids: add them, or specify another key with set_keys(action=...)."
    )
    if tokens.ndim == 3 and tokens.shape[-1] == 1:
        tokens = tokens.squeeze(-1)
    if tokens.ndim != 2:
        raise DataError(
            f"{names.action!r} must have shape [B, T]; got {list(tokens.shape)}. Flatten additional batch dimensions "
            "with td.reshape(-1)."
        )
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise DataError(f"{names.action!r} has dtype {tokens.dtype}; token ids must be integers.")
    tokens = tokens.long()
    attention = _attention(read, names, tokens)
    behaviour = read.per_token(
        read.need(
            names.sample_log_prob,
            "Store the behaviour log-probs, or specify another key with set_keys(sample_log_prob=...).",
        ),
        names.sample_log_prob,
        tokens,
    )
    advantage = read.need(names.advantage, "MCAdvantage writes it. To use another key, call set_keys(advantage=...).")
    proximal = None
    if decoupled:
        proximal = read.per_token(
            read.need(names.prox_log_probs, "decoupled=True needs the proximal log-probs."),
            names.prox_log_probs,
            tokens,
        )
    ref = read.per_token(read.get(names.ref_log_probs), names.ref_log_probs, tokens)
    candidates = _token_mask(read, names, tokens, attention, masking_strategy)
    return LossBatch(
        tokens=tokens,
        attention=attention,
        candidates=candidates,
        mask=scorable(candidates, attention, behaviour, proximal, ref if kl_to_ref else None),
        behaviour=behaviour,
        advantage=read.per_token(advantage, names.advantage, tokens),
        ref=ref,
        proximal=proximal,
        weight=read.per_token(read.get(names.loss_weight), names.loss_weight, tokens),
        group=_groups(read, names, len(tokens)),
        source=td,
    )


def _groups(read: _Reader, names: Any, rows: int) -> torch.Tensor | None:
    """Return the group of each row, int64 [B], or None if the batch has no numbers of groups."""
    numbers = read.td.get(names.group, None)
    is_per_row = isinstance(numbers, torch.Tensor) and numbers.numel() == rows
    return numbers.reshape(rows).long() if is_per_row else None


def _attention(read: _Reader, names: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mask of real tokens, from the row lengths if a ragged batch has no mask."""
    value = read.get(names.attention_mask)
    if value is not None:
        return read.per_token(value.bool(), names.attention_mask, tokens)
    if isinstance(read.td, LazyStackedTensorDict):
        ones = read.td.apply(torch.ones_like)
        lengths = _Reader(ones, read.side, read.device).get(names.action)
        if lengths is not None:
            return lengths.bool()
    elif read.td.get(names.action).is_nested:
        ones = torch.ones_like(read.td.get(names.action))
        return torch.nested.to_padded_tensor(ones, 0).bool().to(tokens.device)
    return read.need(names.attention_mask, "A padded batch needs the mask of its real tokens.")


def _token_mask(
    read: _Reader,
    names: Any,
    tokens: torch.Tensor,
    attention: torch.Tensor,
    strategy: MaskingStrategy,
) -> torch.Tensor:
    if strategy == "generic":
        return attention
    if strategy == "rlhf":
        advice = "masking_strategy='rlhf' selects the assistant's tokens; pass 'sft' for one response after a prompt."
        assistant = read.get(names.assistant_mask)
        if assistant is None:
            assistant = read.need(names.assistant_mask, advice)
        return read.per_token(assistant, names.assistant_mask, tokens).bool()
    ragged = isinstance(read.td, LazyStackedTensorDict) or bool(read.td.get(names.action).is_nested)
    rows = TokenBatch(tokens, attention, read.side if ragged else None, attention)
    lengths = prompt_lengths(read.td, rows, _PROMPT_TOKENS, names.assistant_mask)
    if lengths is None:
        raise MissingKeyError(
            f"masking_strategy='sft' needs {keys.NUM_PROMPT_TOKENS!r}, {_PROMPT_TOKENS!r} or "
            f"{names.assistant_mask!r} to separate the response from the prompt; the batch has none of them."
        )
    return attention.cumsum(1) > lengths[:, None]
