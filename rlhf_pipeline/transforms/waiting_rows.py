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
    ASSISTANT_MASK,
    COLUMN_OF_KEY,
    CREATED_AT,
    KEY_OF_COLUMN,
    LEFT_OUT,
    RETURN,
    REWARD,
    TASK_REWARD,
    WAITING,
    Key,
)
from rlhf_pipeline.data.trajectories import Flat, Text, Trajectories, segment_sum
from rlhf_pipeline.transforms.groups import Arrived, Ints, with_penalty
from trajectory_store import TrajectoryStore

_SCORED = ("task_reward", "kl_coef", "log_probs")
"""Columns that tell how far a return may be from its exact value."""

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

    @classmethod
    def left_out(cls, rows: Ints) -> Later:
        """Rows that waited and are not learned from."""
        return cls(rows, {"waiting": np.full(len(rows), LEFT_OUT)}, complete=False)


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
        read: Any = self.columns(["assistant_mask", *_SCORED, "return", "waiting", "created_at"], rows)
        mask, returns = read[ASSISTANT_MASK], read[RETURN].values.double()
        tokens = segment_sum(mask.values, mask.lengths).to(torch.int64)
        arrived = Arrived(
            batch=None,
            bounds=list(range(len(rows) + 1)),
            groups=read[WAITING].values.tolist(),
            reward_key=TASK_REWARD,
            scores=with_penalty(read, returns, tokens, self.eps),
            rows=rows,
        )
        failed = [0] * len(rows)
        if "failed_members" in self.store.schema:
            failed = self.store.read_scalars("failed_members", rows).tolist()
        return Found(arrived, read[CREATED_AT].values.tolist(), failed)

    def column_of(self, key: Key) -> str | None:
        """The column that holds a key, or None."""
        name = COLUMN_OF_KEY.get(key, key if isinstance(key, str) else "/".join(key))
        return name if name in self.store.schema else None

    def columns(self, names: Sequence[str], rows: Ints) -> Trajectories:
        """Those of some columns that the store has, of some rows, by key."""
        out = Trajectories(len(rows))
        for name in (name for name in names if name in self.store.schema):
            key, column = (REWARD if name == "reward" else KEY_OF_COLUMN.get(name, name)), self.store.schema[name]
            if column.ragged:
                found = self.store.read_ragged(name, rows)
                lengths = np.array(found.lengths, np.int64)
                out[key] = Flat(torch.from_numpy(np.array(found.values)), torch.from_numpy(lengths))
            elif column.is_text:
                out[key] = Text(self.store.read(rows, [name])[name])
            else:
                out[key] = Flat(torch.from_numpy(np.array(self.store.read_scalars(name, rows))))
        return out
