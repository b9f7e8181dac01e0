"""TorchRL's wrappers in the place of a policy: the same weights give the right numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import nn
from torchrl.modules.llm import TransformersWrapper
from transformers import Qwen2ForCausalLM

from rlhf_pipeline import (
    CausalLMPolicy,
    Collect,
    Collector,
    CopyDigits,
    GRPOLoss,
    KLRewardTransform,
    LogProbs,
    MCAdvantage,
    RetrieveLogProb,
    RolloutFromModel,
    Tokens,
    TrajectoryReplayBuffer,
    token_match,
)
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.interop.torchrl.wrappers import EnginePolicy, as_policy, is_torchrl_wrapper

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated:UserWarning"),
]
REF = ("next", "ref_log_probs", "full")
ROWS = [[5, 6, 7, 8, 258], [9, 258, 258], [3, 4, 5, 6, 7, 8, 9, 10]]
PROMPTS = [2, 1, 7]  # the second completion holds the end token twice, the third has one token


def wrapped(tiny: Any, *, pad: str = "<|im_end|>", seed: int = 0, **options: Any) -> TransformersWrapper:
    """A wrapper whose padding token is the end token, as TorchRL's examples set it."""
    tokenizer = tiny.tokenizer(pad=pad)
    options = {"input_mode": "tokens", "generate": False, **options}
    return TransformersWrapper(tiny.model(tokenizer, seed=seed), tokenizer=tokenizer, **options)


class Engine:
    """A stand-in for `vLLMWrapper`: its model is no module, and the log-prob of a first token is NaN."""

    input_mode, pad_output, num_samples, inplace, return_log_probs = "tokens", False, None, None, True
    tokens_key, masks_key, log_probs_key, text_key, history_key = "tokens", "masks", "log_probs", "text", "history"

    def __init__(self, model: Any, tokenizer: Any, generate: bool, generate_kwargs: Any = None, drops: Any = None):
        self.model = SimpleNamespace(inner=model, generation_config=model.generation_config)
        self.tokenizer, self.generate, self.drops = tokenizer, generate, drops
        self.generate_kwargs = generate_kwargs or {}

    def get_new_version(self, *, generate: bool, generate_kwargs: Any, **_: Any) -> Engine:
        return Engine(self.model.inner, self.tokenizer, generate, generate_kwargs, self.drops)

    def __call__(self, tensordict: Any) -> Any:
        one = (lambda row: self._sample(row["tokens"].prompt)) if self.generate else self._score
        return lazy_stack([one(row) for row in tensordict.unbind(0)])

    @torch.no_grad()
    def _score(self, row: Any) -> TensorDict:
        ids = row["tokens"].full
        ids = ids[ids != self.drops] if self.drops is not None else ids
        found = torch.log_softmax(self.model.inner(input_ids=ids[None]).logits[0, :-1], -1)
        scores = torch.cat((torch.full((1,), torch.nan), found.gather(1, ids[1:, None])[:, 0]))
        return TensorDict({"log_probs": LogProbs(full=scores)})

    @torch.no_grad()
    def _sample(self, prompt: torch.Tensor) -> TensorDict:
        ids, scores = prompt.tolist(), []
        while len(scores) < self.generate_kwargs["max_new_tokens"] and (not scores or ids[-1] != 258):
            found = torch.log_softmax(self.model.inner(input_ids=torch.tensor([ids])).logits[0, -1], -1)
            ids.append(int(torch.multinomial(found.exp(), 1)))
            scores.append(found[ids[-1]])
        response = torch.tensor(ids[len(prompt) :])
        return TensorDict({"tokens": Tokens(response=response), "log_probs": LogProbs(response=torch.stack(scores))})


def engine(tiny: Any, **options: Any) -> Engine:
    """An engine over the weights of `wrapped`, with a padding token of its own."""
    tokenizer = tiny.tokenizer()
    return Engine(tiny.model(tokenizer), tokenizer, **{"generate": False, **options})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_retrieve_log_prob_equals_a_naive_loop(tiny, temperature):
    """Padding equal to the end token, one-token completions, any temperature: all right, no graph."""
    wrapper = wrapped(tiny, generate_kwargs={"temperature": temperature})
    out: Any = RetrieveLogProb(wrapper).inv(tiny.rows(ROWS, PROMPTS))
    for row, ids, prompt in zip(out.unbind(0), ROWS, PROMPTS, strict=True):
        got, want = row[REF], tiny.naive(wrapper.model, ids, temperature)
        assert not got.requires_grad
        assert got[:prompt].isnan().all()
        torch.testing.assert_close(got[prompt:].double(), want[prompt:], rtol=0, atol=2e-6)


