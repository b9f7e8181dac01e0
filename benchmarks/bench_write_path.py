"""The write path: our group advantage against TorchRL's, and what the transforms cost beside the model.

Run as `python benchmarks/bench_write_path.py [--quick]`. Everything is processor time of one thread.

1. `MCAdvantage` against TorchRL's on the same ragged trajectories (log-normal in length, mean about 530 tokens, reward
   per token, groups of 8), in blocks that take turns: whole groups in one call of 64 trajectories, and groups whose
   members come one per call. TorchRL's takes a lazy stack, its own form; ours is also given the jagged form that our
   collector makes. The tenth percentile of many calls.
2. The whole stack, `Collector.collect` with a model of two layers: prompts, sampling, rewards, reference log-probs, KL
   penalty, advantages, commit. The share is the time inside our transforms, forward passes of the reference excluded,
   of the whole. The median of several rollouts.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _stores import Table, parser, race  # noqa: E402
from bench_replay import trajectories  # noqa: E402
from tensordict import lazy_stack  # noqa: E402
from torchrl.envs.transforms import Compose  # noqa: E402
from torchrl.objectives.llm import MCAdvantage as TorchRLAdvantage  # noqa: E402

from rlhf_pipeline import scratch_policy  # noqa: E402
from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer  # noqa: E402
from rlhf_pipeline.collectors.collector import Collector  # noqa: E402
from rlhf_pipeline.config import Collect  # noqa: E402
from rlhf_pipeline.data.prompts import CopyDigits  # noqa: E402
from rlhf_pipeline.data.rewards import token_match  # noqa: E402
from rlhf_pipeline.data.tensordicts import steps_of, td_of  # noqa: E402
from rlhf_pipeline.interop.torchrl.kl_transforms import KLRewardTransform  # noqa: E402
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage  # noqa: E402
from rlhf_pipeline.transforms.retrieve_log_prob import RetrieveLogProb  # noqa: E402

BATCH, SIZE = 64, 8
FASTER, SHARE = 20.0, 3.0
"""The goals: times as fast as TorchRL's, and percent of a rollout. A goal is printed as met or missed."""


def bench_advantage(table: Table, quick: bool) -> None:
    """Trajectories per second of the group advantage, reward per token."""
    whole = [lazy_stack(trajectories(BATCH, group=SIZE))]
    # 64 groups that wait at any time: each call brings one member of every group.
    spread = [lazy_stack(trajectories(BATCH, group=1, seed=seed)) for seed in range(SIZE)]
    for label, batches in (("whole groups in one call", whole), ("one member of each of 64 groups per call", spread)):
        for how in ("sum", None):
            peer = TorchRLAdvantage(SIZE, prompt_key="group_id", trajectory_return=how)
            for form in ("jagged", "lazy stack"):
                given = batches if form == "lazy stack" else [td_of(steps_of(batch)) for batch in batches]
                ours = MCAdvantage(SIZE, trajectory_return=how)

                def call(transform: Any, parts: list[Any]) -> None:
                    for part in parts:
                        transform.inv(part)

                blocks, block = (2, 2) if quick else (4, 8)
                calls = {
                    "ours": lambda t=ours, p=given: call(t, p),
                    "TorchRL's": lambda t=peer, p=batches: call(t, p),
                }
                found = race(calls, blocks, block)
                for name, us in found.items():
                    table.line(f"  {name}, trajectories a second", BATCH * len(batches) * 1e6 / us)
                name = f"{label}, {form}" + ("" if how else ", per step")
                table.line(f"{name}: times TorchRL's", found["TorchRL's"] / found["ours"], "x", FASTER, least=True)


class Timer:
    """Adds up the processor time of what runs inside it, once where it is nested."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        start = time.process_time()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.process_time() - start


def timed(owner: Any, name: str, timer: Timer) -> None:
    """Put a timer around a method of one object."""
    method = getattr(owner, name)

    def inner(*args: Any, **kwargs: Any) -> Any:
        with timer():
            return method(*args, **kwargs)

    owner.__dict__[name] = inner


def bench_stack(table: Table, name: str, folder: Path, *, rollouts: int, **sizes: int) -> None:
    """The share of the transforms in whole rollouts."""
    made = {"hidden_size": 64, "num_layers": 2, "num_heads": 4}
    policy, reference = (scratch_policy("0123456789=", seed=seed, num_slots=256, **made) for seed in (0, 1))
    transforms = [MCAdvantage(sizes["group_size"]), KLRewardTransform(coef=0.05), RetrieveLogProb(reference)]
    inside, model = Timer(), Timer()
    for transform in transforms:
        timed(transform, "write", inside)
    timed(reference, "log_probs", model)
    buffer = TrajectoryReplayBuffer(storage=folder, transform=Compose(*transforms))
    collector = Collector(
        policy=policy,
        prompts=CopyDigits(num_digits=8),
        reward=token_match,
        buffer=buffer,
        config=Collect(num_slots=256, **sizes),
        seed=0,
    )
    shares, totals = [], []
    for rollout in range(rollouts + 1):
        inside.seconds = model.seconds = 0.0
        start = time.process_time()
        collector.collect(rollout, policy_version=rollout)
        total = time.process_time() - start
        if rollout:  # the first warms up
            shares.append((inside.seconds - model.seconds) / total)
            totals.append((total, model.seconds, inside.seconds - model.seconds))
    buffer.trajectories.close()
    for what, ms in zip(("whole", "scoring", "our transforms"), np.median(totals, axis=0) * 1e3, strict=True):
        table.line(f"  {what}", ms, "ms")
    table.line(f"Collector.collect, {name}: our share", float(np.median(shares)) * 100, "%", SHARE)


def main() -> int:
    """Print the tables."""
    options = parser(__doc__, "fewer repeats").parse_args()
    torch.set_num_threads(1)
    table = Table()
    bench_advantage(table, options.quick)
    with tempfile.TemporaryDirectory() as name:
        for new in (64, 8):
            bench_stack(
                table,
                f"16 prompts x 16, {new} new tokens",
                Path(name) / str(new),
                rollouts=2 if options.quick else 10,
                prompts_per_rollout=16,
                group_size=16,
                max_new_tokens=new,
            )
    return int(options.check and not table.good)


if __name__ == "__main__":
    sys.exit(main())
