"""Does replay of stored trajectories buy reward at a fixed budget of generated tokens? An experiment, on the CPU.

    python benchmarks/experiment_replay.py            # 4 arms x 8 seeds, some ten minutes on two cores
    python benchmarks/experiment_replay.py --quick    # 2 seeds, a third of the budget

The task is `copy_digits`; every arm samples the same number of rollouts from the same prompts, and what differs is what
the learner does with them:

- fresh: one optimizer step on each rollout, nothing is used twice.
- fresh x3: three steps on each rollout. What replay has to beat: it spends the learner's time the same way.
- uniform: three steps per rollout, each on a batch drawn with equal chances from the last `WINDOW` versions.
- freshness-weighted: the same, with chances of |advantage| * exp(-age / TAU), after arxiv.org/abs/2604.16918.

Stale trajectories are weighed by the clipped ratio to the policy that produced them, and by the ESS guard. The reward
is the mean of each new rollout, sampled at temperature 1 by the current weights from prompts never seen before, so it
is a measure of the policy that replay cannot flatter.

Prints a table with 95 % intervals over the seeds (Student's t), of each arm and of its paired difference to `fresh`,
and writes `results/experiment_replay.{json,svg}` with --save.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "pipelines"))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROLLOUTS, UPDATES, WINDOW, TAU = 90, 3, 24, 6.0
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom."""
RESULTS = Path(__file__).with_name("results")

ARMS: dict[str, dict[str, Any]] = {
    "fresh": {"updates": 1},
    "fresh x3": {"updates": UPDATES},
    "uniform": {"updates": UPDATES, "window": WINDOW, "sample": {"strategy": "uniform", "min_ess": 0.3}},
    "freshness-weighted": {
        "updates": UPDATES,
        "window": WINDOW,
        "sample": {"strategy": "priority", "tau": TAU, "min_ess": 0.3},
    },
}


