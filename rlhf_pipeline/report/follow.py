"""Follows a store: prints its newest trajectories, and new ones as they are added."""

from __future__ import annotations

import io
import select as system
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rlhf_pipeline.buffer.filters import select
from rlhf_pipeline.errors import MissingPathError
from rlhf_pipeline.report.stored import Stored
from rlhf_pipeline.report.tail import Arrival, Table, Tail, interleaved, step_line
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.rows import NewRows, Row


class Follower:
    """Prints a store's newest trajectories, and new ones as they are added.

    Args:
        run: the store's run, if it has one.
        stored: the store.
        filters: conditions that a trajectory must meet.
        say: prints a line.
        columns: the terminal's width.
    """

    def __init__(
        self, run: RunFolder | None, stored: Stored, filters: list[str], say: Callable[[str], None], columns: int
    ) -> None:
        self._say = say
        self._path = stored.path
        self._root = _root(stored.path)
        self._table = Table(columns)
        self._steps = NewRows(run.rows(run.metrics_file)) if run is not None else None
        choose = None
        if filters:
            select(stored.store, filters, stored.ids()[:0])  # reports a mistyped filter in an empty store as well
            choose = lambda ids: select(stored.store, filters, ids)  # noqa: E731
        self._tail = Tail(stored, choose)

    def newest(self, num: int) -> None:
        """Print the heading, the newest trajectories, and the newest step."""
        steps = self._steps.rows[-1:] if self._steps is not None else []
        self._print(self._tail.newest(num), steps, heading=True)

    def follow(self, every: float) -> None:
        """Print new arrivals, polling at an interval in seconds. Ends when the reader has exited.

        Raises:
            MissingPathError: the store was removed or replaced.
        """
        wait = waiter()
        while not wait(every):
            # Steps are read first, so that the trajectories they refer to are found afterwards.
            steps = self._steps.read() if self._steps is not None else []
            self._print(self._tail.fresh(), steps)
            if _root(self._path) != self._root:
                raise MissingPathError(f"the store {self._path} was removed, or replaced by another one.")

    def _print(self, batches: Iterable[list[Arrival]], steps: list[Row], *, heading: bool = False) -> None:
        lines: list[str] = []
        for arrivals in batches:
            texts = self._table.lines(arrivals, heading=heading)
            if heading:
                lines.append(texts.pop(0))
                heading = False
            known = [row for row in steps if row.get("watermark", 0) < arrivals[-1].place]
            steps = steps[len(known) :]
            lines += interleaved(arrivals, texts, known)
            self._say("\n".join(lines))
            lines = []
        if heading:
            lines += self._table.lines([], heading=True)
        lines += map(step_line, steps)
        if lines:
            self._say("\n".join(lines))


def _root(store: Address) -> bytes | None:
    """Return a store's root file, which never changes and identifies the store; None if it is missing, or at a URL."""
    if not isinstance(store, Path):
        return None
    try:
        return (store / "zarr.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def waiter() -> Callable[[float], bool]:
    """Return a function that waits, and returns whether the reader of a pipe (head, grep -q) has exited."""
    try:
        poll = system.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors and hang-ups only
    except (AttributeError, io.UnsupportedOperation, OSError):

        def wait(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        return wait
    return lambda seconds: bool(poll.poll(seconds * 1000))
