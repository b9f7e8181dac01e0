"""The slot engine against `model.generate`, in one run."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_generate.py"


@pytest.mark.bench
@pytest.mark.slow
def test_slots_are_twice_as_fast_as_a_static_batch() -> None:
    """A ragged batch of groups at a vocabulary of 4,000: at least 2x with log-probs off and on, in CPU time."""
    spec = importlib.util.spec_from_file_location("bench_generate", BENCH)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules["bench_generate"] = bench
    spec.loader.exec_module(bench)
    bench.clock = time.process_time
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        batch = bench.ragged_batch(4_000, 8, 8, 150)
        _, ratios = bench.measure(bench.make_model(4_000, 256, 4), batch, rounds=1, slots=64, on_rows=64)
    finally:
        torch.set_num_threads(threads)
    assert ratios["off"] > 2.0
    assert ratios["on"] > 2.0
