"""Agent programs with the real `openai` client, beside environments that have the same conversations."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rlhf_pipeline import (
    AgentProgram,
    Collect,
    Learn,
    Pipeline,
    Prompt,
    Prompts,
    Step,
    TinyPolicy,
    Turn,
    scratch_policy,
)
from rlhf_pipeline.collectors.conversations import Conversation, Conversations
from rlhf_pipeline.data.keys import POLICY_ROLE
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.report.drift import drifted
from rlhf_pipeline.report.stored import Stored
from rlhf_pipeline.run.start import run as run_pipeline
from rlhf_pipeline.user_code.runtime import process_runtime
from tests.processes import Children
from tests.rlhf_pipeline.environments.lossy import LosesFirstResponse
from tests.rlhf_pipeline.small import CHAT_TEMPLATE, response_template, talker

openai = pytest.importorskip("openai")

ADD: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add digits.",
        "parameters": {"type": "object", "properties": {"digits": {"type": "string"}}},
    },
}


def policy(seed: int = 0) -> Any:
    """A tiny policy whose turns have calls."""
    made = talker(seed)
    made.tokenizer.response_template = response_template("add")
    return made


def run(environment: Any, *texts: str, model: Any = None, **changes: Any) -> list[Conversation]:
    """Groups of conversations, one for each text."""
    limits = {"group_size": 2, "max_new_tokens": 6, "max_turns": 12, "max_row_tokens": 120, "step_timeout_s": 60.0}
    runner = Conversations(
        environment,
        policy=model or policy(),
        config=Collect(**{**limits, **changes}),
        temperature=1.0,
        seed=3,
        as_chat=True,
        template={},
    )
    return runner.run([Prompt(text=text) for text in texts], list(range(len(texts))))


def test_a_turn_that_no_request_waits_for_is_an_error():
    """A turn before the first request of the program."""
    with pytest.raises(RuntimeError, match="no request is waiting for this turn"):
        asyncio.run(AgentProgram(everything)().step(Turn(text="1")))


def log_probs_of(conversations: list[Conversation]) -> Any:
    """The log-probs of all rows, one after the other."""
    rows = [row.row.log_probs for one in conversations for row in one.sampled_rows if row.row is not None]
    return np.concatenate(rows).astype(np.float32)


def rows_of(conversations: list[Conversation]) -> list[Any]:
    """What else is stored of conversations: tokens, turns, messages and rewards of each row."""
    found: list[Any] = []
    for one in conversations:
        rows = [(row.row, row.messages) for row in one.sampled_rows if row.row is not None]
        found.append((one.rewards, one.finish_reason, one.info))
        found += [(row.ids, row.mask, row.turn_spans, messages) for row, messages in rows]
    return found


def told(message: Any) -> list[dict[str, Any]]:
    """What follows a turn: the results of its calls, or a question."""
    calls = [dict(call) for call in message.get("tool_calls") or ()]
    if not calls:
        return [{"role": "user", "content": "12"}]
    return [{"role": "tool", "tool_call_id": call["id"], "name": "add", "content": "7"} for call in calls]


async def everything(base_url: str, api_key: str, prompt: Prompt) -> dict[str, float]:
    """Two turns with tools, one of them streamed, and a retry; a sub-agent; a third turn; an edited history."""
    async with httpx.AsyncClient(transport=LosesFirstResponse()) as drops:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=drops)
        main: list[Any] = [{"role": "user", "content": prompt.text}]

        async def turn() -> None:
            answer = await client.chat.completions.create(model="policy", messages=main, tools=[ADD])
            main.append(answer.choices[0].message.model_dump(exclude_none=True))
            main.extend(told(main[-1]))

        await turn()
        text, calls = "", list[dict[str, Any]]()
        stream = await client.chat.completions.create(model="policy", messages=main, tools=[ADD], stream=True)
        async for chunk in stream:
            delta = chunk.choices[0].delta
            text += delta.content or ""
            calls += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or ()]
        main.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
        main.extend(told(main[-1]))
        asked = [{"role": "user", "content": "4+4"}]
        agent = await client.chat.completions.create(model="policy", messages=asked)
        asked += [agent.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "9"}]
        agent = await client.chat.completions.create(model="policy", messages=asked)
        await turn()
        edited = [main[0], {"role": "assistant", "content": "11"}, {"role": "user", "content": "0"}]
        await client.chat.completions.create(model="policy", messages=edited, tools=[ADD])
    return {"length": float(len(main)), "agent": float(len(agent.choices[0].message.content))}


class Everything:
    """The same conversations, of an environment."""

    parallel = True  # as a program, so that the same rows share batches
    tools = (ADD,)

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Show the prompt."""
        self.text, self.length = prompt.text, 1

    def step(self, turn: Turn) -> Step:
        """Say what comes next."""
        calls = [{"id": call["id"]} for call in turn.tool_calls]
        reply = told({"tool_calls": calls})
        if turn.number in (1, 2, 5):
            self.length += 1 + len(reply)
        if turn.number == 1:
            return Step(reply)
        if turn.number == 2:
            self.reply = reply
            return Step(history=[{"role": "user", "content": "4+4"}], tools=())
        if turn.number == 3:
            return Step([{"role": "user", "content": "9"}])
        if turn.number == 4:
            self.agent = len(turn.text)
            return Step(self.reply, row=0)
        if turn.number == 5:
            edited = [("user", self.text), ("assistant", "11"), ("user", "0")]
            return Step(history=[{"role": role, "content": text} for role, text in edited])
        return Step(done=True, rewards={"length": self.length, "agent": self.agent})


