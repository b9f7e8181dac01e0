"""One test per fault of TorchRL 0.14 on the write path: ours is right, and theirs, run beside it, is not.

The day one of these fails on the peer's side, TorchRL has mended it. RolloutFromModel's faults are in
`tests/rlhf_pipeline/interop/torchrl/test_rollout_from_model_peer.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.data import History, LazyMemmapStorage, LazyStackStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import Compose
from torchrl.envs.llm.transforms import IncrementalTokenizer
from torchrl.envs.llm.transforms import kl as peer_kl
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies.common import LogProbDistribution as PeerLogProbDistribution
from torchrl.objectives import llm as peer_llm

from rlhf_pipeline import (
    CausalLMPolicy,
    ChatHistory,
    GRPOLoss,
    KLRewardTransform,
    LogProbDistribution,
    MCAdvantage,
    RetrieveLogProb,
    Tokens,
    TrajectoryReplayBuffer,
)
from rlhf_pipeline.errors import DataError

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated:UserWarning"),
]
PeerMCAdvantage: Any = peer_llm.MCAdvantage
PeerGRPOLoss: Any = peer_llm.GRPOLoss
REF = ("next", "ref_log_probs", "full")
FULL = ("log_probs", "full")
END = 258
ROWS = [[5, 6, 7, 8, 9], [9, 10, 11]]
PROMPTS = [2, 1]


def wrap(tiny: Any, *, pad: str = "<|endoftext|>", seed: int = 0, **options: Any) -> TransformersWrapper:
    """TorchRL's wrapper around a tiny model, reading token ids."""
    tokenizer = tiny.tokenizer(pad=pad)
    options = {"input_mode": "tokens", "generate": False, **options}
    return TransformersWrapper(tiny.model(tokenizer, seed=seed), tokenizer=tokenizer, **options)


