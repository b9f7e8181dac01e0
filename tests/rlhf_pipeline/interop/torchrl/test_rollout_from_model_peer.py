"""TorchRL 0.14.1's RolloutFromModel beside ours: equal where it is right, and each fault that ours has not."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.llm.prompt import PromptData
from torchrl.data.llm.utils import AdaptiveKLController as TorchRLAdaptive
from torchrl.data.llm.utils import RolloutFromModel as TorchRLRollout
from torchrl.modules.models.llm import GPT2RewardModel
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_pipeline.interop.torchrl.rollout_from_model import RolloutFromModel
from tests.rlhf_pipeline.interop.torchrl.test_rollout_from_model import EOS, Scripted, table

pytestmark = pytest.mark.peer


class Peer(TorchRLRollout):
    """TorchRL's class with its hard-coded EOS set to the scripted model's."""

    EOS_TOKEN_ID = EOS


def score(input_ids, attention_mask):
    """One point per attended token."""
    return attention_mask.float(), attention_mask.sum(1).float()


def prompts(rows):
    """A PromptData of equally long prompts."""
    ids = torch.tensor(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PromptData(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            prompt_rindex=torch.full((len(rows),), ids.shape[1]),
            batch_size=[len(rows)],
        )


def both(completions, steps, rows, eos=EOS, **kwargs):
    """(ours, TorchRL's) on the same script."""
    models = [Scripted(table(seed), completions, eos=eos, pad=EOS) for seed in (0, 1)]
    ours = RolloutFromModel(*models, score, max_new_tokens=steps, **kwargs)
    return ours, Peer(*models, score, max_new_tokens=steps, **kwargs)


def test_equal_where_torchrl_is_right():
    """No early stop: every leaf is TorchRL's; it pads with the EOS id."""
    data = prompts([[2, 3, 4], [5, 6, 7]])
    ours, theirs = both([[6, 5, 4], [7, 2, 3]], 3, data)
    mine, peer = ours.rollout_from_data(data), theirs.rollout_from_data(data)
    assert set(mine.keys(True, True)) == set(peer.keys(True, True))
    assert mine.names == peer.names
    for key in mine.keys(True, True):
        if key == ("next", "terminated"):  # documented as a copy of done; TorchRL leaves the limit out
            continue
        assert mine[key].dtype == peer[key].dtype, key
        torch.testing.assert_close(mine[key], peer[key], msg=str(key))


def test_early_stop_is_paid_twice_there():
    """Two completions of three end early: TorchRL's are done twice and paid twice."""
    data = prompts([[2, 3], [4, 5], [6, 7]])
    ours, theirs = both([[6, EOS], [EOS], [7, 7, 7, 7]], 4, data)
    mine, peer = ours.rollout_from_data(data), theirs.rollout_from_data(data)
    assert mine["next", "done"].sum((1, 2)).tolist() == [1, 1, 1]
    assert peer["next", "done"].sum((1, 2)).tolist() == [2, 2, 1]
    assert mine["next", "reward_raw"].sum((1, 2)).tolist() == [2.0, 1.0, 4.0]
    assert peer["next", "reward_raw"].sum((1, 2)).tolist() == [2.0, 0.0, 4.0]  # 1 twice, 0 twice: EOS is padding there


def test_nan_when_all_stop_early_there():
    """Scores are padded with -inf before the softmax there."""
    data = prompts([[2, 3], [4, 5]])
    ours, theirs = both([[6, EOS], [EOS]], 4, data)
    assert ours.rollout_from_data(data)["sample_log_prob"].isfinite().all()
    assert theirs.rollout_from_data(data)["sample_log_prob"].isnan().any()


def test_other_eos_there():
    """A model that ends at 5 and pads with 1: the real EOS is not an end for TorchRL, even without its 50256."""
    data = prompts([[2, 3], [4, 6]])
    ours, theirs = both([[6, 5], [7, 7, 7]], 3, data, eos=5)
    assert ours.rollout_from_data(data)["next", "done"].squeeze(-1).nonzero().tolist() == [[0, 1], [1, 2]]
    assert [0, 1] not in theirs.rollout_from_data(data)["next", "done"].squeeze(-1).nonzero().tolist()
    assert TorchRLRollout.EOS_TOKEN_ID == 50256


def test_step_scheduler_without_scheduler_there():
    """AttributeError there."""
    ours, theirs = both([[6]], 1, None)
    assert ours.step_scheduler() == 0.1
    with pytest.raises(AttributeError):
        theirs.step_scheduler()


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")  # np.clip of a tensor, in theirs
def test_torchrls_controller_becomes_a_float():
    """Its coefficient turns into a tensor; ours stays a float, and moves the way the controller means."""
    data = prompts([[2, 3], [4, 5]])
    ours, theirs = both([[6, 6], [7, 7]], 2, data, kl_coef=0.2)
    for rollout in (ours, theirs):
        rollout.kl_scheduler = TorchRLAdaptive(init_kl_coef=0.2, target=1e-4, horizon=10)
        td = rollout.rollout_from_data(data)
    total = -td["next", "reward_kl"].sum() / 0.2
    sign = 1 if total > 0 else -1
    assert ours.step_scheduler() == pytest.approx(0.2 * (1 + sign * 0.2 * 2 / 10))
    assert type(ours.kl_coef) is float
    theirs.step_scheduler()
    assert not isinstance(theirs.kl_coef, float)


def test_memory_there():
    """600 prompt tokens and 32 steps: TorchRL's leaves take over 50 times the memory of left-padded windows."""
    data = prompts([[2] * 600])
    ours, theirs = both([[6] * 32], 32, data)
    ours.padding_side = "left"

    def size(td: TensorDict) -> int:
        storages = [leaf.untyped_storage() for leaf in td.values(True, True)]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    assert size(theirs.rollout_from_data(data)) > 50 * size(ours.rollout_from_data(data))


def test_sampling_is_cut_to_fifty_tokens_there():
    """An open top_k means 50 in transformers, and dropout stays on: TorchRL's log-probs are not the model's."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=400, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=EOS
    )
    model = GPT2LMHeadModel(config).train()
    data = prompts([[2, 3, 4]] * 64)
    ours = RolloutFromModel(model, model, score, max_new_tokens=4)
    theirs = Peer(model, model, score, max_new_tokens=4)
    mine, (generated, log_probs, _) = ours.rollout_from_data(data), theirs.generate(data)
    with torch.no_grad():
        logits = model.eval()(input_ids=generated).logits
    true = RolloutFromModel.logprobs_of_labels(logits[:, 2:-1], generated[:, 3:])
    assert (log_probs.squeeze(-1) - true).abs().median() > 1.0
    whole = torch.cat((data.input_ids, mine["action"]), 1)
    with torch.no_grad():
        logits = model(input_ids=whole).logits
    true = RolloutFromModel.logprobs_of_labels(logits[:, 2:-1], whole[:, 3:])
    real = mine["next", "done"].squeeze(-1).flip(1).cumsum(1).flip(1).bool()
    assert (mine["sample_log_prob"].squeeze(-1) - true)[real].abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_gpt2_reward_model(tmp_path):
    """TorchRL's reward model scores our right-padded rows: its score of each row alone, less the prompt's."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=8, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=EOS
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    reward = GPT2RewardModel(tmp_path, pad_token_id=EOS)
    models = Scripted(table(0), [[6, 5, EOS], [7, 7, 7, 7]], pad=EOS), Scripted(table(1), [], pad=EOS)
    td = RolloutFromModel(*models, reward, max_new_tokens=4).rollout_from_data(prompts([[2, 3], [4, 5]]))
    reward.eval()

    def alone(row):
        ids = torch.tensor([row])
        with torch.no_grad():
            return float(reward(ids, torch.ones_like(ids))[1])

    expected = [alone([2, 3, 6, 5]) - alone([2, 3]), alone([4, 5, 7, 7, 7, 7]) - alone([4, 5])]
    assert td["next", "reward_raw"].sum((1, 2)).tolist() == pytest.approx(expected, abs=1e-5)
