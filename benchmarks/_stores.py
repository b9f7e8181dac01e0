"""What the benchmarks of the store share: rows, stores of many sizes, and the line with figure, goal and verdict."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trajectory_store import Column, RaggedArray, Schema, TrajectoryStore

BATCH = 64
TOKEN_COLUMNS = {"input_ids": "int32", "assistant_mask": "bool", "log_probs": "float32", "ref_log_probs": "float32"}
BYTES_PER_TOKEN = 13


class Table:
    """Lines of `what | figure | goal | met or missed`, and whether all goals were met."""

    def __init__(self) -> None:
        self.good = True
        print(f"{'what':<68}{'figure':>12}  {'goal':<12}verdict")

    def line(self, what: str, figure: float, unit: str = "", goal: float | None = None, *, least: bool = False) -> None:
        """Print a figure; the goal is an upper limit unless `least`."""
        verdict = ""
        limit = ""
        if goal is not None:
            met = figure >= goal if least else figure <= goal
            self.good &= met
            verdict = "met" if met else "MISSED"
            limit = f"{'>=' if least else '<='} {goal:g}"
        print(f"{what:<68}{figure:>9.3f} {unit:<3} {limit:<12}{verdict}", flush=True)


def token_schema(scalars: tuple[str, ...] = ("task_reward",)) -> Schema:
    """The four token columns and some scalars."""
    ragged = [Column(name, dtype, ragged=True) for name, dtype in TOKEN_COLUMNS.items()]
    return Schema([*ragged, *(Column(name, "float32") for name in scalars)])


def lengths_of(count: int, rng: np.random.Generator, mean: float = 600) -> np.ndarray:
    """Log-normal lengths like those of a run, at most seven times the mean."""
    return np.clip(rng.lognormal(np.log(mean) - 0.28, 0.75, count), 16, 7 * mean).astype(np.int64)


def rows_of(lengths: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    """Random rows of these lengths."""
    total = int(lengths.sum())
    return {
        "input_ids": RaggedArray(rng.integers(0, 150_000, total, dtype=np.int32), lengths),
        "assistant_mask": RaggedArray(rng.random(total, dtype=np.float32) < 0.5, lengths),
        "log_probs": RaggedArray(rng.random(total, dtype=np.float32), lengths),
        "ref_log_probs": RaggedArray(rng.random(total, dtype=np.float32), lengths),
        "task_reward": rng.random(len(lengths), dtype=np.float32),
    }


def fill(
    path: Path,
    count: int,
    *,
    mean: float,
    per_commit: int = 1000,
    seed: int = 0,
    schema: Schema | None = None,
    more: Callable[[np.ndarray], dict[str, Any]] = lambda places: {},
    **options: Any,
) -> int:
    """Make a store of many rows; returns the payload in bytes. The random values repeat, the lengths do not.

    Args:
        path: where.
        count: rows.
        mean: tokens per row.
        per_commit: rows.
        seed: of everything random.
        schema: of the store, with the columns of `token_schema`, which it is by default.
        more: from the places of rows to values of further columns.
        **options: of the store.
    """
    rng = np.random.default_rng(seed)
    most = max(int(per_commit * 7 * mean), 1 << 23)
    pool = rows_of(np.array([most]), rng)
    payload = 0
    with TrajectoryStore.create(path, schema or token_schema(), **options) as store:
        for first in range(0, count, per_commit):
            n = min(per_commit, count - first)
            lengths = lengths_of(n, rng, mean)
            total = int(lengths.sum())
            start = int(rng.integers(0, most - total + 1))
            data: dict[str, Any] = {
                name: RaggedArray(pool[name].values[start : start + total], lengths) for name in TOKEN_COLUMNS
            }
            data["task_reward"] = rng.random(n, dtype=np.float32)
            store.append(data | more(np.arange(first, first + n)))
            payload += BYTES_PER_TOKEN * total + 4 * n
    return payload


def have_pages(folder: Path | str, commits: Iterable[Iterable[int]]) -> None:
    """Leave pages that are really there at the head of the kernel's free ones, in pieces as commits need them.

    A virtual machine may have handed free memory back to its host. The first write to such a page then costs ten times
    the copy (measured: 890 instead of 115 us for 500 kB, whatever writes them), for as long as no page is used twice.

    Args:
        folder: where the files of the benchmark are.
        commits: per commit that is to come, the bytes that it writes into each of its files.
    """
    with contextlib.ExitStack() as stack:
        files: dict[int, Any] = {}
        for commit in commits:
            for i, size in enumerate(commit):
                if i not in files:
                    files[i] = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
                files[i].write(bytes(size))


def disk_bytes(path: Path) -> int:
    """Blocks in use under a folder."""
    return sum(f.stat().st_blocks * 512 for f in path.rglob("*") if f.is_file())


def drop_cache(path: Path) -> None:
    """Write back and drop the page cache of every file under a folder."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def child(script: str, *words: object, timeout: float = 600) -> Any:
    """Run a script in a fresh process; its last line of output is JSON."""
    line = [sys.executable, script, *(str(w) for w in words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def anonymous_kb() -> int:
    """Memory of this process that is no file's, in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1])
    raise RuntimeError("this system does not count RssAnon")


def race(functions: Mapping[str, Callable[[], object]], blocks: int, block: int) -> dict[str, float]:
    """Microseconds of processor time per call, in blocks that take turns; the tenth percentile: other work only adds.

    The first call of a block of several warms up and is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(max(blocks, 2)):
        for name, function in functions.items():
            if block > 1:
                function()
            for _ in range(block):
                start = time.process_time()
                function()
                seconds[name].append(time.process_time() - start)
    return {name: float(np.percentile(found, 10)) * 1e6 for name, found in seconds.items()}


def parser(about: str | None, quick: str) -> argparse.ArgumentParser:
    """The options of every benchmark of the store: `--quick` and `--check`."""
    made = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--check", action="store_true", help="fail where a goal is missed")
    return made
