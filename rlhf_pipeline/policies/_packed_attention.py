"""Attention over rows laid end to end.

transformers' own packed path builds a dense mask over the whole pack, which is slower than padding. Here each segment
is a separate call on the CPU, and one variable-length kernel serves them all on CUDA. Segments travel as a keyword
argument through the model, so that a layer that is recomputed in the backward pass finds them again.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlhf_pipeline.policies._packing import Segments

ARGUMENT = "packed_segments"
QUERY_BLOCK = 512
"""Queries of a segment with a prefix are processed in blocks of this size, which limits the size of a mask."""


class PackedUnsupported(Exception):
    """The model cannot run on packed rows; the message gives the reason. Callers fall back to padding."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: Segments,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> Tensor:
    """Attention of each token to the tokens of its own segment up to itself, and to its segment's prefix.

    Args:
        module: the attention layer.
        query: `[1, heads, N, D]`.
        key: `[1, key heads, N, D]`; key heads divide heads.
        value: as `key`.
        attention_mask: None, as the segments contain all information.
        segments: of the rows.
        scaling: of the products; `1 / sqrt(D)` when None.
        dropout: 0.
        **kwargs: further arguments from the model.

    Returns:
        `[1, N, heads, D]`.
    """
    _refuse_extras(module, query, attention_mask, dropout, segments, kwargs)
    segments.calls += 1
    segments.kernel = "varlen" if _has_varlen(query, value) else "sdpa"
    if segments.kernel == "varlen":
        return _varlen(query, key, value, segments, scaling)
    return _by_segment(query, key, value, segments, scaling)


def _refuse_extras(
    module: nn.Module,
    query: Tensor,
    mask: Tensor | None,
    dropout: float,
    segments: Segments,
    extras: dict[str, Any],
) -> None:
    """Raise `PackedUnsupported` for features beyond plain causal attention over segments."""
    window = extras.get("sliding_window")
    total = sum(segments.lengths)
    rules = [
        (mask is None, "it passes a custom mask to attention"),
        (dropout == 0.0, "its attention has dropout"),
        (getattr(module, "is_causal", True) is not False, "its attention is not causal"),
        (
            query.shape[0] == 1 and query.shape[2] == total,
            f"its attention received {list(query.shape)} for {total} tokens",
        ),
        (
            window is None or window >= segments.longest,
            f"its attention has a window of {window} and a row has {segments.longest} tokens",
        ),
        (extras.get("softcap") is None, "it caps its attention scores"),
    ]
    rules += [
        (not isinstance(extra, Tensor) or name in ("position_ids", "cache_position"), f"its attention uses {name!r}")
        for name, extra in extras.items()
    ]
    for holds, reason in rules:
        if not holds:
            raise PackedUnsupported(reason)


def _by_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """Call SDPA once per segment, or once per block of queries where a prefix needs a mask.

    The axis is split once: the gradient of a split is one concatenation, that of each slice is as large as the axis.
    """
    grouped = query.shape[1] != key.shape[1]
    queries, keys, values = (x.split(segments.lengths, 2) for x in (query, key, value))
    at = {start: i for i, start in enumerate(segments.starts)}
    out: list[Tensor] = []
    for i, (length, prefix) in enumerate(zip(segments.lengths, segments.prefix_lengths, strict=True)):
        q, k, v = queries[i], keys[i], values[i]
        if not prefix:
            out.append(scaled_dot_product_attention(q, k, v, is_causal=length > 1, scale=scaling, enable_gqa=grouped))
            continue
        shared = at[segments.prefix_starts[i]]
        k, v = torch.cat([keys[shared], k], 2), torch.cat([values[shared], v], 2)
        for first in range(0, length, QUERY_BLOCK):
            rows = min(QUERY_BLOCK, length - first)
            visible = prefix + first + rows
            mask = None
            if rows > 1:
                mask = torch.ones(rows, visible, dtype=torch.bool, device=q.device).tril(prefix + first)
            block = q[:, :, first : first + rows]
            out.append(
                scaled_dot_product_attention(
                    block, k[:, :, :visible], v[:, :, :visible], attn_mask=mask, scale=scaling, enable_gqa=grouped
                )
            )
    return torch.cat(out, 2).transpose(1, 2).contiguous()  # as other attention returns it; JetMoE takes views


def one_kernel_for_segments(x: Tensor) -> bool:
    """Return whether torch has a variable-length kernel for this device and dtype: CUDA, half precision."""
    return x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16) and _varlen_function() is not None


def _has_varlen(query: Tensor, value: Tensor) -> bool:
    """Return whether that kernel takes these tensors: equal head sizes, multiples of 8 up to 256."""
    size = query.shape[-1]
    return size == value.shape[-1] <= 256 and size % 8 == 0 and one_kernel_for_segments(query)


@cache
def _varlen_function() -> tuple[Any, frozenset[str]] | None:
    """Return `varlen_attn` and its argument names, which differ between versions of torch; None before 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = frozenset(inspect.signature(varlen_attn).parameters)
    return (varlen_attn, names) if names & {"window_size", "is_causal"} else None


def _varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """Run all segments in one kernel, causal from the last key back, so that every query sees its whole prefix."""
    function, names = _varlen_function() or (None, frozenset())
    if function is None:
        raise PackedUnsupported("this version of torch has no variable-length attention")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    bounds_q, bounds_k, longest_q, longest_k, gather = segments.varlen(query.device)
    if gather is not None:
        k, v = k.index_select(0, gather), v.index_select(0, gather)
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if scaling is not None and scaling != q.shape[-1] ** -0.5:
        if "scale" not in names:
            raise PackedUnsupported(
                "the variable-length attention of this version of torch accepts no scale, but the model's scale is "
                f"{scaling}"
            )
        options["scale"] = scaling
    if k.shape[1] != q.shape[1]:
        if "enable_gqa" in names:
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = function(q.contiguous(), k.contiguous(), v.contiguous(), bounds_q, bounds_k, longest_q, longest_k, **options)
    return out[None]
