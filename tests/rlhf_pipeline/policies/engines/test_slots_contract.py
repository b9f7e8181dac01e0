"""The slot engine keeps the contract of engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlhf_pipeline.policies.engines.slots import SlotEngine
from rlhf_pipeline.policies.token_policy import TokenPolicy
from tests.rlhf_pipeline.policies.engines.contract import Bench, EngineContract


class TestSlots(EngineContract):
    """Three slots, so that completions wait for a slot while weights are replaced."""

    @pytest.fixture
    def bench(self, folders: dict[int, Path]) -> Iterator[Bench]:
        """A policy's own engine."""
        policy = TokenPolicy.from_pretrained(folders[2], dtype=torch.float32, num_slots=3)
        engine = policy.engine
        assert isinstance(engine, SlotEngine)
        engine.load_weights(folders[1], 1)
        yield Bench(engine, folders)
        engine.close()
