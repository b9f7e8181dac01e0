"""The name under which models find this package's attention, and the implementation of each model that it replaces."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

NAME: Final = "rlhf_pipeline"

_lock = threading.Lock()
_uses: dict[int, tuple[int, str]] = {}
"""By the id of a config with this name: the number of contexts, and the original implementation."""


@contextmanager
def attention_selected(config: Any) -> Iterator[None]:
    """Let models of this config use the attention of that name within the context."""
    with _lock:
        uses, implementation = _uses.get(id(config), (0, config._attn_implementation))
        _uses[id(config)] = uses + 1, implementation
        config._attn_implementation = NAME
    try:
        yield
    finally:
        with _lock:
            uses, implementation = _uses.pop(id(config))
            if uses > 1:
                _uses[id(config)] = uses - 1, implementation
            else:
                config._attn_implementation = implementation


def is_named(config: Any) -> bool:
    """Return whether models of this config use the attention of that name now."""
    return config._attn_implementation == NAME


def implementation_of(config: Any) -> str | None:
    """Return a model's own attention implementation, also while another thread has replaced it."""
    with _lock:
        _, implementation = _uses.get(id(config), (0, getattr(config, "_attn_implementation", None)))
    return implementation
