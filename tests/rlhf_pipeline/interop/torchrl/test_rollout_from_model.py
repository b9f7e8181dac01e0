from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.interop.torchrl.rollout_from_model import RolloutFromModel
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.transforms.kl_controllers import AdaptiveKLController, ConstantKLController

EOS, PAD = 1, 0
KEYS = {
    "action", "input_ids", "attention_mask", "sample_log_prob", ("next", "input_ids"), ("next", "attention_mask"),
    ("next", "terminated"), ("next", "done"), ("next", "reward"), ("next", "reward_raw"), ("next", "reward_kl"),
}  # fmt: skip


class Scripted(nn.Module):
    """Says what it is told, and has the bigram logits of a table, which `generate` gives as transformers does."""

    device = torch.device("cpu")

    def __init__(self, table, completions, *, eos=EOS, pad=PAD):
        super().__init__()
        self.table = nn.Parameter(table)
        self.completions = completions
        self.generation_config = SimpleNamespace(eos_token_id=eos, pad_token_id=pad)
        self.pad = pad
        self.seen = None

    def generate(self, input_ids, attention_mask, generation_config):
        self.seen = (input_ids, attention_mask, generation_config, self.training)
        longest = max(len(row) for row in self.completions)
        new = torch.tensor([row + [self.pad] * (longest - len(row)) for row in self.completions])
        sequences = torch.cat((input_ids, new), 1)
        scores = self.table[sequences[:, input_ids.shape[1] - 1 : -1]]
        return SimpleNamespace(sequences=sequences, scores=tuple(scores.unbind(1)))

    def forward(self, input_ids, attention_mask, **_):
        return SimpleNamespace(logits=self.table[input_ids])


def table(seed=0, vocab=8):
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def batch(rows, width=None, side="right", pad=PAD):
    """A batch of prompts of these tokens."""
    width = width or max(map(len, rows))
    gaps = [[pad] * (width - len(row)) for row in rows]
    ids = [row + gap if side == "right" else gap + row for row, gap in zip(rows, gaps, strict=True)]
    mask = [
        [1] * len(row) + [0] * len(gap) if side == "right" else [0] * len(gap) + [1] * len(row)
        for row, gap in zip(rows, gaps, strict=True)
    ]
    rindex = [len(row) if side == "right" else width for row in rows]
    return TensorDict({"input_ids": ids, "attention_mask": mask, "prompt_rindex": rindex}, batch_size=[len(rows)])


def count_score(input_ids, attention_mask):
    """(rewards, end scores): half a point per real token."""
    return attention_mask.float(), attention_mask.sum(1) * 0.5


def scripted(completions, steps, *, eos=EOS, pad=PAD, **kwargs):
    """A rollout whose completions are known."""
    model = Scripted(table(0), completions, eos=eos, pad=pad)
    reference = Scripted(table(1), completions, eos=eos, pad=pad)
    return RolloutFromModel(model, reference, kwargs.pop("reward", count_score), max_new_tokens=steps, **kwargs)


def test_keys_shapes_and_numbers_by_hand():
    """Two prompts, one early stop, one at the limit: everything beside a loop in float64."""
    prompts, completions, coef, steps = [[2, 3, 4], [5]], [[6, EOS], [7, 2, 3, 4]], 0.25, 4
    rollout = scripted(completions, steps, kl_coef=coef)
    data = batch(prompts)
    td = rollout.rollout_from_data(data)
    assert set(td.keys(True, True)) == KEYS
    assert td.batch_size == (2, 4)
    assert td.names == [None, "time"]
    ours, theirs = table(0).double().log_softmax(-1), table(1).double().log_softmax(-1)
    for b, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        total = 0.0
        for i in range(steps):
            step, before = td[b, i], prompt + completion[:i]
            after = prompt + completion[: i + 1]
            assert step["input_ids"][step["attention_mask"]].tolist() == before
            assert step["next", "input_ids"][step["next", "attention_mask"]].tolist() == after
            assert (step["input_ids"][~step["attention_mask"]] == PAD).all()
            over = i >= len(completion)
            last = i == len(completion) - 1
            token = PAD if over else completion[i]
            kl = 0.0 if over else float(ours[before[-1], token] - theirs[before[-1], token])
            raw = 0.5 * len(completion) if last else 0.0  # the batch holds prompts only: score less the prompt's score
            assert step["action"].item() == token
            assert step["sample_log_prob"].item() == pytest.approx(0.0 if over else float(ours[before[-1], token]))
            assert step["next", "done"].item() is last
            assert step["next", "terminated"].item() is last
            assert step["next", "reward_raw"].item() == pytest.approx(raw)
            assert step["next", "reward_kl"].item() == pytest.approx(-coef * kl, abs=1e-6)
            assert step["next", "reward"].item() == pytest.approx(raw - coef * kl, abs=1e-6)
            total += raw
        assert td[b]["next", "reward_raw"].sum().item() == total


