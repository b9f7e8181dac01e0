"""Token batches out of TensorDicts: padded on any side, ragged stacks, or jagged leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor

from rlhf_pipeline.data import keys
from rlhf_pipeline.data.padding import Side, length_mask, pad_rows
from rlhf_pipeline.errors import DataError, MissingKeyError

Key = Any
Leaf = Tensor | list[Tensor] | None


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Padded tokens, and the form in which they were given.

    Attributes:
        input_ids: int64 `[B, T]`.
        attention_mask: bool `[B, T]`.
        side: the side that was padded; None for a batch that came padded and keeps its own layout.
        extent: bool `[B, T]`, True at the row as it was given, which may include padding of its own.
    """

    input_ids: Tensor
    attention_mask: Tensor
    side: Side | None
    extent: Tensor

    @property
    def ragged(self) -> bool:
        """True if the rows came without padding."""
        return self.side is not None

    def rows(self, values: Tensor) -> list[Tensor]:
        """Cut `[B, T, ...]` into rows of their given lengths."""
        return [row[length] for row, length in zip(values, self.extent, strict=True)]

    def real_rows(self, values: Tensor) -> list[Tensor]:
        """Cut `[B, T, ...]` into the real part of each row."""
        return [row[real] for row, real in zip(values, self.attention_mask, strict=True)]


def leaf(td: TensorDictBase, key: Key) -> Leaf:
    """Return a leaf as a tensor, or as a list of rows if it is ragged; None if absent."""
    if isinstance(td, LazyStackedTensorDict):
        rows = [row.get(key, None) for row in td.unbind(0)]
        if any(row is None for row in rows):
            return None
        tensors = [torch.as_tensor(row) for row in rows]
        # Rows of equal length are a list too: how a stack is padded must not depend on its lengths.
        return tensors if tensors and tensors[0].ndim == 1 else torch.stack(tensors)
    value = td.get(key, None)
    if isinstance(value, Tensor) and value.is_nested:
        return list(value.unbind())
    return value if isinstance(value, Tensor) else None


def read_ids(td: TensorDictBase, key: Key, mask_key: Key, side: Side) -> TokenBatch | None:
    """Read token ids and their attention mask; None if there are no ids under the key.

    Args:
        td: batch size `[B]`.
        key: of the token ids.
        mask_key: of the attention mask; without one, all padded ids count as real.
        side: the side on which ragged rows are padded.
    """
    ids = leaf(td, key)
    if ids is None:
        return None
    if isinstance(ids, list):
        return pad_ids(ids, side, leaf(td, mask_key))
    if ids.ndim != 2:
        raise DataError(f"{key!r} must have shape [B, T] or be ragged rows; got shape {list(ids.shape)}.")
    mask = leaf(td, mask_key)
    if isinstance(mask, list):
        raise DataError(f"{key!r} is padded and {mask_key!r} is ragged; pass both in the same form.")
    if mask is None:
        mask = torch.ones_like(ids, dtype=torch.bool)
    if mask.shape != ids.shape:
        raise DataError(
            f"{key!r} has shape {list(ids.shape)} and {mask_key!r} has shape {list(mask.shape)}; the shapes must be "
            "equal."
        )
    return TokenBatch(ids.long(), mask.bool(), None, torch.ones_like(ids, dtype=torch.bool))


def pad_ids(rows: Sequence[Tensor | Sequence[int]], side: Side, masks: Leaf = None) -> TokenBatch:
    """Pad rows of token ids; rows that contain padding themselves come with masks."""
    ids, lengths = pad_rows(rows, side=side, dtype=torch.int64)
    extent = length_mask(lengths, ids.shape[1], side=side).to(ids.device)
    batch = TokenBatch(ids, extent, side, extent)
    if masks is None:
        return batch
    return replace(batch, attention_mask=extent & pad_like(masks, batch, "attention mask").bool())


def pad_like(values: Leaf, batch: TokenBatch, name: str) -> Tensor:
    """Pad a per-token leaf to the layout of a batch, `[B, T]`."""
    if values is None:
        raise MissingKeyError(f"The TensorDict has no {name}.")
    padded = pad_rows(values, side=batch.side or "right")[0] if isinstance(values, list) else values
    if padded.shape != batch.input_ids.shape:
        raise DataError(
            f"{name} has shape {list(padded.shape)}, but the tokens have shape {list(batch.input_ids.shape)}."
        )
    return padded.to(batch.input_ids.device)


def prompt_lengths(td: TensorDictBase, batch: TokenBatch, prompt_key: Key, assistant_key: Key) -> Tensor | None:
    """Return the number of prompt tokens of each row, int64 `[B]`, or None if unknown.

    Sources, in order: "num_prompt_tokens"; the length of a ragged prompt; the first token of the assistant; a padded
    prompt equal to the first columns of the tokens, as generation lays them out. Ids are not compared with the padding
    id: where padding and end token share an id, a prompt may end in it.
    """
    device = batch.input_ids.device
    count = td.get(keys.NUM_PROMPT_TOKENS, None)
    if isinstance(count, Tensor):
        return count.reshape(-1).to(device)
    prompt = leaf(td, prompt_key)
    if isinstance(prompt, list):
        return torch.tensor([len(p) for p in prompt], device=device)
    assistant = leaf(td, assistant_key)
    if assistant is not None:
        assistant_tokens = pad_like(assistant, batch, repr(assistant_key)).bool() & batch.attention_mask
        return (batch.attention_mask & (assistant_tokens.cumsum(1) == 0)).sum(1)
    if prompt is None or prompt.ndim != 2 or prompt.shape[1] > batch.input_ids.shape[1]:
        return None
    width = prompt.shape[1]
    real = batch.attention_mask[:, :width]
    same = (batch.input_ids[:, :width] == prompt.to(device)) | ~real
    # The last prompt column is real in every row where the prompt is padded on the left, or not at all.
    return real.sum(1) if width and bool(same.all() & real[:, -1].all()) else None
