"""Token ids for trajectories that exist as text only: chat histories and strings."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, cast

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.data.llm import History
from torchrl.data.llm.history import _CHAT_TEMPLATES
from torchrl.modules.llm.policies.common import ChatHistory, Masks, Text, Tokens

from rlhf_pipeline.data.padding import Side, pad_rows
from rlhf_pipeline.errors import DefinitionError, MissingKeyError
from rlhf_pipeline.policies.chat import encode_chat, encode_prompt, has_generation_markers
from rlhf_pipeline.policies.token_batches import Key, pad_ids

__all__ = ["history_messages", "text_list", "tokenizer_with_template", "with_tokens"]

_TEMPLATE_OPTIONS = ("chat_template", "chat_template_name")
# TorchRL's own defaults, which match what is done here anyway.
_AS_DONE: dict[str, Any] = {
    "return_assistant_tokens_mask": True,
    "tokenize": True,
    "return_dict": True,
    "return_tensors": "pt",
    "add_generation_prompt": False,
    "return_attention_mask": True,
    "padding_side": "left",
}


def tokenizer_with_template(tokenizer: Any, options: Mapping[str, Any] | None) -> Any:
    """Return a copy of a tokenizer with the chat template that TorchRL's `tokenizer_kwargs` name.

    Args:
        tokenizer: of transformers, or None.
        options: `chat_template`, or the `chat_template_name` of one of TorchRL's templates; `padding` has no effect.

    Raises:
        DefinitionError: an option would change the tokens in another way.
    """
    settings = dict(options or {})
    template = settings.pop("chat_template", None)
    name = settings.pop("chat_template_name", None)
    settings.pop("padding", None)
    for key, value in settings.items():
        if _AS_DONE.get(key) != value:
            raise DefinitionError(
                f"tokenizer_kwargs has {key}={value!r}, which is not supported: conversations are always encoded "
                "completely, as ragged rows with a mask of the assistant's tokens. Only "
                f"{' and '.join(_TEMPLATE_OPTIONS)} can be set."
            )
    if template is None and name is not None:
        if name not in _CHAT_TEMPLATES:
            raise DefinitionError(
                f"chat_template_name is {name!r}; the templates of TorchRL are {', '.join(sorted(_CHAT_TEMPLATES))}."
            )
        template = _CHAT_TEMPLATES[name]
    if template is None or tokenizer is None:
        return tokenizer
    tokenizer = copy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def with_tokens(
    tensordict: TensorDictBase,
    tokenizer: Any | None,
    *,
    history_key: Key = ("history", "full"),
    text_key: Key = ("text", "full"),
    padding_side: Side | None = None,
) -> TensorDictBase:
    """Return the trajectories with token ids and masks, encoded from their histories or their text.

    Only for data that was never sampled as tokens: encoding the text of sampled tokens again gives other ids. Assistant
    masks come from the generation markers of the chat template; without markers, and for plain text, the assistant's
    tokens are unknown and no assistant mask is written.

    Args:
        tensordict: batch size `[B]`.
        tokenizer: a tokenizer of transformers.
        history_key: of a `History`, or of a `ChatHistory` whose `full` is read.
        text_key: of the strings, or of a `Text` whose `full` is read; used where there is no history.
        padding_side: pads the rows on this side; None leaves them ragged.

    Returns:
        A lazy stack `[B]` (a TensorDict of the input's kind where padded) with ("tokens", "full"), ("masks",
        "all_attention_mask") and, if known, ("masks", "all_assistant_mask") beside what was there.
    """
    td: Any = tensordict
    encoded: list[tuple[list[int], list[bool] | None]]
    history = _value(td, history_key, ChatHistory)
    if history is not None:
        chats = [history_messages(row) for row in history.unbind(0)]
        encoded = [_encode(tokenizer, messages) for messages in chats]
    else:
        text = _value(td, text_key, Text)
        if text is None or not tensordict.batch_size:
            raise MissingKeyError(
                f"The batch has no token ids under ('tokens', 'full'), no conversation under {history_key!r} and no "
                f"text under {text_key!r}. Write the token ids of the prompt and the "
                "completion."
            )
        encoded = [(encode_prompt(tokenizer, item, as_chat=False, whole=True), None) for item in text_list(text)]
    ids = [torch.tensor(row, dtype=torch.int64) for row, _ in encoded]
    assistant_masks = [torch.tensor(mask) for _, mask in encoded if mask is not None]
    if padding_side is not None:
        batch = pad_ids(ids, padding_side)
        size, marked = [len(ids)], pad_rows(assistant_masks, side=padding_side)[0].bool() if assistant_masks else None
        masks = Masks(all_attention_mask=batch.attention_mask, all_assistant_mask=marked, batch_size=size)
        return td.copy().set("tokens", Tokens(full=batch.input_ids, batch_size=size)).set("masks", masks)
    rows: list[TensorDictBase] = []
    for i, row in enumerate(td.unbind(0)):
        real = torch.ones_like(ids[i], dtype=torch.bool)
        masks = Masks(all_attention_mask=real, all_assistant_mask=assistant_masks[i] if assistant_masks else None)
        rows.append(cast(TensorDictBase, row).copy().set("tokens", Tokens(full=ids[i])).set("masks", masks))
    return lazy_stack(rows)


def text_list(value: Any) -> list[str]:
    """Return the strings of a non-tensor leaf."""
    if isinstance(value, str):
        return [value]
    data = value.tolist() if hasattr(value, "tolist") else value
    return [data] if isinstance(data, str) else [str(item) for item in data]


def history_messages(history: Any) -> list[dict[str, Any]]:
    """Return the chat messages of one `History` `[turns]`."""
    return [{"role": turn.role, "content": turn.content} for turn in history.unbind(0)]


def _encode(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[bool] | None]:
    if has_generation_markers(tokenizer):
        return encode_chat(tokenizer, messages)
    if getattr(tokenizer, "chat_template", None) is None:
        return encode_chat(tokenizer, messages)  # reports what is missing
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    return [int(i) for i in ids], None


def _value(td: Any, key: Key, container: type) -> Any:
    """Return the conversations or strings under a key, with or without a container around them; None if absent."""
    value = td
    for name in (key,) if isinstance(key, str) else key:
        if isinstance(value, container):
            value = getattr(value, name, None)
        elif isinstance(value, TensorDictBase):
            value = cast(Any, value).get(name, None)
    if isinstance(value, container):
        value = cast(Any, value).full
    is_valid = isinstance(value, History) if container is ChatHistory else not isinstance(value, torch.Tensor)
    return value if is_valid else None
