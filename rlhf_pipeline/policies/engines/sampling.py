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
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
