"""Episodes of several rows: exact rows, one commit each, and advantages of episodes."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
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
    GRPOLoss,
    KLRewardTransform,
    Learn,
    Learner,
    MCAdvantage,
    Prompt,
    RetrieveLogProb,
    Sample,
    Step,
    TrajectoryReplayBuffer,
    TrajectoryStorage,
    Turn,
    scratch_policy,
)
from rlhf_pipeline.buffer.trajectory_schema import EPISODE, FAILURES, TURN_FIGURES, TURN_REWARDS, TURNS
from rlhf_pipeline.data.keys import ASSISTANT_MASK, LOG_PROBS, TOKENS
from rlhf_pipeline.data.rewards import environment_reward
from rlhf_pipeline.data.trajectories import Flat, Trajectories
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.policies.chat import encode_prompt
from rlhf_pipeline.run.ledger import Ledger
from tests.rlhf_pipeline.small import Clock, talker

THINKING = (
    "{% for m in messages %}{{ {'user': 'U', 'assistant': 'A', 'tool': 'T'}[m.role] + ':' }}"
    "{% if m.role == 'assistant' %}{{ m.content.split('+')[-1] + eos_token }}{% else %}{{ m.content }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
"""A template that drops the thinking of earlier turns: everything up to a plus."""


class Questions:
    """Prompts that are asked through the chat template."""

    as_chat = True

    def prompt(self, cursor: int, seed: int) -> Prompt:
        return Prompt(text=f"{cursor}+2:")


class Four:
    """Asks three times more; each turn earns its share of odd characters."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Show the prompt."""

    def step(self, turn: Turn) -> Step:
        odd = sum(ord(letter) % 2 for letter in turn.text) / 16
        return Step(f"{turn.number}:", done=turn.number == 4, rewards={"odd": odd})


def thinker(**options: Any) -> CausalLMPolicy:
    policy = talker(**options)
    policy.tokenizer.chat_template = THINKING
    return policy


def collected(
    path: Path,
    environment: Any = Four,
    policy: CausalLMPolicy | None = None,
    *,
    transforms: Any = (),
    columns: Any = (),
    **collect: Any,
) -> dict[str, Any]:
    """The rows of a rollout."""
    storage = TrajectoryStorage(path, extra=[*FAILURES, TURNS, *columns])
    config = {"prompts_per_rollout": 2, "group_size": 4, "max_new_tokens": 8, "max_turns": 4, "history": "rewritten"}
    collector = Collector(
        policy=policy or thinker(),
        prompts=Questions(),
        reward=environment_reward,
        buffer=TrajectoryReplayBuffer(storage=storage, transform=Compose(*transforms) if transforms else None),
        config=Collect(**{**config, **collect}),
        seed=1,
        environment=environment,
    )
    rollout = collector.collect(0, policy_version=0)
    store = storage.store
    rows = {"row_id": store.ids(), **store.read(store.ids()), "rollout": rollout}
    assert rollout.num_trajectories == 8
    storage.close()
    return rows


