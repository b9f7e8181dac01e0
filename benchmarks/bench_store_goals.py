"""Every goal of the store's speed and size in one table: what, figure, goal, met or missed.

    python benchmarks/bench_store_goals.py [--quick] [--only NAME ...]

Runs each benchmark of the store as a process of its own, one after the other, and takes the lines that have a goal out
of what it prints. The exit code is 1 if a goal was missed. It takes four to six minutes on two busy cores.

That nothing is lost is no figure: the tests show it, and `.ci/run` runs them, those with kills and power losses in a
short form. The long ones: `STORE_STATES=1500 python -m pytest -m crash tests/crash/test_store_power_loss.py`, and
`python tests/crash/histories.py`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MOST_S = 600

# Script, arguments, arguments of --quick.
BENCHMARKS = (
    ("bench_store_sample.py", ("--clock", "cpu"), ("--quick",)),
    ("bench_replay.py", ("--quick",), ("--quick",)),
    ("bench_store_scale.py", (), ("--no-torch",)),
    ("bench_store_cold.py", (), ("--quick",)),
    ("bench_store_append.py", (), ("--quick",)),
    ("bench_store_open.py", (), ("--quick",)),
    ("bench_store_disk.py", (), ("--quick",)),
    ("bench_store_zarr.py", (), ("--quick",)),
    ("bench_store_updates.py", (), ("--quick",)),
)
TABLE_LINE = re.compile(
    r"^(?P<what>.+?)\s+(?P<figure>-?[\d.]+) (?P<unit>\S*)\s+(?P<goal>[<>]= \S+)\s+(?P<verdict>met|MISSED)\s*$"
)


class Goal(NamedTuple):
    """One line of the table."""

    what: str
    figure: str
    goal: str
    met: bool

    def __str__(self) -> str:
        return f"{self.what:<92}{self.figure:>14}  {self.goal:<10} {'met' if self.met else 'MISSED'}"


def goals_of(output: str) -> list[Goal]:
    """The lines with a goal in what a benchmark printed."""
    found = []
    for line in output.splitlines():
        match = TABLE_LINE.match(line)
        if match is not None:
            figure = f"{match['figure']} {match['unit']}".strip()
            found.append(Goal(match["what"].strip(), figure, match["goal"], match["verdict"] == "met"))
    return found


def benchmark(script: str, arguments: tuple[str, ...]) -> list[Goal]:
    """Run one benchmark and print its goals."""
    start = time.perf_counter()
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    line = [sys.executable, str(HERE / script), *arguments]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=MOST_S, env=environment, cwd=ROOT)
        output, code = done.stdout + done.stderr, f"exit {done.returncode}"
    except subprocess.TimeoutExpired:
        output, code = "nothing", f"after {MOST_S} s"
    found = goals_of(output)
    if not found:
        last = output.strip().splitlines()[-1:] or ["no output"]
        found = [Goal(f"{script} said: {last[0]}"[:91], code, "", met=False)]
    print(f"-- {' '.join((script, *arguments))}: {time.perf_counter() - start:.0f} s")
    print(*found, sep="\n", flush=True)
    return found


def main() -> int:
    """Print the table and what was missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter benchmarks")
    parser.add_argument("--only", nargs="+", default=[], help="benchmarks whose name contains one of these")
    options = parser.parse_args()
    start = time.perf_counter()
    goals: list[Goal] = []
    for script, full, quick in BENCHMARKS:
        if not options.only or any(name in script for name in options.only):
            goals += benchmark(script, quick if options.quick else full)
    missed = [goal for goal in goals if not goal.met]
    print(f"\n{len(goals) - len(missed)} of {len(goals)} goals met, {time.perf_counter() - start:.0f} s")
    for goal in missed:
        print(f"missed: {goal.what}: {goal.figure}, goal {goal.goal}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