def curve(task: tuple[str, int, int]) -> dict[str, Any]:
    """Run one arm with one seed; the mean reward of each rollout and the tokens sampled up to it."""
    arm, seed, rollouts = task
    import torch
    from copy_digits import copy_digits

    from rlhf_pipeline import Sample
    from rlhf_pipeline.run.rows import StepRows
    from rlhf_pipeline.run.start import run
    from trajectory_store import TrajectoryStore

    torch.set_num_threads(1)
    how, base = ARMS[arm], copy_digits()
    updates = how["updates"]
    pipeline = dataclasses.replace(
        base,
        # `updates - 1` lets a step see the newest rollout and no other.
        buffer=dataclasses.replace(base.buffer, max_staleness=max(how.get("window", 0), updates - 1)),
        sample=Sample(**how.get("sample", {})),
        learn=dataclasses.replace(
            base.learn,
            steps=rollouts * updates,
            updates_per_rollout=updates,
            stop_at_reward=None,
            checkpoint_every=10**6,
        ),
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        run_dir = Path(folder) / "run"
        run(pipeline, run_dir=run_dir, seed=seed)
        rows = [row for row in StepRows(run_dir / "metrics.jsonl") if row["task_reward"] is not None]
        with TrajectoryStore.open(run_dir / "store") as store:
            groups = store.read_scalars("group_id") // pipeline.collect.prompts_per_rollout
            sampled = store.lengths("input_ids") - store.read_scalars("num_prompt_tokens")
        tokens = [int(sampled[groups <= row["rollout"]].sum()) for row in rows]
    return {"arm": arm, "seed": seed, "reward": [round(row["task_reward"], 4) for row in rows], "tokens": tokens}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half width of the 95 % interval by Student's t."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    quantile = T_975[min(len(values) - 1, len(T_975)) - 1]
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def figures(run: dict[str, Any]) -> dict[str, float]:
    """What is compared: the reward at the end, over the whole budget, and the tokens until 0.5 is reached."""
    reward, tokens = run["reward"], run["tokens"]
    smooth = [statistics.fmean(reward[max(i - 4, 0) : i + 1]) for i in range(len(reward))]
    there = next((tokens[i] for i, value in enumerate(smooth) if value >= 0.5), math.nan)
    return {
        "last": statistics.fmean(reward[-10:]),
        "whole": statistics.fmean(reward),
        "to 0.5": there,
    }


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the result."""
    by_arm = {arm: {run["seed"]: figures(run) for run in runs if run["arm"] == arm} for arm in ARMS}
    lines = [
        f"{'arm':<20} {'reward, last 10':>18} {'mean over budget':>18} "
        f"{'minus fresh (paired)':>22} {'tokens to 0.5':>14}"
    ]
    for arm, found in by_arm.items():
        last = interval([one["last"] for one in found.values()])
        whole = interval([one["whole"] for one in found.values()])
        gap = [one["whole"] - by_arm["fresh"][seed]["whole"] for seed, one in found.items()]
        against = "" if arm == "fresh" else "{:+.3f} +- {:.3f}".format(*interval(gap))
        reached = [one["to 0.5"] for one in found.values() if math.isfinite(one["to 0.5"])]
        middle = (
            f"{statistics.median(reached):,.0f}"
            if len(reached) == len(found)
            else f"{len(reached)}/{len(found)} get there"
        )
        lines.append(
            f"{arm:<20} {'{:.3f} +- {:.3f}'.format(*last):>18} {'{:.3f} +- {:.3f}'.format(*whole):>18} "
            f"{against:>22} {middle:>14}"
        )
    return lines


def picture(runs: list[dict[str, Any]]) -> str:
    """Return an SVG: the mean reward of each arm over the tokens sampled, with its 95 % interval."""
    width, height, left, right, top, bottom = 760, 420, 62, 24, 48, 48
    colours = dict(zip(ARMS, ("#2f6fde", "#8a94a6", "#c9731c", "#1c8a4b"), strict=True))
    most = max(run["tokens"][-1] for run in runs)

    def at(tokens: float, reward: float) -> str:
        x = left + tokens / most * (width - left - right)
        return f"{x:.1f},{height - bottom - reward * (height - top - bottom):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#3d4451">',
        "<title>Reward over generated tokens</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="{left}" y="28" font-size="15" font-weight="600">copy_digits: reward over generated tokens, '
        "mean and 95 % interval</text>",
    ]
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        start, end = at(0, tick), at(most, tick)
        (x0, y0), (x1, _) = start.split(","), end.split(",")
        parts.append(f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y0}" stroke="#e4e7ec"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y0) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for part in range(5):
        x = at(most * part / 4, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{height - bottom + 19}" text-anchor="middle">{most * part / 4:,.0f}</text>')
    parts.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 10}" text-anchor="middle">generated tokens</text>'
    )
    for number, (arm, colour) in enumerate(colours.items()):
        mine = [run for run in runs if run["arm"] == arm]
        points = []
        for rollout in range(len(mine[0]["reward"])):
            near = slice(max(rollout - 2, 0), rollout + 3)
            mean, half = interval([statistics.fmean(run["reward"][near]) for run in mine])
            points.append((statistics.fmean(run["tokens"][rollout] for run in mine), mean, half))
        if math.isfinite(points[0][2]):
            band = [at(x, min(y + half, 1)) for x, y, half in points] + [
                at(x, max(y - half, 0)) for x, y, half in reversed(points)
            ]
            parts.append(f'<polygon points="{" ".join(band)}" fill="{colour}" opacity="0.15"/>')
        line = " ".join(at(x, y) for x, y, _ in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.25"/>')
        parts.append(f'<text x="{left + 14}" y="{top + 18 + 18 * number}" fill="{colour}">{arm}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", action="store_true", help="write results/experiment_replay.{json,svg}")
    args = parser.parse_args()
    seeds, rollouts = (2, ROLLOUTS // 3) if args.quick else (args.seeds, ROLLOUTS)
    tasks = [(arm, seed, rollouts) for seed in range(seeds) for arm in ARMS]
    runs = []
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for run in pool.imap_unordered(curve, tasks):
            runs.append(run)
            print(
                f"  {len(runs)}/{len(tasks)} {run['arm']} seed {run['seed']}: {run['reward'][-1]:.2f}", file=sys.stderr
            )
    print(f"{rollouts} rollouts of 256 trajectories, {runs[0]['tokens'][-1]:,} tokens or so per run, {seeds} seeds")
    print("\n".join(table(runs)))
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        ordered = sorted(runs, key=lambda run: (list(ARMS).index(run["arm"]), run["seed"]))
        found = {"rollouts": rollouts, "seeds": seeds, "arms": ARMS, "table": table(runs), "runs": ordered}
        (RESULTS / "experiment_replay.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
        (RESULTS / "experiment_replay.svg").write_text(picture(runs), encoding="utf-8")
        print(f"written: {RESULTS / 'experiment_replay.json'} and .svg")


if __name__ == "__main__":
    main()
