"""What was acknowledged is there, once and for every reader, whoever compacts, evicts or has the wrong clock."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from tests.moments import at_call, fails
from trajectory_store import (
    BatchError,
    Column,
    CorruptionError,
    MissingRowError,
    ReadOnlyError,
    Schema,
    SchemaError,
    StoreError,
    TrajectoryStore,
    fs,
    upkeep,
)
from trajectory_store.backend import Segment
from trajectory_store.bucket import FolderBucket
from trajectory_store.catalog import Catalog
from trajectory_store.errors import ReadFailedError, SegmentGoneError
from trajectory_store.local_backend import LocalWriter, Memmap
from trajectory_store.local_segment import LocalSegment
from trajectory_store.objects.backend import ObjectMedium, ObjectWriter
from trajectory_store.objects.segment import ObjectSegment
from trajectory_store.updates import Later

SCHEMA = Schema(
    [
        Column("tag", "int64"),
        Column("x", "int32", ragged=True),
        Column("text", "str", mutable=True),
        Column("ref", "float32", ragged=True, mutable=True, fill=-1.0),
        Column("priority", "float64", mutable=True),
    ]
)

pytestmark = pytest.mark.parametrize("backend", ["memmap", "zarr"])


def rows(tags):
    """A batch in which every value follows from the tag."""
    tags = [int(tag) for tag in tags]
    return {"tag": tags, "x": [[tag] * (tag % 4) for tag in tags], "text": [f"row {tag}" for tag in tags]}


def create(path, backend, **options):
    """A store without rows, closed."""
    TrajectoryStore.create(path, SCHEMA, backend=backend, **options).close()
    return path


def append_and_close(path, tags):
    """Append in a session of its own."""
    with TrajectoryStore.open(path, "a") as store:
        return store.append(rows(tags))


def tags_of(path):
    """What a fresh reader sees, whole; `verify` has nothing to say."""
    with TrajectoryStore.open(path) as store:
        found = store.read(store.ids())
        assert found["text"] == [f"row {tag}" for tag in found["tag"]]
        assert [x.tolist() for x in found["x"]] == [[tag] * (tag % 4) for tag in found["tag"].tolist()]
        report = store.verify()
        assert report.ok, str(report)
        return found["tag"].tolist()


def at_once(*calls):
    """Run calls in threads that start together; returns what they raised."""
    barrier, errors = threading.Barrier(len(calls)), []

    def run(call):
        barrier.wait()
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the test looks at them
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.fixture
def clock(monkeypatch):
    """Sets how far ahead the clock is, in seconds, of the real one."""
    real, offset = time.time_ns, [0.0]
    monkeypatch.setattr(time, "time_ns", lambda: real() + int(offset[0] * 1e9))
    monkeypatch.setattr(time, "time", lambda: (real() + int(offset[0] * 1e9)) / 1e9)

    def move(seconds):
        offset[0] = seconds

    return move


def live(children, path, killed, ended):
    """Writers one after another, the first of them killed after their acknowledgement; returns their ids."""

    def life(number):
        store = TrajectoryStore.open(path, "a")
        ids = store.append({"tag": [number], "x": [[number] * (number % 4)], "text": [f"row {number}"]})
        if number % 3 == 0:
            store.update(ids, priority=float(number))
        sys.stdout.write(f"{int(ids[0])}\n")
        if number < killed:
            os.kill(os.getpid(), signal.SIGKILL)
        store.close()

    ids = []
    for number in range(killed + ended):
        child = children.fork(partial(life, number))
        assert child.wait() == (-signal.SIGKILL if number < killed else 0), child.output()
        ids.append(int(child.output()))
    return ids


def test_rows_of_many_killed_writers_stay_after_a_compaction(tmp_path, backend, children):
    """17 writers killed, two that end well: every row, every update and the watermark, before and after."""
    path = create(tmp_path / "s", backend)
    ids = live(children, path, 17, 2)
    for compacted in (False, True, True):
        if compacted:
            with TrajectoryStore.open(path, "a") as store:
                store.compact()
        assert tags_of(path) == list(range(19))
        with TrajectoryStore.open(path) as store:
            assert store.watermark == 19
            assert store.ids().tolist() == ids
            assert store.read_scalars("priority", ids).tolist() == [i if i % 3 == 0 else 0 for i in range(19)]


def test_a_writer_that_begins_no_segment_merges_what_killed_ones_left(tmp_path, backend, monkeypatch, children):
    """Each of them was killed before it could do its share, and nobody else comes."""
    path = create(tmp_path / "s", backend)
    with TrajectoryStore.open(path, "a") as writer:
        writer.append(rows([20]))
        live(children, path, 20, 0)
        writer.refresh()
        left = len(writer._catalog.state.entries)
        assert left > 16
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 2 * upkeep.TIDY_S)
        writer.append(rows([21]))
        writer._background.pause()
        writer.refresh()
        assert len(writer._catalog.state.entries) < left - 7
        assert sorted(writer.read_scalars("tag").tolist()) == list(range(22))
    assert sorted(tags_of(path)) == list(range(22))


def test_rows_of_slow_writers_stay_after_an_eviction(tmp_path, backend):
    """18 writers of unequal pace in a ring: the newest rows are the same for an old and for a fresh reader."""
    path = create(tmp_path / "s", backend, max_trajectories=200, segment_rows=20)
    writers = [TrajectoryStore.open(path, "a") for _ in range(18)]
    total = 0
    newest: list[int] = []
    for turn in range(60):
        for number, writer in enumerate(writers):
            if turn % 30 == 0 or number == 17:
                count = 5 if number == 17 else 1
                writer.refresh()
                newest += writer.append(rows(range(total, total + count))).tolist()
                total += count
    newest = newest[-200:]
    old = writers[0]
    old.refresh()
    with TrajectoryStore.open(path) as fresh:
        for store in (old, fresh):
            assert store.ids().tolist() == newest
            assert store.watermark == total
            assert store.read_scalars("tag").tolist() == list(range(total - 200, total))
        assert fresh.verify().ok
    for writer in writers:
        writer.close()


def test_two_compactions_at_once_double_nothing(tmp_path, backend):
    """Whoever wins, every row is there once and as it was."""
    for attempt in range(3):
        path = create(tmp_path / f"s{attempt}", backend)
        for number in range(8):
            append_and_close(path, range(20 * number, 20 * number + 20))
        stores = [TrajectoryStore.open(path, "a") for _ in range(2)]
        errors = at_once(*(store.compact for store in stores))
        assert all(isinstance(error, StoreError) for error in errors), errors
        for store in stores:
            store.refresh()
            assert len(store) == store.watermark == 160
            store.close()
        assert tags_of(path) == list(range(160))


@pytest.mark.parametrize("upkeep", ["compact", "evict"])
def test_a_writer_that_was_idle_for_hours_appends_what_all_can_see(tmp_path, backend, clock, upkeep):
    """Its segment was compacted or evicted meanwhile, by a process whose clock is two hours ahead."""
    limit = 5 if upkeep == "evict" else None
    path = create(tmp_path / "s", backend, max_trajectories=limit, segment_rows=4)
    idle = TrajectoryStore.open(path, "a")
    idle.append(rows([1]))
    clock(7200)
    append_and_close(path, range(2, 12))
    append_and_close(path, [12])
    if upkeep == "compact":
        with TrajectoryStore.open(path, "a") as store:
            store.compact()
    clock(0)
    idle.refresh()
    ids = idle.append(rows([13]))
    idle.update(ids, priority=3.5)
    assert int(ids[0]) in idle.ids().tolist()
    wanted = list(range(9, 14)) if upkeep == "evict" else list(range(1, 14))
    assert tags_of(path) == wanted
    with TrajectoryStore.open(path) as fresh:
        assert fresh.read(ids)["tag"].tolist() == [13]
        assert fresh.read(ids)["priority"].tolist() == [3.5]
        assert fresh.watermark == 13
    idle.close()
    assert tags_of(path) == wanted


@pytest.mark.parametrize("upkeep", ["compact", "evict"])
def test_an_idle_writer_that_has_not_refreshed_loses_nothing(tmp_path, backend, clock, upkeep):
    """What it appends next is there for every reader, or older than the newest `max_trajectories`."""
    limit = 5 if upkeep == "evict" else None
    path = create(tmp_path / "s", backend, max_trajectories=limit, segment_rows=4)
    idle = TrajectoryStore.open(path, "a")
    idle.append(rows([1]))
    append_and_close(path, range(2, 6))
    clock(7200)
    with TrajectoryStore.open(path, "a") as store:
        if upkeep == "compact":
            store.compact()
        else:
            store.append(rows(range(6, 12)))
    ids = idle.append(rows([20]))
    with TrajectoryStore.open(path) as fresh:
        assert int(ids[0]) in fresh.ids().tolist()
        assert fresh.read(ids)["tag"].tolist() == [20]
        assert fresh.watermark == (6 if upkeep == "compact" else 12)
        assert fresh.verify().ok
    idle.close()
    assert tags_of(path)[-1] == 20


def test_an_update_after_another_process_compacted_is_there(tmp_path, backend):
    """The updating process has not refreshed since: its update is seen by all, and outlives further compactions."""
    path = create(tmp_path / "s", backend)
    ids = append_and_close(path, range(10))
    append_and_close(path, [10])
    learner = TrajectoryStore.open(path, "a")
    learner.update(ids, priority=1.0)
    for value in (5.0, 6.0):
        with TrajectoryStore.open(path, "a") as store:
            store.compact()
        learner.update(ids, priority=value)
        assert learner.read_scalars("priority", ids).tolist() == [value] * 10
        learner.refresh()
        with TrajectoryStore.open(path) as fresh:
            for store in (learner, fresh):
                assert store.read_scalars("priority", ids).tolist() == [value] * 10
    learner.close()
    with TrajectoryStore.open(path, "a") as store:
        store.compact()
        assert store.read_scalars("priority", ids).tolist() == [6.0] * 10
    assert tags_of(path) == list(range(11))


def test_an_update_of_a_row_that_a_reader_does_not_know_yet_waits_for_it(tmp_path, backend):
    """Between the look at the catalog and that at the commits, one writer begins a segment, another updates its row."""
    path = create(tmp_path / "s", backend)
    one, two = (TrajectoryStore.open(path, "a") for _ in range(2))
    ids = one.append(rows([0])).tolist()
    two.refresh()
    two.update(ids, priority=1.0)
    with TrajectoryStore.open(path) as reader:
        assert reader.read_scalars("priority").tolist() == [1.0]
        medium = Memmap if backend == "memmap" else ObjectMedium
        late = [TrajectoryStore.open(path, "a")]

        def write_meanwhile(_):
            if late:
                ids.extend(late.pop().append(rows([1])))
                two.refresh()
                two.update(ids[-1:], priority=77.0)

        with at_call(medium.refresh, before=write_meanwhile):
            reader.refresh()
        assert not late
        assert reader.read_scalars("priority").tolist()[0] == 1.0
        reader.refresh()
        assert reader.read_scalars("priority").tolist() == [1.0, 77.0]
        assert reader.read_scalars("priority", ids).tolist() == [1.0, 77.0]
    for store in (one, two):
        store.close()


@pytest.mark.parametrize("durability", ["process", "group"])
def test_a_living_writer_loses_nothing_to_another_process(tmp_path, backend, durability):
    """While another one opens and merges, no row is left out, merged away or noted as never committed."""
    path = create(tmp_path / "s", backend, durability=durability)
    writer = TrajectoryStore.open(path, "a")
    writer.append(rows([0, 1]))
    with TrajectoryStore.open(path, "a") as other:
        assert other.read_scalars("tag").tolist() == [0, 1]
        writer.append(rows([2]))
        other.refresh()
        assert other.read_scalars("tag").tolist() == [0, 1, 2]
        other.compact()
        ids = writer.append(rows([3]))
        writer.update(ids, priority=3.0)
        other.refresh()
        assert other.read_scalars("tag").tolist() == [0, 1, 2, 3]
        assert other.read_scalars("priority").tolist() == [0, 0, 0, 3]
    assert tags_of(path) == [0, 1, 2, 3]
    writer.close()
    assert tags_of(path) == [0, 1, 2, 3]


def killed(children, path, tags):
    """A process appended rows, one commit each, and was killed."""

    def write():
        store = TrajectoryStore.open(path, "a")
        for tag in tags:
            store.append(rows([tag]))
        os.kill(os.getpid(), signal.SIGKILL)

    child = children.fork(write)
    assert child.wait() == -signal.SIGKILL, child.output()


def spoil(path, backend, commit, bits=1):
    """Change the data of one commit of the first segment, on the disk; returns how to put it back."""
    file = path / ("seg-00000000/tag/c/0" if backend == "memmap" else f"seg-00000000/{commit:08d}.zip")
    good = file.read_bytes()
    bad = bytearray(good)
    bad[commit * 8 if backend == "memmap" else 64] ^= bits  # in an object, the first values begin there
    file.write_bytes(bad)
    return lambda: file.write_bytes(good)


def test_a_torn_commit_of_a_killed_writer_is_reported_until_its_owner_accepts_the_loss(tmp_path, backend, children):
    """One commit in the middle is torn: the ones after it count, and nothing but its owner's word makes it a loss."""
    path = create(tmp_path / "s", backend)
    killed(children, path, range(5))
    put_back = spoil(path, backend, 2)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for mode in ("r", "r", "a"):
        with pytest.warns(RuntimeWarning, match="1 row is not returned"):
            store = TrajectoryStore.open(path, mode)
        with store:
            assert store.read_scalars("tag").tolist() == [0, 1, 3, 4]
            assert (len(store), store.watermark) == (4, 5)
            with pytest.raises(CorruptionError, match="cannot be read"):
                store.read([2])
            assert store.verify().damaged_ids.tolist() == [2]
            assert not store.verify().ok
        if mode == "r":
            assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}, "a reader wrote"
    with pytest.warns(RuntimeWarning, match="1 row is not returned"):
        store = TrajectoryStore.open(path, "a")
    with store:
        assert store.accept_losses() == 1
        store.append(rows([5]))
        assert store.read_scalars("tag").tolist() == [0, 1, 3, 4, 5]
        assert (len(store), store.watermark) == (5, 6)
        report = store.verify()
        assert (report.ok, report.damaged_ids.tolist(), len(report.losses)) == (True, [2], 1), str(report)
        store.compact()
    put_back()
    with TrajectoryStore.open(path) as store:
        assert store.read_scalars("tag").tolist() == [0, 1, 2, 3, 4, 5]
        assert not store.verify().losses


