"""One optimizer step's gradient, however its trajectories are cut and laid out."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_pipeline import CausalLMPolicy, GRPOLoss
from rlhf_pipeline.functional.aggregation import AGGREGATIONS, contributes, token_weights
from rlhf_pipeline.losses.grpo import GRPOLossOutput
from rlhf_pipeline.policies.packed import LAYOUTS, plan_micro_batches
from tests.rlhf_pipeline.small import qwen2

VOCAB, GROUPS, SIZE, PROMPT = 61, 3, 4, 9


def strong():
    """A small Qwen2 with strong weights."""
    return qwen2(32, vocab_size=VOCAB, tie_word_embeddings=True, initializer_range=0.15)


def gpt2():
    """A small GPT-2 in float64; every operation in it keeps float64, unlike Qwen2's norm."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.15, bos_token_id=None
    )
    return GPT2LMHeadModel(config).double().eval()


def step_batch(policy, *, seed=0, flat_groups=()):
    """The trajectories of one step, padded, with stale log-probs; groups in `flat_groups` have advantage 0."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for group in range(GROUPS):
        prompt = torch.randint(0, VOCAB, (PROMPT + group,), generator=g)
        for _ in range(SIZE):
            own = int(torch.randint(1, 20, (), generator=g))
            rows.append((prompt, torch.randint(0, VOCAB, (own,), generator=g)))
    width = max(len(a) + len(b) for a, b in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    attention = torch.zeros(len(rows), width, dtype=torch.bool)
    assistant = attention.clone()
    for i, (a, b) in enumerate(rows):
        total = len(a) + len(b)
        tokens[i, :total] = torch.cat([a, b])
        attention[i, :total] = True
        assistant[i, len(a) : total] = True
    dtype = policy.head_weight.dtype
    with torch.no_grad():
        current = policy.log_probs(tokens, attention, assistant).to(dtype)
    noise = 0.3 * torch.randn(2, *tokens.shape, generator=g).to(dtype)
    value = torch.randn(len(rows), generator=g).to(dtype)
    group_ids = torch.arange(len(rows)) // SIZE
    for group in flat_groups:
        value[group_ids == group] = 0.0
    return TensorDict(
        {
            "tokens": {"full": tokens},
            "masks": {"all_assistant_mask": assistant, "all_attention_mask": attention},
            "log_probs": {"full": (current + noise[0]) * assistant},
            "next": {"ref_log_probs": {"full": (current + noise[1]) * assistant}},
            "advantage": value[:, None] * assistant,
            "scalar_advantage": value,
            "group_id": group_ids,
            "num_prompt_tokens": torch.tensor([len(a) for a, _ in rows]),
        },
        batch_size=[len(rows)],
    )


def step_gradient(policy, td, splits, *, layout="padded", aggregation="token_mean", **options):
    """Accumulate the gradient over micro-batches with the weights of the whole step."""
    policy.scoring_layout = layout
    loss = GRPOLoss(policy, aggregation=aggregation, **options)
    policy.model.zero_grad(set_to_none=True)
    mask = td["masks", "all_assistant_mask"]
    lengths = mask.sum(1)
    dtype = policy.head_weight.dtype
    weights = token_weights(lengths, aggregation, groups=td["group_id"], max_completion_tokens=20, dtype=dtype)
    outputs = []
    for rows in splits:
        part = td[rows]
        part["loss_weight"] = weights[rows][:, None] * part["masks", "all_assistant_mask"]
        out = loss(part)
        out.total_loss().backward()
        outputs.append(out)
    assert policy.layout_notices() == []
    gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    return gradient, float(GRPOLossOutput.merge(outputs).total_loss())


def plan(td, layout, budget):
    """The micro-batches of a layout."""
    lengths = td["masks", "all_attention_mask"].sum(1)
    return plan_micro_batches(
        layout,
        lengths,
        budget,
        prompt_lengths=td["num_prompt_tokens"],
        group_ids=td["group_id"],
        weight=torch.zeros(9, 64),
    ).rows


OPTIONS = {
    "grpo": {"kl_to_ref_coeff": 0.1, "entropy_bonus": True},
    "cispo": {"objective": "cispo", "entropy_bonus": False, "aggregation": "dr_grpo"},
    "gspo": {"objective": "gspo", "entropy_bonus": False, "aggregation": "sequence_mean", "clip_epsilon": 0.3},
    "recompute": {"head": "recompute", "entropy_bonus": True, "kl_to_ref_coeff": 0.1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("budget", [45, 400])
def test_the_gradient_of_a_step_does_not_depend_on_split_or_layout(name, layout, budget):
    """At most 1e-6 of its norm in float32, against one padded batch of everything."""
    policy = CausalLMPolicy(strong())
    td = step_batch(policy)
    everything = [torch.arange(len(td))]
    expected, value = step_gradient(policy, td, everything, **OPTIONS[name])
    found, total = step_gradient(policy, td, plan(td, layout, budget), layout=layout, **OPTIONS[name])
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    assert total == pytest.approx(value, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_in_float64_the_gradients_differ_by_rounding_only(name, layout):
    """1e-13 of the norm, so that nothing hides behind a tolerance."""
    policy = CausalLMPolicy(gpt2())
    td = step_batch(policy, seed=1)
    expected, _ = step_gradient(policy, td, [torch.arange(len(td))], **OPTIONS[name])
    found, _ = step_gradient(policy, td, plan(td, layout, 90), layout=layout, **OPTIONS[name])
    assert float((found - expected).norm() / expected.norm()) < 1e-13


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rows_without_a_gradient_may_be_left_out_but_not_out_of_the_counts(layout, aggregation):
    """A group without spread is skipped; the gradient stays that of all rows, and its loss too."""
    policy = CausalLMPolicy(strong())
    td = step_batch(policy, flat_groups=(1,))
    options = {"entropy_bonus": False, "aggregation": aggregation}
    expected, value = step_gradient(policy, td, [torch.arange(len(td))], **options)
    useful = contributes(td["scalar_advantage"]).nonzero()[:, 0]
    assert len(useful) == len(td) - SIZE
    splits = [useful[rows] for rows in plan(td[useful], layout, 90)]
    found, total = step_gradient(policy, td, splits, layout=layout, **options)
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    assert total == pytest.approx(value, rel=1e-5, abs=1e-7)
    # Leaving them out of the counts as well would make the step larger.
    kept = td[useful]
    larger, _ = step_gradient(policy, kept, [torch.arange(len(kept))], **options)
    assert float(larger.norm() / expected.norm()) > 1.1


@pytest.mark.parametrize("options", [{"entropy_bonus": True}, {"entropy_bonus": False, "kl_to_ref_coeff": 0.1}])
def test_with_an_entropy_or_kl_term_every_row_has_a_gradient(options):
    """Then `contributes` keeps all rows, and a group without spread moves the gradient."""
    policy = CausalLMPolicy(strong())
    td = step_batch(policy, flat_groups=(1,))
    terms = {"kl_loss": options.get("kl_to_ref_coeff") is not None, "entropy_bonus": options["entropy_bonus"]}
    assert bool(contributes(td["scalar_advantage"], **terms).all())
    everything, _ = step_gradient(policy, td, [torch.arange(len(td))], **options)
    without, _ = step_gradient(policy, td, [contributes(td["scalar_advantage"]).nonzero()[:, 0]], **options)
    assert float((everything - without).norm() / everything.norm()) > 1e-3
