"""Head and token loss in one pass: the gradient is formed while a chunk's logits are live.

For a loss that is a sum over tokens of functions of that token's log-prob and entropy, the backward pass needs nothing
that is not known in the forward pass. So the head costs 3 matmuls instead of the 4 of recomputation or the [N, V]
activation of materialised logits. The entropy, where only its value is wanted, costs nothing: the product
`(softmax - onehot) @ weight`, which the gradient needs anyway, holds the expected logit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.functional._head import HeadPass, check_head_shapes
from rlhf_pipeline.functional.logprob import head_backward

__all__ = ["FusedTokenLoss", "TokenObjective", "fused_token_loss"]

TokenObjective = Callable[..., Sequence[torch.Tensor]]
"""`objective(log_probs [c], entropy [c] | None, *rows [c]) -> [term [c], ...]`, weighted terms per token."""


class FusedTokenLoss(NamedTuple):
    """What `fused_token_loss` returns.

    Attributes:
        losses: one scalar per term of the objective, with gradient.
        log_probs: [N], detached.
        entropy: [N], detached.
    """

    losses: tuple[torch.Tensor, ...]
    log_probs: torch.Tensor
    entropy: torch.Tensor


def _term_gradients(
    objective: TokenObjective,
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    rows: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None] | None,
) -> tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor | None]:
    """The sums of the terms and the gradients of their (scaled) total by log-prob and by entropy."""
    with torch.enable_grad():
        lp = log_probs.detach().requires_grad_()
        ent = None if entropy is None else entropy.detach().requires_grad_()
        sums = [term.sum() for term in objective(lp, ent, *rows)]
        if scales is None:
            total = torch.stack(sums).sum()
        else:
            used = [s * g for s, g in zip(sums, scales, strict=True) if g is not None]
            if not used:
                return sums, None, None
            total = torch.stack(used).sum()
        if not total.requires_grad:
            return sums, None, None
        inputs = [lp] if ent is None else [lp, ent]
        grads = torch.autograd.grad(total, inputs, allow_unused=True)
    return [s.detach() for s in sums], grads[0], grads[1] if len(grads) > 1 else None


def _common_scale(grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The one gradient that all terms get, or None; decided without a synchronisation on CUDA."""
    first = grads[0]
    for g in grads:
        if g is None or first is None:
            return None
        if g.data_ptr() != first.data_ptr() and (g.device.type != "cpu" or bool(g != first)):
            return None
    return first


def _scaled(value: torch.Tensor | None, scale: torch.Tensor) -> torch.Tensor | None:
    """Scale a gradient in place: it was collected for this one use."""
    if value is None or (scale.device.type == "cpu" and bool(scale == 1)):
        return value
    return value.mul_(scale)


