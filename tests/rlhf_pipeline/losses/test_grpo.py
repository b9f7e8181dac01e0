"""Tests of the loss: its value, its gradient, its splits and its masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import lazy_stack
from torchrl.objectives.common import LossModule

from rlhf_pipeline import GRPOLoss, GRPOLossOutput
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.functional.aggregation import (
    AGGREGATIONS,
    token_weights,
)
from tests.rlhf_pipeline.functional.watch import Watch

MASK = ("masks", "all_assistant_mask")
LOG_PROBS = ("log_probs", "full")
REF = ("next", "ref_log_probs", "full")


def grpo(policy, **options: Any) -> GRPOLoss:
    """The loss with options from a parametrised test."""
    return GRPOLoss(policy, **options)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    ("objective", "clip"),
    [("grpo", 0.2), ("grpo", (0.1, 0.28)), ("cispo", 0.2), ("gspo", (0.05, 0.1))],
)
@pytest.mark.parametrize("head", ["fused", "recompute"])
def test_loss_and_gradient_equal_a_plain_loop(tiny, head, objective, clip, aggregation):
    """In float64 the loss and the gradient equal loops over all logits to 1e-12; in float32 to 1e-5."""
    if head == "fused" and objective == "gspo":
        head = "auto"
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        policy = tiny.Policy(dtype, temperature=0.8, bias=True)
        exact = tiny.Policy(torch.float64, temperature=0.8, bias=True)
        exact.load_state_dict(policy.state_dict())
        td = tiny.make_batch(policy)
        loss = GRPOLoss(
            policy,
            clip_epsilon=clip,
            objective=objective,
            aggregation=aggregation,
            entropy_coeff=0.03,
            kl_to_ref_coeff=0.1,
            kl_to_inference_coeff=0.2,
            kl_estimator="k3",
            max_completion_tokens=8,
            head=head,
            chunk_size=4,
        )
        want = tiny.plain_loss(
            exact,
            tiny.as_double(td),
            low=low,
            high=high,
            objective=objective,
            aggregation=aggregation,
            entropy=0.03,
            kl_ref=0.1,
            kl_inference=0.2,
            max_tokens=8,
        )
        got = loss(td).total_loss()
        assert got.item() == pytest.approx(want.item(), rel=limit, abs=limit)
        assert tiny.relative(tiny.gradient(policy, got), tiny.gradient(exact, want)) < limit


def test_weights_of_the_batch_are_those_of_token_weights(tiny):
    """Without `loss_weight` the batch's own counts give the same loss."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    for aggregation in ("token_mean", "prompt_mean"):
        loss = GRPOLoss(policy, aggregation=aggregation)
        plain = loss(td).total_loss().item()
        fixed = td.copy()
        fixed["loss_weight"] = token_weights(td[MASK].sum(1), aggregation)[:, None] * td[MASK]
        assert loss(fixed).total_loss().item() == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("extra", [1, 13])
def test_padding_dilutes_nothing(tiny, extra):
    """More padding columns change no loss and no diagnostic."""
    policy = tiny.Policy()
    loss = GRPOLoss(policy, kl_to_ref_coeff=0.1, kl_to_inference_coeff=0.1)
    short, long = loss(tiny.make_batch(policy)), loss(tiny.make_batch(policy, extra=extra))
    for name, value in short.items():
        torch.testing.assert_close(long.get(name), value, rtol=2e-5, atol=2e-6, msg=name)


