"""What a store promises beside its rows: syncs, addresses, bounded files, a silent end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trajectory_store
from trajectory_store import Column, Schema, StoreError, TrajectoryStore
from trajectory_store.bucket import PATIENCE

from ._folders import SCHEMA as WIDE
from ._folders import files, rows, session

STORAGE = Path(trajectory_store.__file__).resolve().parents[1]
SCHEMA = Schema([Column("tag", "int64"), Column("x", "int32", ragged=True), Column("text", "str", mutable=True)])
BACKENDS = pytest.mark.parametrize("backend", ["memmap", "zarr"])


def some(tag):
    """One row."""
    return {"tag": [tag], "x": [[tag] * 3], "text": [f"row {tag}"]}


@BACKENDS
@pytest.mark.parametrize("durability", ["process", "power", "group"])
def test_a_power_durable_append_waits_for_the_disk(tmp_path, monkeypatch, backend, durability):
    """At least one sync per append and per update where that was promised, and none where it was not."""
    calls = []
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, real=real, name=name: (calls.append(name), real(fd))[1])
    with TrajectoryStore.create(tmp_path / "s", SCHEMA, backend=backend, durability=durability) as store:
        store.append(some(1))
        for write in (
            lambda: store.append(some(2)),
            lambda: store.update(store.ids(), text=["later"] * 2),
            lambda: store.update(store.ids(), text=["latest"] * 2),
        ):
            calls.clear()
            write()
            assert bool(calls) == (durability != "process"), calls


@BACKENDS
@pytest.mark.parametrize("durability", ["process", "power", "group"])
def test_the_files_say_the_durability_that_was_asked_for(tmp_path, backend, durability):
    """Wherever metadata has the word, it is true."""
    path = tmp_path / "s"
    with TrajectoryStore.create(path, SCHEMA, backend=backend, durability=durability) as store:
        store.append(some(1))
    said = {word for file in files(path) for word in re.findall(rb'"durability": ?"(\w+)"', file.read_bytes())}
    assert said == {durability.encode()}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "url",
    [
        "memory://bucket/run",
        "s3://bucket/run",
        "gs://bucket/run",
        "http://127.0.0.1:9/run",
        "file:///TMP/run",
        "no://x",
    ],
)
def test_a_url_is_never_taken_for_a_folder(tmp_path, monkeypatch, url):
    """It is opened as what it says, or refused; no folder of that name appears here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv(PATIENCE, "0.5")
    (tmp_path / "room").mkdir()
    url = url.replace("/TMP", str(tmp_path / "room"))
    for backend in ("zarr", "memmap"):
        refusal = ""
        try:
            with TrajectoryStore.create(url, SCHEMA, backend=backend) as store:
                ids = store.append(some(5))
            with TrajectoryStore.open(url) as store:
                assert store.read(ids)["text"] == ["row 5"]
        except StoreError as error:
            refusal = str(error)
        assert url in refusal or (backend == "zarr" and not refusal), f"{backend}: {refusal or 'taken for a folder'}"
        with pytest.raises(StoreError, match="elsewhere"):
            TrajectoryStore.open(url + "/elsewhere")
        assert [entry.name for entry in tmp_path.iterdir()] == ["room"]


RESTARTS = 120


@BACKENDS
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_many_restarts_of_a_writer_stay_cheap(tmp_path, backend):
    """Files, descriptors, the time to open and the apparent size do not grow with the restarts; nobody compacts."""
    path = tmp_path / "s"
    TrajectoryStore.create(path, WIDE, backend=backend).close()
    for number in range(RESTARTS):
        session(path, [2 * number, 2 * number + 1])
    with TrajectoryStore.open(path, "a") as store:
        store.append(rows([2 * RESTARTS]))
        time.sleep(1.0)  # the last merge runs in the background
    held = len(os.listdir("/proc/self/fd"))
    begin = time.perf_counter()
    with TrajectoryStore.open(path) as store:
        opened = time.perf_counter() - begin
        tags = store.read_scalars("tag").tolist()
        store.read_padded(store.ids()[::4])
        assert len(os.listdir("/proc/self/fd")) - held <= 100
        assert store.verify().ok
    assert tags == list(range(1, 2 * RESTARTS + 2))
    assert opened < 0.5
    stats = [file.stat() for file in files(path)]
    assert len(stats) <= 3 * RESTARTS
    assert sum(stat.st_size for stat in stats) <= 2 * sum(512 * stat.st_blocks for stat in stats) + 1_000_000


LEFT_OPEN = """
import sys, threading
from trajectory_store import Column, Schema, TrajectoryStore
schema = Schema([Column("tag", "int64"), Column("text", "str"), Column("score", "float64", mutable=True)])
store = TrajectoryStore.create(sys.argv[1], schema, backend=sys.argv[2])
ids = store.append({"tag": [1, 2], "text": ["a", "b"]})
store.update(ids, score=0.5)
reader = TrajectoryStore.open(sys.argv[1])
kept = reader.read(ids)
class Holder:
    def __init__(self): self.cycle, self.store = self, TrajectoryStore.open(sys.argv[1], "a")
holder = Holder()
holder.store.append({"tag": [3], "text": ["e"]})
ending = sys.argv[3]
if ending == "error":
    raise SystemExit(3)
if ending == "removed":
    import shutil
    shutil.rmtree(sys.argv[1])
if ending == "thread":
    kept = threading.local()
    kept.store = holder.store
    import builtins
    builtins.kept_for_ever = [store, reader]
if ending == "fork":
    import os
    if not os.fork():
        sys.exit(0)
    os.wait()
"""


@pytest.mark.parametrize("ending", ["end", "error", "fork", "removed", "thread"])
@BACKENDS
def test_a_process_that_ends_without_closing_says_nothing(tmp_path, backend, ending):
    """No traceback at exit, and everything acknowledged is there."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEFT_OPEN, str(tmp_path / "s"), backend, ending],
        env={"PYTHONPATH": str(STORAGE), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3 if ending == "error" else 0, "", "")
    if ending == "removed":
        return
    with TrajectoryStore.open(tmp_path / "s") as store:
        assert store.read(store.ids())["text"] == ["a", "b", "e"]
        assert store.read_scalars("score").tolist() == [0.5, 0.5, 0.0]
        assert store.verify().ok