@pytest.mark.parametrize("end", ["closed", "killed"])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_damage_costs_what_it_touches(tmp_path, backend, damage, end, children):
    """One commit of fifty, named by verify, never merged away, and back as soon as its file is."""
    path = create(tmp_path / "s", backend)
    if end == "closed":
        with TrajectoryStore.open(path, "a") as store:
            for tag in range(50):
                store.append(rows([tag]))
    else:
        killed(children, path, range(50))
    for tag in range(50, 57):
        append_and_close(path, [tag])
    file = path / ("seg-00000000/tag/c/0" if backend == "memmap" else "seg-00000000/00000003.zip")
    good = file.read_bytes()
    put_back = spoil(path, backend, 3)
    touched = {3}
    if damage == "cut":
        file.write_bytes(good[:40])
        touched = set(range(5, 50)) if backend == "memmap" else {3}
    elif damage == "missing":
        file.unlink()
        touched = set(range(1, 50)) if backend == "memmap" else {3}  # what is missing reads as 0, which row 0 holds
    whole = [tag for tag in range(57) if tag not in touched]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for mode in ("r", "a", "r"):
            with TrajectoryStore.open(path, mode) as store:
                ids, report = store.ids(), store.verify()
                served = ids[~np.isin(ids, report.damaged_ids)]
                assert store.read_scalars("tag", served).tolist() == whole
                assert (report.damaged_ids.tolist(), store.watermark) == (sorted(touched), 57)
                assert report.problems
                if mode == "a":
                    store.compact()
        assert file.parent.exists()
        put_back()
        with TrajectoryStore.open(path) as store:
            assert store.read_scalars("tag").tolist() == list(range(57))
            assert store.verify().ok


