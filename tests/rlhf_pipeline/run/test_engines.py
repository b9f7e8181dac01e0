"""Runs whose completions come from an engine elsewhere: here the fake vLLM server, with a real model behind it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline import (
    Collect,
    CopyDigits,
    Learn,
    Pipeline,
    TinyPolicy,
    override,
    scratch_policy,
    token_match,
)
from rlhf_pipeline.buffer.trajectory_schema import FAILURES, SAMPLED_BY, TEMPERATURE, trajectory_schema
from rlhf_pipeline.cli import main
from rlhf_pipeline.config_text import override_all
from rlhf_pipeline.errors import DefinitionError, EngineError
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.build import build_models, build_parts, open_storage
from rlhf_pipeline.run.events import Event, Notice
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.start import run
from tests.processes import Children
from tests.rlhf_pipeline.fake_device import to_device
from tests.rlhf_pipeline.policies.engines.fake_vllm import FakeVLLM
from tests.rlhf_pipeline.small import collect, learn
from trajectory_store import TrajectoryStore

PROMPTS, GROUP = 3, 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeVLLM]:
    """A server with the right model and other weights: a run gives it its own."""
    policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2, seed=77)
    policy.save_pretrained(tmp_path / "model")
    with FakeVLLM(tmp_path / "model").serving() as fake:
        yield fake


def digits(engine: str, steps: int) -> Pipeline:
    return Pipeline(
        name="tiny",
        policy=TinyPolicy(hidden_size=16, num_layers=1, num_heads=2),
        prompts=CopyDigits(num_digits=2),
        reward=token_match,
        collect=Collect(
            prompts_per_rollout=PROMPTS, group_size=GROUP, max_new_tokens=3, temperature=0.8, engine=engine
        ),
        learn=Learn(steps=steps, lr=1e-2, checkpoint_every=2),
    )


def versions_of(server: FakeVLLM) -> list[str]:
    """The versions in the labels that a server was given, without those of weights on their way."""
    return [version for version in (label.split(":")[1] for label in server.labels[1:]) if version != "loading"]


def check_store(run_dir: Path, rollouts: int) -> None:
    """Every member of every group is there once, of the weights of its step, with a log-prob for each of its tokens."""
    with TrajectoryStore.open(run_dir / "store") as store:
        ids = store.ids()
        names = store.read_scalars("trajectory_id", ids)
        assert sorted(names.tolist()) == list(range(rollouts * PROMPTS * GROUP))
        assert (store.read_scalars("policy_version", ids) == names // (PROMPTS * GROUP)).all()
        scored, sampled = store.read_ragged("log_probs", ids), store.read_ragged("assistant_mask", ids)
        assert (np.isfinite(scored.values) == sampled.values.astype(bool)).all()


def test_a_run_samples_with_a_server(server: FakeVLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Each step's weights reach the server first, so what it samples is on-policy and the sampler's check is silent."""
    events: list[Event] = []
    finished = run(digits(server.address, 4), run_dir=tmp_path / "run", on_event=events.append)
    assert finished.steps == 4
    assert not [event for event in events if isinstance(event, Notice)]
    check_store(tmp_path / "run", 4)
    assert len(server.requests) == 4 * PROMPTS
    assert versions_of(server) == ["0", "1", "2", "3"]
    metrics = RunFolder(tmp_path / "run").metrics
    assert all(row["sampler_gap"] < 1e-5 for row in metrics)
    assert sorted(path.name for path in (tmp_path / "run" / "weights").glob("version-*")) == [
        "version-00000002",
        "version-00000003",
    ]
    assert main(["show", str(tmp_path / "run")]) == 0
    assert f"  sampled by {server.address} at temperature 0.8, processed log-probs\n" in capsys.readouterr().out


def test_a_run_with_a_server_scores_with_the_reference_meanwhile(server: FakeVLLM, tmp_path: Path):
    """Each sampled token has the log-prob of the first weights, which are the policy's own in the first rollout."""
    pipeline = override(digits(server.address, 3), "write.kl_coef", "0.1")
    assert run(pipeline, run_dir=tmp_path / "run").steps == 3
    check_store(tmp_path / "run", 3)
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        names = ("ref_log_probs", "log_probs", "assistant_mask")
        reference, policy, sampled = (store.read_ragged(name, store.ids()).values for name in names)
        first = int(store.read_ragged("log_probs", store.ids()[: PROMPTS * GROUP]).lengths.sum())
    assert (np.isfinite(reference) == sampled.astype(bool)).all()
    gap = np.abs(reference - policy)
    assert np.nanmax(gap[:first]) < 1e-5
    assert np.nanmax(gap[first:]) > 1e-4


@pytest.mark.parametrize(
    ("changes", "on_cuda", "beside"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"collect.engine": "http://a:1"}, False, True),
        ({"collect.engine": "vllm"}, False, True),
        ({"policy.lora_rank": "2"}, False, False),
        ({"write.kl_coef": "0", "collect.engine": "http://a:1"}, False, False),
    ],
)
def test_where_the_reference_scores_beside_sampling(
    changes: dict[str, str], on_cuda: bool, beside: bool, tmp_path: Path
):
    """Where it helps; and never with slots on a CPU, whose runs are the same bit for bit."""
    pipeline = override_all(digits("slots", 1), [("write.kl_coef", "0.1"), *changes.items()])
    models = build_models(pipeline, seed=0, device="cpu")
    if on_cuda:
        assert isinstance(models.reference, TokenPolicy)
        to_device(models.reference.model)
    (run_dir := tmp_path / "run").mkdir()
    with build_parts(pipeline, models, run=RunFolder(run_dir), seed=0) as parts:
        assert (parts.collector.retrieve is not None) == beside


