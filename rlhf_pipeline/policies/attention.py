"""Attention of this package's own, registered with transformers under one name: of packed rows, and of decode steps.

There is one name for all, and it stays while any context needs it, so that threads may run a model on packed rows, on
slots, and on rows that are neither, which get transformers' SDPA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_pipeline.policies._packed_attention import packed_attention
from rlhf_pipeline.policies._packing import Segments
from rlhf_pipeline.policies.attention_name import NAME, attention_selected, implementation_of, is_named

Attended = Callable[[Tensor, Tensor, Tensor, Any, float | None], Tensor]
"""Takes queries `[S, heads, 1, D]`, keys and values, the model's mask, and the scaling; returns `[S, 1, heads, D]`."""

_without_mask: ContextVar[bool] = ContextVar("without_mask", default=False)
_attended: ContextVar[Attended | None] = ContextVar("attended", default=None)
_OF_STEPS = frozenset({"dropout", "is_causal", "sliding_window", "position_ids", "cache_position", "use_cache"})
"""Arguments of a step's attention that its mask already contains, or that change nothing."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if packed_segments is not None:
        output = packed_attention(module, query, key, value, attention_mask, packed_segments, scaling=scaling, **kwargs)
        return output, None
    attended = _attended.get()
    if attended is not None:
        unknown = sorted(name for name, argument in kwargs.items() if argument is not None and name not in _OF_STEPS)
        if unknown:
            raise TypeError(
                f"{type(module).__name__} passes unsupported arguments to its attention: {', '.join(unknown)}"
            )
        return attended(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # pyright: ignore[reportReturnType]


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return None if _without_mask.get() else sdpa_mask(*args, **kwargs)


@contextmanager
def _registered(config: Any) -> Iterator[None]:
    """Let models of this config use the attention above within the context."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    with attention_selected(config):
        yield


@contextmanager
def packed_rows_running(config: Any) -> Iterator[None]:
    """Make models of this config use `packed_attention`, without a mask, within the context."""
    token = _without_mask.set(True)
    try:
        with _registered(config):
            yield
    finally:
        _without_mask.reset(token)


@contextmanager
def steps_attended_by(config: Any, attended: Attended) -> Iterator[None]:
    """Make models of this config use this attention within the context, in this thread."""
    token = _attended.set(attended)
    try:
        with _registered(config):
            yield
    finally:
        _attended.reset(token)


def same_attention_when_recomputed(config: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a checkpointed layer: recomputation uses the same attention as the forward pass."""
    return nullcontext(), _registered(config) if is_named(config) else nullcontext()


def is_sdpa(config: Any) -> bool:
    """Return whether a model's own attention is PyTorch's scaled dot product attention."""
    return implementation_of(config) == "sdpa"


def grouped_queries(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Attention of a step, see `steps_attended_by`: heads that share keys are queries at several positions.

    Args:
        query: `[rows, heads, 1, D]`.
        key: `[rows, key heads, columns, D]`.
        value: as `key`.
        mask: bool or additive, `[rows, 1, 1, columns]`.
        scaling: of the products.
    """
    shared = key.shape[1]
    by_key = query.unflatten(1, (shared, -1)).squeeze(3)
    out = scaled_dot_product_attention(by_key, key, value, attn_mask=mask, scale=scaling)
    return out.flatten(1, 2).unsqueeze(1)


class _KeyHeads(TorchFunctionMode):
    """Notes the number of key heads that reach PyTorch's attention."""

    heads = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            self.heads = args[1].shape[1]
        return func(*args, **(kwargs or {}))


@cache
def repeats_keys() -> bool:
    """Return whether transformers copies keys for each head that shares them, in a step with a mask: 5.17 does."""
    module: Any = nn.Module()
    module.num_key_value_groups = 2
    query, key = torch.zeros(1, 2, 1, 8), torch.zeros(1, 1, 8, 8)
    with _KeyHeads() as keys:
        sdpa_attention_forward(module, query, key, key, torch.ones(1, 1, 1, 8, dtype=torch.bool))
    return keys.heads > 1
