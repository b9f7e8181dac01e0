from __future__ import annotations

import functools
import io
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.envs.transforms import Compose

from rlhf_pipeline import scratch_policy
from rlhf_pipeline.data import keys
from rlhf_pipeline.data.tensordicts import steps_of
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.interop.torchrl.kl_transforms import KLRewardTransform
from rlhf_pipeline.transforms.kl_controllers import AdaptiveKLController


class Table:
    """A scorer whose log-prob of a token is a function of the token alone."""

    def __init__(self):
        self.weight = torch.linspace(-3, -0.1, 50).requires_grad_()
        self.calls = 0

    def log_probs(self, input_ids, attention_mask, score_mask):
        """Look the tokens up."""
        self.calls += 1
        return torch.where(score_mask & attention_mask, self.weight[input_ids], 0.0)


def flat(td, key):
    """Values of a column, one trajectory after the other."""
    return steps_of(td)[key].values


def test_shaped_reward_against_a_hand_computed_reference(make_rows, to_form, form):
    """Per token: the task reward on the last assistant token, minus coef times k1 on every assistant token."""
    rows = make_rows([4, 6, 3], rewards=[1.0, -0.5, 2.0])
    out = KLRewardTransform(coef=0.3).inv(to_form(rows, form))
    reward, penalty, sums, counts = [], [], [], 0
    k1s, k2s, k3s = 0.0, 0.0, 0.0
    for row in rows:
        d = row["log_probs", "full"].double() - row["next", "ref_log_probs", "full"].double()
        k1 = torch.where(row["masks", "all_assistant_mask"], d, 0.0)
        r = -0.3 * k1
        r[-1] += row["task_reward"]
        reward.append(r)
        penalty.append(k1)
        sums.append(float(k1.sum()))
        scored = d[2:]
        counts += scored.numel()
        k1s, k2s = k1s + float(scored.sum()), k2s + float((scored**2 / 2).sum())
        k3s += float((torch.exp(-scored) - 1 + scored).sum())
    torch.testing.assert_close(flat(out, keys.REWARD).double(), torch.cat(reward), atol=1e-6, rtol=0)
    torch.testing.assert_close(flat(out, keys.KL_PENALTY).double(), torch.cat(penalty), atol=1e-6, rtol=0)
    assert flat(out, keys.KL_COEF).tolist() == pytest.approx([0.3] * 3)
    transform = KLRewardTransform(coef=0.3)
    transform.inv(to_form(rows, form))
    stats = transform.stats
    assert stats["k1"] == pytest.approx(k1s / counts, abs=1e-9)
    assert stats["k2"] == pytest.approx(k2s / counts, abs=1e-9)
    assert stats["k3"] == pytest.approx(k3s / counts, abs=1e-9)
    assert stats["kl"] == pytest.approx(math.fsum(sums) / 3, abs=1e-9)


def test_statistics_do_not_depend_on_padding(make_rows, to_form):
    """TorchRL averages over prompt and padding: 2.0x and 2.8x too small."""
    rows = make_rows([4, 20])
    transform = KLRewardTransform()
    transform.inv(to_form(rows, "padded"))
    padded = dict(transform.stats)
    transform.inv(to_form(rows, "stack"))
    assert transform.stats == pytest.approx(padded)
    assert transform.stats["tokens"] == 2 + 18


def test_last_assistant_token_gets_the_reward(make_rows, to_form, form):
    """Tokens of another role at the end carry nothing."""
    rows = make_rows([6], rewards=[1.0])
    rows[0]["masks", "all_assistant_mask"] = torch.tensor([False, False, True, True, False, False])
    out = KLRewardTransform(coef=0.0).inv(to_form(rows, form))
    assert flat(out, keys.REWARD).tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]


def test_log_probs_that_are_not_finite_have_no_penalty(make_rows, to_form, form):
    """The token and its share of the count leave the statistics."""
    rows = make_rows([5], rewards=[0.0])
    rows[0]["log_probs", "full"][3] = torch.nan
    transform = KLRewardTransform(coef=1.0)
    out = transform.inv(to_form(rows, form))
    assert bool(flat(out, keys.REWARD).isfinite().all())
    assert flat(out, keys.REWARD)[3] == 0
    assert transform.stats["tokens"] == 2