def test_figures_by_hand(tiny):
    """Two tokens of five count: ratios 1.5 and 0.5, so every figure is a mean over two."""
    ln = tiny.ln
    actor = tiny.Scorer([[0.0, 0.0, ln(0.6), ln(0.1), 0.0]])
    mask = [[False, False, True, True, False]]
    attention = [[True, True, True, True, False]]
    td = tiny.scorer_batch(
        mask,
        [[0.0, 0.0, ln(0.4), ln(0.2), 0.0]],
        [[9.0, 9.0, 2.0, -1.0, 9.0]],
        attention=attention,
        ref=[[0.0, 0.0, ln(0.3), ln(0.1), 7.0]],
    )
    loss = GRPOLoss(
        actor,
        entropy_bonus=False,
        kl_to_ref_coeff=0.1,
        kl_to_inference_coeff=1.0,
        clip_epsilon=(0.2, 0.28),
    )
    out = loss(td)
    assert out.loss_objective.item() == pytest.approx((-1.28 * 2 + 0.8 * 1) / 2)
    assert out.clip_fraction_high.item() == 0.5
    assert out.clip_fraction_low.item() == 0.5
    assert out.clip_fraction.item() == 1.0
    assert out.kl_approx.item() == pytest.approx((ln(0.4 / 0.6) + ln(0.2 / 0.1)) / 2)
    k3 = (0.5 - 1 + ln(2.0)) / 2
    assert out.kl_to_ref.item() == pytest.approx(k3)
    assert out.loss_kl_to_ref.item() == pytest.approx(0.1 * k3)
    k3 = ((0.4 / 0.6 - 1 + ln(1.5)) + (2.0 - 1 - ln(2.0))) / 2
    assert out.kl_to_inference.item() == pytest.approx(k3)
    assert out.loss_kl_to_inference.item() == pytest.approx(k3)
    assert out.ESS.item() == pytest.approx(4 / (2 * (2.25 + 0.25)))
    assert out.ess_sequence.item() == 1.0
    assert out.num_tokens.item() == 2
    assert out.entropy is None


def test_entropy_is_a_mean_over_the_completion(tiny):
    """The entropy and its bonus are means over assistant tokens, equal to those from all logits."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    _, entropy = tiny.log_probs_of(policy, td["tokens", "full"], td["masks", "all_attention_mask"])
    want = entropy[td[MASK]].mean().item()
    for bonus in (True, False):
        out = GRPOLoss(policy, entropy_bonus=bonus, entropy_coeff=0.5)(td)
        assert out.entropy.item() == pytest.approx(want, rel=1e-5)
        if bonus:
            assert out.loss_entropy.item() == pytest.approx(-0.5 * want, rel=1e-5)
        else:
            assert out.loss_entropy is None


@pytest.mark.parametrize("options", [{}, {"head": "recompute"}, {"objective": "gspo"}])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_mask_without_a_token_gives_zeros(tiny, options, aggregation):
    """No assistant token: loss and diagnostics are 0 and the backward pass gives zeros, never NaN."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    td[MASK] = torch.zeros_like(td[MASK])
    loss = grpo(policy, aggregation=aggregation, max_completion_tokens=8, kl_to_ref_coeff=0.1, **options)
    out = loss(td)
    assert all(value.item() == 0 for value in out.values())
    assert tiny.gradient(policy, out.total_loss()).abs().sum() == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_without_finite_behaviour_leaves_loss_and_count(tiny, bad):
    """A NaN behaviour log-prob acts as if the mask had left the token out."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    hurt, masked = td.clone(), td.clone()
    hurt[LOG_PROBS][0, 5] = bad
    masked[MASK][0, 5] = False
    loss = GRPOLoss(policy, kl_to_inference_coeff=0.1)
    got, want = loss(hurt), loss(masked)
    for name, value in want.items():
        torch.testing.assert_close(got.get(name), value, rtol=1e-5, atol=1e-6, msg=name)
    assert torch.isfinite(tiny.gradient(policy, got.total_loss())).all()


def test_nan_outside_the_mask_reaches_nothing(tiny):
    """Prompt and padding may hold NaN log-probs, references and advantages."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    want = GRPOLoss(policy, kl_to_ref_coeff=0.1)(td)
    for key in (LOG_PROBS, REF, "advantage"):
        td[key] = td[key].masked_fill(~td[MASK], math.nan)
    got = GRPOLoss(policy, kl_to_ref_coeff=0.1)(td)
    assert tiny.relative(tiny.gradient(policy, got.total_loss()), tiny.gradient(policy, want.total_loss())) < 1e-6


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_leaves_are_padded_on_one_side(tiny, side):
    """A lazy stack of ragged trajectories with per-token advantages equals the padded batch.

    TorchRL pads the advantage on one side and the log-probs on the other.
    """
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    td["advantage"] = td["advantage"] * torch.linspace(0.5, 1.5, td["advantage"].shape[1])
    total = td["masks", "all_attention_mask"].sum(1).tolist()
    rows = []
    for i, n in enumerate(total):
        row = td[i].clone()
        for key in list(row.keys(include_nested=True, leaves_only=True)):
            if row[key].ndim == 1:
                row[key] = row[key][:n]
        rows.append(row)
    want = GRPOLoss(policy, kl_to_ref_coeff=0.1)(td)
    got = GRPOLoss(policy, kl_to_ref_coeff=0.1, padding_side=side)(lazy_stack(rows))
    for name, value in want.items():
        torch.testing.assert_close(got.get(name), value, rtol=1e-4, atol=1e-5, msg=name)


