"""Conversations with a tool: the sampler's own tokens through the write path to the loss."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data.llm import History
from torchrl.envs import Compose

from rlhf_pipeline import (
    CausalLMPolicy,
    ChatHistory,
    GRPOLoss,
    KLRewardTransform,
    MCAdvantage,
    RetrieveLogProb,
    scratch_policy,
)
from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.buffer.trajectory_schema import PROVENANCE
from rlhf_pipeline.collectors.multi_turn import Conversation, conversation_rows, converse
from rlhf_pipeline.errors import DataError, DefinitionError, EngineError
from rlhf_pipeline.policies.chat import encode_reply
from tests.rlhf_pipeline.small import CHAT_TEMPLATE, calculator, talker

END = 1


@torch.no_grad()
def naive(model: Any, ids: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probs [T], one forward pass per token; 0 at the first."""
    out = [torch.zeros((), dtype=torch.float64)]
    for t in range(1, len(ids)):
        logits = model(input_ids=torch.tensor([ids[:t]])).logits[0, -1].double() / temperature
        out.append(torch.log_softmax(logits, -1)[ids[t]])
    return torch.stack(out)


def talks(policy: CausalLMPolicy, **options: Any) -> list[Conversation]:
    """Conversations of two groups."""
    options = {"group_size": 16, "max_turns": 3, "max_new_tokens": 8, "seed": 3, **options}
    return converse(policy, ["1+2", "3+1"], calculator, **options)


def test_two_turns_around_a_tool():
    """Turns are the sampler's tokens, replies are the template's, and the row is what the policy went on from."""
    policy = talker()
    tokenizer = policy.tokenizer
    done = talks(policy)
    assert {t.num_turns for t in done} >= {1, 2}
    assert {t.finish_reason for t in done} >= {"stop", "length"}
    for talk in done:
        prompt = "U:" + ("1+2", "3+1")[talk.prompt_index] + "\nA:"
        assert talk.token_ids[: talk.num_prompt_tokens] == tokenizer.encode(prompt)
        assert talk.assistant_mask[-1]
        assert [m["role"] for m in talk.messages] == [
            "user",
            *["assistant", "tool"] * (talk.num_turns - 1),
            "assistant",
        ]
        said = [i for i, mine in zip(talk.token_ids, talk.assistant_mask, strict=True) if mine]
        assert said.count(END) == talk.num_turns - (talk.finish_reason == "length")
        # Between two turns stands what the template puts there, once.
        rest = [i for i, mine in zip(talk.token_ids, talk.assistant_mask, strict=True) if not mine]
        tools = [m["content"] for m in talk.messages if m["role"] == "tool"]
        assert tokenizer.decode(rest) == prompt + "".join(f"\nT:{value}\nA:" for value in tools)
        if tools:
            assert tools[0] == calculator(talk.messages[:2])[0]["content"]


def test_log_probs_over_several_turns_equal_a_naive_loop():
    """Those of the sampler, and those of scoring the whole row, to 1e-6 in float32; also at another temperature."""
    for temperature in (1.0, 0.6):
        policy = talker(temperature=temperature)
        several = [t for t in talks(policy) if t.num_turns > 1][:4]
        assert several
        for talk in several:
            want = naive(policy.model, talk.token_ids, temperature)
            said = torch.tensor(talk.assistant_mask)
            sampled = torch.tensor(talk.log_probs)
            assert sampled[~said].isnan().all()
            torch.testing.assert_close(sampled[said].double(), want[said], rtol=0, atol=2e-6)
            ids = torch.tensor([talk.token_ids])
            scored = policy.log_probs(ids, torch.ones_like(ids, dtype=torch.bool), said[None])[0]
            torch.testing.assert_close(scored[said].double(), want[said], rtol=0, atol=1e-6)


