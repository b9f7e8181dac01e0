"""Every goal of the store in one table: what, figure, goal, met or missed.

    python tests/benchmarks/bench_store_goals.py [--quick] [--no-crash] [--only NAME ...]

Runs each benchmark of the store as a process of its own, one after the other, and takes the lines that have a goal out
of what it prints; then the crash suites, two at a time, with the numbers of kills and power losses that are the goal,
where a test that fails is a goal missed (`--no-crash` leaves them out). The exit code is 1 if a goal was missed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KILLS, LOSSES = 300, 1000

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
# What, tests, and the environment that makes them as long as the goal says.
SUITES = (
    (
        f"{KILLS} SIGKILLs, 1, 2 and 4 writers: rows lost, wrong or twice",
        ("tests/crash/test_store_kill.py", "tests/crash/test_store_kill_upkeep.py"),
        {"STORE_KILLS": str(KILLS)},
    ),
    (
        f"{LOSSES} simulated power losses: synced rows lost",
        ("tests/crash/test_store_power_loss.py",),
        {"STORE_STATES": str(3 * LOSSES // 2)},
    ),
    ("a flipped bit in any column or record is reported", ("tests/trajectory_store/test_verify.py",), {}),
    (
        "random operations agree with a plain list, both backends",
        ("tests/trajectory_store/test_state_machine.py",),
        {},
    ),
)
TABLE_LINE = re.compile(
    r"^(?P<what>.+?)\s+(?P<figure>-?[\d.]+) (?P<unit>\S*)\s+(?P<goal>[<>]= \S+)\s+(?P<verdict>met|MISSED)\s*$"
)
REPLAY_LINE = re.compile(
    r"^(?P<what>.+?)\s+[\d.]+\s+[\d.]+ us(/traj)?\s+(?P<figure>[\d.]+)(?P<unit>x) (?P<how>longer|faster)\s+"
    r"(?P<goal>[<>]= [\d.]+)x\s+(?P<verdict>met|missed)\s+(?P<peer>.*)$"
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
        match = TABLE_LINE.match(line) or REPLAY_LINE.match(line)
        if match is not None:
            parts = match.groupdict()
            against = f" ({parts['how']} than {parts['peer']})" if "peer" in parts else ""
            figure = f"{parts['figure']} {parts['unit']}".strip()
            found.append(Goal((parts["what"].strip() + against)[:91], figure, parts["goal"], parts["verdict"] == "met"))
    return found


def run(line: list[str], extra: dict[str, str], timeout: float) -> tuple[str, int, float]:
    """Output, exit code and seconds of a process."""
    start = time.perf_counter()
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ, **extra}
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return f"took longer than {timeout:.0f} s", 1, timeout
    return done.stdout + done.stderr, done.returncode, time.perf_counter() - start


def benchmark(script: str, arguments: tuple[str, ...]) -> list[Goal]:
    """Run one benchmark and print its goals."""
    output, code, seconds = run([sys.executable, str(HERE / script), *arguments], {}, 600)
    found = goals_of(output)
    if not found:
        last = output.strip().splitlines()[-1:] or ["no output"]
        found = [Goal(f"{script} said: {last[0]}"[:91], f"exit {code}", "", met=False)]
    print(f"-- {' '.join((script, *arguments))}: {seconds:.0f} s")
    print(*found, sep="\n", flush=True)
    return found


def suite(what: str, tests: tuple[str, ...], extra: dict[str, str]) -> list[Goal]:
    """Run some tests and print whether all passed."""
    line = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", *tests]
    output, code, seconds = run(line, extra, 1200)
    ending = output.strip().splitlines()[-1:] or ["no output"]
    passed = re.search(r"(\d+) passed", ending[0])
    figure = f"{passed.group(1)} passed" if passed and code == 0 else f"exit {code}"
    found = Goal(what, "0" if code == 0 else figure, "0 failures", code == 0)
    print(f"-- {' '.join(tests)}: {seconds:.0f} s, {ending[0]}")
    print(found, flush=True)
    return [found]


def main() -> int:
    """Print the table and what was missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter benchmarks, and no crash suites")
    parser.add_argument("--no-crash", action="store_true", help="leave the crash suites out")
    parser.add_argument("--only", nargs="+", default=[], help="benchmarks whose name contains one of these")
    options = parser.parse_args()
    start = time.perf_counter()
    goals: list[Goal] = []
    for script, full, quick in BENCHMARKS:
        if not options.only or any(name in script for name in options.only):
            goals += benchmark(script, quick if options.quick else full)
    if not (options.quick or options.no_crash or options.only):
        with ThreadPoolExecutor(2) as side_by_side:  # those that kill processes mostly wait for them
            for found in side_by_side.map(lambda each: suite(*each), SUITES):
                goals += found
    missed = [goal for goal in goals if not goal.met]
    print(f"\n{len(goals) - len(missed)} of {len(goals)} goals met, {time.perf_counter() - start:.0f} s")
    for goal in missed:
        print(f"missed: {goal.what}: {goal.figure}, goal {goal.goal}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
