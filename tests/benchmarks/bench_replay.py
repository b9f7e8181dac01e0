"""The TorchRL layer over the store against TorchRL's own classes, in one run on one machine.

Run as `python tests/benchmarks/bench_replay.py [--quick]`. Trajectories are log-normal in length (mean about 530
tokens), groups of 8. Every line is processor time with one thread: the tenth percentile of many calls, in blocks of
20 that take turns with the peer's. The ratios are what counts. Writes go to the page cache, process-durable.

Measured on two busy cores with 4096 rows: `sample` 2.7 to 2.8x (3.4x in one run over 512 rows; the goal is 3.5x),
`extend` 0.35x with ragged TensorDicts and 0.54x with jagged leaves (the goal is 0.5x): looking up and joining the 640
small tensors of 64 ragged TensorDicts takes 0.28 ms, nearly as long as the append itself.
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
sys.path[:0] = [str(ROOT), str(ROOT / "storage")]
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack  # noqa: E402
from torchrl.data import LazyStackStorage, TensorDictReplayBuffer  # noqa: E402
from torchrl.objectives.llm import MCAdvantage as TorchRLAdvantage  # noqa: E402

from rlhf_pipeline.keys import COLUMN_OF_KEY  # noqa: E402
from rlhf_pipeline.replay.buffer import TrajectoryReplayBuffer  # noqa: E402
from rlhf_pipeline.replay.schema import trajectory_schema  # noqa: E402
from rlhf_pipeline.transforms._columns import Columns, Text, columns_of  # noqa: E402
from rlhf_pipeline.transforms._rebuild import td_of  # noqa: E402
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
            function()  # the first call of a block warms up
            for _ in range(block):
                start = time.process_time()
                function()
                found.append(time.process_time() - start)
    return float(np.percentile(seconds[0], 10)) * 1e6, float(np.percentile(seconds[1], 10)) * 1e6


def line(name: str, figures: tuple[float, float], peer_name: str, goal: str, per: int = 1) -> None:
    """One row of the table."""
    ours, peer = figures
    unit = "us" if per == 1 else "us/traj"
    print(f"{name:<54} {ours / per:>9.1f} {peer / per:>9.1f} {unit:<8} {peer / ours:>7.2f}x   {goal:<9} {peer_name}")


def bench_sample(folder: Path, count: int, repeats: int) -> None:
    """`sample()` of 64 rows as padded tensors."""
    rows = trajectories(count, text=False, rewards=True)
    ours = TrajectoryReplayBuffer(storage=folder / "sample", batch_size=BATCH)
    for i in range(0, count, BATCH):
        ours.extend_raw(lazy_stack(rows[i : i + BATCH]))
    peer = TensorDictReplayBuffer(storage=LazyStackStorage(count), batch_size=BATCH)
    peer.extend(lazy_stack(rows))
    derived = (("next", "reward"), "advantage", ("masks", "all_attention_mask"))

    def padded(keys: tuple[object, ...]) -> None:
        batch = peer.sample()
        assert isinstance(batch, LazyStackedTensorDict)
        for key in keys:
            batch.get(key, as_padded_tensor=True)
        for key in ("task_reward", "group_id", "policy_version"):
            batch.get(key)

    what = "sample 64: 4 token columns, masks, reward, advantage"
    everything = (*TOKEN_KEYS, *derived)
    line(
        what,
        race(ours.sample, lambda: padded(everything), repeats),
        "LazyStackStorage, 7 as_padded_tensor",
        ">= 3.5x",
    )
    keys = [*TOKEN_KEYS, "task_reward", "group_id", "policy_version"]

    def four() -> None:
        ours.trajectories.read(torch.randint(0, count, (BATCH,)), keys=keys)

    what = "read 64: 4 token columns"
    line(what, race(four, lambda: padded(TOKEN_KEYS), repeats), "LazyStackStorage, 4 as_padded_tensor", "")
    names = [COLUMN_OF_KEY[key] for key in keys]

    def bare() -> None:
        ours.store.read_padded(ours.trajectories.row_ids(torch.randint(0, count, (BATCH,))), names)

    line(what, race(four, bare, repeats), "store.read_padded", "")
    ours.storage.close()


def arrays(columns: Columns) -> dict[str, Any]:
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


def bench_extend(folder: Path, repeats: int, *, text: bool) -> None:
    """`extend` of 64 trajectories against the store's own append of the same columns."""
    stack = lazy_stack(trajectories(BATCH, text=text, rewards=False))
    ours = TrajectoryReplayBuffer(storage=folder / f"extend-{text}")
    bare = TrajectoryStore.create(folder / f"append-{text}", trajectory_schema())
    columns = columns_of(stack)
    data, jagged = arrays(columns), td_of(columns)
    what = "numbers and text" if text else "numbers"
    for name, batch in (("64 ragged TensorDicts", stack), ("64, jagged leaves", jagged)):
        figures = race(lambda td=batch: ours.extend(td), lambda: bare.append(data), repeats)
        line(f"extend {name}, {what}", figures, "store.append of ready arrays", ">= 0.5x")
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
            figures = race(lambda td=batch: ours.inv(td), lambda t=peer: t.inv(stack), repeats)
            line(f"MCAdvantage(8), {form}", figures, f"TorchRL on a lazy stack, {name}", ">= 20x", BATCH)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rows and repeats")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    repeats, count = (40, 512) if quick else (200, 4096)
    print(f"{'':<54} {'ours':>9} {'peer':>9} {'':<8} {'ratio':>8}   {'target':<9} peer")
    with tempfile.TemporaryDirectory() as name:
        bench_sample(Path(name), count, repeats)
        bench_extend(Path(name), repeats, text=False)
        bench_extend(Path(name), repeats, text=True)
    bench_advantage(repeats)


if __name__ == "__main__":
    main()
