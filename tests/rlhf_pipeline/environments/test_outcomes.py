"""The table of outcomes: each ending provoked in a run with slots, and its rows, metrics and evaluation judged."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rlhf_pipeline import Collect, Evaluate, Learn, Pipeline, Prompt, Step, TinyPolicy, Tools, Turn, WritePath
from rlhf_pipeline.data.rewards import LeftOut, mask_truncated
from rlhf_pipeline.environments.outcomes import BROKEN, CALLS, LENGTH, OUTCOMES, STOP, Outcome, table
from rlhf_pipeline.errors import EngineError
from rlhf_pipeline.policies.engines.slots import SlotEngine
from rlhf_pipeline.run.start import run
from tests.moments import Call, at_call
from trajectory_store import TrajectoryStore

PAGE = Path(__file__).parents[3] / "docs" / "rewards.md"
CHAT = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '=' }}{% endfor %}"
GROUP, PROMPTS = 8, 2
EVALUATED: dict[str, Any] = {"num_prompts": 4, "group_size": 8, "temperature": 1.0}


@dataclass(frozen=True)
class Ask:
    """Prompts of one letter; the odd ones say so."""

    as_chat: bool = False

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return one."""
        return Prompt(text="b", meta={"odd": cursor % 2 == 1})


class Coin:
    """An `a` wins, anything else loses."""

    def reset(self, prompt: Prompt, seed: int) -> Any:
        """Show a letter."""
        return "a"

    def step(self, turn: Turn) -> Step:
        """Say whether it is won."""
        return Step(done=True, rewards={"won": 1.0}) if "a" in turn.text else Step(done=True)


class OddReset(Coin):
    """Shows bytes for every other prompt."""

    def reset(self, prompt: Prompt, seed: int) -> Any:
        """Show something."""
        return b"a" if prompt.meta["odd"] else "a"


class Goes(Coin):
    """Goes on where nothing is won, with a reply of one letter, or as many as the class says."""

    letters: ClassVar[int] = 1

    def step(self, turn: Turn) -> Step:
        """Answer."""
        step = super().step(turn)
        return step if step.rewards else Step("c" * self.letters)


class Talks(Goes):
    """Answers with more than a row has room for."""

    letters = 100


class Aborts(Coin):
    """Lets the engine end everything in its first turn, once."""

    engines: ClassVar[list[Any]] = []
    done: ClassVar[bool] = False

    def step(self, turn: Turn) -> Step:
        """Abort, or say whether it is won."""
        if not Aborts.done:
            Aborts.done = True
            Aborts.engines[-1].abort()
        return Step("c") if turn.number == 1 else super().step(turn)


def remember_engine(call: Call) -> None:
    """Let the environment above know the engine."""
    Aborts.engines.append(call.arguments["self"])


def tool(fails: Callable[[], object] | None = None) -> Tools:
    """An environment of one tool, which fails in some way."""

    def look(where: str) -> str:
        """Look.

        Args:
            where: a place
        """
        return str(fails() if fails is not None else where)

    return Tools(look)


def no_route() -> None:
    """Fail as a network does."""
    raise OSError("no route")


def wrong(error: BaseException | None) -> Callable[[str], float | None]:
    """A reward that fails on an `a`, or does not apply to it."""

    def graded(completion: str) -> float | None:
        if "a" not in completion:
            return 0.5 * len(completion)
        if isinstance(error, TimeoutError):
            time.sleep(2.0)
        elif error is not None:
            raise error
        return None

    return graded


def letters(completion: str) -> float:
    """Count the letters that win."""
    return float(completion.count("a"))


def with_mask(completion: str) -> None:
    """Leave out what has an `a`."""
    if "a" in completion:
        raise LeftOut("too_short")


def call(name: str, arguments: dict[str, str], **how: Any) -> dict[str, Any]:
    """A form of calls: each letter but an `a` is one."""
    calls = {"type": "function", "function": {"name": name, "arguments": arguments}}
    field_of = {"open_pattern": "[bcdefg]", "close": "<|im_end|>", "repeats": True, "transform": calls, **how}
    return {"start_anchor": "=", "fields": {"content": {}, "tool_calls": field_of}}


GOOD = call("look", {"where": "{content}"})


@dataclass(frozen=True, kw_only=True)
class Case:
    """How an ending is provoked, and how its rows are told from others."""

    environment: Any = Coin
    reward: Any = None
    collect: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, Any] | None = None
    worth: float | None = None
    """The reward of its rows, where they have one and it is the same for all."""
    failure: str = ""


