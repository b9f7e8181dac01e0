"""One table: the trajectory store against the stores people use today, in one run on one machine.

    python tests/benchmarks/bench_store_peers.py [--quick] [--save FILE] [--only NAME ...]

Every store gets the same trajectories (log-normal lengths, four columns of 13 bytes per token) and, in turns:
commits of 64 trajectories, batches of 64 random rows to four padded columns, an open in a fresh process, and a
SIGKILL in the middle of appending, after which the store's own reader opens what is left. Ratios to one thread's
memcpy of the payload (13 bytes per token; padding does not count for anybody) are medians of the calls of all
turns, by wall time and by processor time, which counts all threads and does not see a busy neighbour. Nobody syncs
to the disk: the durability compared is that of a killed process. Pages are in the page cache. A peer that is not
installed is named and left out.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "storage"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import numpy as np  # noqa: E402

from trajectory_store import Column, RaggedArray, Schema, TrajectoryStore  # noqa: E402

BATCH = 64
LONGEST = 4096
COLUMNS = {"input_ids": "int32", "assistant_mask": "bool", "log_probs": "float32", "ref_log_probs": "float32"}
TOKEN_BYTES = 13
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
        commits.append({name: RaggedArray(v, lengths) for name, v in zip(COLUMNS, values, strict=True)})
    return commits


class Padder:
    """Bytes of ragged rows into four padded columns of reused memory: the same loop for all who need one."""

    def __init__(self) -> None:
        self.outs = {name: np.zeros(BATCH * LONGEST * np.dtype(d).itemsize, np.uint8) for name, d in COLUMNS.items()}

    def __call__(self, rows: dict[str, list[Any]], lengths: np.ndarray) -> dict[str, np.ndarray]:
        """`rows[name]` holds one buffer of bytes per row; `[64, T]` of each column."""
        width, batch = int(lengths.max()), {}
        for name, dtype in COLUMNS.items():
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


class Ours(Peer):
    """`append`, and `read_padded`."""

    name = "trajectory_store"
    needs = "numpy"
    backend = "memmap"

    def create(self, path, rows):
        schema = Schema([Column(name, dtype, ragged=True) for name, dtype in COLUMNS.items()])
        self.store = TrajectoryStore.create(path, schema, backend=self.backend)

    def append(self, commit):
        self.store.append(commit)

    def close(self):
        self.store.close()

    def open(self, path, rows):
        self.store = TrajectoryStore.open(path)
        self.ids, self.names = self.store.ids(), list(COLUMNS)

    def count(self):
        return len(self.ids)

    def sample(self, rows):
        return self.store.read_padded(self.ids[rows], self.names)


class OursZarr(Ours):
    """The same calls on the backend for object stores, here on local files."""

    name = "trajectory_store, zarr backend"
    needs = "zarr"
    backend = "zarr"


class LazyStack(Peer):
    """TensorDicts in RAM that refer to the tensors given; padded by the stack's own method."""

    name = "TorchRL LazyStackStorage (RAM)"
    needs = "torchrl"
    on_disk = False
    note = "keeps references in RAM and copies nothing"

    def create(self, path, rows):
        from torchrl.data import LazyStackStorage

        self.storage, self.at = LazyStackStorage(rows), 0

    def append(self, commit):
        import torch
        from tensordict import LazyStackedTensorDict, TensorDict

        lengths = commit["input_ids"].lengths.tolist()
        parts = {name: torch.from_numpy(commit[name].values).split(lengths) for name in COLUMNS}
        rows = [TensorDict({name: part[i] for name, part in parts.items()}, []) for i in range(len(lengths))]
        self.storage.set(range(self.at, self.at + len(rows)), LazyStackedTensorDict(*rows))
        self.at += len(rows)

    def count(self):
        return len(self.storage)

    def sample(self, rows):
        import torch

        stack = self.storage.get(torch.from_numpy(rows))
        return {name: stack.get(name, as_padded_tensor=True, padding_value=0) for name in COLUMNS}


