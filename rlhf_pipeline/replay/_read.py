"""From rows of the store to one padded TensorDict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from rlhf_pipeline.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    ATTENTION_MASK,
    COLUMN_OF_KEY,
    KL_COEF,
    KL_PENALTY,
    LOG_PROBS,
    REF_LOG_PROBS,
    REWARD,
    ROW_ID,
    TASK_REWARD,
    TOKENS,
    Key,
)
from rlhf_pipeline.replay._write import key_of
from rlhf_pipeline.replay.schema import REWARD_COLUMN, SLOT
from rlhf_pipeline.transforms._columns import text_stack
from trajectory_store import TrajectoryStore

_NEEDS: dict[Key, tuple[Key, ...]] = {
    REWARD: (ASSISTANT_MASK, LOG_PROBS, REF_LOG_PROBS, KL_COEF, TASK_REWARD),
    KL_PENALTY: (ASSISTANT_MASK, LOG_PROBS, REF_LOG_PROBS),
    ADVANTAGE: (ADVANTAGE, ASSISTANT_MASK),
    ATTENTION_MASK: (TOKENS,),
    LOG_PROBS: (LOG_PROBS, ASSISTANT_MASK),
    REF_LOG_PROBS: (REF_LOG_PROBS, ASSISTANT_MASK),
}


def columns_for(store: TrajectoryStore, keys: Sequence[Key] | None, *, text: bool) -> list[str]:
    """The columns to read for some keys (or column names); None means all that are numbers, and text if asked."""
    schema = store.schema
    if keys is None:
        return [c.name for c in schema if c.name != SLOT and (text or not c.is_text)]
    names: list[str] = []
    for key in keys:
        if key == REWARD and REWARD_COLUMN in schema:
            names.append(REWARD_COLUMN)
            continue
        for need in _NEEDS.get(key, (key,)):
            name = COLUMN_OF_KEY.get(need, need if isinstance(need, str) else "/".join(need))
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
) -> TensorDict:
    """Read rows into one TensorDict `[B]`, right padded.

    Args:
        store: where to read.
        ids: int64 `[B]`, the row ids.
        keys: TensorDict keys or column names; None reads all numbers and derives reward, penalty and masks.
        text: read the text columns too.
        pad_to_multiple_of: round the padded length up.

    Returns:
        Token columns `[B, T]`, scalars `[B]`, `row_id` int64 `[B]`. Log-probs are 0 at padding and where no score
        exists outside the assistant mask; one that is missing inside it stays NaN.
    """
    names = columns_for(store, keys, text=text)
    raw = store.read_padded(ids, names, pad_to_multiple_of=pad_to_multiple_of)
    flat: dict[Key, Any] = {ROW_ID: torch.from_numpy(np.array(ids, dtype=np.int64))}
    for name in names:
        value = raw[name]
        flat[key_of(name)] = text_stack(value) if isinstance(value, list) else torch.from_numpy(value)
    lengths = raw.get("lengths")
    if TOKENS in flat:
        flat[TOKENS] = flat[TOKENS].to(torch.int64)
    if ASSISTANT_MASK in flat and lengths is not None:
        _derive(flat, torch.from_numpy(lengths), keys is None)
    elif TOKENS in flat and lengths is not None:
        flat[ATTENTION_MASK] = torch.arange(flat[TOKENS].shape[1]) < torch.from_numpy(lengths)[:, None]
    for key, value in flat.items():
        if isinstance(value, Tensor) and value.ndim == 1 and value.dtype is torch.int32:
            flat[key] = value.to(torch.int64)
    if keys is not None:
        wanted = {*keys, ROW_ID} | {key_of(k) for k in keys if isinstance(k, str)}
        flat = {key: value for key, value in flat.items() if key in wanted}
    return TensorDict(_tree(flat), batch_size=[len(ids)])


def _derive(flat: dict[Key, Any], lengths: Tensor, everything: bool) -> None:
    mask: Tensor = flat[ASSISTANT_MASK]
    rows = torch.arange(mask.shape[0])
    flat[ATTENTION_MASK] = torch.arange(mask.shape[1]) < lengths[:, None]
    last = last_assistant(mask, lengths)
    outside = ~mask
    log_probs, ref = flat.get(LOG_PROBS), flat.get(REF_LOG_PROBS)
    if log_probs is not None:
        log_probs.masked_fill_(log_probs.isnan() & outside, 0.0)
    if ref is not None and bool(ref[rows, last].isnan().all()):
        del flat[REF_LOG_PROBS]  # no row of the batch was ever scored by a reference
        ref = None
    if ref is not None:
        ref.masked_fill_(ref.isnan() & outside, 0.0)
    k1 = None
    if log_probs is not None and ref is not None:
        k1 = (log_probs - ref).masked_fill_(outside, 0.0).nan_to_num_(0.0, 0.0, 0.0)
        flat[KL_PENALTY] = k1
    if REWARD in flat:
        flat[REWARD] = flat[REWARD].nan_to_num_(0.0)
    elif TASK_REWARD in flat and (everything or KL_COEF in flat):
        coef = flat.get(KL_COEF)
        reward = torch.zeros(mask.shape) if k1 is None or coef is None else k1 * -coef[:, None]
        reward[rows, last] += flat[TASK_REWARD].nan_to_num(0.0)
        flat[REWARD] = reward
    advantage = flat.get(ADVANTAGE)
    if advantage is not None and advantage.ndim == 1:
        if bool(advantage.isnan().all()):
            del flat[ADVANTAGE]  # nothing computed one
        else:
            flat[ADVANTAGE] = torch.where(mask, advantage[:, None], 0.0)


def last_assistant(mask: Tensor, lengths: Tensor) -> Tensor:
    """Column of the last assistant token of each row of `[B, T]`; the last token where there is none, int64 `[B]`.

    >>> mask = torch.tensor([[False, True, False], [False, True, True], [False, False, False]])
    >>> last_assistant(mask, torch.tensor([3, 3, 2])).tolist()
    [1, 2, 1]
    """
    last = (lengths - 1).clamp_min(0)
    if bool(mask[torch.arange(mask.shape[0]), last].all()):
        return last
    # The first maximum of the reversed row is the last True.
    back = mask.flip(1).to(torch.uint8).argmax(1)
    return torch.where(mask.any(1), mask.shape[1] - 1 - back, last)


def scalar_batch(store: TrajectoryStore, ids: np.ndarray, *, text: bool = False) -> TensorDict:
    """Only what is one value per row, `[B]`: cheap for whole stores."""
    names = [c.name for c in store.schema if not c.ragged and c.name != SLOT and (text or not c.is_text)]
    flat: dict[Key, Any] = {ROW_ID: torch.from_numpy(np.array(ids, dtype=np.int64))}
    for name in names:
        value = store.read_scalars(name, ids)
        key = key_of(name)
        if value.dtype == object:
            flat[key] = text_stack(value.tolist())
        else:
            flat[key] = torch.from_numpy(value).to(torch.int64) if value.dtype == np.int32 else torch.from_numpy(value)
    return TensorDict(_tree(flat), batch_size=[len(ids)])


def single(store: TrajectoryStore, row_id: int) -> TensorDict:
    """One trajectory with an empty batch size, not padded, with its text."""
    batch = padded_batch(store, np.array([row_id]), text=False)
    out: Any = batch[0]
    for column in store.schema:
        if column.is_text:
            out.set_non_tensor(key_of(column.name), store.read([row_id], [column.name])[column.name][0])
    return out


def _tree(flat: dict[Key, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        if isinstance(key, str):
            tree[key] = value
            continue
        node = tree
        for name in key[:-1]:
            node = node.setdefault(name, {})
        node[key[-1]] = value
    return tree
