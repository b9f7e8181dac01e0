"""Conversations with environments: exact rows, limits, and failures that cost one conversation."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torchrl.envs import Compose

from rlhf_pipeline import (
    CausalLMPolicy,
    Collect,
    FrozenLake,
    GRPOLoss,
    KLRewardTransform,
    LakeMaps,
    MCAdvantage,
    Prompt,
    RetrieveLogProb,
    Step,
    Tools,
    TrajectoryReplayBuffer,
    TrajectoryStorage,
    Turn,
    scratch_policy,
)
from rlhf_pipeline.buffer.trajectory_schema import TURNS
from rlhf_pipeline.collectors.conversations import Conversation, Conversations
from rlhf_pipeline.collectors.sampled_rows import num_turns, sampled_conversations
from rlhf_pipeline.data.keys import ASSISTANT_MASK, POLICY_ROLE, TOKENS
from rlhf_pipeline.environments.games import LAKE_ALPHABET
from rlhf_pipeline.errors import DefinitionError
from tests.rlhf_pipeline.small import sums_collector, talker

LIMITS: dict[str, Any] = {"group_size": 4, "max_new_tokens": 2, "max_turns": 6, "max_row_tokens": 60, "num_slots": 16}


class Slow(FrozenLake):
    """The same game, answered after a while: conversations leave their slots and come back."""

    async def step(self, turn: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0.001 * (turn.number % 3))
        return FrozenLake.step(self, turn)


class Wordy(FrozenLake):
    """The same game with a long reply, which is computed in one pass with the whole row."""

    def step(self, turn: Any) -> Any:
        step = super().step(turn)
        return Step(str(step.reply) * 5, done=step.done, rewards=step.rewards)


def lake_policy(num_slots: int = 16) -> CausalLMPolicy:
    return scratch_policy(LAKE_ALPHABET, hidden_size=16, num_layers=2, num_heads=2, seed=1, num_slots=num_slots)


def conversations(
    environment: Any, policy: Any = None, groups: int = 4, ended: Any = None, **changes: Any
) -> list[Conversation]:
    """Conversations of a few groups."""
    config = Collect(**{**LIMITS, **changes})
    runner = Conversations(
        environment, policy=policy or lake_policy(), config=config, temperature=1.0, seed=3, as_chat=False, template={}
    )
    source = LakeMaps(start_anywhere=True)
    return runner.run([source.prompt(cursor, 0) for cursor in range(groups)], list(range(groups)), ended=ended)


@pytest.mark.parametrize("environment", [FrozenLake, Slow, Wordy])
def test_log_probs_and_masks_are_those_of_the_policy(environment):
    """Every sampled token, and no other, has the log-prob of scoring the whole row, whatever the schedule."""
    policy = lake_policy()
    limits = {"max_row_tokens": 200} if environment is Wordy else {}
    done = conversations(environment, policy, **limits)
    assert {conversation.num_turns for conversation in done} > {1, 6}
    drawn = sampled_conversations(done, lambda _: "", group_size=4)
    turns = num_turns(drawn)
    assert turns is not None
    assert turns.tolist() == [conversation.num_turns for conversation in done]
    lengths, assistant = drawn.lengths(TOKENS), drawn.numbers(ASSISTANT_MASK)
    ends = np.cumsum(lengths)
    for conversation, end, length in zip(done, ends.tolist(), lengths.tolist(), strict=True):
        row, said = conversation.row, torch.from_numpy(assistant[end - length : end])[None]
        assert row is not None
        ids = torch.tensor([row.ids])
        scored = policy.log_probs(ids, torch.ones_like(said), said).detach()[0]
        sampled = torch.tensor(row.log_probs)
        assert torch.equal(sampled.isfinite(), said[0])
        torch.testing.assert_close(sampled[said[0]], scored[said[0]], rtol=0, atol=1e-5)
        # The row is the prompt, then turn and reply by turns, as the messages say.
        spans = [*row.turn_spans, (len(row.ids), POLICY_ROLE)]
        texts = [
            policy.tokenizer.decode(row.ids[a:b], skip_special_tokens=True)
            for (a, _), (b, _) in itertools.pairwise(spans)
        ]
        assert "".join(texts) == "".join(message["content"] for message in conversation.messages[1:])


def test_tokens_do_not_depend_on_the_schedule():
    """In place or after a wait, with two slots or sixteen, alone or in a crowd: the same conversations."""
    wanted = [conversation.row.ids for conversation in conversations(FrozenLake) if conversation.row is not None]
    assert len({tuple(ids) for ids in wanted}) > 8
    for other in (conversations(Slow), conversations(FrozenLake, lake_policy(2))):
        assert [conversation.row.ids for conversation in other if conversation.row is not None] == wanted
    assert [
        conversation.row.ids for conversation in conversations(FrozenLake, groups=1) if conversation.row is not None
    ] == wanted[:4]


def test_limits_end_a_conversation():
    """Turns and tokens: a row ends with a sampled token and says why, and its rewards are those of its turns."""
    few = conversations(FrozenLake, max_turns=2, max_new_tokens=1)
    short = conversations(FrozenLake, max_row_tokens=9)
    assert {conversation.finish_reason for conversation in few} <= {"turns", "stop"}
    assert "turns" in {conversation.finish_reason for conversation in few}
    assert "length" in {conversation.finish_reason for conversation in short}
    for conversation in few + short:
        assert conversation.row is not None
        assert len(conversation.row.ids) <= 60
        assert math.isfinite(conversation.row.log_probs[-1])
        each = [value for gains in conversation.turn_rewards for value in gains.values()]
        assert sum(each) == pytest.approx(sum(conversation.rewards.values()))
        assert len(conversation.turn_rewards) == conversation.num_turns


def test_a_reply_is_shown_if_one_token_of_the_policy_fits_behind_it():
    """A row that is limited to one token of the second turn has it; one token less ends it before the reply."""
    number, row = next(
        (number, conversation.row)
        for number, conversation in enumerate(conversations(FrozenLake))
        if conversation.row is not None and len(conversation.row.turn_spans) > 2
    )
    reply, second_turn = (start for start, _ in row.turn_spans[1:3])
    for limit, end in ((second_turn + 1, second_turn + 1), (second_turn, reply)):
        limited = conversations(FrozenLake, max_row_tokens=limit)[number].row
        assert limited is not None
        assert limited.ids == row.ids[:end]


class Moody(FrozenLake):
    """Goes wrong in the second turn of some conversations, in the way that the class says."""

    how: Any = None

    def step(self, turn: Any) -> Any:
        if turn.number == 2 and "O" in self.rows[1]:
            return type(self).how()
        return super().step(turn)


def _exit() -> Any:
    raise SystemExit(3)


def _raised(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("how", "kind", "error"),
    [
        (lambda: time.sleep(20), "timeout", "no reply after 0.9 s"),
        (lambda: asyncio.sleep(20), "timeout", "no reply after 0.9 s"),
        (lambda: 1 / 0, "tool_error", "ZeroDivisionError"),
        (_exit, "tool_error", "SystemExit"),
        (lambda: Step(b"bytes"), "tool_error", "the reply is of type bytes"),  # type: ignore[arg-type]
        (lambda: "text", "tool_error", "step returned str"),
        (lambda: Step(rewards={"reached": math.nan}), "tool_error", "must be finite"),
        (lambda: Step("~"), "tool_error", "unknown to the tokenizer"),
        (lambda: Step("", done="no"), "tool_error", "done is 'no'; it must be True or False"),  # type: ignore[arg-type]
        (lambda: Step(rewards={"reached": 1e300}), "tool_error", "fit in a float32"),
        (lambda: Step(rewards={"other": 1.0}), "tool_error", "the environment does not declare the reward 'other'"),
        (lambda: Step([{"role": "user", "content": [{"type": "image"}]}]), "tool_error", "a part of type 'image'"),
        (lambda: _raised(KeyboardInterrupt()), "tool_error", "KeyboardInterrupt"),
        (lambda: _raised(DefinitionError("its own")), "tool_error", "its own"),
    ],
)
def test_a_failure_costs_its_own_conversation(how, kind, error):
    """A hang, an exception, another type, a character without a token: one failure each, and the others as before."""
    environment = type("Moodier", (Moody,), {"how": staticmethod(how)})
    wanted = conversations(FrozenLake, groups=2)
    found = conversations(environment, groups=2, step_timeout_s=0.9 if kind == "timeout" else None)
    failed = [conversation for conversation in found if conversation.failure is not None]
    assert 0 < len(failed) < len(found)
    assert {conversation.failure.kind for conversation in failed if conversation.failure is not None} == {kind}
    assert all(error in conversation.failure.error for conversation in failed if conversation.failure is not None)
    for one, other in zip(wanted, found, strict=True):
        if other.failure is None:
            assert one.row is not None
            assert other.row is not None
            assert one.row.ids == other.row.ids


def test_a_reply_of_a_megabyte_ends_its_conversation():
    """There is no room for it in the row, and it is not encoded to find that out."""
    environment = type("Loud", (Moody,), {"how": staticmethod(lambda: Step("." * 1_000_000))})
    ends = {(conversation.num_turns, conversation.finish_reason) for conversation in conversations(environment)}
    assert (2, "length") in ends
    assert len({turns for turns, _ in ends}) > 1


class Parts(FrozenLake):
    """Answers with parts of text, and stores what JSON has no form for."""

    def step(self, turn: Any) -> Any:
        step = super().step(turn)
        parts = [{"type": "text", "text": step.reply[:2]}, {"type": "text", "text": step.reply[2:]}]  # type: ignore[index]
        info = {"at": np.int64(turn.number), "seen": np.zeros(2), "how": {1}, "text": "\ud800"}
        return Step([{"role": "user", "content": parts}], done=np.bool_(step.done), rewards=step.rewards, info=info)  # type: ignore[arg-type]


def test_parts_of_text_are_text_and_whatever_is_noted_is_stored():
    """The same conversations as with plain text; NumPy's numbers are numbers."""
    wanted, found = conversations(FrozenLake), conversations(Parts)
    assert [one.row.ids for one in found if one.row is not None] == [
        one.row.ids for one in wanted if one.row is not None
    ]
    assert not any(one.failure for one in found)
    assert all(one.info == {"at": one.num_turns, "seen": [0.0, 0.0], "how": [1], "text": "?"} for one in found)


