"""Checked sampling against unchecked: 64 random trajectories to 4 padded columns, warm, once every commit was compared.

    python benchmarks/bench_store_checked.py [--quick] [--check]

Both read the same batches from one open store and take turns batch by batch, each first in every other batch, so a slow
minute of the machine hits both. The figure is the ratio of their medians, of a store with one segment and of one with
eight.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _stores import BATCH, TOKEN_COLUMNS, Table, lengths_of, parser, rows_of, token_schema

from trajectory_store import TrajectoryStore

GOAL = 1.03


def ratio(store: TrajectoryStore, batches: int, rng: np.random.Generator) -> float:
    """The median time of a checked batch as a part of that of an unchecked one."""
    ids, names = store.ids(), list(TOKEN_COLUMNS)
    store.read_batch(ids, checked=True)
    spent: dict[bool, list[float]] = {False: [], True: []}
    for number in range(batches):
        some = rng.choice(ids, BATCH, replace=False)
        store.read_padded(some, names)
        for checked in (False, True) if number % 2 else (True, False):
            begin = time.perf_counter()
            store.read_padded(some, names, checked=checked)
            spent[checked].append(time.perf_counter() - begin)
    return float(np.median(spent[True]) / np.median(spent[False]))


def main() -> int:
    """Print the ratios."""
    options = parser(__doc__, "fewer rows and batches").parse_args()
    rows, batches = (4_000, 2_000) if options.quick else (20_000, 10_000)
    table, rng = Table(), np.random.default_rng(0)
    for segments in (1, 8):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "s")
            TrajectoryStore.create(path, token_schema()).close()
            for _ in range(segments):
                with TrajectoryStore.open(path, "a") as store:
                    lengths = lengths_of(rows // segments, rng)
                    store.append({**rows_of(lengths, rng), "task_reward": np.zeros(len(lengths))})
            with TrajectoryStore.open(path) as store:
                what = f"checked against unchecked, {segments} segment{'s' * (segments > 1)}"
                table.line(what, ratio(store, batches, rng), "x", GOAL)
    return int(options.check and not table.good)


if __name__ == "__main__":
    sys.exit(main())