class _FusedTokenLoss(torch.autograd.Function):
    """See `fused_token_loss`. Where the terms get different gradients, the backward pass makes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        objective: TokenObjective,
        rows: tuple[torch.Tensor, ...],
        settings: tuple[float, int | None, float | None, bool, int, bool],
    ) -> tuple[torch.Tensor, ...]:
        temperature, chunk_size, soft_cap, entropy_gradient, terms, grad_enabled = settings
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3] if grad_enabled else (False,) * 3
        needs = (of_hidden, of_weight, of_bias)
        with torch.autocast(hidden.device.type, enabled=False):
            head = HeadPass(hidden, weight, bias, targets, temperature, chunk_size, soft_cap, needs)
            make = {"device": hidden.device, "dtype": head.result}
            log_probs = torch.empty(hidden.shape[0], **make)
            entropy = torch.empty(hidden.shape[0], **make)
            losses = [torch.zeros((), **make) for _ in range(terms)]
            for start, end in head.chunks:
                part = slice(start, end)
                ent = entropy[part]
                x, t = head.logits(start, end), head.targets[part]
                # Without a hidden gradient, or where logits are not linear in it, no product tells the entropy.
                keep_log = entropy_gradient or not needs[0] or not head.is_linear
                if keep_log:
                    head.log_softmax_(x, t, log_probs[part], ent)
                else:
                    head.softmax_minus_onehot_(x, t, log_probs[part])
                given = ent if entropy_gradient else None
                constants = [row[part] for row in rows]
                g: torch.Tensor | None = None
                e: torch.Tensor | None = None
                if any(needs):
                    sums, g, e = _term_gradients(objective, log_probs[part], given, constants, None)
                else:
                    sums = [term.sum() for term in objective(log_probs[part], given, *constants)]
                for total, value in zip(losses, sums, strict=True):
                    total += value
                if not any(needs):
                    continue
                zeros = torch.zeros_like(ent)
                g = zeros if g is None else g.to(x.dtype)
                if keep_log:
                    head.entropy_gradient_(x, t, g, zeros if e is None else e.to(x.dtype), ent)
                    head.accumulate(x, start, end, None)
                else:
                    product = head.accumulate(x, start, end, g)
                    _entropy_from_product(head, x, part, product, log_probs[part], ent)
            head.free()
        ctx.collected = head.gradients() if any(needs) else None
        ctx.settings, ctx.objective = settings, objective
        ctx.save_for_backward(hidden, weight, bias, targets, log_probs, entropy, *rows)
        ctx.mark_non_differentiable(log_probs, entropy)
        ctx.set_materialize_grads(False)
        return (*losses, log_probs, entropy)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        temperature, chunk_size, soft_cap, entropy_gradient, terms, _ = ctx.settings
        term_grads = grads[:terms]
        # Handed over, not kept: a gradient that somebody else holds is copied on its way into `.grad`.
        collected, ctx.collected = ctx.collected, None
        scale = _common_scale(term_grads)
        if collected is not None and scale is not None:
            return (*(_scaled(value, scale) for value in collected), *[None] * 4)
        hidden, weight, bias, targets, log_probs, entropy, *rows = ctx.saved_tensors
        del collected
        with torch.autocast(hidden.device.type, enabled=False):
            _, g, e = _term_gradients(ctx.objective, log_probs, entropy if entropy_gradient else None, rows, term_grads)
            out = head_backward(
                hidden,
                weight,
                bias,
                targets,
                grad_log_probs=g,
                grad_entropy=e,
                needs=ctx.needs_input_grad[:3],
                temperature=temperature,
                chunk_size=chunk_size,
                soft_cap=soft_cap,
            )
        return (*out, *[None] * 4)


def _entropy_from_product(
    head: HeadPass,
    x: torch.Tensor,
    part: slice,
    product: torch.Tensor | None,
    log_probs: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`H = -log p_t - (E[z] - z_t)`, with `E[z] - z_t` read from `(softmax - onehot) @ weight`."""
    if product is None:
        return
    gap = torch.linalg.vecdot(product, head.hidden[part].to(product.dtype)).mul_(head.inverse)
    if head.bias is not None:
        gap = gap + x @ head.bias
    torch.add(log_probs, gap, out=out).neg_().clamp_(min=0)


def fused_token_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    objective: TokenObjective,
    rows: Sequence[torch.Tensor] = (),
    *,
    terms: int = 1,
    entropy_gradient: bool = False,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
) -> FusedTokenLoss:
    """Sum a token loss over rows of hidden states, forming its gradient chunk by chunk in the forward pass.

    The objective must return terms that are already weighted, token by token, so that chunks, micro-batches and ranks
    add up. Its rows are constants. Each term comes back as its own scalar; if all get the same gradient (the usual sum
    of losses) the gradients collected in the forward pass are used, else the logits are made again, which is slower
    and as right. Between forward and backward a gradient of the size of the head is held.

    Args:
        hidden: [N, H], the states that predict the targets.
        weight: [V, H].
        targets: int64 [N].
        objective: `objective(log_probs [c], entropy [c] | None, *rows [c])`, a sequence of `terms` tensors [c].
        rows: tensors [N] that the objective reads.
        terms: how many terms the objective returns.
        entropy_gradient: whether the objective is given the entropy with gradient; costs one more pass over the
            logits. Without it the objective gets None, and the entropy returned is exact all the same.
        temperature: logits are divided by it.
        bias: [V] or None.
        chunk_size: rows per chunk; see `token_log_probs`.
        soft_cap: of the logits; see `token_log_probs`.

    Returns:
        The losses, and the log-probs and entropies [N] without gradient.

    Raises:
        DefinitionError: shapes do not fit.

    >>> hidden, weight = torch.eye(2, requires_grad=True), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> out = fused_token_loss(hidden, weight, torch.tensor([0, 2]), lambda lp, _: [-lp / 2])
    >>> out.losses[0].backward()
    >>> hidden.grad
    tensor([[-0.2119,  0.1060],
            [ 0.1060,  0.2881]])
    """
    check_head_shapes(hidden, weight, targets, bias, temperature, chunk_size, soft_cap)
    for i, row in enumerate(rows):
        if row.shape != targets.shape:
            raise DefinitionError(f"row {i} of the objective must be {list(targets.shape)}; got {list(row.shape)}.")
    settings = (float(temperature), chunk_size, soft_cap, entropy_gradient, terms, torch.is_grad_enabled())
    out: Any = _FusedTokenLoss.apply(hidden, weight, bias, targets, objective, tuple(rows), settings)
    return FusedTokenLoss(tuple(out[:terms]), out[terms], out[terms + 1])
