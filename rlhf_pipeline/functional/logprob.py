"""Log-probabilities of chosen tokens straight from hidden states, in chunks of rows.

`[N, V]` logits never exist: a chunk of rows goes through the head, leaves one number per row, and its buffer is
used again. The backward pass makes the chunk's logits a second time, so the head costs 4 matmuls instead of 3.
`fused_head.fused_token_loss` has the 3-matmul form for losses that are sums over tokens.
"""

from __future__ import annotations

from typing import Any, Literal, cast, overload

import torch
from torch.autograd.function import once_differentiable

from rlhf_pipeline.functional._head import HeadPass, check_head_shapes

__all__ = ["entropy_of", "head_backward", "token_log_probs"]


def entropy_of(log_probs: torch.Tensor) -> torch.Tensor:
    """The entropy of whole distributions, in nats: `-sum p log p` with `0 log 0 = 0`, differentiable.

    Args:
        log_probs: [..., V], from a log-softmax; -inf where a token is banned.

    >>> entropy_of(torch.tensor([0.5, 0.5, 0.0]).log())
    tensor(0.6931)
    """
    return -(log_probs.exp() * log_probs.masked_fill(torch.isneginf(log_probs), 0.0)).sum(-1)


def head_backward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    needs: tuple[bool, bool, bool],
    temperature: float = 1.0,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of a head from gradients of its log-probs and entropies, making the logits again.

    Args:
        hidden: [N, H].
        weight: [V, H].
        bias: [V] or None.
        targets: int64 [N].
        grad_log_probs: [N] or None.
        grad_entropy: [N] or None.
        needs: whether to compute the gradient of (hidden, weight, bias); what is not needed is skipped.
        temperature: logits are divided by it.
        chunk_size: rows per chunk.
        soft_cap: see `token_log_probs`.

    Returns:
        The gradients of (hidden, weight, bias), None where not needed.
    """
    if grad_log_probs is None and grad_entropy is None:
        return None, None, None
    head = HeadPass(hidden, weight, bias, targets, temperature, chunk_size, soft_cap, needs)
    for start, end in head.chunks:
        x, t = head.logits(start, end), head.targets[start:end]
        g = None if grad_log_probs is None else grad_log_probs[start:end].to(x.dtype)
        if grad_entropy is None:
            head.softmax_minus_onehot_(x, t)
            head.accumulate(x, start, end, g)
            continue
        log_probs, entropy = x.new_empty(end - start), x.new_empty(end - start)
        head.log_softmax_(x, t, log_probs, entropy)
        g = torch.zeros_like(log_probs) if g is None else g
        head.entropy_gradient_(x, t, g, grad_entropy[start:end].to(x.dtype), entropy)
        head.accumulate(x, start, end, None)
    head.free()
    return head.gradients()


class _TokenLogProbs(torch.autograd.Function):
    """Chunked head to log-probs and entropies; the logits are made again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        settings: tuple[float, int | None, float | None],
        return_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.settings = settings
        with torch.autocast(hidden.device.type, enabled=False):
            head = HeadPass(hidden, weight, bias, targets, *settings)
            make = {"device": hidden.device, "dtype": head.result}
            log_probs = torch.empty(hidden.shape[0], **make)
            entropy = torch.empty(hidden.shape[0], **make) if return_entropy else None
            for start, end in head.chunks:
                part = None if entropy is None else entropy[start:end]
                x = head.logits(start, end)
                head.log_softmax_(x, head.targets[start:end], log_probs[start:end], part)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        temperature, chunk_size, soft_cap = ctx.settings
        with torch.autocast(hidden.device.type, enabled=False):
            out = head_backward(
                hidden,
                weight,
                bias,
                targets,
                grad_log_probs=grads[0],
                grad_entropy=grads[1],
                needs=ctx.needs_input_grad[:3],
                temperature=temperature,
                chunk_size=chunk_size,
                soft_cap=soft_cap,
            )
        return (*out, None, None, None)


@overload
def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
    return_entropy: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
    return_entropy: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
    return_entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`log_softmax((hidden @ weight.T + bias) / temperature)` at `targets`, never more than [chunk, V] at once.

    Differentiable once in hidden, weight and bias; gradients that nothing asks for are not computed (a frozen head
    skips a third of the backward pass). The logits, the log-sum-exp (maximum subtracted) and the weight's gradient
    over chunks are float32 whatever the dtype of the operands; float64 operands stay float64. bfloat16 operands
    are multiplied as they are on CUDA, with a float32 product, and as float32 on the CPU.

    Args:
        hidden: [N, H], the state that *predicts* each target: for token `t` of a sequence, the state at `t - 1`.
        weight: [V, H], the head's weight.
        targets: int64 [N], ids in [0, V).
        temperature: the sampling temperature; logits are divided by it.
        bias: [V] or None.
        chunk_size: rows per chunk. None means 256 to 1024 rows on the CPU (524 at a vocabulary of 32,000, 256 at
            151,936) and 2**28 logits on CUDA. Measured on 2 cores at H = 256 and V = 151,936, in microseconds per row
            for the three matmuls of a step: 64 rows 1861, 128 rows 1550, 256 rows 1423, 512 rows 1306. So a chunk four
            times smaller costs 30 %, and one twice as large gains 8 % for twice the memory.
        soft_cap: logits `z` become `soft_cap * tanh(z / soft_cap)` before the temperature (Gemma 2); None for no cap.
        return_entropy: also return the entropy of each row's distribution, differentiable too.

    Returns:
        float32 [N] in nats (float64 for float64 inputs); with `return_entropy`, a pair with the entropy [N].

    Raises:
        DefinitionError: shapes do not fit, or the temperature is not above 0.

    >>> hidden, weight = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> token_log_probs(hidden, weight, torch.tensor([0, 2])).exp()
    tensor([0.5761, 0.2119])
    """
    check_head_shapes(hidden, weight, targets, bias, temperature, chunk_size, soft_cap)
    settings = (float(temperature), chunk_size, soft_cap)
    out = cast(
        tuple[torch.Tensor, torch.Tensor],
        _TokenLogProbs.apply(hidden, weight, bias, targets, settings, return_entropy),
    )
    return out if return_entropy else out[0]