def sampled(tiny: Any, wrapper: TransformersWrapper, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Tokens and log-probs of one completion by TorchRL's wrapper."""
    row = tiny.rows([prompt], [len(prompt)])
    row[0]["tokens"].prompt = row[0]["tokens"].full
    torch.manual_seed(0)
    with torch.no_grad():
        out: Any = wrapper(row)
    response = out.get(("tokens", "response"), as_list=True)[0]
    return response.tolist(), out.get(("log_probs", "response"), as_list=True)[0].double()


def group(values: list[float], identity: int = 0) -> TensorDict:
    """Trajectories of one step, each with its reward."""
    n = len(values)
    td = TensorDict({"group_id": torch.full((n,), identity)}, [n])
    td["next", "reward"] = torch.tensor(values).reshape(n, 1)
    td["next", "done"] = torch.ones(n, 1, dtype=torch.bool)
    return td


# -- the write path ------------------------------------------------------------------------------------------------


def test_kl_transforms_do_nothing_on_the_write_path(tiny, tmp_path):
    """Only MCAdvantage has an inverse call there: `extend` writes no reference log-probs; here it does."""
    wrapper = wrap(tiny)
    lp = [torch.zeros(len(row)) for row in ROWS]
    rows = tiny.rows(ROWS, PROMPTS, log_probs=lp, task_reward=[torch.tensor(1.0)] * 2, group_id=[torch.tensor(0)] * 2)
    peer = ReplayBuffer(storage=LazyStackStorage(8))
    peer_transform: Any = peer_kl.RetrieveLogProb(
        wrapper, assistant_only=False, log_probs_full_key=("ref_log_probs", "full")
    )
    peer.append_transform(peer_transform)
    peer.extend(rows.clone())
    assert "ref_log_probs" not in peer._storage[0].keys()  # noqa: SIM118
    ours = TrajectoryReplayBuffer(
        storage=str(tmp_path / "store"),
        transform=Compose(MCAdvantage(2), KLRewardTransform(coef=0.1), RetrieveLogProb(wrapper)),
    )
    ours.extend(rows)
    stored = ours.store.read(ours.store.ids(), ["ref_log_probs", "assistant_mask"])
    for ids, ref, said in zip(ROWS, stored["ref_log_probs"], stored["assistant_mask"], strict=True):
        want = tiny.naive(wrapper.model, ids)
        torch.testing.assert_close(torch.tensor(ref[said]).double(), want[torch.tensor(said)], rtol=0, atol=2e-6)
    ours.trajectories.close()


def test_inverted_kl_transforms_fail_on_the_write_path(tiny):
    """`append_transform(..., invert=True)`, as TorchRL's recipe has it, raises there."""
    wrapper = wrap(tiny)
    rows = tiny.rows(ROWS, PROMPTS, log_probs=[torch.zeros(len(row)) for row in ROWS])
    for row in rows.unbind(0):
        row["next"] = TensorDict({"reward": torch.ones(1)})
    peer = ReplayBuffer(storage=LazyStackStorage(8))
    peer_transform: Any = peer_kl.KLRewardTransform(wrapper, coef=0.1)
    peer.append_transform(peer_transform, invert=True)
    with pytest.raises((AttributeError, KeyError, NotImplementedError, RuntimeError)):
        peer.extend(rows.clone())
    out: Any = KLRewardTransform(wrapper, coef=0.1).inv(rows)
    assert out[0]["next", "reward"].shape == (5,)


def test_reference_log_probs_keep_their_graph(tiny):
    """`detach=True` is ignored there: what is stored holds the whole forward pass."""
    wrapper = wrap(tiny)
    rows = tiny.rows(ROWS, PROMPTS)
    peer_transform: Any = peer_kl.RetrieveLogProb(wrapper, assistant_only=False, detach=True)
    assert peer_transform(rows.clone()).get(FULL, as_list=True)[0].requires_grad
    assert not RetrieveLogProb(wrapper)(rows)[0][REF].requires_grad


def test_the_task_reward_is_paid_at_every_token():
    """A reward of one per trajectory is broadcast there, so a longer completion earns more; here it is paid once."""
    n = 4
    zeros = torch.zeros(n)
    inner = TensorDict({"gen": {"full": zeros}, "ref": {"full": zeros}, "reward": torch.ones(1, 1)})
    peer: Any = peer_kl.KLComputation(gen_log_probs_full_key=("gen", "full"), ref_log_probs_full_key=("ref", "full"))
    out: Any = peer(lazy_stack([TensorDict({"next": inner})]))
    assert sum(float(r.sum()) for r in out["next"].get("reward", as_list=True)) == n
    row = TensorDict({"masks": {"all_assistant_mask": torch.tensor([False, True, True, True])}})
    row["tokens", "full"], row[FULL], row[REF] = torch.arange(n), zeros, zeros
    row["task_reward"] = torch.tensor(1.0)
    ours: Any = KLRewardTransform().inv(lazy_stack([row]))
    assert ours[0]["next", "reward"].tolist() == [0, 0, 0, 1]


def test_add_stores_a_group_as_one_row(tmp_path):
    """The call that completes a group writes one item of batch size 2 there; here it writes two trajectories."""
    peer = ReplayBuffer(storage=LazyStackStorage(8))
    peer.append_transform(PeerMCAdvantage(2, prompt_key="group_id", trajectory_return="sum"))
    ours = TrajectoryReplayBuffer(storage=str(tmp_path / "store"), transform=MCAdvantage(2))
    peer.add(group([0.0])[0])
    with pytest.warns(UserWarning, match=r"Using `add\(\)` with a TensorDict that has batch_size"):
        peer.add(group([1.0])[0])
    for value in (0.0, 1.0):
        row = TensorDict({"tokens": {"full": torch.arange(3)}, "group_id": torch.tensor(0)})
        row["masks", "all_assistant_mask"] = torch.tensor([False, True, True])
        row["log_probs", "full"], row["task_reward"] = torch.zeros(3), torch.tensor(value)
        ours.add(row)
    assert len(peer) == 1
    assert peer._storage[0].batch_size == (2,)
    assert len(ours) == 2
    ours.trajectories.close()


def test_a_trailing_incomplete_trajectory_vanishes():
    """Steps after the last end are dropped without a word there; here the batch is refused."""
    rows = [group([value])[0] for value in (0.0, 1.0, 0.5)]
    rows[-1]["next", "done"].fill_(False)
    flat: Any = lazy_stack(rows)
    peer = PeerMCAdvantage(2, prompt_key="group_id", trajectory_return="sum")
    assert peer.inv(flat.clone()).shape == (2,)
    assert peer.queued_trajectories == 0
    with pytest.raises(DataError, match="last trajectory of the batch is not complete"):
        MCAdvantage(2, prompt_key="group_id").inv(flat)


def test_a_group_of_one_is_not_a_number():
    """The standard deviation of one return: NaN there, advantage 0 and a flag here."""
    peer = PeerMCAdvantage(1, prompt_key="group_id")
    with pytest.warns(UserWarning, match="degrees of freedom"):
        theirs = peer.inv(group([1.0]))
    assert theirs["advantage"].isnan().all()
    out: Any = MCAdvantage(1).inv(group([1.0]))
    assert out["advantage"].flatten().tolist() == [0.0]
    assert out["degenerate"].tolist() == [True]


def test_waiting_groups_are_in_no_state():
    """A half-arrived group is gone after a checkpoint there; here it is completed."""
    for kind, left in ((PeerMCAdvantage, 0), (MCAdvantage, 1)):
        before, after = (kind(2, prompt_key="group_id", trajectory_return="sum") for _ in range(2))
        assert before.inv(group([0.0])) is None
        after.load_state_dict(before.state_dict())
        assert after.queued_trajectories == left
        out = after.inv(group([1.0]))
        assert (out is None) == (left == 0)


def test_returns_are_counted_as_sums():
    """The statistic of the returns is their sum there whatever the return is; here it is of the returns."""
    found = {}
    for kind in (PeerMCAdvantage, MCAdvantage):
        transform = kind(2, prompt_key="group_id", trajectory_return="max")
        td = torch.cat([group([1.0]), group([1.0])])
        td["next", "done"][0] = False
        transform.inv(td)
        found[kind] = transform.get_stats()["trajectory_return_sum"]
    assert found == {PeerMCAdvantage: 2.0, MCAdvantage: 1.0}


def test_transforms_before_the_group_get_none(tiny):
    """While a group waits, every transform that runs after MCAdvantage is handed None, and fails there."""

    class Peer(peer_kl.Transform):
        def _inv_call(self, tensordict: Any) -> Any:
            return tensordict.set("seen", torch.ones(tensordict.shape))

    peer = ReplayBuffer(
        storage=LazyStackStorage(8), transform=Compose(Peer(), PeerMCAdvantage(2, prompt_key="group_id"))
    )
    with pytest.raises(AttributeError, match="NoneType"):
        peer.extend(group([0.0]))
    stack = Compose(KLRewardTransform(), RetrieveLogProb(wrap(tiny)), MCAdvantage(2))
    assert stack.inv(group([0.0])) is None


# -- storages ------------------------------------------------------------------------------------------------------


def test_strings_read_back_as_the_first(tmp_path):
    """A memory-mapped storage gives every row the first row's string there."""
    texts = ["alpha", "beta", "gamma"]
    peer = TensorDictReplayBuffer(storage=LazyMemmapStorage(3, scratch_dir=tmp_path / "peer"), batch_size=3)
    rows: Any = lazy_stack([TensorDict({"x": torch.tensor(float(i)), "prompt": t}) for i, t in enumerate(texts)])
    peer.extend(rows.contiguous())
    read = [peer._storage[i]["prompt"] for i in range(3)]
    assert [getattr(item, "data", item) for item in read] == ["alpha"] * 3
    ours = TrajectoryReplayBuffer(storage=str(tmp_path / "store"))
    td = ragged(texts)
    ours.extend(td)
    assert ours.store.read(ours.store.ids(), ["prompt"])["prompt"] == texts
    ours.trajectories.close()


def ragged(texts: list[str]) -> Any:
    """Trajectories without groups, each with its prompt."""
    out = []
    for i, text in enumerate(texts):
        row = TensorDict({"tokens": {"full": torch.arange(2 + i)}, "task_reward": torch.tensor(float(i))})
        row["masks", "all_assistant_mask"] = torch.arange(2 + i) > 0
        row[FULL], row["prompt"] = torch.zeros(2 + i), NonTensorData(text)
        out.append(row)
    return lazy_stack(out)


def test_a_reloaded_state_has_no_strings(tmp_path):
    """`load_state_dict` loses the prompts there; here the store has them."""
    texts = ["alpha", "beta"]
    peer, other = (ReplayBuffer(storage=LazyStackStorage(4), batch_size=2) for _ in range(2))
    peer.extend(ragged(texts))
    other.load_state_dict(peer.state_dict())
    assert other._storage[0].get("prompt", None) != "alpha"
    ours = TrajectoryReplayBuffer(storage=str(tmp_path / "store"))
    ours.extend(ragged(texts))
    state = ours.state_dict()
    ours.trajectories.close()
    again = TrajectoryReplayBuffer(storage=str(tmp_path / "store"))
    again.load_state_dict(state)
    assert again.store.read(again.store.ids(), ["prompt"])["prompt"] == texts
    again.trajectories.close()


# -- policies ------------------------------------------------------------------------------------------------------


def test_the_first_sampled_token_has_log_prob_zero(tiny):
    """A completion's first token counts as certain there."""
    wrapper = wrap(tiny, generate=True, generate_kwargs={"max_new_tokens": 4, "do_sample": True})
    ids, scores = sampled(tiny, wrapper, [5, 6, 7])
    want = tiny.naive(wrapper.model, [5, 6, 7, *ids])[3:]
    assert scores[0] == 0
    assert want[0] < -0.05
    torch.testing.assert_close(scores[1:], want[1:], rtol=0, atol=1e-5)
    policy = CausalLMPolicy(wrapper.model, max_new_tokens=4)
    mine = policy.generate_groups([[5, 6, 7]], seed=0)[0]
    want = tiny.naive(wrapper.model, [5, 6, 7, *mine.token_ids])[3:]
    torch.testing.assert_close(mine.log_probs.double(), want, rtol=0, atol=2e-6)


def test_log_probs_are_at_temperature_one(tiny):
    """Sampled at 0.5, reported at 1 there; here both are at 0.5."""
    options = {"max_new_tokens": 5, "do_sample": True, "temperature": 0.5}
    wrapper = wrap(tiny, generate=True, generate_kwargs=options)
    ids, scores = sampled(tiny, wrapper, [5, 6, 7])
    row = [5, 6, 7, *ids]
    at_one, right = (tiny.naive(wrapper.model, row, t)[3:] for t in (1.0, 0.5))
    torch.testing.assert_close(scores[1:], at_one[1:], rtol=0, atol=1e-5)
    assert (scores[1:] - right[1:]).abs().max() > 0.01
    policy = CausalLMPolicy(wrapper.model, temperature=0.5)
    ids = torch.tensor([row])
    mine = policy.log_probs(ids, torch.ones_like(ids, dtype=torch.bool))[0, 3:]
    torch.testing.assert_close(mine.double(), right, rtol=0, atol=2e-6)


def test_sampling_is_cut_to_fifty_tokens(tiny):
    """Nobody asked for top_k, and a checkpoint's default cuts what is sampled there; log-probs do not know of it."""
    wrapper = wrap(tiny, generate=True, generate_kwargs={"max_new_tokens": 1, "do_sample": True})
    with torch.no_grad():
        wrapper.model.lm_head.weight.mul_(1e-3)  # every token is nearly as likely
        torch.manual_seed(0)
        rows = tiny.rows([[5]] * 400, [1] * 400)
        for row in rows.unbind(0):
            row["tokens"].prompt = row["tokens"].full
        out: Any = wrapper(rows)
    theirs = {int(t[0]) for t in out.get(("tokens", "response"), as_list=True) if len(t)}
    assert len(theirs) <= 50
    mine = CausalLMPolicy(wrapper.model).generate_groups([[5]], group_size=400, max_new_tokens=1, seed=0)
    assert len({c.token_ids[0] for c in mine}) > 150  # of 259, 205 are expected


def test_packed_rows_see_each_other(tiny):
    """`pad_model_input=False`: the first token of a row is scored from the row before it, and no mask is causal."""
    wrapper = wrap(tiny, pad_model_input=False)
    rows = tiny.rows(ROWS, [1, 1])
    with torch.no_grad():
        peer = wrapper(rows.clone()).get(FULL, as_list=True)
    ours: Any = RetrieveLogProb(wrapper)(rows)
    worst = 0.0
    for a, b, ids in zip(peer, ours.unbind(0), ROWS, strict=True):
        want = tiny.naive(wrapper.model, ids)[1:]
        worst = max(worst, float((a[1:].double() - want).abs().max()))
        torch.testing.assert_close(b[REF][1:].double(), want, rtol=0, atol=2e-6)
    assert worst > 0.1
    assert peer[1][0] != 0  # scored with the logits of the other row's last token


def test_the_end_token_is_dropped_where_it_pads(tiny):
    """With `pad_token = eos_token`, as TorchRL's examples set it, a completion loses its end there."""
    wrapper = wrap(tiny, pad="<|im_end|>", generate=True, generate_kwargs={"max_new_tokens": 3, "do_sample": False})
    with torch.no_grad():
        wrapper.model.lm_head.weight[END] = 0
        wrapper.model.lm_head.weight[:END] = 0
        wrapper.model.lm_head.weight[END] += 100 * first_state(wrapper.model, [5, 6, 7])
    ids, _ = sampled(tiny, wrapper, [5, 6, 7])
    assert ids == []
    policy = CausalLMPolicy(wrapper.model, wrapper.tokenizer)
    done = policy.generate_groups([[5, 6, 7]], seed=0, temperature=0.0)[0]
    assert done.token_ids == [END]
    assert done.finish_reason == "stop"


def first_state(model: Any, ids: list[int]) -> torch.Tensor:
    """The last hidden state after a prompt, of length 1."""
    hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
    return hidden / hidden.norm()


def test_sampling_writes_no_log_probs_of_whole_rows(tiny):
    """`("log_probs", "full")`, which TorchRL's own loss reads, is missing after sampling there."""
    wrapper = wrap(tiny, generate=True, generate_kwargs={"max_new_tokens": 3})
    row = tiny.rows([[5, 6]], [2])
    row[0]["tokens"].prompt = row[0]["tokens"].full
    with torch.no_grad():
        out: Any = wrapper(row.clone())
    assert out[0].get(FULL, None) is None
    mine: Any = CausalLMPolicy(wrapper.model, generate=True, max_new_tokens=3)(row)
    full, tokens = mine[0][FULL], mine[0]["tokens", "full"]
    torch.testing.assert_close(full[2:].double(), tiny.naive(wrapper.model, tokens)[2:], rtol=0, atol=2e-6)


def test_history_scoring_changes_the_sampled_tokens(tiny):
    """A sampled conversation is decoded and encoded again there; here the sampler's own ids are scored."""
    tokenizer = tiny.tokenizer()
    sampled_ids = torch.tensor([0x80, 0x81, 300 - 200])  # bytes of the alphabet that no text decodes to
    text = tokenizer.decode(sampled_ids)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
    wrapper = TransformersWrapper(
        tiny.model(tokenizer),
        tokenizer=tokenizer,
        input_mode="history",
        generate=False,
        chat_template=tokenizer.chat_template,
    )
    with torch.no_grad():
        out: Any = wrapper(lazy_stack([TensorDict({"history": ChatHistory(full=History.from_chats([chat])[0])})]))
    again = out.get(("tokens", "full"), as_list=True)[0].tolist()
    wanted = sampled_ids.tolist()
    assert not any(again[i : i + 3] == wanted for i in range(len(again)))
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
    ours: Any = RetrieveLogProb(wrapper)(tiny.rows([[*prompt, *wanted]], [len(prompt)]))
    assert ours[0]["tokens", "full"][len(prompt) :].tolist() == wanted


def test_the_next_turn_starts_without_its_header(tiny):
    """`IncrementalTokenizer` hands the sampled tokens on and leaves replies and header out; here they are added."""
    tokenizer = tiny.tokenizer()
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "tool", "content": "!"}]
    start = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
    said = [*tokenizer.encode("ho"), END]
    turn = TensorDict({"tokens": Tokens(full=torch.tensor([[*start, *said]]), batch_size=[1])}, [1])
    history = ChatHistory(prompt=History.from_chats([chat]), batch_size=[1])
    peer: Any = IncrementalTokenizer(tokenizer)
    following = peer._step(turn, TensorDict({"history": history}, [1]))
    assert following["tokens", "prompt"][0].tolist() == [*start, *said]
    options: dict[str, Any] = {"input_mode": "history", "generate": True, "max_new_tokens": 1}
    policy = CausalLMPolicy(tiny.model(tokenizer), tokenizer, prefer_tokens=True, **options)
    out: Any = policy(following)
    want = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert out[0]["tokens"].prompt.tolist() == want


