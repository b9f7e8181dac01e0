"""Generation on slots."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.policies.engines import rollout
from rlhf_pipeline.policies.engines.protocol import WeightRefresh
from rlhf_pipeline.policies.engines.sampling import stream_keys, uniforms
from rlhf_pipeline.policies.model_parts import recomputes
from rlhf_pipeline.policies.token_policy import Completion, TokenPolicy
from tests.moments import at_call

PROMPTS = [[2 + i] + [3 + (7 * i + j) % 90 for j in range(5 * i)] for i in range(6)]
RAGGED = [2 + 2 * i for i in range(18)]

Make = Callable[..., PreTrainedModel]
Oracle = Callable[..., torch.Tensor]


def _worst_gap(model: PreTrainedModel, oracle: Oracle, completions: list[Completion], temperature: float) -> float:
    gaps = []
    for c in completions:
        exact = oracle(model, PROMPTS[c.prompt_index] + c.token_ids, temperature)
        assert torch.isfinite(c.log_probs).all()
        gaps.append(float((exact[-len(c.token_ids) :] - c.log_probs).abs().max()))
    return max(gaps)


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2", "qwen2-tied", "qwen2-sliding", "llama", "mistral", "gemma3_text", "gemma2", "granite"),
        *("phi", "gpt2", "gpt_neox", "opt"),
    ],
)
def test_sampled_log_probs_equal_the_models_own(name: str, make_model: Make, oracle: Oracle) -> None:
    """Ragged prompts and limits on few slots: rows are evicted, refilled, moved and shifted, and stay exact."""
    model = make_model(name)
    policy = TokenPolicy(model, temperature=0.7, num_slots=5)
    completions = policy.generate_groups(PROMPTS, group_size=3, max_new_tokens=RAGGED, seed=1)
    assert [(c.prompt_index, c.member) for c in completions] == [(p, m) for p in range(6) for m in range(3)]
    assert _worst_gap(model, oracle, completions, 0.7) < 1e-5


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gpt2"])
def test_eager_attention(name: str, make_model: Make, oracle: Oracle) -> None:
    """The attention implementation that adds its mask, for which the model builds the mask itself."""
    model = make_model(name, attention="eager")
    policy = TokenPolicy(model, temperature=0.7, num_slots=5)
    completions = policy.generate_groups(PROMPTS, group_size=3, max_new_tokens=RAGGED, seed=1)
    assert _worst_gap(model, oracle, completions, 0.7) < 1e-5


def test_the_tokens_are_those_of_a_naive_loop(make_model: Make) -> None:
    """A loop without any cache, with the same uniforms and the inverse CDF in float64, samples the same tokens."""
    model = make_model().eval()
    policy = TokenPolicy(model, temperature=0.7, num_slots=3, eos_token_id=[1, 50])
    completions = policy.generate_groups(PROMPTS, group_size=2, max_new_tokens=25, seed=9, stream_ids=range(40, 46))
    for c in completions:
        tokens = list(PROMPTS[c.prompt_index])
        keys = stream_keys(9, [40 + c.prompt_index], [c.member])
        expected: list[int] = []
        for t in range(25):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([tokens])).logits[0, -1].double() / 0.7
            cdf = torch.softmax(logits, -1).cumsum(0)
            u = float(uniforms(keys, np.array([t]))[0])
            token = int((cdf <= u * float(cdf[-1])).sum())
            expected.append(token)
            tokens.append(token)
            if token in (1, 50):
                break
        assert c.token_ids == expected
        assert c.finish_reason == ("stop" if expected[-1] in (1, 50) else "length")


@pytest.mark.parametrize("num_slots", [1, 2, 5, 64])
def test_results_do_not_depend_on_the_number_of_slots(num_slots: int, make_model: Make) -> None:
    """The same tokens on any number of slots, and log-probs equal but for the last bits."""
    model = make_model()
    reference = TokenPolicy(model, num_slots=18).generate_groups(PROMPTS, group_size=3, max_new_tokens=RAGGED, seed=3)
    again = TokenPolicy(model, num_slots=num_slots).generate_groups(
        PROMPTS, group_size=3, max_new_tokens=RAGGED, seed=3
    )
    for a, b in zip(reference, again, strict=True):
        assert a.token_ids == b.token_ids
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=0)


def test_padding_that_equals_the_end_token(make_model: Make, oracle: Oracle) -> None:
    """Padding and end share an id: the end token stays in the completion and every log-prob is right."""
    model = make_model("qwen2", pad_token_id=1, eos_token_id=1, vocab_size=9)
    policy = TokenPolicy(model, pad_token_id=1, eos_token_id=1, num_slots=4)
    prompts = [[5], [6, 1, 7], [8] * 9]
    completions = policy.generate_groups(prompts, group_size=4, max_new_tokens=30, seed=0)
    assert "stop" in {c.finish_reason for c in completions}
    for c in completions:
        assert 1 not in c.token_ids[:-1]
        assert (c.token_ids[-1] == 1) == (c.finish_reason == "stop")
        exact = oracle(model, prompts[c.prompt_index] + c.token_ids)[-len(c.token_ids) :]
        assert float((exact - c.log_probs).abs().max()) < 1e-5


def test_limits_for_all_per_prompt_and_per_completion(make_model: Make) -> None:
    """Without end tokens the lengths are the limits."""
    policy = TokenPolicy(make_model(), eos_token_id=[], max_new_tokens=3, num_slots=3)
    prompts = PROMPTS[:2]

    def lengths(limit: object) -> list[int]:
        done = policy.generate_groups(prompts, group_size=2, max_new_tokens=limit, seed=0)  # type: ignore[arg-type]
        assert all(c.finish_reason == "length" and len(c.log_probs) == len(c.token_ids) for c in done)
        return [len(c.token_ids) for c in done]

    assert lengths(None) == [3, 3, 3, 3]
    assert lengths(1) == [1, 1, 1, 1]
    assert lengths([2, 5]) == [2, 2, 5, 5]
    assert lengths([1, 2, 3, 4]) == [1, 2, 3, 4]
    with pytest.raises(DefinitionError, match=r"shape \(3,\)"):
        lengths([1, 2, 3])
    with pytest.raises(DefinitionError, match="at least 1"):
        lengths(0)


def test_long_completions_after_short_prompts(make_model: Make, oracle: Oracle) -> None:
    """Completions far longer than the first cache: it grows and shifts, and log-probs stay exact."""
    model = make_model()
    policy = TokenPolicy(model, eos_token_id=[], num_slots=3)
    prompts = [[2], [3, 4]]
    limits = [230, 7, 60, 3, 100, 9, 30, 200]
    completions = policy.generate_groups(prompts, group_size=4, max_new_tokens=limits, seed=2)
    assert [len(c.token_ids) for c in completions] == limits
    for c in completions:
        exact = oracle(model, prompts[c.prompt_index] + c.token_ids)[-len(c.token_ids) :]
        assert float((exact - c.log_probs).abs().max()) < 1e-5


def test_many_prompts_of_one_member_prefill_in_batches(make_model: Make, oracle: Oracle) -> None:
    """Prompts beyond one prefill batch, each with one member, on few slots."""
    model = make_model()
    policy = TokenPolicy(model, num_slots=6)
    prompts = [[2 + (i + j) % 90 for j in range(1 + (37 * i) % 200)] for i in range(60)]
    completions = policy.generate_groups(prompts, max_new_tokens=4, seed=2)
    assert [c.prompt_index for c in completions] == list(range(60))
    for c in completions:
        exact = oracle(model, prompts[c.prompt_index] + c.token_ids)[-len(c.token_ids) :]
        assert float((exact - c.log_probs).abs().max()) < 1e-5


def test_results_do_not_depend_on_the_size_of_a_prefill_pass(make_model: Make, monkeypatch) -> None:
    """A GPU takes more prompts in a pass than a CPU; their forward passes are counted."""
    model = make_model("qwen2")
    prompts = [[2 + (place + column) % 90 for column in range(1 + place % 7)] for place in range(20)]
    found: list[list[Completion]] = []
    passes: list[int] = []
    for most in (1, 30, 1 << 20):
        # The kind of the device decides it.
        monkeypatch.setattr(rollout, "prefill_tokens", lambda width, device, most=most: most)
        policy = TokenPolicy(model, eos_token_id=[], num_slots=4)
        with at_call(rollout.prefill) as prefilled:
            found.append(policy.generate_groups(prompts, group_size=2, max_new_tokens=5, seed=3))
        passes.append(sum(call.caller == rollout.__name__ for call in prefilled))
        monkeypatch.undo()
    assert passes == [20, 5, 1]  # prompts of 1 to 7 tokens: the widest times their number is at most 30
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert a.token_ids == b.token_ids
            torch.testing.assert_close(a.log_probs, b.log_probs, rtol=0, atol=1e-5)


def test_diverged_weights_are_named(make_model: Make) -> None:
    """Logits that are not finite stop the call with the prompt and a next step."""
    model = make_model()
    with torch.no_grad():
        next(model.parameters())[7] = float("nan")
    with pytest.raises(DataError, match="not finite at token 0 of a completion of prompt 1"):
        TokenPolicy(model).generate_groups([[5], [7]], max_new_tokens=2, seed=0)


def test_generation_leaves_no_graph_and_no_mode_behind(make_model: Make) -> None:
    """Outputs carry no gradient, and training goes on afterwards."""
    policy = TokenPolicy(make_model())
    completion = policy.generate_groups([[5, 6]], max_new_tokens=4, seed=0)[0]
    assert not completion.log_probs.requires_grad
    ids = torch.tensor([[5, 6, *completion.token_ids]])
    policy.log_probs(ids, torch.ones_like(ids, dtype=torch.bool)).sum().backward()
    assert policy.head_weight.grad is not None
    # Outputs may enter autograd: they are ordinary tensors, not inference tensors.
    assert (completion.log_probs * torch.ones(1, requires_grad=True)).sum().requires_grad


def _bend_masks(model: PreTrainedModel, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Make the trunk treat its attention masks in its own way, as some architectures do."""
    trunk = model.base_model
    original = trunk.forward

    @functools.wraps(original)
    def forward(*args: object, attention_mask: torch.Tensor | None = None, **kwargs: object) -> object:
        changed = None if attention_mask is None else change(attention_mask)
        return original(*args, attention_mask=changed, **kwargs)

    trunk.forward = forward


