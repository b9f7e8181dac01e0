"""From rows of the store to one TensorDict with `torch.jagged` leaves: no padding is read, made or moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlhf_pipeline.data.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    KL_COEF,
    KL_PENALTY,
    LOG_PROBS,
    REF_LOG_PROBS,
    RETURN,
    REWARD,
    ROW_ID,
    TASK_REWARD,
    TOKENS,
    Key,
)
from rlhf_pipeline.data.trajectories import Flat, jagged, last_position, text_stack
from rlhf_pipeline.replay.batches import columns_for, nest
from rlhf_pipeline.replay.schema import key_of
from trajectory_store import TrajectoryStore


def jagged_batch(
    store: TrajectoryStore, ids: np.ndarray, *, keys: Sequence[Key] | None = None, text: bool = False
) -> TensorDict:
    """Read rows into one TensorDict `[B]` whose token columns are jagged `[B, j]`.

    Args:
        store: where to read.
        ids: int64 `[B]`, the row ids.
        keys: TensorDict keys or column names; None reads all numbers and derives reward and penalty.
        text: read the text columns too.

    Returns:
        The values that `rlhf_pipeline.replay.batches.padded_batch` has at the real tokens, and its scalars; there is no
        attention mask, as there is no padding. Leaves of equal lengths share their offsets.
    """
    names = columns_for(store.schema, None if keys is None else tuple(keys), text=text)
    flat: dict[Key, Any] = {ROW_ID: torch.from_numpy(np.array(ids, dtype=np.int64))}
    known: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    axes: dict[Key, str] = {}
    for name in names:
        column, key = store.schema[name], key_of(name)
        if column.is_text:
            flat[key] = text_stack(store.read(ids, [name])[name])
            continue
        if not column.ragged:
            flat[key] = _wide(store.read_scalars(name, ids))
            flat[key] = flat[key].float() if key == RETURN else flat[key]
            continue
        found = store.read_ragged(name, ids)
        axis = axes[key] = str(column.axis)
        if axis not in known:
            lengths = torch.from_numpy(np.array(found.lengths, dtype=np.int64))
            known[axis] = lengths, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        flat[key] = Flat(_wide(found.values), known[axis][0])
    if isinstance(flat.get(ASSISTANT_MASK), Flat) and len(ids):
        axis = axes.get(TOKENS, axes[ASSISTANT_MASK])
        for key in _derive(flat, known[axis][0], keys):
            axes[key] = axis
    if keys is not None:
        wanted = {*keys, ROW_ID} | {key_of(k) for k in keys if isinstance(k, str)}
        flat = {key: value for key, value in flat.items() if key in wanted}
    leaves = {k: jagged(v, known[axes[k]][1]) if isinstance(v, Flat) else v for k, v in flat.items()}
    return nest(leaves, len(ids))


def _wide(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64 if values.dtype == np.int32 else values.dtype))


def _derive(flat: dict[Key, Any], lengths: torch.Tensor, keys: Sequence[Key] | None) -> list[Key]:
    """Fill the gaps of the log-probs and add what is per token; returns the keys added."""
    mask: torch.Tensor = flat[ASSISTANT_MASK].values
    last = last_position(mask, lengths)
    log_probs, ref = _values(flat, LOG_PROBS), _values(flat, REF_LOG_PROBS)
    if ref is not None and bool(ref[last].isnan().all()):
        del flat[REF_LOG_PROBS]  # no row of the batch was ever scored by a reference
        ref = None
    for values in (log_probs, ref):
        if values is not None:
            values[values.isnan() & ~mask] = 0.0
    penalty, coef, added = None, flat.get(KL_COEF), []
    asked = keys is not None and KL_PENALTY in keys
    rewarded = keys is None or REWARD in keys
    counts = rewarded and (coef is None or bool(coef.any()))
    if log_probs is not None and ref is not None and (asked or counts):
        penalty = torch.where(mask, log_probs - ref, 0.0).nan_to_num(0.0, 0.0, 0.0)
        flat[KL_PENALTY] = Flat(penalty, lengths)
        added.append(KL_PENALTY)
    if REWARD in flat:
        flat[REWARD] = Flat(flat[REWARD].values.nan_to_num(0.0), flat[REWARD].lengths)
    elif TASK_REWARD in flat and rewarded:
        reward = torch.zeros_like(mask, dtype=torch.float32)
        if penalty is not None and coef is not None and counts:
            reward = -penalty * torch.repeat_interleave(coef, lengths)
        reward[last] += flat[TASK_REWARD].nan_to_num(0.0)
        flat[REWARD] = Flat(reward, lengths)
        added.append(REWARD)
    advantage = flat.get(ADVANTAGE)
    if isinstance(advantage, torch.Tensor):
        if bool(advantage.isnan().all()):
            del flat[ADVANTAGE]  # nothing computed one
        else:
            flat[ADVANTAGE] = Flat(torch.where(mask, torch.repeat_interleave(advantage, lengths), 0.0), lengths)
            added.append(ADVANTAGE)
    return added


def _values(flat: dict[Key, Any], key: Key) -> torch.Tensor | None:
    column = flat.get(key)
    return column.values if isinstance(column, Flat) else None
