"""vLLM over HTTP: the contract, and what can go wrong on the way."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlhf_pipeline.errors import EngineError
from rlhf_pipeline.policies.engines.http import HTTPEngine
from rlhf_pipeline.policies.engines.jobs import jobs_of
from rlhf_pipeline.policies.engines.protocol import Request
from tests.rlhf_pipeline.policies.engines.contract import (
    CLOSE,
    POSITIONS,
    PROMPTS,
    VOCAB,
    Bench,
    EngineContract,
    InThread,
    until,
)
from tests.rlhf_pipeline.policies.engines.fake_vllm import FakeVLLM
from tests.rlhf_pipeline.policies.engines.real_vllm import serving

SHAPES = Path(__file__).parent / "vllm_shapes.json"


def engine_for(address: str, **options: Any) -> HTTPEngine:
    options = {"owner": "run-1", "patience_s": 5.0, "look_s": 0.02, **options}
    return HTTPEngine(address, vocab=VOCAB, max_positions=POSITIONS, **options)


@pytest.fixture(scope="module")
def slow_fake(folders: dict[int, Path]) -> Iterator[FakeVLLM]:
    """A server that takes a millisecond a token, so that there is something in flight."""
    with FakeVLLM(folders[2], max_num_seqs=2, delay_s=0.001).serving() as fake:
        yield fake


class TestFakeServer(EngineContract):
    """The contract against the fake server, with groups that are larger than the server takes at once."""

    start_s = 0.1

    @pytest.fixture
    def bench(self, folders: dict[int, Path], slow_fake: FakeVLLM) -> Iterator[Bench]:
        """A client that has given the server version 1."""
        engine = engine_for(slow_fake.address)
        engine.load_weights(folders[1], 1)
        yield Bench(engine, folders)
        engine.close()


@pytest.fixture
def fake(folders: dict[int, Path]) -> Iterator[FakeVLLM]:
    """A server of a test's own."""
    with FakeVLLM(folders[1]).serving() as fake:
        yield fake


def test_a_group_sends_its_prompt_once(fake: FakeVLLM, folders: dict[int, Path]):
    """One request per prompt, whose members share its computation."""
    engine = engine_for(fake.address)
    engine.load_weights(folders[1], 1)
    engine.generate(Request(prompts=PROMPTS, group_size=8, max_new_tokens=2))
    assert sorted(tokens for _, tokens in fake.requests) == sorted(PROMPTS)


def test_what_breaks_on_the_way_is_asked_again_and_comes_once(fake: FakeVLLM, folders: dict[int, Path]):
    """A lost reply, a refused connection and an error of the server: the same completions, each of them once."""
    engine = engine_for(fake.address)
    engine.load_weights(folders[1], 1)
    asked = Request(prompts=PROMPTS, group_size=2, max_new_tokens=6, seed=3)
    straight = engine.generate(asked)
    fake.requests.clear()
    fake.broken = ["drop", "refuse", 503, "drop"]
    again = engine.generate(asked)
    assert again.token_ids.tolist() == straight.token_ids.tolist()
    assert len(again) == 6
    names = [name for name, _ in fake.requests]
    assert len(names) == len(set(names)) == 3 + 4
    # Every request that broke was taken back under its own id before the next one went out.
    assert sum(path == "/abort_requests" for _, path in fake.log) >= 4


def test_weights_of_somebody_else_are_refused(fake: FakeVLLM, folders: dict[int, Path]):
    """Another run that gives the server its own weights is found out by the first reply."""
    mine, other = engine_for(fake.address), engine_for(fake.address, owner="run-2")
    mine.load_weights(folders[1], 1)
    other.load_weights(folders[2], 1)
    with pytest.raises(EngineError, match=r"labelled 'run-2:1:.*Use a separate server for each run"):
        mine.generate(Request(prompts=PROMPTS, max_new_tokens=2))


def test_processes_of_one_run_load_weights_once(fake: FakeVLLM, folders: dict[int, Path]):
    """The second one finds the label of the very same files and leaves the server alone."""
    first, second = engine_for(fake.address), engine_for(fake.address)
    first.load_weights(folders[2], 7)
    loads = fake.log.count(("POST", "/collective_rpc"))
    second.load_weights(folders[2], 7)
    assert fake.log.count(("POST", "/collective_rpc")) == loads == 1
    found = second.generate(Request(prompts=[[5]], max_new_tokens=2))
    assert found.spans is not None
    assert found.spans.lists() == [[(0, 7)]]