def test_a_model_that_ignores_ready_made_masks_is_driven_with_plain_ones(make_model: Make, oracle: Oracle) -> None:
    """The engine finds out before the first completion, and log-probs stay exact."""
    model = make_model()
    _bend_masks(model, lambda mask: None if mask.ndim == 4 else mask)
    completions = TokenPolicy(model, num_slots=5).generate_groups(PROMPTS, max_new_tokens=9, seed=0)
    assert _worst_gap(model, oracle, completions, 1.0) < 1e-5


def test_a_model_that_ignores_all_masks_is_refused(make_model: Make) -> None:
    """Its completions would be those of no policy; scoring, which needs no mask, still works."""
    model = make_model()
    _bend_masks(model, lambda _mask: None)
    policy = TokenPolicy(model)
    with pytest.raises(
        DefinitionError, match="with a KV cache, its hidden states differ from those without a cache by"
    ):
        policy.generate_groups([[5], [6, 7]], seed=0)
    assert policy.log_probs(torch.tensor([[5, 6]]), torch.ones(1, 2, dtype=torch.bool)).shape == (1, 2)


def test_an_engine_is_checked_while_layers_are_recomputed(make_model: Make) -> None:
    """Such layers take no cache; they are restored, and completions are those of the plain model."""
    policy, request = TokenPolicy(make_model()), {"max_new_tokens": 5, "seed": 4}
    policy.checkpoint_activations()
    assert policy.engine.name == "slots"
    assert recomputes(policy.model)
    found, expected = (p.generate_ragged([[5, 6]], **request) for p in (policy, TokenPolicy(make_model())))
    assert found.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("num_slots", [5, 8])