def test_jagged_leaves_equal_the_padded_batch(tiny):
    """A batch whose leaves are jagged nested tensors gives the loss of the padded one."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    attention = td["masks", "all_attention_mask"]
    ragged = td.clone()
    for key in list(td.keys(include_nested=True, leaves_only=True)):
        if td[key].ndim == 2:
            rows = [row[keep] for row, keep in zip(td[key], attention, strict=True)]
            ragged[key] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    want, got = GRPOLoss(policy)(td), GRPOLoss(policy)(ragged)
    assert got.total_loss().item() == pytest.approx(want.total_loss().item(), rel=1e-5)
    del ragged["masks", "all_attention_mask"]
    again = GRPOLoss(policy)(ragged)
    assert again.total_loss().item() == pytest.approx(want.total_loss().item(), rel=1e-5)


@pytest.mark.parametrize("shape", ["[B, T]", "[B, T, 1]", "[B]", "[B, 1]"])
def test_shapes_of_advantages(tiny, shape):
    """An advantage per token or per trajectory, with or without a trailing one, is the same loss."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    want = GRPOLoss(policy)(td).total_loss().item()
    full = td["advantage"]
    per_row = torch.tensor([1.0, -1.0, 0.5, -0.7])
    forms = {"[B, T]": full, "[B, T, 1]": full[..., None], "[B]": per_row, "[B, 1]": per_row[:, None]}
    td["advantage"] = forms[shape]
    td[LOG_PROBS] = td[LOG_PROBS][..., None]
    assert GRPOLoss(policy)(td).total_loss().item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"entropy_bonus": False}, {"head": "recompute"}])
def test_logits_of_the_batch_never_exist(tiny, options):
    """The largest tensor of a step is the head's weight, not [B, T, V] nor [N, V]."""
    policy = tiny.Bigram(vocab=512, hidden=4)
    td = tiny.make_batch(tiny.Policy())
    with Watch() as seen:
        grpo(policy, chunk_size=2, **options)(td).total_loss().backward()
    assert seen.numel == policy.head_weight.numel()
    assert seen.numel < int(td[MASK].sum()) * 512 / 3


@pytest.mark.parametrize("options", [{}, {"entropy_bonus": False}, {"head": "recompute"}])
def test_the_loss_reads_no_number_back(tiny, options):
    """The forward pass of the loss takes no value from a tensor to the host, which would stop a GPU."""
    td = tiny.make_batch(tiny.Policy())
    loss = grpo(tiny.Bigram(), kl_to_ref_coeff=0.1, **options)
    with Watch() as seen:
        loss(td)
    assert torch.ops.aten._local_scalar_dense not in seen.names


