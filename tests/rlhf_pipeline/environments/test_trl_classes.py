"""Environment classes of TRL's documentation, used as it uses them: the class, a factory, a dict, rewards, parts."""

from __future__ import annotations

import functools
import json
import random
from typing import Any, ClassVar

import pytest

from rlhf_pipeline import Collect, FrozenLake, LakeMaps, Learn, Pipeline, Prompt, Reward, TinyPolicy, Tools
from rlhf_pipeline.environments.makers import Environments, maker_of
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.environments.test_outcomes import CHAT, call, stored


class Increment:
    """A counter, whose target is drawn, or a column of the data."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def reset(self, prompt: Any = None, **row: Any) -> Any:
        """Begin, and say what is asked for."""
        self.counter, self.target = self.start, random.randint(1, 6)
        Increment.seen.append((prompt, row))
        return f"{'abcdef'[self.target - 1]}"

    def increment(self, step: str) -> int:
        """Increment the counter.

        Args:
            step: how much to add
        """
        self.counter += 1
        return self.counter

    def get_reward(self) -> float | None:
        """Return whether the target is reached."""
        return float(self.counter > self.start)


class Awaited(Increment):
    """The same with a reward that takes a while, and parts of text."""

    def reset(self, prompt: Any = None, **row: Any) -> Any:
        """Begin, with parts."""
        return [{"type": "text", "text": super().reset(prompt, **row)}]

    def increment(self, step: str) -> Any:
        """Increment the counter.

        Args:
            step: how much to add
        """
        self.counter += 1
        return [{"type": "text", "text": "7"}, {"type": "text", "text": "7"}]

    async def get_reward(self) -> float | None:  # type: ignore[override]
        """Return whether the target is reached."""
        return float(self.counter > self.start)


class Unrewarded(Increment):
    """The same without a reward of its own."""

    def get_reward(self) -> None:  # type: ignore[override]
        """Return none."""


class Rows:
    """Prompts as messages, with columns."""

    as_chat = True

    def __init__(self, **columns: Any) -> None:
        self.columns = columns

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return one."""
        columns = {name: values[cursor % len(values)] for name, values in self.columns.items()}
        return Prompt(messages=[{"role": "user", "content": "g"}], meta=columns)


def of_environments(environments: list[Any], **kwargs: Any) -> list[float]:
    """A reward function in TRL's form, which looks into the environments."""
    return [float(getattr(one, "counter", 0)) for one in environments]


def pipeline(environment: Any, **changes: Any) -> Pipeline:
    """One step on two groups of four."""
    given: dict[str, Any] = {
        "name": "trl",
        "policy": TinyPolicy(
            alphabet="abcdefgilnort=0123456789LDRU.,O#G: '-><_",
            hidden_size=16,
            num_layers=1,
            num_heads=2,
            chat_template=CHAT,
            response_template=call("increment", {"step": "{content}"}),
        ),
        "environment": environment,
        "collect": Collect(prompts_per_rollout=2, group_size=4, max_new_tokens=2, max_turns=3),
        "learn": Learn(steps=1, lr=1e-3),
    }
    return Pipeline(**{**given, **changes})


@pytest.mark.parametrize(
    "environment",
    [Increment, Awaited, Unrewarded, functools.partial(Awaited, start=3), lambda: Increment(2)],
    ids=["class", "awaited", "no_reward", "partial", "factory"],
)
def test_a_class_of_trl_runs_as_it_is(environment, tmp_path):
    """Members of a group get one task though it is drawn, columns and messages reach `reset`, rewards are read."""
    Increment.seen.clear()
    reward = (Reward("reward"), of_environments)
    run(pipeline(environment, prompts=Rows(level=[1, 2]), reward=reward), run_dir=tmp_path / "run")
    rows = stored(tmp_path / "run" / "store")
    assert not any(rows["failure_reason"])
    assert {tuple(row) for _, row in Increment.seen} == {("answer", "level")}
    assert Increment.seen[0][0] == [{"role": "user", "content": "g"}]
    tasks = [json.loads(meta)["messages"][0]["content"] for meta in rows["meta"]]
    for group in {*rows["group_id"].tolist()}:
        assert len({task for task, one in zip(tasks, rows["group_id"], strict=True) if one == group}) == 1
    told = [one["content"] for meta in rows["meta"] for one in json.loads(meta)["messages"] if one["role"] == "tool"]
    assert told
    if environment is Awaited:
        assert {*told} == {"77"}
    start = 3 if isinstance(environment, functools.partial) else 0 if isinstance(environment, type) else 2
    called = rows["reward_of_environments"] > start
    assert called.any()
    wanted = [0.0] * len(called) if environment is Unrewarded else called.astype(float).tolist()
    assert rows["reward_reward"].tolist() == wanted


