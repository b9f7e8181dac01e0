"""Runs that are killed before a file-system call, and again, end like the run that was left alone.

    python -m tests.crash.kills resume --kills 10    # every variant, killed ten times, at calls drawn by chance
    python -m tests.crash.kills sweep                # each way to run, killed at every call, and again in its resume
    python -m tests.crash.kills sweep several --points 60 --sites   # at 60 calls, and at one of every kind and path
    python -m tests.crash.kills sweep one --part 2/8                # the second of eight parts of the calls

Every life of a run is a process forked from this one, which has imported everything; a preloaded library counts the
calls that change files under the run folder and sends SIGKILL before one of them. What is on the disk changes at these
calls only, so no moment is left out, and nothing here waits for the clock. In every second life, the thread that writes
checkpoints is delayed at each of its calls: its checkpoint is unfinished while the run takes further steps.
`test_kills.py` is the short form.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from rlhf_pipeline import (
    Pipeline,
    PretrainedPolicy,
    Replay,
    Sample,
    scratch_policy,
)
from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from rlhf_pipeline.cli import main as rlhf_pipeline
from rlhf_pipeline.data.rewards import environment_reward
from rlhf_pipeline.report.check import check_run
from rlhf_pipeline.run import selection
from rlhf_pipeline.run.checkpoint import checkpoint_path
from rlhf_pipeline.run.events import Event, RolloutDone, RunStarted
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.supervise import SupervisorConfig, supervise
from rlhf_pipeline.run.rerun import plan_rerun, rerun
from rlhf_pipeline.run.run import Run
from rlhf_pipeline.run.signals import STOPPING
from rlhf_pipeline.run.start import run
from tests.processes import Child, Children
from tests.rlhf_pipeline import small
from tests.rlhf_pipeline.small import PlainCalculator, collect, learn
from trajectory_store import TrajectoryStore, diff

Act = Callable[[Path], int]
"""Starts a run in a folder, or goes on with what is there; returns the steps that it has taken."""

LIFE_S = 300.0
DELAY_US = 3000
"""Of a call in a thread: a checkpoint of some 40 calls then takes as long as a few steps."""
HOOK = Path(__file__).with_name("_kill_at_call.c")
TIMED = frozenset({"time", "rollout_s", "update_s", "tokens_per_s", "update_tokens_per_s", "peak_memory_mb", "mfu"})
"""Of a step's metrics, what the machine decides."""
BY_PLACE = frozenset({"row_ids", "watermark"})
"""What tells where trajectories lie, and how many were stored: a writer that starts again begins a segment, and what a
ring has dropped since the checkpoint is sampled again."""


# ---------------------------------------------------------------------------------------------- lives and kills


class Life:
    """A process that does something to a run: killed before a file-system call, or left alone to its end."""

    def __init__(self, child: Child, end: Path) -> None:
        self.child = child
        self._end = end

    def wait(self) -> tuple[int, int] | None:
        """Wait for its end: its calls and the run's steps, or None if it was killed.

        Raises:
            AssertionError: it failed by itself.
        """
        code = self.child.wait(LIFE_S)
        assert code in (0, -signal.SIGKILL), f"exit code {code}: {self.child.output()[-6000:]}"
        return tuple(json.loads(self._end.read_text())) if code == 0 else None


class Lives:
    """Lives of runs, each in a process forked from this one.

    Args:
        children: starts them, and leaves none behind.
        seed: of what differs from life to life and must not matter.
        sites: whether one call of every kind and path is among those to kill at.
        part: number and count: which part of the calls to kill at, so that a long sweep runs in parts.
    """

    def __init__(
        self, children: Children, seed: int = 0, *, sites: bool = False, part: tuple[int, int] = (1, 1)
    ) -> None:
        self.children = children
        self.rng = random.Random(seed)
        self.sites = sites
        self.part = part
        self.num_started = self.num_kills = self.num_judged = 0

    def start(self, act: Act, run_dir: Path, at: int = 0, calls: Path | None = None) -> Life:
        """Begin a life that is killed before its call number `at`; 0 never. Its calls are written to `calls`."""
        self.num_started += 1
        end = self.children.folder / f"end-{self.num_started}.json"
        chance, delay_us = self.rng.getrandbits(31), self.rng.choice((0, DELAY_US))
        return Life(self.children.fork(lambda: _live(act, run_dir, at, chance, delay_us, end, calls)), end)

    def end(self, life: Life) -> tuple[int, int] | None:
        """Wait for its end; see `Life.wait`."""
        steps = life.wait()
        self.num_kills += steps is None
        return steps

    def live(self, act: Act, run_dir: Path, at: int = 0, calls: Path | None = None) -> tuple[int, int] | None:
        """Begin a life and wait for its end."""
        return self.end(self.start(act, run_dir, at, calls))


