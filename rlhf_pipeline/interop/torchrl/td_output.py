"""TensorDicts of sampled completions."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torchrl.data.llm import History

from rlhf_pipeline.data.padding import length_mask, pad_rows
from rlhf_pipeline.interop.torchrl.containers import ChatHistory, LogProbs, Masks, Text, Tokens
from rlhf_pipeline.policies.token_batches import Key


def repeated_rows(td: TensorDictBase, members: int) -> TensorDictBase:
    """Return a TensorDict of `[B * members]` rows, each a copy of its prompt's row."""
    if isinstance(td, LazyStackedTensorDict):
        return lazy_stack([row.copy() for row in td.unbind(0) for _ in range(members)])
    index = torch.arange(td.batch_size[0]).repeat_interleave(members)
    return cast(TensorDictBase, td[index])


def grouped_rows(td: TensorDictBase, members: int | None) -> TensorDictBase:
    """Cut the batch `[B * members]` into `[B, members]`."""
    if members is None:
        return td
    if not isinstance(td, LazyStackedTensorDict):
        return td.reshape(-1, members)
    rows = list(td.unbind(0))
    return lazy_stack([lazy_stack(rows[i : i + members]) for i in range(0, len(rows), members)])


def completion_row(fields: dict[str, list[Any]], i: int, keys: dict[str, Key]) -> TensorDict:
    """Return one completion as a TensorDict without batch size."""

    def pick(name: str) -> Any:
        return fields[name][i] if name in fields else None

    row = TensorDict({}, [])
    full = fields["full"][i]
    row.set(keys["tokens"], Tokens(prompt=pick("prompt"), response=pick("response"), full=full, padded=False))
    attention = torch.ones_like(full, dtype=torch.bool)
    row.set(
        keys["masks"],
        Masks(all_attention_mask=attention, all_assistant_mask=pick("assistant"), padded=False),
    )
    if "full_scores" in fields:
        scores = LogProbs(response=pick("response_scores"), full=fields["full_scores"][i], padded=False)
        row.set(keys["log_probs"], scores)
    if "prompt_text" in fields:
        start, end = fields["prompt_text"][i], fields["response_text"][i]
        row.set(keys["text"], Text(prompt=start, response=end, full=start + end))
    if "prompt_history" in fields:
        row.set(keys["history"], _continued_chat(fields, i))
    return row


def _continued_chat(fields: dict[str, list[Any]], i: int) -> ChatHistory:
    """Return the conversation of a completion, its last turn, and both together."""
    prompt = fields["prompt_history"][i]
    turn = History(role="assistant", content=fields["response_text"][i], batch_size=(1,))
    return ChatHistory(prompt=prompt, response=turn, full=prompt.extend(turn, inplace=False))


def padded_completions(fields: dict[str, list[Any]], pad: int, count: int, keys: dict[str, Key]) -> TensorDict:
    """Return completions padded as TorchRL pads them: prompt on the left, response on the right."""
    prompt, prompt_sizes = pad_rows(fields["prompt"], pad_value=pad, side="left")
    response, response_sizes = pad_rows(fields["response"], pad_value=pad, side="right")
    real_prompt = length_mask(prompt_sizes, prompt.shape[1], side="left").to(prompt.device)
    real_response = length_mask(response_sizes, response.shape[1], side="right").to(prompt.device)
    size = [count]
    out = TensorDict({}, size)
    out.set(
        keys["tokens"],
        Tokens(
            prompt=prompt,
            response=response,
            full=torch.cat((prompt, response), 1),
            padded=True,
            batch_size=size,
        ),
    )
    out.set(
        keys["masks"],
        Masks(
            all_attention_mask=torch.cat((real_prompt, real_response), 1),
            all_assistant_mask=torch.cat((torch.zeros_like(real_prompt), real_response), 1),
            padded=True,
            batch_size=size,
        ),
    )
    if "full_scores" in fields:
        scores = pad_rows(fields["response_scores"], side="right")[0]
        full = torch.cat((scores.new_zeros(prompt.shape), scores), 1)
        out.set(keys["log_probs"], LogProbs(response=scores, full=full, padded=True, batch_size=size))
    if "prompt_text" in fields:
        pairs = zip(fields["prompt_text"], fields["response_text"], strict=True)
        texts: Any = [Text(prompt=start, response=end, full=start + end) for start, end in pairs]
        out.set(keys["text"], lazy_stack(texts))
    if "prompt_history" in fields:
        chats: Any = [_continued_chat(fields, i) for i in range(count)]
        out.set(keys["history"], lazy_stack(chats))
    return out