def test_tokens_of_others_have_no_penalty(make_rows, to_form, form):
    """Whoever samples may give log-probs of all tokens: those of the prompt, of tools and of the user do not count."""
    rows = make_rows([4, 6], rewards=[1.0, 0.0])
    masks = [[0, 0, 1, 1], [0, 1, 1, 0, 0, 1]]
    for row, mask in zip(rows, masks, strict=True):
        row["masks", "all_assistant_mask"] = torch.tensor(mask, dtype=torch.bool)
        row["log_probs", "full"] = torch.full((len(mask),), -0.25)
        row["next", "ref_log_probs", "full"] = torch.full((len(mask),), -0.75)
    transform = KLRewardTransform(coef=1.0)
    out = transform.inv(to_form(rows, form))
    assert flat(out, keys.KL_PENALTY).tolist() == [0.5 * one for mask in masks for one in mask]
    assert flat(out, keys.REWARD).tolist() == [0, 0, -0.5, 0.5, 0, -0.5, -0.5, 0, 0, -0.5]
    assert (transform.stats["tokens"], transform.stats["kl"]) == (5, 1.25)


@pytest.mark.parametrize("shape", ["per token", "trailing one", "scalar", "scalar one"])
def test_reward_as_input(make_rows, to_form, form, shape):
    """`("next", "reward")` may be per token or one per trajectory; it wins over `task_reward`."""
    rows = make_rows([4, 5], rewards=[100.0, 100.0])
    for row in rows:
        n = row["tokens", "full"].shape[0]
        base = torch.arange(n, dtype=torch.float32)
        row["next", "reward"] = {
            "per token": base,
            "trailing one": base[:, None],
            "scalar": torch.tensor(7.0),
            "scalar one": torch.tensor([7.0]),
        }[shape]
    out = KLRewardTransform(coef=0.0).inv(to_form(rows, form))
    expected = [0.0, 1, 2, 3, 0, 1, 2, 3, 4] if "scalar" not in shape else [0.0, 0, 0, 7, 0, 0, 0, 0, 7]
    assert flat(out, keys.REWARD).reshape(-1).tolist() == expected


def test_task_reward_is_kept_where_only_rewards_per_token_came(make_rows, to_form, form):
    """The sum before the penalty becomes `task_reward`, so the store can derive the shaped reward."""
    row = make_rows([4])[0].exclude("task_reward")
    row["next", "reward"] = torch.tensor([0.0, 0.0, 0.5, 1.0])
    out = KLRewardTransform(coef=0.1).inv(to_form([row], form))
    assert flat(out, keys.TASK_REWARD).tolist() == [1.5]


def test_own_model_is_used_only_where_needed(make_rows, to_form, form):
    """Stored reference log-probs are reused; otherwise the model scores the assistant tokens, without a graph."""
    rows = make_rows([4, 6], ref=False)
    model = Table()
    out = KLRewardTransform(model, coef=0.5).inv(to_form(rows, form))
    assert model.calls > 0
    mask = torch.cat([row["masks", "all_assistant_mask"] for row in rows])
    tokens = torch.cat([row["tokens", "full"] for row in rows])
    ref = flat(out, keys.REF_LOG_PROBS)
    assert torch.equal(ref[mask], model.weight.detach()[tokens[mask]])
    assert not ref.requires_grad
    assert not flat(out, keys.REWARD).requires_grad
    calls = model.calls
    KLRewardTransform(model).inv(to_form(make_rows([4]), form))
    assert model.calls == calls


def test_behaviour_log_probs_with_a_graph_lose_it(make_rows, to_form, form):
    """Nothing that is stored keeps an autograd graph."""
    rows = make_rows([4])
    rows[0]["log_probs", "full"] = rows[0]["log_probs", "full"].clone().requires_grad_()
    out = KLRewardTransform().inv(to_form(rows, form))
    assert not flat(out, keys.REWARD).requires_grad
    assert not flat(out, keys.KL_PENALTY).requires_grad


def test_never_applied_twice(make_rows, to_form, form):
    """A second pass, inverse or forward, changes nothing."""
    transform = KLRewardTransform(coef=0.5)
    once = transform.inv(to_form(make_rows([4, 5]), form))
    assert transform.inv(once) is once
    assert transform(once) is once


def test_forward_equals_inverse(make_rows, to_form, form):
    """The same numbers on a sampled batch."""
    td = to_form(make_rows([4, 5]), form)
    transform = KLRewardTransform(coef=0.5)
    expected = flat(transform.inv(td), keys.REWARD)
    assert torch.equal(flat(transform(td), keys.REWARD), expected)


def test_measuring_only(make_rows, to_form, form):
    """`add_to_reward=False` writes the penalty and leaves the reward out."""
    out = KLRewardTransform(coef=0.5, add_to_reward=False).inv(to_form(make_rows([4]), form))
    columns = steps_of(out)
    assert keys.REWARD not in columns
    assert keys.KL_PENALTY in columns
    assert columns[keys.KL_COEF].values.tolist() == [0.0]


