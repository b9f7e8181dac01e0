"""The TorchRL layer over the store against TorchRL's own classes, in one run on one machine.

Run as `python tests/benchmarks/bench_replay.py [--quick] [--rows 512 4096 20000] [--folder DIR]`. Trajectories are
log-normal in length (mean about 530 tokens), groups of 8. Every line is processor time with one thread: the tenth
percentile of many calls that take turns with the peer's, reads in blocks of 20, writes one by one; the ratios are what
counts. Reads are mapped, from a warm page cache, in the folder for temporary files. Writes are process-durable and go
to `--folder`, by default to memory (`/dev/shm`), as a disk's write-back adds work of its own to both sides. A line with
a goal ends with `met` or `missed`, and the exit code is 1 if one was missed.

`sample()` is compared with TorchRL's `TensorDictReplayBuffer(LazyStackStorage)`, which is asked for every key that it
holds, ragged ones as padded tensors. `extend` is compared with `TrajectoryStore.append` of the same 64 trajectories:
once as arrays that are flat and in the dtypes of the schema already, which is all that an append could be given, and
once row by row, as a stack of TensorDicts has them.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "storage"), str(ROOT / "tests" / "benchmarks")]
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _stores import have_pages  # noqa: E402
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack  # noqa: E402
from torchrl.data import LazyStackStorage, TensorDictReplayBuffer  # noqa: E402
from torchrl.objectives.llm import MCAdvantage as TorchRLAdvantage  # noqa: E402

from rlhf_pipeline.data.keys import COLUMN_OF_KEY  # noqa: E402
from rlhf_pipeline.data.trajectories import (  # noqa: E402
    Text,
    Trajectories,
    columns_of,
    td_of,
)
from rlhf_pipeline.replay.buffer import TrajectoryReplayBuffer  # noqa: E402
from rlhf_pipeline.replay.trajectory_schema import trajectory_schema  # noqa: E402
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage  # noqa: E402
from trajectory_store import RaggedArray, TrajectoryStore  # noqa: E402

BATCH = 64
TOKEN_KEYS = (
    ("tokens", "full"),
    ("masks", "all_assistant_mask"),
    ("log_probs", "full"),
    ("next", "ref_log_probs", "full"),
)


def trajectories(count: int, *, text: bool, rewards: bool, seed: int = 0) -> list[TensorDict]:
    """Ragged trajectories, one TensorDict each; `rewards` adds what TorchRL needs per token."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(5.9, 0.85, count)).clip(32, 2048).astype(int)
    rows = []
    for i, n in enumerate(lengths.tolist()):
        mask = torch.arange(n) >= 16
        row = {
            "tokens": {"full": torch.randint(0, 32000, (n,))},
            "masks": {"all_assistant_mask": mask},
            "log_probs": {"full": -torch.rand(n)},
            "task_reward": torch.tensor(float(i % 3)),
            "group_id": torch.tensor(i // 8),
            "policy_version": torch.tensor(i // BATCH),
            "num_prompt_tokens": torch.tensor(16),
            "trajectory_id": torch.tensor(i),
            "next": {"done": torch.ones(1, dtype=torch.bool), "ref_log_probs": {"full": -torch.rand(n)}},
        }
        if rewards:
            row["next"]["reward"] = torch.randn(n)
            row["advantage"] = torch.randn(n)
            row["masks"]["all_attention_mask"] = torch.ones(n, dtype=torch.bool)
        if text:
            row |= {"prompt": "p" * 60, "completion": "c" * (4 * n), "finish_reason": "stop", "meta": "{}"}
        rows.append(TensorDict(row, batch_size=[]))
    return rows


def race(ours: Callable[[], object], peer: Callable[[], object], repeats: int, block: int = 20) -> tuple[float, float]:
    """Microseconds per call of both, in blocks that take turns; the tenth percentile, as a busy machine only adds."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(max(repeats // block, 2)):
        for function, found in zip((ours, peer), seconds, strict=True):
            if block > 1:
                function()  # the first call of a block warms up
            for _ in range(block):
                start = time.process_time()
                function()
                found.append(time.process_time() - start)
    return float(np.percentile(seconds[0], 10)) * 1e6, float(np.percentile(seconds[1], 10)) * 1e6


missed: list[str] = []


def line(
    name: str, figures: tuple[float, float], peer_name: str, *, least: float = 0.0, most: float = 0.0, per: int = 1
) -> None:
    """One row of the table: times as fast as the peer, at `least`; or, with `most`, times as long as the peer."""
    ours, peer = figures
    slower = most > 0 or peer < ours
    figure = ours / peer if slower else peer / ours
    met = figure <= most if most else peer / ours >= least
    goal = f"<= {most:g}x" if most else f">= {least:g}x" if least else ""
    verdict = "" if not goal else "met" if met else "missed"
    if not met:
        missed.append(name)
    print(
        f"{name:<56} {ours / per:>9.1f} {peer / per:>9.1f} us{'/traj' if per > 1 else '':<6}"
        f"{figure:>6.2f}x {'longer' if slower else 'faster':<7} {goal:<8} {verdict:<7} {peer_name}"
    )


def bench_sample(folder: Path, count: int, repeats: int) -> None:
    """`sample()` of 64 rows as padded tensors, out of `count`."""
    rows = trajectories(count, text=False, rewards=True)
    ours = TrajectoryReplayBuffer(storage=folder / f"sample-{count}", batch_size=BATCH)
    for i in range(0, count, BATCH):
        ours.extend_raw(lazy_stack(rows[i : i + BATCH]))
    peer = TensorDictReplayBuffer(storage=LazyStackStorage(count), batch_size=BATCH)
    peer.extend(lazy_stack(rows))
    derived = (("next", "reward"), "advantage", ("masks", "all_attention_mask"))
    scalars = ("task_reward", "group_id", "policy_version", "num_prompt_tokens", "trajectory_id", ("next", "done"))
    have = set(ours.sample().keys(True, True))
    assert have >= {*TOKEN_KEYS, *derived, *scalars, "index"}, have

    def padded(ragged: tuple[object, ...], plain: tuple[object, ...]) -> None:
        batch = peer.sample()
        assert isinstance(batch, LazyStackedTensorDict)
        for key in ragged:
            batch.get(key, as_padded_tensor=True)
        for key in plain:
            batch.get(key)

    line(
        f"sample 64 of {count}: every key",
        race(ours.sample, lambda: padded((*TOKEN_KEYS, *derived), (*scalars, "index")), repeats),
        "LazyStackStorage, 7 as_padded_tensor and 7 scalars",
        least=3.5,
    )
    some = scalars[:3]
    keys = [*TOKEN_KEYS, *some]

    def four() -> None:
        ours.trajectories.read(torch.randint(0, count, (BATCH,)), keys=keys)

    what = f"read 64 of {count}: 4 token columns, 3 scalars"
    line(what, race(four, lambda: padded(TOKEN_KEYS, some), repeats), "LazyStackStorage, 4 as_padded_tensor, 3 scalars")
    names = [COLUMN_OF_KEY[key] for key in keys]

    def bare() -> None:
        ours.store.read_padded(ours.trajectories.row_ids(torch.randint(0, count, (BATCH,))), names)

    line(what, race(four, bare, repeats), "store.read_padded")
    ours.storage.close()


def arrays(columns: Trajectories) -> dict[str, Any]:
    """The same columns as the arrays that the store takes, dtypes of the schema."""
    data: dict[str, Any] = {"created_at": np.zeros(columns.n)}
    for key, column in columns.items():
        name = COLUMN_OF_KEY[key]
        if isinstance(column, Text):
            data[name] = column.plain()
            continue
        values = column.values.numpy()
        values = values.astype(np.int32) if name in ("input_ids", "num_prompt_tokens") else values
        lengths = column.lengths
        data[name] = values.reshape(columns.n) if lengths is None else RaggedArray(values, lengths.numpy())
    return data


def row_lists(data: dict[str, Any]) -> dict[str, Any]:
    """The same columns with one array per row, int64 tokens, as the TensorDicts hold them."""
    out = dict(data)
    for name, column in data.items():
        if isinstance(column, RaggedArray):
            dtype = np.int64 if name == "input_ids" else column.values.dtype
            out[name] = [row.astype(dtype) for row in column.to_list()]
    return out


def bench_extend(folder: Path, repeats: int, *, text: bool) -> None:
    """`extend` of 64 trajectories against the store's own append of the same columns."""
    stack = lazy_stack(trajectories(BATCH, text=text, rewards=False))
    ours = TrajectoryReplayBuffer(storage=folder / f"extend-{text}")
    bare = TrajectoryStore.create(folder / f"append-{text}", trajectory_schema())
    columns = columns_of(stack)
    data, jagged = arrays(columns), td_of(columns)
    rows = row_lists(data)
    what = "numbers and text" if text else "numbers"
    sizes = [column.values.nbytes for column in data.values() if isinstance(column, RaggedArray)]

    def in_turns(ours: Callable[[], object], peer: Callable[[], object]) -> tuple[float, float]:
        have_pages(folder, [sizes] * 2 * repeats)
        return race(ours, peer, repeats, block=1)

    extend, flat = ours.trajectories.extend, "store.append of flat arrays, dtypes of the schema"
    for name, batch in (("64 ragged TensorDicts", stack), ("64, jagged leaves", jagged)):
        figures = in_turns(lambda td=batch: extend(td), lambda: bare.append(data))
        line(f"storage.extend {name}, {what}", figures, flat, most=2.0)
    figures = in_turns(lambda: extend(stack), lambda: bare.append(rows))
    line(f"storage.extend 64 ragged, {what}", figures, "store.append of a list of rows per column", most=2.0)
    figures = in_turns(lambda: ours.extend(stack), lambda: bare.append(data))
    line(f"buffer.extend 64 ragged, {what}", figures, flat)
    ours.storage.close()
    bare.close()


def bench_advantage(repeats: int) -> None:
    """Trajectories per second of the group advantage alone."""
    rows = trajectories(BATCH, text=True, rewards=True)
    stack = lazy_stack(rows)
    jagged = td_of(columns_of(stack))
    ours = MCAdvantage(8)
    for name, how in (("sum", "sum"), ("per step", None)):
        peer = TorchRLAdvantage(8, prompt_key="group_id", trajectory_return=how)
        for form, batch in (("jagged leaves", jagged), ("lazy stack", stack)):
            figures = race(lambda td=batch: ours.inv(td), lambda t=peer: t.inv(stack), repeats // 6, block=5)
            line(f"MCAdvantage(8), {form}", figures, f"TorchRL on a lazy stack, {name}", least=20.0, per=BATCH)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows and repeats")
    parser.add_argument("--rows", type=int, nargs="+", help="trajectories stored, for sample() (default: 512 4096)")
    parser.add_argument("--folder", type=Path, help="where extend writes (default: /dev/shm if it is there)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    repeats = 60 if options.quick else 200
    memory = Path("/dev/shm")
    written = options.folder or (memory if memory.is_dir() else None)
    print(f"{'':<56} {'ours':>9} {'peer':>9} {'':<8}{'figure':>7}  {'':<6} {'goal':<8} {'':<7} peer")
    for count in options.rows or ([512] if options.quick else [512, 4096]):
        with tempfile.TemporaryDirectory() as name:
            bench_sample(Path(name), count, repeats)
    with tempfile.TemporaryDirectory(dir=written) as name:
        for text in (False, True):
            bench_extend(Path(name), repeats, text=text)
    bench_advantage(repeats)
    print(f"missed: {', '.join(dict.fromkeys(missed))}" if missed else "every goal met")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
