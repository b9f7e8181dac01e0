"""From prompts to token ids and from token ids to text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.data.store_errors import as_ours
from rlhf_pipeline.errors import DataError, DefinitionError
from trajectory_store.recorder import text_codec
from trajectory_store.recorder.text_codec import messages_of

Message = Mapping[str, Any]

CUT: Final = " [cut]"
"""The mark at the end of a truncated reply."""
_CHARACTERS_A_TOKEN: Final = 32
"""Characters per token of a limit that are encoded to determine that a text is too long."""
_MARK = "assistants-turn-goes-here"
_MARKS = re.compile(r"message-(\d+)-goes-here")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


# The store's package has the tokens, and its own errors.
encode_prompt = as_ours()(text_codec.encode_prompt)
encode_text = as_ours()(text_codec.encode_text)
decode_completion = as_ours()(text_codec.decode)
_need_tokenizer = as_ours()(text_codec.need_tokenizer)


def encode_any(
    tokenizer: Any | None, prompt: Prompt, *, as_chat: bool, template: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the token ids of a prompt, of text or of messages; see `encode_prompt`."""
    what = prompt.text if prompt.messages is None else prompt.messages
    return encode_prompt(tokenizer, what, as_chat=as_chat, template=template)


def known_text(tokenizer: Any, text: str) -> str:
    """Return a text without the characters that the tokenizer has no token for; most tokenizers have one for all."""
    try:
        encode_text(tokenizer, text, add_special_tokens=False)
    except DataError:
        vocabulary = tokenizer.get_vocab()
        return "".join(character for character in text if character in vocabulary)
    return text


def cut_text(tokenizer: Any, text: str, most: int) -> tuple[str, int]:
    """Return a text with so many tokens at most, and its tokens; where it is cut, a mark shows it."""
    head = text[: _CHARACTERS_A_TOKEN * (most + 1)]
    ids = encode_text(tokenizer, head, add_special_tokens=False)
    if len(ids) <= most and head == text:
        return text, len(ids)
    mark = encode_text(tokenizer, known_text(tokenizer, CUT), add_special_tokens=False)
    for keep in range(max(most - len(mark), 0), -1, -1):
        parts = (ids[:keep], mark[:most])
        cut = "".join(tokenizer.decode(part, clean_up_tokenization_spaces=False).rstrip("\ufffd") for part in parts)
        num = len(encode_text(tokenizer, cut, add_special_tokens=False))
        if num <= most:  # a text may have more tokens than its parts
            return cut, num
    return "", 0


def decode_prompt(tokenizer: Any | None, token_ids: Sequence[int]) -> str:
    """Return what a model reads before its completion as text, with everything that the chat template wrote."""
    codec = _need_tokenizer(tokenizer)
    return codec.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def end_texts(tokenizer: Any | None, end_token_ids: Iterable[int]) -> list[str]:
    """Return the texts of the tokens that end a turn; none without a tokenizer."""
    return [] if tokenizer is None else [tokenizer.decode([token]) for token in end_token_ids]


def encode_reply(
    tokenizer: Any | None,
    messages: Sequence[Message],
    completion_ids: Sequence[int],
    replies: Sequence[Message],
    *,
    turn: Message | None = None,
    tools: Sequence[Any] | None = None,
    template: Mapping[str, Any] | None = None,
    end_token_ids: Collection[int] | None = None,
) -> list[int]:
    """Return the tokens between a sampled turn of the assistant and its next one.

    The chat template puts there: the end of the assistant's turn, unless it was sampled, the replies, and the header
    of the next turn. The sampled tokens are never encoded again: the policy continues
    `ids + completion_ids + encode_reply(...)`.
    """
    codec = _need_tokenizer(tokenizer)
    if getattr(codec, "chat_template", None) is None:
        raise DefinitionError("The tokenizer has no chat template, so replies cannot be encoded. Set a chat template.")
    ends = set(codec.all_special_ids) if end_token_ids is None else set(end_token_ids)
    ended = [int(completion_ids[-1])] if len(completion_ids) and int(completion_ids[-1]) in ends else []
    texts = end_texts(codec, [*ended, *sorted(ends.difference(ended))])
    head, tail = reply_text(codec, messages, replies, turn=turn, tools=tools, template=template, ends=texts)
    ids = _encode_after(codec, head, tail)
    # If the turn's end token was sampled, the template's first token is the same one.
    return ids[1:] if ended and ids[:1] == ended else ids


