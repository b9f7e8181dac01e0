"""What positions and segments cost in the layouts of a step: an entry of `rlhf_pipeline/policies/layout_costs.py`.

    python benchmarks/fit_layout_costs.py                       # measures this machine: a GPU, or one core of its CPU
    python benchmarks/fit_layout_costs.py --quick               # small sizes: does it run
    python benchmarks/fit_layout_costs.py --of benchmarks/results/gpu_check_h200.json

Forward and backward of random rows are timed in each layout, and the seconds are fitted by least squares: to the
positions of padded rows, and to the positions and the segments of packed ones. The entry is their ratio. `--of` takes
the seconds that the section `step` of `gpu_check.py` recorded, whose rows are known, and no segments.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_learner_h200 import SHAPES, Sizes, make_policy, make_rows

from rlhf_pipeline import CausalLMPolicy, scratch_policy
from rlhf_pipeline.policies.layout_costs import LayoutCosts
from rlhf_pipeline.policies.packed import plan_micro_batches

Timed = tuple[int, int, float]
"""Positions, segments and seconds of a batch."""


def rows_of(groups: int, members: int, prompt: int, completion: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random rows and their mask, `[groups * members, T]`; half of the completions are half as long."""
    drawn = torch.Generator().manual_seed(groups * members + prompt)
    prompts = torch.randint(0, 8, (groups, prompt), generator=drawn).repeat_interleave(members, 0)
    ids = torch.cat([prompts, torch.randint(0, 8, (len(prompts), completion), generator=drawn)], 1)
    lengths = prompt + torch.where(torch.arange(len(ids)) % 2 == 0, completion, max(completion // 2, 1))
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


def seconds(policy: CausalLMPolicy, layout: str, ids: torch.Tensor, mask: torch.Tensor, reps: int) -> float:
    """Return the median time of forward and backward, after one call that checks the layout."""
    policy.scoring_layout = layout
    found: list[float] = []
    for _ in range(reps + 1):
        started = time.perf_counter()
        policy.log_probs(ids, mask).sum().backward()
        if policy.device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
        policy.model.zero_grad()
    return statistics.median(found[1:])


def fitted(padded: Sequence[Timed], packed: Sequence[Timed], *, width: int) -> LayoutCosts:
    """Return the costs that explain these times best, in positions of padded rows.

    >>> rows = [(n, 0, 2.0 * n + 1) for n in (10, 20, 40)]
    >>> by_segment = [(n, s, 1.0 * n + 8.0 * s + 1) for n, s in ((10, 2), (20, 9), (40, 4), (80, 3))]
    >>> [round(cost, 3) for cost in fitted(rows, by_segment, width=16)]
    [0.5, 64.0]
    """

    def slopes(timed: Sequence[Timed], columns: int) -> list[float]:
        table = np.array([[*row[:columns], 1.0] for row in timed])
        solved, *_ = np.linalg.lstsq(table, np.array([row[2] for row in timed]), rcond=None)
        return solved.tolist()

    position, *_ = slopes(padded, 1)
    of_packed, of_segment, *_ = slopes(packed, 2)
    return LayoutCosts(position=of_packed / position, segment=of_segment / position * width)


def measured(policy: CausalLMPolicy, *, width: int, quick: bool) -> LayoutCosts:
    """Time batches of a policy in both layouts, and return the costs."""
    on_cuda = policy.device.type == "cuda"
    scale = 1 if quick else 16 if on_cuda else 2
    padded: list[Timed] = []
    packed: list[Timed] = []
    for groups, members, prompt, completion in (
        (2, 2, 8, 8),
        (2, 4, 24, 12),
        (4, 4, 16, 24),
        (8, 4, 40, 8),
        (3, 8, 8, 40),
    ):
        ids, mask = rows_of(groups, members, prompt * scale, completion * scale)
        ids, mask = ids.to(policy.device), mask.to(policy.device)
        lengths = mask.sum(1).cpu()
        reps = 1 if quick else 5
        padded.append((ids.numel(), 0, seconds(policy, "padded", ids, mask, reps)))
        packed.append((int(lengths.sum()), len(ids), seconds(policy, "packed", ids, mask, reps)))
        shared = int(lengths.sum()) - groups * (members - 1) * prompt * scale
        packed.append((shared, len(ids) + groups, seconds(policy, "prefix_shared", ids, mask, reps)))
    return fitted(padded, packed, width=width)


def recorded(file: Path) -> float:
    """Return the cost of a packed position in the figures of the section `step` at the 0.5B shape."""
    found, sizes = json.loads(file.read_text(encoding="utf-8"))["step"], Sizes()
    rows = make_rows(sizes, SHAPES["0.5b"].vocab)
    lengths = [len(row["tokens", "full"]) for row in rows]
    prompts = [int(row["num_prompt_tokens"]) for row in rows]
    groups = [place // sizes.group for place in range(len(rows))]
    each: dict[str, float] = {}
    for layout in ("padded", "packed", "prefix_shared"):
        plan = plan_micro_batches(layout, lengths, sizes.token_budget, prompt_lengths=prompts, group_ids=groups)
        positions = sum(plan.positions)
        each[layout] = found[f"ours, {layout}"]["seconds"] / positions
        print(f"{layout:14} {positions:8,} positions {each[layout] * 1e6:8.2f} us each")
    return statistics.mean((each["packed"], each["prefix_shared"])) / each["padded"]


def main() -> int:
    """Print the entry of this machine, or of recorded figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--of", type=Path, metavar="FILE", help="figures that gpu_check.py recorded")
    args = parser.parse_args()
    if args.of is not None:
        print(f"LayoutCosts(position={recorded(args.of):.2f}, segment=0.0)")
        return 0
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for width in (64,) if args.quick else (896,) if device.type == "cuda" else (64, 256):
        if device.type == "cuda":
            policy = make_policy(SHAPES["0.5b"], device)
        else:
            policy = scratch_policy("01234567", hidden_size=width, num_layers=4, num_heads=4, seed=0)
        costs = measured(policy, width=width, quick=args.quick)
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        print(f"{name}, width {width}: LayoutCosts(position={costs.position:.2f}, segment={costs.segment:.0f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