def test_the_write_path_and_the_loss(tmp_path):
    """One row per conversation with its mask over all turns; only sampled tokens have loss and gradient."""
    policy, reference = talker(), talker(seed=1)
    done = talks(policy)
    rewards = [float(t.num_turns) for t in done]
    buffer = TrajectoryReplayBuffer(
        storage=str(tmp_path / "store"),
        transform=Compose(MCAdvantage(16), KLRewardTransform(coef=0.1), RetrieveLogProb(reference)),
    )
    buffer.extend(conversation_rows(done, rewards, group_ids=[7, 9], policy_version=4, tokenizer=policy.tokenizer))
    rows = buffer.store.read(buffer.store.ids())
    assert len(rows["input_ids"]) == 32
    assert sorted(set(rows["group_id"])) == [7, 9]
    for talk, ids, said, ref, meta in zip(
        done, rows["input_ids"], rows["assistant_mask"], rows["ref_log_probs"], rows["meta"], strict=True
    ):
        assert ids.tolist() == talk.token_ids
        assert said.tolist() == talk.assistant_mask
        want = naive(reference.model, talk.token_ids)[torch.tensor(said)]
        torch.testing.assert_close(torch.tensor(ref[said]).double(), want, rtol=0, atol=2e-6)
        assert json.loads(meta)["messages"] == talk.messages
    batch = buffer.read(buffer.store.ids())
    out: Any = GRPOLoss(policy, entropy_bonus=False)(batch)
    assert float(out.num_tokens) == sum(map(sum, (t.assistant_mask for t in done)))
    assert abs(float(out.kl_approx)) < 1e-6  # on-policy
    assert float(out.ESS) == pytest.approx(1.0)
    # The gradient is that of -sum(A log p) / N over the sampled tokens of all turns, by plain autograd.
    out.total_loss().backward()
    got = policy.head_weight.grad.clone()
    policy.model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for talk, advantage in zip(done, batch["advantage"], strict=True):
        ids = torch.tensor([talk.token_ids])
        scores = torch.log_softmax(policy.model(input_ids=ids).logits[0, :-1].double(), -1)
        scores = scores.gather(1, ids[0, 1:, None])[:, 0]
        said = torch.tensor(talk.assistant_mask)[1:]
        total = total - (scores * advantage[1 : len(talk.token_ids)] * said).sum()
    (total / float(out.num_tokens)).backward()
    torch.testing.assert_close(got, policy.head_weight.grad, rtol=1e-4, atol=1e-7)
    buffer.trajectories.close()


def test_a_conversation_does_not_depend_on_its_neighbours():
    """The same stream and member give the same conversation alone, in a larger group, and in another order."""
    policy = talker()
    both = talks(policy, stream_ids=[5, 8])
    alone = converse(policy, ["3+1"], calculator, group_size=4, max_turns=3, max_new_tokens=8, seed=3, stream_ids=[8])
    for one, other in zip(alone, both[16:20], strict=True):
        assert one.token_ids == other.token_ids
    again = talks(policy, stream_ids=[5, 8], seed=4)
    assert any(a.token_ids != b.token_ids for a, b in zip(both, again, strict=True))
    # Members and turns are other streams.
    assert len({tuple(t.token_ids) for t in both[:16]}) > 8


def test_limits_end_a_conversation_with_a_sampled_token():
    """Turns, tokens of a turn and tokens of a row: whatever the limit, nothing follows the last sampled token."""
    policy = talker()
    one = talks(policy, max_turns=1)
    assert {t.num_turns for t in one} == {1}
    assert "turns" in {t.finish_reason for t in one}
    short = talks(policy, max_tokens=12, max_turns=6)
    assert max(len(t.token_ids) for t in short) <= 12
    for talk in one + short:
        assert talk.assistant_mask[-1]
        assert talk.messages[-1]["role"] == "assistant"
        assert talk.finish_reason != "stop" or talk.token_ids[-1] == END


def test_a_tool_that_raises_fails_its_conversation_only():
    """The error is a line of its own; the others go on."""

    def moody(messages: Any) -> Any:
        if messages[0]["content"] == "1+2":
            raise RuntimeError("no\nluck")
        return calculator(messages)

    done = converse(talker(), ["1+2", "3+1"], moody, group_size=8, max_turns=2, max_new_tokens=8, seed=3)
    failed = [t for t in done if t.finish_reason == "failed"]
    assert failed
    assert {t.prompt_index for t in failed} == {0}
    assert failed[0].error is not None
    assert failed[0].error.startswith("RuntimeError: no luck (")
    assert any(t.num_turns == 2 for t in done[8:])
    rows = conversation_rows(done, [0.0] * 16)
    assert json.loads(rows["meta"][0])["error"] == failed[0].error


