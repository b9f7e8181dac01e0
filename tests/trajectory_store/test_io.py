"""Which way of reading a file system gets."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import trajectory_store
from tests.moments import at_call
from trajectory_store import Column, CorruptionError, Schema, TrajectoryStore, columns
from trajectory_store.catalog_log import Journal
from trajectory_store.file_access import PreadBytes, choose, file_system

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /mnt/share rw,relatime shared:5 - nfs4 server:/export rw,vers=4.2
31 22 0:27 / /mnt/share/local rw shared:6 - xfs /dev/vdb rw
33 22 0:29 / /dev/shm rw shared:8 - tmpfs tmpfs rw
32 22 0:28 / /mnt/with\\040space rw shared:7 - fuse.s3fs s3fs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "way"),
    [
        ("/data/store", "ext4", "mmap"),
        ("/mnt/share/a/store", "nfs4", "pread"),
        ("/mnt/shared", "ext4", "mmap"),
        ("/mnt/share/local/store", "xfs", "mmap"),
        ("/mnt/with space/store", "fuse.s3fs", "pread"),
        ("/dev/shm/store", "tmpfs", "pread"),
    ],
)
def test_file_systems_that_are_unsafe_to_map_are_read_by_position(tmp_path, path, kind, way):
    """The longest mount point decides; a name that only begins alike does not."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert file_system(path, mounts) == kind
    assert choose(path, mounts) == way
    assert choose(path, tmp_path / "none") == "mmap"


def test_bytes_on_demand(tmp_path):
    """Slices are bytes; a file cut short is an error, before and while it is open."""
    path = tmp_path / "f"
    path.write_bytes(b"0123456789")
    file = PreadBytes(path, 10)
    assert (file[2:5], file[-3:], len(file)) == (b"234", b"789", 10)
    path.write_bytes(b"0123")
    with pytest.raises(CorruptionError, match="ends at byte 4"):
        file[2:8]
    with pytest.raises(CorruptionError, match="has 4 bytes, but its metadata specifies 10"):
        PreadBytes(path, 10)


def test_a_time_limit_that_ends_a_read_is_raised(tmp_path, monkeypatch):
    """A TimeoutError from outside, raised while the system reads, is not a failed read: nothing reads again."""
    (tmp_path / "f").write_bytes(b"0123456789")
    file, pread = PreadBytes(tmp_path / "f", 10), os.pread

    def interrupted(*args):
        monkeypatch.setattr(os, "pread", pread)  # the alarm of a test's or a user's time limit comes once
        raise TimeoutError("the time limit of a caller")

    monkeypatch.setattr(os, "pread", interrupted)
    with pytest.raises(TimeoutError, match="of a caller"):
        file[2:5]
    assert file[2:5] == b"234"


@pytest.mark.filterwarnings("ignore:.*not returned:RuntimeWarning")
def test_positional_reads_survive_a_file_cut_short(tmp_path):
    """Where a map would end the process with SIGBUS, pread gives an error and goes on."""
    schema = Schema([Column("x", "int64", ragged=True), Column("n", "int64")])
    with TrajectoryStore.create(tmp_path / "s", schema) as store:
        ids = store.append({"x": [list(range(300_000))], "n": [1]})
        others = store.append({"x": [[]], "n": [2]})
    with TrajectoryStore.open(tmp_path / "s", io="pread") as store:
        assert store.read(ids)["x"][0][-1] == 299_999
        with open(tmp_path / "s" / "seg-00000000" / "x" / "c" / "0", "r+b") as f:
            f.truncate(100)
        with pytest.raises(CorruptionError, match="ends at byte"):
            store.read(ids)
        assert store.read(others)["n"].tolist() == [2]


MANY_MAPS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[2])))
from trajectory_store import Column, Schema, TrajectoryStore
schema = Schema([Column(f"c{i}", "int64") for i in range(6)])
TrajectoryStore.create(sys.argv[1], schema, segment_rows=2).close()
store = TrajectoryStore.open(sys.argv[1], "a", io=sys.argv[3])
for i in range(60):
    store.append({f"c{k}": [i, k] for k in range(6)})
assert store.read_scalars("c5").tolist() == [v for i in range(60) for v in (i, 5)]
assert all(len(v) == 120 for v in store.read(store.ids()).values())
open(sys.argv[1] + "/../note", "w").close()
print(store.verify().ok)
"""


@pytest.mark.parametrize(("hard", "io"), [(4096, "mmap"), (192, "mmap"), (192, "pread")])
def test_more_maps_than_open_files_are_allowed(tmp_path, hard, io):
    """Maps hold no descriptors, and small finished files are loaded: many segments are read with few open files."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_MAPS, str(tmp_path / "s"), str(hard), io],
        env={**os.environ, "PYTHONPATH": str(Path(trajectory_store.__file__).resolve().parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the open files of this process")
def test_verify_holds_the_files_of_one_segment(tmp_path):
    """Of segments that are still written, whose files are not loaded, too: 8 writers have 8 of them."""
    schema, held = Schema([Column(f"c{i}", "int64") for i in range(10)]), []
    TrajectoryStore.create(tmp_path / "s", schema).close()
    with contextlib.ExitStack() as stack:
        for i in range(8):
            writer = stack.enter_context(TrajectoryStore.open(tmp_path / "s", "a"))
            writer.append({f"c{k}": [i] for k in range(10)})
        reader = stack.enter_context(TrajectoryStore.open(tmp_path / "s", io="pread"))
        before = len(os.listdir("/proc/self/fd"))
        with at_call(Journal.missing, before=lambda _: held.append(len(os.listdir("/proc/self/fd")))):
            assert reader.verify().ok
    assert held[-1] - before < 3 * 8  # the log and the mark of each


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_adjacent_rows_are_read_ahead_and_scattered_ones_are_not(tmp_path, io):
    """The pattern of the access decides, not what else the process reads; the values are the same."""
    schema = Schema([Column("x", "int64", ragged=True), Column("n", "int64")])
    with TrajectoryStore.create(tmp_path / "s", schema, segment_rows=20_000) as store:
        store.append({"x": [[i] * 3 for i in range(20_000)], "n": range(20_000)})
    with at_call(columns.will_need) as calls, TrajectoryStore.open(tmp_path / "s", io=io) as store:
        ids = store.ids()
        some = ids[np.random.default_rng(0).permutation(20_000)[:64]]
        for _ in range(20):
            assert store.read_padded(some)["n"].tolist() == some.tolist()
        assert not [call for call in calls if call.caller == columns.__name__]
        assert store.read_scalars("n").tolist() == list(range(20_000))
        assert store.read_ragged("x").values.tolist() == np.repeat(np.arange(20_000), 3).tolist()
        asked = [call.arguments["end"] - call.arguments["start"] for call in calls if call.caller == columns.__name__]
        assert asked == ([160_000, 160_000, 480_000] if io == "mmap" else [])