def reply_text(
    codec: Any,
    messages: Sequence[Message],
    replies: Sequence[Message],
    *,
    turn: Message | None = None,
    tools: Sequence[Any] | None = None,
    template: Mapping[str, Any] | None = None,
    ends: Sequence[str] = (),
) -> tuple[str, str]:
    """Return the chat template's text up to the end of an assistant's turn, and from there to the next turn.

    Args:
        codec: a tokenizer with a chat template.
        messages: those before the turn.
        replies: those after it.
        turn: the turn; its text does not count, its calls do. None is a turn without calls.
        tools: as for `encode_prompt`.
        template: likewise.
        ends: texts that may end a turn, in the order in which they are looked for after its calls.

    Raises:
        DataError: the template rejects the messages.
        DefinitionError: it writes other messages after the turn than these replies.
    """

    def rendered(*parts: Sequence[Message], going_on: bool = True) -> str:
        joined = [message for part in parts for message in part]
        return rendered_prompt(codec, joined, tools=tools, template=template, going_on=going_on)

    before, after = messages_of(messages), messages_of(replies)
    marked, first = _marked([*before, *after]), len(before)
    if (turn or {}).get("tool_calls"):
        caller: dict[str, Any] = {"content": "", **(turn or {}), "role": "assistant"}
        # The text before the reply's own text does not depend on it.
        sample = rendered(marked[:first], [caller], marked[first:])
        start = _common(rendered(marked[:first]), sample)
        stop = mark.start() if (mark := _MARKS.search(sample, start)) else len(sample)
        cut = next((at for end in ends if (at := sample.rfind(end, start, stop)) >= 0), -1)
        if cut < 0:  # the model that the template is for ends its turns in another way
            closed = rendered(marked[:first], [caller], going_on=False)
            cut = len(closed) if start < len(closed) <= stop and sample.startswith(closed) else -1
        if cut < 0:
            raise DataError(
                "the chat template does not write an end-of-turn token between a tool call and its reply, "
                "so the reply cannot be separated from the call."
            )
        tail = sample[cut:]
        whole = rendered(before, [caller], after)
        at = whole.rfind(sample[start:stop])
        if at < 0:
            raise DataError(
                "the chat template renders a tool call differently if its reply differs, "
                "so the reply cannot be separated from the call."
            )
        parts = [whole[: at + cut - start], whole[at + cut - start :]]
    else:
        texts = [
            rendered(part[:first], [{"role": "assistant", "content": _MARK}], part[first:])
            for part in (marked, [*before, *after])
        ]
        for text in texts:
            if text.count(_MARK) != 1:
                raise DataError(
                    f"The chat template renders an assistant turn {text.count(_MARK)} times before a reply; the "
                    "turn must appear exactly once. Use a template that keeps the assistant's content unchanged."
                )
        tail, parts = texts[0].split(_MARK)[1], texts[1].split(_MARK)
    _check_order(tail, marked, first)
    return parts[0], parts[1]


def continued_text(
    tokenizer: Any | None,
    messages: Sequence[Message],
    completion_ids: Sequence[int],
    turn: Message,
    replies: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    template: Mapping[str, Any] | None = None,
    end_token_ids: Collection[int] = (),
) -> list[int] | None:
    """Return the tokens by which the chat template continues a sampled turn, or None if it rewrites what came before.

    The template is the only judge: `encode_reply` also takes templates that would show earlier turns in another way.

    Args:
        tokenizer: with a chat template.
        messages: those before the turn, as the policy was shown them.
        completion_ids: the sampled turn.
        turn: the same as a message.
        replies: what follows it.
        tools: as for `encode_prompt`.
        template: likewise.
        end_token_ids: tokens that end a turn.

    Raises:
        DataError: the template rejects the messages.
    """
    codec, ids = _need_tokenizer(tokenizer), [int(token) for token in completion_ids]
    ended = ids[-1:] if ids[-1:] and ids[-1] in end_token_ids else []
    before, after = (
        rendered_prompt(codec, part, tools=tools, template=template) for part in (messages, [*messages, turn, *replies])
    )
    sampled = codec.decode(ids[: len(ids) - len(ended)], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    head = before + sampled
    if not after.startswith(head):
        return None
    tail = _encode_after(codec, head, after[len(head) :])
    return tail[1:] if ended and tail[:1] == ended else tail


def rendered_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    template: Mapping[str, Any] | None = None,
    going_on: bool = True,
) -> str:
    """Return the text that the policy is to continue, as the chat template writes it; or without the next turn's head.

    Raises:
        DataError: the template rejects the messages.
    """
    options = {"tokenize": False, "add_generation_prompt": going_on, "tools": tools, **(template or {})}
    try:
        return tokenizer.apply_chat_template(messages_of(messages), **options)
    except Exception as error:  # templates are programs, and fail in any way on what they did not expect
        roles = [message.get("role") for message in messages]
        raise DataError(f"the chat template rejects a conversation with the message roles {roles}: {error}") from error


