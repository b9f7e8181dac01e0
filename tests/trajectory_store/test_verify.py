"""A flipped bit anywhere is found and named."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from tests.damage import flip
from trajectory_store import (
    Column,
    CorruptionError,
    FormatVersionError,
    NotAStoreError,
    Schema,
    TrajectoryStore,
)

from .contract import example_rows, example_schema


@pytest.fixture
def store_path(tmp_path):
    """A closed store of two segments and six commits."""
    path = tmp_path / "s"
    with TrajectoryStore.create(path, example_schema(), segment_rows=24) as store:
        for i in range(6):
            store.append(example_rows(8, seed=i))
    return path


def used_bytes(path, segment, name):
    """How many bytes of an array the rows of a segment use."""
    with TrajectoryStore.open(path) as store:
        reader = store._catalog.segments[segment]
        spec = reader.specs[name]
        if name in reader.schema and reader.schema[name].axis is not None:
            return reader.elements()[reader.schema[name].axis] * spec.dtype.itemsize
        extra = 1 if name.endswith(".offsets") else 0
        return (reader.rows + extra) * spec.dtype.itemsize


def test_an_intact_store_is_ok(store_path):
    """All checksums hold and the report says what was checked."""
    with TrajectoryStore.open(store_path) as store:
        report = store.verify()
    assert report.ok
    assert report
    assert (report.rows, report.segments) == (48, 2)
    assert "48 trajectories" in str(report)


def test_a_flipped_bit_in_any_column_is_found(store_path):
    """Each array of a segment, at three places, reports the damaged commit's ids."""
    rng = np.random.default_rng(0)
    with TrajectoryStore.open(store_path) as store:
        names = list(store._catalog.segments[0].specs)
        ids = store.ids()
    for name in names:
        size = used_bytes(store_path, 0, name)
        for byte in {0, size - 1, int(rng.integers(size))}:
            if name.endswith(".offsets") and byte < 8:
                continue
            file = store_path / "seg-00000000" / name / "c" / "0"
            bit = int(rng.integers(8))
            flip(file, byte, bit)
            with TrajectoryStore.open(store_path) as store:
                report = store.verify()
            assert not report.ok, (name, byte)
            assert "seg-00000000" in str(report)
            assert set(report.damaged_ids) <= set(ids[:24])
            assert 1 <= len(report.damaged_ids) <= 24
            flip(file, byte, bit)


def test_a_flipped_bit_in_any_record_is_found(store_path):
    """Every byte of the records, the last and the end record too; later commits stay readable."""
    file = store_path / "seg-00000001" / "commits" / "c" / "0" / "0"
    with TrajectoryStore.open(store_path) as store:
        count = store._catalog.segments[1].records
    for byte in range(0, count * 64, 13):
        flip(file, byte, byte % 8)
        with TrajectoryStore.open(store_path) as store:
            report = store.verify()
        assert not report.ok, byte
        assert f"record {byte // 64}" in str(report)
        flip(file, byte, byte % 8)