def test_weights_that_change_between_turns_are_in_the_rows(tmp_path):
    """The versions are those that the engine has named, not what the caller says: the oldest, the newest, and where.

    They are stored with groups that arrive in two parts, too.
    """
    policy = talker()
    engine = policy.engine
    engine.load_weights(policy.model.state_dict(), 5)

    def trained(messages: Any) -> Any:
        if engine.version == 5:
            engine.load_weights(policy.model.state_dict(), 9)
        return calculator(messages)

    done = converse(policy, ["1+2", "3+1"], trained, group_size=8, max_turns=3, max_new_tokens=8, seed=3)
    rows = conversation_rows(done, [0.0] * 16, policy_version=2)
    assert rows["policy_version"].tolist() == [5] * 16
    newest = [9 if talk.num_turns > 1 else -1 for talk in done]
    assert {*newest} == {9, -1}
    assert rows["newest_policy_version"].tolist() == newest
    buffer = TrajectoryReplayBuffer(
        storage=TrajectoryStorage(tmp_path / "store", extra=PROVENANCE), transform=MCAdvantage(8)
    )
    for part in (slice(0, 16, 2), slice(1, 16, 2)):
        buffer.extend(conversation_rows(done[part], [1.0, 0.0] * 4, group_ids=[0, 1]))
    kept = buffer.store.read(buffer.store.ids(), ["trajectory_id", "version_spans", "policy_version"])
    assert kept["policy_version"].tolist() == [5] * 16
    for number, spans in zip(kept["trajectory_id"].tolist(), kept["version_spans"], strict=True):
        talk = done[number]
        first = talk.assistant_mask.index(True)
        second = talk.assistant_mask.index(True, talk.assistant_mask.index(False, first)) if talk.num_turns > 1 else 0
        assert spans.tolist() == ([[first, 5], [second, 9]] if second else [])
    buffer.trajectories.close()


def test_a_turn_of_unknown_weights_leaves_the_row_without_versions():
    """It may be older than the turns that are known, so the row is as old as its caller says."""
    policy = talker()
    engine: Any = policy.engine

    def lost(messages: Any) -> Any:
        engine.version = None
        return calculator(messages)

    engine.version = 5
    done = converse(policy, ["1+2", "3+1"], lost, group_size=8, max_turns=3, max_new_tokens=8, seed=3)
    versions = conversation_rows(done, [0.0] * 16, policy_version=2)["policy_version"].tolist()
    assert versions == [2 if talk.num_turns > 1 else 5 for talk in done]
    assert {*versions} == {2, 5}


def test_turns_that_the_engine_gives_up_are_not_taken_for_whole(monkeypatch):
    """A conversation that somebody stopped did not end by its length."""
    policy = talker()
    engine, turns = policy.engine, []
    generate = engine.generate

    def late(request: Any, *rest: Any) -> Any:
        turns.append(request)
        return generate(request if len(turns) == 1 else replace(request, deadline_s=0.0), *rest)

    monkeypatch.setattr(engine, "generate", late)
    with pytest.raises(EngineError, match=r"the engine aborted \d+ of \d+ turns"):
        converse(policy, ["1+2", "3+1"], calculator, group_size=8, max_turns=3, max_new_tokens=8, seed=3)


def test_two_calls_give_other_ids(tmp_path):
    """Conversations of the same prompts, seed and weights are other groups in each call, and all of them are stored."""
    policy = talker()
    buffer = TrajectoryReplayBuffer(storage=str(tmp_path / "store"), transform=Compose(MCAdvantage(4)))
    for _ in range(3):
        done = converse(policy, ["1", "2"], calculator, group_size=4, max_turns=2, max_new_tokens=4, seed=1)
        buffer.extend(conversation_rows(done, [float(i % 4) for i in range(8)]))
    groups = buffer.store.read_scalars("group_id")
    assert len(set(buffer.store.read_scalars("trajectory_id").tolist())) == 24
    assert [groups.tolist().count(group) for group in dict.fromkeys(groups.tolist())] == [4] * 6
    assert not torch.tensor(buffer.store.read_scalars("advantage")).isnan().any()
    buffer.trajectories.close()


@pytest.mark.parametrize("group_ids", [None, [40, 41]])
def test_rows_of_a_group_may_be_made_one_by_one(tmp_path, group_ids):
    """A call per conversation gives the ids of one call for all, so the group closes and all ids differ."""
    done = converse(talker(), ["1", "2"], calculator, group_size=4, max_turns=2, max_new_tokens=4, seed=1)
    whole = conversation_rows(done, [0.0] * 8, group_ids=group_ids)
    buffer = TrajectoryReplayBuffer(storage=str(tmp_path / "store"), transform=Compose(MCAdvantage(4)))
    for i, talk in enumerate(done):
        buffer.extend(conversation_rows([talk], [float(i)], group_ids=group_ids))
    assert sorted(buffer.store.read_scalars("trajectory_id").tolist()) == sorted(whole["trajectory_id"].tolist())
    assert len(set(whole["trajectory_id"].tolist())) == 8
    if group_ids is not None:
        assert whole["trajectory_id"].tolist() == [*range(160, 168)]
    buffer.trajectories.close()