def test_dtypes_and_shapes():
    """As documented: a trailing 1 on numbers per step, P + T columns on prefixes."""
    td = scripted([[6, EOS]], 5).rollout_from_data(batch([[2, 3]], width=3))
    one, wide = (1, 5, 1), (1, 5, 8)
    assert {key: (tuple(td[key].shape), td[key].dtype) for key in KEYS} == {
        "action": ((1, 5), torch.int64),
        "input_ids": (wide, torch.int64),
        "attention_mask": (wide, torch.bool),
        "sample_log_prob": (one, torch.float32),
        ("next", "input_ids"): (wide, torch.int64),
        ("next", "attention_mask"): (wide, torch.bool),
        ("next", "done"): (one, torch.bool),
        ("next", "terminated"): (one, torch.bool),
        ("next", "reward"): (one, torch.float32),
        ("next", "reward_raw"): (one, torch.float32),
        ("next", "reward_kl"): (one, torch.float32),
    }


def test_all_stop_early_without_nan():
    """Every completion ends after two tokens of six: nothing is NaN, the score is paid once, nothing follows."""
    td = scripted([[6, EOS], [EOS]], 6).rollout_from_data(batch([[2], [3]]))
    for key in KEYS:
        assert td[key].double().isfinite().all(), key
    assert td["next", "done"].squeeze(-1).nonzero().tolist() == [[0, 1], [1, 0]]
    assert td["next", "reward_raw"].squeeze(-1).sum(1).tolist() == [1.0, 0.5]
    assert not td["next", "reward"][0, 2:].any()
    assert not td["sample_log_prob"][1, 1:].any()


@pytest.mark.parametrize("eos", [7, [1, 7], [7, 5]])
def test_any_eos(eos):
    """One id or several, from the model's generation config."""
    rollout = scripted([[3, 7], [3, 4, 4, 4]], 4, eos=eos)
    td = rollout.rollout_from_data(batch([[2], [2]]))
    assert 7 in rollout.eos_token_ids
    assert td["next", "done"].squeeze(-1).nonzero().tolist() == [[0, 1], [1, 3]]


def test_padding_equal_to_eos():
    """The EOS that ends a completion and one in the prompt are tokens; padding with the same id is not."""
    rollout = scripted([[6, EOS], [6, 5, 4, EOS]], 4, pad=EOS)
    data = batch([[2, EOS, 3], [4]], pad=EOS)
    generated, log_probs, _ = rollout.generate(data)
    assert generated.tolist() == [[2, 1, 3, 6, 1, 1, 1], [4, 6, 5, 4, 1, 1, 1]]
    ours = table(0).log_softmax(-1)
    torch.testing.assert_close(log_probs[0, :, 0], torch.stack((ours[3, 6], ours[6, 1], *torch.zeros(2))))
    td = rollout.rollout_from_data(data)
    assert td["attention_mask"].sum(-1).tolist() == [[3, 4, 5, 5], [1, 2, 3, 4]]
    assert td["next", "attention_mask"].sum(-1).tolist() == [[4, 5, 5, 5], [2, 3, 4, 5]]
    assert td["next", "done"].squeeze(-1).nonzero().tolist() == [[0, 1], [1, 3]]  # the second at the limit, once
    assert td["next", "reward_raw"].squeeze(-1).sum(1).tolist() == [1.0, 2.0]


def test_label_is_hidden_and_is_the_baseline():
    """The policy sees the prompt only; the score counts from that of the whole row."""
    rollout = scripted([[6, 6, EOS]], 3)
    data = TensorDict(
        {"input_ids": [[2, 3, 5, 5, 5]], "attention_mask": [[1, 1, 1, 1, 0]], "prompt_rindex": [2]}, batch_size=[1]
    )
    td = rollout.rollout_from_data(data)
    assert rollout.model.seen[0].tolist() == [[2, 3]]
    assert td["next", "input_ids"][0, -1].tolist() == [2, 3, 6, 6, 1, 0, 0, 0]
    assert td["next", "reward_raw"].sum() == 0.5 * 5 - 0.5 * 4


