"""Records of the catalog that are lost, and damaged arrays: nothing is removed, hidden, or taken for a loss."""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trajectory_store import Column, CorruptionError, Schema, TrajectoryStore
from trajectory_store.catalog_log import Entry, State
from trajectory_store.rebuild import Unnamed, is_superfluous, rebuild

SCHEMA = Schema([Column("tag", "int64"), Column("x", "int32", ragged=True), Column("later", "int64", mutable=True)])
BACKENDS = pytest.mark.parametrize("backend", ["memmap", "zarr"])
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:trajectory_store")


def make(path: Path, backend: str, limit: int | None = None) -> None:
    """Four sessions of 25 rows, merged into one segment."""
    TrajectoryStore.create(path, SCHEMA, backend=backend, max_trajectories=limit).close()
    for k in range(4):
        with TrajectoryStore.open(path, "a") as store:
            store.update(store.append({"tag": [k] * 25, "x": [[k] * 3] * 25})[:1], later=9)
    with TrajectoryStore.open(path, "a") as store:
        store.compact()


def tags(path: Path, mode: str = "r") -> list[int]:
    """What a reader, or a writer, sees."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with TrajectoryStore.open(path, mode) as store:
            return store.read_scalars("tag").tolist()


@BACKENDS
@pytest.mark.parametrize("which", ["newest", "all"])
@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_a_finished_merge_whose_record_is_lost_is_found(tmp_path, backend, which, how):
    """A reader serves it, a writer names it again and removes nothing, and the files put back change nothing."""
    path, wanted = tmp_path / "s", [k for k in range(4) for _ in range(25)]
    make(path, backend)
    every = sorted((path / "catalog").glob("[0-9]*"))
    lost = {file: file.read_bytes() for file in every if which == "all" or file.stem == every[-1].stem}
    for file, raw in lost.items():
        if how == "missing":
            file.unlink()
        else:
            file.write_bytes(raw[:40] + bytes([raw[40] ^ 1]) + raw[41:])
    segments = sorted(os.listdir(path))
    assert tags(path) == wanted
    assert tags(path, "a") == wanted
    assert sorted(os.listdir(path)) == segments
    with TrajectoryStore.open(path, "a") as store:
        store.append({"tag": [7], "x": [[7]]})
        store.compact()
    for file, raw in lost.items():
        file.write_bytes(raw)
    with TrajectoryStore.open(path) as store:
        assert store.read_scalars("tag").tolist() == [*wanted, 7]
        assert store.read_scalars("later").tolist() == [9 if i % 25 == 0 and i < 100 else 0 for i in range(101)]


def state_of(*entries: Entry, gone: tuple[tuple[int, int], ...] = (), following: int = 9) -> State:
    """A record of the catalog."""
    return State(5, "n", "p", "s", 1, following, SCHEMA, entries=entries, gone=gone)


def unnamed(ordinal: int, *sources: int, whole: bool = True, catalog: int = 0) -> Unnamed:
    """A segment that is there."""
    entry = Entry(ordinal, "rows", 100 + ordinal, bool(sources))
    return Unnamed(entry=entry, schema=SCHEMA, sources=sources, is_complete=whole and bool(sources), catalog=catalog)


def test_a_folder_that_was_copied_under_another_number_counts_for_nothing():
    """Its salt is that of the segment that it was copied from, named by the catalog or not."""
    state = state_of(Entry(0, "rows", 1))
    named, other = unnamed(99_999_999), unnamed(9)
    copy = replace(named, entry=replace(named.entry, salt=1))
    assert rebuild(state, [copy], set()) == state
    again = replace(named, entry=replace(named.entry, salt=other.entry.salt))
    assert [entry.ordinal for entry in rebuild(state, [again, other], set()).entries] == [0, 9]


def test_evicted_rows_do_not_come_back():
    """Neither as the segment itself, nor as a merge that holds some of them; and both may be removed.

    That the first commit refers to a later record changes nothing: it may be of a copy of the store that went on.
    """
    state = state_of(Entry(2, "rows", 3), gone=((0, 1),))
    left = [unnamed(0), unnamed(1, catalog=6), unnamed(5, 0, 1), unnamed(6, 1, 2)]
    assert rebuild(state, left, {2}, lambda _: True) == state
    assert [is_superfluous(state, one, {2}) for one in left] == [True, True, True, True]
    assert [is_superfluous(state, one, set()) for one in left] == [True, True, True, False]


def test_a_merge_counts_in_place_of_its_sources_only_if_it_is_whole_and_needed_or_sound():
    """A merge that was not finished, or that another one has overtaken, does not count; nor does it cost anything."""
    state = state_of(Entry(0, "rows", 1), Entry(1, "rows", 2), Entry(2, "rows", 3))
    merge = unnamed(5, 0, 1)
    found = rebuild(state, [merge], {0})
    assert [(e.ordinal, e.sources) for e in found.entries] == [(2, [2]), (5, [0, 1])]
    assert rebuild(state, [merge], set(), lambda _: True) == found
    assert rebuild(state, [merge], set()) == state
    assert rebuild(state, [unnamed(5, 0, 1, whole=False)], {0}, lambda _: True) == state
    newer = state_of(Entry(2, "rows", 3), Entry(6, "rows", 4, merged=True, owners=((0, 1),)))
    assert rebuild(newer, [merge], set(), lambda _: True) == newer
    assert is_superfluous(newer, merge, {2, 6})
    assert not is_superfluous(newer, merge, {2})
    assert not is_superfluous(state, unnamed(9, 0, 1), {0, 1, 2})  # of a later claim, and perhaps named by now


def test_what_a_missing_merge_was_made_of_counts_as_far_as_it_is_there():
    """The merged segment keeps the others, and what it had is named only once."""
    state = state_of(Entry(6, "rows", 4, merged=True, owners=((0, 2),)))
    found = rebuild(state, [unnamed(0), unnamed(1)], {6})
    assert [(e.ordinal, e.sources) for e in found.entries] == [(0, [0]), (1, [1]), (6, [2])]
    assert [e.ordinal for e in rebuild(state, [unnamed(0), unnamed(5, 1, 2)], {6}).entries] == [0, 5]


def test_the_segment_of_a_record_that_is_lost_counts():
    """One with commits and an ordinal that no known record can have known."""
    assert [e.ordinal for e in rebuild(state_of(), [unnamed(9), unnamed(3)], set()).entries] == [9]
    assert [e.ordinal for e in rebuild(state_of(), [unnamed(3, catalog=6)], set()).entries] == [3]


@BACKENDS
@pytest.mark.parametrize("array", ["row_time", "tag", "tokens.offsets", "x"])
@pytest.mark.parametrize("how", ["flipped", "missing", "cut"])
def test_a_damaged_array_costs_the_rows_that_it_holds(tmp_path, backend, array, how):
    """The rows of other segments are served by every call, and damage is named once; put back, all rows are there."""
    path = tmp_path / "s"
    make(path, backend)
    with TrajectoryStore.open(path, "a") as store:
        good = store.append({"tag": [50] * 10, "x": [[5]] * 10})
    file = min(path.glob(f"seg-*-merged/{array}/c/0"))
    raw = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(raw[:5] + bytes([raw[5] ^ 64]) + raw[6:] if how == "flipped" else raw[: len(raw) // 2])
    with warnings.catch_warnings(record=True) as named:
        warnings.simplefilter("always")
        with TrajectoryStore.open(path) as store:
            for _ in range(2):
                assert store.read(good)["tag"].tolist() == [50] * 10
                assert store.where("tag == 50").tolist() == good.tolist()
                assert [row["tag"] for row in store][-10:] == [50] * 10
                assert store["tag"][-10:].tolist() == [50] * 10
                assert len(store["x"]) in (10, 109, 110)
                assert set(good.tolist()) <= set(store.ids().tolist())
            assert not store.verify().ok
            file.write_bytes(raw)
            store.refresh()
            assert len(store.ids()) == 110
            assert (
                store.read(store.ids(), checked=True)["tag"].tolist()
                == [k for k in range(4) for _ in range(25)] + [50] * 10
            )
    assert len(named) == len({str(one.message) for one in named})


@BACKENDS
@pytest.mark.parametrize("array", ["row_time", "row_id", "later", "target"])
@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_a_damaged_array_of_updates_costs_later_values_only(tmp_path, backend, array, how):
    """Other columns are read, and so are rows without such a value; read checked, those with one are refused."""
    path = tmp_path / "s"
    make(path, backend)
    segment = next(path.glob("seg-*-merged/target")).parent
    file = segment / array / "c/0"
    raw = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(raw[:5] + bytes([raw[5] ^ 64]) + raw[6:])
    with TrajectoryStore.open(path) as store:
        ids = store.ids()
        assert store.read(ids, ["tag", "x"], checked=True)["tag"].tolist() == [k for k in range(4) for _ in range(25)]
        later, others = ids[::25], np.setdiff1d(ids, ids[::25])
        found = store.read(others, checked=array != "target")
        assert found["tag"].tolist() == [k for k in range(4) for _ in range(24)]
        if array != "target":  # of which it is not known whose values they were
            assert store.read(others, checked=True)["later"].tolist() == [0] * len(others)
        for row in later:
            with pytest.raises(CorruptionError, match=segment.name):
                store.read([row], ["later"], checked=True)
        file.write_bytes(raw)
        store.refresh()
        assert store.read(ids, checked=True)["later"].tolist() == [9, *[0] * 24] * 4


@BACKENDS
def test_checked_reads_know_of_updates_that_cannot_be_opened(tmp_path, backend):
    """They may be for any row, so no later value is taken for the newest; one of two copies of metadata is enough."""
    for name in ("s", "other"):
        make(tmp_path / name, backend)
    segment = next((tmp_path / "s").glob("seg-*-merged/target")).parent
    file = segment / "zarr.json"
    copy = next(path for path in (segment / "commits/zarr.json", segment / "zarr.copy") if path.exists())
    kept = {path: path.read_bytes() for path in (file, copy)}
    shutil.copyfile(tmp_path / "other" / file.relative_to(tmp_path / "s"), file)
    with TrajectoryStore.open(tmp_path / "s") as store:
        assert store.read(store.ids()[:1], ["later"], checked=True)["later"].tolist() == [9]
        assert not store.verify().ok
    for path in kept:
        path.write_bytes(b"?")
    with TrajectoryStore.open(tmp_path / "s") as store:
        ids = store.ids()
        assert store.read(ids, ["tag"], checked=True)["tag"].tolist() == [k for k in range(4) for _ in range(25)]
        with pytest.raises(CorruptionError, match=f"{segment.name}, which cannot be opened"):
            store.read(ids[1:2], ["later"], checked=True)
        for path, raw in kept.items():
            path.write_bytes(raw)
        store.refresh()
        assert store.read(ids, checked=True)["later"].tolist() == [9, *[0] * 24] * 4


@BACKENDS
def test_the_last_commits_of_a_killed_writer_are_no_loss_by_a_guess(tmp_path, backend):
    """Their records are damaged: a writer that opens does not end the segment in their place."""
    path = tmp_path / "s"
    TrajectoryStore.create(path, SCHEMA, backend=backend).close()
    pid = os.fork()
    if not pid:
        store = TrajectoryStore.open(path, "a")
        ids = np.concatenate([store.append({"tag": [k], "x": [[k]]}) for k in range(3)])
        for k in range(3):
            store.update(ids, later=k + 1)
        os._exit(0)
    os.waitpid(pid, 0)
    kept = {}
    for segment in path.glob("seg-*"):
        file = segment / ("commits/c/0/0" if backend == "memmap" else "00000002.zip")
        at = 2 * 64 + 40 if backend == "memmap" else 64
        raw = kept[file] = file.read_bytes()
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    for mode in ("r", "a", "a", "r"):
        with TrajectoryStore.open(path, mode) as store:
            if mode == "a":
                store.compact()
            assert store.ids().tolist() == [0, 1]
            report = store.verify()
            assert not report.ok
            assert len({segment.name for segment in path.glob("seg-*") if segment.name in str(report)}) == 2, report
            with pytest.raises(CorruptionError, match="seg-"):
                store.read([0], ["later"], checked=True)
    for file, raw in kept.items():
        file.write_bytes(raw)
    with TrajectoryStore.open(path) as store:
        assert store.verify().ok
        assert store.read(store.ids(), checked=True)["later"].tolist() == [3, 3, 3]
    for file, raw in kept.items():
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    with TrajectoryStore.open(path, "a") as store:
        assert store.accept_losses() == 2
        assert store.verify().ok
        assert store.ids().tolist() == [0, 1]
        assert store.read(store.ids(), ["later"], checked=True)["later"].tolist() == [2, 2]


@BACKENDS
def test_a_closed_segment_that_was_rolled_back_is_named(tmp_path, backend):
    """The catalog knows how many rows it had."""
    path = tmp_path / "s"
    with TrajectoryStore.create(path, SCHEMA, backend=backend) as store:
        store.append({"tag": [1], "x": [[1]]})
        shutil.copytree(path / "seg-00000000", tmp_path / "older")
        store.append({"tag": [2], "x": [[2]]})
    shutil.rmtree(path / "seg-00000000")
    shutil.copytree(tmp_path / "older", path / "seg-00000000")
    for mode in ("r", "a", "r"):
        assert tags(path, mode) == [1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with TrajectoryStore.open(path) as store:
                assert not store.verify().ok


def test_the_column_of_another_store_under_closed_rows_is_named_by_a_checked_read(tmp_path):
    """Its values would be taken for those of the rows."""
    for name, tag in (("s", 1), ("other", 2)):
        with TrajectoryStore.create(tmp_path / name, SCHEMA) as store:
            ids = store.append({"tag": [tag] * 5, "x": [[tag]] * 5})
    shutil.copyfile(tmp_path / "other/seg-00000000/tag/c/0", tmp_path / "s/seg-00000000/tag/c/0")
    with TrajectoryStore.open(tmp_path / "s") as store, pytest.raises(CorruptionError, match="seg-00000000"):
        store.read(np.asarray(ids), ["tag"], checked=True)


def test_the_commit_of_another_store_is_never_read(tmp_path):
    """Within a block of commits that the last of them records, too; and its targets are not those of an update."""
    stores = [tmp_path / "s", tmp_path / "other"]
    for at, path in enumerate(stores):
        TrajectoryStore.create(path, SCHEMA, backend="zarr").close()
        with TrajectoryStore.open(path, "a") as store:
            ids = np.concatenate([store.append({"tag": [k + 100 * at], "x": [[k]]}) for k in range(70)])
            for k in range(2):
                store.update(ids[10 * at :][:2], later=k + 1)
    files = [f"{name}/0000000{seq}.zip" for name, seq in (("seg-00000000", 5), ("seg-00000002", 1))]
    for file in files:
        shutil.copyfile(stores[1] / file, stores[0] / file)
    with TrajectoryStore.open(stores[0]) as store:
        with pytest.raises(CorruptionError, match="a different commit"):
            store.read([ids[5]], ["tag"])
        for checked in (False, True):
            assert store.read(ids[20:30], ["tag"], checked=checked)["tag"].tolist() == list(range(20, 30))
        with pytest.raises(CorruptionError, match="a different commit"):
            store.read([ids[0]], ["later"], checked=True)
        assert len(store.ids()) == 69


@BACKENDS
def test_one_copy_of_the_metadata_is_enough(tmp_path, backend):
    """The root is damaged or missing: readers and writers go on, and `verify` names it."""
    path = tmp_path / "s"
    make(path, backend)
    raw = (path / "zarr.json").read_bytes()
    (path / "zarr.json").write_bytes(raw[:100] + b"?" + raw[101:])
    assert len(tags(path, "a")) == 100
    with TrajectoryStore.open(path) as store:
        assert "zarr.json is damaged or missing" in str(store.verify())
    TrajectoryStore.create(tmp_path / "other", SCHEMA, backend=backend).close()
    shutil.copyfile(tmp_path / "other/zarr.json", path / "zarr.json")
    assert len(tags(path, "a")) == 100
    (path / "zarr.json").unlink()
    assert len(tags(path)) == 100
    assert len(tags(path, "a")) == 100
    assert (path / "zarr.json").read_bytes() == raw