def test_a_closed_segment_is_on_the_disk_and_trusted(tmp_path, backend):
    """After a restart nothing of it is read before it is asked for, so opening costs what it did before."""
    path = create(tmp_path / "s", backend)
    append_and_close(path, list(range(9)))
    with at_call(fs.open_fd) as calls, TrajectoryStore.open(path) as store:
        assert len(store) == 9
        opened = [str(call.arguments["path"]) for call in calls]
        assert not [where for where in opened if where.endswith("tag/c/0")]
        assert sum(where.endswith(".zip") for where in opened) <= 2 * 2


@pytest.mark.filterwarnings("ignore:.*cannot be opened:RuntimeWarning")
def test_a_read_that_fails_when_a_killed_writer_is_checked_cuts_nothing_off(tmp_path, backend, monkeypatch, children):
    """Too many files are open when the data is checked: that costs the segment for now, and is noted nowhere."""
    path = create(tmp_path / "s", backend)
    killed(children, path, [0, 1])
    real = os.open

    def full(where, *arguments, **options):
        if str(where).endswith(("tag/c/0", ".zip")):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(where, *arguments, **options)

    with monkeypatch.context() as patches:
        patches.setattr(os, "open", full)
        with suppress(StoreError), TrajectoryStore.open(path, "a") as store:
            assert not len(store)
    assert tags_of(path) == [0, 1]


