from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data.llm import History

from rlhf_pipeline import CausalLMPolicy, ChatHistory, KLRewardTransform
from rlhf_pipeline.data import keys
from rlhf_pipeline.data.tensordicts import steps_of
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.transforms.retrieve_log_prob import RetrieveLogProb
from tests.rlhf_pipeline.small import CHAT_TEMPLATE, qwen2, talker


@pytest.fixture(scope="module")
def policy():
    """A tiny random Qwen2, scored at temperature 0.7."""
    return CausalLMPolicy(qwen2(32, vocab_size=50), temperature=0.7, eos_token_id=[], pad_token_id=0)


class Spy:
    """Passes calls on and notes how much was asked for."""

    def __init__(self, policy):
        self.policy = policy
        self.shapes = []
        self.scored = 0

    def log_probs(self, input_ids, attention_mask, score_mask):
        """Note the shape and ask the policy."""
        self.shapes.append(tuple(input_ids.shape))
        self.scored += int(score_mask.sum())
        return self.policy.log_probs(input_ids, attention_mask, score_mask)


def one_by_one(policy, rows, temperature=0.7):
    """Float64 reference: full logits of each trajectory alone."""
    out = []
    for row in rows:
        ids = row["tokens", "full"]
        with torch.no_grad():
            logits = policy.model(ids[None]).logits[0].double() / temperature
        scores = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]
        full = torch.cat([torch.full((1,), torch.nan, dtype=torch.float64), scores])
        out.append(torch.where(row["masks", "all_assistant_mask"], full, torch.nan))
    return torch.cat(out)


def test_equals_one_by_one(policy, make_rows, to_form, form):
    """Batching by length with padding changes nothing but the last bits."""
    rows = make_rows([5, 19, 3, 40, 8, 8, 27], ref=False)
    out = RetrieveLogProb(policy, token_budget=64).inv(to_form(rows, form))
    got = steps_of(out)[keys.REF_LOG_PROBS].values
    torch.testing.assert_close(got.double(), one_by_one(policy, rows), atol=2e-6, rtol=0, equal_nan=True)
    assert got.dtype == torch.float32
    assert not got.requires_grad


def test_work_is_bounded_and_only_on_responses(policy, make_rows, to_form, form):
    """No forward pass exceeds the token budget, rows of one length share a pass, and the prompt is never scored."""
    rows = make_rows([8] * 6 + [30] * 2, ref=False)
    spy = Spy(policy)
    RetrieveLogProb(spy, token_budget=64).inv(to_form(rows, form))
    assert all(b * t <= 64 for b, t in spy.shapes)
    assert spy.shapes == [(2, 30), (6, 8)]
    assert spy.scored == 6 * 6 + 2 * 28


def test_scored_once(policy, make_rows, to_form, form):
    """A batch that has reference log-probs is left alone, on write and on read."""
    spy = Spy(policy)
    transform = RetrieveLogProb(spy)
    td = to_form(make_rows([5, 6]), form)
    assert transform.inv(td) is td
    assert transform(td) is td
    assert spy.shapes == []


def test_behaviour_log_probs_are_filled_where_missing(policy, make_rows, to_form, form):
    """A collector without log-probs: the behaviour model gives them, at its own temperature."""
    rows = make_rows([5, 9], ref=False)
    expected = one_by_one(policy, rows)
    for row in rows:
        row.pop("log_probs")
    out = steps_of(RetrieveLogProb(policy, behaviour_model=policy).inv(to_form(rows, form)))
    for key in (keys.LOG_PROBS, keys.REF_LOG_PROBS):
        torch.testing.assert_close(out[key].values.double(), expected, atol=2e-6, rtol=0, equal_nan=True)


def test_existing_behaviour_log_probs_are_kept(policy, make_rows, to_form, form):
    """What the sampler reported is never replaced by a re-computation."""
    rows = make_rows([5, 9], ref=False)
    before = torch.cat([row["log_probs", "full"] for row in rows])
    out = steps_of(RetrieveLogProb(policy, behaviour_model=policy).inv(to_form(rows, form)))
    torch.testing.assert_close(out[keys.LOG_PROBS].values, before, equal_nan=True)


