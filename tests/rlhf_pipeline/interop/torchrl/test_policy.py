"""The policy on TensorDicts: TorchRL's names, and the masks right for every padding."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torch import Tensor
from torchrl.data.llm import History
from torchrl.modules.llm import policies as torchrl_policies
from torchrl.modules.llm.policies import common as torchrl_common
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss
from transformers import PreTrainedModel

from rlhf_pipeline import CausalLMPolicy, scratch_policy
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.interop.torchrl import containers
from rlhf_pipeline.policies.chat import encode_chat
from rlhf_pipeline.policies.new_model import new_model

ROWS = [[5, 6, 7, 8, 9, 10], [20, 1, 22], [40, 41, 42, 43]]
PROMPTS = [2, 1, 3]

Make = Callable[..., PreTrainedModel]
Oracle = Callable[..., Tensor]


def _assistant(i: int) -> list[bool]:
    """Row 0 has a tool token (index 3) between two assistant turns."""
    mask = [t >= PROMPTS[i] for t in range(len(ROWS[i]))]
    if i == 0:
        mask[3] = False
    return mask


def _batch(form: str) -> Any:
    """The same three rows as a TensorDict in one of the forms that a buffer or a policy gives."""
    if form in ("lazy", "jagged"):
        rows = [
            TensorDict(
                {
                    "tokens": {"full": torch.tensor(row), "prompt": torch.tensor(row[: PROMPTS[i]])},
                    "masks": {"all_assistant_mask": torch.tensor(_assistant(i))},
                }
            )
            for i, row in enumerate(ROWS)
        ]
        if form == "lazy":
            return lazy_stack(rows)
        leaves = {
            ("tokens", "full"): [r["tokens", "full"] for r in rows],
            ("masks", "all_assistant_mask"): [r["masks", "all_assistant_mask"] for r in rows],
        }
        td = TensorDict({"num_prompt_tokens": torch.tensor(PROMPTS)}, [3])
        for key, values in leaves.items():
            td.set(key, torch.nested.nested_tensor(values, layout=torch.jagged))
        return td
    width = 8
    ids = torch.ones(3, width, dtype=torch.int64)
    attention = torch.zeros(3, width, dtype=torch.bool)
    assistant = torch.zeros(3, width, dtype=torch.bool)
    for i, row in enumerate(ROWS):
        # "layout": prompts end at column 3 and responses begin there, as generation pads.
        start = {"right": 0, "left": width - len(row), "layout": 3 - PROMPTS[i]}[form]
        ids[i, start : start + len(row)] = torch.tensor(row)
        attention[i, start : start + len(row)] = True
        assistant[i, start : start + len(row)] = torch.tensor(_assistant(i))
    masks = {"all_attention_mask": attention, "all_assistant_mask": assistant}
    return TensorDict({"tokens": {"full": ids}, "masks": masks}, [3])


def _by_row(values: Tensor, form: str) -> list[Tensor]:
    """Cut a padded result into the real part of each row; ragged rows are padded on the left by default."""
    out = []
    for i, row in enumerate(ROWS):
        width = values.shape[1]
        start = {"right": 0, "layout": 3 - PROMPTS[i]}.get(form, width - len(row))
        out.append(values[i, start : start + len(row)].detach())
    return out


FORMS = ["right", "left", "layout", "lazy", "jagged"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", ["get_dist", "get_generic_dist", "get_rlhf_dist", "get_sft_dist"])
def test_every_mask_is_right_for_every_padding(form: str, method: str, make_model: Make, oracle: Oracle) -> None:
    """Log-probs equal a naive loop where the method's mask is, and are 0 elsewhere; id 1 pads and is real too."""
    model = make_model()
    policy = CausalLMPolicy(model, temperature=0.7, pad_token_id=1)
    td = _batch(form)
    dist = getattr(policy, method)(td)
    tokens = policy.read_batch(td).input_ids
    found = _by_row(dist.log_prob(tokens), form)
    entropy = _by_row(dist.entropy(), form)
    for i, row in enumerate(ROWS):
        wanted = {
            "get_dist": [True] * len(row),
            "get_generic_dist": [True] * len(row),
            "get_rlhf_dist": _assistant(i),
            "get_sft_dist": [t >= PROMPTS[i] for t in range(len(row))],
        }[method]
        wanted[0] = False
        exact = oracle(model, row, 0.7) * torch.tensor(wanted)
        assert float((found[i] - exact).abs().max()) < 1e-5
        assert [bool(e > 0) for e in entropy[i]] == wanted


