"""Which returned turn the messages of a request continue."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_pipeline.environments.histories import Histories, canonical

ASKED = {"role": "user", "content": "What is 17 + 25?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": 25}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "content": "42", "tool_call_id": "c1"}
SAID = {"role": "assistant", "content": "It is 42."}


def call(**changes: Any) -> dict[str, Any]:
    """The turn with the call, as a client sends it back, changed."""
    function = {"name": "add", "arguments": '{"b":25,  "a":17}', **changes}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": function.pop("id", "c1"), "function": function}],
    }


@pytest.fixture
def histories() -> Histories[str]:
    """Two turns were returned, with a tool."""
    found = Histories[str]()
    found.add([ASKED, CALLS], "call", tools=["add"])
    found.add([ASKED, CALLS, TOLD, SAID], "answer", tools=["add"])
    return found


def test_a_turn_is_found_by_the_whole_history(histories):
    """The newest turn counts, whatever follows it."""
    more = {"role": "user", "content": "Sure?"}
    assert histories.longest([ASKED, CALLS, TOLD, SAID, more], tools=["add"]) == ("answer", 4)
    assert histories.longest([ASKED, CALLS, TOLD], tools=["add"]) == ("call", 2)
    assert histories.longest([ASKED, CALLS, TOLD, {**SAID, "content": "It is 43."}, more], tools=["add"]) == ("call", 2)
    assert histories.longest([more, SAID], tools=["add"]) == (None, 0)


@pytest.mark.parametrize(
    ("turn", "same"),
    [
        (call(), True),
        ({**call(), "reasoning_content": "Add them.", "refusal": None}, True),
        (call(arguments=json.dumps({"a": 17, "b": 26})), False),
        (call(name="sum"), False),
        (call(id="c2"), False),
        ({**call(), "content": " "}, False),
    ],
)
def test_calls_are_compared_as_values(histories, turn, same):
    """Arguments may be written in another way; name, values, id and text may not change."""
    assert histories.longest([ASKED, turn, TOLD], tools=["add"]) == (("call", 2) if same else (None, 0))


def test_other_tools_are_another_conversation(histories):
    """Tools stand at the beginning of what the policy reads."""
    assert histories.longest([ASKED, CALLS, TOLD], tools=["add", "sub"]) == (None, 0)


def test_texts_cannot_imitate_several_messages():
    """Each message is closed by what JSON cannot contain unescaped."""
    joined = {"role": "user", "content": 'a", [], null]\n["user", "b'}
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    histories = Histories[int]()
    histories.add(two, 1)
    assert histories.longest([joined]) == (None, 0)
    assert canonical(joined) != "\n".join(map(canonical, two))
