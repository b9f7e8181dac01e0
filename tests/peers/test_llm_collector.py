"""TorchRL's `LLMCollector` and `ChatEnv` into the buffer: the recipe of `docs/torchrl_collectors.md`."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack
from torch.utils.data import DataLoader, IterableDataset
from torchrl.data import History, Unbounded
from torchrl.envs import Compose, StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import IncrementalTokenizer
from torchrl.modules.llm import TransformersWrapper

from rlhf_pipeline import (
    CausalLMPolicy,
    ChatHistory,
    GRPOLoss,
    KLRewardTransform,
    LogProbs,
    MCAdvantage,
    RetrieveLogProb,
    Tokens,
    TrajectoryReplayBuffer,
    TrajectoryStorage,
)
from rlhf_pipeline.buffer.trajectory_schema import SAMPLED_BY
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.interop.torchrl import ChatTrajectories, as_policy

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its own, at import
    from torchrl.collectors.llm import LLMCollector

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore:The env passed to LLMCollector is missing transforms:FutureWarning"),
    pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated:UserWarning"),
]
GROUP = 4


class Questions(IterableDataset):
    """Every other question is the same text; each has a group of its own."""

    def __iter__(self) -> Iterator[Any]:
        for number in itertools.count():
            yield TensorDict({"query": f"say {number // 2}", "group_id": torch.tensor(number)})


class LengthReward(Transform):
    """A reward per turn: the letters of the answer."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        said = [row[-1].content for row in tensordict["history"].full.unbind(0)]
        reward = torch.tensor([[float(len(text))] for text in said])
        return next_tensordict.set("reward", reward)

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1))
        return reward_spec


class Tool(Transform):
    """Answers every turn with a message of a tool."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        history = next_tensordict["history"].prompt
        rows = [
            row.extend(History(role="tool", content="noted", batch_size=(1,)), inplace=False)
            for row in history.unbind(0)
        ]
        next_tensordict["history"] = ChatHistory(prompt=torch.stack(rows))
        return next_tensordict


def environment(tokenizer: Any, *, turns: int = 1, faithful: bool = True) -> Any:
    """A ChatEnv over the questions, each `GROUP` times."""
    loader = DataLoader(Questions(), batch_size=1, collate_fn=lambda rows: rows[0].unsqueeze(0))
    env: Any = ChatEnv.from_dataloader(loader, repeats=GROUP, batch_size=(1,), input_mode="history")
    env = env.append_transform(LengthReward())
    if turns > 1:
        env = env.append_transform(Tool())
    if faithful:
        env = env.append_transform(IncrementalTokenizer(tokenizer))
    return env.append_transform(StepCounter(max_steps=turns))


def collect(env: Any, policy: Any, buffer: Any, turns: int) -> None:
    """Let TorchRL's collector fill the buffer with whole trajectories."""
    collector = LLMCollector(
        env,
        policy=policy,
        replay_buffer=buffer,
        dialog_turns_per_batch=1,
        total_dialog_turns=turns,
        yield_completed_trajectories=True,
        track_policy_version=True,
    )
    for _ in collector:
        pass
    collector.shutdown()


