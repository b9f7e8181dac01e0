"""An exception from outside ends a write: Ctrl-C, an alarm, the time limit of a library."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.crash.interrupts import CALLS, EXCEPTIONS, TimedOut, lines_of, sweep
from tests.moments import at_call, fails
from trajectory_store import Column, Schema, TrajectoryStore, fs
from trajectory_store.catalog import Catalog
from trajectory_store.local_backend import LocalWriter
from trajectory_store.objects.backend import ObjectWriter

SCHEMA = Schema([Column("tag", "int64"), Column("x", "int32", ragged=True), Column("m", "int64", mutable=True)])
BACKENDS = pytest.mark.parametrize("backend", ["memmap", "zarr"])


def rows(*tags):
    """A batch in which every value follows from the tag."""
    return {"tag": list(tags), "x": [[tag] * 4 for tag in tags]}


@BACKENDS
@pytest.mark.parametrize("call", CALLS)
def test_a_write_that_is_interrupted_at_a_line_costs_nothing(backend, call):
    """A sample of `tests/crash/interrupts.py`: no id changes its row, nothing is lost, doubled or left hanging."""
    durability = "power" if CALLS.index(call) % 2 else "process"
    ats = lines_of(backend, durability, call)
    points = [(ats[len(ats) * i // 7], EXCEPTIONS[i % 3]) for i in (1, 4, 6)]
    done, failures = sweep(backend, durability, call, points)
    assert done
    assert not failures, "\n".join(failures)


@BACKENDS
@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError("too long"), TimedOut("too long")])
@pytest.mark.parametrize("again", [True, False])
def test_a_commit_that_is_complete_keeps_its_number(tmp_path, backend, error, again):
    """Its writer was interrupted before it counted it, and readers have seen it. Appended again, it is there once."""
    store = TrajectoryStore.create(tmp_path / "s", SCHEMA, backend=backend)
    first = store.append(rows(1)).tolist()
    put = LocalWriter._put_record if backend == "memmap" else ObjectWriter._put_commit
    with at_call(put, after=fails(error)), pytest.raises(type(error)) as caught:
        store.append(rows(10, 11))
    assert caught.value is error
    reader = TrajectoryStore.open(tmp_path / "s")
    drawn = reader.ids()
    assert reader.read(drawn, checked=True)["tag"].tolist() == [1, 10, 11]
    ids = store.append(rows(10, 11) if again else rows(77, 78)).tolist()
    assert (first + ids == drawn.tolist()) == again
    for view in (store, reader, TrajectoryStore.open(tmp_path / "s")):
        view.refresh()
        assert view.read(drawn, checked=True)["tag"].tolist() == [1, 10, 11]
        assert view["tag"].tolist() == [1, 10, 11] + ([] if again else [77, 78])
        assert view.verify().ok
    assert store.append(rows(10, 11)).tolist() != ids, "only the call that was interrupted is recognised"
    store.close()


@BACKENDS
def test_a_retry_may_be_interrupted_as_well(tmp_path, backend):
    """Before it looks at the log, and after it found its rows: they are in the store once."""
    store = TrajectoryStore.create(tmp_path / "s", SCHEMA, backend=backend)
    kind = LocalWriter if backend == "memmap" else ObjectWriter
    for function in (kind.commit, kind.finish, Catalog.refresh_segment):
        with at_call(function, after=fails(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
            store.append(rows(1, 2))
    ids = store.append(rows(1, 2))
    assert store.ids().tolist() == ids.tolist()
    assert store["tag"].tolist() == [1, 2]
    store.close()


def test_an_interrupt_as_the_thread_starts_that_ends_a_segment(tmp_path):
    """The segment is ended by the next call, and every call works."""
    store = TrajectoryStore.create(tmp_path / "s", SCHEMA)
    store.append(rows(*range(64)))

    def interrupt(call):
        if call.arguments["self"].name == "trajectory-end":
            raise KeyboardInterrupt

    with at_call(threading.Thread.start, before=interrupt), pytest.raises(KeyboardInterrupt):
        store.append(rows(*range(64, 1000)))
    store.append(rows(*range(64, 1000)))
    store.append(rows(*range(1000, 30_000)))
    store.compact()
    assert np.array_equal(store["tag"], np.arange(30_000))
    store.close()
    with TrajectoryStore.open(tmp_path / "s") as fresh:
        assert fresh.verify().ok
        assert len(fresh) == 30_000


def test_a_time_limit_as_a_commit_is_noted_is_raised(tmp_path):
    """TimeoutError is an OSError, and no word of the disk."""
    store = TrajectoryStore.create(tmp_path / "s", SCHEMA)
    store.append(rows(1))

    def interrupt(call):
        if len(call.arguments["data"]) == 16 and call.number > 1:  # the mark of what is acknowledged
            raise TimeoutError("the step took too long")

    with at_call(fs.pwrite, before=interrupt), pytest.raises(TimeoutError, match="the step took too long"):
        store.append(rows(2))
    store.append(rows(2))
    assert store["tag"].tolist() == [1, 2]
    store.close()


@pytest.mark.parametrize("durability", ["power", "group"])
def test_an_interrupted_sync_blocks_no_other_thread(tmp_path, durability):
    """The thread that syncs for all is interrupted: those that wait, and those that come, sync themselves."""
    store = TrajectoryStore.create(tmp_path / "s", SCHEMA, durability=durability)
    store.append(rows(1))
    with at_call(LocalWriter._datasync, after=fails(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
        store.append(rows(2))
    thread = threading.Thread(target=store.append, args=(rows(3),), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    store.append(rows(2))
    assert store["tag"].tolist() == [1, 2, 3]
    store.close()