def test_a_writer_that_was_silent_for_hours_loses_nothing(tmp_path, backend, clock):
    """Where no lock says whether it lives, its segment is ended before it is taken for one that was cut off."""
    path = create(tmp_path / "s", backend)
    writer = TrajectoryStore.open(path, "a")
    writer.append(rows([0, 1]))
    clock(7200)
    reader = TrajectoryStore.open(path)
    clock(0)
    with reader:
        writer.append(rows([2]))
        reader.refresh()
        assert reader.read_scalars("tag").tolist() == [0, 1, 2]
    assert tags_of(path) == [0, 1, 2]
    writer.close()


ALONE = Column("x", "int64", ragged=True)
JOINS = Column("y", "int64", ragged=True, mutable=True, fill=0)


def test_an_open_store_gains_columns(tmp_path, backend):
    """Rows of before read the fill, another writer and a reader go on, and a reader may not add any."""
    store, name = TrajectoryStore.create(tmp_path / "s", [ALONE], backend=backend), Column("r", "float32", fill=-1.0)
    with store, TrajectoryStore.open(tmp_path / "s", "a") as other, TrajectoryStore.open(tmp_path / "s") as reader:
        store.append({"x": [[1]]})
        for _ in range(2):
            store.add_columns([name])
        store.append({"x": [[2]], "r": [0.5]})
        other.append({"x": [[3]]})
        for one in (store, other, reader):
            one.refresh()
            assert one.read_scalars("r").tolist() == [-1.0, 0.5, -1.0]
        with pytest.raises(ReadOnlyError, match="mode 'a'"):
            reader.add_columns([name])
        assert store.verify().ok