class OnlyRequests:
    """The slot engine as one that samples requests, as a server does."""

    name, version = "requests", 0

    def __init__(self, engine: Any) -> None:
        self.generate, self.abort, self.close = engine.generate, engine.abort, engine.close


@pytest.mark.parametrize("is_server", [False, True])
def test_rows_equal_those_of_an_environment(is_server):
    """Tools, a stream, a retry, a sub-agent and an edited history: the same tokens, log-probs and messages."""
    models = [policy(), policy()]
    if is_server:
        for model in models:
            model.engine = OnlyRequests(model.engine)
    asked = run(AgentProgram(everything), "1+2", "34", model=models[0])
    answered = run(Everything, "1+2", "34", model=models[1])
    assert [one.failure for one in (*asked, *answered)] == [None] * 8
    assert rows_of(asked) == rows_of(answered)
    bits = 1e-5 if is_server else 0.0  # the batches of a server, and so last bits, are not reproducible
    np.testing.assert_allclose(log_probs_of(asked), log_probs_of(answered), rtol=0, atol=bits)
    assert {len(one.sampled_rows) for one in asked} == {3}
    assert any(row.messages[1].get("tool_calls") for one in asked for row in one.sampled_rows)
    assert [one.edited_histories for one in asked] == [1] * 4


# One program among others


async def turns(base_url: str, api_key: str, prompt: Prompt) -> float:
    """Three turns; the reward is the number of letters."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        for _ in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "5"}]
        return float(sum(len(message["content"]) for message in messages))


def turns_in_a_thread(base_url: str, api_key: str, prompt: Prompt) -> float:
    """The same, without a coroutine."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        for _ in range(3):
            answer = client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "5"}]
        return float(sum(len(message["content"]) for message in messages))


COMMAND = """
import json, os, sys
import openai

prompt = json.loads(sys.stdin.readline())
client = openai.OpenAI()
messages = [{"role": "user", "content": prompt["text"]}]
for _ in range(3):
    answer = client.chat.completions.create(model="policy", messages=messages)
    messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "5"}]
print("so many letters:")
print(json.dumps({"reward": sum(len(message["content"]) for message in messages)}))
"""


@pytest.mark.parametrize("program", [turns_in_a_thread, [sys.executable, "-c", COMMAND]], ids=["def", "command"])
def test_a_function_and_a_command_have_the_same_rows(program):
    """A `def` runs in a thread, a command in a process; the last line of its output is the reward."""
    found = run(AgentProgram(program), "1+2", "3")
    assert [one.failure for one in found] == [None] * 4
    coroutine = run(AgentProgram(turns), "1+2", "3")
    assert rows_of(found) == rows_of(coroutine)
    np.testing.assert_array_equal(log_probs_of(found), log_probs_of(coroutine))
    assert all(one.rewards["reward"] > 0 for one in found)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print('no reward')", "ends with 'no reward'; the last line must be the reward"),
        ("import sys; sys.exit('no key')", "exited with status 1: no key"),
        ("print(1.0)", "ended before its first request"),
    ],
)
def test_a_command_without_a_reward_fails_its_conversations(code, error):
    """Its error is recorded, as one of an environment is."""
    (one, _) = run(AgentProgram([sys.executable, "-c", code]), "1+2")
    assert one.failure is not None
    assert (one.failure.kind, one.finish_reason) == ("tool_error", "failed")
    assert error in one.failure.error


