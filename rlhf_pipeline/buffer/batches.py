"""Batches from rows of the store: the columns on disk, and derived reward, penalty and advantage per token.

Padded arrays are mostly padding, and allocating memory costs more than the arithmetic, so everything works in place or
in reused buffers, positions outside the response are addressed by index, and constant runs are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from rlhf_pipeline.buffer.checked_rows import check_rows
from rlhf_pipeline.buffer.trajectory_schema import INTERNAL
from rlhf_pipeline.data.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    ATTENTION_MASK,
    KL_COEF,
    KL_PENALTY,
    LOG_PROBS,
    NUM_PROMPT_TOKENS,
    POLICY_ROLE,
    REF_LOG_PROBS,
    RETURN,
    REWARD,
    REWARD_COLUMN,
    ROW_ID,
    TASK_REWARD,
    TOKENS,
    TURN_ADVANTAGES,
    TURN_SPANS,
    Key,
    column_name,
    key_of,
)
from rlhf_pipeline.data.tensordicts import plant, text_stack, unchecked_tree
from trajectory_store import BufferPool, Schema
from trajectory_store.reads import StoreReads

_INT64, _FLOAT = np.dtype(np.int64), np.dtype(np.float32)
_GAPS: tuple[Key, ...] = (ASSISTANT_MASK, NUM_PROMPT_TOKENS)
"""Keys that show where log-probs may be missing; with the prompt's length the mask need not be searched."""

_NEEDS: dict[Key, tuple[Key, ...]] = {
    REWARD: (LOG_PROBS, REF_LOG_PROBS, KL_COEF, TASK_REWARD, *_GAPS),
    KL_PENALTY: (LOG_PROBS, REF_LOG_PROBS, *_GAPS),
    ADVANTAGE: (ADVANTAGE, *_GAPS, TURN_SPANS, TURN_ADVANTAGES),
    ATTENTION_MASK: (TOKENS,),
    LOG_PROBS: (LOG_PROBS, *_GAPS),
    REF_LOG_PROBS: (REF_LOG_PROBS, *_GAPS),
}


@lru_cache(maxsize=64)
def columns_for(schema: Schema, keys: tuple[Key, ...] | None, *, text: bool) -> dict[str, tuple[Key, bool]]:
    """Return the columns to read for keys (or column names), each with its key and whether it was requested.

    None means all numeric columns, and text on request.
    """
    if keys is None:
        every = (column for column in schema if column.name not in INTERNAL and (text or not column.is_text))
        return {column.name: (key_of(column.name), True) for column in every}
    requested = {*keys, *(key_of(key) for key in keys if isinstance(key, str))}
    plan: dict[str, tuple[Key, bool]] = {}
    for key in keys:
        needs = (REWARD_COLUMN,) if key == REWARD and REWARD_COLUMN in schema else _NEEDS.get(key, (key,))
        for need in needs:
            name = column_name(need)
            if name in schema or need == key:
                name = schema[name].name
                plan[name] = key_of(name), key_of(name) in requested
    return plan


def padded_batch(store: StoreReads, ids: np.ndarray, **options: Any) -> TensorDict:
    """Read rows into one TensorDict `[B]`, right padded, text as stacks; `options` are those of `padded_columns`."""
    return nest(padded_columns(store, ids, **options), len(ids))


def padded_columns(
    store: StoreReads,
    ids: np.ndarray,
    *,
    keys: Sequence[Key] | None = None,
    text: bool = False,
    pad_to_multiple_of: int = 1,
    pool: BufferPool | None = None,
) -> dict[Key, Any]:
    """Read rows, right padded.

    Args:
        store: the store to read from.
        ids: int64 `[B]`, the row ids.
        keys: TensorDict keys or column names; None reads all numbers and derives reward, penalty and masks.
        text: also read the text columns.
        pad_to_multiple_of: round the padded length up.
        pool: provides the memory of derived columns; None allocates it.

    Returns:
        By key, token columns `[B, T]` and scalars `[B]` as tensors, text as lists, `row_id` int64 `[B]`. Log-probs are
        0 at padding, and where they are missing outside the assistant mask; inside it, missing log-probs stay NaN.

    Raises:
        CorruptionError: what is stored of these rows does not match its checksums.
    """
    pool = pool or BufferPool()
    plan = columns_for(store.schema, None if keys is None else tuple(keys), text=text)
    raw = store.read_padded(ids, list(plan), pad_to_multiple_of=pad_to_multiple_of)
    flat: dict[Key, Any] = {}
    spare: set[Key] = set()
    for name, (key, requested) in plan.items():
        flat[key] = raw[name]
        if not requested:
            spare.add(key)
    lengths = raw.get("lengths")
    if lengths is not None and TOKENS in flat:
        flat[ATTENTION_MASK] = attention_mask(flat[TOKENS].shape, lengths)
        if keys is not None and ATTENTION_MASK not in keys:
            spare.add(ATTENTION_MASK)
    if lengths is not None and ASSISTANT_MASK in flat and len(ids):
        places = padded_places(flat[ASSISTANT_MASK], lengths, flat.get(NUM_PROMPT_TOKENS))
        advantage = flat.get(ADVANTAGE)
        derive(flat, places, pool, keys, spread_advantage=advantage is not None and advantage.ndim == 1)
        if ADVANTAGE in flat and TURN_ADVANTAGES in flat and TURN_SPANS in flat:
            _spread_turn_advantages(flat, raw[f"{store.schema[column_name(TURN_ADVANTAGES)].axis}.lengths"])
        if keys is not None and KL_PENALTY not in keys:
            spare.add(KL_PENALTY)
    if RETURN in flat:  # float64 on disk, so that a waiting group can be completed later
        flat[RETURN] = flat[RETURN].astype(np.float32)
    flat[ROW_ID] = np.array(ids, dtype=np.int64)
    out: dict[Key, Any] = {}
    for key, value in flat.items():
        if key in spare:
            continue
        if isinstance(value, np.ndarray) and value.dtype == np.int32:
            wide = pool.take(value.shape, _INT64) if value.ndim > 1 else np.empty(value.shape, _INT64)
            np.copyto(wide, value)
            value = wide
        out[key] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return out


