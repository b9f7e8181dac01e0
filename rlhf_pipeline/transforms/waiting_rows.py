"""Groups that wait in a trajectory store: rows whose advantage is NaN, and the later values that complete them."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf_pipeline.data.keys import (
    COLUMN_OF_KEY,
    FAILED_MEMBERS,
    KEY_OF_COLUMN,
    KL_COEF,
    LOG_PROBS,
    TASK_REWARD,
    WAITING,
    Key,
)
from rlhf_pipeline.data.trajectories import Flat, Text, Trajectories, segment_sum
from rlhf_pipeline.functional.advantage import penalty_rounding
from rlhf_pipeline.transforms.groups import Arrived, Ints, Scores
from trajectory_store import TrajectoryStore

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Later(NamedTuple):
    """Later values of rows that a store holds.

    Attributes:
        rows: int64 `[n]`.
        columns: by column name.
        complete: whether the rows may be learned from now.
    """

    rows: Ints
    columns: dict[str, Any]
    complete: bool


class Found(NamedTuple):
    """The rows that wait.

    Attributes:
        arrived: their groups (as numbers) and scores.
        since: when each came, seconds.
        failed: members of their groups that are reported failed, noted on one row of each.
    """

    arrived: Arrived
    since: list[float]
    failed: list[int]


class WaitingRows:
    """The rows of a store that wait for their group. All processes that write to the store share them.

    Args:
        store: open for appending, with the column `waiting`.
        look: brings the store up to date and returns the ids of the rows that wait, int64, in order.

    Attributes:
        eps: of the dtype that log-probs were computed in.
    """

    def __init__(self, store: TrajectoryStore, look: Callable[[], Ints]) -> None:
        self.store = store
        self.look = look
        self.eps = torch.finfo(torch.float32).eps

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from completing groups; only where the store is a local folder."""
        folder = Path(self.store.path)
        if not folder.is_dir():
            yield
            return
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:  # there one process has to write
                    raise
            yield
        finally:
            os.close(descriptor)

    def find(self, rows: Ints) -> Found:
        """What is known of some rows that wait."""
        store, names = self.store, COLUMN_OF_KEY
        mask = store.read_ragged("assistant_mask", rows)
        lengths = torch.from_numpy(np.asarray(mask.lengths, np.int64))
        arrived = Arrived(
            batch=None,
            bounds=list(range(len(rows) + 1)),
            groups=store.read_scalars(names[WAITING], rows).tolist(),
            reward=None,
            scores=self._scores(rows, segment_sum(torch.from_numpy(np.asarray(mask.values, bool)), lengths)),
            rows=rows,
        )
        failed = (
            store.read_scalars(names[FAILED_MEMBERS], rows).tolist() if names[FAILED_MEMBERS] in store.schema else []
        )
        return Found(arrived, store.read_scalars("created_at", rows).tolist(), failed or [0] * len(rows))

    def _scores(self, rows: Ints, tokens: torch.Tensor) -> Scores:
        store, names = self.store, COLUMN_OF_KEY
        returns, task, coef = (
            torch.from_numpy(store.read_scalars(name, rows).astype(np.float64))
            for name in ("return", names[TASK_REWARD], names[KL_COEF])
        )
        rounding = torch.zeros_like(returns)
        if bool((coef > 0).any()):
            found = store.read_ragged(names[LOG_PROBS], rows)
            values, sizes = np.asarray(found.values), np.asarray(found.lengths, np.int64)
            rounding = penalty_rounding(
                coef, task, torch.from_numpy(values), torch.from_numpy(sizes), lengths=tokens, eps=self.eps
            )
        return Scores(returns, tokens.to(torch.int64), task, rounding)

    def column_of(self, key: Key) -> str | None:
        """The column that holds a key, or None."""
        name = COLUMN_OF_KEY.get(key, key if isinstance(key, str) else "/".join(key))
        return name if name in self.store.schema else None

    def mask(self, rows: Ints) -> Flat:
        """The assistant's tokens of some rows."""
        found = self.store.read_ragged("assistant_mask", rows)
        values, lengths = np.asarray(found.values, bool), np.asarray(found.lengths, np.int64)
        return Flat(torch.from_numpy(values), torch.from_numpy(lengths))

    def rewards(self, rows: Ints) -> Flat:
        """The reward of some rows, per token where the store keeps it so."""
        if "reward" in self.store.schema:
            found = self.store.read_ragged("reward", rows)
            lengths = torch.from_numpy(np.asarray(found.lengths, np.int64))
            return Flat(torch.from_numpy(np.asarray(found.values, np.float32)), lengths)
        return Flat(torch.from_numpy(self.store.read_scalars(COLUMN_OF_KEY[TASK_REWARD], rows)))

    def trajectory(self, row: int) -> Trajectories:
        """One row with all its columns."""
        out, rows = Trajectories(1), np.array([row])
        for column in self.store.schema:
            key = KEY_OF_COLUMN.get(column.name, column.name)
            if column.ragged:
                found = self.store.read_ragged(column.name, rows)
                out[key] = Flat(
                    torch.from_numpy(np.array(found.values)), torch.from_numpy(np.array(found.lengths, np.int64))
                )
            elif column.is_text:
                out[key] = Text(self.store.read(rows, [column.name])[column.name])
            else:
                out[key] = Flat(torch.from_numpy(np.array(self.store.read_scalars(column.name, rows))))
        return out

    def values(self, keys: Sequence[Key], rows: Ints) -> Trajectories:
        """One value of each row, by key."""
        out = Trajectories(len(rows))
        for key in keys:
            name = self.column_of(key)
            if name is not None and self.store.schema[name].is_text:
                out[key] = Text(self.store.read(rows, [name])[name])
            elif name is not None and not self.store.schema[name].ragged:
                out[key] = Flat(torch.from_numpy(self.store.read_scalars(name, rows)))
        return out
