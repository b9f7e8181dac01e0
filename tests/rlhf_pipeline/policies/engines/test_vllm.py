"""vLLM in process: the contract. Runs where vLLM can be imported; see docs/engines.md for an environment on a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.policies.engines.protocol import Request, WeightRefresh
from rlhf_pipeline.policies.engines.vllm import VLLMEngine
from tests.rlhf_pipeline.policies.engines.contract import CLOSE, POSITIONS, VOCAB, Bench, EngineContract

HAS_VLLM = importlib.util.find_spec("vllm") is not None


@pytest.fixture(scope="module")
def vllm(folders: dict[int, Path]) -> Iterator[VLLMEngine]:
    """One engine for all tests: it takes half a minute to start."""
    engine = VLLMEngine(
        folders[2], num_slots=4, vocab=VOCAB, max_positions=POSITIONS, dtype="float32", eager=True, memory=0.1
    )
    yield engine
    engine.close()


@pytest.mark.peer
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, as vLLM imports it
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
class TestVLLM(EngineContract):
    """Four slots, so that completions wait for a slot while weights are replaced."""

    start_s = 0.1
    in_flight_tokens = 1_900  # a token of each of them takes a millisecond or two

    @pytest.fixture
    def bench(self, folders: dict[int, Path], vllm: VLLMEngine) -> Bench:
        """The engine with the weights of version 1."""
        vllm.load_weights(folders[1], 1)
        return Bench(vllm, folders)

    def test_new_weights_late_in_flight(self, bench: Bench):
        """When they arrive, the completions in progress are longer than vLLM prefills at once: they are recomputed."""

        def load() -> int:
            bench.engine.load_weights(bench.folders[2], 2)
            return 2

        request = Request(prompts=[[5]], group_size=4, max_new_tokens=1_600, temperature=0.7, seed=5)
        found = bench.engine.generate(request, WeightRefresh(load, every=1_500, version=1))
        assert found.spans is not None
        assert found.spans.lists() == [[(0, 1), (1_500, 2)]] * 4
        assert bench.worst(found, request.prompts, 0.7) < CLOSE


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_without_vllm_the_message_reports_what_to_install(tmp_path: Path):
    """And what to sample with instead."""
    with pytest.raises(DefinitionError, match=r"pip install 'rlhf-pipeline\[vllm\]'.*collect.engine=slots"):
        VLLMEngine(tmp_path, num_slots=1, vocab=VOCAB)
