"""The TorchRL layer over the store against TorchRL's own classes, in one run on one machine.

Run as `python benchmarks/bench_replay.py [--quick] [--rows 512 4096 20000] [--folder DIR]`. Trajectories are
log-normal in length (mean about 530 tokens), groups of 8. Every line is processor time with one thread: the tenth
percentile of many calls that take turns with the peer's, reads in blocks of 20, writes one by one; the ratios are what
counts. Reads are mapped, from a warm page cache, in the folder for temporary files. Writes are process-durable and go
to `--folder`, by default to memory (`/dev/shm`), as a disk's write-back adds work of its own to both sides.

`sample()` is compared with TorchRL's `TensorDictReplayBuffer(LazyStackStorage)`, which is asked for every key that it
holds, ragged ones as padded tensors. `extend` is compared with `TrajectoryStore.append` of the same 64 trajectories:
once as arrays that are flat and in the dtypes of the schema already, which is all that an append could be given, and
once row by row, as a stack of TensorDicts has them.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _stores import Table, have_pages, parser, race  # noqa: E402
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack  # noqa: E402
from torchrl.data import LazyStackStorage, TensorDictReplayBuffer  # noqa: E402

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer  # noqa: E402
from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema  # noqa: E402
from rlhf_pipeline.data.keys import COLUMN_OF_KEY  # noqa: E402
from rlhf_pipeline.data.tensordicts import steps_of, td_of  # noqa: E402
from rlhf_pipeline.data.trajectories import Text, Trajectories  # noqa: E402
from trajectory_store import RaggedArray, TrajectoryStore  # noqa: E402

BATCH = 64
LONGER = 1.5
"""The goal of `extend`: times as long as an append to the store. A goal is printed as met or missed."""
TOKEN_KEYS = (
    ("tokens", "full"),
    ("masks", "all_assistant_mask"),
    ("log_probs", "full"),
    ("next", "ref_log_probs", "full"),
)


def trajectories(
    count: int, *, text: bool = False, rewards: bool = True, seed: int = 0, group: int = 8
) -> list[TensorDict]:
    """Ragged trajectories in groups of `group`, one TensorDict each; `rewards` adds what TorchRL needs per token."""
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
            "group_id": torch.tensor(i // group),
            "policy_version": torch.tensor(i // BATCH),
            "num_prompt_tokens": torch.tensor(16),
            "trajectory_id": torch.tensor(seed * count + i),
            "next": {"done": torch.ones(1, dtype=torch.bool), "ref_log_probs": {"full": -torch.rand(n)}},
        }
        if rewards:
            row["next"]["reward"] = torch.zeros(n).index_put_((torch.tensor(n - 1),), row["task_reward"])
            row["advantage"] = torch.where(mask, torch.randn(()), 0.0)
            row["masks"]["all_attention_mask"] = torch.ones(n, dtype=torch.bool)
        if text:
            row |= {"prompt": "p" * 60, "completion": "c" * (4 * n), "finish_reason": "stop", "meta": "{}"}
        rows.append(TensorDict(row, batch_size=[]))
    return rows


def line(
    table: Table,
    name: str,
    peer_name: str,
    ours: Callable[[], object],
    peer: Callable[[], object],
    repeats: int,
    *,
    block: int = 20,
    least: float | None = None,
    most: float | None = None,
) -> None:
    """Ours and a peer in turns: times as fast as the peer, at `least`; or, with `most`, times as long as the peer."""
    found = race({"ours": ours, peer_name: peer}, repeats // block, block)
    for who, us in found.items():
        table.line(f"  {who}", us, "us")
    longer = found["ours"] / found[peer_name]
    if most is not None:
        table.line(f"{name}: times as long", longer, "x", most)
    else:
        table.line(f"{name}: times as fast", 1 / longer, "x", least, least=True)


def bench_sample(table: Table, folder: Path, count: int, repeats: int) -> None:
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

    def every_key() -> None:
        padded((*TOKEN_KEYS, *derived), (*scalars, "index"))

    what, lazy = f"sample 64 of {count}: every key", "LazyStackStorage, 7 as_padded_tensor and 7 scalars"
    line(table, what, lazy, ours.sample, every_key, repeats, least=3.5)
    some = scalars[:3]
    keys = [*TOKEN_KEYS, *some]

    def four() -> None:
        ours.trajectories.read(torch.randint(0, count, (BATCH,)), keys=keys)

    what, lazy = f"read 64 of {count}: 4 token columns, 3 scalars", "LazyStackStorage, 4 as_padded_tensor, 3 scalars"
    line(table, what, lazy, four, lambda: padded(TOKEN_KEYS, some), repeats)
    names = [COLUMN_OF_KEY[key] for key in keys]

    def bare() -> None:
        ours.store.read_padded(ours.trajectories.row_ids(torch.randint(0, count, (BATCH,))), names)

    line(table, what, "store.read_padded", four, bare, repeats)
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


def bench_extend(table: Table, folder: Path, repeats: int, *, text: bool) -> None:
    """`extend` of 64 trajectories against the store's own append of the same columns."""
    stack = lazy_stack(trajectories(BATCH, text=text, rewards=False))
    ours = TrajectoryReplayBuffer(storage=folder / f"extend-{text}")
    bare = TrajectoryStore.create(folder / f"append-{text}", trajectory_schema())
    columns = steps_of(stack)
    data, jagged = arrays(columns), td_of(columns)
    rows = row_lists(data)
    what = "numbers and text" if text else "numbers"
    sizes = [column.values.nbytes for column in data.values() if isinstance(column, RaggedArray)]

    extend, flat = ours.trajectories.extend, "store.append of flat arrays, dtypes of the schema"
    for name, peer, call, given, most in (
        ("storage.extend 64 ragged TensorDicts", flat, lambda: extend(stack), data, LONGER),
        ("storage.extend 64, jagged leaves", flat, lambda: extend(jagged), data, LONGER),
        ("storage.extend 64 ragged", "store.append of a list of rows per column", lambda: extend(stack), rows, LONGER),
        ("buffer.extend 64 ragged", flat, lambda: ours.extend(stack), data, None),
    ):
        have_pages(folder, [sizes] * 2 * repeats)
        line(table, f"{name}, {what}", peer, call, lambda of=given: bare.append(of), repeats, block=1, most=most)
    ours.storage.close()
    bare.close()


def main() -> int:
    """Print the table."""
    words = parser(__doc__, "fewer rows and repeats")
    words.add_argument("--rows", type=int, nargs="+", help="trajectories stored, for sample() (default: 512 4096)")
    words.add_argument("--folder", type=Path, help="where extend writes (default: /dev/shm if it is there)")
    options = words.parse_args()
    torch.set_num_threads(1)
    repeats = 60 if options.quick else 200
    memory = Path("/dev/shm")
    written = options.folder or (memory if memory.is_dir() else None)
    table = Table()
    for count in options.rows or ([512] if options.quick else [512, 4096]):
        with tempfile.TemporaryDirectory() as name:
            bench_sample(table, Path(name), count, repeats)
    with tempfile.TemporaryDirectory(dir=written) as name:
        for text in (False, True):
            bench_extend(table, Path(name), repeats, text=text)
    return int(options.check and not table.good)


if __name__ == "__main__":
    sys.exit(main())
