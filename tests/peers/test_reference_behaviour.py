"""The worked examples of the reference documents on TorchRL's class and on ours: every leaf, figure and error.

Where the two differ, docs/torchrl.md has a line with the reason, and each of its lines must be found here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl.data import RolloutFromModel as PeerRollout
from torchrl.data.llm import History, PromptData
from torchrl.envs import TransformedEnv, check_env_specs
from torchrl.envs.llm.transforms import kl as peer_kl
from torchrl.modules import ProbabilisticActor
from torchrl.modules.distributions import TanhNormal
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import common as peer_common
from torchrl.objectives.llm import DistillationLoss, SFTLoss
from torchrl.objectives.llm import GRPOLoss as PeerLoss
from torchrl.objectives.llm import MCAdvantage as PeerAdvantage
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_pipeline import (
    CausalLMPolicy,
    ChatHistory,
    GRPOLoss,
    KLRewardTransform,
    LogProbDistribution,
    LogProbs,
    Masks,
    MCAdvantage,
    RetrieveLogProb,
    RolloutFromModel,
    Text,
    Tokens,
)

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore"),  # of TorchRL's own classes
]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "torchrl.md"
HEADING = "### Where the worked examples differ"
CHATS = [
    [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello, how are you?"},
        {"role": "assistant", "content": "I'm doing well, thank you!"},
    ],
    [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What's the weather like?"},
        {"role": "assistant", "content": "I can't check the weather for you."},
    ],
]
Leaves = dict[str, Any]
"""What an example returned, by name: tensors, texts, numbers, or `error: TYPE`."""


# -------------------------------------------------------------------------------------------------- comparison


def leaves_of(td: TensorDictBase, prefix: str = "") -> Leaves:
    """Return every leaf of a TensorDict by its dotted name; ragged rows as a tuple, padded ones as a tensor."""
    leaves: Leaves = {}
    for key in td.keys(include_nested=True, leaves_only=True):
        name = prefix + ".".join((key,) if isinstance(key, str) else key)
        try:
            value: Any = td.get(key)
        except RuntimeError:  # ragged
            value = td.get(key, as_list=True)
        if isinstance(value, torch.Tensor) and not value.is_nested:
            leaves[name] = value.detach()
        elif isinstance(value, torch.Tensor):
            leaves[name] = tuple(row.detach() for row in value.unbind(0))
        elif isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            leaves[name] = tuple(row.detach() for row in value)
        else:
            leaves[name] = getattr(value, "data", value)
    return leaves


def differences(ours: Leaves, theirs: Leaves) -> dict[str, str]:
    """Return the leaves that differ, each with how: absent, shape, padding, value or error."""
    differing = {}
    for name in sorted({*ours, *theirs}):
        if name not in theirs or name not in ours:
            differing[name] = "only here" if name in ours else "only there"
        elif (kind := _difference(ours[name], theirs[name])) is not None:
            differing[name] = kind
    return differing


def _difference(a: Any, b: Any) -> str | None:
    if isinstance(a, tuple) and isinstance(b, tuple):
        kinds = [_difference(x, y) for x, y in zip(a, b, strict=False)]
        return "shape" if len(a) != len(b) else next((kind for kind in kinds if kind), None)
    if isinstance(a, frozenset) and isinstance(b, frozenset):
        return None if b <= a else "error"  # whoever catches theirs catches ours
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return None if type(a) is type(b) and a == b else "value"
    if a.shape != b.shape:
        return "shape"
    if a.dtype != b.dtype:
        return "dtype"
    return None if torch.allclose(a.double(), b.double(), atol=2e-5, rtol=1e-4, equal_nan=True) else "value"


def outcome(call: Callable[[], Leaves]) -> Leaves:
    """Return what a call returns, or the standard types of its error."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - every error of the peer is an outcome
        standard = {base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"}
        return {"error": frozenset(standard)}


def listed() -> dict[tuple[str, str], str]:
    """Return the differences that the page lists: how, by example and leaf."""
    section = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n#")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ((?:`[^`]+`(?:, )?)+) \| ([^|]+) \| ([^|]+\w[^|]*) \|", section, flags=re.M)
    return {(example, leaf): how.strip() for example, names, how, _ in rows for leaf in re.findall(r"`([^`]+)`", names)}


EXAMPLES: dict[str, Callable[[Any, bool], Leaves]] = {}


def example(function: Callable[[Any, bool], Leaves]) -> Callable[[Any, bool], Leaves]:
    """Register an example: `(tiny, ours) -> leaves`."""
    EXAMPLES[function.__name__] = function
    return function


# ---------------------------------------------------------------------------- document 000: KL and RetrieveLogProb


def scorer(tiny: Any, ours: bool, **options: Any) -> Any:
    """Return a policy of each side over the same weights."""
    tokenizer = tiny.tokenizer()
    model = tiny.model(tokenizer)
    if ours:
        options.pop("return_log_probs", None)
        return CausalLMPolicy(model, tokenizer, **options)
    return TransformersWrapper(model, tokenizer=tokenizer, **options)


def chat_batch() -> TensorDict:
    """The data of the document's example, in the keys of 0.14."""
    history = History.from_chats(CHATS)
    full = ChatHistory(full=history, prompt=history[:, :-1], response=history[:, -1:], batch_size=[2])
    td = TensorDict(
        {
            "history": full,
            "next": TensorDict(
                {"reward": torch.tensor([[0.5], [-1.0]]), "done": torch.zeros(2, 1, dtype=torch.bool), "history": full},
                [2],
            ),
        },
        [2],
    )
    return lazy_stack(list(td.unbind(0)))


@example
def retrieve_log_prob(tiny: Any, ours: bool) -> Leaves:
    """The example of RetrieveLogProb: the reference's log-probs of two conversations."""
    kind = RetrieveLogProb if ours else peer_kl.RetrieveLogProb
    transform = kind(
        scorer(tiny, ours, input_mode="history", generate=False, return_log_probs=True),
        assistant_only=True,
        tokenizer=tiny.tokenizer(),
    )
    data = transform(chat_batch())
    scores = data.get(("next", "ref_log_probs" if ours else "log_probs", "full"), as_list=True)
    keys = (".".join([key] if isinstance(key, str) else key) for key in data.keys(True, True))
    return {"the log-probs": tuple(row.detach() for row in scores), **dict.fromkeys(keys)}


@example
def retrieve_log_prob_errors(tiny: Any, ours: bool) -> Leaves:
    """An actor that generates, none, and one that returns no log-probs."""
    kind = RetrieveLogProb if ours else peer_kl.RetrieveLogProb
    history = {"input_mode": "history"}

    def made(**options: Any) -> Leaves:
        kind(scorer(tiny, ours, **history, **options))
        return {"error": None}

    return {
        "generating actor": outcome(lambda: made(generate=True))["error"],
        "no actor": outcome(lambda: {"error": kind() and None})["error"],
    }


@example
def kl_reward_errors(tiny: Any, ours: bool) -> Leaves:
    """KLRewardTransform with a reference that generates, and with too many keys."""
    kind: Any = KLRewardTransform if ours else peer_kl.KLRewardTransform

    def made(generate: bool, **options: Any) -> Leaves:
        kind(scorer(tiny, ours, input_mode="tokens", generate=generate), **options)
        return {"error": None}

    return {
        "generating actor": outcome(lambda: made(True))["error"],
        "two in_keys": outcome(lambda: made(False, in_keys=["a", "b"]))["error"],
        "five out_keys": outcome(lambda: made(False, out_keys=list("abcde")))["error"],
    }


@example
def sft_loss(tiny: Any, ours: bool) -> Leaves:
    """The end of the same example: TorchRL's SFTLoss, with our policy or theirs as its actor."""
    kind = RetrieveLogProb if ours else peer_kl.RetrieveLogProb
    reference = scorer(tiny, ours, input_mode="history", generate=False, return_log_probs=True)
    retrieve = kind(
        reference, assistant_only=True, tokenizer=tiny.tokenizer(), log_probs_full_key=("ref_log_probs", "full")
    )
    data = retrieve(chat_batch())
    loss = SFTLoss(
        actor_network=scorer(tiny, ours, input_mode="history", generate=False),
        tokenizer=tiny.tokenizer(),
        reduction="mean",
        normalize_by_seq_length=True,
        kl_to_ref_coeff=0.1,
    )
    return leaves_of(loss(data))


@example
def distillation_loss(tiny: Any, ours: bool) -> Leaves:
    """Of 0.14, and in no document: TorchRL's DistillationLoss, with our policy or theirs as student and as teacher."""
    kind = RetrieveLogProb if ours else peer_kl.RetrieveLogProb
    teacher = scorer(tiny, ours, input_mode="history", generate=False, return_log_probs=True)
    retrieve = kind(
        teacher, assistant_only=True, tokenizer=tiny.tokenizer(), log_probs_full_key=("teacher_log_probs", "full")
    )
    student = scorer(tiny, ours, input_mode="history", generate=False)
    with torch.no_grad():
        next(student.parameters()).mul_(1.1)
    return leaves_of(DistillationLoss(student, tokenizer=tiny.tokenizer())(retrieve(chat_batch())))


# ------------------------------------------------------------------------------------ document 001: any actor


def actor_for(env: Any) -> Any:
    """Return the document's actor."""
    torch.manual_seed(0)
    inputs, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    net = torch.nn.Sequential(torch.nn.Linear(inputs, 2 * actions), NormalParamExtractor())
    module = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(module, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True)


@example
def actor_kl_reward(tiny: Any, ours: bool) -> Leaves:
    """A rollout after the actor moved away from its copy. TorchRL 0.14 has no such class: the document's formula."""
    del tiny
    env = ContinuousActionVecMockEnv()
    actor = actor_for(env)
    frozen = actor_for(env)
    transform = KLRewardTransform(actor, out_keys="reward_kl") if ours else None
    made = TransformedEnv(env, transform) if ours else env
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.1)
        made.set_seed(0)
        torch.manual_seed(3)
        td = made.rollout(3, actor)
        if not ours:
            kl = td["action_log_prob"] - frozen.get_dist(td.clone(False)).log_prob(td["action"])
            td["next", "reward_kl"] = td["next", "reward"] + kl.view_as(td["next", "reward"])
            td["reward_kl"] = torch.cat([torch.zeros(1, 1), td["next", "reward_kl"][:-1]])
    leaves = leaves_of(td)
    if ours:
        check_env_specs(made)
    return {**leaves, "check_env_specs": "passes"}


