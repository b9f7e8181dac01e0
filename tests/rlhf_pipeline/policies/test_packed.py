"""The layouts `packed` and `prefix_shared` against padded rows: same log-probs, same gradients, less work."""

from __future__ import annotations

import functools
from types import MethodType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_pipeline import CausalLMPolicy
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.policies.packed import LAYOUTS, plan_batches, plan_micro_batches
from tests.rlhf_pipeline.small import qwen2

LAYOUTS_TO_COMPARE = [layout for layout in LAYOUTS if layout != "padded"]
FITTING = ["qwen2", "qwen2-tied", "llama", "granite", "gemma3_text-capped", "phi", "gpt2", "gpt_neox", "opt", "jetmoe"]


def groups(*, seed=0, sizes=(3, 2, 3), prompt=11, completion=13, left=False):
    """Padded rows of several groups: token ids, attention mask and the mask of the completions."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for i, members in enumerate(sizes):
        start = torch.randint(2, 97, (prompt + i,), generator=g)
        for _ in range(members):
            length = int(torch.randint(1, completion + 1, (), generator=g))
            rows.append((start, torch.randint(2, 97, (length,), generator=g)))
    width = max(len(a) + len(b) for a, b in rows) + 2
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    attention = torch.zeros(len(rows), width, dtype=torch.bool)
    scored = torch.zeros_like(attention)
    for i, (a, b) in enumerate(rows):
        total = len(a) + len(b)
        at = slice(width - total, width) if left else slice(0, total)
        ids[i, at] = torch.cat([a, b])
        attention[i, at] = True
        scored[i, at] = torch.arange(total) >= len(a)
    return ids, attention, scored


def score(model, layout, batch):
    """Log-probs and the gradient of a weighted sum of them, flat."""
    policy = CausalLMPolicy(model, scoring_layout=layout)
    model.zero_grad(set_to_none=True)
    log_probs = policy.log_probs(*batch)
    weights = torch.linspace(-1, 1, log_probs.numel(), dtype=log_probs.dtype, device=log_probs.device)
    weights = weights.view_as(log_probs)
    (log_probs * weights).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return log_probs.detach(), gradient, policy


def compared_with_padded_rows(model, layout, batch):
    """Log-probs within 1e-6 and the gradient within 1e-6 of its norm, in float32; returns the policy of the layout."""
    expected, gradient, _ = score(model, "padded", batch)
    log_probs, found, policy = score(model, layout, batch)
    # Log-probs reach -20 here, so their float32 spacing is 2e-6.
    torch.testing.assert_close(log_probs, expected, rtol=3e-7, atol=1e-6)
    assert float((found - gradient).norm() / gradient.norm()) < 1e-6
    return policy


def computed_tokens(policy, batch):
    """How many positions the embedding looks up for one call."""
    seen = []
    hook = policy.model.get_input_embeddings().register_forward_hook(lambda _m, given, _out: seen.append(given[0]))
    with torch.no_grad():
        policy.log_probs(*batch)
    hook.remove()
    return seen[0].numel()


@pytest.mark.parametrize("layout", LAYOUTS_TO_COMPARE)
@pytest.mark.parametrize("name", FITTING)
def test_a_layout_gives_the_log_probs_and_gradients_of_padded_rows(make_model, name, layout):
    """With no fallback."""
    assert compared_with_padded_rows(make_model(name), layout, groups()).layout_notices() == []


@pytest.mark.parametrize("layout", LAYOUTS_TO_COMPARE)
def test_in_float64_the_layouts_agree_to_1e_12(make_model, layout):
    """The difference is rounding and nothing else. GPT-2, because Qwen2's norm computes in float32 by itself."""
    model = make_model("gpt2").double()
    batch = groups(seed=3)
    ids, attention, scored = batch
    hidden = {}
    gradients = {}
    for name in ("padded", layout):
        model.zero_grad(set_to_none=True)
        found = CausalLMPolicy(model, scoring_layout=name).scoring_rows(ids, attention, scored)
        found.hidden.square().sum().backward()
        hidden[name] = found.hidden.detach()
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(hidden[layout], hidden["padded"], rtol=1e-12, atol=1e-12)
    assert float((gradients[layout] - gradients["padded"]).norm() / gradients["padded"].norm()) < 1e-13


