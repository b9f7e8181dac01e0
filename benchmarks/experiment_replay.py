"""Does replay of stored trajectories buy reward at a fixed budget of generated tokens? An experiment, on the CPU.

    python benchmarks/experiment_replay.py                       # copy_digits: 7 arms x 8 seeds
    python benchmarks/experiment_replay.py --pipeline frozen_lake --keep FOLDER   # goes on where it was cut
    python benchmarks/experiment_replay.py --pipeline sokoban --seeds 4 --keep FOLDER
    python benchmarks/experiment_replay.py --quick               # 2 seeds, a third of the budget

Every arm samples the same number of rollouts from the same prompts; they differ in what the learner does with them.
All but the first take three optimizer steps per rollout, so between them the number of updates is equal too:

- fresh: one optimizer step on each rollout, nothing is used twice.
- fresh x3: three steps on each rollout. What replay has to beat: it spends the learner's time the same way.
- fresh x3, lr/3: the same at a third of the learning rate, the control for steps that are too long.
- fresh x3, min_ess: the same with the ESS guard that the replaying arms have.
- uniform: each step on a batch drawn with equal chances from the last `WINDOW` versions.
- freshness-weighted: the same, with chances of |advantage| * exp(-age / TAU), after arxiv.org/abs/2604.16918.
- anchored: the first step on the whole fresh rollout, two on batches drawn with equal chances from the window, after
  arxiv.org/abs/2604.16918 and arxiv.org/abs/2606.04560.

Stale trajectories are weighed by the clipped ratio to the policy that produced them, and by the ESS guard. What is
measured is the policy itself, which replay cannot flatter:

- `copy_digits`: the mean reward of each new rollout, sampled at temperature 1 from prompts never seen before.
- `frozen_lake`, `sokoban`: pass@1 on 256 held-out maps, every 10 rollouts. Rollouts are half as large as the pipeline
  has, so that a run costs a minute or two, and the learning rate is constant, so that the budget has no part in a
  curve. The target of `frozen_lake` is a mean of 0.3 over three evaluations: every run rests for a while below 0.25,
  walking right and down blindly.

Prints a table with 95 % intervals over the seeds (Student's t): of each arm, and of its paired differences to `fresh
x3` at the end and to `fresh` over the whole budget; of the tokens to the target the median, and the second lowest and
second highest seed (with 8 seeds a 93 % interval of the median). Writes `results/experiment_replay.{json,svg}` with
--save; of another pipeline, with its name. A finished run is a file in the folder of --keep, and is not repeated;
all that are in the folder are in the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from experiment_sums import made_on

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

UPDATES, WINDOW, TAU = 3, 24, 6.0
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom."""
RESULTS = Path(__file__).with_name("results")

_GUARDED = {"min_ess": 0.3}
ARMS: dict[str, dict[str, Any]] = {
    "fresh": {"updates": 1},
    "fresh x3": {"updates": UPDATES},
    "fresh x3, lr/3": {"updates": UPDATES, "lr": 1 / 3},
    "fresh x3, min_ess": {"updates": UPDATES, "sample": _GUARDED},
    "uniform": {"updates": UPDATES, "window": WINDOW, "sample": {"strategy": "uniform", **_GUARDED}},
    "freshness-weighted": {
        "updates": UPDATES,
        "window": WINDOW,
        "sample": {"strategy": "priority", "tau": TAU, **_GUARDED},
    },
    "anchored": {"updates": UPDATES, "window": WINDOW, "sample": {"strategy": "anchored", **_GUARDED}},
}
COLOURS = ("#2f6fde", "#8a94a6", "#6b5bb5", "#4aa3a2", "#c9731c", "#1c8a4b", "#b8336a")
CONTROL = "fresh x3"
"""What the end of a run is compared with: as many generated tokens, and as many updates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is run and measured of a pipeline.

    Attributes:
        rollouts: of a run.
        measure: of the metrics.
        target: of it; the tokens sampled until it is reached are counted.
        smooth: measurements whose mean must reach it.
        last: measurements at the end that are averaged.
        every: rollouts between two evaluations; 0 for none.
        prompts: of a rollout; None as in the definition.
    """

    rollouts: int
    measure: str
    target: float
    smooth: int
    last: int
    every: int = 0
    prompts: int | None = None


TASKS = {
    "copy_digits": Task(rollouts=90, measure="task_reward", target=0.5, smooth=5, last=10),
    "frozen_lake": Task(rollouts=150, measure="evaluation/pass@1", target=0.3, smooth=3, last=3, every=10, prompts=32),
    "sokoban": Task(rollouts=100, measure="evaluation/pass@1", target=0.3, smooth=3, last=3, every=10, prompts=32),
}


