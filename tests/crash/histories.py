"""Random histories of a store: every process may do anything at any moment, and dies at any moment.

    python tests/crash/histories.py --medium memmap --histories 60 --kills 600 --seed 0

In each history 1 to 4 processes append, update, refresh, read, compact, verify, take snapshots and reopen, with clocks
that are up to two hours apart, in half of the histories with a small `max_trajectories`. In every second history
the clock changes whenever a process opens the store, as if its machine had been started again. They are stopped
(SIGSTOP) and continued, killed (SIGKILL) and replaced. All of them note what they try and what was acknowledged in one
file; the judge of `_world.py` then says whether anything was lost, doubled, stale or torn. One line per medium sums it
up; exit code 1 where anything must not be. `--medium s3` runs against a server on this machine that loses requests and
replies (`_s3.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

_now, _now_ns, CLOCK_NS = time.time, time.time_ns, [0]
time.time_ns = lambda: _now_ns() + CLOCK_NS[0]  # before the store is imported: however it asks for the time
time.time = lambda: _now() + CLOCK_NS[0] / 1e9

import numpy as np  # noqa: E402
from _world import (  # noqa: E402  # noqa: E402
    MOST_ROWS,
    SCHEMA,
    UPDATED,
    Judge,
    TornError,
    length_of,
    read_all,
    read_log,
    rows_of,
    stamps_of,
    values_of,
)

from tests.processes import Child, Children  # noqa: E402
from trajectory_store import MissingRowError, StoreError, TrajectoryStore  # noqa: E402

CLOCKS_S = (0, 0, 0, -7200, -5, -0.001, 0.001, 5, 3700, 7200)
MOST_PROCESSES = 1 << 12
"""In one history: the number of a process is the high half of its commits' and updates' numbers (below 2^24)."""
HANG_S = 60.0
LOST_REPLIES = ("WriteFailedError", "ReadFailedError")


@dataclass(frozen=True, kw_only=True)
class History:
    """One history, drawn from a seed."""

    where: str
    """What `TrajectoryStore.create` takes."""
    medium: str
    seed: int
    processes: int
    kills: int
    limit: int | None
    options: dict[str, Any] = field(default_factory=dict)
    most_rows: int = 500
    """About how many rows there will be without a limit."""
    clocks_s: tuple[float, ...] = CLOCKS_S
    restarts: bool = False
    """The clock changes at each opening."""
    before_the_end: Callable[[], None] = lambda: None
    """Called in the process that looks at what is left."""

    @classmethod
    def draw(cls, where: str, medium: str, seed: int, processes: int, kills: int) -> History:
        """Choose what the seed says."""
        rng = random.Random(f"{medium} {seed}")
        limit = rng.choice([None, None, 20, 60])
        options: dict[str, Any] = {
            "backend": "memmap" if medium == "memmap" else "zarr",
            "max_trajectories": limit,
            "segment_rows": rng.choice([4, 9, 30, None]),
            "durability": rng.choice(["process", "process", "group", "power"]) if medium != "s3" else "process",
        }
        return cls(
            where=where,
            medium=medium,
            seed=seed,
            processes=processes,
            kills=kills,
            limit=limit,
            options=options,
            restarts=bool(seed % 2),
        )


class Log:
    """An event per line, appended by any number of processes in the order in which they happen."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._seen = self._events = 0

    def __call__(self, view: str, kind: str, *rest: Any) -> None:
        os.write(self._fd, b"\n" + json.dumps([view, kind, *rest]).encode() + b"\n")

    def events(self) -> int:
        """How many events there are by now."""
        while written := os.pread(self._fd, 1 << 20, self._seen):
            self._seen += len(written)
            self._events += written.count(b"\n[")
        return self._events

    def wait(self, more: int, seconds: float) -> None:
        """Wait for so many more events, or so long."""
        end, target = time.monotonic() + seconds, self.events() + more
        while self.events() < target and time.monotonic() < end:
            time.sleep(0.003)