def test_known_log_probs_are_given_for_any_token():
    """`LogProbDistribution.log_prob` ignores its argument there; here other tokens are an error."""
    scores, tokens = torch.tensor([[-1.0, -2.0]]), torch.tensor([[5, 6]])
    other = torch.tensor([[7, 8]])
    assert PeerLogProbDistribution(scores).log_prob(other).tolist() == scores.tolist()
    with pytest.raises(DataError, match="these are not the tokens that were scored"):
        LogProbDistribution(scores, tokens=tokens).log_prob(other)


# -- the loss ------------------------------------------------------------------------------------------------------


def padded_batch(tiny: Any, wrapper: TransformersWrapper, lengths: list[int], prompt: int) -> TensorDict:
    """Rows padded on the left with scores of the model, behaviour ones 0.3 below where the assistant speaks."""
    torch.manual_seed(0)
    width = max(lengths)
    real = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    said = real & (torch.arange(width) >= width - torch.tensor(lengths)[:, None] + prompt)
    td = TensorDict(batch_size=[len(lengths)])
    td["tokens", "full"] = torch.where(real, torch.randint(3, 200, real.shape), wrapper.tokenizer.pad_token_id)
    td["masks", "all_attention_mask"], td["masks", "all_assistant_mask"] = real, said
    with torch.no_grad():
        scores = wrapper(td.copy())["log_probs", "full"]
    td[FULL] = torch.where(said, scores, 0.0)
    td[REF] = torch.where(said, scores - 0.5, 0.0)
    td["advantage"] = said.float()[..., None]
    return td