def scalar_batch(store: StoreReads, ids: np.ndarray, *, text: bool = False) -> TensorDict:
    """Read only the values that exist once per row, `[B]`: cheap for whole stores."""
    flat: dict[Key, Any] = {ROW_ID: np.array(ids, dtype=np.int64)}
    check_rows(store, ids)
    for column in store.schema:
        if column.ragged or column.name in INTERNAL or (column.is_text and not text):
            continue
        value = store.read_scalars(column.name, ids)
        if column.is_text:
            value = value.tolist()
        elif value.dtype == np.int32:
            value = value.astype(np.int64)
        flat[key_of(column.name)] = value
    if RETURN in flat:
        flat[RETURN] = flat[RETURN].astype(np.float32)
    return nest(flat, len(ids))


def single(store: StoreReads, row_id: int) -> TensorDict:
    """Read one trajectory with an empty batch size, not padded, with its text."""
    out: Any = padded_batch(store, np.array([row_id]))[0]
    names = [column.name for column in store.schema if column.is_text]
    for name, value in store.read([row_id], names).items():
        out.set_non_tensor(key_of(name), value[0])
    return out


def nest(flat: dict[Key, Any], n: int) -> TensorDict:
    """Build a TensorDict with nested keys; shapes are right by construction, so TensorDict need not check them."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        leaf = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        leaf = text_stack(leaf) if isinstance(leaf, list) else leaf
        plant(tree, key, leaf)
    return unchecked_tree(tree, torch.Size([n]))


@dataclass(frozen=True, slots=True)
class TokenPlaces:
    """The positions of a right padded batch's tokens, in `[B, T]`.

    Attributes:
        first: int64, the flat index of each row's first token, which has no penalty: no token precedes it.
        last: int64 `[B]`, the flat index of each row's last assistant token, or of its last token if there is none.
        unsampled: int64, the flat indices of the real tokens that are not the assistant's.
        at_assistant: turns one value per row, `[B]`, into an array with it at the assistant's tokens, and 0 elsewhere.
    """

    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    unsampled: npt.NDArray[np.int64]
    at_assistant: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


def derive(
    flat: dict[Key, Any], places: TokenPlaces, pool: BufferPool, keys: Sequence[Key] | None, *, spread_advantage: bool
) -> None:
    """Fill the gaps of the log-probs and add the derived per-token columns, in place.

    Missing log-probs become 0 outside the assistant mask; inside it they stay NaN, so that code that divides by a count
    can exclude them. The reward is `task_reward` on the last assistant token minus `kl_coef * k1`; the advantage of the
    trajectory is set on every assistant token.

    Args:
        flat: columns with one value per position, and scalars `[B]`, by key; changed in place.
        places: positions of the tokens.
        pool: provides the memory of the new columns.
        keys: the requested keys; None for all. The penalty is derived if requested, or if a row's reward includes one.
        spread_advantage: whether the advantage is one per trajectory.
    """
    mask: npt.NDArray[np.bool_] = flat[ASSISTANT_MASK]
    log_probs, ref = flat.get(LOG_PROBS), flat.get(REF_LOG_PROBS)
    if ref is not None and bool(np.isnan(ref.reshape(-1)[places.last]).all()) and not np.isfinite(ref[mask]).any():
        del flat[REF_LOG_PROBS]  # no row of the batch was scored by a reference
        ref = None
    for values in (log_probs, ref):
        if values is not None:
            line = values.reshape(-1)
            unsampled = line[places.unsampled]
            line[places.unsampled] = np.where(np.isnan(unsampled), _FLOAT.type(0.0), unsampled)
    penalty, coef = None, flat.get(KL_COEF)
    rewarded, penalised = keys is None or REWARD in keys, keys is not None and KL_PENALTY in keys
    counts = rewarded and (coef is None or coef.any())
    if log_probs is not None and ref is not None and (penalised or counts):
        penalty = pool.take(log_probs.shape, _FLOAT)
        np.subtract(log_probs, ref, out=penalty)
        line = penalty.reshape(-1)
        line[places.unsampled] = 0.0
        line[places.first] = 0.0
        if not np.isfinite(np.dot(line, line)):
            np.nan_to_num(penalty, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        flat[KL_PENALTY] = penalty
    if REWARD in flat:
        np.nan_to_num(flat[REWARD], copy=False)
    elif TASK_REWARD in flat and rewarded:
        reward = pool.take(mask.shape, _FLOAT)
        if penalty is None or coef is None or not coef.any():
            reward.fill(0.0)
        else:
            np.multiply(penalty, -coef[:, None], out=reward)
        task: npt.NDArray[np.float32] = flat[TASK_REWARD]
        reward.reshape(-1)[places.last] += task if np.isfinite(task).all() else np.nan_to_num(task)
        flat[REWARD] = reward
    if spread_advantage and np.isnan(flat[ADVANTAGE]).all():
        del flat[ADVANTAGE]  # no advantage was computed
    elif spread_advantage:
        flat[ADVANTAGE] = places.at_assistant(flat[ADVANTAGE])


def _spread_turn_advantages(flat: dict[Key, Any], num_turns: npt.NDArray[np.int64]) -> None:
    """Give the tokens of each turn the turn's advantage, in place, in rows that have one for each turn."""
    spans, mask = flat[TURN_SPANS], flat[ASSISTANT_MASK]
    row, number = np.nonzero(spans[:, :, 1] == POLICY_ROLE)
    turn = np.zeros(mask.shape, np.int64)
    turn[row, spans[row, number, 0]] = 1  # where a turn begins
    turn = np.maximum(turn.cumsum(1) - 1, 0)
    rows = (num_turns > 0) & (np.bincount(row, minlength=len(mask)) == num_turns)
    if rows.any():
        by_token = np.take_along_axis(flat[TURN_ADVANTAGES], turn, 1)
        flat[ADVANTAGE] = np.where(rows[:, None] & mask, by_token, flat[ADVANTAGE])