@pytest.mark.parametrize(
    ("collect", "told"),
    [({}, False), ({"refresh_weights_every": 8}, True), ({"engine": "vllm"}, True), ({"engine": "http://a:1"}, True)],
)
def test_a_run_keeps_how_it_sampled_where_more_than_its_definition_decides_that(
    collect: dict[str, Any], told: bool, tmp_path: Path
):
    """Weights that may change during sampling, or an engine elsewhere; any other store has the temperature."""
    tiny = digits("slots", 1)
    pipeline = replace(tiny, collect=replace(tiny.collect, **collect))
    with closing(open_storage(RunFolder(tmp_path / "run"), pipeline, max_size=None)) as storage:
        names = [column.name for column in storage.store.schema]
    assert names == [
        *trajectory_schema().names,
        *(column.name for column in (*(SAMPLED_BY if told else (TEMPERATURE,)), *FAILURES)),
    ]


def test_a_run_that_gets_another_engine_keeps_how_it_sampled_from_then_on(server: FakeVLLM, tmp_path: Path):
    """Its store gains the columns when it is resumed; what was sampled before says nothing."""
    run(digits("slots", 2), run_dir=tmp_path / "run")
    run(digits(server.address, 4), run_dir=tmp_path / "run", resume=True)
    check_store(tmp_path / "run", 4)
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        engines = store.read(store.ids(), ["engine"])["engine"]
    assert engines == [""] * (2 * PROMPTS * GROUP) + [server.address] * (2 * PROMPTS * GROUP)


def test_a_server_that_goes_loses_nothing(server: FakeVLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run ends with what it has stored, and goes on with --resume, at another address too."""
    # Else the test waits for the five minutes that a server may take to restart.
    monkeypatch.setattr("rlhf_pipeline.policies.engines.http.PATIENCE_S", 0.3)
    events: list[Event] = []

    def cut(event: Event) -> None:
        events.append(event)
        if getattr(event, "step", 0) == 3:
            server.broken = [503] * 10_000

    with pytest.raises(EngineError, match=rf"{server.address} has been unreachable for 0\.3 s.*--resume"):
        run(digits(server.address, 6), run_dir=tmp_path / "run", on_event=cut)
    check_store(tmp_path / "run", 3)
    with FakeVLLM(tmp_path / "model").serving() as other:
        run(digits(other.address, 6), run_dir=tmp_path / "run", resume=True, on_event=events.append)
        assert len(other.requests) == 3 * PROMPTS
    check_store(tmp_path / "run", 6)
    assert [row["step"] for row in RunFolder(tmp_path / "run").metrics] == [1, 2, 3, 4, 5, 6]


def test_a_completion_that_is_aborted_stops_the_rollout(server: FakeVLLM, tmp_path: Path):
    """Nothing of the rollout is stored: a cut completion has no reward."""
    sample = server.sample

    def cut(body: dict) -> dict:
        reply = sample(body)
        reply["choices"][1]["finish_reason"] = "abort"
        return reply

    server.sample = cut  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=rf"{server.address} aborted 3 of 12 completions.*so it was not stored"):
        run(digits(server.address, 2), run_dir=tmp_path / "run")
    check_store(tmp_path / "run", 0)


def test_collectors_beside_a_learner_give_the_server_what_is_published(server: FakeVLLM, tmp_path: Path):
    """The versions that it labels its tokens with are the learner's own, and arrive in the store."""
    pipeline = digits(server.address, 2)
    learner = threading.Thread(target=lambda: learn(pipeline, run_dir=tmp_path / "run"), daemon=True)
    learner.start()
    collect(pipeline, run_dir=tmp_path / "run", name="a")
    learner.join(60)
    assert not learner.is_alive()
    assert set(versions_of(server)) <= {"0", "1", "2"}
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        assert store.watermark >= 2 * PROMPTS * GROUP
        assert (store.read_scalars("policy_version") <= 2).all()


def run_digits(address: str, run_dir: Path) -> None:
    """Run 40 steps with the engine at an address."""
    run(digits(address, 40), run_dir=run_dir)


@pytest.mark.crash
def test_a_killed_run_continues_with_its_server(server: FakeVLLM, tmp_path: Path, children: Children):
    """`kill -9` in the middle of a rollout: every trajectory is there once, and every step was taken once."""
    server.delay_s = 0.02
    child = children.call(run_digits, server.address, tmp_path / "run")
    child.until(lambda: len(server.requests) > 4 * PROMPTS, every=0.002)  # in its fifth rollout
    assert child.killed()
    server.delay_s = 0.0
    run(override(digits(server.address, 40), "learn.steps", "7"), run_dir=tmp_path / "run", resume=True)
    check_store(tmp_path / "run", 7)
    assert [row["step"] for row in RunFolder(tmp_path / "run").metrics] == list(range(1, 8))


@pytest.mark.parametrize(
    "engine",
    ["vlm", "http://", "127.0.0.1:8000", "http://host:8000/v1", "http://me@host:80", "http://host:port", "ftp://a:1"],
)
def test_what_is_no_engine_is_refused_at_once(engine: str):
    """By the definition, with what it may be."""
    with pytest.raises(DefinitionError, match="it must be slots, vllm, or an address like http://127"):
        Collect(engine=engine)


def test_adapters_alone_do_not_reach_an_engine_elsewhere():
    """LoRA is refused with every engine but the slots."""
    pipeline = digits("http://127.0.0.1:8000", 1)
    with pytest.raises(DefinitionError, match="loads complete models, not adapters"):
        override(pipeline, "policy.lora_rank", "4")
