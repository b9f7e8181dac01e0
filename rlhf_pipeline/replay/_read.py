"""From rows of the store to one padded TensorDict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlhf_pipeline.data.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    ATTENTION_MASK,
    KL_COEF,
    KL_PENALTY,
    LOG_PROBS,
    NUM_PROMPT_TOKENS,
    REF_LOG_PROBS,
    RETURN,
    REWARD,
    ROW_ID,
    TASK_REWARD,
    TOKENS,
    Key,
)
from rlhf_pipeline.data.trajectories import text_stack
from rlhf_pipeline.replay._derive import attention_mask, derive
from rlhf_pipeline.replay.schema import INTERNAL, REWARD_COLUMN, column_name, key_of
from trajectory_store import BufferPool, TrajectoryStore

_INT64 = np.dtype(np.int64)
_GAPS: tuple[Key, ...] = (ASSISTANT_MASK, NUM_PROMPT_TOKENS)
"""What tells where log-probs may be missing; with the prompt's length the mask need not be searched."""

_NEEDS: dict[Key, tuple[Key, ...]] = {
    REWARD: (LOG_PROBS, REF_LOG_PROBS, KL_COEF, TASK_REWARD, *_GAPS),
    KL_PENALTY: (LOG_PROBS, REF_LOG_PROBS, *_GAPS),
    ADVANTAGE: (ADVANTAGE, *_GAPS),
    ATTENTION_MASK: (TOKENS,),
    LOG_PROBS: (LOG_PROBS, *_GAPS),
    REF_LOG_PROBS: (REF_LOG_PROBS, *_GAPS),
}


def columns_for(store: TrajectoryStore, keys: Sequence[Key] | None, *, text: bool) -> list[str]:
    """The columns to read for some keys (or column names); None means all that are numbers, and text if asked."""
    schema = store.schema
    if keys is None:
        return [c.name for c in schema if c.name not in INTERNAL and (text or not c.is_text)]
    names: list[str] = []
    for key in keys:
        if key == REWARD and REWARD_COLUMN in schema:
            names.append(REWARD_COLUMN)
            continue
        for need in _NEEDS.get(key, (key,)):
            name = column_name(need)
            if name in schema or need == key:
                names.append(schema[name].name)
    return list(dict.fromkeys(names))


def padded_batch(
    store: TrajectoryStore,
    ids: np.ndarray,
    *,
    keys: Sequence[Key] | None = None,
    text: bool = False,
    pad_to_multiple_of: int = 1,
    pool: BufferPool | None = None,
) -> TensorDict:
    """Read rows into one TensorDict `[B]`, right padded.

    Args:
        store: where to read.
        ids: int64 `[B]`, the row ids.
        keys: TensorDict keys or column names; None reads all numbers and derives reward, penalty and masks.
        text: read the text columns too.
        pad_to_multiple_of: round the padded length up.
        pool: where derived columns get their memory; None takes fresh memory.

    Returns:
        Token columns `[B, T]`, scalars `[B]`, `row_id` int64 `[B]`. Log-probs are 0 at padding and where no score
        exists outside the assistant mask; one that is missing inside it stays NaN.
    """
    pool = pool or BufferPool()
    names = columns_for(store, keys, text=text)
    raw = store.read_padded(ids, names, pad_to_multiple_of=pad_to_multiple_of)
    flat: dict[Key, Any] = {key_of(name): raw[name] for name in names}
    lengths = raw.get("lengths")
    if lengths is not None and TOKENS in flat:
        flat[ATTENTION_MASK] = attention_mask(flat[TOKENS].shape, lengths)
    if lengths is not None and ASSISTANT_MASK in flat and len(ids):
        penalised = keys is not None and KL_PENALTY in keys
        derive(flat, lengths, pool, rewarded=keys is None or REWARD in keys, penalised=penalised)
    for key, value in flat.items():
        if isinstance(value, np.ndarray) and value.dtype == np.int32:
            flat[key] = wide = pool.take(value.shape, _INT64) if value.ndim > 1 else np.empty(value.shape, _INT64)
            np.copyto(wide, value)
    _narrow_return(flat)
    flat[ROW_ID] = np.array(ids, dtype=np.int64)
    if keys is not None:
        wanted = {*keys, ROW_ID} | {key_of(k) for k in keys if isinstance(k, str)}
        flat = {key: value for key, value in flat.items() if key in wanted}
    return nest(flat, len(ids))


def scalar_batch(store: TrajectoryStore, ids: np.ndarray, *, text: bool = False) -> TensorDict:
    """Only what is one value per row, `[B]`: cheap for whole stores."""
    flat: dict[Key, Any] = {ROW_ID: np.array(ids, dtype=np.int64)}
    for column in store.schema:
        if column.ragged or column.name in INTERNAL or (column.is_text and not text):
            continue
        value = store.read_scalars(column.name, ids)
        if column.is_text:
            value = value.tolist()
        elif value.dtype == np.int32:
            value = value.astype(np.int64)
        flat[key_of(column.name)] = value
    _narrow_return(flat)
    return nest(flat, len(ids))


def _narrow_return(flat: dict[Key, Any]) -> None:
    """Batches hold the return as float32; on disk it is exact, so that a group that waits can be completed later."""
    if isinstance(flat.get(RETURN), np.ndarray):
        flat[RETURN] = flat[RETURN].astype(np.float32)


def single(store: TrajectoryStore, row_id: int) -> TensorDict:
    """One trajectory with an empty batch size, not padded, with its text."""
    out: Any = padded_batch(store, np.array([row_id]))[0]
    names = [column.name for column in store.schema if column.is_text]
    for name, value in store.read([row_id], names).items():
        out.set_non_tensor(key_of(name), value[0])
    return out


def nest(flat: dict[Key, Any], n: int) -> TensorDict:
    """Nest the keys; the shapes are right by construction, so TensorDict need not check them again."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        leaf = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        leaf = text_stack(leaf) if isinstance(leaf, list) else leaf
        if isinstance(key, str):
            tree[key] = leaf
            continue
        node = tree
        for name in key[:-1]:
            node = node.setdefault(name, {})
        node[key[-1]] = leaf
    return _wrap(tree, torch.Size([n]))


def _wrap(tree: dict[str, Any], batch_size: torch.Size) -> TensorDict:
    items = {k: _wrap(v, batch_size) if isinstance(v, dict) else v for k, v in tree.items()}
    return TensorDict._new_unsafe(items, batch_size=batch_size)