class Summing(FrozenLake):
    """Says when it is over how it ended."""

    rewards = (*FrozenLake.rewards, "ended")

    def end(self, reason: str) -> Step:
        """Return a reward and values."""
        return Step(rewards={"ended": 1.0}, info={"reason": reason})


def test_the_end_of_a_conversation_may_store_values():
    """`end` may return a `Step`: its rewards count and its `info` is stored, also where `max_turns` ended it."""
    found = conversations(Summing, max_turns=2)
    assert {one.finish_reason for one in found} >= {"turns"}
    assert not any(one.failure for one in found)
    assert all(one.info["reason"] == one.finish_reason and one.rewards["ended"] == 1.0 for one in found)


@pytest.mark.parametrize(("most", "told"), [(3, "..."), (1, "."), (None, "." * 30)])
def test_a_reply_is_cut_and_marked(most, told):
    """With so many tokens at most; the conversation goes on, and its row says that something is missing."""
    environment = type("Loud", (Moody,), {"how": staticmethod(lambda: Step("." * 30))})
    mark = " [cut]"
    policy = scratch_policy(LAKE_ALPHABET + mark, hidden_size=16, num_layers=1, num_heads=2, seed=1)
    most = most if most is None else most + len(mark)
    found = conversations(environment, policy, max_reply_tokens=most, max_row_tokens=200, max_turns=3)
    loud = [one for one in found if one.num_turns > 2 and "O" in one.environment.rows[1]]  # type: ignore[attr-defined]
    assert loud
    for one in loud:
        assert one.messages[-2]["content"] == told + (mark if most is not None else "")
        assert one.cut_replies == (most is not None)
        assert one.row is not None
        assert "".join(message["content"] for message in one.messages) == policy.tokenizer.decode(
            one.row.ids, skip_special_tokens=True
        )


