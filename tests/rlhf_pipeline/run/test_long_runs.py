"""What it costs to start, to go on and to look does not grow with the run: 1,000 steps against 100,000."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rlhf_pipeline.cli import main
from rlhf_pipeline.run.checkpoint import checkpoint_path, list_checkpoints
from rlhf_pipeline.run.files import new_folder
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.jsonl import line_of
from rlhf_pipeline.run.rows import StepRows
from trajectory_store import TrajectoryStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[3]
SHORT, LONG = 1_000, 100_000
GROWTH = 1.5
GROUP = 2
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
from pathlib import Path
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.children import SupervisorConfig
from rlhf_pipeline.run.processes.heartbeat import Heartbeat
from rlhf_pipeline.run.processes.supervise import Supervisor
run = RunFolder(sys.argv[1])
run.check_parts()
run.processes.mkdir(exist_ok=True)
made = Supervisor(run.path, {"learner": ["true"]}, SupervisorConfig(), total_steps=1,
                  heartbeat=Heartbeat(run.processes, "supervisor"))
assert made.metrics.rows.last_step == int(sys.argv[2]), made.metrics.rows.last_step
assert made.last_reward is not None
"""


@dataclass(frozen=True)
class Cost:
    """Processor time in seconds, and the most memory in bytes, of one process."""

    seconds: float
    memory: int


def cost(*command: str, codes: tuple[int, ...] = (0,)) -> Cost:
    """Run a command twice; its least costs."""
    found: list[Cost] = []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'storage'}"}
    for _ in range(2):
        # Started by a small process: until it executes something, a child has the memory of its parent.
        shown = subprocess.run(
            [sys.executable, "-c", MEASURE, *command], env=environment, capture_output=True, text=True, check=False
        )
        assert shown.returncode in codes, shown.stderr
        seconds, kilobytes = shown.stdout.split()
        found.append(Cost(float(seconds), int(kilobytes) * 1024))
    return Cost(min(one.seconds for one in found), min(one.memory for one in found))


def rlhf(*words: object, codes: tuple[int, ...] = (0,)) -> Cost:
    return cost(sys.executable, "-m", "rlhf_pipeline", *map(str, words), codes=codes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two runs that differ in their length only: two real steps each, the first one repeated many times."""
    first = tmp_path_factory.mktemp("long") / "first"
    assert main(["run", "copy_digits", "--out", str(first), "--steps", "2", *SIZES]) == 0
    return {steps: prolonged(first, first.with_name(str(steps)), steps) for steps in (SHORT, LONG)}


def prolonged(source: Path, folder: Path, steps: int) -> Path:
    """Return a copy of a run as if it had taken so many steps."""
    shutil.copytree(source, folder)
    run = RunFolder(folder)
    metrics, ledger = run.metrics[0], run.ledger[0]
    with TrajectoryStore.open(run.store_path, "a") as store:
        rows = store.read(store.ids()[:GROUP])
        have = len(store)
        new = np.arange(have, steps * GROUP)
        for part in np.array_split(new, max(len(new) // 20_000, 1)):
            batch = {name: [values[i % GROUP] for i in part] for name, values in rows.items()}
            batch |= {"trajectory_id": part, "group_id": part // GROUP, "policy_version": part // GROUP}
            store.append(batch)
        ids = store.ids().reshape(steps, GROUP)
        watermark = store.watermark
    with run.metrics_file.open("wb") as lines, run.ledger_file.open("wb") as records:
        for step in range(1, steps + 1):
            lines.write(line_of({**metrics, "step": step, "rollout": step - 1, "watermark": GROUP * step}))
            named = {"row_ids": ids[step - 1].tolist(), "trajectory_ids": [GROUP * step - 2, GROUP * step - 1]}
            records.write(line_of({**ledger, "step": step, **named, "watermark": min(GROUP * step, watermark)}))
    for file in (run.metrics_file, run.ledger_file):
        file.with_suffix(".index").unlink()
        StepRows(file).mend()
    (newest,) = list_checkpoints(run.checkpoints)[-1:]
    state = json.loads((newest / "state.json").read_text())
    state["step"] = state["progress"]["step"] = steps
    with new_folder(checkpoint_path(run.checkpoints, steps)) as made:
        for file in newest.iterdir():
            if file.name not in ("files.json", "state.json", "uses.safetensors"):
                shutil.copy(file, made / file.name)
        (made / "state.json").write_text(json.dumps(state))
    for other in list_checkpoints(run.checkpoints)[:-1]:
        shutil.rmtree(other)
    return folder


def assert_flat(short: Cost, long: Cost) -> None:
    assert long.seconds <= GROWTH * short.seconds, (short, long)
    assert long.memory <= GROWTH * short.memory, (short, long)


def test_looking_at_the_newest_costs_the_same(runs):
    """`tail`, `show` of a step and of the newest trajectory."""
    for words in (["tail", "-n", "3"], ["show", "--last", "2"]):
        assert_flat(*(rlhf(words[0], runs[steps], *words[1:]) for steps in (SHORT, LONG)))
    assert_flat(*(rlhf("show", runs[steps], "--step", steps - 1) for steps in (SHORT, LONG)))


def test_a_supervisor_starts_at_the_same_cost(runs):
    """It checks the parts of the run and follows its metrics, without reading them."""
    found = [cost(sys.executable, "-c", SUPERVISOR, str(runs[steps]), str(steps)) for steps in (SHORT, LONG)]
    assert_flat(*found)
    assert found[1].memory < 120e6


def test_going_on_costs_the_same(runs, tmp_path):
    """A resume in one process: the checks, the checkpoint, a rollout and a step."""
    found: list[Cost] = []
    for steps in (SHORT, LONG):
        command = [sys.executable, "-m", "rlhf_pipeline", "run", "--resume", "--out", str(runs[steps])]
        # The second time there is nothing left to do: the least is the cost of starting.
        found.append(cost(*command, "--steps", str(steps + 1)))
        assert RunFolder(runs[steps]).metrics.last_step == steps + 1
    assert_flat(*found)


def test_reading_everything_streams(runs):
    """`verify` and `inspect` look at every row, in little memory; the rewards of this made-up run do not agree."""
    assert rlhf("verify", runs[LONG]).memory < 300e6
    assert rlhf("inspect", runs[LONG], codes=(1,)).memory < 300e6
