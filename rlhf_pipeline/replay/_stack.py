"""A lazy stack of complete trajectories straight to one append.

Most batches need nothing derived: every leaf is a column of the store, ragged leaves have one dimension, and every row
ends its trajectory. Such a stack is flattened here in one pass, without the columns in between that transforms work
on. Everything else goes the general way of `rlhf_pipeline.replay.storage`, which gives the same data and says what is
wrong.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData
from torch import Tensor

from rlhf_pipeline.data.keys import ASSISTANT_MASK, CREATED_AT, DONE, NUM_PROMPT_TOKENS, REWARD, TOKENS, Key
from rlhf_pipeline.data.trajectories import Text, plain_entries
from rlhf_pipeline.replay.trajectory_schema import column_of_key
from trajectory_store import Column, RaggedArray, Schema

Leaves = dict[Key, list[Any] | tuple[Any, ...]]
_NUMBERS = {"i": int, "b": bool}
_COMPLETE: frozenset[Key] = frozenset({TOKENS, ASSISTANT_MASK, NUM_PROMPT_TOKENS})


def stack_data(rows: Sequence[Any], schema: Schema) -> dict[str, Any] | None:
    """What `TrajectoryStore.append` takes, of one TensorDict per trajectory.

    Args:
        rows: the TensorDicts of a lazy stack.
        schema: the columns of the store.

    Returns:
        The data by column, or None where the stack has to go the general way.
    """
    plan = column_of_key(schema)
    if set(map(type, rows)) != {TensorDict}:
        return None
    leaves: Leaves = {}
    try:
        _collect(list(map(plain_entries, rows)), (), leaves)
        # A key that is no column may be one to derive from, or one to report; rewards per token are to be summed.
        complete = _COMPLETE <= leaves.keys() <= plan.keys() and REWARD not in leaves
        if not complete or not leaves[TOKENS][0].is_cpu:
            return None
        return _joined(leaves, plan, len(rows), schema)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, OverflowError):
        return None  # rows or leaves that are not alike, shapes or dtypes that need care


def _collect(level: list[dict[str, Any]], prefix: tuple[str, ...], out: Leaves) -> None:
    names = tuple(level[0])
    if set(map(len, level)) != {len(names)}:
        raise KeyError("the trajectories do not hold the same keys")
    columns = zip(*map(itemgetter(*names), level), strict=True) if len(names) > 1 else _only(level, names)
    for name, leaves in zip(names, columns, strict=True):
        if type(leaves[0]) is TensorDict:
            _collect(list(map(plain_entries, leaves)), (*prefix, name), out)
        else:
            out[(*prefix, name) if prefix else name] = leaves


def _only(level: list[dict[str, Any]], names: tuple[str, ...]) -> list[list[Any]]:
    return [[entries[name] for entries in level] for name in names]


def _joined(leaves: Leaves, plan: Mapping[Key, Column], n: int, schema: Schema) -> dict[str, Any] | None:
    out: dict[str, Any] = {}
    sizes: list[int] = []
    tokens: RaggedArray | None = None
    for key, column_leaves in leaves.items():
        column, first = plan[key], column_leaves[0]
        if column.is_text:
            if not set(map(type, column_leaves)) <= {str, NonTensorData}:
                return None
            texts = Text(list(column_leaves)).plain()
            out[column.name] = texts if set(map(type, texts)) == {str} else list(map(str, texts))
        elif column.ragged:
            found = list(map(Tensor.numel, column_leaves))
            values = torch.cat(column_leaves)
            if first.ndim != 1 or values.ndim != 1 or 0 in found:
                return None
            if tokens is None or found != sizes:
                sizes, tokens = found, RaggedArray(values.numpy(), np.array(found))
                out[column.name] = tokens
            else:
                out[column.name] = tokens.beside(values.numpy())
        else:
            # As Python numbers scalars come faster than `torch.stack` makes a view of each.
            numbers = list(map(Tensor.item, column_leaves))
            if key == DONE and not all(numbers):
                return None  # steps of longer trajectories
            same = set(map(type, numbers)) == {_NUMBERS.get(column.np_dtype.kind)}
            out[column.name] = np.array(numbers, column.np_dtype if same else None)
    if CREATED_AT not in leaves and "created_at" in schema:
        out["created_at"] = np.full(n, time.time())
    return out