@pytest.mark.slow
def test_a_command_and_a_function_that_hang_are_ended(tmp_path):
    """At their deadline; the processes of the command end with it."""
    file = tmp_path / "pids"
    code = (
        "import os, subprocess, time, openai\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(file)!r}, 'a').write(f'{{os.getpid()}}\\n{{child.pid}}\\n')\n"
        "messages = [{'role': 'user', 'content': '1'}]\n"
        "openai.OpenAI().chat.completions.create(model='policy', messages=messages)\n"
        "time.sleep(600)\n"
    )

    def hangs(base_url: str, api_key: str, prompt: Prompt) -> None:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = [{"role": "user", "content": prompt.text}]
            client.chat.completions.create(model="policy", messages=messages)
        time.sleep(30)

    for program in ([sys.executable, "-c", code], hangs):
        began = time.monotonic()
        found = run(AgentProgram(program), "1", step_timeout_s=10.0)
        assert [one.failure.kind for one in found if one.failure is not None] == ["timeout"] * 2
        assert time.monotonic() - began < 28
    pids = [int(line) for line in file.read_text(encoding="utf-8").split()]
    assert len(pids) == 4
    for pid in pids:
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text(encoding="utf-8").split(") ")[1].startswith("Z")


def test_a_program_at_the_limit_of_turns():
    """Its next request is rejected; what it returns then counts, and an error is a reward of 0."""

    async def goes_on(base_url: str, api_key: str, prompt: Prompt) -> Mapping[str, float]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            asked = 0
            while True:
                try:
                    messages: Any = [{"role": "user", "content": str(asked)}]
                    await client.chat.completions.create(model="policy", messages=messages)
                except openai.BadRequestError as error:
                    if prompt.text == "0":
                        raise
                    return {"asked": asked, "ended": float(error.code == "conversation_ended")}
                asked += 1

    returned, _, raised, _ = run(AgentProgram(goes_on), "1", "0", max_turns=3)
    assert (returned.rewards, returned.finish_reason) == ({"asked": 3.0, "ended": 1.0}, "turns")
    assert (raised.rewards, raised.finish_reason, raised.failure) == ({}, "turns", None)


ROGUES = ("1", "2", "3", "4", "5")


async def some_are_rogues(base_url: str, api_key: str, prompt: Prompt) -> float:
    """A program that waits forever, one that blocks the loop, a flood, a foreign conversation, a foreign key."""
    if prompt.text not in ROGUES:
        return await turns(base_url, api_key, prompt)
    key = "sk-of-another" if prompt.text == "5" else api_key
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
        messages: list[Any] = [{"role": "user", "content": prompt.text}]
        await client.chat.completions.create(model="policy", messages=messages)
        if prompt.text == "1":
            await asyncio.sleep(3600)
        if prompt.text == "2":
            time.sleep(12)
        if prompt.text == "2":
            await client.close()
            time.sleep(30)
        if prompt.text == "3":
            create = client.chat.completions.create
            flood = [create(model="policy", messages=messages, seed=seed) for seed in range(80)]
            await asyncio.gather(*flood, return_exceptions=True)
        others = [{"role": "user", "content": "10"}, {"role": "assistant", "content": "7"}]
        await client.chat.completions.create(model="policy", messages=[*others, *messages])
    return 0.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # connections of abandoned programs
def test_programs_run_at_the_same_time_and_apart():
    """64 programs, of which ten go wrong: the others have the rows that they have alone."""
    texts = [str(number) for number in range(1, 33)]
    active: list[int] = [0, 0]

    async def counted(base_url: str, api_key: str, prompt: Prompt) -> float:
        active[0] += 1
        active[1] = max(active)
        try:
            return await some_are_rogues(base_url, api_key, prompt)
        finally:
            active[0] -= 1

    began = time.monotonic()
    found = run(AgentProgram(counted), *texts, step_timeout_s=8.0)
    assert time.monotonic() - began < 60
    assert active[1] == 64
    kinds = [None if one.failure is None else one.failure.kind for one in found]
    assert kinds[:10] == ["timeout"] * 4 + [None] * 4 + ["tool_error"] * 2
    assert [one.finish_reason for one in found[4:6]] == ["turns"] * 2
    assert [len(one.sampled_rows) for one in found[6:8]] == [2, 2]
    assert kinds[10:] == [None] * 54
    alone = run(AgentProgram(turns), *texts)
    for one, other in zip(found[10:], alone[10:], strict=True):
        assert one.rewards == other.rewards
        assert one.row is not None
        assert other.row is not None
        assert one.row.ids == other.row.ids
        np.testing.assert_allclose(one.row.log_probs, other.row.log_probs, atol=1e-5)
    gc.collect()  # the connections, here and not in a later test


