"""How a token is drawn: a random number that is a pure function of its address, and the inverse CDF.

**Numbers.** A stateful generator returns its numbers in the order of the calls, so the tokens of a completion would
depend on which other completions ran beside it. Here every number has an address instead: (seed, stream, member,
token index). It is hashed with SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014), once per coordinate, so that neighbouring addresses give unrelated numbers:

    key(seed, stream, member) = mix(mix(mix(seed) + stream) + member)
    u(key, t)                 = top 53 bits of mix(key + t * 0xD1342543DE82EF95), over 2**53

All arithmetic is modulo 2**64. The numbers lie in [0, 1).

**Tokens.** Why not `torch.multinomial`: for 64 rows of 32,000 entries on 2 cores it takes more than ten times as long
as the inverse CDF, it takes its randomness from a stateful generator, and it does not return the token's log-prob.

A float32 running sum over a large vocabulary cannot resolve a probability below 6e-8, and a float64 one writes twice
the memory. So the vocabulary is cut into blocks: a vectorised sum per block, a float64 running sum over the blocks,
then a float64 running sum inside the one block that holds the token. It costs about as much as the softmax before it.

**Truncation.** Top-k, top-p and min-p each keep the most probable tokens; what they keep together is the support. A
token is drawn from the distribution that is normalised over its support, and its log-prob is that of this distribution.
The log of the support's mass under the whole distribution comes with it: their sum is the log-prob under the whole one,
which is what a policy's scores are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf_pipeline.errors import DefinitionError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# Any odd constant other than the one inside `_mix` keeps the sequence over t apart from the sequence over members.
_STEP = np.uint64(0xD1342543DE82EF95)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_MASK_64 = (1 << 64) - 1
_UNIT = 2.0**-53

UInt64Array = npt.NDArray[np.uint64]


def _mix(x: UInt64Array) -> UInt64Array:
    """Return the SplitMix64 output for the state `x`; `x` is not changed."""
    x = x + _GOLDEN
    x ^= x >> _S30
    x *= _MIX_1
    x ^= x >> _S27
    x *= _MIX_2
    x ^= x >> _S31
    return x


def _as_uint64(values: Sequence[int] | npt.NDArray[np.int64] | int) -> UInt64Array:
    if isinstance(values, np.ndarray):
        return values.astype(np.int64).view(np.uint64)
    items = [values] if isinstance(values, int) else values
    return np.array([int(v) & _MASK_64 for v in items], dtype=np.uint64)


def stream_keys(
    seed: int,
    streams: Sequence[int] | npt.NDArray[np.int64],
    members: Sequence[int] | npt.NDArray[np.int64],
) -> UInt64Array:
    """Return one 64-bit key per (stream, member).

    Args:
        seed: any integer; taken modulo 2**64.
        streams: stream ids `[N]`, any integers.
        members: member indices `[N]`.

    Returns:
        uint64 keys `[N]` for `uniforms`.

    >>> a = stream_keys(0, [7, 7, 8], [0, 1, 0])
    >>> len(set(a.tolist()))
    3
    >>> bool((stream_keys(0, [8], [0]) == a[2:]).all())
    True
    """
    return _mix(_mix(_mix(_as_uint64(seed)) + _as_uint64(streams)) + _as_uint64(members))


def uniforms(keys: UInt64Array, index: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the uniform number of every (key, token index), float64 in [0, 1), shape `[N]`.

    >>> keys = stream_keys(0, [0, 1], [0, 0])
    >>> u = uniforms(keys, np.array([3, 3]))
    >>> bool(u[1] == uniforms(keys[1:], np.array([3]))[0])
    True
    """
    return (_mix(keys + index.astype(np.uint64) * _STEP) >> _S11).astype(np.float64) * _UNIT


