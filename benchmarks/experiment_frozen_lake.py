"""Does `frozen_lake` learn with other seeds than those it was made with? The definition as it is, an experiment.

    python benchmarks/experiment_frozen_lake.py --runs FOLDER            # eight seeds, some minutes each
    python benchmarks/experiment_frozen_lake.py --runs FOLDER --save     # the same, and writes results/frozen_lake.json
    python benchmarks/experiment_frozen_lake.py --runs FOLDER --fresh    # one step on each rollout, for comparison
    python benchmarks/experiment_frozen_lake.py --markdown               # the tables of the committed results

Each run is `rlhf-pipeline run frozen_lake --seed N`. What counts is pass@1 on 128 held-out maps, four walks on each, at
the best of its eight evaluations: that of the checkpoint which the run keeps. The walks of an evaluation begin in the
corner farthest from the goal, those that it learns from begin anywhere: a reward of training is higher than the share
of held-out maps that it goes with. The command started again goes on where it was cut.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

from experiment_sums import command_of, evaluations_of, made_on

from rlhf_pipeline.run.rows import StepRows

RESULTS = Path(__file__).with_name("results") / "frozen_lake.json"
SEEDS = tuple(range(201, 209))
FRESH = {
    **{"sample.strategy": "fresh", "sample.min_ess": "none", "buffer.max_staleness": "0", "learn.epochs": "1"},
    **{"learn.steps": "320", "evaluate.every": "40", "learn.checkpoint_every": "40"},
}
"""What the definition had before: twice as many walks, and one step on each rollout."""
GOAL = 0.65
"""Of held-out maps; seven of eight seeds shall reach it."""
LAST = 20
"""Rollouts at the end whose mean reward is printed, and steps before an evaluation whose mean entropy is."""
EARLY = 40
"""Rollouts after which the entropy is printed."""


def shown_by(run: Path) -> dict[str, Any]:
    """Return what a run shows: its evaluations, the mean reward of its last rollouts, and how long it took."""
    rows = [*StepRows(run / "metrics.jsonl")]
    rewards = [row["task_reward"] for row in rows if row.get("task_reward") is not None]
    pass_at_1 = evaluations_of(run, "evaluation/pass@1")
    return {
        "steps of a rollout": len(rows) // len(rewards),
        "pass@1": pass_at_1,
        "entropy": {
            step: statistics.fmean(row["entropy"] for row in rows[int(step) - LAST : int(step)])
            for step in pass_at_1
            if step != "0"
        },
        "reward of the last rollouts": statistics.fmean(rewards[-LAST:]),
        "seconds": round(sum((row["rollout_s"] or 0.0) + row["update_s"] for row in rows)),
    }


def seeds_of(runs: Path, kind: str) -> dict[str, Any]:
    """Return what the finished runs of a kind in a folder show, by seed."""
    finished = [run for run in sorted(runs.glob(f"{kind}-*")) if (run / "report.html").exists()]
    return {run.name.rpartition("-")[2]: shown_by(run) for run in finished}


def found_by(runs: Path) -> dict[str, Any]:
    """Return what the runs in a folder show, of those that are finished."""
    return {
        **made_on(),
        "seeds": seeds_of(runs, "frozen_lake"),
        "fresh": seeds_of(runs, "fresh"),
    }


def markdown(seeds: dict[str, Any]) -> list[str]:
    """Return a table: of each seed the best evaluation, the last one, and an early one with the entropy before it."""
    early = f"after {EARLY} rollouts"
    lines = [
        f"| seed | best pass@1 | after step | last | {early} | entropy {early} | reward of the last {LAST} rollouts |",
        "|---|---|---|---|---|---|---|",
    ]
    for seed, one in seeds.items():
        curve, entropy, then = one["pass@1"], one["entropy"], str(EARLY * one["steps of a rollout"])
        best = max(curve, key=lambda step: curve[step])
        figures = [curve[best], [*curve.values()][-1], curve[then], entropy[then], one["reward of the last rollouts"]]
        cells = [f"{figure:.2f}" for figure in figures]
        lines.append("| " + " | ".join([seed, cells[0], best, *cells[1:]]) + " |")
    return lines


def reached(seeds: dict[str, Any]) -> str:
    """Return how many seeds have reached the goal."""
    enough = sum(max(one["pass@1"].values()) >= GOAL for one in seeds.values())
    return f"{enough} of {len(seeds)} seeds reach {GOAL}"


def shown(found: dict[str, Any]) -> str:
    """Return both tables."""
    tables = [[*markdown(found[kind]), "", reached(found[kind])] for kind in ("seeds", "fresh") if found[kind]]
    return "\n\n".join("\n".join(lines) for lines in tables)


def main() -> None:
    """Run what is not finished, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where the runs are")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS, help="which; none to read those there are")
    parser.add_argument("--fresh", action="store_true", help="learn from each rollout once, as before")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the committed results")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name} of the results")
    args = parser.parse_args()
    if args.markdown:
        print(shown(json.loads(RESULTS.read_text(encoding="utf-8"))))
        return
    args.runs.mkdir(parents=True, exist_ok=True)
    kind, more = (
        ("fresh", [f"--set={name}={value}" for name, value in FRESH.items()]) if args.fresh else ("frozen_lake", [])
    )
    for seed in args.seeds:
        run = args.runs / f"{kind}-{seed}"
        if not (run / "report.html").exists():
            subprocess.run(command_of(run, seed, more, pipeline="frozen_lake"), check=True)
    found = found_by(args.runs)
    print(shown(found))
    if args.save:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