@pytest.mark.parametrize("turns", [1, 2])
def test_the_recipe(tiny, tmp_path, turns):
    """Collector, environment, our write path, our loss: one row per trajectory with the sampler's tokens."""
    tokenizer = tiny.tokenizer()
    model, reference = (tiny.model(tokenizer, seed=seed, scale=1.0) for seed in (0, 1))
    with torch.no_grad():
        model.lm_head.weight[258] += 0.4 * model.lm_head.weight.abs().max()
    policy = CausalLMPolicy(
        model, tokenizer, input_mode="history", generate=True, prefer_tokens=True, max_new_tokens=6, temperature=0.9
    )
    buffer = TrajectoryReplayBuffer(
        storage=str(tmp_path / "store"),
        transform=Compose(
            MCAdvantage(GROUP), KLRewardTransform(coef=0.1), RetrieveLogProb(reference), ChatTrajectories()
        ),
    )
    collect(environment(tokenizer, turns=turns), policy, buffer, (4 * GROUP - 1) * turns)
    # TorchRL's environment throws its first prompt away, so the first group lacks a member and waits.
    assert len(buffer) == 3 * GROUP
    assert buffer.close_groups().numel() == GROUP - 1
    rows = buffer.store.read(buffer.store.ids())
    # Equal questions are not one group: the identity is the number that the loader gave.
    assert sorted(rows["group_id"].tolist()) == sorted(list(range(4)) * GROUP)[1:]
    for i, ids in enumerate(rows["input_ids"]):
        ids, said = ids.astype("int64"), torch.tensor(rows["assistant_mask"][i])
        assert tokenizer.decode(ids[: rows["num_prompt_tokens"][i]]) == (
            f"<|im_start|>user\n{rows['prompt'][i]}<|im_end|>\n<|im_start|>assistant\n"
        )
        want = tiny.naive(model, ids, 0.9)
        torch.testing.assert_close(torch.tensor(rows["log_probs"][i])[said].double(), want[said], rtol=0, atol=3e-6)
        against = tiny.naive(reference, ids)
        torch.testing.assert_close(
            torch.tensor(rows["ref_log_probs"][i])[said].double(), against[said], rtol=0, atol=3e-6
        )
        meta = json.loads(rows["meta"][i])
        assert meta["turns"] == turns
        answers = [m["content"] for m in meta["messages"] if m["role"] == "assistant"]
        assert rows["task_reward"][i] == sum(map(len, answers))
        if turns == 2:
            # Between the turns stands what the template puts there, and the end of a turn once.
            between = tokenizer.decode(
                ids[rows["num_prompt_tokens"][i] :][~said[rows["num_prompt_tokens"][i] :].numpy()]
            )
            assert between.removeprefix("<|im_end|>") == "\n<|im_start|>tool\nnoted<|im_end|>\n<|im_start|>assistant\n"
    out: Any = GRPOLoss(policy.get_new_version(generate=False), entropy_bonus=False)(buffer.read(buffer.store.ids()))
    assert abs(float(out.kl_approx)) < 1e-6
    assert float(out.num_tokens) == sum(int(m.sum()) for m in rows["assistant_mask"])
    buffer.trajectories.close()


def test_a_wrapper_of_torchrl_becomes_a_policy_for_the_collector(tiny, tmp_path):
    """`as_policy(wrapper)` takes the wrapper's place; left as it is, its log-probs are refused, or scored again."""
    tokenizer = tiny.tokenizer()
    wrapper = TransformersWrapper(
        tiny.model(tokenizer, scale=1.0),
        tokenizer=tokenizer,
        input_mode="history",
        generate=True,
        generate_kwargs={"max_new_tokens": 5, "do_sample": True},
        chat_template=tokenizer.chat_template,
    )
    policy: Any = as_policy(wrapper)
    scorer = policy.get_new_version(generate=False)

    def buffer(name: str, **options: Any) -> TrajectoryReplayBuffer:
        steps = [MCAdvantage(GROUP), RetrieveLogProb(scorer, behaviour_model=scorer), ChatTrajectories(**options)]
        return TrajectoryReplayBuffer(storage=str(tmp_path / name), transform=Compose(*steps))

    refused = buffer("refused")
    with pytest.raises(DataError, match="has log-prob 0"):
        collect(environment(tokenizer, faithful=False), wrapper, refused, GROUP)
    refused.trajectories.close()
    for name, sampler, options in (("policy", policy, {}), ("scored", wrapper, {"keep_log_probs": False})):
        rb = buffer(name, **options)
        collect(environment(tokenizer, faithful=False), sampler, rb, GROUP)
        rb.close_groups()
        rows = rb.store.read(rb.store.ids())
        assert len(rb) == GROUP
        for ids, lp, said in zip(rows["input_ids"], rows["log_probs"], rows["assistant_mask"], strict=True):
            want = tiny.naive(wrapper.model, ids.astype("int64"))
            torch.testing.assert_close(torch.tensor(lp[said]).double(), want[torch.tensor(said)], rtol=0, atol=3e-6)
        rb.trajectories.close()


def test_a_conversation_that_was_encoded_again_is_refused(tiny, tmp_path):
    """Without token ids between the turns the history is encoded from text, and what was sampled is not in it."""
    tokenizer = tiny.tokenizer()
    policy = CausalLMPolicy(
        tiny.model(tokenizer, scale=1.0), tokenizer, input_mode="history", generate=True, max_new_tokens=8
    )
    buffer = TrajectoryReplayBuffer(
        storage=str(tmp_path / "store"), transform=Compose(MCAdvantage(GROUP), ChatTrajectories())
    )
    with pytest.raises(DataError, match="encoded again from its text"):
        collect(environment(tokenizer, turns=2, faithful=False), policy, buffer, 8 * GROUP)
    buffer.trajectories.close()


def step(tiny: Any, **changes: Any) -> Any:
    """One complete turn."""
    row = tiny.rows([[5, 6, 7]], [1])[0]
    row["tokens"].prompt, row["tokens"].response = torch.tensor([5]), torch.tensor([6, 7])
    row["log_probs"] = TensorDict({"response": torch.tensor([-1.0, -2.0])})
    row["group_id"] = torch.tensor(3)
    row["next"] = TensorDict({"reward": torch.ones(1), "done": torch.ones(1, dtype=torch.bool)})
    for key, value in changes.items():
        row[tuple(key.split("__"))] = value
    return row


