"""The newest trajectories and steps as lines, and later ones as other processes store them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from rlhf_pipeline.buffer.filters import select
from rlhf_pipeline.buffer.stored_groups import NewIds
from rlhf_pipeline.errors import MissingPathError, plain
from rlhf_pipeline.report.formatting import number
from rlhf_pipeline.report.query import Answer, View
from rlhf_pipeline.report.stored import Ids
from rlhf_pipeline.run.rows import NewRows, Row
from trajectory_store import MissingRowError

ReadT = TypeVar("ReadT")

_BATCH_ROWS = 512
_MOST_SCANNED = 1 << 16
_TRIES = 8
_MOST_TOKENS = 32
_HEADINGS = ("id", "version", "group", "reward", "tokens", "finish")
_LEAST_WIDTHS = (6, 7, 6, 7, 6, 6)
_FIGURES = (
    ("task_reward", "reward", 3),
    ("loss", "loss", 4),
    ("kl_k1", "kl", 4),
    ("clip_fraction", "clip", 3),
    ("entropy", "entropy", 2),
    ("ess", "ess", 2),
    ("grad_norm", "grad", 3),
    ("staleness", "age", 1),
    ("tokens_per_s", "tok/s", 0),
)


class Tail:
    """Follows a store. It only reads, so other processes may append, evict and compact meanwhile."""

    def __init__(self, view: View, filters: Sequence[str] = (), width: int = 110) -> None:
        self._view = view
        self._store = view.stored.store
        self._filters = filters
        self._width, self._widths = width, list(_LEAST_WIDTHS)
        self._root = self._identity()
        self._new = NewIds(self._store, skip_stored=True)
        self._steps = NewRows(view.metrics_rows()) if view.run is not None else None

    def newest(self, num: int) -> Iterator[str]:
        """Yield the heading, the newest trajectories, oldest first, and the newest step."""
        lines = list(self._lines(self._newest_ids(num)))  # first: they set the widths
        yield from (self._line(_HEADINGS, "completion"), *lines)
        yield from map(step_line, self._steps.rows[-1:] if self._steps is not None else ())

    def fresh(self) -> Iterator[str]:
        """Yield rows and steps committed since the last call, in order: a step follows the rows stored before it."""
        # Steps are read first, so that the trajectories they refer to are found afterwards.
        steps = self._steps.read() if self._steps is not None else ()
        self._view.refresh()
        new = self._new.take()
        before = self._store.watermark - len(new)
        for step in steps:
            num = min(max(step.get("watermark", self._store.watermark) - before, 0), len(new))
            yield from (*self._lines(new[:num]), step_line(step))
            new, before = new[num:], before + num
        yield from self._lines(new)
        if self._identity() != self._root:
            raise MissingPathError(f"the store {self._view.stored.path} was removed, or replaced by another store.")

    def _newest_ids(self, num: int) -> Ids:
        """Return the newest trajectories that meet the conditions; the store is read from its end."""
        arrivals, newest = self._store.arrivals(), np.zeros(0, np.int64)
        end, size = len(arrivals), num if not self._filters else max(num, _BATCH_ROWS)
        while end and len(newest) < num:
            first = max(end - size, 0)
            newest = np.concatenate([self._read_present(arrivals[first:end], self._select), newest])
            end, size = first, min(2 * size, _MOST_SCANNED)
        return newest[max(len(newest) - num, 0) :]

    def _select(self, ids: Ids) -> Ids:
        return select(self._store, self._filters, ids)

    def _read_present(self, ids: Ids, read: Callable[[Ids], ReadT]) -> ReadT:
        """Read rows; those that are evicted meanwhile are excluded."""
        for _ in range(_TRIES):
            try:
                return read(ids)
            except MissingRowError:
                self._view.refresh()
                ids = ids[self._store.holds(ids)]
        return read(ids[:0])

    def _lines(self, ids: Ids) -> Iterator[str]:
        """Yield one line for each of the trajectories that meet the conditions."""
        for first in range(0, len(ids), _BATCH_ROWS):
            some = ids[first : first + _BATCH_ROWS]
            yield from self._table(self._read_present(some, lambda ids: self._view.rows(self._select(ids))))

    def _table(self, rows: Sequence[Answer]) -> list[str]:
        cells = [
            (
                row["id"],
                *("-" if row[name] is None else str(row[name]) for name in ("version", "group")),
                number(row["reward"]),
                str(row["tokens"]),
                plain(row["finish"]) or "-",
            )
            for row in rows
        ]
        self._widths = [
            max(map(len, texts)) for texts in zip((" " * room for room in self._widths), *cells, strict=True)
        ]
        return [self._line(fields, self._text(row)) for fields, row in zip(cells, rows, strict=True)]

    def _text(self, row: Answer) -> str:
        """Return a completion; its first tokens if no text is stored."""
        if row["completion"] or row["prompt"] or not row["tokens"]:
            return row["completion"]
        item = self._view.trajectory(int(row["id"]))
        return "".join(item["pieces"][item["prompt_tokens"] :][:_MOST_TOKENS])

    def _line(self, fields: Sequence[str], completion: str) -> str:
        head = "  ".join(f"{text:>{space}}" for text, space in zip(fields, self._widths, strict=True))
        room = max(self._width - len(head) - 2, 12)
        start = plain(completion[: room + 1]).replace("\n", "\\n")  # the rest may be long and is not shown
        return f"{head}  {start if len(start) <= room else start[: room - 3] + '...'}"

    def _identity(self) -> bytes | None:
        """Return the root file, which never changes and identifies the store; None if it is missing, or at a URL."""
        path = self._view.stored.path
        root = path / "zarr.json" if isinstance(path, Path) else None
        return root.read_bytes() if root is not None and root.is_file() else None


def step_line(row: Row) -> str:
    """Return one row of `metrics.jsonl` as a line.

    >>> step_line({"step": 3, "task_reward": 0.25, "loss": -0.01, "kl_k1": None, "tokens_per_s": 21450.0})
    'step 3: reward 0.250, loss -0.0100, tok/s 21.4k'
    """
    parts = [f"{name} {number(row[key], digits)}" for key, name, digits in _FIGURES if row.get(key) is not None]
    return f"step {row['step']}{': ' if parts else ''}{', '.join(parts)}"