class Flaky(FrozenLake):
    """Fails the first tries of every other conversation."""

    fails: Any = None
    tries = 0
    count: Any = None

    def step(self, turn: Any) -> Any:
        if turn.number == 2:
            Flaky.count[tuple(self.rows), id(self.rows)] += 1
            if sum(Flaky.count.values()) <= self.tries:
                raise OSError(f"try {sum(Flaky.count.values())}")
        return super().step(turn)


def test_what_the_world_failed_is_begun_again():
    """As often as `retries` says: the same tokens as without the failures, which are noted; or failed at last."""
    wanted = [one.row.ids for one in conversations(FrozenLake) if one.row is not None]
    for retries, tries in ((1, 3), (2, 1), (0, 2), (1, 10_000)):
        environment = type("Flakier", (Flaky,), {"tries": tries})
        Flaky.count = collections.Counter()
        ended = list[int]()
        found = conversations(environment, retries=retries, ended=lambda place, one: ended.append(place))  # noqa: B023
        assert sorted(ended) == [*range(16)]
        failed = [one for one in found if one.failure is not None]
        again = [one for one in found if one.retried]
        assert bool(failed) == (retries == 0 or tries > 100)
        assert bool(again) == (retries > 0)
        assert all("OSError: try" in error for one in again for error in one.retried)
        for one, ids in zip(found, wanted, strict=True):
            if one.failure is None:
                assert one.row is not None
                assert one.row.ids == ids


