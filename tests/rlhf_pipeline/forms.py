"""Forms that users bring, made for tests."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlhf_pipeline.data.keys import ATTENTION_MASK, TOKENS
from rlhf_pipeline.data.padding import length_mask, under_mask
from rlhf_pipeline.data.tensordicts import jagged, plant, stack_of, text_stack
from rlhf_pipeline.data.trajectories import Flat, Text, Trajectories


def padded_of(batch: Trajectories) -> TensorDictBase:
    """Return a TensorDict `[n]` whose token columns are padded on the right, with the attention mask."""
    tokens = batch.get(TOKENS)
    lengths = tokens.lengths if isinstance(tokens, Flat) else None
    if lengths is None:
        return td_of(batch)
    real = length_mask(lengths)
    out = Trajectories(batch.n, batch)
    for key, column in batch.items():
        if isinstance(column, Flat) and column.lengths is not None and torch.equal(column.lengths, lengths):
            out[key] = Flat(under_mask(real, column.values))
    out[ATTENTION_MASK] = Flat(real)
    return td_of(out)


def td_of(columns: Trajectories) -> TensorDictBase:
    """Return a TensorDict of batch size `[n]` with jagged leaves, the fast form of the write path.

    Rows that differ in more than their first dimension cannot be jagged: such batches become a lazy stack.
    """
    if any(isinstance(column, Flat) and column.shapes is not None for column in columns.values()):
        return stack_of(columns)
    tree: dict[str, Any] = {}
    offsets: list[tuple[Tensor, Tensor]] = []
    for key, column in columns.items():
        if isinstance(column, Text):
            leaf: Any = text_stack(column.items)
        elif column.lengths is None:
            leaf = column.values
        else:
            shared = next((o for ls, o in offsets if ls is column.lengths or torch.equal(ls, column.lengths)), None)
            leaf = jagged(column, shared)
            if shared is None:
                offsets.append((column.lengths, leaf.offsets()))
        plant(tree, key, leaf)
    return TensorDict(tree, batch_size=[columns.n])
