"""Sampling: 64 random trajectories to 4 padded columns, warm, against memcpy, LMDB and TorchRL in the same run.

    python benchmarks/bench_store_sample.py [--quick] [--check] [--clock cpu] [--threads 1]

A ratio of 1 is one thread's memcpy of the payload (13 bytes per token), so the padding, which is written too, counts
against us: a batch of these lengths writes four times its payload. The time of that memcpy for all that is written has
a line of its own. LMDB holds one blob per trajectory and fills the same matrices with a loop of slices; TorchRL's
LazyStackStorage holds TensorDicts in RAM. Stores and memcpy take turns of a whole pass over the batches, so a slow
minute of the machine hits all of them; the first pass is not counted. A peer that is not installed is left out.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from _peers.base import Clocks, Memcpy, Peer, installed, make_commits
from _peers.keyed import Lmdb
from _peers.ours import Ours
from _peers.torchrl_storages import LazyStack
from _stores import BATCH, BYTES_PER_TOKEN, TOKEN_COLUMNS, Table, parser

from trajectory_store import Column, Schema, TrajectoryStore

MEMCPY, LMDB, LAZY_STACK = 0.20, 1.0, 4.0
MORE_SCALARS = 12
CLOCKS = ("wall", "cpu")


class Positional(Ours):
    """Our store read with `pread`, as it is on network file systems."""

    name = 'trajectory_store, io="pread"'

    def open(self, path, rows):
        self.store = TrajectoryStore.open(path, io="pread")
        self.ids, self.names = self.store.ids(), list(TOKEN_COLUMNS)


class WithScalars(Ours):
    """The four columns and 13 scalars: what a replay buffer asks for."""

    name = "trajectory_store, and 13 scalars"

    def create(self, path, rows):
        ragged = [Column(name, dtype, ragged=True) for name, dtype in TOKEN_COLUMNS.items()]
        scalars = [Column(f"scalar_{i}", "float32", fill=0.0) for i in range(MORE_SCALARS + 1)]
        self.store = TrajectoryStore.create(path, Schema([*ragged, *scalars]))

    def open(self, path, rows):
        self.store = TrajectoryStore.open(path)
        self.ids, self.names = self.store.ids(), self.store.schema.names


def measure(peers: list[Peer], picks: list[np.ndarray], turns: int, memcpy: Memcpy) -> dict[str, Clocks]:
    """The batches of each store."""
    clocks = {peer.name: Clocks() for peer in peers}
    for turn in range(turns + 1):
        memcpy.take()
        for peer in peers:
            for rows in picks[: len(picks) // 4]:
                peer.sample(rows)
            for rows in picks:
                with clocks[peer.name] if turn else Clocks():
                    batch = peer.sample(rows)
                del batch
    return clocks


def main() -> int:
    """Print the table; exit 1 with --check where a goal is missed."""
    words = parser(__doc__, "2 thousand rows instead of 20 thousand")
    words.add_argument("--clock", choices=CLOCKS, default="wall", help="what is measured")
    words.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    options = words.parse_args()
    commits = make_commits(32 if options.quick else 312)
    rows, turns = len(commits) * BATCH, 3 if options.quick else 6
    rng = np.random.default_rng(0)
    picks = [rng.integers(0, rows, BATCH) for _ in range(60 if options.quick else 200)]
    lengths = np.concatenate([c["input_ids"].lengths for c in commits])
    payload = float(np.mean([lengths[p].sum() for p in picks])) * BYTES_PER_TOKEN
    memcpy, clock = Memcpy(), CLOCKS.index(options.clock)
    kinds = installed([Ours, Positional, WithScalars, Lmdb, LazyStack])
    if LazyStack in kinds:
        import torch

        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        peers = [kind() for kind in kinds]
        for peer in peers:
            path = Path(folder, type(peer).__name__)
            peer.create(path, rows)
            for commit in commits:
                peer.append(commit)
            if peer.on_disk:
                peer.close()
                peer.open(path, rows)
            batch = peer.sample(picks[0])
            for k, row in enumerate(picks[0].tolist()):
                for name in TOKEN_COLUMNS:
                    want = commits[row // BATCH][name][row % BATCH]
                    assert (np.asarray(batch[name])[k, : len(want)] == want).all()
        seconds = {n: c.result()[clock] for n, c in measure(peers, picks, turns, memcpy).items()}
    copy = memcpy.rates()[clock]
    print(
        f"{options.clock} time; memcpy {copy / 1e9:.1f} GB/s; {payload / 1e3:.0f} kB per batch; {rows} trajectories\n"
    )
    print(f"{'store':36}{'us/batch':>10}{'Mtok/s':>10}{'x memcpy':>10}")
    for name, s in seconds.items():
        print(f"{name:36}{s * 1e6:10.0f}{payload / BYTES_PER_TOKEN / s / 1e6:10.0f}{payload / s / copy:10.3f}")
    print()
    table, ours = Table(), seconds[Ours.name]
    table.line("payload, x memcpy", payload / ours / copy, "x", MEMCPY, least=True)
    written = float(np.mean([BATCH * lengths[p].max() for p in picks])) * BYTES_PER_TOKEN
    table.line("  what is written with the padding, x memcpy", written / ours / copy, "x")
    table.line("  payload of a bare memcpy of all that is written, x memcpy", payload / written, "x")
    if Lmdb.name in seconds:
        table.line("times as fast as LMDB", seconds[Lmdb.name] / ours, "x", LMDB, least=True)
    if LazyStack.name in seconds:
        ratio = seconds[LazyStack.name] / ours
        table.line("times as fast as LazyStackStorage + as_padded_tensor", ratio, "x", LAZY_STACK, least=True)
    table.line("13 scalars more, as a part of the batch's time", seconds[WithScalars.name] / ours - 1)
    return int(options.check and not table.good)


if __name__ == "__main__":
    raise SystemExit(main())