def _live(act: Act, run_dir: Path, at: int, chance: int, delay_us: int, end: Path, calls: Path | None) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(chance)  # what a process happens to begin with has no part in a run
    hook: Any = ctypes.CDLL(os.environ["LD_PRELOAD"])
    if calls is not None:
        hook.tell_calls(os.open(calls, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    hook.delay_threads(delay_us)
    hook.kill_at_call(str(run_dir).encode(), at)
    steps = act(run_dir)
    end.write_text(json.dumps((hook.calls_counted(), steps)))


# ------------------------------------------------------------------------------------------------- what is run


def tiny(**changes: str) -> Pipeline:
    """A pipeline of a fraction of a second; fields by path, with two underscores for the dot."""
    base = {
        "collect__prompts_per_rollout": "2",
        "buffer__max_staleness": "0",
        "learn__epochs": "1",
        "learn__steps": "18",
        "learn__checkpoint_every": "4",
    }
    return small.tiny(**base | changes)


def typed(pipeline: Pipeline) -> Act:
    """Start a run, or resume it, as a person would who types the command again."""

    def act(run_dir: Path) -> int:
        return run(pipeline, run_dir=run_dir, resume=RunFolder(run_dir).record.exists).steps

    return act


def settings(**changes: str) -> Callable[[Path], Act]:
    """Return what makes a run with other settings than `tiny`."""
    return lambda _folder: typed(tiny(**changes))


def moving_reference(folder: Path) -> Act:
    """A model in bfloat16 with float32 masters, and a reference that follows it."""
    policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=0)
    policy.save_pretrained(folder / "model")
    pipeline = tiny(write__kl_coef="0.2", learn__lr="1e-3", learn__reference_every="2", learn__reference_rate="0.5")
    return typed(replace(pipeline, policy=PretrainedPolicy(path=str(folder / "model"), dtype="bfloat16")))


def offline(folder: Path) -> Act:
    """A run over two stores, which gathers in small commits; log-probs and advantages are lacking."""
    for name, seed in (("a", 0), ("b", 1)):
        rng, num = np.random.default_rng(seed), 120
        prompts, completions = np.arange(num) // 3, rng.integers(2, 9, num)
        with TrajectoryStore.create(folder / name, trajectory_schema()) as store:
            store.append(
                {
                    "input_ids": [rng.integers(0, 13, 3 + length) for length in completions],
                    "assistant_mask": [np.arange(3 + length) >= 3 for length in completions],
                    "task_reward": rng.integers(0, 2, num).astype(float),
                    "group_id": prompts,
                    "trajectory_id": np.arange(num),
                    "num_prompt_tokens": np.full(num, 3),
                }
            )
    pipeline = replace(
        tiny(write__kl_coef="0.1", collect__max_new_tokens="8"),
        replay=Replay(stores=(str(folder / "a"), str(folder / "b")), weights=(2.0, 1.0), filters=("reward>=0",)),
        sample=Sample(batch_size=12),
    )

    def act(run_dir: Path) -> int:
        # 240 rows are one commit of a real run: the kills of this variant come between the commits of its choice.
        selection.BATCH_ROWS = 6  # type: ignore[misc]
        return typed(pipeline)(run_dir)

    return act


def multi_turn(_folder: Path) -> Act:
    """Conversations with an environment."""
    changes = {"collect__max_turns": "3", "write__kl_coef": "0.1"}
    return typed(replace(tiny(**changes), environment=PlainCalculator, reward=environment_reward))


VARIANTS: dict[str, Callable[[Path], Act]] = {
    "plain": settings(),
    "adaptive-kl": settings(write__kl_coef="0.2", write__kl_target="0.02", write__kl_horizon="100"),
    "lora": settings(policy__lora_rank="4", write__kl_coef="0.1", learn__lr="5e-2"),
    "several-updates": settings(
        learn__epochs="3", buffer__max_staleness="2", loss__tis_cap="2.0", write__kl_coef="0.1"
    ),
    "minibatches": settings(learn__epochs="2", learn__minibatches="3", loss__tis_cap="2.0"),
    "priority": settings(
        sample__strategy="priority", sample__batch_size="6", sample__tau="4", sample__max_uses="3",
        sample__min_ess="0.5", buffer__max_staleness="8", learn__epochs="2",
    ),
    "ring": settings(
        buffer__max_trajectories="16"
    ),
    "zarr": settings(buffer__backend="zarr", buffer__max_staleness="2", sample__strategy="recency", sample__tau="2"),
    "multi-turn": multi_turn,
    "moving-reference": moving_reference,
    "offline": offline,
}  # fmt: skip
"""What makes each way to run, given a folder for what it reads."""


# ---------------------------------------------------------------------------------------------------- the judge


def differences(killed: Path, straight: Path) -> Iterator[str]:
    """Say what a run that was killed has that the straight one has not, and the other way round."""
    killed_run, straight_run = RunFolder(killed), RunFolder(straight)
    steps = straight_run.metrics.last_step
    mine, theirs = (_saved(checkpoint_path(run.checkpoints, steps)) for run in (killed_run, straight_run))
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            yield f"{name} of the last checkpoint differs"
    for what, ours, others, aside in (
        ("metrics", killed_run.metrics, straight_run.metrics, TIMED | BY_PLACE),
        ("ledger", killed_run.ledger, straight_run.ledger, BY_PLACE),
    ):
        if len(ours) != len(others):
            yield f"{what}: {len(ours)} rows, expected {len(others)}"
        for one, other in zip(ours, others, strict=False):
            names = [name for name in {**one, **other} if name not in aside and one.get(name) != other.get(name)]
            if names:
                words = [f"{name} {one.get(name)} for {other.get(name)}" for name in names]
                yield f"{what}: step {other['step']}: {'; '.join(words)}"[:400]
                break
    with TrajectoryStore.open(killed_run.store_path) as ours, TrajectoryStore.open(straight_run.store_path) as others:
        rows = diff(others, ours, key="trajectory_id")
        rows.changed.pop("created_at", None)
        if str(rows) != "The stores contain the same rows.":
            yield f"store: {rows}"
        ids, numbers = set(ours.ids().tolist()), ours.read_scalars("trajectory_id").tolist()
        if len(set(numbers)) < len(numbers):
            yield "a trajectory was stored twice"
        if killed_run.record.exists and killed_run.config.pipeline["buffer"]["max_trajectories"] is None:
            lost = {row for line in killed_run.ledger for row in line["row_ids"]} - ids
            if lost:
                yield f"the ledger names rows that the store has not: {sorted(lost)[:4]}"
    if killed_run.record.exists:
        yield from (finding.text for finding in check_run(RunFolder.open(killed)) if not finding.ok)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = rlhf_pipeline(["diff", str(straight), str(killed)])
        if code != 0:
            yield f"`rlhf-pipeline diff` ends with {code}: {said.getvalue()}"


def _saved(checkpoint: Path) -> dict[str, bytes]:
    """What a checkpoint holds, by file and tensor: weights, moments, generators, counters."""
    contents: dict[str, bytes] = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 - it is no dictionary
                    contents[f"{path.name}: {key}"] = file.get_tensor(key).flatten().view(torch.uint8).numpy().tobytes()
        elif path.name == "state.json":
            state = json.loads(path.read_bytes())
            # By the segments in which they lie, and each writer has its own: a run that was killed has more.
            rows = sum(count for *_, count in state.pop("rows", {}).values())
            state.pop("lines", None)  # their checksums, which the times in them decide; both are compared below
            contents[path.name] = json.dumps(state | {"num_rows": rows}).encode()
        elif path.is_file() and path.name != "files.json":  # the checksums of the others
            contents[path.name] = path.read_bytes()
    return {name: content for name, content in contents.items() if name.split(": ")[-1] not in BY_PLACE}


def judged(lives: Lives, killed: Path, judge: Callable[[Path], Iterator[str]]) -> None:
    """Judge a run in a process of its own, as this one must not begin threads: it forks.

    Raises:
        AssertionError: says what is wrong with the run.
    """

    def act(run_dir: Path) -> int:
        problems = list(judge(run_dir))
        sys.stderr.write("".join(f"{line}\n" for line in problems))
        return len(problems)

    said = lives.live(act, killed)
    assert said is not None
    assert said[1] == 0, f"{said[1]} differences: see above"


# ----------------------------------------------------------------------------------------------- exact resumes


def resume(lives: Lives, name: str, folder: Path, kills: int) -> str:
    """Kill a run `kills` times at calls drawn by chance, let it end, and compare it with the straight one."""
    act = VARIANTS[name](folder)
    straight, killed = folder / "straight", folder / "killed"
    whole = lives.live(act, straight)
    assert whole is not None
    total, before = whole[0], lives.num_kills
    while lives.num_kills - before < kills:
        # So that as many kills come before the end of the run, some of them while it starts.
        said = lives.live(act, killed, lives.rng.randint(1, math.ceil(1.5 * total / kills)))
        if said is not None:
            break
    done = lives.num_kills - before
    assert done > kills // 2, f"killed only {done} times"
    assert lives.live(act, killed) is not None
    judged(lives, killed, lambda run_dir: differences(run_dir, straight))
    return f"{done} kills over {total} calls"


# --------------------------------------------------------------------------------------------------- the sweep

SWEPT = tiny(
    write__kl_coef="0.2", write__kl_target="0.02", write__kl_horizon="100", buffer__max_staleness="5",
    learn__steps="5", learn__checkpoint_every="2", learn__keep_checkpoints="2",
)  # fmt: skip


def points(lives: Lives, calls: Path, few: int | None) -> list[int]:
    """The calls to kill at: every one, in random order, or a few that are spread over all of them.

    Args:
        lives: whether one of each kind and path is to be among them, numbers in the path left out.
        calls: those of the straight run.
        few: how many are spread; None takes all.
    """
    lines = calls.read_text().splitlines()
    total, places = len(lines), dict[str, list[int]]()
    number, count = lives.part
    if few is None or few >= total:
        return lives.rng.sample(range(1, total + 1), total)[number - 1 :: count]
    for call, line in enumerate(lines, start=1):
        places.setdefault(re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "N", line), []).append(call)
    aimed = {lives.rng.choice(calls_there) for calls_there in places.values()} if lives.sites else set[int]()
    return sorted(aimed | {1 + round(i * (total - 1) / (few - 1)) for i in range(few)})[number - 1 :: count]