def test_what_is_missing_is_named(tiny):
    """An end, a reward, a group, log-probs: each has its own message."""
    transform = ChatTrajectories()
    for change, message in (
        ({"next__done": torch.zeros(1, dtype=torch.bool)}, "yield_completed_trajectories=True"),
        ({"log_probs__response": torch.ones(3)}, "Turn 1 has 3 log-probs for 2 sampled tokens"),
        ({"tokens__response": torch.tensor([6, 8])}, "not the beginning"),
    ):
        with pytest.raises(DataError, match=message):
            transform.inv(lazy_stack([step(tiny, **change)]))
    for key, message in (
        (("next", "reward"), "No turn has the key"),
        ("group_id", "has a group identity"),
        (("tokens", "prompt"), "no ('tokens', 'prompt')"),
    ):
        row = step(tiny)
        if key == ("tokens", "prompt"):
            row["tokens"].prompt = None
        else:
            row = row.exclude(key)
        with pytest.raises(DataError, match=message.replace("(", r"\(").replace(")", r"\)")):
            transform.inv(lazy_stack([row]))
    assert transform.inv(None) is None
    named = step(tiny, query=NonTensorData("why?"))
    got: Any = ChatTrajectories(group_key="query").inv(lazy_stack([named]))
    assert got[0]["query"] == "why?"


def test_turns_of_several_versions(tmp_path):
    """A conversation is as old as its oldest turn; where each version begins is stored if the store has the column."""

    def turn(prompt: list[int], response: list[int], version: int, done: bool) -> TensorDict:
        tokens = Tokens(
            prompt=torch.tensor(prompt), response=torch.tensor(response), full=torch.tensor(prompt + response)
        )
        return TensorDict(
            {
                "tokens": tokens,
                "log_probs": LogProbs(response=torch.full((len(response),), -1.0)),
                "group_id": torch.tensor(3),
                "policy_version": torch.tensor(version),
                "next": {"reward": torch.tensor([0.0]), "done": torch.tensor([done])},
            }
        )

    talk = [turn([5], [6, 7], 6, False), turn([5, 6, 7, 8], [9], 6, False), turn([5, 6, 7, 8, 9, 8], [7], 4, True)]
    storage = TrajectoryStorage(tmp_path / "store", extra=SAMPLED_BY)
    buffer = TrajectoryReplayBuffer(storage=storage, transform=ChatTrajectories())
    buffer.extend(lazy_stack([*talk, turn([5], [6], 4, True)]))
    rows = storage.store.read([0, 1])
    assert rows["policy_version"].tolist() == [4, 4]
    assert rows["newest_policy_version"].tolist() == [6, -1]
    assert [spans.tolist() for spans in rows["version_spans"]] == [[[1, 6], [6, 4]], []]
    alone = ChatTrajectories().inv(lazy_stack([turn([5], [6], 4, True)]))
    assert alone is not None
    assert "version_spans" not in alone[0].keys()  # noqa: SIM118
    storage.close()


def test_padding_of_a_policy_that_pads_is_no_token(tiny):
    """Prompts padded on the left and responses on the right give the rows of a policy that does not pad."""
    rows = []
    for padded in (False, True):
        policy = CausalLMPolicy(tiny.model(tiny.tokenizer()), generate=True, max_new_tokens=9, pad_output=padded)
        prompts = [TensorDict({"tokens": {"prompt": torch.tensor(ids)}}) for ids in ([5, 6, 7], [5], [8, 5])]
        turns = []
        for turn in policy(lazy_stack(prompts)).unbind(0):
            end = TensorDict({"reward": torch.ones(1), "done": torch.ones(1, dtype=torch.bool)})
            turns.append(turn.copy().set("group_id", torch.tensor(1)).set("next", end))
        rows.append(ChatTrajectories().inv(lazy_stack(turns)))
    assert len({len(row["tokens", "full"]) for row in rows[0].unbind(0)}) > 1
    for plain, padded in zip(*(part.unbind(0) for part in rows), strict=True):
        for key in (("tokens", "full"), ("masks", "all_assistant_mask"), "num_prompt_tokens"):
            assert plain[key].tolist() == padded[key].tolist()
        torch.testing.assert_close(plain["log_probs", "full"], padded["log_probs", "full"], equal_nan=True)


