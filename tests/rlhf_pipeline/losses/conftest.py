"""A tiny policy, batches, and a slow and plain loss to compare with."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tests.rlhf_pipeline.functional.watch import relative
from tests.rlhf_pipeline.small import qwen2

VOCAB, PROMPT, LENGTH = 61, 3, 9
# Trajectories of 6, 2, 0 and 5 completion tokens after a prompt of 3.
COMPLETIONS = (6, 2, 0, 5)


class TinyPolicy(nn.Module):
    """A two-layer Qwen2 with the policy surface that a loss needs."""

    def __init__(self, dtype=torch.float32, temperature=1.0, bias=False):
        super().__init__()
        model = qwen2(vocab_size=VOCAB, tie_word_embeddings=True, initializer_range=0.2)
        self.model = model.to(dtype)
        self.temperature = temperature
        self.head_bias = nn.Parameter(torch.linspace(-1, 1, VOCAB, dtype=dtype)) if bias else None

    @property
    def head_weight(self):
        """The head's weight [V, H], tied to the embedding."""
        return self.model.lm_head.weight

    def hidden_states(self, input_ids, attention_mask):
        """The last hidden states [B, T, H]."""
        positions = (attention_mask.long().cumsum(1) - 1).clamp_min(0)
        return self.model.model(
            input_ids=input_ids, attention_mask=attention_mask.long(), position_ids=positions
        ).last_hidden_state

    def forward(self, input_ids, attention_mask, position_ids=None):
        """Logits [B, T, V] of the next token."""
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
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.7], dtype=current.dtype)[:, None] * assistant
    data = {
        "tokens": {"full": tokens},
        "masks": {"all_assistant_mask": assistant, "all_attention_mask": attention},
        "log_probs": {"full": (current + noise[0]) * assistant},
        "advantage": advantage,
        "num_prompt_tokens": torch.full((rows,), PROMPT),
        "group_id": torch.tensor([4, 4, 4, 9]),
    }
    td = TensorDict(data, batch_size=[rows])
    if ref:
        td["next", "ref_log_probs", "full"] = (current + noise[1]) * assistant
    return td


class Scorer(nn.Module):
    """A policy whose log-probs are its parameters, for numbers worked out by hand."""

    def __init__(self, log_probs):
        super().__init__()
        self.values = nn.Parameter(torch.as_tensor(log_probs, dtype=torch.float64))

    def log_probs(self, input_ids, attention_mask, score_mask=None):
        """The parameters, whatever the tokens."""
        return self.values


class Bigram(nn.Module):
    """A policy whose hidden state is the token's embedding; no library code runs in it."""

    def __init__(self, vocab=512, hidden=4):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(vocab, hidden)
        self.head_weight = nn.Parameter(torch.randn(vocab, hidden))
        self.temperature = 1.0

    def hidden_states(self, input_ids, attention_mask):
        """The embeddings [B, T, H]."""
        return self.embedding(input_ids)


def scorer_batch(mask, behaviour, advantage, **more):
    """A batch for a `Scorer`; every position is a real token but where `attention` says otherwise."""
    mask = torch.as_tensor(mask)
    attention = torch.as_tensor(more.pop("attention", torch.ones_like(mask)))
    data: dict[str, Any] = {
        "tokens": {"full": torch.zeros(mask.shape, dtype=torch.long)},
        "masks": {"all_assistant_mask": mask, "all_attention_mask": attention},
        "log_probs": {"full": torch.as_tensor(behaviour, dtype=torch.float64)},
        "advantage": torch.as_tensor(advantage, dtype=torch.float64),
    }
    td = TensorDict(data, batch_size=[mask.shape[0]])
    for key, value in more.items():
        name = {"ref": ("next", "ref_log_probs", "full"), "prox": ("prox_log_probs", "full")}
        td[name.get(key, key)] = torch.as_tensor(value, dtype=torch.float64)
    return td


def plain_loss(
    policy,
    td,
    *,
    low=0.2,
    high=0.2,
    objective="grpo",
    aggregation="token_mean",
    entropy=0.0,
    kl_ref=0.0,
    kl_inference=0.0,
    max_tokens=None,
):
    """The loss written as loops over trajectories and tokens, from all logits."""
    lp, h = log_probs_of(policy, td["tokens", "full"], td["masks", "all_attention_mask"])
    mask = td["masks", "all_assistant_mask"]
    lb, a = td["log_probs", "full"], td["advantage"]
    ref = td.get(("next", "ref_log_probs", "full"), None)
    per_sequence, lengths, groups = [], [], []
    for i in range(len(mask)):
        at = mask[i].nonzero()[:, 0].tolist()
        if not at:
            continue
        mean = torch.stack([lp[i, t] - lb[i, t] for t in at]).mean()
        total = torch.zeros((), dtype=lp.dtype)
        for t in at:
            w = (mean if objective == "gspo" else lp[i, t] - lb[i, t]).exp()
            clipped = min(max(w.item(), 1 - low), 1 + high)
            if objective == "cispo":
                loss = -clipped * a[i, t] * lp[i, t]
            else:
                inside = w * a[i, t] <= clipped * a[i, t]
                loss = -(w if inside else clipped) * a[i, t]
            loss = loss - entropy * h[i, t]
            if kl_ref:
                d = lp[i, t] - ref[i, t]
                loss = loss + kl_ref * ((-d).exp() - 1 + d)
            if kl_inference:
                d = lp[i, t] - lb[i, t]
                loss = loss + kl_inference * ((-d).exp() - 1 + d)
            total = total + loss
        per_sequence.append(total)
        lengths.append(len(at))
        groups.append(int(td["group_id"][i]))
    if aggregation == "token_mean":
        return sum(per_sequence) / sum(lengths)
    if aggregation == "sequence_mean":
        return sum(s / n for s, n in zip(per_sequence, lengths, strict=True)) / len(lengths)
    if aggregation == "group_mean":
        means = []
        for group in set(groups):
            members = [i for i, group_of_member in enumerate(groups) if group_of_member == group]
            means.append(sum(per_sequence[i] for i in members) / sum(lengths[i] for i in members))
        return sum(means) / len(means)
    scale = len(lengths) * ((max_tokens or 0) if aggregation == "dr_grpo" else 1)
    return sum(per_sequence) / scale


def as_double(td):
    """The batch with its floating leaves in float64."""
    return td.apply(lambda x: x.double() if x.is_floating_point() else x)


def gradient(policy, loss):
    """The gradient of all parameters as one vector; the parameters' own `grad` is left empty."""
    policy.zero_grad(set_to_none=True)
    loss.backward()
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in policy.parameters()])
    policy.zero_grad(set_to_none=True)
    return flat


@pytest.fixture(scope="session")
def tiny():
    """The helpers above in one place."""
    return SimpleNamespace(
        Policy=TinyPolicy,
        Scorer=Scorer,
        Bigram=Bigram,
        as_double=as_double,
        make_batch=make_batch,
        scorer_batch=scorer_batch,
        log_probs_of=log_probs_of,
        plain_loss=plain_loss,
        gradient=gradient,
        relative=relative,
        completions=COMPLETIONS,
        prompt=PROMPT,
        ln=math.log,
    )