def test_scores_are_clipped():
    """Ten tokens at half a point are worth no more than the limit, in either direction."""
    td = scripted([[6] * 10], 10, score_clip=2.0).rollout_from_data(batch([[2]]))
    assert td["next", "reward_raw"].sum() == 2.0
    worse = scripted([[6] * 10], 10, score_clip=2.0, reward=lambda ids, mask: -mask.sum(1).float())
    assert worse.rollout_from_data(batch([[2]]))["next", "reward_raw"].sum() == -2.0


def test_prompts_padded_on_either_side():
    """Padding before a prompt changes no token, mask count, log-prob or reward, which may see absolute positions."""

    def by_place(ids, mask):
        return (ids * mask * torch.arange(ids.shape[1])).sum(1) / 8

    right, left = (
        scripted([[6, EOS], [7, 7, 7]], 3, reward=by_place).rollout_from_data(batch([[2, 3, 4], [5]], side=side))
        for side in ("right", "left")
    )
    assert right["next", "reward_raw"].sum((1, 2)).tolist() == [(3 * 6 + 4 * 1) / 8, (1 * 7 + 2 * 7 + 3 * 7) / 8]
    for key in KEYS:
        torch.testing.assert_close(left[key], right[key])


def reward_module():
    """A TensorDictModule, as TorchRL documents."""
    return TensorDictModule(count_score_module(), ["input_ids", "attention_mask"], ["rewards", "end_scores"])