def test_members_of_a_group_have_the_same_seed():
    """Each group has another one: a non-negative int64, which NumPy and torch take too."""
    seeds: list[int] = []

    class Seeded(FrozenLake):
        def reset(self, prompt: Prompt, seed: int) -> str:
            seeds.append(seed)
            return super().reset(prompt, seed)

    conversations(Seeded, groups=12, max_turns=1)
    counts = collections.Counter(seeds)
    assert (len(counts), {*counts.values()}) == (12, {4})
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_members_of_a_group_see_the_same():
    """A reset that depends on more than prompt and seed is refused: answers to other questions cannot be compared."""

    class Fickle(FrozenLake):
        made = 0

        def reset(self, prompt: Prompt, seed: int) -> str:
            Fickle.made += 1
            return super().reset(prompt, seed) + "." * Fickle.made

    with pytest.raises(DefinitionError, match="reset returns different inputs for members of the group of prompt 0"):
        conversations(Fickle)


@pytest.mark.parametrize(
    ("shown", "error"),
    [
        (b"#..#", "what reset returned is of type bytes"),
        ("", "reset returned empty text"),
        (Step("#..#"), "reset returned a Step"),
        ("~", "unknown to the tokenizer"),
        ("." * 60, "has 60 tokens, but a row has at most 60"),
        (np.zeros(3), "what reset returned is of type ndarray"),
        ([{"role": "user"}, 3], "a message must be a mapping with a role"),
    ],
)
def test_what_reset_shows_costs_its_own_group(shown, error):
    """Whatever it is; other groups are as before."""

    class Odd(FrozenLake):
        def reset(self, prompt: Prompt, seed: int) -> Any:  # type: ignore[override]
            first = super().reset(prompt, seed)
            return shown if self.rows[0][1] == "O" else first

    wanted, found = conversations(FrozenLake), conversations(Odd)
    failed = [one.failure.error for one in found if one.failure is not None]
    assert 0 < len(failed) < len(found)
    assert all(error in one for one in failed)
    assert {one.failure.kind for one in found if one.failure is not None} == {"tool_error"}
    for one, other in zip(wanted, found, strict=True):
        assert other.failure is not None or (one.row is not None and other.row is not None)
        assert other.failure is not None or one.row.ids == other.row.ids  # type: ignore[union-attr]