# ------------------------------------------------------------------------------ document 002: wrappers, containers


def text_input() -> TensorDict:
    """Two texts of different lengths."""
    return TensorDict({"text": Text(full=["What is 1 + 1? 2", "Hi"], batch_size=[2])}, [2])


def token_input() -> TensorDictBase:
    """Two rows of ids of different lengths."""
    rows = [[5, 6, 7, 8, 9], [10, 11]]
    return lazy_stack([TensorDict({("tokens", "full"): torch.tensor(row)}) for row in rows])


def scored(tiny: Any, ours: bool, mode: str, pad: bool) -> Leaves:
    """Return the leaves that a scoring policy writes."""
    policy = scorer(tiny, ours, input_mode=mode, generate=False, pad_output=pad, return_log_probs=True)
    inputs = {"text": text_input, "history": chat_batch, "tokens": token_input}[mode]()
    if mode == "history":
        inputs = inputs.exclude("next")
    out = policy(inputs)
    return leaves_of(out.select("tokens", "masks", "log_probs", strict=False))


for _mode in ("text", "history", "tokens"):
    for _pad in (False, True):
        EXAMPLES[f"score_{_mode}{'_padded' if _pad else ''}"] = lambda tiny, ours, mode=_mode, pad=_pad: scored(
            tiny, ours, mode, pad
        )


