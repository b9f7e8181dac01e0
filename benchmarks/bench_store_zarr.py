"""The zarr backend: objects, requests and bytes of a commit, opening a folder, and how fast columns come back.

    python benchmarks/bench_store_zarr.py [--quick]

Requests are counted at a bucket in memory: those that overlap in time are one round trip. The bytes put (values,
metadata, record and directory of the zip) over the payload are the write amplification, without compression and
with it. Opening is measured in fresh processes that have used the library once on another small store, so imports do
not count; wall and processor time, the best of the rounds, as other work only adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
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
    parser,
    rows_of,
    token_schema,
)
from obstore.store import MemoryStore

from trajectory_store import Column, Schema, TrajectoryStore
from trajectory_store.objects import remote
from trajectory_store.objects.remote import ObstoreBucket

ROUND_TRIPS, OBJECTS, AMPLIFICATION = 1, 1, 1.02
OPEN_MS, BATCH_MS = 5.0, 50.0
DELAY_S = 0.02


class Counting(ObstoreBucket):
    """Counts requests, round trips and bytes put; a request may take a while. Those that overlap are one round trip."""

    def __init__(self, store: Any) -> None:
        super().__init__(store, "memory")
        self.delay = 0.0
        self._lock = threading.Lock()
        self.running = self.trips = self.requests = self.puts = self.put_bytes = 0

    def clear(self) -> None:
        """Count from 0."""
        self.trips = self.requests = self.puts = self.put_bytes = 0

    def _call(self, call: Callable[[], Any]) -> Any:
        with self._lock:
            self.trips += self.running == 0
            self.running += 1
            self.requests += 1
        try:
            time.sleep(self.delay)
            return super()._call(call)
        finally:
            with self._lock:
                self.running -= 1

    def put_new(self, key: str, data: bytes) -> bool:
        """Put and count."""
        self.puts += 1
        self.put_bytes += len(data)
        return super().put_new(key, data)


@contextmanager
def counted() -> Generator[Counting]:
    """A bucket in memory, to which every store that is made or opened goes."""
    bucket = Counting(MemoryStore())
    real = remote.open_bucket
    remote.open_bucket = lambda target, *, durable: bucket
    try:
        yield bucket
    finally:
        remote.open_bucket = real


def commits(table: Table, count: int) -> None:
    """Requests and bytes of a commit of 64 trajectories, and of following it."""
    rng = np.random.default_rng(0)
    for compress in (False, True):
        what = "zstd" if compress else "uncompressed"
        with counted() as bucket:
            writer = TrajectoryStore.create(bucket.store, token_schema(), backend="zarr", compress=compress)
            reader = TrajectoryStore.open(bucket.store)
            for _ in range(5):  # the first ones make segments
                writer.append(rows_of(lengths_of(BATCH, rng), rng))
            reader.refresh()
            trips, objects, amplification, follow = [], [], [], []
            for _ in range(count):
                lengths = lengths_of(BATCH, rng)
                data = rows_of(lengths, rng)
                bucket.clear()
                writer.append(data)
                trips.append(bucket.trips)
                objects.append(bucket.puts)
                payload = BYTES_PER_TOKEN * int(lengths.sum()) + 4 * BATCH
                amplification.append(bucket.put_bytes / payload)
                bucket.clear()
                reader.refresh()
                follow.append(bucket.trips)
            table.line(f"zarr, {what}: round trips per commit of 64 trajectories", max(trips), "", ROUND_TRIPS)
            table.line(f"zarr, {what}: objects per commit", max(objects), "", OBJECTS)
            table.line(
                f"zarr, {what}: bytes put / payload (write amplification)", max(amplification), "x", AMPLIFICATION
            )
            table.line("  round trips of a refresh that finds it", statistics.mean(follow))
            bucket.clear()
            reader.refresh()
            table.line("  round trips of a refresh without news", bucket.trips)
            if not compress:
                bucket.delay = DELAY_S
                start = time.perf_counter()
                writer.append(data)
                table.line("  a commit where a request takes 20 ms", (time.perf_counter() - start) * 1e3, "ms")
                bucket.delay = 0.0
            reader.close()
            writer.close()


def many(table: Table, count: int) -> None:
    """Opening a store with many commits that nothing was merged of, where a request takes 20 ms."""
    with counted() as bucket:
        schema = Schema([Column("n", "int64")])
        writer = TrajectoryStore.create(bucket.store, schema, backend="zarr", segment_rows=count)
        for i in range(count):
            writer.append({"n": [i]})
        bucket.delay = DELAY_S
        start = time.perf_counter()
        reader = TrajectoryStore.open(bucket.store)
        took = time.perf_counter() - start
        assert len(reader) == count
        table.line(f"zarr: open {count} unmerged commits at 20 ms a request", took, "s", 1.0)
        bucket.delay = 0.0


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
    words = parser(__doc__, "fewer commits and rounds")
    words.add_argument("--opening", help=argparse.SUPPRESS)
    options = words.parse_args()
    if options.opening:
        opening(options.opening)
        return 0
    table = Table()
    commits(table, 3 if options.quick else 10)
    many(table, 2_000 if options.quick else 16_000)
    folders(table, 2560 if options.quick else 10_240, 3 if options.quick else 7)
    return int(options.check and not table.good)


if __name__ == "__main__":
    raise SystemExit(main())
