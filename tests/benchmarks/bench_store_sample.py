"""Sampling: 64 random trajectories to 4 padded columns, warm, against memcpy and two peers of the same run.

    python tests/benchmarks/bench_store_sample.py [--quick]

A ratio of 1 is one thread's memcpy of the payload (13 bytes per token), so the padding, which is written
too, counts against us. LMDB holds one blob per trajectory and is read through the same pad loop; TorchRL's
LazyStackStorage holds TensorDicts in RAM.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "storage"))

from trajectory_store import Column, RaggedArray, Schema, TrajectoryStore

BATCH = 64
COLUMNS = {"input_ids": "int32", "assistant_mask": "bool", "log_probs": "float32"}
COLUMNS["ref_log_probs"] = "float32"
TARGET = 0.15


def make_rows(count, rng):
    """Lengths like a reasoning run's: log-normal, 600 tokens on average, at most 4096."""
    lengths = np.clip(rng.lognormal(6.1, 0.75, count), 16, 4096).astype(np.int64)
    total = int(lengths.sum())
    return {
        "input_ids": RaggedArray(rng.integers(0, 150_000, total, dtype=np.int32), lengths),
        "assistant_mask": RaggedArray(rng.random(total) < 0.5, lengths),
        "log_probs": RaggedArray(rng.random(total, dtype=np.float32), lengths),
        "ref_log_probs": RaggedArray(rng.random(total, dtype=np.float32), lengths),
        "task_reward": rng.random(count, dtype=np.float32),
    }


def schema():
    """The four token columns and one scalar."""
    ragged = [Column(name, dtype, ragged=True) for name, dtype in COLUMNS.items()]
    return Schema([*ragged, Column("task_reward", "float32")])


class Memcpy:
    """One thread copying memory that is in no cache."""

    def __init__(self):
        self.source = np.random.default_rng(0).integers(0, 255, 1 << 26, dtype=np.uint8)
        self.target = np.zeros_like(self.source)

    def seconds(self):
        """Seconds per byte of one copy."""
        start = time.perf_counter()
        np.copyto(self.target, self.source)
        return (time.perf_counter() - start) / len(self.source)


def memcpy_rate(rounds=30):
    """Bytes per second of the median copy."""
    memcpy = Memcpy()
    return 1 / statistics.median(memcpy.seconds() for _ in range(rounds))


def measure(functions, batches, rounds=4):
    """Median seconds per call of each store, and bytes per second of memcpy.

    Stores and memcpy take turns of a whole pass over the batches, so a slow minute of the machine hits all
    of them; the first pass is not counted: warm means that pages are mapped and nobody else ran in between.
    """
    memcpy = Memcpy()
    times = {name: [] for name in functions}
    copies = []
    for turn in range(rounds + 1):
        copies += [memcpy.seconds() for _ in range(10)]
        for name, function in functions.items():
            for batch in batches[: len(batches) // 4]:
                function(batch)
            for batch in batches:
                start = time.perf_counter()
                function(batch)
                if turn:
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}, 1 / statistics.median(copies)


def lmdb_sampler(stack, folder, data):
    """One blob per trajectory: its length, then the four columns; the same pad loop, one fixed output."""
    import lmdb

    columns = [data[name] for name in COLUMNS]
    lengths, edges = columns[0].lengths, columns[0].offsets
    env = stack.enter_context(lmdb.open(str(folder), map_size=1 << 33, writemap=True, sync=False))
    with env.begin(write=True) as txn:
        for i in range(len(lengths)):
            a, b = edges[i], edges[i + 1]
            head = int(b - a).to_bytes(8, "little")
            blob = b"".join([head, *(c.values[a:b].tobytes() for c in columns)])
            txn.put(i.to_bytes(8, "big"), blob)
    items = [np.dtype(d).itemsize for d in COLUMNS.values()]
    outs = [np.zeros(BATCH * 4096 * item, np.uint8) for item in items]

    def sample(rows):
        with env.begin(buffers=True) as txn:
            blobs = [txn.get(i.to_bytes(8, "big")) for i in rows.tolist()]
            sizes = np.array([int.from_bytes(blob[:8], "little") for blob in blobs])
            width = int(sizes.max())
            skip = np.full(len(rows), 8)
            for out, item in zip(outs, items, strict=True):
                out[: BATCH * width * item].fill(0)
                view = memoryview(out)
                starts = np.arange(BATCH) * width * item
                ends = (starts + sizes * item).tolist()
                after = skip + sizes * item
                rows_at = zip(blobs, starts.tolist(), ends, skip.tolist(), after.tolist(), strict=True)
                for blob, a, b, c, d in rows_at:
                    view[a:b] = blob[c:d]
                skip = after

    return sample


