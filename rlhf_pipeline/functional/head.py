"""The head of a language model on rows of hidden states: log-probs, entropies, token losses, and their gradients.

`[N, V]` logits never exist. The rows go through the head in chunks: a chunk leaves one number per row, and its buffer
is reused. `token_log_probs` recomputes a chunk's logits in the backward pass, so the head costs 4 matmuls instead of 3.
`fused_token_loss` has the 3-matmul form, for losses that are sums over tokens of functions of that token's log-prob and
entropy: their gradient is computed while the chunk's logits exist. If only the value of the entropy is needed, it is
free there: the product `(softmax - onehot) @ weight`, which the gradient needs anyway, contains the expected logit.

`HeadPass` runs without autograd, on buffers that are made once per call. Three things make it fast:

* the logits of a chunk are in one buffer that is reused, so its pages are faulted in once;
* passes over a chunk process blocks of rows that fit in a cache (CPU only);
* the gradient of the logits is kept *unscaled* (`softmax - onehot`), and the per-row factor is applied to the
  [chunk, H] side of both matmuls, so no pass over [chunk, V] is spent on scaling.

A soft cap (`c * tanh(z / c)`, Gemma 2) costs a second buffer of [chunk, V], which holds its derivative.

Names of tensors end with their axes where those are not the arguments': C rows of a chunk, R rows of a block, V tokens
of the vocabulary, H hidden size. `x_CV` holds logits, log-probs or gradients in turn, as it is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast, overload

import torch
from torch.autograd.function import once_differentiable

from rlhf_pipeline.errors import DefinitionError

__all__ = [
    "FusedTokenLoss",
    "Head",
    "TokenObjective",
    "entropy_of",
    "fused_token_loss",
    "head_backward",
    "token_log_probs",
]

CPU_CHUNK_ELEMENTS = 1 << 24
CUDA_CHUNK_ELEMENTS = 1 << 28
CPU_BLOCK_ELEMENTS = 1 << 20
CPU_CHUNK_ROWS = (256, 1024)
CUDA_CHUNK_ROWS = (64, 8192)
_LEAST = -1e30
"""Replaces a log-prob of -inf before it is multiplied by its probability, 0, so that `0 log 0 = 0`."""


def default_chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Return the number of rows of a chunk: a budget of elements divided by the vocabulary size.

    2**24 elements (64 MiB in float32) on the CPU, within 256 to 1024 rows, because a matmul with fewer rows is slow
    there; 2**28 (1 GiB) elsewhere, at least 64 rows.

    >>> [default_chunk_rows(vocab, torch.device("cpu")) for vocab in (32_000, 151_936)]
    [524, 256]
    """
    cpu = device.type == "cpu"
    budget = CPU_CHUNK_ELEMENTS if cpu else CUDA_CHUNK_ELEMENTS
    least, most = CPU_CHUNK_ROWS if cpu else CUDA_CHUNK_ROWS
    return max(least, min(most, budget // max(vocab_size, 1)))


def row_chunks(rows: int, chunk: int) -> list[tuple[int, int]]:
    """Cut `rows` into ranges of nearly equal size, none above `chunk`.

    Sizes are equal to avoid a short tail: most BLAS libraries use another path for a matmul with very few rows,
    which is slower per row and rounds differently.

    >>> row_chunks(10, 4)
    [(0, 4), (4, 7), (7, 10)]
    >>> row_chunks(0, 4)
    []
    """
    count = -(-rows // chunk)
    edges = [0]
    for i in range(count):
        edges.append(edges[-1] + rows // count + (1 if i < rows % count else 0))
    return list(pairwise(edges))


@cache
def writes_float32(device: torch.device) -> bool:
    """Return whether a matmul of bfloat16 operands can write and accumulate float32 on a device; tried once.

    >>> writes_float32(torch.device("cpu"))
    False
    """
    if device.type != "cuda" or "dtype_out" not in torch.ops.aten.addmm.overloads():
        return False
    ones = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    out = torch.empty(16, 16, device=device)
    try:
        torch.ops.aten.mm.dtype_out(ones, ones.t(), torch.float32, out=out)
        torch.ops.aten.addmm.dtype_out(out, ones.t(), ones, torch.float32, alpha=-0.5, out=out)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool((out == 8.0).all())


def operand_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of the matmul operands; the products are always float32 (float64 for float64 inputs).

    bfloat16 operands stay bfloat16 on CUDA, where a matmul can write float32. Everywhere else, and for
    float16 (whose range is too small for scaled gradients), operands are float32.
    """
    if torch.float64 in (hidden.dtype, weight.dtype):
        return torch.float64
    if torch.bfloat16 in (hidden.dtype, weight.dtype) and writes_float32(hidden.device):
        return torch.bfloat16
    return torch.float32


class Head(NamedTuple):
    """The head of a language model, which turns the hidden state that predicts a token into logits.

    Attributes:
        weight: [V, H].
        bias: [V] or None.
        temperature: of sampling; logits are divided by it.
        soft_cap: logits `z` become `soft_cap * tanh(z / soft_cap)` before the temperature (Gemma 2); None for no cap.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    temperature: float = 1.0
    soft_cap: float | None = None


def check_head_shapes(hidden: torch.Tensor, head: Head, targets: torch.Tensor, chunk_size: int | None) -> None:
    """Raise `DefinitionError` with the shapes found if the inputs of a head do not fit together."""
    weight, bias, temperature, soft_cap = head
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise DefinitionError(
            f"hidden must have shape [N, H] and weight [V, H]; got {list(hidden.shape)} and "
            f"{list(weight.shape)}. Flatten the hidden states with hidden[mask] first."
        )
    if targets.shape != hidden.shape[:1] or targets.dtype not in (torch.int64, torch.int32):
        raise DefinitionError(
            f"targets must be int64 of shape [{hidden.shape[0]}], one token id per row of hidden; got {targets.dtype} "
            f"of shape {list(targets.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise DefinitionError(
            f"bias must have shape [{weight.shape[0]}], one number per token id; got {list(bias.shape)}."
        )
    if not temperature > 0.0:
        raise DefinitionError(
            f"temperature must be above 0, because logits are divided by it; got {temperature}. Score greedy "
            "rollouts at temperature 1.0."
        )
    if chunk_size is not None and chunk_size < 1:
        raise DefinitionError(f"chunk_size must be at least 1 row, or None; got {chunk_size}.")
    if soft_cap is not None and not soft_cap > 0.0:
        raise DefinitionError(f"soft_cap must be above 0, or None for logits without a cap; got {soft_cap}.")


class HeadPass:
    """One pass over the rows of a head: makes logits chunk by chunk and collects gradients.

    Args:
        hidden: [N, H].
        head: turns them into logits.
        targets: int64 [N].
        chunk_size: rows per chunk, or None for `default_chunk_rows`.
        needs: whether to compute gradients of (hidden, weight, bias).
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        head: Head,
        targets: torch.Tensor,
        chunk_size: int | None,
        needs: tuple[bool, bool, bool] = (False, False, False),
    ) -> None:
        weight, bias, temperature, soft_cap = head
        self.operand = operand_dtype(hidden, weight)
        self.result = torch.float64 if self.operand == torch.float64 else torch.float32
        self.hidden, self.hidden_dtype, self.weight_dtype = hidden, hidden.dtype, weight.dtype
        self.weight = weight.to(self.operand)
        self.bias = None if bias is None else bias.to(self.result) / temperature
        self.cap = None if soft_cap is None else soft_cap / temperature
        self.bias_dtype = None if bias is None else bias.dtype
        self.targets = targets.long()
        self.inverse = 1.0 / temperature
        rows, self.vocab = hidden.shape[0], weight.shape[0]
        chunk = chunk_size or default_chunk_rows(self.vocab, hidden.device)
        self.chunks = row_chunks(rows, chunk)
        largest = max((e - s for s, e in self.chunks), default=0)
        make = {"device": hidden.device, "dtype": self.result}
        self._buffer = torch.empty(largest, self.vocab, **make)
        block = CPU_BLOCK_ELEMENTS // self.vocab if hidden.device.type == "cpu" else largest
        self.block = max(1, min(block, largest))
        self._slope = torch.empty_like(self._buffer) if self.cap is not None and any(needs) else None
        self._scratch: torch.Tensor | None = None
        need_hidden, need_weight, need_bias = needs
        self.grad_hidden = torch.empty_like(hidden) if need_hidden else None
        self.grad_weight: torch.Tensor | None = None
        if need_weight:
            new = torch.empty if self.chunks else torch.zeros
            self.grad_weight = new(weight.shape, **make)
        self.grad_bias = torch.zeros(self.vocab, **make) if need_bias else None

    def logits(self, start: int, end: int) -> torch.Tensor:
        """Return the tempered logits [end - start, V] of a chunk, in the buffer that the next call reuses."""
        x_CV = self._buffer[: end - start]
        h_CH = self.hidden[start:end].to(self.operand)
        if self.operand == self.result:
            torch.mm(h_CH if self.inverse == 1.0 else h_CH * self.inverse, self.weight.t(), out=x_CV)
        else:
            torch.ops.aten.mm.dtype_out(h_CH, self.weight.t(), self.result, out=x_CV)
            if self.inverse != 1.0:
                x_CV.mul_(self.inverse)
        if self.bias is not None:
            x_CV.add_(self.bias)
        return x_CV if self.cap is None else self._capped_(x_CV, self.cap)

    def _capped_(self, x_CV: torch.Tensor, cap: float) -> torch.Tensor:
        """Cap tempered logits in place, and keep the derivative of the cap if a gradient is needed."""
        x_CV.div_(cap).tanh_()
        if self._slope is not None:
            torch.square(x_CV, out=self._slope[: x_CV.shape[0]]).neg_().add_(1.0)
        return x_CV.mul_(cap)

    def blocks(self, x_CV: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield blocks of the rows of `x_CV` that fit in a cache, as slices and views."""
        for start in range(0, x_CV.shape[0], self.block):
            part = slice(start, min(start + self.block, x_CV.shape[0]))
            yield part, x_CV[part]

    def scratch(self, like: torch.Tensor) -> torch.Tensor:
        """Return a second block-sized buffer, made on first use."""
        if self._scratch is None:
            self._scratch = torch.empty(self.block, self.vocab, device=like.device, dtype=like.dtype)
        return self._scratch[: like.shape[0]]

    def log_softmax_(
        self,
        x_CV: torch.Tensor,
        targets: torch.Tensor,
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None = None,
    ) -> None:
        """Turn logits into log-probabilities in place; write those of the targets and, if given, the entropy."""
        for part, y_RV in self.blocks(x_CV):
            torch.log_softmax(y_RV, -1, out=y_RV)
            log_probs[part] = y_RV.gather(1, targets[part, None])[:, 0]
            if entropy is not None:
                if self.bias is not None:
                    y_RV.clamp_(min=_LEAST)  # a bias of -inf bans a token; 0 times its log-prob is 0
                p_RV = torch.exp(y_RV, out=self.scratch(y_RV))
                entropy[part] = torch.linalg.vecdot(p_RV, y_RV).neg_()

    def softmax_minus_onehot_(
        self, x_CV: torch.Tensor, targets: torch.Tensor, log_probs: torch.Tensor | None = None
    ) -> None:
        """Turn logits into `softmax - onehot` in place, and write the targets' log-probs if given.

        The log-prob is `x_t - max + log(max p)`: one exponential per element, and exact even if `p_t`
        underflows.
        """
        for part, y_RV in self.blocks(x_CV):
            index = targets[part, None]
            if log_probs is None:
                torch.softmax(y_RV, -1, out=y_RV)
            else:
                lead = y_RV.gather(1, index)[:, 0].sub_(y_RV.amax(-1))
                torch.softmax(y_RV, -1, out=y_RV)
                log_probs[part] = lead.add_(y_RV.amax(-1).log_())
            y_RV.scatter_add_(1, index, y_RV.new_full((), -1.0).expand(index.shape))

    def entropy_gradient_(
        self,
        x_CV: torch.Tensor,
        targets: torch.Tensor,
        grad_log_prob: torch.Tensor,
        grad_entropy: torch.Tensor,
        entropy: torch.Tensor,
    ) -> None:
        """Turn log-probabilities into minus the logits' gradient, in place.

        `-dL/dx = p * (g + e * (log p + H)) - g * onehot`, where `g` and `e` are the gradients of the target's
        log-prob and of the entropy `H`.
        """
        offset = (grad_log_prob + grad_entropy * entropy)[:, None]
        for part, y_RV in self.blocks(x_CV):
            p_RV = torch.exp(y_RV, out=self.scratch(y_RV))
            y_RV.mul_(grad_entropy[part, None]).add_(offset[part]).mul_(p_RV)
            y_RV.scatter_add_(1, targets[part, None], -grad_log_prob[part, None])

    def accumulate(
        self, x_CV: torch.Tensor, start: int, end: int, row_scale: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Add the gradients of a chunk. `x_CV` contains the negative gradient of the logits before `row_scale`."""
        if self._slope is not None:
            x_CV.mul_(self._slope[: x_CV.shape[0]])
        d_CV = x_CV.to(self.operand)
        product_CH = None
        if self.grad_hidden is not None:
            if self.operand == self.result:
                product_CH = torch.mm(d_CV, self.weight)
            else:
                product_CH = torch.empty(d_CV.shape[0], self.weight.shape[1], device=d_CV.device)
                torch.ops.aten.mm.dtype_out(d_CV, self.weight, self.result, out=product_CH)
            factor = -self.inverse if row_scale is None else (row_scale * -self.inverse)[:, None]
            self.grad_hidden[start:end] = product_CH * factor
        if self.grad_weight is not None:
            h_CH = self.hidden[start:end].to(self.operand)
            if row_scale is not None:
                h_CH = (h_CH * row_scale[:, None]).to(self.operand)
            beta, alpha = (0.0 if start == 0 else 1.0), -self.inverse
            acc = self.grad_weight
            if self.operand == self.result:
                torch.addmm(acc, d_CV.t(), h_CH, beta=beta, alpha=alpha, out=acc)
            else:
                torch.ops.aten.addmm.dtype_out(acc, d_CV.t(), h_CH, self.result, beta=beta, alpha=alpha, out=acc)
        if self.grad_bias is not None:
            scale = x_CV.new_ones(x_CV.shape[0]) if row_scale is None else row_scale.to(x_CV.dtype)
            self.grad_bias.addmv_(x_CV.t(), scale, alpha=-self.inverse)
        return product_CH

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of (hidden, weight, bias) in the dtypes of the inputs, and free the chunk buffers."""
        self._buffer, self._slope, self._scratch = self._buffer[:0], None, None
        weight = None if self.grad_weight is None else self.grad_weight.to(self.weight_dtype)
        bias = None
        if self.grad_bias is not None and self.bias_dtype is not None:
            bias = self.grad_bias.to(self.bias_dtype)
        return self.grad_hidden, weight, bias


def entropy_of(log_probs: torch.Tensor) -> torch.Tensor:
    """Return the entropy of complete distributions, in nats: `-sum p log p` with `0 log 0 = 0`, differentiable.

    Args:
        log_probs: [..., V], from a log-softmax; -inf for a banned token.

    >>> entropy_of(torch.tensor([0.5, 0.5, 0.0]).log())
    tensor(0.6931)
    """
    return -(log_probs.exp() * log_probs.masked_fill(torch.isneginf(log_probs), 0.0)).sum(-1)


def head_backward(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    *,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    needs: tuple[bool, bool, bool],
    chunk_size: int | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Compute the gradients of a head from the gradients of its log-probs and entropies, recomputing the logits.

    Args:
        hidden: [N, H].
        head: the head that was applied to them.
        targets: int64 [N].
        grad_log_probs: [N] or None.
        grad_entropy: [N] or None.
        needs: whether to compute the gradients of (hidden, weight, bias); the others are skipped.
        chunk_size: rows per chunk.
    """
    if grad_log_probs is None and grad_entropy is None:
        return None, None, None
    rows = HeadPass(hidden, head, targets, chunk_size, needs)
    for start, end in rows.chunks:
        x_CV, targets_C = rows.logits(start, end), rows.targets[start:end]
        grad_C = None if grad_log_probs is None else grad_log_probs[start:end].to(x_CV.dtype)
        if grad_entropy is None:
            rows.softmax_minus_onehot_(x_CV, targets_C)
            rows.accumulate(x_CV, start, end, grad_C)
            continue
        log_probs, entropy = x_CV.new_empty(end - start), x_CV.new_empty(end - start)
        rows.log_softmax_(x_CV, targets_C, log_probs, entropy)
        grad_C = torch.zeros_like(log_probs) if grad_C is None else grad_C
        rows.entropy_gradient_(x_CV, targets_C, grad_C, grad_entropy[start:end].to(x_CV.dtype), entropy)
        rows.accumulate(x_CV, start, end, None)
    return rows.gradients()


class _TokenLogProbs(torch.autograd.Function):
    """The chunked head that gives log-probs and entropies; the backward pass recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        settings: tuple[float, float | None, int | None],
        return_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.settings = settings
        with torch.autocast(hidden.device.type, enabled=False):
            temperature, soft_cap, chunk_size = settings
            head = HeadPass(hidden, Head(weight, bias, temperature, soft_cap), targets, chunk_size)
            make = {"device": hidden.device, "dtype": head.result}
            log_probs = torch.empty(hidden.shape[0], **make)
            entropy = torch.empty(hidden.shape[0], **make) if return_entropy else None
            for start, end in head.chunks:
                part = None if entropy is None else entropy[start:end]
                x_CV = head.logits(start, end)
                head.log_softmax_(x_CV, head.targets[start:end], log_probs[start:end], part)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        temperature, soft_cap, chunk_size = ctx.settings
        with torch.autocast(hidden.device.type, enabled=False):
            out = head_backward(
                hidden,
                Head(weight, bias, temperature, soft_cap),
                targets,
                grad_log_probs=grads[0],
                grad_entropy=grads[1],
                needs=ctx.needs_input_grad[:3],
                chunk_size=chunk_size,
            )
        return (*out, None, None, None)


@overload
def token_log_probs(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    *,
    chunk_size: int | None = None,
    return_entropy: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def token_log_probs(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    *,
    chunk_size: int | None = None,
    return_entropy: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
def token_log_probs(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    *,
    chunk_size: int | None = None,
    return_entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return `log_softmax((hidden @ weight.T + bias) / temperature)` at `targets`, with [chunk, V] in memory at most.

    Differentiable once in hidden, weight and bias; gradients that are not needed are not computed (a frozen head
    skips a third of the backward pass). The logits, the log-sum-exp (maximum subtracted) and the weight's gradient
    over chunks are float32 whatever the dtype of the operands; float64 operands stay float64. On CUDA, bfloat16
    operands are multiplied unchanged, with a float32 product; on the CPU they are multiplied as float32.

    Args:
        hidden: [N, H], the state that *predicts* each target: for token `t` of a sequence, the state at `t - 1`.
        head: turns them into logits.
        targets: int64 [N], ids in [0, V).
        chunk_size: rows per chunk. None means 256 to 1024 rows on the CPU (524 at a vocabulary of 32,000, 256 at
            151,936) and 2**28 logits on CUDA. Measured on 2 cores at H = 256 and V = 151,936, in microseconds per row
            for the three matmuls of a step: 64 rows 1861, 128 rows 1550, 256 rows 1423, 512 rows 1306. So a chunk four
            times smaller costs 30 %, and one twice as large gains 8 % for twice the memory.
        return_entropy: also return the entropy of each row's distribution, differentiable too.

    Returns:
        float32 [N] in nats (float64 for float64 inputs); with `return_entropy`, a pair with the entropy [N].

    >>> hidden, weight = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> token_log_probs(hidden, Head(weight), torch.tensor([0, 2])).exp()
    tensor([0.5761, 0.2119])
    """
    check_head_shapes(hidden, head, targets, chunk_size)
    settings = (float(head.temperature), head.soft_cap, chunk_size)
    out = cast(
        tuple[torch.Tensor, torch.Tensor],
        _TokenLogProbs.apply(hidden, head.weight, head.bias, targets, settings, return_entropy),
    )
    return out if return_entropy else out[0]


TokenObjective = Callable[..., Sequence[torch.Tensor]]
"""`objective(log_probs [c], entropy [c] | None, *rows [c]) -> [term [c], ...]`, weighted terms per token."""


class FusedTokenLoss(NamedTuple):
    """The result of `fused_token_loss`.

    Attributes:
        losses: one scalar per term of the objective, with gradient.
        log_probs: [N], detached.
        entropy: [N], detached.
    """

    losses: tuple[torch.Tensor, ...]
    log_probs: torch.Tensor
    entropy: torch.Tensor


def _gradients(
    sums: Sequence[torch.Tensor], log_probs: torch.Tensor, entropy: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of the total by log-prob and by entropy."""
    with torch.enable_grad():
        total = torch.stack(list(sums)).sum() if sums else None
    if total is None or not total.requires_grad:
        return None, None
    inputs = [log_probs] if entropy is None else [log_probs, entropy]
    gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    return gradients[0], gradients[1] if len(gradients) > 1 else None


def _leaf(values: torch.Tensor) -> torch.Tensor:
    """Return values that begin a separate graph."""
    return values.detach().requires_grad_()


def _common_scale(grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the gradient if all terms have the same one, else None; decided without a synchronisation on CUDA."""
    first = grads[0]
    for g in grads:
        if g is None or first is None:
            return None
        if g.data_ptr() != first.data_ptr() and (g.device.type != "cpu" or bool(g != first)):
            return None
    return first


class _FusedTokenLoss(torch.autograd.Function):
    """See `fused_token_loss`. If the terms have different gradients, the backward pass recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        objective: TokenObjective,
        rows: tuple[torch.Tensor, ...],
        settings: tuple[float, float | None, int | None, bool, int, bool],
    ) -> tuple[torch.Tensor, ...]:
        temperature, soft_cap, chunk_size, entropy_gradient, terms, grad_enabled = settings
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3] if grad_enabled else (False,) * 3
        needs = (of_hidden, of_weight, of_bias)
        with torch.autocast(hidden.device.type, enabled=False):
            head = HeadPass(hidden, Head(weight, bias, temperature, soft_cap), targets, chunk_size, needs)
            make = {"device": hidden.device, "dtype": head.result}
            log_probs = torch.empty(hidden.shape[0], **make)
            entropy = torch.empty(hidden.shape[0], **make)
            losses = [torch.zeros((), **make) for _ in range(terms)]
            for start, end in head.chunks:
                part = slice(start, end)
                entropy_C = entropy[part]
                x_CV, targets_C = head.logits(start, end), head.targets[part]
                # Without a hidden gradient, or with a cap, which is not linear, no product gives the entropy.
                keep_log = entropy_gradient or not needs[0] or head.cap is not None
                if keep_log:
                    head.log_softmax_(x_CV, targets_C, log_probs[part], entropy_C)
                else:
                    head.softmax_minus_onehot_(x_CV, targets_C, log_probs[part])
                log_probs_C, entropy_leaf = _leaf(log_probs[part]), _leaf(entropy_C) if entropy_gradient else None
                with torch.set_grad_enabled(any(needs)):
                    sums = [term.sum() for term in objective(log_probs_C, entropy_leaf, *(row[part] for row in rows))]
                for total, value in zip(losses, sums, strict=True):
                    total += value.detach()
                if not any(needs):
                    continue
                grad_C, grad_entropy_C = _gradients(sums, log_probs_C, entropy_leaf)
                zeros = torch.zeros_like(entropy_C)
                grad_C = zeros if grad_C is None else grad_C.to(x_CV.dtype)
                if keep_log:
                    head.entropy_gradient_(
                        x_CV,
                        targets_C,
                        grad_C,
                        zeros if grad_entropy_C is None else grad_entropy_C.to(x_CV.dtype),
                        entropy_C,
                    )
                    head.accumulate(x_CV, start, end, None)
                else:
                    product_CH = head.accumulate(x_CV, start, end, grad_C)
                    _entropy_from_product(head, x_CV, part, product_CH, log_probs[part], entropy_C)
            collected = head.gradients()
        ctx.collected = collected if any(needs) else None
        ctx.settings, ctx.token_objective = settings, objective
        ctx.save_for_backward(hidden, weight, bias, targets, log_probs, entropy, *rows)
        ctx.mark_non_differentiable(log_probs, entropy)
        ctx.set_materialize_grads(False)
        return (*losses, log_probs, entropy)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        temperature, soft_cap, chunk_size, entropy_gradient, terms, _ = ctx.settings
        term_grads = grads[:terms]
        # Handed over, not kept: autograd copies a gradient into `.grad` if anything else still refers to it.
        collected, ctx.collected = ctx.collected, None
        scale = _common_scale(term_grads)
        if collected is not None and scale is not None:
            if scale.device.type != "cpu" or bool(scale != 1):
                collected = [value if value is None else value.mul_(scale) for value in collected]
            return (*collected, *[None] * 4)
        hidden, weight, bias, targets, log_probs, entropy, *rows = ctx.saved_tensors
        del collected
        with torch.autocast(hidden.device.type, enabled=False):
            lp, entropy_leaf = _leaf(log_probs), _leaf(entropy) if entropy_gradient else None
            with torch.enable_grad():
                sums = [term.sum() for term in ctx.token_objective(lp, entropy_leaf, *rows)]
                scaled = [s * g for s, g in zip(sums, term_grads, strict=True) if g is not None]
            g, e = _gradients(scaled, lp, entropy_leaf)
            out = head_backward(
                hidden,
                Head(weight, bias, temperature, soft_cap),
                targets,
                grad_log_probs=g,
                grad_entropy=e,
                needs=ctx.needs_input_grad[:3],
                chunk_size=chunk_size,
            )
        return (*out, *[None] * 4)


def _entropy_from_product(
    head: HeadPass,
    x_CV: torch.Tensor,
    part: slice,
    product_CH: torch.Tensor | None,
    log_probs: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write `H = -log p_t - (E[z] - z_t)`, with `E[z] - z_t` read from `(softmax - onehot) @ weight`."""
    if product_CH is None:
        return
    gap = torch.linalg.vecdot(product_CH, head.hidden[part].to(product_CH.dtype)).mul_(head.inverse)
    if head.bias is not None:
        gap = gap + x_CV @ head.bias.clamp(min=_LEAST)
    torch.add(log_probs, gap, out=out).neg_().clamp_(min=0)


def fused_token_loss(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    objective: TokenObjective,
    rows: Sequence[torch.Tensor] = (),
    *,
    terms: int = 1,
    entropy_gradient: bool = False,
    chunk_size: int | None = None,
) -> FusedTokenLoss:
    """Sum a token loss over rows of hidden states, computing its gradient chunk by chunk in the forward pass.

    The objective must return terms that are already weighted, token by token, so that chunks, micro-batches and ranks
    add up. Its rows are constants. Each term is returned as its own scalar. If all have the same gradient (the usual
    sum of losses), the gradients from the forward pass are used; else the logits are recomputed, which is slower but
    equally correct. Between forward and backward, a gradient of the size of the head is held.

    Args:
        hidden: [N, H], the states that predict the targets.
        head: turns them into logits.
        targets: int64 [N].
        objective: `objective(log_probs [c], entropy [c] | None, *rows [c])`, a sequence of `terms` tensors [c].
        rows: tensors [N] that the objective reads.
        terms: how many terms the objective returns.
        entropy_gradient: pass the entropy to the objective with gradient, which costs one more pass over the
            logits. Without it the objective gets None; the returned entropy is exact either way.
        chunk_size: rows per chunk; see `token_log_probs`.

    Returns:
        The losses, and the log-probs and entropies [N] without gradient.

    >>> hidden, weight = torch.eye(2, requires_grad=True), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> out = fused_token_loss(hidden, Head(weight), torch.tensor([0, 2]), lambda lp, _: [-lp / 2])
    >>> out.losses[0].backward()
    >>> hidden.grad
    tensor([[-0.2119,  0.1060],
            [ 0.1060,  0.2881]])
    """
    check_head_shapes(hidden, head, targets, chunk_size)
    for i, row in enumerate(rows):
        if row.shape != targets.shape:
            raise DefinitionError(
                f"row {i} of the objective must have shape {list(targets.shape)}; got {list(row.shape)}."
            )
    settings = (float(head.temperature), head.soft_cap, chunk_size, entropy_gradient, terms, torch.is_grad_enabled())
    out: Any = _FusedTokenLoss.apply(hidden, head.weight, head.bias, targets, objective, tuple(rows), settings)
    return FusedTokenLoss(tuple(out[:terms]), out[terms], out[terms + 1])
