"""A supervised run that somebody kills, freezes and signals every few seconds, and a count of what is left.

    python tests/crash/soak.py --minutes 15              # trouble
    python tests/crash/soak.py --minutes 10 --undisturbed  # none: memory stays flat
    python tests/crash/soak.py --minutes 5 --effects       # of conversations with effects outside: none is repeated

For three quarters of the time the supervisor, a collector or the learner is killed, frozen, or asked to stop, alone or
all at once, some in the first second of their lives; the script plays the person who types the command again when the
supervisor is gone. Beside it `verify`, `inspect`, `tail`, `show` and a compaction take turns. Then the run is asked to
stop (SIGTERM), is resumed and works undisturbed, is stopped once more, and goes on to its last step. What the stores,
the ledger and the metrics say is then compared with what was acknowledged on the way, and the table says met or missed.
Exit code 1 if anything is missed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from _lakes import NOTES
from _soak_checks import GOAL, Line, Witness, check_effects, check_run, mean_reward

from rlhf_pipeline import definitions
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.heartbeat import read_heartbeat
from tests.processes import Child, Children
from trajectory_store import TrajectoryStore

ROLES = ("supervisor", "learner", "collector-0", "collector-1")
TROUBLE_EVERY_S = (5.0, 12.0)
"""A process needs 5 to 10 s until it has imported torch; killed more often than that, nobody would ever work."""
TROUBLE = {"kill": 6, "kill all": 1, "kill a young one": 2, "pause": 2, "freeze": 1, "ask one": 2, "ask all": 1}
"""What may happen, and how often beside the others."""
HANG_S = 15
"""After which the supervisor takes a frozen process for dead."""
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOOK_EVERY_S = 3.0
"""Between two commands that look at the run while it works."""
SHARE_OF_TROUBLE = 0.75
LAST_STEPS = 30
SAFETY = 0.03
"""How far above the goal the reward should be when the run is stopped for the last time."""
MORE_S = 240.0
"""How much longer a run may work undisturbed that has not learned the task yet."""
MOST_GROWTH = 0.05
"""Of a process's anonymous memory, from the first to the last quarter of its life."""
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
        """Return how the memory of each process grew that lived undisturbed."""
        found = []
        for role, samples in self.samples.items():
            lives = {pid for pid, _, _ in samples}
            if len(lives) != 1:
                found.append(Line(f"memory of {role}", f"{len(lives)} lives", False))
                continue
            megabytes = np.array([sample[2] for sample in samples])
            quarter = max(len(megabytes) // 4, 1)
            first, last = float(np.median(megabytes[:quarter])), float(np.median(megabytes[-quarter:]))
            what = f"memory of {role} in {samples[-1][1] - samples[0][1]:.0f} s, MB"
            found.append(Line(what, f"{first:.1f} -> {last:.1f}", last <= (1 + MOST_GROWTH) * first))
        return found


def is_warm(run_dir: Path, role: str, pid: int) -> bool:
    """Return True if a process has done enough work in its life for its memory to count."""
    heartbeat = read_heartbeat(run_dir / "processes", role)
    if heartbeat.get("pid") != pid:
        return False
    if role == "supervisor":
        return heartbeat["state"] == "running"
    worked = (
        heartbeat.get("step", 0) - heartbeat.get("first_step", 0) if role == "learner" else heartbeat.get("rollouts", 0)
    )
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
    heartbeat = read_heartbeat(run_dir / "processes", "supervisor")
    pids = {"supervisor": heartbeat.get("pid"), **heartbeat.get("processes", {})}
    restarts: dict[str, int] = {}
    for role in ROLES:
        for pid in (pids.get(role), read_heartbeat(run_dir / "processes", role).get("pid")):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if os.fsencode(run_dir) in command:  # the number may be another process's by now
                restarts[role] = int(str(pid))
                break
    return restarts


def compact(store_path: Path) -> None:
    """Merge the segments of the run's store."""
    with TrajectoryStore.open(store_path, "a") as store:
        store.compact()


class Looks:
    """Commands that look at a run, and a compaction, one after the other while it works; each must succeed."""

    def __init__(self, run_dir: Path, children: Children) -> None:
        words = (["verify"], ["inspect", "--grade"], ["tail", "-n", "3"], ["show"])
        commands = [functools.partial(children.run, word, run_dir, *more) for word, *more in words]
        self.commands = [*commands, functools.partial(children.call, compact, run_dir / "store")]
        self.run = RunFolder(run_dir)
        self.done = 0
        self.problems: list[str] = []
        self._process: Child | None = None
        self._next = 0.0

    def look(self) -> None:
        """Start the next one, once the one before has ended and a run is there that has stored something."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            if code := self._process.poll():
                self.problems.append(f"{self._process.name}: exit code {code}\n{self._process.output()[-3000:]}")
            self._process, self._next, self.done = None, time.monotonic() + LOOK_EVERY_S, self.done + 1
        if time.monotonic() >= self._next and self.run.metrics_file.is_file():
            self._process = self.commands[self.done % len(self.commands)]()

    def end(self) -> None:
        """Wait for the last one."""
        if self._process is not None:
            self._process.wait()
            self._next = float("inf")
            self.look()


class Soak:
    """One supervised run and the person beside it."""

    def __init__(
        self,
        run_dir: Path,
        settings: list[str],
        seed: int,
        children: Children,
        *,
        effects: bool = False,
        undisturbed: bool = False,
        pace: float = 1.0,
    ) -> None:
        self.run_dir = run_dir
        self.definition = f"{Path(__file__).with_name('_lakes.py')}:noted_lake" if effects else "long_running"
        self.notes = run_dir.with_suffix(".notes")
        self.settings = settings
        self.undisturbed = undisturbed
        self.pace = pace
        self.rng = random.Random(seed)
        self.troubles: Counter[str] = Counter()
        self.memory = Memory()
        self.children = children
        self.looks = Looks(run_dir, children)
        self.asked: int | None = None
        """The signal that the living supervisor was sent last."""
        self._paused: list[tuple[float, int]] = []
        """Until when, and who."""
        self.witness: Witness | None = None
        self.supervisor: Child | None = None

    def start(self, *more: str) -> None:
        """Type the command, or type it again."""
        resumed = (self.run_dir / "config.json").is_file()
        words = ["--resume"] if resumed else [self.definition, *(w for s in self.settings for w in ("--set", s))]
        options = ["--collectors", "2", "--max-failures", "100", "--hang-timeout", str(HANG_S * self.pace), *more]
        self.supervisor = self.children.python(
            *("-m", "rlhf_pipeline", "run", *words, "--out", self.run_dir, *options),
            name="supervisor",
            env={NOTES: str(self.notes)},
        )
        self.asked = None

    def work_in_trouble(self, seconds: float) -> None:
        """Make trouble every few seconds; if the supervisor is gone, start it again."""
        end = time.monotonic() + seconds
        next_trouble = time.monotonic() + self.pace * self.rng.uniform(10, 15)
        while time.monotonic() < end:
            self.look()
            self.restart_if_gone()
            if time.monotonic() >= next_trouble:
                self.await_conversations()
                next_trouble = time.monotonic() + self.pace * self.rng.uniform(*TROUBLE_EVERY_S)
                self.make_trouble(*self.rng.choices(list(TROUBLE), list(TROUBLE.values())))
        self.wake()

    def await_conversations(self) -> None:
        """With effects, wait until conversations are on: at another moment a kill tells nothing about them."""
        end, size = time.monotonic() + HANG_S * self.pace, self.noted()
        while size and self.noted() == size and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(self.rng.uniform(0, 0.5) if size else 0)

    def noted(self) -> int:
        """Return the bytes of the notes."""
        return self.notes.stat().st_size if self.notes.exists() else 0

    def restart_if_gone(self) -> None:
        """Type the command again where the supervisor was killed or asked to stop."""
        if self.supervisor is not None and self.supervisor.poll() is None:
            return
        code = None if self.supervisor is None else self.supervisor.poll()
        # A process that has only just been started has no handlers yet.
        stopped = (None, -signal.SIGKILL) if self.asked is None else (-signal.SIGKILL, 128 + self.asked, -self.asked)
        if code not in stopped:
            raise SystemExit(f"the supervisor ended with code {code}:\n{self.tail()}")
        self.start("--steps", "1000000")

    def make_trouble(self, what: str) -> None:
        """Do one of `TROUBLE`; the supervisor half as often as each other one, because it takes all of them with it."""
        names = alive(self.run_dir)
        if not names or self.supervisor is None:
            return
        weights = [1 if role == "supervisor" else 2 for role in names]
        ((role, pid),) = self.rng.choices(list(names.items()), weights)
        if what == "kill":
            self.kill(pid)
            what = f"kill {role}"
        elif what == "kill all":
            self.kill(*names.values())
        elif what == "kill a young one":
            self.supervisor.kill()
            self.start("--steps", "1000000")
            time.sleep(self.rng.uniform(0, 1))
            self.supervisor.kill()
        elif what in ("pause", "freeze"):
            if role == "supervisor":
                what = "pause"  # nobody would wake it
            self.send(pid, signal.SIGSTOP)
            if what == "pause":
                self._paused.append((time.monotonic() + self.rng.uniform(1, 6), pid))
        else:
            number = self.rng.choice(ASKING)
            if what == "ask all":
                self.asked = number
                pid = self.supervisor.pid
            elif role == "supervisor":
                self.asked = number
            self.send(pid, number)
            what = f"{number.name} to {'all' if what == 'ask all' else role}"
        self.troubles[what] += 1

    def kill(self, *pids: int) -> None:
        """Kill processes, and wait until the supervisor has ended if it is one of them: it must not count as alive."""
        for pid in pids:
            self.send(pid, signal.SIGKILL)
        if self.supervisor is not None and self.supervisor.pid in pids:
            self.supervisor.kill()

    def send(self, pid: int, number: int) -> None:
        """Send a signal to a process that may be gone."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def wake(self, before: float = float("inf")) -> None:
        """Let those go on whose pause is over."""
        for until, pid in self._paused:
            if until <= before:
                self.send(pid, signal.SIGCONT)
        self._paused = [(until, pid) for until, pid in self._paused if until > before]

    def work(self, seconds: float, *, at_least: int, goal: bool) -> None:
        """Let the run work undisturbed for so long, and up to a step at least; longer while it learns the task.

        How many steps it takes before is up to the machine, and in what order rollouts arrive to chance.
        """
        end = time.monotonic() + seconds
        while (
            time.monotonic() < end
            or self.steps() < at_least
            or (goal and self.reward() < GOAL + SAFETY and time.monotonic() < end + MORE_S)
        ):
            self.look()
            if self.supervisor is None or self.supervisor.poll() is not None:
                raise SystemExit(f"the run ended by itself before step {at_least}:\n{self.tail()}")

    def stop(self) -> int:
        """Ask the run to stop, as a service manager does, and return its exit code."""
        if self.asked is not None:
            self.wait()  # another signal already ends it, whose exit code it would have
        self.restart_if_gone()
        assert self.supervisor is not None
        while alive(self.run_dir).get("supervisor") != self.supervisor.pid:
            self.look()  # a process that only just starts has no handlers yet
            self.restart_if_gone()
        self.supervisor.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait for the supervisor, looking at it, and return its exit code."""
        while self.supervisor is not None and self.supervisor.poll() is None:
            self.look()
        code = None if self.supervisor is None else self.supervisor.poll()
        return -1 if code is None else code

    def look(self) -> None:
        """Take in what was acknowledged, and how much memory there is."""
        if self.witness is None and (self.run_dir / "config.json").is_file():
            config = RunFolder.open(self.run_dir).config
            self.witness = Witness(self.run_dir, config.pipeline["collect"]["prompts_per_rollout"])
        if self.witness is not None:
            self.witness.look()
        self.memory.look(self.run_dir)
        self.wake(time.monotonic())
        if not self.undisturbed:
            self.looks.look()
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
        return "" if self.supervisor is None else "\n".join(self.supervisor.output().splitlines()[-20:])


def soak(
    run_dir: Path,
    *,
    seconds: float,
    seed: int = 0,
    settings: list[str],
    quiet_steps: int = 300,
    goal: bool = True,
    effects: bool = False,
    undisturbed: bool = False,
    pace: float = 1.0,
) -> list[Line]:
    """Run and make trouble; stop, resume, work undisturbed; stop, resume, end; count.

    Args:
        run_dir: the run folder; must not exist.
        seconds: about how long all of it takes.
        seed: of the trouble.
        settings: `--set` pairs for the definition.
        quiet_steps: optimizer steps without trouble before the run is stopped, at least: enough to learn from nothing.
        goal: whether the run must learn its task.
        effects: whether it is `noted_lake`, whose finished conversations must not be repeated.
        undisturbed: make no trouble, and judge the memory.
        pace: times the seconds between troubles, and until a process is taken for dead; above 1 on a busy machine.
    """
    started = time.monotonic()
    with Children(run_dir.with_suffix(".processes")) as children:
        run = Soak(run_dir, settings, seed, children, effects=effects, undisturbed=undisturbed, pace=pace)
        if undisturbed:
            run.start("--steps", "1000000")
            run.work(seconds, at_least=0, goal=False)
            steps, troubled, codes = 0, 0.0, [run.stop()]
        else:
            run.work_in_trouble(SHARE_OF_TROUBLE * seconds)
            codes = [run.stop()]
            steps, troubled = run.steps(), time.monotonic() - started
            if quiet_steps:
                run.start("--steps", "1000000")
                run.work(seconds - troubled, at_least=steps + quiet_steps, goal=goal)
                codes.append(run.stop())
        memory = run.memory.lines() if undisturbed else []
        run.start("--steps", str(run.steps() + LAST_STEPS))
        codes.append(run.wait())
        run.look()
        run.looks.end()
        if run.witness is None:
            raise SystemExit("the run folder was never made")
        config = json.loads((run_dir / "config.json").read_text())
        pipeline = definitions.find(config["definition"]).pipeline([tuple(pair) for pair in config["overrides"]])
        took = time.monotonic() - started
        log = (run_dir / "supervisor.log").read_text()
        supervisors = log.count("supervisor: started")
        stopped = {"0", *(str(128 + number) for number in ASKING)}
        errors = [code for code in re.findall(r"ended with code (\d+)", log) if code not in stopped]
        happened = [Line(f"  {what}", f"{num}", None) for what, num in sorted(run.troubles.items())]
        return [
            Line("seconds, of them with trouble", f"{took:.0f}, {troubled:.0f}", None),
            Line("what happened", f"{sum(run.troubles.values())}", None),
            *happened,
            Line(
                "starts: supervisor, its processes",
                f"{supervisors}, {log.count(': started, process') - supervisors}",
                None,
            ),
            Line("optimizer steps, with trouble and after", f"{steps:,}, {run.steps() - steps:,}", None),
            Line("exit codes: of SIGTERM, and of the end", f"{codes}", codes == [143] * (len(codes) - 1) + [0]),
            Line(
                "processes that ended by an error of their own",
                f"{len(errors)}",
                not errors,
                details="" if not errors else "\n".join(log.splitlines()[-60:]),
            ),
            Line(
                "commands beside it, of them failed",
                f"{run.looks.done}, {len(run.looks.problems)}",
                not run.looks.problems,
                details="\n".join(run.looks.problems),
            ),
            *check_run(run_dir, pipeline, run.witness, goal=goal and not undisturbed),
            *(check_effects(run_dir, pipeline, run.notes) if effects else []),
            *memory,
        ]


def main() -> int:
    """Run the soak and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of the trouble")
    parser.add_argument(
        "--quiet-steps", type=int, default=300, help="steps without trouble at the end, at least; 0: no such phase"
    )
    parser.add_argument("--no-goal", dest="goal", action="store_false", help="the run need not learn its task")
    parser.add_argument("--effects", action="store_true", help="of conversations with effects; without a goal")
    parser.add_argument("--undisturbed", action="store_true", help="make no trouble, and judge the memory")
    parser.add_argument("--pace", type=float, default=1.0, help="above 1: less often, for a busy machine")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument(
        "--out", type=Path, help="keep the run here (default: a temporary folder, removed if all is met)"
    )
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-")) if args.out is None else args.out.resolve().parent
    run_dir = folder / "run" if args.out is None else args.out.resolve()
    lines = soak(
        run_dir,
        seconds=60 * args.minutes,
        seed=args.seed,
        settings=args.settings,
        quiet_steps=args.quiet_steps,
        goal=args.goal and not args.effects,
        effects=args.effects,
        undisturbed=args.undisturbed,
        pace=args.pace,
    )
    for line in lines:
        print(line)  # noqa: T201
    missed = [line for line in lines if line.met is False]
    for line in missed:  # again, at the end: the middle of a long report may not be shown
        print(line, line.details, sep="\n")  # noqa: T201
    print(f"{len(missed)} missed; the run is in {run_dir}" if missed else "all met")  # noqa: T201
    if args.out is None and not missed:
        shutil.rmtree(folder)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
