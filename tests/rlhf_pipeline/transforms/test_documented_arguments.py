"""Every argument and example that TorchRL's documents give for these transforms works, or is refused with a reason."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl.data.llm import History
from torchrl.modules import ProbabilisticActor, TanhNormal

from rlhf_pipeline import CausalLMPolicy, WritePath, scratch_policy
from rlhf_pipeline.data import keys
from rlhf_pipeline.data.tensordicts import steps_of
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.interop.torchrl.kl_transforms import KLRewardTransform
from rlhf_pipeline.policies.new_model import new_model
from rlhf_pipeline.transforms.kl_controllers import ConstantKLController
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage
from rlhf_pipeline.transforms.retrieve_log_prob import RetrieveLogProb

DOCUMENTED = {
    MCAdvantage: (
        "grpo_size prompt_key rewards_key advantage_key done_key verbose trajectory_return keep_return_bounds"
    ),
    RetrieveLogProb: (
        "actor model history_key log_prob_key log_probs_full_key assistant_only tokenizer_kwargs detach device "
        "tokenizer padding_side"
    ),
    KLRewardTransform: (
        "actor ref_model ref_model_factory coef in_keys out_keys log_prob_key action_key device add_to_reward "
        "assistant_only requires_grad tokenizer padding_side"
    ),
}
CHATS = [
    [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello, how are you?"},
        {"role": "assistant", "content": "I'm doing well, thank you!"},
    ],
    [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What's the weather like?"},
        {"role": "assistant", "content": "I can't check the weather for you, as I have no window."},
    ],
]


@pytest.fixture(scope="module")
def chat_policy(tmp_path_factory):
    """A tiny random chat model."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text("\n".join(m["content"] for chat in CHATS for m in chat))
    new_model(folder / "m", text_file=folder / "text.txt", vocab_size=300, hidden_size=32, num_layers=1, num_heads=2)
    return CausalLMPolicy.from_pretrained(folder / "m")


@pytest.fixture(scope="module")
def policy():
    """A tiny random model over the token ids of `make_rows`."""
    alphabet = "".join(chr(33 + i) for i in range(60))
    return scratch_policy(alphabet, hidden_size=16, num_layers=1, num_heads=2, seed=0)


