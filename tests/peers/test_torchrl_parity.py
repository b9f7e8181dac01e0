"""What TorchRL's own tests ask of these parts, asked of both in turn: equal wherever TorchRL 0.14 is right.

`README.md` beside this file lists the upstream tests, and which of them should not pass here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.data import History, LazyStackStorage, ReplayBuffer
from torchrl.envs.llm.transforms import kl as peer_kl
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives import llm as peer_llm

from rlhf_pipeline import ChatHistory, GRPOLoss, KLRewardTransform, MCAdvantage, RetrieveLogProb, Text
from rlhf_pipeline.errors import DataError, DefinitionError

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:In LLMWrapperBase:UserWarning"),
]
PeerMCAdvantage: Any = peer_llm.MCAdvantage
PeerGRPOLoss: Any = peer_llm.GRPOLoss
REF = ("next", "ref_log_probs", "full")
Steps = tuple[Any, list[float]]


def steps(group: Any, rewards: list[float], key: Any = "group_id", **more: Any) -> Any:
    """One trajectory of one step per reward, done at its last."""
    n = len(rewards)
    td = TensorDict({("next", "reward"): torch.tensor(rewards).reshape(n, 1)}, batch_size=[n])
    td[key] = torch.full((n,), group)
    td["next", "done"] = (torch.arange(n) == n - 1).reshape(n, 1)
    for name, value in more.items():
        td[name] = torch.full((n,), value)
    return td


def both(**arguments: Any) -> tuple[Any, Any]:
    """The transform of each side, made with the same arguments."""
    arguments = {"prompt_key": "group_id", "trajectory_return": "sum", **arguments}
    return MCAdvantage(**arguments), PeerMCAdvantage(**arguments)


def feed(ours: Any, peer: Any, arrivals: list[Any], keys: tuple[Any, ...] = ()) -> list[Any]:
    """Give both the same arrivals; what comes out, and what is counted, must agree at every one."""
    outs = []
    for td in arrivals:
        a, b = ours.inv(td.clone()), peer.inv(td.clone())
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            assert a["advantage"].shape == a["next", "reward"].shape
            for key in ("advantage", ("next", "reward"), *keys):
                torch.testing.assert_close(a[key], b[key], atol=1e-5, rtol=1e-5)
        want = peer.get_stats()
        if peer.trajectory_return != "sum":
            # Counted by the sum there, whatever the return is; and without returns nothing was selected.
            other = ("trajectory_return", "successful", *([] if peer.trajectory_return else ["selected"]))
            want = {name: value for name, value in want.items() if not name.startswith(other)}
        assert {name: ours.get_stats()[name] for name in want} == pytest.approx(want)
        outs.append(a)
    return outs


@pytest.mark.parametrize("how", ["sum", "max", "mean", None])
def test_advantages_of_trajectories(how):
    """Random trajectories of four groups: returns, or with None all rewards, are normalised over the group."""
    gen = torch.Generator().manual_seed(0)
    arrivals = []
    for _ in range(24):
        group, length = (int(torch.randint(low, high, (1,), generator=gen)) for low, high in ((0, 4), (1, 7)))
        arrivals.append(steps(group, torch.randn(length, generator=gen).tolist()))
    outs = feed(*both(grpo_size=3, trajectory_return=how), arrivals)
    assert sum(out is not None for out in outs) > 3


@pytest.mark.parametrize("key", ["group_id", ("meta", "group_id")])
def test_interleaved_groups_with_flat_and_nested_identity(key):
    """Groups complete on their own, by the value of a tensor."""
    arrivals = [
        steps(0, [1.0, 0.0], key),
        steps(1, [0.0, 0.0], key),
        steps(0, [0.0, 0.0], key),
        steps(1, [0.0, 1.0], key),
    ]
    outs = feed(*both(grpo_size=2, prompt_key=key), arrivals, keys=(key,))
    assert [out is None for out in outs] == [True, True, False, False]


def test_dynamic_sampling_drops_groups_without_spread():
    """Groups whose mean return is not strictly inside the bounds are left out, and counted."""
    ours, peer = both(grpo_size=2, keep_return_bounds=(0.1, 0.9))
    arrivals = [steps(g, [r]) for g, pair in enumerate([(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)]) for r in pair]
    outs = feed(ours, peer, arrivals)
    assert [out is not None for out in outs] == [False] * 5 + [True]
    assert not ours.queues
    ours.reset_stats()
    peer.reset_stats()
    assert {name: ours.get_stats()[name] for name in peer.get_stats()} == peer.get_stats()


def test_a_flat_batch_of_several_trajectories():
    """What a collector concatenates is cut at the done flags."""
    flat = torch.cat([steps(0, [1.0, 0.0]), steps(0, [0.0, 0.0, 0.0]), steps(1, [0.0])], 0)
    ours, peer = both(grpo_size=2)
    assert feed(ours, peer, [flat])[0].shape == (5,)
    assert sum(map(len, ours.queues.values())) == sum(map(len, peer.queues.values())) == 1


def test_lazy_and_plain_trajectories_of_one_group():
    """The forms may mix, and a concrete TensorDict comes out."""
    lazy: Any = lazy_stack([steps(1, [0.0])], 0).unbind(0)[0]
    flat = torch.cat([steps(0, [0.0]), steps(1, [1.0])], 0)
    out = feed(*both(grpo_size=2), [steps(0, [1.0]), lazy, flat])[-1]
    assert isinstance(out, TensorDict)


def test_prompts_as_strings_of_ragged_steps():
    """A string says the group, survives, and steps of other lengths do not disturb it."""

    def trajectory(reward: float, n: int, tokens: int) -> Any:
        rows = []
        for i in range(n):
            row = TensorDict({"query": NonTensorData("what?"), "tokens": torch.zeros(tokens, dtype=torch.int64)})
            row["next"] = TensorDict({"reward": torch.tensor([reward]), "done": torch.tensor([i == n - 1])})
            rows.append(row)
        return lazy_stack(rows)

    ours, peer = both(grpo_size=2, prompt_key="query")
    for transform in (ours, peer):
        assert transform.inv(trajectory(0.0, 2, 4)) is None
    one, two = ours.inv(trajectory(1.0, 3, 6)), peer.inv(trajectory(1.0, 3, 6))
    for a, b in zip(one.unbind(0), two.unbind(0), strict=True):
        torch.testing.assert_close(a["advantage"], b["advantage"])
        assert a["query"] == b["query"] == "what?"


def test_clearing_the_queues_keeps_the_counts():
    """Waiting trajectories are forgotten, not those that were counted."""
    ours, peer = both(grpo_size=2)
    feed(ours, peer, [steps(0, [1.0])])
    for transform in (ours, peer):
        transform.clear_queues()
    assert ours.queued_groups == 0
    assert {name: ours.get_stats()[name] for name in peer.get_stats()} == peer.get_stats()


def test_inside_torchrls_buffer():
    """As an appended transform of TorchRL's own buffer it writes the same rows."""
    lengths = []
    for transform in both(grpo_size=2, keep_return_bounds=(0.1, 0.9)):
        buffer = ReplayBuffer(storage=LazyStackStorage(100))
        buffer.append_transform(transform)
        seen = []
        for group, rewards in ((0, [0.0, 0.0]), (0, [0.0, 1.0]), (1, [0.0, 0.0]), (1, [0.0, 0.0])):
            buffer.extend(steps(group, rewards))
            seen.append(len(buffer))
        assert "advantage" in buffer.sample(4).keys()  # noqa: SIM118
        lengths.append(seen)
    assert lengths[0] == lengths[1] == [0, 4, 4, 4]