@pytest.mark.parametrize("layout", LAYOUTS_TO_COMPARE)
def test_another_rows_tokens_do_not_reach_a_row(make_model, layout):
    """Other completions and another group's prompt change; the log-probs of a row stay, bit for bit."""
    ids, attention, scored = groups()
    other = ids.clone()
    watched = torch.tensor([1, 4])
    others = torch.tensor([i for i in range(len(ids)) if i not in (1, 4)])
    other[others] = torch.where(scored[others], (ids[others] + 5) % 97, ids[others])
    other[5:] = torch.where(attention[5:], (ids[5:] + 7) % 97, ids[5:])
    policy = CausalLMPolicy(make_model(), scoring_layout=layout)
    with torch.no_grad():
        before, after = policy.log_probs(ids, attention, scored), policy.log_probs(other, attention, scored)
    assert torch.equal(before[watched], after[watched])
    assert not torch.equal(before[others], after[others])


def test_a_groups_prompt_is_computed_once(make_model):
    """Packed rows compute each needed token, shared ones the prompt once; the last token of a row predicts nothing."""
    batch = groups(sizes=(3, 2), prompt=10)
    lengths = batch[1].sum(1)
    expected = int(lengths.sum()) - 5
    packed = computed_tokens(CausalLMPolicy(make_model(), scoring_layout="packed"), batch)
    shared = computed_tokens(CausalLMPolicy(make_model(), scoring_layout="prefix_shared"), batch)
    assert packed == expected
    assert shared == expected - 2 * 10 - 1 * 11


def test_members_of_a_group_are_found_anywhere_in_the_batch(make_model):
    """Shuffled rows share the same prompts, and keep their places in the result."""
    batch = groups(sizes=(3, 2), prompt=10)
    order = torch.tensor([3, 0, 4, 2, 1])
    shuffled = tuple(x[order] for x in batch)
    policy = CausalLMPolicy(make_model(), scoring_layout="prefix_shared")
    assert computed_tokens(policy, shuffled) == computed_tokens(policy, batch)
    with torch.no_grad():
        torch.testing.assert_close(policy.log_probs(*shuffled), policy.log_probs(*batch)[order], rtol=1e-6, atol=1e-6)


def test_groups_that_share_a_long_start_are_cut_where_it_saves_most(make_model):
    """A common system prompt of 9 tokens does not keep two groups from sharing their own longer prompts."""
    g = torch.Generator().manual_seed(0)
    system = torch.randint(2, 97, (9,), generator=g)
    rows = []
    for start in (2, 50):
        prompt = torch.cat([system, torch.arange(start, start + 20)])
        rows += [torch.cat([prompt, torch.randint(2, 97, (4,), generator=g)]) for _ in range(3)]
    ids = torch.stack(rows)
    attention = torch.ones_like(ids, dtype=torch.bool)
    scored = torch.arange(ids.shape[1]).expand_as(ids) >= 29
    policy = CausalLMPolicy(make_model(), scoring_layout="prefix_shared")
    assert computed_tokens(policy, (ids, attention, scored)) <= 2 * 29 + 6 * 3


@pytest.mark.parametrize("layout", LAYOUTS_TO_COMPARE)
def test_padding_side_turns_and_empty_rows_do_not_matter(make_model, layout):
    """Left padding, tokens of others between two turns, a row with nothing scored and one with everything scored."""
    ids, attention, scored = groups(left=True)
    scored = scored.clone()
    scored[0, -3:-1] = False
    scored[2] = False
    scored[3] = attention[3]
    model = make_model("qwen2")
    compared_with_padded_rows(model, layout, (ids, attention, scored))
    nothing = CausalLMPolicy(model, scoring_layout=layout).scoring_rows(ids, attention, torch.zeros_like(scored))
    assert nothing.hidden.shape == (0, 32)


def test_a_row_that_is_the_start_of_its_neighbour(make_model):
    """A row may consist of shared tokens only."""
    ids = torch.randint(2, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    ids[1, :12] = ids[0, :12]
    attention = torch.ones_like(ids, dtype=torch.bool)
    attention[1, 12:] = False
    compared_with_padded_rows(make_model("qwen2"), "prefix_shared", (ids, attention, None))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), prompt=st.integers(1, 20)
)
def test_any_mix_of_groups_scores_as_padded(seed, sizes, prompt):
    """Group sizes, prompt lengths and completions as they come."""
    model = _shared_model()
    batch = groups(seed=seed, sizes=sizes, prompt=prompt)
    with torch.no_grad():
        expected = CausalLMPolicy(model).log_probs(*batch)
        for layout in LAYOUTS_TO_COMPARE:
            found = CausalLMPolicy(model, scoring_layout=layout).log_probs(*batch)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-6)


