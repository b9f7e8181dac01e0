"""Prompts to ids, completions to text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_pipeline import CausalLMPolicy, scratch_policy
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.policies.chat import (
    decode_completion,
    encode_chat,
    encode_prompt,
    encode_reply,
    has_generation_markers,
)
from rlhf_pipeline.policies.new_model import new_model
from tests.rlhf_pipeline.small import talker


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


def test_a_prompt_does_not_end_with_the_end() -> None:
    """A tokenizer that puts the end token after every text puts none between a prompt and its completion."""
    tokenizer = scratch_policy("01=").tokenizer
    bare, end = tokenizer.encode("10="), tokenizer.eos_token_id
    around = processors.TemplateProcessing(single="$A E", special_tokens=[("E", end)])
    tokenizer.backend_tokenizer.post_processor = around
    assert encode_prompt(tokenizer, "10=") == bare
    assert encode_prompt(tokenizer, "10=", whole=True) == [*bare, end]


def test_text_has_one_bos_token_whoever_writes_it() -> None:
    """A tokenizer that puts BOS before every text puts none before rendered text that begins with it."""
    tokenizer = scratch_policy("01=").tokenizer
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    before = processors.TemplateProcessing(single="B $A", special_tokens=[("B", bos)])
    tokenizer.backend_tokenizer.post_processor = before
    wanted = [bos, *tokenizer.encode("10=", add_special_tokens=False)]
    for text in ("10=", "<s>10="):
        assert encode_prompt(tokenizer, text, as_chat=False) == wanted
        assert encode_prompt(tokenizer, text, as_chat=False, whole=True) == wanted
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    assert encode_prompt(tokenizer, "10=") == wanted


def test_arguments_reach_the_template_and_its_refusal_is_one_sentence() -> None:
    """`enable_thinking` and its like change the prompt; what a template raises names the messages."""
    tokenizer = scratch_policy("01=").tokenizer
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{{ messages[0].content }}{% if not enable_thinking %}={% endif %}"
    )
    plain, thinking = (encode_prompt(tokenizer, "1", template=how) for how in (None, {"enable_thinking": True}))
    assert plain == [*thinking, tokenizer.encode("=")[0]]
    with pytest.raises(
        DefinitionError, match=r"rejects a prompt with the message roles \['system'\]: System role not supp"
    ):
        encode_prompt(tokenizer, [{"role": "system", "content": "1"}])


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


PLAIN = (
    "{% for m in messages %}{{ {'user': 'U: ', 'assistant': 'A: '}[m.role] + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)
USER = [{"role": "user", "content": "hello"}]
REPLY = [{"role": "user", "content": "hi"}]


def letters(before: Any, after: Any, *added: AddedToken) -> Any:
    """A tokenizer of letters, with what stands before them, what puts them together again, and tokens of its own."""
    made = Tokenizer(models.BPE(unk_token="?"))
    made.pre_tokenizer, made.decoder = before, after
    made.train_from_iterator(["hello A U : - <|> \n \u2581 goes-here hi"], trainers.BpeTrainer(vocab_size=60))
    made.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="$", unk_token="?")


def test_a_reply_brings_no_token_of_its_own_to_the_seam() -> None:
    """Where a tokenizer puts a space before every text, the row decodes to what the template writes."""
    scheme: Any = {"replacement": "\u2581", "prepend_scheme": "first", "split": False}
    tokenizer = letters(pre_tokenizers.Metaspace(**scheme), decoders.Metaspace(replacement="\u2581"))
    tokenizer.chat_template = PLAIN
    prompt = encode_prompt(tokenizer, USER)
    said = tokenizer.convert_tokens_to_ids(["h", "i"])
    ids = [*prompt, *said, *encode_reply(tokenizer, USER, said, REPLY)]
    assert tokenizer.decode(ids) == "U: hello\nA: hi\nU: hi\nA: "


def test_what_ended_a_turn_is_not_written_twice() -> None:
    """Neither a special token, nor another one that the policy ends its turns with."""
    tokenizer = letters(pre_tokenizers.Split("", "isolated"), decoders.Fuse())
    tokenizer.chat_template = PLAIN
    end = tokenizer.convert_tokens_to_ids("\n")
    cut = encode_reply(tokenizer, USER, [end], REPLY)
    assert cut[0] == end
    assert encode_reply(tokenizer, USER, [end], REPLY, end_token_ids=(end,)) == cut[1:]


class Counting(PreTrainedTokenizerFast):
    """A tokenizer that counts the characters it encodes."""

    characters = 0

    def encode(self, text: Any, *args: Any, **options: Any) -> list[int]:
        """Count and encode."""
        self.characters += len(text)
        return super().encode(text, *args, **options)


def test_a_reply_costs_what_is_new(tokenizer: Any) -> None:
    """However long the conversation is, as little is encoded, and the ids are those of the whole text."""
    counting = Counting(tokenizer_object=tokenizer.backend_tokenizer, chat_template=tokenizer.chat_template)
    said, costs = tokenizer.encode("fox<|im_end|>"), []
    for turns in (2, 20):
        chat = [*USER, *[{"role": "assistant", "content": "fox"}, *USER] * turns]
        counting.characters = 0
        ids = encode_reply(counting, chat, said, REPLY, end_token_ids=(said[-1],))
        costs.append(counting.characters)
        whole = encode_prompt(tokenizer, [*chat, {"role": "assistant", "content": "fox"}, *REPLY])
        assert [*encode_prompt(tokenizer, chat), *said, *ids] == whole
    assert costs[0] == costs[1] > 0


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{% for m in messages if m.role != 'tool' %}{{ m.content }};{% endfor %}", "no message instead of message 2 "),
        (
            "{% for m in messages | sort(attribute='role', reverse=true) %}{{ m.content }}{% endfor %}",
            "no message instead of message 2 ",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[0].content }}",
            r"message 2 \(tool\), message 0 \(user\) instead of",
        ),
    ],
    ids=["left out", "moved to the front", "said again"],
)
def test_templates_that_write_messages_in_another_place_are_refused(template: str, written: str) -> None:
    """A reply that the policy would not read, or an earlier message that it would read again, is no conversation."""
    tokenizer = letters(pre_tokenizers.Split("", "isolated"), decoders.Fuse())
    tokenizer.chat_template = template
    with pytest.raises(DefinitionError, match=f"the chat template writes {written}"):
        encode_reply(tokenizer, USER, [1], [{"role": "tool", "content": "hi"}])


def test_the_mask_is_right_where_spaces_are_part_of_other_tokens_or_of_none() -> None:
    """The header is not the assistant's, whatever its last token swallows, and a turn ends where it ends."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|A|>{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}<|U|>{{ m.content }}{% endif %}<|>{% endfor %}"
    )
    added = [AddedToken(name, special=True, rstrip=True, normalized=False) for name in ("<|A|>", "<|U|>", "<|>")]
    for before in (pre_tokenizers.Split("", "isolated"), pre_tokenizers.WhitespaceSplit()):
        tokenizer = letters(before, decoders.Fuse(), *added)
        tokenizer.chat_template = template
        for words in ("hello", " hello", "hello ", "", " "):
            chat = [*USER, {"role": "assistant", "content": words}, *REPLY, {"role": "assistant", "content": "hi"}]
            ids, mask = encode_chat(tokenizer, chat)
            marked = tokenizer.decode([i for i, mine in zip(ids, mask, strict=True) if mine])
            assert marked.replace(" ", "") == words.strip() + "hi"


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
    with pytest.raises(DataError, match="has no tokens"):
        encode_prompt(tokenizer, "")
    with pytest.raises(
        DataError, match=r"'1a' contains a character that is unknown to the tokenizer\. Its alphabet is '01='"
    ):
        encode_prompt(tokenizer, "1a")