def test_no_column_joins_an_axis_whose_lengths_may_change(tmp_path, backend):
    """A column that is alone on its axis may get other lengths later if it is mutable; else another may join it."""
    for mutable, fill in ((False, None), (False, 0), (True, None), (True, 0)):
        path, alone = tmp_path / f"{mutable}{fill}", Column("x", "int64", ragged=True, mutable=mutable, fill=fill)
        with TrajectoryStore.create(path, [alone], backend=backend) as store:
            ids = store.append({"x": [[1, 2], [5]]})
            if mutable:
                store.update(ids[:1], x=[[7, 8, 9]])
                with pytest.raises(SchemaError, match="its only column, 'x', is mutable"):
                    TrajectoryStore.open(path, "a", add_columns=[JOINS])
                continue
            with pytest.raises(BatchError, match=r"column 'x' of .* cannot be updated"):
                store.update(ids[:1], x=[[7, 8, 9]])
            TrajectoryStore.open(path, "a", add_columns=[JOINS]).close()
            store.update(ids[:1], y=[[3, 4]])
            assert [y.tolist() for y in store.read(ids)["y"]] == [[3, 4], [0]]


def test_a_batch_whose_columns_differ_in_length_is_not_appended(tmp_path, backend):
    """The values of a later row would begin where those of the row before should end."""
    with TrajectoryStore.create(tmp_path / "s", [Column("x", "int64", ragged=True), JOINS], backend=backend) as store:
        batch = store.read_batch(store.append({"x": [[1, 2], [3]], "y": [[1, 2], [3]]}))
        batch.values["x"] = np.arange(5)
        with pytest.raises(BatchError, match="column 'x' has 5 values, but its 2 rows need 3"):
            store.append_batch(batch)
        assert len(store) == 2


def test_a_clock_that_is_behind_hides_no_row_and_no_update(tmp_path, backend, clock):
    """Five seconds behind, a full ring: new rows are the newest, and the later of two updates wins."""
    path = create(tmp_path / "s", backend, max_trajectories=10)
    with TrajectoryStore.open(path, "a") as store:
        ids = store.append(rows(range(10)))
        store.update(ids[5:], priority=100.0)
    clock(-5)
    with TrajectoryStore.open(path, "a") as store:
        store.update(ids[5:], priority=200.0)
        new = store.append(rows([10, 11]))
        assert store.ids().tolist() == [*ids[2:].tolist(), *new.tolist()]
        assert store.read_scalars("priority", ids[5:]).tolist() == [200.0] * 5
        store.refresh()
        assert store.ids()[-2:].tolist() == new.tolist()
    assert tags_of(path) == list(range(2, 12))
    with TrajectoryStore.open(path) as fresh:
        assert fresh.read_scalars("priority", ids[5:]).tolist() == [200.0] * 5


def test_rows_of_one_moment_have_one_order_for_all(tmp_path, backend, monkeypatch):
    """A reader that met the row of the later segment first has the ids in the order of one that opens now."""
    path = create(tmp_path / "s", backend)
    with TrajectoryStore.open(path, "a") as one, TrajectoryStore.open(path, "a") as two:
        begun = [*one.append(rows([0])), *two.append(rows([1]))]
        moment, later = time.time_ns() + 10**12, []

        def stopped():  # `one` looks at the clock, and `two` commits right then
            if not later:
                later.append(-1)
                later[:] = two.append(rows([2]))
                reader.refresh()
                assert reader.ids().tolist() == [*begun, *later]
            return moment

        with TrajectoryStore.open(path) as reader:
            monkeypatch.setattr(time, "time_ns", stopped)
            earlier = one.append(rows([3]))
            reader.refresh()
            with TrajectoryStore.open(path) as fresh:
                assert reader.ids().tolist() == fresh.ids().tolist() == [*begun, *earlier, *later]


