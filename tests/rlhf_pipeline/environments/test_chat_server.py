"""The local server of agent programs, with the real `openai` client, and a function in place of a policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlhf_pipeline.environments.chat_requests import (
    HONOURED,
    IGNORED,
    PARAMETERS,
    REJECTED,
    ChatChoice,
    ChatError,
    parameter_table,
    parse,
)
from rlhf_pipeline.environments.chat_server import MOST_WAITING, ChatSample, ChatSession, chat_server
from tests.rlhf_pipeline.environments.lossy import LosesFirstResponse

openai = pytest.importorskip("openai")

ASKED = [{"role": "user", "content": "2 + 2?"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "add000001", "function": {"name": "add", "arguments": {"a": 2, "b": [2]}}}


@asynccontextmanager
async def served(
    answer: Callable[[ChatSample], ChatChoice | None], session: ChatSession | None = None
) -> AsyncIterator[tuple[Any, ChatSession]]:
    """A client of a conversation, and its requests; `answer` responds to each sample."""
    session = session or ChatSession()
    key, ended = chat_server().open(session), asyncio.get_running_loop().create_future()

    async def respond() -> None:
        while True:
            await session.arrives(ended)
            while (sample := session.take()) is not None:
                choice = answer(sample)
                if choice is not None:
                    session.answer(sample, choice)

    responding = asyncio.ensure_future(respond())
    async with openai.AsyncOpenAI(base_url=chat_server().address, api_key=key, max_retries=2) as client:
        try:
            yield client, session
        finally:
            responding.cancel()
            session.close(ChatError("over"))
            chat_server().close([key])


def numbered(sample: ChatSample) -> ChatChoice:
    """The number of the sample."""
    return ChatChoice(message={"content": f"sample {sample.number}"}, completion_tokens=3)


def test_responses():
    """Text, calls, several choices and streams arrive as OpenAI's client reads them."""

    async def ask() -> None:
        async with served(numbered) as (client, _):
            create = client.chat.completions.create
            whole = await create(model="mine", messages=ASKED, n=3, tools=[ADD])
            assert (whole.model, whole.usage.completion_tokens) == ("mine", 9)
            assert [one.message.content for one in whole.choices] == ["sample 0", "sample 1", "sample 2"]
            assert [one.id for one in (await client.models.list()).data] == ["policy"]
        calling = ChatChoice(message={"content": "", "tool_calls": [CALL, CALL]}, finish_reason="tool_calls")
        async with served(lambda _: calling) as (client, _):
            whole = await client.chat.completions.create(model="m", messages=ASKED, tools=[ADD])
            (first, _) = whole.choices[0].message.tool_calls
            assert (first.id, first.function.name) == ("add000001", "add")
            assert json.loads(first.function.arguments) == {"a": 2, "b": [2]}
            async with client.chat.completions.stream(model="m", messages=[*ASKED, *ASKED]) as stream:
                streamed = await stream.get_final_completion()
            assert streamed.choices[0].message.tool_calls[1].function.arguments == '{"a": 2, "b": [2]}'
            assert streamed.choices[0].finish_reason == "tool_calls"

    asyncio.run(ask())


def test_streams_have_usage_on_request():
    """Chunks of finished text, and numbers of tokens if the client asks for them."""

    async def ask() -> list[Any]:
        async with served(numbered) as (client, _):
            options = {"include_usage": True}
            stream = await client.chat.completions.create(
                model="m", messages=ASKED, stream=True, stream_options=options, n=2
            )
            return [chunk async for chunk in stream]

    chunks = asyncio.run(ask())
    texts = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
    assert texts == ["sample 0", "sample 1"]
    assert chunks[-1].usage.completion_tokens == 6


def test_a_retry_receives_the_same_response():
    """After a dropped connection the client repeats its request; so may others, unmarked. One sample is drawn."""
    drawn: list[ChatSample] = []

    def late(sample: ChatSample) -> ChatChoice:
        drawn.append(sample)
        return ChatChoice(message={"content": f"drawn {len(drawn)}"})

    async def ask() -> None:
        async with httpx.AsyncClient(transport=LosesFirstResponse()) as drops, served(late) as (client, session):
            flaky = client.with_options(http_client=drops)
            first = await flaky.chat.completions.create(model="m", messages=ASKED)
            assert first.choices[0].message.content == "drawn 1"
            assert session.num_repeats == 0  # the client marks its retry
            again = await client.chat.completions.create(model="m", messages=ASKED)
            other = await client.chat.completions.create(model="m", messages=ASKED, seed=7)
            assert [one.choices[0].message.content for one in (again, other)] == ["drawn 1", "drawn 2"]
            assert session.num_repeats == 1
        async with served(numbered, ChatSession("sample")) as (client, _):
            both = await asyncio.gather(*(client.chat.completions.create(model="m", messages=ASKED) for _ in range(2)))
            assert {one.choices[0].message.content for one in both} == {"sample 0", "sample 1"}

    asyncio.run(ask())


