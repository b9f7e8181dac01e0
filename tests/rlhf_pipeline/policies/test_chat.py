"""Prompts to ids, completions to text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline import CausalLMPolicy, scratch_policy
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.policies.chat import (
    decode_completion,
    encode_chat,
    encode_prompt,
    has_generation_markers,
)
from rlhf_pipeline.policies.new_model import new_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer with a chat template, through the folder of a checkpoint."""
    root = tmp_path_factory.mktemp("chat")
    (root / "text.txt").write_text("the quick brown fox says hello and 1234\n" * 20, encoding="utf-8")
    new_model(root / "m", text_file=root / "text.txt", vocab_size=300, hidden_size=16, num_layers=1, num_heads=2)
    return CausalLMPolicy.from_pretrained(root / "m").tokenizer


def test_text_becomes_a_user_message_with_the_assistants_header(tokenizer: Any) -> None:
    """The decoded ids are the template's text, ready for the assistant to go on."""
    ids = encode_prompt(tokenizer, "hello é")
    assert tokenizer.decode(ids) == "<|im_start|>user\nhello é<|im_end|>\n<|im_start|>assistant\n"
    assert encode_prompt(tokenizer, [{"role": "user", "content": "hello é"}]) == ids
    system = encode_prompt(tokenizer, [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    assert tokenizer.decode(system).startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>")


def test_raw_text_is_left_alone(tokenizer: Any) -> None:
    """as_chat=False adds nothing."""
    assert tokenizer.decode(encode_prompt(tokenizer, "1+1=", as_chat=False)) == "1+1="


def test_a_tokenizer_without_a_template_takes_raw_text_only() -> None:
    """Text passes; messages are refused."""
    tokenizer = scratch_policy("01=").tokenizer
    assert encode_prompt(tokenizer, "10=") == [3, 2, 4]
    with pytest.raises(DefinitionError, match="no chat template"):
        encode_prompt(tokenizer, [{"role": "user", "content": "1"}])


def test_completions_are_decoded_without_special_tokens(tokenizer: Any) -> None:
    """The end token disappears, the text does not change."""
    ids = tokenizer.encode("hello  fox\n12")
    assert decode_completion(tokenizer, [*ids, tokenizer.eos_token_id]) == "hello  fox\n12"
    assert decode_completion(tokenizer, []) == ""


def test_the_assistants_tokens_are_marked(tokenizer: Any) -> None:
    """The mask covers the assistant's content and the end token of each of its turns, and nothing else."""
    ids, mask = encode_chat(
        tokenizer,
        [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "the fox 42"},
            {"role": "user", "content": "and"},
            {"role": "assistant", "content": "日本"},
        ],
    )
    assert len(ids) == len(mask)
    marked = [i for i, m in zip(ids, mask, strict=True) if m]
    assert tokenizer.decode(marked) == "the fox 42<|im_end|>日本<|im_end|>"


def test_the_prompt_is_a_prefix_of_the_conversation(tokenizer: Any) -> None:
    """What generation continues is what the whole conversation begins with."""
    prompt = encode_prompt(tokenizer, "hello")
    ids, mask = encode_chat(tokenizer, [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fox"}])
    assert ids[: len(prompt)] == prompt
    assert mask.index(True) == len(prompt)


def test_templates_without_markers_are_refused(tokenizer: Any) -> None:
    """Without markers the mask would be all False, so there is an error instead."""
    assert has_generation_markers(tokenizer)
    plain = scratch_policy("01=").tokenizer
    assert not has_generation_markers(plain)
    plain.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert not has_generation_markers(plain)
    with pytest.raises(DefinitionError, match="generation"):
        encode_chat(plain, [{"role": "assistant", "content": "1"}])


def test_bad_input_is_refused(tmp_path: Path) -> None:
    """No tokenizer, no tokens, a character that has no token."""
    with pytest.raises(DefinitionError, match="no tokenizer"):
        encode_prompt(None, "x")
    with pytest.raises(DefinitionError, match="no tokenizer"):
        decode_completion(None, [1])
    tokenizer = scratch_policy("01=").tokenizer
    with pytest.raises(DataError, match="gives no tokens"):
        encode_prompt(tokenizer, "")
    with pytest.raises(DataError, match=r"'1a' has a character that the tokenizer does not know\. It knows '01='"):
        encode_prompt(tokenizer, "1a")
