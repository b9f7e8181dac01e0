"""Each class, argument, default, attribute and key of the reference documents is here, or in a table with a reason."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl.modules import ProbabilisticActor

import rlhf_pipeline
from rlhf_pipeline import KLRewardTransform, scratch_policy
from rlhf_pipeline.interop.torchrl import ActorKLRewardTransform
from tests.rlhf_pipeline.interop.torchrl.reference_documents import FOLDER, REQUIRED, Documented, classes, documents
from tests.rlhf_pipeline.interop.torchrl.test_rollout_from_model import EOS, batch, scripted

PAGE = Path(__file__).resolve().parents[4] / "docs" / "torchrl.md"
OLD = "torchrl_0.5_envs_transforms_rlhf.txt"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the reference documents are not beside the checkout")

DIFFERENT: dict[tuple[str, str], object] = {
    ("KLRewardTransform", "actor"): None,
    ("KLRewardTransform", "log_prob_key"): ("log_probs", "full"),
    ("RetrieveLogProb", "actor"): None,
    ("RetrieveLogProb", "log_prob_key"): None,
    ("RetrieveLogProb", "assistant_only"): True,
    ("LLMWrapperBase", "input_mode"): "tokens",
    ("LLMWrapperBase", "generate"): False,
    ("GRPOLoss", "clip_epsilon"): None,
    ("GRPOLoss", "gamma"): None,
    ("GRPOLoss", "clip_value"): None,
    ("MCAdvantage", "prompt_key"): None,
}
"""Arguments whose default is another one, ours beside them; docs/torchrl.md has the reason of each."""

NOT_HERE = {
    ("KLRewardTransform", "find_sample_log_prob"): "a function within the constructor",
}
"""Names that the reading of the documents finds and that are no part of a class."""


def policy() -> Any:
    """A policy that scores."""
    return scratch_policy("01=", hidden_size=16, num_layers=1, num_heads=2)


def actor() -> Any:
    """A probabilistic actor, as the older document has it."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
    module = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=torch.distributions.Normal, return_log_prob=True
    )


def made(documented: Documented) -> tuple[type, Any]:
    """Return our class of that name and an object of it."""
    if documented.name == "KLRewardTransform":
        old = documented.file == OLD
        return (ActorKLRewardTransform if old else KLRewardTransform), KLRewardTransform(actor() if old else policy())
    if documented.name == "LLMWrapperBase":
        return rlhf_pipeline.CausalLMPolicy, policy()
    kind = getattr(rlhf_pipeline, documented.name)
    arguments: dict[str, tuple[Any, ...]] = {
        "RetrieveLogProb": (policy(),),
        "GRPOLoss": (policy(),),
        "MCAdvantage": (2,),
        "LogProbDistribution": (torch.zeros(1, 2),),
        "GRPOLossOutput": tuple(torch.zeros(4)),
        "RolloutFromModel": (policy().model, policy().model, lambda *given: given),
    }
    return kind, kind(*arguments.get(documented.name, ()))


FOUND = [one for file in documents() for one in classes(file)]


def test_every_document_is_read():
    """Five documents, and the classes that their introduction names, with the arguments known to be there."""
    assert len(documents()) == 5
    assert [one.name for one in FOUND] == [
        *("KLRewardTransform", "KLRewardTransform", "RetrieveLogProb", "Tokens", "Masks", "ChatHistory", "LogProbs"),
        *("Text", "LogProbDistribution", "LLMWrapperBase", "GRPOLossOutput", "GRPOLoss", "MCAdvantage"),
        "RolloutFromModel",
    ]
    by_name = {one.name: one for one in FOUND}
    assert by_name["KLRewardTransform"].buffers == {"coef"}
    assert {"functional_actor", "frozen_params", "sample_log_prob_key", "DEFAULT_IN_KEYS"} <= FOUND[0].attributes
    assert by_name["MCAdvantage"].arguments["prompt_key"] == "text"
    assert by_name["GRPOLoss"].arguments["*clip_epsilon"] == 0.2
    assert by_name["RolloutFromModel"].keys >= {"action", "sample_log_prob", "reward_kl", "reward_raw"}
    assert sum(len(one.arguments) + len(one.attributes) + len(one.keys) for one in FOUND) > 130