def sampled(tiny: Any, ours: bool, mode: str, pad: bool) -> Leaves:
    """Return the leaves that a greedy policy writes."""
    policy = scorer(
        tiny,
        ours,
        input_mode=mode,
        generate=True,
        pad_output=pad,
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": 4, "do_sample": False},
    )
    if mode == "history":
        prompt = History.from_chats([chat[:2] for chat in CHATS])
        inputs = TensorDict({"history": ChatHistory(prompt=prompt, batch_size=[2])}, [2])
    elif mode == "text":
        inputs = TensorDict({"text": Text(prompt=["What is 1 + 1?", "Hi"], batch_size=[2])}, [2])
    else:
        rows = [[5, 6, 7, 8, 9], [10, 11]]
        inputs = lazy_stack([TensorDict({("tokens", "prompt"): torch.tensor(row)}) for row in rows])
    out = policy(inputs)
    leaves = leaves_of(out.select("tokens", "masks", "log_probs", strict=False))
    if mode == "history":
        leaves["history.response.role"] = str(out["history"].response.role)
        leaves["history.full.shape"] = tuple(out["history"].full.shape)
    return leaves


for _mode in ("text", "history", "tokens"):
    for _pad in (False, True):
        EXAMPLES[f"sample_{_mode}{'_padded' if _pad else ''}"] = lambda tiny, ours, mode=_mode, pad=_pad: sampled(
            tiny, ours, mode, pad
        )