def torchrl_sampler(data):
    """LazyStackStorage of TensorDicts in RAM, padded by the stack's own method."""
    import torch
    from tensordict import LazyStackedTensorDict, TensorDict
    from torchrl.data import LazyStackStorage

    storage = LazyStackStorage(len(data["input_ids"]))
    rows = [
        TensorDict({name: torch.from_numpy(np.array(data[name][i])) for name in COLUMNS}, [])
        for i in range(len(data["input_ids"]))
    ]
    storage.set(range(len(rows)), LazyStackedTensorDict(*rows))

    def sample(picked):
        stack = storage.get(torch.from_numpy(picked))
        return [stack.get(name, as_padded_tensor=True, padding_value=0) for name in COLUMNS]

    return sample


def main():
    """Print the table; exit 1 where the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="2000 rows instead of 20000")
    parser.add_argument("--check", action="store_true", help="fail below the target")
    options = parser.parse_args()
    count, rounds = (2_000, 60) if options.quick else (20_000, 300)
    rng = np.random.default_rng(0)
    data = make_rows(count, rng)
    lengths = data["input_ids"].lengths
    picks = [rng.integers(0, count, BATCH) for _ in range(rounds)]
    payload = float(np.mean([lengths[p].sum() for p in picks])) * 13
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with TrajectoryStore.create(folder / "store", schema()) as store:
            for first in range(0, count, 1000):
                rows = range(first, min(count, first + 1000))
                batch = {name: data[name].take(rows) for name in COLUMNS}
                store.append({**batch, "task_reward": data["task_reward"][rows.start : rows.stop]})
        store = stack.enter_context(TrajectoryStore.open(folder / "store"))
        ids, names = store.ids(), list(COLUMNS)
        check = store.read_padded(ids[picks[0]], names)
        for k, i in enumerate(picks[0]):
            assert (check["input_ids"][k, : lengths[i]] == data["input_ids"][i]).all()
        samplers = {"trajectory_store": lambda p: store.read_padded(ids[p], names)}
        if importlib.util.find_spec("lmdb"):
            samplers["LMDB + the same pad loop"] = lmdb_sampler(stack, folder / "lmdb", data)
        if importlib.util.find_spec("torchrl"):
            samplers["TorchRL LazyStackStorage (RAM)"] = torchrl_sampler(data)
        results, copy = measure(samplers, picks)
    print(f"memcpy {copy / 1e9:.1f} GB/s; {payload / 1e3:.0f} kB of {BATCH} trajectories per batch")
    print(f"{'store':36}{'us/batch':>10}{'Mtok/s':>10}{'x memcpy':>10}")
    for name, seconds in results.items():
        tokens = payload / 13 / seconds / 1e6
        print(f"{name:36}{seconds * 1e6:10.0f}{tokens:10.0f}{payload / seconds / copy:10.3f}")
    ours = payload / next(iter(results.values())) / copy
    print(f"target {TARGET} x memcpy: {'met' if ours >= TARGET else 'missed'} ({ours:.3f})")
    return int(options.check and ours < TARGET)


if __name__ == "__main__":
    raise SystemExit(main())
