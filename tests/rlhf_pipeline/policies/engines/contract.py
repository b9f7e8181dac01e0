"""What every engine must do, whatever it runs on: a class of tests that each engine's own test file inherits."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.policies.engines.protocol import Engine, RaggedCompletions, Request, WeightRefresh
from rlhf_pipeline.policies.engines.turn_requests import converse
from rlhf_pipeline.policies.engines.turn_rows import EndedTurn, TurnRow

VOCAB, POSITIONS = 128, 2048
PROMPTS = [[5, 6, 7, 8, 9], [100], [11] * 20]
CLOSE = 2e-5


def write_model(folder: Path, seed: int) -> None:
    """A tiny Qwen2 in float32 with steep logits: weights of another seed are nats away."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # vLLM's kernels for the CPU have no heads narrower than 32
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,  # which vLLM forgets when it loads weights again from a folder
        bos_token_id=0,
        eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)


@dataclass
class Bench:
    """An engine that has taken version 1, and the folders of the versions 1 and 2."""

    engine: Engine
    folders: dict[int, Path]
    models: dict[int, Qwen2ForCausalLM] = field(default_factory=dict)

    def exact(self, version: int, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> torch.Tensor:
        """Log-probs of tokens after a prompt by teacher forcing, in float64 from the logits on."""
        if version not in self.models:
            self.models[version] = Qwen2ForCausalLM.from_pretrained(self.folders[version], dtype=torch.float32).eval()
        with torch.no_grad():
            logits = self.models[version](torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        scores = torch.log_softmax(logits.double() / temperature, -1)
        return scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]

    def worst(self, found: RaggedCompletions, prompts: Sequence[Sequence[int]], temperature: float) -> float:
        """The largest distance of any token's log-prob from teacher forcing under the weights of its own span."""
        assert found.spans is not None
        gaps = [0.0]
        for completion, spans in zip(found, found.spans.lists(), strict=True):
            ends = [start for start, _ in [*spans, (len(completion.token_ids), 0)][1:]]
            for (start, version), end in zip(spans, ends, strict=True):
                prompt = prompts[completion.prompt_index]
                exact = self.exact(version, prompt, completion.token_ids, temperature)
                assert torch.isfinite(completion.log_probs).all()
                gaps.append(float((exact - completion.log_probs.double())[start:end].abs().max()))
        return max(gaps)


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that another thread does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


class InThread:
    """A call of `generate` in a thread of its own."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.found: RaggedCompletions | None = None
        self.error: BaseException | None = None
        self._first_ended = threading.Event()

        def call() -> None:
            try:
                self.found = engine.generate(request, None, lambda index, tokens: self._first_ended.set())
            except BaseException as error:  # noqa: BLE001 - handed to the test
                self.error = error

        self.thread = threading.Thread(target=call, daemon=True)
        self.thread.start()

    def wait_for_the_first_to_end(self) -> None:
        assert self._first_ended.wait(60.0), "no completion ends"

    def result(self, seconds: float = 60.0) -> RaggedCompletions:
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "generate does not return"
        if self.error is not None:
            raise self.error
        assert self.found is not None
        return self.found


class Replier:
    """Answers each turn with two tokens, at once or after a while, and ends a conversation after so many turns.

    The last number of turns is that of all further conversations.
    """

    reply_after = 1

    def __init__(self, *turns: int, delay_s: float = 0.0, on_turn: Callable[[], None] = lambda: None) -> None:
        self.turns, self.delay_s, self.on_turn = turns, delay_s, on_turn
        self.order: list[int] = []
        """The conversations of the turns, in the order in which they ended."""
        self._wake: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._ready: dict[int, list[int]] = {}

    def answer(self, ended: Sequence[EndedTurn]) -> dict[int, list[int] | None]:
        """Answer, or begin to."""
        answers: dict[int, list[int] | None] = {}
        for turn in ended:
            assert np.isfinite(turn.row.log_probs[turn.row.began :]).all()
            self.order.append(turn.place)
            self.on_turn()
            if self.order.count(turn.place) >= self.turns[min(turn.place, len(self.turns) - 1)]:
                answers[turn.place] = None
            elif self.delay_s == 0:
                answers[turn.place] = [7, 8]
            elif self.delay_s < math.inf:
                threading.Timer(self.delay_s, self._arrive, [turn.place]).start()
        return answers

    def _arrive(self, place: int) -> None:
        with self._changed:
            self._ready[place] = [7, 8]
            self._changed.notify_all()
        self._wake()

    def listen(self, wake: Callable[[], None]) -> None:
        """See `Partner.listen`."""
        self._wake = wake

    def arrived(self) -> dict[int, list[int]]:
        """See `Partner.arrived`."""
        with self._changed:
            ready, self._ready = self._ready, {}
        return ready

    def fetch(self, places: Sequence[int], go_on: Callable[[], bool]) -> dict[int, list[int]] | None:
        """See `Partner.fetch`."""
        with self._changed:
            while not self._ready.keys() >= {*places}:
                self._changed.wait(0.02)
                if not go_on():
                    return None
            return {place: self._ready.pop(place) for place in places}


class EngineContract:
    """Inherit it as `Test...` and give the fixture `bench`.

    `in_flight_tokens` says how many tokens of a completion take longer than new weights, a pause or an abort need to
    arrive, `start_s` a time after which some are sampled, and not yet all of these.
    """

    start_s = 0.05
    in_flight_tokens = 200

    @pytest.fixture
    def bench(self, folders: dict[int, Path]) -> Any:
        """The engine under test with the weights of version 1."""
        raise NotImplementedError

    @pytest.mark.parametrize("temperature", [0.7, 1.3])
    def test_log_probs_equal_teacher_forcing(self, bench: Bench, temperature: float):
        """Of every token of each member of each group, at the temperature of sampling, in the order of the request."""
        request = Request(prompts=PROMPTS, group_size=3, max_new_tokens=12, temperature=temperature, seed=4)
        completions = bench.engine.generate(request)
        assert completions.prompt_index.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert completions.member.tolist() == [0, 1, 2] * 3
        assert completions.lengths.tolist() == [12] * 9
        assert not completions.stopped.any()
        assert completions.aborted is None
        assert completions.spans is not None
        assert completions.spans.lists() == [[(0, 1)]] * 9
        assert bench.worst(completions, PROMPTS, temperature) < CLOSE
        members = {tuple(c.token_ids) for c in completions if c.prompt_index == 0}
        assert len(members) == 3

    def test_greedy_has_log_probs_at_temperature_one(self, bench: Bench):
        """Temperature 0 takes the most probable token, for all members alike."""
        completions = bench.engine.generate(Request(prompts=PROMPTS, group_size=2, max_new_tokens=5, temperature=0.0))
        tokens = [c.token_ids for c in completions]
        assert tokens[::2] == tokens[1::2]
        assert bench.worst(completions, PROMPTS, 1.0) < CLOSE
        with torch.no_grad():
            first = bench.models[1](torch.tensor([PROMPTS[0]])).logits[0, -1].argmax()
        assert tokens[0][0] == int(first)

    def test_limits_end_tokens_and_finish_reasons(self, bench: Bench):
        """Each completion has its own limit; an end token ends it, belongs to it, and is a stop even at the limit."""
        limits = [1, 2, 2, 7, 1, 3]
        completions = bench.engine.generate(Request(prompts=PROMPTS[:2], group_size=3, max_new_tokens=limits, seed=1))
        assert completions.lengths.tolist() == limits
        assert {c.finish_reason for c in completions} == {"length"}
        ends = set(range(0, VOCAB, 3))
        request = Request(prompts=PROMPTS, group_size=8, max_new_tokens=6, end_token_ids=sorted(ends), seed=1)
        completions = bench.engine.generate(request)
        assert {c.finish_reason for c in completions} == {"stop", "length"}
        for c in completions:
            assert not ends & set(c.token_ids[:-1])
            assert (c.token_ids[-1] in ends) == (c.finish_reason == "stop")
        assert bench.worst(completions, PROMPTS, 1.0) < CLOSE
        every = Request(prompts=[[5]], max_new_tokens=1, end_token_ids=range(VOCAB))
        assert [c.finish_reason for c in bench.engine.generate(every)] == ["stop"]

    def test_the_seed_and_the_stream_decide(self, bench: Bench):
        """The same request gives the same tokens; another seed or stream gives others, whatever the prompt's place."""

        def tokens(prompts: list[list[int]], **changes: object) -> list[list[int]]:
            settings = {"group_size": 2, "max_new_tokens": 8, "seed": 3, **changes}
            return [c.token_ids for c in bench.engine.generate(Request(prompts=prompts, **settings))]  # type: ignore[arg-type]

        straight = tokens(PROMPTS)
        assert tokens(PROMPTS) == straight
        assert tokens(PROMPTS[::-1], stream_ids=[2, 1, 0]) == [*straight[4:], *straight[2:4], *straight[:2]]
        assert tokens(PROMPTS[:1]) == straight[:2]
        assert tokens(PROMPTS, seed=4) != straight
        assert tokens(PROMPTS[:1], stream_ids=[9]) != straight[:2]

    @pytest.mark.parametrize("form", ["folder", "state_dict"])
    def test_new_weights(self, bench: Bench, form: str):
        """What is sampled after them has their log-probs and their version; nothing of the old ones is left over."""
        before = bench.engine.generate(Request(prompts=PROMPTS, max_new_tokens=8, seed=2))
        new = Qwen2ForCausalLM.from_pretrained(bench.folders[2], dtype=torch.float32)
        bench.engine.load_weights(bench.folders[2] if form == "folder" else new.state_dict(), 2)
        assert bench.engine.version == 2
        after = bench.engine.generate(Request(prompts=PROMPTS, max_new_tokens=8, seed=2))
        assert after.spans is not None
        assert after.spans.lists() == [[(0, 2)]] * 3
        assert bench.worst(after, PROMPTS, 1.0) < CLOSE
        assert before.token_ids.tolist() != after.token_ids.tolist()

    def test_new_weights_in_flight(self, bench: Bench):
        """Each span of a completion is scored by its own weights, given all tokens before it."""

        def load() -> int:
            if bench.engine.version == 1:
                bench.engine.load_weights(bench.folders[2], 2)
            return 2

        tokens = self.in_flight_tokens
        request = Request(prompts=PROMPTS, group_size=2, max_new_tokens=tokens, temperature=0.7, seed=5)
        completions = bench.engine.generate(request, WeightRefresh(load, every=9, version=1))
        assert completions.spans is not None
        spans = completions.spans.lists()
        assert {tuple(version for _, version in part) for part in spans} <= {(1,), (1, 2), (2,)}
        assert any(len(part) == 2 for part in spans), spans
        assert bench.worst(completions, request.prompts, 0.7) < CLOSE

    def test_pause_keeps_what_is_in_progress(self, bench: Bench):
        """Nothing is sampled while it is paused, and then it goes on where it was."""
        limits = [3, self.in_flight_tokens, self.in_flight_tokens]
        request = Request(prompts=PROMPTS, max_new_tokens=limits, seed=6)
        began = time.monotonic()
        bench.engine.generate(request)
        whole = time.monotonic() - began
        going = InThread(bench.engine, request)
        going.wait_for_the_first_to_end()
        bench.engine.pause()
        time.sleep(1.5 * whole + 0.2)
        going_on = going.thread.is_alive()
        bench.engine.resume()
        assert going_on
        completions = going.result()
        assert completions.lengths.tolist() == limits
        assert bench.worst(completions, PROMPTS, 1.0) < CLOSE

    def test_abort_returns_what_was_sampled(self, bench: Bench):
        """The tokens so far with their log-probs and spans, marked as aborted; and the engine goes on sampling."""
        limits = [3, self.in_flight_tokens, self.in_flight_tokens]
        going = InThread(bench.engine, Request(prompts=PROMPTS, group_size=2, max_new_tokens=limits, seed=6))
        going.wait_for_the_first_to_end()
        bench.engine.abort()
        completions = going.result()
        assert completions.aborted is not None
        assert completions.aborted[2:].all()
        assert (completions.lengths[2:] < self.in_flight_tokens).all()
        assert {c.finish_reason for c in completions} == {"length", "abort"}
        assert bench.worst(completions, PROMPTS, 1.0) < CLOSE
        assert bench.engine.generate(Request(prompts=[[5]], max_new_tokens=2)).lengths.tolist() == [2]

    def test_a_deadline_aborts(self, bench: Bench):
        """What is done by then is whole; the rest is marked as aborted."""
        limits = [1, self.in_flight_tokens, self.in_flight_tokens]
        completions = bench.engine.generate(Request(prompts=PROMPTS, max_new_tokens=limits, deadline_s=self.start_s))
        assert completions.aborted is not None
        assert completions.aborted.tolist() == [False, True, True]
        assert bench.worst(completions, PROMPTS, 1.0) < CLOSE

    def test_each_completion_is_passed_on_when_it_ends(self, bench: Bench):
        """Once, in the thread that asked, with the tokens that are returned in the end, also across new weights."""

        def load() -> int:
            if bench.engine.version == 1:
                bench.engine.load_weights(bench.folders[2], 2)
            return 2

        seen: list[tuple[int, list[int]]] = []
        threads = set()

        def ended(index: int, tokens: Sequence[int]) -> None:
            threads.add(threading.get_ident())
            seen.append((index, list(tokens)))

        limits = [1, 2, 40, self.in_flight_tokens, 7, self.in_flight_tokens, 3, 3, 90]
        request = Request(prompts=PROMPTS, group_size=3, max_new_tokens=limits, end_token_ids=[7], seed=1)
        completions = bench.engine.generate(request, WeightRefresh(load, every=9, version=1), ended)
        assert {c.finish_reason for c in completions} <= {"stop", "length"}
        assert sorted(seen) == [(i, c.token_ids) for i, c in enumerate(completions)]
        assert threads == {threading.get_ident()}
        seen.clear()
        bench.engine.generate(Request(prompts=[]), None, ended)
        assert seen == []

    def test_a_completion_is_passed_on_while_others_are_sampled(self, bench: Bench):
        """So that the first to end can stop the others, which are cut short and therefore not passed on."""
        seen: list[int] = []

        def ended(index: int, tokens: Sequence[int]) -> None:
            seen.append(index)
            bench.engine.abort()

        limits = [self.in_flight_tokens, 1, self.in_flight_tokens]
        completions = bench.engine.generate(Request(prompts=PROMPTS, max_new_tokens=limits, seed=1), None, ended)
        assert completions.aborted is not None
        assert completions.aborted.tolist() == [True, False, True]
        assert seen == [1]

    def test_what_fails_when_a_completion_ends_ends_the_call(self, bench: Bench):
        """With the error as it was raised; nothing goes on, and the next call is like any other."""

        def ended(index: int, tokens: Sequence[int]) -> None:
            raise DataError("no room for it")

        limits = [self.in_flight_tokens, 1, self.in_flight_tokens]
        with pytest.raises(DataError, match=r"^no room for it$"):
            bench.engine.generate(Request(prompts=PROMPTS, max_new_tokens=limits, seed=1), None, ended)
        completions = bench.engine.generate(Request(prompts=PROMPTS, max_new_tokens=8, seed=2))
        assert completions.lengths.tolist() == [8] * 3
        assert completions.aborted is None
        assert bench.worst(completions, PROMPTS, 1.0) < CLOSE

    def test_bad_requests_are_refused(self, bench: Bench):
        """With what is wrong; and the engine goes on."""
        wrong = [
            ({"prompts": [[5], []]}, DataError, "Prompt 1 has no tokens"),
            ({"prompts": [[5, 6], [5, VOCAB]]}, DataError, f"Prompt 1 contains the token id {VOCAB}"),
            ({"prompts": [[-1]]}, DataError, "token id -1"),
            ({"prompts": [[5] * POSITIONS]}, DataError, f"has {POSITIONS} tokens"),
            ({"prompts": [[5]], "max_new_tokens": 0}, DefinitionError, "at least 1"),
            ({"prompts": [[5]], "group_size": 0}, DefinitionError, "group_size is 0"),
            ({"prompts": [[5]], "temperature": -1.0}, DefinitionError, "temperature is -1"),
            ({"prompts": [[5]], "stream_ids": [1, 2]}, DefinitionError, "stream_ids has length 2"),
        ]
        for fields, kind, message in wrong:
            with pytest.raises(kind, match=message):
                bench.engine.generate(Request(**fields))  # type: ignore[arg-type]
        assert len(bench.engine.generate(Request(prompts=[]))) == 0
        completions = bench.engine.generate(Request(prompts=[[5] * (POSITIONS - 2)], max_new_tokens=9))
        assert completions.lengths.tolist() == [2]
        assert np.isfinite(completions.log_probs).all()

    def rows(self, bench: Bench, replier: Replier, prompts: Sequence[Sequence[int]] = PROMPTS, **asked: Any) -> Any:
        """Conversations on the engine."""
        request = Request(prompts=prompts, **{"max_new_tokens": 4, "temperature": 0.7, "seed": 3, **asked})
        return converse(bench.engine, request, replier, row_tokens=POSITIONS)

    def worst_row(self, bench: Bench, row: TurnRow) -> float:
        """The largest distance of a sampled token's log-prob from teacher forcing, under the weights of its span."""
        ids, mask, first = row.ids, np.array(row.mask), row.num_prompt
        assert np.isfinite(row.log_probs).tolist() == mask.tolist()
        gaps = [0.0]
        ends = [start for start, _ in [*row.version_spans, (len(ids), 0)][1:]]
        for (start, version), end in zip(row.version_spans, ends, strict=True):
            exact = bench.exact(version, ids[:first], ids[first:], 0.7).numpy()
            part = mask[start:end]
            gaps.append(float(np.abs(exact[start - first : end - first] - row.log_probs[start:end])[part].max()))
        return max(gaps)

    @pytest.mark.parametrize("delay_s", [0.0, 0.01])
    def test_conversations_are_scored_by_the_whole_row(self, bench: Bench, delay_s: float):
        """Also those whose replies come late; seed, stream, member and turn decide their tokens, not the others."""
        rows = self.rows(bench, Replier(3, delay_s=delay_s), group_size=2)
        assert all(row.over and not row.aborted and row.mask.count(True) == 12 for row in rows)
        assert all(row.version_spans == [(row.num_prompt, 1)] for row in rows)
        assert max(self.worst_row(bench, row) for row in rows) < CLOSE
        assert len({tuple(row.ids) for row in rows}) == len(rows)
        alone = self.rows(bench, Replier(3), PROMPTS[1:2], group_size=2, stream_ids=[1])
        assert [row.ids for row in alone] == [row.ids for row in rows[2:4]]

    def test_a_turn_begins_when_its_reply_has_arrived(self, bench: Bench):
        """All turns of one conversation are over while another one is still in its first turn."""
        replier = Replier(1, 3, delay_s=0.01)
        rows = self.rows(bench, replier, PROMPTS[:2], max_new_tokens=[self.in_flight_tokens, 1])
        assert replier.order == [1, 1, 1, 0]
        assert [row.mask.count(True) for row in rows] == [self.in_flight_tokens, 3]

    def test_each_turn_has_the_version_of_its_weights(self, bench: Bench):
        """New weights between two turns: the spans change there, and each token is scored by its own weights."""

        def load() -> None:
            if bench.engine.version == 1:
                bench.engine.load_weights(bench.folders[2], 2)

        rows = self.rows(bench, Replier(2, on_turn=load), PROMPTS[:1])
        first = rows[0].num_prompt
        assert rows[0].version_spans == [(first, 1), (first + 4 + 2, 2)]
        assert self.worst_row(bench, rows[0]) < CLOSE

    @pytest.mark.parametrize("how", ["abort", "deadline"])
    def test_conversations_that_wait_for_a_reply_are_ended(self, bench: Bench, how: str):
        """By an abort and by the deadline, as those that are being sampled; the engine goes on."""
        replier = Replier(2, delay_s=math.inf)
        deadline: dict[str, Any] = {"deadline_s": 1.0} if how == "deadline" else {}
        if how == "abort":
            threading.Timer(0.5, bench.engine.abort).start()
        rows = self.rows(bench, replier, **deadline)
        assert [row.aborted for row in rows] == [True] * 3
        assert sorted(replier.order) == [0, 1, 2]
        assert all(row.over for row in self.rows(bench, Replier(1)))