def count_score_module():
    """A module with a parameter, dropout and the keywords of GPT2RewardModel."""

    class Reward(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.dropout = nn.Dropout(0.9)

        def forward(self, input_ids, attention_mask):
            score = self.dropout(attention_mask.float()) * self.scale
            return score, score.sum(1, keepdim=True)

    return Reward()


@pytest.mark.parametrize("reward", [reward_module(), count_score_module(), lambda a, b: b.sum(1) * 0.5])
def test_kinds_of_reward_models(reward):
    """A module, a TensorDictModule and a bare callable of end scores; dropout is off while they run, and back after."""
    td = scripted([[6, EOS], [6, 6]], 2, reward=reward).rollout_from_data(batch([[2], [3]]))
    assert td["next", "reward_raw"].squeeze(-1).tolist() == [[0.0, 1.0], [0.0, 1.0]]
    assert not td["next", "reward"].requires_grad
    assert getattr(reward, "training", True)


def test_bad_scores_are_refused():
    """One NaN would poison the whole batch's advantages; one score for two rows would be broadcast."""
    data = batch([[2], [3]])
    with pytest.raises(DataError, match=r"nan for row 1"):
        scripted([[6], [6]], 1, reward=lambda a, b: torch.tensor([0.0, float("nan")])).rollout_from_data(data)
    with pytest.raises(DataError, match="2 rows"):
        scripted([[6], [6]], 1, reward=lambda a, b: torch.zeros(1)).rollout_from_data(data)


# Memory


def test_left_padded_prefixes_are_views_of_two_buffers():
    """Four leaves share two storages of P + 2 T columns, and slices of them copy nothing."""
    prompt, steps = 40, 16
    td = scripted([[6] * steps] * 3, steps, padding_side="left").rollout_from_data(batch([[2] * prompt] * 3))
    for name, size in (("input_ids", 8), ("attention_mask", 1)):
        storage = td[name].untyped_storage()
        assert storage.data_ptr() == td["next", name].untyped_storage().data_ptr()
        assert storage.nbytes() == 3 * (prompt + 2 * steps) * size
        assert td[1:, :4][name].untyped_storage().data_ptr() == storage.data_ptr()


def test_prefixes_are_padded_on_the_right():
    """Each step has its tokens first; here and under `next` are one buffer of T + 1 prefixes."""
    td = scripted([[6, EOS], [7, 5, 4]], 3).rollout_from_data(batch([[2, 3], [5]]))
    assert td["input_ids"][1].tolist() == [[5, PAD, PAD, PAD, PAD], [5, 7, PAD, PAD, PAD], [5, 7, 5, PAD, PAD]]
    assert td["next", "attention_mask"].sum(-1).tolist() == [[3, 4, 4], [2, 3, 4]]
    assert td["input_ids"].untyped_storage().nbytes() == 2 * 4 * 5 * 8
    assert td["input_ids"].untyped_storage().data_ptr() == td["next", "input_ids"].untyped_storage().data_ptr()
    with pytest.raises(DefinitionError, match="padding_side"):
        scripted([[6, EOS]], 3, padding_side="middle")


def test_mini_batches_of_the_left_padded_layout():
    """Picked steps are ordinary tensors; `pad_right` gives the prefix first and padding after it."""
    td = scripted([[6, EOS], [7, 5, 4]], 3, padding_side="left").rollout_from_data(batch([[2, 3], [5]]))
    picked = td[torch.tensor([0, 1, 1]), torch.tensor([2, 0, 2])]
    assert picked["input_ids"].untyped_storage().nbytes() == 3 * 5 * 8
    right = RolloutFromModel.pad_right(picked, pad_token_id=9)
    assert right["input_ids"].tolist() == [[2, 3, 6, 1, 9], [5, 9, 9, 9, 9], [5, 7, 5, 9, 9]]
    assert right["attention_mask"].sum(1).tolist() == [4, 1, 3]
    assert right["next", "input_ids"].tolist() == [[2, 3, 6, 1, 9], [5, 7, 9, 9, 9], [5, 7, 5, 4, 9]]
    assert picked["input_ids"][1].tolist() == [0, 0, 0, 0, 5]


# The KL coefficient


def test_step_scheduler_without_a_scheduler():
    """The coefficient stays; TorchRL raises AttributeError."""
    rollout = scripted([[6]], 1, kl_coef=0.3)
    rollout.rollout_from_data(batch([[2]]))
    assert rollout.step_scheduler() == 0.3
    assert rollout.kl_coef == 0.3


def test_adaptive_scheduler_by_hand():
    """It gets the KL of each trajectory in nats, neither negated nor scaled, and forgets it after the step."""
    ours, theirs = table(0).double().log_softmax(-1), table(1).double().log_softmax(-1)
    d = ours - theirs
    kls = [float(d[4, 5] + d[5, 5]), float(d[6, 2] + d[2, 7])]  # 8.38 and 4.38
    rollout = scripted([[5, 5], [2, 7]], 2, kl_coef=0.2)
    seen = []

    class Watched(AdaptiveKLController):
        def update(self, kl_values=None):
            seen.append(list(kl_values))
            return super().update(kl_values)

    rollout.kl_scheduler = Watched(init_kl_coef=0.2, target=sum(kls) / 2 / 1.1, horizon=4)
    rollout.rollout_from_data(batch([[4], [6]]))
    assert rollout.step_scheduler() == pytest.approx(0.2 * (1 + 0.1 * 2 / 4), abs=1e-7)
    assert seen[0] == pytest.approx(kls, abs=1e-5)
    assert type(rollout.kl_coef) is float
    rollout.step_scheduler()
    assert len(seen) == 1


def test_num_steps_keeps_the_last_rollouts():
    """Two rollouts of three are left when num_steps is 2."""
    seen = []
    controller = ConstantKLController(kl_coef=0.2)
    controller.update = lambda values=None: seen.extend(values) or 0.2
    rollout = scripted([[6], [7]], 1, kl_scheduler=controller, num_steps=2)
    for _ in range(3):
        rollout.rollout_from_data(batch([[2], [3]]))
    rollout.step_scheduler()
    assert len(seen) == 4


def test_a_controller_may_hold_the_rollout():
    """`model=rollout` sets its coefficient, as TorchRL's controllers do; a tensor becomes a float."""
    rollout = scripted([[6]], 1)
    rollout.kl_scheduler = ConstantKLController(kl_coef=0.7, model=rollout)
    assert rollout.kl_coef == 0.7
    rollout.kl_coef = torch.tensor(0.5)
    assert type(rollout.kl_coef) is float


# Real models


def llama(seed=0, **more):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=61, bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD, **sizes, **more)
    return _strong(LlamaForCausalLM(config))


def gpt2(seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=EOS
    )
    return _strong(GPT2LMHeadModel(config))  # with its dropout of 0.1


def bloom(seed=0):
    """A model that `CausalLMPolicy` refuses (ALiBi), so its logits are used; with two ends."""
    torch.manual_seed(seed)
    config = BloomConfig(
        vocab_size=61, hidden_size=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=[EOS, 2], pad_token_id=EOS
    )
    return _strong(BloomForCausalLM(config))