def test_groups_are_not_shared_through_memory():
    """TorchRL's `share_memory_` and a shared buffer are refused, with what to do instead."""
    transform = MCAdvantage(2)
    assert not transform.is_shared
    with pytest.raises(DefinitionError, match="shared through a store"):
        transform.share_memory_()
    with pytest.raises(DefinitionError, match="shared through a store"):
        ReplayBuffer(storage=LazyStackStorage(4), transform=transform, shared=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"trajectory_return": "prod"},
        {"trajectory_return": None, "keep_return_bounds": (0.1, 0.9)},
        {"keep_return_bounds": (0.9, 0.1)},
    ],
)
def test_the_same_arguments_are_refused(wrong):
    """With a ValueError on both sides; the words differ."""
    arguments = {"grpo_size": 2, "prompt_key": "group_id", "trajectory_return": "sum", **wrong}
    for kind in (MCAdvantage, PeerMCAdvantage):
        with pytest.raises(ValueError, match=r"\w"):
            kind(**arguments)


# -- the KL transforms ---------------------------------------------------------------------------------------------

CHATS = [
    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4."}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "name a cat"},
        {"role": "assistant", "content": "Tom, of course"},
    ],
]


def data_of(mode: str, tokenizer: Any) -> TensorDict:
    """Two trajectories as histories, as text, or as tokens padded on the left."""
    if mode == "history":
        return TensorDict(history=ChatHistory(full=History.from_chats(CHATS)), batch_size=[2])
    text = ["what is 2+2? it is 4.", "cats meow"]
    if mode == "text":
        return TensorDict(text=Text(full=text), batch_size=[2])
    encoded = tokenizer(text, return_tensors="pt", padding=True, padding_side="left")
    td = TensorDict(batch_size=[2])
    td["tokens", "full"] = encoded["input_ids"]
    td["masks", "all_attention_mask"] = encoded["attention_mask"].bool()
    return td