@pytest.mark.parametrize(("lengths", "times"), [([8, 8], 2.0), ([8, 24], None)])
def test_the_kl_is_averaged_over_prompt_and_padding(tiny, lengths, times):
    """Prompt and padding count as tokens without KL there: twice too small with half a prompt, more with padding."""
    wrapper = wrap(tiny, pad_output=True)
    td = padded_batch(tiny, wrapper, lengths, 4)
    options: dict[str, Any] = {"kl_to_ref_coeff": 1.0, "entropy_bonus": False, "masking_strategy": "rlhf"}
    theirs = float(PeerGRPOLoss(wrapper, **options)(td.clone()).loss_kl_to_ref.detach())
    ours = float(GRPOLoss(wrapper, kl_estimator="k3", **options)(td.clone()).loss_kl_to_ref.detach())
    said = td["masks", "all_assistant_mask"]
    right = math.exp(-0.5) - 1 + 0.5
    assert ours == pytest.approx(right, rel=1e-4)
    diluted = said.numel() / int(said.sum())
    assert theirs == pytest.approx(right / diluted, rel=1e-3)
    assert diluted == pytest.approx(times or 2.0, rel=0.01)


def test_advantages_are_padded_on_the_other_side(tiny):
    """Ragged advantages are padded right and log-probs left there, so they belong to other tokens."""
    wrapper = wrap(tiny)
    rows, prompts = [[5, 6, 7, 8, 9, 10, 11, 12], [9, 10, 11]], [4, 1]
    scores = [tiny.naive(wrapper.model, row).nan_to_num(0).float() for row in rows]
    advantage = [(torch.arange(len(row)) >= p).float() for row, p in zip(rows, prompts, strict=True)]
    td = tiny.rows(rows, prompts, log_probs=scores, advantage=advantage)
    theirs_td = tiny.rows(rows, prompts, log_probs=scores, advantage=[a[:, None] for a in advantage])
    options: dict[str, Any] = {"entropy_bonus": False, "masking_strategy": "rlhf"}
    ours = float(GRPOLoss(wrapper, **options)(td).loss_objective.detach())
    theirs = float(PeerGRPOLoss(wrapper, **options)(theirs_td).loss_objective.detach())
    assert ours == pytest.approx(-1.0, abs=1e-4)  # every counted token has advantage 1 and ratio 1
    assert theirs > -0.9