def test_packed_scoring_is_put_right(tiny):
    """`pad_model_input=False` is wrong in TorchRL; here it changes nothing."""
    padded, packed = wrapped(tiny), wrapped(tiny, pad_model_input=False)
    rows = tiny.rows(ROWS, PROMPTS)
    one, two = RetrieveLogProb(padded).inv(rows), RetrieveLogProb(packed).inv(rows)
    for a, b in zip(one.unbind(0), two.unbind(0), strict=True):
        torch.testing.assert_close(a[REF], b[REF], equal_nan=True)


def test_as_a_reference_of_the_kl_penalty(tiny):
    """It is taken as a token model, not as an actor of the general form."""
    wrapper = wrapped(tiny)
    lp = [torch.zeros(len(row)) for row in ROWS]
    transform = KLRewardTransform(wrapper, coef=0.5)
    assert type(transform) is KLRewardTransform
    out: Any = transform.inv(tiny.rows(ROWS, PROMPTS, log_probs=lp, task_reward=[torch.tensor(1.0)] * 3))
    for row, ids, prompt in zip(out.unbind(0), ROWS, PROMPTS, strict=True):
        want = 0.5 * tiny.naive(wrapper.model, ids)[prompt:]
        want[-1] += 1.0
        torch.testing.assert_close(row["next", "reward"][prompt:].double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_as_the_actor_of_the_loss(tiny, temperature):
    """The loss is that of a CausalLMPolicy at the wrapper's temperature, gradient and all."""
    wrapper = wrapped(tiny, generate_kwargs={"temperature": temperature})
    policy = CausalLMPolicy(wrapper.model, temperature=temperature)
    lp = [tiny.naive(wrapper.model, row, temperature).nan_to_num(0).float() for row in ROWS]
    advantage = [torch.full((len(row),), a) for row, a in zip(ROWS, (1.0, -1.0, 0.5), strict=True)]
    td = tiny.rows(ROWS, PROMPTS, log_probs=lp, advantage=advantage)
    found = []
    for actor in (wrapper, policy):
        wrapper.model.zero_grad()
        out: Any = GRPOLoss(actor)(td)
        out.total_loss().backward()
        found.append((out.loss_objective.item(), out.kl_approx.item(), wrapper.model.lm_head.weight.grad.clone()))
    assert abs(found[0][1]) < 1e-5  # on-policy: the ratio is 1
    assert found[0][0] == pytest.approx(found[1][0])
    torch.testing.assert_close(found[0][2], found[1][2])


def test_as_the_policy_of_the_collector(tiny, tmp_path):
    """What is stored are the sampler's tokens, the end token among them, with right log-probs at every one."""
    wrapper = wrapped(tiny, generate=True, generate_kwargs={"do_sample": True, "max_new_tokens": 6})
    with torch.no_grad():
        wrapper.model.lm_head.weight[258] *= 3
    buffer = TrajectoryReplayBuffer(storage=str(tmp_path / "store"), transform=MCAdvantage(4))
    config = Collect(prompts_per_rollout=4, group_size=4, max_new_tokens=6, temperature=0.7)
    prompts = CopyDigits(num_digits=2)
    collector = Collector(policy=wrapper, prompts=prompts, reward=token_match, buffer=buffer, config=config, seed=0)
    assert collector.collect(0, policy_version=0).num_trajectories == 16
    rows = buffer.store.read(buffer.store.ids(), ["input_ids", "log_probs", "assistant_mask", "finish_reason"])
    ended = 0
    for ids, lp, said, why in zip(*rows.values(), strict=True):
        want = tiny.naive(wrapper.model, ids.astype("int64"), 0.7)
        torch.testing.assert_close(torch.tensor(lp[said]).double(), want[torch.tensor(said)], rtol=0, atol=5e-6)
        assert (why == "stop") == (ids[-1] == 258)
        ended += why == "stop"
    assert ended
    buffer.trajectories.close()


def test_in_a_rollout_with_one_step_per_token(tiny):
    """RolloutFromModel takes it as the policy and as the reference."""
    wrapper = wrapped(tiny, generate=True, generate_kwargs={"do_sample": True, "temperature": 0.8})
    rollout = RolloutFromModel(wrapper, wrapped(tiny), lambda ids, mask: mask.sum(1).float(), max_new_tokens=3)
    prompts = TensorDict({"input_ids": torch.tensor([[5, 6], [7, 8]]), "prompt_rindex": torch.tensor([2, 2])}, [2])
    prompts["attention_mask"] = torch.ones(2, 2, dtype=torch.bool)
    td = rollout.rollout_from_data(prompts)
    for row in range(2):
        ids = [*prompts["input_ids"][row].tolist(), *td["action"][row].tolist()]
        length = int(td["next", "done"][row].flatten().nonzero()[0]) + 1
        want = tiny.naive(wrapper.model, ids[: 2 + length], 0.8)[2:]
        got = td["sample_log_prob"][row, :length, 0].double()
        torch.testing.assert_close(got, want, rtol=0, atol=5e-6)


def test_options_are_carried_over(tiny):
    """Keys, modes and limits of the wrapper are those of the policy; a greedy wrapper gives a greedy policy."""
    wrapper = wrapped(tiny, generate=True, generate_kwargs={"max_new_tokens": 3}, log_probs_key="lp", pad_output=True)
    policy: Any = as_policy(wrapper)
    assert isinstance(policy, CausalLMPolicy)
    assert policy.head_weight is wrapper.model.lm_head.weight
    assert (policy.temperature, policy.max_new_tokens, policy.log_probs_key) == (0.0, 3, "lp")
    assert policy.pad_output
    assert policy.generate
    assert as_policy(policy) is policy
    assert not is_torchrl_wrapper(policy)
    assert not is_torchrl_wrapper(wrapper.model)


def test_the_named_chat_template_is_used(tiny):
    """A wrapper that names a template is scored with that one, and its tokenizer is left as it is."""
    wrapper = wrapped(tiny, input_mode="history", chat_template_name="chatml_format")
    policy: Any = as_policy(wrapper)
    assert "You are a helpful assistant" not in policy.tokenizer.chat_template
    assert policy.tokenizer.chat_template != wrapper.tokenizer.chat_template


@pytest.mark.parametrize(
    "options", [{"top_k": 20}, {"top_p": 0.9}, {"repetition_penalty": 1.1}, {"num_beams": 2}, {"bad_words_ids": [[3]]}]
)
def test_sampling_that_log_probs_would_not_know_of_is_refused(tiny, options):
    """Cut or changed distributions are named, with the value that turns them off."""
    name = next(iter(options))
    wrapper = wrapped(tiny, generate=True, generate_kwargs={"do_sample": True, **options})
    with pytest.raises(DefinitionError, match=f"samples with {name}="):
        as_policy(wrapper)
    if name != "bad_words_ids":
        as_policy(wrapped(tiny, generate_kwargs=options))  # it only scores


def test_an_engine_scores_without_gradient(tiny):
    """A wrapper around something that is no module is called on ragged tokens; a NaN at the first token is no harm."""
    wrapper = engine(tiny)
    policy: Any = as_policy(wrapper)
    assert isinstance(policy, EnginePolicy)
    out: Any = RetrieveLogProb(wrapper).inv(tiny.rows(ROWS, PROMPTS))
    for row, ids, prompt in zip(out.unbind(0), ROWS, PROMPTS, strict=True):
        want = tiny.naive(wrapper.model.inner, ids)
        torch.testing.assert_close(row[REF][prompt:].double(), want[prompt:], rtol=0, atol=2e-6)
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 0]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]).bool()
    scores = policy.log_probs(ids, mask)
    assert (scores != 0).tolist() == [[False, False, False, True], [False, True, True, False]]
    assert policy.log_probs(ids[:0], mask[:0]).shape == (0, 4)