@pytest.mark.parametrize("documented", FOUND, ids=lambda one: f"{one.file[8:11]}-{one.name}")
def test_names_and_defaults(documented):
    """Arguments of the constructor by name, place and default; attributes, buffers, methods and their arguments."""
    kind, ours = made(documented)
    signature = inspect.signature(kind.__init__).parameters
    places = [name for name, one in signature.items() if name != "self" and one.kind is not one.KEYWORD_ONLY]
    place = 0
    for name, default in documented.arguments.items():
        plain, keyword_only = name.lstrip("*"), name.startswith("*")
        if (documented.name, plain) in DIFFERENT:
            given = signature.get(plain)
            assert DIFFERENT[documented.name, plain] == (None if given is None else given.default), plain
            assert re.search(rf"`{documented.name}\([^)`]*\b{plain}=", PAGE.read_text(encoding="utf-8")), plain
        else:
            found = signature[plain].default
            assert (REQUIRED if found is inspect.Parameter.empty else found) == default, plain
            assert keyword_only or places[place] == plain, plain
        place += not keyword_only
    for name in documented.attributes:
        assert hasattr(kind, name) or hasattr(ours, name), name
    assert documented.buffers <= {name for name, _ in getattr(ours, "named_buffers", dict)()}
    for method, arguments in documented.methods.items():
        if (documented.name, method) in NOT_HERE or isinstance(inspect.getattr_static(kind, method), property):
            continue
        taken = inspect.signature(getattr(kind, method)).parameters
        assert [name for name in taken if name not in ("self", "cls")][: len(arguments)] == list(arguments), method
        for name, default in arguments.items():
            found = taken[name].default
            assert (REQUIRED if found is inspect.Parameter.empty else found) == default, (method, name)


@pytest.mark.parametrize("documented", FOUND, ids=lambda one: f"{one.file[8:11]}-{one.name}")
def test_every_argument_is_taken(documented):
    """Each by its name, with the document's default."""
    kind, ours = made(documented)
    given = {name.lstrip("*"): value for name, value in documented.arguments.items() if value is not REQUIRED}
    required = {
        "actor": lambda: ours.actor,
        "model": lambda: ours.model,
        "ref_model": lambda: ours.ref_model,
        "reward_model": lambda: ours.reward_model,
        "grpo_size": lambda: 2,
        "log_probs": lambda: torch.zeros(1, 2),
    }
    if documented.name == "GRPOLossOutput":
        return  # its fields are checked as attributes
    given |= {name: required[name]() for name, value in documented.arguments.items() if value is REQUIRED}
    assert isinstance(kind(**given), kind)


def test_the_keys_of_a_rollout():
    """Every key that the printed rollout has, in it and in `next`."""
    (documented,) = (one for one in FOUND if one.name == "RolloutFromModel")
    td = scripted([[6, EOS]], 3).rollout_from_data(batch([[2, 3]]))
    assert documented.keys <= {*td.keys(), *td["next"].keys()}
    assert {"reward", "reward_raw", "reward_kl", "done"} <= set(td["next"].keys()) & documented.keys


@pytest.mark.parametrize(
    ("name", "default", "ours"),
    [("sample_log_prob", "log_probs", ("log_probs", "full")), ("action", "tokens_response", ("tokens", "full"))],
)
def test_the_keys_of_the_loss(name, default, ours):
    """The document's are changed ones of ours, as the page says; `set_keys` takes them."""
    text = (FOLDER / "torchrl_0.8_objectives_llm_grpo.txt").read_text(encoding="utf-8")
    assert f'{name}="{default}"' in text
    loss = rlhf_pipeline.GRPOLoss(policy())
    assert getattr(loss.tensor_keys, name) == ours
    assert f'`set_keys({name}="{default}")`' in PAGE.read_text(encoding="utf-8")
    loss.set_keys(**{name: default})
    assert default in loss.in_keys


