"""Exceptions from outside at every line of a write, and what must hold after each of them.

    python -m tests.crash.interrupts --backend memmap --durability process --step 1

A tracer counts the lines of the package that a call executes in its thread, and raises at one of them, as Ctrl-C, an
alarm or a library's time limit does. After that, no id has another row, no acknowledged row is lost, an interrupted
batch that is appended again is in the store once, and nothing hangs. A reader with drawn rows and a second writer are
open throughout.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import trajectory_store
from trajectory_store import Column, Schema, TrajectoryStore

PACKAGE = str(Path(trajectory_store.__file__).parent)
SCHEMA = Schema(
    [
        Column("tag", "int64"),
        Column("x", "int32", ragged=True),
        Column("text", "str"),
        Column("score", "float32", mutable=True),
    ]
)
CALLS = ("append", "roll", "update", "add_columns", "compact", "close")
BACKENDS = ("memmap", "zarr")
DURABILITIES = ("process", "power")
HANG_S = 60.0
ROUNDS = 12
"""Calls that are interrupted in one store before the next one is made."""


class TimedOut(Exception):
    """What a library that limits the time of a call raises."""


EXCEPTIONS: tuple[type[BaseException], ...] = (KeyboardInterrupt, TimeoutError, TimedOut)


class Injector:
    """Raises an exception at the n-th line of the package that this thread executes; counts the lines if n is -1."""

    def __init__(self, at: int, error: BaseException | None = None) -> None:
        self.at = at
        self.error = error
        self.lines = 0
        self.place = ""
        self.events: dict[tuple[str, int], list[int]] = {}
        """Where each line was executed first and last."""

    def __enter__(self) -> Injector:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = False
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event != "line":
            return self._line
        if self.error is None:
            at = (frame.f_code.co_filename, frame.f_lineno)
            self.events[at] = [self.events.get(at, [self.lines])[0], self.lines]
        elif self.lines == self.at:
            if _is_destructor(frame):  # Python swallows what a destructor raises
                return self._line
            self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            self.lines += 1
            raise self.error
        self.lines += 1
        return self._line


def _is_destructor(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__" or "weakref" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class World:
    """A store with two writers and a reader, and what each of them was promised."""

    def __init__(self, folder: Path, backend: str, durability: str) -> None:
        self.path = folder
        self.durability = durability
        self.rows: dict[int, int] = {}
        """The tag of each id that anybody has ever seen."""
        self.acknowledged: dict[int, int] = {}
        self.scores: dict[int, float] = {}
        self.next_tag = 1
        self.columns = 0
        options: dict[str, Any] = {"backend": backend, "durability": durability, "segment_rows": 4}
        TrajectoryStore.create(folder, SCHEMA, **options).close()
        self.store = self.open()
        self.second = self.open()
        self.reader = TrajectoryStore.open(folder)
        self.append_to(self.second, 1)

    def open(self) -> TrajectoryStore:
        """Open a writer."""
        return TrajectoryStore.open(self.path, "a", durability=self.durability)  # type: ignore[arg-type]

    def batch(self, count: int) -> tuple[list[int], dict[str, Any]]:
        """Return new tags, and rows that follow from them."""
        tags = list(range(self.next_tag, self.next_tag + count))
        self.next_tag += count
        return tags, {"tag": tags, "x": [[tag] * (tag % 3) for tag in tags], "text": [f"row {tag}" for tag in tags]}

    def append_to(self, store: TrajectoryStore, count: int) -> np.ndarray:
        """Append, and note what was acknowledged."""
        tags, rows = self.batch(count)
        ids = store.append(rows)
        self.acknowledge(ids, tags)
        return ids

    def acknowledge(self, ids: np.ndarray, tags: list[int]) -> None:
        """Note that an append returned these ids."""
        pairs = dict(zip(ids.tolist(), tags, strict=True))
        for row, tag in pairs.items():
            assert self.rows.setdefault(row, tag) == tag, (
                f"id {row} was tag {self.rows[row]}, and is acknowledged as {tag}"
            )
        self.acknowledged |= pairs

    def look(self, store: TrajectoryStore, *, draws: bool = True) -> None:
        """Check that a store serves all that was acknowledged, each id with its row, and each row once."""
        store.refresh()
        ids = store.ids()
        values = store.read(ids, ["tag", "x", "text", "score"], checked=True)
        tags = dict(zip(ids.tolist(), values["tag"].tolist(), strict=True))
        for row, tag in tags.items():
            assert self.rows.setdefault(row, tag) == tag, f"id {row} was tag {self.rows[row]} and is {tag}"
        lost = self.acknowledged.keys() - tags.keys()
        assert not lost, f"acknowledged rows are lost: {sorted(lost)}"
        assert len(set(tags.values())) == len(tags), "a batch is there twice"
        assert values["text"] == [f"row {tag}" for tag in values["tag"].tolist()]
        assert [x.tolist() for x in values["x"]] == [[tag] * (tag % 3) for tag in values["tag"].tolist()]
        scores = dict(zip(ids.tolist(), values["score"].tolist(), strict=True))
        for row, score in self.scores.items():
            assert scores[row] == score, f"row {row}: the score is {scores[row]} instead of {score}"
        drawn = [row for row in self.rows if row in tags] if draws else []
        assert set(self.rows) <= set(tags), f"rows that were seen are gone: {sorted(set(self.rows) - set(tags))}"
        assert store.read(drawn, ["tag"])["tag"].tolist() == [self.rows[row] for row in drawn]

    def close(self) -> None:
        """Close everything; what a fresh reader sees holds, and no checksum fails."""
        for store in (self.store, self.second, self.reader):
            store.close()
        with TrajectoryStore.open(self.path) as fresh:
            self.look(fresh)
            report = fresh.verify()
            assert report.ok, str(report)


def prepared(world: World, call: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return a call to interrupt, after what it needs, and what takes note of its outcome once it returns."""
    store = world.store
    if call in ("append", "roll"):
        tags, rows = world.batch(2 if call == "append" else 5)  # five rows fit no segment that was begun
        if call == "roll" or store.segment is None:
            world.append_to(store, 1)
        return lambda: store.append(rows), lambda ids: world.acknowledge(ids, tags)
    if call == "update":
        ids = world.append_to(store, 2)
        score = float(world.next_tag)
        return (lambda: store.update(ids, score=score)), lambda _: world.scores.update(
            dict.fromkeys(ids.tolist(), score)
        )
    if call == "add_columns":
        world.columns += 1
        column = Column(f"c{world.columns}", "int32", fill=7)

        def check(_: Any) -> None:
            assert store.read_scalars(column.name).tolist() == [7] * len(store)

        return (lambda: store.add_columns([column])), check
    ids = world.append_to(store, 5)
    score = float(world.next_tag)
    store.update(ids[:2], score=score)
    world.scores |= dict.fromkeys(ids[:2].tolist(), score)
    if call == "compact":
        return store.compact, lambda _: None
    return store.close, lambda _: None


