"""A segment that another process ends: what was committed counts, and what comes later goes to a new segment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Literal

import pytest

from tests.moments import at_call
from tests.processes import Children
from trajectory_store import Column, TrajectoryStore, fs
from trajectory_store.format import RECORD_SIZE

Backend = Literal["memmap", "zarr"]
BACKENDS = pytest.mark.parametrize("backend", ["memmap", "zarr"])


@BACKENDS
@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_writer_that_was_stopped_continues_in_a_new_segment(tmp_path, backend, durability):
    """Its segment was ended meanwhile, and even merged: nothing of it is lost, doubled or late."""
    store = TrajectoryStore.create(tmp_path / "s", [Column("tag", "int64")], backend=backend, durability=durability)
    store.append({"tag": [0]})
    store.close()
    (told, tell), (go, let_go) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            store = TrajectoryStore.open(tmp_path / "s", "a")
            for tag in (1, 2):
                os.write(tell, f"{int(store.append({'tag': [tag]})[0]):020d}".encode())
                os.read(go, 1)
        finally:
            os._exit(0)
    os.close(tell)
    first = int(os.read(told, 20))
    os.kill(pid, signal.SIGSTOP)
    with TrajectoryStore.open(tmp_path / "s", "a") as other, TrajectoryStore.open(tmp_path / "s") as reader:
        other.fence(first >> 32)
        assert other.read_scalars("tag").tolist() == [0, 1]
        reader.refresh()
        assert not reader.being_written()
        other.compact()
        os.kill(pid, signal.SIGCONT)
        os.write(let_go, b"xx")
        second = int(os.read(told, 20))
        os.waitpid(pid, 0)
        assert first >> 32 != second >> 32
        for store in (other, reader):
            store.refresh()
            assert store.read_scalars("tag").tolist() == [0, 1, 2]
        assert other.verify().ok, str(other.verify())


@BACKENDS
@pytest.mark.parametrize("is_closed", [False, True])
def test_what_a_writer_commits_before_it_dies_is_kept_by_whoever_ends_its_segment(
    tmp_path: Path, children: Children, backend: Backend, is_closed: bool
):
    """The process that ends the segment last looked at it before these commits: it may have been stopped since."""
    path, go = tmp_path / "s", tmp_path / "go"
    TrajectoryStore.create(path, [Column("tag", "int64")], backend=backend, durability="power").close()

    def write() -> None:
        store = TrajectoryStore.open(path, "a")
        store.append({"tag": [0]})
        os.write(1, b"0")
        while not go.exists():
            time.sleep(0.001)
        store.append({"tag": [1]})
        store.append({"tag": [2]})
        if is_closed:
            store.close()
        os.kill(os.getpid(), signal.SIGKILL)

    writer = children.fork(write)
    writer.until(writer.output)
    with TrajectoryStore.open(path, "a") as store:
        go.touch()
        assert writer.wait() == -signal.SIGKILL
        for segment in store._catalog.segments.values():
            store._catalog.medium.close_dead(segment)
        store.refresh()
        assert store.read_scalars("tag").tolist() == [0, 1, 2]
    with TrajectoryStore.open(path) as store:
        assert store.read_scalars("tag").tolist() == [0, 1, 2]
        assert store.verify().ok, str(store.verify())


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_commit_at_the_moment_of_the_end_counts_once(tmp_path, moment):
    """The other process ends the segment right before, or right after, a record is written: the rows are there once."""
    store = TrajectoryStore.create(tmp_path / "s", [Column("tag", "int64")])
    ids = store.append({"tag": [1]})
    ended = []

    def end(call):
        if len(call.arguments["data"]) == RECORD_SIZE and not ended:
            ended.append(call)
            other.fence(int(ids[0]) >> 32)

    with TrajectoryStore.open(tmp_path / "s", "a") as other:
        with at_call(fs.pwrite, **{moment: end}):
            late = store.append({"tag": [2]})
        assert ended
        assert (int(late[0]) >> 32 == int(ids[0]) >> 32) == (moment == "after")
        store.append({"tag": [3]})
        for one in (store, other):
            one.refresh()
            assert one.read_scalars("tag").tolist() == [1, 2, 3]
        store.close()
        assert other.verify().ok, str(other.verify())
