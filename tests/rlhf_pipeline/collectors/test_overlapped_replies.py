"""Environments whose calls run beside sampling: rows repeat bit for bit, whenever replies arrive."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_pipeline import (
    CausalLMPolicy,
    Collect,
    Collector,
    FrozenLake,
    LakeMaps,
    Step,
    TrajectoryReplayBuffer,
    TrajectoryStorage,
    scratch_policy,
)
from rlhf_pipeline.buffer.trajectory_schema import PROVENANCE
from rlhf_pipeline.data.rewards import environment_reward
from rlhf_pipeline.environments.games import LAKE_ALPHABET
from rlhf_pipeline.policies.engines.protocol import WeightRefresh
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.start import run
from rlhf_pipeline.user_code import runtime
from tests.crash._lakes import small_lake
from tests.crash.test_conversation_kills import stores
from tests.processes import Children, count_call
from tests.rlhf_pipeline.small import weights

NOISE = random.Random(time.time_ns() ^ os.getpid())
LONGEST_S = 0.2


class AsyncLake(FrozenLake):
    """Answers after a random time."""

    async def step(self, turn: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(NOISE.uniform(0, LONGEST_S))
        return FrozenLake.step(self, turn)


class ParallelLake(FrozenLake):
    """The same, in threads; so do its beginning and its end."""

    parallel = True

    def reset(self, prompt: Any, seed: int) -> str:
        time.sleep(NOISE.uniform(0, LONGEST_S / 4))
        return super().reset(prompt, seed)

    def step(self, turn: Any) -> Any:
        time.sleep(NOISE.uniform(0, LONGEST_S))
        return super().step(turn)

    def end(self, reason: str) -> dict[str, float]:
        time.sleep(NOISE.uniform(0, LONGEST_S / 4))
        return {}


def collected(environment: Any, *, groups: int, num_slots: int = 64, refreshed: bool = False, **changes: Any) -> Any:
    """Return the rows of one rollout, by column."""
    policy = scratch_policy(LAKE_ALPHABET, hidden_size=16, num_layers=1, num_heads=2, seed=1, num_slots=num_slots)
    refresh = _refresh(policy) if refreshed else None
    with tempfile.TemporaryDirectory() as folder:
        storage = TrajectoryStorage(f"{folder}/store", extra=PROVENANCE)
        limits = {"group_size": 4, "max_new_tokens": 2, "max_turns": 4, "max_row_tokens": 60, "num_slots": num_slots}
        collector = Collector(
            policy=policy,
            prompts=LakeMaps(start_anywhere=True),
            reward=environment_reward,
            buffer=TrajectoryReplayBuffer(storage=storage),
            config=Collect(**{**limits, "prompts_per_rollout": groups, **changes}),
            seed=1,
            environment=environment,
        )
        collector.collect(0, policy_version=0, refresh=refresh)
        rows = storage.store.read(storage.store.ids())
        storage.close()
    return {name: _bytes(column) for name, column in rows.items() if name != "created_at"} | {"rows": rows}


def _bytes(column: Any) -> bytes:
    return b"".join(np.asarray(value).tobytes() if not isinstance(value, str) else value.encode() for value in column)


def _refresh(policy: CausalLMPolicy) -> WeightRefresh:
    """Other weights every seven tokens."""
    first = {name: value.clone() for name, value in policy.model.state_dict().items()}
    draw = torch.Generator().manual_seed(1)
    drift = {name: 0.05 * torch.randn(value.shape, generator=draw) for name, value in first.items()}
    version = 0

    def load() -> int:
        nonlocal version
        version += 1
        with torch.no_grad():
            for name, value in policy.model.state_dict().items():
                value.copy_(first[name] + version * drift[name])
        return version

    return WeightRefresh(load, 7, 0)


@pytest.mark.parametrize("environment", [AsyncLake, ParallelLake])
@pytest.mark.parametrize("refreshed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_rows_repeat_whenever_replies_arrive(environment: Any, refreshed: bool):
    """Two hundred conversations on 64 slots, three times: tokens, log-probs and versions are the same bits."""
    runs = [collected(environment, groups=50, refreshed=refreshed) for _ in range(3)]
    assert len(runs[0]["rows"]["task_reward"]) == 200
    assert not any(runs[0]["rows"]["failure_reason"])
    for name in runs[0].keys() - {"rows"}:
        assert len({each[name] for each in runs}) == 1, name
    if refreshed:
        assert len({*np.concatenate([spans[:, 1] for spans in runs[0]["rows"]["version_spans"]]).tolist()}) > 2


def test_a_limit_of_live_conversations_changes_only_how_many_there_are():
    """Of at most seven, one group of four at once, in the order of the prompts: the tokens of all at once."""
    alive, most, lock = 0, 0, threading.Lock()

    class Counted(ParallelLake):
        def __init__(self) -> None:
            nonlocal alive, most
            with lock:
                alive += 1
                most = max(most, alive)

        def end(self, reason: str) -> dict[str, float]:
            nonlocal alive
            with lock:
                alive -= 1
            return {}

    few = collected(Counted, groups=5, live_conversations=7)
    assert most == 4
    assert few["input_ids"] == collected(ParallelLake, groups=5)["input_ids"]


class _Waits(FrozenLake):
    """Three turns, half a second in one place."""

    where = ""

    def __init__(self) -> None:
        self.wait("init")

    def wait(self, where: str) -> None:
        if where == self.where:
            time.sleep(0.5)

    def reset(self, prompt: Any, seed: int) -> str:
        self.wait("reset")
        return "."

    def answered(self, turn: Any) -> Step:
        return Step(".", done=turn.number == 3, rewards={"reached": 1.0})

    async def step(self, turn: Any) -> Any:  # type: ignore[override]
        if self.where == "async":
            await asyncio.sleep(0.5)
        return self.answered(turn)

    def end(self, reason: str) -> dict[str, float]:
        self.wait("end")
        return {}


class _ParallelWaits(_Waits):
    parallel = True

    def step(self, turn: Any) -> Any:  # type: ignore[override]
        self.wait("step")
        return self.answered(turn)


@pytest.mark.parametrize(
    ("base", "where"),
    [(_Waits, "async"), (_ParallelWaits, "step"), (_Waits, "reset"), (_Waits, "end"), (_Waits, "init")],
)
def test_slow_environments_wait_together(base: Any, where: str):
    """64 conversations of three turns with half a second each: at most three seconds, once in three tries."""
    environment = type("Waits", (base,), {"where": where})
    for _ in range(3):
        started = time.monotonic()
        rows = collected(environment, groups=16)["rows"]
        taken_s = time.monotonic() - started
        if taken_s <= 3.0:
            break
    assert taken_s <= 3.0
    assert not any(rows["failure_reason"])


def test_pausing_and_loading_do_not_wait_for_an_environment():
    """While a step in place takes a second, another thread pauses the engine and loads weights."""
    policy = scratch_policy(LAKE_ALPHABET, hidden_size=16, num_layers=1, num_heads=2, seed=1, num_slots=4)
    engine, began, taken = policy.engine, threading.Event(), list[float]()
    engine.model = policy.model  # type: ignore[attr-defined]

    class InPlace(FrozenLake):
        def step(self, turn: Any) -> Step:
            began.set()
            time.sleep(1.0)
            return Step(done=True)

    def other() -> None:
        began.wait()
        for change in (engine.pause, engine.resume, lambda: engine.load_weights(policy.model.state_dict(), 1)):
            started = time.monotonic()
            change()
            taken.append(time.monotonic() - started)

    thread = threading.Thread(target=other)
    thread.start()
    with tempfile.TemporaryDirectory() as folder:
        storage = TrajectoryStorage(f"{folder}/store", extra=PROVENANCE)
        Collector(
            policy=policy,
            prompts=LakeMaps(),
            reward=environment_reward,
            buffer=TrajectoryReplayBuffer(storage=storage),
            config=Collect(prompts_per_rollout=1, group_size=2, max_new_tokens=1, num_slots=4),
            seed=1,
            environment=InPlace,
        ).collect(0, policy_version=0)
        storage.close()
    thread.join()
    assert max(taken) < 0.5


def collect_in_place() -> None:
    """Write the notices about an environment whose steps are slow."""

    class InPlace(FrozenLake):
        def step(self, turn: Any) -> Any:
            time.sleep(0.1)
            return super().step(turn)

    for _ in range(2):
        collected(InPlace, groups=3)
    sys.stdout.write("\n".join(runtime.process_runtime().take_notices()))


def test_slow_steps_in_place_are_mentioned_once(children: Children):
    """The sentence names the attribute that lets them run side by side; a process mentions them once."""
    assert children.call(collect_in_place).succeed().count("set `parallel = True` on the class") == 1


class _KilledParallel(FrozenLake):
    """Ends the process at one of its turns."""

    parallel = True

    def step(self, turn: Any) -> Any:
        time.sleep(NOISE.uniform(0, 0.03))
        count_call()
        return super().step(turn)


class _KilledAsync(FrozenLake):
    async def step(self, turn: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(NOISE.uniform(0, 0.03))
        count_call()
        return FrozenLake.step(self, turn)


def _trained(children: Children, environment: Any, folder: Path, kill_at: int | None) -> int:
    def whole() -> None:
        global NOISE
        NOISE = random.Random(time.time_ns() ^ os.getpid())
        changes = {"collect__prompts_per_rollout": 8, "collect__group_size": 4, "learn__steps": 3}
        changes |= {"learn__checkpoint_every": 1, "collect__num_slots": 12, "collect__max_new_tokens": 4}
        pipeline = small_lake(environment, **changes, collect__max_row_tokens=120, collect__reply_after=8)
        run(pipeline, run_dir=folder, resume=RunFolder(folder).record.exists)

    return children.fork(whole, kill_at=kill_at).wait()


@pytest.mark.slow
@pytest.mark.parametrize("environment", [_KilledAsync, _KilledParallel])
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(environment: Any, tmp_path: Path, children: Children):
    """Killed in the middle of conversations, twice, and resumed: the same rows and the same weights, bit for bit."""
    assert _trained(children, environment, tmp_path / "straight", None) == 0
    codes = [_trained(children, environment, tmp_path / "killed", at) for at in (40, 150)]
    assert codes == [-signal.SIGKILL] * 2
    assert _trained(children, environment, tmp_path / "killed", None) == 0
    straight, killed = stores(tmp_path / "straight"), stores(tmp_path / "killed")
    assert straight.keys() == killed.keys()
    for store in straight:
        assert [name for name in straight[store] if straight[store][name] != killed[store][name]] == []
    assert weights(tmp_path / "straight") == weights(tmp_path / "killed")
    assert json.loads((tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3
