"""Collectors beside the learner against one process that does both in turn: wall clock to a reward, equal hardware.

    python benchmarks/bench_async.py            five seeds, about ten minutes
    python benchmarks/bench_async.py --quick    one seed

Every run is the command that a person types, on the same cores (two; a supervised run shares them out among its
processes) and with the definition copy_digits. Collectors that work while the learner does sample with older weights,
so an asynchronous run needs a `buffer.max_staleness` above 0; everything else is equal. It then needs more steps, each
of which takes less time: both are in the table. The clock runs from the end of the first step to the end of the step
at which the last three rollouts have a mean reward of 0.9, both read from the `time` in metrics.jsonl. Starting
processes and importing torch, which three processes on two cores do more slowly than one, comes on top and has a column
of its own. Figures of a machine that does something else as well are noise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rlhf_pipeline.run.rows import StepRows

GOAL_REWARD = 0.9
WINDOW = 3


@dataclass(frozen=True)
class Variant:
    """One way to run the definition."""

    name: str
    words: tuple[str, ...] = ()


VARIANTS = (
    Variant("one process"),
    Variant("1 collector, max_staleness=1", ("--collectors", "1", "--set", "buffer.max_staleness=1")),
    Variant("1 collector, max_staleness=2", ("--collectors", "1", "--set", "buffer.max_staleness=2")),
    Variant("2 collectors, max_staleness=2", ("--collectors", "2", "--set", "buffer.max_staleness=2")),
)


@dataclass(frozen=True)
class Measured:
    """One run."""

    start_s: float
    """From typing the command to the end of the first step."""
    goal_s: float | None
    """From there to the goal; None if it was not reached."""
    steps: int
    step_ms: float


def measure(variant: Variant, seed: int, cores: set[int], folder: Path) -> Measured:
    """Run the command and read what came of it."""
    run_dir = folder / f"{variant.name.replace(' ', '-').replace(',', '')}-{seed}"
    line = [sys.executable, "-m", "rlhf_pipeline", "run", "copy_digits", "--seed", str(seed), "--out", str(run_dir)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    typed = time.time()
    done = subprocess.run(
        [*line, *variant.words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode != 0:
        raise SystemExit(f"{variant.name}, seed {seed}:\n{done.stdout}{done.stderr}")
    rows = list(StepRows(run_dir / "metrics.jsonl"))
    rewards: list[float] = []
    for row in rows:
        rewards.append(row["task_reward"])
        if len(rewards) >= WINDOW and statistics.mean(rewards[-WINDOW:]) >= GOAL_REWARD:
            break
    reached = statistics.mean(rewards[-WINDOW:]) >= GOAL_REWARD
    first, last = rows[0], rows[len(rewards) - 1]
    seconds = last["time"] - first["time"]
    return Measured(
        start_s=first["time"] - typed,
        goal_s=seconds if reached else None,
        steps=last["step"],
        step_ms=1000 * seconds / max(last["step"] - first["step"], 1),
    )


def main() -> int:
    """Print the table; 1 where the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=2)
    args = parser.parse_args()
    cores = set(sorted(os.sched_getaffinity(0))[: args.cores])
    found: dict[str, list[Measured]] = {variant.name: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1 if args.quick else args.seeds):
            # In turns, and each time in another order: what else the machine does falls on all of them.
            for place in range(len(VARIANTS)):
                variant = VARIANTS[(place + seed) % len(VARIANTS)]
                found[variant.name].append(measure(variant, seed, cores, Path(folder)))
    print(f"copy_digits to reward {GOAL_REWARD} on {len(cores)} cores, median of {len(found['one process'])} seeds")
    print(f"{'':32} {'to 0.9':>9} {'steps':>6} {'per step':>9} {'start':>8} {'reached':>8} {'speed-up':>9}")
    sync = found["one process"]
    speed_ups: dict[str, float] = {}
    for name, runs in found.items():
        pairs = [(b.goal_s, a.goal_s) for b, a in zip(sync, runs, strict=True) if a.goal_s and b.goal_s]
        speed_ups[name] = statistics.median(before / after for before, after in pairs) if pairs else float("nan")
        seconds = [run.goal_s if run.goal_s is not None else float("inf") for run in runs]
        print(
            f"{name:32} {statistics.median(seconds):7.1f} s {statistics.median(r.steps for r in runs):6.0f} "
            f"{statistics.median(r.step_ms for r in runs):6.0f} ms {statistics.median(r.start_s for r in runs):6.1f} s "
            f"{sum(r.goal_s is not None for r in runs):>4} of {len(runs)} {speed_ups[name]:8.2f}x"
        )
    best = max((value, name) for name, value in speed_ups.items() if name != "one process")
    met = best[0] >= 1.0
    verdict = "met" if met else "missed"
    print(f"best asynchronous form against one process: {best[0]:.2f}x ({best[1]}); goal at least 1.00x: {verdict}")
    return int(not (met or args.quick))


if __name__ == "__main__":
    raise SystemExit(main())