CASES: dict[str, Case] = {
    "won": Case(worth=1.0),
    "lost": Case(worth=0.0),
    "turns used up": Case(environment=Goes, collect={"max_turns": 2}, worth=0.0),
    "turn truncated": Case(collect={"max_new_tokens": 2}),
    "row full": Case(environment=Goes, collect={"max_row_tokens": 5}, worth=0.0),
    "reply too long": Case(environment=Talks, collect={"max_row_tokens": 20}, worth=0.0),
    "malformed call": Case(environment=tool(), reward=letters, calls=call("look", {}, content="json"), worth=0.0),
    "unknown call": Case(environment=tool(), reward=letters, calls=call("find", {}), worth=0.0),
    "bad arguments": Case(environment=tool(), reward=letters, calls=call("look", {"at": "{content}"}), worth=0.0),
    "tool rejected": Case(environment=tool(lambda: int("x")), reward=letters, calls=GOOD, failure=""),
    "tool raised": Case(environment=tool(no_route), reward=letters, calls=GOOD),
    "tool timed out": Case(
        environment=tool(lambda: time.sleep(3)), reward=letters, calls=GOOD, collect={"step_timeout_s": 0.2}
    ),
    "reset failed": Case(environment=OddReset),
    "reward raised": Case(reward=wrong(KeyError("x"))),
    "grader timed out": Case(reward=wrong(TimeoutError()), collect={"reward_timeout_s": 0.2, "reward_concurrency": 64}),
    "reward None": Case(reward=wrong(None)),
    "excluded": Case(reward=(letters, with_mask), failure="too_short"),
    "engine aborted": Case(environment=Aborts, collect={"retries": 1}),
}


def pipeline(case: Case) -> Pipeline:
    """One step on two groups, evaluated before and after."""
    collect = {"prompts_per_rollout": PROMPTS, "group_size": GROUP, "max_new_tokens": 1, "max_turns": 3}
    collect |= {"max_call_errors": 2, "num_slots": 32}
    template = {} if case.calls is None else {"chat_template": CHAT, "response_template": case.calls}
    return Pipeline(
        name="outcomes",
        policy=TinyPolicy(alphabet="abcdefg=", hidden_size=16, num_layers=1, num_heads=2, **template),
        prompts=Ask(as_chat=case.calls is not None),
        environment=case.environment,
        **({} if case.reward is None else {"reward": case.reward}),
        collect=Collect(**{**collect, **case.collect}),
        write=WritePath(estimator="dr_grpo"),
        evaluate=Evaluate(prompts=Ask(as_chat=case.calls is not None), every=1, **EVALUATED),
        learn=Learn(steps=1, lr=1e-3),
    )


def stored(path: Path) -> dict[str, Any]:
    """The columns of a store."""
    with TrajectoryStore.open(path) as store:
        return store.read(store.ids())


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: outcome.name.replace(" ", "_"))
def test_an_ending_counts_as_the_table_says(outcome: Outcome, tmp_path):
    """Reason, failure and reward of its rows, the baseline of their groups, and the figures of run and evaluation."""
    case = CASES[outcome.name]
    Aborts.done = False
    with at_call(SlotEngine.converse, before=remember_engine):
        run(pipeline(case), run_dir=tmp_path / "run", definition="outcomes")
    rows = stored(tmp_path / "run" / "store")
    failure = case.failure or outcome.failure
    reasons, failures = np.array(rows["finish_reason"]), np.array(rows["failure_reason"])
    these = failures == failure
    if outcome.finish_reason:
        these &= reasons == outcome.finish_reason
    if case.worth is not None:
        these &= rows["task_reward"] == case.worth
    assert these.any()
    assert (~these).any() or not outcome.finish_reason + failure
    assert (rows["reward_trusted"][these] == (failure == "")).all()
    assert np.isnan(rows["task_reward"][these]).all() == outcome.reward.startswith("none")
    # Who counts in the baseline is who is learned from.
    learned = np.isfinite(rows["task_reward"])
    assert (learned[these] == outcome.learned).all()
    for group in np.unique(rows["group_id"]):
        of_group = rows["group_id"] == group
        wanted = rows["task_reward"] - (
            rows["task_reward"][of_group & learned].mean() if learned[of_group].any() else 0
        )
        np.testing.assert_allclose(rows["advantage"][of_group & learned], wanted[of_group & learned], atol=1e-6)
        assert (rows["advantage"][of_group & ~learned] == 0).all()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (line,) = [one for one in lines if one["step"] == 1]
    assert line["task_reward"] == pytest.approx(rows["task_reward"][learned].mean(), abs=1e-6)
    assert line["num_failed"] == np.isin(failures, [*BROKEN]).sum()
    if failure:
        assert line[f"failed/{failure}"] == (failures == failure).sum()
    (folder,) = (tmp_path / "run" / "evaluations").iterdir()
    seen = stored(folder)
    at = seen["policy_version"] == 1
    counts = np.isfinite(seen["task_reward"])
    of_kind = np.array(seen["failure_reason"]) == ("" if outcome.evaluated else failure)
    assert of_kind.any()
    assert (counts[of_kind] == outcome.evaluated).all()
    assert line["evaluation/failed"] == (at & ~counts).sum()
    means = [
        seen["task_reward"][at & counts & (seen["group_id"] == group)] for group in np.unique(seen["group_id"][at])
    ]
    assert line["evaluation/reward"] == pytest.approx(np.mean([one.mean() for one in means if len(one)]), abs=1e-6)
    if outcome.name == "excluded":
        assert not np.isnan(seen["task_reward"]).any()
        assert seen["task_reward"].max() > 0
    if outcome.name == "engine aborted":
        assert any(
            "the engine aborted it" in json.loads(meta).get("retried", []) for meta in rows["meta"] + seen["meta"]
        )
    if outcome.name == "tool rejected":
        said = "error: ValueError: invalid literal for int() with base 10: 'x'"
        known = "".join(one for one in said if one in "abcdefg=")  # the alphabet has no other
        sent = [message for one in rows["meta"] for message in json.loads(one)["messages"] if message["role"] == "tool"]
        assert ("look", known) in [(message["name"], message["content"]) for message in sent]
        assert all(len(message["tool_call_id"]) == 9 for message in sent)
    if outcome.finish_reason == CALLS:
        assert {json.loads(meta)["call_errors"] for meta, one in zip(rows["meta"], these, strict=True) if one} == {2}


