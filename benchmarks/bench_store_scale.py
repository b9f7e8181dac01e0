"""Sampling from 20 thousand and from a million trajectories: a batch may not take longer because the store is larger.

    python benchmarks/bench_store_scale.py [--quick] [--folder FOLDER] [--mean TOKENS]

Both stores have the same lengths (log-normal, mean 200 tokens, 13 bytes each). The small one is 52 MB, more than the
last cache of the machine that this was written on (32 MB), the large one 2.6 GB, so both batches come from memory.
Warm means that every row was read once by this process, so its pages are mapped. The stores take turns, and processor
time counts; of many repetitions the tenth percentile, as other work only adds.

`read_padded` takes 64 random rows to four padded columns; `TrajectoryReplayBuffer.sample()` draws them itself from the
same stores and gives a TensorDict. Memory itself is slower where more of it is in use: caches and page tables miss more
often. The bare copies of such slices, one after the other and without a store around them, show by how much.
`read_padded` stays below their ratio because it looks at the first value of every row of a segment before it copies, so
that these waits for memory overlap.

It needs about 3 GB of disk and as much memory for the page cache; with less the large store is not warm, and the
benchmark says so.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _stores import BATCH, BYTES_PER_TOKEN, TOKEN_COLUMNS, Table, fill, parser, race

from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from trajectory_store import TrajectoryStore

TARGET = 1.2
PER_COMMIT = 2000


def touch(store: TrajectoryStore, ids: np.ndarray) -> None:
    """Map every page of the token columns, and read it."""
    for first in range(0, len(ids), 4096):
        for name in TOKEN_COLUMNS:
            store.read_ragged(name, ids[first : first + 4096])


def major_faults() -> int:
    """Pages that this process waited for a disk for."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[9])


def sampler(path: Path, count: int) -> Callable[[], object]:
    """Random batches by ids."""
    store = TrajectoryStore.open(path)
    ids, rng, names = store.ids(), np.random.default_rng(3), list(TOKEN_COLUMNS)
    assert len(ids) == count
    touch(store, ids)
    return lambda: store.read_padded(ids[rng.integers(0, count, BATCH)], names)


def bare_sampler(path: Path, batches: int = 64) -> Callable[[], object]:
    """Nothing but the copies of such a batch: the slices are known, the target is reused. What memory alone costs."""
    store = TrajectoryStore.open(path)
    ids, rng = store.ids(), np.random.default_rng(4)
    touch(store, ids)
    plans = []
    for _ in range(batches):
        picked = ids[rng.integers(0, len(ids), BATCH)]
        width = int(store.lengths("input_ids", picked).max())
        plan = []
        for name in TOKEN_COLUMNS:
            target = memoryview(np.zeros(BATCH * width, store.schema[name].np_dtype)).cast("B")
            item = store.schema[name].np_dtype.itemsize
            for k, row_id in enumerate(picked.tolist()):
                segment = store._catalog.segments[row_id >> 32]
                first, last = (int(x) * item for x in segment.offsets("tokens")[row_id & 0xFFFFFFFF :][:2])
                at = k * width * item
                plan.append((target, at, at + last - first, segment.raw(name), first, last))
        plans.append(plan)
    turn = iter(range(1 << 60))

    def copy() -> None:
        for target, a, b, source, c, d in plans[next(turn) % batches]:
            target[a:b] = source[c:d]

    return copy


def scalars(places: np.ndarray) -> dict[str, np.ndarray]:
    """What a trajectory has beside its tokens."""
    return {
        "group_id": places // 8,
        "trajectory_id": places,
        "created_at": places.astype(np.float64),
        "advantage": np.sin(places).astype(np.float32),
        "num_prompt_tokens": np.full(len(places), 8, np.int32),
    }


def buffer_sampler(stack: contextlib.ExitStack, path: Path, count: int) -> Callable[[], object]:
    """`TrajectoryReplayBuffer.sample`."""
    from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer

    buffer = TrajectoryReplayBuffer(storage=path, batch_size=BATCH)
    stack.callback(buffer.storage.close)
    touch(buffer.store, buffer.store.ids())
    assert len(buffer) == count
    return buffer.sample


def main() -> int:
    """Print the table; exit 1 with --check where a goal is missed."""
    words = parser(__doc__, "200 thousand rows instead of a million")
    words.add_argument("--folder", help="where the stores are made")
    words.add_argument("--mean", type=float, default=200, help="tokens per trajectory")
    words.add_argument("--no-torch", action="store_true", help="only the store, not the replay buffer")
    options = words.parse_args()
    counts = (20_000, 200_000) if options.quick else (20_000, 1_000_000)
    repeats = 600 if options.quick else 3000
    table = Table()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        samplers = {}
        for count in counts:
            start = time.perf_counter()
            payload = fill(
                Path(folder, str(count)),
                count,
                mean=options.mean,
                per_commit=PER_COMMIT,
                schema=trajectory_schema(),
                more=scalars,
            )
            samplers[str(count)] = sampler(Path(folder, str(count)), count)
            tokens = payload / count / BYTES_PER_TOKEN
            print(f"{count} rows, {tokens:.0f} tokens on average, {payload / 1e6:.0f} MB: ", end="")
            print(f"{time.perf_counter() - start:.0f} s")
        compare(table, "read_padded, 64 rows, 4 columns", samplers, repeats)
        bare = {str(count): bare_sampler(Path(folder, str(count))) for count in counts}
        compare(table, "bare copies of such slices, one by one, without a store", bare, repeats, goal=None)
        if not options.no_torch:
            import torch

            torch.set_num_threads(1)
            warnings.filterwarnings("ignore")
            with contextlib.ExitStack() as stack:
                samplers = {str(count): buffer_sampler(stack, Path(folder, str(count)), count) for count in counts}
                compare(table, "TrajectoryReplayBuffer.sample(), 64 rows", samplers, repeats)
    return int(options.check and not table.good)


def compare(
    table: Table, what: str, samplers: dict[str, Callable[[], object]], repeats: int, goal: float | None = TARGET
) -> None:
    """Two lines of times and one of the ratio."""
    faults = major_faults()
    found = race(samplers, repeats // 25, 25)
    if major_faults() - faults > repeats // 100:
        print("the large store did not stay in memory: the ratio below is not that of warm stores")
    for name, us in found.items():
        table.line(f"{what}, of {name}", us, "us")
    (few, small), (many, large) = found.items()
    table.line(f"{what}: {many} / {few}", large / small, "x", goal)


if __name__ == "__main__":
    raise SystemExit(main())