@pytest.fixture
def normal_actor():
    """A probabilistic actor without tokens."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), NormalParamExtractor())
    inner = TensorDictModule(net, in_keys=["obs"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        inner, in_keys=["loc", "scale"], distribution_class=torch.distributions.Normal, return_log_prob=True
    )


@pytest.mark.parametrize("transform", DOCUMENTED, ids=lambda t: t.__name__)
def test_every_documented_argument_is_there(transform):
    """Under its documented name."""
    have = set(inspect.signature(transform.__init__).parameters)
    assert set(DOCUMENTED[transform].split()) <= have


@pytest.mark.parametrize("name", ["candidate_group_size", "candidate_selection_min_size", "candidate_selector"])
def test_a_choice_of_candidates_is_refused(name):
    """With what to do instead; None, which asks for nothing, is taken, and a slip is named."""
    with pytest.raises(DefinitionError, match=f"{name}: a group contains all trajectories"):
        MCAdvantage(2, **{name: 4})
    assert MCAdvantage(2, **{name: None}).grpo_size == 2
    with pytest.raises(DefinitionError, match="Did you mean 'keep_return_bounds'"):
        MCAdvantage(2, **{"keep_return_bound": (0.1, 0.9)})


def test_an_advantage_takes_the_settings_of_a_definition():
    """One object, equal to the same by keyword; keywords change single settings, which are checked."""
    declared = WritePath(estimator="rloo", zero_variance="mark", min_group_size=2, group_timeout_s=5)
    transform = MCAdvantage(4, settings=declared, clock=abs, keep_return_bounds=(0.0, float("inf")))
    spelled = MCAdvantage(
        4,
        estimator="rloo",
        zero_variance="mark",
        min_group_size=2,
        group_timeout_s=5,
        clock=abs,
        rewards=None,
        keep_return_bounds=(0, float("inf")),
    )
    assert transform.settings == spelled.settings
    assert (transform.grpo_size, transform.group_timeout_s, transform.settings.marks_groups) == (4, 5.0, True)
    assert MCAdvantage(4, settings=declared, zero_variance="drop").settings.drops_groups
    assert MCAdvantage(2, trajectory_return=None).settings.trajectory_return is None
    with pytest.raises(DefinitionError, match="min_group_size is 2; it must be between 1 and grpo_size"):
        MCAdvantage(1, settings=declared)
    with pytest.raises(DefinitionError, match="does not accept kl_coef: KLRewardTransform applies"):
        MCAdvantage(4, kl_coef=0.1)


# -- MCAdvantage ----------------------------------------------------------------------------------------------------


def test_group_advantage_by_position_and_with_other_keys():
    """`MCAdvantage(grpo_size, prompt_key, rewards_key, advantage_key, done_key, verbose)`, each under another name."""

    def trajectory(reward):
        return TensorDict(
            {"text": "why?", "gain": torch.tensor([[0.0], [reward]]), "over": torch.tensor([[False], [True]])},
            batch_size=[2],
        )

    transform = MCAdvantage(2, "text", "gain", "better", "over", False)
    assert transform.inv(trajectory(0.0)) is None
    out = transform.inv(trajectory(1.0))
    assert out["better"].reshape(-1).tolist() == pytest.approx([-0.7071068] * 2 + [0.7071068] * 2)
    assert out.get("advantage", None) is None


def test_verbose_reports_what_was_written(make_rows, caplog):
    """One line for the groups of a call; none by default."""
    with caplog.at_level(logging.INFO, logger="rlhf_pipeline"):
        MCAdvantage(2).inv(lazy_stack(make_rows([4, 5])))
        assert caplog.messages == []
        MCAdvantage(2, verbose=True).inv(lazy_stack(make_rows([4, 5, 6], rewards=[0.0, 3.0, 1.0])))
    assert caplog.messages == ["1 groups of 2 to 2 trajectories: mean return 1.5, 0 of them without spread"]


# -- KLRewardTransform, for language models ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out_keys", "expected"),
    [
        (None, ["reward", "kl_penalty"]),
        ("shaped", ["shaped", "kl_penalty"]),
        (["shaped"], ["shaped", "kl_penalty"]),
        (["shaped", "kl"], ["shaped", "kl"]),
        (["shaped", "kl", "reference"], ["shaped", "kl", "reference"]),
    ],
)
def test_out_keys(policy, make_rows, out_keys, expected):
    """One, two or three names, a plain one too; the document's defaults where they are left out."""
    transform = KLRewardTransform(policy, 0.5, "reward", out_keys)
    out = transform.inv(lazy_stack(make_rows([4, 6], ref=False)))
    for name in expected:
        assert ("next", name) in steps_of(out)


def test_the_penalty_is_the_documented_one(policy, make_rows):
    """`reward - coef * (log_prob - ref_log_prob)`; `coef` may be a tensor; `add_to_reward=False` only measures."""
    rows = make_rows([4, 6], ref=False, rewards=[1.0, 0.0])
    out = steps_of(KLRewardTransform(actor=policy, coef=torch.tensor(0.25)).inv(lazy_stack(rows)))
    mask = torch.cat([row["masks", "all_assistant_mask"] for row in rows])
    kl = torch.cat([row["log_probs", "full"] for row in rows]) - out[keys.REF_LOG_PROBS].values
    expected = torch.where(mask, -0.25 * kl, 0.0)
    expected[3] += 1.0
    torch.testing.assert_close(out[keys.REWARD].values, expected, atol=1e-6, rtol=0)
    measured = steps_of(KLRewardTransform(policy, add_to_reward=False).inv(lazy_stack(rows)))
    assert keys.REWARD not in measured
    torch.testing.assert_close(measured[keys.KL_PENALTY].values[mask], kl[mask], atol=1e-6, rtol=0)


def test_arguments_that_have_no_use_here(policy, make_rows):
    """`action_key` changes nothing, as the tokens are the actions; a gradient through the reference is refused."""
    rows = lazy_stack(make_rows([4, 6], ref=False))
    left = KLRewardTransform(policy, action_key="response").inv(rows)
    right = KLRewardTransform(policy).inv(rows)
    assert torch.equal(steps_of(left)[keys.REWARD].values, steps_of(right)[keys.REWARD].values)
    with pytest.raises(DefinitionError, match="kl_to_ref_coeff"):
        KLRewardTransform(policy, requires_grad=True)


