"""Groups that are not complete yet, on disk beside the store: `kill -9` loses none and writes none twice.

`<store>/pending/<writer>/` belongs to the one process that holds the lock of its `lock` file. In it is a trajectory
store of the waiting trajectories. When a group is complete, its rows go to the main store in one commit and carry the
group's number in the column `pending_id`; then the flag `consumed` of its waiting rows is set in place. A process that
takes over drops every group whose number is in the main store, so it does not matter where the former one died.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_pipeline.data.trajectories import Flat, Text, Trajectories, ragged_tokens
from rlhf_pipeline.errors import DefinitionError, MissingKeyError
from rlhf_pipeline.keys import ADVANTAGE, DEGENERATE, PENDING_ID, RETURN, TOKENS, Key
from rlhf_pipeline.replay._pending_home import Home, in_use, take_homes
from rlhf_pipeline.replay._write import stored_array
from rlhf_pipeline.replay.schema import PENDING, REWARD_COLUMN, SLOT, key_of
from rlhf_pipeline.transforms._ledger import hashable
from rlhf_pipeline.transforms._queue import Failure, Saved
from trajectory_store import Column, RaggedArray, Schema, StoreError, TrajectoryStore

_log = logging.getLogger("rlhf_pipeline")
_ROW_BITS = 32
_LEFT_OUT = {"advantage", "return", "degenerate", "use_count", SLOT, PENDING.name, REWARD_COLUMN}
_UNSAVED: frozenset[Key] = frozenset({ADVANTAGE, RETURN, DEGENERATE, PENDING_ID, "use_count"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")

OWN = (
    PENDING,
    Column("pending_group", "str"),
    Column("pending_since", "float64"),
    Column("pending_after", "int64"),
    Column("pending_failed", "int32", fill=0),
    Column("pending_last", "bool", fill=True),
    Column("pending_reward", "float64", ragged=True, axis="pending_reward", fill=0.0),
    Column("pending_rewarded", "bool", fill=False),
    Column("consumed", "uint8", mutable=True, fill=0),
)
"""The columns of a pending stream beside those of the store; storage/FORMAT.md section 10 says what they mean."""


def pending_schema(main: Schema) -> Schema:
    """The columns of a pending stream: those of the store that are known before a group is complete, and its own."""
    kept = [c for c in main if c.name not in _LEFT_OUT]
    return Schema([*map(_fixed, kept), *OWN])


def _fixed(column: Column) -> Column:
    """The same column, with a fill instead of a value that may change."""
    return Column(column.name, column.dtype, fill=column.fill_value) if column.mutable else column


class PendingLog:
    """The waiting trajectories of one writer.

    Args:
        store: the main store, a local folder opened for appending, with the column `pending_id`.
        writer: the writer's name, whose groups are this process's after a restart. None has no name: such a process
            takes over what all dead processes without a name left behind.
        reward_key: where the reward is taken from and put back.

    Raises:
        DefinitionError: if the name cannot be a folder's.
    """

    def __init__(self, store: TrajectoryStore, writer: str | None = None, *, reward_key: Key) -> None:
        if writer is not None and not _NAME.match(writer):
            raise DefinitionError(
                f"writer is {writer!r}; a name begins with a letter or digit and holds those, '_', '.' and '-'."
            )
        self.store = store
        self.root = Path(store.path) / "pending"
        self.writer = writer
        self.reward_key = reward_key
        self._schema = pending_schema(store.schema)
        self._homes: list[Home] = []
        self._rows: dict[int, list[tuple[Home, np.ndarray]]] = {}
        self._floor = -1

    def __str__(self) -> str:
        return f"{self.root.absolute()}:{self.writer or ''}"

    # -- what MCAdvantage calls --------------------------------------------------------------------------------

    def recover(self) -> tuple[list[Saved], list[Failure]]:
        """What waits and belongs to no living process; from now on it is this process's.

        Raises:
            RunExistsError: a living process has this writer's name.
        """
        self._let_go()
        homes, busy = take_homes(self.root, self.writer)
        if busy and self.writer is not None:
            raise in_use(self.writer, self.root)
        self._homes = homes
        saved, failures = [], []
        for home in homes:
            home.open(self._schema)
            self._drop_written(home)
            ids = home.open_rows()
            if len(ids):
                self._remember(home, ids, home.scalars(PENDING.name, ids))
                failed = home.scalars("pending_failed", ids)
                failures += self._failures(home, ids[failed > 0])
                saved += self._load(home, ids[failed == 0])
        if saved or failures:
            _log.info(
                "%d trajectories of incomplete groups wait at %s", sum(len(s.groups) for s in saved), self.root
            )  # fmt: skip
        return saved, failures

    def add(self, saved: Saved) -> Any:
        """Keep trajectories; durable on return."""
        columns = ragged_tokens(saved.columns)
        tokens, reward = columns.get(TOKENS), saved.reward
        if not isinstance(tokens, Flat) or tokens.lengths is None:
            raise MissingKeyError(f"the batch has no token ids under {TOKENS!r}, so it can not be stored")
        n = columns.n
        data: dict[str, Any] = {}
        plan = {key_of(c.name): c for c in self.store.schema if c.name not in _LEFT_OUT}
        for key, value in columns.items():
            column = plan.get(key)
            if column is not None and key not in _UNSAVED:
                data[column.name] = stored_array(column, key, value, n)
        steps = np.diff(saved.bounds)
        last = np.zeros(n, dtype=bool)
        last[np.asarray(saved.bounds[1:]) - 1] = True
        flat = reward.values.detach().reshape(-1).double().numpy()
        lengths = np.full(n, len(flat) // max(n, 1)) if reward.lengths is None else reward.lengths.numpy()
        if reward.lengths is not None and reward.values.ndim > 1:
            lengths = lengths * (reward.values[0].numel() if len(reward.values) else 1)
        tickets = np.repeat(np.asarray(saved.tickets, dtype=np.int64), steps)
        names = [json.dumps(group) for group in saved.groups]
        return self._append(
            tickets,
            {
                **data,
                "pending_group": [name for name, k in zip(names, steps.tolist(), strict=True) for _ in range(k)],
                "pending_since": np.repeat(np.asarray(saved.since), steps),
                "pending_last": last,
                "pending_rewarded": np.full(n, self.reward_key in columns),
                "pending_reward": RaggedArray(flat, lengths.astype(np.int64)),
            },
        )

    def add_failure(self, failure: Failure) -> Any:
        """Keep a report of failures; durable on return."""
        blank = {c.name: _blank(c) for c in self._schema if not c.optional}
        return self._append(
            np.array([failure.ticket], dtype=np.int64),
            {
                **blank,
                "pending_group": [json.dumps(failure.group)],
                "pending_since": np.array([failure.since]),
                "pending_failed": np.array([failure.members], dtype=np.int32),
                "pending_reward": RaggedArray(np.zeros(0), np.zeros(1, np.int64)),
            },
        )

    def undo(self, token: Any) -> None:
        """Forget what an `add` kept."""
        home, ids, tickets = token
        home.consume(ids)
        for ticket in set(tickets.tolist()):
            kept = [(h, rows) for h, rows in self._rows.pop(ticket, []) if h is not home or rows[0] not in ids]
            if kept:
                self._rows[ticket] = kept

    def drop(self, tickets: Sequence[int]) -> None:
        """Forget groups: they are written, or will never be."""
        gone: dict[int, tuple[Home, list[np.ndarray]]] = {}
        for ticket in tickets:
            for home, ids in self._rows.pop(ticket, ()):
                gone.setdefault(id(home), (home, []))[1].append(ids)
        for home, parts in gone.values():
            home.consume(np.concatenate(parts))
            moved = home.tidy(self._schema)
            if moved:
                self._move(home, moved)

    def written(self, tickets: Sequence[int]) -> bool:
        """Whether one of the groups is in the main store."""
        try:
            self.store.refresh()
            after = min((int(home.after) for home in self._homes if home.after is not None), default=0)
            return bool(self._in_store(np.asarray(tickets, dtype=np.int64), after).any())
        except StoreError:
            return False

    def close(self) -> None:
        """Let go: any process may take over what waits. What is empty leaves the disk."""
        self._let_go()

    # -- the parts ---------------------------------------------------------------------------------------------

    def _append(self, tickets: np.ndarray, data: dict[str, Any]) -> Any:
        if not self._homes:
            self._homes = [Home.make(self.root, self.writer)]
        home, after = self._homes[0], self._after()
        store = home.writable(self._schema, self.store.durability)
        data |= {PENDING.name: tickets, "pending_after": np.full(len(tickets), after)}
        ids = store.append(data)
        home.count(ids, after)
        self._remember(home, ids, tickets)
        return home, ids, tickets

    def _after(self) -> int:
        """An id that every later row of this process in the main store reaches."""
        # A process appends to its own newest segment or to one above all there are, so ids never fall below either.
        own = int(self.store._stream.ordinal)
        if own >= 0:
            return own << _ROW_BITS
        if self._floor < 0:
            ids = self.store.ids()
            self._floor = ((int(ids.max()) >> _ROW_BITS) + 1) << _ROW_BITS if len(ids) else 0
        return self._floor

    def _remember(self, home: Home, ids: np.ndarray, tickets: np.ndarray) -> None:
        order = np.argsort(tickets, kind="stable")
        names, first = np.unique(tickets[order], return_index=True)
        for ticket, rows in zip(names.tolist(), np.split(ids[order], first[1:]), strict=True):
            self._rows.setdefault(ticket, []).append((home, rows))

    def _move(self, home: Home, moved: dict[int, int]) -> None:
        """The rows of a stream got new ids, as it was written anew without those that are gone."""
        for places in self._rows.values():
            for i, (where, ids) in enumerate(places):
                if where is home:
                    places[i] = (home, np.array([moved[row] for row in ids.tolist()], dtype=np.int64))

    def _drop_written(self, home: Home) -> None:
        """Set the flag of the groups that the former process had written when it died."""
        ids = home.open_rows()
        if not len(ids):
            return
        tickets = home.scalars(PENDING.name, ids)
        self.store.refresh()
        there = self._in_store(tickets, int(home.scalars("pending_after", ids).min()))
        if there.any():
            home.consume(ids[there])

    def _in_store(self, tickets: np.ndarray, after: int) -> np.ndarray:
        """Which groups are in the main store; only rows from the id `after` on are looked at."""
        ids = self.store.ids()
        found = self.store.read_scalars(PENDING.name, ids[ids >= after])
        return np.isin(tickets, found[found >= 0])

    def _failures(self, home: Home, ids: np.ndarray) -> list[Failure]:
        if not len(ids):
            return []
        rows = home.read(ids, ["pending_group", PENDING.name, "pending_since", "pending_failed"])
        names = [hashable(json.loads(name)) for name in rows["pending_group"]]
        values = (rows[name].tolist() for name in (PENDING.name, "pending_since", "pending_failed"))
        return [Failure(*row) for row in zip(names, *values, strict=True)]

    def _load(self, home: Home, ids: np.ndarray) -> list[Saved]:
        """The trajectories of some rows, one batch for each set of columns that they were given."""
        if not len(ids):
            return []
        schema = home.schema
        names = [c.name for c in schema if c.name not in {o.name for o in OWN}]
        every = np.ones(len(ids), dtype=bool)
        given = np.stack([home.present(name, ids) if schema[name].optional else every for name in names])
        given = np.concatenate([given, home.scalars("pending_rewarded", ids)[None]])
        _, which = np.unique(given, axis=1, return_inverse=True)
        which = which.reshape(-1)
        out = []
        for kind in dict.fromkeys(which.tolist()):
            rows = ids[which == kind]
            columns = Trajectories(len(rows))
            *there, rewarded = given[:, which == kind][:, 0].tolist()
            for name, present in zip(names, there, strict=True):
                if present:
                    columns[key_of(name)] = _column(home, schema[name], rows)
            out.append(self._saved(home, columns, rows, rewarded))
        return out

    def _saved(self, home: Home, columns: Trajectories, rows: np.ndarray, rewarded: bool) -> Saved:
        own = home.read(rows, ["pending_group", PENDING.name, "pending_since", "pending_last"])
        ends = np.flatnonzero(own["pending_last"])
        reward = home.ragged("pending_reward", rows)
        values, lengths = torch.from_numpy(reward.values), torch.from_numpy(reward.lengths.astype(np.int64))
        # One value per row is a reward per step, as where it is per token there are more than one.
        flat = Flat(values) if bool((lengths == 1).all()) else Flat(values, lengths)
        if rewarded:
            columns[self.reward_key] = flat
        return Saved(
            columns=columns,
            bounds=[0, *(ends + 1).tolist()],
            groups=[hashable(json.loads(own["pending_group"][i])) for i in ends],
            tickets=own[PENDING.name][ends].tolist(),
            since=own["pending_since"][ends].tolist(),
            reward=flat,
        )

    def _let_go(self) -> None:
        for home in self._homes:
            home.close()
        self._homes, self._rows = [], {}

    def __del__(self) -> None:
        close: Callable[[], None] | None = getattr(self, "_let_go", None)
        if close is not None and getattr(self, "_homes", None):
            close()


def _column(home: Home, column: Column, rows: np.ndarray) -> Flat | Text:
    if column.is_text:
        return Text(home.read(rows, [column.name])[column.name])
    if column.ragged:
        found = home.ragged(column.name, rows)
        return Flat(_tensor(found.values), torch.from_numpy(found.lengths.astype(np.int64)))
    return Flat(_tensor(home.scalars(column.name, rows)))


def _tensor(values: np.ndarray) -> torch.Tensor:
    wide = values.astype(np.int64) if values.dtype.kind in "iu" and values.dtype != np.uint8 else values
    return torch.from_numpy(np.ascontiguousarray(wide))


def _blank(column: Column) -> Any:
    """One row of nothing."""
    if column.is_text:
        return [""]
    if column.ragged:
        return RaggedArray(np.zeros(0, column.np_dtype), np.zeros(1, np.int64))
    return np.zeros(1, column.np_dtype)
