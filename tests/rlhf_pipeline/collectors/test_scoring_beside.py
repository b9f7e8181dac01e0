"""Reference log-probs that are computed while completions are being sampled: the write path's, earlier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.envs.transforms import Compose

from rlhf_pipeline import (
    CausalLMPolicy,
    Collect,
    Collector,
    CopyDigits,
    KLRewardTransform,
    MCAdvantage,
    RetrieveLogProb,
    TrajectoryReplayBuffer,
    scratch_policy,
)
from rlhf_pipeline.collectors.grading import Grader
from rlhf_pipeline.errors import DataError, EngineError
from rlhf_pipeline.policies.engines.http import HTTPEngine
from rlhf_pipeline.policies.engines.protocol import Ended, RaggedCompletions, Request, WeightRefresh
from rlhf_pipeline.policies.engines.slots import SlotEngine
from rlhf_pipeline.user_code.arguments import bind
from tests.rlhf_pipeline.policies.engines.fake_vllm import FakeVLLM

ENGINES = ["slots", "server"]
COUNT = 16


def policy_of(seed: int, **options: Any) -> CausalLMPolicy:
    return scratch_policy("0123456789=", hidden_size=16, num_layers=2, num_heads=2, seed=seed, num_slots=5, **options)


class Counting:
    """Passes calls on, and notes how many rows each has, and what else has happened by then."""

    def __init__(self, policy: CausalLMPolicy) -> None:
        self.policy = policy
        self.rows: list[int] = []
        self.sampling = False
        self.while_sampling = 0
        self.fails_at = -1

    def log_probs(self, *args: Any) -> torch.Tensor:
        """Ask the policy."""
        if len(self.rows) == self.fails_at:
            raise DataError("the reference has no room")
        self.rows.append(len(args[0]))
        self.while_sampling += self.sampling
        assert not torch.is_inference_mode_enabled()
        return self.policy.log_probs(*args)


@contextmanager
def collecting(folder: Path, engine: str, *, beside: bool, **options: Any) -> Iterator[tuple[Collector, Counting]]:
    """A collector whose reference has other weights than its policy, and which samples with the engine of that name."""
    folder.mkdir()
    policy, reference = policy_of(0, temperature=0.9), Counting(policy_of(1, temperature=0.9))
    retrieve = RetrieveLogProb(reference, **{"token_budget": 64, **options})
    buffer = TrajectoryReplayBuffer(
        storage=folder / "store", transform=Compose(MCAdvantage(4), KLRewardTransform(coef=0.1), retrieve)
    )
    collector = Collector(
        policy=policy,
        prompts=CopyDigits(num_digits=3),
        reward=lambda prompt, completion, answer, meta: float(len(completion)),
        buffer=buffer,
        config=Collect(prompts_per_rollout=4, group_size=4, max_new_tokens=40, temperature=0.9),
        seed=0,
        retrieve=retrieve if beside else None,
    )
    generate_ragged = policy.generate_ragged

    def watched(*args: Any, **named: Any) -> RaggedCompletions:
        reference.sampling = True
        try:
            return generate_ragged(*args, **named)
        finally:
            reference.sampling = False

    policy.generate_ragged = watched  # type: ignore[method-assign]
    try:
        if engine != "server":
            assert isinstance(policy.engine, SlotEngine)
            yield collector, reference
            return
        policy.save_pretrained(folder / "model")
        with FakeVLLM(folder / "model").serving() as fake:
            policy.engine = HTTPEngine(fake.address, owner="run", look_s=0.01)
            policy.engine.load_weights(folder / "model", 0)
            yield collector, reference
    finally:
        buffer.trajectories.close()


def stored(collector: Collector) -> dict[str, np.ndarray]:
    """Columns of the store, in the order of the trajectories."""
    store = collector.buffer.store
    ids = store.ids()[np.argsort(store.read_scalars("trajectory_id"))]
    out = {name: store.read_ragged(name, ids).values for name in ("input_ids", "log_probs", "ref_log_probs")}
    return out | {name: store.read_scalars(name, ids) for name in ("task_reward", "return", "advantage")}


@pytest.mark.parametrize("assistant_only", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_values_of_the_write_path(engine: str, assistant_only: bool, tmp_path: Path):
    """Of every token of every trajectory, in passes within the budget, most of them while others are sampled."""
    with collecting(tmp_path / "after", engine, beside=False, assistant_only=assistant_only) as (plain, after):
        plain.collect(0, policy_version=0)
        expected = stored(plain)
    with collecting(tmp_path / "beside", engine, beside=True, assistant_only=assistant_only) as (collector, reference):
        collector.collect(0, policy_version=0)
        found = stored(collector)
    assert sum(after.rows) == sum(reference.rows) == COUNT
    assert after.while_sampling == 0
    assert reference.while_sampling > 1
    assert found["input_ids"].tolist() == expected["input_ids"].tolist()
    assert np.isfinite(found["ref_log_probs"]).sum() > len(found["ref_log_probs"]) // 2
    for name in ("ref_log_probs", "return", "advantage"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, rtol=0)


def test_the_values_of_several_rounds(tmp_path: Path):
    """With dynamic sampling each trajectory that is kept has the scores of its own tokens, whatever its round."""
    found = []
    for name, beside in (("after", False), ("beside", True)):
        with collecting(tmp_path / name, "ragged", beside=beside) as (collector, reference):
            collector.config = replace(collector.config, dynamic=5)
            collector.grader = Grader(
                bind(lambda prompt, completion, answer, meta: float(len(completion)) if prompt[0] in "05" else 0.0)
            )
            rounds = collector.collect(0, policy_version=0).figures["rounds"]
            found.append(stored(collector))
            assert rounds == 5
            assert sum(reference.rows) == (5 * COUNT if beside else COUNT)
    assert found[1]["input_ids"].tolist() == found[0]["input_ids"].tolist()
    for column in ("ref_log_probs", "return", "advantage"):
        np.testing.assert_allclose(found[1][column], found[0][column], atol=1e-5, rtol=0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fails_at", [0, 2])
def test_a_failure_is_that_of_the_write_path(engine: str, fails_at: int, tmp_path: Path):
    """The rollout ends with the reference's own error, and none of it is stored; the next attempt is like any other."""
    with collecting(tmp_path / "run", engine, beside=True) as (collector, reference):
        reference.fails_at = fails_at
        with pytest.raises(DataError, match=r"^the reference has no room$"):
            collector.collect(0, policy_version=0)
        assert len(collector.buffer.store) == 0
        reference.fails_at = -1
        assert collector.collect(0, policy_version=0).num_trajectories == COUNT
        assert np.isfinite(stored(collector)["ref_log_probs"]).any()