def test_an_engine_samples_for_the_collector(tiny, tmp_path):
    """Its tokens and log-probs are stored as it gave them."""
    wrapper = engine(tiny, generate=True, generate_kwargs={"max_new_tokens": 5, "do_sample": True, "temperature": 1.0})
    buffer = TrajectoryReplayBuffer(storage=str(tmp_path / "store"), transform=MCAdvantage(2))
    collector = Collector(
        policy=wrapper,
        prompts=CopyDigits(num_digits=2),
        reward=token_match,
        buffer=buffer,
        config=Collect(prompts_per_rollout=2, group_size=2, max_new_tokens=4),
        seed=0,
    )
    collector.collect(0, policy_version=0)
    rows = buffer.store.read(buffer.store.ids(), ["input_ids", "log_probs", "assistant_mask"])
    for ids, lp, said in zip(*rows.values(), strict=True):
        assert 1 <= said.sum() <= 4
        want = tiny.naive(wrapper.model.inner, ids.astype("int64"))
        torch.testing.assert_close(torch.tensor(lp[said]).double(), want[torch.tensor(said)], rtol=0, atol=5e-6)
    buffer.trajectories.close()
    assert len(as_policy(wrapper).generate_ragged([], seed=0)) == 0


class SummedLogits(Qwen2ForCausalLM):
    """Logits that are not a head on hidden states, whatever its factor and soft cap."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add to each logit that of the preceding token id."""
        out: Any = super().forward(*args, **kwargs)
        out.logits = out.logits + out.logits.roll(1, -1)
        return out


