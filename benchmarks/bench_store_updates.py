"""Later values, scans of a column, and stores whose writer was started again and again.

    python benchmarks/bench_store_updates.py [--quick]

An update is one durable commit of 64 scalars. A scan reads one float32 column of a million rows in the order of
arrival, plain and after updates, and is compared with a plain list of the same values. The store of many restarts is
written by 2,000 writers of one commit each, and compared with one of the same rows by a single writer; both are written
in memory, where a file is made ten times as fast, and copied to the disk, holes kept. Wall time, medians; plain
and updated scans take turns, and are compared by processor time.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from _stores import BATCH, TOKEN_COLUMNS, Table, disk_bytes, lengths_of, parser, race, rows_of, token_schema

from trajectory_store import Column, Schema, TrajectoryStore

MEMORY = Path("/dev/shm")
UPDATE_MS, SCAN_MS, UPDATED, OPEN_MS, DESCRIPTORS, SLOWER, APPARENT = 0.1, 5.0, 1.3, 100.0, 100, 1.5, 2.0


def median_ms(call: Callable[[], object], rounds: int) -> float:
    """Milliseconds."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found) * 1e3


def updates(table: Table, folder: Path, rows: int, count: int) -> None:
    """Updates of 64 scalars, and scans before and after."""
    rng = np.random.default_rng(0)
    schema = Schema([Column("plain", "float32"), Column("updated", "float32", mutable=True)])
    with TrajectoryStore.create(folder / "updates", schema) as store:
        plain = rng.random(rows).astype(np.float32)
        for first in range(0, rows, 1 << 16):
            store.append({"plain": plain[first : first + (1 << 16)]})
        ids, wanted = store.ids(), np.zeros(rows, np.float32)
        store.read_scalars("plain")
        table.line(
            f"scan of a float32 column of {rows} rows",
            median_ms(lambda: store.read_scalars("plain"), 20),
            "ms",
            SCAN_MS,
        )
        took = []
        for _ in range(count):
            at, values = rng.integers(0, rows, BATCH), rng.random(BATCH).astype(np.float32)
            start = time.perf_counter()
            store.update(ids[at], updated=values)
            took.append(time.perf_counter() - start)
            wanted[at] = values
        table.line(f"update of {BATCH} scalars, median of {count}", statistics.median(took) * 1e3, "ms", UPDATE_MS)
        assert np.array_equal(store.read_scalars("updated"), wanted), "the scan differs from a plain list"
        took = race({name: partial(store.read_scalars, name) for name in ("plain", "updated")}, 20, 2)
        what = f"scan of a column after {count} updates / of a plain one, in turn"
        table.line(what, took["updated"] / took["plain"], "x", UPDATED)
    with TrajectoryStore.open(folder / "updates") as reader:
        start = time.perf_counter()
        assert np.array_equal(reader.read_scalars("updated"), wanted), "a new reader differs from a plain list"
        table.line("  the first such scan of a new reader", (time.perf_counter() - start) * 1e3, "ms")


def restarts(table: Table, folder: Path, count: int) -> None:
    """Many writers of one commit each."""
    rng = np.random.default_rng(1)
    paths = {"many": folder / "many", "one": folder / "one"}
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as made:
        stores = {name: TrajectoryStore.create(Path(made, name), token_schema()) for name in paths}
        stores["many"].close()
        start = time.perf_counter()
        for _ in range(count):
            lengths = np.maximum(lengths_of(8, rng) // 4, 1)
            data = rows_of(lengths, rng)
            with TrajectoryStore.open(Path(made, "many"), "a") as store:
                store.append(data)
            stores["one"].append(data)
        table.line(f"  {count} restarts, each", (time.perf_counter() - start) / count * 1e3, "ms")
        stores["one"].close()
        subprocess.run(["cp", "-a", "--sparse=always", *(str(Path(made, name)) for name in paths), folder], check=True)
    opened = []
    for _ in range(5):
        start = time.perf_counter()
        TrajectoryStore.open(paths["many"]).close()
        opened.append(time.perf_counter() - start)
    table.line(f"open after {count} restarts", statistics.median(opened) * 1e3, "ms", OPEN_MS)
    before = len(os.listdir("/proc/self/fd"))
    took = {}
    for name, path in paths.items():
        store = TrajectoryStore.open(path)
        picks = [store.ids()[rng.integers(0, len(store), BATCH)] for _ in range(60)]
        for pick in picks[:20]:
            store.read_padded(pick, list(TOKEN_COLUMNS))
        turn = iter(picks * 4)
        took[name] = median_ms(lambda store=store, turn=turn: store.read_padded(next(turn), list(TOKEN_COLUMNS)), 200)
        if name == "many":
            held = len(os.listdir("/proc/self/fd")) - before
            table.line("descriptors of a reader that has sampled", held, "", DESCRIPTORS)
            table.line("  segments", len(store._catalog.segments))
        store.close()
    table.line("a batch of 64 rows after restarts / of one writer", took["many"] / took["one"], "x", SLOWER)
    apparent = sum(f.stat().st_size for f in paths["many"].rglob("*") if f.is_file())
    table.line("apparent size / disk after restarts", apparent / disk_bytes(paths["many"]), "x", APPARENT)


def main() -> int:
    """Print the table; exit 1 with --check where a goal is missed."""
    options = parser(__doc__, "fewer rows, updates and restarts").parse_args()
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        updates(table, Path(folder), 1 << 20, 1_000 if options.quick else 10_000)
        restarts(table, Path(folder), 200 if options.quick else 2_000)
    return int(options.check and not table.good)


if __name__ == "__main__":
    raise SystemExit(main())