@functools.cache
def _shared_model():
    return qwen2(vocab_size=97, initializer_range=0.3)


@pytest.mark.parametrize("layout", LAYOUTS_TO_COMPARE)
def test_a_long_segment_after_a_prefix_goes_block_by_block(make_model, layout, monkeypatch):
    """Blocks of queries give what one call gives."""
    # The models of these tests have fewer positions than one block has queries.
    monkeypatch.setattr("rlhf_pipeline.policies._packed_attention.QUERY_BLOCK", 4)
    compared_with_padded_rows(make_model("qwen2"), layout, groups(seed=5))


@pytest.mark.parametrize("layout", LAYOUTS_TO_COMPARE)
def test_recomputed_layers_use_the_packed_attention_again(make_model, layout):
    """Activation checkpointing leaves the gradient alone, and the model's own attention comes back."""
    model = make_model("qwen2")
    batch = groups()
    _, gradient, _ = score(model, layout, batch)
    policy = CausalLMPolicy(model, scoring_layout=layout)
    policy.checkpoint_activations()
    _, found, _ = score(policy.model, layout, batch)
    policy.checkpoint_activations(False)
    assert torch.equal(found, gradient)
    assert model.config._attn_implementation == "sdpa"


def test_generation_is_untouched_by_the_layout(make_model):
    """The packed attention is in place only while rows are scored."""
    model = make_model("qwen2")
    plain = CausalLMPolicy(model, max_new_tokens=5)
    packed = plain.get_new_version(scoring_layout="prefix_shared")
    with torch.no_grad():
        packed.log_probs(*groups())
    one, other = (p.generate_groups([[5, 6, 7]], group_size=2, seed=0) for p in (plain, packed))
    assert [c.token_ids for c in one] == [c.token_ids for c in other]


def test_attention_that_cannot_be_replaced_falls_back_with_a_message(make_model):
    """StableLM computes attention itself; its rows are padded and the log-probs are right."""
    policy = compared_with_padded_rows(make_model("stablelm"), "packed", groups())
    assert "its attention is custom" in policy.layout_notices()[0]
    assert policy.layout_notices() == []


def test_one_layer_with_its_own_attention_is_enough_to_fall_back(make_model):
    """A layer that never calls the registered attention is counted."""
    model = make_model("qwen2")
    layer = model.model.layers[1].self_attn
    plain = type(layer).forward

    def own(self, *args, **kwargs):
        kwargs.pop("packed_segments", None)
        before, self.config = self.config, type(self.config)(**{**self.config.to_dict()})
        self.config._attn_implementation = "sdpa"
        try:
            return plain(self, *args, **kwargs)
        finally:
            self.config = before

    layer.forward = MethodType(own, layer)
    policy = compared_with_padded_rows(model, "prefix_shared", groups())
    assert "2 of its 3 layers" in policy.layout_notices()[0]


def running_mean(x):
    """Causal in padded rows; it leaks between packed ones."""
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def nan_in_long_rows(x):
    """Overflows where the rows of a batch stand behind one another."""
    return torch.full_like(x, float("nan") if x.shape[1] > 60 else 0.0)


@pytest.mark.parametrize("added", [running_mean, nan_in_long_rows])
def test_a_layer_that_differs_in_packed_rows_is_found_by_the_first_batch(make_model, added):
    """Rows are padded then, and a notice says why."""
    model = make_model("qwen2")
    mlp = model.model.layers[0].mlp
    plain = type(mlp).forward
    mlp.forward = MethodType(lambda self, x: plain(self, x) + added(x), mlp)
    policy = compared_with_padded_rows(model, "packed", groups())
    notice = policy.layout_notices()[0]
    assert "log-probs differ from those of padded rows" in notice
    assert "padded from this step on" in notice
    assert policy.scoring_layout == "packed"


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "qwen2-sliding"])
def test_rows_longer_than_a_sliding_window_are_padded(make_model, name):
    """Short rows are packed, long ones padded, and both are right; one message tells."""
    model = make_model(name)
    policy = CausalLMPolicy(model, scoring_layout="packed")
    long, short = groups(), groups(prompt=1, sizes=(1, 1), completion=2)
    with torch.no_grad():
        for batch in (short, long, groups(seed=1, prompt=15)):
            expected = CausalLMPolicy(model).log_probs(*batch)
            torch.testing.assert_close(policy.log_probs(*batch), expected, rtol=3e-7, atol=1e-6)
            if batch is short:
                assert policy.layout_notices() == []
    notices = policy.layout_notices()
    assert len(notices) == 1
    assert "window of" in notices[0]