class FalseAlarm(logging.Handler):
    """Nothing is damaged in a history, so nobody may say so, not even in a log."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if "damaged" in record.getMessage():
            self._log("", "bad", "alarm", record.getMessage())


class Actor:
    """One process of a history: opens the store and does one thing after another until it is told to end."""

    def __init__(self, history: History, number: int, log: Log) -> None:
        self.history = history
        self.log = log
        self.name = str(number)
        self.rng = random.Random(f"{history.seed} {number}")
        self.mode = "r" if self.rng.random() < 0.12 else "a"
        self.number = number * MOST_PROCESSES
        self.handles = 0
        self.keys: dict[int, int] = {}
        """Rows this process may update: id -> key."""
        self.store: TrajectoryStore | None = None
        self.view = ""
        self.snapshot: tuple[Any, dict[int, Any]] | None = None
        self.ending = False

    def run(self) -> None:
        """Go on until SIGTERM; a StoreError is noted and gone past, anything else ends the process."""
        calls = [
            *[self.append] * (8 if self.mode == "a" else 0),
            *[self.update] * (8 if self.mode == "a" else 0),
            *[self.compact] * (2 if self.mode == "a" else 0),
            *[self.refresh, self.read] * 3,
            *[self.take_snapshot, self.read_snapshot, self.verify, self.reopen, self.read_fresh],
        ]
        while not self.ending:
            call = self.rng.choice(calls) if self.store is not None else self.open
            try:
                call()
            except TornError as error:
                self.log(self.view, "bad", "torn", f"{call.__name__}: {error}")
            except RuntimeWarning as warning:
                self.log(self.view, "bad", "alarm", f"{call.__name__}: {warning}")
                self.store = self.snapshot = None
            except StoreError as error:
                self.log(self.view, "err", call.__name__, type(error).__name__, str(error)[:400])
                if isinstance(error, MissingRowError) and self.store is not None:
                    self.refresh()
            time.sleep(self.rng.random() ** 3 * 0.03)
        if self.store is not None:
            self.store.close()

    def new_view(self) -> str:
        self.handles += 1
        return f"{self.name}.{self.handles}"

    def open(self) -> None:
        self.view = self.new_view()
        if self.history.restarts:
            CLOCK_NS[0] = int(self.rng.choice(self.history.clocks_s) * 1e9)
        self.log(self.view, "look")
        self.store = TrajectoryStore.open(self.history.where, self.mode)
        self.log(self.view, "saw", self.store.watermark)
        self.read()

    def reopen(self) -> None:
        assert self.store is not None
        self.store.close()
        self.store = self.snapshot = None

    def refresh(self) -> None:
        assert self.store is not None
        self.log(self.view, "look")
        watermark = self.store.refresh()
        self.log(self.view, "saw", watermark)

    def read(self) -> None:
        assert self.store is not None
        self.note_read(self.view, self.store)

    def note_read(self, view: str, store: TrajectoryStore) -> None:
        """Read everything that the store shows; rows that leave in between are another look's."""
        for attempt in range(20):
            try:
                ids, keys, stamps = read_all(store)
                break
            except MissingRowError:
                if self.history.limit is None or attempt == 19:
                    raise
                self.log(view, "look")
                self.log(view, "saw", store.refresh())
        self.log(view, "read", ids, keys, stamps, True)
        self.keys = dict(zip(ids, keys, strict=True))
        if ids and self.rng.random() < 0.3:
            some = self.rng.sample(ids, min(len(ids), 9))
            padded = store.read_padded(some, ["x", "key"], side=self.rng.choice(["left", "right"]))
            expected = [self.keys[i] for i in some]
            if padded["key"].tolist() != expected or padded["lengths"].tolist() != [length_of(k) for k in expected]:
                self.log(view, "bad", "torn", f"read_padded of {expected}: {padded['key']}, {padded['lengths']}")

    def append(self) -> None:
        if self.history.limit is None and len(self.keys) > self.history.most_rows:
            self.update()
            return
        assert self.store is not None
        self.number += 1
        commit, count = self.number, self.rng.choice([1, 2, 3, 5, 8, 13])
        keys = list(range(commit * MOST_ROWS, commit * MOST_ROWS + count))
        self.log(self.view, "add?", commit, count)
        ids = self.store.append(rows_of(keys)).tolist()
        self.log(self.view, "add", commit, ids)
        self.keys.update(zip(ids, keys, strict=True))
        if self.rng.random() < 0.3:
            self.read()
        else:
            self.read_some(ids)

    def update(self) -> None:
        assert self.store is not None
        if not self.keys:
            return
        self.number += 1
        stamp = self.number
        keys_before = list(self.keys)
        ids = self.rng.sample(
            keys_before[-40:] if self.rng.random() < 0.5 else keys_before, self.rng.randint(1, min(9, len(keys_before)))
        )
        columns = self.rng.sample(UPDATED, self.rng.randint(1, len(UPDATED)))
        self.log(self.view, "set?", stamp, ids, columns)
        updated_ids = np.repeat(np.array(ids, np.int64), 2)[::2] if self.rng.random() < 0.5 else ids
        self.store.update(updated_ids, **values_of(stamp, [self.keys[i] for i in ids], columns))
        self.log(self.view, "set", stamp)
        self.read_some(ids)

    def read_some(self, ids: list[int]) -> None:
        """What a process wrote is visible to it at once."""
        assert self.store is not None
        keys, stamps = stamps_of(self.store.read(ids))
        self.log(self.view, "read", ids, keys, stamps, False)

    def compact(self) -> None:
        assert self.store is not None
        self.store.compact()
        self.log(self.view, "did", "compactions")

    def verify(self) -> None:
        assert self.store is not None
        report = self.store.verify()
        self.log(self.view, "did", "verifies")
        if not report.ok:
            self.log(self.view, "bad", "alarm", str(report)[:600])

    def take_snapshot(self) -> None:
        assert self.store is not None
        while self.snapshot is None or self.store.snapshot() != self.snapshot[0]:  # a read follows segments that left
            snapshot = self.store.snapshot()
            self.snapshot = (snapshot, self.cells(self.store.ids().tolist()[-30:], self.store))

    def read_snapshot(self) -> None:
        """The ids and values are those of then, whatever was updated, folded or refreshed since."""
        assert self.store is not None
        if self.snapshot is None:
            return
        snapshot, before = self.snapshot
        still = set(self.store.ids(snapshot).tolist())
        if self.history.limit is None and not before.keys() <= still:
            self.log(self.view, "bad", "snapshot", f"rows {sorted(before.keys() - still)} left the snapshot")
        ids = [row for row in before if row in still]
        now = self.cells(ids, self.store.as_of(snapshot))
        wrong = [(row, before[row], now[row]) for row in ids if now[row] != before[row]]
        if wrong:
            self.log(self.view, "bad", "snapshot", f"values of then, values read: {wrong[:3]}")
        self.log(self.view, "did", "snapshots")

    def cells(self, ids: list[int], store: Any) -> dict[int, Any]:
        keys, stamps = stamps_of(store.read(ids))
        return {row: (keys[at], *(stamps[name][at] for name in UPDATED)) for at, row in enumerate(ids)}

    def read_fresh(self) -> None:
        """A reader that is opened now sees all of it, too."""
        view = self.new_view()
        self.log(view, "look")
        with TrajectoryStore.open(self.history.where, "r") as fresh:
            self.log(view, "saw", fresh.watermark)
            self.note_read(view, fresh)


