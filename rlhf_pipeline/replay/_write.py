"""From the columns of a batch to one append."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch

from rlhf_pipeline.data.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    ATTENTION_MASK,
    CREATED_AT,
    KL_COEF,
    KL_PENALTY,
    LOSS_WEIGHT,
    NUM_PROMPT_TOKENS,
    RETURN,
    REWARD,
    ROW_ID,
    TASK_REWARD,
    TOKENS,
    Key,
)
from rlhf_pipeline.data.trajectories import (
    Flat,
    Text,
    Trajectories,
    as_ragged,
    last_position,
    segment_sum,
)
from rlhf_pipeline.errors import DataError, MissingKeyError, did_you_mean
from rlhf_pipeline.replay.schema import REWARD_COLUMN, column_name, column_of_key
from trajectory_store import Column, RaggedArray, Schema

_log = logging.getLogger("rlhf_pipeline")
_DERIVED: frozenset[Key] = frozenset(
    {REWARD, KL_PENALTY, ATTENTION_MASK, ROW_ID, LOSS_WEIGHT, "index", "_weight", ("next", "terminated")}
    | {("next", "truncated"), "done", "terminated", "truncated", ("masks", "all_attention_mask")}
    | {("tokens", "prompt"), ("tokens", "response"), ("log_probs", "prompt"), ("log_probs", "response")}
)
"""Keys that a batch may carry and that are not stored: they are derived on read or belong to TorchRL."""


def append_data(columns: Trajectories, schema: Schema) -> dict[str, Any]:
    """What `TrajectoryStore.append` takes.

    Args:
        columns: one row per trajectory.
        schema: the columns of the store.

    Raises:
        DataError: if a column has the wrong shape, or token ids are missing.
    """
    tokens = columns.get(TOKENS)
    if not isinstance(tokens, Flat) or tokens.lengths is None:
        raise MissingKeyError(
            f"the batch has no token ids under {TOKENS!r}. A trajectory is stored as its token ids; keys seen: "
            f"{list(columns)[:12]}"
        )
    if columns.n and int(tokens.lengths.min()) == 0:
        raise DataError(f"trajectory {int(tokens.lengths.argmin())} of {columns.n} has no tokens; leave it out.")
    _derive(columns, tokens, schema)
    out: dict[str, Any] = {}
    plan = column_of_key(schema)
    for key, value in columns.items():
        column = plan.get(key)
        if column is not None:
            out[column.name] = stored_array(column, key, value, columns.n)
        elif key not in _DERIVED:
            _report_unknown(key, value, schema)
    if CREATED_AT not in columns and "created_at" in schema:
        out["created_at"] = np.full(columns.n, time.time())
    return out


def _derive(columns: Trajectories, tokens: Flat, schema: Schema) -> None:
    """Fill in what follows from the rest."""
    mask, prompt = columns.get(ASSISTANT_MASK), columns.get(NUM_PROMPT_TOKENS)
    lengths = tokens.lengths
    assert lengths is not None  # append_data checked it
    if mask is None and isinstance(prompt, Flat):
        starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        position = torch.arange(int(lengths.sum())) - starts
        mask = Flat(position >= torch.repeat_interleave(prompt.values.reshape(-1), lengths), lengths)
        columns[ASSISTANT_MASK] = mask
    if prompt is None and isinstance(mask, Flat) and mask.lengths is not None:
        flat = torch.arange(mask.values.numel(), dtype=torch.float64)
        flat = torch.where(mask.values.to(torch.bool), flat, float(mask.values.numel()))
        first = torch.segment_reduce(flat, "min", lengths=mask.lengths).to(torch.int64)
        columns[NUM_PROMPT_TOKENS] = Flat((first - (lengths.cumsum(0) - lengths)).clamp_max(lengths))
    advantage = columns.get(ADVANTAGE)
    if isinstance(advantage, Flat) and "advantage" in schema and not schema["advantage"].ragged:
        values = advantage.values
        if advantage.lengths is not None:
            keep = torch.ones_like(values.reshape(-1), dtype=torch.bool)
            if isinstance(mask, Flat) and mask.lengths is not None and torch.equal(mask.lengths, advantage.lengths):
                keep = mask.values.to(torch.bool)
            columns[ADVANTAGE] = Flat(values.reshape(-1)[last_position(keep, advantage.lengths)])
        elif values.ndim > 1 and values.numel():
            columns[ADVANTAGE] = Flat(values.reshape(columns.n, -1)[:, 0])
    _derive_reward(columns, schema)


def _derive_reward(columns: Trajectories, schema: Schema) -> None:
    """Where only rewards per token came, keep what the store can: their sum, before the penalty."""
    reward = columns.get(REWARD)
    if not isinstance(reward, Flat) or TASK_REWARD in columns:
        return
    if reward.lengths is None or int(reward.lengths.max()) == 1:
        columns[TASK_REWARD] = Flat(reward.values.reshape(columns.n).float())
        return
    values = reward.values.detach().double().reshape(-1)
    kl, coef = columns.get(KL_PENALTY), columns.get(KL_COEF)
    if isinstance(kl, Flat) and isinstance(coef, Flat):
        values = values + torch.repeat_interleave(coef.values.double(), reward.lengths) * kl.values.double().reshape(-1)
    columns[TASK_REWARD] = Flat(segment_sum(values, reward.lengths).float())
    if REWARD_COLUMN not in schema:
        mask = columns.get(ASSISTANT_MASK)
        keep = mask.values.to(torch.bool) if isinstance(mask, Flat) else torch.ones_like(values, dtype=torch.bool)
        elsewhere = values.abs() > 1e-5
        elsewhere[last_position(keep, reward.lengths)] = False
        if bool(elsewhere.any()):
            raise DataError(
                "the batch has rewards on tokens other than the last, and the store has no column for them: create "
                "it with schema=trajectory_schema(token_rewards=True)"
            )
    if RETURN not in columns:
        total = segment_sum(reward.values, reward.lengths)
        columns[RETURN] = Flat(total.float())


def stored_array(column: Column, key: Key, value: Flat | Text, n: int) -> Any:
    """What `append` takes for one column.

    Raises:
        DataError: if the values do not fit the column.
    """
    if isinstance(value, Text):
        plain = value.plain()
        if not column.is_text:
            return np.asarray(plain)
        return [item if isinstance(item, str) else str(item) for item in plain]
    if column.is_text:
        raise DataError(f"{key!r} is a tensor, and the column '{column.name}' holds text")
    if column.ragged and value.values.ndim >= 2:  # rows of one length, in a batch where all have it
        value = as_ragged(value, n)
    values = value.values
    if values.requires_grad or values.is_cuda:
        values = values.detach().cpu()
    if values.ndim != 1:
        values = values.reshape(-1)
    array = (values.float() if values.dtype is torch.bfloat16 else values).numpy()
    if array.dtype.kind == "f" and array.dtype != column.np_dtype and column.np_dtype.kind == "f":
        array = array.astype(column.np_dtype)
    if not column.ragged:
        if len(array) != n:
            raise DataError(
                f"{key!r} has {len(array)} values for {n} trajectories; the column '{column.name}' holds one each"
            )
        return array
    if value.lengths is None:
        raise DataError(f"{key!r} must hold one value per token, got shape {tuple(value.values.shape)}")
    return RaggedArray(array, value.lengths.numpy())


_reported: set[Key] = set()


def _report_unknown(key: Key, value: Flat | Text, schema: Schema) -> None:
    """Say once per key that it has no column and is not stored."""
    if key not in _reported:
        _reported.add(key)
        hint = did_you_mean(str(key), schema.names)
        per_token = isinstance(value, Flat) and (value.lengths is not None or value.values.ndim > 1)
        kind = "str" if isinstance(value, Text) else str(value.values.dtype).removeprefix("torch.")
        column = f"[Column({column_name(key)!r}, {kind!r}, ragged=True)]" if per_token else f"{{{key!r}: {kind!r}}}"
        _log.warning(
            "not stored, as the schema has no column for it: %r.%s To keep it: TrajectoryStorage(path, extra=%s).",
            key,
            hint if hint.startswith(" Did") else "",
            column,
        )