@pytest.mark.parametrize("label", ["default", "run-2:2:0"])
def test_a_restarted_server_gets_its_weights_back(label: str, folders: dict[int, Path]):
    """It comes back with other weights, of a run with a longer name too; what broke is sampled with the run's own."""
    with FakeVLLM(folders[1]).serving() as fake:
        engine = engine_for(fake.address, owner="run")
        engine.load_weights(folders[2], 2)
        straight = engine.generate(Request(prompts=[[5]], max_new_tokens=20, seed=1))
        fake.broken = ["refuse"]
        fake.load(folders[1])
        fake.label(label)
        again = engine.generate(Request(prompts=[[5]], max_new_tokens=20, seed=1))
    assert again.token_ids.tolist() == straight.token_ids.tolist()
    assert fake.log.count(("POST", "/collective_rpc")) == 2


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs but the release of locks."""


def cut_after(engine: HTTPEngine, calls: int) -> None:
    """Let an engine die after so many calls that change the server."""
    exchange, left = engine._exchange, calls

    def counted(method: str, *args: Any, **options: Any) -> Any:
        nonlocal left
        reply = exchange(method, *args, **options)
        left -= method == "POST"
        if left == 0:
            raise Killed
        return reply

    engine._exchange = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("wanted", [1, 2])
@pytest.mark.parametrize("calls", range(1, 7))
def test_a_hand_over_that_is_killed_is_done_again(calls: int, wanted: int, fake: FakeVLLM, folders: dict[int, Path]):
    """After any of its calls: the next process gets the version that it asks for, labelled as such, and samples."""
    engine_for(fake.address).load_weights(folders[1], 1)
    killed = engine_for(fake.address)
    cut_after(killed, calls)
    with pytest.raises(Killed):
        killed.load_weights(folders[2], 2)
    engine = engine_for(fake.address)
    engine.load_weights(folders[wanted], wanted)
    found = InThread(engine, Request(prompts=PROMPTS, max_new_tokens=4, seed=1)).result(20)
    assert found.spans is not None
    assert found.spans.lists() == [[(0, wanted)]] * 3
    assert Bench(engine, folders).worst(found, PROMPTS, 1.0) < CLOSE


def test_who_waits_loads_weights_whose_loader_was_killed(
    fake: FakeVLLM, folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch
):
    """The server is paused until somebody does; what it was sampling goes on.

    Whoever waits asks for its label now and then, and not again what kind of server it is, as no connection broke.
    """
    # Else the test waits for the 10 s between two looks at a server.
    monkeypatch.setattr("rlhf_pipeline.policies.engines.http._HEALTH_EVERY_S", 0.1)
    fake.delay_s = 0.002
    engine = engine_for(fake.address)
    engine.load_weights(folders[1], 1)
    fake.log.clear()
    going = InThread(engine, Request(prompts=PROMPTS, max_new_tokens=150, seed=1))
    until(lambda: len(fake.engines) == 3)
    killed = engine_for(fake.address)
    cut_after(killed, 3)
    with pytest.raises(Killed):
        killed.load_weights(folders[2], 2)
    found = going.result(30)
    asked = [path for method, path in fake.log if method == "GET"]
    assert asked.count("/weight_info") > 1
    assert asked.count("/server_info?config_format=json") == 1  # by the process that was killed
    assert found.spans is not None
    assert {version for spans in found.spans.lists() for _, version in spans} == {1}
    assert Bench(engine, folders).worst(found, PROMPTS, 1.0) < CLOSE


def test_weights_that_arrive_during_a_pause_do_not_end_it(fake: FakeVLLM, folders: dict[int, Path]):
    """Whoever paused the engine resumes it."""
    engine = engine_for(fake.address)
    engine.load_weights(folders[1], 1)
    engine.pause()
    engine.load_weights(folders[2], 2)
    assert fake.paused
    engine.resume()
    assert not fake.paused


def test_weights_that_arrive_first_during_a_call(fake: FakeVLLM, folders: dict[int, Path]):
    """Its tokens have no versions, since some of them were sampled with weights that nobody knows."""
    fake.delay_s = 0.002
    engine = engine_for(fake.address)
    going = InThread(engine, Request(prompts=PROMPTS, max_new_tokens=[3, 100, 100], seed=1))
    until(lambda: len(fake.engines) == 2)
    engine.load_weights(folders[2], 2)
    found = going.result()
    assert found.spans is None
    assert found.lengths.tolist() == [3, 100, 100]


def test_a_server_out_of_reach_is_named(fake: FakeVLLM, folders: dict[int, Path]):
    """With the address, how long it was waited for, and the command that starts one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EngineError, match=rf"{address} has been unreachable for 0.2 s .*vllm serve"):
            engine_for(address, patience_s=0.2).load_weights(folders[1], 1)