class Hidden(FrozenLake):
    """Shows a prompt whose text the tokenizer does not know; the third map cannot be had."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        if prompt.text.startswith("torn"):
            raise OSError("the map is torn")
        return super().reset(prompt, seed)


def test_only_what_an_environment_shows_is_encoded():
    """The text of a prompt is not, whether a group has no conversation left to run or every reset of it failed."""
    source, policy = LakeMaps(start_anywhere=True), lake_policy()
    runner = Conversations(
        Hidden, policy=policy, config=Collect(**LIMITS), temperature=1.0, seed=3, as_chat=False, template={}
    )
    prompts = [
        dataclasses.replace(source.prompt(cursor, 0), text="torn map" if cursor == 2 else "map") for cursor in range(4)
    ]
    wanted = [conversation.row for conversation in conversations(FrozenLake, policy)]
    left = [2, 3, *range(8, 16)]
    found = runner.run(prompts, range(4), only=left)
    assert [conversation.failure is None for conversation in found] == [place // 4 != 2 for place in left]
    for place, conversation in zip(left, found, strict=True):
        assert (one := wanted[place]) is not None
        assert conversation.row is not None
        assert conversation.failure is not None or conversation.row.ids == one.ids


def test_tools_answer_calls_and_say_what_is_wrong():
    """Results, wrong names and wrong arguments are told; an error that no argument causes fails the conversation."""

    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one
            b: the other
        """
        return a + b

    def broken() -> str:
        """Fail."""
        raise OSError("no route")

    def step(*calls: tuple[str, dict[str, Any]]) -> Any:
        named = tuple({"name": name, "arguments": arguments} for name, arguments in calls)
        return asyncio.run(Tools(add, broken)().step(Turn(text="", tool_calls=named)))  # type: ignore[arg-type]

    told = [one["content"] for one in step(("add", {"a": 1, "b": 2}), ("sub", {}), ("add", {"a": 1})).reply]
    assert told[0] == "3"
    assert told[1] == "error: there is no tool 'sub'; there are add, broken"
    assert told[2].startswith("error: TypeError: missing a required argument: 'b'")
    assert step().done
    with pytest.raises(OSError, match="no route"):
        step(("broken", {}))