def test_every_outcome_is_provoked_and_printed():
    """The page prints the table as it is, and a case provokes each row of it."""
    assert [*CASES] == [one.name for one in OUTCOMES]
    assert table() in PAGE.read_text("utf-8")


def test_an_engine_that_aborts_stores_nothing(tmp_path):
    """Without a second try the run ends, and the rollout is sampled again by whoever resumes it."""
    Aborts.done = False
    once = dataclasses.replace(pipeline(Case(environment=Aborts)), evaluate=None)
    with (
        at_call(SlotEngine.converse, before=remember_engine),
        pytest.raises(EngineError, match="so it was not stored"),
    ):
        run(once, run_dir=tmp_path / "run", definition="outcomes")
    run(once, run_dir=tmp_path / "run", definition="outcomes", resume=True)
    rows = stored(tmp_path / "run" / "store")
    assert [*rows["finish_reason"]] == [STOP] * (GROUP * PROMPTS)
    assert not any(math.isnan(one) for one in rows["task_reward"])


STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}REFUSED{% endif %}"
    "{{ m.content }}{% for one in m.tool_calls or [] %}{{ one.function.name + one.function.arguments | tojson }}"
    "{% endfor %}{{ eos_token if m.role == 'assistant' else '=' }}{% endfor %}"
)
"""Refuses what a tool answers to no call, and needs the arguments of each call."""
REFUSALS = {
    "raises": STRICT.replace("REFUSED", "{{ raise_exception('no call') }}"),
    "leaves it out": STRICT.replace("REFUSED{% endif %}{{ m.content }}", "{% else %}{{ m.content }}{% endif %}"),
}


@pytest.mark.parametrize("how", REFUSALS)
def test_an_error_is_reported_where_a_template_has_no_place_for_it(how, tmp_path):
    """The user says it; the conversation goes on, is learned from, and its row is what was told."""
    made = pipeline(Case(environment=tool(), reward=letters, calls=call("look", {}, content="json")))
    object.__setattr__(made.policy, "chat_template", REFUSALS[how])
    object.__setattr__(made.policy, "alphabet", "".join(dict.fromkeys("abcdefg=: error")))
    run(dataclasses.replace(made, evaluate=None), run_dir=tmp_path / "run", definition="outcomes")
    rows = stored(tmp_path / "run" / "store")
    assert not any(rows["failure_reason"])
    told = [json.loads(meta)["messages"] for meta in rows["meta"] if json.loads(meta).get("call_errors")]
    assert told
    for messages in (one for one in told if len(one) > 2):
        assert [one["role"] for one in messages[:3]] == ["user", "assistant", "user"]
        assert messages[2]["content"].startswith("error: ")


@pytest.mark.parametrize("parts", [{}, {"arguments": None}, {"arguments": "{}"}])
def test_a_call_without_arguments_is_reported(parts, tmp_path):
    """The template reads arguments of each call, and the policy gave none: that is its mistake, and no failure."""
    calls = call("look", {})
    calls["fields"]["tool_calls"]["transform"]["function"] = {"name": "look", **parts}
    made = pipeline(Case(environment=tool(), reward=letters, calls=calls))
    object.__setattr__(made.policy, "chat_template", REFUSALS["raises"])
    run(dataclasses.replace(made, evaluate=None), run_dir=tmp_path / "run", definition="outcomes")
    rows = stored(tmp_path / "run" / "store")
    assert not any(rows["failure_reason"])
    assert CALLS in rows["finish_reason"]


def test_a_turn_with_tools_that_was_cut_may_be_left_out(tmp_path):
    """`mask_truncated` leaves out exactly the conversations whose last turn did not end by itself."""
    case = Case(environment=tool(), reward=(letters, mask_truncated), calls=GOOD, collect={"max_new_tokens": 3})
    made = pipeline(case)
    object.__setattr__(made.policy, "alphabet", "ab=")
    run(made, run_dir=tmp_path / "run", definition="outcomes")
    rows = stored(tmp_path / "run" / "store")
    cut = [reason == LENGTH for reason in rows["finish_reason"]]
    assert 0 < sum(cut) < len(cut)
    assert [one == "truncated" for one in rows["failure_reason"]] == cut
    for ids, spans, one in zip(rows["input_ids"], rows["turn_spans"], cut, strict=True):
        assert not one or len(ids) - spans[-1][0] == 3
