"""A tiny chat model that TorchRL's wrappers and environments and this package's policies can all drive."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tensordict
import torch
from tensordict import TensorDict, lazy_stack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from rlhf_pipeline import LogProbs, Masks, Tokens

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def make_tokenizer(*, pad: str = "<|endoftext|>") -> PreTrainedTokenizerFast:
    """Bytes and three special tokens, with a chat template that marks the assistant's tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *SPECIAL]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token=pad, additional_special_tokens=list(SPECIAL[1:2])
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: Any, *, seed: int = 0, scale: float = 3.0, **config: Any) -> Any:
    """A Qwen2 with strong weights, so that a wrong position or mask shows."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    model = AutoModelForCausalLM.from_config(Qwen2Config(**{**options, **config})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model


@torch.no_grad()
def naive(model: Any, ids: Any, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [T] of one unpadded row, one forward pass per token; NaN at the first."""
    ids = torch.as_tensor(ids)
    out = [torch.tensor(float("nan"))]
    for t in range(1, len(ids)):
        logits = model(input_ids=ids[None, :t]).logits[0, -1].double() / temperature
        out.append(torch.log_softmax(logits, -1)[ids[t]])
    return torch.stack([value.double() for value in out])


def make_rows(rows: list[Any], prompts: list[int], **leaves: list[Any]) -> Any:
    """Ragged trajectories `[n]` with TorchRL's containers: tokens, masks, and what else is given per row."""
    out: list[Any] = []
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        ids = torch.as_tensor(row)
        mask = torch.arange(len(ids)) >= prompt
        td = TensorDict(
            {
                "tokens": Tokens(full=ids, padded=False),
                "masks": Masks(all_attention_mask=torch.ones_like(mask), all_assistant_mask=mask, padded=False),
            }
        )
        for key, values in leaves.items():
            if key == "log_probs":
                td.set("log_probs", LogProbs(full=torch.as_tensor(values[i]), padded=False))
            else:
                td.set(key, values[i])
        out.append(td)
    return lazy_stack(out)


@pytest.fixture
def tiny() -> SimpleNamespace:
    """Everything above."""
    return SimpleNamespace(tokenizer=make_tokenizer, model=make_model, naive=naive, rows=make_rows)


@pytest.fixture(autouse=True)
def lists_become_stacks() -> Iterator[None]:
    """TorchRL's LLM classes need this switch; it is put back."""
    with tensordict.set_list_to_stack(True):
        yield
