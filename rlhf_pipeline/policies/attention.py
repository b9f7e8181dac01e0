"""Attention of this package's own, registered with transformers under one name: of packed rows, and of decode steps.

There is one name for all, and it stays while any context needs it, so that threads may run a model on packed rows, on
slots, and on rows that are neither, which get transformers' SDPA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf_pipeline.policies._packed_attention import packed_attention
from rlhf_pipeline.policies._packing import Segments

NAME: Final = "rlhf_pipeline"
Attended = Callable[[Tensor, Tensor, Tensor, Any, float | None], Tensor]
"""Takes queries `[S, heads, 1, D]`, keys and values, the model's mask, and the scaling; returns `[S, 1, heads, D]`."""

_without_mask: ContextVar[bool] = ContextVar("without_mask", default=False)
_attended: ContextVar[Attended | None] = ContextVar("attended", default=None)
_lock = threading.Lock()
_uses: dict[int, tuple[int, str]] = {}
"""By the id of a config that has the name: by how many contexts, and its own implementation."""


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
        found = packed_attention(module, query, key, value, attention_mask, packed_segments, scaling=scaling, **kwargs)
        return found, None
    attended = _attended.get()
    if attended is not None:
        return attended(query, key, value, attention_mask, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # pyright: ignore[reportReturnType]


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return None if _without_mask.get() else sdpa_mask(*args, **kwargs)


@contextmanager
def _named(config: Any) -> Iterator[None]:
    """Let models of this config use the attention above within the context."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    with _lock:
        uses, own = _uses.get(id(config), (0, config._attn_implementation))
        _uses[id(config)] = uses + 1, own
        config._attn_implementation = NAME
    try:
        yield
    finally:
        with _lock:
            uses, own = _uses.pop(id(config))
            if uses > 1:
                _uses[id(config)] = uses - 1, own
            else:
                config._attn_implementation = own


@contextmanager
def packed_rows_running(config: Any) -> Iterator[None]:
    """Make models of this config use `packed_attention`, without a mask, within the context."""
    token = _without_mask.set(True)
    try:
        with _named(config):
            yield
    finally:
        _without_mask.reset(token)


@contextmanager
def steps_attended_by(config: Any, attended: Attended) -> Iterator[None]:
    """Make models of this config use this attention within the context, in this thread."""
    token = _attended.set(attended)
    try:
        with _named(config):
            yield
    finally:
        _attended.reset(token)


def same_attention_when_recomputed(config: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a checkpointed layer: recomputation uses the same attention as the forward pass."""
    return nullcontext(), _named(config) if config._attn_implementation == NAME else nullcontext()


def is_sdpa(config: Any) -> bool:
    """Return whether models of this config use PyTorch's scaled dot product attention."""
    return config._attn_implementation in ("sdpa", NAME)
