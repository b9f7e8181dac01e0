"""Processes killed while they compact, patch and evict: ids, values and the count of rows stay right."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trajectory_store import Column, Schema, TrajectoryStore

STORAGE = Path(__file__).resolve().parents[2] / "storage"
ROUNDS = max(5, int(os.environ.get("STORE_KILLS", "24")) // 4)
SCHEMA = Schema(
    [
        Column("x", "int64", ragged=True),
        Column("ref", "float32", ragged=True, fill=-1.0),
        Column("key", "int64"),
        Column("score", "float64", fill=0.0),
        Column("uses", "int32", mutable=True),
    ]
)
PROGRAM = """
import os, sys
import numpy as np
from trajectory_store import TrajectoryStore
path, out = sys.argv[1], int(sys.argv[2])
rng = np.random.default_rng()
store = TrajectoryStore.open(path, "a")
key = int.from_bytes(os.urandom(5), "big") << 16
while True:
    for _ in range(int(rng.integers(1, 6))):
        n = int(rng.integers(1, 9))
        keys = list(range(key, key + n))
        ids = store.append({"x": [[k] * (k % 5) for k in keys], "key": keys})
        os.write(out, b"".join(b"add %d %d\\n" % pair for pair in zip(ids.tolist(), keys)))
        key += n
    mine = [int(i) for i in rng.choice(store.ids(), 3)]
    names = store.read(mine, "key")["key"].tolist()
    value = int(rng.integers(1, 1000))
    os.write(out, b"".join(b"try %d %d\\n" % (i, value) for i in mine))
    store.update(mine, score=[value] * 3, ref=[[value] * (k % 5) for k in names])
    store.update(mine, uses=value)
    os.write(out, b"".join(b"set %d %d\\n" % (i, value) for i in mine))
    if rng.random() < 0.5:
        store.compact()
"""


def start(path, log):
    """Start one process on the store; each notes what was acknowledged in a file of its own."""
    fd = os.open(log / f"{len(list(log.iterdir())):06d}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path), str(fd)],
            env={**os.environ, "PYTHONPATH": str(STORAGE), "OMP_NUM_THREADS": "1"},
            pass_fds=[fd],
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(fd)


def history(log):
    """What was acknowledged: key per id, and per id the values that it may have."""
    keys, values = {}, {}
    lines = []
    for file in sorted(log.iterdir()):
        raw = file.read_bytes()
        lines += raw[: raw.rfind(b"\n") + 1].splitlines()
    for line in lines:
        what, row, value = line.split()
        if what == b"add":
            keys[int(row)] = int(value)
        elif what == b"try":
            values.setdefault(int(row), {0}).add(int(value))
        else:
            values[int(row)] = {int(value)}
    return keys, values


@pytest.mark.crash
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("limit", [None, 60])
def test_killed_while_compacting_patching_and_evicting(tmp_path, limit):
    """One process at a time, killed at random; the next one and a fresh reader find everything right."""
    path, log = tmp_path / "s", tmp_path / "log"
    TrajectoryStore.create(path, SCHEMA, segment_rows=8, max_trajectories=limit).close()
    log.mkdir()
    rng = random.Random(7)
    reader = TrajectoryStore.open(path)
    for _ in range(ROUNDS):
        process = start(path, log)
        newest, deadline = max(log.iterdir()), time.monotonic() + 30
        while newest.stat().st_size == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.4)
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors.decode()
        keys, values = history(log)
        reader.refresh()
        with TrajectoryStore.open(path) as fresh:
            for store in (reader, fresh):
                check(store, keys, values, limit)
    with TrajectoryStore.open(path, "a") as store:
        check(store, *history(log), limit)
        store.compact()
        check(store, *history(log), limit)
        assert store.verify().ok, str(store.verify())
        assert not [p.name for p in path.iterdir() if p.name.startswith(".old")]
    reader.close()


def check(store, keys, values, limit):
    """Every acknowledged row is there once, in order, with one of the values it may have."""
    ids = store.ids().tolist()
    assert len(set(ids)) == len(ids) == len(store)
    wanted = list(keys)
    present = set(ids)
    if limit is None:
        assert set(wanted) <= present
    assert [i for i in ids if i in keys] == [i for i in wanted if i in present]
    rows = store.read(ids)
    for i, row in enumerate(ids):
        key, score = int(rows["key"][i]), rows["score"][i]
        assert keys.get(row, key) == key
        assert rows["x"][i].tolist() == [key] * (key % 5)
        allowed = values.get(row, {0})
        assert score in allowed, (row, score, allowed)
        assert rows["ref"][i].tolist() == [score or -1.0] * (key % 5)
        if len(allowed) == 1:
            assert rows["uses"][i] == next(iter(allowed))
    if limit is not None:
        assert len(ids) <= limit
        assert len(wanted) <= store.watermark <= len(wanted) + 8 * ROUNDS