def _strong(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model.train()


def forced(model, row, start, temperature):
    """Teacher forcing of one row without padding, in float64: log-probs of the tokens from `start` on."""
    other = type(model)(model.config).double().eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        scores = (other(input_ids=torch.tensor([row])).logits[0] / temperature).log_softmax(-1)
    return scores[start - 1 : -1].gather(1, torch.tensor(row[start:])[:, None])[:, 0]


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_model_scores_the_prefixes_as_they_are(make):
    """The keys that are returned are all that GPT-2 needs: no positions, and the log-probs are the stored ones."""
    model = make(0)
    td = RolloutFromModel(model, make(1), count_score, max_new_tokens=5).rollout_from_data(batch([[5, 6, 7], [8]]))
    picked = td[td["next", "done"].squeeze(-1).flip(1).cumsum(1).flip(1).bool()]
    with torch.no_grad():
        logits = model.eval()(picked["input_ids"], attention_mask=picked["attention_mask"].long()).logits
    last = logits[torch.arange(len(picked)), picked["attention_mask"].sum(1) - 1]
    scores = RolloutFromModel.logprobs_of_labels(last, picked["action"])
    torch.testing.assert_close(scores, picked["sample_log_prob"].squeeze(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_last_column_predicts_the_action(make):
    """On the left, each step is what the model takes to sample it: its last column gives the stored log-prob."""
    model = make(0)
    rollout = RolloutFromModel(model, make(1), count_score, max_new_tokens=5, padding_side="left")
    td = rollout.rollout_from_data(batch([[5, 6, 7], [8]]))
    steps = td["next", "done"].squeeze(-1).flip(1).cumsum(1).flip(1).bool()  # up to the end of each trajectory
    picked = td[steps]
    mask = picked["attention_mask"].long()
    with torch.no_grad():
        logits = model.eval()(
            input_ids=picked["input_ids"], attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        ).logits[:, -1]
    scores = RolloutFromModel.logprobs_of_labels(logits, picked["action"])
    torch.testing.assert_close(scores, picked["sample_log_prob"].squeeze(-1), atol=1e-5, rtol=0)


def test_a_checkpoints_sampling_habits_are_off():
    """top_k=1 in the model's generation config leaves sampling free; min_p, which no call can undo, is refused."""
    model = llama()
    model.generation_config.top_k = 1
    rollout = RolloutFromModel(model, model, count_score, max_new_tokens=2)
    torch.manual_seed(0)
    assert len(set(rollout.rollout_from_data(batch([[5, 6]] * 64))["action"][:, 0].tolist())) > 1
    model.generation_config.min_p = 0.5
    with pytest.raises(DefinitionError, match=r"min_p=0\.5"):
        rollout.rollout_from_data(batch([[5, 6]]))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("make", "as_policy"), [(llama, False), (llama, True), (gpt2, False), (gpt2, True), (bloom, False)]
)
def test_log_probs_equal_teacher_forcing(make, as_policy, temperature):
    """Within 1e-5 of a float64 pass over each row alone, at the sampling temperature, model and reference alike."""
    model, reference = make(0), make(1)
    model.generation_config.temperature = temperature
    model.generation_config.top_k = 3  # a checkpoint's habit that must not shape the rollout
    actor = TokenPolicy(model, temperature=temperature) if as_policy else model
    prompts = [[5, 6, 7, 8, 9], [10], [11, 12, 13]] * 4
    rollout = RolloutFromModel(actor, reference, count_score, kl_coef=0.5, max_new_tokens=12)
    torch.manual_seed(3)
    td = rollout.rollout_from_data(batch(prompts, width=7))
    assert td["next", "done"].sum((1, 2)).tolist() == [1] * len(prompts)
    lengths = td["next", "done"].squeeze(-1).long().argmax(1) + 1
    for b, prompt in enumerate(prompts):
        n = int(lengths[b])
        row = prompt + td["action"][b, :n].tolist()
        ours = forced(model, row, len(prompt), temperature)
        kl = ours - forced(reference, row, len(prompt), temperature)
        assert (td["sample_log_prob"][b, :n, 0] - ours).abs().max() < 1e-5
        assert (td["next", "reward_kl"][b, :n, 0] + 0.5 * kl).abs().max() < 1e-5
    assert model.training is not as_policy  # a plain model gets its mode back; a policy keeps its own in eval
    assert reference.training


def test_a_model_against_itself_has_no_kl():
    """Model and reference are scored the same way, so equal weights give exactly 0."""
    model = llama()
    td = RolloutFromModel(model, model, count_score, max_new_tokens=6).rollout_from_data(batch([[5, 6], [7]]))
    assert not td["next", "reward_kl"].any()
    assert torch.equal(td["next", "reward"], td["next", "reward_raw"])


@pytest.mark.parametrize("as_policy", [False, True])
def test_seeded_and_greedy(as_policy):
    """The global seed repeats a rollout; do_sample=False takes the likeliest, scored at temperature 1."""
    model = llama()
    actor = TokenPolicy(model, temperature=0.5) if as_policy else model
    rollout = RolloutFromModel(actor, llama(1), count_score, max_new_tokens=8)
    data = batch([[5, 6], [7]])
    torch.manual_seed(5)
    first = rollout.rollout_from_data(data)["action"]
    torch.manual_seed(5)
    assert torch.equal(rollout.rollout_from_data(data)["action"], first)
    generated, log_probs, _ = rollout.generate(data, GenerationConfig(do_sample=False))
    row = generated[1, : int((log_probs[1] != 0).sum()) + 1].tolist()
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([row])).logits[0, :-1]
    assert logits.argmax(-1).tolist() == row[1:]
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(log_probs[1, : len(expected), 0], expected, atol=1e-5, rtol=0)


def test_logprobs_of_labels():
    """Float32 from bfloat16 logits, and right under a large offset."""
    logits = (torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)) + 100).bfloat16()
    labels = torch.tensor([[0, 1, 2], [4, 3, 0]])
    out = RolloutFromModel.logprobs_of_labels(logits, labels)
    expected = logits.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=0)


