"""What every adapter shares: the trajectories, the loop that pads, and what a store has to do."""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from _stores import BATCH, TOKEN_COLUMNS

from trajectory_store import RaggedArray

os.environ.setdefault("OMP_NUM_THREADS", "1")
LONGEST = 4096
Batch = dict[str, RaggedArray]


def make_commits(count: int) -> list[Batch]:
    """Commits of 64 trajectories; the first ones are the same whatever the count. Mean length about 590 tokens."""
    commits = []
    for i in range(count):
        rng = np.random.default_rng([7, i])
        lengths = np.clip(rng.lognormal(6.1, 0.75, BATCH), 16, LONGEST).astype(np.int64)
        total = int(lengths.sum())
        values = (
            rng.integers(0, 150_000, total, dtype=np.int32),
            rng.random(total) < 0.5,
            rng.random(total, dtype=np.float32),
            rng.random(total, dtype=np.float32),
        )
        commits.append({name: RaggedArray(v, lengths) for name, v in zip(TOKEN_COLUMNS, values, strict=True)})
    return commits


class Padder:
    """Bytes of ragged rows into four padded columns of reused memory: the same loop for all who need one."""

    def __init__(self) -> None:
        self.outs = {
            name: np.zeros(BATCH * LONGEST * np.dtype(d).itemsize, np.uint8) for name, d in TOKEN_COLUMNS.items()
        }

    def __call__(self, rows: dict[str, list[Any]], lengths: np.ndarray) -> dict[str, np.ndarray]:
        """`rows[name]` holds one buffer of bytes per row; `[64, T]` of each column."""
        width, batch = int(lengths.max()), {}
        for name, dtype in TOKEN_COLUMNS.items():
            size = np.dtype(dtype).itemsize
            out = self.outs[name][: len(lengths) * width * size]
            out.fill(0)
            view = memoryview(out)
            starts = np.arange(len(lengths)) * (width * size)
            ends = starts + lengths * size
            for a, b, row in zip(starts.tolist(), ends.tolist(), rows[name], strict=True):
                view[a:b] = row
            batch[name] = out.view(dtype).reshape(len(lengths), width)
        return batch


def octets(values: np.ndarray) -> memoryview:
    """The bytes of an array, not copied."""
    return memoryview(np.ascontiguousarray(values)).cast("B")


def edges_of(commit: Batch) -> list[int]:
    """Where the rows of a commit begin and end."""
    return commit["input_ids"].offsets.tolist()


class Peer:
    """A store: `create` or `open` first. `append` returns when the rows are acknowledged."""

    name = ""
    needs = ""
    on_disk = True
    note = ""

    def create(self, path: Path, rows: int) -> None:
        """Make an empty store, for at most `rows` rows."""

    def append(self, commit: Batch) -> None:
        """Write one commit of 64."""

    def close(self) -> None:
        """End writing as the store's manual says."""

    def open(self, path: Path, rows: int) -> None:
        """Open for reading with the store's own reader."""

    def count(self) -> int:
        """Rows the reader sees."""
        raise NotImplementedError

    def sample(self, rows: np.ndarray) -> dict[str, Any]:
        """Four padded columns `[64, T]`."""
        raise NotImplementedError

    def row(self, number: int) -> dict[str, Any]:
        """Return the four columns of one row, each an array that belongs to the caller."""
        raise NotImplementedError

    def place(self, number: int) -> dict[str, Any]:
        """Return the same by the place of the row in the order of arrival."""
        return self.row(number)


def row_of_table(table: Any) -> dict[str, np.ndarray]:
    """Return the columns of an Arrow table of one row as arrays that belong to the caller."""
    columns = {name: table[name].chunk(0).values.to_numpy().copy() for name in TOKEN_COLUMNS}
    return {name: values.view(TOKEN_COLUMNS[name]) for name, values in columns.items()}


def installed(kinds: list[type[Peer]]) -> list[type[Peer]]:
    """The stores that can run here; the others are named."""
    for kind in kinds:
        if importlib.util.find_spec(kind.needs) is None:
            print(f"skipped: {kind.name} (the module {kind.needs} is not installed)")
    return [kind for kind in kinds if importlib.util.find_spec(kind.needs)]


class Memcpy:
    """One thread copying memory that is in no cache."""

    def __init__(self) -> None:
        self.source = np.random.default_rng(0).integers(0, 255, 1 << 26, dtype=np.uint8)
        self.target = np.zeros_like(self.source)
        self.clocks = Clocks()

    def take(self, times: int = 6) -> None:
        """Measure some more copies."""
        for _ in range(times):
            with self.clocks:
                np.copyto(self.target, self.source)

    def rates(self) -> tuple[float, float]:
        """Bytes per second, by wall and by processor time."""
        wall, cpu = self.clocks.result()
        return len(self.source) / wall, len(self.source) / cpu


class Clocks:
    """Wall and processor time (all threads) of the blocks run under it."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __enter__(self) -> None:
        self.begun = (time.perf_counter(), time.process_time())

    def __exit__(self, *_: object) -> None:
        self.wall.append(time.perf_counter() - self.begun[0])
        self.cpu.append(time.process_time() - self.begun[1])

    def result(self) -> tuple[float, float]:
        """The medians."""
        return statistics.median(self.wall), statistics.median(self.cpu)
