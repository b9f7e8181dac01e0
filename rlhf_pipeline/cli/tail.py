"""`rlhf-pipeline tail`: the newest trajectories, and those that come."""

from __future__ import annotations

import argparse
import io
import json
import select as system
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rlhf_pipeline.errors import MissingPathError
from rlhf_pipeline.exchange.filters import select
from rlhf_pipeline.report.run_folder import Row, RunFolder, is_run, is_store
from rlhf_pipeline.report.stored import Stored, open_run_or_store
from rlhf_pipeline.report.tail import Arrival, StepRows, Table, Tail, interleaved, step_line

_POLL_S = 0.25


def execute(args: argparse.Namespace) -> int:
    """Print the newest trajectories; with `--follow` go on until Ctrl-C, which ends it as quietly as `tail -f`."""
    try:
        if args.follow:
            _wait_for_store(Path(args.path).expanduser())
        run, store_path = open_run_or_store(args.path)
        with Stored(store_path) as stored:
            follower = _Follower(run, stored, args.filters)
            follower.newest(args.num)
            if args.follow:
                follower.follow()
    except KeyboardInterrupt:
        if not args.follow:
            raise
        return 128 + signal.SIGINT
    return 0


class _Follower:
    """Prints what a store holds, and what is added to it."""

    def __init__(self, run: RunFolder | None, stored: Stored, filters: list[str]) -> None:
        self._path = stored.path
        self._identity = _identity(stored.path)
        self._table = Table(shutil.get_terminal_size((110, 24)).columns)
        self._steps = StepRows(run.path / "metrics.jsonl") if run is not None else None
        choose = None
        if filters:
            select(stored.store, filters, stored.ids()[:0])  # a slip is an error in an empty store, too
            choose = lambda ids: select(stored.store, filters, ids)  # noqa: E731
        self._tail = Tail(stored, choose)

    def newest(self, num: int) -> None:
        """Print the heading, the newest trajectories, and the newest step."""
        steps = self._steps.fresh()[-1:] if self._steps is not None else []
        self._print(self._tail.newest(num), steps, heading=True)

    def follow(self) -> None:
        """Print what comes. Ends when nobody reads it any more.

        Raises:
            MissingPathError: the store was removed, or another one was made in its place.
        """
        wait = _waiter()
        while not wait(_POLL_S):
            # Steps first: the trajectories that they know of are then there, too.
            steps = self._steps.fresh() if self._steps is not None else []
            self._print(self._tail.fresh(), steps)
            if _identity(self._path) != self._identity:
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
            _say(lines)
            lines = []
        if heading:
            lines += self._table.lines([], heading=True)
        _say([*lines, *map(step_line, steps)])


def _say(lines: list[str]) -> None:
    if lines:
        print("\n".join(lines), flush=True)


def _wait_for_store(folder: Path) -> None:
    """A run that has just been started has no store yet."""
    said = False
    while is_run(folder) and not is_store(folder / "store"):
        if not said:
            print(f"{folder} has stored nothing yet; waiting for it", file=sys.stderr, flush=True)
            said = True
        time.sleep(_POLL_S)


def _identity(store: Path) -> object:
    """Return what tells a store from another one at its path; None where none is."""
    try:
        return json.loads((store / "zarr.json").read_bytes())["attributes"]["salt"]
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


def _waiter() -> Callable[[float], bool]:
    """Return a function that waits and says whether the reader of a pipe (head, grep -q) has left."""
    try:
        poll = system.poll()
        poll.register(sys.stdout.fileno(), 0)  # errors and hang-ups only
    except (AttributeError, io.UnsupportedOperation, OSError):

        def wait(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        return wait
    return lambda seconds: bool(poll.poll(seconds * 1000))