@pytest.mark.parametrize("initializer_range", [0.2, 0.28, 0.4])
def test_rounding_does_not_decide_which_layout_a_process_uses(initializer_range):
    """Layouts of eight bfloat16 layers differ by 0.024 to 0.034 a token, which is rounding: such rows stay shared."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=initializer_range,
    )  # fmt: skip
    policy = CausalLMPolicy(Qwen2ForCausalLM(config).bfloat16(), scoring_layout="prefix_shared")
    ids, attention, scored = groups(prompt=40, completion=20)
    with torch.no_grad():
        policy.log_probs(ids, attention, scored)
        assert policy.layout_notices() == []
        assert policy.take_computed() == {
            "layout": "prefix_shared",
            "attention": "sdpa",
            "dtype": "bfloat16",
            "compiled": "none",
        }
        policy.log_probs(ids[:1], attention[:1], scored[:1])
        policy.scoring_layout = "padded"
        policy.log_probs(ids, attention, scored)
    assert policy.take_computed() == {"layout": "padded", "attention": "sdpa", "dtype": "bfloat16", "compiled": "none"}


def test_auto_reports_a_layout_that_fails_its_check(make_model):
    """What cannot be packed is padded quietly; a chosen layout that gives other log-probs is named."""
    model = make_model("qwen2")
    mlp = model.model.layers[0].mlp
    plain = type(mlp).forward
    mlp.forward = MethodType(lambda self, x: plain(self, x) + running_mean(x), mlp)
    policy = compared_with_padded_rows(model, "auto", groups(prompt=180, completion=60))
    (notice,) = policy.layout_notices()
    assert "layout 'auto' is not suitable for this model: log-probs differ from those of padded rows" in notice


def test_bfloat16_rows_stay_packed(make_model):
    """The first-use check allows the rounding of half precision."""
    model = make_model("qwen2").bfloat16()
    policy = CausalLMPolicy(model, scoring_layout="prefix_shared")
    with torch.no_grad():
        found = policy.log_probs(*groups())
        expected = CausalLMPolicy(model).log_probs(*groups())
    assert policy.layout_notices() == []
    assert float((found - expected).abs().mean()) < 2e-2


def test_auto_takes_what_costs_less(make_model):
    """A long prompt of a group is computed once; rows as short as a segment's cost are padded; the plan says so too."""
    policy = CausalLMPolicy(make_model(), scoring_layout="auto")
    width = int(policy.head_weight.shape[1])
    for prompt, shared in ((800 // width * 3, True), (9, False)):
        ids = torch.randint(5, 90, (1, prompt)).expand(4, -1)
        ids = torch.cat([ids, torch.arange(8).view(4, 2)], 1)
        mask = torch.ones_like(ids, dtype=torch.bool)
        once, rows = prompt + 4, 4 * (prompt + 2)
        assert computed_tokens(policy, (ids, mask, torch.arange(prompt + 2).expand(4, -1) >= prompt)) == (
            once if shared else rows
        )
        plan = plan_micro_batches(
            "auto", [prompt + 2] * 4, 9999, prompt_lengths=[prompt] * 4, group_ids=[0] * 4, weight=policy.head_weight
        )
        assert plan.positions == [prompt + 8 if shared else rows]


def test_auto_says_nothing_of_a_model_that_it_pads(make_model, monkeypatch):
    """A model whose attention cannot be replaced is padded, as asked for: no notice."""
    model = make_model()
    policy = CausalLMPolicy(model, scoring_layout="auto")
    monkeypatch.setattr(type(model.model), "_supports_attention_backend", False)
    batch = groups()
    assert computed_tokens(policy, batch) == computed_tokens(CausalLMPolicy(model), batch)
    assert policy.layout_notices() == []


def test_an_unknown_layout_names_the_nearest():
    """A typing error is told where it is made."""
    with pytest.raises(DefinitionError, match="Did you mean 'packed'"):
        plan_micro_batches("pakced", [1], 4)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=30),
    st.integers(50, 120),
    st.sampled_from(LAYOUTS),
)
def test_a_plan_holds_each_row_once_and_keeps_to_the_budget(rows, budget, layout):
    """Whatever the groups; the same rows give the same plan."""
    group_ids = [group for group, _ in rows]
    prompts = [2 * group + 1 for group in group_ids]
    lengths = [prompt + own for prompt, (_, own) in zip(prompts, rows, strict=True)]
    known = {"prompt_lengths": prompts, "group_ids": group_ids, "weight": torch.zeros(9, 64)}
    plan = plan_micro_batches(layout, lengths, budget, **known)
    assert sorted(i for batch in plan.rows for i in batch.tolist()) == list(range(len(rows)))
    assert all(0 < size <= budget for size in plan.positions)
    again = plan_micro_batches(layout, torch.tensor(lengths), budget, **known)
    assert [b.tolist() for b in again.rows] == [b.tolist() for b in plan.rows]