def padded_places(mask: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64], prompt: Any) -> TokenPlaces:
    """Return the positions of the tokens of a right padded batch.

    Args:
        mask: `[B, T]`, the assistant's tokens.
        lengths: `[B]`, tokens of each row.
        prompt: int `[B]`, tokens of each prompt, if known: the mask then need not be searched.
    """
    starts = np.arange(0, mask.size, mask.shape[1]) if mask.size else np.zeros(len(lengths), np.int64)
    unsampled = head = None
    if prompt is not None:
        heads = np.minimum(prompt, lengths)
        ends = heads.cumsum()
        total = int(ends[-1])
        index = np.repeat(starts - ends + heads, heads)
        index += np.arange(total)
        # The mask has as many tokens as the responses, and none in a prompt or padding: it is exactly the responses.
        if np.count_nonzero(mask) == int(lengths.sum()) - total and not mask.reshape(-1)[index].any():
            unsampled, head = index, heads
    if unsampled is None:
        unsampled = np.flatnonzero(attention_mask(mask.shape, lengths) & ~mask)

    def at_assistant(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if head is None:
            return np.where(mask, values[:, None], _FLOAT.type(0.0))
        runs = np.empty((len(lengths), 3), np.int64)  # per row: prompt, response, padding
        runs[:, 0] = head
        np.subtract(lengths, head, out=runs[:, 1])
        np.subtract(mask.shape[1], lengths, out=runs[:, 2])
        spread = np.zeros(3 * len(lengths), np.float32)
        spread[1::3] = values
        return np.repeat(spread, runs.reshape(-1)).reshape(mask.shape)

    last = np.maximum(lengths - 1, 0)
    if not mask[np.arange(len(last)), last].all():
        back = mask[:, ::-1].argmax(1)  # the first maximum of the reversed row
        last = np.where(mask.any(1), mask.shape[1] - 1 - back, last)
    return TokenPlaces(starts, starts + last, unsampled, at_assistant)


def attention_mask(shape: tuple[int, int], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return the attention mask of a right padded batch, bool `[B, T]`: True at real tokens.

    >>> attention_mask((2, 3), np.array([1, 3])).tolist()
    [[True, False, False], [True, True, True]]
    """
    runs = np.empty((shape[0], 2), np.int64)
    runs[:, 0] = lengths
    np.subtract(shape[1], lengths, out=runs[:, 1])
    values = np.zeros(2 * shape[0], np.bool_)
    values[::2] = True
    return np.repeat(values, runs.reshape(-1)).reshape(shape)  # a third of the time of a comparison
