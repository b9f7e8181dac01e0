"""Opening a store of a million trajectories: no step may take time or memory that grows with the rows.

    python benchmarks/bench_store_open.py [--quick] [--check]

Two stores with the same number of segments, one with 64 times the rows of the other, both in commits of 64 rows, are
opened in fresh processes. A third one has as many commits as objects in a local folder, merged in the background.
The first batch takes 64 rows by ids that are known, four columns, padded. Memory is RssAnon, what the process itself
holds; pages of files that the kernel may drop at any time do not count. `ids()`, the list of all rows, is 8 bytes per
row by its nature and has a line of its own.

Then a commit of 64 rows in one process until another one has seen it: the row holds the time before its append began,
the reader calls `refresh()` in a loop.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _stores import BATCH, TOKEN_COLUMNS, Table, anonymous_kb, child, parser, rows_of, token_schema

from trajectory_store import Column, Schema, TrajectoryStore

SEGMENTS = 16
OPEN_MS, BATCH_MS, VISIBLE_MS, OBJECTS_MS = 10.0, 50.0, 1.0, 100.0
MEMORY_RATIO = 1.05


def fill(path: Path, rows_per_segment: int, backend: str = "memmap") -> None:
    """A store of 16 segments in commits of 64 rows, four tokens per row."""
    data = rows_of(np.full(BATCH, 4), np.random.default_rng(0))
    sizes = {"backend": "zarr"} if backend == "zarr" else {"segment_rows": rows_per_segment}
    with TrajectoryStore.create(path, token_schema(), **sizes) as store:
        for _ in range(rows_per_segment * SEGMENTS // BATCH):
            store.append(data)
        ids = store.ids()
        np.save(path.with_suffix(".npy"), np.random.default_rng(1).choice(ids, BATCH))


def opening(path: str) -> None:
    """In a fresh process: times in ms and anonymous memory in kB of each step."""
    picked = np.load(Path(path).with_suffix(".npy"))
    warm = rows_of(np.full(2, 4), np.random.default_rng(0))
    with tempfile.TemporaryDirectory() as folder:  # imports and first calls do not count as opening
        with TrajectoryStore.create(Path(folder, "s"), token_schema()) as store:
            store.read_padded(store.append(warm), list(TOKEN_COLUMNS))
        del store
    before = anonymous_kb()
    marks = [time.perf_counter()]
    store = TrajectoryStore.open(path)
    marks.append(time.perf_counter())
    store.read_padded(picked, list(TOKEN_COLUMNS))
    marks.append(time.perf_counter())
    memory = anonymous_kb() - before
    count = len(store)
    marks.append(time.perf_counter())
    store.ids()
    marks.append(time.perf_counter())
    for _ in range(100):
        store.refresh()
    marks.append(time.perf_counter())
    steps = [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]
    print(json.dumps([count, *steps, memory, anonymous_kb(), anonymous_kb() - before]))


def measure(path: Path, rounds: int) -> list[float]:
    """Medians over fresh processes."""
    lines = [child(__file__, "--opening", path) for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*lines, strict=True)]


def write(path: str, commits: int) -> None:
    """In a process of its own: appends with the time in them, with pauses."""
    rng = np.random.default_rng(0)
    data = rows_of(np.full(BATCH, 600), rng)
    with TrajectoryStore.open(path, "a") as store:
        for _ in range(commits):
            time.sleep(0.004 * rng.random())
            store.append({**data, "stamp": np.full(BATCH, time.monotonic_ns())})


def follow(folder: str, commits: int) -> tuple[float, float, int]:
    """Median and 90th percentile ms from the start of an append to the refresh that shows it, and how many."""
    schema = Schema([*token_schema(), Column("stamp", "int64")])
    path = str(Path(folder, "live"))
    TrajectoryStore.create(path, schema).close()
    found: list[float] = []
    line = [sys.executable, __file__, "--write", path, str(commits)]
    with TrajectoryStore.open(path) as store, subprocess.Popen(line) as writer:
        seen, end = 0, BATCH * commits
        limit = time.monotonic() + 120
        while seen < end and time.monotonic() < limit:
            now_seen = store.refresh()
            if now_seen == seen:
                continue
            now = time.monotonic_ns()
            stamps = np.unique(store.read_scalars("stamp", store.ids()[seen:]))
            found += [(now - int(stamp)) / 1e6 for stamp in stamps]
            seen = now_seen
        if writer.wait() != 0:
            raise RuntimeError("the writer failed")
    found = found[5:]
    return statistics.median(found), float(np.percentile(found, 90)), len(found)


def main() -> int:
    """Print the table; exit 1 with --check where a goal is missed."""
    words = parser(__doc__, "130 thousand rows instead of a million")
    words.add_argument("--opening", help=argparse.SUPPRESS)
    words.add_argument("--write", nargs=2, help=argparse.SUPPRESS)
    options = words.parse_args()
    if options.opening:
        opening(options.opening)
        return 0
    if options.write:
        write(options.write[0], int(options.write[1]))
        return 0
    large = BATCH * BATCH * (2 if options.quick else 16)
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for size in (large // 64, large):
            fill(Path(folder, str(size)), size)
            found.append(measure(Path(folder, str(size)), 5 if options.quick else 9))
        small, big = found
        table = Table()
        table.line(f"open {big[0]:.0f} trajectories", big[1], "ms", OPEN_MS)
        table.line(f"  the same for {small[0]:.0f}", small[1], "ms")
        table.line("first batch of 64 rows, 4 columns, after it", big[2], "ms", BATCH_MS)
        table.line("  the same in the small store", small[2], "ms")
        table.line("len(), after it", big[3], "ms")
        table.line("idle refresh()", big[5] / 100, "ms")
        table.line("memory of open and first batch", big[6] / 1e3, "MB")
        table.line("  the same for the small store", small[6] / 1e3, "MB")
        ratio = (big[7] - big[8] + big[6]) / (small[7] - small[8] + small[6])
        table.line("  all anonymous memory, large / small", ratio, "x", MEMORY_RATIO)
        table.line("ids(): the list of all rows", big[4], "ms")
        table.line("  its memory, per row", (big[8] - big[6]) * 1024 / big[0], "B")
        fill(Path(folder, "objects"), large, "zarr")
        objects = measure(Path(folder, "objects"), 5)
        table.line(f"zarr: open {objects[0]:.0f} trajectories, merged in the background", objects[1], "ms", OBJECTS_MS)
        commits = 100 if options.quick else 400
        middle, most, count = follow(folder, commits)
        table.line(f"commit of 64 rows seen by another process, median of {count}", middle, "ms", VISIBLE_MS)
        table.line("  90th percentile", most, "ms")
    return int(options.check and not table.good)


if __name__ == "__main__":
    raise SystemExit(main())
