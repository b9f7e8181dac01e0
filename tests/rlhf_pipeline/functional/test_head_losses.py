"""Tests of the head that forms its gradient in the forward pass."""

from __future__ import annotations

import pytest
import torch

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.functional.head import Head, fused_token_loss, token_log_probs
from tests.rlhf_pipeline.functional.watch import Watch, relative

N, H, V = 37, 16, 53


def make(dtype, seed=0):
    """Hidden states, weight, bias with gradient; targets and two rows of constants."""
    g = torch.Generator().manual_seed(seed)
    leaves = [
        torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((N, H), (V, H), (V,))
    ]
    targets = torch.randint(0, V, (N,), generator=g)
    return leaves, targets, torch.randn(2, N, generator=g, dtype=torch.float64).to(dtype)


def objective(log_probs, entropy, a, c):
    """Two terms that are not linear in the log-prob, and one in the entropy if it is given."""
    terms = [a * log_probs.exp(), -c * log_probs.square()]
    return terms if entropy is None else [*terms, c * entropy.square()]


def oracle(leaves, targets, rows, temperature, with_entropy, cap=None):
    """The same terms in float64 by log_softmax over all logits."""
    exact = [z.detach().double().requires_grad_() for z in leaves]
    logits = exact[0] @ exact[1].t() + exact[2]
    log_p = torch.log_softmax((logits if cap is None else cap * torch.tanh(logits / cap)) / temperature, -1)
    chosen = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    terms = objective(chosen, entropy if with_entropy else None, *rows.double())
    return [t.sum() for t in terms], chosen, entropy, exact


@pytest.mark.parametrize("cap", [None, 2.5])
@pytest.mark.parametrize("chunk", [1, 8, 1000])
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_and_gradient_equal_log_softmax(dtype, limit, with_entropy, chunk, cap):
    """Losses, log-probs, entropies and gradients agree with a float64 reference, for any chunk, capped or not."""
    leaves, targets, rows = make(dtype)
    out = fused_token_loss(
        leaves[0],
        Head(leaves[1], leaves[2], temperature=0.7, soft_cap=cap),
        targets,
        objective,
        list(rows),
        terms=3 if with_entropy else 2,
        entropy_gradient=with_entropy,
        chunk_size=chunk,
    )
    sums, chosen, entropy, exact = oracle(leaves, targets, rows, 0.7, with_entropy, cap)
    assert relative(out.log_probs, chosen) < limit
    assert relative(out.entropy, entropy) < limit
    for a, b in zip(out.losses, sums, strict=True):
        assert a.item() == pytest.approx(b.item(), rel=limit, abs=limit)
    got = torch.autograd.grad(torch.stack(out.losses).sum() * 3, leaves)
    want = torch.autograd.grad(torch.stack(sums).sum() * 3, exact)
    assert max(relative(a, b) for a, b in zip(got, want, strict=True)) < limit


@pytest.mark.parametrize("scales", [(2.0, 1.0, 0.5), (1.0, 0.0, 0.0)])
def test_terms_with_different_gradients_are_right_too(scales):
    """One term alone, or terms with unequal factors, get their own gradient by a second pass."""
    leaves, targets, rows = make(torch.float64)
    out = fused_token_loss(
        leaves[0],
        Head(leaves[1], leaves[2]),
        targets,
        objective,
        list(rows),
        terms=3,
        entropy_gradient=True,
        chunk_size=8,
    )
    sums, _, _, exact = oracle(leaves, targets, rows, 1.0, True)
    pick = [(s, a, b) for s, a, b in zip(scales, out.losses, sums, strict=True) if s]
    got = torch.autograd.grad(torch.stack([s * a for s, a, _ in pick]).sum(), leaves)
    want = torch.autograd.grad(torch.stack([s * b for s, _, b in pick]).sum(), exact)
    assert max(relative(a, b) for a, b in zip(got, want, strict=True)) < 1e-12


