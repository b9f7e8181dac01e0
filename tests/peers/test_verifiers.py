"""Environments of the package `verifiers`, with its own agent loop and tool server, and a tiny model as the policy."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_pipeline import Collect, Learn, TinyPolicy, Turn
from rlhf_pipeline.collectors.conversations import Conversation, Conversations
from rlhf_pipeline.collectors.sampled_rows import sampled_conversations
from rlhf_pipeline.data.keys import ASSISTANT_MASK, TOKENS
from rlhf_pipeline.environments.verifiers import Verifiers
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import CHAT_TEMPLATE, response_template, talker
from trajectory_store import TrajectoryStore

pytestmark = pytest.mark.timeout(600)  # an agent of verifiers is a process of its own, a new one for each turn
SEAT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


@pytest.fixture(scope="module")
def tasksets() -> Iterator[None]:
    """The task sets of this folder, for this process and the servers that verifiers starts."""
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    folder, beside = str(Path(__file__).with_name("tasksets")), str(Path(sys.executable).parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
        patch.setenv("PATH", os.pathsep.join([beside, os.environ["PATH"]]))
        if shutil.which("uv") is None:
            pytest.skip("uv is not installed, with which verifiers starts its agents")
        yield


@pytest.fixture(scope="module")
def guesses(tasksets: None) -> Iterator[Verifiers]:
    """Several turns."""
    made = Verifiers("guess_digit", player=SEAT)
    yield made
    made.close()


def conversations(environment: Verifiers, policy: Any, *numbers: int, **changes: Any) -> list[Conversation]:
    """Pairs of conversations on a few tasks."""
    limits = {"group_size": 2, "max_new_tokens": 6, "max_turns": 3, "max_row_tokens": 90, "step_timeout_s": 300.0}
    runner = Conversations(
        environment,
        policy=policy,
        config=Collect(**{**limits, **changes}),
        temperature=1.0,
        seed=3,
        as_chat=True,
        template={},
    )
    prompts = environment.prompts().all_prompts()
    return runner.run([prompts[number] for number in numbers], list(numbers))


def check_rows(done: list[Conversation], policy: Any) -> None:
    """Sampled tokens, and no others, are masked and have the policy's log-probs; the row is what was said."""
    drawn = sampled_conversations(done, lambda _: "", group_size=2)
    lengths, assistant = drawn.lengths(TOKENS), drawn.numbers(ASSISTANT_MASK)
    ends = np.cumsum(lengths)
    for conversation, end, length in zip(done, ends.tolist(), lengths.tolist(), strict=True):
        assert conversation.row is not None
        said = torch.from_numpy(assistant[end - length : end])[None]
        scored = policy.log_probs(torch.tensor([conversation.row.ids]), torch.ones_like(said), said).detach()[0]
        sampled = torch.tensor(conversation.row.log_probs)
        assert torch.equal(sampled.isfinite(), said[0])
        torch.testing.assert_close(sampled[said[0]], scored[said[0]], rtol=0, atol=1e-5)
        marks = {"user": "U:", "assistant": "A:", "tool": "T:"}
        for message in conversation.messages:
            if message["role"] != "assistant":
                assert marks[message["role"]] + message["content"] in policy.tokenizer.decode(conversation.row.ids)


@pytest.mark.peer
@pytest.mark.slow
def test_several_turns(guesses):
    """Episodes go on turn by turn with the sampled tokens, and end with the rewards of task and environment."""
    policy = talker()
    done = conversations(guesses, policy, 1)
    assert max(conversation.num_turns for conversation in done) > 1, [
        (conversation.failure, conversation.messages) for conversation in done
    ]
    check_rows(done, policy)
    for conversation in done:
        texts = [message["content"] for message in conversation.messages[1:]]
        assert conversation.messages[0] == {"role": "user", "content": f"U{conversation.prompt.meta['number']}"}
        assert texts[1::2] == ["0:"] * (conversation.num_turns - 1)
        right = float(str(conversation.prompt.meta["number"]) in texts[-1])
        assert conversation.rewards == {"short": 0.25 / conversation.num_turns, "right": right}
        ended = "stop" if conversation.turn_stopped else "length"  # the last turn was cut at its limit of tokens
        assert conversation.finish_reason == (ended if right else "turns")
        assert conversation.info == {"metrics": {"turns": float(conversation.num_turns)}}