def limited(call: Callable[[], Any], what: str) -> Any:
    """Make a call in another thread, and fail if it does not return: a lock was left behind."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert outcome, f"{what} hangs"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def interrupt(world: World, call: str, at: int, kind: type[BaseException]) -> str:
    """Interrupt a call at a line, check what everybody sees, and repeat the call; return where it was interrupted."""
    run, note = prepared(world, call)
    world.look(world.reader)
    error = kind("from outside")
    with Injector(at, error) as injector:
        try:
            returned = run()
        except BaseException as other:  # noqa: BLE001 - compared with the one that was injected
            raised = other
        else:
            raised = None
    assert raised in (None, error), f"{error!r} became {raised!r}"
    if raised is None:
        assert not injector.place, f"the exception at {injector.place} was swallowed"
        note(returned)
        if call == "close":
            world.store = world.open()
        return ""
    try:
        world.look(world.reader)
        limited(lambda: world.append_to(world.second, 1), "the second writer")
        if world.next_tag % 2:  # the object works at once from the same thread, and from another one
            note(run())
        elif call in ("append", "roll"):
            note(run())
            limited(lambda: world.append_to(world.store, 1), "the writer in another thread")
        else:
            note(limited(run, "the call in another thread"))
        if call == "close":
            world.store = world.open()
        for store in (world.store, world.reader):
            world.look(store)
    except BaseException as wrong:
        wrong.add_note(f"after {kind.__name__} at line {at} of {call}, {injector.place}")
        raise
    return injector.place


def lines_of(backend: str, durability: str, call: str) -> list[int]:
    """Return where a call executes each line of the package for the first and for the last time, in order."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        world = World(Path(folder, "s"), backend, durability)
        world.append_to(world.store, 1)
        run, _ = prepared(world, call)
        with Injector(-1) as injector:
            run()
        if call == "close":
            world.store = world.open()
        world.close()
    return sorted({at for numbers in injector.events.values() for at in numbers})


def sweep(
    backend: str, durability: str, call: str, points: Iterable[tuple[int, type[BaseException]]]
) -> tuple[int, list[str]]:
    """Interrupt a call at some of its lines; return the number of interruptions, and what failed."""
    done, failures, todo = 0, list[str](), list(points)
    while todo:
        part, todo = todo[:ROUNDS], todo[ROUNDS:]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            world, number = World(Path(folder, "s"), backend, durability), 0
            try:
                for number, (at, kind) in enumerate(part):  # noqa: B007 - read after an error
                    done += bool(interrupt(world, call, at, kind))
                world.close()
            except Exception as error:  # noqa: BLE001 - counted
                notes = "; ".join(getattr(error, "__notes__", ()))
                failures.append(f"{backend} {durability} {call}: {type(error).__name__}: {error} {notes}")
                todo = part[number + 1 :] + todo
                with suppress(Exception):
                    world.close()
    return done, failures


def main(argv: list[str]) -> int:
    """Sweep over every line, or every n-th; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--durability", choices=DURABILITIES, action="append")
    parser.add_argument("--call", choices=CALLS, action="append")
    parser.add_argument("--step", type=int, default=1, help="of the lines, take every n-th")
    parser.add_argument("--first", type=int, default=0, help="the first line")
    parser.add_argument("--rotate", action="store_true", help="one exception per line, in turn")
    options = parser.parse_args(argv)
    failed = 0
    for backend in options.backend or BACKENDS:
        for durability in options.durability or DURABILITIES:
            for call in options.call or CALLS:
                began = time.monotonic()
                ats = lines_of(backend, durability, call)[options.first :: options.step]
                kinds = [[EXCEPTIONS[i % 3]] if options.rotate else EXCEPTIONS for i in range(len(ats))]
                points = [(at, kind) for at, some in zip(ats, kinds, strict=True) for kind in some]
                done, failures = sweep(backend, durability, call, points)
                failed += len(failures)
                took = f"{done} interruptions, {len(failures)} failures, {time.monotonic() - began:.0f} s"
                sys.stdout.write(f"{backend} {durability} {call}: {took}\n")
                for words in failures[:20]:
                    sys.stdout.write(f"    {words[:1200]}\n")
                sys.stdout.flush()
    return bool(failed)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main(sys.argv[1:]))
