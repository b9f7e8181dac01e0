"""A supervised run, one random process of it killed with SIGKILL every few seconds, and a count of what is left.

    python tests/crash/soak.py --minutes 10 --seed 0

For three quarters of the time the supervisor, a collector or the learner is killed at random; the script plays the
person who types the command again when the supervisor is gone. Then the run is asked to stop (SIGTERM), is resumed and
works undisturbed, is stopped once more, and goes on to its last step. What the stores, the ledger and the metrics say
is then compared with what was acknowledged on the way, and the table says met or missed. Exit code 1 if anything is
missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from _soak_checks import GOAL, Line, Witness, check_run, mean_reward

from rlhf_pipeline import definitions
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.heartbeat import read_heartbeat

ROLES = ("supervisor", "learner", "collector-0", "collector-1")
KILL_EVERY_S = (5.0, 12.0)
"""A process needs 5 to 10 s until it has imported torch; killed more often than that, nobody would ever work."""
SHARE_OF_KILLS = 0.75
LAST_STEPS = 30
SAFETY = 0.03
"""How far above the goal the reward should be when the run is stopped for the last time."""
MORE_S = 240.0
"""How much longer a run may work undisturbed that has not learned the task yet."""
MOST_GROWTH = 0.10
"""Of a role's anonymous memory, from the first to the last quarter of its samples."""
SLACK_MB = 16.0
WARM = 15
"""Rollouts or steps of a process's life from which on its memory counts: before, it allocates what it will keep."""