@pytest.mark.parametrize(("repeats", "is_server"), [("retry", False), ("sample", False), ("retry", True)])
def test_the_order_of_requests_does_not_change_samples(repeats, is_server):
    """Sub-agents that begin together, continuations of one turn, and equal requests, in two orders of arrival."""

    def asks(late: int) -> Any:
        async def program(base_url: str, api_key: str, prompt: Prompt) -> None:
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

                async def ask(place: int, *texts: str) -> Any:
                    await asyncio.sleep(0.3 * (place == late))
                    roles = ("user", "assistant") * 2
                    messages: Any = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
                    answer = await client.chat.completions.create(model="policy", messages=messages)
                    return answer.choices[0].message.content

                await asyncio.gather(ask(0, "1"), ask(1, "2"))
                first = await ask(2, prompt.text)
                await asyncio.gather(ask(0, prompt.text, first, "3"), ask(1, prompt.text, first, "4"))
                await asyncio.gather(ask(0, "9"), ask(1, "9"))

        return program

    def sampled(late: int) -> list[Any]:
        model = policy()
        if is_server:
            model.engine = OnlyRequests(model.engine)
        found = run(AgentProgram(asks(late), repeats=repeats), "12", model=model, max_new_tokens=8)
        assert [one.failure for one in found] == [None] * 2
        # A turn with all that stands before it; which of two rows it is in depends on the order.
        return [
            sorted(
                (row.row.ids[:start], row.row.ids[start:end])
                for row in one.sampled_rows
                if row.row is not None
                for (start, role), end in zip(
                    row.row.turn_spans, [at for at, _ in row.row.turn_spans[1:]] + [len(row.row.ids)], strict=True
                )
                if role == POLICY_ROLE
            )
            for one in found
        ]

    first, second = sampled(0), sampled(1)
    assert first == second
    assert [len(turns) for turns in first] == [6 if repeats == "retry" else 7] * 2


REWRITES = CHAT_TEMPLATE.replace(
    "m.content }}", "(m.content if loop.last or m.role != 'assistant' else m.content.split('+')[-1]) }}"
)
"""Drops what stands before a plus in earlier turns."""