def sweep_one(lives: Lives, folder: Path, few: int | None) -> str:
    """A run in one process: a start, rollouts, steps, checkpoints, and the resume of each."""
    return _sweep(lives, typed(SWEPT), folder, few, make=lambda run_dir: None)


def sweep_learner(lives: Lives, folder: Path, few: int | None) -> str:
    """A learner beside rollouts that wait: steps, publications, checkpoints, and the resume of each."""
    waiting = folder / "waiting"
    collector = lives.start(collect_all, waiting)
    assert lives.live(publish_first, waiting) is not None
    assert lives.end(collector) is not None
    return _sweep(lives, learning, folder, few, make=lambda run_dir: shutil.copytree(waiting, run_dir))


def _sweep(
    lives: Lives,
    act: Act,
    folder: Path,
    few: int | None,
    *,
    make: Callable[[Path], object],
    judge: Callable[[Path, Path], Iterator[str]] | None = None,
) -> str:
    straight, before = folder / "straight", lives.num_kills
    make(straight)
    calls = folder / "calls"
    whole = lives.live(act, straight, calls=calls)
    assert whole is not None
    total, steps = whole
    chosen = points(lives, calls, few)
    for place, at in enumerate(chosen):
        run_dir = folder / f"killed-{at}"
        make(run_dir)
        said, again = lives.live(act, run_dir, at), 0
        if said is None:  # else it had fewer calls: a heartbeat is written as time passes
            again = lives.rng.randint(1, total) if few is None or place % 2 else 0
            said = lives.live(act, run_dir, again) or lives.live(act, run_dir)
        assert said is not None, (at, again)
        assert said[1] == steps, (at, again)
        _judge_at(lives, run_dir, lambda run_dir: (judge or differences)(run_dir, straight), (at, again))
    return f"{len(chosen)} of {total} calls, {lives.num_kills - before} kills"