@pytest.mark.peer
@pytest.mark.slow
def test_tools(tasksets):
    """A call that the policy writes reaches the tool's server, and its result is the reply."""
    policy = talker()
    policy.tokenizer.response_template = response_template("sums_add")
    sums = Verifiers("add_digits", agent=SEAT)
    done = conversations(sums, policy, 0, 1)
    names = [tool["function"]["name"] for tool in done[0].at.tools.schemas]
    assert names == ["sums_add"]
    sums.close()
    check_rows(done, policy)
    answered = 0
    for conversation in done:
        for call, reply in zip(conversation.messages[1::2], conversation.messages[2::2], strict=False):
            digits = call["tool_calls"][0]["function"]["arguments"]["digits"]
            added = sum(int(one) for one in digits if one.isdigit())
            assert (reply["role"], reply["content"]) == ("tool", str(added))
            answered += added > 0
        last = conversation.messages[-1]["content"]
        assert conversation.rewards == {"right": 0.5 * (conversation.prompt.answer in last)}
    assert answered


@pytest.mark.peer
def test_what_goes_wrong_costs_one_conversation(guesses):
    """An error of the environment fails its conversation with its own words; other prompts are refused."""
    prompts = guesses.prompts().all_prompts()
    with pytest.raises(RuntimeError, match="no route"):
        asyncio.run(guesses().reset(prompts[9], 0))
    with pytest.raises(DefinitionError, match="do not come from this environment"):
        asyncio.run(Verifiers("guess_digit", player=SEAT)().reset(prompts[0], 0))

    async def left() -> Any:
        episode = guesses()
        await episode.reset(prompts[1], 0)
        again = await episode.step(Turn(text="2"))
        return again.history[-1], (await episode.end("failed")).rewards

    assert asyncio.run(left()) == ({"role": "user", "content": "0:"}, {})


@pytest.mark.peer
def test_the_page(tasksets):
    """The definition of the page: eight tasks to learn from and two others to evaluate with."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "Verifiers(" in code)
    space: dict[str, Any] = {}
    exec(block, space)
    pipeline = space["guess_digit"]()
    numbers = [
        [prompt.meta["number"] for prompt in source.all_prompts()]
        for source in (pipeline.prompts, pipeline.evaluate.prompts)
    ]
    assert numbers == [[*range(2, 10)], [0, 1]]


def test_without_the_package(monkeypatch):
    """One sentence with the command that installs it."""
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(DefinitionError, match=r'pip install "rlhf-pipeline\[verifiers\]"'):
        _ = Verifiers("guess_digit").env


@pytest.mark.peer
@pytest.mark.slow
def test_the_port_of_an_environment(tasksets, tmp_path):
    """The definition of docs/coming_from.md learns from verifiers' own rewards, of task and environment, by name."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "Verifiers(" in code)
    space: dict[str, Any] = {}
    exec(block, space)
    ported = space["guess"]()
    policy = TinyPolicy(alphabet="0123456789+UAT:\n", hidden_size=32, num_heads=2, chat_template=CHAT_TEMPLATE)
    small = {"prompts": space["port"].prompts(limit=2), "learn": Learn(steps=1), "policy": policy}
    collect = replace(ported.collect, max_turns=2, max_new_tokens=4, step_timeout_s=300.0)
    run(replace(ported, collect=collect, **small), run_dir=tmp_path / "run")
    space["port"].close()
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        rows = store.read(store.ids())
    assert len(rows["meta"]) == 4
    for number, meta in enumerate(map(json.loads, rows["meta"])):
        turns = int((rows["turn_spans"][number][:, 1] == 1).sum())
        right = float(str(meta["prompt"]["number"]) in meta["messages"][-1]["content"])
        assert rows["reward_right"][number] == right
        assert rows["reward_short"][number] == pytest.approx(0.25 / turns)
        assert rows["task_reward"][number] == pytest.approx(right + 0.25 / turns)
        assert rows["turn_rewards"][number].sum() == pytest.approx(rows["task_reward"][number])