@pytest.mark.parametrize("name", ["qwen2", "mistral", "gpt2"])
def test_cuda_gives_the_tokens_of_the_cpu(name: str, num_slots: int, make_model: Make) -> None:
    """Before and after a step: the same tokens in float32, log-probs within 1e-4."""
    here = TokenPolicy(make_model(name), num_slots=num_slots)
    there = TokenPolicy(make_model(name), num_slots=num_slots).to("cuda")
    for seed in (1, 2):
        on_cpu, on_cuda = (
            policy.generate_groups(PROMPTS, group_size=3, max_new_tokens=RAGGED, seed=seed) for policy in (here, there)
        )
        assert [c.token_ids for c in on_cpu] == [c.token_ids for c in on_cuda]
        for x, y in zip(on_cpu, on_cuda, strict=True):
            torch.testing.assert_close(x.log_probs, y.log_probs, atol=1e-4, rtol=0)
        with torch.no_grad():
            for parameter in (*here.parameters(), *there.parameters()):
                parameter.mul_(1.01)


def test_weights_that_do_not_change_on_the_way_change_nothing(make_model: Make) -> None:
    """Looking for newer weights in the middle of a rollout and finding none: the same tokens and log-probs."""
    policy = TokenPolicy(make_model("qwen2"), num_slots=5)
    asked = {"group_size": 3, "max_new_tokens": RAGGED, "seed": 1}
    plain = policy.generate_ragged(PROMPTS, **asked)
    looked = policy.generate_ragged(PROMPTS, **asked, refresh=WeightRefresh(lambda: 7, every=2, version=7))
    assert plain.spans is None
    assert looked.spans is not None
    assert looked.spans.lists() == [[(0, 7)]] * len(looked)
    assert (plain.token_ids == looked.token_ids).all()
    assert (plain.log_probs == looked.log_probs).all()