@pytest.mark.parametrize(
    ("group_ids", "wanted"),
    [
        ([1], "1 group ids for 2 prompts"),
        ([1, 2, 3], "3 group ids for 2 prompts"),
        ([7, 7], "the group id 7 is given to two prompts"),
        ([-1, 2], "the group id -1 is out of range"),
        ([2**62, 2], "is out of range: from 0 to"),
    ],
)
def test_group_ids_that_do_not_fit(group_ids, wanted):
    """One id per prompt, each its own; a conversation is given once."""
    done = converse(talker(), ["1", "2"], calculator, group_size=4, max_turns=1, max_new_tokens=2)
    with pytest.raises(DefinitionError, match=wanted):
        conversation_rows(done, [0.0] * 8, group_ids=group_ids)
    with pytest.raises(DefinitionError, match="two conversations would have the trajectory id"):
        conversation_rows([done[0], done[0]], [0.0, 0.0])


def test_replies_are_encoded_once_and_sampled_ends_are_kept():
    """A sampled end is not written twice; a turn that was cut gets the template's."""
    tokenizer = talker().tokenizer
    before, reply = [{"role": "user", "content": "1"}], [{"role": "tool", "content": "2"}]
    turn = tokenizer.encode("0")
    glue = tokenizer.encode("\nT:2\nA:")
    assert encode_reply(tokenizer, before, [*turn, END], reply) == glue
    assert encode_reply(tokenizer, before, turn, reply) == [END, *glue]
    whole = tokenizer.apply_chat_template(
        [*before, {"role": "assistant", "content": "0"}, *reply], add_generation_prompt=True, return_dict=False
    )
    assert whole == [*tokenizer.encode("U:1\nA:"), *turn, END, *glue]


def test_bad_arguments_are_refused():
    """Limits, streams, prompts that do not fit, templates that cannot be cut, rewards that do not match."""
    policy = talker()
    with pytest.raises(DefinitionError, match="max_turns is 0"):
        converse(policy, ["1"], calculator, max_turns=0)
    with pytest.raises(DefinitionError, match="2 stream ids for 1 prompts"):
        converse(policy, ["1"], calculator, stream_ids=[1, 2])
    with pytest.raises(DefinitionError, match="Prompt 0 has 6 tokens; a row has at most 5"):
        converse(policy, ["1"], calculator, max_tokens=5)
    with pytest.raises(DefinitionError, match="2 rewards for 1 conversations"):
        conversation_rows(converse(policy, ["1"], calculator, max_turns=1), [1.0, 2.0])
    with pytest.raises(DefinitionError, match="no chat template"):
        encode_reply(scratch_policy("01").tokenizer, [], [2], [])
    policy.tokenizer.chat_template = "{% for m in messages %}{% if m.role != 'assistant' %}x{% endif %}{% endfor %}"
    with pytest.raises(DataError, match="renders an assistant's turn 0 times"):
        encode_reply(policy.tokenizer, [{"role": "user", "content": "1"}], [2], [{"role": "tool", "content": "1"}])
    done = converse(talker(), ["1"], lambda _: [{"role": "tool", "content": "?"}], group_size=8, max_new_tokens=8)
    assert any("does not know" in str(talk.error) for talk in done)  # that conversation only
    assert conversation_rows([], []).batch_size == (0,)


def test_conversations_that_exist_as_text_only():
    """Where nothing was sampled here, the template's generation markers tell the assistant's tokens of every turn."""
    policy = talker()
    policy.tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "{{ {'user': 'U', 'assistant': 'A', 'tool': 'T'}[m.role] + ':' + m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}",
        "{{ {'user': 'U', 'assistant': 'A', 'tool': 'T'}[m.role] + ':' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}",
    )
    roles = ("user", "assistant", "tool", "assistant")
    chats = [list(zip(roles, words, strict=True)) for words in (("1+2", "12", "3", "3"), ("7", "07+", "7", "777"))]
    history = History.from_chats([[{"role": r, "content": c} for r, c in chat] for chat in chats])
    td = TensorDict(history=ChatHistory(full=history), batch_size=[2])
    out: Any = RetrieveLogProb(policy.get_new_version(input_mode="history")).inv(td)
    for row, chat in zip(out.unbind(0), chats, strict=True):
        ids, said = row["tokens", "full"].tolist(), row["masks", "all_assistant_mask"]
        assert len(ids) == sum(len(content) + 3 + (role == "assistant") for role, content in chat)
        want = [i for role, content in chat if role == "assistant" for i in [*policy.tokenizer.encode(content), END]]
        assert [i for i, mine in zip(ids, said.tolist(), strict=True) if mine] == want
        found = row["next", "ref_log_probs", "full"]
        assert found[~said].isnan().all()
        torch.testing.assert_close(found[said].double(), naive(policy.model, ids)[said], rtol=0, atol=2e-6)
