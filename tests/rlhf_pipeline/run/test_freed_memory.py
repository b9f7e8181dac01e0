"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from rlhf_pipeline.run.freed_memory import FreedMemory

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")


def anonymous_mb() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) / 1024


def test_holes_are_given_back_once_a_minute(monkeypatch: pytest.MonkeyPatch):
    """A hundred megabytes in holes between blocks in use are the process's own until the minute is over."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    freed = FreedMemory()
    blocks = [np.ones(12_000) for _ in range(1100)]  # of 96 kB: small enough to come from the heap
    blocks = blocks[::11]
    held = anonymous_mb()
    freed.trim()
    assert anonymous_mb() > held - 10
    now += 61.0
    freed.trim()
    assert anonymous_mb() < held - 80
    assert len(blocks) == 100