def test_a_server_that_stays_broken_ends_the_call(fake: FakeVLLM, folders: dict[int, Path]):
    """After the patience, not after the first failure; and nothing is left in progress."""
    engine = engine_for(fake.address, patience_s=0.3)
    engine.load_weights(folders[1], 1)
    fake.broken = [503] * 1000
    with pytest.raises(EngineError, match=r"unreachable for 0\.3 s .*EngineCore"):
        engine.generate(Request(prompts=PROMPTS, max_new_tokens=2))
    assert not fake.engines


def test_raw_log_probs_are_refused(fake: FakeVLLM, folders: dict[int, Path]):
    """VLLM's default are log-probs before the temperature; the message has the command that sets the others."""
    fake.mode = "raw_logprobs"
    with pytest.raises(EngineError, match=r"reports raw_logprobs.*--logprobs-mode processed_logprobs"):
        engine_for(fake.address).load_weights(folders[1], 1)


def test_weights_that_the_server_cannot_load(fake: FakeVLLM, folders: dict[int, Path], tmp_path: Path):
    """The server stays paused, since nobody knows what it holds, and the message says what to do."""
    engine = engine_for(fake.address)
    engine.load_weights(folders[1], 1)
    missing = tmp_path / "version-3"
    missing.mkdir()
    (missing / "config.json").write_text("{}", encoding="utf-8")
    fake.answer = _refusing(fake)  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"could not load the weights in .*version-3 \(500.*is paused until"):
        engine.load_weights(missing, 3)
    assert fake.paused
    assert engine.version is None


def _refusing(fake: FakeVLLM) -> Any:
    answer = fake.answer

    def refuse(method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (500, {"error": {"message": "no"}}) if path == "/collective_rpc" else answer(method, path, body)

    return refuse


def test_a_log_prob_that_is_null_is_nan(fake: FakeVLLM, folders: dict[int, Path]):
    """And the tokens around it keep theirs."""
    engine = engine_for(fake.address)
    engine.load_weights(folders[1], 1)
    fake.nan_every = 3
    found = engine.generate(Request(prompts=PROMPTS, group_size=4, max_new_tokens=8, seed=2))
    gone = found.token_ids % 3 == 0
    assert gone.any()
    assert np.isnan(found.log_probs[gone]).all()
    assert np.isfinite(found.log_probs[~gone]).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda choice: choice["token_ids"].append(3),
        lambda choice: choice["weight_versions"].clear(),
        lambda choice: choice.update(index=7),
        lambda choice: choice.update(finish_reason="error"),
        lambda choice: choice.update(logprobs=None),
    ],
)
def test_replies_of_another_form_are_refused(change: Any, fake: FakeVLLM, folders: dict[int, Path]):
    """Nothing of them is taken, and the message shows the reply."""
    engine = engine_for(fake.address)
    engine.load_weights(folders[1], 1)
    sample = fake.sample

    def changed(body: dict[str, Any]) -> dict[str, Any]:
        reply = sample(body)
        change(reply["choices"][0])
        return reply

    fake.sample = changed  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"not in vLLM's format .*request_id"):
        engine.generate(Request(prompts=[[5]], max_new_tokens=2))


# ---------------------------------------------------------------------------------- the real server