def listed(td: Any, key: Any) -> list[torch.Tensor]:
    """Log-probs row by row, without padding: a score of a real token is never exactly 0 but at the first."""
    value: Any = td.get(key, as_list=True) if not isinstance(td, TensorDict) else td.get(key)
    return [row[row != 0] for row in value]


@pytest.mark.parametrize("pad_output", [True, False], ids=["padded", "unpadded"])
@pytest.mark.parametrize(
    ("mode", "assistant_only"), [("history", True), ("history", False), ("text", False), ("tokens", False)]
)
def test_retrieved_log_probs(tiny, mode, assistant_only, pad_output):
    """Histories, text and tokens: the same numbers as TorchRL's transform, where padding is a token of its own."""
    tokenizer = tiny.tokenizer()
    model = tiny.model(tokenizer)
    options: dict[str, Any] = {"tokenizer": tokenizer, "input_mode": mode, "generate": False, "pad_output": pad_output}
    td = data_of(mode, tokenizer)
    if mode == "history":
        # TorchRL takes the tokenizer's template only by name; the same one for both sides.
        options["chat_template"] = tokenizer.chat_template
    ours = RetrieveLogProb(TransformersWrapper(model, **options), assistant_only=assistant_only)(td.copy())
    peer_transform: Any = peer_kl.RetrieveLogProb(TransformersWrapper(model, **options), assistant_only=assistant_only)
    with torch.no_grad():
        peer = peer_transform(td.copy().to_lazystack(0))
    for a, b in zip(listed(ours, REF), listed(peer, ("log_probs", "full")), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-6)


def test_kl_of_two_sets_of_log_probs():
    """Penalty and shaped reward are those of TorchRL's `KLComputation`, token by token, on ragged rows."""
    torch.manual_seed(0)
    rows, peer_rows = [], []
    for n, prompt in ((5, 1), (3, 2)):
        said = torch.arange(n) >= prompt
        lp, lr, reward = -torch.rand(n) * said, -torch.rand(n) * said, torch.randn(n)
        row = TensorDict({"tokens": {"full": torch.arange(n)}, "masks": {"all_assistant_mask": said}})
        row["log_probs", "full"], row["next"] = lp, TensorDict({"ref_log_probs": {"full": lr}, "reward": reward})
        rows.append(row)
        inner = TensorDict({"gen": {"full": lp}, "ref": {"full": lr}, "reward": reward[:, None]})
        peer_rows.append(TensorDict({"next": inner}))
    peer: Any = peer_kl.KLComputation(
        gen_log_probs_full_key=("gen", "full"), ref_log_probs_full_key=("ref", "full"), coeff=0.5
    )
    want = peer(lazy_stack(peer_rows))["next"]
    got: Any = KLRewardTransform(coef=0.5)(lazy_stack(rows))
    for i, row in enumerate(got.unbind(0)):
        torch.testing.assert_close(row["next", "kl_penalty"], want.get("kl_penalty", as_list=True)[i])
        torch.testing.assert_close(row["next", "reward"], want.get("reward", as_list=True)[i][:, 0])


