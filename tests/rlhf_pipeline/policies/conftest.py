"""Tiny models with strong weights, so that a wrong position or mask shows in the log-probs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

LLAMA_LIKE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GPT_LIKE = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {**LLAMA_LIKE},
    "qwen2-tied": {**LLAMA_LIKE, "tie_word_embeddings": True},
    "qwen2-sliding": {**LLAMA_LIKE, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "llama": {**LLAMA_LIKE},
    "mistral": {**LLAMA_LIKE, "sliding_window": 5},
    "gemma3_text": {**LLAMA_LIKE, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "gemma3_text-capped": {
        **LLAMA_LIKE,
        "head_dim": 8,
        "sliding_window": 256,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 5.0,
    },
    "gemma2": {
        **LLAMA_LIKE,
        "head_dim": 8,
        "sliding_window": 256,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 5.0,
    },
    "granite": {**LLAMA_LIKE, "logits_scaling": 4.0},
    "phi": {**LLAMA_LIKE},
    "gpt2": {**GPT_LIKE},
    "gpt_neox": {k: v for k, v in LLAMA_LIKE.items() if k != "num_key_value_heads"},
    "jetmoe": {
        **{k: v for k, v in LLAMA_LIKE.items() if k != "num_attention_heads"},
        "kv_channels": 8,
        "num_local_experts": 4,
    },
    "opt": {
        "vocab_size": 97,
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 16,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
}


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    """A factory: `make_model("qwen2", attention="sdpa", seed=0, **config)`."""

    def make(name: str = "qwen2", *, attention: str = "sdpa", seed: int = 0, **changes: Any) -> PreTrainedModel:
        kind = name if name in CONFIG_MAPPING else name.split("-")[0]
        config = AutoConfig.for_model(kind, **{**ARCHITECTURES.get(name, LLAMA_LIKE), **changes})
        attention = "eager" if name == "gemma2" else attention  # which has no other
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4.0)
                elif "bias" in parameter_name:
                    parameter.normal_()
        return model

    return make


@pytest.fixture
def oracle() -> Callable[..., torch.Tensor]:
    """Log-probs of one sequence by the model's own logits, in float64, position by position."""

    def score(model: PreTrainedModel, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([token_ids])).logits[0].double() / temperature
        out = [0.0]
        for t in range(1, len(token_ids)):
            row = logits[t - 1]
            peak = row.max()
            out.append(float(row[token_ids[t]] - peak - (row - peak).exp().sum().log()))
        return torch.tensor(out, dtype=torch.float64)

    return score
