"""A filter and an aggregate over a million rows, in the store and in DuckDB on a Parquet file of the same rows.

    python benchmarks/bench_store_tables.py [--quick]

Both answer the same question, checked to be equal, in alternating turns; the figure is the ratio of the medians of wall
time. The Parquet file is what `to_parquet` wrote. DuckDB uses one thread, as the store does.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from trajectory_store import Column, RaggedArray, TrajectoryStore

COLUMNS = [
    *(Column("reward", "float32"), Column("version", "int64"), Column("finish", "str")),
    Column("tokens", "int32", ragged=True),
]


def fill(store: TrajectoryStore, rows: int) -> None:
    """Append rows with 32 tokens each, 20,000 a commit."""
    rng = np.random.default_rng(0)
    for first in range(0, rows, 20_000):
        count = min(20_000, rows - first)
        tokens = rng.integers(0, 32_000, count * 32, np.int32)
        finish = ["length" if one else "stop" for one in rng.random(count) < 0.25]
        store.append(
            {
                "reward": rng.random(count, np.float32), "version": np.arange(first, first + count), "finish": finish,
                "tokens": RaggedArray(tokens, np.full(count, 32)),
            }
        )  # fmt: skip


def race(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Return the median milliseconds of each, in turns; the answers must be equal."""
    assert ours() == theirs()
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for times, call in zip(took, (ours, theirs), strict=True):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(took[0]) * 1e3, statistics.median(took[1]) * 1e3


def main() -> None:
    quick = "--quick" in sys.argv
    rows, rounds = (50_000, 5) if quick else (1_000_000, 11)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        with TrajectoryStore.create(Path(folder) / "store", COLUMNS) as store:
            fill(store, rows)
            store.to_parquet(path)
            table = f"read_parquet('{path}')"
            base = duckdb.connect(config={"threads": 1})

            def ask(question: str) -> Any:
                return base.sql(f"select {question} from {table}").fetchall()[0][0]

            pairs = {
                "filter: number and text": (
                    lambda: store.count("reward >= 0.5 and finish == 'length'"),
                    lambda: ask("count(*) filter (where reward >= 0.5 and finish = 'length')"),
                ),
                "filter: largest token of a row": (
                    lambda: store.count("max(tokens) < 30000"),
                    lambda: ask("count(*) filter (where list_max(tokens) < 30000)"),
                ),
                "aggregate: sum of a column": (
                    lambda: int(store.read_scalars("version").sum()),
                    lambda: int(ask("sum(version)")),
                ),
                "aggregate: tokens of all rows": (
                    lambda: int(store.lengths("tokens").sum()),
                    lambda: int(ask("sum(len(tokens))")),
                ),
            }
            print(f"{rows:,} rows, DuckDB {duckdb.__version__}, one thread each; ms, median of {rounds}")
            for name, (ours, theirs) in pairs.items():
                mine, other = race(ours, theirs, rounds)
                print(f"{name:34s} store {mine:8.1f}   DuckDB on Parquet {other:8.1f}   {other / mine:6.2f}x as fast")


if __name__ == "__main__":
    main()