def test_a_factory_and_a_device(policy, make_rows):
    """`ref_model_factory` makes the model, `device` places it."""
    transform = KLRewardTransform(ref_model_factory=lambda: policy, device="cpu")
    assert transform.device == torch.device("cpu")
    assert keys.REF_LOG_PROBS in steps_of(transform.inv(lazy_stack(make_rows([4], ref=False))))


# -- KLRewardTransform, for any actor ----------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_frozen_copy_follows_casts(normal_actor, requires_grad):
    """Its parameters are its own, and go along with `.double()`; they ask for gradients if they should."""
    transform = KLRewardTransform(normal_actor, requires_grad=requires_grad)
    transform.double()
    frozen, live = list(transform.parameters()), list(normal_actor.parameters())
    assert {p.dtype for p in frozen} == {torch.float64}
    assert {p.dtype for p in live} == {torch.float32}
    assert {p.requires_grad for p in frozen} == {requires_grad}


def test_tanh_normal_is_an_actor_too():
    """The document's distribution, on plain data."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
    actor: Any = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    td = actor(TensorDict(observation=torch.randn(5, 3), batch_size=[5]))
    td["next", "reward"] = torch.ones(5, 1)
    out = KLRewardTransform(actor, coef=0.1)(td)
    torch.testing.assert_close(out["next", "reward"], torch.ones(5, 1), atol=1e-6, rtol=0)


# -- RetrieveLogProb ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True], ids=["TensorDict", "lazy stack"])
def test_the_documented_chat_example(chat_policy, stacked):
    """Chat histories with TorchRL's template: ragged scores of the assistant's tokens, padded on request."""
    history = History.from_chats(CHATS)
    td: Any = TensorDict(
        history=history,
        next=TensorDict(reward=torch.randn(2, 1), done=torch.zeros(2, dtype=torch.bool), history=history),
        batch_size=(2,),
    )
    data = lazy_stack(list(td.unbind(0))) if stacked else td
    transform = RetrieveLogProb(
        actor=chat_policy,
        assistant_only=True,
        history_key="history",
        tokenizer_kwargs={"chat_template_name": "qwen", "padding": False, "return_tensors": "pt"},
        tokenizer=chat_policy.tokenizer,
        log_prob_key="ref_log_prob",
    )
    out = transform(data)
    scores = out.get(("next", "ref_log_prob"), as_padded_tensor=True)
    masks = out.get(("masks", "all_assistant_mask"), as_padded_tensor=True)
    tokens = out.get(("tokens", "full"), as_padded_tensor=True)
    assert scores.shape == masks.shape == tokens.shape
    for row, mask, ids in zip(scores, masks.bool(), tokens, strict=True):
        with torch.no_grad():
            logits = chat_policy.model(ids[None]).logits[0].double()
        naive = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(row[1:][mask[1:]].double(), naive[mask[1:]], atol=2e-6, rtol=0)
        assert bool((row[~mask] == 0).all())
        assert int(mask.sum()) > 3
    assert not scores.requires_grad


def test_text_and_token_inputs_agree(chat_policy):
    """The same strings as text and as token ids, all tokens but the first scored."""
    texts = ["Hello, how are you?", "weather"]
    ids = [torch.tensor(chat_policy.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    as_text = lazy_stack([TensorDict({"text": {"full": text}}) for text in texts])
    as_tokens = lazy_stack([TensorDict({"tokens": {"full": row}}) for row in ids])
    transform = RetrieveLogProb(chat_policy, assistant_only=False)
    left, right = (steps_of(transform.inv(td))[keys.REF_LOG_PROBS] for td in (as_text, as_tokens))
    assert left.lengths.tolist() == right.lengths.tolist() == [len(row) for row in ids]
    assert torch.equal(left.values.isfinite(), right.values.isfinite())
    torch.testing.assert_close(left.values, right.values, equal_nan=True)


def test_what_would_change_the_tokens_is_refused(chat_policy):
    """An option of the tokenizer that has no meaning here says so."""
    with pytest.raises(DefinitionError, match="add_generation_prompt"):
        RetrieveLogProb(chat_policy, tokenizer_kwargs={"add_generation_prompt": True})
    with pytest.raises(DefinitionError, match="chat_template_name"):
        RetrieveLogProb(chat_policy, tokenizer_kwargs={"chat_template_name": "no such template"})
    with pytest.raises(DefinitionError, match="tokenizer_kwargs has truncation=True"):
        RetrieveLogProb(chat_policy, tokenizer_kwargs={"truncation": True})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_on_another_device(make_rows, to_form, form, device):
    """The result is where the data is, and what the model gives on the data's own device."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    alphabet = "".join(chr(33 + i) for i in range(60))
    rows = make_rows([5, 19, 3, 40], ref=False)
    made = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "seed": 0}
    here, there = scratch_policy(alphabet, **made), scratch_policy(alphabet, **made)
    expected = steps_of(RetrieveLogProb(here).inv(to_form(rows, form)))[keys.REF_LOG_PROBS].values
    for transform in (RetrieveLogProb(there, device=device), KLRewardTransform(there, device=device)):
        found = steps_of(transform.inv(to_form(rows, form)))[keys.REF_LOG_PROBS].values
        assert found.device.type == "cpu"
        torch.testing.assert_close(found, expected, atol=1e-5 if device == "cuda" else 0, rtol=0, equal_nan=True)
    assert next(there.parameters()).device.type == device