def test_figures_are_averaged_over_prompt_and_padding(tiny):
    """The reported entropy is diluted there; here it is the mean over the assistant's tokens."""
    wrapper = wrap(tiny, pad_output=True)
    td = padded_batch(tiny, wrapper, [8, 8], 4)
    theirs: Any = PeerGRPOLoss(wrapper, masking_strategy="rlhf")(td.clone())
    ours: Any = GRPOLoss(wrapper, masking_strategy="rlhf")(td.clone())
    assert float(theirs.entropy) == pytest.approx(float(ours.entropy) / 2, rel=1e-3)


def test_clipped_tokens_of_cispo_have_no_gradient(tiny):
    """CISPO keeps every token's gradient, with a clipped weight; the stop-gradient is missing there."""
    wrapper = wrap(tiny, pad_output=True)
    td = padded_batch(tiny, wrapper, [8], 4)
    td[FULL] = torch.where(td["masks", "all_assistant_mask"], td[FULL] - 0.5, 0.0)  # every ratio is e^0.5
    model: Any = wrapper.model
    grads = []
    for loss in (peer_llm.CISPOLoss(wrapper, clip_epsilon=0.2), GRPOLoss(wrapper, objective="cispo", clip_epsilon=0.2)):
        model.zero_grad()
        out: Any = loss(td.clone())
        out.loss_objective.backward()
        grads.append(float(model.lm_head.weight.grad.norm()))
    assert grads[0] == pytest.approx(0.0, abs=1e-7)
    assert grads[1] > 1e-3
