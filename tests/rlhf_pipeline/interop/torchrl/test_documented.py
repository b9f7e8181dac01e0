"""Every argument, key and example that TorchRL documents for wrappers and containers: it works, or says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.llm import History

from rlhf_pipeline import (
    CausalLMPolicy,
    ChatHistory,
    LogProbs,
    Masks,
    Text,
    Tokens,
    scratch_policy,
)
from rlhf_pipeline.errors import DefinitionError

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
CHATS = [
    [{"role": "system", "content": "be"}, {"role": "user", "content": "bad?"}, {"role": "assistant", "content": "no"}],
    [{"role": "system", "content": "be"}, {"role": "user", "content": "ab"}, {"role": "assistant", "content": "dad"}],
]


def chat_policy(**options: Any) -> CausalLMPolicy:
    """A policy over a few letters whose tokenizer has a chat template with generation markers."""
    policy = scratch_policy("abdenosu:?", hidden_size=16, num_layers=1, num_heads=2)
    policy.tokenizer.chat_template = TEMPLATE
    return policy.get_new_version(**options)


def token_batch() -> TensorDict:
    """Two rows, padded on the left and on the right."""
    td = TensorDict(batch_size=[2])
    td["tokens", "full"] = torch.tensor([[0, 2, 3, 4, 5], [2, 3, 4, 5, 0]])
    td["masks", "all_attention_mask"] = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
    td["masks", "all_assistant_mask"] = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 0]]).bool()
    return td


@pytest.mark.parametrize(
    ("container", "names"),
    [
        (Tokens, ["prompt", "response", "full"]),
        (Masks, ["all_attention_mask", "all_assistant_mask"]),
        (LogProbs, ["prompt", "response", "full"]),
        (Text, ["prompt", "response", "full"]),
        (ChatHistory, ["prompt", "response", "full"]),
    ],
)
def test_default_specs_of_the_containers(container, names):
    """All fields by default, the named ones on request; specs give the container's class."""
    spec = container.default_spec()
    assert set(names) <= set(spec.keys())
    assert set(container.default_spec(keys=names[:1]).keys()) & set(names) == set(names[:1])
    assert spec.data_cls is container
    assert all(hasattr(container(), name) for name in names)


def test_the_chat_history_example():
    """`result["history"].response` is the new turn, `.full` the whole conversation."""
    policy = chat_policy(input_mode="history", generate=True, max_new_tokens=3)
    history = History.from_chats([CHATS[0][:2]])
    result: Any = policy(TensorDict(history=ChatHistory(prompt=history), batch_size=(1,)))
    assert result["history"].response.role == [["assistant"]]
    assert result["history"].full.shape == (1, 3)
    assert result["history"].full[0, 2].content == result["text"].response[0]
    for key in ("text", "masks", "tokens", "log_probs", "history"):
        assert key in policy.out_keys
        assert key in result.keys()  # noqa: SIM118


def test_every_argument_of_the_base_class():
    """All of TorchRL's keyword arguments are taken."""
    policy = chat_policy()
    made = CausalLMPolicy(
        policy.model,
        tokenizer=policy.tokenizer,
        input_mode="tokens",
        input_key=("mine", "full"),
        attention_mask_key="attention_mask",
        generate=False,
        generate_kwargs={"max_new_tokens": 4, "temperature": 1.0},
        tokenizer_kwargs={"padding": True, "return_tensors": "pt", "padding_side": "left"},
        pad_output=True,
        inplace=False,
        device=torch.device("cpu"),
        layout=torch.strided,
        num_samples=None,
        chat_template_name=None,
        chat_template=TEMPLATE,
        return_log_probs=True,
        history_key="history",
        text_key="text",
        tokens_key="tokens",
        masks_key="masks",
        log_probs_key="scores",
    )
    assert made.in_keys == [("mine", "full")]
    assert "scores" in made.out_keys
    td = TensorDict({"mine": {"full": torch.tensor([[0, 2, 3]])}, "attention_mask": torch.tensor([[0, 1, 1]])}, [1])
    scored: Any = made(td)
    assert (scored["scores"].full != 0).tolist() == [[False, False, True]]
    named = policy.get_new_version(chat_template_name="chatml_format")
    assert named.tokenizer.chat_template != policy.tokenizer.chat_template


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layout": torch.jagged}, "as_nested_tensor=True, layout=torch.jagged"),
        ({"tokenizer_kwargs": {"padding_side": "right"}}, "tokenizer_kwargs has padding_side='right'"),
        ({"chat_template_name": "llama9"}, "chat_template_name is 'llama9'"),
        ({"tokenizer": "gpt2"}, "tokenizer is the string 'gpt2', not an object"),
        ({"model": "gpt2"}, r"CausalLMPolicy\.from_pretrained\('gpt2', \.\.\.\)"),
        ({"device": "meta"}, "shares the weights"),
        ({"generate_kwargs": {"top_k": 5}}, "top_k"),
    ],
)
def test_arguments_that_cannot_work_say_why(wrong, message):
    """Each with what to do instead."""
    with pytest.raises(DefinitionError, match=message):
        chat_policy().get_new_version(**wrong)