@pytest.mark.parametrize("form", ["right", "left", "lazy"])
def test_custom_masks_and_mask_keys(form: str, make_model: Make) -> None:
    """A mask handed in, or named by its key, picks tokens of the full distribution."""
    policy = CausalLMPolicy(make_model())
    td = _batch(form)
    tokens = policy.read_batch(td).input_ids
    everything = policy.get_dist(td).log_prob(tokens)
    mask = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    custom = policy.get_dist_with_custom_mask(td, mask).log_prob(tokens)
    torch.testing.assert_close(custom, everything * mask, atol=1e-6, rtol=0)
    keyed = policy.get_dist(td, mask_key=("masks", "all_assistant_mask")).log_prob(tokens)
    torch.testing.assert_close(keyed, policy.get_rlhf_dist(td).log_prob(tokens), atol=1e-6, rtol=0)
    with pytest.raises(DataError, match="mask has shape"):
        policy.get_dist_with_custom_mask(td, mask[:, :2])


def test_sft_prompts_from_padded_prompts_alone(make_model: Make) -> None:
    """Without other hints a left-padded prompt that begins the tokens marks where responses begin."""
    policy = CausalLMPolicy(make_model())
    td = _batch("layout")
    expected = policy.get_sft_dist(td).log_prob(td["tokens", "full"])
    td["tokens", "prompt"] = td["tokens", "full"][:, :3].clone()
    del td["masks", "all_assistant_mask"]
    assert torch.equal(policy.get_sft_dist(td).log_prob(td["tokens", "full"]), expected)
    del td["tokens", "prompt"]
    with pytest.raises(DataError, match="The lengths of the prompts are unknown"):
        policy.get_sft_dist(td)