def test_replies_are_encoded_once_and_sampled_ends_are_kept():
    """A sampled end is not written twice; a turn that was cut gets the template's."""
    tokenizer = talker().tokenizer
    before, reply = [{"role": "user", "content": "1"}], [{"role": "tool", "content": "2"}]
    turn = tokenizer.encode("0")
    glue = tokenizer.encode("\nT:2\nA:")
    assert encode_reply(tokenizer, before, [*turn, 1], reply) == glue
    assert encode_reply(tokenizer, before, turn, reply) == [1, *glue]
    whole = tokenizer.apply_chat_template(
        [*before, {"role": "assistant", "content": "0"}, *reply], add_generation_prompt=True, return_dict=False
    )
    assert whole == [*tokenizer.encode("U:1\nA:"), *turn, 1, *glue]


def test_a_template_must_show_the_turn_before_a_reply():
    """Without a template, or with one that does not write the assistant's turn, there is nothing to cut off."""
    with pytest.raises(DefinitionError, match="no chat template"):
        encode_reply(scratch_policy("01").tokenizer, [], [2], [])
    tokenizer = talker().tokenizer
    tokenizer.chat_template = "{% for m in messages %}{% if m.role != 'assistant' %}x{% endif %}{% endfor %}"
    with pytest.raises(DataError, match="renders an assistant turn 0 times"):
        encode_reply(tokenizer, [{"role": "user", "content": "1"}], [2], [{"role": "tool", "content": "1"}])
