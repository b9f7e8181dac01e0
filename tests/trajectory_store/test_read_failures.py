"""A system call of a reader fails once: it raises, or sees everything, and later nothing is missing.

The default run lets one call of eleven fail; set `STORE_FAIL_EVERY=1` for all, which takes some minutes.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trajectory_store import Column, ReadFailedError, Schema, TrajectoryStore

EVERY = int(os.environ.get("STORE_FAIL_EVERY", "11"))
SCHEMA = Schema([Column("n", "int64"), Column("x", "int32", ragged=True), Column("s", "float32", mutable=True)])
CALLS = ("pread", "read", "open", "stat", "lstat", "scandir", "listdir", "fstat")


class Failure:
    """Counts the calls of a reader that ask the file system something, and lets one of them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = self.seen = 0
        self.on = False
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))
        monkeypatch.setattr(builtins, "open", self.wrap(builtins.open))
        monkeypatch.setattr(io, "open", self.wrap(io.open))

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen += self.on
            if self.on and self.seen == self.at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **kwargs)

        return call


def rows(n: int, value: int) -> dict[str, Any]:
    """Return `n` rows that tell which append they are of."""
    return {"n": [value] * n, "x": [[value] * (1 + i) for i in range(n)], "s": [0.0] * n}


def content(store: TrajectoryStore) -> dict[str, Any]:
    """Return all that a store holds, ids included."""
    found = store.read(store.ids(), list(SCHEMA.names))
    return {"ids": store.ids().tolist()} | {name: [v.tolist() for v in values] for name, values in found.items()}


def new_segments(one: TrajectoryStore, two: TrajectoryStore) -> None:
    """Both writers append, one of them over the end of its segment."""
    one.append(rows(2, 10))
    two.append(rows(2, 11))
    for value in range(12, 15):
        one.append(rows(3, value))


def updates(one: TrajectoryStore, two: TrajectoryStore) -> None:
    """One writer appends and gives old rows values, in a segment of its own."""
    one.append(rows(2, 10))
    one.update(two.ids()[::2], s=2.5)


def compaction(one: TrajectoryStore, two: TrajectoryStore) -> None:
    """What all wrote is merged, and the segments that it was in go."""
    updates(one, two)
    one.close()
    two.refresh()
    two.compact()


@pytest.mark.parametrize("change", [new_segments, updates, compaction])
@pytest.mark.parametrize(("backend", "way"), [("memmap", {"io": "pread"}), ("memmap", {"io": "mmap"}), ("zarr", {})])
def test_a_read_that_fails_hides_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: Any,
    way: dict[str, Any],
    change: Callable[[TrajectoryStore, TrajectoryStore], None],
):
    """Rows of a segment that could not be opened for a moment were hidden until the store was opened again."""
    failure, raised = Failure(monkeypatch), 0
    while failure.at <= failure.seen:
        failure.at += EVERY
        path = tmp_path / str(failure.at)
        one = TrajectoryStore.create(path, SCHEMA, backend=backend, segment_rows=8)
        two = TrajectoryStore.open(path, mode="a")
        for value, writer in enumerate((one, two, one)):
            writer.append(rows(3, value))
            two.refresh()
        with TrajectoryStore.open(path, **way) as reader:
            assert len(content(reader)["n"]) == 9
            change(one, two)
            failure.seen, failure.on = 0, True
            seen = None
            try:
                reader.refresh()
                seen = content(reader)
            except ReadFailedError:
                raised += 1
            failure.on = False
            for value in (20, 21):
                reader.refresh()
                with TrajectoryStore.open(path, **way) as fresh:
                    assert content(reader) == content(fresh) == (seen or content(fresh))
                seen = None
                two.append(rows(1, value))
        one.close()
        two.close()
    assert raised