@example
def wrapper_errors(tiny: Any, ours: bool) -> Leaves:
    """`get_dist` and `log_prob` of a policy that generates."""
    policy = scorer(tiny, ours, input_mode="tokens", generate=True)
    td = token_input()
    methods = ("get_dist", "_get_sft_dist", "_get_rlhf_dist", "_get_generic_dist", "log_prob")

    def call(name: str) -> Leaves:
        getattr(policy, name)(td.copy())
        return {"error": None}

    return {name: outcome(lambda name=name: call(name))["error"] for name in methods}


@example
def containers(tiny: Any, ours: bool) -> Leaves:
    """The specs of the five containers."""
    del tiny
    names = ("Tokens", "Masks", "ChatHistory", "LogProbs", "Text")
    here = dict(zip(names, (Tokens, Masks, ChatHistory, LogProbs, Text), strict=True))
    kinds: dict[str, Any] = here if ours else {name: getattr(peer_common, name) for name in names}
    return {name: sorted(map(str, kind.default_spec().keys())) for name, kind in kinds.items()}


@example
def log_prob_distribution(tiny: Any, ours: bool) -> Leaves:
    """Stored log-probs with a mask, a wrong shape, and what such a distribution cannot do."""
    del tiny
    kind: Any = LogProbDistribution if ours else peer_common.LogProbDistribution
    values, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[True, False]])
    dist = kind(values, mask)
    ids = torch.zeros(1, 2, dtype=torch.int64)

    def call(method: Callable[..., Any], *given: Any) -> Leaves:
        method(*given)
        return {"error": None}

    return {
        "log_prob": dist.log_prob(ids),
        "batch_shape": tuple(dist.batch_shape),
        "event_shape": tuple(dist.event_shape),
        "wrong shape": outcome(lambda: call(dist.log_prob, ids[:, :1]))["error"],
        "sample": outcome(lambda: call(dist.sample))["error"],
        "entropy": outcome(lambda: call(dist.entropy))["error"],
    }


# ------------------------------------------------------------------------------------- document 003: GRPO


def loss_batch(tiny: Any) -> TensorDictBase:
    """Two padded conversations of one turn with log-probs near the policy's, in the keys of 0.14."""
    policy = scorer(tiny, False, input_mode="history", generate=False, pad_output=True, return_log_probs=True)
    history = History.from_chats(CHATS)
    td = TensorDict({"history": ChatHistory(full=history, prompt=history[:, :-1], batch_size=[2])}, [2])
    td = policy(td)
    mask = td["masks", "all_assistant_mask"].bool()
    noise = 0.4 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(5))
    current = td["log_probs", "full"].detach()
    td["log_probs", "full"] = torch.where(mask, (current + noise).clamp(max=-1e-3), 0.0)
    td["next", "ref_log_probs", "full"] = torch.where(mask, (current - noise).clamp(max=-1e-3), 0.0)
    td["advantage"] = torch.tensor([1.0, -0.5])[:, None, None].expand(*mask.shape, 1).clone()
    return td


DOCUMENTED_FIGURES = (
    *("loss_objective", "clip_fraction", "kl_approx", "ESS", "entropy", "loss_entropy", "loss_kl_to_ref", "kl_to_ref"),
    *("loss_kl_to_inference", "kl_to_inference"),
)
"""The fields of the document's GRPOLossOutput."""


@example
def grpo_loss(tiny: Any, ours: bool) -> Leaves:
    """The loss and its logged figures on the same batch, with the document's arguments."""
    kind: Any = GRPOLoss if ours else PeerLoss
    more = {"padding_side": "left"} if ours else {}
    loss = kind(
        scorer(tiny, ours, input_mode="history", generate=False, pad_output=True, return_log_probs=True),
        clip_epsilon=0.2,
        entropy_bonus=True,
        entropy_coeff=0.01,
        kl_to_ref_coeff=0.1,
        kl_to_inference_coeff=0.2,
        masking_strategy="rlhf",
        **more,
    )
    td = loss_batch(tiny)
    if ours:
        loss.kl_estimator = "k3"
    return {name: value for name, value in leaves_of(loss(td)).items() if name in DOCUMENTED_FIGURES}