def at_the_end(history: History, log: Log) -> None:
    """After the last process: verify, read, compact, read; the same for a copy of the folder and a last append."""
    view = "end"
    places = [history.where]
    if history.medium != "s3":
        copy = f"{history.where}-copy"
        shutil.copytree(history.where, copy, symlinks=True)
        places.append(copy)
    for place in places:
        view += "'"
        for mode in ("r", "a", "r"):
            actor = Actor(replace(history, where=place), 0, log)
            actor.name, actor.mode = f"{view}{mode}", mode
            actor.open()
            actor.verify()
            if mode == "a":
                actor.compact()
                actor.refresh()
                actor.read()
                actor.verify()
            assert actor.store is not None
            actor.store.close()
    with TrajectoryStore.open(history.where, "a") as store:
        ids = store.append(rows_of([1]))
        if stamps_of(store.read(ids))[0] != [1] or not store.verify().ok:
            log("end", "bad", "lost", "an append after all of it")


def act(history: History, number: int, log: Log, *, last: bool = False) -> None:
    """Be a process of the history; it ends with code 0 after SIGTERM."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr)
        warnings.simplefilter("error", RuntimeWarning)
        logging.getLogger("trajectory_store").addHandler(FalseAlarm(log))
        if last:
            history.before_the_end()
            at_the_end(history, log)
        else:
            actor = Actor(history, number, log)
            CLOCK_NS[0] = int(actor.rng.choice(history.clocks_s) * 1e9)
            signal.signal(signal.SIGTERM, lambda *_: setattr(actor, "ending", True))
            actor.run()
    except BaseException:
        log(str(number), "bad", "exception", traceback.format_exc()[-1500:])
        raise


def live(history: History, log: Log, rng: random.Random, children: Children) -> Counter[str]:
    """Start processes, stop and kill them, start others; at last let those that live end well."""
    counts: Counter[str] = Counter()
    running: list[Child] = []
    stopped: dict[Child, float] = {}
    started = 0

    def start() -> None:
        nonlocal started
        started += 1
        number = started
        running.append(children.fork(lambda: act(history, number, log), name=f"process-{number}"))

    def reap(child: Child, seconds: float) -> None:
        """Wait for a process that was told to end; one that does not is stuck."""
        try:
            child.wait(seconds)
        except AssertionError as error:
            child.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
            log(child.name, "bad", "hang", f"{error}\n{child.output()[-1500:]}")
            child.kill()

    pace = 2.0 if history.medium == "s3" else 0.5
    while counts["kills"] < history.kills:
        while len(running) < history.processes:
            start()
        log.wait(int(rng.random() ** 2 * 60), 4 * pace)  # how fast a machine is does not matter
        time.sleep(rng.random() ** 2 * 0.05)
        for child, until in list(stopped.items()):
            if time.monotonic() > until:
                child.send_signal(signal.SIGCONT)
                del stopped[child]
        child = rng.choice(running)
        if child.poll() is not None:  # it noted why
            running.remove(child)
            stopped.pop(child, None)
            counts["ended by themselves"] += 1
            if counts["ended by themselves"] > 20:
                break
        elif rng.random() < 0.6:
            child.kill()
            running.remove(child)
            stopped.pop(child, None)
            counts["kills"] += 1
        elif child not in stopped:
            child.send_signal(signal.SIGSTOP)
            stopped[child] = time.monotonic() + rng.random() ** 2 * 3 * pace
            counts["stops"] += 1
    for child in running:
        child.send_signal(signal.SIGCONT)
        child.send_signal(signal.SIGTERM)
    for child in running:
        reap(child, HANG_S)
    reap(children.fork(lambda: act(history, 0, log, last=True), name="last"), 2 * HANG_S)
    return counts


def play(history: History, folder: Path) -> tuple[Judge, Counter[str]]:
    """Live through one history and judge it."""
    log = folder / "log"
    with Children(folder / "processes") as children:
        create = children.fork(lambda: TrajectoryStore.create(history.where, SCHEMA, **history.options).close())
        create.succeed()
        counts = live(history, Log(log), random.Random(history.seed), children)
    judge = Judge(history.limit, allowed=LOST_REPLIES if history.medium == "s3" else ())
    judge.feed(read_log(log)).close()
    return judge, counts


def sum_up(medium: str, histories: int, counts: Counter[str], problem_counts: Counter[str]) -> str:
    """One line."""
    kinds = (
        "lost",
        "doubled",
        "stale",
        "torn",
        "order",
        "watermark",
        "snapshot",
        "alarm",
        "refused",
        "exception",
        "hang",
    )
    others = ", ".join(f"{num} {what}" for what, num in sorted(counts.items()) if " in " in what)
    return (
        f"{medium}: {histories} histories, {counts['kills']} kills, {counts['stops']} stops; acknowledged: "
        f"{counts['rows']:,} rows, {counts['updates']:,} updates; {counts['reads']:,} reads, {counts['compactions']:,} "
        f"compactions, {counts['verifies']:,} verifies, {counts['snapshots']:,} snapshots read"
        + (f"; StoreErrors: {others}" if others else "")
        + ". Found: "
        + ", ".join(f"{problem_counts[kind]} {kind}" for kind in kinds)
    )


def main() -> int:
    """Play histories and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--medium", choices=["memmap", "zarr", "s3"], action="append", help="default: memmap and zarr")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--histories", type=int, default=60, help="per medium")
    parser.add_argument("--kills", type=int, default=600, help="per medium, all histories together")
    parser.add_argument("--writers", type=int, choices=[1, 2, 3, 4], help="processes at once; default: 1 to 4 in turn")
    parser.add_argument("--one-clock", action="store_true", help="all processes have the same clock")
    parser.add_argument("--keep", type=Path, help="keep the stores and logs of histories with findings here")
    args = parser.parse_args()
    missed = 0
    for medium in args.medium or ["memmap", "zarr"]:
        counts: Counter[str] = Counter()
        problem_counts: Counter[str] = Counter()
        for number in range(args.histories):
            seed = args.seed + number
            kills = args.kills * (number + 1) // args.histories - args.kills * number // args.histories
            writers = args.writers or 1 + number % 4
            with contextlib.ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="history-", dir=room(seed))))
                if medium == "s3":
                    from _s3 import serve

                    rig = stack.enter_context(serve(folder, seed=seed))
                    history = History.draw(rig.url, medium, seed, writers, kills)
                    history = replace(history, before_the_end=rig.calm)
                else:
                    history = History.draw(str(folder / "s"), medium, seed, writers, kills)
                if args.one_clock:
                    history = replace(history, clocks_s=(0,))
                judge, more = play(history, folder)
                counts += more + judge.counts
                problem_counts.update(kind for kind, _ in judge.problems)
                shown = Counter[str]()
                for kind, words in judge.problems:
                    shown[kind] += 1
                    if shown[kind] <= 3:
                        where = f"{medium} seed {seed}, {writers} processes, {history.options}"
                        print(f"{where}: {kind}: {words}", flush=True)  # noqa: T201
                if judge.problems and args.keep is not None:
                    shutil.copytree(folder, args.keep / f"{medium}-{seed}", symlinks=True, dirs_exist_ok=True)
        print(sum_up(medium, args.histories, counts, problem_counts))  # noqa: T201
        missed += sum(problem_counts.values())
    return 1 if missed else 0


def room(seed: int) -> str | None:
    """On a disk, and every third time in memory, where maps are not used."""
    memory = "/dev/shm"
    return memory if seed % 3 == 2 and os.access(memory, os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())
