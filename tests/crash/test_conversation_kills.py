"""Kills in the middle of conversations: rows, evaluations and weights are those of the run that nobody killed."""

from __future__ import annotations

import dataclasses
import importlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
from tests.processes import Child, count_call
from tests.rlhf_pipeline.small import CHAT_TEMPLATE, collect, learn, weights
from trajectory_store import TrajectoryStore

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(280)]

NOT_COMPARED = {"created_at", "evaluation"}


class Dies(FrozenLake):
    """Ends its process at one of its turns."""

    def step(self, turn: Turn) -> Step:
        """Die, or walk on; a turn that is no move is counted as a call that could not be made."""
        count_call()
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
    """Two turns with a sub-agent between them; it ends its process at one of its requests."""
    openai = importlib.import_module("openai")
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(*texts: str) -> str:
            count_call()
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
def test_a_run_killed_in_its_conversations(made, tmp_path, children):
    """Killed early, in the middle and late, in rollouts and in evaluations."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"

    def go_on(folder: Path) -> Callable[[], object]:
        return lambda: run(made(), run_dir=folder, resume=RunFolder(folder).record.exists)

    children.fork(go_on(straight)).succeed()
    codes = [children.fork(go_on(killed), kill_at=kill_at).wait() for kill_at in (5, 90, 140, 33)]
    assert codes[:2] == [-signal.SIGKILL] * 2
    assert {*codes} <= {-signal.SIGKILL, 0}
    children.fork(go_on(killed)).succeed()
    assert stores(killed) == stores(straight)
    assert weights(killed) == weights(straight)
    if made is of_several_rows:
        sizes = {*stores(killed)["store"]["episode_size"]}
        assert len(sizes) > 1


@pytest.mark.parametrize("environment", [Dies, Forgets])
def test_a_collector_killed_in_its_conversations(environment, tmp_path, children):
    """One that began alone, so that no other takes its conversations; then two take its place beside the learner."""
    made = dataclasses.replace(pipeline(buffer__max_staleness=0), environment=environment)

    def live(folder: Path, kill_at: int | None) -> list[int]:
        def collector(kill_at: int | None = None) -> Child:
            return children.fork(lambda: collect(made, run_dir=folder), name="collector", kill_at=kill_at)

        learner = children.fork(lambda: learn(made, run_dir=folder), name="learner")
        codes = [] if kill_at is None else [collector(kill_at).wait(120)]
        collectors = [collector(), collector()]
        learner.succeed(120)
        return codes + [child.wait(120) for child in collectors]

    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert live(straight, None) == [0, 0]
    assert live(killed, 20) == [-signal.SIGKILL, 0, 0]
    assert stores(killed) == stores(straight)
    assert weights(killed) == weights(straight)