# -- every form of a call that TorchRL documents ----------------------------------------------------------------------


def test_positions_of_the_language_model_form(policy, make_rows):
    """`KLRewardTransform(actor, coef, in_keys, out_keys, log_prob_key, action_key, device, add_to_reward)`."""
    td = lazy_stack(make_rows([4, 5], ref=False))
    transform = KLRewardTransform(policy, 0.5, None, None, ("log_probs", "full"), None, None, False)
    out = transform.inv(td)
    assert out[0].get(keys.KL_PENALTY).shape == (4,)
    assert out[0].get(keys.KL_COEF).item() == 0.0


def test_forms_of_the_general_form(normal_actor):
    """`(actor, coef, in_keys, out_keys, requires_grad)`, and `device`, where the copy runs."""
    transform = KLRewardTransform(normal_actor, 0.1, None, None, True, device="cpu")
    assert all(p.requires_grad for p in transform.frozen_actor.parameters())
    td = normal_actor(TensorDict(obs=torch.zeros(4, 3), batch_size=[4]))
    td["next", "reward"] = torch.ones(4, 1)
    assert transform(td)["next", "reward"].tolist() == [[1.0]] * 4
    with pytest.raises(DefinitionError, match="fifth argument of ActorKLRewardTransform is requires_grad"):
        KLRewardTransform(normal_actor, 0.1, None, None, "log_probs")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_ray_service": True}, "does not accept use_ray_service: the reference runs in the process"),
        ({"coeff": 0.1}, "Did you mean 'coef'"),
        (
            {"coef": ConstantKLController(kl_coef=0.1)},
            "coef is of type ConstantKLController; it must be a number. Pass a controller as controller=",
        ),
    ],
)
def test_what_is_not_taken_is_named(policy, normal_actor, options, message):
    """In one sentence, in both forms; what is switched off is no objection."""
    KLRewardTransform(policy, use_ray_service=False)
    for model in (policy, normal_actor):
        with pytest.raises(DefinitionError, match=message):
            KLRewardTransform(model, **options)


def test_a_controller_takes_the_coefficient_of_its_model():
    """`ConstantKLController(kl_coef=None, model=m)`, and the documented kind of error where the model has none."""

    class Model:
        kl_coef = 0.3

    assert ConstantKLController(model=Model()).coef == 0.3
    assert ConstantKLController(kl_coef=None, model=Model()).update() == 0.3
    with pytest.raises(DefinitionError, match="needs a coefficient"):
        ConstantKLController(kl_coef=None)
    with pytest.raises(AttributeError, match="kl_coef"):
        ConstantKLController(kl_coef=0.1, model=object())