def test_a_trajectory_above_the_budget_has_a_pass_of_its_own(tmp_path: Path):
    """As on the write path."""
    with collecting(tmp_path / "run", "slots", beside=True, token_budget=1) as (collector, reference):
        collector.collect(0, policy_version=0)
        assert reference.rows == [1] * COUNT


def test_new_weights_in_flight_leave_the_reference_alone(tmp_path: Path):
    """They change what is sampled, and not how it is scored: policy and reference are two models."""
    with collecting(tmp_path / "run", "slots", beside=True) as (collector, reference):
        before = {name: tensor.clone() for name, tensor in reference.policy.model.state_dict().items()}
        other = policy_of(2).model.state_dict()

        def load() -> int:
            collector.policy.engine.load_weights(other, 1)
            return 1

        collector.collect(0, policy_version=0, refresh=WeightRefresh(load, every=16, version=0))
        rows = collector.buffer.read(collector.buffer.store.ids())
        again = RetrieveLogProb(reference)(rows.exclude(("next", "ref_log_probs", "full")))
        mask = rows["masks", "all_assistant_mask"]
        gap = (again["next", "ref_log_probs", "full"] - rows["next", "ref_log_probs", "full"])[mask]
        assert float(gap.abs().max()) < 1e-5
        assert all(torch.equal(before[name], now) for name, now in reference.policy.model.state_dict().items())


def test_an_engine_that_passes_nothing_on_is_found_out(tmp_path: Path):
    """Trajectories without reference log-probs would look like ones that need none."""
    with collecting(tmp_path / "run", "slots", beside=True) as (collector, _):
        generate = collector.policy.engine.generate

        def silent(request: Request, refresh: WeightRefresh | None = None, ended: Ended | None = None) -> Any:
            def first(index: int, tokens: Sequence[int]) -> None:
                if ended is not None and index == 0:
                    ended(index, tokens)

            return generate(request, refresh, first)

        collector.policy.engine.generate = silent  # type: ignore[method-assign]
        with pytest.raises(
            EngineError, match=r"reported the end of 1 of 16 completions.* and the rollout was not stored"
        ):
            collector.collect(0, policy_version=0)
        assert len(collector.buffer.store) == 0