def test_a_second_backward_pass_is_right():
    """With retain_graph a second backward pass gives the same gradient again."""
    leaves, targets, rows = make(torch.float64)
    out = fused_token_loss(leaves[0], Head(leaves[1]), targets, objective, list(rows), terms=2)
    total = out.losses[0] + out.losses[1]
    first = torch.autograd.grad(total, leaves[:2], retain_graph=True)
    again = torch.autograd.grad(total, leaves[:2])
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("need_hidden", "need_weight", "matmuls"),
    [(True, True, 3), (True, False, 2), (False, True, 2), (False, False, 1)],
)
def test_three_matmuls_and_no_more_than_needed(need_hidden, need_weight, matmuls):
    """Forward and backward take 3 matmuls, one less for each side that is frozen."""
    leaves, targets, rows = make(torch.float32)
    hidden = leaves[0].detach().requires_grad_(need_hidden)
    weight = leaves[1].detach().requires_grad_(need_weight)
    with Watch() as seen:
        out = fused_token_loss(hidden, Head(weight), targets, objective, list(rows), terms=2)
        if need_hidden or need_weight:
            (out.losses[0] + out.losses[1]).backward()
    assert seen.matmuls == matmuls
    assert (hidden.grad is not None, weight.grad is not None) == (need_hidden, need_weight)
    _, want = token_log_probs(hidden, Head(weight), targets, return_entropy=True)
    torch.testing.assert_close(out.entropy, want.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradient_only_the_logits_are_made(mode):
    """Under no_grad one matmul gives losses, log-probs and entropies."""
    leaves, targets, rows = make(torch.float32)
    with mode(), Watch() as seen:
        out = fused_token_loss(leaves[0], Head(leaves[1]), targets, objective, list(rows), terms=2)
    assert seen.matmuls == 1
    assert not out.losses[0].requires_grad


def test_never_more_than_a_chunk_of_logits():
    """The largest tensor is [chunk, V], far below [N, V]."""
    hidden = torch.randn(256, 8, requires_grad=True)
    weight = torch.randn(512, 8, requires_grad=True)
    targets = torch.zeros(256, dtype=torch.long)
    with Watch() as seen:
        out = fused_token_loss(
            hidden, Head(weight), targets, lambda lp, ent: [lp, ent], terms=2, entropy_gradient=True, chunk_size=16
        )
        (out.losses[0] + out.losses[1]).backward()
    assert seen.numel == 16 * 512


def test_confident_tokens_keep_their_entropy_and_gradient():
    """At p = 1 - 1e-6 entropy and gradient are right within float32's grain of p, not lost in large terms."""
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[13.8], [0.0]])
    out = fused_token_loss(hidden, Head(weight), torch.tensor([0]), lambda lp, _: [lp])
    out.losses[0].backward()
    exact = torch.log_softmax(hidden.detach().double() @ weight.double().t(), -1)
    entropy = -(exact.exp() * exact).sum()
    assert hidden.grad is not None
    assert out.entropy.item() == pytest.approx(entropy.item(), rel=0.1)
    assert hidden.grad.item() == pytest.approx(13.8 * exact.exp()[0, 1].item(), rel=0.1)


def test_bfloat16_operands():
    """bfloat16 operands give float32 losses close to float64 and gradients in bfloat16."""
    leaves, targets, rows = make(torch.bfloat16)
    out = fused_token_loss(leaves[0], Head(leaves[1], leaves[2]), targets, objective, list(rows.float()), terms=2)
    sums, chosen, _, exact = oracle(leaves, targets, rows, 1.0, False)
    assert out.losses[0].dtype == torch.float32
    assert (out.log_probs.double() - chosen).abs().max() < 1e-5
    got = torch.autograd.grad(out.losses[0] + out.losses[1], leaves)
    want = torch.autograd.grad(sums[0] + sums[1], exact)
    assert all(g.dtype == torch.bfloat16 for g in got)
    assert max(relative(a, b) for a, b in zip(got, want, strict=True)) < 5e-3


def test_rows_of_another_length_are_refused():
    """A row of constants that is not [N] is named."""
    leaves, targets, rows = make(torch.float32)
    with pytest.raises(DefinitionError, match=r"row 1 of the objective must have shape \[37\]"):
        fused_token_loss(leaves[0], Head(leaves[1]), targets, objective, [rows[0], rows[1, :3]], terms=2)
