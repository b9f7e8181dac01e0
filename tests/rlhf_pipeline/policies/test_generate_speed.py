"""The slot engine against `model.generate`, in one run."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks import bench_generate


@pytest.mark.bench
@pytest.mark.slow
def test_slots_are_twice_as_fast_as_a_static_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ragged batch of groups at a vocabulary of 4,000: at least 2x with log-probs off and on, in CPU time."""
    monkeypatch.setattr(bench_generate, "clock", time.process_time)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        batch = bench_generate.ragged_batch(4_000, 8, 8, 150)
        model = bench_generate.make_model(4_000, 256, 4)
        _, ratios = bench_generate.measure(model, batch, rounds=1, slots=64, on_rows=64)
    finally:
        torch.set_num_threads(threads)
    assert ratios["off"] > 2.0
    assert ratios["on"] > 2.0
