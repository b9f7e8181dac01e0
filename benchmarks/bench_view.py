"""Looking at a million trajectories: the first page, a search of a rare text against DuckDB's, and memory.

    python benchmarks/bench_view.py [--rows N]

A store in commits of 16,384 rows with completions of 100 to 350 characters, 100 of which have a rare word. The pages'
reader answers the first page, a page in the order of the rewards, and the search to its end; DuckDB searches the same
texts in a table in memory, with one thread, by `contains` (letters as they are) and by `ilike` (either case, as the
pages search). The two alternate, and medians of five are printed. Memory is the peak of the process that reads.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_pipeline.report.query import View
from trajectory_store import Column, RaggedArray, Schema, TrajectoryStore

PART, RARE, REPEATS = 16_384, "Quetzalcoatl", 5
WORDS = ["the", "answer", "is", "therefore", "we", "add", "carry", "the", "one", "both", "sides", "question", "squared"]


def fill(path: Path, rows: int) -> list[str]:
    """Write the store; return the completions."""
    rng = np.random.default_rng(0)
    pool = [" ".join(rng.choice(WORDS, rng.integers(20, 70))) for _ in range(5000)]
    texts = [pool[at] for at in rng.integers(0, len(pool), rows)]
    for at in rng.integers(0, rows, 100).tolist():
        texts[at] += f" {RARE}"
    columns = [Column("input_ids", "int32", ragged=True), Column("task_reward", "float32"), Column("group_id", "int64")]
    columns += [Column("policy_version", "int64"), Column("num_prompt_tokens", "int32"), Column("completion", "str")]
    with TrajectoryStore.create(path, Schema([*columns, Column("finish_reason", "str")])) as store:
        for first in range(0, rows, PART):
            some = texts[first : first + PART]
            num = len(some)
            numbers = {"task_reward": rng.random(num), "group_id": np.arange(first, first + num) // 8}
            more = {"policy_version": np.full(num, first // PART), "num_prompt_tokens": np.ones(num, np.int32)}
            tokens = RaggedArray(np.zeros(4 * num, np.int32), np.full(num, 4))
            store.append({"input_ids": tokens, **numbers, **more, "completion": some, "finish_reason": ["stop"] * num})
    return texts


def to_the_end(view: View, text: str) -> int:
    """Search to the end, as the pages do; return the number of hits."""
    view._searches.clear()
    answer = view.trajectories(text=text)
    while not answer["complete"]:
        answer = view.trajectories(text=text, snapshot=answer["snapshot"], everything=True)
    return answer["matched"]


def took(call: Callable[[], Any]) -> float:
    """Return the milliseconds of a call."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def looked(path: str) -> None:
    """In a fresh process: print the milliseconds of the first pages and the peak memory."""
    began = time.perf_counter()
    view = View(path)
    view.about()
    first = view.trajectories()
    page = (time.perf_counter() - began) * 1e3
    figures = {"first page, store opened": page, "page by reward": took(lambda: view.trajectories(sort="-reward"))}
    figures |= {"counts of kinds": took(view.facets), "search to its end": took(lambda: to_the_end(view, RARE))}
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None
    assert len(first["rows"]) == 50
    print(json.dumps(figures | {"peak MB": int(peak[1]) / 1e3}))


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--child", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.child:
        looked(args.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "store")
        texts = fill(path, args.rows)
        print(f"{args.rows:,} trajectories, {sum(map(len, texts)) / 1e6:.0f} MB of completions")
        command = [sys.executable, __file__, "--child", str(path)]
        child = subprocess.run(command, capture_output=True, text=True, check=True)
        for name, value in json.loads(child.stdout).items():
            print(f"{name:<28}{value:>10.1f}{'' if name.startswith('peak') else ' ms'}")
        try:
            import duckdb
            import pyarrow
        except ImportError:
            print("DuckDB is not installed: pip install duckdb pyarrow")
            return
        database = duckdb.connect(config={"threads": 1})
        said = pyarrow.table({"completion": texts})
        database.register("said", said)
        database.execute("create table t as select * from said")
        view = View(path)
        times: dict[str, list[float]] = {"ours": [], "contains": [], "ilike": []}
        hits = {
            "ours": lambda: to_the_end(view, RARE),
            "contains": lambda: database.execute(
                f"select count(*) from t where contains(completion, '{RARE}')"
            ).fetchone(),
            "ilike": lambda: database.execute(f"select count(*) from t where completion ilike '%{RARE}%'").fetchone(),
        }
        for _ in range(REPEATS):
            for name, call in hits.items():
                times[name].append(took(call))
        assert hits["ours"]() == hits["ilike"]()[0]
        for name, values in times.items():
            print(f"search of a rare text, {name:<10}{statistics.median(values):>10.1f} ms")


if __name__ == "__main__":
    main()
