"""Checks that a model computes the same hidden states through slots as without a cache.

Models of transformers share a protocol for caches and masks, and a few bend it. A wrong mask does not fail: it gives
other hidden states, and log-probs that belong to no policy. So each model is checked once, before its first completion:
two prompts of unequal length and two further tokens each, through the slot cache and in plain forward passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.policies.engines.decode_step import DecodeStep
from rlhf_pipeline.policies.engines.slot_cache import SlotCache, prefill
from rlhf_pipeline.policies.model_parts import ModelParts, evaluated, rounding

T = TypeVar("T")

WITHOUT_SLOTS = (
    "Sample it with vLLM, in the process (--set collect.engine=vllm) or on a server "
    "(--set collect.engine=http://HOST:PORT), or name another model (--set policy.path=MODEL). "
    "`rlhf-pipeline replay` learns from completions that are stored."
)
"""The advice for a model that the slot engine cannot generate with."""

_LENGTHS = (2, 5)
_NEW = 2

_verified: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def verified_parts(parts: ModelParts) -> ModelParts:
    """Return the parts with the way of masking that gives this model's own hidden states."""
    own = _verified.get(parts.trunk)
    if own is None:
        own = _find_masking(parts)
        _verified[parts.trunk] = own
    return dataclasses.replace(parts, builds_own_mask=own)


def _find_masking(parts: ModelParts) -> bool:
    # A mask built by the model is slower, but every model supports it.
    own, gap, problem = first_right(parts, (parts.builds_own_mask, True), _through_slots)
    if own is not None:
        return own
    if gap is None:
        # Diverged weights: the sampler reports them when it sees their logits.
        return parts.builds_own_mask
    reason = f"its hidden states differ from its own by {gap:.1%}"
    if gap == float("inf"):
        reason = f"its forward pass fails ({problem})"
    raise DefinitionError(
        f"The slot engine cannot generate with {type(parts.trunk).__name__}: through a KV cache {reason}. "
        f"{WITHOUT_SLOTS}"
    ) from problem


def first_right(
    parts: ModelParts, ways: Iterable[T], through: Callable[[ModelParts, T], Tensor]
) -> tuple[T | None, float | None, Exception | None]:
    """Find the first way of decoding that gives a model's own hidden states, up to rounding."""
    with evaluated(parts.trunk):  # without dropout, and layers that are recomputed in training take no cache
        expected = _plain_states(parts)
        if not bool(torch.isfinite(expected).all()):
            return None, None, None
        gap, problem = float("inf"), None
        for way in ways:
            try:
                found = through(parts, way)
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
                problem = error
                continue
            gap = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
            # Padding that reaches a state can change it by little.
            if gap < rounding(parts.head.weight, fine=1e-4 if parts.num_states else 1e-3, coarse=0.1):
                return way, gap, problem
        return None, gap, problem


def probe(parts: ModelParts) -> tuple[Tensor, Tensor, int]:
    """Return a few token ids, int64 `[2, longest + new]`, the prompts' lengths, int64 `[2]`, and how many are new."""
    device = parts.head.weight.device
    width = max(_LENGTHS) + _NEW
    ids = torch.arange(1, 2 * width + 1, device=device).reshape(2, width)  # not 0, often padding, whose embedding is 0
    return ids.remainder(parts.head.weight.shape[0]), torch.tensor(_LENGTHS, device=device), _NEW


@torch.inference_mode()
def _plain_states(parts: ModelParts) -> Tensor:
    """Return hidden states of the last prompt token and the new ones, without a cache, `[2, 1 + new, H]`."""
    rows = []
    for ids, length in zip(probe(parts)[0], _LENGTHS, strict=True):
        ids = ids[None, : length + _NEW]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        hidden = parts.hidden(input_ids=ids, position_ids=positions, use_cache=False)
        rows.append(hidden[0, length - 1 :])
    return torch.stack(rows)


@torch.inference_mode()
def _through_slots(parts: ModelParts, own: bool) -> Tensor:
    """Return the same states by prefill and single steps on two slots."""
    tokens, lengths, _ = probe(parts)
    device = tokens.device
    rows, longest = torch.arange(2, device=device), max(_LENGTHS)
    states, hidden = prefill(parts, tokens[:, :longest], lengths)
    out = [hidden]
    sizes = {"num_slots": 2, "longest_prompt": longest, "longest_completion": _NEW}
    cache = SlotCache(parts.num_layers, parts.num_states, **sizes, device=device)
    cache.begin(0, rows=0, to_come=2)
    cache.insert(rows, states, rows)
    decode = DecodeStep(dataclasses.replace(parts, builds_own_mask=own), cache)
    for step in range(_NEW):
        cache.open_window(2, longest + step)
        out.append(decode.feed(tokens[rows, lengths + step], lengths + step))
        cache.column += 1
    return torch.stack(out, 1)