def trajectories() -> list[TensorDict]:
    """Six trajectories of one step each, of two prompts."""
    rewards = [1.0, 0.0, 0.5, 0.0, 2.0, 0.25]
    rows = []
    for number, reward in enumerate(rewards):
        td = TensorDict({("next", "reward"): torch.tensor([[reward]])}, [1])
        td["next", "done"] = torch.ones(1, 1, dtype=torch.bool)
        td["group_id"] = torch.tensor([number % 2])
        rows.append(td)
    return rows


@example
def mc_advantage(tiny: Any, ours: bool) -> Leaves:
    """Rewards normalised over the group; what is written when, and errors."""
    del tiny
    kind: Any = MCAdvantage if ours else PeerAdvantage
    transform = kind(3, prompt_key="group_id", trajectory_return=None)
    leaves: Leaves = {}
    for number, td in enumerate(trajectories()):
        out = transform.inv(td)
        leaves[f"written {number}"] = out is not None
        if out is not None:
            leaves |= leaves_of(out.select("advantage", ("next", "reward")), f"{number}.")

    def unfinished() -> Leaves:
        td = trajectories()[0]
        td["next", "done"] = torch.zeros(1, 1, dtype=torch.bool)
        kind(3, prompt_key="group_id").inv(td)
        return {"error": None}

    return {**leaves, "unfinished": outcome(unfinished)["error"]}


# ---------------------------------------------------------------------------- document 004: RolloutFromModel


class RewardModel(torch.nn.Module):
    """Rewards per token, and an end score that depends on the tokens, with the keywords of GPT2RewardModel."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = attention_mask.float()
        return mask, (input_ids * mask).sum(1) / mask.sum(1).clamp(min=1) / 1e4


@example
def rollout_from_model(tiny: Any, ours: bool) -> Leaves:
    """The example trains GPT-2: prompts of several lengths, five greedy steps, no early end."""
    del tiny
    config = GPT2Config(
        vocab_size=50257,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=64,
        initializer_range=0.6,
        bos_token_id=50256,
        eos_token_id=50256,
    )
    torch.manual_seed(0)
    model, reference = GPT2LMHeadModel(config).eval(), GPT2LMHeadModel(config).eval()
    lengths = torch.tensor([3, 5, 7, 2])
    ids = torch.full((4, 20), 50256)
    generator = torch.Generator().manual_seed(1)
    for i, length in enumerate(lengths.tolist()):
        ids[i, :length] = torch.randint(2, 4000, (length,), generator=generator)
    prompts = PromptData(
        input_ids=ids,
        attention_mask=(torch.arange(20) < lengths[:, None]).long(),
        prompt_rindex=lengths,
        batch_size=[4],
    )
    rollout = (RolloutFromModel if ours else PeerRollout)(
        model, reference, RewardModel(), max_new_tokens=5, kl_coef=0.3
    )
    theirs = PeerRollout(model, reference, RewardModel(), max_new_tokens=5, kl_coef=0.3)
    torch.manual_seed(5)
    generated = theirs.generate(prompts)  # sampled once: both lay out the same tokens
    td = rollout.create_rollout_td(prompts, *generated)
    scores = model(td["input_ids"][:, 2], attention_mask=td["attention_mask"][:, 2].long()).logits
    last = td["attention_mask"][:, 2].sum(1) - 1
    chosen = scores[torch.arange(4), last].log_softmax(-1).gather(1, td["action"][:, 2:3])
    return {**leaves_of(td), "GPT-2 on the returned keys": chosen.detach(), "names": list(td.names)}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_differs_only_where_the_page_lists_it(tiny, name):
    """Each leaf's value, shape, padding, figure and error; no line of the page is without its difference."""
    ours, theirs = (outcome(lambda side=side: EXAMPLES[name](tiny, side)) for side in (True, False))
    expected = {leaf: how for (example_name, leaf), how in listed().items() if example_name == name}
    assert differences(ours, theirs) == expected, (ours, theirs)


def test_every_line_of_the_page_is_of_an_example():
    """An example that was renamed leaves no line behind."""
    assert {name for name, _ in listed()} <= {*EXAMPLES}
    assert len(EXAMPLES) >= 22
