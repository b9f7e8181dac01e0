"""Reading batches from a store that is in no cache: bytes that the disk gave per byte of payload.

    python benchmarks/bench_store_cold.py [--quick] [--folder FOLDER]

The page cache of the store's files is written back and dropped (fsync, then POSIX_FADV_DONTNEED), then a fresh
process reads batches of 64 random rows. Counted is `read_bytes` of /proc/self/io: what the block layer was asked for
on behalf of the process, readahead included. Imports come before, so only the store's own files are in the figure.
mincore is not used: it counts pages that are in the cache, so those that were dropped and read again count once.

A disk gives whole pages of 4 KiB. A row of four columns and n tokens lies on 13 n / 4096 + 4 of them on average, and
one more holds its offsets: at 600 tokens that is 3.6 times the payload as long as rows share no page, as in the first
batch; later ones find some of their pages. So the lengths of the other benchmarks (mean 600) and longer ones are
shown, each with that floor.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from _stores import BATCH, BYTES_PER_TOKEN, TOKEN_COLUMNS, Table, child, drop_cache, fill, parser

TARGET = 3.0


def read_bytes() -> int:
    """Bytes that this process had read from a disk."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes"):
            return int(line.split()[1])
    raise RuntimeError("this system does not count read_bytes")


def measure(path: str, batches: int) -> None:
    """In a fresh process: the bytes read and the payload, of opening, of the first batch and of the others."""
    import numpy as np

    from trajectory_store import TrajectoryStore

    rng = np.random.default_rng(5)
    begin = read_bytes()
    store = TrajectoryStore.open(path)
    ids = store.ids()
    opened = read_bytes()
    steps = []
    payload = [0, 0]
    for i in range(batches):
        before, start = read_bytes(), time.perf_counter()
        batch = store.read_padded(ids[rng.integers(0, len(ids), BATCH)], list(TOKEN_COLUMNS))
        steps.append((read_bytes() - before, time.perf_counter() - start))
        payload[min(i, 1)] += int(batch["lengths"].sum()) * BYTES_PER_TOKEN
    others = steps[1:]
    print(
        json.dumps(
            {
                "open": opened - begin,
                "first": steps[0][0] / payload[0],
                "others": sum(b for b, _ in others) / payload[1],
                "all": sum(b for b, _ in steps) / sum(payload),
                "first_ms": steps[0][1] * 1e3,
                "ms": float(np.median([s for _, s in others])) * 1e3,
            }
        )
    )


def main() -> int:
    """Print the table; exit 1 with --check where a goal is missed."""
    words = parser(__doc__, "smaller stores")
    words.add_argument("--folder", help="where the stores are made; must be on a disk (default: the temporary folder)")
    words.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = words.parse_args()
    if options.child:
        measure(options.child[0], int(options.child[1]))
        return 0
    table = Table()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for mean, count, goal in ((600, 20_000, TARGET), (1200, 10_000, None)):
            count, batches = (count // 5, 10) if options.quick else (count, 40)
            path = Path(folder, str(mean))
            payload = fill(path, count, mean=mean)
            drop_cache(path)
            found = child(__file__, "--child", path, batches)
            if not found["all"]:
                print("no byte came from a disk: give --folder one that is not in memory")
                return int(options.check)
            floor = 1 + 5 * 4096 / (BYTES_PER_TOKEN * payload / count / BYTES_PER_TOKEN)
            print(
                f"{count} rows, mean {payload / count / BYTES_PER_TOKEN:.0f} tokens, {payload / 1e6:.0f} MB:", end=" "
            )
            print(f"{batches} batches; rows that share no page: {floor:.2f}; opening read {found['open'] / 1e3:.0f} kB")
            table.line("  bytes read / payload, all batches", found["all"], "x", goal)
            table.line("  the first batch", found["first"], "x")
            table.line("  the other batches", found["others"], "x")
            table.line("  time of the first batch", found["first_ms"], "ms")
            table.line("  time of the others (median)", found["ms"], "ms")
    return int(options.check and not table.good)


if __name__ == "__main__":
    raise SystemExit(main())
