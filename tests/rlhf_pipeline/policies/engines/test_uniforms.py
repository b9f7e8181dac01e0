"""Random numbers with an address."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_pipeline.policies.engines.sampling import stream_keys, uniforms


def _splitmix64(x: int) -> int:
    """The published algorithm on Python integers."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_the_mixer_is_the_published_one() -> None:
    """SplitMix64 from state 0 begins with 0xE220A8397B1DCDAF, and the stated formula gives our numbers."""
    assert _splitmix64(0) == 0xE220A8397B1DCDAF
    seed, stream, member, t = 5, 11, 3, 7
    mask = (1 << 64) - 1
    key = _splitmix64((_splitmix64((_splitmix64(seed) + stream) & mask) + member) & mask)
    expected = (_splitmix64((key + t * 0xD1342543DE82EF95) & mask) >> 11) / 2**53
    keys = stream_keys(seed, [stream], [member])
    assert keys.tolist() == [key]
    assert uniforms(keys, np.array([t])).tolist() == [expected]


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    """The number of an address is the same alone, in another order and in a larger call."""
    keys = stream_keys(0, [4, 5, 6, 5], [0, 1, 2, 0])
    t = np.array([9, 8, 7, 6])
    together = uniforms(keys, t)
    alone = [float(uniforms(keys[i : i + 1], t[i : i + 1])[0]) for i in range(4)]
    assert together.tolist() == alone
    assert uniforms(keys[::-1], t[::-1]).tolist() == alone[::-1]


@pytest.mark.parametrize("change", ["seed", "stream", "member"])
def test_each_coordinate_gives_another_sequence(change: str) -> None:
    """Changing one coordinate by one changes every number of the sequence."""
    base = {"seed": 3, "stream": 3, "member": 3}
    other = {**base, change: base[change] + 1}
    t = np.arange(1000)
    a, b = (uniforms(np.repeat(stream_keys(c["seed"], [c["stream"]], [c["member"]]), 1000), t) for c in (base, other))
    assert not (a == b).any()
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.1


@pytest.mark.parametrize("axis", ["token", "member", "stream", "seed"])
def test_the_numbers_are_uniform_along_every_axis(axis: str) -> None:
    """Chi-square with 64 bins over 200,000 numbers, and no serial correlation; both far inside 5 sigma."""
    n = 200_000
    count = np.arange(n)
    zero = np.zeros(n, dtype=np.int64)
    if axis == "seed":
        u = np.array([float(uniforms(stream_keys(s, [0], [0]), np.array([0]))[0]) for s in range(20_000)])
    elif axis == "token":
        u = uniforms(np.repeat(stream_keys(1, [2], [3]), n), count)
    elif axis == "member":
        u = uniforms(stream_keys(1, zero, count), zero)
    else:
        u = uniforms(stream_keys(1, count, zero), zero)
    observed = np.histogram(u, bins=64, range=(0, 1))[0]
    expected = len(u) / 64
    chi2 = float(((observed - expected) ** 2 / expected).sum())
    assert 20 < chi2 < 63 + 5 * (2 * 63) ** 0.5
    serial = float(np.corrcoef(u[:-1], u[1:])[0, 1])
    assert abs(serial) < 5 / len(u) ** 0.5
    assert u.min() >= 0.0
    assert u.max() < 1.0


def test_any_integer_names_a_seed_or_a_stream() -> None:
    """Negative and very large integers are taken modulo 2**64."""
    keys = stream_keys(-1, [-1, 2**63, 2**64 - 1], [0, 0, 0])
    assert keys[0] == keys[2]
    assert keys[0] != keys[1]
    assert stream_keys(2**64 - 1, [0], [0]) == stream_keys(-1, [0], [0])