def test_floods_and_foreign_keys_are_rejected():
    """A conversation has room for some requests, and is reached by its own key alone; others go on."""

    async def ask() -> None:
        async with served(lambda _: None) as (flooding, stuck), served(numbered) as (client, _):
            create = flooding.chat.completions.create
            asked = [create(model="m", messages=ASKED, seed=seed) for seed in range(300)]
            pending = [asyncio.ensure_future(one) for one in asked]
            other = await client.chat.completions.create(model="m", messages=ASKED)
            assert other.choices[0].message.content == "sample 0"
            wrong = flooding.with_options(api_key="sk-of-another")
            with pytest.raises(openai.AuthenticationError, match="there is no conversation with this API key"):
                await wrong.chat.completions.create(model="m", messages=ASKED)
            while sum(one.done() for one in pending) < len(pending) - MOST_WAITING:
                await asyncio.sleep(0.01)
            assert {type(one.exception()) for one in pending if one.done()} == {openai.RateLimitError}
            stuck.close(ChatError("the conversation has ended", code="conversation_ended"))
            outcomes = await asyncio.gather(*pending, return_exceptions=True)
            ended = [one for one in outcomes if isinstance(one, openai.BadRequestError)]
            assert len(ended) == MOST_WAITING
            assert {getattr(one, "code", None) for one in ended} == {"conversation_ended"}
            assert len(outcomes) == 300

    asyncio.run(ask())


def test_oversized_and_unreadable_bodies():
    """Errors have OpenAI's form."""
    session = ChatSession()
    key, address = chat_server().open(session), f"{chat_server().address}/chat/completions"
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(headers=headers) as client:
        large = client.post(address, content=b" " * (17 << 20))
        assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
        broken = client.post(address, content=b"{")
        assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
        assert client.get(address.replace("chat/completions", "files")).status_code == 404
        assert client.post(address, headers={"authorization": "Bearer none"}).status_code == 401
    chat_server().close([key])


ACCEPTED: dict[str, list[Any]] = {
    "messages": [ASKED, [{"role": "developer", "content": [{"type": "text", "text": "Add."}]}]],
    "model": ["gpt-5"],
    "tools": [[ADD], []],
    "tool_choice": ["auto", "none"],
    "parallel_tool_calls": [True],
    "n": [1, 16],
    "seed": [7],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}],
    "response_format": [{"type": "text"}],
    "logprobs": [False],
    "stop": [[], ""],
    "logit_bias": [{}],
    "presence_penalty": [0.0],
    "frequency_penalty": [0],
    "modalities": [["text"]],
    "functions": [[]],
    "function_call": ["auto"],
    "top_logprobs": [0],
}
REFUSED: dict[str, list[Any]] = {
    "messages": [
        [],
        "text",
        [{"role": "robot", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
    "tools": [[{"type": "web_search"}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "add"}}],
    "parallel_tool_calls": [False],
    "n": [0, 17, True],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
    "logprobs": [True],
    "top_logprobs": [2],
    "stop": ["\n", ["a"]],
    "logit_bias": [{"1": 5}],
    "presence_penalty": [0.5],
    "frequency_penalty": [0.5],
    "modalities": [["text", "audio"]],
    "functions": [[{"name": "add"}]],
    "function_call": [{"name": "add"}],
    "audio": [{"voice": "x"}],
    "prediction": [{"type": "content"}],
    "web_search_options": [{"user_location": {}}],
}


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda one: one.name)
def test_each_parameter_is_treated_as_the_table_states(parameter):
    """Honoured, ignored, or rejected in OpenAI's form; null is always accepted."""
    plain = parse(json.dumps({"messages": ASKED}).encode())
    for value in ACCEPTED.get(parameter.name, ["any", 0.5] if parameter.treatment == IGNORED else [None]):
        request = parse(json.dumps({"messages": ASKED, parameter.name: value}).encode())
        if parameter.treatment == IGNORED:
            assert (request.messages, request.tools, request.count) == (plain.messages, plain.tools, plain.count)
    refused = REFUSED.get(parameter.name, [])
    assert bool(refused) or parameter.treatment != REJECTED
    for value in refused:
        with pytest.raises(ChatError) as rejected:
            parse(json.dumps({"messages": ASKED, parameter.name: value}).encode())
        assert rejected.value.param == parameter.name
    assert parameter.treatment in (HONOURED, IGNORED, REJECTED)


def test_what_is_honoured_has_an_effect():
    """Tools are shown unless the choice is `none`, and a seed draws another sample."""
    bodies = [{}, {"tools": [ADD]}, {"tools": [ADD], "tool_choice": "none"}, {"seed": 1}, {"seed": 2}, {"n": 2}]
    requests = [parse(json.dumps({"messages": ASKED, **body}).encode()) for body in bodies]
    assert [len(one.tools) for one in requests] == [0, 1, 0, 0, 0, 0]
    assert len({one.digest for one in requests}) == len(requests)
    assert [one.variant == "" for one in requests] == [True, True, True, False, False, True]
    assert requests[3].variant != requests[4].variant
    assert requests[5].count == 2
    with pytest.raises(ChatError, match="unrecognized request argument: top_k"):
        parse(json.dumps({"messages": ASKED, "top_k": 5}).encode())


def test_the_table_on_the_page():
    """The page prints the table of the code."""
    page = Path(__file__).resolve().parents[3] / "docs" / "environments.md"
    assert parameter_table() in page.read_text(encoding="utf-8")


def test_messages_are_read_as_templates_need_them():
    """Arguments are parsed, and a tool's message has the name of the call that it answers."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    told = [{"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]}]
    request = parse(json.dumps({"messages": [*ASKED, *said, *told]}).encode())
    parsed = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert request.messages[1:] == (
        {"role": "assistant", "content": "", "tool_calls": [parsed]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
    )
    assert MOST_WAITING >= 16  # room for the largest n