class LazyMemmap(Peer):
    """Rows padded to the longest length there can be, and a length; read by index, cut to the longest row."""

    name = "TorchRL LazyMemmapStorage (padded)"
    needs = "torchrl"

    def create(self, path, rows):
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyMemmapStorage

        self.path, self.at = path, 0
        self.storage = LazyMemmapStorage(rows, scratch_dir=path)
        fields = {name: torch.zeros(BATCH, LONGEST, dtype=getattr(torch, d)) for name, d in COLUMNS.items()}
        self.buffer = TensorDict({**fields, "length": torch.zeros(BATCH, dtype=torch.int64)}, [BATCH])

    def append(self, commit):
        import torch

        edges = edges_of(commit)
        for name in COLUMNS:
            padded, values = self.buffer[name].zero_().numpy(), commit[name].values
            for i in range(BATCH):
                padded[i, : edges[i + 1] - edges[i]] = values[edges[i] : edges[i + 1]]
        self.buffer["length"].copy_(torch.from_numpy(commit["input_ids"].lengths))
        self.storage.set(range(self.at, self.at + BATCH), self.buffer)
        self.at += BATCH

    def close(self):
        self.storage.dumps(self.path)

    def open(self, path, rows):
        from torchrl.data import LazyMemmapStorage

        self.storage = LazyMemmapStorage(rows, scratch_dir=path, existsok=True)
        self.storage.loads(path)

    def count(self):
        return len(self.storage)

    def sample(self, rows):
        import torch

        batch = self.storage.get(torch.from_numpy(rows))
        width = int(batch["length"].max())
        return {name: batch[name][:, :width] for name in COLUMNS}

    def salvage(self, path: Path) -> int:
        """Rows with a length in the raw files, which `TensorDict.load_memmap` opens."""
        from tensordict import TensorDict

        return int((TensorDict.load_memmap(path)["length"] > 0).sum())


class PlainZarr(Peer):
    """One flat array per column, chunks of 64 Ki, not compressed; where rows end is appended last."""

    name = "Zarr (zarr-python)"
    needs = "zarr"

    def create(self, path, rows):
        import zarr

        group = zarr.create_group(path)
        kinds = {**COLUMNS, "row_ends": "int64"}
        self.arrays = {
            name: group.create_array(name, shape=(0,), chunks=(1 << 16,), dtype=dtype, compressors=None)
            for name, dtype in kinds.items()
        }
        self.end = 0

    def append(self, commit):
        for name in COLUMNS:
            self.arrays[name].append(commit[name].values)
        ends = self.end + commit["input_ids"].offsets[1:]
        self.arrays["row_ends"].append(ends)
        self.end = int(ends[-1])

    def open(self, path, rows):
        import zarr

        self.group = zarr.open_group(path, mode="r")
        self.arrays = {name: self.group[name] for name in COLUMNS}
        self.edges = np.concatenate([[0], self.group["row_ends"][:]])
        self.pad = Padder()

    def count(self):
        return len(self.edges) - 1

    def sample(self, rows):
        first, last = self.edges[rows], self.edges[rows + 1]
        where = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
        cuts = np.cumsum(last - first)[:-1]
        flat = {name: array.get_coordinate_selection(where) for name, array in self.arrays.items()}
        return self.pad({n: [octets(r) for r in np.split(v, cuts)] for n, v in flat.items()}, last - first)


def arrow_table(commit: Batch) -> Any:
    """A commit as Arrow lists; the mask as bytes, because Arrow's booleans are bits and unpacking costs more."""
    import pyarrow as pa

    offsets = pa.array(commit["input_ids"].offsets.astype(np.int32))
    flat = {n: commit[n].values.view(np.uint8) if d == "bool" else commit[n].values for n, d in COLUMNS.items()}
    return pa.table({name: pa.ListArray.from_arrays(offsets, pa.array(v)) for name, v in flat.items()})


def list_rows(column: Any) -> tuple[list[memoryview], np.ndarray]:
    """Views of the rows of an Arrow list array, and their lengths."""
    edges = column.offsets.to_numpy()
    values = column.values.to_numpy()
    data, size = octets(values), values.itemsize
    cuts = (edges * size).tolist()
    return [data[a:b] for a, b in itertools.pairwise(cuts)], np.diff(edges)


def pad_table(table: Any, pad: Padder) -> dict[str, np.ndarray]:
    """The rows of a small Arrow table, padded."""
    import pyarrow as pa

    rows, lengths = {}, np.zeros(0)
    for name in COLUMNS:
        rows[name], lengths = list_rows(pa.concat_arrays(table[name].chunks))
    return pad(rows, lengths.astype(np.int64))


