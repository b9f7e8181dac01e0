"""Row chunks of a language-model head: logits, softmax statistics and gradients, never more than [chunk, V].

Everything here runs without autograd, on buffers that are made once per call. Three habits keep it fast:

* the logits of a chunk live in one buffer that is reused, so the pages are faulted in once;
* passes over a chunk go through it in blocks of rows that fit in a cache (CPU only);
* the gradient of the logits is kept *unscaled* (`softmax - onehot`), and the per-row factor goes to the
  [chunk, H] side of both matmuls, so no pass over [chunk, V] is spent on scaling.

A soft cap (`c * tanh(z / c)`, Gemma 2) costs a second buffer of [chunk, V], which holds its derivative.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import torch

from rlhf_pipeline.errors import DefinitionError

CPU_CHUNK_ELEMENTS = 1 << 24
CUDA_CHUNK_ELEMENTS = 1 << 28
CPU_BLOCK_ELEMENTS = 1 << 20
CPU_CHUNK_ROWS = (256, 1024)
CUDA_CHUNK_ROWS = (64, 8192)
_LEAST = -1e30
"""In place of a log-prob of -inf where it is multiplied by its probability, 0: `0 log 0 = 0`."""


def default_chunk_rows(vocab_size: int, device: torch.device) -> int:
    """The number of rows of a chunk: a budget of elements divided by the vocabulary.

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

    Equal sizes rather than a short tail: a matmul with very few rows takes another path in most BLAS
    libraries, slower per row and with other rounding.

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
    """Whether a matmul of bfloat16 operands can write and accumulate float32 on a device; tried once.

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
    """The dtype of the matmul operands; the products are float32 (float64 for float64 inputs) in any case.

    bfloat16 operands stay bfloat16 on CUDA, where a matmul can write float32. Everywhere else, and for
    float16 (whose range is too small for scaled gradients), operands are float32.
    """
    if torch.float64 in (hidden.dtype, weight.dtype):
        return torch.float64
    if torch.bfloat16 in (hidden.dtype, weight.dtype) and writes_float32(hidden.device):
        return torch.bfloat16
    return torch.float32


def check_head_shapes(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    chunk_size: int | None,
    soft_cap: float | None,
) -> None:
    """Raise `DefinitionError` with the shapes seen where the inputs of a head do not fit together."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise DefinitionError(
            f"hidden must be [N, H] and weight [V, H]; got {list(hidden.shape)} and "
            f"{list(weight.shape)}. Flatten the hidden states with hidden[mask] first."
        )
    if targets.shape != hidden.shape[:1] or targets.dtype not in (torch.int64, torch.int32):
        raise DefinitionError(
            f"targets must be int64 [{hidden.shape[0]}], one token id per row of hidden; got "
            f"{targets.dtype} {list(targets.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise DefinitionError(f"bias must be [{weight.shape[0]}], one number per token id; got {list(bias.shape)}.")
    if not temperature > 0.0:
        raise DefinitionError(
            f"temperature must be above 0 because logits are divided by it; got {temperature}. "
            "Score greedy rollouts at temperature 1.0."
        )
    if chunk_size is not None and chunk_size < 1:
        raise DefinitionError(f"chunk_size must be 1 or more rows, or None; got {chunk_size}.")
    if soft_cap is not None and not soft_cap > 0.0:
        raise DefinitionError(f"soft_cap must be above 0, or None for logits without a cap; got {soft_cap}.")


class HeadPass:
    """One pass over the rows of a head: makes logits chunk by chunk and collects gradients.

    Args:
        hidden: [N, H].
        weight: [V, H].
        bias: [V] or None.
        targets: int64 [N].
        temperature: logits are divided by it.
        chunk_size: rows per chunk, or None for `default_chunk_rows`.
        soft_cap: logits `z` become `soft_cap * tanh(z / soft_cap)` before the temperature; None for no cap.
        needs: whether gradients are wanted for (hidden, weight, bias).
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int | None,
        soft_cap: float | None = None,
        needs: tuple[bool, bool, bool] = (False, False, False),
    ) -> None:
        self.operand = operand_dtype(hidden, weight)
        self.result = torch.float64 if self.operand == torch.float64 else torch.float32
        self.hidden, self.hidden_dtype, self.weight_dtype = hidden, hidden.dtype, weight.dtype
        self.weight = weight.to(self.operand)
        self.bias = None if bias is None else bias.to(self.result) / temperature
        self.cap = None if soft_cap is None else soft_cap / temperature
        # A bias of -inf bans a token; the product of its probability and its log-prob is not a number.
        self.bans = bias is not None and not bool(torch.isfinite(bias).all())
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

    def rows(self, start: int, end: int) -> torch.Tensor:
        """The hidden rows of a chunk in the operand dtype."""
        return self.hidden[start:end].to(self.operand)

    def logits(self, start: int, end: int) -> torch.Tensor:
        """The tempered logits [end - start, V] of a chunk, in the buffer that the next call reuses."""
        x = self._buffer[: end - start]
        h = self.rows(start, end)
        if self.operand == self.result:
            torch.mm(h if self.inverse == 1.0 else h * self.inverse, self.weight.t(), out=x)
        else:
            torch.ops.aten.mm.dtype_out(h, self.weight.t(), self.result, out=x)
            if self.inverse != 1.0:
                x.mul_(self.inverse)
        if self.bias is not None:
            x.add_(self.bias)
        return x if self.cap is None else self._capped_(x, self.cap)

    def _capped_(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """Cap tempered logits in place, and keep the derivative of the cap where a gradient is wanted."""
        x.div_(cap).tanh_()
        if self._slope is not None:
            torch.square(x, out=self._slope[: x.shape[0]]).neg_().add_(1.0)
        return x.mul_(cap)

    @property
    def is_linear(self) -> bool:
        """Whether the logits are finite and linear in the hidden state."""
        return self.cap is None and not self.bans

    def blocks(self, x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Views of the rows of `x` that fit in a cache, with their slices."""
        for start in range(0, x.shape[0], self.block):
            part = slice(start, min(start + self.block, x.shape[0]))
            yield part, x[part]

    def scratch(self, like: torch.Tensor) -> torch.Tensor:
        """A second block-sized buffer, made on first use."""
        if self._scratch is None:
            self._scratch = torch.empty(self.block, self.vocab, device=like.device, dtype=like.dtype)
        return self._scratch[: like.shape[0]]

    def log_softmax_(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None = None,
    ) -> None:
        """Turn logits into log-probabilities in place; write the targets' and, if asked, the entropy."""
        for part, y in self.blocks(x):
            torch.log_softmax(y, -1, out=y)
            log_probs[part] = y.gather(1, targets[part, None])[:, 0]
            if entropy is not None:
                if self.bans:
                    y.clamp_(min=_LEAST)
                p = torch.exp(y, out=self.scratch(y))
                entropy[part] = torch.linalg.vecdot(p, y).neg_()

    def softmax_minus_onehot_(
        self, x: torch.Tensor, targets: torch.Tensor, log_probs: torch.Tensor | None = None
    ) -> None:
        """Turn logits into `softmax - onehot` in place, and write the targets' log-probs if asked.

        The log-prob is `x_t - max + log(max p)`: one exponential per element, no loss where `p_t`
        underflows.
        """
        for part, y in self.blocks(x):
            index = targets[part, None]
            if log_probs is None:
                torch.softmax(y, -1, out=y)
            else:
                lead = y.gather(1, index)[:, 0].sub_(y.amax(-1))
                torch.softmax(y, -1, out=y)
                log_probs[part] = lead.add_(y.amax(-1).log_())
            y.scatter_add_(1, index, y.new_full((), -1.0).expand(index.shape))

    def entropy_gradient_(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        grad_log_prob: torch.Tensor,
        grad_entropy: torch.Tensor,
        entropy: torch.Tensor,
    ) -> None:
        """Turn log-probabilities into minus the logits' gradient, in place.

        With `g`, `e` the gradients of the target's log-prob and of the entropy `H`:
        `-dL/dx = p * (g + e * (log p + H)) - g * onehot`.
        """
        offset = (grad_log_prob + grad_entropy * entropy)[:, None]
        for part, y in self.blocks(x):
            p = torch.exp(y, out=self.scratch(y))
            y.mul_(grad_entropy[part, None]).add_(offset[part]).mul_(p)
            y.scatter_add_(1, targets[part, None], -grad_log_prob[part, None])

    def accumulate(self, x: torch.Tensor, start: int, end: int, row_scale: torch.Tensor | None) -> torch.Tensor | None:
        """Add the gradients of a chunk. `x` holds minus the logits' gradient before `row_scale`.

        Returns:
            `x @ weight` [end - start, H] where the hidden gradient is wanted, else None.
        """
        if self._slope is not None:
            x.mul_(self._slope[: x.shape[0]])
        d = x.to(self.operand)
        product = None
        if self.grad_hidden is not None:
            if self.operand == self.result:
                product = torch.mm(d, self.weight)
            else:
                product = torch.empty(d.shape[0], self.weight.shape[1], device=d.device)
                torch.ops.aten.mm.dtype_out(d, self.weight, self.result, out=product)
            factor = -self.inverse if row_scale is None else (row_scale * -self.inverse)[:, None]
            self.grad_hidden[start:end] = product * factor
        if self.grad_weight is not None:
            h = self.rows(start, end)
            if row_scale is not None:
                h = (h * row_scale[:, None]).to(self.operand)
            beta, alpha = (0.0 if start == 0 else 1.0), -self.inverse
            acc = self.grad_weight
            if self.operand == self.result:
                torch.addmm(acc, d.t(), h, beta=beta, alpha=alpha, out=acc)
            else:
                torch.ops.aten.addmm.dtype_out(acc, d.t(), h, self.result, beta=beta, alpha=alpha, out=acc)
        if self.grad_bias is not None:
            scale = x.new_ones(x.shape[0]) if row_scale is None else row_scale.to(x.dtype)
            self.grad_bias.addmv_(x.t(), scale, alpha=-self.inverse)
        return product

    def free(self) -> None:
        """Free the chunk buffers before the gradients are handed on."""
        self._buffer = self._buffer[:0]
        self._slope = None
        self._scratch = None

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The collected gradients of (hidden, weight, bias) in the dtypes of the inputs."""
        weight = None if self.grad_weight is None else self.grad_weight.to(self.weight_dtype)
        bias = None
        if self.grad_bias is not None and self.bias_dtype is not None:
            bias = self.grad_bias.to(self.bias_dtype)
        return self.grad_hidden, weight, bias
