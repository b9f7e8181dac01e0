"""The write path: our group advantage against TorchRL's, and what the transforms cost beside the model.

Run as `python tests/benchmarks/bench_write_path.py [--quick]`. Everything is processor time of one thread.

1. `MCAdvantage` against TorchRL's on the same ragged trajectories (log-normal in length, mean about 530 tokens, reward
   per token, groups of 8), in blocks that take turns: whole groups in one call of 64 trajectories, and groups whose
   members come one per call. TorchRL's takes a lazy stack, its own form; ours is also given the jagged form that our
   collector makes. The tenth percentile of many calls.
2. The whole stack, `Collector.collect` with a model of two layers: prompts, sampling, rewards, reference log-probs, KL
   penalty, advantages, commit. The share is the time inside our transforms, forward passes of the reference excluded,
   of the whole. The median of several rollouts.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "storage")]
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tensordict import TensorDict, lazy_stack  # noqa: E402
from torchrl.envs.transforms import Compose  # noqa: E402
from torchrl.objectives.llm import MCAdvantage as TorchRLAdvantage  # noqa: E402

from rlhf_pipeline import scratch_policy  # noqa: E402
from rlhf_pipeline.collectors.collector import Collector  # noqa: E402
from rlhf_pipeline.config import Collect  # noqa: E402
from rlhf_pipeline.data.prompts import CopyDigits  # noqa: E402
from rlhf_pipeline.data.rewards import token_match  # noqa: E402
from rlhf_pipeline.data.trajectories import columns_of, td_of  # noqa: E402
from rlhf_pipeline.replay.buffer import TrajectoryReplayBuffer  # noqa: E402
from rlhf_pipeline.transforms.kl_reward import KLRewardTransform  # noqa: E402
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage  # noqa: E402
from rlhf_pipeline.transforms.retrieve_log_prob import RetrieveLogProb  # noqa: E402

BATCH, SIZE = 64, 8
missed: list[str] = []


def trajectories(groups: list[int], seed: int = 0) -> list[TensorDict]:
    """Ragged trajectories with a reward per token, one TensorDict each."""
    rng = np.random.default_rng(seed)
    rows = []
    for number, group in enumerate(groups):
        n = int(np.exp(rng.normal(5.9, 0.85)).clip(32, 2048))
        row: dict[str, Any] = {
            "tokens": {"full": torch.randint(0, 32000, (n,))},
            "masks": {"all_assistant_mask": torch.arange(n) >= 16},
            "log_probs": {"full": -torch.rand(n)},
            "group_id": torch.tensor(group),
            "trajectory_id": torch.tensor(number),
            "next": {"done": torch.ones(1, dtype=torch.bool), "reward": torch.randn(n)},
        }
        rows.append(TensorDict(row, batch_size=[]))
    return rows


def race(ours: Callable[[], object], peer: Callable[[], object], blocks: int, block: int) -> tuple[float, float]:
    """Microseconds per call of both, in blocks that take turns; the tenth percentile, as a busy machine only adds."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(blocks):
        for function, found in zip((ours, peer), seconds, strict=True):
            function()
            for _ in range(block):
                start = time.process_time()
                function()
                found.append(time.process_time() - start)
    return float(np.percentile(seconds[0], 10)) * 1e6, float(np.percentile(seconds[1], 10)) * 1e6


def verdict(name: str, *, met: bool) -> str:
    """The last word of a line; misses are remembered."""
    if not met:
        missed.append(name)
    return "met" if met else "missed"


def bench_advantage(quick: bool) -> None:
    """Trajectories per second of the group advantage."""
    print(f"{'MCAdvantage(8), reward per token':<50} {'ours/s':>10} {'TorchRL/s':>10} {'figure':>8}  {'goal':<7}")
    whole = [lazy_stack(trajectories([i // SIZE for i in range(BATCH)]))]
    # 64 groups that wait at any time: each call brings one member of every group.
    spread = [lazy_stack(trajectories(list(range(BATCH)), seed)) for seed in range(SIZE)]
    for label, batches in (("whole groups in one call", whole), ("one member of each of 64 groups per call", spread)):
        for how in ("sum", None):
            peer = TorchRLAdvantage(SIZE, prompt_key="group_id", trajectory_return=how)
            for form in ("jagged", "lazy stack"):
                given = batches if form == "lazy stack" else [td_of(columns_of(batch)) for batch in batches]
                ours = MCAdvantage(SIZE, trajectory_return=how)

                def call(transform: Any, parts: list[Any]) -> None:
                    for part in parts:
                        transform.inv(part)

                blocks, block = (2, 4) if quick else (4, 8)
                found = race(
                    lambda t=ours, p=given: call(t, p), lambda t=peer, p=batches: call(t, p), blocks, block
                )  # fmt: skip
                mine, theirs = (BATCH * len(batches) * 1e6 / us for us in found)
                name = f"{label}, {form}" + ("" if how else ", per step")
                ratio = mine / theirs
                print(
                    f"{name:<50} {mine:>10,.0f} {theirs:>10,.0f} {ratio:>7.1f}x  >= 20x  "
                    f"{verdict(name, met=ratio >= 20)}"
                )


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


def bench_stack(name: str, folder: Path, *, rollouts: int, goal: bool, **sizes: int) -> None:
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
    share = float(np.median(shares))
    total, scored, ours = np.median(np.array(totals), axis=0) * 1e3
    rate = sizes["prompts_per_rollout"] * sizes["group_size"] / total * 1e3
    last = f"< 5 %  {verdict(name, met=share < 0.05)}" if goal else ""
    print(f"{name:<50} {rate:>8,.0f}/s {total:>8.1f} {scored:>8.1f} {ours:>8.2f} {share:>8.1%}  {last}")


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    bench_advantage(quick)
    print(
        f"\n{'Collector.collect, ms of processor time':<50} {'traj.':>10} {'total':>8} {'scoring':>8} {'ours':>8} share"
    )
    with tempfile.TemporaryDirectory() as name:
        for new, goal in ((64, True), (8, True)):
            bench_stack(
                f"16 prompts x 16, {new} new tokens",
                Path(name) / str(new),
                rollouts=4 if quick else 10,
                goal=goal,
                prompts_per_rollout=16,
                group_size=16,
                max_new_tokens=new,
            )
    print(f"missed: {', '.join(missed)}" if missed else "every goal met")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