def curve(of: tuple[str, str, int, int]) -> dict[str, Any]:
    """Run one arm with one seed; what was measured, and the tokens sampled up to each measurement."""
    name, arm, seed, rollouts = of
    import torch

    from rlhf_pipeline import Evaluate, Sample, definitions
    from rlhf_pipeline.run.rows import StepRows
    from rlhf_pipeline.run.start import run
    from trajectory_store import TrajectoryStore

    torch.set_num_threads(1)
    task, how, base = TASKS[name], ARMS[arm], definitions.find(name).pipeline()
    updates = how["updates"]
    evaluate = None
    if isinstance(base.evaluate, Evaluate):
        evaluate = dataclasses.replace(
            base.evaluate, every=task.every * updates, num_prompts=256, group_size=1, at_start=False, keep_best=False
        )
    pipeline = dataclasses.replace(
        base,
        collect=dataclasses.replace(base.collect, prompts_per_rollout=task.prompts or base.collect.prompts_per_rollout),
        # `updates - 1` lets a step see the newest rollout and no other.
        buffer=dataclasses.replace(base.buffer, max_staleness=max(how.get("window", 0), updates - 1)),
        sample=Sample(**how.get("sample", {})),
        evaluate=evaluate,
        learn=dataclasses.replace(
            base.learn,
            steps=rollouts * updates,
            lr=base.learn.lr * how.get("lr", 1.0),
            epochs=updates,
            lr_schedule="constant",
            stop_at_reward=None,
            checkpoint_every=10**6,
        ),
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        run_dir = Path(folder) / "run"
        run(pipeline, run_dir=run_dir, seed=seed)
        every = [*StepRows(run_dir / "metrics.jsonl")]
        if every[-1]["step"] < rollouts * updates:  # a signal asked it to stop, and half a run would be kept
            raise SystemExit(f"{arm} seed {seed} was stopped after step {every[-1]['step']}")
        rows = [row for row in every if row.get(task.measure) is not None]
        with TrajectoryStore.open(run_dir / "store") as store:
            of_rollout = store.read_scalars("group_id") // pipeline.collect.prompts_per_rollout
            masks = store.read_ragged("assistant_mask")
        sampled = np.bincount(np.repeat(of_rollout, masks.lengths), masks.values).cumsum()
    return {
        "arm": arm,
        "seed": seed,
        "reward": [round(row[task.measure], 4) for row in rows],
        "tokens": [int(sampled[row["rollout"]]) for row in rows],
    }


def kept(of: tuple[str, str, int, int], folder: Path | None) -> dict[str, Any]:
    """Return a curve from the folder of those that are finished; else run it, and keep it there."""
    file = folder and folder / re.sub(r"[^\w.-]+", "_", "{}-{}-seed{}-of-{}.json".format(*of))
    if file is not None and file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    found = curve(of)
    if file is not None:
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(found) + "\n", encoding="utf-8")
        partial.replace(file)
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and half width of the 95 % interval by Student's t."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    quantile = T_975[min(len(values) - 1, len(T_975)) - 1]
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def figures(run: dict[str, Any], task: Task) -> dict[str, float]:
    """What is compared: the reward at the end, over the whole budget, and the tokens until the target is reached."""
    reward, tokens = run["reward"], run["tokens"]
    smooth = [statistics.fmean(reward[max(i + 1 - task.smooth, 0) : i + 1]) for i in range(len(reward))]
    there = next((tokens[i] for i, value in enumerate(smooth) if value >= task.target), math.inf)
    return {"last": statistics.fmean(reward[-task.last :]), "whole": statistics.fmean(reward), "there": there}


def table(runs: list[dict[str, Any]], task: Task) -> list[str]:
    """Return the lines of the result."""
    by_arm = by_arm_and_seed(runs, task)
    lines = [
        f"{'arm':<20} {f'last {task.last}':>16} {f'minus {CONTROL}':>18} {'whole budget':>16} {'minus fresh':>18} "
        f"{f'tokens to {task.target}, median':>28} {'get there':>10}"
    ]
    for arm, found in by_arm.items():
        cells = []
        for figure, other in (("last", CONTROL), ("whole", "fresh")):
            cells.append("{:.3f} +- {:.3f}".format(*interval([one[figure] for one in found.values()])))
            cells.append("" if arm == other else "{:+.3f} +- {:.3f}".format(*paired(by_arm, arm, other, figure)))
        there = sorted(one["there"] for one in found.values())
        middle = (statistics.median(there), *(there[1], there[-2])) if len(there) > 3 else (statistics.median(there),)
        shown = " .. ".join("never" if math.isinf(one) else f"{one:,.0f}" for one in middle[1:])
        lines.append(
            f"{arm:<20} {cells[0]:>16} {cells[1]:>18} {cells[2]:>16} {cells[3]:>18} "
            f"{f'{middle[0]:,.0f} ({shown})':>28} {f'{sum(map(math.isfinite, there))} of {len(there)}':>10}"
        )
    return lines


def by_arm_and_seed(runs: list[dict[str, Any]], task: Task) -> dict[str, dict[int, dict[str, float]]]:
    """Return the figures of each arm that has been run, by seed."""
    found = {arm: {run["seed"]: figures(run, task) for run in runs if run["arm"] == arm} for arm in ARMS}
    return {arm: seeds for arm, seeds in found.items() if seeds}