def _judge_at(lives: Lives, run_dir: Path, judge: Callable[[Path], Iterator[str]], at: object) -> None:
    try:
        judged(lives, run_dir, judge)
    except AssertionError as error:
        raise AssertionError(f"killed at {at}: {error}") from error
    shutil.rmtree(run_dir)
    lives.num_judged += 1
    if lives.num_judged % 20 == 0:
        sys.stderr.write(f"{lives.num_judged} calls, the last {at}\n")


def learning(run_dir: Path) -> int:
    """The learner of a run of several processes."""
    return learn(SWEPT, run_dir=run_dir).steps


def collecting(run_dir: Path) -> int:
    """A collector of it."""
    return collect(SWEPT, run_dir=run_dir).num_rollouts


def publish_first(run_dir: Path) -> int:
    """Publish the first weights, and stop before the first step."""
    return learn(SWEPT, run_dir=run_dir, on_event=_stop_at(RunStarted, 1)).steps


def collect_all(run_dir: Path) -> int:
    """Collect as many rollouts as the run has steps, all with the first weights."""
    return collect(SWEPT, run_dir=run_dir, on_event=_stop_at(RolloutDone, SWEPT.learn.steps)).num_rollouts


def _stop_at(kind: type, number: int) -> Callable[[Event], None]:
    events: list[Event] = []

    def look(event: Event) -> None:
        if isinstance(event, kind):
            events.append(event)
            if len(events) == number:
                os.kill(os.getpid(), 15)

    return look