def test_an_environment_that_owns_its_data_needs_no_prompts(tmp_path):
    """What `reset` returns is all that is asked."""
    run(pipeline(Increment), run_dir=tmp_path / "run")
    rows = stored(tmp_path / "run" / "store")
    assert {json.loads(meta)["messages"][0]["content"] for meta in rows["meta"]} <= {*"abcdef"}
    assert not any(rows["failure_reason"])


def test_several_environments_share_a_run(tmp_path):
    """A column chooses; each prompt is answered by its own environment, and shows its tools alone."""
    lakes, shown = LakeMaps(size=2, most_holes=0), list[Any]()

    class Both:
        as_chat = True

        def prompt(self, cursor: int, seed: int) -> Prompt:
            """Return a lake, or a sum."""
            name = ("lake", "sums", "nothing")[cursor % 3]
            return Prompt(text="g", meta={**lakes.prompt(cursor, seed).meta, "environment": name})

    def find(where: str) -> str:
        """Find.

        Args:
            where: a place
        """
        return where

    class Lake(FrozenLake):
        def reset(self, prompt: Prompt, seed: int) -> str:
            """Note the columns."""
            shown.append(prompt.meta.keys())
            return super().reset(prompt, seed)

    made = pipeline(
        {"lake": Lake, "sums": Tools(find)},
        prompts=Both(),
        reward=(Reward("reached"), of_environments),
        collect=Collect(prompts_per_rollout=3, group_size=4, max_new_tokens=2, max_turns=3, alarm_failed=1.0),
    )
    with_tools = made.policy.chat_template.replace("{% for", "{{ '<' if tools else '>' }}{% for", 1)  # type: ignore[union-attr]
    object.__setattr__(made.policy, "chat_template", with_tools)
    run(made, run_dir=tmp_path / "run")
    rows = stored(tmp_path / "run" / "store")
    names = [json.loads(meta)["prompt"]["environment"] for meta in rows["meta"]]
    assert sorted({*names}) == ["lake", "nothing", "sums"]
    for name, failure, meta, ids in zip(names, rows["failure_reason"], rows["meta"], rows["input_ids"], strict=True):
        assert (failure == "tool_error") == (name == "nothing")
        if name == "nothing":
            assert "the environments are lake, sums" in json.loads(meta)["error"]
        else:
            first = [ids_[0] for ids_, other in zip(rows["input_ids"], names, strict=True) if other == name]
            assert {*first} == {ids[0]}
    tokens = [
        {int(ids[0]) for ids, one in zip(rows["input_ids"], names, strict=True) if one == name}
        for name in ("lake", "sums")
    ]
    assert tokens[0].isdisjoint(tokens[1])
    assert shown
    assert all("environment" not in columns for columns in shown)


def test_what_cannot_be_an_environment_is_named():
    """No methods, an empty dict, an object in place of a class, a name of a reward that is none of the declared."""

    class Empty:
        pass

    for wrong, said in ((Empty, "neither a `step` method"), ({}, "an empty dict"), (3, "pass the environment class")):
        with pytest.raises(DefinitionError, match=said):
            maker_of(wrong)
    with pytest.raises(
        DefinitionError, match=r"'reach'.* is not among the rewards that the environment declares: reached"
    ):
        pipeline(FrozenLake, reward=(Reward("reach"),), prompts=LakeMaps())
    assert Environments({"a": FrozenLake, "b": Increment}).rewards is None
    assert Environments({"a": FrozenLake, "b": FrozenLake}).rewards == ("reached", "nearer")
