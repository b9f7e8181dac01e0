"""From prompts to token ids and from token ids to text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError

Message = Mapping[str, Any]

_MARK = "assistants-turn-goes-here"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def _need_tokenizer(tokenizer: Any | None) -> Any:
    if tokenizer is None:
        raise DefinitionError(
            "The policy has no tokenizer, so text cannot be encoded or decoded. Pass token ids, or give the checkpoint "
            "folder its tokenizer.json and tokenizer_config.json."
        )
    return tokenizer


def _messages(prompt: str | Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def encode_prompt(
    tokenizer: Any | None,
    prompt: str | Sequence[Message],
    *,
    as_chat: bool = True,
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """Return the token ids that a completion continues.

    Args:
        tokenizer: a tokenizer of transformers.
        prompt: text, or chat messages with "role" and "content".
        as_chat: put text through the chat template as a user message, where the tokenizer has a template. Messages
            always need one.
        tools: handed to the chat template.

    Returns:
        Token ids; with a template they end with the header of the assistant's turn (the generation prompt).

    Raises:
        DefinitionError: there is no tokenizer, or messages were given and it has no chat template.
        DataError: the prompt gives no tokens.
    """
    codec = _need_tokenizer(tokenizer)
    template = getattr(codec, "chat_template", None)
    if not isinstance(prompt, str) and template is None:
        raise DefinitionError(
            "The prompt is a list of messages and the tokenizer has no chat template. "
            "Set tokenizer.chat_template, or pass the prompt as text."
        )
    if template is not None and (as_chat or not isinstance(prompt, str)):
        ids = codec.apply_chat_template(
            _messages(prompt), add_generation_prompt=True, tokenize=True, return_dict=False, tools=tools
        )
    else:
        ids = encode_text(codec, str(prompt))
    if not ids:
        raise DataError(f"The prompt {prompt!r} gives no tokens. Check the prompt field of the data.")
    return [int(i) for i in ids]


def encode_text(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the token ids of a text, as they are.

    Args:
        tokenizer: a tokenizer of transformers.
        text: what to encode.
        **options: handed to the tokenizer.

    Raises:
        DataError: a character has no token.
    """
    try:
        return list(map(int, tokenizer.encode(text, **options)))
    except Exception as error:
        # The tokenizers package raises a bare Exception for a character without a token.
        if "Missing [UNK] token" not in str(error):
            raise
        known = "".join(sorted(t for t in tokenizer.get_vocab() if len(t) == 1))
        raise DataError(
            f"The text {text!r} has a character that the tokenizer does not know. It knows {known!r}; "
            "put the missing ones in the alphabet."
        ) from error


def decode_completion(tokenizer: Any | None, token_ids: Sequence[int]) -> str:
    """Return the text of a completion without special tokens.

    Args:
        tokenizer: a tokenizer of transformers.
        token_ids: the sampled tokens, with or without the EOS token.
    """
    return _need_tokenizer(tokenizer).decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def encode_reply(
    tokenizer: Any | None,
    messages: Sequence[Message],
    completion_ids: Sequence[int],
    replies: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
) -> list[int]:
    """Return the tokens that stand between a sampled turn of the assistant and its next one.

    They are what the chat template puts there: the end of the assistant's turn, unless it was sampled, the replies,
    and the header of the next turn. The sampled tokens themselves are never encoded again: what a policy goes on from
    is `ids + completion_ids + encode_reply(...)`, and what it sampled stays as it was.

    Args:
        tokenizer: a tokenizer of transformers with a chat template.
        messages: the conversation before the sampled turn.
        completion_ids: the tokens of that turn.
        replies: what came back: messages of a tool, or of the user.
        tools: handed to the template.

    Raises:
        DefinitionError: there is no tokenizer, or it has no chat template.
        DataError: the template does not render the assistant's turn where the replies can be cut off after it.
    """
    codec = _need_tokenizer(tokenizer)
    if getattr(codec, "chat_template", None) is None:
        raise DefinitionError("The tokenizer has no chat template, so replies cannot be encoded. Set one.")
    turn = {"role": "assistant", "content": _MARK}
    text = codec.apply_chat_template(
        [*_messages(messages), turn, *_messages(replies)], add_generation_prompt=True, tokenize=False, tools=tools
    )
    if text.count(_MARK) != 1:
        raise DataError(
            f"The chat template renders an assistant's turn {text.count(_MARK)} times before a reply; it must be once. "
            "Use a template that keeps the assistant's content as it is."
        )
    ids = encode_text(codec, text.split(_MARK)[1], add_special_tokens=False)
    said = int(completion_ids[-1]) if len(completion_ids) else None
    # A special token that ended the turn was sampled: the template's own stands for the same one.
    ended = said is not None and ids[:1] == [said] and said in set(codec.all_special_ids)
    return ids[1:] if ended else ids


def continued_prompt(tokenizer: Any | None, messages: Sequence[Message], known_ids: Sequence[int]) -> list[int]:
    """Return the token ids that the next turn of a conversation continues, from those that are known of it.

    Args:
        tokenizer: a tokenizer of transformers with a chat template.
        messages: the conversation; the assistant's turns may be followed by replies.
        known_ids: the tokens up to the end of the assistant's last turn, as they were sampled (TorchRL's
            `IncrementalTokenizer` hands these on), or the whole prompt, encoded.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return [int(i) for i in known_ids] or encode_prompt(tokenizer, messages)
    if list(known_ids) == (whole := encode_prompt(tokenizer, messages)) or not len(known_ids):
        return whole
    replies = messages[turns[-1] + 1 :]
    return [*map(int, known_ids), *encode_reply(tokenizer, messages[: turns[-1]], known_ids, replies)]


def has_generation_markers(tokenizer: Any | None) -> bool:
    """Tell whether the chat template marks the assistant's tokens with `{% generation %}`."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("default")
    return isinstance(template, str) and _GENERATION.search(template) is not None


def encode_chat(tokenizer: Any | None, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Return token ids of a whole conversation and the mask of the assistant's tokens.

    Only for conversations that exist as text. What a policy sampled is never encoded again: its token ids are kept.

    Args:
        tokenizer: a tokenizer of transformers whose chat template has `{% generation %}` markers.
        messages: chat messages, the assistant's turns included.

    Returns:
        `(token_ids, assistant_mask)`, of one length.

    Raises:
        DefinitionError: there is no tokenizer, or its template has no markers.
    """
    codec = _need_tokenizer(tokenizer)
    if not has_generation_markers(tokenizer):
        raise DefinitionError(
            "The chat template does not mark the assistant's tokens. Put `{% generation %}` and `{% endgeneration %}` "
            "around the assistant's content in tokenizer.chat_template."
        )
    encoded = codec.apply_chat_template(
        _messages(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return [int(i) for i in encoded["input_ids"]], [bool(m) for m in encoded["assistant_masks"]]