def test_the_mask_methods_take_torchrls_arguments():
    """Keys of masks and prompts may be other ones, under the public names and the private ones of TorchRL."""
    policy, td = chat_policy(), token_batch()
    values = td["tokens", "full"]
    td["elsewhere"] = td["masks", "all_assistant_mask"]
    td["real"] = td["masks", "all_attention_mask"]
    td["start"] = torch.tensor([[2, 3], [2, 3]])
    want = policy.get_rlhf_dist(td).log_prob(values)
    assert (want != 0).tolist() == td["elsewhere"].tolist()
    bare = td.exclude(("masks", "all_assistant_mask"))
    for found in (
        policy.get_rlhf_dist(bare, assistant_mask_key="elsewhere"),
        policy._get_rlhf_dist(bare, assistant_mask_key="elsewhere", padding_side="left", logits_key="logits"),
        policy._get_dist_with_assistant_mask(bare, assistant_mask_key="elsewhere"),
        policy.get_dist(bare, mask_key="elsewhere", as_padded_tensor=True, padding_value=0.0, padding_side="left"),
        policy.get_sft_dist(bare, assistant_mask_key="elsewhere"),
        policy.get_dist_with_custom_mask(bare, td["elsewhere"]),
        policy._get_dist_with_custom_mask(bare, td["elsewhere"]),
    ):
        torch.testing.assert_close(found.log_prob(values), want)
    every = policy.get_generic_dist(td).log_prob(values)
    torch.testing.assert_close(policy._get_generic_dist(bare, attention_mask_key="real").log_prob(values), every)
    right = td[1:]
    prompt = policy._get_dist_with_prompt_mask(right.exclude(("masks", "all_assistant_mask")), tokens_key="start")
    torch.testing.assert_close(prompt.log_prob(values[1:]), want[1:])
    out = TensorDict(batch_size=[2])
    policy.get_dist(td, out, logits_key="z")
    assert out["z"].shape == (2, 5, policy.vocab_size)
    for options in ({"as_nested_tensor": True}, {"layout": torch.jagged}):
        with pytest.raises(DefinitionError, match="nested tensors has no working log_prob"):
            policy.get_dist(td, **options)


def test_the_rest_of_the_base_class():
    """Key lists, `log_prob`, and a sampler that refuses to score."""
    policy, td = chat_policy(), token_batch()
    assert policy.log_prob_keys == ["log_probs"]
    policy.log_prob_keys = ["mine"]
    assert policy.log_prob_keys == ["mine"]
    assert policy.dist_sample_keys == ["tokens_response"]
    with pytest.raises(NotImplementedError):
        _ = policy.dist_params_keys
    assert policy.log_prob(td.clone()).shape == (2, 2)  # of the responses
    sampler = policy.get_new_version(generate=True)
    for method in (sampler.log_prob, sampler.get_dist, sampler.get_sft_dist, sampler.get_rlhf_dist):
        with pytest.raises(NotImplementedError, match=r"get_new_version\(generate=False\)"):  # as TorchRL raises
            method(td)
    assert policy.collector is None


def test_several_turns_go_on_from_the_sampled_tokens():
    """With `prefer_tokens` the next turn starts with the tokens that were sampled, not with their text."""
    policy = chat_policy(input_mode="history", generate=True, prefer_tokens=True, max_new_tokens=4)
    assert policy.get_new_version(num_samples=2).prefer_tokens
    codec = policy.tokenizer
    chat = [*CHATS[0], {"role": "user", "content": "ab"}]
    # "no" as the policy sampled it: other tokens than the text has.
    known = [*codec.encode("s:beu:bad?a:"), 0, *codec.encode("n"), 0, *codec.encode("o"), 1]
    td = TensorDict(history=ChatHistory(prompt=History.from_chats([chat]), batch_size=(1,)), batch_size=(1,))
    td["tokens", "prompt"] = torch.tensor([known])
    out: Any = policy(td)
    assert out[0]["tokens"].prompt.tolist() == [*known, *codec.encode("u:aba:")]
    fresh: Any = policy(TensorDict(history=ChatHistory(prompt=History.from_chats([chat[:2]])), batch_size=(1,)))
    assert fresh[0]["tokens"].prompt.tolist() == codec.encode("s:beu:bad?a:")


def test_an_attention_mask_of_ones_own_counts():
    """In `get_sft_dist`, besides the prompt's length."""
    policy, td = chat_policy(), token_batch()
    td["mine"] = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 0]]).bool()
    dist: Any = policy.get_sft_dist(td, attention_mask_key="mine")
    assert dist.mask.tolist() == [[False, False, False, True, False], [False, False, True, True, False]]
