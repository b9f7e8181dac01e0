"""Uniform random numbers that are a pure function of (seed, stream, member, token index).

A generator with a state hands out its numbers in the order of the calls, so the tokens of a completion would depend
on which other completions ran beside it. Here every number has an address instead. The address is hashed with
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), once per
coordinate, so that neighbouring addresses give unrelated numbers:

    key(seed, stream, member) = mix(mix(mix(seed) + stream) + member)
    u(key, t)                 = top 53 bits of mix(key + t * 0xD1342543DE82EF95), over 2**53

All arithmetic is modulo 2**64. The numbers lie in [0, 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# Any odd constant other than the one inside `_mix` keeps the walk over t apart from the walk over members.
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
    """Shift right, zeros in front: `>>` of int64 copies the sign bit, so the copies are cut off."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def device_uniforms(keys: Tensor, index: Tensor) -> Tensor:
    """Return what `uniforms` does, bit for bit, on any device, from keys of the same bits as int64 `[N]`.

    int64 addition and multiplication wrap modulo 2**64 as those of uint64 do.

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