def test_the_penalty_in_the_environment(tiny):
    """As the reference page uses it: `KLRewardTransform` appended to a `ChatEnv`, a reward per token of each turn."""
    tokenizer = tiny.tokenizer()
    policy = CausalLMPolicy(
        tiny.model(tokenizer), tokenizer, input_mode="history", generate=True, prefer_tokens=True, max_new_tokens=5
    )
    reference = CausalLMPolicy(tiny.model(tokenizer, seed=1), tokenizer)
    env = environment(tokenizer, turns=2).append_transform(KLRewardTransform(reference, coef=0.5))
    turns = env.rollout(2, policy)[0]
    for turn in turns.unbind(0):
        full, said = turn["tokens", "full"], turn["masks", "all_assistant_mask"]
        want = tiny.naive(reference.model, full)[said]
        k1 = turn["log_probs", "full"][said].double() - want
        torch.testing.assert_close(turn["next", "kl_penalty"][said].double(), k1, rtol=0, atol=1e-5)
        length = float(len(turn["history"].full[-1].content))
        shaped = turn["next", "reward"].double()
        assert float(shaped.sum()) == pytest.approx(length - 0.5 * float(k1.sum()), abs=1e-4)
        assert bool((shaped[~said] == 0).all())


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("apart", [False, True], ids=["one transform", "RetrieveLogProb first"])
def test_the_penalty_with_torchrls_own_wrapper(tiny, batch, pad_output, apart):
    """Sampled by `TransformersWrapper` as it is: each token but a turn's first has its penalty; that one has none."""
    tokenizer = tiny.tokenizer(pad="<|endoftext|>")
    model, reference = tiny.model(tokenizer), tiny.model(tokenizer, seed=1)
    wrapper = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="history", generate=True, return_log_probs=True, pad_output=pad_output,
        generate_kwargs={"max_new_tokens": 5, "do_sample": True, "temperature": 1.0},
    )  # fmt: skip
    scorer = TransformersWrapper(
        reference, tokenizer=tokenizer, input_mode="history", generate=False, return_log_probs=True
    )
    env = ChatEnv(batch_size=(batch,), input_mode="history", tokenizer=tokenizer).append_transform(LengthReward())
    if apart:
        env = env.append_transform(RetrieveLogProb(scorer)).append_transform(KLRewardTransform(coef=0.5))
    else:
        env = env.append_transform(KLRewardTransform(scorer, coef=0.5))
    torch.manual_seed(0)
    start = env.reset(TensorDict({"query": [f"say {'so ' * n}" for n in range(batch)]}, [batch]))
    for turn in env.step(wrapper(start)).unbind(0):
        real = turn["masks", "all_attention_mask"].bool()
        prompt, full = turn["tokens", "prompt"], turn["tokens", "full"][real]
        said = torch.arange(len(real)) > len(prompt)
        said = said[real]
        k1 = tiny.naive(model, full)[said] - tiny.naive(reference, full)[said]
        found = turn["next", "kl_penalty"][real]
        torch.testing.assert_close(found[said].double(), k1, rtol=0, atol=1e-4)
        assert not found[~said].any()
        length = float(len(turn["history"].full[-1].content))
        assert float(turn["next", "reward"].sum()) == pytest.approx(length - 0.5 * float(k1.sum()), abs=1e-3)


def test_transforms_are_appended_before_the_turns(tiny, tmp_path):
    """`append_transform`, inverted or not, as TorchRL's recipe has it: the chat's turns become rows before it runs."""
    tokenizer = tiny.tokenizer()
    policy = CausalLMPolicy(
        tiny.model(tokenizer), tokenizer, input_mode="history", generate=True, prefer_tokens=True, max_new_tokens=4
    )
    reference = CausalLMPolicy(tiny.model(tokenizer, seed=1), tokenizer)
    storage = TrajectoryStorage(tmp_path / "store", extra={("next", "step_count"): "int64"})
    buffer = TrajectoryReplayBuffer(storage=storage, transform=Compose(MCAdvantage(GROUP), ChatTrajectories()))
    buffer.append_transform(KLRewardTransform(reference, coef=0.5), invert=True)
    assert [type(t).__name__ for t in buffer.transform] == ["MCAdvantage", "KLRewardTransform", "ChatTrajectories"]
    collect(environment(tokenizer), policy, buffer, 9)
    batch = buffer.read(buffer.store.ids())
    assert len(buffer) >= GROUP
    assert bool((batch["kl_coef"] == 0.5).all())
    assert bool((batch["next", "step_count"] == 1).all())
    said = batch["masks", "all_assistant_mask"]
    k1 = batch["log_probs", "full"] - batch["next", "ref_log_probs", "full"]
    shaped = batch["task_reward"] - 0.5 * torch.where(said, k1, 0.0).sum(1)
    torch.testing.assert_close(batch["next", "reward"].sum(1), shaped)
    buffer.trajectories.close()
