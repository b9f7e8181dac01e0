"""Appending: commits of 64 trajectories against memcpy, LMDB and TorchRL in the same run.

    python benchmarks/bench_store_append.py [--quick] [--check] [--clock wall] [--threads 1]

A ratio of 1 is one thread's memcpy of the payload (13 bytes per token). Our commits are checksummed, and each survives
`kill -9`; LazyStackStorage keeps references in RAM. Stores and memcpy take turns of five commits; every ratio is taken
within a turn, and the median of all turns is the figure, so a slow minute of the machine hits both sides. Commits that
wait for no disk are measured by processor time, which other work disturbs least; the wall time has a column of its
own. The synced rows wait for the disk at each commit, so they are wall time always, and take turns commit by commit;
they are compared by the lower quartile of all commits, because whoever else uses the disk or the processor only adds.

A virtual machine may have handed free memory back to its host. The first write to such a page then costs ten times the
copy (measured: 890 instead of 115 us for 500 kB, whatever writes them), while memcpy here has its pages. So a turn
begins with a file that is written and deleted: its pages are there, and the next ones to be given out.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _peers.base import Batch, Peer, installed, make_commits
from _peers.keyed import Lmdb, LmdbSynced
from _peers.ours import Ours
from _peers.torchrl_storages import LazyStack
from _stores import BATCH, BYTES_PER_TOKEN, TOKEN_COLUMNS, Table, have_pages, parser

from trajectory_store import Column, Schema, TrajectoryStore

SPARSE, PREALLOCATED, SYNCED = 0.07, 0.15, 1.0
PART = 5
CLOCKS = ("wall", "cpu")


class Durable(Ours):
    """Our store with the options of a row of the table."""

    def create(self, path, rows):
        schema = Schema([Column(name, dtype, ragged=True) for name, dtype in TOKEN_COLUMNS.items()])
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

    name = "power-durable"

    def options(self):
        return {"durability": "power"}


class Group(Durable):
    """Synced too, by one thread, so nobody shares the sync."""

    name = "group-durable (one thread)"

    def options(self):
        return {"durability": "group"}


Turns = dict[str, list[np.ndarray]]
"""Per store one array per turn: `[commits, 2]` seconds by the wall clock and of the processor."""


def clocks() -> np.ndarray:
    """Wall and processor time now."""
    return np.array([time.perf_counter(), time.process_time()])


def copies(memory: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Seconds per byte of one thread's memcpy, both clocks, the median of a few."""
    found = []
    for _ in range(4):
        start = clocks()
        np.copyto(target, memory)
        found.append(clocks() - start)
    return np.median(found, axis=0) / memory.nbytes


def measure(peers: list[Peer], commits: list[Batch], root: Path, *, synced: bool = False) -> tuple[Turns, np.ndarray]:
    """The stores' turns, and per turn what memcpy takes; the first commits make files and are not counted."""
    part = 1 if synced else PART
    turns: Turns = {peer.name: [] for peer in peers}
    memory = np.random.default_rng(0).integers(0, 255, 1 << 26, dtype=np.uint8)
    target = np.zeros_like(memory)
    bare = []
    for peer in peers:
        peer.create(root / type(peer).__name__, len(commits) * BATCH)
        peer.append(commits[0])
    for turn, first in enumerate(range(1, len(commits), part)):
        if not synced:  # deleted files would be in the way of whoever syncs first
            sizes = [[commit[name].values.nbytes for name in TOKEN_COLUMNS] for commit in commits[first : first + part]]
            have_pages(root, sizes * 2 * len(peers))
        bare.append(copies(memory, target))
        for i in range(len(peers)):  # forwards and backwards, as each pays for what the one before left to the disk
            peer = peers[(turn + (i if turn % 2 else -i)) % len(peers)]
            marks = [clocks()]
            for commit in commits[first : first + part]:
                peer.append(commit)
                marks.append(clocks())
            turns[peer.name].append(np.diff(marks, axis=0))
    for peer in peers:
        peer.close()
    return turns, np.array(bare)


def against(turns: Turns, bare: np.ndarray, payload: float, name: str) -> np.ndarray:
    """Payload bytes per second over those of memcpy, both clocks: the median over the turns."""
    return np.median([b * payload / np.median(t, axis=0) for b, t in zip(bare, turns[name], strict=True)], axis=0)


def main() -> int:
    """Print the table; exit 1 with --check where a goal is missed."""
    words = parser(__doc__, "61 commits instead of 241")
    words.add_argument("--clock", choices=CLOCKS, default="cpu", help="what the goals without a sync are held against")
    words.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    words.add_argument("--folder", help="where the stores are made; the synced rows need a disk")
    options = words.parse_args()
    commits = make_commits(61 if options.quick else 241)
    payload = sum(len(c["input_ids"].values) for c in commits) / len(commits) * BYTES_PER_TOKEN
    quick_kinds = installed([Sparse, Preallocated, Lmdb, LazyStack])
    synced_kinds = installed([Power, Group, LmdbSynced])
    if LazyStack in quick_kinds:
        import torch

        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        few = commits[: 31 if options.quick else 101]
        unsynced, bare = measure([kind() for kind in quick_kinds], commits, Path(folder))
        waiting, slow = measure([kind() for kind in synced_kinds], few, Path(folder), synced=True)
    copy = 1 / np.median(bare, axis=0)
    print(f"memcpy {copy[0] / 1e9:.1f} GB/s; {payload / 1e3:.0f} kB per commit of {BATCH}; {len(bare)} turns\n")
    heads = ("p25 ms", "p50 ms", "p99 ms", "mean", "cpu p50", "x memcpy", "(cpu)")
    print(f"{'store':32}" + "".join(f"{head:>9}" for head in heads))
    for turns, memory in ((unsynced, bare), (waiting, slow)):
        for name, found in turns.items():
            ms = np.concatenate(found) * 1e3
            wall, cpu = against(turns, memory, payload, name)
            low, middle, high = np.percentile(ms[:, 0], [25, 50, 99])
            print(
                f"{name:32}{low:9.3f}{middle:9.3f}{high:9.2f}{ms[:, 0].mean():9.3f}{np.median(ms[:, 1]):9.3f}", end=""
            )
            print(f"{wall:9.4f}{cpu:9.4f}")
    print()
    table, clock = Table(), CLOCKS.index(options.clock)
    for kind, goal in ((Sparse, SPARSE), (Preallocated, PREALLOCATED)):
        ratio = against(unsynced, bare, payload, kind.name)[clock]
        table.line(f"{kind.name.replace('process', 'process-durable')}, x memcpy", ratio, "x", goal, least=True)
    if LmdbSynced.name in waiting:
        for kind in (Power, Group):
            peer, ours = (np.percentile(np.concatenate(waiting[n])[:, 0], 25) for n in (LmdbSynced.name, kind.name))
            table.line(f"{kind.name}: times as fast as LMDB synced", peer / ours, "x", SYNCED, least=True)
    return int(options.check and not table.good)


if __name__ == "__main__":
    raise SystemExit(main())
