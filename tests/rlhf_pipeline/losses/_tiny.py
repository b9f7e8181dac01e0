"""A tiny policy and batches for the tests of the losses."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCAB, PROMPT, LENGTH = 61, 3, 9
# Trajectories of 6, 2, 0 and 5 completion tokens after a prompt of 3.
COMPLETIONS = (6, 2, 0, 5)


class TinyPolicy(nn.Module):
    """A two-layer Qwen2 with the policy surface that a loss needs."""

    def __init__(self, dtype=torch.float32, temperature=1.0, bias=False):
        super().__init__()
        config = Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
        torch.manual_seed(0)
        model: Any = Qwen2ForCausalLM(config)
        self.model = model.to(dtype).eval()
        self.temperature = temperature
        self.head_bias = nn.Parameter(torch.linspace(-1, 1, VOCAB, dtype=dtype)) if bias else None

    @property
    def head_weight(self):
        return self.model.lm_head.weight

    def hidden_states(self, input_ids, attention_mask):
        positions = (attention_mask.long().cumsum(1) - 1).clamp_min(0)
        return self.model.model(
            input_ids=input_ids, attention_mask=attention_mask.long(), position_ids=positions
        ).last_hidden_state

    def forward(self, input_ids, attention_mask, position_ids=None):
        logits = self.hidden_states(input_ids, attention_mask) @ self.head_weight.t()
        return logits if self.head_bias is None else logits + self.head_bias


def log_probs_of(policy, tokens, attention):
    """Log-probs and entropies [B, T] of every token by log_softmax over all logits; 0 at the first."""
    log_p = torch.log_softmax(policy(tokens, attention)[:, :-1] / policy.temperature, -1)
    chosen = log_p.gather(2, tokens[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    pad = torch.zeros_like(chosen[:, :1])
    return torch.cat([pad, chosen], 1), torch.cat([pad, entropy], 1)


def make_batch(policy, *, spread=0.3, seed=0, ref=True, extra=0):
    """A right-padded batch with stale behaviour log-probs; `extra` more columns of padding."""
    g = torch.Generator().manual_seed(seed)
    rows, width = len(COMPLETIONS), LENGTH + extra
    tokens = torch.randint(0, VOCAB, (rows, LENGTH), generator=g)
    tokens = torch.cat([tokens, torch.zeros(rows, extra, dtype=torch.long)], 1)
    lengths = torch.tensor(COMPLETIONS)[:, None] + PROMPT
    at = torch.arange(width)
    attention = at < lengths
    assistant = attention & (at >= PROMPT)
    with torch.no_grad():
        current, _ = log_probs_of(policy, tokens, attention)
    noise = torch.randn(2, rows, LENGTH, generator=g)
    noise = torch.cat([noise, torch.zeros(2, rows, extra)], 2).to(current.dtype) * spread
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.7])[:, None] * assistant
    data = {
        "tokens": {"full": tokens},
        "masks": {"all_assistant_mask": assistant, "all_attention_mask": attention},
        "log_probs": {"full": ((current + noise[0]) * assistant).float()},
        "advantage": advantage,
        "num_prompt_tokens": torch.full((rows,), PROMPT),
    }
    td = TensorDict(data, batch_size=[rows])
    if ref:
        td["next", "ref_log_probs", "full"] = ((current + noise[1]) * assistant).float()
    return td