def test_tokens_of_the_first_position_have_no_score(policy, make_rows, to_form, form):
    """Every token but the first when all are asked for."""
    out = steps_of(RetrieveLogProb(policy, assistant_only=False).inv(to_form(make_rows([4, 6], ref=False), form)))
    scored = out[keys.REF_LOG_PROBS].values.isfinite()
    assert scored.tolist() == [False, True, True, True, False, True, True, True, True, True]


def test_prompt_length_stands_in_for_the_mask(policy, make_rows, to_form, form):
    """Without an assistant mask `num_prompt_tokens` says where the response begins."""
    rows = make_rows([5, 9], ref=False)
    expected = one_by_one(policy, rows)
    rows = [row.exclude("masks") for row in rows]
    out = steps_of(RetrieveLogProb(policy).inv(to_form(rows, form)))
    torch.testing.assert_close(out[keys.REF_LOG_PROBS].values.double(), expected, atol=2e-6, rtol=0, equal_nan=True)


def test_forward_fills_zeros_and_may_keep_the_graph(policy, make_rows, to_form):
    """On a sampled batch unscored positions are 0; `detach=False` is honoured there."""
    td = to_form(make_rows([4, 6], ref=False), "padded")
    detached = RetrieveLogProb(policy)(td)[keys.REF_LOG_PROBS]
    assert detached.shape == (2, 6)
    assert bool((detached[:, :2] == 0).all())
    assert bool((detached[0, 4:] == 0).all())
    assert not detached.requires_grad
    td = to_form(make_rows([4, 6], ref=False), "padded")
    assert RetrieveLogProb(policy, detach=False)(td)[keys.REF_LOG_PROBS].requires_grad
    td = to_form(make_rows([4, 6], ref=False), "padded")
    assert not RetrieveLogProb(policy, detach=False).inv(td)[keys.REF_LOG_PROBS].requires_grad


def test_older_names(policy, make_rows):
    """`actor` and `log_prob_key` of the older document."""
    transform = RetrieveLogProb(actor=policy, log_prob_key=("next", "mine"), history_key="history")
    out = transform.inv(lazy_stack(make_rows([4], ref=False)))
    assert ("next", "mine") in out.keys(True)
    assert transform.inv(None) is None


def test_transformers_model_is_wrapped(policy, make_rows):
    """A bare causal language model is scored at temperature 1."""
    rows = make_rows([6], ref=False)
    out = steps_of(RetrieveLogProb(policy.model).inv(lazy_stack(rows)))
    torch.testing.assert_close(
        out[keys.REF_LOG_PROBS].values.double(), one_by_one(policy, rows, 1.0), atol=2e-6, rtol=0, equal_nan=True
    )


def test_errors(policy):
    """No model, two models, no tokens, a model that cannot score."""
    with pytest.raises(DefinitionError, match="reference model"):
        RetrieveLogProb()
    with pytest.raises(DefinitionError, match="pass either model= or actor="):
        RetrieveLogProb(policy, actor=policy)
    with pytest.raises(DefinitionError, match="token_budget"):
        RetrieveLogProb(policy, token_budget=0)
    with pytest.raises(DefinitionError, match="Linear"):
        RetrieveLogProb(torch.nn.Linear(1, 1))
    with pytest.raises(DataError, match="token ids"):
        RetrieveLogProb(policy).inv(TensorDict(text=torch.zeros(2), batch_size=[2]))


def test_a_policy_that_generates_is_refused(policy):
    """Its call would sample another completion; the error names the version that scores. Also of the KL's reference."""
    sampler = policy.get_new_version(generate=True)
    for transform in (RetrieveLogProb, KLRewardTransform):
        with pytest.raises(DefinitionError, match=r"get_new_version\(generate=False\)"):
            transform(sampler)
        transform(sampler.get_new_version(generate=False))


def test_state_dict_carries_no_model_weights(policy):
    """A checkpoint of the buffer is not a checkpoint of the reference."""
    assert list(RetrieveLogProb(policy).state_dict()) == []