def test_a_record_is_later_than_the_one_before_it_whatever_the_clock_says(tmp_path, backend, clock):
    """Its writer had not looked since another one, whose clock is two hours ahead, put a record."""
    path = create(tmp_path / "s", backend)
    with TrajectoryStore.open(path, "a") as ahead, TrajectoryStore.open(path, "a") as behind:
        clock(7200)
        ahead.append(rows([0]))
        clock(0)
        behind.append(rows([1]))
    records = [file.read_bytes()[9:] for file in sorted((path / "catalog").glob("*.rec"))]
    times = [json.loads(record)["time_ns"] for record in records]
    assert len(times) >= 3
    assert times == sorted(set(times))


def test_of_two_updates_at_one_time_the_same_wins_after_a_merge(tmp_path, backend, monkeypatch):
    """Two writers that saw nothing of each other, with clocks that stand still."""
    path = create(tmp_path / "s", backend)
    ids = append_and_close(path, range(2))
    stopped = time.time_ns() + 10**12
    monkeypatch.setattr(time, "time_ns", lambda: stopped)
    with TrajectoryStore.open(path, "a") as two:
        one = TrajectoryStore.open(path, "a")
        for store in (one, two):
            store.update(ids[:1], priority=1.0)
        kind = LocalWriter if backend == "memmap" else ObjectWriter

        def commit_before(call):
            if call.number == 1:
                two.update(ids[1:], priority=200.0)

        with at_call(kind.commit, before=commit_before):
            one.update(ids[1:], priority=100.0)
        found = []
        for _ in range(2):
            two.refresh()
            with TrajectoryStore.open(path, "a") as fresh:
                found += [store.read_scalars("priority", ids).tolist() for store in (two, fresh)]
                one.close()
                fresh.compact()  # one's updates are merged, and the other's not, because it lives
                found += [fresh.read_scalars("priority", ids).tolist()]
        assert found == [[1.0, 200.0]] * 6
        with TrajectoryStore.open(path) as fresh:
            assert fresh.verify().ok, str(fresh.verify())


@pytest.mark.parametrize("meanwhile", ["merge", "update"])
def test_an_eviction_takes_no_update_of_a_row_that_stays(tmp_path, backend, meanwhile):
    """Another process merges the rows that were to go, or updates a row that the eviction does not know of."""
    path = create(tmp_path / "s", backend, max_trajectories=4)
    ids = np.concatenate([append_and_close(path, tags) for tags in ([0, 1], [2, 3])])
    other = TrajectoryStore.open(path, "a")
    other.update(ids, priority=5.0)
    if meanwhile == "merge":
        other.close()
    waiting, late = [True], []

    def write_after_the_look(call):
        if call.returned and waiting:
            waiting.clear()
            if meanwhile == "merge":
                with TrajectoryStore.open(path, "a")._look_in() as theirs:
                    assert upkeep._merge(theirs, theirs.row_segments()[:2])
            else:
                late.append(other.append(rows([9])))
                other.update(late[0], priority=7.0)
            other.close()

    with TrajectoryStore.open(path, "a") as store:
        with at_call(upkeep._victims, after=write_after_the_look):
            store.append(rows(range(4, 8)))
        assert not waiting
        if meanwhile == "merge":
            assert store.read_scalars("priority", ids).tolist() == [5.0] * 4
        else:
            store.refresh()
            assert store.read_scalars("priority", late[0]).tolist() == [7.0]
        assert store.verify().ok


def test_updates_of_a_segment_that_cannot_be_read_stay(tmp_path, backend):
    """Whoever puts the damaged segment back finds its later values, too."""
    path = create(tmp_path / "s", backend, max_trajectories=6)
    ids = append_and_close(path, range(2))
    with TrajectoryStore.open(path, "a") as store:
        store.append(rows([2, 3]))
        store.update(ids, priority=5.0)
    copy = "commits/zarr.json" if backend == "memmap" else "zarr.copy"
    headers = {file: file.read_bytes() for file in (path / "seg-00000000" / "zarr.json", path / "seg-00000000" / copy)}
    for header in headers:
        header.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="cannot be opened"):
        store = TrajectoryStore.open(path, "a")
    with store:
        store.compact()
        for first in range(4, 40, 6):
            store.append(rows(range(first, first + 6)))
    for header, whole in headers.items():
        header.write_bytes(whole)
    with TrajectoryStore.open(path) as store:
        assert store.read_scalars("priority", ids).tolist() == [5.0] * 2


