"""What a batch holds beside the columns on disk: reward, penalty and advantage per token.

Padded arrays are mostly padding, and fresh memory costs more than the arithmetic, so everything works in place or in
reused buffers, positions outside the response are reached through their indices, and constant runs are repeated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.data.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    KL_COEF,
    KL_PENALTY,
    LOG_PROBS,
    NUM_PROMPT_TOKENS,
    REF_LOG_PROBS,
    REWARD,
    TASK_REWARD,
    Key,
)
from trajectory_store import BufferPool

_FLOAT = np.dtype(np.float32)


def derive(
    flat: dict[Key, Any], lengths: npt.NDArray[np.int64], pool: BufferPool, *, rewarded: bool, penalised: bool
) -> None:
    """Fill the gaps of the log-probs and add what is per token, in place.

    Log-probs that do not exist become 0 outside the assistant mask; inside it they stay NaN, so that whoever divides
    by a count sees them. The reward is `task_reward` on the last assistant token minus `kl_coef * k1`, the
    advantage of the trajectory stands on every assistant token.

    Args:
        flat: padded columns `[B, T]` and scalars `[B]` by key; changed.
        lengths: tokens of each row.
        pool: where the memory of the new columns comes from.
        rewarded: derive the reward, and the penalty if a row's reward has one.
        penalised: derive the penalty in any case.
    """
    mask: npt.NDArray[np.bool_] = flat[ASSISTANT_MASK]
    starts = np.arange(0, mask.size, mask.shape[1]) if mask.size else np.zeros(len(lengths), np.int64)
    other, head = _outside(mask, lengths, starts, flat.get(NUM_PROMPT_TOKENS))
    last = starts + last_assistant(mask, lengths)
    log_probs, ref = flat.get(LOG_PROBS), flat.get(REF_LOG_PROBS)
    if ref is not None and bool(np.isnan(ref.reshape(-1)[last]).all()):
        del flat[REF_LOG_PROBS]  # no row of the batch was ever scored by a reference
        ref = None
    for values in (log_probs, ref):
        if values is not None:
            line = values.reshape(-1)
            there = line[other]
            line[other] = np.where(np.isnan(there), _FLOAT.type(0.0), there)
    penalty, coef = None, flat.get(KL_COEF)
    counts = rewarded and (coef is None or coef.any())
    if log_probs is not None and ref is not None and (penalised or counts):
        penalty = pool.take(log_probs.shape, _FLOAT)
        np.subtract(log_probs, ref, out=penalty)
        line = penalty.reshape(-1)
        line[other] = 0.0
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
        reward.reshape(-1)[last] += task if np.isfinite(task).all() else np.nan_to_num(task)
        flat[REWARD] = reward
    _spread_advantage(flat, mask, lengths, head)


def attention_mask(shape: tuple[int, int], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Bool `[B, T]`: True at the real tokens of a right padded batch.

    >>> attention_mask((2, 3), np.array([1, 3])).tolist()
    [[True, False, False], [True, True, True]]
    """
    runs = np.empty((shape[0], 2), np.int64)
    runs[:, 0] = lengths
    np.subtract(shape[1], lengths, out=runs[:, 1])
    values = np.zeros(2 * shape[0], np.bool_)
    values[::2] = True
    return np.repeat(values, runs.reshape(-1)).reshape(shape)  # a third of the time of a comparison


def _outside(
    mask: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], prompt: Any
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
    """Flat indices of the real tokens that are not the assistant's, and the prompt lengths if that is all of them."""
    if prompt is not None:
        head = np.minimum(prompt, lengths)
        ends = head.cumsum()
        total = int(ends[-1])
        index = np.repeat(starts - ends + head, head)
        index += np.arange(total)
        # As many as the responses have, none in a prompt and none in the padding: they are the responses.
        if np.count_nonzero(mask) == int(lengths.sum()) - total and not mask.reshape(-1)[index].any():
            return index, head
    return np.flatnonzero(attention_mask(mask.shape, lengths) & ~mask), None


def _spread_advantage(
    flat: dict[Key, Any], mask: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64], head: Any
) -> None:
    advantage = flat.get(ADVANTAGE)
    if advantage is None or advantage.ndim != 1:
        return
    if np.isnan(advantage).all():
        del flat[ADVANTAGE]  # nothing computed one
        return
    if head is None:
        flat[ADVANTAGE] = np.where(mask, advantage[:, None], _FLOAT.type(0.0))
        return
    runs = np.empty((len(lengths), 3), np.int64)  # of each row its prompt, its response, its padding
    runs[:, 0] = head
    np.subtract(lengths, head, out=runs[:, 1])
    np.subtract(mask.shape[1], lengths, out=runs[:, 2])
    values = np.zeros(3 * len(lengths), np.float32)
    values[1::3] = advantage
    flat[ADVANTAGE] = np.repeat(values, runs.reshape(-1)).reshape(mask.shape)


def last_assistant(mask: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Column of the last assistant token of each row of `[B, T]`; the last token where there is none.

    >>> mask = np.array([[False, True, False], [False, True, True], [False, False, False]])
    >>> last_assistant(mask, np.array([3, 3, 2])).tolist()
    [1, 2, 1]
    """
    last = np.maximum(lengths - 1, 0)
    if mask[np.arange(len(last)), last].all():
        return last
    back = mask[:, ::-1].argmax(1)  # the first maximum of the reversed row
    return np.where(mask.any(1), mask.shape[1] - 1 - back, last)