@pytest.mark.parametrize("key", [("mine", "full"), "mine"])
def test_forward_writes_into_the_batch(policy, make_rows, to_form, form, key):
    """As TorchRL's transform: the batch that is passed comes back, with the result under `next` where it has one."""
    inner = (key,) if isinstance(key, str) else key
    td = to_form(make_rows([4, 6], ref=False), form)
    transform = RetrieveLogProb(policy, log_probs_full_key=key)
    assert transform(td) is td
    want = RetrieveLogProb(policy)(to_form(make_rows([4, 6], ref=False), form))
    for row, other in zip(td.unbind(0), want.unbind(0), strict=True):
        assert torch.equal(row["next", *inner], other[keys.REF_LOG_PROBS])
        assert row.get(key, None) is None
    without = to_form(make_rows([4, 6], ref=False), form).exclude("next")
    assert transform(without) is without
    assert without.get("next", None) is None
    assert without[0].get(key, None) is not None


def test_the_write_path_leaves_what_it_is_given(policy, make_rows, to_form, form):
    """`inv` answers with a batch of its own, and a key in `next` is one there too."""
    td = to_form(make_rows([4, 6], ref=False), form)
    out = RetrieveLogProb(policy, log_probs_full_key=("ref_log_probs", "full")).inv(td)
    assert out[0].get(keys.REF_LOG_PROBS, None) is not None
    assert td[0].get(keys.REF_LOG_PROBS, None) is None


def test_a_stack_of_padded_rows_keeps_its_padding(policy, make_rows, to_form):
    """The result is as long as the row's tokens, and 0 where its attention mask says padding."""
    padded = to_form(make_rows([4, 6], ref=False), "padded")
    want = RetrieveLogProb(policy)(padded.clone())[keys.REF_LOG_PROBS]
    stack = RetrieveLogProb(policy)(lazy_stack(list(padded.clone().unbind(0))))
    for row, scores in zip(stack.unbind(0), want, strict=True):
        assert torch.equal(row[keys.REF_LOG_PROBS], scores)


def test_a_tokenizer_of_ones_own_gets_the_template_that_the_model_names():
    """Else a conversation would be other tokens than the model samples; `tokenizer_kwargs` has the last word."""

    class Templated:
        chat_template = "the model's"

        def log_probs(self, input_ids, attention_mask, score_mask):
            return torch.zeros(input_ids.shape)

    given = SimpleNamespace(chat_template="its own")
    assert RetrieveLogProb(Templated(), tokenizer=given).tokenizer.chat_template == "the model's"
    asked = RetrieveLogProb(Templated(), tokenizer=given, tokenizer_kwargs={"chat_template": "asked for"})
    assert asked.tokenizer.chat_template == "asked for"
    assert given.chat_template == "its own"


def test_conversations_that_exist_as_text_only():
    """Where nothing was sampled here, the template's generation markers tell the assistant's tokens of every turn."""
    policy = talker()
    policy.tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "{{ {'user': 'U', 'assistant': 'A', 'tool': 'T'}[m.role] + ':' + m.content }}"
        "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}",
        "{{ {'user': 'U', 'assistant': 'A', 'tool': 'T'}[m.role] + ':' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}",
    )
    roles = ("user", "assistant", "tool", "assistant")
    chats = [list(zip(roles, words, strict=True)) for words in (("1+2", "12", "3", "3"), ("7", "07+", "7", "777"))]
    history = History.from_chats([[{"role": r, "content": c} for r, c in chat] for chat in chats])
    td = TensorDict(history=ChatHistory(full=history), batch_size=[2])
    out: Any = RetrieveLogProb(policy.get_new_version(input_mode="history")).inv(td)
    for row, chat in zip(out.unbind(0), chats, strict=True):
        ids, said = row["tokens", "full"].tolist(), row["masks", "all_assistant_mask"]
        assert len(ids) == sum(len(content) + 3 + (role == "assistant") for role, content in chat)
        want = [i for role, content in chat if role == "assistant" for i in [*policy.tokenizer.encode(content), 1]]
        assert [i for i, mine in zip(ids, said.tolist(), strict=True) if mine] == want
    found = torch.cat([row["next", "ref_log_probs", "full"] for row in out.unbind(0)])
    torch.testing.assert_close(
        found.double(), one_by_one(policy, out.unbind(0), 1.0), rtol=0, atol=2e-6, equal_nan=True
    )
