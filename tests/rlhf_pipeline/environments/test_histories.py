"""Which returned turn the messages of a request continue."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_pipeline.environments.histories import Continued, Histories, canonical

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
    assert histories.find([ASKED, CALLS, TOLD, SAID, more], tools=["add"]) == Continued("answer", 4)
    assert histories.find([ASKED, CALLS, TOLD], tools=["add"]) == Continued("call", 2)
    assert histories.find([ASKED], tools=["add"]) == Continued()


def test_changed_histories_are_recognized(histories):
    """A turn with other text, and a turn after other messages; an example of a program's is neither."""
    more = {"role": "user", "content": "Sure?"}
    changed = [ASKED, CALLS, TOLD, {**SAID, "content": "It is 43."}, more]
    assert histories.find(changed, tools=["add"]) == Continued("call", 2, is_edited=True)
    assert histories.find([more, SAID, more], tools=["add"]) == Continued(is_edited=True)
    assert histories.find([more, {**SAID, "content": "Yes."}, more], tools=["add"]) == Continued()


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
    expected = Continued("call", 2) if same else Continued(is_edited=True)
    assert histories.find([ASKED, turn, TOLD], tools=["add"]) == expected


def test_other_tools_are_another_conversation(histories):
    """Tools stand at the beginning of what the policy reads."""
    assert histories.find([ASKED, CALLS, TOLD], tools=["add", "sub"]).place is None


def test_texts_cannot_imitate_several_messages():
    """Each message is closed by what JSON cannot contain unescaped."""
    joined = {"role": "user", "content": 'a", [], null]\n["user", "b'}
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    histories = Histories[int]()
    histories.add(two, 1)
    assert histories.find([joined]) == Continued()
    assert canonical(joined) != "\n".join(map(canonical, two))