def test_who_opens_a_store_sweeps_nothing_away_that_was_just_merged(tmp_path, backend):
    """A process looks while a segment is being merged, and tidies up once the merge is done."""
    path = create(tmp_path / "s", backend)
    for tag in (1, 2):
        append_and_close(path, [tag])
    medium = Memmap if backend == "memmap" else ObjectMedium
    looked, merged, opened = threading.Event(), threading.Event(), []
    late = threading.Thread(target=lambda: opened.append(TrajectoryStore.open(path, "a")))

    def let_another_look(_):
        if not late.ident:
            late.start()
            assert looked.wait(60)

    def lock_later(_):
        if threading.current_thread() is late and not looked.is_set():
            looked.set()
            assert merged.wait(60)

    with (
        at_call(FolderBucket.upkeep_lock, before=lock_later),
        at_call(medium.write_merged, before=let_another_look),
        TrajectoryStore.open(path, "a") as store,
    ):
        store.compact()
        merged.set()
        late.join()
    opened[0].close()
    assert tags_of(path) == [1, 2]


def test_a_writer_that_ends_while_another_process_opens_is_no_damage(tmp_path, backend):
    """The catalog may say how many rows a segment has for good before they were all looked at."""
    path = create(tmp_path / "s", backend)
    writer = TrajectoryStore.open(path, "a")
    writer.append(rows([0]))
    medium = Memmap if backend == "memmap" else ObjectMedium

    def append_after(call):
        if call.number == 1:
            writer.append(rows([1]))
            writer.close()

    with at_call(medium.open_segments, after=append_after), TrajectoryStore.open(path) as store:
        assert set(store.read_scalars("tag").tolist()) <= {0, 1}
    assert tags_of(path) == [0, 1]


def test_a_segment_that_is_merged_away_during_an_update_or_an_opening_is_found_again(tmp_path, backend):
    """The lengths of the rows are read from where they are now; opening reads no column at all."""
    path = create(tmp_path / "s", backend)
    ids = np.array([append_and_close(path, [tag])[0] for tag in (1, 2)])
    other, store = (TrajectoryStore.open(path, "a") for _ in range(2))

    def merge(call):
        if call.number == 1:
            assert other.compact().rows == 2

    with at_call(Catalog.locate, after=merge):
        store.update(ids, ref=[[0.5], [0.5, 0.5]])
    assert [values.tolist() for values in store.read(ids, "ref")["ref"]] == [[0.5], [0.5, 0.5]]
    store.close()
    with at_call(Segment.array) as reads:
        TrajectoryStore.open(path).close()
    assert not reads


def test_a_look_that_fails_half_way_is_made_again_as_a_whole(tmp_path, backend):
    """Of two segments the first is read, and the second has gone, or cannot be read for a moment: nothing is missed."""
    path = create(tmp_path / "s", backend)
    reader, *writers = (TrajectoryStore.open(path, mode) for mode in "raa")
    ids = []

    def write(tag):
        for writer in writers:
            ids.extend(writer.append(rows([tag])))
            writer.update(ids[-1:], priority=float(tag))
            tag += 1

    def check(what):
        assert reader.ids().tolist() == ids, what
        assert reader.read_scalars("priority").tolist() == list(range(1, len(ids) + 1)), what

    gone = SegmentGoneError("it is somewhere else")
    for what, kind, name in [("rows", Segment, "runs"), ("updates", Later, "_read"), ("values", Later, "_values_at")]:
        write(len(ids) + 1)
        reader.refresh()
        with at_call(getattr(kind, name), before=fails(gone, number=2)):
            check(what)
        check(what)
    write(len(ids) + 1)
    look = LocalSegment.refresh if backend == "memmap" else ObjectSegment.take_next
    no_answer = fails(ReadFailedError(5, "no answer", str(path)), number=2)
    with at_call(look, before=no_answer), pytest.raises(ReadFailedError):
        reader.refresh()
    reader.refresh()
    check("commits")


def test_a_clock_that_is_ahead_removes_nothing_that_is_being_made(tmp_path, backend, clock):
    """How old a half-made file is, the file system says."""
    path = create(tmp_path / "s", backend)
    made = [path / ".new-1", path / "catalog" / ".partial-1"]
    made[0].mkdir()
    made[1].touch()
    clock(7200)
    with TrajectoryStore.open(path, "a") as store:
        store.append(rows([0]))
        store.compact()
    assert all(each.exists() for each in made)


