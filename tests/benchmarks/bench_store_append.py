"""Appending: commits of 64 trajectories against memcpy and LMDB of the same run.

    python tests/benchmarks/bench_store_append.py [--quick] [--check]

A ratio of 1 is one thread's memcpy of the payload. Every commit is checksummed and survives `kill -9`; the
"power" rows wait for the disk at each commit, and the speed of a disk's sync drifts, so compare within one run.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_store_sample import COLUMNS, make_rows, memcpy_rate, schema

from trajectory_store import TrajectoryStore

BATCH = 64
TARGET = 0.07


def batches_of(rng, count):
    """So many batches of 64 trajectories, made beforehand."""
    return [make_rows(BATCH, rng) for _ in range(count)]


def bench_store(path, batches, **options):
    """Seconds per commit."""
    times = []
    with TrajectoryStore.create(path, schema(), **options) as store:
        for batch in batches:
            start = time.perf_counter()
            store.append(batch)
            times.append(time.perf_counter() - start)
    return times


def bench_lmdb(path, batches, sync):
    """One blob per trajectory, one transaction per batch."""
    import lmdb

    times = []
    with lmdb.open(str(path), map_size=1 << 34, writemap=True, sync=sync) as env:
        key = 0
        for batch in batches:
            edges = batch["input_ids"].offsets.tolist()
            start = time.perf_counter()
            with env.begin(write=True) as txn:
                for i in range(BATCH):
                    a, b = edges[i], edges[i + 1]
                    blob = b"".join(batch[name].values[a:b].tobytes() for name in COLUMNS)
                    txn.put(key.to_bytes(8, "big"), blob)
                    key += 1
            times.append(time.perf_counter() - start)
    return times


def main():
    """Print the table; exit 1 where the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="40 commits instead of 300")
    parser.add_argument("--check", action="store_true", help="fail below the target")
    options = parser.parse_args()
    count = 40 if options.quick else 300
    batches = batches_of(np.random.default_rng(0), count)
    payload = statistics.mean(len(b["input_ids"].values) * 13 + BATCH * 4 for b in batches)
    lmdb = importlib.util.find_spec("lmdb") is not None
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        memcpy = memcpy_rate()
        results["process, sparse"] = bench_store(root / "a", batches)
        results["process, preallocated"] = bench_store(
            root / "b", batches, preallocate=True, segment_rows=1 << 14, segment_elements=1 << 23
        )
        if lmdb:
            results["LMDB, no sync"] = bench_lmdb(root / "c", batches, sync=False)
        few = batches[: max(20, count // 6)]
        results["power"] = bench_store(root / "d", few, durability="power")
        results["group (one thread)"] = bench_store(root / "e", few, durability="group")
        if lmdb:
            results["LMDB, synced"] = bench_lmdb(root / "f", few, sync=True)
    print(f"memcpy {memcpy / 1e9:.1f} GB/s; {payload / 1e3:.0f} kB per commit of {BATCH} trajectories")
    print(f"{'store':28}{'p50 ms':>10}{'p99 ms':>10}{'GB/s':>8}{'x memcpy':>10}")
    for name, times in results.items():
        p50, p99 = np.percentile(times, [50, 99])
        print(f"{name:28}{p50 * 1e3:10.3f}{p99 * 1e3:10.2f}{payload / p50 / 1e9:8.2f}{payload / p50 / memcpy:10.4f}")
    ours = payload / statistics.median(results["process, sparse"]) / memcpy
    print(f"target {TARGET} x memcpy, sparse: {'met' if ours >= TARGET else 'missed'} ({ours:.3f})")
    return int(options.check and ours < TARGET)


if __name__ == "__main__":
    raise SystemExit(main())