def _signed(x: int | np.uint64) -> int:
    return int(x) - (1 << 64) if int(x) >> 63 else int(x)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros: `>>` of int64 copies the sign bit, so the copies are masked off."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def device_uniforms(keys: Tensor, index: Tensor) -> Tensor:
    """Return the same numbers as `uniforms`, bit for bit, on any device, from the keys' bits as int64 `[N]`.

    int64 addition and multiplication wrap modulo 2**64 as uint64's do.

    >>> import torch
    >>> keys = stream_keys(0, [0, 1], [0, 0])
    >>> there = device_uniforms(torch.from_numpy(keys.view(np.int64)), torch.tensor([3, 3]))
    >>> bool((there.numpy() == uniforms(keys, np.array([3, 3]))).all())
    True
    """
    x = keys + index * _signed(_STEP) + _signed(_GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX_2)
    x = x ^ _shifted(x, 31)
    return _shifted(x, 11).double() * _UNIT


_BLOCK = 256
_FLAT_LIMIT = 1024


def _invert(cdf: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index whose `cdf` is above `target`, and the clamped target.

    The target is clamped to the largest float64 below the row's total. So such an index exists, and the running sum
    rises at it: the entry there is not zero, however the end of the row was rounded.
    """
    last = cdf[:, -1:]
    target = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    index = torch.searchsorted(cdf, target, right=True)
    return index.clamp_(max=cdf.shape[1] - 1), target


def _guard(weights: Tensor, index: Tensor) -> Tensor:
    """Replace an index of zero weight by the largest entry of its row.

    A sequential running sum of numbers >= 0 never falls, and then this changes nothing. The parallel scan on a CUDA
    device adds in another order per block of threads, so it needs the check.
    """
    if weights.device.type == "cpu":
        return index
    return torch.where(weights.gather(1, index) > 0, index, weights.argmax(1, keepdim=True))


def sample_rows(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token per row of `softmax(logits / temperature)`.

    The token is the first one at which the cumulative probability passes `uniform`. A token of probability zero is
    never drawn, and no index is out of range, for any `uniform` in [0, 1].

    Args:
        logits: float32 or float64 `[N, V]`; overwritten.
        uniform: float64 `[N]`, in [0, 1); unused at temperature 0.
        temperature: the sampling temperature. At 0 the most probable token is taken, and the log-prob is that of the
            distribution at temperature 1, since the distribution at temperature 0 has no finite log-probs to train on.

    Returns:
        `(tokens int64 [N], log_probs float32 [N])`.

    >>> logits = torch.tensor([[0.0, float("-inf"), 0.0]]).repeat(3, 1)
    >>> tokens, log_probs = sample_rows(logits, torch.tensor([0.0, 0.4999, 1.0]).double(), 1.0)
    >>> tokens.tolist(), [round(x, 4) for x in log_probs.tolist()]
    ([0, 0, 2], [-0.6931, -0.6931, -0.6931])
    """
    if temperature not in (0.0, 1.0):
        logits = logits.div_(temperature)
    probs = torch.softmax(logits, dim=-1)
    vocab = probs.shape[1]
    if temperature == 0.0:
        index = probs.argmax(1, keepdim=True)
    elif vocab <= _FLAT_LIMIT:
        cdf = probs.cumsum(1, dtype=torch.float64)
        index, _ = _invert(cdf, uniform.unsqueeze(1) * cdf[:, -1:])
        index = _guard(probs, index)
    else:
        index = _two_level(probs, uniform.unsqueeze(1))
    return index.squeeze(1), probs.gather(1, index).log_().squeeze(1).float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """Which tokens may be drawn: those that every rule keeps, at the sampling temperature.

    The rules are those of transformers, in its order: top-k, then top-p over what is left, then min-p.

    >>> Truncation(top_p=1.5)
    Traceback (most recent call last):
    rlhf_pipeline.errors.DefinitionError: top_p is 1.5; it must be in (0, 1].
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1:
            raise DefinitionError(f"top_p is {self.top_p:g}; it must be in (0, 1].")
        if self.top_k < 0:
            raise DefinitionError(f"top_k is {self.top_k}; it must be at least 0.")
        if not 0 <= self.min_p <= 1:
            raise DefinitionError(f"min_p is {self.min_p:g}; it must be in [0, 1].")


def sample_truncated(
    logits: Tensor, uniform: Tensor, temperature: float, truncation: Truncation
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row of `softmax(logits / temperature)`, cut to its support and normalised again.

    Of tokens with equal probability at the edge of the support, any may be in it; the most probable one always is.

    Args:
        logits: float32 or float64 `[N, V]`; overwritten.
        uniform: float64 `[N]`, in [0, 1).
        temperature: above 0.
        truncation: the rules.

    Returns:
        `(tokens int64 [N], log_probs float32 [N], log_mass float32 [N])`: `log_probs` of the distribution over the
        support, and the log of the support's mass before it was normalised again.

    >>> logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(2, 1)
    >>> tokens, log_probs, log_mass = sample_truncated(
    ...     logits, torch.tensor([0.6, 0.7]).double(), 1.0, Truncation(top_p=0.7))
    >>> tokens.tolist(), [round(p, 3) for p in log_probs.exp().tolist()], [round(m, 3) for m in log_mass.exp().tolist()]
    ([0, 1], [0.625, 0.375], [0.8, 0.8])
    """
    probs = torch.softmax(logits.div_(temperature), dim=-1)
    num_tokens = min(truncation.top_k or probs.shape[1], probs.shape[1])
    probs, ids = probs.topk(num_tokens, dim=-1) if num_tokens < probs.shape[1] else probs.sort(dim=-1, descending=True)
    cdf = probs.cumsum(1, dtype=torch.float64)
    inside = (cdf - probs < truncation.top_p * cdf[:, -1:]) & (probs >= truncation.min_p * probs[:, :1])
    inside[:, 0] = True
    probs = torch.where(inside, probs, 0.0)
    cdf = probs.cumsum(1, dtype=torch.float64)
    mass = cdf[:, -1:]
    index, _ = _invert(cdf, uniform.unsqueeze(1) * mass)
    index = _guard(probs, index)
    log_mass = mass.log()
    log_probs = probs.gather(1, index).double().log() - log_mass
    return ids.gather(1, index).squeeze(1), log_probs.squeeze(1).float(), log_mass.squeeze(1).float()


def drawn(
    logits: Tensor, uniform: Tensor, temperature: float, truncation: Truncation | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one token per row: `sample_truncated`, or `sample_rows` without truncation, which has no mass.

    At temperature 0 the most probable token is taken, which every truncation keeps.
    """
    if truncation is None or temperature == 0:
        return *sample_rows(logits, uniform, temperature), None
    return sample_truncated(logits, uniform, temperature, truncation)


def _two_level(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return int64 `[N, 1]`: the block first, then the token inside it."""
    vocab = probs.shape[1]
    whole = vocab // _BLOCK * _BLOCK
    sums = probs[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)
    if whole < vocab:
        sums = torch.cat((sums, probs[:, whole:].sum(-1, keepdim=True)), dim=1)
    cdf = sums.cumsum(1, dtype=torch.float64)
    block, target = _invert(cdf, uniform * cdf[:, -1:])
    block = _guard(sums, block)
    before = torch.where(block > 0, cdf.gather(1, (block - 1).clamp_(min=0)), 0.0)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(1, columns.clamp(max=vocab - 1)).masked_fill_(columns >= vocab, 0.0)
    # The block's own running sum may end a rounding away from the block's sum; `_invert` clamps that too.
    local, _ = _invert(inside.cumsum(1, dtype=torch.float64), (target - before).clamp_(min=0.0))
    # The clamp is for rows of NaN: their token is arbitrary, and the caller sees a log-prob of NaN.
    return (block * _BLOCK + _guard(inside, local)).clamp_(max=vocab - 1)