class Arrow(Peer):
    """An IPC stream with one record batch per commit; read from a map through views of the buffers."""

    name = "Arrow IPC stream (pyarrow)"
    needs = "pyarrow"

    def create(self, path, rows):
        import pyarrow as pa

        path.mkdir()
        self.schema = arrow_table(make_commits(1)[0]).schema
        self.sink = pa.OSFile(str(path / "data.arrow"), "wb")
        self.writer = pa.ipc.new_stream(self.sink, self.schema)

    def append(self, commit):
        self.writer.write_table(arrow_table(commit))

    def close(self):
        self.writer.close()
        self.sink.close()

    def open(self, path, rows):
        import pyarrow as pa

        self._views(pa.ipc.open_stream(pa.memory_map(str(path / "data.arrow"))).read_all())

    def _views(self, table):
        parts = {name: [list_rows(chunk) for chunk in table[name].chunks] for name in COLUMNS}
        self.rows = {name: [row for rows, _ in part for row in rows] for name, part in parts.items()}
        self.lengths = np.concatenate([sizes for _, sizes in parts["input_ids"]]).astype(np.int64)
        self.pad = Padder()

    def count(self):
        return len(self.lengths)

    def sample(self, rows):
        picked = rows.tolist()
        return self.pad({name: [view[i] for i in picked] for name, view in self.rows.items()}, self.lengths[rows])

    def salvage(self, path: Path) -> int:
        """Rows of the whole record batches before the torn one, read one by one."""
        import pyarrow as pa

        count, stream = 0, pa.ipc.open_stream(pa.memory_map(str(path / "data.arrow")))
        try:
            while True:
                count += stream.read_next_batch().num_rows
        except (StopIteration, pa.ArrowInvalid, OSError):
            return count


class HuggingFace(Peer):
    """`ArrowWriter`, one table per commit; `Dataset.from_file` in Arrow format, indexed by a list of rows."""

    name = "Hugging Face datasets"
    needs = "datasets"

    def create(self, path, rows):
        from datasets import Features, List, Value
        from datasets.arrow_writer import ArrowWriter

        path.mkdir()
        kinds = {**COLUMNS, "assistant_mask": "uint8"}
        features = Features({name: List(Value(kind)) for name, kind in kinds.items()})
        self.writer = ArrowWriter(path=str(path / "data.arrow"), features=features)

    def append(self, commit):
        self.writer.write_table(arrow_table(commit))

    def close(self):
        self.writer.finalize()

    def open(self, path, rows):
        from datasets import Dataset

        self.data = Dataset.from_file(str(path / "data.arrow")).with_format("arrow")
        self.pad = Padder()

    def count(self):
        return len(self.data)

    def sample(self, rows):
        return pad_table(self.data[rows.tolist()], self.pad)

    salvage = Arrow.salvage


class Lmdb(Peer):
    """One blob per trajectory under its number; one transaction per commit, not synced."""

    name = "LMDB"
    needs = "lmdb"

    def create(self, path, rows):
        import lmdb

        self.env, self.at = lmdb.open(str(path), map_size=1 << 33, writemap=True, sync=False), 0

    def append(self, commit):
        edges, columns = edges_of(commit), [commit[name].values for name in COLUMNS]
        with self.env.begin(write=True) as txn:
            for a, b in itertools.pairwise(edges):
                head = (b - a).to_bytes(8, "little")
                txn.put(self.at.to_bytes(8, "big"), b"".join([head, *(c[a:b].tobytes() for c in columns)]), append=True)
                self.at += 1

    def close(self):
        self.env.close()

    def open(self, path, rows):
        import lmdb

        self.env = lmdb.open(str(path), readonly=True, readahead=False)
        self.pad = Padder()

    def count(self):
        return self.env.stat()["entries"]

    def sample(self, rows):
        with self.env.begin(buffers=True) as txn:
            blobs = [txn.get(i.to_bytes(8, "big")) for i in rows.tolist()]
            lengths = np.array([int.from_bytes(blob[:8], "little") for blob in blobs])
            views, skip = {}, np.full(len(rows), 8)
            for name, dtype in COLUMNS.items():
                after = skip + lengths * np.dtype(dtype).itemsize
                cuts = zip(blobs, skip.tolist(), after.tolist(), strict=True)
                views[name], skip = [blob[a:b] for blob, a, b in cuts], after
            return self.pad(views, lengths)