@dataclass
class Memory:
    """Samples of the anonymous memory (what is not a mapped file) of every process."""

    samples: dict[str, list[tuple[int, float, float]]] = field(default_factory=lambda: {role: [] for role in ROLES})
    """By role: process id, time, MB."""
    at: float = 0.0

    def look(self, run_dir: Path) -> None:
        """Take a sample of each process, once a second at most."""
        now = time.monotonic()
        if now - self.at < 1.0:
            return
        self.at = now
        for role, pid in alive(run_dir).items():
            megabytes = anonymous_mb(pid)
            if megabytes is not None and is_warm(run_dir, role, pid):
                self.samples[role].append((pid, now, megabytes))

    def lines(self) -> list[Line]:
        """Return, for each role, how its memory grew over all its lives, and in its longest one."""
        found = []
        for role, samples in self.samples.items():
            if not samples:
                found.append(Line(f"memory of {role}", "no life long enough", None))
                continue
            longest = Counter(pid for pid, _, _ in samples).most_common(1)[0][0]
            for what, some in (
                ("all lives", samples),
                ("longest life", [sample for sample in samples if sample[0] == longest]),
            ):
                megabytes = np.array([sample[2] for sample in some])
                quarter = max(len(megabytes) // 4, 1)
                first, last = float(np.median(megabytes[:quarter])), float(np.median(megabytes[-quarter:]))
                flat = last - first <= max(MOST_GROWTH * first, SLACK_MB)
                seconds = some[-1][1] - some[0][1]
                found.append(
                    Line(f"memory of {role}, {what} ({seconds:.0f} s), MB", f"{first:.0f} -> {last:.0f}", flat)
                )
        return found


def is_warm(run_dir: Path, role: str, pid: int) -> bool:
    """Return True if a process has done enough work in its life for its memory to count."""
    said = read_heartbeat(run_dir / "processes", role)
    if said.get("pid") != pid:
        return False
    if role == "supervisor":
        return said["state"] == "running"
    worked = said.get("step", 0) - said.get("first_step", 0) if role == "learner" else said.get("rollouts", 0)
    return worked >= WARM


def anonymous_mb(pid: int) -> float | None:
    """Return the anonymous resident memory of a process in MB, or None if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) / 1024 if "RssAnon" in fields else None


def alive(run_dir: Path) -> dict[str, int]:
    """Return the process id of each process of this run that lives, by name, those that only just start included."""
    said = read_heartbeat(run_dir / "processes", "supervisor")
    pids = {"supervisor": said.get("pid"), **said.get("processes", {})}
    found: dict[str, int] = {}
    for role in ROLES:
        for pid in (pids.get(role), read_heartbeat(run_dir / "processes", role).get("pid")):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if os.fsencode(run_dir) in command:  # the number may be another process's by now
                found[role] = int(str(pid))
                break
    return found


class Soak:
    """One supervised run and the person beside it."""

    def __init__(self, run_dir: Path, settings: list[str], seed: int) -> None:
        self.run_dir = run_dir
        self.settings = settings
        self.rng = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.memory = Memory()
        self.witness: Witness | None = None
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.output = run_dir.with_suffix(".out")

    def start(self, *more: str) -> None:
        """Type the command, or type it again."""
        resumed = (self.run_dir / "config.json").is_file()
        words = ["--resume"] if resumed else ["long_running", *(w for s in self.settings for w in ("--set", s))]
        command = [sys.executable, "-m", "rlhf_pipeline", "run", *words, "--out", str(self.run_dir)]
        with self.output.open("ab") as out:
            self.supervisor = subprocess.Popen(
                [*command, "--collectors", "2", "--max-failures", "100", *more], stdout=out, stderr=out
            )

    def work_and_kill(self, seconds: float) -> None:
        """Kill somebody every few seconds; if it was the supervisor, start it again."""
        end = time.monotonic() + seconds
        next_kill = time.monotonic() + self.rng.uniform(10, 15)
        while time.monotonic() < end:
            self.look()
            if self.supervisor is None or self.supervisor.poll() is not None:
                code = None if self.supervisor is None else self.supervisor.returncode
                if code not in (None, -signal.SIGKILL):
                    raise SystemExit(f"the supervisor ended with code {code}:\n{self.tail()}")
                self.start("--steps", "1000000")
            if time.monotonic() >= next_kill:
                next_kill = time.monotonic() + self.rng.uniform(*KILL_EVERY_S)
                self.kill_one()

    def work(self, seconds: float, *, at_least: int) -> None:
        """Let the run work undisturbed for so long, and up to a step at least; longer while it learns the task.

        How many steps it takes before is up to the machine, and in what order rollouts arrive to chance.
        """
        end = time.monotonic() + seconds
        while (
            time.monotonic() < end
            or self.steps() < at_least
            or (self.reward() < GOAL + SAFETY and time.monotonic() < end + MORE_S)
        ):
            self.look()
            if self.supervisor is None or self.supervisor.poll() is not None or time.monotonic() > end + 300:
                raise SystemExit(f"the run has not reached step {at_least}:\n{self.tail()}")

    def kill_one(self) -> None:
        """Kill one process; the supervisor half as often as each other one, because it takes all of them with it."""
        found = sorted(alive(self.run_dir).items())
        if found:
            weights = [1 if role == "supervisor" else 2 for role, _ in found]
            ((role, pid),) = self.rng.choices(found, weights)
            os.kill(pid, signal.SIGKILL)
            self.kills[role] += 1

    def stop(self) -> int:
        """Ask the run to stop, as a service manager does, and return its exit code."""
        while self.supervisor is None or self.supervisor.poll() is not None:
            self.start("--steps", "1000000")
        while alive(self.run_dir).get("supervisor") != self.supervisor.pid:
            self.look()  # a process that only just starts has no handlers yet
        self.supervisor.send_signal(signal.SIGTERM)
        return self.wait(180)

    def wait(self, seconds: float) -> int:
        """Wait for the supervisor, looking at it, and return its exit code."""
        end = time.monotonic() + seconds
        while self.supervisor is not None and self.supervisor.poll() is None:
            self.look()
            if time.monotonic() > end:
                raise SystemExit(f"the run did not end within {seconds:.0f} s:\n{self.tail()}")
        return self.supervisor.returncode if self.supervisor is not None else -1

    def look(self) -> None:
        """Take in what was acknowledged, and how much memory there is."""
        if self.witness is None and (self.run_dir / "config.json").is_file():
            config = RunFolder.open(self.run_dir).config
            self.witness = Witness(self.run_dir, config.pipeline["collect"]["prompts_per_rollout"])
        if self.witness is not None:
            self.witness.look()
        self.memory.look(self.run_dir)
        time.sleep(0.2)

    def reward(self) -> float:
        """Return the mean reward of the last rollouts that were learned from."""
        return mean_reward(RunFolder.open(self.run_dir).metrics)

    def steps(self) -> int:
        """Return the learner's step."""
        metrics = RunFolder.open(self.run_dir).metrics
        return metrics[-1]["step"] if metrics else 0

    def tail(self) -> str:
        """Return the last lines of what the supervisor printed."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-20:])

    def kill_all(self) -> None:
        """Leave nothing behind."""
        for pid in alive(self.run_dir).values():
            os.kill(pid, signal.SIGKILL)
        if self.supervisor is not None:
            self.supervisor.wait()


def soak(run_dir: Path, *, seconds: float, seed: int, settings: list[str], quiet_steps: int) -> list[Line]:
    """Run and kill; stop, resume, work undisturbed; stop, resume, end; count.

    Args:
        run_dir: the run folder; must not exist.
        seconds: about how long all of it takes.
        seed: of the kills.
        settings: `--set` pairs for the definition.
        quiet_steps: optimizer steps without kills before the run is stopped, at least: enough to learn from nothing.
    """
    run = Soak(run_dir, settings, seed)
    started = time.monotonic()
    try:
        run.work_and_kill(SHARE_OF_KILLS * seconds)
        codes = [run.stop()]
        steps, killing = run.steps(), time.monotonic() - started
        run.start("--steps", "1000000")
        run.work(seconds - killing, at_least=steps + quiet_steps)
        codes.append(run.stop())
        run.start("--steps", str(run.steps() + LAST_STEPS))
        codes.append(run.wait(300))
        run.look()
        if run.witness is None:
            raise SystemExit("the run folder was never made")
        config = json.loads((run_dir / "config.json").read_text())
        pipeline = definitions.find(config["definition"]).pipeline([tuple(pair) for pair in config["overrides"]])
        took = time.monotonic() - started
        log = (run_dir / "supervisor.log").read_text()
        supervisors = log.count("supervisor: started")
        errors = [code for code in re.findall(r"ended with code (\d+)", log) if code not in ("0", "143")]
        return [
            Line("seconds, of them with kills", f"{took:.0f}, {killing:.0f}", None),
            Line("kills", ", ".join(f"{role} {num}" for role, num in sorted(run.kills.items())), None),
            Line(
                "starts: supervisor, its processes",
                f"{supervisors}, {log.count(': started, process') - supervisors}",
                None,
            ),
            Line("optimizer steps, with kills and after", f"{steps:,}, {run.steps() - steps:,}", None),
            Line("exit codes: SIGTERM twice, and the end", f"{codes}", codes == [143, 143, 0]),
            Line("processes that ended by an error of their own", f"{len(errors)}", not errors),
            *check_run(run_dir, pipeline, run.witness),
            *run.memory.lines(),
        ]
    finally:
        run.kill_all()


def main() -> int:
    """Run the soak and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--quiet-steps", type=int, default=300, help="steps without kills at the end, at least")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument(
        "--out", type=Path, help="keep the run here (default: a temporary folder, removed if all is met)"
    )
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-")) if args.out is None else args.out.resolve().parent
    run_dir = folder / "run" if args.out is None else args.out.resolve()
    lines = soak(
        run_dir, seconds=60 * args.minutes, seed=args.seed, settings=args.settings, quiet_steps=args.quiet_steps
    )
    for line in lines:
        print(line)  # noqa: T201
    missed = sum(line.met is False for line in lines)
    print(f"{missed} missed; the run is in {run_dir}" if missed else "all met")  # noqa: T201
    if args.out is None and not missed:
        shutil.rmtree(folder)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