def _apart(act: Callable[[], object], parent: int) -> None:
    """Do what a process of a supervised run does, forked from the supervisor: it need not import anything."""
    hook: Any = ctypes.CDLL(os.environ["LD_PRELOAD"])
    hook.kill_at_call(b"", 0)  # only the supervisor's own calls count
    hook.tell_calls(-1)
    for handler in list(logging.getLogger("rlhf_pipeline").handlers):
        logging.getLogger("rlhf_pipeline").removeHandler(handler)
    os.closerange(3, 4096)  # as an exec would: else it held the locks of a supervisor that is gone
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    if os.getppid() == parent:
        act()


def supervising(run_dir: Path) -> int:
    """A supervisor with two collectors and a learner, which end when it is gone."""
    parent = os.getpid()
    acts: dict[str, Callable[[str], object]] = {
        "learner": lambda _: learn(SWEPT, run_dir=run_dir, parent=parent),
        "collector": lambda name: collect(SWEPT, run_dir=run_dir, name=name, parent=parent),
    }
    with Children(run_dir.parent / f"processes-of-{run_dir.name}") as children:

        def launch(name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
            act = acts[name.partition("-")[0]]
            return children.fork(lambda: _apart(lambda: act(name), parent), name=name)

        config = SupervisorConfig(collectors=2, first_delay_s=0.1)
        return supervise(Run(pipeline=SWEPT, run_dir=run_dir), config, launch=launch).steps


def sweep_supervised(lives: Lives, folder: Path, few: int | None) -> str:
    """A supervisor that is killed and started again, while its processes notice that it is gone."""
    return _sweep(
        lives, supervising, folder, few, make=lambda run_dir: None, judge=lambda run_dir, _: one_of_several(run_dir)
    )


def sweep_several(lives: Lives, folder: Path, few: int | None) -> str:
    """A learner and two collectors side by side: each killed at its calls, and again when it is started again.

    In what order rollouts arrive is up to the machine, so the run is judged by itself: see `one_of_several`.
    """
    acts: dict[str, Act] = {"learner": learning, "collector": collecting, "other collector": collecting}
    before = lives.num_kills

    def together(run_dir: Path, role: str = "", at: int = 0) -> None:
        alive = {
            name: lives.start(act, run_dir, at if name == role else 0, None if role else folder / f"{name}-calls")
            for name, act in acts.items()
        }
        while alive:
            time.sleep(0.01)
            for name, life in list(alive.items()):
                if life.child.poll() is None:
                    continue
                said = lives.end(life)
                if said is None:  # its second life may be cut short as well, its third is left alone
                    again = lives.rng.randint(1, 2 * at) if at and (at % 2 or few is None) else 0
                    at = 0
                    alive[name] = lives.start(acts[name], run_dir, again)
                else:
                    del alive[name]

    together(folder / "straight")
    judged(lives, folder / "straight", one_of_several)
    done = []
    for role in ("learner", "collector"):
        calls = folder / f"{role}-calls"
        chosen = points(lives, calls, few)
        for at in chosen:
            run_dir = folder / f"{role}-{at}"
            together(run_dir, role, at)
            _judge_at(lives, run_dir, one_of_several, (role, at))
        done.append(f"{len(chosen)} of {len(calls.read_text().splitlines())} of a {role}")
    return f"calls: {', '.join(done)}; {lives.num_kills - before} kills"


def one_of_several(run_dir: Path) -> Iterator[str]:
    """Say what is wrong with a run of collectors and a learner.

    Prompts, rollouts and steps must be there once each, and
    the steps, taken again as the ledger says, give the same bits.
    """
    folder = RunFolder.open(run_dir)
    yield from (finding.text for finding in check_run(folder) if not finding.ok)
    steps, size = SWEPT.learn.steps, SWEPT.collect.prompts_per_rollout
    for rows in (folder.ledger, folder.metrics):
        if [row["step"] for row in rows] != list(range(1, steps + 1)):
            yield f"{rows.path.name} has the steps {[row['step'] for row in rows]}"
    begun = [row["rollout"] for row in folder.ledger]
    if len(set(begun)) != steps:
        yield f"rollouts were learned from twice: {begun}"
    with TrajectoryStore.open(folder.store_path) as store, TrajectoryStore.open(folder.rollouts) as rollouts:
        ids, numbers = store.ids(), store.read_scalars("trajectory_id")
        groups, members = np.unique(store.read_scalars("group_id"), return_counts=True)
        arrived = sorted(rollouts.read_scalars("rollout").tolist())
    if len(np.unique(numbers)) < len(numbers):
        yield "a trajectory was stored twice"
    stored = sorted(set((groups // size).tolist()))
    whole = [rollout * size + prompt for rollout in stored for prompt in range(size)]
    if groups.tolist() != whole or set(members.tolist()) != {SWEPT.collect.group_size}:
        yield f"prompts were lost or repeated: {groups.tolist()}, {members.tolist()}"
    if len(set(arrived)) < len(arrived) or not {*begun, *arrived} <= set(stored):
        yield f"rollouts arrived {arrived}, of {begun} steps learned, and {stored} are stored"
    # The run may end while a collector is dead. What it had begun, stored or not, is what the next one takes up.
    if len({*range(max(stored) + 1)} - {*arrived}) > 1:
        yield f"rollouts were lost: {arrived} arrived"
    for row in folder.ledger:
        if len(row["row_ids"]) != SWEPT.collect.rollout_size or not np.isin(row["row_ids"], ids).all():
            yield f"step {row['step']} learned from {row['row_ids']}"
    first = min(int(path.name[5:]) for path in folder.checkpoints.iterdir() if path.name.startswith("step-"))
    if first < steps:
        for repeated in rerun(SWEPT, plan_rerun(run_dir, from_step=first + 1), seed=0, device="cpu"):
            if not (repeated.ok and repeated.same_bits):
                yield f"step {repeated.step}, taken again: {repeated}"


SWEEPS: dict[str, Callable[[Lives, Path, int | None], str]] = {
    "one": sweep_one,
    "learner": sweep_learner,
    "several": sweep_several,
    "supervised": sweep_supervised,
}


# -------------------------------------------------------------------------------------------------- the command


def with_hook(arguments: Sequence[str]) -> int:
    """Build the library that counts calls, and run this module again with it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("there is no C compiler to build the library with that counts file-system calls")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kill_at_call.so"
        subprocess.run([compiler, "-O1", "-w", "-shared", "-fPIC", "-o", library, HOOK, "-ldl"], check=True)
        environment = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.crash.kills", *arguments]
        return subprocess.run(command, env=environment, cwd=HOOK.parents[2], check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    resumes = commands.add_parser("resume", help="killed at calls drawn by chance")
    resumes.add_argument("--kills", type=int, default=10)
    sweeps = commands.add_parser("sweep", help="killed at every call")
    sweeps.add_argument("--points", type=int, help="only so many calls, spread over all of them")
    sweeps.add_argument("--sites", action="store_true", help="and one call of every kind and path")
    sweeps.add_argument("--part", default="1/1", help="2/8 is the second of eight parts of these calls")
    for command, names in ((resumes, VARIANTS), (sweeps, SWEEPS)):
        command.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all by default")
        command.add_argument("--seed", type=int, default=0, help="of the kills")
    args = parser.parse_args(arguments)
    if "LD_PRELOAD" not in os.environ:
        return with_hook(arguments)
    failed = 0
    for name in args.names or (VARIANTS if args.command == "resume" else SWEEPS):
        started = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix=f"kills-{name}-"))
        try:
            with Children(folder / "processes") as children:
                if args.command == "resume":
                    line = resume(Lives(children, args.seed), name, folder, args.kills)
                else:
                    number, count = map(int, args.part.split("/"))
                    lives = Lives(children, args.seed, sites=args.sites, part=(number, count))
                    line = SWEEPS[name](lives, folder, args.points)
            shutil.rmtree(folder)
        except AssertionError as error:
            line, failed = f"FAILED: {error}. The runs are in {folder}", failed + 1
        print(f"{args.command} {name}: {line} ({time.monotonic() - started:.0f} s)", flush=True)  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