def _common(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _check_order(tail: str, marked: Sequence[Message], first: int) -> None:
    """Reject a template that writes something else after the assistant's turn than the replies, once and in order."""
    shown_order = [int(i) for i in dict.fromkeys(_MARKS.findall(tail))]
    expected_order = [i for i, message in enumerate(marked) if i >= first and isinstance(message.get("content"), str)]
    if shown_order != expected_order:
        written, expected = (
            [f"message {i + (i >= first)} ({marked[i]['role']})" for i in part]
            for part in (shown_order, expected_order)
        )
        raise DefinitionError(
            f"After an assistant turn, the chat template writes {', '.join(written) or 'no message'} instead of "
            f"{', '.join(expected)}, so the policy would read a different conversation. Use a template that "
            "writes every message once, in order."
        )


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose texts are marks, to see where a template puts them."""
    return [
        {**message, "content": f"message-{i}-goes-here"} if isinstance(message.get("content"), str) else message
        for i, message in enumerate(messages)
    ]


def _encode_after(codec: Any, head: str, tail: str) -> list[int]:
    """Return the token ids of a text that follows another one; by itself, it may begin with an extra space token."""
    for before in (head, head.rstrip()):
        # The template may write a call with characters that a small vocabulary lacks; the policy's own are tokens.
        before = known_text(codec, before[_last_split(codec, before, tail) :])
        head_ids = encode_text(codec, before, add_special_tokens=False)
        all_ids = encode_text(codec, before + tail, add_special_tokens=False)
        if all_ids[: len(head_ids)] == head_ids:
            return all_ids[len(head_ids) :]
    return encode_text(codec, tail, add_special_tokens=False)


def _last_split(codec: Any, head: str, tail: str) -> int:
    """Return where the last special token of `head` starts in `head + tail`; 0 without one.

    A tokenizer cuts a text at these tokens before it does anything else, so the ids from there on are the same without
    the text before. A reply then costs what is new, not the whole conversation.
    """
    added = [t.content for t in codec.added_tokens_decoder.values() if not (t.normalized or t.single_word)]
    if not added:
        return 0
    tokens = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))))
    return max((m.start() for m in tokens.finditer(head + tail) if m.end() <= len(head)), default=0)


def continued_prompt(
    tokenizer: Any | None,
    messages: Sequence[Message],
    known_ids: Sequence[int],
    *,
    end_token_ids: Collection[int] | None = None,
) -> list[int]:
    """Return the token ids that the next turn of a conversation continues, reusing the token ids already known."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return [int(i) for i in known_ids] or encode_prompt(tokenizer, messages)
    if list(known_ids) == (whole := encode_prompt(tokenizer, messages)) or not len(known_ids):
        return whole
    replies = messages[turns[-1] + 1 :]
    before = messages[: turns[-1]]
    return [*map(int, known_ids), *encode_reply(tokenizer, before, known_ids, replies, end_token_ids=end_token_ids)]


def has_generation_markers(tokenizer: Any | None) -> bool:
    """Return whether the chat template marks the assistant's tokens with `{% generation %}`."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    return isinstance(template, str) and _GENERATION.search(template) is not None


def encode_chat(tokenizer: Any | None, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Return token ids of a whole conversation and the mask of the assistant's tokens.

    Only for conversations that exist as text. Sampled tokens are never encoded again: their ids are kept.
    """
    codec = _need_tokenizer(tokenizer)
    if not has_generation_markers(tokenizer):
        raise DefinitionError(
            "The chat template does not mark the assistant's tokens. Put `{% generation %}` and `{% endgeneration %}` "
            "around the assistant's content in tokenizer.chat_template."
        )
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, (spans,) = render_jinja_template(
        [messages_of(messages)],
        chat_template=codec.get_chat_template(),
        return_assistant_tokens_mask=True,
        **codec.special_tokens_map,
    )
    encoded = codec(texts[0], add_special_tokens=False, return_offsets_mapping=True)
    ids = [int(i) for i in encoded["input_ids"]]
    mask = [False] * len(ids)
    for i, (start, end) in enumerate(encoded["offset_mapping"]):
        for first, last in spans:
            # A tokenizer may drop spaces, and an added token of the header may include the spaces after it.
            inside = start < last and end > first if start < end else first < start <= last
            mask[i] |= inside and not (start < first and ids[i] in codec.added_tokens_decoder)
    return ids, mask
