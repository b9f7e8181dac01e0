"""Writers killed with SIGKILL at random moments: no acknowledged row is lost, no torn row is visible.

The default run kills a few dozen writers; set `STORE_KILLS=300` for the long one.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from trajectory_store import TrajectoryStore
from trajectory_store.testing import example_schema

STORAGE = Path(__file__).resolve().parents[2] / "storage"
KILLS = int(os.environ.get("STORE_KILLS", "24"))

WRITER = """
import os, sys
import numpy as np
from trajectory_store import RaggedArray, TrajectoryStore
path, writer, ack = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = TrajectoryStore.open(path, "a")
rng = np.random.default_rng()
n = 0
while True:
    count = int(rng.integers(1, 40))
    lengths = rng.integers(0, 400, count)
    keys = [(writer << 40) + (os.getpid() << 16 << 4) + n + i for i in range(count)]
    rows = [np.full(k, key % 50_000, np.int32) for key, k in zip(keys, lengths)]
    data = {
        "input_ids": RaggedArray.from_rows(rows, "int32"),
        "assistant_mask": RaggedArray.from_rows([r % 2 == 0 for r in rows], "bool"),
        "log_probs": RaggedArray.from_rows([r / 7 for r in rows], "float32"),
        "task_reward": [key % 1000 for key in keys],
        "group_id": keys,
        "prompt": [str(key) * 3 for key in keys],
    }
    ids = store.append(data)
    if rng.random() < 0.3:
        store.update(ids, use_count=7, priority=[key % 1000 for key in keys])
        os.write(ack, b"".join(b"%d %d 1\\n" % pair for pair in zip(ids.tolist(), keys)))
    else:
        os.write(ack, b"".join(b"%d %d 0\\n" % pair for pair in zip(ids.tolist(), keys)))
    n += count
"""


def start_writer(path, writer, acks):
    """Start a writer that appends to `path` and writes what was acknowledged to a file of its own.

    A killed process may leave half a line, so no two processes share a file.
    """
    fd = os.open(acks / f"{len(list(acks.iterdir())):06d}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        return subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(writer), str(fd)],
            env={**os.environ, "PYTHONPATH": str(STORAGE), "OMP_NUM_THREADS": "1"},
            pass_fds=[fd],
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(fd)


def acknowledged(acks):
    """Read the rows that writers acknowledged: id, key, updated."""
    words = []
    for file in sorted(acks.iterdir()):
        raw = file.read_bytes()
        words += raw[: raw.rfind(b"\n") + 1].split()
    return np.array(words, dtype=np.int64).reshape(-1, 3)


def written(acks):
    """How many bytes of acknowledgements there are."""
    return sum(file.stat().st_size for file in acks.iterdir())


def check_rows(store, ids):
    """Every row is whole: all its columns come from the same key."""
    rows = store.read(ids)
    keys = rows["group_id"]
    assert rows["prompt"] == [str(k) * 3 for k in keys.tolist()]
    assert (rows["task_reward"] == keys % 1000).all()
    for key, tokens, mask, scores in zip(
        keys, rows["input_ids"], rows["assistant_mask"], rows["log_probs"], strict=True
    ):
        assert (tokens == key % 50_000).all()
        assert len(mask) == len(tokens) == len(scores)
        assert (mask == (tokens % 2 == 0)).all()
        np.testing.assert_array_equal(scores, (tokens / 7).astype(np.float32))
    return keys


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("writers", [1, 2, 4])
def test_killed_writers_lose_nothing(tmp_path, writers):
    """1, 2 and 4 writers at once, killed at random; a live reader sees only whole rows."""
    path, acks = tmp_path / "s", tmp_path / "acks"
    TrajectoryStore.create(path, example_schema(), segment_rows=700).close()
    acks.mkdir()
    reader = TrajectoryStore.open(path)
    rng = random.Random(writers)
    for _ in range(max(1, KILLS // 3 // writers)):
        running = [start_writer(path, w, acks) for w in range(writers)]
        before = written(acks)
        deadline = time.monotonic() + 30
        while written(acks) == before and time.monotonic() < deadline:
            time.sleep(0.005)
        for process in running:
            time.sleep(rng.random() * 0.15)
            process.send_signal(signal.SIGKILL)
        for process in running:
            _, errors = process.communicate()
            assert process.returncode == -signal.SIGKILL, errors.decode()
        seen = len(reader.ids())
        reader.refresh()
        check_rows(reader, reader.ids()[seen:])
    table = acknowledged(acks)
    assert len(table) > 0
    with TrajectoryStore.open(path, "a") as store:
        assert np.array_equal(np.sort(store.ids()), np.sort(reader.ids()))
        assert set(table[:, 0].tolist()) <= set(store.ids().tolist())
        keys = check_rows(store, table[:, 0])
        assert (keys == table[:, 1]).all()
        updated = table[table[:, 2] == 1]
        rows = store.read(updated[:, 0], ["use_count", "priority"])
        assert (rows["use_count"] == 7).all()
        assert (rows["priority"] == updated[:, 1] % 1000).all()
        report = store.verify()
        assert report.ok, report
        assert len(np.unique(store.ids())) == len(store)
        more = store.append(store.read(store.ids()[:1]))
        assert int(more[0]) not in set(reader.ids().tolist())
    reader.close()
