"""The tensors of a rollout with one step per token: prefixes padded on the right, or on the left without copies.

Prompt and completion of a row share one buffer, and step `i` is a window on it that ends at token `i`. Windows of equal
width that move by one column per step are a strided view, so `[B, T, W]` prefixes cost a buffer `[B, W + T]`. This
needs padding on the left. With padding on the right, a column would change from padding to a token between steps while
its neighbours stay the same; strides cannot express that without showing a step the tokens after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_pipeline.errors import DataError, MissingKeyError


class PromptRows(NamedTuple):
    """The prompts of a batch.

    Attributes:
        input_ids: int64 `[B, P]`, as in the batch, with whatever follows the prompt (a label, padding).
        attention_mask: bool `[B, P]`, True at the tokens of `input_ids`.
        prompt_mask: bool `[B, P]`, True at the tokens of the prompt.
        rindex: int64 `[B]`, the column after the prompt's last token.
    """

    input_ids: Tensor
    attention_mask: Tensor
    prompt_mask: Tensor
    rindex: Tensor


def prompt_rows(batch: Any) -> PromptRows:
    """Read the prompts of a `PromptData`, a TensorDict, a dict or any object with these fields."""
    input_ids, rindex = _field(batch, "input_ids"), _field(batch, "prompt_rindex")
    for name, value in (("input_ids", input_ids), ("prompt_rindex", rindex)):
        if value is None:
            raise MissingKeyError(
                f"the batch has no {name}; a rollout needs input_ids, attention_mask and prompt_rindex."
            )
    if input_ids.ndim != 2 or rindex.numel() != input_ids.shape[0]:
        raise DataError(
            f"input_ids must have shape [B, P] and prompt_rindex [B]; got {list(input_ids.shape)} and "
            f"{list(rindex.shape)}."
        )
    attention_mask = _field(batch, "attention_mask")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise DataError(
            f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}; "
            f"got {list(attention_mask.shape)}."
        )
    attention_mask = attention_mask.to(device=input_ids.device, dtype=torch.bool)
    rindex = rindex.to(device=input_ids.device, dtype=torch.int64).reshape(-1)
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    prompt_mask = attention_mask & (columns < rindex.unsqueeze(1))
    wrong = (rindex > input_ids.shape[1]) | (prompt_mask.sum(1) == 0)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise DataError(
            f"row {row} has {int(prompt_mask[row].sum())} prompt tokens, prompt_rindex {int(rindex[row])} and "
            f"{input_ids.shape[1]} columns; a prompt needs at least one token, and prompt_rindex must be the column "
            "after its last token."
        )
    return PromptRows(input_ids.long(), attention_mask, prompt_mask, rindex)


def _field(batch: Any, name: str) -> Any:
    get = getattr(batch, "get", None)
    return get(name, None) if callable(get) else getattr(batch, name, None)


def completion_lengths(completion: Tensor, eos_token_ids: Sequence[int]) -> Tensor:
    """Return the number of tokens of each row of `[B, T]` up to and including its first EOS, `[B]`.

    A row without an EOS has all `T`. Everything after the first EOS is padding, whatever its ids, and nothing before it
    is, so the padding id may be an EOS.

    >>> completion_lengths(torch.tensor([[5, 2, 2], [5, 5, 3], [5, 5, 5]]), (2, 3)).tolist()
    [2, 3, 3]
    """
    eos = torch.tensor(list(eos_token_ids), dtype=completion.dtype, device=completion.device)
    before = torch.isin(completion, eos).int().cumsum(1) == 0
    return (before.sum(1) + 1).clamp(max=completion.shape[1])


def end_aligned(input_ids: Tensor, mask: Tensor, width: int, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Move the tokens of each row to the right end of `width` columns: (ids `[B, width]`, mask `[B, width]`)."""
    ids = torch.full((input_ids.shape[0], width), pad_token_id, dtype=torch.int64, device=input_ids.device)
    real = torch.zeros_like(ids, dtype=torch.bool)
    rows, columns = mask.nonzero(as_tuple=True)
    target = (mask.cumsum(1) - 1 + (width - mask.sum(1, keepdim=True)))[rows, columns]
    ids[rows, target] = input_ids[rows, columns].long()
    real[rows, target] = True
    return ids, real


def start_aligned(input_ids: Tensor, mask: Tensor, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Move the tokens of each row to the left end of its columns: (ids, mask), in the shape of the arguments.

    >>> start_aligned(torch.tensor([[9, 4, 9, 5]]), torch.tensor([[False, True, False, True]]), 0)[0].tolist()
    [[4, 5, 0, 0]]
    """
    order = mask.long().argsort(dim=-1, descending=True, stable=True)
    real = mask.gather(-1, order)
    return input_ids.gather(-1, order).masked_fill(~real, pad_token_id), real


def right_padded_prefixes(
    prompts: PromptRows, completion: Tensor, lengths: Tensor, pad_token_id: int
) -> tuple[Tensor, Tensor]:
    """Return the prefix before each step and after the last one, tokens first; arguments as for `prefix_windows`.

    Returns:
        (ids int64 `[B, T + 1, P + T]`, mask bool of that shape). After a completion's end the prefix stays the same.

    >>> prompts = PromptRows(*(torch.tensor(x) for x in ([[4, 5]], [[True, True]], [[True, True]], [2])))
    >>> right_padded_prefixes(prompts, torch.tensor([[6, 0]]), torch.tensor([1]), 0)[0].tolist()
    [[[4, 5, 0, 0], [4, 5, 6, 0], [4, 5, 6, 0]]]
    """
    steps = completion.shape[1]
    real = torch.arange(steps, device=completion.device) < lengths.unsqueeze(1)
    ids, mask = torch.cat((prompts.input_ids, completion), 1), torch.cat((prompts.prompt_mask, real), 1)
    ids, _ = start_aligned(ids, mask, pad_token_id)
    tokens = torch.arange(steps + 1, device=ids.device).minimum(lengths.unsqueeze(1))
    tokens = tokens + prompts.prompt_mask.sum(1, keepdim=True)
    mask = torch.arange(ids.shape[1], device=ids.device) < tokens.unsqueeze(-1)
    return torch.where(mask, ids.unsqueeze(1), pad_token_id), mask


def prefix_windows(
    prompts: PromptRows, completion: Tensor, lengths: Tensor, pad_token_id: int
) -> tuple[Tensor, Tensor]:
    """Return the prefix before each step and after the last one, as views of two buffers.

    Args:
        prompts: `B` prompts in `P` columns.
        completion: int64 `[B, T]`, padding after each row's length.
        lengths: int64 `[B]`.
        pad_token_id: fills padding.

    Returns:
        (ids int64 `[B, T + 1, P + T]`, mask bool of that shape). Step `i` ends with the `i`-th token of the completion,
        step 0 with the prompt's last token; padding is on the left, and also on the right after a completion's end.
        Both are views of buffers `[B, P + 2 T]`.
    """
    steps = completion.shape[1]
    width = prompts.input_ids.shape[1] + steps
    ids, mask = end_aligned(prompts.input_ids, prompts.prompt_mask, width, pad_token_id)
    real = torch.arange(steps, device=completion.device) < lengths.unsqueeze(1)
    ids, mask = torch.cat((ids, completion), 1), torch.cat((mask, real), 1)
    return ids.unfold(1, width, 1), mask.unfold(1, width, 1)