# -- the loss ------------------------------------------------------------------------------------------------------


def loss_batch(tiny: Any, *, pad_output: bool = True) -> tuple[Any, Any]:
    """An actor of TorchRL and a padded batch for it, the assistant's mask among its keys."""
    torch.manual_seed(1)
    tokenizer = tiny.tokenizer()
    wrapper = TransformersWrapper(
        tiny.model(tokenizer), tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=pad_output
    )
    td = TensorDict(batch_size=[3])
    td["tokens", "full"] = torch.randint(3, 200, (3, 9))
    td["masks", "all_attention_mask"] = torch.ones(3, 9, dtype=torch.bool)
    td["masks", "all_assistant_mask"] = (torch.arange(9) >= 4).expand(3, 9)
    with torch.no_grad():
        scores = wrapper(td.copy())["log_probs", "full"]
    td["log_probs", "full"] = scores + 0.3 * torch.randn(3, 9)
    td["next", "ref_log_probs", "full"] = scores + 0.1 * torch.randn(3, 9)
    td["advantage"] = torch.randn(3, 1, 1).expand(3, 9, 1).clone()
    return wrapper, td


@pytest.mark.parametrize("epsilon", [0.2, (0.2, 0.28)], ids=["symmetric", "dapo"])
@pytest.mark.parametrize("threshold", [None, 0.05, 100.0])
def test_the_objective(tiny, epsilon, threshold):
    """Clipping on both sides and the KL mask: the same objective, finite, and every field of the output is there."""
    wrapper, td = loss_batch(tiny)
    options: dict[str, Any] = {"clip_epsilon": epsilon, "kl_mask_threshold": threshold, "masking_strategy": "rlhf"}
    ours: Any = GRPOLoss(wrapper, **options)(td.clone())
    peer: Any = PeerGRPOLoss(wrapper, **options)(td.clone())
    torch.testing.assert_close(ours.loss_objective, peer.loss_objective, rtol=0, atol=2e-5)
    for name, value in peer.items():
        mine = ours.get(name)
        assert (mine is None) <= (value is None), name
        if mine is not None:
            assert mine.shape == ()
            assert mine.isfinite()
    assert 0 <= ours.clip_fraction <= 1


def test_missing_keys(tiny):
    """Behaviour log-probs are needed, reference ones only for their KL; the error names the key."""
    wrapper, td = loss_batch(tiny)
    without = td.clone().exclude(("next", "ref_log_probs", "full"))
    for kind in (GRPOLoss, PeerGRPOLoss):
        assert kind(wrapper)(without.clone()).loss_objective.isfinite()
    with pytest.raises(KeyError, match="ref log-prob"):
        PeerGRPOLoss(wrapper, kl_to_ref_coeff=0.1)(without.clone())
    with pytest.raises(DataError, match="ref_log_probs"):
        GRPOLoss(wrapper, kl_to_ref_coeff=0.1)(without.clone())
    unscored = td.clone().exclude(("log_probs", "full"))
    with pytest.raises(KeyError, match="log-prob"):
        PeerGRPOLoss(wrapper)(unscored.clone())
    with pytest.raises(DataError, match=r"no \('log_probs', 'full'\)"):
        GRPOLoss(wrapper)(unscored.clone())