def test_ragged_rows_may_be_padded_on_the_right(make_model: Make) -> None:
    """padding_side moves the padding of ragged rows and nothing else."""
    policy = CausalLMPolicy(make_model())
    td = _batch("lazy")
    right = policy.read_batch(td, "right").input_ids
    found = policy.get_rlhf_dist(td, padding_side="right").log_prob(right)
    left = policy.get_rlhf_dist(td).log_prob(policy.read_batch(td).input_ids)
    for a, b in zip(_by_row(found, "right"), _by_row(left, "left"), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_scoring_writes_log_probs_beside_the_tokens(make_model: Make) -> None:
    """Scoring gives full aligned with the tokens, responses ragged or padded; log_prob gives responses."""
    policy = CausalLMPolicy(make_model())
    for form in FORMS:
        td = _batch(form)
        expected = _by_row(policy.get_dist(td).log_prob(policy.read_batch(td).input_ids), form)
        out = policy(td)
        if form in ("lazy", "jagged"):
            assert isinstance(out, LazyStackedTensorDict)
            full = [row["log_probs", "full"].detach() for row in out.unbind(0)]
            response = [row["log_probs", "response"].detach() for row in out.unbind(0)]
        else:
            assert out is td
            assert out["log_probs", "full"].shape == td["tokens", "full"].shape
            full = _by_row(out["log_probs", "full"], form)
            response = [r[: len(ROWS[i]) - PROMPTS[i]] for i, r in enumerate(out["log_probs", "response"].detach())]
        for i in range(3):
            torch.testing.assert_close(full[i], expected[i], atol=1e-6, rtol=0)
            torch.testing.assert_close(response[i], expected[i][PROMPTS[i] :], atol=1e-6, rtol=0)
    padded = policy.log_prob(_batch("lazy"), as_padded_tensor=True)
    assert padded.shape == (3, 4)


def test_logits_only(make_model: Make) -> None:
    """Logits at position t are those of token t."""
    model = make_model()
    policy = CausalLMPolicy(model)
    logits = policy(_batch("right"), logits_only=True)["logits"]
    own = model(input_ids=torch.tensor([ROWS[0]])).logits[0]
    torch.testing.assert_close(logits[0, 1:6], own[:5], atol=1e-4, rtol=1e-5)
    assert not logits[0, 0].any()


@pytest.mark.parametrize("inplace", [True, False, "empty"])
def test_inplace(inplace: Any, make_model: Make) -> None:
    """True writes into the input, False into a copy, "empty" into a new TensorDict."""
    policy = CausalLMPolicy(make_model(), inplace=inplace)
    td = _batch("right")
    out = policy(td)
    assert (out is td) == (inplace is True)
    assert ("log_probs" in td) == (inplace is True)
    assert ("tokens" in out) == (inplace != "empty")
    target = TensorDict({}, [3])
    assert policy(td, tensordict_out=target) is target
    assert "log_probs" in target


@pytest.mark.parametrize("form", ["ragged", "padded"])
@pytest.mark.parametrize("pad_output", [False, True])
def test_generation_from_tokens(form: str, pad_output: bool, make_model: Make) -> None:
    """Sampling writes containers whose log-probs equal a scoring version's."""
    scorer = CausalLMPolicy(make_model(), temperature=0.7, pad_token_id=1)
    policy = scorer.get_new_version(
        generate=True, pad_output=pad_output, generate_kwargs={"max_new_tokens": 7, "seed": 3}
    )
    if form == "ragged":
        td: Any = lazy_stack(
            [TensorDict({"tokens": {"prompt": torch.tensor(r)}, "query": i}) for i, r in enumerate(ROWS)]
        )
    else:
        full = _batch("left")
        masks = {"all_attention_mask": full["masks", "all_attention_mask"]}
        td = TensorDict({"tokens": {"prompt": full["tokens", "full"]}, "masks": masks, "query": torch.arange(3)}, [3])
    out = policy(td)
    assert [int(q) for q in out["query"]] == [0, 1, 2]
    expected = scorer.generate_groups(ROWS, max_new_tokens=7, seed=3)
    scored = scorer(out.copy())
    for i, row in enumerate(out.unbind(0)):
        real = row["masks", "all_attention_mask"]
        said = row["masks", "all_assistant_mask"]
        assert row["tokens", "full"][real].tolist() == ROWS[i] + expected[i].token_ids
        assert row["tokens", "full"][said].tolist() == expected[i].token_ids
        torch.testing.assert_close(row["log_probs", "full"][said], expected[i].log_probs)
        again = scored[i]["log_probs", "full"].detach()
        assert float((again[said] - expected[i].log_probs).abs().max()) < 1e-5
        n = len(expected[i].token_ids)
        assert row["tokens", "response"][:n].tolist() == expected[i].token_ids
        torch.testing.assert_close(row["log_probs", "response"][:n], expected[i].log_probs)
    if pad_output:
        assert out["tokens", "prompt"].shape == (3, 6)
        assert out["tokens"].padded


def test_samples_per_prompt_add_a_dimension(make_model: Make) -> None:
    """num_samples gives [B, num_samples]; a second call draws others; a single row works."""
    policy = CausalLMPolicy(make_model(), generate=True, num_samples=4, generate_kwargs={"max_new_tokens": 5})
    td = lazy_stack([TensorDict({"tokens": {"prompt": torch.tensor(r)}, "query": i}) for i, r in enumerate(ROWS)])
    first, second = policy(td), policy(td)
    assert first.batch_size == (3, 4)
    assert [[int(q["query"]) for q in row.unbind(0)] for row in first.unbind(0)] == [[0] * 4, [1] * 4, [2] * 4]
    assert ("tokens", "response") not in td.keys(include_nested=True)
    a, b = ([row["tokens", "response"].tolist() for row in out[0].unbind(0)] for out in (first, second))
    assert len({tuple(x) for x in a}) > 1
    assert a != b
    padded = policy.get_new_version(pad_output=True)(td)
    assert padded.batch_size == (3, 4)
    assert padded["tokens", "full"].shape[:2] == (3, 4)
    one = policy.get_new_version(num_samples=None)(TensorDict({"tokens": {"prompt": torch.tensor([5, 6])}}))
    assert one.batch_size == ()
    assert one["tokens", "full"][:2].tolist() == [5, 6]


def test_calls_of_other_sizes_draw_new_completions(make_model: Make) -> None:
    """No completion of a prompt is another call's, however many prompts each call had."""
    policy = CausalLMPolicy(make_model(), generate=True, max_new_tokens=12)
    seen = []
    for size in (4, 2, 3):
        out: Any = policy(TensorDict({"tokens": {"prompt": torch.tensor([[7, 8, 9]] * size)}}, [size]))
        seen += [tuple(row["tokens", "response"].tolist()) for row in out.unbind(0)]
    assert len(set(seen)) == 9


def test_generation_from_text_and_histories(tmp_path: Path) -> None:
    """Text and chat histories are encoded once; responses come back as text and as an assistant's turn."""
    (tmp_path / "text.txt").write_text("the quick brown fox says hello\n" * 20)
    made = new_model(
        tmp_path / "m", text_file=tmp_path / "text.txt", vocab_size=300, hidden_size=16, num_layers=1, num_heads=2
    )
    policy = CausalLMPolicy.from_pretrained(made.folder, generate=True, max_new_tokens=6)
    text = policy.get_new_version(input_mode="text")
    rows = [TensorDict({"text": {"prompt": word}}) for word in ("hello", "the fox")]
    out = text(lazy_stack(rows))
    for row, word in zip(out.unbind(0), ("hello", "the fox"), strict=True):
        assert row["text"].prompt == word
        assert row["text"].full == word + row["text"].response
        assert row["tokens", "prompt"].tolist() == policy.tokenizer.encode(word)
    chats = [[{"role": "user", "content": "hello"}], [{"role": "user", "content": "the"}]]
    histories = History.from_chats(chats)
    chat = policy.get_new_version(input_mode="history")
    out = chat(TensorDict({"history": {"prompt": histories}}, [2]))
    for row, messages in zip(out.unbind(0), chats, strict=True):
        full = row["history"].full
        answer = row["text"].response
        assert [m.content for m in full.unbind(0)] == [messages[0]["content"], answer]
        assert [m.role for m in full.unbind(0)] == ["user", "assistant"]


def test_scoring_histories_uses_the_generation_markers(tmp_path: Path, oracle: Oracle) -> None:
    """get_rlhf_dist on histories scores the assistant's tokens and no others."""
    (tmp_path / "text.txt").write_text("the quick brown fox says hello\n" * 20)
    made = new_model(
        tmp_path / "m", text_file=tmp_path / "text.txt", vocab_size=300, hidden_size=16, num_layers=1, num_heads=2
    )
    policy = CausalLMPolicy.from_pretrained(made.folder, input_mode="history")
    chats = [
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the fox"}],
        [{"role": "user", "content": "a longer question"}, {"role": "assistant", "content": "no"}],
    ]
    td = TensorDict({"history": {"full": History.from_chats(chats)}}, [2])
    batch = policy.read_batch(td)
    found = policy.get_rlhf_dist(td).log_prob(batch.input_ids).detach()
    for i, chat in enumerate(chats):
        ids, mask = encode_chat(policy.tokenizer, chat)
        exact = oracle(policy.model, ids) * torch.tensor(mask)
        assert float((found[i][batch.attention_mask[i]] - exact).abs().max()) < 1e-5
    scored = policy(td)
    assert scored[0]["tokens", "full"].tolist() == encode_chat(policy.tokenizer, chats[0])[0]
    assert scored[0]["masks", "all_assistant_mask"].tolist() == encode_chat(policy.tokenizer, chats[0])[1]


def test_a_new_version_shares_the_model(make_model: Make) -> None:
    """Weights are shared, arguments change, unknown ones are refused with a suggestion."""
    policy = CausalLMPolicy(make_model(), temperature=0.7, eos_token_id=[4, 5], num_slots=3)
    other = policy.get_new_version(generate=True, temperature=1.5)
    assert other.model is policy.model
    assert (other.temperature, other.generate, other.num_slots, other.eos_token_ids) == (1.5, True, 3, (4, 5))
    assert (policy.temperature, policy.generate) == (0.7, False)
    assert policy.get_new_version(num_slots=9).get_new_version().num_slots == 9
    keyed = policy.get_new_version(input_key=("my", "ids"))
    assert keyed.get_new_version(temperature=2.0).in_keys == [("my", "ids")]
    assert keyed.get_new_version(generate=True).in_keys == [("tokens", "prompt")]
    assert policy.device == torch.device("cpu")
    with pytest.raises(DefinitionError, match="Did you mean 'temperature'"):
        policy.get_new_version(temprature=1.0)


def test_torchrl_names_and_classes(make_model: Make) -> None:
    """The containers are TorchRL's own, the policy is a wrapper in both libraries, keys follow the mode."""
    for name in ("Tokens", "Masks", "ChatHistory", "LogProbs", "Text"):
        assert getattr(containers, name) is getattr(torchrl_common, name)
    policy = CausalLMPolicy(make_model(), log_probs_key="scores")
    assert isinstance(policy, containers.LLMWrapperBase)
    assert isinstance(policy, torchrl_policies.LLMWrapperBase)
    assert policy.in_keys == [("tokens", "full")]
    assert "scores" in policy.out_keys
    assert policy.get_new_version(generate=True).in_keys == [("tokens", "prompt")]
    assert "scores" in policy(_batch("right"))
    assert not policy.batching


def test_a_registered_collector_is_held_weakly(make_model: Make) -> None:
    """The collector is found again, and the policy does not keep it alive."""

    class Collector:
        pass

    policy = CausalLMPolicy(make_model())
    assert policy.collector is None
    collector = Collector()
    policy.register_collector(collector)
    assert policy.collector is collector
    del collector
    gc.collect()
    assert policy.collector is None


def test_what_does_not_fit_is_refused(make_model: Make) -> None:
    """Generating policies do not score; missing inputs, bad modes and unsupported sampling are named."""
    policy = CausalLMPolicy(make_model())
    sampler = policy.get_new_version(generate=True)
    for call in (sampler.get_dist, sampler.get_sft_dist, sampler.get_rlhf_dist, sampler.log_prob):
        with pytest.raises(DefinitionError, match="generate=False"):
            call(_batch("right"))
    with pytest.raises(DataError, match=r"no \('tokens', 'full'\) \(its keys: x\)"):
        policy.get_dist(TensorDict({"x": torch.zeros(3)}, [3]))
    with pytest.raises(DataError, match="no prompts under"):
        sampler(TensorDict({"x": torch.zeros(3)}, [3]))
    with pytest.raises(DataError, match="one batch dimension"):
        policy(TensorDict({}, [3, 2]))
    with pytest.raises(DefinitionError, match="input_mode is 'chat'"):
        CausalLMPolicy(make_model(), input_mode="chat")
    with pytest.raises(DefinitionError, match="'top_p', which would change the sampled distribution"):
        CausalLMPolicy(make_model(), generate_kwargs={"top_p": 0.9})
    with pytest.raises(DefinitionError, match="num_samples is 2, but generate_kwargs requests 3 samples"):
        CausalLMPolicy(make_model(), num_samples=2, generate_kwargs={"n": 3})


@pytest.mark.peer
def test_torchrls_loss_takes_the_policy() -> None:
    """TorchRL's GRPOLoss scores through our distributions: on-policy, the objective's gradient is -A * grad(log p)."""
    policy = scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2)
    td = _batch("left")
    td["tokens", "full"] = td["tokens", "full"] % 13
    scores = policy.log_probs(td["tokens", "full"], td["masks", "all_attention_mask"])
    td["log_probs"] = containers.LogProbs(full=scores.detach(), batch_size=[3])
    td["advantage"] = torch.ones(3, 8, 1)
    said = td["masks", "all_assistant_mask"]
    loss = TorchRLGRPOLoss(actor_network=policy, masking_strategy="rlhf", entropy_bonus=False)
    out = loss(td)
    assert float(out.loss_objective.detach()) == pytest.approx(-1.0, abs=1e-5)
    out.loss_objective.backward()
    theirs = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    assert theirs
    policy.zero_grad()
    (-scores[said].mean()).backward()
    for n, p in policy.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(theirs[n], p.grad, atol=1e-6, rtol=1e-4)