def test_updates_take_ids_and_values_of_any_memory_layout(tmp_path, backend):
    """Every second id, every second value, one value for all; text and ragged columns as well as scalars."""
    path = create(tmp_path / "s", backend)
    with TrajectoryStore.open(path, "a") as store:
        ids = store.append(rows(range(10)))
        assert not ids[::2].flags["C_CONTIGUOUS"]
        store.update(ids[::2], priority=np.arange(10.0)[::2])
        store.update(ids[::-2], text=[f"new {i}" for i in range(5)])
        store.update(ids[::3], ref=[np.arange(2 * (i % 4), dtype=np.float32)[::2] for i in range(0, 10, 3)])
        store.update(ids[1::2], priority=-1)
        more = store.append({**rows([10, 11]), "tag": np.arange(10, 14)[::2], "priority": np.arange(4.0)[::2]})
        assert store.read_scalars("tag", more).tolist() == [10, 12]
    with TrajectoryStore.open(path) as store:
        assert store.read_scalars("priority", ids).tolist() == [0, -1, 2, -1, 4, -1, 6, -1, 8, -1]
        texts = store.read(ids, "text")["text"]
        assert texts[::-2] == [f"new {i}" for i in range(5)]
        assert texts[::2] == [f"row {i}" for i in range(0, 10, 2)]
        ref = store.read(ids, "ref")["ref"]
        assert [r.tolist() for r in ref[::3]] == [[2.0 * j for j in range(i % 4)] for i in range(0, 10, 3)]
        assert ref[1].tolist() == [-1.0]


def test_a_snapshot_keeps_the_values_of_then(tmp_path, backend):
    """Reads as of the snapshot give its ids and its values, or say that a compaction has folded them; never others."""
    path = create(tmp_path / "s", backend)
    with TrajectoryStore.open(path, "a") as store:
        ids = store.append(rows(range(10)))
        store.update(ids[:2], text=["first"] * 2)
        snapshot = store.snapshot()
        store.update(ids[:3], text=["second"] * 3, priority=2.0)
        store.append(rows(range(10, 15)))
    append_and_close(path, [15])
    with TrajectoryStore.open(path, "a") as store:
        for compacted in (False, True):
            assert store.ids(snapshot).tolist() == ids.tolist()
            assert store.read(ids[:4], "text")["text"] == ["second"] * 3 + ["row 3"]
            try:
                then = store.as_of(snapshot).read(ids[:4], ["text", "priority"])
            except StoreError:
                assert compacted
            else:
                assert then["text"] == ["first", "first", "row 2", "row 3"]
                assert then["priority"].tolist() == [0.0] * 4
            store.compact()
            store.refresh()


@pytest.mark.timeout(120)
def test_no_reader_mistakes_a_compaction_for_damage(tmp_path, backend):
    """For some seconds one process compacts without pause; reads, updates and `verify` of others never fail."""
    path = create(tmp_path / "s", backend, segment_rows=8)
    ids = append_and_close(path, range(8))
    append_and_close(path, range(8, 16))
    end, counts = time.monotonic() + 4, dict.fromkeys(["compacted", "read", "updated", "verified"], 0)

    def compact():
        tag = 16
        while time.monotonic() < end:
            append_and_close(path, [tag])
            with TrajectoryStore.open(path, "a") as store:
                store.compact()
            tag += 1
            counts["compacted"] += 1

    def read():
        with TrajectoryStore.open(path) as store:
            while time.monotonic() < end:
                known = store.ids()
                found = store.read(known)["tag"]
                assert found.tolist() == list(range(len(known)))
                counts["read"] += 1
                if counts["read"] % 3 == 0:
                    store.refresh()

    def update():
        with TrajectoryStore.open(path, "a") as store:
            while time.monotonic() < end:
                counts["updated"] += 1
                time.sleep(0.001)
                store.update(ids[:4], priority=float(counts["updated"]))
                assert store.read_scalars("priority", ids[:4]).tolist() == [counts["updated"]] * 4

    def verify():
        with TrajectoryStore.open(path) as store:
            while time.monotonic() < end:
                report = store.verify()
                assert report.ok, str(report)
                counts["verified"] += 1

    errors = at_once(compact, read, update, verify)
    assert not errors, errors
    assert min(counts.values()) > 0, counts
    with TrajectoryStore.open(path) as store:
        assert store.read_scalars("priority", ids[:4]).tolist() == [counts["updated"]] * 4


def test_ids_that_were_evicted_are_said_to_be_gone(tmp_path, backend):
    """Reading or updating one names it, and nothing else happens to the others."""
    path = create(tmp_path / "s", backend, max_trajectories=6, segment_rows=3)
    ids = append_and_close(path, range(6))
    more = append_and_close(path, range(6, 12))
    with TrajectoryStore.open(path, "a") as store:
        assert store.ids().tolist() == more.tolist()
        with pytest.raises(MissingRowError, match=str(int(ids[0]))):
            store.update([int(ids[0]), int(more[0])], priority=1.0)
        assert store.read_scalars("priority").tolist() == [0.0] * 6
    assert tags_of(path) == list(range(6, 12))
