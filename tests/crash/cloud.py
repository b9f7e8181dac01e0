"""Runs in an object store: processes that share one URL and nothing else, killed and stopped, end as if left alone.

    python -m tests.crash.cloud --steps 60 --seed 3            # weights as of an undisturbed run (synchronous)
    python -m tests.crash.cloud --steps 60 --staleness 2       # the ledger, taken again, gives the same bits
    python -m tests.crash.cloud --steps 12 --cut 20            # nobody is killed, the network is gone for 20 s

Two collectors and a learner, each with a cache of its own and a clock 5 s away from the others', reach a server on
loopback through a network that fails in every way a network does (`_s3`). While they work, one of them is killed now
and then and started again; or it is stopped for longer than its lease, so that another one takes its place, and goes on
afterwards, when nothing that it does may count. `test_cloud.py` is the short form.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_pipeline import Pipeline
from rlhf_pipeline.errors import PipelineError, RunExistsError
from rlhf_pipeline.report.check import check_run
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.checkpoint import checkpoint_path
from rlhf_pipeline.run.events import Event, RolloutDone, StepDone
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.rerun import plan_rerun, rerun
from tests.crash._s3 import serve
from tests.crash.kills import tiny
from tests.processes import Child, Children
from tests.rlhf_pipeline.small import collect, learn
from trajectory_store import StoreError, TrajectoryStore

LEASE_S = 4.0
CLOCKS_S = {"collector-0": -5.0, "collector-1": 5.0, "learner": 0.0}
LATE_S = 240.0
REFUSED = 9
"""The exit code of a process that was told that another one has taken its place."""


@dataclass
class World:
    """The processes of one run."""

    place: Address
    pipeline: Pipeline
    folder: Path
    children: Children
    troubles: Counter[str] = field(default_factory=Counter)
    lives: dict[str, Child] = field(default_factory=dict)
    stopped: list[tuple[float, Child]] = field(default_factory=list)

    def start(self, role: str) -> None:
        """Begin a life: a process with a clock and a cache of its own."""
        self.lives[role] = self.children.fork(lambda: _live(self, role), name=role)

    @property
    def done(self) -> int:
        """How many rollouts were stored and steps taken, those that were taken again included."""
        return sum(len(file.read_text().split()) for file in self.folder.glob("*.[0-9]*"))

    @property
    def learned(self) -> bool:
        """Whether the learner has come to the end."""
        return self.lives["learner"].poll() == 0

    def kill(self, role: str) -> None:
        """Kill a process and start it again."""
        self.lives[role].kill()
        self.troubles[f"{role} killed"] += 1
        self.start(role)

    def replace(self, role: str) -> None:
        """Stop a process for longer than its lease, and start another one in its place."""
        life = self.lives[role]
        if life.poll() is None:
            life.send_signal(signal.SIGSTOP)
            self.stopped.append((time.monotonic() + 2.5 * LEASE_S, life))
            self.troubles[f"{role} stopped and replaced"] += 1
            self.start(role)

    def look(self) -> None:
        """Let those go on that were stopped, and start again who ended without being asked to."""
        for until, life in [*self.stopped]:
            if time.monotonic() > until:
                life.send_signal(signal.SIGCONT)
                self.stopped.remove((until, life))
        for role, life in self.lives.items():
            if life.poll() not in (None, 0):
                self.troubles[f"{role} ended with code {life.poll()}"] += 1
                self.start(role)


def _live(world: World, role: str) -> None:
    """One life; ends the process."""
    os.environ["RLHF_PIPELINE_LEASE_S"] = str(LEASE_S)
    os.environ["RLHF_PIPELINE_CACHE"] = str(world.folder / role)
    away, clock, clock_ns = CLOCKS_S[role], time.time, time.time_ns
    time.time = lambda: clock() + away
    time.time_ns = lambda: clock_ns() + int(away * 1e9)
    acknowledged = (world.folder / f"{role}.{os.getpid()}").open("a", buffering=1)
    log = (world.folder / f"{role}.log").open("a", buffering=1)

    def note(event: Event) -> None:
        if isinstance(event, (RolloutDone, StepDone)):
            acknowledged.write(f"{event.rollout if isinstance(event, RolloutDone) else event.step}\n")
        log.write(f"{event}\n")

    work: Callable[..., Any] = learn if role == "learner" else collect
    more = {} if role == "learner" else {"name": role}
    code = 1
    try:
        work(world.pipeline, run_dir=world.place, on_event=note, **more)
        code = 0
    except RunExistsError as error:
        log.write(f"{error}\n")
        code = REFUSED
    except (PipelineError, StoreError) as error:
        log.write(f"{type(error).__name__}: {error}\n")
    os._exit(code)


def play(world: World, *, seed: int, trouble: bool = False, cut: Callable[[], None] | None = None) -> None:
    """Run to the end, with trouble on the way.

    Args:
        world: what runs.
        seed: of the kills.
        trouble: kill and stop processes.
        cut: called once, in the middle of the work.

    Raises:
        AssertionError: the run does not come to its end.
    """
    rng, late = random.Random(seed), time.monotonic() + LATE_S
    for role in CLOCKS_S:
        world.start(role)
    again = 4
    while not world.learned:
        assert time.monotonic() < late, f"the run has not ended after {LATE_S:g} s: see {world.folder}"
        time.sleep(0.05)
        world.look()
        if cut is not None and world.done >= again:
            cut()
            cut = None
        if trouble and not world.stopped and world.done >= again:
            again = world.done + rng.randint(1, 5)
            time.sleep(rng.random())
            rng.choice([world.kill, world.kill, world.replace])(rng.choice([*CLOCKS_S]))
    world.stopped = [(0.0, life) for _, life in world.stopped]
    world.look()
    for life in world.lives.values():
        life.wait(30)


def problems(world: World, straight: Path | None) -> Iterator[str]:
    """Say what is not as it would be had nobody been killed."""
    run, pipeline = RunFolder.open(world.place), world.pipeline
    yield from (f"verify: {finding.part}: {finding.text}" for finding in check_run(run) if not finding.ok)
    for name, rows in (("metrics", run.metrics), ("ledger", run.ledger)):
        if [row["step"] for row in rows] != list(range(1, pipeline.learn.steps + 1)):
            yield f"{name} have the steps {[row['step'] for row in rows]}"
    with TrajectoryStore.open(run.store_path) as store:
        names, counts = np.unique(store.read_scalars("trajectory_id"), return_counts=True)
        groups, sizes = np.unique(store.read_scalars("group_id"), return_counts=True)
        per_rollout = pipeline.collect.prompts_per_rollout
        stored = {int(group) // per_rollout for group in groups}
    if (counts != 1).any():
        yield f"trajectories that are stored twice: {names[counts != 1].tolist()}"
    if (sizes != pipeline.collect.group_size).any():
        yield f"prompts that do not have {pipeline.collect.group_size} completions: {groups[sizes != 4].tolist()}"
    files = world.folder.glob("collector-?.[0-9]*")
    lost = {int(line) for file in files for line in file.read_text().split()} - stored
    if lost:
        yield f"acknowledged rollouts that are not there: {sorted(lost)}"
    if straight is not None:
        mine, theirs = (_weights(one, pipeline.learn.steps) for one in (run, RunFolder(straight)))
        if mine != theirs:
            yield "the weights differ from those of the undisturbed run"
        return
    plan = plan_rerun(world.place, from_step=1)
    for step in rerun(pipeline, plan, seed=0, device="cpu"):
        if not step.ok:
            yield f"step {step.step}, taken again as the ledger says: {step}"


def _weights(run: RunFolder, step: int) -> bytes:
    return (run.bring(checkpoint_path(run.checkpoints, step)) / "model.safetensors").read_bytes()


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run, judge, and say what was found; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cut", type=float, default=0.0, help="cut the network for so many seconds; kill nobody")
    parser.add_argument("--logs", type=Path, help="an empty folder, for what the processes say")
    args = parser.parse_args(arguments)
    pipeline = tiny(
        learn__steps=str(args.steps), buffer__max_staleness=str(args.staleness), learn__keep_checkpoints="1000"
    )
    with tempfile.TemporaryDirectory() as name:
        folder, straight, started = args.logs or Path(name), None, time.monotonic()
        if args.staleness == 0:
            straight = folder / "straight"
            (folder / "logs").mkdir()
            with Children(folder / "logs" / "processes") as children:
                play(World(straight, pipeline, folder / "logs", children), seed=0)
        with serve(folder, seed=args.seed) as rig, Children(folder / "processes") as children:
            world = World(rig.url, pipeline, folder, children)
            play(world, seed=args.seed, trouble=not args.cut, cut=(lambda: rig.cut(args.cut)) if args.cut else None)
            rig.calm()
            violations = list(problems(world, straight))
            if args.cut and world.troubles:
                violations.append("a process did not outlast the cut")
        say(f"{args.steps} steps in {time.monotonic() - started:.0f} s; {dict(world.troubles)}")
        for problem in violations:
            say(f"WRONG: {problem}")
    return 1 if violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