def thinks_like_qwen() -> CausalLMPolicy:
    """A random model with TRL's copy of the template of Qwen 3, and a character for each token."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl is not installed")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    tokenizer: Any = scratch_policy(alphabet, hidden_size=16, num_layers=1, num_heads=2).tokenizer
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = (Path(spec.origin).parent / "chat_templates" / "qwen3.jinja").read_text("utf-8")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=len(tokenizer), num_attention_heads=2, num_key_value_heads=2, **sizes)
    )
    return CausalLMPolicy(model, tokenizer, eos_token_id=[tokenizer.convert_tokens_to_ids("<|im_end|>")])


@pytest.mark.parametrize(
    ("make", "limits"),
    [
        (thinker, {"max_new_tokens": 8}),
        pytest.param(thinks_like_qwen, {"max_new_tokens": 40}, marks=pytest.mark.peer),
    ],
)
def test_every_row_is_what_the_policy_was_shown(make, limits, tmp_path):
    """A row begins with what the template shows, and each sampled token has the log-prob of teacher forcing."""
    policy = make()
    rows = collected(tmp_path / "store", policy=policy, **limits)
    sizes = rows["episode_size"]
    assert set(sizes.tolist()) > {1, 2} or set(sizes.tolist()) > {2, 3}
    firsts = np.flatnonzero(rows["episode_row"] == 0)
    assert len(firsts) == 8
    for first in firsts.tolist():
        episode = range(first, first + sizes[first])
        assert {rows["episode_id"][row] for row in episode} == {rows["group_id"][first] * 4 + first_of(rows, first)}
        assert [rows["episode_row"][row] for row in episode] == [*range(sizes[first])]
        assert np.isfinite([rows["task_reward"][row] for row in episode]).tolist() == [False] * (len(episode) - 1) + [
            True
        ]
        metas = [json.loads(rows["meta"][row]) for row in episode]
        assert sum(len(meta["turn_rewards"]) for meta in metas) == 4
        for row, meta in zip(episode, metas, strict=True):
            turns = len(meta["turn_rewards"])
            asked = meta["messages"][: -(2 * turns - 1)]
            ids, prompt = rows["input_ids"][row].tolist(), int(rows["num_prompt_tokens"][row])
            assert ids[:prompt] == encode_prompt(policy.tokenizer, asked)
            mask = torch.from_numpy(rows["assistant_mask"][row].copy())[None]
            scored = policy.log_probs(torch.tensor([ids]), torch.ones_like(mask), mask).detach()[0]
            np.testing.assert_allclose(rows["log_probs"][row][mask[0]], scored[mask[0]], rtol=0, atol=1e-5)
            assert np.isnan(rows["log_probs"][row][~mask[0].numpy()]).all()
    assert len(np.unique(rows["trajectory_id"])) == len(rows["trajectory_id"])


class Plain:
    """An engine without a loop for conversations: each turn is a request of its own."""

    name, version = "plain", None

    def __init__(self, engine: Any) -> None:
        self.generate, self.abort = engine.generate, engine.abort


def test_engines_begin_the_same_rows(tmp_path):
    """Tokens read ahead change no row; on an engine that samples requests the rows follow the template as well."""
    policies = [thinker(), thinker(), thinker()]
    policies[1].engine.sync_every = 4
    policies[2].engine = Plain(policies[2].engine)
    wanted, ahead, plain = (collected(tmp_path / f"{number}", policy=policy) for number, policy in enumerate(policies))
    for name in ("input_ids", "episode_size", "trajectory_id", "task_reward"):
        for one, other in zip(wanted[name], ahead[name], strict=True):
            np.testing.assert_array_equal(one, other)
    for row, (ids, mask) in enumerate(zip(plain["input_ids"], plain["assistant_mask"], strict=True)):
        chosen = torch.from_numpy(mask.copy())[None]
        scored = thinker().log_probs(torch.from_numpy(ids.astype(np.int64))[None], torch.ones_like(chosen), chosen)
        np.testing.assert_allclose(plain["log_probs"][row][mask], scored.detach()[0][mask], rtol=0, atol=1e-5)
    sampled = [tuple(ids[mask]) for ids, mask in zip(plain["input_ids"], plain["assistant_mask"], strict=True)]
    assert len({*sampled}) == len(sampled)  # no two rows have the random numbers of one


def first_of(rows: dict[str, Any], first: int) -> int:
    """The member that an episode is, from the id of its first row."""
    return int(rows["trajectory_id"][first]) - 4 * int(rows["group_id"][first])


def test_one_row_as_long_as_the_template_keeps_turns(tmp_path):
    """The rows of a template that rewrites nothing are those of `history="sampled"`, without further columns."""
    names = ("input_ids", "log_probs", "trajectory_id", "meta", "task_reward")
    policy = talker()
    policy.tokenizer.pad_token = policy.tokenizer.eos_token  # otherwise a sampled one is not in the text of a turn
    both = [collected(tmp_path / history, policy=policy, history=history) for history in ("sampled", "rewritten")]
    for rows in both:
        assert not {column.name for column in EPISODE} & set(rows)
    for name in names:
        for one, other in zip(both[0][name], both[1][name], strict=True):
            np.testing.assert_array_equal(one, other)


class Returns(Four):
    """Earns a third of the outcome at the end."""

    def end(self, reason: str) -> dict[str, float]:
        return {"reached": 0.5}


KL = 0.25


def write_path(rule: str, estimator: str, kl: bool) -> list[Any]:
    reference = thinker(seed=5)
    shaped = [KLRewardTransform(coef=KL), RetrieveLogProb(reference)] if kl else []
    return [MCAdvantage(4, estimator=estimator, episode_return=rule), *shaped]


def expected_returns(rows: dict[str, Any], rule: str, kl: bool) -> np.ndarray:
    """The returns of the episodes by the rules, in float64."""
    found, earned = list[float](), list[list[float]]()
    for row in range(len(rows["input_ids"])):
        mask = rows["assistant_mask"][row].astype(bool)
        k1 = np.where(mask, rows["log_probs"][row].astype(np.float64) - rows["ref_log_probs"][row], 0.0)
        begin = rows["turn_spans"][row][-1][0] if rule == "skyrl" else 0
        penalty = KL * k1[begin:].sum() if kl else 0.0
        earned.append(rows["turn_rewards"][row].astype(np.float64).tolist())
        if rows["episode_row"][row] == 0:
            total, episode = 0.0, list[float]()
        total += -penalty
        episode += earned[-1]
        if rows["episode_row"][row] == rows["episode_size"][row] - 1:
            if rule == "sum":
                found.append(float(rows["task_reward"][row]) + total)
            else:
                found.append(sum(earned[-1] if rule == "verl" else earned[-1][-1:]) - penalty)
    return np.array(found)


def of_group(returns: np.ndarray, estimator: str) -> np.ndarray:
    """The advantages of a group, in float64."""
    centred = returns - returns.mean()
    return centred / centred.std(ddof=1) if estimator == "grpo" else centred * len(returns) / (len(returns) - 1)


@pytest.mark.parametrize(
    ("estimator", "rule", "kl"),
    [("grpo", "sum", False), ("rloo", "sum", True), ("grpo", "verl", True), ("grpo", "skyrl", True)],
)
def test_rows_get_the_advantage_of_their_episode(estimator, rule, kl, tmp_path):
    """Returns and advantages equal float64 references written from the rules, in one commit or one each episode."""
    rows = collected(tmp_path / "store", Returns, transforms=write_path(rule, estimator, kl), columns=[TURN_REWARDS])
    last = rows["episode_row"] == rows["episode_size"] - 1
    returns = expected_returns(rows, rule, kl)
    np.testing.assert_allclose(rows["return"][last], returns, rtol=0, atol=2e-6)
    wanted = np.concatenate([of_group(part, estimator) for part in np.split(returns, 2)])
    place = np.cumsum(last) - last
    np.testing.assert_allclose(rows["advantage"], wanted[place], rtol=0, atol=2e-5)
    assert (rows["return"] == rows["return"][last][place]).all()

    class Alone(Returns):
        has_effects = True

    each = collected(tmp_path / "each", Alone, transforms=write_path(rule, estimator, kl), columns=[TURN_REWARDS])
    order = np.lexsort((each["episode_row"], each["episode_id"]))
    for name in ("input_ids", "trajectory_id", "task_reward", "turn_rewards"):
        for number, row in enumerate(order.tolist()):
            np.testing.assert_array_equal(each[name][row], rows[name][number], name)
    for name in ("return", "advantage"):
        np.testing.assert_allclose(each[name][order], rows[name], rtol=0, atol=1e-6)
    sampled = sum(int(mask.sum()) for mask in rows["assistant_mask"])
    assert each["rollout"].num_tokens == rows["rollout"].num_tokens == sampled > 0


def stored(path: Path, **collect: Any) -> TrajectoryReplayBuffer:
    """A buffer with the rows of one rollout."""
    collected(path, Returns, transforms=write_path("sum", "grpo", False), columns=[TURN_REWARDS], **collect)
    return TrajectoryReplayBuffer(storage=TrajectoryStorage(path))


@pytest.mark.parametrize("weight", ["one", "rows"])
def test_a_step_takes_whole_episodes(weight, tmp_path):
    """A batch of three has the rows of three episodes, and in the loss each counts as one, or as each of its rows."""
    buffer, policy = stored(tmp_path / "store"), thinker()
    learner = Learner(
        policy=policy,
        loss=GRPOLoss(policy, aggregation="sequence_mean"),
        buffer=buffer,
        config=Learn(episode_weight=weight),
        max_staleness=3,
        max_completion_tokens=8,
        ledger=Ledger(tmp_path / "ledger.jsonl"),
        seed=0,
        sample=Sample(strategy="uniform", batch_size=3, max_uses=1),
    )
    store, used = buffer.store, set[int]()
    episodes = store.read_scalars("episode_id")
    for step in (1, 2, 3):
        row_ids = learner.chosen_rows(step).row_ids
        chosen = np.unique(episodes[row_ids])
        assert len(chosen) == (3, 3, 2)[step - 1]
        assert row_ids.tolist() == np.flatnonzero(np.isin(episodes, chosen)).tolist()
        assert not used & {*chosen.tolist()}
        used |= {*chosen.tolist()}
        plan = learner._plan(row_ids)
        lengths, of = plan.scored.double().numpy(), episodes[row_ids]
        tokens = {episode: lengths[of == episode].sum() for episode in chosen}
        wanted = 1 / (len(lengths) * lengths)
        if weight == "one":
            wanted = np.array([1 / (len(chosen) * tokens[episode]) for episode in of])
        np.testing.assert_allclose(plan.weights.numpy(), wanted, rtol=1e-6)
        figures = learner.step(step)
        assert figures["num_trajectories"] == len(row_ids)
        assert learner.ledger.planned(step)["row_ids"] == row_ids.tolist()
    buffer.trajectories.close()


def test_turns_are_compared_across_rows(tmp_path):
    """With `turn_grpo`, turn k of an episode is compared with turn k of the others, whichever rows have them."""
    rows = collected(
        tmp_path / "store", Returns, transforms=write_path("sum", "turn_grpo", False), columns=TURN_FIGURES
    )
    last = rows["episode_row"] == rows["episode_size"] - 1
    episode = (np.cumsum(last) - last).tolist()
    turns, found = [[list[float]() for _ in range(8)] for _ in range(2)]
    for row, number in enumerate(episode):
        turns[number] += rows["turn_rewards"][row].astype(np.float64).tolist()
        found[number] += rows["turn_advantages"][row].tolist()
        own = rows["turn_advantages"][row]
        assert rows["advantage"][row] == own[np.abs(own).argmax()]
    for members in (slice(0, 4), slice(4, 8)):
        group = np.array(turns[members])
        each = (group - group.mean(0)) / np.maximum(group.std(0, ddof=1), 1e-6)
        np.testing.assert_allclose(found[members], each[:, ::-1].cumsum(1)[:, ::-1], rtol=0, atol=1e-4)


def test_a_group_closes_early_by_its_episodes(tmp_path):
    """Three of four episodes close a group after the timeout; their rows are not counted one by one."""
    clock = Clock()
    transform = MCAdvantage(4, min_group_size=3, group_timeout_s=60.0, clock=clock)
    rows = collected(tmp_path / "rows", Returns, columns=[TURN_REWARDS])
    buffer = TrajectoryReplayBuffer(
        storage=TrajectoryStorage(tmp_path / "store", extra=[*EPISODE]), transform=transform
    )
    first = [np.flatnonzero(rows["episode_id"] == episode) for episode in range(3)]

    def extend(some: np.ndarray) -> None:
        batch = Trajectories(len(some))
        for name in ("group_id", "trajectory_id", "episode_id", "episode_row", "episode_size", "task_reward"):
            batch[name] = Flat(torch.from_numpy(rows[name][some]))
        lengths = torch.tensor([len(rows["input_ids"][row]) for row in some])
        for key, name in ((TOKENS, "input_ids"), (ASSISTANT_MASK, "assistant_mask"), (LOG_PROBS, "log_probs")):
            batch[key] = Flat(torch.from_numpy(np.concatenate([rows[name][row] for row in some])), lengths)
        buffer.extend(batch)

    for episode in first[:2]:
        extend(episode)
    clock.now += 61
    buffer.close_overdue()
    assert np.isnan(buffer.store.read_scalars("advantage")).all()  # two episodes, of at least four rows
    assert len(buffer.waiting()) == 2
    extend(first[2])
    buffer.close_overdue()
    returns = rows["task_reward"][[episode[-1] for episode in first]].astype(np.float64)
    wanted = np.repeat((returns - returns.mean()) / returns.std(ddof=1), [len(episode) for episode in first])
    np.testing.assert_allclose(buffer.store.read_scalars("advantage"), wanted, rtol=0, atol=1e-5)
    with pytest.raises(DataError, match="do not form complete episodes"):
        extend(np.flatnonzero(rows["episode_id"] == 4)[:-1])
    buffer.trajectories.close()


class Delegates(Four):
    """Lets a sub-agent take the second and third turn, on messages of its own, and then goes on with its row."""

    def step(self, turn: Turn) -> Step:
        if turn.number == 1:
            return Step(history=[{"role": "user", "content": "9:"}])
        if turn.number == 2:
            return Step("7:")
        return Step("8:", row=0) if turn.number == 3 else Step(done=True, rewards={"odd": 1.0})


class Compacts(Four):
    """Shows a summary in place of the history before the third turn."""

    def step(self, turn: Turn) -> Step:
        if turn.number == 2:
            return Step(history=[{"role": "user", "content": "5+5:"}])
        return super().step(turn)


class Judges(Compacts):
    """Gives the outcome to the first row, though the policy judges it in the second."""

    def step(self, turn: Turn) -> Step:
        step = super().step(turn)
        return dataclasses.replace(step, row=0) if step.done else step


def test_an_environment_names_the_row_of_the_outcome(tmp_path):
    """The named row is the last of the episode and has the outcome; the rewards of its turns add up to it."""
    rows = collected(tmp_path / "store", Judges, talker(), history="sampled", columns=[TURN_REWARDS])
    assert rows["episode_row"].tolist() == [0, 1] * 8
    prompts = [talker().tokenizer.decode(ids[:6]) for ids in rows["input_ids"]]
    assert [prompt.startswith("U:5+5") for prompt in prompts] == [True, False] * 8
    for row in range(0, 16, 2):
        assert np.isnan(rows["task_reward"][row])
        total = rows["turn_rewards"][row].sum() + rows["turn_rewards"][row + 1].sum()
        assert rows["task_reward"][row + 1] == pytest.approx(total, abs=1e-6)


@pytest.mark.parametrize(
    ("environment", "turns", "last"), [(Delegates, [2, 2], "A:"), (Compacts, [2, 2], "U:5+5:\nA:")]
)
def test_an_environment_begins_rows(environment, turns, last, tmp_path):
    """A sub-agent and a compacted history are rows of the episode; the row that ends it has the outcome."""
    policy = talker()
    rows = collected(tmp_path / "store", environment, policy, history="sampled")
    assert rows["episode_size"].tolist() == [2] * 16
    for row in range(0, 16, 2):
        metas = [json.loads(rows["meta"][number]) for number in (row, row + 1)]
        assert [len(meta["turn_rewards"]) for meta in metas] == turns
        assert "graded" not in metas[0]
        assert np.isfinite(rows["task_reward"][[row, row + 1]]).tolist() == [False, True]
        prompts = [
            policy.tokenizer.decode(rows["input_ids"][number][: rows["num_prompt_tokens"][number]])
            for number in (row, row + 1)
        ]
        question = f"U:{rows['group_id'][row]}+2:\nA:"
        assert prompts == (["U:9:\nA:", question] if environment is Delegates else [question, last])
        for number in (row, row + 1):
            mask = torch.from_numpy(rows["assistant_mask"][number].copy())[None]
            ids = torch.from_numpy(rows["input_ids"][number].astype(np.int64))[None]
            scored = policy.log_probs(ids, torch.ones_like(mask), mask).detach()[0]
            np.testing.assert_allclose(rows["log_probs"][number][mask[0]], scored[mask[0]], rtol=0, atol=1e-5)