def test_a_run_stores_turns_rewards_and_failures(tmp_path):
    """Spans, both rewards and the failure of each row are stored, and no failure is trusted."""
    from rlhf_pipeline import definitions
    from rlhf_pipeline.run.start import run
    from trajectory_store import TrajectoryStore

    pipeline = definitions.find("frozen_lake").pipeline(
        [
            ("collect.prompts_per_rollout", "8"),
            ("policy.hidden_size", "16"),
            ("learn.lr_schedule", "constant"),
            ("learn.steps", "2"),
            ("learn.epochs", "1"),
            ("sample.strategy", "fresh"),
        ]
    )
    object.__setattr__(pipeline, "environment", type("Moodier", (Moody,), {"how": staticmethod(lambda: 1 / 0)}))
    said: list[str] = []
    run(
        pipeline,
        run_dir=tmp_path / "run",
        definition="frozen_lake",
        on_event=lambda event: said.append(str(getattr(event, "message", ""))),
    )
    assert any("trajectories failed and are not used for training (tool_error" in text for text in said)
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        rows = store.read(store.ids())
    failed = [reason == "tool_error" for reason in rows["failure_reason"]]
    assert 0 < sum(failed) < len(failed) == 64
    assert rows["reward_trusted"].tolist() == [not one for one in failed]
    assert np.isnan(rows["task_reward"]).tolist() == failed
    for spans, mask, meta in zip(rows["turn_spans"], rows["assistant_mask"], rows["meta"], strict=True):
        roles = spans[:, 1].tolist()
        assert roles == [1, 0] * (len(roles) // 2) + [1]
        assert mask[spans[spans[:, 1] == 1, 0]].all()
        assert len([m for m in json.loads(meta)["messages"] if m["role"] == "assistant"]) == roles.count(1)
    good = ~np.array(failed)
    np.testing.assert_allclose(
        rows["task_reward"][good],
        rows["reward_reached"][good] + np.nan_to_num(rows["reward_nearer"][good]),
        rtol=1e-6,
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["failed/tool_error"] for line in lines) == sum(failed)


def test_the_write_path_and_the_loss(tmp_path):
    """Advantages, reference and loss are those of the sampled tokens of all turns, and of no other."""
    policy, reference = talker(), talker(seed=1)
    buffer = TrajectoryReplayBuffer(
        storage=TrajectoryStorage(tmp_path / "store", extra=[TURNS]),
        transform=Compose(MCAdvantage(16), KLRewardTransform(coef=0.1), RetrieveLogProb(reference)),
    )
    collector = sums_collector(policy, buffer, group_size=16)
    assert collector.collect(0, policy_version=0).num_trajectories == 32
    rows, batch = buffer.store.read(buffer.store.ids()), buffer.read(buffer.store.ids())
    assert max(map(len, rows["turn_spans"])) > 1
    total = torch.zeros((), dtype=torch.float64)
    for i, (row, said) in enumerate(zip(rows["input_ids"], rows["assistant_mask"], strict=True)):
        ids, said = torch.tensor(row[None], dtype=torch.int64), torch.tensor(said)[1:]
        scores, wanted = (
            torch.log_softmax(one.model(input_ids=ids).logits[0, :-1].double(), -1).gather(1, ids[0, 1:, None])[:, 0]
            for one in (policy, reference)
        )
        for name, values in (("log_probs", scores), ("ref_log_probs", wanted)):
            stored = torch.tensor(rows[name][i][1:])
            torch.testing.assert_close(stored[said].double(), values[said].detach(), rtol=0, atol=2e-6)
        total = total - (scores * batch["advantage"][i, 1 : len(row)] * said).sum()
    # The gradient is that of -sum(A log p) / N over the sampled tokens of all turns, by plain autograd.
    out: Any = GRPOLoss(policy, entropy_bonus=False)(batch)
    assert float(out.num_tokens) == sum(mask.sum() for mask in rows["assistant_mask"])
    out.total_loss().backward()
    got = policy.head_weight.grad.clone()
    policy.model.zero_grad()
    (total / float(out.num_tokens)).backward()
    torch.testing.assert_close(got, policy.head_weight.grad, rtol=1e-4, atol=1e-7)
    buffer.trajectories.close()


class Waits:
    """Ends after 1 to 8 turns; an answer is given when every conversation that goes on has asked for its own."""

    members: Iterator[int]
    asked: ClassVar[collections.Counter[int]]
    lengths: ClassVar[list[int]]

    def reset(self, prompt: Prompt, seed: int) -> str:
        self.turns = random.Random(f"{prompt.text} {next(self.members)}").randint(1, 8)
        self.lengths.append(self.turns)
        return "#..#"

    async def step(self, turn: Turn) -> Step:
        self.asked[turn.number] += 1
        for _ in range(2_000):
            if self.asked[turn.number] == sum(length >= turn.number for length in self.lengths):
                return Step(".,.,", done=turn.number == self.turns)
            await asyncio.sleep(0.01)
        raise TimeoutError(f"{self.asked[turn.number]} conversations asked for answer {turn.number}")


def test_a_rollout_waits_for_all_answers_at_once():
    """64 conversations: no answer comes before all that go on have asked, so none may wait for another's."""
    members = {"members": itertools.count(), "asked": collections.Counter(), "lengths": []}
    done = conversations(type("Waits", (Waits,), members), lake_policy(64), groups=16, max_turns=8, max_row_tokens=80)
    assert {conversation.num_turns for conversation in done} == {*range(1, 9)}
    assert [conversation.failure for conversation in done if conversation.failure] == []
