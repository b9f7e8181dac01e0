"""Appending: commits of 64 trajectories against memcpy, LMDB and TorchRL in the same run.

    python tests/benchmarks/bench_store_append.py [--quick] [--check] [--clock cpu] [--threads 1]

A ratio of 1 is one thread's memcpy of the payload (13 bytes per token). Our commits are checksummed, and each survives
`kill -9`; LazyStackStorage keeps references in RAM. Stores and memcpy take turns of a few commits. The synced rows wait
for the disk at each commit, so they are always wall time; the speed of a disk drifts, so they take turns too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _peers.base import BATCH, COLUMNS, TOKEN_BYTES, Batch, Peer, make_commits
from _peers.keyed import Lmdb, LmdbSynced
from _peers.ours import Ours
from _peers.torchrl_storages import LazyStack
from _stores import Table
from bench_store_sample import CLOCKS, Memcpy, installed

from trajectory_store import Column, Schema, TrajectoryStore

SPARSE, PREALLOCATED, SYNCED = 0.07, 0.15, 1.0
PART = 10


class Durable(Ours):
    """Our store with the options of a row of the table."""

    def create(self, path, rows):
        schema = Schema([Column(name, dtype, ragged=True) for name, dtype in COLUMNS.items()])
        self.store = TrajectoryStore.create(path, schema, **self.options())

    def options(self) -> dict[str, Any]:
        """What `TrajectoryStore.create` is called with."""
        return {}


class Sparse(Durable):
    """The defaults."""

    name = "process, sparse"


class Preallocated(Durable):
    """Blocks reserved a segment at a time."""

    name = "process, preallocated"

    def options(self):
        return {"preallocate": True, "segment_rows": 1 << 14, "segment_elements": 1 << 23}


class Power(Durable):
    """Data and record synced before `append` returns."""

    name = "power"

    def options(self):
        return {"durability": "power"}


class Group(Durable):
    """Synced too, by one thread, so nobody shares the sync."""

    name = "group (one thread)"

    def options(self):
        return {"durability": "group"}


def measure(peers: list[Peer], commits: list[Batch], root: Path, memcpy: Memcpy, clock) -> dict[str, np.ndarray]:
    """Seconds per commit; the first one of each store makes its files and is not counted."""
    times: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for peer in peers:
        peer.create(root / type(peer).__name__, len(commits) * BATCH)
    for first in range(0, len(commits), PART):
        memcpy.take()
        for peer in peers:
            for i, commit in enumerate(commits[first : first + PART]):
                start = clock()
                peer.append(commit)
                if first + i:
                    times[peer.name].append(clock() - start)
    for peer in peers:
        peer.close()
    return {name: np.array(t) for name, t in times.items()}


def main() -> int:
    """Print the table; exit 1 with --check where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="40 commits instead of 200")
    parser.add_argument("--check", action="store_true", help="fail where a goal is missed")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="what is measured; not for synced rows")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    options = parser.parse_args()
    commits = make_commits(40 if options.quick else 200)
    payload = sum(len(c["input_ids"].values) for c in commits) / len(commits) * TOKEN_BYTES
    memcpy = Memcpy(CLOCKS[options.clock])
    quick_kinds = installed([Sparse, Preallocated, Lmdb, LazyStack])
    synced_kinds = installed([Power, Group, LmdbSynced])
    if LazyStack in quick_kinds:
        import torch

        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        unsynced = measure([kind() for kind in quick_kinds], commits, Path(folder), memcpy, memcpy.clock)
        few = commits[: 20 if options.quick else 60]
        synced = measure([kind() for kind in synced_kinds], few, Path(folder), memcpy, CLOCKS["wall"])
    copy = memcpy.rate()
    print(f"{options.clock} time; memcpy {copy / 1e9:.1f} GB/s; {payload / 1e3:.0f} kB per commit of {BATCH}\n")
    print(f"{'store':36}{'p50 ms':>10}{'p99 ms':>10}{'GB/s':>8}{'x memcpy':>10}")
    median: dict[str, float] = {}
    for name, times in (unsynced | synced).items():
        median[name], high = np.percentile(times, [50, 99]).tolist()
        speed = payload / median[name]
        print(f"{name:36}{median[name] * 1e3:10.3f}{high * 1e3:10.2f}{speed / 1e9:8.2f}{speed / copy:10.4f}")
    print()
    table = Table()
    table.line("process-durable, sparse, x memcpy", payload / median[Sparse.name] / copy, "x", SPARSE, least=True)
    ratio = payload / median[Preallocated.name] / copy
    table.line("process-durable, preallocated, x memcpy", ratio, "x", PREALLOCATED, least=True)
    if LmdbSynced.name in median:
        ratio = median[LmdbSynced.name] / median[Power.name]
        table.line("power-durable, times as fast as LMDB synced", ratio, "x", SYNCED, least=True)
    return int(options.check and not table.good)


if __name__ == "__main__":
    raise SystemExit(main())