def markdown(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """Return the table of a task as docs/offline.md prints it: means, and paired differences to the control."""
    task = TASKS[name]
    by_arm = by_arm_and_seed(runs, task)
    measured = "pass@1 on held-out maps" if task.every else "reward of new rollouts"
    lines = [
        f"| {name}: {measured} | seeds | last {task.last} | minus {CONTROL} | whole budget | minus {CONTROL} | "
        f"minus fresh | tokens to {task.target:g}, median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, found in by_arm.items():
        cells = [arm, str(len(found))]
        for figure, others in (("last", [CONTROL]), ("whole", [CONTROL, "fresh"])):
            cells.append("{:.2f} ± {:.2f}".format(*interval([one[figure] for one in found.values()])))
            cells += [
                "" if arm == other else "{:+.2f} ± {:.2f}".format(*paired(by_arm, arm, other, figure))
                for other in others
            ]
        there = statistics.median(one["there"] for one in found.values())
        lines.append("| " + " | ".join([*cells, "never" if math.isinf(there) else f"{there:,.0f}"]) + " |")
    return lines


def paired(by_arm: dict[str, dict[int, dict[str, float]]], arm: str, other: str, figure: str) -> tuple[float, float]:
    """Return the interval of the difference between two arms, seed by seed, over the seeds that both have."""
    seeds = sorted(by_arm[arm].keys() & by_arm[other].keys())
    return interval([by_arm[arm][seed][figure] - by_arm[other][seed][figure] for seed in seeds])


def picture(runs: list[dict[str, Any]], name: str) -> str:
    """Return an SVG: the mean reward of each arm over the tokens sampled, with its 95 % interval."""
    width, height, left, right, top, bottom = 760, 420, 62, 24, 48, 48
    ran = {run["arm"] for run in runs}
    colours = {arm: colour for arm, colour in zip(ARMS, COLOURS, strict=True) if arm in ran}
    task, most = TASKS[name], max(run["tokens"][-1] for run in runs)

    def at(tokens: float, reward: float) -> str:
        x = left + tokens / most * (width - left - right)
        return f"{x:.1f},{height - bottom - reward * (height - top - bottom):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#3d4451">',
        "<title>Reward over generated tokens</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="{left}" y="28" font-size="15" font-weight="600">{name}: reward over generated tokens, '
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
            near = slice(max(rollout - task.smooth // 2, 0), rollout + task.smooth // 2 + 1)
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


def results_of(name: str) -> Path:
    """Return the file of the committed results of a task."""
    return RESULTS / f"experiment_replay{'' if name == 'copy_digits' else f'_{name}'}.json"


def committed(name: str) -> list[dict[str, Any]]:
    """Return the runs of a task whose results are committed."""
    return json.loads(results_of(name).read_text(encoding="utf-8"))["runs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", choices=TASKS, default="copy_digits")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep each finished run here, and use those there")
    parser.add_argument(
        "--markdown", action="store_true", help="print the tables of the committed results, and no more"
    )
    parser.add_argument("--save", action="store_true", help="write results/experiment_replay*.{json,svg}")
    args = parser.parse_args()
    if args.markdown:
        print("\n\n".join("\n".join(markdown(name, committed(name))) for name in TASKS if results_of(name).exists()))
        return
    task = TASKS[args.pipeline]
    seeds, rollouts = (2, task.rollouts // 3) if args.quick else (args.seeds, task.rollouts)
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    tasks = [(args.pipeline, arm, seed, rollouts) for seed in range(seeds) for arm in ARMS]
    runs = []
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        for run in pool.imap_unordered(functools.partial(kept, folder=args.keep), tasks):
            runs.append(run)
            print(
                f"  {len(runs)}/{len(tasks)} {run['arm']} seed {run['seed']}: {run['reward'][-1]:.2f}", file=sys.stderr
            )
    if args.keep is not None:  # of other seeds, too: an arm may have more of them than were asked for
        files = sorted(args.keep.glob(f"{args.pipeline}-*-of-{rollouts}.json"))
        runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        seeds = max(run["seed"] for run in runs) + 1
    print(f"{rollouts} rollouts, {runs[0]['tokens'][-1]:,} sampled tokens or so per run, {seeds} seeds")
    print("\n".join(table(runs, task)))
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        ordered = sorted(runs, key=lambda run: (list(ARMS).index(run["arm"]), run["seed"]))
        found = {
            **made_on(),
            **{"rollouts": rollouts, "seeds": seeds, "arms": ARMS, "table": table(runs, task), "runs": ordered},
        }
        file = results_of(args.pipeline)
        file.write_text(json.dumps(found) + "\n", encoding="utf-8")
        file.with_suffix(".svg").write_text(picture(runs, args.pipeline), encoding="utf-8")
        print(f"written: {file} and .svg")


if __name__ == "__main__":
    main()
