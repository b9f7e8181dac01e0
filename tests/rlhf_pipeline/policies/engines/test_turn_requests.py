"""Conversations on an engine that only samples requests."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from rlhf_pipeline import Collect, Prompt, Step, Turn, scratch_policy
from rlhf_pipeline.collectors.conversations import Conversations
from rlhf_pipeline.environments.games import LAKE_ALPHABET
from rlhf_pipeline.errors import EngineError
from rlhf_pipeline.policies.engines.protocol import Ended, RaggedCompletions, Request, WeightRefresh

TOKEN_S, TOOL_S, TURNS = 0.002, 0.03, 6


class Requests:
    """An engine of 2 ms a token, for any number of requests at once; one turn in ten is long."""

    name, version = "requests", 0

    def __init__(self) -> None:
        self.aborts = 0
        self.in_progress = 0
        self.fails_at: int | None = None
        self.aborts_at: int | None = None

    def generate(
        self, request: Request, refresh: WeightRefresh | None = None, ended: Ended | None = None
    ) -> RaggedCompletions:
        """Wait as long as the longest turn takes."""
        aborts = self.aborts
        lengths = [150 if random.Random(f"{stream}").random() < 0.1 else 5 for stream in request.streams()]
        self.in_progress += 1
        for _ in range(max(lengths)):
            if self.in_progress == self.fails_at:
                self.fails_at = None
                raise EngineError("the engine failed")
            if self.in_progress == self.aborts_at:
                self.aborts_at = None
                self.abort()
            time.sleep(TOKEN_S)
            if aborts != self.aborts:
                break
        if ended is not None:
            for index, length in enumerate(lengths):
                ended(index, [2] * (length - 1) + [0])
        counts, nothing = np.array(lengths), np.zeros(len(lengths), np.int64)
        ids = np.concatenate([[2] * (length - 1) + [0] for length in lengths]).astype(np.int64)
        aborted = np.full(len(lengths), aborts != self.aborts)
        log_probs = np.zeros(len(ids), np.float32)
        return RaggedCompletions(ids, log_probs, counts, nothing, nothing, ~aborted, aborted=aborted)

    def abort(self) -> None:
        """End the requests in progress."""
        self.aborts += 1


class Tool:
    """Takes a while; notes how long each conversation takes alone."""

    alone_s: ClassVar[dict[int, float]]

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Begin."""
        self.alone_s[id(self)] = 0.0
        return "#..#"

    async def step(self, turn: Turn) -> Step:
        """Answer."""
        self.alone_s[id(self)] += len(turn.token_ids) * TOKEN_S + TOOL_S
        await asyncio.sleep(TOOL_S)
        return Step(".", done=turn.number == TURNS)


def run(engine: Any, environment: Any) -> list[Any]:
    """32 conversations."""
    tokenizer = scratch_policy(LAKE_ALPHABET, hidden_size=16, num_layers=1, num_heads=2).tokenizer
    policy: Any = SimpleNamespace(
        engine=engine, tokenizer=tokenizer, model=None, eos_token_ids=[0], pad_token_id=0, max_positions=8_000
    )
    config = Collect(prompts_per_rollout=8, group_size=4, max_new_tokens=200, max_turns=TURNS)
    runner = Conversations(
        environment, policy=policy, config=config, temperature=1.0, seed=0, as_chat=False, template={}
    )
    return runner.run([Prompt(text=".") for _ in range(8)], range(8))


def test_no_conversation_waits_for_another():
    """All take as long as the slowest one alone, give or take."""
    environment = type("Timed", (Tool,), {"alone_s": {}})
    began = time.monotonic()
    found = run(Requests(), environment)
    took_s, slowest_s = time.monotonic() - began, max(environment.alone_s.values())
    assert [conversation.num_turns for conversation in found] == [TURNS] * 32
    assert slowest_s > 2 * min(environment.alone_s.values())
    assert took_s < 1.3 * slowest_s + 0.3  # as threads start late on a busy machine


def test_what_fails_ends_the_call():
    """With the error; the other requests are aborted, and no thread is left behind."""
    engine = Requests()
    engine.fails_at = 20
    with pytest.raises(EngineError, match=r"^the engine failed$"):
        run(engine, type("Timed", (Tool,), {"alone_s": {}}))
    assert engine.aborts > 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("turns")]


def test_an_abort_ends_the_conversations():
    """Nothing of a rollout is kept whose turns another client aborted."""
    engine = Requests()
    engine.aborts_at = 20  # while it samples, however long it takes to start
    with pytest.raises(EngineError, match="so it was not stored"):
        run(engine, type("Timed", (Tool,), {"alone_s": {}}))