def test_the_batch_is_not_changed_and_takes_no_gradient(tiny):
    """The loss writes nothing into its batch, and refuses log-probs that carry a graph, as TorchRL does."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    before = td.clone()
    GRPOLoss(policy)(td).total_loss().backward()
    assert set(td.keys(True, True)) == set(before.keys(True, True))
    td[LOG_PROBS] = td[LOG_PROBS].clone().requires_grad_() * 1.0
    with pytest.raises(DataError, match=r"\('log_probs', 'full'\) requires a gradient.*detach\(\)"):
        GRPOLoss(policy)(td)


def test_per_token_losses(tiny):
    """`reduction="none"` gives [B, T] with zeros outside the mask; `"sum"` is its sum."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    rows = GRPOLoss(policy, reduction="none", kl_to_ref_coeff=0.1)(td)
    also = GRPOLoss(policy, aggregation="none", kl_to_ref_coeff=0.1)(td)
    total = GRPOLoss(policy, reduction="sum", kl_to_ref_coeff=0.1)(td)
    for name in ("loss_objective", "loss_entropy", "loss_kl_to_ref"):
        value = rows.get(name)
        assert value.shape == td[MASK].shape
        assert (value[~td[MASK]] == 0).all()
        torch.testing.assert_close(value, also.get(name))
        torch.testing.assert_close(value.sum(), total.get(name), rtol=1e-5, atol=1e-5)
    assert (
        tiny.relative(tiny.gradient(policy, rows.total_loss().sum()), tiny.gradient(policy, total.total_loss())) < 1e-5
    )


def test_it_is_a_torchrl_loss_module(tiny):
    """It is a LossModule with keys that `set_keys` changes, and its parameters are the policy's."""
    policy = tiny.Policy()
    loss = GRPOLoss(policy)
    assert isinstance(loss, LossModule)
    assert loss.tensor_keys.advantage == "advantage"
    loss.set_keys(advantage="gain", sample_log_prob="old")
    assert "gain" in loss.in_keys
    assert "old" in loss.in_keys
    td = tiny.make_batch(policy)
    want = GRPOLoss(policy)(td)
    td["gain"], td["old"] = td.pop("advantage"), td.pop(LOG_PROBS)
    got = loss(td)
    assert got.total_loss().item() == want.total_loss().item()
    assert {id(p) for p in loss.parameters()} == {id(p) for p in policy.parameters()}
    with pytest.raises(ValueError, match="not an accepted tensordict key"):
        loss.set_keys(advantages="gain")


def test_out_keys_name_what_is_filled(tiny):
    """`out_keys` lists the fields of the output that are not None."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    both = {"kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.1}
    for options in ({}, {"entropy_bonus": False}, both):
        loss = grpo(policy, **options)
        assert set(loss.out_keys) == {name for name, v in loss(td).items() if v is not None}


def test_coefficients_may_change_between_steps(tiny):
    """Clip bounds and coefficients are read at the time of the call."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    loss = GRPOLoss(policy)
    first = loss(td)
    loss.entropy_coeff, loss.clip_epsilon_high = 0.5, 0.9
    second, want = loss(td), GRPOLoss(policy, entropy_coeff=0.5, clip_epsilon=(0.2, 0.9))(td)
    assert second.total_loss().item() == want.total_loss().item()
    assert second.total_loss().item() != first.total_loss().item()


def test_merged_outputs_equal_the_whole_batch(tiny):
    """Merging micro-batches gives every figure of the whole, where reference log-probs are missing too."""
    policy = tiny.Policy()
    td = tiny.make_batch(policy)
    td[REF][0, 4:6] = math.nan
    td["loss_weight"] = token_weights(td[MASK].sum(1))[:, None] * td[MASK]
    loss = GRPOLoss(policy)
    whole = loss(td)
    for split in ([td[:1], td[1:]], [td[:2], td[2:3], td[3:]]):
        merged = GRPOLossOutput.merge([loss(part) for part in split])
        for name, value in whole.items():
            torch.testing.assert_close(merged.get(name), value.detach(), rtol=1e-5, atol=1e-6, msg=name)
    with pytest.raises(ValueError, match="no output to merge"):
        GRPOLossOutput.merge([])
