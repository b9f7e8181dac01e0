"""The zarr backend: requests and bytes of a commit, opening a folder, and how fast columns come back.

    python tests/benchmarks/bench_store_zarr.py [--quick]

Requests are counted by a wrapper around a zarr store in memory: those that overlap in time are one round trip. The
bytes put (values, metadata and commit object) over the payload are the write amplification, without compression and
with it. Opening is measured in fresh processes that have used the library once on another small store, so imports do
not count; wall and processor time, the best of the rounds, as other work only adds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _stores import (
    BATCH,
    BYTES_PER_TOKEN,
    TOKEN_COLUMNS,
    Table,
    child,
    disk_bytes,
    fill,
    have_pages,
    lengths_of,
    rows_of,
    token_schema,
)
from zarr.storage import MemoryStore, WrapperStore

from trajectory_store import TrajectoryStore

ROUND_TRIPS, AMPLIFICATION = 2, 1.05
OPEN_MS, BATCH_MS = 10.0, 50.0


class Counting(WrapperStore[Any]):
    """Counts requests, round trips and bytes put; a request may take a while."""

    delay = 0.001

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.running = self.trips = self.gets = self.puts = self.put_bytes = 0

    def clear(self) -> None:
        """Count from 0."""
        self.trips = self.gets = self.puts = self.put_bytes = 0

    async def _wait(self) -> None:
        self.trips += self.running == 0
        self.running += 1
        await asyncio.sleep(self.delay)
        self.running -= 1

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Get and count."""
        self.gets += 1
        await self._wait()
        return await self._store.get(key, prototype, byte_range)

    async def set(self, key: str, value: Any) -> None:
        """Put and count."""
        self.puts += 1
        self.put_bytes += len(value)
        await self._wait()
        await self._store.set(key, value)

    async def set_if_not_exists(self, key: str, value: Any) -> None:
        """Put and count."""
        self.puts += 1
        self.put_bytes += len(value)
        await self._wait()
        await self._store.set_if_not_exists(key, value)


def commits(table: Table, count: int) -> None:
    """Requests and bytes of a commit of 64 trajectories, and of following it."""
    rng = np.random.default_rng(0)
    for compress in (False, True):
        what = "zstd" if compress else "uncompressed"
        store = Counting(MemoryStore())
        writer = TrajectoryStore.create(store, token_schema(), backend="zarr", compress=compress)
        reader = TrajectoryStore.open(store)
        writer.append(rows_of(lengths_of(BATCH, rng), rng))  # the first one makes the segment
        reader.refresh()
        trips, amplification, follow, requests = [], [], [], []
        for _ in range(count):
            lengths = lengths_of(BATCH, rng)
            data = rows_of(lengths, rng)
            store.clear()
            writer.append(data)
            trips.append(store.trips)
            requests.append(store.puts + store.gets)
            payload = BYTES_PER_TOKEN * int(lengths.sum()) + 4 * BATCH
            amplification.append(store.put_bytes / payload)
            store.clear()
            reader.refresh()
            follow.append(store.trips)
        table.line(f"zarr, {what}: round trips per commit of 64 trajectories", max(trips), "", ROUND_TRIPS)
        table.line("  requests", statistics.mean(requests))
        table.line(f"zarr, {what}: bytes put / payload (write amplification)", max(amplification), "x", AMPLIFICATION)
        table.line("  round trips of a refresh that finds it", statistics.mean(follow))
        store.clear()
        reader.refresh()
        table.line("  round trips of a refresh without news", store.trips)
        if not compress:
            store.delay = 0.02
            start = time.perf_counter()
            writer.append(data)
            table.line("  a commit where a request takes 20 ms", (time.perf_counter() - start) * 1e3, "ms")
        reader.close()
        writer.close()


def opening(path: str) -> None:
    """In a fresh process: ms of open and of open with a first batch, wall and processor."""
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        with TrajectoryStore.create(Path(folder, "s"), token_schema(), backend="zarr") as store:
            store.append(rows_of(lengths_of(BATCH, rng), rng))
        with TrajectoryStore.open(Path(folder, "s")) as store:
            store.read_padded(store.ids(), list(TOKEN_COLUMNS))
    rng = np.random.default_rng(1)
    have_pages(tempfile.gettempdir(), [[150_000, 150_000, 150_000, 40_000]] * 160)
    wall, cpu = time.perf_counter(), time.process_time()
    store = TrajectoryStore.open(path)
    ids = store.ids()
    opened = time.perf_counter() - wall
    store.read_padded(ids[rng.choice(len(ids), BATCH, replace=False)], list(TOKEN_COLUMNS))
    both, used = time.perf_counter() - wall, time.process_time() - cpu
    store = TrajectoryStore.open(path)
    start = time.perf_counter()
    values = store.read_ragged("log_probs").values.nbytes
    print(json.dumps([opened * 1e3, both * 1e3, used * 1e3, values / (time.perf_counter() - start) / 1e6]))


def folders(table: Table, count: int, rounds: int) -> None:
    """Open a local folder, as committed and compacted."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store")
        start = time.process_time()
        payload = fill(path, count, mean=600, per_commit=BATCH, backend="zarr")
        rate = payload / (time.process_time() - start) / 1e6
        print(f"a folder of {count} trajectories in commits of {BATCH}: {payload / 1e6:.0f} MB")
        table.line("append, MB/s of processor time", rate)
        table.line("disk / payload", disk_bytes(path) / payload, "x")
        measure(table, path, "as committed", rounds, OPEN_MS, BATCH_MS)
        with TrajectoryStore.open(path, "a") as store:
            start = time.process_time()
            store.compact()
            rate = payload / (time.process_time() - start) / 1e6
        table.line("compact, MB/s of processor time", rate)
        table.line("disk / payload, compacted", disk_bytes(path) / payload, "x")
        measure(table, path, "compacted", rounds, OPEN_MS, None)


def measure(table: Table, path: Path, what: str, rounds: int, most_open: float, most_batch: float | None) -> None:
    """The lines of one store, with goals for opening and for the first batch after it."""
    lines = [child(__file__, "--opening", path) for _ in range(rounds)]
    opened, both, cpu, rate = zip(*lines, strict=True)
    later = min(b - a for a, b in zip(opened, both, strict=True))
    table.line(f"zarr, {what}: open", min(opened), "ms", most_open)
    table.line(f"zarr, {what}: first batch of 64 rows after it", later, "ms", most_batch)
    table.line("  both, processor time", min(cpu), "ms")
    table.line("  a whole column, fetched and read the first time, MB/s", max(rate))


def main() -> int:
    """Print the table; exit 1 with --check where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer commits and rounds")
    parser.add_argument("--check", action="store_true", help="fail where a goal is missed")
    parser.add_argument("--opening", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.opening:
        opening(options.opening)
        return 0
    table = Table()
    commits(table, 3 if options.quick else 10)
    folders(table, 2560 if options.quick else 10_240, 3 if options.quick else 7)
    return int(options.check and not table.good)


if __name__ == "__main__":
    raise SystemExit(main())
