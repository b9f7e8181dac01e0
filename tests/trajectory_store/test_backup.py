"""Copies of a store that is being written."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from trajectory_store import Column, CorruptionError, StoreExistsError, TrajectoryStore

COLUMNS = [Column("n", "int64"), Column("tokens", "int32", ragged=True), Column("later", "int64", mutable=True)]
WRITER = """
import sys, time
from trajectory_store import TrajectoryStore
for life in range(1000):
    with TrajectoryStore.open(sys.argv[1], "a") as store:
        for _ in range(20):
            n = len(store)
            ids = store.append({"n": [n, n + 1], "tokens": [[n] * 5, [n + 1] * 3]})
            store.update(ids, later=[n, n + 1])
            print(n + 2, flush=True)
            time.sleep(0.02)
        store.compact()
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_copies_of_a_live_store_are_whole(tmp_path, backend):
    """While a process appends, updates, restarts and merges: every copy verifies and has what was acknowledged."""
    TrajectoryStore.create(tmp_path / "store", COLUMNS, backend=backend).close()
    command = [sys.executable, "-c", WRITER, str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            for number in range(12):
                acknowledged = int(writer.stdout.readline())
                with TrajectoryStore.open(tmp_path / "store") as store:
                    store.copy(tmp_path / f"copy-{number}")
                time.sleep(0.1)
                with TrajectoryStore.open(tmp_path / f"copy-{number}", "a") as copy:
                    assert copy.verify().ok, str(copy.verify())
                    numbers = copy["n"]
                    assert len(numbers) >= acknowledged
                    assert numbers.tolist() == list(range(len(numbers)))
                    assert copy["later"].tolist()[:acknowledged] == list(range(acknowledged))
                    assert [row.tolist() for row in copy["tokens"][:2]] == [[0] * 5, [1] * 3]
                    copy.append({"n": [-1], "tokens": [[]]})
        finally:
            writer.kill()


def test_a_copy_keeps_ids_and_holes(tmp_path):
    """The ids of a ledger are valid in the copy, and unused capacity takes no disk."""
    with TrajectoryStore.create(tmp_path / "store", COLUMNS) as store:
        ids = store.append({"n": np.arange(5), "tokens": [[n] for n in range(5)]})
        store.copy(tmp_path / "copy")
        with TrajectoryStore.open(tmp_path / "copy") as copy:
            assert copy.ids().tolist() == ids.tolist()
        before, after = (
            sum(path.stat().st_blocks for path in (tmp_path / name).rglob("*")) for name in ("store", "copy")
        )
        assert after <= 1.2 * before
        with pytest.raises(StoreExistsError, match="already exists"):
            store.copy(tmp_path / "copy")


def test_a_copy_is_refused_if_the_newest_record_of_the_catalog_cannot_be_read(tmp_path):
    """One damaged object of it costs nothing; with both, the copy could lack rows that only this record names."""
    store = TrajectoryStore.create(tmp_path / "store", COLUMNS)
    store.append({"n": [1], "tokens": [[1]]})
    store.close()
    copy, record = sorted((tmp_path / "store" / "catalog").glob("*.*"))[-3:-1]
    assert (record.suffix, copy.stem) == (".rec", record.stem)
    record.write_bytes(b"x" + record.read_bytes()[1:])
    with pytest.warns(RuntimeWarning, match="does not match its checksum"):
        store = TrajectoryStore.open(tmp_path / "store")
    with store:
        store.copy(tmp_path / "first")
        copy.write_bytes(record.read_bytes())
        with pytest.raises(CorruptionError, match="does not match its checksum"):
            store.copy(tmp_path / "second")
    with TrajectoryStore.open(tmp_path / "first") as found:
        assert found.verify().ok
        assert found["n"].tolist() == [1]
    assert not (tmp_path / "second").exists()