def test_what_the_loss_is_asked_for():
    """The clip, and the actor's parameters, which are those that are trained."""
    actor_network = policy()
    loss = rlhf_pipeline.GRPOLoss(actor_network, clip_epsilon=0.1)
    assert float(loss.clip_epsilon) == pytest.approx(0.1)
    assert rlhf_pipeline.GRPOLoss(actor_network, clip_epsilon=(0.1, 0.3)).clip_epsilon.tolist() == pytest.approx(
        [0.1, 0.3]
    )
    live = dict(actor_network.named_parameters())
    held = loss.actor_network_params.flatten_keys(".")
    assert {held[name].data_ptr() for name in live} == {value.data_ptr() for value in live.values()}
    assert not [name for name, _ in loss.named_parameters() if not name.startswith("actor_network.")]
    assert loss.critic_network is None


def test_the_frozen_parameters_fit_the_functional_actor():
    """As the older document uses them: put into the stateless copy, they give the actor's distribution."""
    live = actor()
    transform: Any = KLRewardTransform(live)
    td = live(rlhf_td())
    with transform.frozen_params.to_module(transform.functional_actor):
        frozen = transform.functional_actor.get_dist(td.copy())
    torch.testing.assert_close(frozen.log_prob(td["action"]), live.get_dist(td.copy()).log_prob(td["action"]))
    assert not any(value.requires_grad for value in transform.frozen_params.values(True, True))
    assert transform.actor is live


def rlhf_td() -> Any:
    """Observations of the actor."""
    return TensorDict(observation=torch.randn(4, 3), batch_size=[4])


def test_the_coefficient_is_a_buffer():
    """It moves and is saved as one; the controller decides it, whoever sets it."""
    transform = KLRewardTransform(coef=torch.tensor(0.25))
    assert torch.equal(dict(transform.named_buffers())["coef"], torch.tensor(0.25))
    transform.coef = 0.5
    assert (float(transform.coef), transform.controller.coef) == (0.5, 0.5)
    other = KLRewardTransform(coef=0.1).double()
    other.load_state_dict(transform.state_dict())
    assert (other.coef, other.controller.coef, other.coef.dtype) == (0.5, 0.5, torch.float64)


def test_a_distribution_takes_every_argument_by_place():
    """`get_dist` and the masks under it, with arguments of a caller that knows more than they need."""
    scorer = policy()
    td = rlhf_tokens()
    want = scorer.get_dist(td).log_prob(td["tokens", "full"])
    found = scorer.get_dist(td, None, "logits", None, True, None, 0.0, "left", None, unknown=1)
    torch.testing.assert_close(found.log_prob(td["tokens", "full"]), want)
    mask = ("masks", "all_assistant_mask")
    said = scorer.get_rlhf_dist(td).log_prob(td["tokens", "full"])
    for one in (
        scorer._get_dist_with_assistant_mask(td, mask, "logits", "left", unknown=1),
        scorer._get_dist_with_prompt_mask(td, ("tokens", "prompt"), "logits", mask, None, "left", unknown=1),
        scorer._get_dist_with_custom_mask(td, td["masks", "all_assistant_mask"], "logits", "left", unknown=1),
    ):
        torch.testing.assert_close(one.log_prob(td["tokens", "full"]), said)
    whole = scorer._get_dist_with_attention_mask(td, ("masks", "all_attention_mask"), "logits", "left", unknown=1)
    torch.testing.assert_close(whole.log_prob(td["tokens", "full"]), want)


def rlhf_tokens() -> Any:
    """Two rows of tokens, the last two sampled."""
    td = TensorDict(batch_size=[2])
    td["tokens", "full"] = torch.tensor([[2, 3, 4, 2], [3, 3, 2, 4]])
    td["masks", "all_attention_mask"] = torch.ones(2, 4, dtype=torch.bool)
    td["masks", "all_assistant_mask"] = torch.tensor([[False, False, True, True]] * 2)
    return td