def test_a_model_with_logits_of_its_own_is_scored_by_its_wrapper(tiny):
    """`CausalLMPolicy` refuses it, so the wrapper's own scores are taken, and its samples are not."""
    tokenizer = tiny.tokenizer()
    model: Any = SummedLogits(tiny.model(tokenizer).config).eval()
    wrapper = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True)
    policy: Any = as_policy(wrapper)
    assert isinstance(policy, EnginePolicy)
    out: Any = RetrieveLogProb(wrapper).inv(tiny.rows(ROWS, PROMPTS))
    for row, ids, prompt in zip(out.unbind(0), ROWS, PROMPTS, strict=True):
        torch.testing.assert_close(row[REF][prompt:].double(), tiny.naive(model, ids)[prompt:], rtol=0, atol=3e-6)
    with pytest.raises(DefinitionError, match="first sampled token to 0"):
        policy.generate_ragged([[5]], seed=0)
    td = tiny.rows(ROWS, PROMPTS, advantage=[torch.ones(len(row)) for row in ROWS])
    for row, ids in zip(td.unbind(0), ROWS, strict=True):
        row["log_probs"] = TensorDict({"full": tiny.naive(model, ids).nan_to_num(0).float()})
    loss: Any = GRPOLoss(wrapper.get_new_version(pad_output=False), padding_side="left")(td)
    assert abs(loss.kl_approx.item()) < 1e-5


def test_what_an_engine_cannot_do_is_refused(tiny):
    """No gradient, another temperature, dropped tokens: one message each with what to do."""
    lp = [torch.zeros(len(row)) for row in ROWS]
    rows = tiny.rows(ROWS, PROMPTS, log_probs=lp, advantage=[torch.zeros(len(row)) for row in ROWS])
    with pytest.raises(DefinitionError, match="provides no gradients"):
        GRPOLoss(engine(tiny))(rows)
    with pytest.raises(DefinitionError, match=r"scores at temperature 1, but 0\.5 is needed"):
        RetrieveLogProb(engine(tiny, generate_kwargs={"temperature": 0.5})).inv(rows)
    with pytest.raises(DefinitionError, match="processed_logprobs"):
        EnginePolicy(engine(tiny)).generate_ragged([[5]], temperature=0.5)
    with pytest.raises(DataError, match="a padding token that no text contains"):
        RetrieveLogProb(engine(tiny, drops=258)).inv(rows)


def test_what_is_no_policy_is_named():
    """The message lists what would do."""
    with pytest.raises(DefinitionError, match="Collector got an object of type Linear"):
        as_policy(nn.Linear(2, 2), "Collector")
