"""What it costs to start, to go on and to look does not grow with the run: made-up runs of 10^3, 10^5 and 10^6 steps.

    python -m benchmarks.bench_long_runs                     # 1,000, 100,000 and 1,000,000 steps; 10 minutes
    python -m benchmarks.bench_long_runs --steps 1000 30000

Prints the processor time and the most memory of each command on each run, and how they grow from the shortest run to
the longest. Exit code 1 if one that looks at the newest, starts or goes on grows by more than half, or one that reads
everything needs 300 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_pipeline.run.checkpoint import checkpoint_path, list_checkpoints
from rlhf_pipeline.run.files import new_folder
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.rows import line_of
from trajectory_store import TrajectoryStore

ROOT = Path(__file__).resolve().parents[1]
GROWTH = 1.5
MOST_MEMORY = 300e6
GROUP = 2
BATCH = 20_000
SIZES = [
    f"--set=collect.group_size={GROUP}",
    "--set=collect.prompts_per_rollout=1",
    "--set=learn.checkpoint_every=1000000",
    "--set=learn.stop_at_reward=none",
]
MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
sys.exit(code)
"""
SUPERVISOR = """
import sys
from rlhf_pipeline.run.completeness import check_parts
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.children import SupervisorConfig
from rlhf_pipeline.run.processes.heartbeat import Heartbeat
from rlhf_pipeline.run.processes.supervise import Supervisor
run = RunFolder(sys.argv[1])
check_parts(run)
run.processes.mkdir(exist_ok=True)
made = Supervisor(run.path, {"learner": ["true"]}, SupervisorConfig(), total_steps=1,
                  heartbeat=Heartbeat(run.processes, "supervisor"))
assert made.metrics.rows.last_step == int(sys.argv[2]), made.metrics.rows.last_step
assert made.run.first_and_last_reward()[1] is not None
"""
PROCESS = """
import os, sys
from pathlib import Path
from rlhf_pipeline import definitions
from rlhf_pipeline.run.events import RolloutDone, RunStarted
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.collect import collect
from rlhf_pipeline.run.processes.learn import learn
from rlhf_pipeline.run.run import Run
run = RunFolder.open(sys.argv[1])
pipeline = definitions.find(run.config.definition).pipeline(run.config.overrides)
act, until = {"learn": (learn, RunStarted), "collect": (collect, RolloutDone)}[sys.argv[2]]
act(Run(pipeline=pipeline, run_dir=run.path, definition=run.config.definition, overrides=run.config.overrides),
    on_event=lambda event: os.kill(os.getpid(), 15) if isinstance(event, until) else None)
"""


@dataclass(frozen=True)
class Cost:
    """Processor time in seconds, and the most memory in bytes, of one process."""

    seconds: float
    memory: int

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s {self.memory / 1e6:.0f} MB"