class Asks:
    """The conversation of `turns`."""

    parallel = True

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Show the prompt."""
        self.length = len(prompt.text)

    def step(self, turn: Turn) -> Step:
        """Ask three times."""
        self.length += len(turn.text) + 1
        if turn.number == 3:
            return Step(done=True, rewards={"reward": self.length})
        return Step([{"role": "user", "content": "5"}])


def test_a_template_that_rewrites_the_turns_of_a_program():
    """With `collect.history="rewritten"` the policy reads what the template shows; the program changed nothing."""
    found = []
    for environment in (AgentProgram(turns), Asks):
        model = policy()
        model.tokenizer.chat_template = REWRITES
        found.append(run(environment, "1+2", "34", "7", model=model, history="rewritten", max_new_tokens=10))
    asked, answered = found
    assert rows_of(asked) == rows_of(answered)
    np.testing.assert_array_equal(log_probs_of(asked), log_probs_of(answered))
    assert {len(one.sampled_rows) for one in asked} > {1}
    assert {one.edited_histories for one in asked} == {0}


@pytest.mark.slow
def test_members_may_begin_with_other_messages(tmp_path):
    """A program that shows each member something else: the rows are stored, and nothing is reported as damage."""
    counts = iter(range(1000))

    async def program(base_url: str, api_key: str, prompt: Prompt) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = [{"role": "user", "content": f"{next(counts)}+{prompt.text}"}]
            answer = await client.chat.completions.create(model="policy", messages=messages)
        return float("1" in answer.choices[0].message.content)

    letters = TinyPolicy(
        alphabet="0123456789+UAT:\n", hidden_size=16, num_layers=1, num_heads=2, chat_template=CHAT_TEMPLATE
    )
    pipeline = Pipeline(
        name="others",
        policy=letters,
        prompts=Prompts(rows=[{"question": str(number), "answer": ""} for number in range(4)]),
        environment=AgentProgram(program, has_effects=True),
        collect=Collect(prompts_per_rollout=2, group_size=2, max_new_tokens=4),
        learn=Learn(steps=2),
    )
    run_pipeline(pipeline, run_dir=tmp_path / "run")
    with Stored(tmp_path / "run" / "store") as stored:
        assert len(stored.store) == 8
        assert [*drifted(stored)] == []


def test_several_choices_are_rows():
    """Each choice is a row, and each may be continued."""

    async def program(base_url: str, api_key: str, prompt: Prompt) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            asked: list[Any] = [{"role": "user", "content": prompt.text}]
            answer = await client.chat.completions.create(model="policy", messages=asked, n=3)
            texts = [one.message.content for one in answer.choices]
            assert len({*texts}) == 3
            for text in texts:
                more = [*asked, {"role": "assistant", "content": text}, {"role": "user", "content": "4"}]
                await client.chat.completions.create(model="policy", messages=more)
        return 1.0

    (one, other) = run(AgentProgram(program), "12")
    assert (one.failure, other.failure) == (None, None)
    assert [len(row.turns) for row in one.sampled_rows] == [2, 2, 2]
    assert one.edited_histories == 0


def test_a_turn_that_was_changed_keeps_the_tokens_before_it(children: Children):
    """A trimmed second turn begins a new row with the stored tokens of the first one; a process reports it once."""
    children.call(change_a_turn).succeed()


def change_a_turn() -> None:
    """What the test before says, in a process that has reported nothing."""

    async def program(base_url: str, api_key: str, prompt: Prompt) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = [{"role": "user", "content": prompt.text}]
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": "6"})
            messages[3] = {**messages[3], "content": messages[3]["content"] + "1"}
            await client.chat.completions.create(model="policy", messages=messages)
        return 1.0

    (one, _) = run(AgentProgram(program), "12")
    assert one.failure is None
    first, second = (row.row for row in one.sampled_rows)
    assert first is not None
    assert second is not None
    (_, reply, last) = first.turn_spans
    shared = last[0]
    assert second.ids[: reply[0]] == first.ids[: reply[0]]
    assert second.ids[:shared] == first.ids[:shared]
    assert not any(second.mask[: second.num_prompt])
    assert one.edited_histories == 1
    assert (
        sum(
            "a turn of the policy whose text or preceding messages were changed" in notice
            for notice in process_runtime().take_notices()
        )
        == 1
    )


def test_what_is_no_program():
    """One sentence each."""
    for odd, error in (("python agent.py", "as a list of arguments"), ([], "as a list of arguments")):
        with pytest.raises(DefinitionError, match=error):
            AgentProgram(odd)
    with pytest.raises(DefinitionError, match="'retry' or 'sample'"):
        AgentProgram(turns, repeats="never")  # type: ignore[arg-type]


def page_blocks() -> list[str]:
    """The programs of docs/environments.md."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")
    return [code for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "AgentProgram" in code]


@pytest.mark.parametrize("code", page_blocks(), ids=["answer", "checked"])
def test_the_programs_of_the_page(code):
    """Each runs as printed, with a policy that knows its letters."""
    space: dict[str, Any] = {}
    exec(code, space)
    letters = "".join(sorted({*"What is 2 + 3?No. Again?Is this right?U:A\n0123456789T+"}))
    model = scratch_policy(letters, hidden_size=16, num_layers=1, num_heads=2, seed=0)
    model.tokenizer.chat_template = CHAT_TEMPLATE
    environment = space.get("environment") or space["sums"]().environment
    runner = Conversations(
        environment,
        policy=model,
        config=Collect(group_size=2, max_new_tokens=4, max_turns=3, max_row_tokens=200),
        temperature=1.0,
        seed=0,
        as_chat=True,
        template={},
    )
    found = runner.run([Prompt(text="What is 2 + 3?", answer="5")], [0])
    assert [one.failure for one in found] == [None, None]
    assert {one.num_turns for one in found} == {3}
    assert {one.finish_reason for one in found} <= {"stop", "length"}