def test_groups_stay_whole_and_a_large_one_is_cut():
    """Groups of 10 + 3 x 5 and 10 + 2 x 5 positions under a budget of 26, then one group of 10 + 6 x 5."""
    plan = plan_micro_batches("prefix_shared", [15] * 5, 26, prompt_lengths=[10] * 5, group_ids=[0, 1, 0, 1, 0])
    assert [b.tolist() for b in plan.rows] == [[0, 2, 4], [1, 3]]
    assert plan.positions == [25, 20]
    cut = plan_micro_batches("prefix_shared", [15] * 6, 26, prompt_lengths=[10] * 6, group_ids=[7] * 6)
    assert [b.tolist() for b in cut.rows] == [[0, 1, 2], [3, 4, 5]]
    assert cut.positions == [25, 25]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_above_the_budget_is_a_micro_batch_by_itself(layout):
    """Rows of 9 and 11 tokens under a budget of 8, and two of 4 that still share a micro-batch."""
    plan = plan_micro_batches(
        layout, [4, 9, 4, 11], 8, prompt_lengths=[1] * 4, group_ids=[0] * 4, weight=torch.zeros(9, 900)
    )
    assert sorted(sorted(rows.tolist()) for rows in plan.rows) == [[0, 2], [1], [3]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", LAYOUTS_TO_COMPARE)
def test_the_variable_length_kernel_agrees_with_padded_rows(make_model, layout):
    """bfloat16 on CUDA: log-probs and gradients within the rounding of half precision."""
    model = make_model("qwen2", hidden_size=256, intermediate_size=512).bfloat16().cuda()
    batch = tuple(x.cuda() for x in groups(prompt=40, completion=60))
    expected, gradient, _ = score(model, "padded", batch)
    log_probs, found, policy = score(model, layout, batch)
    assert policy.layout_notices() == []
    assert float((log_probs - expected).abs().mean()) < 2e-2
    assert float((found.float() - gradient.float()).norm() / gradient.float().norm()) < 5e-2


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 64), max_size=40),
    budget=st.integers(64, 300),
)
def test_a_plan_holds_every_row_once_within_the_budget(lengths, budget):
    """Each row is in one batch, and no padded batch is above the budget."""
    plan = plan_batches(torch.tensor(lengths, dtype=torch.int64), budget)
    seen = sorted(i for batch in plan for i in batch.tolist())
    assert seen == list(range(len(lengths)))
    for batch in plan:
        assert len(batch) * max(lengths[i] for i in batch.tolist()) <= budget


def test_sorted_plan_wastes_little():
    """On log-normal lengths the plan keeps over 0.85 of the positions real; one batch does not reach 0.6."""
    for seed in range(8):
        g = torch.Generator().manual_seed(seed)
        lengths = (120 + (5 + 0.8 * torch.randn(64, generator=g)).exp().clamp(max=2048)).long()
        plan = plan_batches(lengths, 8192)
        padded = sum(len(batch) * int(lengths[batch].max()) for batch in plan)
        assert int(lengths.sum()) / padded > 0.85
        assert int(lengths.sum()) / (len(lengths) * int(lengths.max())) < 0.6
        assert len(plan) <= -(-int(lengths.sum()) // 8192) + 5


def test_overhead_trades_batches_for_padding():
    """A batch costs a sixteenth of the budget: where that is little equal rows part from others, else all join."""
    assert [b.tolist() for b in plan_batches([4, 4, 1], 16)] == [[0, 1], [2]]
    assert [b.tolist() for b in plan_batches([4, 4, 1], 100)] == [[0, 1, 2]]


def test_ties_keep_their_order():
    """Equal lengths stay in order, so the plan is the same every time."""
    assert [b.tolist() for b in plan_batches([3, 3, 3, 3], 6)] == [[0, 1], [2, 3]]


def test_a_plan_without_a_budget_is_refused():
    """The message names the setting."""
    with pytest.raises(DefinitionError, match="token_budget"):
        plan_batches([3], 0)
