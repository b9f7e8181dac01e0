"""Batches of older versions of TorchRL: flat keys, and values per token that cover only the response.

A row has `tokens` (of the prompt), `tokens_response` and `log_probs`. `complete_rows` gives it all tokens, as the rest
of this package reads them; `with_responses` cuts what was computed back to the response, with a last dimension of one,
as these versions have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from rlhf_pipeline.data.keys import ASSISTANT_MASK, ATTENTION_MASK, TOKENS, Key
from rlhf_pipeline.data.tensordicts import entries_of, is_jagged, is_stack, rows_of

PROMPT, RESPONSE, PROMPT_MASK = "tokens", "tokens_response", "attention_mask"


def is_flat(td: TensorDictBase, log_probs: Key) -> bool:
    """Return whether a batch has log-probs of responses under a flat key, but no complete token sequences."""
    if not isinstance(log_probs, str) or td.batch_dims != 1 or not td.shape[0]:
        return False
    entries = entries_of(rows_of(td)[0] if is_stack(td) else td)
    return isinstance(entries.get(log_probs), Tensor) and isinstance(entries.get(PROMPT), Tensor | None)


def complete_rows(td: TensorDictBase, log_probs: str, per_token: Sequence[Key]) -> TensorDictBase:
    """Return a flat batch as a lazy stack `[n]` of rows with complete token sequences and the assistant's mask.

    Args:
        td: a flat batch.
        log_probs: the key of the log-probs.
        per_token: further keys; their values per token are placed as the log-probs are.
    """
    return lazy_stack([_complete_row(row, log_probs, per_token) for row in _rows(td, log_probs)])  # pyright: ignore[reportReturnType]


def with_responses(td: TensorDictBase, complete: TensorDictBase, log_probs: str, keys: Sequence[Key]) -> TensorDictBase:
    """Return a shallow copy of a flat batch with what was computed for its whole rows, `[T_response, 1]` each."""
    out = td.clone(recurse=False)
    rows = list(zip(_rows(td, log_probs), rows_of(complete), strict=True))
    for key in keys:
        responses = [_response(row, done.get(key), log_probs) for row, done in rows if done.get(key, None) is not None]
        if len(responses) < len(rows):
            continue
        if is_stack(out):
            for row, leaf in zip(rows_of(out), responses, strict=True):
                row.set(key, leaf)
        elif is_jagged(td.get(log_probs)):
            out.set(key, torch.nested.as_nested_tensor(responses, layout=torch.jagged))
        else:
            out.set(key, torch.stack(responses))
    return out


def _rows(td: TensorDictBase, log_probs: str) -> list[Any]:
    """Return the rows of a batch. In a padded one a log-prob of 0 is padding, as in these versions."""
    if is_stack(td) or is_jagged(td.get(log_probs)):
        return list(td.unbind(0))
    rows = [row.clone(recurse=False) for row in td.unbind(0)]
    for row in rows:
        scores = row.get(log_probs)
        row.set(log_probs, torch.where(scores == 0, torch.nan, scores))
    return rows


def _real(row: Any, log_probs: str) -> Tensor:
    """Return which positions of a row's response hold tokens, `[T_response]`."""
    return ~row.get(log_probs).reshape(-1).isnan()


def _complete_row(row: Any, log_probs: str, per_token: Sequence[Key]) -> TensorDict:
    real = _real(row, log_probs)
    response = row.get(RESPONSE, None)
    prompt = row.get(PROMPT, None)
    mask = row.get(PROMPT_MASK, None)
    if prompt is not None and mask is not None and mask.shape[-1] >= prompt.shape[-1]:
        prompt = prompt[mask[: prompt.shape[-1]].bool()]
    # A row needs a token before its response; nothing is scored where there are no tokens.
    prompt = torch.zeros(1, dtype=torch.int64) if prompt is None else prompt
    out: dict[Any, Any] = {name: value for name, value in row.items() if name not in (PROMPT, RESPONSE, PROMPT_MASK)}
    complete = TensorDict(out)
    if response is not None:
        complete[TOKENS] = torch.cat([prompt, response.reshape(-1)[real]])
    assistant_mask = torch.ones(len(prompt) + int(real.sum()), dtype=torch.bool)
    assistant_mask[: len(prompt)] = False
    complete[ASSISTANT_MASK], complete[ATTENTION_MASK] = assistant_mask, torch.ones_like(assistant_mask)
    for key in (log_probs, *per_token):
        value = row.get(key, None)
        if value is not None and value.numel() == real.numel():
            before = value.new_full((len(prompt),), 0.0 if key != log_probs else torch.nan)
            complete[key] = torch.cat([before, value.reshape(-1)[real]])
    return complete


def _response(row: Any, scored: Tensor, log_probs: str) -> Tensor:
    real = _real(row, log_probs)
    out = scored.new_zeros(real.shape)
    out[real] = scored.reshape(-1)[-int(real.sum()) :] if bool(real.any()) else scored[:0]
    return out.unsqueeze(-1)
