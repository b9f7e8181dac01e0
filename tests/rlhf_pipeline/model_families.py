"""Tiny models of many architectures with strong weights, so that a wrong position or mask shows in the log-probs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf_pipeline.policies.loading import use_config_time_steps

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
RECURRENT_LIKE = {**LLAMA_LIKE, "num_hidden_layers": 4}
GATED_DELTA = {
    **RECURRENT_LIKE,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
MAMBA_2 = {
    **RECURRENT_LIKE,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": GATED_DELTA,
    "qwen3_next": {
        **GATED_DELTA,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": {k: v for k, v in GATED_DELTA.items() if k != "head_dim"},
    "kimi_linear": {
        **RECURRENT_LIKE,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    },
    "lfm2": {
        **RECURRENT_LIKE,
        "conv_L_cache": 3,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "falcon_h1": {**MAMBA_2, "mamba_d_ssm": 64, "head_dim": 8},
    "granitemoehybrid": {
        **MAMBA_2,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 16,
    },
    "bamba": {**MAMBA_2, "attn_layer_indices": [2]},
    "jamba": {
        **RECURRENT_LIKE,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
    },
    "nemotron_h": {
        **RECURRENT_LIKE,
        "hybrid_override_pattern": "M-*M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
        "head_dim": 8,
    },
}
"""Models whose layers keep states."""
WITHOUT_HEADS = {k: v for k, v in RECURRENT_LIKE.items() if "heads" not in k}
PURE: dict[str, dict[str, Any]] = {
    "mamba": {**WITHOUT_HEADS, "state_size": 8},
    "falcon_mamba": {**WITHOUT_HEADS, "state_size": 8},
    "mamba2": {**WITHOUT_HEADS, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
}
"""Models whose layers are all recurrent: no positions, and no attention."""
ZAMBA: dict[str, dict[str, Any]] = {
    "zamba": {
        **RECURRENT_LIKE,
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        **RECURRENT_LIKE,
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "mamba_d_state": 8,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
    },
}
"""Models that share attention blocks; the slots run the first."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **RECURRENT,
    **PURE,
    **ZAMBA,
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
REJECTED: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {**RECURRENT_LIKE, "lru_width": 32, "attention_window_size": 64},
    "minimax": {**RECURRENT_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "block_size": 16},
    "rwkv": {**WITHOUT_HEADS, "attention_hidden_size": 32},
    "bloom": {"vocab_size": 97, "hidden_size": 32, "n_layer": 3, "n_head": 4},
}
"""Models that the slots reject, or every policy does; see Zamba2 as well."""


def family_model(name: str = "qwen2", *, attention: str = "sdpa", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of an architecture, or of one of its configurations above."""
    kind = name if name in CONFIG_MAPPING else name.split("-")[0]
    config = AutoConfig.for_model(kind, **{**(ARCHITECTURES | REJECTED).get(name, LLAMA_LIKE), **changes})
    attention = "eager" if name in ("gemma2", "zamba", "rwkv", "bloom", *PURE) else attention  # which have no other
    # Of the pure recurrences, stronger ones make transformers' own steps differ from its whole rows by 3e-4.
    strength = 2.0 if name in PURE else 4.0
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    use_config_time_steps(model)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "A_log" in parameter_name or "dt_" in parameter_name:
                continue  # of a recurrence: stronger ones forget at once
            if parameter.dim() > 1:
                parameter.mul_(strength)
            elif "bias" in parameter_name:
                parameter.normal_()
    return model
