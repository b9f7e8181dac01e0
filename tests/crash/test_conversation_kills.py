"""Kills in the middle of conversations: rows, evaluations and weights are those of the run that nobody killed."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rlhf_pipeline import (
    AgentProgram,
    Buffer,
    Collect,
    Evaluate,
    FrozenLake,
    LakeMaps,
    Learn,
    Pipeline,
    Prompt,
    Prompts,
    Step,
    TinyPolicy,
    Turn,
)
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.start import run
from tests.crash._lakes import small_lake
from tests.rlhf_pipeline.small import CHAT_TEMPLATE, collect, learn, weights
from trajectory_store import TrajectoryStore

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(280)]

FORKED = multiprocessing.get_context("fork")
KILL_AT = "LAKE_KILL_AT"
NOT_COMPARED = {"created_at", "evaluation"}


class Dies(FrozenLake):
    """Ends its process at a turn of its own count."""

    turns: ClassVar[int] = 0

    def step(self, turn: Turn) -> Step:
        """Die, or walk on; a turn that is no move is counted as a call that could not be made."""
        Dies.turns += 1
        if str(Dies.turns) == os.environ.get(KILL_AT):
            os.kill(os.getpid(), signal.SIGKILL)
        step = super().step(turn)
        return dataclasses.replace(step, call_errors=int(turn.text[-1:] not in "LDRU"))


class Forgets(Dies):
    """Every second turn shows the newest cells alone: a new row of the episode."""

    def step(self, turn: Turn) -> Step:
        """Walk on, and forget."""
        step = super().step(turn)
        if turn.number % 2 or step.done:
            return step
        return dataclasses.replace(step, reply="", history=[{"role": "user", "content": str(step.reply)}])


def of_several_rows() -> Pipeline:
    """Learns from episodes of several rows, evaluates such, and penalises the KL of each row."""
    held_out = Evaluate(prompts=LakeMaps(held_out=True), every=1, num_prompts=6, group_size=2, temperature=1.0)
    return dataclasses.replace(pipeline(write__kl_coef=0.1), environment=Forgets, evaluate=held_out)


def pipeline(**changes: Any) -> Pipeline:
    """Three steps on small rollouts."""
    settings = {"collect__prompts_per_rollout": 4, "collect__group_size": 4, "learn__steps": 3}
    return small_lake(Dies, **settings, learn__checkpoint_every=1, **changes)


def evaluated() -> Pipeline:
    """Evaluated after every step, on other maps."""
    held_out = Evaluate(prompts=LakeMaps(held_out=True), every=1, num_prompts=6, group_size=2, temperature=1.0)
    return dataclasses.replace(pipeline(), evaluate=held_out)


def by_turns() -> Pipeline:
    """Learns from each turn."""
    return pipeline(write__estimator="turn_grpo", collect__retries=1)


async def asks(base_url: str, api_key: str, prompt: Prompt) -> float:
    """Two turns with a sub-agent between them; it ends its process at a request of the count of `Dies`."""
    openai = importlib.import_module("openai")
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(*texts: str) -> str:
            Dies.turns += 1
            if str(Dies.turns) == os.environ.get(KILL_AT):
                os.kill(os.getpid(), signal.SIGKILL)
            roles = ("user", "assistant") * 2
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
            answer = await client.chat.completions.create(model="policy", messages=messages)
            return answer.choices[0].message.content

        first = await ask(prompt.text)
        agent = await ask(prompt.text[:1])
        second = await ask(prompt.text, first, "7")
    return float((first + agent + second).count("1"))


def programs() -> Pipeline:
    """Agent programs, whose episodes have two rows."""
    letters = TinyPolicy(
        alphabet="0123456789+UAT:\n", hidden_size=16, num_layers=1, num_heads=2, chat_template=CHAT_TEMPLATE
    )
    return Pipeline(
        name="programs",
        policy=letters,
        prompts=Prompts(rows=[{"question": f"{number}", "answer": ""} for number in range(12, 20)]),
        environment=AgentProgram(asks),
        collect=Collect(prompts_per_rollout=3, group_size=4, max_new_tokens=4, max_row_tokens=60),
        buffer=Buffer(max_staleness=1),
        learn=Learn(steps=4, lr=1e-2, checkpoint_every=1),
    )


def in_a_process(act: Callable[[], object], kill_at: int | None = None) -> Any:
    """Start something in a process that dies at this turn."""

    def whole() -> None:
        torch.set_num_threads(1)
        Dies.turns, os.environ[KILL_AT] = 0, str(kill_at)  # no attribute, which would be another environment
        act()

    process = FORKED.Process(target=whole)
    process.start()
    return process


def stores(run_dir: Path) -> dict[str, dict[str, list[Any]]]:
    """The columns of the run's store and of its evaluations, in the order of the trajectories."""
    found = {}
    for path in (run_dir / "store", *sorted((run_dir / "evaluations").glob("*"))):
        with TrajectoryStore.open(path) as store:
            rows = store.read(store.ids())
        order = np.argsort(rows["trajectory_id"], kind="stable")
        kept = rows.keys() - NOT_COMPARED
        found[path.name] = {name: [str(np.asarray(rows[name][at]).tolist()) for at in order] for name in sorted(kept)}
    return found


@pytest.mark.parametrize("made", [evaluated, by_turns, of_several_rows, programs])
def test_a_run_killed_in_its_conversations(made, tmp_path):
    """Killed early, in the middle and late, in rollouts and in evaluations."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"

    def go_on(folder: Path) -> Callable[[], object]:
        return lambda: run(made(), run_dir=folder, resume=RunFolder(folder).record.exists)

    process = in_a_process(go_on(straight))
    process.join()
    assert process.exitcode == 0
    codes = list[int | None]()
    for kill_at in (5, 90, 140, 33):
        process = in_a_process(go_on(killed), kill_at)
        process.join()
        codes.append(process.exitcode)
    assert codes[:2] == [-signal.SIGKILL] * 2
    assert {*codes} <= {-signal.SIGKILL, 0}
    process = in_a_process(go_on(killed))
    process.join()
    assert process.exitcode == 0
    assert stores(killed) == stores(straight)
    assert weights(killed) == weights(straight)
    if made is of_several_rows:
        sizes = {*stores(killed)["store"]["episode_size"]}
        assert len(sizes) > 1


@pytest.mark.parametrize("environment", [Dies, Forgets])
def test_a_collector_killed_in_its_conversations(environment, tmp_path):
    """One that began alone, so that no other takes its conversations; then two take its place beside the learner."""
    made = dataclasses.replace(pipeline(buffer__max_staleness=0), environment=environment)

    def live(folder: Path, kill_at: int | None) -> list[int | None]:
        learner = in_a_process(lambda: learn(made, run_dir=folder))
        collectors = [] if kill_at is None else [in_a_process(lambda: collect(made, run_dir=folder), kill_at)]
        for process in collectors:
            process.join(120)
        collectors += [in_a_process(lambda: collect(made, run_dir=folder)) for _ in range(2)]
        for process in (learner, *collectors):
            process.join(120)
        return [process.exitcode for process in collectors]

    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert live(straight, None) == [0, 0]
    assert live(killed, 20) == [-signal.SIGKILL, 0, 0]
    assert stores(killed) == stores(straight)
    assert weights(killed) == weights(straight)