def cost(*command: object, codes: tuple[int, ...] = (0,), tries: int = 1) -> Cost:
    """Run a command `tries` times; its least costs."""
    found: list[Cost] = []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'storage'}"}
    for _ in range(tries):
        # Started by a small process: until it executes something, a child has the memory of its parent.
        shown = subprocess.run(
            [sys.executable, "-c", MEASURE, *map(str, command)],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert shown.returncode in codes, shown.stderr
        seconds, kilobytes = shown.stdout.split()
        found.append(Cost(float(seconds), int(kilobytes) * 1024))
    return Cost(min(one.seconds for one in found), min(one.memory for one in found))


def rlhf(*words: object, **options: Any) -> Cost:
    """Run `rlhf-pipeline WORDS`."""
    return cost(sys.executable, "-m", "rlhf_pipeline", *words, **options)


def prolonged(source: Path, folder: Path, steps: int) -> Path:
    """Return a copy of a run of two steps as if it had taken so many; the first one is repeated."""
    shutil.copytree(source, folder)
    run = RunFolder(folder)
    metrics, ledger = run.metrics[0], run.ledger[0]
    with TrajectoryStore.open(run.store_path, "a") as store:
        rows = store.read(store.ids()[:GROUP])
        have = len(store)
        for first in range(have, steps * GROUP, BATCH):
            new = np.arange(first, min(first + BATCH, steps * GROUP))
            batch = {name: [*values] * (len(new) // GROUP) for name, values in rows.items()}
            store.append(batch | {"trajectory_id": new, "group_id": new // GROUP, "policy_version": new // GROUP})
        ids = store.ids().reshape(steps, GROUP)
    row = {"step": "@step", "rollout": "@before", "watermark": "@watermark"}
    named = {"row_ids": "@ids", "trajectory_ids": "@numbers"}
    one = _template({**metrics, **row})
    other = _template({**ledger, **{name: row[name] for name in row if name in ledger}, **named})
    with run.metrics_file.open("wb") as lines, run.ledger_file.open("wb") as records:
        for step in range(1, steps + 1):
            values = {"step": step, "before": step - 1, "watermark": GROUP * step}
            values |= {"ids": ids[step - 1].tolist(), "numbers": [GROUP * step - 2, GROUP * step - 1]}
            lines.write(_filled(one, values))
            records.write(_filled(other, values))
    _prolong_checkpoint(run, steps)
    if run.is_of_several:
        _prolong_rollouts(run, steps)
    return folder


def _template(row: dict[str, Any]) -> str:
    return line_of(row).decode()


def _filled(template: str, values: dict[str, Any]) -> bytes:
    for name, value in values.items():
        template = template.replace(f'"@{name}"', str(value))
    return template.encode()


def _prolong_checkpoint(run: RunFolder, steps: int) -> None:
    (newest,) = list_checkpoints(run.checkpoints)[-1:]
    state = json.loads((newest / "state.json").read_text())
    state["step"] = state["progress"]["step"] = steps
    state["lines"] = run.lines_of(steps)
    if "done" in state["source"]:
        state["source"]["done"] = [steps, []]
    with new_folder(checkpoint_path(run.checkpoints, steps)) as made:
        for file in newest.iterdir():
            if file.name not in ("files.json", "state.json", "uses.safetensors"):
                shutil.copy(file, made / file.name)
        (made / "state.json").write_text(json.dumps(state))
    for other in list_checkpoints(run.checkpoints)[:-1]:
        shutil.rmtree(other)


def _prolong_rollouts(run: RunFolder, steps: int) -> None:
    """Write a row for each rollout; the published weights are forgotten, and published again by the learner."""
    with TrajectoryStore.open(run.rollouts, "a") as store:
        row = store.read(store.ids()[:1])
        for first in range(len(store), steps, BATCH):
            new = np.arange(first, min(first + BATCH, steps))
            store.append({name: [*values] * len(new) for name, values in row.items()} | {"rollout": new})
    shutil.rmtree(run.weights)


def flat_costs(run: Path, steps: int) -> Iterator[tuple[str, Cost]]:
    """What shall not grow with the run."""
    yield "tail -n 3", rlhf("tail", run, "-n", "3", tries=2)
    yield "show --last 2", rlhf("show", run, "--last", "2", tries=2)
    yield "show --step", rlhf("show", run, "--step", steps - 1, tries=2)
    yield "supervisor, start", cost(sys.executable, "-c", SUPERVISOR, run, steps, tries=2)


def resumed(run: Path, steps: int) -> Cost:
    """Go on for a step in one process."""
    return rlhf("run", "--resume", "--out", run, "--steps", steps + 1)


def linear_costs(run: Path) -> Iterator[tuple[str, Cost]]:
    """What reads everything; the rewards of these made-up runs do not agree."""
    yield "inspect", rlhf("inspect", run, "--grade", codes=(0, 1))
    yield "verify", rlhf("verify", run)


def made(source: str, folder: Path, *more: str) -> Path:
    """Make a run of two steps, as a person would."""
    command = [sys.executable, "-m", "rlhf_pipeline", "run", source, "--out", str(folder), "--steps", "2", *SIZES]
    subprocess.run([*command, *more], check=True, stdout=subprocess.DEVNULL)
    return folder


def started(several: Path, folder: Path, steps: int) -> Iterator[tuple[str, Cost]]:
    """Yield what a learner and then a collector take until they work on a run of so many steps, which is removed."""
    run = prolonged(several, folder, steps)
    for what in ("learn", "collect"):
        if what == "collect":  # with the weights that the learner has published
            shutil.rmtree(run / "claims", ignore_errors=True)
        yield f"{what}, start", cost(sys.executable, "-c", PROCESS, run, what)
    shutil.rmtree(run)


def main(arguments: Sequence[str]) -> int:
    """Make the runs, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    args = parser.parse_args(arguments)
    table: dict[str, list[Cost]] = {}
    with tempfile.TemporaryDirectory(prefix="long-runs-") as name:
        folder = Path(name)
        one = made("copy_digits", folder / "one")
        several = made("long_running", folder / "several", "--collectors", "1")
        for steps in args.steps:
            run = prolonged(one, folder / f"one-{steps}", steps)
            for what, found in [*linear_costs(run), *flat_costs(run, steps), ("resume", resumed(run, steps))]:
                table.setdefault(what, []).append(found)
            shutil.rmtree(run)
            for what, found in started(several, folder / f"several-{steps}", steps):
                table.setdefault(what, []).append(found)
    print(f"{'':<20}" + "".join(f"{steps:>20,}" for steps in args.steps) + f"{'time x':>10}{'memory x':>10}")
    missed = 0
    for what, found in table.items():
        times, memory = found[-1].seconds / found[0].seconds, found[-1].memory / found[0].memory
        linear = what in ("inspect", "verify")
        ok = found[-1].memory < MOST_MEMORY if linear else max(times, memory) <= GROWTH
        missed += not ok
        line = f"{what:<20}" + "".join(f"{one!s:>20}" for one in found) + f"{times:>10.2f}{memory:>10.2f}"
        print(line + ("" if ok else "  MISSED"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