def test_a_damaged_record_in_the_middle_costs_its_own_rows(tmp_path):
    """The commits around it stay, reading its rows is an error, and verify names them."""
    path = tmp_path / "s"
    log = path / "seg-00000000" / "commits" / "c" / "0" / "0"
    with TrajectoryStore.create(path, Schema([Column("n", "int64")])) as store:
        ids = np.concatenate([store.append({"n": [2 * i, 2 * i + 1]}) for i in range(8)])
    for bad in range(8):
        mine = ids[2 * bad : 2 * bad + 2]
        for byte in (1, 5, 9, 24, 28, 41):
            flip(log, 64 * bad + byte)
            with TrajectoryStore.open(path) as store:
                assert (len(store), store.watermark) == (14, 16)
                with pytest.warns(RuntimeWarning, match="seg-00000000: 2 rows are not returned"):
                    assert store.ids().tolist() == [*ids[: 2 * bad], *ids[2 * bad + 2 :]]
                assert store.read_scalars("n").tolist() == [n for n in range(16) if n // 2 != bad]
                with pytest.raises(CorruptionError, match=f"commit {bad} is damaged"):
                    store.read(mine)
                assert store.holds(ids).tolist() == [n // 2 != bad for n in range(16)]
                report = store.verify()
                assert report.damaged_ids.tolist() == mine.tolist()
                assert f"record {bad} is damaged" in str(report)
            flip(log, 64 * bad + byte)
    with TrajectoryStore.open(path) as store:
        assert store.read_scalars("n").tolist() == list(range(16))


def test_a_damaged_last_record_is_reported(tmp_path):
    """Where nothing follows, the rows of the damaged record are not served, and verify says so."""
    path = tmp_path / "s"
    store = TrajectoryStore.create(path, Schema([Column("n", "int64")]))
    for i in range(4):
        store.append({"n": [i]})
    copy = shutil.copytree(path, tmp_path / "copy")
    store.close()
    flip(copy / "seg-00000000" / "commits" / "c" / "0" / "0", 64 * 3 + 30)
    with pytest.warns(RuntimeWarning, match="1 acknowledged commit from number 3 on is missing"):
        store = TrajectoryStore.open(copy)
    with store:
        assert store.read_scalars("n").tolist() == [0, 1, 2]
        assert "record 3 is damaged" in str(store.verify())


def test_damaged_metadata_is_found(store_path):
    """A changed zarr.json of a column, a segment or the commits is a problem."""
    for name in ("input_ids/zarr.json", "commits/zarr.json", "prompt.offsets/zarr.json"):
        flip(store_path / "seg-00000000" / name, 40)
        with TrajectoryStore.open(store_path) as store:
            assert name in str(store.verify())
        flip(store_path / "seg-00000000" / name, 40)
    with TrajectoryStore.open(store_path) as store:
        assert store.verify().ok
    meta = store_path / "seg-00000001" / "zarr.json"
    doc = json.loads(meta.read_text())
    doc["attributes"]["writer"] = "somebody else"
    meta.write_text(json.dumps(doc))
    with TrajectoryStore.open(store_path) as store:
        assert "zarr.json is damaged" in str(store.verify())


def test_an_unreadable_segment_leaves_the_others(store_path):
    """Opening warns, names the segment, and serves the rest; verify lists it. One copy of its metadata is enough."""
    (store_path / "seg-00000000" / "zarr.json").write_text("{")
    with TrajectoryStore.open(store_path) as store:
        assert len(store.ids()) == 48
        assert "seg-00000000: zarr.json is damaged" in str(store.verify())
    (store_path / "seg-00000000" / "commits/zarr.json").unlink()
    with pytest.warns(RuntimeWarning, match="seg-00000000"):
        store = TrajectoryStore.open(store_path)
    assert len(store) == 24
    assert "seg-00000000" in str(store.verify())
    store.close()


def test_other_folders_and_versions_are_named(tmp_path, store_path):
    """A folder of something else, a file, and versions on both sides of ours."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    with pytest.raises(NotAStoreError, match=r"zarr\.json"):
        TrajectoryStore.open(tmp_path / "other")
    (tmp_path / "other" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    with pytest.raises(NotAStoreError):
        TrajectoryStore.open(tmp_path / "other")
    with pytest.raises(NotAStoreError):
        TrajectoryStore.open(store_path / "seg-00000000")
    for version, advice in ((7, "Install a newer release"), (4, "create the store again")):
        for meta in (store_path / "zarr.json", store_path / "catalog" / "zarr.json"):
            doc = json.loads(meta.read_text())
            doc["attributes"]["version"] = version
            meta.write_text(json.dumps(doc))
        with pytest.raises(FormatVersionError, match=advice):
            TrajectoryStore.open(store_path)


def test_a_record_left_far_behind_is_no_gap(tmp_path):
    """A process that slept may put a record whose number was used and removed; one that is missing is named."""
    path = tmp_path / "s"
    TrajectoryStore.create(path, example_schema()).close()
    with TrajectoryStore.open(path, "a") as store:
        slept = path / "catalog" / "000000000003.rec"
        for _ in range(180):
            store._catalog.journal.change(lambda state: state)
            if store._catalog.journal.state.number == 3:
                shutil.copy(slept, tmp_path)
        assert not slept.exists()
        shutil.copy(tmp_path / slept.name, slept)
        assert store.verify().ok, store.verify()
        records = sorted((path / "catalog").glob("*.rec"))
        records[-9].unlink()
        assert f"{records[-9].name} is missing" in str(store.verify())


@pytest.mark.parametrize(("how", "named"), [("flipped", [7]), ("missing", [])])
def test_the_row_of_a_damaged_update_is_named_where_its_object_still_says_which(tmp_path, how, named):
    """Five updates of rows 5 to 9, the third damaged: never a row that it had nothing to do with."""
    with TrajectoryStore.create(
        tmp_path / "s", [Column("n", "int64"), Column("later", "int64", mutable=True)], backend="zarr"
    ) as store:
        ids = store.append({"n": np.arange(10)})
        for place in range(5, 10):
            store.update(ids[place : place + 1], later=[place])
    file = tmp_path / "s" / "seg-00000001" / "00000002.zip"
    if how == "missing":
        file.unlink()
        with pytest.warns(RuntimeWarning, match="is missing"):
            store = TrajectoryStore.open(tmp_path / "s")
    else:
        flip(file, 70)
        store = TrajectoryStore.open(tmp_path / "s")
    with store:
        report = store.verify()
    assert any("seg-00000001/00000002.zip" in problem for problem in report.problems)
    assert report.damaged_ids.tolist() == [ids[row] for row in named]