def test_controller_gives_and_receives(make_rows, to_form, form):
    """The coefficient of a batch is the one before its update, and `kl_coef` records it."""
    controller = AdaptiveKLController(init_kl_coef=0.2, target=0.01, horizon=2)
    transform = KLRewardTransform(controller=controller)
    rows = make_rows([4, 5])
    for row in rows:
        row["next", "ref_log_probs", "full"] = row["log_probs", "full"] - 1.0  # k1 = 1 on every token
    out = transform.inv(to_form(rows, form))
    assert flat(out, keys.KL_COEF).tolist() == pytest.approx([0.2, 0.2])
    assert transform.coef == pytest.approx(0.2 * 1.2)
    assert transform.stats["kl"] == pytest.approx(2.5)
    transform(to_form(rows, form))
    assert transform.coef == pytest.approx(0.24)


def test_controller_state_travels_with_the_transform(make_rows, to_form):
    """Through `state_dict` and a file that `torch.load` reads with weights_only."""

    def build():
        return KLRewardTransform(controller=AdaptiveKLController(init_kl_coef=0.2, target=0.01, horizon=2))

    first, second = build(), build()
    first.inv(to_form(make_rows([4, 5]), "stack"))
    file = io.BytesIO()
    torch.save(Compose(first).state_dict(), file)
    file.seek(0)
    Compose(second).load_state_dict(torch.load(file, weights_only=True))
    assert second.coef == first.coef != 0.2


def test_state_dict_carries_no_model_weights():
    """A checkpoint of the buffer is not a checkpoint of the reference."""
    model = torch.nn.Linear(2, 2)
    model.log_probs = lambda *a: None
    assert list(KLRewardTransform(model).state_dict()) == ["coef", "_extra_state"]


def test_missing_inputs_are_named(make_rows, to_form):
    """Each message says what is missing and what to do."""
    rows = make_rows([4])
    with pytest.raises(DataError, match="RetrieveLogProb"):
        KLRewardTransform().inv(lazy_stack([rows[0].exclude(("log_probs", "full"))]))
    with pytest.raises(DataError, match="reference"):
        KLRewardTransform().inv(lazy_stack(make_rows([4], ref=False)))
    with pytest.raises(DataError, match="task_reward"):
        KLRewardTransform().inv(lazy_stack([rows[0].exclude("task_reward")]))
    row = rows[0].exclude("masks", "num_prompt_tokens")
    row["log_probs", "full"] = torch.zeros(4)
    with pytest.raises(DataError, match="all_assistant_mask"):
        KLRewardTransform().inv(lazy_stack([row]))


def test_none_passes_and_wrong_arguments():
    """None stays None; contradictions are refused."""
    assert KLRewardTransform().inv(None) is None
    with pytest.raises(DefinitionError, match="one of"):
        KLRewardTransform(Table(), actor=Table())
    with pytest.raises(DefinitionError, match="one reward key"):
        KLRewardTransform(in_keys=["reward", "other"])
    with pytest.raises(DefinitionError, match="log_probs"):
        KLRewardTransform(torch.nn.Linear(2, 2))


def test_keys_may_be_renamed(make_rows, to_form, form):
    """TorchRL's names relative to `next` and full keys both work."""
    transform = KLRewardTransform(coef=0.0, in_keys=["score"], out_keys=["shaped", "kl"])
    rows = make_rows([4])
    rows[0]["next", "score"] = torch.tensor(5.0)
    columns = steps_of(transform.inv(to_form(rows, form)))
    assert columns[("next", "shaped")].values.reshape(-1).tolist() == [0.0, 0.0, 0.0, 5.0]
    assert ("next", "kl") in columns


def test_single_trajectory(make_rows):
    """A TensorDict with an empty batch size is one trajectory."""
    out = KLRewardTransform(coef=0.0).inv(make_rows([4], rewards=[3.0])[0])
    assert out["next", "reward"].tolist() == [0.0, 0.0, 0.0, 3.0]


def test_on_a_sampled_batch_without_reference(make_rows, to_form):
    """As a forward transform it scores, shapes and leaves 0, not NaN, where nothing is scored."""
    td = to_form(make_rows([4, 6], ref=False, rewards=[1.0, 2.0]), "padded")
    out = KLRewardTransform(Table(), coef=0.5)(td)
    assert bool(out[keys.REF_LOG_PROBS].isfinite().all())
    assert bool((out[keys.REF_LOG_PROBS][:, :2] == 0).all())
    assert bool((out[keys.REWARD][0, 4:] == 0).all())