def shape(value: Any) -> Any:
    """The form of JSON: types in place of values, and of a list its first item."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return {type(None): "null", bool: "true or false", int: "number", float: "number", str: "text"}[type(value)]


def exchanges(address: str, folders: dict[int, Path]) -> dict[str, Any]:
    """What the client needs of a server: the form of each reply, with its status."""
    engine = engine_for(address, patience_s=60.0)
    out: dict[str, Any] = {}

    def note(name: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        status, reply = engine._ask_status(method, path, body)
        if path.startswith("/server_info"):
            config = reply["vllm_config"]
            kept = {"model_config": ["logprobs_mode", "max_model_len"], "scheduler_config": ["max_num_seqs"]}
            reply = {"vllm_config": {group: {key: config[group][key] for key in keys} for group, keys in kept.items()}}
        out[name] = {"request": f"{method} {path}", "body": shape(body), "status": status, "reply": shape(reply)}
        return reply

    asked = Request(
        prompts=[[5, 6]], group_size=2, max_new_tokens=3, temperature=0.7, end_token_ids=[1], stream_ids=[3]
    )
    (job,) = jobs_of(asked, asked.limits(), most=None)
    params = job.sampling
    completions = {"request_id": "a", "token_ids": job.tokens, "sampling_params": params}
    everything = {**completions, "sampling_params": {**params, "stop_token_ids": list(range(VOCAB))}}
    note("health", "GET", "/health")
    note("server info", "GET", "/server_info?config_format=json")
    note("completions", "POST", "/inference/v1/generate", completions)
    note("a stop", "POST", "/inference/v1/generate", everything)
    note("too many members", "POST", "/inference/v1/generate", {**completions, "sampling_params": {**params, "n": 99}})
    note("too long", "POST", "/inference/v1/generate", {**completions, "token_ids": [5] * POSITIONS})
    note("pause", "POST", "/pause?mode=keep", {})
    note("is it paused", "GET", "/is_paused")
    weights = {"weights_path": str(folders[2])}
    note("reload", "POST", "/collective_rpc", {"method": "reload_weights", "kwargs": weights})
    note("reset", "POST", "/reset_prefix_cache?reset_running_requests=true", {})
    note("label", "POST", "/update_weight_version", {"new_version": "run-1:2:x"})
    note("resume", "POST", "/resume", {})
    note("weight info", "GET", "/weight_info")
    note("abort", "POST", "/abort_requests", {"request_ids": ["generate-tokens-none"]})
    lost = {"weights_path": str(folders[2].parent / "nowhere")}
    note("a failed reload", "POST", "/collective_rpc", {"method": "reload_weights", "kwargs": lost})
    return out


def test_the_fake_server_has_the_forms_of_the_real_one(fake: FakeVLLM, folders: dict[int, Path]):
    """Every reply has status and form of what vLLM 0.32 was recorded to answer."""
    assert exchanges(fake.address, folders) == json.loads(SHAPES.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def vllm_server(folders: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real server."""
    with serving(folders[1], tmp_path_factory.mktemp("vllm") / "log.txt", max_model_len=POSITIONS) as address:
        yield address


@pytest.mark.peer
@pytest.mark.timeout(600)
def test_the_real_server_has_the_recorded_forms(vllm_server: str, folders: dict[int, Path]):
    """`RECORD_SHAPES=1` writes them down anew."""
    found = exchanges(vllm_server, folders)
    if os.environ.get("RECORD_SHAPES"):
        SHAPES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    assert found == json.loads(SHAPES.read_text(encoding="utf-8"))


@pytest.mark.peer
@pytest.mark.timeout(600)
class TestRealServer(EngineContract):
    """The contract against vLLM itself."""

    start_s = 0.1
    in_flight_tokens = 1_900  # it takes less than a millisecond for a token of each of them

    @pytest.fixture
    def bench(self, folders: dict[int, Path], vllm_server: str) -> Iterator[Bench]:
        """A client that has given the server version 1."""
        engine = engine_for(vllm_server, patience_s=60.0)
        engine.load_weights(folders[1], 1)
        yield Bench(engine, folders)
        engine.close()


def test_calls_from_two_threads(fake: FakeVLLM, folders: dict[int, Path]):
    """Two calls of one engine at once get their own completions, and aborting ends both."""
    fake.delay_s = 0.002
    engine = engine_for(fake.address)
    engine.load_weights(folders[1], 1)
    a, b = (InThread(engine, Request(prompts=PROMPTS, max_new_tokens=200, seed=seed)) for seed in (1, 2))
    time.sleep(0.15)
    engine.abort()
    for call in (a, b):
        aborted = call.result().aborted
        assert aborted is not None
        assert aborted.all()


def test_a_tied_head_goes_to_the_server_as_a_tensor_of_its_own(fake: FakeVLLM, folders: dict[int, Path]):
    """VLLM would keep the old one; what is made for it is gone afterwards, and the folder is as it was."""
    before = sorted(path.name for path in folders[2].rglob("*"))
    seen: list[torch.Tensor] = []
    load = fake.load

    def look(folder: Path) -> None:
        seen.append(load_file(folder / "head.safetensors")["lm_head.weight"])
        load(folder)

    fake.load = look  # type: ignore[method-assign]
    engine_for(fake.address).load_weights(folders[2], 2)
    embedding = load_file(folders[2] / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(seen[0], embedding)
    assert sorted(path.name for path in folders[2].rglob("*")) == before
    assert not list(folders[2].parent.glob(".engine-*"))