class Lance(Peer):
    """One appended version per commit; compacted and old versions removed before reading; `take`."""

    name = "Lance"
    needs = "lance"

    def create(self, path, rows):
        self.path = str(path)

    def append(self, commit):
        import lance

        lance.write_dataset(arrow_table(commit), self.path, mode="append" if Path(self.path).exists() else "create")

    def close(self):
        import lance

        data = lance.dataset(self.path)
        data.optimize.compact_files()
        data.cleanup_old_versions(older_than=datetime.timedelta(0))

    def open(self, path, rows):
        import lance

        self.data = lance.dataset(str(path))
        self.pad = Padder()

    def count(self):
        return self.data.count_rows()

    def sample(self, rows):
        return pad_table(self.data.take(rows.tolist(), columns=list(COLUMNS)), self.pad)


PEERS: list[type[Peer]] = [Ours, OursZarr, LazyStack, LazyMemmap, PlainZarr, Arrow, HuggingFace, Lmdb, Lance]
PACKAGES = ("numpy", "torch", "torchrl", "tensordict", "zarr", "pyarrow", "datasets", "lmdb", "pylance")


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


def check(peer: Peer, commits: list[Batch], rows: np.ndarray) -> None:
    """Stop if the reader gives back anything but what was written."""
    batch = peer.sample(rows)
    for name in COLUMNS:
        got = np.asarray(batch[name])
        for k, row in enumerate(rows.tolist()):
            want = commits[row // BATCH][name][row % BATCH]
            if not (np.array_equal(got[k, : len(want)], want) and not got[k, len(want) :].any()):
                raise ValueError(f"{peer.name}: column {name} of row {row} is not what was written.")


def disk_bytes(path: Path) -> int:
    """Blocks in use under a folder."""
    return sum(f.stat().st_blocks * 512 for f in path.rglob("*") if f.is_file())


def child(command: str, name: str, path: Path, rows: int) -> None:
    """The parts that need a process of their own; they answer on standard output."""
    peer = next(kind for kind in PEERS if kind.name == name)()
    if command == "write":
        commits = make_commits(20)
        peer.create(path, rows)
        for i in range(rows // BATCH):
            peer.append(commits[i % len(commits)])
            os.write(1, b"%d\n" % ((i + 1) * BATCH))
        time.sleep(60)
    elif command == "open":
        warm_up(type(peer))
        picks = np.random.default_rng(1).choice(rows, BATCH, replace=False)
        start = time.perf_counter()
        peer.open(path, rows)
        opened = time.perf_counter()
        peer.sample(picks)
        print(json.dumps([opened - start, time.perf_counter() - start]))
    else:
        print(json.dumps(survivors(peer, path, rows)))


def warm_up(kind: type[Peer]) -> None:
    """Use the library once on another small store, so that imports do not count as opening."""
    with tempfile.TemporaryDirectory() as folder:
        peer, path = kind(), Path(folder, "small")
        peer.create(path, BATCH)
        peer.append(make_commits(1)[0])
        peer.close()
        peer.open(path, BATCH)
        peer.sample(np.arange(BATCH))


def survivors(peer: Peer, path: Path, acknowledged: int) -> dict[str, Any]:
    """Open what a killed writer left and compare every acknowledged row."""
    try:
        peer.open(path, 1 << 16)
        count = min(peer.count(), acknowledged)
        commits = make_commits(20)
        for first in range(0, count, BATCH):
            rows = np.arange(first, min(count, first + BATCH))
            check(peer, [commits[i % 20] for i in range(first // BATCH + 1)], rows)
        return {"rows": count, "error": ""}
    except Exception as error:  # noqa: BLE001 - whatever the reader raises is the result
        result = {
            "rows": 0,
            "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120],
        }
    try:
        result["salvaged"] = peer.salvage(path) if hasattr(peer, "salvage") else 0
    except Exception as error:  # noqa: BLE001
        result["salvage_error"] = type(error).__name__
    return result


def run_child(command: str, name: str, path: Path, rows: int) -> Any:
    """The answer of a fresh process."""
    line = [sys.executable, __file__, "--child", command, name, str(path), str(rows)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{name}, {command}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def kill_writer(name: str, path: Path, rows: int, rng: random.Random) -> dict[str, Any]:
    """SIGKILL a process in the middle of appending; what its rows look like afterwards."""
    line = [sys.executable, __file__, "--child", "write", name, str(path), str(rows)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as writer:
        try:
            seen, wanted = 0, BATCH * rng.randint(10, 25)
            while seen < wanted:
                text = writer.stdout.readline()
                if not text:
                    raise RuntimeError(f"{name}: the writer ended after {seen} rows.")
                seen = int(text)
            time.sleep(rng.random() * 0.003)
        finally:
            writer.kill()
        rest = writer.stdout.read().split(b"\n")[:-1]
    acknowledged = int(rest[-1]) if rest else seen
    if acknowledged == rows:
        raise RuntimeError(f"{name}: the writer was done before it was killed; give it more rows.")
    return {"acknowledged": acknowledged, **run_child("check", name, path, acknowledged)}


def measure_appends(peers: list[Peer], root: Path, commits: list[Batch], memcpy: Memcpy) -> dict[str, Clocks]:
    """All stores take turns, a tenth of the commits each; the first commit of a store is not counted."""
    clocks, part = {peer.name: Clocks() for peer in peers}, max(2, len(commits) // 10)
    for peer in peers:
        peer.create(root / peer.needs / type(peer).__name__, len(commits) * BATCH)
    for first in range(0, len(commits), part):
        memcpy.take()
        for peer in peers:
            for i, commit in enumerate(commits[first : first + part]):
                with clocks[peer.name] if first + i else Clocks():
                    peer.append(commit)
    for peer in peers:
        peer.close()
    return clocks


def measure_samples(peers: list[Peer], root: Path, commits: list[Batch], memcpy: Memcpy, turns: int) -> dict[str, Any]:
    """All stores take turns of at most 40 batches or 0.4 seconds, after a few that are not counted."""
    count = len(commits) * BATCH
    rng = np.random.default_rng(3)
    picks = [rng.choice(count, BATCH, replace=False) for _ in range(100)]
    clocks = {peer.name: Clocks() for peer in peers}
    for peer in peers:
        if peer.on_disk:
            peer.open(root / peer.needs / type(peer).__name__, count)
        if peer.count() != count:
            raise ValueError(f"{peer.name} has {peer.count()} rows of {count}.")
        check(peer, commits, picks[0])
    for _ in range(turns):
        memcpy.take()
        for peer in peers:
            start = time.perf_counter()
            for i in rng.permutation(len(picks))[:50]:
                late = time.perf_counter() - start
                if late > 0.4:
                    break
                with clocks[peer.name] if i > 9 or late > 0.1 else Clocks():
                    peer.sample(picks[i])
    lengths = np.concatenate([commit["input_ids"].lengths for commit in commits])
    return {"clocks": clocks, "payload": float(np.mean([lengths[p].sum() for p in picks])) * TOKEN_BYTES}


def survived(rounds: list[dict[str, Any]]) -> str:
    """The cell of the table on SIGKILL."""
    total, kept = sum(r["acknowledged"] for r in rounds), sum(r["rows"] for r in rounds)
    if kept == total:
        return f"yes ({total} of {total})"
    text = f"no ({kept} of {total})"
    saved = sum(min(r.get("salvaged", r["rows"]), r["acknowledged"]) for r in rounds)
    return text + (f"; by hand {saved}" if saved > kept else "")


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| store | append, x memcpy | (processor) | sample, x memcpy | (processor) "
        "| open + first batch, x ours | ms | disk / payload | acknowledged rows after SIGKILL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = next((r["open_ms"] for r in results.values() if r["open_ms"]), None)
    for name, r in results.items():
        opened = (f"{r['open_ms'] / base:.2f}", f"{r['open_ms']:.1f}") if r["open_ms"] else ("-", "-")
        disk = f"{r['disk']:.2f}" if r["disk"] else "-"
        speeds = [f"{r[key]:.4f}" for key in ("append", "append_cpu", "sample", "sample_cpu")]
        lines.append("| " + " | ".join([name, *speeds, *opened, disk, r["survived"]]) + " |")
    return "\n".join(lines)


def hardware() -> str:
    """Processor, cores, memory, system."""
    info = Path("/proc/cpuinfo")
    model = platform.processor()
    if info.exists():
        model = next((s.split(":")[1].strip() for s in info.read_text().splitlines() if "model name" in s), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return (
        f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}, load {load:.1f} at the start"
    )


def versions() -> str:
    """What is compared, and Python."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def present(only: list[str]) -> list[type[Peer]]:
    """The stores that can run here; the others are named."""
    kinds = [k for k in PEERS if not only or any(text.lower() in k.name.lower() for text in only)]
    for kind in kinds:
        if importlib.util.find_spec(kind.needs) is None:
            print(f"skipped: {kind.name} (the module {kind.needs} is not installed)")
    return [kind for kind in kinds if importlib.util.find_spec(kind.needs)]


def run(kinds: list[type[Peer]], root: Path, *, quick: bool) -> dict[str, Any]:
    """Measure everything and return the numbers."""
    import torch

    torch.set_num_threads(1)
    commits, memcpy = make_commits(30 if quick else 160), Memcpy()
    peers = [kind() for kind in kinds]
    for peer in peers:
        __import__(peer.needs)
        (root / peer.needs).mkdir(exist_ok=True)
    payload = sum(len(c["input_ids"].values) for c in commits) * TOKEN_BYTES
    appends = measure_appends(peers, root, commits, memcpy)
    samples = measure_samples(peers, root, commits, memcpy, 3 if quick else 6)
    rates, rng, results = memcpy.rates(), random.Random(), {}
    rounds = 2 if quick else 3
    for peer in peers:
        path, clocks = root / peer.needs / type(peer).__name__, samples["clocks"][peer.name]
        per_commit, per_batch = payload / len(commits), samples["payload"]
        wall, cpu = appends[peer.name].result()
        result = {"append": per_commit / wall / rates[0], "append_cpu": per_commit / cpu / rates[1]}
        result["append_ms"], (wall, cpu) = wall * 1e3, clocks.result()
        result |= {"sample": per_batch / wall / rates[0], "sample_cpu": per_batch / cpu / rates[1]}
        result |= {"sample_ms": wall * 1e3, "open_ms": None, "disk": None, "survived": "no (nothing on disk)"}
        if peer.on_disk:
            opens = [run_child("open", peer.name, path, len(commits) * BATCH)[1] for _ in range(rounds)]
            result |= {"open_ms": statistics.median(opens) * 1e3, "disk": disk_bytes(path) / payload}
            kills = [
                kill_writer(peer.name, root / peer.needs / f"{type(peer).__name__}-{i}", 2000 * BATCH, rng)
                for i in range(rounds)
            ]
            result |= {"survived": survived(kills), "kills": kills}
        results[peer.name] = result
    return {
        "rows": len(commits) * BATCH,
        "payload_mb": payload / 1e6,
        "memcpy_gb_s": [rate / 1e9 for rate in rates],
        "kills": rounds,
        "results": results,
    }


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1920 rows instead of 10240")
    parser.add_argument("--only", nargs="+", default=[], help="stores whose name contains one of these")
    parser.add_argument("--save", type=Path, help="write the numbers as JSON too")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        command, name, path, rows = options.child
        child(command, name, Path(path), int(rows))
        return 0
    start, date = time.perf_counter(), datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    about = {"date": date, "hardware": hardware(), "versions": versions()}
    with tempfile.TemporaryDirectory() as folder:
        found = {**about, **run(present(options.only), Path(folder), quick=options.quick)}
    for key in about:
        print(f"{key}: {about[key]}")
    print(
        f"{found['rows']} trajectories, {found['payload_mb']:.0f} MB; memcpy {found['memcpy_gb_s'][0]:.1f} GB/s; "
        f"{found['kills']} kills per store; the run took {time.perf_counter() - start:.0f} s\n"
    )
    print(table(found["results"]))
    for name, result in found["results"].items():
        for kill in result.get("kills", []):
            if kill["error"]:
                print(f"{name} after SIGKILL: {kill['error']}")
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