def flat_rows() -> list[TensorDict]:
    """Rows as TorchRL 0.8 has them: flat keys, and values per token of the response alone."""
    torch.manual_seed(0)
    rows = []
    for prompt, response in (([2, 3, 4], [5, 6]), ([2, 3], [5, 6, 7])):
        scores = -torch.rand(len(response)) - 1
        given = {"tokens": torch.tensor(prompt), "tokens_response": torch.tensor(response), "log_probs": scores}
        rows.append(TensorDict({**given, "next": {"reward": torch.ones(1)}}))
    return rows


@pytest.mark.parametrize("layout", ["stack", "padded", "jagged", "reference given"])
def test_flat_batches_of_an_older_version(layout):
    """`log_prob_key="log_probs"`: reward, penalty and reference of the response `[T, 1]`, as its document has them."""
    policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2)
    rows, want, kls = flat_rows(), [], []
    for row in rows:
        whole = torch.cat([row["tokens"], row["tokens_response"]])[None]
        ref = policy.log_probs(whole, torch.ones_like(whole).bool())[0, len(row["tokens"]) :].detach()
        kls.append(row["log_probs"] - ref)
        want.append(-0.5 * kls[-1] + (torch.arange(len(ref)) == len(ref) - 1))
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    td: Any = lazy_stack([row.clone() for row in rows])
    options: dict[str, Any] = {"ref_model": policy}
    if layout == "jagged":
        jagged = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
        per_token = {name: jagged([row[name] for row in rows]) for name in ("tokens", "tokens_response", "log_probs")}
        td = TensorDict({**per_token, ("next", "reward"): torch.ones(2, 1)}, [2])
    elif layout != "stack":
        scores = pad([row["log_probs"] for row in rows])
        td = TensorDict({"log_probs": scores, ("next", "reward"): torch.ones(2, 1)}, [2])
        td["tokens"], td["attention_mask"] = pad([row["tokens"] for row in rows]), torch.tensor([[1, 1, 1], [1, 1, 0]])
        td["tokens_response"] = pad([row["tokens_response"] for row in rows])
    if layout == "reference given":
        td = td.exclude("tokens", "tokens_response", "attention_mask")
        td["next", "ref_log_prob"] = scores - pad(kls)
        options = {"ref_log_prob_key": ("next", "ref_log_prob")}
    transform = KLRewardTransform(coef=0.5, log_prob_key="log_probs", **options)
    assert transform(td) is td
    for row, reward, kl in zip(td.unbind(0), want, kls, strict=True):
        torch.testing.assert_close(row["next", "reward"][: len(kl), 0], reward)
        torch.testing.assert_close(row["next", "kl_penalty"][: len(kl), 0], kl)
        assert not row["next", "reward"][len(kl) :].any()


def test_a_flat_row_by_itself_is_one_trajectory():
    """It gets what it gets in a batch."""
    policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2)
    transform, rows = KLRewardTransform(policy, coef=0.5, log_prob_key="log_probs"), flat_rows()
    batch: Any = transform(lazy_stack([row.clone() for row in rows]))
    for row, want in zip(rows, batch.unbind(0), strict=True):
        found = transform(row)
        for key in (keys.REWARD, keys.KL_PENALTY, keys.REF_LOG_PROBS):
            torch.testing.assert_close(found[key], want[key])


@pytest.mark.parametrize("given", [True, False], ids=["reference given", "scored"])
def test_a_flat_batch_whose_reward_is_not_shaped_keeps_it(given):
    """`add_to_reward=False` adds the penalty per token alone; a reference that the batch has is not written again."""
    policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2)
    rows = flat_rows()
    for row in rows:
        if given:
            row["next", "mine"] = row["log_probs"] - 0.25
    td: Any = lazy_stack(rows)
    options: dict[str, Any] = {"ref_log_prob_key": ("next", "mine")} if given else {}
    options["out_keys"] = [keys.REWARD, keys.KL_PENALTY, "scored"]
    KLRewardTransform(policy, coef=0.5, log_prob_key="log_probs", add_to_reward=False, **options)(td)
    for row in td.unbind(0):
        assert row["next", "reward"].tolist() == [1.0]
        assert row["next", "kl_penalty"].shape == (*row["tokens_response"].shape, 1)
        assert (("next", "scored") in row.keys(True)) is not given
        if given:
            assert row["next", "kl_penalty"].flatten().tolist() == pytest.approx([0.25] * len(row["log_probs"]))
