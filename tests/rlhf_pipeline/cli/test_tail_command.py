"""`rlhf-pipeline tail`, also beside a process that writes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_pipeline.run.rows import StepRows

from .conftest import Cli

ROOT = Path(__file__).parents[3]
ENV = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'storage'}", "COLUMNS": "120"}
WRITER = """
import sys
from trajectory_store import TrajectoryStore
store = TrajectoryStore.open(sys.argv[1], "a")
for line in sys.stdin:
    if line == "compact\\n":
        print(store.compact().rows, flush=True)
        continue
    rows = range(int(line), int(line) + 3)
    store.append({
        "input_ids": [[1, row] for row in rows], "assistant_mask": [[False, True]] * 3, "log_probs": [[0.0, -1.0]] * 3,
        "task_reward": [row % 2 for row in rows], "group_id": [int(line)] * 3, "trajectory_id": list(rows),
        "policy_version": [7] * 3, "num_prompt_tokens": [1] * 3, "finish_reason": ["stop"] * 3, "prompt": ["p"] * 3,
        "completion": [f"made {row}" for row in rows], "meta": [""] * 3,
    })
    print("done", flush=True)
"""


def test_tail(cli: Cli, run_dir: Path):
    """The newest trajectories, oldest first, and the newest step of the run."""
    shown = cli("tail", run_dir)
    lines = shown.out.splitlines()
    assert shown.code == 0
    assert lines[0].split() == ["id", "version", "group", "reward", "tokens", "finish", "completion"]
    assert [line.split()[0] for line in lines[1:-1]] == [str(row) for row in range(38, 48)]
    assert lines[1].split()[1:6] == ["8", "9", "0.25", "4", "length"]
    assert lines[-1].startswith("step 12: loss 0.0083, ")
    assert len(cli("tail", run_dir, "-n", 3).out.splitlines()) == 5
    rows = json.loads(cli("tail", run_dir, "-n", 2, "--filter", "group<3", "--json").out)
    assert [(row["id"], row["group"]) for row in rows] == [("10", 2), ("11", 2)]
    assert cli("tail", run_dir, "-f", "--json").code == 2


def test_tail_of_a_store(cli: Cli, run_dir: Path):
    """A store alone has no steps; a filter looks as far back as it must."""
    (run_dir / "store").rename("alone")
    shown = cli("tail", "alone", "-n", 2, "--filter", "version<=2", "--filter", "group<3")
    assert [line.split()[:3] for line in shown.out.splitlines()[1:]] == [["10", "2", "2"], ["11", "2", "2"]]
    assert cli("tail", "alone", "--filter", "version>99").out.splitlines()[1:] == []


class Follower:
    """A `tail --follow` in a process of its own, read line by line."""

    def __init__(self, *args: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlhf_pipeline.cli", "tail", "-f", *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENV,
            # A check that runs in the background of a shell hands down that Ctrl-C is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))

    def next(self, num: int) -> list[str]:
        """Return the next `num` lines."""
        return [self._lines.get(timeout=20) for _ in range(num)]

    def stop(self, how: int = signal.SIGINT) -> tuple[int, str]:
        """Send a signal; return the exit code and what stands on stderr."""
        self.process.send_signal(how)
        assert self.process.stderr is not None
        code = self.process.wait(20)
        return code, self.process.stderr.read()


@pytest.fixture
def followers() -> Iterator[list[Follower]]:
    """Processes that are killed at the end whatever happens."""
    made: list[Follower] = []
    yield made
    for one in made:
        one.process.kill()
        one.process.wait()
        for stream in (one.process.stdout, one.process.stderr):
            if stream is not None:
                stream.close()


def ends(lines: list[str]) -> list[str]:
    """Return the last word of each line."""
    return [line.split()[-1] for line in lines]


def test_follow_a_live_writer(run_dir: Path, followers: list[Follower]):
    """What another process commits is shown as it comes, each once, through a compaction; Ctrl-C ends it quietly."""
    plain, picky = Follower(run_dir / "store", "-n", 1), Follower(run_dir, "-n", 0, "--filter", "reward==1")
    followers += [plain, picky]
    assert plain.next(3)[1].split()[0] == "47"
    assert picky.next(2)[1].startswith("step 12:")
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run_dir / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENV,
    ) as writer:

        def notify(line: str) -> str:
            assert writer.stdin is not None
            assert writer.stdout is not None
            writer.stdin.write(f"{line}\n")
            writer.stdin.flush()
            return writer.stdout.readline().strip()

        assert notify("100") == "done"
        assert ends(plain.next(3)) == ["100", "101", "102"]
        StepRows(run_dir / "metrics.jsonl").append({"step": 13, "task_reward": 0.5, "watermark": 51})
        assert plain.next(1) == ["step 13: reward 0.500"]
        assert notify("compact") == "51"
        assert notify("103") == "done"
        assert ends(plain.next(3)) == ["103", "104", "105"]
    assert sorted(ends(picky.next(4))) == ["0.500", "101", "103", "105"]
    assert plain.stop() == (130, "")
    assert picky.stop() == (130, "")


def test_follow_the_steps(run_dir: Path, followers: list[Follower]):
    """Without a terminal there is one line per step, whatever is stored meanwhile."""
    steps = Follower(run_dir, "-n", 2)
    followers.append(steps)
    assert [line.split(":")[0] for line in steps.next(2)] == ["step 11", "step 12"]
    StepRows(run_dir / "metrics.jsonl").append({"step": 13, "task_reward": 0.5, "watermark": 51})
    assert steps.next(1) == ["step 13: reward 0.500"]
    assert steps.stop() == (130, "")


def test_follow_waits_for_the_first_trajectory(run_dir: Path, followers: list[Follower]):
    """A run that has only begun is waited for; a store that is removed ends it with a reason."""
    (run_dir / "store").rename("later")
    early = Follower(run_dir, "-n", 1, "--filter", "reward>=0")
    followers.append(early)
    assert early.process.stderr is not None
    assert "has not stored any trajectories yet; waiting for the first one" in early.process.stderr.readline()
    Path("later").rename(run_dir / "store")
    assert early.next(3)[1].split()[0] == "47"
    (run_dir / "store").rename("gone")
    assert early.process.wait(20) == 2
    assert "was removed, or replaced by another store" in early.process.stderr.read()


def test_follow_into_a_pipe(run_dir: Path):
    """When the reader of a pipe leaves, following ends although nothing more comes."""
    line = f"{sys.executable} -m rlhf_pipeline.cli tail -f {run_dir} | head -2"
    shown = subprocess.run(line, shell=True, capture_output=True, text=True, env=ENV, check=False, timeout=20)
    assert len(shown.stdout.splitlines()) == 2
    assert shown.stderr == ""