# Refusals


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 0}, {"score_clip": 0.0}, {"num_steps": 0}, {"kl_coef": -0.1}])
def test_wrong_arguments(wrong):
    """The message names the argument."""
    with pytest.raises(DefinitionError, match=next(iter(wrong))):
        RolloutFromModel(*[llama()] * 2, count_score, **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 5},
        {"top_p": 0.9},
        {"repetition_penalty": 1.2},
        {"min_new_tokens": 2},
        {"max_new_tokens": 3},
        {"eos_token_id": 9},
    ],
)
def test_generation_configs_that_log_probs_would_not_know_of(wrong):
    """Refused by name, before anything is generated."""
    rollout = RolloutFromModel(*[llama()] * 2, count_score, max_new_tokens=4)
    with pytest.raises(DefinitionError, match="end tokens of" if "eos_token_id" in wrong else next(iter(wrong))):
        rollout.generate(batch([[5]]), GenerationConfig(do_sample=True, **wrong))


def test_wrong_batches():
    """No prompt, no field, or no room in the model's positions."""
    rollout = RolloutFromModel(*[llama(max_position_embeddings=8)] * 2, count_score, max_new_tokens=4)
    empty = batch([[5], [5]])
    empty["prompt_rindex"] = torch.tensor([1, 0])
    with pytest.raises(DataError, match="row 1"):
        rollout.generate(empty)
    with pytest.raises(DataError, match="prompt_rindex"):
        rollout.generate(empty.exclude("prompt_rindex"))
    with pytest.raises(DataError, match="8 positions"):
        rollout.generate(batch([[5] * 5]))
    data = batch([[5]])
    with pytest.raises(DataError, match="generated must have shape"):
        rollout.create_rollout_td(data, torch.zeros(1, 3), torch.zeros(1, 4, 1), torch.zeros(1, 4))


def test_generation_that_stops_for_no_reason():
    """A model that stops at a token nobody named would be taken for a full completion."""
    with pytest.raises(DataError, match="eos_token_id"):
        scripted([[6, 7]], 4).generate(batch([[2]]))


def test_a_plain_model_samples_at_the_temperature_of_its_scores():
    """Near temperature 0 sampling takes the likeliest; the config of the call goes before that of the model."""
    model, data = llama(), batch([[5, 6]] * 16)
    rollout = RolloutFromModel(model, model, count_score, max_new_tokens=1)
    likeliest = rollout.generate(data, GenerationConfig(do_sample=False))[0]
    assert not torch.equal(rollout.generate(data)[0], likeliest)
    model.generation_config.temperature = 1e-3
    assert torch.equal(rollout.generate(data)[0], likeliest)
    assert not torch.equal(rollout.generate(data, GenerationConfig(temperature=1.0))[0], likeliest)


def test_what_follows_the_end_is_padding():
    """Whatever a model writes after a row's EOS while others go on, it is neither returned nor paid for."""
    rollout = scripted([[6, EOS, 5, 5], [6, 6, 6, 6]], 4)
    generated, log_probs, log_ratio = rollout.generate(batch([[2], [3]]))
    assert generated[0].tolist() == [2, 6, EOS, PAD, PAD]
    assert not log_probs[0, 2:].any()
    assert not log_ratio[0, 2:].any()
