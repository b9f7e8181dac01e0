"""Opening a store of a million trajectories: no step may take time that grows with the rows.

    python tests/benchmarks/bench_store_open.py [--quick] [--check]

Two stores with the same number of segments, one with 64 times the rows of the other, are opened in fresh
processes; their times must be alike. Then: idle refresh, the ids of all rows, a first batch.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "storage"))

from trajectory_store import Column, RaggedArray, Schema, TrajectoryStore

STORAGE = Path(__file__).resolve().parents[2] / "storage"
TARGET_MS = 10.0
SEGMENTS = 16
CHILD = """
import sys, time
sys.path.insert(0, sys.argv[1])
from trajectory_store import TrajectoryStore
start = time.perf_counter()
store = TrajectoryStore.open(sys.argv[2])
opened = time.perf_counter()
count = len(store)
counted = time.perf_counter()
ids = store.ids()
listed = time.perf_counter()
store.read_padded(ids[:: max(1, len(ids) // 64)][:64], ["input_ids"])
read = time.perf_counter()
for _ in range(100):
    store.refresh()
idle = time.perf_counter()
print(count, opened - start, counted - opened, listed - counted, read - listed, (idle - read) / 100)
"""


def fill(path, rows_per_segment):
    """A store of 16 segments in commits of an eighth of a segment."""
    schema = Schema([Column("input_ids", "int32", ragged=True), Column("task_reward", "float32")])
    part = max(1, rows_per_segment // 8)
    lengths = np.full(part, 4)
    data = {
        "input_ids": RaggedArray(np.arange(4 * part, dtype=np.int32), lengths),
        "task_reward": np.zeros(part, np.float32),
    }
    with TrajectoryStore.create(path, schema, segment_rows=8 * part) as store:
        for _ in range(8 * SEGMENTS):
            store.append(data)


def measure(path, rounds):
    """Medians over fresh processes, in seconds."""
    lines = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(STORAGE), str(path)], capture_output=True, text=True, check=True
        )
        lines.append([float(x) for x in done.stdout.split()])
    return [statistics.median(column) for column in zip(*lines, strict=True)]


def main():
    """Print the table; exit 1 where the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="100 thousand rows instead of a million")
    parser.add_argument("--check", action="store_true", help="fail above the target")
    options = parser.parse_args()
    large = 6_400 if options.quick else 64_000
    with tempfile.TemporaryDirectory() as folder:
        rows = {}
        for name, size in (("small", large // 64), ("large", large)):
            start = time.perf_counter()
            fill(Path(folder, name), size)
            print(f"made {name}: {time.perf_counter() - start:.1f} s")
            rows[name] = measure(Path(folder, name), 5 if options.quick else 9)
    print(f"{'trajectories':>14}{'open ms':>10}{'len us':>10}{'ids ms':>10}{'batch ms':>10}{'idle us':>10}")
    for count, opened, counted, listed, read, idle in rows.values():
        print(
            f"{count:14.0f}{opened * 1e3:10.2f}{counted * 1e6:10.0f}{listed * 1e3:10.2f}"
            f"{read * 1e3:10.2f}{idle * 1e6:10.0f}"
        )
    small, big = rows["small"][1], rows["large"][1]
    good = big * 1e3 <= TARGET_MS
    print(f"64 times the rows take {big / small:.2f} times as long to open")
    print(f"target {TARGET_MS} ms: {'met' if good else 'missed'} ({big * 1e3:.2f} ms)")
    return int(options.check and not good)


if __name__ == "__main__":
    raise SystemExit(main())
