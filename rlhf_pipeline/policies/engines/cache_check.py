"""Checks that a model computes the same hidden states through slots as without a cache.

Models of transformers share a protocol for caches and masks, and a few bend it. A wrong mask does not fail: it gives
other hidden states, and log-probs that belong to no policy. So each model is checked once, before its first completion:
two prompts of unequal length and two further tokens each, through the slot cache and in plain forward passes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.policies.engines.decode_step import DecodeStep
from rlhf_pipeline.policies.engines.slot_cache import SlotCache, prefill
from rlhf_pipeline.policies.model_parts import ModelParts, evaluated, rounding

T = TypeVar("T")

WITHOUT_SLOTS = (
    "Sample with vLLM (in this process: --set collect.engine=vllm; on a server: --set "
    "collect.engine=http://HOST:PORT), or choose another model (--set policy.path=MODEL). `rlhf-pipeline replay` "
    "learns from stored completions."
)
"""The advice for a model that the slot engine cannot generate with."""

_LENGTHS = (2, 5)
_NEW = 2

_verified: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def verified_parts(parts: ModelParts) -> ModelParts:
    """Return the parts with the way of masking that gives this model's own hidden states."""
    builds_mask = _verified.get(parts.trunk)
    if builds_mask is None:
        builds_mask = _find_masking(parts)
        _verified[parts.trunk] = builds_mask
    return dataclasses.replace(parts, builds_own_mask=builds_mask)


def _find_masking(parts: ModelParts) -> bool:
    # A mask built by the model is slower, but every model supports it.
    ways, precise = (parts.builds_own_mask, True), _first_layers(parts)
    builds_mask, gap, problem = first_right(parts, ways, _through_slots)
    if builds_mask is not None and precise is not None:
        builds_mask, gap, problem = first_right(precise, (builds_mask, True), _through_slots)
    if builds_mask is not None:
        return builds_mask
    if gap is None:
        # Diverged weights: the sampler reports them when it sees their logits.
        return parts.builds_own_mask
    reason = f"its hidden states differ from those without a cache by {gap:.1%}"
    if gap == float("inf"):
        reason = f"its forward pass fails ({problem})"
    raise DefinitionError(
        f"The slot engine cannot generate with {type(parts.trunk).__name__}: with a KV cache, {reason}. {WITHOUT_SLOTS}"
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
                hidden = through(parts, way)
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
                problem = error
                continue
            gap = float((hidden - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
            # Padding that reaches a state can change it by little.
            if gap < rounding(parts.head.weight, fine=1e-4 if parts.num_states else 1e-3, coarse=0.1):
                return way, gap, problem
        return None, gap, problem


def _first_layers(parts: ModelParts) -> ModelParts | None:
    """Return the first layers of a model as one in float32, until each kind of layer has come.

    For a model with states in half precision, whose rounding hides padding that changes a state by little; None for
    others. A copy, freed after the check.
    """
    layers, embedding = getattr(parts.trunk, "layers", None), parts.trunk.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    weight, kinds = parts.head.weight, list(getattr(parts.trunk.config, "layer_types", None) or ())  # pyright: ignore[reportAttributeAccessIssue]
    if not parts.num_states or weight.dtype in (torch.float32, torch.float64) or not isinstance(layers, nn.ModuleList):
        return None
    count = max((kinds.index(kind) for kind in kinds), default=0) + 1
    rows = embedding.weight[: 2 * (max(_LENGTHS) + _NEW) + 1]
    few_ids = copy.deepcopy(embedding, {id(embedding.weight): nn.Parameter(rows.detach().float(), requires_grad=False)})
    few_ids.padding_idx = None
    memo: dict[int, Any] = {id(embedding): few_ids}
    memo[id(layers)] = nn.ModuleList([copy.deepcopy(layer, memo) for layer in layers[:count]])
    trunk: Any = copy.deepcopy(parts.trunk, memo).float()
    trunk.config.num_hidden_layers = count
    if "layer_types" in vars(trunk.config):
        trunk.config.layer_types = kinds[:count]
    head = nn.Linear(weight.shape[1], len(rows), bias=False, device=weight.device, dtype=torch.float32)
    return dataclasses.replace(parts, trunk=trunk, head=head, num_layers=count)


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
def _through_slots(parts: ModelParts, builds_mask: bool) -> Tensor:
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
    decode = DecodeStep(dataclasses.replace(parts, builds_own_mask=builds_mask), cache)
    for step in range(_NEW):
        cache.open_window(2, longest + step)
        out.append(decode.feed(tokens[rows, lengths + step], lengths + step))
        cache.column += 1
    return torch.stack(out, 1)
